"""GGUF files: headers, and tensor rows dequantised by the `gguf` library when they are asked for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from ferrule_runtime.errors import CheckpointError
from ferrule_runtime.registry import load_module, module_names

from . import gguf_blocks, gguf_config, gguf_header
from .checkpoint import Checkpoint, finite
from .gguf_header import GgufHeader, GgufTensor
from .gguf_names import GgufNames
from .gguf_tokenizer import tokenizer_json
from .graph import Integers, Weight
from .schemes import Packed
from .values import is_token, printable

__all__ = ["read"]

# One factor for each pair of a head's features, by which its frequency is divided (llama.cpp's converter for Llama 3).
_ROPE_FACTORS = "rope_freqs.weight"
_MTP = "mtp_num_hidden_layers"

_CONFIG = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "context_length": "max_position_embeddings",
}
_NUMBERS = {"attention.layer_norm_rms_epsilon": "rms_norm_eps", "rope.freq_base": "rope_theta"}


def _weight(name: str, tensor: GgufTensor, order: NDArray[np.int64] | None, path: Path) -> Weight:
    kind, shape = tensor.tensor_type, tuple(reversed(tensor.shape))
    if GGML_QUANT_SIZES[kind][0] > 1 and len(shape) != 2:
        raise CheckpointError(
            f"{path}: `{tensor.name}` is stored as {kind.name}, but is no matrix", hint="use another file"
        )

    def blocks(start: int, stop: int) -> NDArray[Any]:
        stored = tensor.data
        return np.ascontiguousarray(stored[start:stop] if order is None else stored[order[start:stop]])

    def rows(start: int, stop: int) -> NDArray[np.float32]:
        # A copy, so that no view keeps pages of the file alive.
        values = np.array(dequantize(blocks(start, stop), kind), dtype=np.float32)
        return finite(values.reshape(stop - start, *shape[1:]), name, start, path)

    if kind.name not in gguf_blocks.INTEGERS:
        return Weight(name, shape, rows, kind.name, lost=gguf_blocks.lost(kind.name))
    scheme, packed_from = gguf_blocks.INTEGERS[kind.name]

    def packed(start: int, stop: int) -> Packed:
        read = packed_from(blocks(start, stop))
        finite(read.scales, name, start, path, "scales")
        return read

    return Weight(name, shape, Integers(scheme, packed), kind.name)


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


def _tensors(
    header: GgufHeader, config: Mapping[str, Any], names: GgufNames, path: Path
) -> tuple[dict[str, Weight], list[str]]:
    """Return the tensors under a release's names, and what is to be said."""
    result: dict[str, Weight] = {}
    layers, skipped = config["num_hidden_layers"], 0
    for tensor in header.tensors:
        if tensor.name == _ROPE_FACTORS:
            continue  # a part of the configuration
        layer, _ = names.place(tensor.name)
        if layer is not None and layers <= layer < layers + config[_MTP]:
            skipped += 1
            continue
        name = names.theirs(tensor.name)
        if name is None or (layer is not None and layer >= layers):
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
        part = name.removeprefix("model.").removeprefix(f"layers.{layer}.")
        order = names.order(part, tensor.shape[-1], config)
        result[name] = names.restore(part, _weight(name, tensor, order, path), config)
    return result, [f"{skipped} tensors of the multi-token prediction head left out"] if skipped else []


def _token(meta: Mapping[str, Any], key: str, vocabulary: int, path: Path) -> int | None:
    value = meta.get(f"tokenizer.ggml.{key}_token_id")
    if value is not None and not is_token(value, vocabulary):
        raise CheckpointError(f"{path}: `tokenizer.ggml.{key}_token_id` is {printable(value)} of {vocabulary} tokens")
    return value


def _text(meta: Mapping[str, Any], key: str, path: Path) -> str | None:
    found = meta.get(key)
    if found is not None and not isinstance(found, str):
        raise CheckpointError(f"{path}: `{key}` is {printable(found)}", hint="fetch the file again")
    return found


def _factors(tensor: GgufTensor, path: Path) -> tuple[float, ...]:
    kind = tensor.tensor_type
    if kind != GGMLQuantizationType.F32:
        raise CheckpointError(f"{path}: `{tensor.name}` is stored as {kind.name}, not as F32", hint="use another file")
    return tuple(dequantize(np.ascontiguousarray(tensor.data), kind).ravel().tolist())


def _config(
    meta: Mapping[str, Any], family: GgufNames, tensors: Mapping[str, GgufTensor], path: Path
) -> dict[str, Any]:
    values = gguf_config.Metadata(meta, family.architecture, path)
    config: dict[str, Any] = {"model_type": family.model_type}
    config |= {ours: values.whole(key) for key, ours in _CONFIG.items()}
    config |= {ours: values.number(key) for key, ours in _NUMBERS.items()}
    # Layers that predict tokens after the next stand behind the others, and are counted with them.
    config[_MTP] = values.whole("nextn_predict_layers", 0, least=0)
    config["num_hidden_layers"] -= config[_MTP]
    if not 0 < config["num_hidden_layers"] <= len(tensors):
        raise values.error("block_count")
    heads = config["num_attention_heads"]
    config["head_dim"] = values.whole("attention.key_length", config["hidden_size"] // heads)
    config["tie_word_embeddings"] = "output.weight" not in tensors
    tokens = meta.get("tokenizer.ggml.tokens")
    config["vocab_size"] = len(tokens) if isinstance(tokens, list) else 0
    factors = tensors.get(_ROPE_FACTORS)
    config |= gguf_config.rope(values, config["head_dim"], _factors(factors, path) if factors else None)
    return {**config, **family.config(values, config)}


def read(path: Path) -> Checkpoint:
    """Open a GGUF file; only its headers and tokenizer are read.

    Raises:
      CheckpointError: Wrong magic or version, truncated, unknown architecture or tensor type, or a part is missing.
    """
    header = gguf_header.read(path)
    meta = header.metadata
    family = _family(meta.get("general.architecture"), path)
    config = _config(meta, family, {tensor.name: tensor for tensor in header.tensors}, path)
    tensors, notes = _tensors(header, config, family, path)
    text, vocabulary = tokenizer_json(meta, path), config["vocab_size"]
    ids = {key: _token(meta, key, vocabulary, path) for key in ("bos", "eos", "eot", "eom")}
    # Templates get the tokenizer's tokens.
    config |= {f"{key}_token_id": ids[key] for key in ("bos", "eos")}
    stops = {ids[key] for key in ("eos", "eot", "eom")} - {None}
    template, first = _text(meta, "tokenizer.chat_template", path), ids["bos"]
    if meta.get("tokenizer.ggml.add_bos_token") and template and first is not None:
        begin = meta["tokenizer.ggml.tokens"][first]
        if "bos_token" not in template and begin not in template:
            notes.append(f"its tokenizer would begin a text with `{printable(begin)}`; its chat template does not")
    kinds = sorted({tensor.stored for tensor in tensors.values() if len(tensor.shape) > 1})
    return Checkpoint(
        name=printable(_text(meta, "general.name", path) or path.stem),
        path=path,
        config=config,
        tensors=tensors,
        tokenizer_json=text,
        template=template,
        stop_tokens=tuple(sorted(stop for stop in stops if stop is not None)),
        licence=_text(meta, "general.license", path),
        stored=f"GGUF {'/'.join(kinds)}",
        notes=tuple(notes),
    )
