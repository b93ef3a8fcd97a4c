"""What a conversation leaves behind: the same however it was fed, and bit for bit what was saved."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from families import FAMILIES, export_bundle, write_family

from ferrule_convert.archs import build
from ferrule_convert.checkpoint import open_checkpoint
from ferrule_convert.interpret import Memory, interpret
from ferrule_runtime.bundle import Bundle
from ferrule_runtime.engines import Snapshot, load
from ferrule_runtime.engines.onnx import OnnxEngine
from ferrule_runtime.errors import ContextError, EngineError

TOKENS = np.random.default_rng(6).integers(3, 260, 150).tolist()


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("torch")
    path = tmp_path_factory.mktemp(request.param) / "m"
    write_family(path, request.param)
    return path


@pytest.fixture(scope="module", params=["fp32", "w4g32"])
def bundle(request: pytest.FixtureRequest, folder: Path) -> Bundle:
    return export_bundle(folder, folder.parent / request.param, request.param)


@pytest.fixture
def engine_of(bundle: Bundle) -> Callable[..., OnnxEngine]:
    def make(context: int = 192, chunk: int = 64) -> OnnxEngine:
        engine = load(bundle, threads=1, context=context, chunk=chunk)
        assert isinstance(engine, OnnxEngine)
        return engine

    return make


def test_numpy_gives_the_same_in_any_chunks(folder: Path) -> None:
    graph = build(open_checkpoint(folder))
    whole = interpret(graph, TOKENS)
    for chunk in (1, 7, 16, 64):
        memory = Memory()
        parts = [interpret(graph, TOKENS[at : at + chunk], memory) for at in range(0, len(TOKENS), chunk)]
        np.testing.assert_allclose(np.concatenate(parts), whole, rtol=0, atol=1e-4, err_msg=f"chunks of {chunk}")


def test_the_engine_gives_the_same_in_any_chunks(folder: Path, tmp_path: Path) -> None:
    bundle = export_bundle(folder, tmp_path / "b", "fp32")
    whole = interpret(build(open_checkpoint(folder)), TOKENS)
    for chunk in (1, 7, 16, 64, len(TOKENS)):
        engine = load(bundle, threads=1, context=192, chunk=chunk)
        found = engine.feed(TOKENS, every=True)
        np.testing.assert_allclose(found, whole, rtol=0, atol=1e-4, err_msg=f"chunks of {chunk}")


def test_a_restored_snapshot_goes_on_bit_for_bit(engine_of: Callable[..., OnnxEngine]) -> None:
    engine = engine_of()
    engine.feed(TOKENS[:41])
    saved = engine.snapshot()
    first = engine.feed(TOKENS[41:60], every=True)
    engine.feed(TOKENS[60:90])
    engine.restore(saved)
    assert engine.position == 41
    np.testing.assert_array_equal(engine.feed(TOKENS[41:60], every=True), first)


@pytest.mark.parametrize("context", [60, 192, 400])
def test_a_snapshot_goes_into_another_engine_of_any_context_that_holds_it(
    engine_of: Callable[..., OnnxEngine], context: int
) -> None:
    engine = engine_of()
    engine.feed(TOKENS[:41])
    saved = engine.snapshot()
    first = engine.feed(TOKENS[41:60], every=True)
    other = engine_of(context)
    other.feed(TOKENS[100:120])
    other.restore(saved)
    np.testing.assert_array_equal(other.feed(TOKENS[41:60], every=True), first)


def test_a_snapshot_is_a_value(engine_of: Callable[..., OnnxEngine]) -> None:
    engine = engine_of()
    engine.feed(TOKENS[:41])
    saved = engine.snapshot()
    kept = {name: array.copy() for name, array in saved.arrays.items()}
    engine.feed(TOKENS[41:60])
    engine.restore(saved)
    engine.feed(TOKENS[60:80])
    for name, array in saved.arrays.items():
        np.testing.assert_array_equal(array, kept[name])
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0


def test_a_snapshot_before_the_first_token_is_a_reset(engine_of: Callable[..., OnnxEngine]) -> None:
    engine = engine_of()
    empty = engine.snapshot()
    first = engine.feed(TOKENS[:20], every=True)
    engine.restore(empty)
    np.testing.assert_array_equal(engine.feed(TOKENS[:20], every=True), first)


def _another_bundle(saved: Snapshot) -> Snapshot:
    return replace(saved, bundle="0" * 64)


def _another_size(saved: Snapshot) -> Snapshot:
    name, array = next(iter(saved.arrays.items()))
    return replace(saved, arrays={**saved.arrays, name: array[..., :1]})  # would be broadcast


def _another_type(saved: Snapshot) -> Snapshot:
    name, array = next(iter(saved.arrays.items()))
    return replace(saved, arrays={**saved.arrays, name: array.astype(np.float64)})


def _one_less(saved: Snapshot) -> Snapshot:
    return replace(saved, arrays=dict(list(saved.arrays.items())[1:]))


@pytest.mark.parametrize("change", [_another_bundle, _another_size, _another_type, _one_less])
def test_a_state_that_is_not_of_the_bundle_is_refused_and_nothing_changes(
    engine_of: Callable[..., OnnxEngine], change: Callable[[Snapshot], Snapshot]
) -> None:
    engine = engine_of()
    engine.feed(TOKENS[:20])
    saved = engine.snapshot()
    first = engine.feed(TOKENS[20:30], every=True)
    engine.restore(saved)
    with pytest.raises(EngineError, match="a snapshot of 20 tokens is not of this bundle") as caught:
        engine.restore(change(saved))
    assert caught.value.hint
    np.testing.assert_array_equal(engine.feed(TOKENS[20:30], every=True), first)


def test_a_state_that_the_context_does_not_hold_is_refused(engine_of: Callable[..., OnnxEngine]) -> None:
    engine, small = engine_of(), engine_of(30)
    engine.feed(TOKENS[:41])
    with pytest.raises(ContextError, match="a snapshot of 41 tokens does not fit a context of 30"):
        small.restore(engine.snapshot())
    assert small.position == 0
