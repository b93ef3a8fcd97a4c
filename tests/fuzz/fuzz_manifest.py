"""A bundle's manifest, with the bundle's other files in place."""

import shutil
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "board"))

from tiny import write_tiny

from ferrule_runtime.bundle import MANIFEST, Manifest, open_bundle

BUNDLE = Path("bundle")


def seeds(folder: Path) -> None:
    write_tiny(BUNDLE)
    shutil.copy(BUNDLE / MANIFEST, folder)


def one(data: bytes) -> None:
    (BUNDLE / MANIFEST).write_bytes(data)
    shutil.rmtree("state", ignore_errors=True)
    manifest = open_bundle(BUNDLE).manifest
    assert Manifest.from_json(manifest.to_json(), "again") == manifest
