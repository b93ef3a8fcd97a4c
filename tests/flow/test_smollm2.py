"""The real model: our fp32 bundle against transformers' own Llama on the same weights, and what quantising costs."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from checkpoints import Sizes, oracle

from ferrule_convert.checkpoint import open_checkpoint
from ferrule_convert.fidelity import fidelity_windows
from ferrule_convert.pack import Options, convert
from ferrule_convert.recipe import load_recipe
from ferrule_convert.tokenizer import encoder
from ferrule_runtime.bundle import Bundle
from ferrule_runtime.engines import load
from ferrule_targets.target import load_target

pytestmark = pytest.mark.real

_SIZES = Sizes(layers=30, hidden=576, inner=1536, heads=9, kv_heads=3, context=8192)


@pytest.fixture(scope="module")
def bundles(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Bundle]:
    folder = tmp_path_factory.mktemp("bundles")
    made: dict[str, Bundle] = {}

    def bundle(recipe: str) -> Bundle:
        if recipe not in made:
            checkpoint = open_checkpoint(smollm2)
            chosen = (load_target("host"), load_recipe(recipe), folder / recipe, Options(fidelity=recipe != "fp32"))
            made[recipe] = convert(checkpoint, *chosen, lambda text: None)
        return made[recipe]

    return bundle


@pytest.fixture(scope="module")
def transformers_model(smollm2: Path) -> Any:
    """transformers over the file's tensors, dequantised by the gguf library alone and put into its layout here."""
    pytest.importorskip("torch")
    names = {
        "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    }  # fmt: skip
    tensors = {}
    for tensor in gguf.GGUFReader(smollm2).tensors:
        values = np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        values = values.reshape([int(size) for size in reversed(tensor.shape)])
        parts = tensor.name.split(".")
        if parts[0] == "blk":
            if parts[2] in ("attn_q", "attn_k"):
                heads = _SIZES.heads if parts[2] == "attn_q" else _SIZES.kv_heads
                values = values.reshape(heads, -1, 2, values.shape[-1]).swapaxes(1, 2).reshape(values.shape)
            name = f"model.layers.{parts[1]}.{names[parts[2]]}.weight"
        else:
            name = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}[parts[0]] + ".weight"
        tensors[name] = values
    return oracle(tensors, vocabulary=49152, sizes=_SIZES, theta=100000.0, epsilon=1e-5)


def prompt(bundle: Bundle, count: int) -> list[int]:
    return fidelity_windows(encoder(bundle.file("tokenizer.json").read_text(encoding="utf-8"), "text"), count, 1)[0]


def test_logits_of_a_64_token_prompt_equal_those_of_transformers(
    bundles: Callable[[str], Bundle], transformers_model: Any
) -> None:
    torch = pytest.importorskip("torch")
    bundle = bundles("fp32")
    tokens = prompt(bundle, 64)
    with torch.no_grad():
        expected = transformers_model(torch.tensor([tokens])).logits[0].numpy()
    engine = load(bundle, threads=0, context=256, chunk=64)
    assert np.abs(engine.logits(engine.feed(tokens, every=True)) - expected).max() <= 1e-3


def test_greedy_decoding_of_64_tokens_is_that_of_transformers(
    bundles: Callable[[str], Bundle], transformers_model: Any
) -> None:
    torch = pytest.importorskip("torch")
    bundle = bundles("fp32")
    tokens = prompt(bundle, 64)
    with torch.no_grad():
        whole = transformers_model.generate(
            torch.tensor([tokens]), attention_mask=torch.ones(1, 64), max_new_tokens=64, do_sample=False, use_cache=True
        )[0].tolist()
    engine = load(bundle, threads=0, context=256, chunk=64)
    hidden, ours = engine.feed(tokens), []
    for _ in range(64):
        ours.append(int(engine.logits(hidden)[0].argmax()))
        hidden = engine.feed(ours[-1:])
    assert ours == whole[64:]


@pytest.mark.parametrize("chunk", [1, 16, 64, 128])
def test_prefill_in_chunks_gives_the_logits_of_one_pass(bundles: Callable[[str], Bundle], chunk: int) -> None:
    bundle = bundles("fp32")
    tokens = prompt(bundle, 256)
    whole = load(bundle, threads=0, context=256, chunk=256)
    parts = load(bundle, threads=0, context=256, chunk=chunk)
    difference = whole.logits(whole.feed(tokens, every=True)) - parts.logits(parts.feed(tokens, every=True))
    assert np.abs(difference).max() <= 1e-3


def test_eight_bits_stay_within_a_hundredth_of_a_nat(bundles: Callable[[str], Bundle]) -> None:
    found = bundles("w8").manifest.fidelity
    assert found["positions"] >= 2000
    assert found["kl"] <= 0.01
    assert found["top1_low"] < found["top1"] < found["top1_high"]
    assert found["top1_clear"] > found["top1"]  # near ties are what flips


def test_four_bits_cost_more_than_eight_and_stay_a_model(bundles: Callable[[str], Bundle]) -> None:
    four, eight = bundles("w4g32").manifest.fidelity, bundles("w8").manifest.fidelity
    assert eight["kl"] < four["kl"] < 0.5
    assert four["perplexity"] < 1.5 * four["perplexity_float"]


_FILL = """
import json, sys
from pathlib import Path
import ferrule_runtime.commands, ferrule_runtime.agent
from ferrule_runtime.budget import baseline, plan_within
from ferrule_runtime.bundle import open_bundle
from ferrule_runtime.messages import Message
from ferrule_runtime.models.local import LocalModel
from ferrule_runtime.tools import Tool

bundle, context = open_bundle(Path(sys.argv[1])), int(sys.argv[2])
plan = plan_within(bundle.manifest.memory, None, interpreter=baseline(), most_context=8192, context=context)
model = LocalModel(bundle, plan)
properties = {"on": {"type": "boolean"}}
schema = {"type": "object", "properties": properties, "required": ["on"], "additionalProperties": False}
tool = Tool("set_light", "Switch the light.", schema, print)
words = "one two three four five " * (context // 8)
model.reply([Message("user", words)], [tool], "call")
peak = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) * 1024
print(json.dumps({"plan": plan.total, "peak": peak}))
"""


@pytest.mark.parametrize("context", [512, 4096])
@pytest.mark.parametrize("recipe", ["fp32", "w8", "w4g32"])
def test_the_plan_is_within_a_tenth_of_the_measured_peak(
    bundles: Callable[[str], Bundle], recipe: str, context: int
) -> None:
    command = [sys.executable, "-c", _FILL, str(bundles(recipe).path), str(context)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    found = json.loads(done.stdout)
    assert found["peak"] * 0.97 <= found["plan"] <= found["peak"] * 1.10
