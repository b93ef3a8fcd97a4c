"""Model families beyond Llama, against transformers' own, in numpy and in onnxruntime."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from families import assert_engine_gives
from folders import QWEN35, logits_of, write_qwen35, write_safetensors, write_tokenizer

from ferrule_convert.archs import build
from ferrule_convert.checkpoint import open_checkpoint
from ferrule_convert.interpret import Memory, head_logits, interpret
from ferrule_convert.pack import Options, convert
from ferrule_convert.recipe import load_recipe
from ferrule_targets.target import load_target

TOKENS = np.random.default_rng(4).integers(3, 260, 90).tolist()


@pytest.fixture(scope="module")
def qwen35(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray]:
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("qwen35") / "m"
    tensors = write_qwen35(folder, dtype="BF16")
    config = transformers.Qwen3_5TextConfig(**QWEN35, attn_implementation="eager")
    return folder, logits_of(config, transformers.Qwen3_5ForCausalLM, tensors, TOKENS)


def test_qwen35_in_numpy_equals_transformers(qwen35: tuple[Path, np.ndarray]) -> None:
    folder, expected = qwen35
    graph = build(open_checkpoint(folder))
    np.testing.assert_allclose(head_logits(graph, interpret(graph, TOKENS)), expected, atol=1e-4)


def test_qwen35_token_by_token_equals_all_at_once(qwen35: tuple[Path, np.ndarray]) -> None:
    graph, memory = build(open_checkpoint(qwen35[0])), Memory()
    parts = [interpret(graph, TOKENS[:31], memory), *(interpret(graph, [token], memory) for token in TOKENS[31:])]
    np.testing.assert_allclose(np.concatenate(parts), interpret(graph, TOKENS), atol=1e-4)


def test_qwen35_in_onnxruntime_equals_transformers_in_any_chunks_and_after_a_snapshot(
    qwen35: tuple[Path, np.ndarray], tmp_path: Path
) -> None:
    folder, expected = qwen35
    chosen = (load_target("host"), load_recipe("fp32"), tmp_path / "b", Options(fidelity=False))
    bundle = convert(open_checkpoint(folder), *chosen, lambda text: None)
    engine = assert_engine_gives(bundle, TOKENS, expected, (1, 16, 128))
    engine.reset()
    np.testing.assert_allclose(engine.logits(engine.feed(TOKENS, every=True)), expected, atol=1e-4)


def test_qwen35_keeps_a_growing_cache_for_its_attention_layers_alone(
    qwen35: tuple[Path, np.ndarray], tmp_path: Path
) -> None:
    chosen = (load_target("host"), load_recipe("w4g32"), tmp_path / "b", Options(fidelity=False))
    manifest = convert(open_checkpoint(qwen35[0]), *chosen, lambda text: None).manifest
    # One attention layer of four: keys and values of 2 heads of 64.
    assert manifest.memory.kv_per_token == 2 * 2 * 64 * 4
    # Three delta nets: 4 states of 16 x 16, and the last 3 inputs of 3 x 64 channels; in two copies of float32.
    assert manifest.memory.state == 2 * 4 * 3 * (4 * 16 * 16 + 3 * 3 * 64)
    schemes = {rule["pattern"]: rule["scheme"] for rule in manifest.recipe["rules"]}
    assert schemes["layers.*.delta.[ab]"] is None


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_qwen2_and_qwen3_equal_transformers(tmp_path: Path, kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    rng = np.random.default_rng(7)
    raw: dict[str, Any] = {
        "model_type": kind, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 272,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 512, "tie_word_embeddings": False, "eos_token_id": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    }  # fmt: skip
    name = {"qwen2": "Qwen2", "qwen3": "Qwen3"}[kind]
    config = getattr(transformers, f"{name}Config")(**raw, attn_implementation="eager")
    model = getattr(transformers, f"{name}ForCausalLM")
    shapes = {key: tuple(value.shape) for key, value in model(config).state_dict().items()}
    tensors = {
        key: (rng.standard_normal(s) * (0.1 if len(s) == 1 else s[-1] ** -0.5) + ("norm" in key)).astype(np.float32)
        for key, s in shapes.items()
    }
    write_safetensors(tmp_path / "model.safetensors", tensors)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    write_tokenizer(tmp_path)
    graph = build(open_checkpoint(tmp_path))
    found = head_logits(graph, interpret(graph, TOKENS))
    np.testing.assert_allclose(found, logits_of(config, model, tensors, TOKENS), atol=1e-4)
    assert not graph.tied
