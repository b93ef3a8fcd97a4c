"""Kinds found by name: one file each."""

import inspect
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ferrule_runtime
from ferrule_runtime.dialects import Dialect, load_dialect
from ferrule_runtime.errors import BundleError, EngineError, FerruleError, UsageError
from ferrule_runtime.models import load_model
from ferrule_runtime.registry import data_names, load_module, module_names, read_data, unknown

HERE = Path(ferrule_runtime.__file__).parent
KINDS = ["dialects", "engines", "models"]


def on_disk(kind: str) -> list[str]:
    return sorted(path.stem.replace("_", "-") for path in (HERE / kind).glob("[!_]*.py"))


@pytest.mark.parametrize("kind", KINDS)
def test_the_names_are_those_of_the_files(kind: str) -> None:
    assert on_disk(kind)
    assert module_names(f"ferrule_runtime.{kind}") == on_disk(kind)


@pytest.mark.parametrize("kind", KINDS)
def test_each_loads_by_its_name_with_either_dash(kind: str) -> None:
    package = f"ferrule_runtime.{kind}"
    for name in on_disk(kind):
        module = load_module(kind, package, name)
        assert module.__name__ == f"{package}.{name.replace('-', '_')}"
        assert load_module(kind, package, name.replace("-", "_")) is module


@pytest.mark.parametrize(
    "name", ["", "__init__", "_xml_grammar", "-xml-grammar", "../agent", "chatml_json.py", "os", "onnx "]
)
def test_nothing_else_is_loaded(name: str) -> None:
    before = set(sys.modules)
    with pytest.raises(BundleError, match="unknown dialect") as caught:
        load_dialect(name)
    assert ", ".join(on_disk("dialects")) in caught.value.hint
    assert set(sys.modules) == before


@pytest.mark.parametrize("name", on_disk("dialects"))
def test_a_dialect_has_every_name_of_its_protocol(name: str) -> None:
    dialect = load_dialect(name)
    wanted = set(Dialect.__annotations__) | {
        key for key, member in vars(Dialect).items() if inspect.isfunction(member) and not key.startswith("_")
    }
    assert {"TEMPLATE", "STOPS", "CONTROLS", "THINK", "turns", "grammar", "parse"} <= wanted
    assert [key for key in wanted if not hasattr(dialect, key)] == []


names = st.lists(st.from_regex(r"[a-z][a-z0-9-]{3,10}", fullmatch=True), min_size=1, max_size=6, unique=True)


@given(names, st.data())
def test_one_slip_of_the_pen_is_recognised(known: list[str], data: st.DataObject) -> None:
    meant = data.draw(st.sampled_from(known))
    at = data.draw(st.integers(0, len(meant) - 1))
    slipped = meant[:at] + "Q" + meant[at + 1 :]
    error = unknown("recipe", slipped, known, UsageError)
    assert isinstance(error, UsageError)
    assert str(error) == f"unknown recipe `{slipped}`"
    suggested = error.hint.partition("`")[2].partition("`")[0]
    # Another name may be as near; none can be nearer than one letter away.
    assert suggested == meant or sum(a != b for a, b in zip(suggested, slipped, strict=False)) <= 1
    assert error.hint.endswith(f"known: {', '.join(sorted(known))}")


def test_what_is_like_nothing_gets_the_list_alone() -> None:
    assert unknown("recipe", "zzzz", ["w8", "fp32"]).hint == "known: fp32, w8"
    assert unknown("recipe", "w8", []).hint == "known: none"


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("scriptd:x", r"unknown model `scriptd`"),
        ("", "unknown model ``"),
        ("scripted", "names nothing to load"),
        ("scripted:", "names nothing to load"),
    ],
)
def test_a_model_is_asked_for_by_kind_and_argument(spec: str, says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        load_model(spec)
    assert "scripted" in caught.value.hint


def test_data_files_are_found_and_read_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "levels_of_a_test"
    folder.mkdir()
    for name, text in (("__init__.py", ""), ("low.toml", "x = 1\n"), ("high.toml", "x = 'ß'\n"), ("README.md", "")):
        (folder / name).write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert data_names(folder.name) == ["high", "low"]
    assert read_data("level", folder.name, "high") == "x = 'ß'\n"
    with pytest.raises(EngineError, match="unknown level `hihg`") as caught:
        read_data("level", folder.name, "hihg", EngineError)
    assert caught.value.hint == "did you mean `high`? known: high, low"
    with pytest.raises(FerruleError, match="unknown level"):
        read_data("level", folder.name, "../low")
