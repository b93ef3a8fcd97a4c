"""What llama.cpp calls the tensors of a model family: each family's file says it, the reader uses it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["LAYER", "GgufNames"]

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


@dataclass(frozen=True)
class GgufNames:
    """A family's names in GGUF, and what they are in the Hugging Face release.

    Attributes:
      architecture: `general.architecture` of the file.
      model_type: The configuration's `model_type`: the family's own file in `archs/`.
      layer: Tensors of one layer: the part behind `blk.N.` to the part behind `model.layers.N.`.
      interleaved: Tensors, as the part behind `model.layers.N.`, whose heads llama.cpp's converter interleaves, and the
        configuration's key for the number of those heads.
    """

    architecture: str
    model_type: str
    layer: Mapping[str, str]
    interleaved: Mapping[str, str] = field(default_factory=dict)

    def theirs(self, name: str) -> str | None:
        """Return the Hugging Face name of a tensor, or None when the family has no such tensor."""
        if name in _SHARED:
            return _SHARED[name]
        block, _, rest = name.partition(".")
        number, _, rest = rest.partition(".")
        if block == "blk" and number.isdigit() and rest in self.layer:
            return f"model.layers.{number}.{self.layer[rest]}"
        return None

    def interleaved_heads(self, name: str) -> str | None:
        """Return the configuration's key for the heads of an interleaved tensor; None when it is stored as released."""
        return self.interleaved.get(name.partition("model.layers.")[2].partition(".")[2])
