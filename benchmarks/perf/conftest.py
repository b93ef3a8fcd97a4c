"""What the speed suites share: the real model, as bundles and in transformers, with the same number of threads."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from ferrule_convert.checkpoint import open_checkpoint
from ferrule_convert.fetch import fetch
from ferrule_convert.fidelity import fidelity_windows
from ferrule_convert.pack import Options, convert
from ferrule_convert.recipe import load_recipe
from ferrule_convert.tokenizer import encoder
from ferrule_runtime.bundle import Bundle
from ferrule_targets.target import load_target

THREADS = (1, 2)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    return fetch("smollm2-135m")


@pytest.fixture(scope="session")
def bundles(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Bundle]:
    os.environ.setdefault("FERRULE_STATE", str(tmp_path_factory.mktemp("state")))
    folder, made = tmp_path_factory.mktemp("bundles"), dict[str, Bundle]()

    def bundle(recipe: str) -> Bundle:
        if recipe not in made:
            target, options = load_target("host"), Options(fidelity=False)
            checkpoint = open_checkpoint(smollm2)
            made[recipe] = convert(checkpoint, target, load_recipe(recipe), folder / recipe, options, lambda text: None)
        return made[recipe]

    return bundle


@pytest.fixture(scope="session")
def prompt(smollm2: Path) -> list[int]:
    return fidelity_windows(encoder(open_checkpoint(smollm2).tokenizer_json, "text"), 64, 1)[0]


@pytest.fixture(scope="session")
def rates() -> Iterator[dict[str, dict[int, float]]]:
    """Median tokens per second by name and threads; printed as ratios to transformers at the end of the run."""
    found: dict[str, dict[int, float]] = {}
    yield found
    lines = []
    for name, by_threads in found.items():
        for threads, rate in by_threads.items():
            reference = found.get("transformers fp32 eager", {}).get(threads)
            ratio = f"{rate / reference:5.2f}x transformers" if reference else ""
            lines.append(f"{name:24} {threads} threads {rate:7.1f} tok/s  {ratio}")
    sys.stderr.write("\n" + "\n".join(lines) + "\n")
    if path := os.environ.get("FERRULE_BENCH_SUMMARY"):
        Path(path).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


@pytest.fixture(scope="session")
def transformers_model(smollm2: Path) -> Any:
    from checkpoints import Sizes, oracle

    sizes = Sizes(layers=30, hidden=576, inner=1536, heads=9, kv_heads=3, context=8192)
    tensors = {name: tensor.all() for name, tensor in open_checkpoint(smollm2).tensors.items()}
    return oracle(tensors, vocabulary=49152, sizes=sizes, theta=100000.0, epsilon=1e-5)
