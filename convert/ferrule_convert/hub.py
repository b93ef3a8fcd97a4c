"""Releases on the Hugging Face hub, by `owner/name` or `owner/name@revision`: whole, or their headers alone.

The offline flag (`HF_HUB_OFFLINE`), cache, endpoint and token are the `huggingface-hub` library's own.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ferrule_runtime.errors import CheckpointError, FerruleError, FetchError

from .checkpoint import Checkpoint, open_checkpoint

__all__ = ["headers", "is_hub_id", "whole"]

_ID = re.compile(r"(?P<repository>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>\w[\w./-]*))?")
# What ends so is a file that is not there.
_FILES = (".gguf", ".safetensors", ".json", ".bin")
_ONE, _INDEX = "model.safetensors", "model.safetensors.index.json"
# Everything that a folder's reader looks at, but for the weights.
_SMALL = [
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.json",
    "chat_template.jinja", "additional_chat_templates/tool_use.jinja", _INDEX, "README.md",
]  # fmt: skip
# Longest silence of the hub.
_TIMEOUT_S = 10
# First request for a header: most are shorter.
_GUESS = 100_000
# Safetensors' own limit of a header, and the eight bytes before it.
_MOST_HEADER = 100_000_008


def is_hub_id(name: str) -> bool:
    """Tell whether something that is no path here may be a release on the hub."""
    return _ID.fullmatch(name) is not None and not name.endswith(_FILES)


def _split(name: str) -> tuple[str, str | None]:
    found = _ID.fullmatch(name)
    if found is None:
        raise CheckpointError(f"`{name}` is no hub id", hint="owner/name, or owner/name@revision")
    return found["repository"], found["revision"]


def _asked(name: str, call: Callable[[], Any]) -> Any:
    """Ask the hub."""
    try:
        return call()
    except FerruleError:
        raise
    except Exception as error:  # the library raises a dozen types, all meaning "not to be had"
        reason = (str(error).splitlines() or ["no reason given"])[0]
        raise FetchError(
            f"`{name}` is no path here, and not to be had from the hub: {type(error).__name__}: {reason}",
            hint="is the name right, this machine online (`HF_HUB_OFFLINE`), and the licence accepted?",
        ) from None


def _download(name: str, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    repository, revision = _split(name)
    return Path(_asked(name, lambda: snapshot_download(repository, revision=revision, allow_patterns=patterns)))


def _shards(folder: Path) -> list[str]:
    """Return the weight files of a release; the index says them, if there is one."""
    path = folder / _INDEX
    if not path.is_file():
        return [_ONE]
    try:
        shards = sorted(set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()))
        # They become patterns and paths: nothing but plain names.
        if all(re.fullmatch(r"\w[\w.-]*", shard) for shard in shards):
            return shards
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass  # said below
    raise CheckpointError(f"{path}: no `weight_map` of plain file names", hint="fetch the file again")


def _named(name: str, folder: Path, commit: str) -> Checkpoint:
    checkpoint = open_checkpoint(folder)
    return replace(checkpoint, name=_split(name)[0], notes=(f"from the hub at {commit}", *checkpoint.notes))


def _without_orders(checkpoint: Checkpoint) -> Checkpoint:
    """Leave out in which order columns are stored (act-order), since that lies among the weights; say so."""
    tensors = dict(checkpoint.tensors)
    for name, weight in checkpoint.tensors.items():
        if weight.integers and weight.integers.order:
            tensors[name] = replace(weight, rows=weight.integers.as_stored())
    if tensors == checkpoint.tensors:
        return checkpoint
    said = "act-order: bringing features into its order takes memory that headers do not tell; it is not counted"
    return replace(checkpoint, tensors=tensors, notes=(*checkpoint.notes, said))


def whole(name: str) -> Checkpoint:
    """Bring a release into the hub's cache, and open it.

    Raises:
      FetchError: It is not to be had.
      CheckpointError: It cannot be read.
    """
    folder = _download(name, _SMALL)
    folder = _download(f"{_split(name)[0]}@{folder.name}", [*_SMALL, *_shards(folder)])
    return _named(name, folder, folder.name)


def _beginning(url: str, count: int) -> bytes:
    """Return the first bytes of a file; no more are taken, whatever the server sends."""
    # Documented there; the package's types do not say that they are exported.
    from huggingface_hub.utils import (  # type: ignore[attr-defined]
        build_hf_headers,
        get_session,
        hf_raise_for_status,
    )

    wanted = {**build_hf_headers(), "Range": f"bytes=0-{count - 1}", "Accept-Encoding": "identity"}
    data = bytearray()
    # The library's own requests have this limit, its session has none.
    with get_session().stream("GET", url, headers=wanted, follow_redirects=True, timeout=_TIMEOUT_S) as reply:
        hf_raise_for_status(reply)
        for chunk in reply.iter_bytes():
            data += chunk
            if len(data) >= count:
                break
    return bytes(data[:count])


def _hollow(url: str, path: Path) -> None:
    """Write a file that has the header and the length of one on the hub, and nothing between."""
    from huggingface_hub import get_hf_file_metadata

    size = get_hf_file_metadata(url).size
    if size is None:
        raise FetchError(f"{url}: the hub does not say how long it is")
    data = _beginning(url, min(size, _GUESS))
    if len(data) >= 8:
        length = min(8 + struct.unpack("<Q", data[:8])[0], size, _MOST_HEADER)
        if length > len(data):
            data = _beginning(url, length)
    path.write_bytes(data)
    os.truncate(path, size)


def headers(name: str) -> Checkpoint:
    """Open a release without downloading its weights; none of them can be read.

    What is in the hub's cache is used. Otherwise the headers of the weight files are asked for, and put into files that
    are gone when this returns.

    Raises:
      FetchError: It is not to be had.
      CheckpointError: It cannot be read.
    """
    from huggingface_hub import hf_hub_url

    folder = _download(name, _SMALL)
    repository, commit = _split(name)[0], folder.name
    shards = _shards(folder)
    if all((folder / shard).is_file() for shard in shards):
        return _named(name, folder, commit)
    with tempfile.TemporaryDirectory(prefix="ferrule-headers-") as temporary:
        copy = Path(temporary) / commit
        shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("*.safetensors"))
        for shard in shards:
            url = hf_hub_url(repository, shard, revision=commit)
            _asked(name, partial(_hollow, url, copy / shard))
        return _without_orders(_named(name, copy, commit))
