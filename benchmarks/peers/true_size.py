"""Qwen3.5 at its true sizes, with random weights, beside onnxruntime-genai's model builder, in one run.

What a conversion costs (wall time, memory of the whole process tree) and how fast the graphs are, 128 tokens at once
and one by one, with the same block size, accuracy level and threads. Nothing is asserted: the table and its JSON are
the result. It needs the real tokenizer, `FERRULE_TOKENIZERS/qwen3.5/tokenizer.json`, whose 248,077 entries are part of
what a conversion costs, and 20 GB of disk.

    python benchmarks/peers/true_size.py [--out FOLDER] [--rounds N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from genai_builder import Graph, build_int4
from numpy.typing import NDArray
from process_tree import Cost, run

from ferrule_runtime.bundle import open_bundle
from ferrule_runtime.commandline import say
from ferrule_runtime.engines import load

_SHARED = {
    "model_type": "qwen3_5_text", "vocab_size": 248320, "num_hidden_layers": 24, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 256, "rms_norm_eps": 1e-6, "hidden_act": "silu", "attention_bias": False,
    "linear_num_key_heads": 16, "linear_num_value_heads": 16, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "max_position_embeddings": 262144,
    "tie_word_embeddings": True, "eos_token_id": 248044, "bos_token_id": None, "pad_token_id": None,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 6,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
    },
}  # fmt: skip
# Of the published 0.8B; and of a model of 2B's width, to see whether memory grows with it.
SIZES = {
    "0.8b": _SHARED | {"hidden_size": 1024, "intermediate_size": 3584},
    "2b": _SHARED | {"hidden_size": 2048, "intermediate_size": 6144},
}
VISION = {
    "depth": 1, "hidden_size": 64, "num_heads": 4, "intermediate_size": 64, "in_channels": 3, "patch_size": 16,
    "temporal_patch_size": 2, "spatial_merge_size": 2, "num_position_embeddings": 64,
}  # fmt: skip
_PROMPT, _STEPS = 128, 32
# Runs tokens behind those already fed, to the logits of the last one.
Feed = Callable[[Sequence[int]], object]


def _values(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> NDArray[np.float32]:
    """Draw a weight so that activations stay finite through all layers."""
    drawn = rng.standard_normal(shape, dtype=np.float32)
    if name.endswith("linear_attn.norm.weight"):
        return 1 + np.float32(0.1) * drawn
    spread = 0.4 if "conv1d" in name else 0.1 if len(shape) == 1 else shape[-1] ** -0.5
    return np.float32(spread) * drawn


def write_checkpoint(folder: Path, text: dict[str, Any], tokenizer: Path) -> None:
    """Write random bf16 weights of `Qwen3_5ForConditionalGeneration`, one tensor in memory at a time.

    Args:
      folder: To make.
      text: Configuration of the text model.
      tokenizer: Its `tokenizer.json`.
    """
    import torch
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    folder.mkdir(parents=True)
    vision = VISION | {"out_hidden_size": text["hidden_size"]}
    config = Qwen3_5Config(text_config=text, vision_config=vision, tie_word_embeddings=True, dtype="bfloat16")
    config.architectures = ["Qwen3_5ForConditionalGeneration"]
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {name: tuple(one.shape) for name, one in Qwen3_5ForConditionalGeneration(config).state_dict().items()}
    shapes.pop("lm_head.weight", None)
    header, at = {}, 0
    for name, shape in shapes.items():
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    head = json.dumps(header).encode()
    rng = np.random.default_rng(0)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        for name, shape in shapes.items():
            # The upper half of a float32: truncated, which is as random as rounded.
            file.write((_values(name, shape, rng).view(np.uint32) >> 16).astype(np.uint16).data)
    shutil.copy(tokenizer, folder / "tokenizer.json")
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))


def convert(checkpoint: Path, out: Path, recipe: str, *options: str) -> Cost:
    """Convert as a user does, with nothing cached."""
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, "-m", "ferrule_runtime", "convert", str(checkpoint), "--target", "rpi5"]
        command += ["--recipe", recipe, "--dialect", "chatml-json", "-o", str(out), *options]
        return run(command, out.with_suffix(".log"), {"FERRULE_CACHE": cache, "HF_HUB_OFFLINE": "1"})


def _seconds(feed: Feed, chunks: Sequence[Sequence[int]]) -> float:
    started = time.perf_counter()
    for chunk in chunks:
        feed(chunk)
    return time.perf_counter() - started


def speeds(feeds: dict[str, tuple[Feed, Callable[[], None]]], rounds: int) -> Iterator[tuple[str, float, float]]:
    """Time prefill and decode of several graphs in turn, so that what disturbs one disturbs all.

    Args:
      feeds: By name: runs tokens to the logits of the last one, and forgets everything.
      rounds: How often each has its turn, after one that does not count.

    Yields:
      Name, median prefill and median decode in tokens per second.
    """
    tokens = np.random.default_rng(1).integers(1000, 200000, _PROMPT).tolist()
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in feeds}
    for _ in range(rounds + 1):
        for name, (feed, forget) in feeds.items():
            forget()
            prefill = _seconds(feed, [tokens])
            decode = _seconds(feed, [[token] for token in tokens[:_STEPS]])
            found[name].append((_PROMPT / prefill, _STEPS / decode))
    for name, values in found.items():
        yield name, *(statistics.median(column) for column in zip(*values[1:], strict=True))


def _ours(bundle: Path, threads: int) -> tuple[Feed, Callable[[], None]]:
    engine = load(open_bundle(bundle), threads=threads, context=512, chunk=_PROMPT)
    return lambda tokens: engine.logits(engine.feed(tokens)), engine.reset


def _theirs(folder: Path, threads: int) -> tuple[Feed, Callable[[], None]]:
    graph = Graph(folder, threads=threads, context=512)
    return graph.feed, graph.reset


def main() -> None:
    """Run the comparison and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for checkpoints and graphs; a temporary one without it")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    given = os.environ.get("FERRULE_TOKENIZERS")
    if given is None:
        say("true sizes: not run, FERRULE_TOKENIZERS does not say where qwen3.5/tokenizer.json is")
        return
    tokenizer = Path(given) / "qwen3.5" / "tokenizer.json"
    with tempfile.TemporaryDirectory() as scratch:
        out = options.out or Path(scratch)
        os.environ["FERRULE_STATE"] = str(out / "state")
        result = compare(out, tokenizer, options.rounds)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=1) + "\n")


