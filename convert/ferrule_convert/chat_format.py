"""How a checkpoint talks: its template, tool-call dialect and stop tokens, decided once, at conversion."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from tokenizers import Tokenizer

from ferrule_runtime.dialects import load_dialect
from ferrule_runtime.errors import CheckpointError
from ferrule_runtime.registry import module_names

from .checkpoint import Checkpoint
from .tokenizer import load
from .values import is_token

__all__ = ["ChatFormat", "chat_format"]


@dataclass(frozen=True)
class ChatFormat:
    """What a bundle needs in order to talk.

    Attributes:
      dialect: A file in the runtime's `dialects/`.
      template: The jinja template that the bundle carries.
      stop_tokens: Ids that end a reply.
      note: How the choice was made, for the manifest and for people.
    """

    dialect: str
    template: str
    stop_tokens: tuple[int, ...]
    note: str


# What only one format writes, looked for in this order: Qwen's XML has `<tool_call>` too.
_SIGNS = (
    ("qwen-xml", "<function=", "calls are written as `<function=...>`"),
    ("functiongemma", "<start_function_call>", "calls are written in FunctionGemma's control tokens"),
    ("hermes-json", "<tool_call>", "calls are JSON between `<tool_call>` tags"),
)
# Variables of the tokenizer that Hugging Face hands to templates, and the configuration's key of each token.
_TOKENS = {"bos_token": "bos_token_id", "eos_token": "eos_token_id"}


def _detect(checkpoint: Checkpoint, tokenizer: Tokenizer) -> tuple[str, str]:
    """Return the dialect and why."""
    template = checkpoint.template or ""
    for name, sign, why in _SIGNS:
        if sign in template:
            return name, f"in the checkpoint's template, {why}"
    if re.search(r"\btools\b", template):
        raise CheckpointError(
            f"{checkpoint.path}: its chat template writes tools in a format that no dialect here reads",
            hint=f"dialects: {', '.join(module_names('ferrule_runtime.dialects'))}; name one with --dialect",
        )
    if tokenizer.token_to_id("<|im_start|>") is not None:
        return "chatml-json", "the checkpoint's template has no tools: ChatML with a tool format of ours"
    raise CheckpointError(
        f"{checkpoint.path}: no tool-call dialect fits its chat template", hint="name one with --dialect"
    )


def _with_tokens(template: str, checkpoint: Checkpoint, tokenizer: Tokenizer) -> str:
    """Set the tokens that a template names, so that the bundle's template needs nothing beside it."""
    lines = ""
    for variable, key in _TOKENS.items():
        if not re.search(rf"\b{variable}\b", template):
            continue
        found = checkpoint.config.get(key)
        found = found[0] if isinstance(found, list) and found else found
        token = tokenizer.id_to_token(found) if is_token(found, checkpoint.config["vocab_size"]) else None
        if token is None:
            raise CheckpointError(
                f"{checkpoint.path}: its chat template writes `{variable}`, which its configuration does not say",
                hint=f"put `{key}` into its configuration",
            )
        lines += f"{{%- set {variable} = {json.dumps(token)} %}}"
    return lines + template


def chat_format(checkpoint: Checkpoint, dialect: str | None = None) -> ChatFormat:
    """Decide how a checkpoint talks.

    Args:
      checkpoint: Its template and stop tokens are the starting point.
      dialect: The catalogue's or the user's choice; None detects it.

    Raises:
      CheckpointError: No dialect fits, or nothing would end a reply.
      BundleError: Unknown dialect.
    """
    tokenizer = load(checkpoint.tokenizer_json, str(checkpoint.path), checkpoint.config["vocab_size"])
    name, note = (dialect, "named by the user") if dialect else _detect(checkpoint, tokenizer)
    rules = load_dialect(name)
    own = checkpoint.template
    if rules.TEMPLATE is None and own is None:
        raise CheckpointError(f"{checkpoint.path}: no chat template", hint=f"dialect `{name}` has none of its own")
    template = rules.TEMPLATE or _with_tokens(own or "", checkpoint, tokenizer)
    found = {tokenizer.token_to_id(token) for token in rules.STOPS}
    stops = {stop for stop in found if stop is not None} | set(checkpoint.stop_tokens)
    if not stops:
        raise CheckpointError(f"{checkpoint.path}: no stop token, so no reply would end", hint="use another file")
    return ChatFormat(name, template, tuple(sorted(stops)), note)
