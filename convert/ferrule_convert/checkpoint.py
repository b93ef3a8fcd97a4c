"""Checkpoints: published weights, configuration and tokenizer, read lazily and under one set of names.

Whatever the file format, tensors carry the names and layout of the Hugging Face release, and the configuration its
keys, so that a model family is described once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ferrule_runtime.bundle import file_sha256
from ferrule_runtime.errors import CheckpointError

from .graph import Weight

__all__ = ["Checkpoint", "finite", "is_there", "open_checkpoint"]

# What makes a published folder what it is: weights, configuration, tokenizer, template.
_HASHED = (".safetensors", ".json", ".jinja")


def _identity(path: Path) -> str:
    """Return a file's own hash, or one over the folder's files and their names."""
    if path.is_file():
        return file_sha256(path)
    every = (*path.glob("*"), *path.glob("additional_chat_templates/*"))
    files = sorted(one for one in every if one.suffix in _HASHED and one.is_file())
    lines = [f"{one.relative_to(path).as_posix()} {one.stat().st_size} {file_sha256(one)}" for one in files]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


@dataclass(frozen=True)
class Checkpoint:
    """A published model on this machine; no weight has been read.

    Attributes:
      name: What the publisher calls it.
      path: The file or folder.
      config: Configuration with Hugging Face's keys; `model_type` names the family.
      tensors: Every tensor by its Hugging Face name.
      tokenizer_json: The tokenizer in the `tokenizers` library's JSON form.
      template: The chat template (jinja), or None.
      stop_tokens: Ids that end a reply, from wherever the checkpoint says so.
      licence: SPDX-like name, or None where it does not say.
      stored: How the weights are stored, such as `GGUF Q4_1`.
      notes: What people should know: parts left out, contradictions and how they were settled.
      lora: The folder of the adapter that is merged into the tensors, or None.
    """

    name: str
    path: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, Weight]
    tokenizer_json: str
    template: str | None
    stop_tokens: tuple[int, ...]
    licence: str | None
    stored: str
    notes: tuple[str, ...] = ()
    lora: Path | None = None

    def sha256(self) -> str:
        """Return the identity of what was published: the file's own hash, or one over the folder's files.

        With an adapter it is one over both.
        """
        if self.lora is None:
            return _identity(self.path)
        return hashlib.sha256(f"{_identity(self.path)} {_identity(self.lora)}".encode()).hexdigest()

    def tensor(self, name: str, shape: tuple[int, ...]) -> Weight:
        """Return one tensor, which must have the shape that the configuration implies.

        Raises:
          CheckpointError: It is missing, or of another shape.
        """
        if name not in self.tensors:
            raise CheckpointError(
                f"{self.path}: no tensor `{name}`", hint="the file is incomplete, or of another model than it says"
            )
        found = self.tensors[name]
        if found.shape != shape:
            raise CheckpointError(
                f"{self.path}: `{name}` is {_by(found.shape)}, its configuration says {_by(shape)}",
                hint="weights and configuration are of different models",
            )
        return found


def _by(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape))


def finite(values: NDArray[np.float32], name: str, start: int, path: Path, what: str = "values") -> NDArray[np.float32]:
    """Return rows that were read, if all of them are finite.

    Raises:
      CheckpointError: Some are not; says how many, and in which rows.
    """
    if bad := int((~np.isfinite(values)).sum()):
        raise CheckpointError(
            f"{path}: `{name}` holds {bad} {what} that are not finite in rows {start} to {start + len(values) - 1}",
            hint="the weights are damaged; fetch the file again",
        )
    return values


def is_there(path: Path) -> bool:
    """Tell whether something stands at a path; at one that no file can have, or that may not be seen, is nothing."""
    try:
        return path.exists()
    except OSError:
        return False


def open_checkpoint(path: Path, lora: Path | None = None) -> Checkpoint:
    """Open a checkpoint by reading its headers.

    Args:
      path: A GGUF file, or a Hugging Face folder.
      lora: The folder of a LoRA adapter for it, which is merged as weights are read.

    Raises:
      CheckpointError: It is not there, not understood, truncated, or lacks a part.
    """
    if not is_there(path):
        raise CheckpointError(f"{path}: no such checkpoint", hint="`ferrule fetch NAME` brings a catalogued one")
    from . import gguf_file, hf_folder

    if path.suffix == ".safetensors" and path.is_file():
        raise CheckpointError(f"{path}: weights alone are no model", hint="name the folder, with its config.json")
    checkpoint = hf_folder.read(path) if path.is_dir() else gguf_file.read(path)
    if lora is None:
        return checkpoint
    from .lora import merge

    return merge(checkpoint, lora)
