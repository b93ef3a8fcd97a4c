"""The grammar of one Qwen XML call: every argument's raw text held to its schema."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..calls import NUMBER, literal, refuse_keywords, token
from ..errors import ConstraintError
from ..tools import Tool

__all__ = ["xml_grammar"]

_END = "\n</parameter>\n"
# The separators of `tojson`, with which templates write lists and objects.
_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_TOP = frozenset({"type", "properties", "required", "additionalProperties"})
_RANGE = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
_NAME = re.compile(r"[^<>\s][^<>\n]*")


def _json(schema: Mapping[str, Any], whole: Mapping[str, Any]) -> str:
    """Return a JSON value's grammar; references into the tool's schema keep their targets."""
    shared = {key: whole[key] for key in ("$defs", "definitions") if key in whole}
    return "%json " + json.dumps({"x-guidance": _LAYOUT, **shared, **schema}, ensure_ascii=False)


def _words(values: Sequence[Any], where: str) -> str:
    written: list[str] = []
    for value in values:
        if isinstance(value, bool):
            written += [str(value), str(value).lower()]
        elif value is None:
            written += ["None", "null"]
        else:
            written.append(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
    if not written or any("</parameter>" in word for word in written):
        raise ConstraintError(f"{where}: its values cannot be written: {list(values)[:3]!r}")
    return "(" + " | ".join(literal(word) for word in written) + ")"


class _Rules:
    """Rules of one grammar, numbered as they are made."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, body: str, prefix: str = "r") -> str:
        name = f"{prefix}{len(self.lines)}"
        self.lines.append(f"{name}: {body}")
        return name

    def text(self, schema: Mapping[str, Any], where: str) -> str:
        """Add the rule of a free text and the tag behind it: one lexeme, or neither could be told from the other."""
        refuse_keywords(schema, frozenset({"type", "minLength", "maxLength"}), where)
        least, most = schema.get("minLength", 0), schema.get("maxLength")
        length = f"{{{least},{'' if most is None else most}}}" if least or most is not None else "*"
        return self.add(rf"(/(?s:.{length})/ & ~/(?s:.*<\/parameter>.*)/) {literal(_END)}", "TEXT")

    def value(self, schema: Mapping[str, Any], whole: Mapping[str, Any], where: str) -> str:
        """Add the rule of an argument's value and the tag behind it."""
        for key in ("enum", "const"):
            if key in schema:
                refuse_keywords(schema, frozenset({"type", "enum", "const"}), where)
                values = schema["enum"] if key == "enum" else [schema["const"]]
                return self.add(f"{_words(values, where)} {literal(_END)}")
        for key in ("anyOf", "oneOf"):
            if key in schema:
                refuse_keywords(schema, frozenset({key}), where)
                return self.add(" | ".join(self.value(option, whole, where) for option in schema[key]))
        kind = schema.get("type")
        if isinstance(kind, list):
            options = [{**schema, "type": item} for item in kind]
            return self.add(" | ".join(self.value(option, whole, where) for option in options))
        if kind == "string":
            return self.text(schema, where)
        if kind in ("boolean", "null"):
            refuse_keywords(schema, frozenset({"type"}), where)
            return self.add(f"{_words([True, False] if kind == 'boolean' else [None], where)} {literal(_END)}")
        if kind == "number" and set(schema) & _RANGE == set():
            refuse_keywords(schema, frozenset({"type"}), where)
            return self.add(f"{self.add(NUMBER, 'NUMBER')} {literal(_END)}")
        if kind in ("integer", "number", "array", "object"):
            return self.add(f"{self.add(_json(schema, whole))} {literal(_END)}")
        raise ConstraintError(
            f"{where}: its schema says no type that raw text can be held to: {json.dumps(schema)[:80]}",
            hint='give it a "type"',
        )

    def call(self, tool: Tool) -> str:
        """Add the rule of one tool's call, between the outer tags."""
        schema = tool.parameters
        refuse_keywords(schema, _TOP, f"tool `{tool.name}`")
        properties, required = schema.get("properties", {}), schema.get("required", ())
        if missing := [name for name in required if name not in properties]:
            raise ConstraintError(f"tool `{tool.name}`: required argument `{missing[0]}` has no schema")
        parts = [literal(f"<function={tool.name}>\n")]
        for name, argument in properties.items():
            where = f"tool `{tool.name}`, argument `{name}`"
            if not _NAME.fullmatch(name):
                raise ConstraintError(f"{where}: its name cannot be written between tags")
            rule = f"({literal(f'<parameter={name}>' + chr(10))} {self.value(argument, schema, where)})"
            parts.append(rule if name in required else f"{rule}?")
        return self.add(" ".join([*parts, literal("</function>")]))


def xml_grammar(tools: Sequence[Tool], controls: frozenset[str]) -> str:
    """Return a Lark grammar of exactly one call, its arguments in the order of the schema.

    Args:
      tools: What may be called.
      controls: The control tokens that the tokenizer has.

    Raises:
      ConstraintError: There are no tools, or a schema asks for what raw text cannot be held to.
    """
    if not tools:
        raise ConstraintError("a call is wanted, but there are no tools")
    for tool in tools:
        if not _NAME.fullmatch(tool.name):
            raise ConstraintError(f"tool `{tool.name}`: its name cannot be written between tags")
    rules = _Rules()
    calls = " | ".join(rules.call(tool) for tool in tools)
    start, end = token("<tool_call>", controls), token("</tool_call>", controls)
    return "\n".join([f'start: {start} "\\n" ({calls}) "\\n" {end}', *rules.lines, ""])
