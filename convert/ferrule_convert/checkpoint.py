"""Checkpoints: published weights, configuration and tokenizer, read lazily and under one set of names.

Whatever the file format, tensors carry the names and layout of the Hugging Face release, and the configuration its
keys, so that a model family is described once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ferrule_runtime.errors import CheckpointError

from .graph import Weight

__all__ = ["Checkpoint", "open_checkpoint"]


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


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a checkpoint by reading its headers.

    Args:
      path: A GGUF file.

    Raises:
      CheckpointError: It is not there, not understood, truncated, or lacks a part.
    """
    if not path.exists():
        raise CheckpointError(f"{path}: no such checkpoint", hint="`ferrule fetch NAME` brings a catalogued one")
    if path.is_dir():
        raise CheckpointError(f"{path}: is a folder", hint="give the GGUF file itself")
    from . import gguf_file

    return gguf_file.read(path)
