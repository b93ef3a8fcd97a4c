"""Chat templates: messages and tools to a prompt, in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .errors import BundleError

__all__ = ["render"]


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, indent: int | None = None) -> str:
    # Not jinja's own `tojson`, which escapes <, > and & for HTML: models were trained on plain JSON.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def render(
    template: str, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], *, reply: bool = True
) -> str:
    """Render a conversation as the model was trained to read it.

    Args:
      template: The bundle's jinja template; it cannot reach anything but its arguments.
      messages: Turns as the dialect hands them to a template.
      tools: Tool schemas.
      reply: End with the opening of the assistant's turn.

    Raises:
      BundleError: The template is malformed, refuses the conversation, or drops the tools.
    """
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    try:
        # A template may ask whether these are defined, so absent ones are left undefined.
        values = {"tools": list(tools)} if tools else {"tools": None}
        text = environment.from_string(template).render(messages=list(messages), add_generation_prompt=reply, **values)
    except (jinja2.TemplateError, TypeError, ValueError) as error:
        raise BundleError(
            f"the chat template fails: {error}", hint="`ferrule check` shows with what conversation"
        ) from None
    missing = [name for name in (tool["function"]["name"] for tool in tools) if name not in text]
    if missing:
        raise BundleError(
            f"the chat template drops {len(missing)} of {len(tools)} tools, `{missing[0]}` first",
            hint="the model would never hear of them; convert with a dialect that writes tools itself",
        )
    return text
