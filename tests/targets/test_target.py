import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ferrule_runtime.errors import TargetError
from ferrule_runtime.registry import module_names
from ferrule_targets.target import Target, load_target, target_names

BOARD = """\
title = "a board"
cores = 4
features = ["asimd", "asimddp"]
engine = "onnx"
forms = ["onnx-cpu"]
bits = [4, 8]
groups = [32]
accuracy_level = 4
sensors = []
links = ["ssh"]
agent = "python"

[memory]
ram = "1GiB"
free = "800MiB"
source = "its data sheet"
"""


def write(folder: Path, text: str, name: str = "board.toml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_the_first_boards_are_shipped() -> None:
    assert target_names() == ["host", "rpi-zero2", "rpi4", "rpi5"]


@pytest.mark.parametrize("name", target_names())
def test_every_shipped_board_loads_and_names_things_that_exist(name: str) -> None:
    target = load_target(name)
    assert target.name == name
    assert 0 < target.memory.free <= target.memory.ram
    assert target.memory.source
    assert target.cores >= 1
    assert target.engine in module_names("ferrule_runtime.engines")
    assert set(target.forms) <= set(module_names("ferrule_convert.formats"))
    assert set(target.links) <= {"local", "ssh", "adb", "serial"}


@pytest.mark.parametrize(
    ("name", "ram", "activations"),
    [("rpi-zero2", 512 << 20, "float32"), ("rpi4", 1 << 30, "float32"), ("rpi5", 1 << 30, "int8")],
)
def test_boards_carry_their_data_sheets_facts(name: str, ram: int, activations: str) -> None:
    target = load_target(name)
    assert target.memory.ram == ram
    assert target.cores == 4
    assert target.activations == activations
    assert ("asimddp" in target.features) == (activations == "int8")


def test_the_host_is_this_machine() -> None:
    target = load_target("host")
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    total = next(int(line.split()[1]) for line in lines if line.startswith("MemTotal")) * 1024
    # A control group may allow less than there is.
    assert 0 < target.memory.free < target.memory.ram <= total
    assert target.cores == len(os.sched_getaffinity(0))
    assert target.features == ()


def test_a_target_is_a_value(tmp_path: Path) -> None:
    path = write(tmp_path, BOARD)
    target = load_target(path)
    assert target == load_target(str(path))
    assert hash(target) == hash(load_target(path))
    with pytest.raises(ValueError, match="frozen"):
        target.cores = 8


def test_a_file_of_ones_own_is_named_by_its_file(tmp_path: Path) -> None:
    target = load_target(write(tmp_path, BOARD, "kitchen.toml"))
    assert target.name == "kitchen"
    assert target.memory.free == 800 * 1024 * 1024
    assert target.bits == (4, 8)


@given(cores=st.integers(1, 512), mebibytes=st.integers(1, 1 << 20), groups=st.lists(st.integers(1, 4096), max_size=6))
def test_what_is_written_is_what_is_read(
    tmp_path_factory: pytest.TempPathFactory, cores: int, mebibytes: int, groups: list[int]
) -> None:
    text = BOARD.replace("cores = 4", f"cores = {cores}").replace("groups = [32]", f"groups = {groups}")
    text = text.replace('"1GiB"', f'"{mebibytes}MiB"').replace('"800MiB"', f'"{mebibytes * 1024}KiB"')
    target = load_target(write(tmp_path_factory.mktemp("board"), text))
    assert target.cores == cores
    assert target.groups == tuple(groups)
    assert target.memory.ram == target.memory.free == mebibytes * 2**20


@pytest.mark.parametrize(
    ("before", "after", "says", "hint"),
    [
        ("cores = 4", "cors = 4", "unknown key `cors`", "did you mean `cores`?"),
        ("cores = 4\n", "", "`cores` is missing", "needed:"),
        ("cores = 4", "cores = 0", "`cores` is 0: input should be greater than 0", ""),
        ("cores = 4", 'cores = "4"', "`cores` is '4': input should be a valid integer", ""),
        ("cores = 4", "cores = true", "`cores` is True", ""),
        ("bits = [4, 8]", 'bits = [4, "8"]', "`bits.1` is '8'", ""),
        ('links = ["ssh"]', "links = []", "`links` is []", ""),
        ("accuracy_level = 4", "accuracy_level = 2", "`accuracy_level` is 2: input should be 1 or 4", ""),
        ('agent = "python"', 'agent = "lua"', "`agent` is 'lua'", ""),
        ('ram = "1GiB"', "ram = 1024", "`memory.ram`: write an amount with its unit", ""),
        ('ram = "1GiB"', 'ram = "lots"', "`memory.ram`: `lots` is not an amount of memory", ""),
        ('free = "800MiB"', 'free = "2GiB"', "`memory`: `free` is 2147483648 bytes, more than the 1073741824", ""),
        ('source = "its data sheet"', "", "`memory.source` is missing", "needed: free, ram, source"),
        ('source = "its data sheet"', 'sauce = "x"', "unknown key `memory.sauce`", "did you mean `source`?"),
        ('title = "a board"', 'title = "a board"\nname = "x"', "unknown key `name`", "the name of the file"),
        ('title = "a board"', "title = a board", "not TOML", "ferrule targets host"),
        ('features = ["asimd", "asimddp"]', 'features = ["asimd"]', "needs the feature `asimddp`", ""),
    ],
)
def test_a_malformed_board_is_refused_with_file_and_key(
    tmp_path: Path, before: str, after: str, says: str, hint: str
) -> None:
    assert before in BOARD
    path = write(tmp_path, BOARD.replace(before, after))
    with pytest.raises(TargetError) as caught:
        load_target(path)
    assert str(caught.value).startswith(str(path))
    assert says in str(caught.value)
    assert hint in caught.value.hint


def test_a_misspelt_target_is_answered_with_the_nearest() -> None:
    with pytest.raises(TargetError, match="unknown target `rpi-5`") as caught:
        load_target("rpi-5")
    assert caught.value.hint == "did you mean `rpi5`? known: host, rpi-zero2, rpi4, rpi5"


def test_a_file_that_cannot_be_read_is_an_error_of_ours(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="No such file") as caught:
        load_target(tmp_path / "gone.toml")
    assert "shipped targets: host" in caught.value.hint
    garbled = tmp_path / "garbled.toml"
    garbled.write_bytes(b"title = \xff\xfe")
    with pytest.raises(TargetError, match="cannot be read"):
        load_target(garbled)


def test_a_target_survives_json(tmp_path: Path) -> None:
    target = load_target(write(tmp_path, BOARD))
    assert target.model_dump(mode="json")["memory"] == {
        "ram": 2**30,
        "free": 800 * 2**20,
        "source": "its data sheet",
    }
    assert isinstance(target, Target)
