"""A real Qwen2.5: our fp32 bundle against transformers over the weights that the file's K-quants stand for."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from ferrule_convert.checkpoint import open_checkpoint
from ferrule_convert.fidelity import fidelity_windows
from ferrule_convert.pack import Options, convert
from ferrule_convert.recipe import load_recipe
from ferrule_convert.tokenizer import encoder
from ferrule_runtime.engines import Engine, load
from ferrule_targets.target import load_target

pytestmark = [pytest.mark.real, pytest.mark.slow]

PROMPT, STEPS = 64, 32
# Of the published configuration.
SIZES = {
    "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
    "num_key_value_heads": 2, "vocab_size": 151936, "rms_norm_eps": 1e-6, "max_position_embeddings": 32768,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}  # fmt: skip
NAMES = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
TABLES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


@pytest.fixture(scope="module")
def engine(qwen25_coder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("qwen") / "fp32"
    chosen = (load_target("host"), load_recipe("fp32"), folder, Options(fidelity=False))
    bundle = convert(open_checkpoint(qwen25_coder), *chosen, lambda text: None)
    yield load(bundle, threads=0, context=256, chunk=PROMPT)
    shutil.rmtree(folder)  # 2.4 GiB


@pytest.fixture(scope="module")
def transformers_model(qwen25_coder: Path) -> Any:
    """transformers over the file's tensors, dequantised by the gguf library alone."""
    torch = pytest.importorskip("torch")
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tensors = {}
    for tensor in gguf.GGUFReader(qwen25_coder).tensors:
        values = np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        first, *rest = tensor.name.split(".")
        name = f"model.layers.{rest[0]}.{NAMES[rest[1]]}" if first == "blk" else TABLES[first]
        sizes = [int(size) for size in reversed(tensor.shape)]
        tensors[f"{name}.{rest[-1]}"] = torch.from_numpy(values.reshape(sizes))
    config = Qwen2Config(**SIZES, tie_word_embeddings=False, attn_implementation="eager")
    model = Qwen2ForCausalLM(config).eval()
    model.load_state_dict(tensors, strict=True, assign=True)
    return model


@pytest.fixture(scope="module")
def prompt(qwen25_coder: Path) -> list[int]:
    return fidelity_windows(encoder(open_checkpoint(qwen25_coder).tokenizer_json, "text"), PROMPT, 1)[0]


def test_logits_of_a_prompt_equal_those_of_transformers(
    engine: Engine, transformers_model: Any, prompt: list[int]
) -> None:
    torch = pytest.importorskip("torch")
    with torch.no_grad():
        expected = transformers_model(torch.tensor([prompt])).logits[0].numpy()
    engine.reset()
    found = engine.logits(engine.feed(prompt, every=True))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-3)


def test_greedy_decoding_is_that_of_transformers(engine: Engine, transformers_model: Any, prompt: list[int]) -> None:
    torch = pytest.importorskip("torch")
    # `generate` would stop at the model's end of text; greedy steps go on.
    theirs, cache, fed = [], None, prompt
    with torch.no_grad():
        for _ in range(STEPS):
            out = transformers_model(torch.tensor([fed]), cache=cache, use_cache=True)
            cache, fed = out.past_key_values, [int(out.logits[0, -1].argmax())]
            theirs += fed
    engine.reset()
    hidden, ours = engine.feed(prompt), []
    for _ in range(STEPS):
        ours.append(int(engine.logits(hidden)[0].argmax()))
        hidden = engine.feed(ours[-1:])
    assert ours == theirs
