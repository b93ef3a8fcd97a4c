"""Chat templates: messages and tools to a prompt, in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .errors import BundleError

__all__ = ["render"]

# What a template can bring about; the sandbox's own refusals are TemplateErrors, but for a range that is too long.
_FAULTS = (
    jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, MemoryError,
    RecursionError,
)  # fmt: skip


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
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, undefined=_Missing, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    try:
        # A template may ask whether these are defined, so absent ones are left undefined.
        values = {"tools": list(tools)} if tools else {"tools": None}
        text = environment.from_string(template).render(
            messages=list(messages), add_generation_prompt=reply, enable_thinking=False, **values
        )
    except _FAULTS as error:
        raise BundleError(
            f"the chat template fails: {str(error) or type(error).__name__}",
            hint="`ferrule check` shows with what conversation",
        ) from None
    missing = [name for name in (tool["function"]["name"] for tool in tools) if name not in text]
    if missing:
        raise BundleError(
            f"the chat template drops {len(missing)} of {len(tools)} tools, `{missing[0]}` first",
            hint="the model would never hear of them; convert with a dialect that writes tools itself",
        )
    return text
