"""How a Hugging Face folder talks: its template and stop tokens, wherever they are kept; contradictions are told."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ferrule_runtime.errors import CheckpointError

from .values import is_token, printable

__all__ = ["named_tokens", "stop_tokens", "template", "within_vocabulary"]

# Transformers' names of templates: the one for tools first, as tools are what we render.
_WANTED = ("tool_use", "default")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}", hint="fetch the file again") from None


def _chosen(value: Any, path: Path) -> str | None:
    """Return the one template of a JSON value: a text, or named ones as a list or an object."""
    if value is None or isinstance(value, str):
        return value
    named = value
    if isinstance(value, list):
        named = {one.get("name"): one.get("template") for one in value if isinstance(one, dict)}
    if not isinstance(named, dict):
        raise CheckpointError(f"{path}: its `chat_template` is neither a text nor a list of named ones")
    found = next((named[name] for name in _WANTED if isinstance(named.get(name), str)), None)
    if found is None:
        raise CheckpointError(
            f"{path}: its chat templates are named {printable(list(named))}", hint=f"{' or '.join(_WANTED)} is used"
        )
    return str(found)


def template(
    folder: Path, tokenizer_config: Mapping[str, Any], template_json: Mapping[str, Any]
) -> tuple[str | None, list[str]]:
    """Return the chat template and what is to be said about it.

    Files of their own win over `tokenizer_config.json`, as in transformers; among named ones, that for tools.

    Args:
      folder: The release.
      tokenizer_config: `tokenizer_config.json`.
      template_json: `chat_template.json`.

    Raises:
      CheckpointError: One is of no known form.
    """
    found: dict[str, str] = {}
    for name in ("additional_chat_templates/tool_use.jinja", "chat_template.jinja"):
        if (folder / name).is_file():
            found[name] = _read(folder / name)
    for name, values in (("chat_template.json", template_json), ("tokenizer_config.json", tokenizer_config)):
        if (text := _chosen(values.get("chat_template"), folder / name)) is not None:
            found[name] = text
    if not found:
        return None, []
    first, text = next(iter(found.items()))
    others = [name for name, other in found.items() if other.strip() != text.strip()]
    return text, [f"{first} is its chat template; {', '.join(others)} says another"] if others else []


def _added_tokens(tokenizer_json: str) -> tuple[list[Any], slice]:
    """Return a tokenizer's added tokens and where they stand; its vocabulary of 248,000 entries is not parsed."""
    place = re.search(r'"added_tokens"\s*:\s*', tokenizer_json)
    if place is None:
        return [], slice(0, 0)
    try:
        entries, end = json.JSONDecoder().raw_decode(tokenizer_json, place.end())
    except (ValueError, RecursionError):
        return [], slice(0, 0)
    return entries if isinstance(entries, list) else [], slice(place.end(), end)


def within_vocabulary(tokenizer_json: str, vocabulary: int, template: str) -> tuple[str, list[str]]:
    """Return a tokenizer without added tokens that its model has no row for, and what is to be said.

    Text models of multimodal families have them: Gemma 3's smaller ones name an image token behind their last row. One
    that the chat template writes is needed: it stays, and is refused when the tokenizer is loaded.
    """

    def left_out(entry: Any) -> bool:
        known = isinstance(entry, dict) and isinstance(entry.get("id"), int) and isinstance(entry.get("content"), str)
        return known and entry["id"] >= vocabulary and entry["content"] not in template

    entries, place = _added_tokens(tokenizer_json)
    beyond = [entry for entry in entries if left_out(entry)]
    if not beyond:
        return tokenizer_json, []
    kept = json.dumps([entry for entry in entries if not left_out(entry)], ensure_ascii=False)
    names = ", ".join(f"`{printable(entry.get('content'))}`" for entry in beyond[:3])
    said = f"{len(beyond)} added tokens beyond the model's {vocabulary} left out, {names} among them"
    return tokenizer_json[: place.start] + kept + tokenizer_json[place.stop :], [said]


def _added(tokenizer_json: str) -> dict[str, int]:
    """Return ids of added tokens by what they are written as."""
    known = [one for one in _added_tokens(tokenizer_json)[0] if isinstance(one, dict)]
    return {str(one.get("content")): one["id"] for one in known if isinstance(one.get("id"), int)}


def named_tokens(tokenizer_config: Mapping[str, Any], tokenizer_json: str) -> tuple[dict[str, int], list[str]]:
    """Return the ids of `bos_token` and `eos_token`, as far as `tokenizer_config.json` names them, and what to say."""
    ids, found, notes = _added(tokenizer_json), {}, []
    for key in ("bos_token", "eos_token"):
        value = tokenizer_config.get(key)
        name = value.get("content") if isinstance(value, dict) else value
        if not isinstance(name, str):
            continue
        if name in ids:
            found[key] = ids[name]
        else:
            notes.append(f"tokenizer_config.json: `{key}` is `{printable(name)}`, no added token of its tokenizer")
    return found, notes


def _ids(value: Any, where: str, vocabulary: int) -> tuple[int, ...]:
    values = value if isinstance(value, list) else [] if value is None else [value]
    for one in values:
        if not is_token(one, vocabulary):
            raise CheckpointError(f"{where}: `eos_token_id` {printable(one)} of {vocabulary} tokens")
    return tuple(sorted(set(values)))


def stop_tokens(
    folder: Path, values: Mapping[str, Any], tokenizer_eos: int | None, vocabulary: int
) -> tuple[tuple[int, ...], list[str]]:
    """Return the ids that end a reply, from every file that says so, and what is to be said about them.

    Args:
      folder: For messages.
      values: By file, its `eos_token_id`: a number, a list or None.
      tokenizer_eos: Of `tokenizer_config.json`.
      vocabulary: Ids lie below it.

    Raises:
      CheckpointError: One is no id.
    """
    every = {name: _ids(value, f"{folder}/{name}", vocabulary) for name, value in values.items()}
    every["tokenizer_config.json"] = _ids(tokenizer_eos, f"{folder}/tokenizer_config.json", vocabulary)
    said = {name: ids for name, ids in every.items() if ids}
    stops = tuple(sorted({one for ids in said.values() for one in ids}))
    if len(set(said.values())) < 2:
        return stops, []
    (first, ids), *rest = said.items()
    others = ", ".join(f"{name} at {list(found)}" for name, found in rest)
    return stops, [f"{first} ends replies at {list(ids)}, {others}: all of them end replies"]
