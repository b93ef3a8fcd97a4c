"""Rows of a quantised table, read from the file when they are asked for: embedded tokens, and rows of the output head.

Reading beats mapping here: a mapped table costs resident memory in 64 KiB steps around every row that is touched, a
read costs a microsecond and nothing that stays.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .bundle import Bundle, Table
from .errors import BundleError

__all__ = ["TableReader", "unpack"]


class TableReader:
    """A [rows, columns] matrix in a file of the bundle; holds the file open.

    Raises:
      BundleError: The file is too short for the table, or no table is laid out so.
    """

    def __init__(self, bundle: Bundle, table: Table) -> None:
        path = bundle.file(table.file)
        if table.bits not in (2, 4, 8, 32) or not table.group or table.columns % table.group or not table.columns:
            raise BundleError(
                f"{path}: no table has {table.bits} bits by groups of {table.group} in {table.columns} columns",
                hint="convert the checkpoint again",
            )
        self.table = table
        self._path = path
        self._groups = table.columns // table.group
        self._value_bytes = table.columns * table.bits // 8
        self._zero_bytes = (self._groups * table.bits + 7) // 8
        end = table.values + table.rows * self._value_bytes
        if table.bits < 32:
            end = max(end, table.scales + table.rows * self._groups * 4)
        if table.zeros:
            end = max(end, table.zeros + table.rows * self._zero_bytes)
        if (size := path.stat().st_size) < end:
            raise BundleError(f"{path}: {size} bytes, its table needs {end}", hint="convert the checkpoint again")
        self._file = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)

    def _read(self, ids: NDArray[np.int64], offset: int, width: int) -> NDArray[np.uint8]:
        rows = np.empty((len(ids), width), dtype=np.uint8)
        for row, index in zip(rows, ids.tolist(), strict=True):
            if os.preadv(self._file, [row.data], offset + index * width) != width:
                raise BundleError(f"{self._path}: ends within row {index}", hint="copy the bundle again")
        return rows

    def rows(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """Return rows by index as float32 [ids, columns].

        Raises:
          BundleError: An index is outside the table, or the file was cut off since it was opened.
        """
        index = np.asarray(ids, dtype=np.int64)
        if index.size and not 0 <= int(index.min()) <= int(index.max()) < self.table.rows:
            raise BundleError(
                f"token ids {int(index.min())} to {int(index.max())} are outside the table of {self.table.rows} rows",
                hint="the tokenizer belongs to another model",
            )
        bits, groups = self.table.bits, self._groups
        raw = self._read(index, self.table.values, self._value_bytes)
        if bits == 32:
            return raw.view(np.float32)
        packed = raw.reshape(len(index), groups, self._value_bytes // groups)
        integers = unpack(packed, bits, self.table.group).astype(np.float32)
        if self.table.zeros:
            zeros = self._read(index, self.table.zeros, self._zero_bytes)
            integers -= unpack(zeros, bits, groups).astype(np.float32)[:, :, None]
        else:
            integers -= np.float32(1 << (bits - 1))
        integers *= self._read(index, self.table.scales, groups * 4).view(np.float32)[:, :, None]
        return integers.reshape(len(index), self.table.columns)


def unpack(packed: NDArray[np.uint8], bits: int, count: int) -> NDArray[np.uint8]:
    """Spread unsigned integers of 2, 4 or 8 bits along the last axis, the lowest bits of a byte first."""
    if bits == 8:
        return packed[..., :count]
    # One look-up for a byte gives all that it holds, several times faster than shifting each out.
    return _SPREAD[bits][packed].view(np.uint8)[..., :count]


def _spread(bits: int) -> NDArray[np.unsignedinteger[Any]]:
    """Return for each byte the integers in it, as the bytes of one wider integer."""
    shifts = np.arange(8 // bits, dtype=np.uint8) * np.uint8(bits)
    spread = (np.arange(256, dtype=np.uint8)[:, None] >> shifts) & np.uint8((1 << bits) - 1)
    wide: NDArray[np.unsignedinteger[Any]] = np.ascontiguousarray(spread).view(f"u{len(shifts)}")[:, 0]
    return wide


_SPREAD = {bits: _spread(bits) for bits in (2, 4)}
