"""Hugging Face folders: config.json, safetensors (one or sharded), tokenizer.json and where the chat format hides."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ferrule_runtime.errors import CheckpointError

from . import safetensors_file
from .checkpoint import Checkpoint
from .graph import Weight

__all__ = ["read"]

_ONE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_LICENCE = re.compile(r"\A---\n.*?^license:\s*(\S+)\s*$.*?^---", re.DOTALL | re.MULTILINE)
# Parts of a release that are not the text model: skipped, and said so.
_SKIPPED = {"model.visual.": "vision tower", "visual.": "vision tower", "mtp.": "multi-token prediction head"}
_NEEDED = (
    "hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads", "rms_norm_eps", "vocab_size",
    "max_position_embeddings",
)  # fmt: skip


def _json(path: Path, *, needed: bool = False) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if needed:
            raise CheckpointError(f"{path.parent}: no {path.name} in it", hint="the folder is incomplete") from None
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}", hint="fetch the file again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: is no object", hint="fetch the file again")
    return value


def _config(folder: Path) -> dict[str, Any]:
    """Return the text model's configuration, flat, with the keys that every family reads."""
    raw = _json(folder / "config.json", needed=True)
    text = raw.get("text_config", raw)
    kind = str(text.get("model_type", raw.get("model_type"))).removesuffix("_text")
    config: dict[str, Any] = {**text, "model_type": kind}
    rope = config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling") or {}
    for source in (rope, scaling):
        how = source.get("rope_type", source.get("type", "default"))
        if how != "default":
            raise CheckpointError(f"{folder}: its rotary embedding is scaled ({how})", hint="not supported yet")
    config["rope_theta"] = rope.get("rope_theta", config.get("rope_theta"))
    config["partial_rotary_factor"] = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    missing = [key for key in (*_NEEDED, "rope_theta") if config.get(key) is None]
    if missing:
        raise CheckpointError(f"{folder}/config.json: no `{missing[0]}`", hint="the folder is incomplete")
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    config["head_dim"] = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    config["tie_word_embeddings"] = bool(raw.get("tie_word_embeddings", config.get("tie_word_embeddings", False)))
    if config.get("use_sliding_window") or config.get("attention_bias"):
        raise CheckpointError(f"{folder}: sliding windows and biases on every projection are not read")
    return config


def _files(folder: Path) -> dict[str, Weight]:
    """Return every tensor of every shard."""
    index = _json(folder / _INDEX)
    if not index:
        if not (folder / _ONE).is_file():
            raise CheckpointError(f"{folder}: neither {_ONE} nor {_INDEX} in it", hint="only safetensors are read")
        return safetensors_file.read(folder / _ONE)
    placed = index.get("weight_map")
    if not isinstance(placed, dict) or not all(isinstance(name, str) for name in placed.values()):
        raise CheckpointError(f"{folder}/{_INDEX}: no `weight_map`", hint="fetch the file again")
    tensors: dict[str, Weight] = {}
    for shard in sorted(set(placed.values())):
        path = folder / shard
        if Path(shard).name != shard or not path.is_file():
            raise CheckpointError(f"{folder}: shard `{shard}` is missing", hint="fetch the folder again")
        found = safetensors_file.read(path)
        if twice := sorted(tensors.keys() & found.keys()):
            raise CheckpointError(
                f"{path}: `{twice[0]}` is in another shard too", hint="the shards do not belong together"
            )
        if wrong := sorted({name for name, at in placed.items() if at == shard} ^ found.keys()):
            raise CheckpointError(f"{path}: `{wrong[0]}` is in the index or in the shard, but not in both")
        tensors |= found
    return tensors


def _tensors(folder: Path, config: Mapping[str, Any]) -> tuple[dict[str, Weight], list[str]]:
    """Return the text model's tensors under the names of a text-only release, and what was skipped."""
    kept: dict[str, Weight] = {}
    skipped: Counter[str] = Counter()
    for name, weight in _files(folder).items():
        what = next((what for prefix, what in _SKIPPED.items() if name.startswith(prefix)), None)
        if what:
            skipped[what] += 1
        elif not (name == "lm_head.weight" and config["tie_word_embeddings"]):
            kept[name.replace("model.language_model.", "model.", 1)] = weight
    return kept, [f"{count} tensors of the {what} left out" for what, count in skipped.items()]


def _template(folder: Path, tokenizer: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    found = _json(folder / "chat_template.json").get("chat_template", tokenizer.get("chat_template"))
    if isinstance(found, list):
        named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
        found = named.get("tool_use", named.get("default"))
    return found if isinstance(found, str) else None


def _stops(folder: Path, config: Mapping[str, Any], notes: list[str]) -> tuple[int, ...]:
    """Return the ids that end a reply: the generation configuration's, or else the model's."""

    def ids(value: Any) -> tuple[int, ...]:
        values = value if isinstance(value, list) else [value]
        return tuple(sorted({one for one in values if isinstance(one, int) and not isinstance(one, bool)}))

    theirs = ids(_json(folder / "generation_config.json").get("eos_token_id"))
    models = ids(config.get("eos_token_id"))
    if theirs and models and theirs != models:
        notes.append(
            f"generation_config.json ends replies at {list(theirs)}, config.json at {list(models)}: both are used"
        )
    return tuple(sorted({*theirs, *models}))


def read(folder: Path) -> Checkpoint:
    """Open a Hugging Face folder; only its headers, configuration and tokenizer are read.

    Raises:
      CheckpointError: A part is missing, malformed, or contradicts another.
    """
    config = _config(folder)
    tensors, notes = _tensors(folder, config)
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(f"{folder}: no tokenizer.json in it", hint="save the tokenizer in its fast form")
    card = folder / "README.md"
    licence = _LICENCE.search(card.read_text(encoding="utf-8", errors="replace")) if card.is_file() else None
    kinds = sorted({weight.stored for weight in tensors.values() if len(weight.shape) > 1})
    stops = _stops(folder, config, notes)
    return Checkpoint(
        name=folder.name,
        path=folder,
        config=config,
        tensors=tensors,
        tokenizer_json=path.read_text(encoding="utf-8"),
        template=_template(folder, _json(folder / "tokenizer_config.json")),
        stop_tokens=stops,
        licence=licence[1] if licence else None,
        stored=f"safetensors {'/'.join(kinds)}",
        notes=tuple(notes),
    )
