"""What model families share: names, norms, attention, the gated MLP, and the frame around the layers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, TypedDict, Unpack

import numpy as np
from numpy.typing import NDArray

from ferrule_runtime.errors import CheckpointError

from .. import values
from ..checkpoint import Checkpoint
from ..graph import GLU, INPUT, Activation, Add, Attention, Graph, Linear, Node, RMSNorm, Rope, RopeTable, Weight
from ._rope import rope_table

__all__ = ["Builder", "constant", "each", "take"]

Array = NDArray[np.float32]

# Where transformers' classes of such a family read their activation, and what they call it.
_ACTIVATIONS: dict[Activation, tuple[str, tuple[str, ...]]] = {
    "silu": ("hidden_act", ("silu", "swish")),
    "gelu_tanh": ("hidden_activation", ("gelu_pytorch_tanh",)),
}


class _How(TypedDict, total=False):
    table: RopeTable
    window: int | None
    scale: float


def each(weight: Weight, change: Callable[[Array], Array]) -> Weight:
    """Return a weight whose rows are changed by a function as they are read."""
    return weight.changed(lambda start, stop: change(weight.rows(start, stop)), "its values are changed")


def take(weight: Weight, index: NDArray[np.int64], name: str) -> Weight:
    """Return chosen rows of a weight, in the order of the index; integers of the source stay what they are."""
    if weight.integers:
        return replace(weight, name=name, shape=(len(index), *weight.shape[1:]), rows=weight.integers.take(index))

    def rows(start: int, stop: int) -> Array:
        wanted = index[start:stop]
        low, high = int(wanted.min()), int(wanted.max()) + 1
        return weight.rows(low, high)[wanted - low]

    return replace(weight, name=name, shape=(len(index), *weight.shape[1:]), rows=rows)


def constant(name: str, values: Array) -> Weight:
    """Return a weight that no checkpoint holds."""
    return Weight(name, values.shape, lambda start, stop: values[start:stop], "constant")


class Builder:
    """Adds nodes under canonical names, with weights under the release's."""

    def __init__(self, checkpoint: Checkpoint, *, zero_centred: bool = False, activation: Activation = "silu") -> None:
        """Start a graph.

        Args:
          checkpoint: Its configuration and tensors.
          zero_centred: Norms store their weight less one.
          activation: Of the gated MLP.

        Raises:
          CheckpointError: The configuration says another activation.
        """
        self.checkpoint = checkpoint
        self.config = checkpoint.config
        self._where = f"configuration of {checkpoint.path}"
        self.zero_centred = zero_centred
        self.activation = activation
        self.nodes: list[Node] = []
        key, names = _ACTIVATIONS[activation]
        if (found := self.config.get(key, names[0])) not in names:
            raise self.wrong(f"`{key}` is `{values.printable(found)}`, only `{names[0]}` is built for this family")

    def add(self, node: Node) -> str:
        """Append a node; return the name of its value."""
        self.nodes.append(node)
        return node.name

    def weight(self, theirs: str, ours: str, *shape: int) -> Weight:
        """Return the release's `model.THEIRS` under our name."""
        return replace(self.checkpoint.tensor(f"model.{theirs}", shape), name=ours)

    def linear(self, ours: str, x: str, theirs: str, rows: int, columns: int, *, bias: bool = False) -> str:
        """Multiply by `model.THEIRS.weight`, [rows, columns], and add its bias if it has one."""
        extra = self.weight(f"{theirs}.bias", f"{ours}.bias", rows) if bias else None
        return self.add(Linear(ours, x, self.weight(f"{theirs}.weight", ours, rows, columns), extra))

    def norm(self, ours: str, x: str, theirs: str, size: int, *, heads: int = 1) -> str:
        """Norm by `model.THEIRS.weight`, each head by itself."""
        weight = self.weight(f"{theirs}.weight", ours, size)
        if self.zero_centred:
            weight = each(weight, lambda rows: rows + np.float32(1))
        return self.add(RMSNorm(ours, x, weight, self.number("rms_norm_eps"), heads))

    def rope(self, theta: float, scaling: Mapping[str, Any] | None) -> RopeTable:
        """Return a table for this model's heads."""
        size, key = self.size("head_dim"), "partial_rotary_factor"
        turned = int(size * (self.number(key, most=1) if key in self.config else 1.0))
        return rope_table(theta, size, turned, scaling, self.checkpoint.path)

    def attention(self, at: str, x: str, *, bias: bool = False, head_norms: bool = False, **how: Unpack[_How]) -> str:
        """Rotary grouped-query attention, with its four projections; `how` is for `attend`."""
        (heads, kv_heads), size, hidden = self.heads(), self.size("head_dim"), self.size("hidden_size")
        q = self.linear(f"{at}.attention.q", x, f"{at}.self_attn.q_proj", heads * size, hidden, bias=bias)
        k = self.linear(f"{at}.attention.k", x, f"{at}.self_attn.k_proj", kv_heads * size, hidden, bias=bias)
        v = self.linear(f"{at}.attention.v", x, f"{at}.self_attn.v_proj", kv_heads * size, hidden, bias=bias)
        if head_norms:
            q = self.norm(f"{at}.attention.q_norm", q, f"{at}.self_attn.q_norm", size, heads=heads)
            k = self.norm(f"{at}.attention.k_norm", k, f"{at}.self_attn.k_norm", size, heads=kv_heads)
        y = self.attend(at, q, k, v, **how)
        return self.linear(f"{at}.attention.out", y, f"{at}.self_attn.o_proj", hidden, heads * size)

    def attend(self, at: str, q: str, k: str, v: str, **how: Unpack[_How]) -> str:
        """Turn queries and keys, and attend.

        Args:
          at: The layer's name.
          q: Queries.
          k: Keys.
          v: Values.
          how: Where a layer differs: its rotary `table`, the `window` it attends to, the `scale` of its scores.
        """
        (heads, kv_heads), size = self.heads(), self.size("head_dim")
        table = how.get("table") or self.rope(self.config["rope_theta"], self.config.get("rope_scaling"))
        scale, window = how.get("scale", size**-0.5), how.get("window")
        q = self.add(Rope(f"{at}.attention.q_turned", q, heads, table))
        k = self.add(Rope(f"{at}.attention.k_turned", k, kv_heads, table))
        return self.add(Attention(f"{at}.attention", q, k, v, heads, kv_heads, size, scale, window))

    def mlp(self, at: str, x: str) -> str:
        """The gated MLP."""
        hidden, inner = self.size("hidden_size"), self.size("intermediate_size")
        gate = self.linear(f"{at}.mlp.gate", x, f"{at}.mlp.gate_proj", inner, hidden)
        up = self.linear(f"{at}.mlp.up", x, f"{at}.mlp.up_proj", inner, hidden)
        y = self.add(GLU(f"{at}.mlp.gated", gate, up, self.activation))
        return self.linear(f"{at}.mlp.down", y, f"{at}.mlp.down_proj", hidden, inner)

    def wrong(self, what: str) -> CheckpointError:
        """Return the error of a configuration that no such model has."""
        return CheckpointError(f"{self._where}: {what}", hint="the file is damaged, or of a release not known here")

    def size(self, key: str, *, divides: str | None = None) -> int:
        """Return a size of the configuration; every size that a family needs comes this way.

        Args:
          key: Of the size.
          divides: Of another size, which it must divide: heads of keys serve so many heads of queries each.

        Raises:
          CheckpointError: It is not there, is no size, or does not divide.
        """
        found = values.size(self.config, key, self._where)
        if divides and (whole := self.size(divides)) % found:
            raise self.wrong(f"`{key}` is {found}, which does not divide `{divides}`, {whole}")
        return found

    def heads(self) -> tuple[int, int]:
        """Return the heads of queries, and those of keys and values, each of which serves as many of queries.

        Raises:
          CheckpointError: One is no size, or they do not divide.
        """
        return self.size("num_attention_heads"), self.size("num_key_value_heads", divides="num_attention_heads")

    def number(self, key: str, most: float = 1e12) -> float:
        """Return a positive number of the configuration, at most `most`.

        Raises:
          CheckpointError: It is not there, or is none.
        """
        return values.number(self.config, key, self._where, most)

    def layer_kinds(self, known: Collection[str]) -> list[str]:
        """Return `layer_types`: the kind of each layer, all of them known.

        Raises:
          CheckpointError: It is no list of kinds, or not of as many as there are layers.
        """
        kinds, layers = self.config.get("layer_types"), self.size("num_hidden_layers")
        if (
            not isinstance(kinds, list)
            or len(kinds) != layers
            or not all(isinstance(kind, str) and kind in known for kind in kinds)
        ):
            raise CheckpointError(
                f"{self._where}: layer types {values.printable(kinds)} for {layers} layers",
                hint=f"one for each, known: {', '.join(known)}",
            )
        return kinds

    def decoder(self, mixer: Callable[[str, str, int], str], *, x: str = INPUT, post_norms: bool = False) -> Graph:
        """Build pre-norm residual layers around a token mixer, then the last norm.

        Args:
          mixer: Called with the layer's name, the normed value and the layer's number; returns what is added.
          x: What enters the first layer.
          post_norms: What mixer and MLP add is normed too (Gemma's four norms a layer).
        """
        hidden = self.size("hidden_size")
        # Of a layer with post-norms, `post_attention_layernorm` is the mixer's; else it is the one before the MLP.
        before_mlp = "pre_feedforward_layernorm" if post_norms else "post_attention_layernorm"
        for layer in range(self.size("num_hidden_layers")):
            at = f"layers.{layer}"
            y = mixer(at, self.norm(f"{at}.mixer.norm", x, f"{at}.input_layernorm", hidden), layer)
            if post_norms:
                y = self.norm(f"{at}.mixer.post_norm", y, f"{at}.post_attention_layernorm", hidden)
            x = self.add(Add(f"{at}.mixer.sum", x, y))
            y = self.mlp(at, self.norm(f"{at}.mlp.norm", x, f"{at}.{before_mlp}", hidden))
            if post_norms:
                y = self.norm(f"{at}.mlp.post_norm", y, f"{at}.post_feedforward_layernorm", hidden)
            x = self.add(Add(f"{at}.mlp.sum", x, y))
        self.norm("norm", x, "norm", hidden)
        return self._frame()

    def _frame(self) -> Graph:
        vocabulary, hidden = self.size("vocab_size"), self.size("hidden_size")
        embedding = self.weight("embed_tokens.weight", "embedding", vocabulary, hidden)
        head = embedding
        if not self.config["tie_word_embeddings"]:
            head = replace(self.checkpoint.tensor("lm_head.weight", (vocabulary, hidden)), name="head")
        facts: dict[str, Any] = {"layers": self.size("num_hidden_layers"), "hidden": hidden}
        facts |= {"intermediate": self.size("intermediate_size"), "heads": self.size("num_attention_heads")}
        facts |= {"kv_heads": self.size("num_key_value_heads"), "head_dim": self.size("head_dim")}
        facts |= {"vocabulary": vocabulary}
        reach = self.size("max_position_embeddings")
        return Graph(str(self.config["model_type"]), tuple(self.nodes), embedding, head, hidden, reach, facts)
