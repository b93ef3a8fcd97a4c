"""The bundle's format: what is written is read, and what is damaged is refused."""

import dataclasses
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ferrule_runtime.bundle import MANIFEST, File, Manifest, MemoryFacts, Table, file_sha256, is_bundle, open_bundle
from ferrule_runtime.errors import BundleError

names = st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=8)
natural = st.integers(0, 1 << 50)
json_like = st.dictionaries(names, st.none() | st.booleans() | natural | names, max_size=3)
tables = st.builds(Table, names, *[natural] * 7)
manifests = st.builds(
    Manifest, name=names, checkpoint=json_like, architecture=json_like, recipe=json_like, target=names, form=names,
    engine=names, features=st.lists(names, max_size=2).map(tuple), context=natural, dialect=names,
    stop_tokens=st.lists(natural, max_size=3).map(tuple),
    tables=st.fixed_dictionaries({"embedding": tables, "head": tables}),
    memory=st.builds(MemoryFacts, *[natural] * len(dataclasses.fields(MemoryFacts))),
    fidelity=json_like, made=json_like,
    files=st.dictionaries(names, st.builds(File, natural, names), min_size=1, max_size=3),
)  # fmt: skip


@given(manifests)
def test_a_manifest_is_read_as_it_was_written(manifest: Manifest) -> None:
    assert Manifest.from_json(manifest.to_json(), "m") == manifest


@given(manifests, st.data())
def test_a_field_that_is_missing_or_of_another_type_is_named(manifest: Manifest, data: st.DataObject) -> None:
    raw = json.loads(manifest.to_json())
    field = data.draw(st.sampled_from(sorted(set(raw) - {"schema_version"})))
    if data.draw(st.booleans()):
        del raw[field]
    else:
        raw[field] = -1.5
    with pytest.raises(BundleError, match=field):
        Manifest.from_json(json.dumps(raw), "m")


@given(st.text(max_size=40))
def test_what_is_no_manifest_is_refused(text: str) -> None:
    with pytest.raises(BundleError):
        Manifest.from_json(text, "m")


def make(folder: Path) -> Path:
    """Write a bundle of two small files."""
    folder.mkdir()
    for name, content in (("a.bin", bytes(range(200)) * 30), ("b.txt", b"hello")):
        (folder / name).write_bytes(content)
    table = Table("a.bin", 1, 1, 32, 1, 0, 0, 0)
    manifest = Manifest(
        name="b", checkpoint={}, architecture={}, recipe={}, target="host", form="f", engine="e", features=(),
        context=64, dialect="d", stop_tokens=(1,), tables={"embedding": table, "head": table},
        memory=MemoryFacts(*[0] * len(dataclasses.fields(MemoryFacts))), fidelity={}, made={},
        files={name: File((folder / name).stat().st_size, file_sha256(folder / name)) for name in ("a.bin", "b.txt")},
    )  # fmt: skip
    (folder / MANIFEST).write_text(manifest.to_json())
    return folder


def flip(path: Path, at: int = -1, *, keep_times: bool = False) -> None:
    stat = path.stat()
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    with path.open("r+b") as file:
        file.write(data)
    if keep_times:
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


@pytest.mark.parametrize(("name", "at"), [("a.bin", 0), ("a.bin", 3000), ("a.bin", -1), ("b.txt", 2)])
def test_one_flipped_byte_is_found_at_first_open(tmp_path: Path, name: str, at: int) -> None:
    folder = make(tmp_path / "b")
    flip(folder / name, at)
    with pytest.raises(BundleError, match=f"{name}: sha256"):
        open_bundle(folder)


def test_a_later_change_is_found_by_its_time_and_by_verify_without_it(tmp_path: Path) -> None:
    folder = make(tmp_path / "b")
    open_bundle(folder)
    flip(folder / "a.bin", keep_times=True)
    open_bundle(folder)  # the stamp holds: nothing was hashed
    with pytest.raises(BundleError, match="sha256"):
        open_bundle(folder, verify=True)
    os.utime(folder / "a.bin")
    with pytest.raises(BundleError, match="sha256"):
        open_bundle(folder)


def test_missing_and_shortened_parts_are_named(tmp_path: Path) -> None:
    folder = make(tmp_path / "b")
    (folder / "a.bin").write_bytes(b"short")
    with pytest.raises(BundleError, match="5 bytes, the manifest says 6000"):
        open_bundle(folder)
    (folder / "a.bin").unlink()
    with pytest.raises(BundleError, match=r"`a\.bin` is missing"):
        open_bundle(folder)


@pytest.mark.parametrize("name", ["../a.bin", "/etc/passwd", "x/../../y"])
def test_a_part_outside_the_bundle_is_refused(tmp_path: Path, name: str) -> None:
    folder = make(tmp_path / "b")
    text = (folder / MANIFEST).read_text().replace('"b.txt"', json.dumps(name))
    (folder / MANIFEST).write_text(text)
    with pytest.raises(BundleError, match="relative path"):
        open_bundle(folder)


def test_a_state_folder_that_cannot_be_written_costs_only_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("FERRULE_STATE", str(tmp_path / "file"))
    folder = make(tmp_path / "b")
    assert open_bundle(folder) == open_bundle(folder)


def test_a_damaged_stamp_is_not_believed(tmp_path: Path) -> None:
    folder = make(tmp_path / "b")
    open_bundle(folder)
    for stamp in Path(os.environ["FERRULE_STATE"]).rglob("verified.json"):
        stamp.write_text("{")
    flip(folder / "a.bin", keep_times=True)
    with pytest.raises(BundleError, match="sha256"):
        open_bundle(folder)


def test_a_newer_schema_and_what_is_no_bundle(tmp_path: Path) -> None:
    folder = make(tmp_path / "b")
    assert is_bundle(folder)
    assert not is_bundle(tmp_path)
    with pytest.raises(BundleError, match="no such bundle"):
        open_bundle(tmp_path / "nothing")
    with pytest.raises(BundleError, match="no manifest"):
        open_bundle(tmp_path)
    (folder / MANIFEST).write_text(
        (folder / MANIFEST).read_text().replace('"schema_version": 1', '"schema_version": 2')
    )
    with pytest.raises(BundleError, match="schema 2 is newer than 1"):
        open_bundle(folder)
