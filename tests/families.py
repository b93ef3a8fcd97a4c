"""A small random checkpoint of every model family, as a folder and as transformers' own model over the same weights."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from checkpoints import TEMPLATE
from folders import write_safetensors, write_tokenizer

from ferrule_convert.archs import build
from ferrule_convert.checkpoint import open_checkpoint
from ferrule_convert.formats import export, memory_facts
from ferrule_convert.recipe import apply, load_recipe
from ferrule_runtime.bundle import Bundle, File, Manifest
from ferrule_runtime.engines import Engine, load


@dataclass(frozen=True)
class Family:
    """What sets one family apart.

    Attributes:
      config: transformers' class of its configuration.
      model: transformers' class of the model.
      change: Configuration besides `COMMON`.
      zero_centred: Norms store their weight less one, all but those whose name has one of `not_zero_centred`.
    """

    config: str
    model: str
    change: dict[str, Any] = field(default_factory=dict)
    zero_centred: bool = False
    not_zero_centred: tuple[str, ...] = ()


# Every row has a multiple of 128 weights, so that every group size fits.
COMMON: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 272, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "rms_norm_eps": 1e-6, "max_position_embeddings": 4608,
    "tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": 2, "pad_token_id": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}  # fmt: skip

FAMILIES = {
    "llama": Family("LlamaConfig", "LlamaForCausalLM", {"tie_word_embeddings": False}),
    "qwen2": Family("Qwen2Config", "Qwen2ForCausalLM"),
    "qwen3": Family("Qwen3Config", "Qwen3ForCausalLM"),
    "qwen3_5": Family(
        "Qwen3_5TextConfig",
        "Qwen3_5ForCausalLM",
        {
            "num_attention_heads": 2, "head_dim": 64, "num_key_value_heads": 1, "linear_num_key_heads": 2,
            "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
            "linear_conv_kernel_dim": 4, "layer_types": ["linear_attention", "full_attention"],
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_interleaved": True,
                "mrope_section": [3, 3, 2],
            },
        },
        zero_centred=True,
        not_zero_centred=("linear_attn.norm",),
    ),
    "gemma3": Family(
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {
            "sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 32,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            },
        },
        zero_centred=True,
    ),
}  # fmt: skip


def write_family(folder: Path, kind: str, seed: int = 0) -> Any:
    """Write a checkpoint of a family; return transformers' model over its weights, in float32."""
    import torch
    import transformers

    family, rng = FAMILIES[kind], np.random.default_rng(seed)
    config = getattr(transformers, family.config)(**COMMON | family.change, attn_implementation="eager")
    net = getattr(transformers, family.model)(config).float().eval()
    tensors = {}
    for name, parameter in net.named_parameters():
        shape = tuple(parameter.shape)
        scale = 0.1 if "norm" in name else 0.5 if len(shape) == 1 else shape[-1] ** -0.5
        zero = family.zero_centred and not any(part in name for part in family.not_zero_centred)
        mean = 1.0 if "norm" in name and not zero else 0.0
        tensors[name] = (rng.standard_normal(shape) * scale + mean).astype(np.float32)
    net.load_state_dict({name: torch.from_numpy(values) for name, values in tensors.items()}, strict=False)
    folder.mkdir(parents=True, exist_ok=True)
    write_safetensors(folder / "model.safetensors", tensors)
    raw = COMMON | family.change | {"model_type": config.model_type}
    (folder / "config.json").write_text(json.dumps(raw))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    write_tokenizer(folder)
    return net


def logits_of(net: Any, tokens: list[int]) -> np.ndarray:
    """Return the logits of transformers' model, [tokens, vocabulary]."""
    import torch

    with torch.no_grad():
        return np.asarray(net(torch.tensor([tokens]), use_cache=False).logits[0].numpy())


def export_bundle(checkpoint: Path, folder: Path, recipe: str, *, level: int = 4, context: int = 512) -> Bundle:
    """Export a checkpoint without the gate, so that the form is seen alone.

    Args:
      checkpoint: File or folder.
      folder: To make.
      recipe: Its name.
      level: MatMulNBits' accuracy level: 1 keeps activations in float32, 4 makes them int8.
      context: Positions that the tables reach.
    """
    folder.mkdir()
    graph = apply(build(open_checkpoint(checkpoint)), load_recipe(recipe))
    done = export("onnx-cpu", graph, folder, context, level)
    empty: dict[str, str] = {}
    manifest = Manifest(
        name="small", checkpoint=empty, architecture=empty, recipe=empty, target="host", form="onnx-cpu", engine="onnx",
        features=(), context=context, dialect="chatml-json", stop_tokens=(2,), tables=done.tables,
        memory=memory_facts("onnx-cpu", graph, context, 1000), fidelity=empty, made=empty,
        files={name: File((folder / name).stat().st_size, "") for name in done.files},
    )  # fmt: skip
    return Bundle(folder, manifest, "")


def assert_engine_gives(bundle: Bundle, tokens: list[int], expected: np.ndarray, chunks: tuple[int, ...]) -> Engine:
    """Compare logits in chunks of every size with an oracle's, and a state restored with itself; return the engine."""
    for chunk in chunks:
        engine = load(bundle, threads=1, context=256, chunk=chunk)
        np.testing.assert_allclose(engine.logits(engine.feed(tokens, every=True)), expected, atol=1e-4)
    saved = engine.snapshot()
    first = engine.feed(tokens[:40], every=True)
    engine.restore(saved)
    np.testing.assert_array_equal(engine.feed(tokens[:40], every=True), first)
    return engine
