"""Runs as they would be measured, built from a few numbers, and a board that really measures a tiny engine."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from ferrule_profiles.run import BundleFacts, Missing, Run, Value, summarise
from ferrule_runtime.bundle import File, Manifest, MemoryFacts, Table, file_sha256
from ferrule_targets.links.local import LocalLink

BOARD = Path(__file__).with_name("board.py")
MIB = 1 << 20

MACHINE: Mapping[str, Any] = {
    "arch": "aarch64",
    "board": "Raspberry Pi 5 Model B Rev 1.0",
    "cpu": "4x Cortex-A76",
    "cores": 4,
    "memory": 8 << 30,
    "memory_limit": None,
    "system": "Debian GNU/Linux 12 (bookworm)",
    "kernel": "6.6.31",
    "python": "3.11.7",
    "packages": {"onnxruntime": "1.32.0"},
    "missing": {"memory_limit": "no control group sets a limit"},
}
CONDITIONS: Mapping[str, Any] = {
    "load": 0.05,
    "clocks": [{"policy": "policy0", "governor": "performance", "mhz": 2400.0, "max_mhz": 2400.0}],
    "celsius": {"cpu-thermal": 45.0},
    "throttled": [],
    "throttle_events": None,
    "missing": {"throttle_events": "no counters"},
}

TOP1 = {"top1": 0.9, "top1_low": 0.88, "top1_high": 0.92}

Spread = Sequence[float] | float


def value(spread: Spread | None, unit: str, launches: int = 3) -> Value:
    """Return a figure of three launches around a number, or of the numbers given (one a launch), or a missing one."""
    if spread is None:
        return Missing("not measured here")
    if isinstance(spread, int | float):
        spread = [spread * factor for factor in (0.99, 1.0, 1.01)][:launches]
    return summarise([[number] for number in spread], unit)


def make_run(
    recipe: str,
    *,
    first: Spread | None = 0.5,
    decode: Spread | None = 20.0,
    peak: Spread | None = 300 * MIB,
    size: int = 100 * MIB,
    kl: float | None = 0.01,
    joules: tuple[float, float] | None = None,
    machine: Mapping[str, Any] | None = None,
    conditions: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    **changes: Any,
) -> Run:
    """Build a run; rates in tokens/s, times in s, sizes in bytes."""
    now = {**CONDITIONS, **(conditions or {})}
    facts = BundleFacts(
        name=f"tiny-{recipe}", sha256=recipe.ljust(64, "0"), recipe=recipe, recipe_key=f"{recipe}@12345678", bytes=size,
        bits_per_weight=5.0, checkpoint="tiny", checkpoint_sha256="c" * 64, form="onnx-cpu", engine="onnx",
        engine_version="1.32.0",
    )  # fmt: skip
    prefill_joules, token_joules = joules or (None, None)
    run = Run(
        time="2026-03-01T12:00:00+00:00",
        ferrule="0.1.0",
        command=("ferrule", "measure", recipe),
        target="rpi5",
        board="ssh://pi",
        bundle=facts,
        fidelity={"skipped": "--no-fidelity"} if kl is None else {"kl": kl, **TOP1},
        settings={"threads": 4, "context": 160, "chunk": 64, "prompts": [128], "decode": 32, "seed": 1, "repeat": 1,
                  "request": {"prompt": 282, "tokens": 26},
                  "launches": 3, "load_at_start": 0.05, **(settings or {})},
        machine={**MACHINE, **(machine or {})},
        before=(now, now, now),
        after=(now, now, now),
        power=Missing("no meter"),
        figures={
            "prefill@128": value(250.0, "tok/s"),
            "first_token@128": value(first, "s"),
            "decode@128": value(decode, "tok/s"),
            "load": value(1.0, "s"),
            "peak_rss": value(peak, "B"),
            "unevictable": value(200 * MIB, "B"),
            "prefill_energy@128": value(prefill_joules, "J"),
            "energy_per_token@128": value(token_joules, "J"),
            "power@128": value(None, "W"),
        },
    )  # fmt: skip
    return dataclasses.replace(run, **changes)


@pytest.fixture(name="make_run", scope="session")
def _make_run() -> Callable[..., Run]:
    return make_run


@pytest.fixture
def make_bundle(tmp_path: Path) -> Callable[..., Path]:
    """Return a writer of small, valid bundles; the board's engine needs nothing of what is in them."""

    def write(name: str, **changes: Any) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        part = folder / "weights.bin"
        part.write_bytes(b"0" * 1000)
        memory = {field.name: 0 for field in dataclasses.fields(MemoryFacts)} | {"vocabulary": 101}
        table = Table(part.name, rows=101, columns=1, bits=32, group=1, values=0, scales=0, zeros=0)
        values: dict[str, Any] = {
            "name": name, "checkpoint": {"name": "tiny", "sha256": "c" * 64}, "architecture": {},
            "recipe": {"name": "w8", "key": "w8@12345678", "bits_per_weight": 9.0}, "target": "host",
            "form": "onnx-cpu", "engine": "onnx", "features": (), "context": 256, "dialect": "qwen_xml",
            "stop_tokens": (100,), "tables": {"embedding": table, "head": table}, "memory": MemoryFacts(**memory),
            "fidelity": {"kl": 0.01}, "made": {}, "files": {part.name: File(1000, file_sha256(part))},
        }  # fmt: skip
        (folder / "manifest.json").write_text(Manifest(**{**values, **changes}).to_json())
        return folder

    return write


class TinyBoard(LocalLink):
    """This machine, where `ferrule measure` runs a tiny engine in real processes; `mode` says how it misbehaves."""

    def __init__(self, mode: str = "works") -> None:
        self.mode = mode

    @property
    def ferrule(self) -> tuple[str, ...]:
        return (sys.executable, "-P", str(BOARD), self.mode)


@pytest.fixture
def tiny_board() -> Callable[..., TinyBoard]:
    return TinyBoard
