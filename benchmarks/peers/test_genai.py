"""Qwen3.5 by onnxruntime-genai's builder: another implementation of the same model must give the same logits."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from families import export_bundle
from folders import QWEN35, TEMPLATE, qwen35_tensors, write_tokenizer
from genai_builder import Graph, build, build_int4
from true_size import VISION

from ferrule_runtime.engines import load

pytest.importorskip("onnxruntime_genai", reason="runs in tox's `genai` environment")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TOKENS = np.random.default_rng(4).integers(3, 260, 90).tolist()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random Qwen3.5 in the only class that the builder takes, which has a vision tower."""
    folder = tmp_path_factory.mktemp("qwen35") / "m"
    config = transformers.Qwen3_5Config(
        text_config=QWEN35, vision_config=VISION | {"out_hidden_size": 64}, tie_word_embeddings=True,
        image_token_id=268, video_token_id=269, vision_start_token_id=270, vision_end_token_id=271,
    )  # fmt: skip
    net = transformers.Qwen3_5ForConditionalGeneration(config).float()
    tensors = qwen35_tensors(QWEN35)
    state = {name.replace("model.", "model.language_model.", 1): torch.from_numpy(v) for name, v in tensors.items()}
    missing = net.load_state_dict(state, strict=False)
    assert not missing.unexpected_keys
    assert all("visual" in name or name == "lm_head.weight" for name in missing.missing_keys)
    net.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    write_tokenizer(folder)
    return folder


def test_our_float_bundle_gives_the_logits_of_its_float_graph(checkpoint: Path, tmp_path: Path) -> None:
    cost = build(checkpoint, tmp_path / "theirs", "fp32")
    assert cost.peak_pss > 100 << 20  # torch is in it
    theirs = Graph(tmp_path / "theirs", threads=1, context=128)
    expected = theirs.feed(TOKENS)
    ours = load(export_bundle(checkpoint, tmp_path / "ours", "fp32"), threads=1, context=128, chunk=128)
    np.testing.assert_allclose(ours.logits(ours.feed(TOKENS, every=True)), expected, rtol=0, atol=1e-4)
    theirs.reset()
    steps = [theirs.feed(TOKENS[:41]), *(theirs.feed([token]) for token in TOKENS[41:])]
    np.testing.assert_allclose(np.concatenate(steps), expected, rtol=0, atol=1e-4)


def test_the_int4_graph_is_what_was_asked_for(checkpoint: Path, tmp_path: Path) -> None:
    # The builder ignores options that it does not know.
    build_int4(checkpoint, tmp_path / "theirs")
    model = onnx.load(tmp_path / "theirs" / "model.onnx", load_external_data=False)
    found = [{a.name: a.i for a in node.attribute} for node in model.graph.node if node.op_type == "MatMulNBits"]
    assert {(one["bits"], one["block_size"], one["accuracy_level"]) for one in found} == {(4, 32, 4)}
    logits = Graph(tmp_path / "theirs", threads=1, context=128).feed(TOKENS)
    assert logits.shape == (1, QWEN35["vocab_size"])
    assert np.isfinite(logits).all()
