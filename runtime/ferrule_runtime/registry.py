"""Kinds of which there are several: one file each, found by name, loaded when asked for."""

from __future__ import annotations

import difflib
import pkgutil
from collections.abc import Iterable
from importlib import import_module, resources
from types import ModuleType

from .errors import FerruleError

__all__ = ["data_names", "load_module", "module_names", "read_data", "unknown"]


def unknown(kind: str, name: str, known: Iterable[str], error: type[FerruleError] = FerruleError) -> FerruleError:
    """Return the error for a name that does not exist, with the nearest one that does.

    Args:
      kind: What was looked for, such as `recipe`.
      name: What the user wrote.
      known: What exists.
      error: The class of error to make.
    """
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean `{near[0]}`? " if near else ""
    return error(f"unknown {kind} `{name}`", hint=f"{hint}known: {', '.join(names) or 'none'}")


def module_names(package: str) -> list[str]:
    """List the kinds in a package: its modules, with `-` for `_`; private ones are left out."""
    path = import_module(package).__path__
    return sorted(m.name.replace("_", "-") for m in pkgutil.iter_modules(path) if not m.name.startswith("_"))


def load_module(kind: str, package: str, name: str, error: type[FerruleError] = FerruleError) -> ModuleType:
    """Import the module of one kind by its name.

    Raises:
      FerruleError: No such module; the hint names the nearest one.
    """
    key = name.replace("_", "-")
    if key not in module_names(package):
        raise unknown(kind, name, module_names(package), error)
    return import_module(f"{package}.{key.replace('-', '_')}")


def data_names(package: str) -> list[str]:
    """List the TOML files of a package, without their suffix."""
    files = (entry.name for entry in resources.files(package).iterdir())
    return sorted(name.removesuffix(".toml") for name in files if name.endswith(".toml"))


def read_data(kind: str, package: str, name: str, error: type[FerruleError] = FerruleError) -> str:
    """Read the TOML text of one kind by its name.

    Raises:
      FerruleError: No such file; the hint names the nearest one.
    """
    if name not in data_names(package):
        raise unknown(kind, name, data_names(package), error)
    return (resources.files(package) / f"{name}.toml").read_text(encoding="utf-8")
