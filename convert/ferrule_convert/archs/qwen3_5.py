"""Qwen3.5's text model: three gated delta-net layers (Yang et al. 2024), then one of gated full attention, and again.

Norms store their weight less one. Attention's queries come with a gate of the same size, head by head, and only a
quarter of each head is turned; for text the three position axes of its rotary embedding are one.
"""

from __future__ import annotations

import numpy as np

from ..checkpoint import Checkpoint
from ..graph import GLU, CausalConv, Decay, DeltaNet, Graph, Linear, RMSNorm, Sigmoid, Slice
from ._blocks import Builder, constant, each, take

__all__ = ["build"]

# Of the L2 norm of queries and keys in the delta rule.
_L2_EPSILON = 1e-6
# Value heads that share a key head: 1 to 4 in releases. Keys are repeated, so more would outgrow the file.
_MOST_SHARED = 64


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
    # Asked for first: what does not have these sizes is refused before anything of them is made.
    released_qkv = b.weight(f"{theirs}.in_proj_qkv.weight", f"{mine}.qkv", released, hidden)
    filters = b.weight(f"{theirs}.conv1d.weight", f"{mine}.conv", released, 1, kernel)
    # A key head that serves several value heads is repeated, in the projection's rows and in the kernel's.
    keys = np.arange(key_heads * key).reshape(key_heads, key).repeat(heads // key_heads, axis=0).ravel()
    values = np.arange(heads * value)
    index = np.concatenate([keys, keys + key_heads * key, values + 2 * key_heads * key])
    mixed = b.add(Linear(f"{mine}.qkv", x, take(released_qkv, index, f"{mine}.qkv")))
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
