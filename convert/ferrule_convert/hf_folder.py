"""Hugging Face folders: config.json, safetensors (one or sharded), tokenizer.json and where the chat format hides."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ferrule_runtime.errors import CheckpointError

from . import hf_chat, safetensors_file, stored
from .archs import defaults
from .checkpoint import Checkpoint, is_there
from .graph import Weight
from .values import number, printable, size, unique_pairs

__all__ = ["read", "skipped_part", "text_name"]

_ONE, _INDEX = "model.safetensors", "model.safetensors.index.json"
# Licence of a model card: a line of its front matter, which is at the file's beginning.
_CARD_BYTES, _LICENCE = 1 << 16, re.compile(r"^license:[ \t]*(\S+)[ \t]*$", re.MULTILINE)
# Parts of a release that are not the text model: skipped, and said so.
_SKIPPED = {
    "model.visual.": "vision tower", "visual.": "vision tower", "vision_tower.": "vision tower",
    "model.vision_tower.": "vision tower", "multi_modal_projector.": "vision tower",
    "model.multi_modal_projector.": "vision tower", "mtp.": "multi-token prediction head",
}  # fmt: skip
# Where multimodal releases keep the text model, and where a text-only release has it.
_TEXT = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
_NATURAL = (
    "hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size",
    "max_position_embeddings", "head_dim",
)  # fmt: skip
# Kinds of layers that can have rotary embeddings of their own.
_LOCAL, _GLOBAL = "sliding_attention", "full_attention"


def skipped_part(name: str) -> str | None:
    """Return which part of a release a tensor belongs to if the text model does not need it, or None."""
    # A table that old Llama releases carry; it follows from the configuration.
    if name.endswith(".rotary_emb.inv_freq"):
        return "rotary embedding"
    return next((part for prefix, part in _SKIPPED.items() if name.startswith(prefix)), None)


def text_name(name: str) -> str:
    """Return a tensor's name as a text-only release has it."""
    for prefix, ours in _TEXT.items():
        if name.startswith(prefix):
            return ours + name.removeprefix(prefix)
    return name


def _json(path: Path, *, needed: bool = False) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=unique_pairs)
    except FileNotFoundError:
        if needed:
            raise CheckpointError(f"{path.parent}: no {path.name} in it", hint="the folder is incomplete") from None
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}", hint="fetch the file again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: is no object", hint="fetch the file again")
    return value


def _object(values: Mapping[str, Any], key: str, folder: Path) -> dict[str, Any]:
    """Return an object of the configuration; one that is not there is empty."""
    found = values.get(key)
    if found is not None and not isinstance(found, dict):
        raise CheckpointError(f"{folder}/config.json: `{key}` is {printable(found)}", hint="fetch the file again")
    return found or {}


def _refuse(config: Mapping[str, Any], folder: Path) -> None:
    """Refuse what would be read as another model than it is."""
    for key in ("use_sliding_window", "attention_bias", "mlp_bias"):
        if config.get(key):
            raise CheckpointError(f"{folder}: `{key}` is set, which is not supported yet")


