"""The float model over a text: computed once, kept, and never worth failing for."""

from pathlib import Path

import numpy as np
import pytest
from checkpoints import Tiny

from ferrule_convert import distance
from ferrule_convert.apart import LONG, within
from ferrule_convert.archs import build
from ferrule_convert.checkpoint import open_checkpoint
from ferrule_convert.distance import reference_hidden
from ferrule_convert.interpret import interpret
from ferrule_runtime.errors import CheckpointError

TEXT = [list(range(3, 40)), list(range(50, 61))]


def test_every_window_starts_from_an_empty_state(tiny: Tiny) -> None:
    graph = build(open_checkpoint(tiny.path))
    plain = np.concatenate([interpret(graph, window) for window in TEXT])
    np.testing.assert_allclose(reference_hidden("windows", graph, TEXT), plain, atol=1e-5)


def test_the_reference_is_computed_once_and_a_damaged_one_again(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = build(open_checkpoint(tiny.path))
    first = reference_hidden("once", graph, TEXT)
    (path,) = (distance.cache_folder() / "reference").glob("*.npy")
    monkeypatch.setattr(distance, "run_nodes", lambda *_: pytest.fail("computed again"))
    np.testing.assert_array_equal(reference_hidden("once", graph, TEXT), first)
    with pytest.raises(pytest.fail.Exception, match="computed again"):
        reference_hidden("once", graph, [[*TEXT[0], *TEXT[1]]])
    monkeypatch.undo()
    path.write_bytes(path.read_bytes()[:100])
    np.testing.assert_array_equal(reference_hidden("once", graph, TEXT), first)


def test_a_cache_that_cannot_be_written_costs_only_time(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("FERRULE_CACHE", str(tmp_path / "file"))
    assert reference_hidden("x", build(open_checkpoint(tiny.path)), [[5, 6, 7]]).shape == (3, 64)


def test_a_checkpoint_that_is_gone_says_so_from_its_process(tmp_path: Path) -> None:
    hidden = np.zeros((2, 64), dtype=np.float32)
    with pytest.raises(CheckpointError, match=r"gone\.gguf: no such checkpoint"):
        within(LONG, distance.distance, "x", tmp_path / "gone.gguf", None, tmp_path / "h", [[5, 6]], hidden)
