"""A small but whole bundle and a small engine that really computes, both by plain numpy: for tests of the runtime."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from talking import QWEN, tokenizer_json

from ferrule_runtime.bundle import MANIFEST, Bundle, File, Manifest, MemoryFacts, Table, file_sha256, open_bundle
from ferrule_runtime.dialects import chatml_json
from ferrule_runtime.engines import Snapshot
from ferrule_runtime.errors import ContextError, EngineError
from ferrule_runtime.head import TableReader
from ferrule_runtime.tokenizer import Tokenizer

HIDDEN, CONTEXT = 32, 2048
TABLE_FILE = "embedding.bin"


def packed(integers: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Pack integers along the last axis, the first in the lowest bits of a byte: written out value by value."""
    per = 8 // bits
    out = np.zeros((*integers.shape[:-1], -(-integers.shape[-1] // per)), dtype=np.uint8)
    for at in range(integers.shape[-1]):
        out[..., at // per] |= integers[..., at] << (bits * (at % per))
    return out


def write_table(
    path: Path, rng: np.random.Generator, rows: int, columns: int, bits: int, group: int = 32, *, zero: bool = False
) -> tuple[Table, NDArray[np.float32]]:
    """Write a random table, its parts at offsets of their own; return it with the floats that it stands for."""
    if bits == 32:
        floats = rng.standard_normal((rows, columns)).astype(np.float32)
        path.write_bytes(b"\xff" * 64 + floats.tobytes())
        return Table(path.name, rows, columns, 32, columns, 64, 0, 0), floats
    groups = columns // group
    integers = rng.integers(0, 1 << bits, (rows, groups, group), dtype=np.uint8)
    scales = (rng.standard_normal((rows, groups)) / (1 << bits)).astype(np.float32)
    zeros = rng.integers(0, 1 << bits, (rows, groups), dtype=np.uint8)
    parts = [packed(integers, bits).tobytes(), scales.tobytes(), *([packed(zeros, bits).tobytes()] if zero else [])]
    offsets, content = [], b"\xff" * 16
    for part in parts:
        offsets.append(len(content))
        content += part + b"\xff" * 16
    path.write_bytes(content)
    middle = zeros.astype(np.int64) if zero else np.full((rows, groups), 1 << (bits - 1))
    # In integers and 64-bit floats: another way than the reader's.
    floats = ((integers.astype(np.int64) - middle[:, :, None]) * scales[:, :, None].astype(np.float64)).reshape(
        rows, -1
    )
    places = offsets if zero else [*offsets, 0]
    return Table(path.name, rows, columns, bits, group, *places), floats.astype(np.float32)


def manifest_of(folder: Path, names: Sequence[str], **changes: Any) -> Manifest:
    """Return a manifest of these files, with what every bundle says of itself."""
    table = Table(names[0], 1, 1, 32, 1, 0, 0, 0)
    values: dict[str, Any] = {
        "name": "tiny", "checkpoint": {"name": "Tiny", "sha256": "c" * 64, "licence": "apache-2.0", "parameters": 8000},
        "architecture": {"family": "tiny", "layers": 1, "hidden": HIDDEN, "vocabulary": 260},
        "recipe": {"name": "w8", "key": "w8@12345678", "rules": [], "bits_per_weight": 9.0}, "target": "host",
        "form": "onnx-cpu", "engine": "onnx", "features": (), "context": CONTEXT, "dialect": "chatml-json",
        "stop_tokens": (1,), "tables": {"embedding": table, "head": table},
        "memory": MemoryFacts(*[1000] * len(dataclasses.fields(MemoryFacts))), "fidelity": {"skipped": "a test"},
        "made": {}, "files": {name: File((folder / name).stat().st_size, file_sha256(folder / name)) for name in names},
    }  # fmt: skip
    return Manifest(**{**values, **changes})


def write_tiny(
    folder: Path, *, bits: int = 8, seed: int = 0, more: dict[str, str] | None = None
) -> NDArray[np.float32]:
    """Write a bundle that talks ChatML; return its embedding and head, which are tied, as floats.

    Args:
      folder: To make.
      bits: Of the table: 8, or 32 for float32.
      seed: Of the table.
      more: Further files, by name.
    """
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_text(tokenizer_json(QWEN), encoding="utf-8")
    (folder / "template.jinja").write_text(chatml_json.TEMPLATE, encoding="utf-8")
    for name, text in (more or {}).items():
        (folder / name).write_text(text, encoding="utf-8")
    tokenizer = Tokenizer(folder / "tokenizer.json")
    table, floats = write_table(folder / TABLE_FILE, np.random.default_rng(seed), tokenizer.size, HIDDEN, bits)
    stops = tuple(index for index in map(tokenizer.id_of, chatml_json.STOPS) if index is not None)
    names = [TABLE_FILE, "tokenizer.json", "template.jinja", *(more or {})]
    manifest = manifest_of(folder, names, stop_tokens=stops, tables={"embedding": table, "head": table})
    (folder / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
    return floats


def tiny_bundle(folder: Path, **how: Any) -> Bundle:
    """Write a bundle and open it."""
    write_tiny(folder, **how)
    return open_bundle(folder)


class Recurrent:
    """One tanh layer that remembers, between the bundle's embedding and the same table as its head."""

    def __init__(self, bundle: Bundle, context: int = CONTEXT, *, seed: int = 1, noise: float = 0.0) -> None:
        """Make the layer.

        Args:
          bundle: Has the table.
          context: Tokens that can be held.
          seed: Of the layer's weights.
          noise: The largest error put on each logit, as another CPU's rounding would; the same for the same logits.
        """
        table = bundle.manifest.tables["head"]
        self._table = TableReader(bundle, table)
        self._head = self._table.rows(range(table.rows))
        self._mix = np.random.default_rng(seed).standard_normal((table.columns, table.columns)).astype(np.float32) / 4
        self._state = np.zeros(table.columns, dtype=np.float32)
        self._noise = noise
        self.context = context
        self._position = 0

    @property
    def position(self) -> int:
        return self._position

    def feed(self, tokens: Sequence[int], *, every: bool = False) -> NDArray[np.float32]:
        if not tokens:
            raise EngineError("no tokens to feed")
        if self._position + len(tokens) > self.context:
            raise ContextError(f"{len(tokens)} tokens behind {self._position} do not fit {self.context}")
        states = []
        for row in self._table.rows(tokens):
            self._state = np.tanh(self._mix @ self._state + row)
            states.append(self._state)
        self._position += len(tokens)
        return np.stack(states if every else states[-1:])

    def logits(self, hidden: NDArray[np.float32]) -> NDArray[np.float32]:
        exact = np.stack([self._head @ row for row in hidden])
        if not self._noise:
            return exact
        errors = [np.random.default_rng(row.view(np.uint32)).uniform(-1, 1, len(row)) for row in exact]
        return (exact + self._noise * np.stack(errors)).astype(np.float32)

    def snapshot(self) -> Snapshot:
        return Snapshot("", self._position, {"state": self._state.copy()})

    def restore(self, snapshot: Snapshot) -> None:
        self._state, self._position = snapshot.arrays["state"].copy(), snapshot.position

    def reset(self) -> None:
        self._state, self._position = np.zeros_like(self._state), 0