def _rope(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the rotary embedding's values, as releases before `rope_parameters` have them.

    `rope_scaling` is None where nothing is scaled, and has its kind as `rope_type` where something is.
    """
    # The first wins, as in transformers.
    given = _object(config, "rope_parameters", folder)
    local = _object(given, _LOCAL, folder)
    given = _object(given, _GLOBAL, folder) or given
    scaling = _object(config, "rope_scaling", folder) or given
    sources = (scaling, given, config)
    found: dict[str, Any] = {"partial_rotary_factor": 1.0, "rope_scaling": None}
    if local.get("rope_type", "default") != "default":
        raise CheckpointError(f"{folder}: the rotary embedding of its layers with a window is scaled: not supported")
    if local.get("rope_theta") is not None:
        found["rope_local_base_freq"] = local["rope_theta"]
    for key in ("rope_theta", "partial_rotary_factor"):
        found[key] = next((one[key] for one in sources if one.get(key) is not None), found.get(key))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind != "default":
        # Some releases keep this value beside the others; there it wins, as in transformers.
        key = "original_max_position_embeddings"
        beside = {key: config[key]} if config.get(key) is not None else {}
        found["rope_scaling"] = {**scaling, **beside, "rope_type": kind}
    return found


def _config(folder: Path) -> dict[str, Any]:
    """Return the text model's configuration, flat, with the keys that every family reads.

    `tie_word_embeddings` is None where it is not said: families differ in what they take then, the weights tell.
    """
    raw, where = _json(folder / "config.json", needed=True), f"{folder}/config.json"
    text = _object(raw, "text_config", folder) or raw
    kind = str(text.get("model_type", raw.get("model_type"))).removesuffix("_text")
    config: dict[str, Any] = {**defaults(printable(kind)), **text, "model_type": kind}
    _refuse(config, folder)
    key = "quantization_config"
    config[key] = _object(raw, key, folder) or _object(config, key, folder)
    config |= _rope(config, folder)
    for key in ("eos_token_id", "bos_token_id", "tie_word_embeddings"):
        # The whole release's word, or else the text model's.
        config[key] = config.get(key) if raw.get(key) is None else raw[key]
    if not isinstance(config["tie_word_embeddings"], bool | None):
        raise CheckpointError(
            f"{where}: `tie_word_embeddings` is {printable(config['tie_word_embeddings'])}", hint="fetch the file again"
        )
    if config.get("num_key_value_heads") is None:
        config["num_key_value_heads"] = config.get("num_attention_heads")
    if config.get("head_dim") is None:
        config["head_dim"] = size(config, "hidden_size", where) // size(config, "num_attention_heads", where)
    for key in _NATURAL:
        size(config, key, where)
    for key in ("rms_norm_eps", "rope_theta", "partial_rotary_factor"):
        number(config, key, where)
    return config


def _files(folder: Path, packed: Callable[[str], bool]) -> tuple[dict[str, Weight], list[str]]:
    """Return every tensor of every shard, and what is to be said."""

    def unread(name: str) -> bool:
        return packed(name) or skipped_part(name) is not None

    if not (folder / _INDEX).is_file():
        if not (folder / _ONE).is_file():
            raise CheckpointError(f"{folder}: neither {_ONE} nor {_INDEX} in it", hint="only safetensors are read")
        return safetensors_file.read(folder / _ONE, unread), []
    placed = _json(folder / _INDEX).get("weight_map")
    if not isinstance(placed, dict) or not placed or not all(isinstance(name, str) for name in placed.values()):
        raise CheckpointError(f"{folder}/{_INDEX}: no `weight_map`", hint="fetch the file again")
    if (folder / _ONE).is_file() and _ONE not in placed.values():
        raise CheckpointError(f"{folder}: {_ONE} and {_INDEX} in it", hint="remove the one that is not the model")
    tensors: dict[str, Weight] = {}
    expected: dict[str, set[str]] = {}
    for name, shard in placed.items():
        expected.setdefault(shard, set()).add(name)
    for shard in sorted(expected):
        path = folder / shard
        if Path(shard).name != shard or not is_there(path):
            raise CheckpointError(f"{folder}: shard `{printable(shard)}` is missing", hint="fetch the folder again")
        found = safetensors_file.read(path, unread)
        if twice := sorted(tensors.keys() & found.keys()):
            raise CheckpointError(
                f"{path}: `{printable(twice[0])}` is in another shard too", hint="the shards do not belong together"
            )
        if wrong := sorted(expected[shard] ^ found.keys()):
            raise CheckpointError(
                f"{path}: `{printable(wrong[0])}` is in the index or in the shard, but not in both",
                hint="the shards do not belong together",
            )
        tensors |= found
    others = sorted(path.name for path in folder.glob("*.safetensors") if path.name not in expected)
    return tensors, [f"not in the index, so not read: {', '.join(others)}"] if others else []


def _tensors(
    files: Mapping[str, Weight], config: dict[str, Any], folder: Path
) -> tuple[dict[str, Weight], dict[str, Any], list[str]]:
    """Return the text model's tensors under a text-only release's names, the configuration, and what is to be said."""
    kept: dict[str, Weight] = {}
    skipped: Counter[str] = Counter()
    for name, weight in files.items():
        if part := skipped_part(name):
            skipped[part] += 1
            continue
        if (ours := text_name(name)) in kept:
            raise CheckpointError(f"{folder}: two tensors are `{ours}`, `{name}` one of them")
        kept[ours] = weight
    notes = [f"{count} tensors of the {part} left out" for part, count in skipped.items()]
    tied, head = config["tie_word_embeddings"], "lm_head.weight"
    if tied is None:
        tied = head not in kept
        notes.append(f"config.json does not say whether its head is tied: {head} is {'not ' if tied else ''}there")
    if tied and kept.pop(head, None):
        notes.append(f"{head} left out: config.json ties the head to the embedding")
    return kept, config | {"tie_word_embeddings": tied}, notes


def _tokenizer(folder: Path) -> str:
    path = folder / "tokenizer.json"
    if not path.is_file():
        slow = [name for name in ("tokenizer.model", "vocab.json", "merges.txt") if (folder / name).is_file()]
        raise CheckpointError(
            f"{folder}: no tokenizer.json in it{', only ' + ' and '.join(slow) if slow else ''}",
            hint="save the tokenizer in its fast form",
        )
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}", hint="fetch the file again") from None
    if not text.startswith("{"):
        raise CheckpointError(f"{path}: starts with {text[:8]!r}, is no object", hint="fetch the file again")
    return text


def _licence(folder: Path) -> str | None:
    path = folder / "README.md"
    if not path.is_file():
        return None
    with path.open("rb") as file:
        card = file.read(_CARD_BYTES).decode("utf-8", errors="replace").replace("\r\n", "\n")
    matter = card.split("\n---", 1)[0] if card.startswith("---\n") else ""
    found = _LICENCE.search(matter)
    return found[1].strip("\"'") if found else None


def read(folder: Path) -> Checkpoint:
    """Open a Hugging Face folder; only its headers, configuration and tokenizer are read.

    Raises:
      CheckpointError: A part is missing, malformed, or contradicts another.
    """
    config = _config(folder)
    quantised = config["quantization_config"]
    container = stored.container(quantised, folder)
    files, notes = _files(folder, lambda name: stored.is_packed(container, name))
    if container:
        files = stored.assembled(container, quantised, files, folder)
    tensors, config, said = _tensors(files, config, folder)
    notes += said
    about = _json(folder / "tokenizer_config.json")
    template, said = hf_chat.template(folder, about, _json(folder / "chat_template.json"))
    notes += said
    text, said = hf_chat.within_vocabulary(_tokenizer(folder), config["vocab_size"], template or "")
    notes += said
    tokens, said = hf_chat.named_tokens(about, text)
    notes += said
    generation = _json(folder / "generation_config.json").get("eos_token_id")
    ends = {"generation_config.json": generation, "config.json": config["eos_token_id"]}
    stops, said = hf_chat.stop_tokens(folder, ends, tokens.get("eos_token"), config["vocab_size"])
    notes += said
    # Templates get the tokenizer's tokens, whatever the model's configuration says.
    config |= {f"{key}_id": number for key, number in tokens.items()}
    kinds = sorted({weight.stored for weight in tensors.values() if len(weight.shape) > 1})
    return Checkpoint(
        name=folder.resolve().name,
        path=folder if folder.name else folder.resolve(),
        config=config,
        tensors=tensors,
        tokenizer_json=text,
        template=template,
        stop_tokens=stops,
        licence=_licence(folder),
        stored=f"safetensors {'/'.join(kinds)}",
        notes=tuple(notes),
    )
