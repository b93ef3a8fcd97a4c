"""onnxruntime-genai's model builder: graphs of Qwen3.5, built as its users build them, run by onnxruntime alone.

The builder is torch's process: it is called as a command, in the environment that `envs/genai.txt` describes. Two
things to know of it: options that it does not know are ignored in silence, and it takes any linear layer with as many
outputs as the vocabulary for the head, so a small checkpoint's vocabulary must be a size of its own.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from process_tree import Cost, run

__all__ = ["Graph", "build", "build_int4"]

# Neither downloads nor telemetry: everything is in the checkpoint's folder.
_OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


def build(
    checkpoint: Path,
    out: Path,
    precision: Literal["fp32", "int4"],
    options: Sequence[str] = (),
    *,
    python: str = sys.executable,
) -> Cost:
    """Build a graph for the CPU: `model.onnx` and `model.onnx.data` in `out`.

    Args:
      checkpoint: A Hugging Face folder of `Qwen3_5ForConditionalGeneration`; the text-only class is refused.
      out: The folder to make; the log and the builder's cache lie beside it.
      precision: Of the weights.
      options: `key=value`, the builder's `--extra_options`.
      python: An interpreter whose environment has the builder.

    Raises:
      RuntimeError: The builder failed.
    """
    command = [python, "-m", "onnxruntime_genai.models.builder", "-i", str(checkpoint), "-o", str(out)]
    command += ["-p", precision, "-e", "cpu", "-c", str(out.with_suffix(".cache"))]
    if options:
        command += ["--extra_options", *options]
    return run(command, out.with_suffix(".log"), _OFFLINE)


def build_int4(checkpoint: Path, out: Path, *, group: int = 32, python: str = sys.executable) -> Cost:
    """Build the int4 graph that compares with a recipe `w4g<group>`: int8 activations, logits of the last token alone.

    Its head and embedding have 4 bits, where a recipe's have 8.

    Raises:
      RuntimeError: The builder failed.
    """
    return build(
        checkpoint, out, "int4", [f"block_size={group}", "accuracy_level=4", "prune_lm_head=true"], python=python
    )


class Graph:
    """A graph of the builder's in plain onnxruntime, with the state of one conversation.

    Keys and values lie in buffers of the whole context that are past and present at once; recurrent states take turns
    in two copies. So nothing is copied between steps, which is the fastest way to run it.
    """

    def __init__(self, folder: Path, *, threads: int, context: int) -> None:
        """Load a graph.

        Args:
          folder: What `build` has made.
          threads: Of the kernels.
          context: Tokens to hold.
        """
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        # As our own engine: a thread that spins takes the core from whoever it waits for.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self._session = onnxruntime.InferenceSession(
            str(folder / "model.onnx"), options, providers=["CPUExecutionProvider"]
        )
        self._bindings = [self._session.io_binding() for _ in range(2)]
        self._states: list[NDArray[np.float32]] = []
        self._mask = np.ones((1, context), dtype=np.int64)
        # A pruned head has one row; any other has a name for as many as there are tokens.
        self._logits = next(entry.shape[1:] for entry in self._session.get_outputs() if entry.name == "logits")
        self.position = 0
        # The graph has names where the shapes of keys and values have numbers.
        decoder = json.loads((folder / "genai_config.json").read_text(encoding="utf-8"))["model"]["decoder"]
        for entry in self._session.get_inputs():
            if not entry.name.startswith("past"):
                continue
            keys = entry.name.startswith("past_key_values")
            shape = [1, entry.shape[1], context, decoder["head_size"]] if keys else [1, *entry.shape[1:]]
            one = np.zeros(shape, dtype=np.float32)
            two = one if keys else np.zeros_like(one)
            self._states += [one, two]
            result = entry.name.replace("past_key_values", "present").replace("past", "present")
            for binding, source, target in zip(self._bindings, (one, two), (two, one), strict=True):
                binding.bind_ortvalue_input(entry.name, onnxruntime.OrtValue.ortvalue_from_numpy(source))
                binding.bind_ortvalue_output(result, onnxruntime.OrtValue.ortvalue_from_numpy(target))

    def feed(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Run tokens behind those already fed; return the logits that the graph gives, [tokens or 1, vocabulary]."""
        count, binding = len(tokens), self._bindings[0]
        total = self.position + count
        positions = np.arange(self.position, total, dtype=np.int64)
        inputs: dict[str, Any] = {
            "input_ids": np.array([tokens], dtype=np.int64),
            "attention_mask": self._mask[:, :total],
            "position_ids": np.ascontiguousarray(np.broadcast_to(positions, (3, 1, count))),
        }
        for name, values in inputs.items():
            binding.bind_cpu_input(name, values)
        rows, vocabulary = self._logits
        logits = np.empty((1, rows if rows == 1 else count, vocabulary), dtype=np.float32)
        binding.bind_output("logits", "cpu", 0, np.float32, list(logits.shape), logits.ctypes.data)
        self._session.run_with_iobinding(binding)
        self._bindings.reverse()
        self.position = total
        result: NDArray[np.float32] = logits[0]
        return result

    def reset(self) -> None:
        """Forget everything."""
        self.position = 0
        for state in self._states:
            state.fill(0)
