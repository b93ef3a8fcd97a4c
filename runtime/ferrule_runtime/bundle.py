"""The bundle: what is flashed. A read-only folder with a manifest that lists and hashes every part."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import BundleError

__all__ = [
    "MANIFEST", "SCHEMA_VERSION", "Bundle", "File", "Manifest", "MemoryFacts",
    "Table",
    "file_sha256", "is_bundle", "open_bundle", "state_folder",
]  # fmt: skip

MANIFEST = "manifest.json"
SCHEMA_VERSION = 1
_BLOCK = 1 << 20


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


@dataclass(frozen=True)
class File:
    """One part: its size in bytes and its SHA-256."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Table:
    """Where a [rows, columns] matrix lies in a file of the bundle, quantised along its rows.

    Attributes:
      file: The part that holds it.
      rows: Usually the vocabulary.
      columns: Usually the hidden size.
      bits: Of one weight; 32 means float32, without scales.
      group: Columns that share a scale.
      values: Byte offset of the integers, laid out as MatMulNBits reads them.
      scales: Byte offset of the float32 scales, [rows, columns / group]; 0 for float32.
      zeros: Byte offset of the integer zero points, packed per row; 0 where they are 2^(bits-1).
    """

    file: str
    rows: int
    columns: int
    bits: int
    group: int
    values: int
    scales: int
    zeros: int


@dataclass(frozen=True)
class MemoryFacts:
    """What the budget needs to know of a graph, in bytes. `budget.py` says how each is used.

    Attributes:
      mapped: The graph's weights that stay mapped from the file while it runs.
      packed: Anonymous copies that the kernels make of weights at load.
      table: The output head's table in the file, mapped while its copy is made.
      head_packed: What a whole-vocabulary head's own session copies.
      kv_per_token: Keys and values of one position, all layers.
      state: Recurrent state, constant in the context.
      work_per_token: Activations alive at once, per token of a prefill chunk.
      scores_per_pair: Attention scores, per (token of a chunk, position attended to).
      graph: The graph file itself, parsed and kept.
      vocabulary: Entries of the tokenizer.
      tokenizer: The tokenizer's file.
    """

    mapped: int
    packed: int
    table: int
    head_packed: int
    kv_per_token: int
    state: int
    work_per_token: int
    scores_per_pair: int
    graph: int
    vocabulary: int
    tokenizer: int


