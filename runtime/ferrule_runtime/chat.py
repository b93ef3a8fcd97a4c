"""Chat templates: messages and tools to a prompt, in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .errors import BundleError

__all__ = ["render"]

# Characters or items that one repetition may make, and bits that a power may have. No prompt needs as many.
_MOST = 1 << 20


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, in which neither `*` nor `**` makes more than any prompt needs.

    What loops pile up is not seen here: at conversion the template runs in a process that is bounded as a whole.
    """

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        made = 0
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            made = left.bit_length() * right
        elif operator == "*" and isinstance(left, str | list | tuple) and isinstance(right, int):
            made = len(left) * right
        elif operator == "*" and isinstance(left, int) and isinstance(right, str | list | tuple):
            made = left * len(right)
        if made > _MOST:
            raise SecurityError(f"`{operator}` would make {made}, more than {_MOST}")
        return super().call_binop(context, operator, left, right)


def _line(error: Exception) -> str:
    """Return an error's text in one printable line: templates raise what they like."""
    text = " ".join(str(error).split()) or type(error).__name__
    return (text if text.isprintable() else ascii(text)[1:-1])[:500]


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


class _Missing(jinja2.Undefined):
    """A value that is not there: a template may ask for it, as Hugging Face templates do, but not print it."""

    def __str__(self) -> str:
        self._fail_with_undefined_error()


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Not jinja's own `tojson`, which escapes <, > and & for HTML: models were trained on plain JSON.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def render(
    template: str, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], *, reply: bool = True
) -> str:
    """Render a conversation as the model was trained to read it, thinking switched off where the template can.

    Args:
      template: The bundle's jinja template; it cannot reach anything but its arguments.
      messages: Turns as the dialect hands them to a template.
      tools: Tool schemas.
      reply: End with the opening of the assistant's turn.

    Raises:
      BundleError: The template is malformed, refuses the conversation, or drops the tools.
    """
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, undefined=_Missing, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    # Jinja's random text: no prompt, and never the same.
    del environment.globals["lipsum"]
    try:
        # A template may ask whether these are defined, so absent ones are left undefined.
        values = {"tools": list(tools)} if tools else {"tools": None}
        text = environment.from_string(template).render(
            messages=list(messages), add_generation_prompt=reply, enable_thinking=False, **values
        )
    except Exception as error:  # whatever it is, the template brought it about
        raise BundleError(
            f"the chat template fails: {_line(error)}",
            hint="`ferrule check` shows with what conversation",
        ) from None
    missing = [name for name in (tool["function"]["name"] for tool in tools) if name not in text]
    if missing:
        raise BundleError(
            f"the chat template drops {len(missing)} of {len(tools)} tools, `{missing[0]}` first",
            hint="the model would never hear of them; convert with a dialect that writes tools itself",
        )
    return text
