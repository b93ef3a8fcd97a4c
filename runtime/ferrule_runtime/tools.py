"""Tools: typed Python functions with their JSON schema, and what they do to the world."""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from .errors import FerruleError, ToolError, UsageError
from .messages import Call
from .registry import unknown
from .schemas import describe, fits, hints_of, read

__all__ = ["Effect", "Tool", "Toolbox", "check_arguments", "load_toolbox", "tool", "with_defaults"]

# What a call does: looks, changes the device, sends data off it, or cannot be taken back.
Effect = Literal["read", "write", "egress", "irreversible"]

_MARK = "__ferrule_tool__"


@dataclass(frozen=True)
class Tool:
    """One thing an agent can do.

    Attributes:
      name: What the model calls it.
      description: What it does, for the model.
      parameters: JSON schema of an object.
      run: The function; takes the arguments by keyword and returns text or JSON-like data.
      effect: What a call does to the world.
      requires: Conditions that must hold, such as `network`; a ToolError's `missing` names one of them.
      provides: Conditions that a successful call can bring about.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    run: Callable[..., Any]
    effect: Effect = "write"
    requires: tuple[str, ...] = ()
    provides: tuple[str, ...] = ()

    def schema(self) -> dict[str, Any]:
        """Return the tool as chat templates expect it: `{"type": "function", "function": {...}}`."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


def tool(
    *, effect: Effect = "write", requires: Iterable[str] = (), provides: Iterable[str] = ()
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Mark a typed function or method as a tool; its schema comes from hints and docstring.

    Args:
      effect: What a call does to the world.
      requires: Conditions that must hold, such as `network`.
      provides: Conditions that a successful call can bring about.
    """

    def mark(function: Callable[..., Any]) -> Callable[..., Any]:
        description, parameters = describe(function)
        function.__dict__[_MARK] = {
            "name": function.__name__,
            "description": description,
            "parameters": parameters,
            "effect": effect,
            "requires": tuple(requires),
            "provides": tuple(provides),
        }
        return function

    return mark


def _runner(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function as it is called with JSON values."""
    hints = hints_of(function)

    def run(**arguments: Any) -> Any:
        return function(**{name: read(value, hints[name]) for name, value in arguments.items()})

    return run


class Toolbox:
    """The tools of one task, by name.

    Attributes:
      note: What people should know of the tools, such as that their device is simulated.
      state: Returns what the tools act on, as JSON-like data, so that an outcome can be checked; None where the
        tools cannot show it.
    """

    def __init__(
        self, tools: Iterable[Tool], *, note: str = "", state: Callable[[], dict[str, Any]] | None = None
    ) -> None:
        self.note = note
        self.state = state
        self._tools: dict[str, Tool] = {}
        for item in tools:
            if item.name in self._tools:
                raise UsageError(f"two tools are called `{item.name}`", hint="names must differ")
            self._tools[item.name] = item

    @classmethod
    def of(cls, owner: Any, *, note: str = "", state: Callable[[], dict[str, Any]] | None = None) -> Toolbox:
        """Collect what `@tool` marked on an object or module, in the order it was written."""
        members = vars(owner if inspect.ismodule(owner) else type(owner))
        marked = [getattr(owner, name) for name, member in members.items() if hasattr(member, _MARK)]
        return cls((Tool(run=_runner(item), **getattr(item, _MARK)) for item in marked), note=note, state=state)

    def __iter__(self) -> Iterator[Tool]:
        return iter(self._tools.values())

    def __len__(self) -> int:
        return len(self._tools)

    def __contains__(self, name: object) -> bool:
        return name in self._tools

    def __getitem__(self, name: str) -> Tool:
        if name not in self._tools:
            error = unknown("tool", name, self._tools, ToolError)
            raise ToolError(str(error), cause="unknown_tool", hint=error.hint)
        return self._tools[name]

    def invoke(self, call: Call) -> Any:
        """Check a call's arguments against the schema, then run it.

        Returns:
          Text or JSON data. Anything else is named, not shown: the tool has run, so it is not a failure.

        Raises:
          ToolError: Unknown tool, arguments that do not fit, or the tool's own failure with its cause.
        """
        item = self[call.name]
        arguments = check_arguments(item, call.arguments)
        try:
            result = item.run(**arguments)
        except ToolError:
            raise
        except Exception as error:
            raise ToolError(f"{call.name}: {type(error).__name__}: {error}", cause="crashed") from error
        try:
            return json.loads(json.dumps(result, allow_nan=False))
        except (TypeError, ValueError, RecursionError):
            return f"(a result that is not JSON: {type(result).__name__})"


def check_arguments(item: Tool, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments if they fit the tool's schema, whole floats as integers where it asks for integers.

    Raises:
      ToolError: One is missing, unknown, or of another type; cause `bad_arguments`.
    """
    properties = item.parameters.get("properties", {})
    for name in item.parameters.get("required", ()):
        if name not in arguments:
            raise ToolError(f"{item.name}: argument `{name}` is missing", cause="bad_arguments")
    checked = {}
    for name, value in arguments.items():
        if name not in properties:
            raise ToolError(f"{item.name}: there is no argument `{name}`", cause="bad_arguments")
        if not fits(value, properties[name]):
            wanted = properties[name].get("enum") or properties[name].get("type")
            raise ToolError(f"{item.name}: argument `{name}` is {value!r}, expected {wanted}", cause="bad_arguments")
        checked[name] = _whole(value, properties[name])
    return checked


def _whole(value: Any, schema: Mapping[str, Any]) -> Any:
    if schema.get("type") == "integer":
        return int(value)
    if schema.get("type") == "array" and "items" in schema:
        return [_whole(item, schema["items"]) for item in value]
    return value


def with_defaults(item: Tool, call: Call) -> Call:
    """Return the call with every default written out, so that calls which mean the same compare equal."""
    properties = item.parameters.get("properties", {})
    defaults = {name: schema["default"] for name, schema in properties.items() if "default" in schema}
    return Call(call.name, {**defaults, **call.arguments})


def load_toolbox(module: str) -> Toolbox:
    """Load the tools of `MODULE`: what its `toolbox()` returns, or else its `@tool` functions.

    Raises:
      UsageError: The module cannot be imported, fails when loaded, or has no tools.
    """
    try:
        loaded = importlib.import_module(module)
        make = getattr(loaded, "toolbox", None)
        box = make() if callable(make) else Toolbox.of(loaded)
    except FerruleError:
        raise
    except ImportError as error:
        raise UsageError(
            f"tools module `{module}` cannot be imported: {error}", hint="it must be on PYTHONPATH"
        ) from None
    except Exception as error:
        raise UsageError(
            f"tools module `{module}` fails when loaded: {type(error).__name__}: {error}",
            hint=f'python -c "import {module}" shows where',
        ) from error
    if not isinstance(box, Toolbox) or not len(box):
        raise UsageError(f"tools module `{module}` has no tools", hint="mark functions with @tool")
    return box