@dataclass(frozen=True)
class Manifest:
    """Everything about a bundle but its weights.

    Attributes:
      name: What the bundle is called, such as `smollm2-135m-w4g32-host`.
      checkpoint: Identity of what was converted: `name`, `sha256`, `licence`, `parameters`.
      architecture: `family`, `layers`, `hidden`, `heads`, `kv_heads`, `head_dim`, `vocabulary`.
      recipe: `name`, `key` (name@hash8), `rules` in full, `bits_per_weight`.
      target: The kind of board it was made for.
      form: The shape of the graph: the name of a file in the converters' `formats/`.
      engine: What executes it: the name of a file in `engines/`.
      features: CPU features the board must have, such as `asimddp`.
      context: Most tokens the graph's tables reach.
      dialect: The tool-call text format: the name of a file in `dialects/`.
      stop_tokens: Ids that end a reply, at least one.
      tables: `embedding` and `head`; the same bytes where they are tied.
      memory: Facts for the budget.
      fidelity: Distance to the float model, or `{"skipped": reason}`.
      made: Versions, command and time of the conversion.
      files: Every other file of the bundle.
    """

    name: str
    checkpoint: Mapping[str, Any]
    architecture: Mapping[str, Any]
    recipe: Mapping[str, Any]
    target: str
    form: str
    engine: str
    features: tuple[str, ...]
    context: int
    dialect: str
    stop_tokens: tuple[int, ...]
    tables: Mapping[str, Table]
    memory: MemoryFacts
    fidelity: Mapping[str, Any]
    made: Mapping[str, Any]
    files: Mapping[str, File]

    def to_json(self) -> str:
        """Write the manifest as stored: indented JSON, keys in the order above."""
        return json.dumps({"schema_version": SCHEMA_VERSION, **dataclasses.asdict(self)}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, where: str) -> Manifest:
        """Read a manifest.

        Raises:
          BundleError: Not JSON, of another schema, or a field is missing or of another type.
        """
        try:
            raw = json.loads(text, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise BundleError(f"{where}: not JSON: {error}", hint="convert the checkpoint again") from None
        version = raw.get("schema_version") if isinstance(raw, dict) else None
        if not isinstance(version, int) or isinstance(version, bool) or version < 1:
            raise BundleError(f"{where}: no `schema_version`", hint="is this a Ferrule bundle?")
        if version > SCHEMA_VERSION:
            raise BundleError(
                f"{where}: schema {version} is newer than {SCHEMA_VERSION}, the newest known here",
                hint="update ferrule-runtime on this machine",
            )
        return _read_manifest(raw, where)

    @property
    def bytes(self) -> int:
        """Size of the bundle's files, without the manifest."""
        return sum(file.size for file in self.files.values())


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


_MAPPINGS = ("checkpoint", "architecture", "recipe", "fidelity", "made")
_TEXTS = ("name", "target", "form", "engine", "dialect")


def _named(value: Any) -> bool:
    """Tell whether a value is a name: text that may be shown as it is."""
    return isinstance(value, str) and value != "" and value.isprintable()


def _read_manifest(raw: dict[str, Any], where: str) -> Manifest:
    def fail(field: str, wanted: str) -> BundleError:
        return BundleError(f"{where}: `{field}` must be {wanted}", hint="convert the checkpoint again")

    def natural(value: Any, field: str) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise fail(field, "a whole number")
        return value

    values: dict[str, Any] = {}
    for field in _TEXTS:
        if not _named(raw.get(field)):
            raise fail(field, "text that can be printed")
        values[field] = raw[field]
    for field in _MAPPINGS:
        if not isinstance(raw.get(field), dict):
            raise fail(field, "an object")
        values[field] = raw[field]
    if not isinstance(raw.get("features"), list) or not all(map(_named, raw["features"])):
        raise fail("features", "a list of names")
    if not isinstance(raw.get("stop_tokens"), list) or not raw["stop_tokens"]:
        raise fail("stop_tokens", "a list of token ids, at least one")
    tables = raw.get("tables")
    keys = [field.name for field in dataclasses.fields(Table)]
    if not isinstance(tables, dict) or set(tables) != {"embedding", "head"}:
        raise fail("tables", "an object with embedding and head")
    if not all(isinstance(table, dict) and sorted(table) == sorted(keys) for table in tables.values()):
        raise fail("tables", f"objects with {', '.join(keys)}")
    for name, table in tables.items():
        if not _named(table["file"]):
            raise fail(f"tables.{name}.file", "the name of a file")
    memory = raw.get("memory")
    names = [field.name for field in dataclasses.fields(MemoryFacts)]
    if not isinstance(memory, dict) or sorted(memory) != sorted(names):
        raise fail("memory", f"an object with {', '.join(names)}")
    files = raw.get("files")
    if not isinstance(files, dict) or not files:
        raise fail("files", "an object of files")
    listed = {}
    for name, entry in files.items():
        parts = Path(name).parts
        if (
            not isinstance(entry, dict)
            or not _named(entry.get("sha256"))
            or not _named(name)
            or not parts
            or ".." in parts
            or name.startswith("/")
        ):
            raise fail(f"files.{name!a}", "a relative path with size and sha256")
        listed[name] = File(natural(entry.get("size"), f"files.{name}.size"), entry["sha256"])
    return Manifest(
        **values,
        features=tuple(raw["features"]),
        context=natural(raw.get("context"), "context"),
        stop_tokens=tuple(natural(token, "stop_tokens") for token in raw["stop_tokens"]),
        tables={
            name: Table(table["file"], *(natural(table[key], f"tables.{name}.{key}") for key in keys[1:]))
            for name, table in tables.items()
        },
        memory=MemoryFacts(**{name: natural(memory[name], f"memory.{name}") for name in names}),
        files=listed,
    )


def state_folder() -> Path:
    """Return the folder for what the runtime makes of a bundle: `FERRULE_STATE`, or one in the user's cache."""
    given = os.environ.get("FERRULE_STATE")
    return Path(given) if given else Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state") / "ferrule"


@dataclass(frozen=True)
class Bundle:
    """A bundle on this machine, opened and verified.

    Attributes:
      path: The folder.
      manifest: What it says of itself.
      hash: SHA-256 of the manifest's bytes: the bundle's identity, since the manifest hashes every part.
    """

    path: Path
    manifest: Manifest
    hash: str

    def file(self, name: str) -> Path:
        """Return the path of one part.

        Raises:
          BundleError: The manifest lists no such part.
        """
        if name not in self.manifest.files:
            raise BundleError(f"{self.path}: no `{name}` in the bundle", hint="convert the checkpoint again")
        return self.path / name


def is_bundle(path: Path) -> bool:
    """Tell whether a path looks like a bundle: a folder with a manifest."""
    try:
        return (path / MANIFEST).is_file()
    except OSError:  # a name that is too long, or a folder that may not be entered
        return False


def _stamp(bundle: Bundle) -> dict[str, list[int]]:
    """Return what must stay the same for a verified bundle to count as unchanged: size, mtime, inode."""
    stats = {name: bundle.file(name).stat() for name in bundle.manifest.files}
    return {name: [s.st_size, s.st_mtime_ns, s.st_ino] for name, s in stats.items()}


def _verify(bundle: Bundle) -> dict[str, list[int]]:
    """Hash every part; return the stamp from before, so that a part that changes meanwhile is hashed again."""
    try:
        _check_parts(bundle)
        stamp = _stamp(bundle)
        _hash_parts(bundle)
    except OSError as error:
        raise BundleError(
            f"{error.filename or bundle.path}: cannot be read: {error.strerror or error}", hint="copy the bundle again"
        ) from None
    return stamp


def _check_parts(bundle: Bundle) -> None:
    for name, expected in bundle.manifest.files.items():
        path = bundle.file(name)
        if not path.is_file():
            raise BundleError(f"{bundle.path}: `{name}` is missing", hint="copy the whole bundle again")
        size = path.stat().st_size
        if size != expected.size:
            raise BundleError(f"{path}: {size} bytes, the manifest says {expected.size}", hint="copy the bundle again")


def _hash_parts(bundle: Bundle) -> None:
    for name, expected in bundle.manifest.files.items():
        path = bundle.file(name)
        if (found := file_sha256(path)) != expected.sha256:
            raise BundleError(
                f"{path}: sha256 {found[:16]}…, the manifest says {expected.sha256[:16]}…", hint="copy the bundle again"
            )


def open_bundle(path: Path, *, verify: bool = False) -> Bundle:
    """Open a bundle; hash every part at the first open on this machine, and again when one changed.

    A stamp of sizes, times and inodes under the state folder lets later starts skip the hashing.

    Args:
      path: The bundle's folder.
      verify: Hash every part even if the stamp still holds.

    Raises:
      BundleError: Not a bundle, of another schema, or damaged.
    """
    manifest = path / MANIFEST
    try:
        raw = manifest.read_bytes()
        text = raw.decode("utf-8")
    except FileNotFoundError:
        if not path.exists():
            raise BundleError(f"{path}: no such bundle", hint="make one with `ferrule convert`") from None
        raise BundleError(f"{path}: no {MANIFEST} in it", hint="is this a Ferrule bundle?") from None
    except NotADirectoryError:
        raise BundleError(f"{path}: a file, not a bundle's folder", hint="is this a Ferrule bundle?") from None
    except (OSError, UnicodeDecodeError) as error:
        raise BundleError(f"{manifest}: cannot be read: {error}", hint="copy the bundle again") from None
    bundle = Bundle(path, Manifest.from_json(text, str(manifest)), hashlib.sha256(raw).hexdigest())
    stamp_file = state_folder() / bundle.hash / "verified.json"
    try:
        known = json.loads(stamp_file.read_text(encoding="utf-8"))
        if not verify and known == {str(path.resolve()): _stamp(bundle)}:
            return bundle
    except (OSError, ValueError):
        pass  # never verified here, or moved, or the note is damaged: hash again
    stamp = _verify(bundle)
    try:
        stamp_file.parent.mkdir(parents=True, exist_ok=True)
        stamp_file.write_text(json.dumps({str(path.resolve()): stamp}), encoding="utf-8")
    except OSError:
        pass  # a read-only or full state folder costs a hash per start, nothing else
    return bundle
