"""Writers of small random Llamas in GPTQ's and AWQ's safetensors, packed value by value as their documentation says."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from checkpoints import Sizes, Tiny, write_tiny
from folders import write_llama
from safetensors.numpy import load_file, save_file

# Matrices of a layer by the input that they share.
INPUTS = {
    "attention": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "heads": ("self_attn.o_proj",),
    "mlp": ("mlp.gate_proj", "mlp.up_proj"),
    "inner": ("mlp.down_proj",),
}
# AutoAWQ: the column of each of a word's values, from its lowest bits.
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


@dataclass(frozen=True)
class Matrix:
    """One matrix as a quantiser leaves it: a weight is (integers - zero of its group) · scale of its group."""

    integers: np.ndarray  # [out, in]
    zeros: np.ndarray  # [groups, out]
    scales: np.ndarray  # float16 [groups, out]
    groups: np.ndarray  # [in], the group of each column

    def floats(self) -> np.ndarray:
        zeros, scales = self.zeros[self.groups].T, self.scales.astype(np.float32)[self.groups].T
        return ((self.integers - zeros).astype(np.float32) * scales).astype(np.float32)


def random_matrix(
    rng: np.random.Generator, out: int, columns: int, *, bits: int, group: int, sym: bool, order: np.ndarray | None
) -> Matrix:
    size = columns if group == -1 else group
    shape, half, top = (columns // size, out), 1 << (bits - 1), (1 << bits) - 1
    groups = np.arange(columns) // size
    if order is not None:
        # Column order[i] was the i-th to be quantised.
        groups = groups[np.argsort(order)]
    integers = rng.integers(0, top + 1, (out, columns))
    zeros = np.full(shape, half) if sym else rng.integers(1, top + 1, shape)
    scales = (rng.uniform(0.5, 1.5, shape) * 2 * columns**-0.5 / top * 2).astype(np.float16)
    return Matrix(integers, zeros, scales, groups)


def gptq_words(values: np.ndarray, bits: int) -> np.ndarray:
    """Pack [n, m] along the first axis into int32 [n · bits / 32, m], the first value in the lowest bits."""
    words = np.zeros((len(values) * bits // 32, values.shape[1]), dtype=np.uint32)
    for row, one in enumerate(values):
        words[row * bits // 32] |= one.astype(np.uint32) << np.uint32(row * bits % 32)
    return words.view(np.int32)


def gptq_parts(matrix: Matrix, bits: int, *, less_one: bool) -> dict[str, np.ndarray]:
    zeros = matrix.zeros - 1 if less_one else matrix.zeros
    return {
        "qweight": gptq_words(matrix.integers.T, bits),
        "qzeros": np.ascontiguousarray(gptq_words(zeros.T, bits).T),
        "scales": matrix.scales,
        "g_idx": matrix.groups.astype(np.int32),
    }


def awq_words(values: np.ndarray) -> np.ndarray:
    """Pack [n, m] along the last axis into int32 [n, m / 8], in AutoAWQ's order."""
    words = np.zeros((len(values), values.shape[1] // 8), dtype=np.uint32)
    for word in range(words.shape[1]):
        for place, column in enumerate(AWQ_ORDER):
            words[:, word] |= values[:, 8 * word + column].astype(np.uint32) << np.uint32(4 * place)
    return words.view(np.int32)


def awq_parts(matrix: Matrix) -> dict[str, np.ndarray]:
    return {
        "qweight": awq_words(matrix.integers.T),
        "qzeros": awq_words(matrix.zeros),
        "scales": matrix.scales,
    }


@dataclass
class Quantised:
    """What was written: the folder, its matrices by name, and the float values of every tensor."""

    folder: Path
    sizes: Sizes
    tokens: list[str]
    matrices: dict[str, Matrix] = field(default_factory=dict)
    tensors: dict[str, np.ndarray] = field(default_factory=dict)


def write_quantised(
    folder: Path,
    method: str = "gptq",
    *,
    bits: int = 4,
    group: int = 32,
    sym: bool = True,
    act_order: bool = False,
    version: str = "gptq",
    layers: int = 2,
    seed: int = 0,
    change: dict[str, Any] | None = None,
) -> Quantised:
    """Write a Llama whose layers' matrices are quantised; embedding and norms are float32.

    Args:
      folder: To write.
      method: `gptq` or `awq`.
      bits: Of a weight.
      group: Columns that share a scale; -1 for whole rows.
      sym: Whether zero points are all in the middle.
      act_order: Whether columns of a group stand apart.
      version: Of the container: `gptq`, `gptq_v2`, `gemm`.
      layers: Of the model.
      seed: Of the weights.
      change: Of `quantization_config`, by key; None leaves a key out.
    """
    rng, sizes = np.random.default_rng(seed), Sizes(layers=layers)
    folder.mkdir(parents=True, exist_ok=True)
    tiny: Tiny = write_tiny(folder / "float.gguf", sizes, seed=seed)
    (folder / "float.gguf").unlink()
    out = Quantised(folder, sizes, tiny.tokens, tensors=dict(tiny.tensors))
    parts: dict[str, np.ndarray] = dict(tiny.tensors)
    for layer in range(layers):
        for shared in INPUTS.values():
            columns = tiny.tensors[f"model.layers.{layer}.{shared[0]}.weight"].shape[1]
            order = rng.permutation(columns) if act_order else None
            for name in shared:
                stem = f"model.layers.{layer}.{name}"
                shape = parts.pop(f"{stem}.weight").shape
                one = random_matrix(rng, *shape, bits=bits, group=group, sym=sym, order=order)
                out.matrices[stem], out.tensors[f"{stem}.weight"] = one, one.floats()
                stored = awq_parts(one) if method == "awq" else gptq_parts(one, bits, less_one=version == "gptq")
                parts |= {f"{stem}.{part}": values for part, values in stored.items()}
    quantised: dict[str, Any] = {"quant_method": method, "bits": bits, "group_size": group}
    if method == "awq":
        quantised |= {"version": version, "zero_point": True, "modules_to_not_convert": None}
    else:
        quantised |= {"sym": sym, "desc_act": act_order, "checkpoint_format": version, "damp_percent": 0.01}
    quantised = {key: value for key, value in (quantised | (change or {})).items() if value is not None}
    write_llama(folder, tiny, change={"quantization_config": quantised})
    save_file({name: np.ascontiguousarray(values) for name, values in parts.items()}, folder / "model.safetensors")
    return out


def rewrite(folder: Path, tensors: dict[str, np.ndarray | None]) -> None:
    """Put tensors in place of those of the same name; None takes one out."""
    kept = load_file(folder / "model.safetensors") | tensors
    save_file({name: values for name, values in kept.items() if values is not None}, folder / "model.safetensors")


def reconfigure(folder: Path, change: dict[str, Any]) -> None:
    """Change keys of `quantization_config`."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= change
    path.write_text(json.dumps(config))
