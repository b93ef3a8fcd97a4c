"""Run `ferrule measure` on a board in fresh processes, and make one run of each bundle.

Launches of several bundles take turns, so that a board that warms up or slows down does so for all of them alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from ferrule_runtime import __version__
from ferrule_runtime.bundle import Bundle, open_bundle
from ferrule_runtime.errors import FerruleError, LinkError, RecordError, UsageError
from ferrule_runtime.procfs import boot_id

from .clock import Launch, only, read_events, speed
from .memory import memory
from .meters import Meter
from .power import ENERGY_FIGURES, Samples, energy_figures
from .run import BundleFacts, Missing, Power, Run, Value

if TYPE_CHECKING:
    from ferrule_runtime.measure_options import Options
    from ferrule_targets.links import Link

__all__ = ["TIMEOUT", "Plan", "profile"]

# Seconds that one launch may take; a slow board decodes a token in about a second.
TIMEOUT = 1800.0

# The package whose version says which engine it was.
_ENGINE_PACKAGES = {"onnx": "onnxruntime"}


# What the plan's event holds beside settings.
_NOT_SETTINGS = ("event", "schema_version", "bundle", "bundle_sha256")


@dataclass(frozen=True)
class Plan:
    """How to profile.

    Attributes:
      options: What each process times.
      launches: Processes per bundle.
      target: The kind of board behind the link.
      timeout: Seconds that one process may take.
    """

    options: Options
    launches: int
    target: str
    timeout: float = TIMEOUT


def _command(link: Link, bundle: Bundle, options: Options) -> list[str]:
    words = [*link.ferrule, "measure", str(bundle.path.resolve())]
    words += ["--prompt", ",".join(map(str, options.prompts))]
    for name in ("decode", "repeat", "threads", "context", "chunk"):
        if (value := getattr(options, name)) is not None:
            words += [f"--{name}", str(value)]
    return words


def _said(stderr: str, word: str) -> str:
    lines = [line.removeprefix(f"{word}: ") for line in stderr.splitlines() if line.startswith(f"{word}: ")]
    return lines[-1] if lines else ""


def _failed(bundle: Bundle, code: int, stderr: str) -> FerruleError:
    """Hand on the board's own error and hint."""
    said = _said(stderr, "error") or stderr.strip().rpartition("\n")[2] or "it said nothing"
    kind = UsageError if code == 2 else LinkError
    ended = f"status {code}" if code >= 0 else f"signal {-code}"
    return kind(f"measuring `{bundle.manifest.name}` ended with {ended}: {said}", hint=_said(stderr, "hint"))


@dataclass(frozen=True)
class _Launched:
    events: Launch
    samples: Samples | None


def _launch(link: Link, bundle: Bundle, command: Sequence[str], meter: Meter | None, timeout: float) -> _Launched:
    if meter is not None:
        meter.start()
    try:
        done = link.run(command, timeout)
    finally:
        samples = meter.stop() if meter is not None else None
    if done.code:
        raise _failed(bundle, done.code, done.stderr)
    events = read_events(done.stdout, f"measuring `{bundle.manifest.name}`")
    if (found := only(events, "plan")["bundle_sha256"]) != bundle.hash:
        raise RecordError(
            f"the board measured another bundle: its manifest is {found[:16]}, not {bundle.hash[:16]}",
            hint="copy the bundle to the board again",
        )
    return _Launched(events, samples)


def _facts(bundle: Bundle, packages: dict[str, str]) -> BundleFacts:
    manifest = bundle.manifest
    try:
        return BundleFacts(
            name=manifest.name,
            sha256=bundle.hash,
            recipe=manifest.recipe["name"],
            recipe_key=manifest.recipe["key"],
            bytes=manifest.bytes,
            bits_per_weight=float(manifest.recipe["bits_per_weight"]),
            checkpoint=manifest.checkpoint["name"],
            checkpoint_sha256=manifest.checkpoint["sha256"],
            form=manifest.form,
            engine=manifest.engine,
            engine_version=packages.get(_ENGINE_PACKAGES.get(manifest.engine, "")),
        )
    except KeyError as error:
        raise RecordError(
            f"{bundle.path}: its manifest does not say {error}", hint="convert the checkpoint again"
        ) from None


def _run(
    link: Link,
    bundle: Bundle,
    command: Sequence[str],
    launched: Sequence[_Launched],
    plan: Plan,
    power: Power | Missing,
    load: float | None,
) -> Run:
    launches = [launch.events for launch in launched]
    machines = [only(launch, "machine") for launch in launches]
    if any(machine["machine"] != machines[0]["machine"] for machine in machines):
        raise RecordError("the board's facts changed between launches", hint="profile again on a board left alone")
    prompts = plan.options.prompts
    figures: dict[str, Value] = {**speed(launches, prompts), **memory(launches)}
    samples = [launch.samples for launch in launched if launch.samples is not None]
    if samples:
        figures |= energy_figures(launches, samples, prompts, boot_id())
    else:
        absent = Missing("no power sensor")  # the run's `power` has the reason in full
        figures |= {f"{name}@{prompt}": absent for prompt in prompts for name in ENERGY_FIGURES}
    done = {key: value for key, value in only(launches[0], "plan").items() if key not in _NOT_SETTINGS}
    return Run(
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        ferrule=__version__,
        command=tuple(command),
        target=plan.target,
        board=link.url,
        bundle=_facts(bundle, machines[0]["machine"]["packages"]),
        fidelity=bundle.manifest.fidelity,
        settings={**done, "launches": len(launches), "load_at_start": load},
        machine=machines[0]["machine"],
        before=tuple(machine["conditions"] for machine in machines),
        after=tuple(only(launch, "machine_after")["conditions"] for launch in launches),
        power=power,
        figures=figures,
    )


def profile(
    bundles: Sequence[Path],
    link: Link,
    plan: Plan,
    meter: Meter | Missing,
    progress: Callable[[str], object],
) -> list[Run]:
    """Measure bundles on a board.

    Args:
      bundles: Folders of bundles, on this machine and under the same path on the board.
      link: How to reach the board.
      plan: How to profile.
      meter: What measures power, or why nothing does.
      progress: Called before each launch with what it is.

    Returns:
      One run per bundle, in their order.

    Raises:
      BundleError: A bundle is damaged.
      LinkError: The board could not be reached, or measuring failed on it.
      RecordError: What came back cannot be used.
    """
    opened = [open_bundle(path) for path in bundles]
    commands = [_command(link, bundle, plan.options) for bundle in opened]
    launched: list[list[_Launched]] = [[] for _ in opened]
    for number in range(1, plan.launches + 1):
        for bundle, command, done in zip(opened, commands, launched, strict=True):
            progress(f"{bundle.manifest.name}: launch {number} of {plan.launches}")
            done.append(_launch(link, bundle, command, meter if not isinstance(meter, Missing) else None, plan.timeout))
    power = meter if isinstance(meter, Missing) else meter.power
    # Before the very first launch: later on the load average holds our own work.
    load = only(launched[0][0].events, "machine")["conditions"]["load"]
    return [
        _run(link, bundle, command, done, plan, power, load)
        for bundle, command, done in zip(opened, commands, launched, strict=True)
    ]
