"""LoRA adapters (Hu et al. 2021) in PEFT's form, merged into the weights as they are read."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ferrule_runtime.errors import CheckpointError

from . import safetensors_file
from .checkpoint import Checkpoint, finite
from .graph import Weight
from .hf_folder import skipped_part, text_name
from .values import printable, unique_pairs

__all__ = ["merge"]

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_HALF = re.compile(r"(?P<module>.+)\.lora_(?P<half>[AB])\.weight")
# PEFT's options that change more than W + scale · B · A; each is refused when it is set.
_REFUSED = (
    "use_dora", "modules_to_save", "lora_bias", "fan_in_fan_out", "layer_replication", "target_parameters",
    "trainable_token_indices", "use_qalora", "alora_invocation_tokens", "megatron_config", "arrow_config",
    "use_bdlora",
)  # fmt: skip
# Ways of starting that change the base model too, unless PEFT converted the adapter back, which it then says.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True)
class _Adapter:
    rank: int
    alpha: float
    rslora: bool
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    base: str | None

    def scale(self, module: str, rank: int) -> float:
        """Return alpha / rank, or alpha / sqrt(rank) where the adapter was trained so (Kalajdzievski 2023)."""
        alpha = float(_for(self.alphas, module, self.alpha))
        return alpha / (rank**0.5 if self.rslora else rank)


def _for(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """Return the value of the first pattern that names a module or the end of its path."""
    return next(
        (value for key, value in patterns.items() if module == key or module.endswith(f".{key}")),
        default,
    )


def _number(value: Any, what: str, path: Path, kind: type[int] | type[float] = int) -> Any:
    known = isinstance(value, (int, kind)) and not isinstance(value, bool)
    if not (known and 0 < value < 1 << 20):
        raise CheckpointError(f"{path}: `{what}` is {printable(value)}", hint="fetch the file again")
    return value


def _patterns(raw: Mapping[str, Any], key: str, path: Path, kind: type[int] | type[float] = int) -> dict[str, Any]:
    found = raw.get(key) or {}
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: `{key}` is {printable(found)}", hint="fetch the file again")
    for name, value in found.items():
        # PEFT takes regular expressions; plain names are what its users write, and cannot hang.
        if not re.fullmatch(r"[\w.]+", name):
            raise CheckpointError(f"{path}: `{key}` has the pattern `{printable(name)}`; only plain names are read")
        _number(value, f"{key}.{name}", path, kind)
    return found


def _adapter(path: Path) -> _Adapter:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=unique_pairs)
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent}: no {_CONFIG} in it", hint="name the adapter's folder") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}", hint="fetch the file again") from None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path}: is no object", hint="fetch the file again")
    merged = "merge it with PEFT, and convert the merged folder"
    if raw.get("peft_type") != "LORA":
        raise CheckpointError(f"{path}: an adapter of kind `{printable(raw.get('peft_type'))}`, not LORA", hint=merged)
    for key in _REFUSED:
        if raw.get(key):
            raise CheckpointError(f"{path}: its `{key}` is {printable(raw[key])}: not supported", hint=merged)
    if raw.get("bias", "none") != "none":
        raise CheckpointError(f"{path}: its `bias` is `{printable(raw['bias'])}`: not supported", hint=merged)
    start = raw.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        raise CheckpointError(f"{path}: its `init_lora_weights` is `{printable(start)}`: not supported", hint=merged)
    base = raw.get("base_model_name_or_path")
    return _Adapter(
        rank=_number(raw.get("r"), "r", path),
        alpha=float(_number(raw.get("lora_alpha"), "lora_alpha", path, float)),
        rslora=bool(raw.get("use_rslora")),
        ranks=_patterns(raw, "rank_pattern", path),
        alphas=_patterns(raw, "alpha_pattern", path, float),
        base=base if isinstance(base, str) and base else None,
    )


def _pairs(path: Path) -> dict[str, dict[str, Weight]]:
    """Return both halves of every adapted module, by the module's path in the model that was adapted."""
    if not path.is_file():
        raise CheckpointError(f"{path.parent}: no {_WEIGHTS} in it", hint="only safetensors are read")
    pairs: dict[str, dict[str, Weight]] = {}
    for name, weight in safetensors_file.read(path).items():
        half = _HALF.fullmatch(name.removeprefix(_PREFIX))
        if half is None or not name.startswith(_PREFIX):
            raise CheckpointError(
                f"{path}: tensor `{printable(name)}` is no half of a matrix's adapter",
                hint="leaving it out would give another model",
            )
        pairs.setdefault(half["module"], {})[half["half"]] = weight
    for module, halves in pairs.items():
        if len(halves) < 2:
            raise CheckpointError(f"{path}: `{printable(module)}` has lora_{next(iter(halves))} alone")
    if not pairs:
        raise CheckpointError(f"{path}: no adapter in it", hint="fetch the file again")
    return pairs


