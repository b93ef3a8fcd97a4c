"""How llama.cpp stores a model family: names, orders and values; each family's file says it, the reader undoes it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ferrule_runtime.errors import CheckpointError

from .gguf_config import Metadata
from .graph import Weight

__all__ = ["LAYER", "GgufNames", "interleaved"]

# The same in every family (llama.cpp's gguf-py, constants.py).
_SHARED = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}

# A layer of Llama's and of the families built like it.
LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}

# Of a layer; in any other spelling it would be a second tensor of the same name.
_NUMBER = re.compile(r"0|[1-9][0-9]{0,5}")

Config = Mapping[str, Any]
# Given a tensor's name in the release behind `model.` and `layers.N.`, its rows and the configuration: where each of
# the release's rows stands in the file; None where they stand in order.
Order = Callable[[str, int, Config], NDArray[np.int64] | None]


def interleaved(heads: Mapping[str, str]) -> Order:
    """Return the order of heads whose halves llama.cpp's converter interleaves (convert_hf_to_gguf.py, `permute`).

    Args:
      heads: By tensor, the configuration's key for the number of its heads.

    The order raises CheckpointError where the rows are not so many heads of two halves.
    """

    def order(name: str, rows: int, config: Config) -> NDArray[np.int64] | None:
        if name not in heads:
            return None
        count = config[heads[name]]
        if rows % (2 * count):
            raise CheckpointError(
                f"`{name}` has {rows} rows, its configuration says {count} heads",
                hint="weights and configuration are of different models",
            )
        size = rows // count
        return np.arange(rows).reshape(count, size // 2, 2).swapaxes(1, 2).reshape(rows)

    return order


@dataclass(frozen=True)
class GgufNames:
    """A family's names in GGUF, and what they are in the Hugging Face release.

    Attributes:
      architecture: `general.architecture` of the file.
      model_type: The configuration's `model_type`: the family's own file in `archs/`.
      layer: Tensors of one layer: the part behind `blk.N.` to the part behind `model.layers.N.`.
      config: From the metadata and the configuration that every family has, what this one has besides.
      order: Of a tensor's rows.
      restore: From a tensor's name, as for `order`, its rows in the release's order and the configuration, the tensor
        as it was released.
    """

    architecture: str
    model_type: str
    layer: Mapping[str, str]
    config: Callable[[Metadata, Config], Config] = field(default=lambda meta, config: {})
    order: Order = field(default=lambda name, rows, config: None)
    restore: Callable[[str, Weight, Config], Weight] = field(default=lambda name, weight, config: weight)

    def theirs(self, name: str) -> str | None:
        """Return the Hugging Face name of a tensor, or None when the family has no such tensor."""
        if name in _SHARED:
            return _SHARED[name]
        number, rest = self.place(name)
        return None if number is None or rest not in self.layer else f"model.layers.{number}.{self.layer[rest]}"

    @staticmethod
    def place(name: str) -> tuple[int | None, str]:
        """Return a tensor's layer, and its name inside it; no layer where it is in none."""
        block, _, rest = name.partition(".")
        number, _, rest = rest.partition(".")
        if block != "blk" or not _NUMBER.fullmatch(number):
            return None, name
        return int(number), rest
