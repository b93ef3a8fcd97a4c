"""Facts of a machine, read from trees that look like a Raspberry Pi 5, a laptop, and nothing at all."""

from __future__ import annotations

import dataclasses
import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy
import pytest

from ferrule_runtime.doctor import Finding, doctor
from ferrule_runtime.probe import Conditions, Machine, conditions, machine
from ferrule_runtime.procfs import Absent, cpu_list

# A Raspberry Pi 5's own /proc/cpuinfo, one core.
PI5_CORE = """processor\t: {n}
BogoMIPS\t: 108.00
Features\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x4
CPU part\t: 0xd0b
CPU revision\t: 1

"""


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def vcgencmd(root: Path, answer: str) -> None:
    path = write(root, {"usr/bin/vcgencmd": f"#!/bin/sh\n[ $1 = get_throttled ] && echo '{answer}'\n"})
    (path / "usr/bin/vcgencmd").chmod(0o755)


@pytest.fixture
def pi5(tmp_path: Path) -> Path:
    policy = "sys/devices/system/cpu/cpufreq/policy0/"
    write(tmp_path, {
        "proc/cpuinfo": "".join(PI5_CORE.format(n=n) for n in range(4)) + "Serial\t\t: 10000000deadbeef\n",
        "proc/meminfo": "MemTotal:        8256544 kB\nMemFree:         6900000 kB\nMemAvailable:    7654321 kB\n",
        "proc/loadavg": "0.08 0.03 0.01 1/200 1234\n",
        "proc/self/status": "Name:\tx\nCpus_allowed_list:\t0-3\n",
        "proc/self/cgroup": "0::/user.slice/session-1.scope\n",
        "proc/sys/kernel/arch": "aarch64\n",
        "proc/sys/kernel/osrelease": "6.6.31+rpt-rpi-2712\n",
        "proc/device-tree/model": "Raspberry Pi 5 Model B Rev 1.0\0",
        "etc/os-release": 'PRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\nID=debian\n',
        "sys/devices/system/cpu/online": "0-3\n",
        policy + "scaling_governor": "ondemand\n",
        policy + "scaling_cur_freq": "1500000\n",
        policy + "cpuinfo_max_freq": "2400000\n",
        "sys/class/thermal/thermal_zone0/type": "cpu-thermal\n",
        "sys/class/thermal/thermal_zone0/temp": "39500\n",
        "sys/fs/cgroup/user.slice/memory.max": "734003200\n",
        "sys/fs/cgroup/user.slice/session-1.scope/memory.max": "max\n",
    })  # fmt: skip
    vcgencmd(tmp_path, "throttled=0x50005")
    return tmp_path


@pytest.fixture
def laptop(tmp_path: Path) -> Path:
    core = "processor\t: {n}\nmodel name\t: 12th Gen Intel(R) Core(TM) i5-1240P\nflags\t\t: fpu sse2 avx2 avx_vnni\n\n"
    files = {
        "proc/cpuinfo": "".join(core.format(n=n) for n in range(4)),
        "proc/meminfo": "MemTotal:       16000000 kB\nMemAvailable:   12000000 kB\n",
        "proc/loadavg": "3.10 2.0 1.0 4/900 77\n",
        # More cores can be named than are there.
        "proc/self/status": "Cpus_allowed_list:\t0-127\n",
        "proc/self/cgroup": "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n0::/\n",
        "sys/devices/system/cpu/online": "0-1,3\n",
        "sys/class/dmi/id/product_name": "ThinkPad\n",
        # The container sees its own group at the top of the mount.
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "2147483648\n",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "150000\n",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        "sys/class/thermal/thermal_zone0/type": "x86_pkg_temp\n",
        "sys/class/thermal/thermal_zone0/temp": "91000\n",
        "sys/class/thermal/thermal_zone1/type": "x86_pkg_temp\n",
    }
    for n, governor in enumerate(("powersave", "performance")):
        files[f"sys/devices/system/cpu/cpufreq/policy{n}/scaling_governor"] = governor
        files[f"sys/devices/system/cpu/cpu{n}/thermal_throttle/core_throttle_count"] = str(n + 2)
    return write(tmp_path, files)


def verdicts(root: Path) -> dict[str, Finding]:
    return {finding.name: finding for finding in doctor(root)}


def test_raspberry_pi_5_is_described_by_its_published_values(pi5: Path) -> None:
    facts = machine(pi5)
    assert facts.arch == "aarch64"
    assert facts.board == "Raspberry Pi 5 Model B Rev 1.0"
    assert facts.cpu == "4x Cortex-A76"
    assert facts.cores == 4
    assert facts.features is not None
    assert {"asimddp", "fp"} <= set(facts.features)
    assert facts.memory == 8256544 * 1024
    assert facts.memory_limit == 734003200, "the parent group's limit binds, though the own group has none"
    assert facts.max_mhz == {"policy0": 2400.0}
    assert facts.kernel == "6.6.31+rpt-rpi-2712"
    now = conditions(pi5)
    assert now.clocks is not None
    assert (now.clocks[0].governor, now.clocks[0].mhz) == ("ondemand", 1500.0)
    assert now.celsius == {"cpu-thermal": 39.5}
    assert now.throttled == ("under-voltage now", "throttled now", "under-voltage since boot", "throttled since boot")
    assert now.load == 0.08
    assert now.memory_available == 7654321 * 1024


