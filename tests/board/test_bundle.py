"""The bundle's format: what is written is read, and what is damaged is refused."""

import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import TABLE_FILE, manifest_of, write_tiny

from ferrule_runtime.bundle import (
    MANIFEST,
    File,
    Manifest,
    MemoryFacts,
    Table,
    file_sha256,
    is_bundle,
    open_bundle,
    state_folder,
)
from ferrule_runtime.errors import BundleError

names = st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=8)
natural = st.integers(0, 1 << 50)
json_like = st.dictionaries(names, st.none() | st.booleans() | natural | names, max_size=3)
tables = st.builds(Table, names, *[natural] * 7)
manifests = st.builds(
    Manifest, name=names, checkpoint=json_like, architecture=json_like, recipe=json_like, target=names, form=names,
    engine=names, features=st.lists(names, max_size=2).map(tuple), context=natural, dialect=names,
    stop_tokens=st.lists(natural, min_size=1, max_size=3).map(tuple),
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


WRONG = [None, -1, -1.5, True, "", "text", [], {}, [None], [-1], [True], ["a", 1], {"a": 1}, float("nan"), 1e999]


def places(raw: dict[str, Any]) -> list[tuple[str, ...]]:
    """Every field that a manifest must have, as a path of keys."""
    inner = [("tables", table, key) for table in ("embedding", "head") for key in raw["tables"][table]]
    inner += [("memory", key) for key in raw["memory"]]
    inner += [("files", name, key) for name in raw["files"] for key in ("size", "sha256")]
    return [(key,) for key in raw if key != "schema_version"] + inner


def kind(value: Any) -> type:
    return bool if isinstance(value, bool) else type(value)


@given(manifests, st.data())
def test_every_field_down_to_the_last_is_looked_at(manifest: Manifest, data: st.DataObject) -> None:
    raw = json.loads(manifest.to_json())
    place = data.draw(st.sampled_from(places(raw)))
    owner = raw
    for key in place[:-1]:
        owner = owner[key]
    if data.draw(st.booleans()):
        del owner[place[-1]]
    else:
        right = kind(owner[place[-1]])
        owner[place[-1]] = data.draw(st.sampled_from([wrong for wrong in WRONG if kind(wrong) is not right]))
    with pytest.raises(BundleError) as caught:
        Manifest.from_json(json.dumps(raw), "m")
    # Not JSON at all is said of the whole; all else names the field, or what holds it.
    assert place[0] in str(caught.value) or "not JSON" in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stop_tokens", []),
        ("stop_tokens", [1, -1]),
        ("stop_tokens", [True]),
        ("features", ["asimddp", 1]),
        ("name", ""),
        ("files", {}),
        ("files", {"": {"size": 1, "sha256": "0"}}),
        ("files", {".": {"size": 1, "sha256": "0"}}),
        ("files", {"a": {"size": True, "sha256": "0"}}),
        ("tables", {"head": {}}),
        ("name", "a\x1b[2J"),
        ("features", ["a\nerror: b"]),
        ("files", {"a\nb": {"size": 1, "sha256": "0"}}),
        ("files", {"\ud800": {"size": 1, "sha256": "0"}}),
        ("files", {"a": {"size": 1, "sha256": "\x1b"}}),
    ],
)
def test_a_value_that_no_bundle_has_is_refused(tmp_path: Path, field: str, value: Any) -> None:
    (tmp_path / "a").write_text("x")
    raw = json.loads(manifest_of(tmp_path, ["a"]).to_json())
    raw[field] = value
    with pytest.raises(BundleError, match=field) as caught:
        Manifest.from_json(json.dumps(raw), "m")
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("version", [None, "1", 1.0, True, False, 0, -1, [1]])
def test_a_version_that_is_none_is_refused(tmp_path: Path, version: Any) -> None:
    (tmp_path / "a").write_text("x")
    raw = json.loads(manifest_of(tmp_path, ["a"]).to_json())
    raw["schema_version"] = version
    with pytest.raises(BundleError, match="no `schema_version`"):
        Manifest.from_json(json.dumps(raw), "m")


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "9" * 5000, '{"schema_version": NaN}', "\ufeff{}"])
def test_text_that_overwhelms_a_parser_is_refused_like_any_other(text: str) -> None:
    with pytest.raises(BundleError, match="m: not JSON"):
        Manifest.from_json(text, "m")


@given(st.text(max_size=40))
def test_what_is_no_manifest_is_refused(text: str) -> None:
    with pytest.raises(BundleError):
        Manifest.from_json(text, "m")


def make(folder: Path) -> Path:
    """Write a bundle of two small files."""
    folder.mkdir()
    for name, content in (("a.bin", bytes(range(200)) * 30), ("b.txt", b"hello")):
        (folder / name).write_bytes(content)
    (folder / MANIFEST).write_text(manifest_of(folder, ["a.bin", "b.txt"]).to_json())
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


