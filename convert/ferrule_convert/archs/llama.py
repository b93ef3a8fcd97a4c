"""Llama (Touvron et al. 2023) and its kin, SmolLM2 among them: RMSNorm, rotary grouped-query attention, SwiGLU."""

from __future__ import annotations

from dataclasses import replace

from ..checkpoint import Checkpoint
from ..gguf_names import GgufNames
from ..graph import GLU, INPUT, Add, Attention, Graph, Linear, Node, RMSNorm, Rope, RopeTable, Weight

__all__ = ["GGUF", "build"]

GGUF = GgufNames(
    architecture="llama",
    model_type="llama",
    layer={
        "attn_norm.weight": "input_layernorm.weight",
        "ffn_norm.weight": "post_attention_layernorm.weight",
        "attn_q.weight": "self_attn.q_proj.weight",
        "attn_k.weight": "self_attn.k_proj.weight",
        "attn_v.weight": "self_attn.v_proj.weight",
        "attn_output.weight": "self_attn.o_proj.weight",
        "ffn_gate.weight": "mlp.gate_proj.weight",
        "ffn_up.weight": "mlp.up_proj.weight",
        "ffn_down.weight": "mlp.down_proj.weight",
    },
    interleaved={
        "self_attn.q_proj.weight": "num_attention_heads",
        "self_attn.k_proj.weight": "num_key_value_heads",
    },
)


def build(checkpoint: Checkpoint) -> Graph:
    """Build the graph of a Llama checkpoint.

    Raises:
      CheckpointError: A tensor is missing or of another shape.
    """
    c = checkpoint.config
    hidden, inner, layers = c["hidden_size"], c["intermediate_size"], c["num_hidden_layers"]
    heads, kv_heads, size = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
    table = RopeTable(tuple(float(c["rope_theta"]) ** (-2 * pair / size) for pair in range(size // 2)))

    def weight(theirs: str, ours: str, *shape: int) -> Weight:
        return replace(checkpoint.tensor(f"model.{theirs}.weight", shape), name=ours)

    nodes: list[Node] = []

    def add(node: Node) -> str:
        nodes.append(node)
        return node.name

    x = INPUT
    for i in range(layers):
        at, their = f"layers.{i}", f"layers.{i}"

        def linear(name: str, source: str, theirs: str, rows: int, columns: int, at: str = at, p: str = their) -> str:
            return add(Linear(f"{at}.{name}", source, weight(f"{p}.{theirs}", f"{at}.{name}", rows, columns)))

        def norm(name: str, source: str, theirs: str, at: str = at, p: str = their) -> str:
            scale = weight(f"{p}.{theirs}", f"{at}.{name}", hidden)
            return add(RMSNorm(f"{at}.{name}", source, scale, c["rms_norm_eps"]))

        y = norm("attention.norm", x, "input_layernorm")
        q = linear("attention.q", y, "self_attn.q_proj", heads * size, hidden)
        k = linear("attention.k", y, "self_attn.k_proj", kv_heads * size, hidden)
        v = linear("attention.v", y, "self_attn.v_proj", kv_heads * size, hidden)
        q = add(Rope(f"{at}.attention.q_turned", q, heads, table))
        k = add(Rope(f"{at}.attention.k_turned", k, kv_heads, table))
        y = add(Attention(f"{at}.attention", q, k, v, heads, kv_heads, size, size**-0.5))
        y = linear("attention.out", y, "self_attn.o_proj", hidden, heads * size)
        x = add(Add(f"{at}.attention.sum", x, y))

        y = norm("mlp.norm", x, "post_attention_layernorm")
        gate = linear("mlp.gate", y, "mlp.gate_proj", inner, hidden)
        up = linear("mlp.up", y, "mlp.up_proj", inner, hidden)
        y = add(GLU(f"{at}.mlp.gated", gate, up))
        y = linear("mlp.down", y, "mlp.down_proj", hidden, inner)
        x = add(Add(f"{at}.mlp.sum", x, y))

    add(RMSNorm("norm", x, weight("norm", "norm", hidden), c["rms_norm_eps"]))
    embedding = weight("embed_tokens", "embedding", c["vocab_size"], hidden)
    tied = c["tie_word_embeddings"]
    head = embedding if tied else replace(checkpoint.tensor("lm_head.weight", (c["vocab_size"], hidden)), name="head")
    facts = {"layers": layers, "hidden": hidden, "intermediate": inner, "heads": heads, "kv_heads": kv_heads}
    facts |= {"head_dim": size, "vocabulary": c["vocab_size"]}
    return Graph("llama", tuple(nodes), embedding, head, hidden, c["max_position_embeddings"], facts)
