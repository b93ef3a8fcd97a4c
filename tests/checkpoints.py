"""A writer of small random Llama checkpoints in GGUF, with a real byte-level tokenizer: for tests of the whole way."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from tokenizers import pre_tokenizers

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ġ t", "h e", "Ġt he", "i n", "o n", "Ġ a", "r e", "Ġ o", "on g"]
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


_GGUF_TYPES = {str: "string", int: "uint32", float: "float32", list: "array"}


@dataclass(frozen=True)
class Sizes:
    layers: int = 2
    hidden: int = 64
    inner: int = 128
    heads: int = 4
    kv_heads: int = 2
    context: int = 2048
    tied: bool = True

    @property
    def head_size(self) -> int:
        return self.hidden // self.heads


@dataclass
class Tiny:
    """What was written: the file, and every tensor in Hugging Face's names and layout, as the file stores it."""

    path: Path
    sizes: Sizes
    tokens: list[str]
    tensors: dict[str, np.ndarray] = field(default_factory=dict)


def vocabulary() -> list[str]:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return CONTROL + alphabet + [merge.replace(" ", "") for merge in MERGES]


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """Hugging Face's q or k rows as llama.cpp's converter stores them."""
    return rows.reshape(heads, 2, -1, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)


def write_tiny(
    path: Path,
    sizes: Sizes = Sizes(),
    *,
    kind: Kind = Kind.F32,
    seed: int = 0,
    leave_out: str = "",
    change: dict[str, Any] | None = None,
    poison: str = "",
    more: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
) -> Tiny:
    """Write a checkpoint.

    Args:
      path: The file to write.
      sizes: Of the model.
      kind: How matrices are stored.
      seed: Of the weights.
      leave_out: A tensor (GGUF name) or metadata key that will be missing.
      change: Metadata to write otherwise, by key.
      poison: A tensor (GGUF name) that will hold a NaN.
      more: Metadata beside the usual, by key: texts, whole numbers, floats or lists.
      tensors: Tensors beside the usual, by GGUF name.
    """
    s, rng = sizes, np.random.default_rng(seed)
    tokens = vocabulary()
    out = Tiny(path, s, tokens)
    writer = gguf.GGUFWriter(path, (change or {}).get("general.architecture", "llama"))
    meta: dict[str, tuple[str, Any]] = {
        "general.name": ("string", "Tiny Llama"),
        "general.license": ("string", "apache-2.0"),
        "llama.block_count": ("uint32", s.layers),
        "llama.context_length": ("uint32", s.context),
        "llama.embedding_length": ("uint32", s.hidden),
        "llama.feed_forward_length": ("uint32", s.inner),
        "llama.attention.head_count": ("uint32", s.heads),
        "llama.attention.head_count_kv": ("uint32", s.kv_heads),
        "llama.attention.layer_norm_rms_epsilon": ("float32", 1e-5),
        "llama.rope.freq_base": ("float32", 10000.0),
        "tokenizer.ggml.model": ("string", "gpt2"),
        "tokenizer.ggml.pre": ("string", "smollm"),
        "tokenizer.ggml.tokens": ("array", tokens),
        "tokenizer.ggml.token_type": ("array", [3 if t in CONTROL else 1 for t in tokens]),
        "tokenizer.ggml.merges": ("array", MERGES),
        "tokenizer.ggml.eos_token_id": ("uint32", 2),
        "tokenizer.chat_template": ("string", TEMPLATE),
    }
    for key, (type_, value) in meta.items():
        if key != leave_out:
            getattr(writer, f"add_{type_}")(key, (change or {}).get(key, value))
    for key, value in (more or {}).items():
        getattr(writer, f"add_{_GGUF_TYPES[type(value)]}")(key, value)
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, values)

    def add(theirs: str, ours: str, shape: tuple[int, ...], heads: int = 0) -> None:
        norm = len(shape) == 1
        scale = 0.1 if norm else shape[-1] ** -0.5 * 2
        values = (rng.standard_normal(shape) * scale + (1.0 if norm else 0.0)).astype(np.float32)
        if theirs == poison:
            values.flat[7] = np.nan
        stored_kind = Kind.F32 if norm else kind
        packed = interleave(values, heads) if heads else values
        data = gguf.quants.quantize(packed, stored_kind)
        back = gguf.quants.dequantize(data, stored_kind).reshape(shape)
        if heads:
            back = back.reshape(heads, -1, 2, shape[-1]).swapaxes(1, 2).reshape(shape)
        out.tensors[ours] = np.array(back, dtype=np.float32)
        if theirs != leave_out:
            writer.add_tensor(theirs, data, raw_dtype=stored_kind)

    add("token_embd.weight", "model.embed_tokens.weight", (len(tokens), s.hidden))
    for i in range(s.layers):
        at, hf = f"blk.{i}", f"model.layers.{i}"
        kv = s.kv_heads * s.head_size
        add(f"{at}.attn_norm.weight", f"{hf}.input_layernorm.weight", (s.hidden,))
        add(f"{at}.attn_q.weight", f"{hf}.self_attn.q_proj.weight", (s.hidden, s.hidden), s.heads)
        add(f"{at}.attn_k.weight", f"{hf}.self_attn.k_proj.weight", (kv, s.hidden), s.kv_heads)
        add(f"{at}.attn_v.weight", f"{hf}.self_attn.v_proj.weight", (kv, s.hidden))
        add(f"{at}.attn_output.weight", f"{hf}.self_attn.o_proj.weight", (s.hidden, s.hidden))
        add(f"{at}.ffn_norm.weight", f"{hf}.post_attention_layernorm.weight", (s.hidden,))
        add(f"{at}.ffn_gate.weight", f"{hf}.mlp.gate_proj.weight", (s.inner, s.hidden))
        add(f"{at}.ffn_up.weight", f"{hf}.mlp.up_proj.weight", (s.inner, s.hidden))
        add(f"{at}.ffn_down.weight", f"{hf}.mlp.down_proj.weight", (s.hidden, s.inner))
    add("output_norm.weight", "model.norm.weight", (s.hidden,))
    if not s.tied:
        add("output.weight", "lm_head.weight", (len(tokens), s.hidden))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def oracle(
    tensors: dict[str, np.ndarray], *, vocabulary: int, sizes: Sizes, theta: float, epsilon: float, **rope: Any
) -> Any:
    """Build transformers' own Llama over the same weights, in float32."""
    torch = __import__("torch")
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=sizes.hidden, intermediate_size=sizes.inner,
        num_hidden_layers=sizes.layers, num_attention_heads=sizes.heads, num_key_value_heads=sizes.kv_heads,
        max_position_embeddings=sizes.context, rms_norm_eps=epsilon, tie_word_embeddings=sizes.tied,
        rope_parameters={"rope_type": "default", "rope_theta": theta, **rope}, attn_implementation="eager",
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    state = {name: torch.from_numpy(np.array(value)) for name, value in tensors.items()}
    if sizes.tied:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, strict=True)
    return model
