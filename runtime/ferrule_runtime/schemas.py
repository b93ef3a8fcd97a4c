"""JSON schemas of Python functions, made from their type hints; values checked and read by them."""

from __future__ import annotations

import enum
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from .errors import UsageError

__all__ = ["describe", "fits", "hints_of", "read", "schema_of"]

_SCALARS: dict[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean"}
_PYTHON: dict[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,), "array": (list,),
    "object": (dict,),
}  # fmt: skip


def _optional(hint: Any) -> Any:
    """Return `X` for `X | None`, and None for anything else."""
    if get_origin(hint) in (typing.Union, types.UnionType):
        kept = [part for part in get_args(hint) if part is not type(None)]
        if len(kept) == 1:
            return kept[0]
    return None


def schema_of(hint: Any, where: str) -> dict[str, Any]:
    """Return the JSON schema of one type hint.

    Args:
      hint: str, int, float, bool, a Literal of one of these, an Enum of texts, a list of these, `X | None`, or
        Annotated with a description.
      where: What the hint belongs to, for the error.

    Raises:
      UsageError: The type has no schema here.
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        notes = [note for note in arguments[1:] if isinstance(note, str)]
        return schema_of(arguments[0], where) | ({"description": " ".join(notes)} if notes else {})
    if (inner := _optional(hint)) is not None:
        return schema_of(inner, where)
    if origin is Literal:
        kinds = {type(value) for value in arguments}
        if len(kinds) == 1 and kinds <= set(_SCALARS):
            return {"type": _SCALARS[kinds.pop()], "enum": list(arguments)}
    elif origin is list:
        return {"type": "array", "items": schema_of(arguments[0], where)}
    elif inspect.isclass(hint) and hint in _SCALARS:
        return {"type": _SCALARS[hint]}
    elif inspect.isclass(hint) and issubclass(hint, enum.Enum) and all(isinstance(m.value, str) for m in hint):
        return {"type": "string", "enum": [member.value for member in hint]}
    raise UsageError(
        f"{where}: type `{hint}` has no JSON schema here",
        hint="use str, int, float, bool, Literal, an Enum of texts, list of these, or Annotated with a description",
    )


def read(value: Any, hint: Any) -> Any:
    """Turn a JSON value that fits a hint's schema into what the hint says: enum members, floats, lists of these."""
    if get_origin(hint) is Annotated:
        return read(value, get_args(hint)[0])
    if (inner := _optional(hint)) is not None:
        return read(value, inner)
    if get_origin(hint) is list:
        return [read(item, get_args(hint)[0]) for item in value]
    if hint is float:
        return float(value)
    if inspect.isclass(hint) and issubclass(hint, enum.Enum):
        return hint(value)
    return value


def hints_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Return a function's type hints by argument name.

    Raises:
      UsageError: A hint names something that cannot be found from the function's module.
    """
    try:
        hints = get_type_hints(function, include_extras=True)
    except NameError as error:
        raise UsageError(
            f"tool `{function.__name__}`: a type hint cannot be read: {error}",
            hint="define the type at the top of the tool's module",
        ) from None
    return {name: hint for name, hint in hints.items() if name != "return"}


def describe(function: Callable[..., Any]) -> tuple[str, dict[str, Any]]:
    """Return a function's description (its docstring's first paragraph) and the JSON schema of its arguments.

    Raises:
      UsageError: No docstring, an argument without a hint or with one that has no schema, or one that cannot be
        given by name.
    """
    text = inspect.getdoc(function)
    if not text:
        raise UsageError(f"tool `{function.__name__}` has no docstring", hint="the model reads its first paragraph")
    hints = hints_of(function)
    properties: dict[str, Any] = {}
    required: list[str] = []
    for name, parameter in inspect.signature(function).parameters.items():
        if name == "self":
            continue
        where = f"tool `{function.__name__}`, argument `{name}`"
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise UsageError(f"{where}: cannot be given by name", hint="write each argument out; no `*`, `**` or `/`")
        if name not in hints:
            raise UsageError(f"{where}: no type hint", hint="a schema is made from the hints")
        properties[name] = schema_of(hints[name], where)
        default = parameter.default
        if default is parameter.empty:
            required.append(name)
        elif default is not None:
            properties[name]["default"] = default.value if isinstance(default, enum.Enum) else default
    schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return text.split("\n\n")[0].replace("\n", " "), schema


def fits(value: Any, schema: Mapping[str, Any]) -> bool:
    """Tell whether a JSON value fits a schema. A type that is not known here fits nothing."""
    kind = schema.get("type")
    if kind is not None:
        if kind not in _PYTHON or (isinstance(value, bool) and kind != "boolean"):
            return False
        # JSON Schema draft 2020-12, validation 6.1.1: a number with a zero fraction is an integer.
        whole = kind == "integer" and isinstance(value, float) and value.is_integer()
        if not whole and not isinstance(value, _PYTHON[kind]):
            return False
    if "enum" in schema and value not in schema["enum"]:
        return False
    if kind == "array" and "items" in schema:
        return all(fits(item, schema["items"]) for item in value)
    return True
