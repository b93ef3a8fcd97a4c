"""The runtime's wheel by itself: run by tox's `board` environment, where nothing else is installed."""

import os
import pkgutil
import subprocess
import sys
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path

import pytest

import ferrule_runtime

pytestmark = pytest.mark.skipif(
    "FERRULE_ALONE" not in os.environ, reason="needs the runtime alone: runs in tox's `board` environment"
)

MODULES = [info.name for info in pkgutil.walk_packages(ferrule_runtime.__path__, "ferrule_runtime.")]


def test_it_is_the_wheel_that_is_tested_not_the_working_tree() -> None:
    assert "site-packages" in Path(ferrule_runtime.__file__).parts


@pytest.mark.parametrize("package", ["ferrule_benchmarks", "ferrule_convert", "ferrule_profiles", "ferrule_targets"])
def test_no_other_package_of_ours_is_there(package: str) -> None:
    with pytest.raises(ModuleNotFoundError):
        import_module(package)


@pytest.mark.parametrize(
    "package",
    [
        "gguf",
        "onnx",
        "pandas",
        "plotly",
        "psutil",
        "pydantic",
        "rich",
        "safetensors",
        "torch",
        "transformers",
    ],
)
def test_nothing_of_the_hosts_is_there(package: str) -> None:
    assert find_spec(package) is None


@pytest.mark.parametrize("module", [name for name in MODULES if not name.endswith("__main__")])
def test_every_module_can_be_imported(module: str) -> None:
    import_module(module)


def test_the_commands_are_the_boards() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ferrule_runtime", "--help"], capture_output=True, text=True, check=True
    )
    for name in ("run", "measure", "doctor", "inspect", "fit", "selftest"):
        assert f"\n    {name} " in done.stdout
    assert "convert" not in done.stdout.replace("convert, measure", "")


def test_a_command_of_the_host_says_where_it_is() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ferrule_runtime", "convert", "x"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "error: no command `convert` on this machine" in done.stderr
    assert "pip install ferrule" in done.stderr


def test_the_wheel_has_no_file_but_the_runtimes() -> None:
    files = metadata.files("ferrule-runtime") or []
    assert files
    tops = {path.parts[0] for path in files if ".." not in path.parts}
    assert tops == {"ferrule_runtime", f"ferrule_runtime-{ferrule_runtime.__version__}.dist-info"}
