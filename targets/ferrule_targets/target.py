"""Targets: what a kind of board is. One TOML per kind, in `boards/` or anywhere; the file's name is the target's."""

from __future__ import annotations

import difflib
import os
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from ferrule_runtime.commandline import byte_size
from ferrule_runtime.errors import TargetError, UsageError
from ferrule_runtime.procfs import Absent, kib, memory_limit
from ferrule_runtime.registry import data_names, read_data

__all__ = ["THIS_MACHINE", "Memory", "Target", "load_target", "target_names"]

THIS_MACHINE = "this machine"
_PACKAGE = "ferrule_targets.boards"
_MEMINFO = Path("/proc/meminfo")

# `accuracy_level` of ONNX Runtime's MatMulNBits that quantises the activations to int8; 1 computes in float32.
_INT8 = 4


def _read_bytes(value: Any) -> Any:
    if not isinstance(value, str):
        raise ValueError("write an amount with its unit, such as `512MiB`")
    try:
        return byte_size(value)
    except UsageError as error:
        raise ValueError(str(error)) from None


def _read_memory(value: Any) -> Any:
    if value != THIS_MACHINE:
        return value
    try:
        ram, free = (kib(_MEMINFO, field) for field in ("MemTotal", "MemAvailable"))
    except Absent as reason:
        raise ValueError(f"{reason}; give the amounts in a target of your own") from None
    try:
        limit = memory_limit(Path("/"))
    except Absent:
        limit = ram
    # Built, not validated: these are bytes already.
    return Memory.model_construct(ram=min(ram, limit), free=min(free, limit), source="this machine, just now")


def _read_cores(value: Any) -> Any:
    return len(os.sched_getaffinity(0)) if value == THIS_MACHINE else value


# TOML has arrays only; what is inside them stays strict.
_Names = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(strict=False)]
_Counts = Annotated[tuple[Annotated[int, Field(gt=0)], ...], Field(strict=False)]


class Memory(BaseModel):
    """How much memory a board has.

    Attributes:
      ram: Bytes of RAM as sold; of several versions, the smallest.
      free: Bytes that its system, headless and idle, leaves for the agent. For planning; on the board, what is
        free at that moment decides.
      source: Where the two figures come from.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    ram: Annotated[int, BeforeValidator(_read_bytes)]
    free: Annotated[int, BeforeValidator(_read_bytes)]
    source: Annotated[str, Field(min_length=1)]

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.free > self.ram:
            raise ValueError(f"`free` is {self.free} bytes, more than the {self.ram} of `ram`")
        return self


class Target(BaseModel):
    """A kind of board: everything that converting and flashing for it need to know.

    Attributes:
      name: The name of its file.
      title: What people call it.
      memory: RAM, and what of it is free. In a file: a table, or `"this machine"`.
      cores: Processor cores that can compute. In a file: a number, or `"this machine"`.
      features: CPU features that a bundle for it relies on, as Linux names them in `/proc/cpuinfo`.
      engine: What executes graphs there: the name of a file in the runtime's `engines/`.
      forms: Shapes a graph may take: names of files in the converters' `formats/`.
      bits: Widths of quantised weights that its engine executes; float32 is always legal.
      groups: Weights that may share a scale.
      accuracy_level: How MatMulNBits computes there: 4 with int8 activations, 1 in float32.
      sensors: Power and temperature sensors on the board; each is a file in the profilers' `sensors/`.
      links: Ways to reach it: names of files in `links/`.
      agent: What can run the agent loop there: this runtime, LiteRT-LM, or nothing.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: Annotated[str, Field(min_length=1)]
    title: Annotated[str, Field(min_length=1)]
    memory: Annotated[Memory, BeforeValidator(_read_memory)]
    cores: Annotated[int, BeforeValidator(_read_cores), Field(gt=0)]
    features: _Names
    engine: Annotated[str, Field(min_length=1)]
    forms: Annotated[_Names, Field(min_length=1)]
    bits: _Counts
    groups: _Counts
    accuracy_level: Literal[1, 4]
    sensors: _Names
    links: Annotated[_Names, Field(min_length=1)]
    agent: Literal["python", "litert-lm", "none"]

    @model_validator(mode="after")
    def _computes_as_said(self) -> Self:
        # Without dot-product instructions the Arm kernels take level 4 and silently compute level 1
        # (measured: equal errors and equal instruction counts on a Cortex-A72).
        if self.accuracy_level == _INT8 and "asimd" in self.features and "asimddp" not in self.features:
            raise ValueError("`accuracy_level` 4 needs the feature `asimddp`: without it the kernels compute level 1")
        return self

    @property
    def activations(self) -> str:
        """What the activations of quantised layers are computed in: `int8` or `float32`."""
        return "int8" if self.accuracy_level == _INT8 else "float32"


def _keys(model: type[BaseModel]) -> list[str]:
    return [key for key in model.model_fields if not (model is Target and key == "name")]


def _explain(error: ErrorDetails, where: str) -> TargetError:
    """Turn one of pydantic's complaints into one of ours: the file, the key, what was there, what should be."""
    path = [str(part) for part in error["loc"]]
    key = ".".join(path)
    known = _keys(Memory if path[:1] == ["memory"] and len(path) > 1 else Target)
    if error["type"] == "extra_forbidden":
        near = difflib.get_close_matches(path[-1], known, n=1)
        hint = f"did you mean `{near[0]}`? " if near else ""
        return TargetError(f"{where}: unknown key `{key}`", hint=f"{hint}known: {', '.join(sorted(known))}")
    if error["type"] == "missing":
        return TargetError(f"{where}: `{key}` is missing", hint=f"needed: {', '.join(sorted(known))}")
    message = error["msg"].removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    if error["type"] == "value_error":
        return TargetError(f"{where}: `{key}`: {message}" if key else f"{where}: {message}")
    return TargetError(f"{where}: `{key}` is {error['input']!r}: {message}")


def _parse(text: str, name: str, where: str) -> Target:
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise TargetError(f"{where}: not TOML: {error}", hint="`ferrule targets host` shows the keys") from None
    if "name" in values:
        raise TargetError(f"{where}: unknown key `name`", hint="the name of the file is the target's name")
    try:
        return Target.model_validate({"name": name, **values})
    except ValidationError as error:
        # A misspelt key is also a missing one: the misspelling is what to tell.
        raise _explain(min(error.errors(), key=lambda one: one["type"] != "extra_forbidden"), where) from None


def target_names() -> list[str]:
    """List the targets that are shipped."""
    return data_names(_PACKAGE)


def load_target(name: str | Path) -> Target:
    """Load a target by its name, or from a TOML file.

    Args:
      name: A name of `target_names()`, or a path that ends in `.toml`.

    Raises:
      TargetError: Unknown, cannot be read, or malformed; the text names the file and the key.
    """
    path = Path(name)
    if path.suffix == ".toml":
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise TargetError(
                f"{path}: cannot be read: {reason}", hint=f"shipped targets: {', '.join(target_names())}"
            ) from None
        return _parse(text, path.stem, str(path))
    return _parse(read_data("target", _PACKAGE, str(name), TargetError), str(name), f"target `{name}`")
