"""Qwen3.5's text model: three gated delta-net layers (Yang et al. 2024), then one of gated full attention, and again.

Norms store their weight less one. Attention's queries come with a gate of the same size, head by head, and only a
quarter of each head is turned; for text the three position axes of its rotary embedding are one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ferrule_runtime.errors import CheckpointError

from ..checkpoint import Checkpoint
from ..gguf_config import Metadata
from ..gguf_names import LAYER, GgufNames
from ..graph import GLU, CausalConv, Decay, DeltaNet, Graph, Linear, RMSNorm, Sigmoid, Slice, Weight
from ._blocks import Builder, constant, each, take

__all__ = ["GGUF", "build"]

Array = NDArray[np.float32]

# Of the L2 norm of queries and keys in the delta rule.
_L2_EPSILON = 1e-6
# Value heads that share a key head: 1 to 4 in releases. Keys are repeated, so more would outgrow the file.
_MOST_SHARED = 64

_NAMES = {
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "attn_qkv.weight": "linear_attn.in_proj_qkv.weight",
    "attn_gate.weight": "linear_attn.in_proj_z.weight",
    "ssm_alpha.weight": "linear_attn.in_proj_a.weight",
    "ssm_beta.weight": "linear_attn.in_proj_b.weight",
    "ssm_conv1d.weight": "linear_attn.conv1d.weight",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_norm.weight": "linear_attn.norm.weight",
    "ssm_out.weight": "linear_attn.out_proj.weight",
}
# Layers to the next of full attention where a file does not say (llama.cpp's src/models/qwen35.cpp).
_INTERVAL = 4


def _from_gguf(meta: Metadata, config: Mapping[str, Any]) -> Mapping[str, Any]:
    heads, inner, layers = meta.whole("ssm.time_step_rank"), meta.whole("ssm.inner_size"), config["num_hidden_layers"]
    if inner % heads:
        raise meta.error("ssm.inner_size")
    recurrent = meta.flags("attention.recurrent_layers", layers)
    if recurrent is None:
        every = meta.whole("full_attention_interval", _INTERVAL)
        recurrent = [(layer + 1) % every != 0 for layer in range(layers)]
    return {
        "linear_conv_kernel_dim": meta.whole("ssm.conv_kernel"),
        "linear_num_key_heads": meta.whole("ssm.group_count"),
        "linear_key_head_dim": meta.whole("ssm.state_size"),
        "linear_num_value_heads": heads,
        "linear_value_head_dim": inner // heads,
        "layer_types": ["linear_attention" if one else "full_attention" for one in recurrent],
    }


def _value_heads(config: Mapping[str, Any], size: int) -> NDArray[np.int64]:
    """Return where each of a release's value features stands in GGUF, with so many in a head.

    A release has the value heads of one key head behind one another; llama.cpp's converter puts the first of every key
    head first (conversion/qwen.py, `_reorder_v_heads`).
    """
    heads, keys = config["linear_num_value_heads"], config["linear_num_key_heads"]
    stands = np.arange(heads).reshape(heads // keys, keys).T.ravel()
    return (stands[:, None] * size + np.arange(size)).ravel()


def _order(name: str, rows: int, config: Mapping[str, Any]) -> NDArray[np.int64] | None:
    heads, keys = config["linear_num_value_heads"], config["linear_num_key_heads"]
    before = 2 * keys * config["linear_key_head_dim"]
    known = {"in_proj_qkv.weight": before, "conv1d.weight": before, "in_proj_z.weight": 0}
    known |= dict.fromkeys(("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias"), 0)
    start = known.get(name.removeprefix("linear_attn."))
    # What has another number of rows than its configuration says is refused when it is built.
    if start is None or rows <= start or (rows - start) % heads or heads % keys:
        return None
    return np.concatenate([np.arange(start), start + _value_heads(config, (rows - start) // heads)])


def _restored(name: str, weight: Weight, config: Mapping[str, Any]) -> Weight:
    """Undo what llama.cpp's converter does to values (conversion/qwen.py, Qwen3NextModel.modify_tensors)."""

    def logarithm(rows: Array) -> Array:
        if not (rows < 0).all():
            raise CheckpointError(f"`{weight.name}` holds rates that are not negative", hint="fetch the file again")
        return np.log(-rows)

    heads, keys = config["linear_num_value_heads"], config["linear_num_key_heads"]
    match name.removeprefix("linear_attn."):
        case "A_log":
            return each(weight, logarithm)
        case "conv1d.weight" if len(weight.shape) == 2:
            channels, kernel = weight.shape
            return replace(each(weight, lambda rows: rows[:, None]), shape=(channels, 1, kernel))
        case "out_proj.weight" if weight.shape[-1] % heads == 0 and heads % keys == 0:
            index = _value_heads(config, weight.shape[-1] // heads)
            return each(weight, lambda rows: rows[:, index])
        case part if part.endswith("norm.weight") and part == name:
            return each(weight, lambda rows: rows - np.float32(1))
        case _:
            return weight


GGUF = GgufNames(
    architecture="qwen35",
    model_type="qwen3_5",
    layer={theirs: ours for theirs, ours in LAYER.items() if theirs != "ffn_norm.weight"} | _NAMES,
    config=_from_gguf,
    order=_order,
    restore=_restored,
)


def _attention(b: Builder, at: str, x: str) -> str:
    (heads, kv_heads), size, hidden = b.heads(), b.size("head_dim"), b.size("hidden_size")
    both = b.weight(f"{at}.self_attn.q_proj.weight", f"{at}.attention.q", 2 * heads * size, hidden)
    rows = np.arange(2 * heads * size).reshape(heads, 2, size)
    q = b.add(Linear(f"{at}.attention.q", x, take(both, rows[:, 0].ravel(), f"{at}.attention.q")))
    gate = b.add(Linear(f"{at}.attention.gate", x, take(both, rows[:, 1].ravel(), f"{at}.attention.gate")))
    k = b.linear(f"{at}.attention.k", x, f"{at}.self_attn.k_proj", kv_heads * size, hidden)
    v = b.linear(f"{at}.attention.v", x, f"{at}.self_attn.v_proj", kv_heads * size, hidden)
    q = b.norm(f"{at}.attention.q_norm", q, f"{at}.self_attn.q_norm", size, heads=heads)
    k = b.norm(f"{at}.attention.k_norm", k, f"{at}.self_attn.k_norm", size, heads=kv_heads)
    y = b.add(GLU(f"{at}.attention.gated", gate, b.attend(at, q, k, v), "sigmoid"))
    return b.linear(f"{at}.attention.out", y, f"{at}.self_attn.o_proj", hidden, heads * size)


def _delta_net(b: Builder, at: str, x: str) -> str:
    hidden, kernel = b.size("hidden_size"), b.size("linear_conv_kernel_dim")
    heads = b.size("linear_num_value_heads")
    key_heads = b.size("linear_num_key_heads", divides="linear_num_value_heads")
    key, value = b.size("linear_key_head_dim"), b.size("linear_value_head_dim")
    if heads > _MOST_SHARED * key_heads:
        raise b.wrong(f"{heads} value heads share {key_heads} key heads")
    mine, theirs = f"{at}.delta", f"{at}.linear_attn"
    released = 2 * key_heads * key + heads * value
    both = b.weight(f"{theirs}.in_proj_qkv.weight", f"{mine}.qkv", released, hidden)
    # A key head that serves several value heads is repeated, in the projection's rows and in the kernel's.
    keys = np.arange(key_heads * key).reshape(key_heads, key).repeat(heads // key_heads, axis=0).ravel()
    values = np.arange(heads * value)
    index = np.concatenate([keys, keys + key_heads * key, values + 2 * key_heads * key])
    mixed = b.add(Linear(f"{mine}.qkv", x, take(both, index, f"{mine}.qkv")))
    filters = b.weight(f"{theirs}.conv1d.weight", f"{mine}.conv", released, 1, kernel)
    mixed = b.add(CausalConv(f"{mine}.conv", mixed, take(filters, index, f"{mine}.conv")))
    size = heads * key
    parts = [b.add(Slice(f"{mine}.{n}", mixed, i * size, (i + 1) * size)) for i, n in enumerate(("q_raw", "k_raw"))]
    v = b.add(Slice(f"{mine}.v", mixed, 2 * size, 2 * size + heads * value))
    unit = constant(f"{mine}.unit", np.full(key, key**-0.5, dtype=np.float32))
    q, k = (b.add(RMSNorm(f"{p}_unit", p, unit, _L2_EPSILON / key, heads)) for p in parts)
    beta = b.add(Sigmoid(f"{mine}.beta", b.linear(f"{mine}.b", x, f"{theirs}.in_proj_b", heads, hidden)))
    rate = each(b.weight(f"{theirs}.A_log", f"{mine}.rate", heads), lambda rows: -np.exp(rows))
    bias = b.weight(f"{theirs}.dt_bias", f"{mine}.bias", heads)
    decay = b.add(Decay(f"{mine}.decay", b.linear(f"{mine}.a", x, f"{theirs}.in_proj_a", heads, hidden), bias, rate))
    y = b.add(DeltaNet(mine, q, k, v, decay, beta, heads, key, value))
    z = b.linear(f"{mine}.z", x, f"{theirs}.in_proj_z", heads * value, hidden)
    weight = b.weight(f"{theirs}.norm.weight", f"{mine}.norm", value)
    y = b.add(RMSNorm(f"{mine}.norm", y, weight, b.number("rms_norm_eps"), heads))
    y = b.add(GLU(f"{mine}.gated", z, y))
    return b.linear(f"{mine}.out", y, f"{theirs}.out_proj", hidden, heads * value)


def build(checkpoint: Checkpoint) -> Graph:
    """Build the graph of a Qwen3.5 text model.

    Raises:
      CheckpointError: A tensor is missing or of another shape, or a layer is of an unknown kind.
    """
    b = Builder(checkpoint, zero_centred=True)
    mixers = {"linear_attention": _delta_net, "full_attention": _attention}
    kinds = b.layer_kinds(mixers)
    return b.decoder(lambda at, x, layer: mixers[kinds[layer]](b, at, x))
