"""A writer of GGUF files as llama.cpp's converter makes them of Qwen3.5 and Gemma 3, by plain numpy."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from checkpoints import CONTROL, MERGES, TEMPLATE, vocabulary
from gguf import GGMLQuantizationType as Kind

_WRITERS = {bool: "bool", str: "string", int: "uint32", float: "float32", list: "array"}
# gguf-py's TokenType.
NORMAL, CONTROL_TYPE, UNUSED = 1, 3, 5


def tokenizer_meta(size: int, pre: str = "qwen2") -> dict[str, Any]:
    """Metadata of the small byte-level tokenizer, filled up to a size as llama.cpp's converter fills it."""
    tokens = vocabulary()
    types = [CONTROL_TYPE if token in CONTROL else NORMAL for token in tokens]
    padding = [f"[PAD{i}]" for i in range(len(tokens), size)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens + padding,
        "tokenizer.ggml.token_type": types + [UNUSED] * len(padding),
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": TEMPLATE,
    }


def write_gguf(
    path: Path,
    architecture: str,
    meta: dict[str, Any],
    tensors: dict[str, np.ndarray],
    kind: Kind = Kind.F32,
    raw: dict[str, np.ndarray] | None = None,
) -> None:
    """Write a file.

    Args:
      path: To write.
      architecture: `general.architecture`.
      meta: By key; a value of None is left out.
      tensors: Matrices are stored as the kind, everything else as float32.
      kind: How matrices are stored.
      raw: Matrices that are blocks of the kind already, [rows, bytes].
    """
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in meta.items():
        if value is not None:
            getattr(writer, f"add_{_WRITERS[type(value)]}")(key, value)
    for name, values in tensors.items():
        of = kind if values.ndim == 2 and "conv1d" not in name else Kind.F32
        writer.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(values), of), raw_dtype=of)
    for name, blocks in (raw or {}).items():
        writer.add_tensor(name, blocks, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _named(tensors: dict[str, np.ndarray], names: dict[str, str]) -> dict[str, np.ndarray]:
    """Call tensors of a release as llama.cpp does: by the part behind `model.layers.N.`, or by the whole name."""
    found = {}
    for name, values in tensors.items():
        parts = name.split(".", 3)
        whole = f"blk.{parts[2]}.{names[parts[3]]}" if parts[1] == "layers" else names[name]
        found[whole] = values
    return found


_SHARED = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
_LAYER = {
    "input_layernorm.weight": "attn_norm.weight", "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight", "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight", "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight", "post_attention_layernorm.weight": "post_attention_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight", "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}  # fmt: skip
_GEMMA = {
    "pre_feedforward_layernorm.weight": "ffn_norm.weight", "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
}  # fmt: skip
_DELTA = {
    "linear_attn.in_proj_qkv.weight": "attn_qkv.weight", "linear_attn.in_proj_z.weight": "attn_gate.weight",
    "linear_attn.in_proj_a.weight": "ssm_alpha.weight", "linear_attn.in_proj_b.weight": "ssm_beta.weight",
    "linear_attn.conv1d.weight": "ssm_conv1d.weight", "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias", "linear_attn.norm.weight": "ssm_norm.weight",
    "linear_attn.out_proj.weight": "ssm_out.weight",
}  # fmt: skip


def _common(architecture: str, c: dict[str, Any]) -> dict[str, Any]:
    keys = {
        "block_count": "num_hidden_layers", "context_length": "max_position_embeddings",
        "embedding_length": "hidden_size", "feed_forward_length": "intermediate_size",
        "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
        "attention.key_length": "head_dim", "attention.value_length": "head_dim",
        "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    }  # fmt: skip
    return {f"{architecture}.{theirs}": c[ours] for theirs, ours in keys.items()}


def write_gemma3(
    path: Path,
    c: dict[str, Any],
    tensors: dict[str, np.ndarray],
    *,
    kind: Kind = Kind.F32,
    whole: dict[str, Any] | None = None,
    **more: Any,
) -> None:
    """Write a Gemma 3 as llama.cpp's conversion/gemma.py does: every norm is stored plus one.

    Args:
      path: To write.
      c: Configuration.
      tensors: By the release's names.
      kind: How matrices are stored.
      whole: Metadata of the tokenizer; None takes the small byte-level one.
      more: Metadata of the architecture.
    """
    stored = {name: values + np.float32(1 if "norm" in name else 0) for name, values in tensors.items()}
    meta = _common("gemma3", c) | {
        "gemma3.rope.freq_base": c["rope_theta"],
        "gemma3.rope.freq_base_swa": c["rope_local_base_freq"],
        "gemma3.attention.sliding_window": c["sliding_window"],
    }
    meta |= (whole or tokenizer_meta(c["vocab_size"])) | {f"gemma3.{key}": value for key, value in more.items()}
    write_gguf(path, "gemma3", meta, _named(stored, _SHARED | _LAYER | _GEMMA), kind)


def _tiled(values: np.ndarray, keys: int, heads: int) -> np.ndarray:
    """Put the first value head of every key head first, then the second, along the first axis."""
    grouped = values.reshape(keys, heads // keys, -1, *values.shape[1:])
    return np.ascontiguousarray(grouped.swapaxes(0, 1)).reshape(values.shape)


def write_qwen35(
    path: Path, c: dict[str, Any], tensors: dict[str, np.ndarray], *, kind: Kind = Kind.F32, **more: Any
) -> None:
    """Write a Qwen3.5 as llama.cpp's conversion/qwen.py does.

    Norms plus one but the delta net's own, decay rates as -exp(A_log), the kernel without its middle axis, and value
    heads in another order.
    """
    keys, heads = c["linear_num_key_heads"], c["linear_num_value_heads"]
    before = 2 * keys * c["linear_key_head_dim"]
    stored = {}
    for name, values in tensors.items():
        if name.endswith(("in_proj_z.weight", "in_proj_a.weight", "in_proj_b.weight", "dt_bias")):
            values = _tiled(values, keys, heads)
        elif name.endswith("A_log"):
            values = -np.exp(_tiled(values, keys, heads))
        elif name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
            values = values.squeeze()
            values = np.concatenate([values[:before], _tiled(values[before:], keys, heads)])
        elif name.endswith("out_proj.weight"):
            values = _tiled(values.T, keys, heads).T
        elif name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
            values = values + np.float32(1)
        stored[name] = values
    rope = c["rope_parameters"]
    meta = _common("qwen35", c) | {
        "qwen35.rope.freq_base": rope["rope_theta"],
        "qwen35.rope.dimension_count": int(c["head_dim"] * rope["partial_rotary_factor"]),
        "qwen35.rope.dimension_sections": [*rope["mrope_section"], 0],
        "qwen35.ssm.conv_kernel": c["linear_conv_kernel_dim"],
        "qwen35.ssm.state_size": c["linear_key_head_dim"],
        "qwen35.ssm.group_count": keys,
        "qwen35.ssm.time_step_rank": heads,
        "qwen35.ssm.inner_size": heads * c["linear_value_head_dim"],
        "qwen35.full_attention_interval": 4,
    }
    meta |= tokenizer_meta(c["vocab_size"]) | {f"qwen35.{key}": value for key, value in more.items()}
    write_gguf(path, "qwen35", meta, _named(stored, _SHARED | _LAYER | _DELTA), kind)
