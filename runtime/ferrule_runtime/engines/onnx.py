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

__all__ = ["Head", "Layers", "OnnxEngine", "load"]

_MODEL, _HEAD = "model.onnx", "head.onnx"


def _session(path: Path, threads: int) -> Any:
    try:
        import onnxruntime
    except ModuleNotFoundError:
        raise EngineError("onnxruntime is not installed", hint="pip install 'ferrule-runtime[onnx]'") from None
    except ImportError as error:
        # What interrupts the loading of a binary module comes out of it as the cause of an ImportError.
        if isinstance(error.__cause__, KeyboardInterrupt):
            raise KeyboardInterrupt from None
        raise EngineError(
            f"onnxruntime cannot be loaded: {str(error).splitlines()[0]}", hint="install it again, for this machine"
        ) from None
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    # A pattern of a whole pass is one block that is laid out badly: 64 tokens of a 0.8B hybrid model took 29 MiB with
    # it and 18 without, at the same speed. Without the arena, what the allocator keeps is 70 to 145 MiB.
    options.enable_mem_pattern = False
    # A thread that waits by spinning takes the core from whoever it waits for: on cores shared with another process two
    # spinning threads decoded at 43 tokens/s, two that sleep at 110 (one: 145).
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # the bindings raise a dozen types of their own, all meaning "cannot load"
        raise EngineError(
            f"{path}: onnxruntime {onnxruntime.__version__} cannot load it: {str(error).splitlines()[0]}",
            hint="was it made for a newer onnxruntime?",
        ) from None


