"""The grammar of one FunctionGemma call, written out of the tool's schema."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..calls import NUMBER, literal, refuse_keywords, token
from ..errors import ConstraintError
from ..tools import Tool

__all__ = ["CALL_END", "CALL_START", "ESCAPE", "gemma_grammar"]

CALL_START, CALL_END, ESCAPE = "<start_function_call>", "<end_function_call>", "<escape>"

_OBJECT = frozenset({"type", "properties", "required", "additionalProperties"})
_NUMBER = frozenset({"type", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
_NAME = re.compile(r"[^:{}\[\],<>\s]+")


class _Rules:
    """Rules of one grammar, numbered as they are made."""

    def __init__(self, controls: frozenset[str]) -> None:
        self.controls = controls
        self.lines: list[str] = []

    def add(self, body: str, prefix: str = "r") -> str:
        name = f"{prefix}{len(self.lines)}"
        self.lines.append(f"{name}: {body}")
        return name

    def escaped(self, inner: str) -> str:
        mark = token(ESCAPE, self.controls)
        return f"{mark} {inner} {mark}"

    def text(self, schema: Mapping[str, Any], where: str) -> str:
        refuse_keywords(schema, frozenset({"type", "minLength", "maxLength"}), where)
        least, most = schema.get("minLength", 0), schema.get("maxLength")
        if most == 0:
            return self.escaped("")
        length = f"{{{max(1, least)},{'' if most is None else most}}}"
        body = f"/(?s:.{length})/ & ~/(?s:.*{ESCAPE}.*)/"
        if ESCAPE not in self.controls:
            # Spelled, the end mark must be one lexeme with the text, or the text would swallow its beginning.
            optional = "" if least else "?"
            return f"{literal(ESCAPE)} {self.add(f'({body}){optional} {literal(ESCAPE)}', 'TEXT')}"
        # An empty text has no lexeme of its own.
        name = self.add(body, "TEXT")
        return self.escaped(name if least else f"{name}?")

    def words(self, values: Sequence[Any], where: str) -> str:
        written = []
        for value in values:
            if isinstance(value, str):
                if ESCAPE in value:
                    raise ConstraintError(f"{where}: the value {value!r} cannot be written")
                written.append(self.escaped(literal(value) if value else ""))
            elif value is None or isinstance(value, bool | int | float):
                written.append(literal("None" if value is None else json.dumps(value)))
            else:
                raise ConstraintError(f"{where}: the value {value!r} cannot be written")
        if not written:
            raise ConstraintError(f"{where}: its schema takes no value at all")
        return "(" + " | ".join(written) + ")"

    def items(self, schema: Mapping[str, Any], where: str) -> str:
        refuse_keywords(schema, frozenset({"type", "items", "minItems", "maxItems"}), where)
        if not isinstance(schema.get("items"), Mapping):
            raise ConstraintError(f"{where}: its schema does not say what the list holds", hint='give it "items"')
        item = self.add(self.value(schema["items"], where))
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if most is not None and (most < least or most < 1):
            if most == least == 0:
                return '"[" "]"'
            raise ConstraintError(f"{where}: a list of at least {least} and at most {most} items")
        again = f'("," {item}){{{max(0, least - 1)},{"" if most is None else most - 1}}}'
        body = item if most == 1 else f"{item} {again}"
        return f'"[" {body} "]"' if least else f'"[" ({body})? "]"'

    def members(self, schema: Mapping[str, Any], where: str) -> str:
        """Return an object between braces; a comma stands only between two members that are there."""
        refuse_keywords(schema, _OBJECT, where)
        properties, required = schema.get("properties", {}), schema.get("required", ())
        if missing := [name for name in required if name not in properties]:
            raise ConstraintError(f"{where}: required `{missing[0]}` has no schema")
        if bad := [name for name in properties if not _NAME.fullmatch(name)]:
            raise ConstraintError(f"{where}: the name `{bad[0]}` cannot be written")
        # As jinja's dictsort. From the last to the first: what may follow when none, or one, was written before.
        first, later = "", ""
        for name in sorted(properties, key=lambda name: str(name).lower(), reverse=True):
            member = f"{literal(name + ':')} {self.value(properties[name], f'{where}, `{name}`')}"
            with_it = self.add(f"{member} {later}")
            if name in required:
                first, later = with_it, self.add(f'"," {with_it}')
            else:
                first = self.add(f"{with_it} | {first}" if first else f"{with_it}?")
                later = self.add(f'"," {with_it} | {later}' if later else f'("," {with_it})?')
        return f'"{{" {first} "}}"'

    def value(self, schema: Mapping[str, Any], where: str) -> str:
        """Return the body of a value's rule."""
        for key in ("enum", "const"):
            if key in schema:
                refuse_keywords(schema, frozenset({"type", "enum", "const"}), where)
                return self.words(schema["enum"] if key == "enum" else [schema["const"]], where)
        for key in ("anyOf", "oneOf"):
            if key in schema:
                refuse_keywords(schema, frozenset({key}), where)
                return "(" + " | ".join(self.add(self.value(option, where)) for option in schema[key]) + ")"
        kind = schema.get("type")
        if isinstance(kind, list):
            options = [{**schema, "type": item} for item in kind]
            return "(" + " | ".join(self.add(self.value(option, where)) for option in options) + ")"
        if kind == "string":
            return self.text(schema, where)
        if kind in ("integer", "number"):
            refuse_keywords(schema, _NUMBER, where)
            if kind == "number" and not (schema.keys() & _NUMBER) - {"type"}:
                return self.add(NUMBER, "NUMBER")
            return self.add(f"%json {json.dumps(dict(schema), ensure_ascii=False)}")
        if kind in ("boolean", "null"):
            refuse_keywords(schema, frozenset({"type"}), where)
            return self.words([True, False] if kind == "boolean" else [None], where)
        if kind == "array":
            return self.items(schema, where)
        if kind == "object":
            return self.members(schema, where)
        raise ConstraintError(
            f"{where}: its schema says no type that this format can be held to: {json.dumps(dict(schema))[:80]}",
            hint='give it a "type"',
        )


def gemma_grammar(tools: Sequence[Tool], controls: frozenset[str]) -> str:
    """Return a Lark grammar of exactly one call, its arguments in alphabetical order.

    Args:
      tools: What may be called.
      controls: The control tokens that the tokenizer has.

    Raises:
      ConstraintError: There are no tools, or a schema asks for what the format cannot be held to.
    """
    if not tools:
        raise ConstraintError("a call is wanted, but there are no tools")
    rules = _Rules(controls)
    calls = []
    for tool in tools:
        if not _NAME.fullmatch(tool.name):
            raise ConstraintError(f"tool `{tool.name}`: its name cannot be written")
        body = rules.members(tool.parameters, f"tool `{tool.name}`")
        calls.append(rules.add(f"{literal(f'call:{tool.name}')} {body}"))
    start, end = token(CALL_START, controls), token(CALL_END, controls)
    return "\n".join([f"start: {start} ({' | '.join(calls)}) {end}", *rules.lines, ""])