def compare(out: Path, tokenizer: Path, rounds: int) -> dict[str, Any]:
    """Convert and time, printing as it goes; return the figures."""
    for size, text in SIZES.items():
        if not (out / size).exists():
            write_checkpoint(out / size, text, tokenizer)
    work: dict[str, Callable[[], Cost]] = {
        "0.8b, builder int4 g32": lambda: build_int4(out / "0.8b", out / "theirs"),
        "0.8b, ferrule w4g32, gate and fidelity": lambda: convert(out / "0.8b", out / "w4g32", "w4g32"),
        "0.8b, ferrule w4g32_head4, gate": lambda: convert(
            out / "0.8b", out / "w4g32_head4", "w4g32_head4", "--no-fidelity"
        ),
        "2b, ferrule w4g32, gate and fidelity": lambda: convert(out / "2b", out / "w4g32-2b", "w4g32"),
    }
    result: dict[str, Any] = {"conversions": {}, "speeds": {}}
    for name, job in work.items():
        cost = job()
        result["conversions"][name] = {"wall_s": cost.wall_s, "peak_pss": cost.peak_pss}
        say(f"{name:42} {cost.wall_s:7.1f} s {cost.peak_pss / 2**20:8.0f} MiB at its peak")
    for threads in (1, 2):
        graphs = {"builder": _theirs(out / "theirs", threads)}
        graphs |= {name: _ours(out / name, threads) for name in ("w4g32_head4", "w4g32")}
        found = {name: rates for name, *rates in speeds(graphs, rounds)}
        result["speeds"][threads] = found
        for name, (prefill, decode) in found.items():
            ratios = f"{prefill / found['builder'][0]:5.2f}x {decode / found['builder'][1]:5.2f}x"
            say(f"{threads} threads, {name:14} prefill {prefill:6.1f} tok/s, decode {decode:5.1f} tok/s, {ratios}")
    return result


if __name__ == "__main__":
    main()