def _merged(base: Weight, a: Weight, b: Weight, scale: float, path: Path) -> Weight:
    def rows(start: int, stop: int) -> NDArray[np.float32]:
        change = b.rows(start, stop) @ a.all()
        return finite(base.rows(start, stop) + np.float32(scale) * change, base.name, start, path)

    return replace(base.changed(rows, "an adapter is merged into it"), stored=f"{base.stored}+LoRA")


def merge(checkpoint: Checkpoint, folder: Path) -> Checkpoint:
    """Return a checkpoint with an adapter merged: rows are W + scale · B · A when they are read, nothing is held.

    Args:
      checkpoint: The base.
      folder: With `adapter_config.json` and `adapter_model.safetensors`.

    Raises:
      CheckpointError: The adapter is malformed, uses an option that is not supported, or is of another base.
    """
    adapter, path = _adapter(folder / _CONFIG), folder / _WEIGHTS
    tensors, skipped = dict(checkpoint.tensors), 0
    for module, halves in _pairs(path).items():
        a, b, name = halves["A"], halves["B"], text_name(f"{module}.weight")
        if skipped_part(f"{module}.weight"):
            skipped += 1
            continue
        if checkpoint.config["tie_word_embeddings"] and name in ("lm_head.weight", "model.embed_tokens.weight"):
            raise CheckpointError(
                f"{path}: adapts `{printable(name)}`, but the base's head is its embedding", hint="merge it with PEFT"
            )
        if name in tensors and tensors[name] is not checkpoint.tensors[name]:
            raise CheckpointError(f"{path}: two adapters are for `{printable(name)}`", hint="fetch the file again")
        rank = _for(adapter.ranks, module, adapter.rank)
        base = tensors.get(name)
        shapes = f"lora_A {a.shape}, lora_B {b.shape}, rank {rank}"
        if base is None or base.shape != (b.shape[0], a.shape[-1]):
            have = f"is {base.shape} in the base" if base else "is not in the base"
            raise CheckpointError(
                f"{path}: `{printable(name)}` {have}; the adapter has {shapes}",
                hint=f"the adapter is for `{printable(adapter.base)}`" if adapter.base else "it is for another model",
            )
        if (a.shape, b.shape) != ((rank, base.shape[1]), (base.shape[0], rank)):
            raise CheckpointError(
                f"{path}: `{printable(name)}` has {shapes}", hint="configuration and weights are of different adapters"
            )
        tensors[name] = _merged(base, a, b, adapter.scale(module, rank), path)
    changed = sum(tensors[name] is not checkpoint.tensors[name] for name in tensors)
    if not changed:
        raise CheckpointError(f"{path}: adapts nothing of the text model", hint="it would change nothing")
    notes = [f"LoRA `{folder.resolve().name}` merged into {changed} matrices; made for `{printable(adapter.base)}`"]
    if skipped:
        notes.append(f"{skipped} adapted matrices that are not of the text model left out")
    return replace(
        checkpoint,
        name=f"{checkpoint.name} + {folder.resolve().name}",
        tensors=tensors,
        lora=folder,
        notes=(*checkpoint.notes, *notes),
    )
