"""The rules of the layout: who imports whom, what starts fast, what is public, one version, one size."""

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from importlib import import_module, metadata
from pathlib import Path

import pytest

import ferrule_runtime

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "ferrule_runtime": ROOT / "runtime",
    "ferrule_targets": ROOT / "targets",
    "ferrule_convert": ROOT / "convert",
    "ferrule_profiles": ROOT / "profiles",
    "ferrule_benchmarks": ROOT / "benchmarks",
}
ALLOWED = {
    "ferrule_runtime": set(),
    "ferrule_targets": {"ferrule_runtime"},
    "ferrule_convert": {"ferrule_runtime", "ferrule_targets"},
    "ferrule_profiles": {"ferrule_runtime", "ferrule_targets"},
    "ferrule_benchmarks": {"ferrule_runtime", "ferrule_targets", "ferrule_convert", "ferrule_profiles"},
}
# What only the host has; none of it may be asked for on a board.
HOST_ONLY = {
    "gguf", "huggingface_hub", "onnx", "onnx_ir", "pandas", "pip", "plotly", "psutil", "pydantic", "pydantic_core",
    "rich", "safetensors", "torch", "transformers",
}  # fmt: skip
# What would make `ferrule --help` slow.
HEAVY = {
    "gguf", "huggingface_hub", "jinja2", "llguidance", "numpy", "onnx", "onnxruntime", "plotly", "psutil", "pydantic",
    "rich", "safetensors", "tokenizers", "torch", "transformers",
}  # fmt: skip
MOST_LINES = 500


def files(package: str) -> list[Path]:
    return sorted((PACKAGES[package] / package).rglob("*.py"))


MODULES = [path for package in PACKAGES for path in files(package)]


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts[1:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(path: Path) -> Iterator[str]:
    """Yield the top-level names that a module imports, wherever in it; relative imports stay in the package."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            assert node.module is not None
            yield node.module.partition(".")[0]


def python(code: str, folder: Path = ROOT) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_only_what_it_may(package: str) -> None:
    ours = {path: set(imported(path)) & (PACKAGES.keys() - {package}) for path in files(package)}
    assert ours
    broken = {str(path): names - ALLOWED[package] for path, names in ours.items() if names - ALLOWED[package]}
    assert not broken


def test_the_runtime_names_no_host_package() -> None:
    assert not {str(path): found for path in files("ferrule_runtime") if (found := set(imported(path)) & HOST_ONLY)}


@pytest.mark.parametrize(
    "module", [module_name(path) for path in MODULES if path.name in ("commands.py", "__main__.py")]
)
def test_listing_commands_imports_nothing_heavy(module: str) -> None:
    done = python(f"import sys, {module}; print(*{{name.partition('.')[0] for name in sys.modules}})")
    assert done.returncode == 0, done.stderr
    assert not HEAVY & set(done.stdout.split())


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_public_names_exist_and_are_sorted(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    has_code = any(isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign) for node in tree.body)
    if not has_code:
        return
    module = import_module(module_name(path))
    names = list(getattr(module, "__all__", ()))
    assert names, "a module with code has `__all__`"
    assert [name for name in names if not hasattr(module, name)] == []
    # Constants, then classes, then the rest, each in order: as ruff's RUF022 sorts.
    assert names == sorted(names, key=lambda name: (not name.isupper(), not name[:1].isupper(), name))
    assert len(names) == len(set(names))


def test_there_is_one_version() -> None:
    found = {name: metadata.version(name) for name in ("ferrule-runtime", "ferrule")}
    assert found == dict.fromkeys(found, ferrule_runtime.__version__)


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_a_module_is_of_a_size_to_be_read(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MOST_LINES
    assert path.stem not in ("utils", "util", "helpers", "common", "misc")


@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_is_typed_and_says_what_it_is(package: str) -> None:
    assert (PACKAGES[package] / package / "py.typed").is_file()
    assert import_module(package).__doc__


@pytest.mark.parametrize("package", PACKAGES)
def test_a_module_has_one_name_wherever_python_starts(package: str) -> None:
    # A second name for the same module would make a second, unequal class of each of its classes.
    folder = PACKAGES[package].name
    for path in files(package):
        name = module_name(path).partition(".")[2]
        if name and "." not in name:
            assert "ModuleNotFoundError" in python(f"import {folder}.{name}").stderr
            break
    else:
        pytest.fail(f"{package} has no module")
    assert "ModuleNotFoundError" in python(f"import {folder}", ROOT / "docs").stderr
    assert python(f"import {package}", ROOT / "docs").returncode == 0


def test_test_files_have_names_of_their_own() -> None:
    counts = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in counts.items() if count > 1] == []
