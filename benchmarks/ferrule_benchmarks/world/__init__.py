"""A simulated device with state, for suites and demos: `ferrule run BUNDLE "..." --tools ferrule_benchmarks.world`.

`FERRULE_WORLD` names the start state, one of `device.SCENARIOS`; without it, `showcase`: Wi-Fi off and the inbox full,
so that a message can be sent only after two obstacles were removed. Policies for the scripted model, written for
"send a message to Ana saying I am on my way", are in `policies/`.
"""

from __future__ import annotations

import os
from pathlib import Path

from ferrule_runtime.errors import UsageError
from ferrule_runtime.registry import unknown
from ferrule_runtime.tools import Toolbox

from .device import SCENARIOS, Device
from .tools import World

__all__ = ["SCENARIOS", "Device", "World", "policy", "toolbox", "world"]

_DEFAULT = "showcase"
_POLICIES = Path(__file__).parent / "policies"


def world(name: str) -> World:
    """Return a fresh simulated device in a start state.

    Raises:
      UsageError: No such start state; the hint names the nearest one.
    """
    if name not in SCENARIOS:
        raise unknown("start state of the simulated device", name, SCENARIOS, UsageError)
    return World(SCENARIOS[name])


def toolbox() -> Toolbox:
    """Return the tools over a fresh device in the start state that `FERRULE_WORLD` names, or the showcase's.

    Raises:
      UsageError: `FERRULE_WORLD` names no start state.
    """
    made = world(os.environ.get("FERRULE_WORLD", _DEFAULT))
    return Toolbox.of(made, note="the device is simulated", state=made.state)


def policy(name: str) -> Path:
    """Return the file of a policy for the scripted model that comes with the simulated device.

    Raises:
      UsageError: No such policy; the hint names the nearest one.
    """
    known = {path.stem: path for path in _POLICIES.glob("*.toml")}
    if name not in known:
        raise unknown("policy", name, known, UsageError)
    return known[name]
