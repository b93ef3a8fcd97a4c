"""GGUF files: headers, and tensor rows dequantised by the `gguf` library when they are asked for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf.quants import dequantize
from numpy.typing import NDArray

from ferrule_runtime.errors import CheckpointError
from ferrule_runtime.registry import load_module, module_names

from . import gguf_header
from .checkpoint import Checkpoint, finite
from .gguf_header import GgufHeader, GgufTensor
from .gguf_names import GgufNames
from .gguf_tokenizer import tokenizer_json
from .graph import Weight
from .hf_chat import token_ids
from .values import printable, size

__all__ = ["read"]

_CONFIG = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "context_length": "max_position_embeddings",
}


def _half_split(heads: int, rows: int) -> NDArray[np.int64]:
    """Return where each row of a Hugging Face q or k matrix stands in llama.cpp's.

    llama.cpp stores the two halves of a head interleaved (convert_hf_to_gguf.py, `permute`); this undoes it.
    """
    size = rows // heads
    return np.arange(rows).reshape(heads, size // 2, 2).swapaxes(1, 2).reshape(rows)


def _weight(name: str, tensor: GgufTensor, order: NDArray[np.int64] | None, path: Path) -> Weight:
    kind = tensor.tensor_type
    shape = tuple(reversed(tensor.shape))

    def rows(start: int, stop: int) -> NDArray[np.float32]:
        stored = tensor.data
        block = stored[start:stop] if order is None else stored[order[start:stop]]
        # A copy, so that no view keeps pages of the file alive.
        values = np.array(dequantize(np.ascontiguousarray(block), kind), dtype=np.float32)
        return finite(values.reshape(stop - start, *shape[1:]), name, start, path)

    return Weight(name, shape, rows, kind.name)


def _family(architecture: object, path: Path) -> GgufNames:
    """Return the names of the family that llama.cpp calls so."""
    known = {}
    for family in module_names("ferrule_convert.archs"):
        names = getattr(load_module("model family", "ferrule_convert.archs", family), "GGUF", None)
        if isinstance(names, GgufNames):
            known[names.architecture] = names
    if not isinstance(architecture, str) or architecture not in known:
        raise CheckpointError(
            f"{path}: architecture `{printable(architecture)}` is not known", hint=f"known: {', '.join(sorted(known))}"
        )
    return known[architecture]


def _tensors(header: GgufHeader, config: Mapping[str, Any], names: GgufNames, path: Path) -> dict[str, Weight]:
    result: dict[str, Weight] = {}
    for tensor in header.tensors:
        name = names.theirs(tensor.name)
        if name is None:
            raise CheckpointError(
                f"{path}: tensor `{printable(tensor.name)}` is not one that a {config['model_type']} model has",
                hint="reading it without that tensor would give another model",
            )
        kind = tensor.tensor_type
        try:
            dequantize(np.zeros(0, dtype=np.uint8), kind)
        except NotImplementedError:
            raise CheckpointError(
                f"{path}: `{tensor.name}` is stored as {kind.name}, which cannot be read", hint="use another file"
            ) from None
        except ValueError:
            pass  # an empty array has no whole block; the type itself is known
        order = None
        if heads := names.interleaved_heads(name):
            if len(tensor.shape) != 2 or tensor.shape[1] % (2 * config[heads]):
                raise CheckpointError(
                    f"{path}: `{tensor.name}` is {tensor.shape}, its configuration says {config[heads]} heads",
                    hint="weights and configuration are of different models",
                )
            order = _half_split(config[heads], tensor.shape[-1])
        result[name] = _weight(name, tensor, order, path)
    return result


def _config(meta: Mapping[str, Any], family: GgufNames, names: Iterable[str], path: Path) -> dict[str, Any]:
    architecture = family.architecture
    config: dict[str, Any] = {"model_type": family.model_type}
    for key, ours in _CONFIG.items():
        value = meta.get(f"{architecture}.{key}")
        if value is None:
            raise CheckpointError(f"{path}: no `{architecture}.{key}` in its metadata", hint="fetch the file again")
        config[ours] = value
    where = str(path)
    heads = size(config, "num_attention_heads", where)
    size(config, "num_key_value_heads", where)
    each = meta.get(f"{architecture}.attention.key_length")
    config["head_dim"] = size(config, "hidden_size", where) // heads if each is None else each
    config["tie_word_embeddings"] = "output.weight" not in names
    tokens = meta.get("tokenizer.ggml.tokens")
    config["vocab_size"] = len(tokens) if isinstance(tokens, list) else 0
    scaling = meta.get(f"{architecture}.rope.scaling.type", "none")
    if scaling != "none" or "rope_freqs.weight" in names:
        raise CheckpointError(
            f"{path}: its rotary embedding is scaled ({printable(scaling)})", hint="not supported by this reader"
        )
    return config


def _text(meta: Mapping[str, Any], key: str, path: Path) -> str | None:
    found = meta.get(key)
    if found is not None and not isinstance(found, str):
        raise CheckpointError(f"{path}: `{key}` is {printable(found)}", hint="fetch the file again")
    return found


def read(path: Path) -> Checkpoint:
    """Open a GGUF file; only its headers and tokenizer are read.

    Raises:
      CheckpointError: Wrong magic or version, truncated, unknown architecture or tensor type, or a part is missing.
    """
    header = gguf_header.read(path)
    meta = header.metadata
    family = _family(meta.get("general.architecture"), path)
    config = _config(meta, family, {tensor.name for tensor in header.tensors}, path)
    tensors = _tensors(header, config, family, path)
    stops = [meta.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    template, licence = (_text(meta, key, path) for key in ("tokenizer.chat_template", "general.license"))
    kinds = sorted({tensor.stored for tensor in tensors.values() if len(tensor.shape) > 1})
    return Checkpoint(
        name=printable(_text(meta, "general.name", path) or path.stem),
        path=path,
        config=config,
        tensors=tensors,
        tokenizer_json=tokenizer_json(meta, path),
        template=template,
        stop_tokens=token_ids([stop for stop in stops if stop is not None], str(path), config["vocab_size"]),
        licence=licence,
        stored=f"GGUF {'/'.join(kinds)}",
    )
