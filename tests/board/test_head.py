"""Rows of a table as floats, against floats made when the table was written."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import manifest_of, write_table

from ferrule_runtime.bundle import Bundle, Table
from ferrule_runtime.errors import BundleError
from ferrule_runtime.head import TableReader

KINDS = [(2, False), (2, True), (4, False), (4, True), (8, False), (8, True), (32, False)]


def bundle_of(path: Path) -> Bundle:
    return Bundle(path.parent, manifest_of(path.parent, [path.name]), "0" * 64)


def write(
    path: Path, bits: int, zero: bool, rows: int = 9, group: int = 16, groups: int = 3
) -> tuple[TableReader, np.ndarray]:
    table, floats = write_table(path, np.random.default_rng(bits), rows, group * groups, bits, group, zero=zero)
    return TableReader(bundle_of(path), table), floats


@pytest.mark.parametrize(("bits", "zero"), KINDS)
def test_every_row_is_what_was_written(tmp_path: Path, bits: int, zero: bool) -> None:
    reader, floats = write(tmp_path / "t.bin", bits, zero)
    rows = reader.rows(range(9))
    assert rows.dtype == np.float32
    np.testing.assert_allclose(rows, floats, rtol=1e-6)
    assert bits < 32 or np.array_equal(rows, floats)


@given(ids=st.lists(st.integers(0, 8), max_size=12), kind=st.sampled_from(KINDS), groups=st.integers(1, 5))
def test_rows_come_in_the_order_asked_for_repeated_ones_too(
    tmp_path_factory: pytest.TempPathFactory, ids: list[int], kind: tuple[int, bool], groups: int
) -> None:
    reader, floats = write(tmp_path_factory.mktemp("head") / "t.bin", *kind, groups=groups)
    rows = reader.rows(ids)
    assert rows.shape == (len(ids), 16 * groups)
    np.testing.assert_allclose(rows, floats[ids], rtol=1e-6)


@pytest.mark.parametrize("ids", [[-1], [9], [0, 9], [3, -1], [1 << 40]])
def test_an_id_outside_the_table_is_refused(tmp_path: Path, ids: list[int]) -> None:
    reader, _ = write(tmp_path / "t.bin", 8, False)
    with pytest.raises(BundleError, match=f"token ids {min(ids)} to {max(ids)} are outside the table of 9 rows"):
        reader.rows(ids)


@pytest.mark.parametrize(("bits", "zero"), KINDS)
def test_a_file_that_is_shorter_than_its_table_is_refused(tmp_path: Path, bits: int, zero: bool) -> None:
    path = tmp_path / "t.bin"
    table, _ = write_table(path, np.random.default_rng(0), 9, 48, bits, 16, zero=zero)
    # The writer pads every part by 16 bytes but float32, which ends the file.
    needed = path.stat().st_size - (0 if bits == 32 else 16)
    path.write_bytes(path.read_bytes()[:needed])
    TableReader(bundle_of(path), table)
    path.write_bytes(path.read_bytes()[: needed - 1])
    with pytest.raises(BundleError, match=f"{needed - 1} bytes, its table needs {needed}"):
        TableReader(bundle_of(path), table)


def test_a_file_that_is_cut_off_while_it_is_open_gives_no_rows(tmp_path: Path) -> None:
    reader, floats = write(tmp_path / "t.bin", 32, False)
    with (tmp_path / "t.bin").open("r+b") as file:
        file.truncate(64 + 5 * 48 * 4 + 7)
    assert np.array_equal(reader.rows([4]), floats[4:5])
    with pytest.raises(BundleError, match="ends within row 5"):
        reader.rows([4, 5])


@pytest.mark.parametrize(("bits", "group", "columns"), [(3, 16, 48), (8, 0, 48), (8, 32, 48), (0, 16, 48), (8, 16, 0)])
def test_a_table_that_is_laid_out_as_none_is_refused(tmp_path: Path, bits: int, group: int, columns: int) -> None:
    path = tmp_path / "t.bin"
    path.write_bytes(bytes(4096))
    with pytest.raises(BundleError, match=f"{bits} bits by groups of {group} in {columns} columns"):
        TableReader(bundle_of(path), Table(path.name, 4, columns, bits, group, 0, 2048, 0))