@given(st.data())
def test_one_flipped_bit_anywhere_in_any_file_is_found(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.getbasetemp() / "every-byte"
    if not folder.exists():
        write_tiny(folder)
    name = data.draw(st.sampled_from([TABLE_FILE, "tokenizer.json", "template.jinja"]))
    content = (folder / name).read_bytes()
    at, bit = data.draw(st.integers(0, len(content) - 1)), data.draw(st.integers(0, 7))
    with (folder / name).open("r+b") as file:
        file.seek(at)
        file.write(bytes([content[at] ^ 1 << bit]))
    with pytest.raises(BundleError, match=f"{name}: sha256"):
        open_bundle(folder)
    (folder / name).write_bytes(content)
    open_bundle(folder)


def test_a_byte_of_the_manifest_changes_what_the_bundle_is_called_by(tmp_path: Path) -> None:
    folder = make(tmp_path / "b")
    before = open_bundle(folder).hash
    text = (folder / MANIFEST).read_text()
    (folder / MANIFEST).write_text(text.replace('"name": "tiny"', '"name": "tint"'))
    assert open_bundle(folder).hash not in (before, "")
    assert open_bundle(folder).hash == file_sha256(folder / MANIFEST)


def replaced(path: Path) -> None:
    """Put another file of the same size and time in a file's place."""
    stat = path.stat()
    other = path.with_suffix(".other")
    other.write_bytes(b"x" * stat.st_size)
    os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    other.replace(path)


def test_another_file_in_its_place_is_found_although_size_and_time_agree(tmp_path: Path) -> None:
    folder = make(tmp_path / "b")
    open_bundle(folder)
    replaced(folder / "a.bin")
    with pytest.raises(BundleError, match="sha256"):
        open_bundle(folder)


def test_a_stamp_is_of_one_place_only(tmp_path: Path) -> None:
    folder = make(tmp_path / "b")
    open_bundle(folder)
    shutil.copytree(folder, tmp_path / "copy")
    flip(tmp_path / "copy" / "a.bin", keep_times=True)
    with pytest.raises(BundleError, match="sha256"):
        open_bundle(tmp_path / "copy")
    open_bundle(folder)


def test_nothing_is_written_into_a_bundle(tmp_path: Path) -> None:
    folder = make(tmp_path / "b")
    before = sorted((path.name, path.stat().st_mtime_ns) for path in folder.iterdir())
    bundle = open_bundle(folder)
    assert sorted((path.name, path.stat().st_mtime_ns) for path in folder.iterdir()) == before
    assert [path.name for path in state_folder().iterdir()] == [bundle.hash]


def test_a_failed_check_leaves_no_stamp(tmp_path: Path) -> None:
    folder = make(tmp_path / "b")
    flip(folder / "b.txt")
    for _ in range(2):
        with pytest.raises(BundleError, match="sha256"):
            open_bundle(folder)
    assert not state_folder().exists()


def test_a_part_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    folder = make(tmp_path / "b")
    (folder / "b.txt").unlink()
    # Opens, is of no size, and fails when it is read, as a worn card does.
    (folder / "b.txt").symlink_to("/proc/self/mem")
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["files"]["b.txt"]["size"] = 0
    (folder / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(BundleError, match="cannot be read"):
        open_bundle(folder)


@pytest.mark.parametrize("name", ["x" * 300, "a/" * 3000])
def test_a_name_that_is_too_long_is_no_bundle(tmp_path: Path, name: str) -> None:
    assert not is_bundle(tmp_path / name)
    with pytest.raises(BundleError, match="cannot be read"):
        open_bundle(tmp_path / name)


def test_a_file_is_no_bundle(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_text("x")
    assert not is_bundle(tmp_path / "model.gguf")
    with pytest.raises(BundleError, match="a file, not a bundle's folder"):
        open_bundle(tmp_path / "model.gguf")


def test_a_manifest_that_is_no_text_is_refused(tmp_path: Path) -> None:
    folder = make(tmp_path / "b")
    (folder / MANIFEST).write_bytes(b"\xff\xfe{}")
    with pytest.raises(BundleError, match="cannot be read"):
        open_bundle(folder)


def test_a_part_that_is_not_listed_is_not_given(tmp_path: Path) -> None:
    bundle = open_bundle(make(tmp_path / "b"))
    (tmp_path / "b" / "more.txt").write_text("not of the bundle")
    assert bundle.file("b.txt").read_text() == "hello"
    with pytest.raises(BundleError, match=r"no `more\.txt` in the bundle"):
        bundle.file("more.txt")


def test_the_size_of_a_bundle_is_that_of_its_parts(tmp_path: Path) -> None:
    bundle = open_bundle(make(tmp_path / "b"))
    assert bundle.manifest.bytes == 6000 + 5


def test_the_state_folder_is_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert state_folder() == tmp_path / "ferrule-state"
    monkeypatch.delenv("FERRULE_STATE")
    monkeypatch.setenv("XDG_STATE_HOME", "/x")
    assert state_folder() == Path("/x/ferrule")
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", "/h")
    assert state_folder() == Path("/h/.local/state/ferrule")


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


@pytest.mark.parametrize("name", ["../a.bin", "/etc/passwd", "x/../../y", "..", "//a", "x/.."])
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
