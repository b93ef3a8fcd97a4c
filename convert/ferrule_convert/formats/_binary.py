"""Files of raw weights: page-aligned, written in order, block by block."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ferrule_runtime.bundle import Table

from ..abreast import abreast
from ..graph import Weight
from ..kept import packed_rows

__all__ = ["ALIGNMENT", "BinaryFile"]

# A page, so that each tensor can be mapped, and dropped by the kernel, by itself.
ALIGNMENT = 4096


class BinaryFile:
    """A file that grows by aligned arrays."""

    def __init__(self, path: Path) -> None:
        self.name = path.name
        self._file = path.open("wb")

    def __enter__(self) -> BinaryFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def _align(self) -> int:
        position = self._file.tell()
        self._file.write(bytes(-position % ALIGNMENT))
        return self._file.tell()

    def write(self, values: NDArray[Any]) -> tuple[int, int]:
        """Write one array; return its offset and length in bytes."""
        offset = self._align()
        self._file.write(np.ascontiguousarray(values).data)
        return offset, values.nbytes

    def write_table(self, weight: Weight) -> Table:
        """Pack and write a matrix block by block: integers as they come, then all scales, then all zero points."""
        rows, columns = weight.shape
        values = self._align()
        scheme = weight.scheme
        if scheme is None:
            for block in abreast(lambda span: weight.rows(*span), weight.spans()):
                self._file.write(np.ascontiguousarray(block).data)
            return Table(self.name, rows, columns, 32, columns, values, 0, 0)
        scales, zeros = [], []
        for packed in abreast(lambda span: packed_rows(weight, scheme, *span), weight.spans()):
            self._file.write(np.ascontiguousarray(packed.values).data)
            scales.append(packed.scales)
            if packed.zeros is not None:
                zeros.append(packed.zeros)
        scales_at, _ = self.write(np.concatenate(scales))
        zeros_at = self.write(np.concatenate(zeros))[0] if zeros else 0
        return Table(self.name, rows, columns, scheme.bits, scheme.group, values, scales_at, zeros_at)
