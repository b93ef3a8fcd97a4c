"""A writer of small random Hugging Face folders, by plain numpy: config, safetensors, tokenizer."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import CONTROL, MERGES, TEMPLATE, Tiny, vocabulary
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

DTYPES: dict[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": None}


def store(values: np.ndarray, dtype: str) -> tuple[bytes, np.ndarray]:
    """Return the bytes of an array in a dtype, and the float32 that they stand for."""
    if dtype == "BF16":
        bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
        short = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        return short.tobytes(), (short.astype(np.uint32) << 16).view(np.float32).reshape(values.shape)
    narrow = values.astype(DTYPES[dtype])
    return narrow.tobytes(), narrow.astype(np.float32)


def write_safetensors(path: Path, tensors: dict[str, np.ndarray], dtype: str = "F32") -> dict[str, np.ndarray]:
    """Write a file; return what a reader must find."""
    header, blobs, found, at = {"__metadata__": {"format": "pt"}}, [], {}, 0
    for name, values in tensors.items():
        data, found[name] = store(values, dtype)
        header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": [at, at + len(data)]}
        blobs.append(data)
        at += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(blobs))
    return found


def write_weights(folder: Path, tensors: dict[str, np.ndarray], dtype: str, shards: int) -> dict[str, np.ndarray]:
    """Write one file, or several with an index; return what a reader must find."""
    if shards == 1:
        return write_safetensors(folder / "model.safetensors", tensors, dtype)
    found: dict[str, np.ndarray] = {}
    placed = {name: f"model-{i % shards:05d}.safetensors" for i, name in enumerate(tensors)}
    for shard in sorted(set(placed.values())):
        part = {name: values for name, values in tensors.items() if placed[name] == shard}
        found |= write_safetensors(folder / shard, part, dtype)
    index = {"metadata": {}, "weight_map": placed}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return found


def write_llama(
    folder: Path, tiny: Tiny, *, dtype: str = "F32", shards: int = 1, change: dict[str, Any] | None = None
) -> dict[str, np.ndarray]:
    """Write the weights of a small Llama as a folder; return its tensors as stored.

    Args:
      folder: To write.
      tiny: Its sizes and weights.
      dtype: How they are stored.
      shards: Files of weights.
      change: Configuration to write otherwise, by key; None leaves a key out.
    """
    folder.mkdir(parents=True, exist_ok=True)
    s = tiny.sizes
    config: dict[str, Any] = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": s.hidden,
        "intermediate_size": s.inner, "num_hidden_layers": s.layers, "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv_heads, "max_position_embeddings": s.context, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "tie_word_embeddings": s.tied, "vocab_size": len(tiny.tokens), "eos_token_id": 2,
    }  # fmt: skip
    config = {key: value for key, value in (config | (change or {})).items() if value is not None}
    found = write_weights(folder, tiny.tensors, dtype, shards)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "eos_token": "<|im_end|>"}))
    write_tokenizer(folder)
    return found


def write_tokenizer(folder: Path) -> None:
    tokens = vocabulary()
    merges = [tuple(merge.split(" ")) for merge in MERGES]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL])
    tokenizer.save(str(folder / "tokenizer.json"))


def logits_of(config: Any, model: Any, tensors: dict[str, np.ndarray], tokens: list[int]) -> np.ndarray:
    """Return the logits of transformers' model over the same weights, in float32."""
    torch = pytest.importorskip("torch")
    net = model(config).float().eval()
    state = {name: torch.from_numpy(np.array(values)) for name, values in tensors.items()}
    state.setdefault("lm_head.weight", state["model.embed_tokens.weight"])
    net.load_state_dict(state, strict=True)
    with torch.no_grad():
        return np.asarray(net(torch.tensor([tokens])).logits[0].numpy())


QWEN35 = {
    "model_type": "qwen3_5_text", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 272, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048, "tie_word_embeddings": True, "attention_bias": False, "hidden_act": "silu",
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_interleaved": True,
        "mrope_section": [3, 3, 2],
    },
    "eos_token_id": 2, "bos_token_id": None, "pad_token_id": None,
}  # fmt: skip