class Layers:
    """A graph of layers in onnxruntime, with the states of one conversation: rows in, rows out.

    Keys and values lie in buffers of the whole context, written in place by the kernel. States are touched when they
    are made, so that memory which is not there is missed at load and not in the middle of an answer.
    """

    def __init__(self, path: Path, *, threads: int, context: int) -> None:
        """Load a graph.

        Args:
          path: An ONNX file with one input of rows, its states, and one output of rows.
          threads: Of the kernels.
          context: Tokens to hold.

        Raises:
          EngineError: onnxruntime is missing, or cannot load the graph.
        """
        self.position = 0
        self._session = _session(path, threads)
        self._input = next(entry.name for entry in self._session.get_inputs())
        self._output = next(entry.name for entry in self._session.get_outputs())
        self._features = self._session.get_outputs()[0].shape[-1]
        self.cache: dict[str, NDArray[np.float32]] = {}
        self._recurrent: tuple[dict[str, NDArray[np.float32]], ...] = ({}, {})
        self._turn = 0
        self._bindings = [self._session.io_binding() for _ in range(2)]
        for entry in self._session.get_inputs():
            if entry.name.startswith("past."):
                self._bind_state(entry.name, entry.shape, context)
        self._lengths = np.zeros(1, dtype=np.int32)
        self._total = np.zeros((), dtype=np.int32)
        if self.cache:
            for binding in self._bindings:
                binding.bind_cpu_input("seqlens_k", self._lengths)
                binding.bind_cpu_input("total_sequence_length", self._total)

    def _bind_state(self, name: str, shape: Sequence[int | str], context: int) -> None:
        import onnxruntime

        sizes = [context if size == "context" else int(size) for size in shape]
        if "context" in shape:
            self.cache[name] = _touched(sizes)
            pairs = [(self.cache[name], self.cache[name])] * 2
        else:
            # A step reads one copy and writes the other; the two take turns, so nothing is copied.
            one, two = (half.setdefault(name, _touched(sizes)) for half in self._recurrent)
            pairs = [(one, two), (two, one)]
        for binding, arrays in zip(self._bindings, pairs, strict=True):
            # On the CPU an OrtValue over a contiguous array is that array's own memory.
            source, result = (onnxruntime.OrtValue.ortvalue_from_numpy(array) for array in arrays)
            binding.bind_ortvalue_input(name, source)
            binding.bind_ortvalue_output(name.replace("past.", "present.", 1), result)

    @property
    def recurrent(self) -> dict[str, NDArray[np.float32]]:
        """The recurrent states that the next step reads."""
        return self._recurrent[self._turn]

    @property
    def stateful(self) -> bool:
        """Whether the graph remembers anything."""
        return bool(self.cache or self._recurrent[0])

    def run(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        """Run rows [tokens, features] behind those already run; return rows [tokens, features].

        Raises:
          EngineError: The graph could not be executed, or its last row is not finite.
        """
        count = len(rows)
        given = np.ascontiguousarray(rows, dtype=np.float32)[None]
        result: NDArray[np.float32] = np.empty((1, count, self._features), dtype=np.float32)
        total = self.position + count
        self._lengths[0], self._total[()] = total - 1, total
        binding = self._bindings[self._turn]
        binding.bind_cpu_input(self._input, given)
        binding.bind_output(self._output, "cpu", 0, np.float32, list(result.shape), result.ctypes.data)
        try:
            self._session.run_with_iobinding(binding)
        except Exception as error:  # see _session
            raise EngineError(f"onnxruntime failed at position {self.position}: {str(error).splitlines()[0]}") from None
        if not np.isfinite(result[0, -1]).all():
            raise EngineError(
                f"hidden state at position {total - 1} is not finite", hint="`ferrule check` the bundle on this machine"
            )
        self.position = total
        self._turn = 1 - self._turn
        return result.reshape(count, -1)

    def reset(self) -> None:
        """Forget everything; old keys and values lie beyond the position and are never read."""
        self.position = 0
        for state in self.recurrent.values():
            state.fill(0)


class Head:
    """A whole-vocabulary head in onnxruntime."""

    def __init__(self, path: Path, *, threads: int) -> None:
        """Load a head.

        Raises:
          EngineError: onnxruntime is missing, or cannot load it.
        """
        self._session = _session(path, threads)

    def logits(self, hidden: NDArray[np.float32]) -> NDArray[np.float32]:
        """Turn hidden states [n, hidden] into logits [n, vocabulary]."""
        result: NDArray[np.float32] = self._session.run(None, {"hidden": np.ascontiguousarray(hidden)})[0]
        return result


class OnnxEngine:
    """A bundle's graph in onnxruntime, with the state of one conversation."""

    def __init__(self, bundle: Bundle, *, threads: int, context: int, chunk: int) -> None:
        if not 1 <= context <= bundle.manifest.context:
            raise ContextError(
                f"a context of {context} tokens was asked for, the bundle's tables reach {bundle.manifest.context}",
                hint=f"--context {bundle.manifest.context} or less",
            )
        self._bundle = bundle.hash
        self._context = context
        self._chunk = min(chunk, context)
        self._embedding = TableReader(bundle, bundle.manifest.tables["embedding"])
        # The head first: while it is packed its table is mapped twice, and nothing else is loaded yet.
        self._head = Head(bundle.file(_HEAD), threads=threads)
        self._layers = Layers(bundle.file(_MODEL), threads=threads, context=context)
        if not self._layers.stateful:
            raise BundleError(f"{bundle.path}: its graph keeps no state", hint="convert the checkpoint again")

    @property
    def position(self) -> int:
        """Tokens fed since the last reset."""
        return self._layers.position

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
        if self.position + len(tokens) > self._context:
            raise ContextError(
                f"{len(tokens)} tokens behind {self.position} do not fit a context of {self._context}",
                hint="a larger --context, a shorter request, or fewer tools",
            )
        kept = []
        for start in range(0, len(tokens), self._chunk):
            hidden = self._layers.run(self._embedding.rows(tokens[start : start + self._chunk]))
            kept.append(hidden if every else hidden[-1:])
        result: NDArray[np.float32] = np.concatenate(kept) if every else kept[-1]
        return result

    def logits(self, hidden: NDArray[np.float32]) -> NDArray[np.float32]:
        """Turn hidden states into logits over the whole vocabulary; see `engines.Engine`."""
        return self._head.logits(hidden)

    def snapshot(self) -> Snapshot:
        """Copy the keys and values of the positions fed so far, and the recurrent states."""
        arrays = {name: state.copy() for name, state in self._state(self.position).items()}
        for array in arrays.values():
            array.flags.writeable = False
        return Snapshot(self._bundle, self.position, arrays)

    def restore(self, snapshot: Snapshot) -> None:
        """Return to a state that was copied before, bit for bit; see `engines.Engine`."""
        if snapshot.position > self._context:
            raise ContextError(
                f"a snapshot of {snapshot.position} tokens does not fit a context of {self._context}",
                hint="a larger --context",
            )
        state = self._state(snapshot.position)
        if snapshot.bundle != self._bundle or _kinds(snapshot.arrays) != _kinds(state):
            raise EngineError(
                f"a snapshot of {snapshot.position} tokens is not of this bundle",
                hint="feed the tokens again with this one",
            )
        for name, array in snapshot.arrays.items():
            state[name][...] = array
        self._layers.position = snapshot.position

    def _state(self, position: int) -> dict[str, NDArray[np.float32]]:
        """Return what lies in memory of the first `position` tokens: views, not copies."""
        cache = {name: buffer[:, :, :position] for name, buffer in self._layers.cache.items()}
        return cache | self._layers.recurrent

    def reset(self) -> None:
        """Forget everything."""
        self._layers.reset()


def _kinds(arrays: dict[str, NDArray[Any]]) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
    return {name: (array.shape, array.dtype) for name, array in arrays.items()}


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
