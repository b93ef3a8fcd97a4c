"""On-board sensors, read from trees that look like the kernel's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ferrule_profiles.sensors import NoSensor, find_sensor, hwmon, rapl, rpi_pmic

# `vcgencmd pmic_read_adc` of a Raspberry Pi 5; some of its lines, as published.
PMIC = """ 3V7_WL_SW_A current(0)=0.00000000A
   3V3_SYS_A current(1)=0.09954602A
   HDMI_A current(22)=0.01220700A
  VDD_CORE_A current(7)=0.75012000A
 3V7_WL_SW_V volt(8)=3.79999600V
   3V3_SYS_V volt(9)=3.32013000V
  VDD_CORE_V volt(15)=0.72021000V
   HDMI_V volt(23)=5.06788000V
   EXT5V_V volt(24)=5.06788000V
    BATT_V volt(25)=3.01110800V
"""


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def zone(name: str, kind: str, energy: int, wrap: int = 262143328850) -> dict[str, str]:
    folder = f"sys/class/powercap/{name}/"
    return {folder + "name": kind, folder + "energy_uj": str(energy), folder + "max_energy_range_uj": str(wrap)}


def test_rapl_adds_packages_but_not_their_parts_nor_the_platform(tmp_path: Path) -> None:
    names = {"intel-rapl:0": "package-0", "intel-rapl:0:0": "core", "intel-rapl:1": "package-1", "intel-rapl:2": "psys"}
    for name, kind in names.items():
        write(tmp_path, zone(name, kind, 1_000_000))
    write(tmp_path, zone("intel-rapl-mmio:0", "package-0", 1_000_000))
    sensor = rapl.open_sensor(tmp_path)
    assert sensor.read() == 0
    for name, kind in names.items():
        write(tmp_path, zone(name, kind, 3_000_000))
    assert sensor.read() == pytest.approx(4.0)


@given(st.lists(st.integers(0, 999), min_size=1, max_size=30))
def test_rapl_counts_on_when_its_counter_wraps(tmp_path_factory: pytest.TempPathFactory, steps: list[int]) -> None:
    root = write(tmp_path_factory.mktemp("rapl"), zone("intel-rapl:0", "package-0", 900, wrap=1000))
    sensor, raw, total = rapl.open_sensor(root), 900, 0
    for step in steps:
        raw, total = (raw + step) % 1000, total + step
        (root / "sys/class/powercap/intel-rapl:0/energy_uj").write_text(str(raw))
        assert sensor.read() == pytest.approx(total / 1e6)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become another user")
def test_rapl_that_only_root_may_read_says_what_to_do(tmp_path: Path) -> None:
    write(tmp_path, zone("intel-rapl:0", "package-0", 5))
    (tmp_path / "sys/class/powercap/intel-rapl:0/energy_uj").chmod(0o400)
    for folder in (tmp_path, *tmp_path.parents[:3]):
        folder.chmod(0o755)
    code = (
        "import os, sys; from pathlib import Path; from ferrule_profiles.sensors import NoSensor, rapl\n"
        "os.setuid(65534)\n"
        "try: rapl.open_sensor(Path(sys.argv[1]))\n"
        "except NoSensor as reason: print(reason)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True)
    assert "Permission denied; allow it: sudo chmod a+r" in done.stdout


def test_single_channel_monitor_is_read_in_microwatts(tmp_path: Path) -> None:
    chip = "sys/class/hwmon/hwmon1/"
    write(tmp_path, {chip + "name": "ina226\n", chip + "power1_input": "4250000\n"})
    write(tmp_path, {"sys/class/hwmon/hwmon0/name": "amdgpu\n", "sys/class/hwmon/hwmon0/power1_input": "9000000\n"})
    sensor = hwmon.open_sensor(tmp_path)
    assert (sensor.read(), sensor.quantity) == (4.25, "power")
    assert "ina226" in sensor.boundary
    (tmp_path / chip / "power1_input").unlink()
    with pytest.raises(NoSensor, match="no /sys/class/hwmon"):
        sensor.read()


def test_jetson_input_is_read_alone_since_the_others_are_parts_of_it(tmp_path: Path) -> None:
    chip = "sys/class/hwmon/hwmon3/"
    files = {chip + "name": "ina3221\n"}
    for channel, (label, millivolt, milliampere) in enumerate(
        [("VDD_CPU_GPU_CV", 5000, 300), ("VDD_IN", 5040, 1500), ("VDD_SOC", 5000, 200)], 1
    ):
        files |= {
            f"{chip}in{channel}_label": label, f"{chip}in{channel}_input": str(millivolt),
            f"{chip}curr{channel}_input": str(milliampere),
        }  # fmt: skip
    sensor = hwmon.open_sensor(write(tmp_path, files))
    assert sensor.read() == pytest.approx(5.04 * 1.5)


def test_two_monitors_are_refused_since_nothing_says_which(tmp_path: Path) -> None:
    for n in (0, 1):
        chip = f"sys/class/hwmon/hwmon{n}/"
        write(tmp_path, {chip + "name": "ina219", chip + "power1_input": "1000000"})
    with pytest.raises(NoSensor, match="2 power monitors"):
        hwmon.open_sensor(tmp_path)


def test_pi_rails_are_paired_by_name_and_the_supply_is_left_out() -> None:
    expected = 0.09954602 * 3.32013 + 0.012207 * 5.06788 + 0.75012 * 0.72021
    assert rpi_pmic.rail_power(PMIC) == pytest.approx(expected, rel=1e-9)


def test_pi_power_chip_is_read_through_its_command(tmp_path: Path) -> None:
    write(tmp_path, {"usr/bin/vcgencmd": f"#!/bin/sh\ncat <<END\n{PMIC}END\n"})
    (tmp_path / "usr/bin/vcgencmd").chmod(0o755)
    assert rpi_pmic.open_sensor(tmp_path).read() == pytest.approx(0.93261, abs=1e-3)


def test_older_pi_without_rails_is_no_sensor(tmp_path: Path) -> None:
    write(tmp_path, {"usr/bin/vcgencmd": "#!/bin/sh\necho 'error=1 error_msg=\"Command not registered\"'\n"})
    (tmp_path / "usr/bin/vcgencmd").chmod(0o755)
    with pytest.raises(NoSensor, match="names no rail"):
        rpi_pmic.open_sensor(tmp_path)


def test_first_sensor_that_works_is_found(tmp_path: Path) -> None:
    write(tmp_path, zone("intel-rapl:0", "package-0", 5))
    assert find_sensor(tmp_path).name == "rapl"


def test_no_sensor_gives_the_reason_of_each(tmp_path: Path) -> None:
    with pytest.raises(NoSensor) as caught:
        find_sensor(tmp_path)
    text = str(caught.value)
    assert all(f"{name}: no " in text for name in ("hwmon", "rapl", "rpi-pmic"))