def qwen35_tensors(c: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights of a Qwen3.5 text model, under the names of its text-only release."""
    rng = np.random.default_rng(seed)
    hidden, inner, size = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    key = c["linear_num_key_heads"] * c["linear_key_head_dim"]
    heads = c["linear_num_value_heads"]
    value = heads * c["linear_value_head_dim"]
    out: dict[str, np.ndarray] = {}

    def add(name: str, *shape: int, scale: float = 0.0, mean: float = 0.0) -> None:
        spread = scale or shape[-1] ** -0.5
        out[f"model.{name}"] = (rng.standard_normal(shape) * spread + mean).astype(np.float32)

    add("embed_tokens.weight", c["vocab_size"], hidden)
    for i, kind in enumerate(c["layer_types"]):
        at = f"layers.{i}"
        add(f"{at}.input_layernorm.weight", hidden, scale=0.1)
        add(f"{at}.post_attention_layernorm.weight", hidden, scale=0.1)
        add(f"{at}.mlp.gate_proj.weight", inner, hidden)
        add(f"{at}.mlp.up_proj.weight", inner, hidden)
        add(f"{at}.mlp.down_proj.weight", hidden, inner)
        if kind == "linear_attention":
            q = f"{at}.linear_attn"
            add(f"{q}.in_proj_qkv.weight", 2 * key + value, hidden)
            add(f"{q}.in_proj_z.weight", value, hidden)
            add(f"{q}.in_proj_a.weight", heads, hidden)
            add(f"{q}.in_proj_b.weight", heads, hidden)
            add(f"{q}.conv1d.weight", 2 * key + value, 1, 4, scale=0.4)
            add(f"{q}.A_log", heads, scale=0.5)
            add(f"{q}.dt_bias", heads, scale=0.5)
            add(f"{q}.norm.weight", c["linear_value_head_dim"], scale=0.1, mean=1.0)
            add(f"{q}.out_proj.weight", hidden, value)
        else:
            q = f"{at}.self_attn"
            add(f"{q}.q_proj.weight", 2 * c["num_attention_heads"] * size, hidden)
            add(f"{q}.k_proj.weight", c["num_key_value_heads"] * size, hidden)
            add(f"{q}.v_proj.weight", c["num_key_value_heads"] * size, hidden)
            add(f"{q}.o_proj.weight", hidden, c["num_attention_heads"] * size)
            add(f"{q}.q_norm.weight", size, scale=0.1)
            add(f"{q}.k_norm.weight", size, scale=0.1)
    # Logits of a few units, as trained models have: tolerances are absolute.
    add("norm.weight", hidden, scale=0.1, mean=-0.5)
    return out


def write_qwen35(
    folder: Path, *, dtype: str = "F32", multimodal: bool = False, shards: int = 1
) -> dict[str, np.ndarray]:
    """Write a folder; return the text model's tensors as stored, under the text-only release's names."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = qwen35_tensors(QWEN35)
    config: dict[str, Any] = dict(QWEN35)
    if multimodal:
        tensors = {name.replace("model.", "model.language_model.", 1): values for name, values in tensors.items()}
        tensors |= {"model.visual.patch.weight": np.ones((4, 4)), "mtp.fc.weight": np.ones((2, 2))}
        config = {"model_type": "qwen3_5", "text_config": config, "tie_word_embeddings": True}
    found = write_weights(folder, tensors, dtype, shards)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 2]}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "README.md").write_text("---\nlanguage: en\nlicense: apache-2.0\n---\n# Tiny\n")
    write_tokenizer(folder)
    return {name.replace("model.language_model.", "model."): values for name, values in found.items()}


# Six layers would be the least with both kinds; `layer_types` makes it three.
GEMMA3 = {
    "model_type": "gemma3_text", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "vocab_size": 272,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-6, "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "query_pre_attn_scalar": 32,
    "max_position_embeddings": 2048, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "eos_token_id": 2,
    "hidden_activation": "gelu_pytorch_tanh", "attn_logit_softcapping": None, "final_logit_softcapping": None,
    "bos_token_id": None, "pad_token_id": None,
}  # fmt: skip


def gemma3_tensors(c: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights of a Gemma 3 text model, under the names of its text-only release."""
    rng = np.random.default_rng(seed)
    hidden, inner, size = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    q, kv = c["num_attention_heads"] * size, c["num_key_value_heads"] * size
    norms = ("input", "post_attention", "pre_feedforward", "post_feedforward")
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens": (c["vocab_size"], hidden), "norm": (hidden,)}
    for layer in range(c["num_hidden_layers"]):
        at = f"layers.{layer}"
        shapes |= {f"{at}.{norm}_layernorm": (hidden,) for norm in norms}
        shapes |= {f"{at}.self_attn.{one}_norm": (size,) for one in "qk"}
        shapes |= {f"{at}.self_attn.q_proj": (q, hidden), f"{at}.self_attn.o_proj": (hidden, q)}
        shapes |= {f"{at}.self_attn.{one}_proj": (kv, hidden) for one in "kv"}
        shapes |= {f"{at}.mlp.gate_proj": (inner, hidden), f"{at}.mlp.up_proj": (inner, hidden)}
        shapes |= {f"{at}.mlp.down_proj": (hidden, inner)}
    spread = {name: 0.3 if len(shape) == 1 else shape[-1] ** -0.5 for name, shape in shapes.items()}
    return {
        f"model.{name}.weight": (rng.standard_normal(shape) * spread[name]).astype(np.float32)
        for name, shape in shapes.items()
    }


def write_gemma3(
    folder: Path, *, multimodal: bool = False, change: dict[str, Any] | None = None
) -> dict[str, np.ndarray]:
    """Write a folder; return the text model's tensors under the text-only release's names.

    Args:
      folder: To write.
      multimodal: As `Gemma3ForConditionalGeneration`, with a vision tower.
      change: Configuration of the text model to write otherwise, by key; None leaves a key out.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = gemma3_tensors(GEMMA3)
    config: dict[str, Any] = {**GEMMA3, **(change or {})}
    config = {key: value for key, value in config.items() if value is not None}
    written = tensors
    if multimodal:
        written = {name.replace("model.", "model.language_model.", 1): values for name, values in tensors.items()}
        written |= {"model.vision_tower.a.weight": np.ones((4, 4)), "model.multi_modal_projector.b": np.ones((2, 2))}
        config = {"model_type": "gemma3", "text_config": config, "eos_token_id": [1, 106]}
    write_weights(folder, written, "F32", 1)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    write_tokenizer(folder)
    return tensors