def test_serial_numbers_are_not_recorded(pi5: Path) -> None:
    assert "deadbeef" not in json.dumps([machine(pi5).to_dict(), conditions(pi5).to_dict()])


def test_laptop_in_a_container_is_limited_by_version_1_groups(laptop: Path) -> None:
    facts = machine(laptop)
    assert facts.cores == 3, "allowed cores that are online"
    assert facts.memory_limit == 2 << 30
    assert facts.cpu_quota == 1.5
    assert facts.board == "ThinkPad"
    now = conditions(laptop)
    assert now.throttle_events == 5
    assert now.celsius == {"x86_pkg_temp": 91.0, "x86_pkg_temp (thermal_zone1)": None}
    assert now.missing["celsius.x86_pkg_temp (thermal_zone1)"]
    assert now.missing["clocks.policy0.mhz"]


def test_unlimited_version_1_group_is_no_limit(tmp_path: Path) -> None:
    write(tmp_path, {
        "proc/self/cgroup": "4:memory:/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    })  # fmt: skip
    facts = machine(tmp_path)
    assert facts.memory_limit is None
    assert facts.missing["memory_limit"] == "no control group sets a limit"


@pytest.mark.parametrize("read", [machine, conditions])
def test_every_absent_fact_has_a_reason_and_no_other(read: object, tmp_path: Path, pi5: Path) -> None:
    for root in (tmp_path / "empty", pi5, Path("/")):
        facts: Machine | Conditions = read(root)  # type: ignore[operator]  # one of two functions
        absent = {field.name for field in dataclasses.fields(facts) if getattr(facts, field.name) is None}
        assert absent == {name for name in facts.missing if "." not in name}
        assert all(facts.missing.values())


def test_nothing_at_all_gives_nulls_and_never_zero(tmp_path: Path) -> None:
    facts, now = machine(tmp_path).to_dict(), conditions(tmp_path).to_dict()
    own = {"arch", "pointer_bits", "python", "packages", "missing"}  # of this interpreter, whatever the root
    assert {facts[name] for name in facts.keys() - own} == {None}
    assert {now[name] for name in now.keys() - {"missing"}} == {None}


@pytest.mark.parametrize(("answer", "said"), [("error=1", "error=1"), ("throttled=", "throttled=")])
def test_odd_answer_of_vcgencmd_is_a_reason(answer: str, said: str, tmp_path: Path) -> None:
    vcgencmd(tmp_path, answer)
    now = conditions(tmp_path)
    assert now.throttled is None
    assert said in now.missing["throttled"]


def test_no_throttling_is_empty_not_null(tmp_path: Path) -> None:
    vcgencmd(tmp_path, "throttled=0x0")
    assert conditions(tmp_path).throttled == ()


def test_this_machine_agrees_with_the_standard_library() -> None:
    facts = machine()
    assert facts.cores == len(os.sched_getaffinity(0))
    assert facts.memory == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert facts.kernel == os.uname().release
    assert facts.pointer_bits == struct.calcsize("P") * 8
    assert facts.python == sys.version.split()[0]
    assert facts.packages["numpy"] == numpy.__version__


@pytest.mark.parametrize(
    ("text", "cores"), [("0", {0}), ("0-3", {0, 1, 2, 3}), ("0-1,4,6-7", {0, 1, 4, 6, 7}), ("2-2", {2})]
)
def test_core_lists_are_read(text: str, cores: set[int]) -> None:
    assert cpu_list(text) == cores


@pytest.mark.parametrize("text", ["", "a", "1-", "-1", "0,,2"])
def test_other_text_is_no_core_list(text: str) -> None:
    with pytest.raises(Absent, match="not a list of cores"):
        cpu_list(text)


def test_doctor_of_a_pi_5_names_what_to_do(pi5: Path) -> None:
    found = verdicts(pi5)
    assert found["processor"].verdict == "ok"
    assert found["temperature"].verdict == "ok"
    assert found["governor"].verdict == "warn"
    assert "performance" in found["governor"].advice
    assert found["throttling"].verdict == "warn"
    assert "power supply" in found["throttling"].advice
    assert "limited to 700.0 MiB" in found["memory"].value


def test_doctor_of_a_busy_hot_laptop_warns(laptop: Path) -> None:
    found = verdicts(laptop)
    assert {name for name, finding in found.items() if finding.verdict == "warn"} >= {
        "cores", "governor", "temperature", "throttling", "load",
    }  # fmt: skip
    assert "--threads 1" in found["cores"].advice


def test_doctor_without_anything_says_missing_with_advice(tmp_path: Path) -> None:
    found = verdicts(tmp_path)
    for name in ("processor", "cores", "memory", "governor", "temperature", "throttling", "load", "power sensor"):
        assert found[name].verdict == "missing", name
        assert found[name].advice


def test_doctor_warns_of_a_processor_without_dot_products(pi5: Path) -> None:
    cpuinfo = (pi5 / "proc/cpuinfo").read_text()
    write(pi5, {"proc/cpuinfo": cpuinfo.replace(" asimddp", "", 1)})  # one core of four lacks it
    assert verdicts(pi5)["processor"].verdict == "warn"


def test_probe_and_doctor_need_the_standard_library_only() -> None:
    code = (
        "import sys, pathlib; import ferrule_runtime.doctor as d; d.doctor(pathlib.Path('/'));"
        "print([m for m in ('numpy', 'onnxruntime', 'jinja2', 'tokenizers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
