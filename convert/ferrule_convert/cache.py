"""Where what can be made or fetched again is kept."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["cache_folder"]


def cache_folder() -> Path:
    """Return the folder for what can be made again: `FERRULE_CACHE`, or one in the user's cache."""
    given = os.environ.get("FERRULE_CACHE")
    return Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ferrule"
