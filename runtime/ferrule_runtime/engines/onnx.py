"""onnxruntime on the CPU: one session for the layers, another for the whole-vocabulary head."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..bundle import Bundle
from ..errors import BundleError, ContextError, EngineError
from ..head import TableReader
from . import Snapshot

__all__ = ["OnnxEngine", "load"]

_MODEL, _HEAD = "model.onnx", "head.onnx"


def _session(path: Path, threads: int) -> Any:
    try:
        import onnxruntime
    except ImportError:
        raise EngineError("onnxruntime is not installed", hint="pip install 'ferrule-runtime[onnx]'") from None
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # the bindings raise a dozen types of their own, all meaning "cannot load"
        raise EngineError(
            f"{path}: onnxruntime {onnxruntime.__version__} cannot load it: {str(error).splitlines()[0]}",
            hint="was it made for a newer onnxruntime?",
        ) from None


class OnnxEngine:
    """A bundle's graph in onnxruntime, with the state of one conversation.

    Keys and values lie in buffers of the whole context, written in place by the kernel. They are touched when the
    engine is made, so that memory which is not there is missed at load and not in the middle of an answer.
    """

    def __init__(self, bundle: Bundle, *, threads: int, context: int, chunk: int) -> None:
        if not 1 <= context <= bundle.manifest.context:
            raise ContextError(
                f"a context of {context} tokens was asked for, the bundle's tables reach {bundle.manifest.context}",
                hint=f"--context {bundle.manifest.context} or less",
            )
        self._bundle = bundle
        self._context = context
        self._chunk = min(chunk, context)
        self._position = 0
        self._embedding = TableReader(bundle, bundle.manifest.tables["embedding"])
        # The head first: while it is packed its table is mapped twice, and nothing else is loaded yet.
        self._head = _session(bundle.file(_HEAD), threads)
        self._session = _session(bundle.file(_MODEL), threads)
        self._make_state()

    def _make_state(self) -> None:
        import onnxruntime

        inputs = {entry.name: entry.shape for entry in self._session.get_inputs()}
        self._cache: dict[str, NDArray[np.float32]] = {}
        self._recurrent: tuple[dict[str, NDArray[np.float32]], ...] = ({}, {})
        self._turn = 0
        self._bindings = [self._session.io_binding() for _ in range(2)]

        def bind(source: NDArray[np.float32], result: NDArray[np.float32], name: str, turn: int) -> None:
            # On the CPU an OrtValue over a contiguous array is that array's own memory.
            values = [onnxruntime.OrtValue.ortvalue_from_numpy(array) for array in (source, result)]
            self._bindings[turn].bind_ortvalue_input(name, values[0])
            self._bindings[turn].bind_ortvalue_output(name.replace("past.", "present.", 1), values[1])

        for name, shape in inputs.items():
            if not name.startswith("past."):
                continue
            if "context" in shape:
                cache = self._cache[name] = _touched([self._context if size == "context" else size for size in shape])
                for turn in range(2):
                    bind(cache, cache, name, turn)
            else:
                # A step reads one copy and writes the other; the two take turns, so nothing is copied.
                for half in self._recurrent:
                    half[name] = _touched(shape)
                for turn in range(2):
                    bind(self._recurrent[turn][name], self._recurrent[1 - turn][name], name, turn)
        if not self._cache and not self._recurrent[0]:
            raise BundleError(f"{self._bundle.path}: its graph keeps no state", hint="convert the checkpoint again")
        self._lengths = np.zeros(1, dtype=np.int32)
        self._total = np.zeros((), dtype=np.int32)
        for binding in self._bindings:
            binding.bind_cpu_input("seqlens_k", self._lengths)
            binding.bind_cpu_input("total_sequence_length", self._total)

    @property
    def position(self) -> int:
        """Tokens fed since the last reset."""
        return self._position

    @property
    def context(self) -> int:
        """Most tokens that can be held."""
        return self._context

    @property
    def chunk(self) -> int:
        """Most tokens that go through the graph at once."""
        return self._chunk

    def feed(self, tokens: Sequence[int], *, every: bool = False) -> NDArray[np.float32]:
        """Run tokens through the graph behind those already fed; see `engines.Engine`."""
        if not tokens:
            raise EngineError("no tokens to feed")
        if self._position + len(tokens) > self._context:
            raise ContextError(
                f"{len(tokens)} tokens behind {self._position} do not fit a context of {self._context}",
                hint="a larger --context, a shorter request, or fewer tools",
            )
        kept = []
        for start in range(0, len(tokens), self._chunk):
            hidden = self._run(tokens[start : start + self._chunk])
            kept.append(hidden if every else hidden[-1:])
        result: NDArray[np.float32] = np.concatenate(kept) if every else kept[-1]
        return result

    def _run(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        rows = self._embedding.rows(tokens)[None]
        hidden: NDArray[np.float32] = np.empty(rows.shape, dtype=np.float32)
        total = self._position + len(tokens)
        self._lengths[0], self._total[()] = total - 1, total
        binding = self._bindings[self._turn]
        binding.bind_cpu_input("embeddings", rows)
        binding.bind_output("hidden", "cpu", 0, np.float32, list(hidden.shape), hidden.ctypes.data)
        try:
            self._session.run_with_iobinding(binding)
        except Exception as error:  # see _session
            raise EngineError(
                f"onnxruntime failed at position {self._position}: {str(error).splitlines()[0]}"
            ) from None
        if not np.isfinite(hidden[0, -1]).all():
            raise EngineError(
                f"hidden state at position {total - 1} is not finite", hint="`ferrule check` the bundle on this machine"
            )
        self._position = total
        self._turn = 1 - self._turn
        return hidden.reshape(len(tokens), -1)

    def logits(self, hidden: NDArray[np.float32]) -> NDArray[np.float32]:
        """Turn hidden states into logits over the whole vocabulary; see `engines.Engine`."""
        result: NDArray[np.float32] = self._head.run(None, {"hidden": np.ascontiguousarray(hidden)})[0]
        return result

    def snapshot(self) -> Snapshot:
        """Copy the keys and values of the positions fed so far, and the recurrent states."""
        arrays = {name: cache[:, :, : self._position].copy() for name, cache in self._cache.items()}
        arrays |= {name: state.copy() for name, state in self._recurrent[self._turn].items()}
        return Snapshot(self._position, arrays)

    def restore(self, snapshot: Snapshot) -> None:
        """Return to a state that was copied before, bit for bit."""
        known = self._cache.keys() | self._recurrent[0].keys()
        if snapshot.position > self._context or snapshot.arrays.keys() != known:
            raise EngineError(f"a snapshot of {snapshot.position} tokens is not of this engine")
        for name, array in snapshot.arrays.items():
            if name in self._cache:
                self._cache[name][:, :, : snapshot.position] = array
            else:
                self._recurrent[self._turn][name][...] = array
        self._position = snapshot.position

    def reset(self) -> None:
        """Forget everything; old keys and values lie beyond the position and are never read."""
        self._position = 0
        for state in self._recurrent[self._turn].values():
            state.fill(0)


def _touched(shape: Sequence[int]) -> NDArray[np.float32]:
    """Return zeros whose every page is really there."""
    array = np.empty(shape, dtype=np.float32)
    array.fill(0)
    return array


def load(bundle: Bundle, *, threads: int, context: int, chunk: int) -> OnnxEngine:
    """Load a bundle into onnxruntime.

    Raises:
      EngineError: onnxruntime is missing, or cannot load the graph.
      ContextError: The context is longer than the bundle's tables.
    """
    return OnnxEngine(bundle, threads=threads or len(os.sched_getaffinity(0)), context=context, chunk=chunk)
