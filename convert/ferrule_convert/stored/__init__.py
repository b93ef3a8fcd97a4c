"""Containers of matrices that were quantised before they were released, one file each.

A file's name is the configuration's `quant_method`. Each module defines `PARTS`, what it stores of one matrix;
`settings(raw, folder)`, which checks what the configuration says; and `matrix(name, parts, settings, folder)`, which
returns the weight. Tensors are called by the matrix's name and the part's: `q_proj.qweight` is one of `q_proj.weight`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from ferrule_runtime.errors import CheckpointError
from ferrule_runtime.registry import load_module, module_names

from ..graph import Weight
from ..safetensors_file import Mapped
from ..values import printable

__all__ = ["assembled", "container", "is_packed"]


def container(quantised: Mapping[str, Any], folder: Path) -> ModuleType | None:
    """Return the module of a folder's container, or None where its configuration says nothing.

    Raises:
      CheckpointError: No such container is read.
    """
    if not quantised:
        return None
    method, known = quantised.get("quant_method"), module_names(__name__)
    if method not in known:
        raise CheckpointError(
            f"{folder}: its weights are quantised already ({printable(method)})",
            hint=f"{' and '.join(known)} are read; otherwise convert the release that is not quantised",
        )
    return load_module("container", __name__, str(method), CheckpointError)


def is_packed(module: ModuleType | None, name: str) -> bool:
    """Tell whether a tensor is one of a container's packed parts, which are not read as floats."""
    return module is not None and module.PARTS.get(name.rpartition(".")[2]) == "I32"


def assembled(
    module: ModuleType, quantised: Mapping[str, Any], tensors: Mapping[str, Weight], folder: Path
) -> dict[str, Weight]:
    """Return tensors with one matrix in place of each set of parts.

    Args:
      module: The container.
      quantised: What the configuration says of it.
      tensors: As the files have them.
      folder: Of the files.

    Raises:
      CheckpointError: A part is missing, doubled, or of another type or shape than the configuration says.
    """
    settings = module.settings(quantised, folder)
    result: dict[str, Weight] = {}
    found: dict[str, dict[str, Mapped]] = {}
    for name, weight in tensors.items():
        stem, _, part = name.rpartition(".")
        if part in module.PARTS and isinstance(weight.rows, Mapped):
            found.setdefault(stem, {})[part] = weight.rows
        else:
            result[name] = weight
    if not found:
        raise CheckpointError(
            f"{folder}: config.json says quantised by {printable(quantised['quant_method'])}, no tensor is",
            hint="weights and configuration are of different releases",
        )
    for stem, parts in found.items():
        name = f"{stem}.weight"
        if name in result:
            raise CheckpointError(
                f"{folder}: `{printable(name)}` is there twice, as floats and as `{next(iter(parts))}`",
                hint="weights and configuration are of different releases",
            )
        for part, mapped in parts.items():
            if (mapped.kind == "I32") != (module.PARTS[part] == "I32"):
                raise CheckpointError(
                    f"{mapped.path}: `{printable(mapped.name)}` is stored as {mapped.kind}", hint="fetch the file again"
                )
        result[name] = cast(Weight, module.matrix(name, parts, settings, folder))
    return result
