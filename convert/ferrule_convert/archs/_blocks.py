"""What model families share: names, norms, attention, the gated MLP, and the frame around the layers."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ferrule_runtime.errors import CheckpointError

from .. import values
from ..checkpoint import Checkpoint
from ..graph import GLU, INPUT, Add, Attention, Graph, Linear, Node, RMSNorm, Rope, RopeTable, Weight

__all__ = ["Builder", "constant", "each", "take"]

Array = NDArray[np.float32]


def each(weight: Weight, change: Callable[[Array], Array]) -> Weight:
    """Return a weight whose rows are changed by a function as they are read."""
    return replace(weight, rows=lambda start, stop: change(weight.rows(start, stop)))


def take(weight: Weight, index: NDArray[np.int64], name: str) -> Weight:
    """Return chosen rows of a weight, in the order of the index."""

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

    def __init__(self, checkpoint: Checkpoint, *, zero_centred: bool = False) -> None:
        """Start a graph.

        Args:
          checkpoint: Its configuration and tensors.
          zero_centred: Norms store their weight less one.
        """
        self.checkpoint = checkpoint
        self.config = checkpoint.config
        self._where = f"configuration of {checkpoint.path}"
        self.zero_centred = zero_centred
        self.nodes: list[Node] = []

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

    def number(self, key: str, most: float = 1e9) -> float:
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
        if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
            raise self.wrong(f"`layer_types` is {values.printable(kinds)}")
        if len(kinds) != layers or not set(kinds) <= set(known):
            raise CheckpointError(
                f"{self._where}: {len(kinds)} layer types ({values.printable(', '.join(sorted(set(kinds))))}) "
                f"for {layers} layers",
                hint=f"known: {', '.join(known)}",
            )
        return kinds

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

    def attention(self, at: str, x: str, *, bias: bool = False, head_norms: bool = False) -> str:
        """Rotary grouped-query attention, with its four projections."""
        (heads, kv_heads), size, hidden = self.heads(), self.size("head_dim"), self.size("hidden_size")
        q = self.linear(f"{at}.attention.q", x, f"{at}.self_attn.q_proj", heads * size, hidden, bias=bias)
        k = self.linear(f"{at}.attention.k", x, f"{at}.self_attn.k_proj", kv_heads * size, hidden, bias=bias)
        v = self.linear(f"{at}.attention.v", x, f"{at}.self_attn.v_proj", kv_heads * size, hidden, bias=bias)
        if head_norms:
            q = self.norm(f"{at}.attention.q_norm", q, f"{at}.self_attn.q_norm", size, heads=heads)
            k = self.norm(f"{at}.attention.k_norm", k, f"{at}.self_attn.k_norm", size, heads=kv_heads)
        y = self.attend(at, q, k, v)
        return self.linear(f"{at}.attention.out", y, f"{at}.self_attn.o_proj", hidden, heads * size)

    def attend(self, at: str, q: str, k: str, v: str) -> str:
        """Turn queries and keys, and attend."""
        (heads, kv_heads), size, theta = self.heads(), self.size("head_dim"), self.number("rope_theta", most=1e12)
        share = self.number("partial_rotary_factor", most=1) if "partial_rotary_factor" in self.config else 1.0
        turned = int(size * share)
        if turned < 2 or turned % 2 or theta < 1:
            raise self.wrong(f"its rotary embedding turns {turned} of {size} values of a head, with base {theta:g}")
        table = RopeTable(tuple(theta ** (-2 * pair / turned) for pair in range(turned // 2)))
        q = self.add(Rope(f"{at}.attention.q_turned", q, heads, table))
        k = self.add(Rope(f"{at}.attention.k_turned", k, kv_heads, table))
        return self.add(Attention(f"{at}.attention", q, k, v, heads, kv_heads, size, size**-0.5))

    def mlp(self, at: str, x: str) -> str:
        """The gated MLP (SwiGLU)."""
        if (act := self.config.get("hidden_act", "silu")) != "silu":
            raise self.wrong(f"`hidden_act` is {values.printable(act)}, which its family does not have")
        hidden, inner = self.size("hidden_size"), self.size("intermediate_size")
        gate = self.linear(f"{at}.mlp.gate", x, f"{at}.mlp.gate_proj", inner, hidden)
        up = self.linear(f"{at}.mlp.up", x, f"{at}.mlp.up_proj", inner, hidden)
        y = self.add(GLU(f"{at}.mlp.gated", gate, up))
        return self.linear(f"{at}.mlp.down", y, f"{at}.mlp.down_proj", hidden, inner)

    def decoder(self, mixer: Callable[[str, str, int], str]) -> Graph:
        """Build pre-norm residual layers around a token mixer, then the last norm.

        Args:
          mixer: Called with the layer's name, the normed value and the layer's number; returns what is added.
        """
        hidden, x = self.size("hidden_size"), INPUT
        for layer in range(self.size("num_hidden_layers")):
            at = f"layers.{layer}"
            y = mixer(at, self.norm(f"{at}.mixer.norm", x, f"{at}.input_layernorm", hidden), layer)
            x = self.add(Add(f"{at}.mixer.sum", x, y))
            y = self.mlp(at, self.norm(f"{at}.mlp.norm", x, f"{at}.post_attention_layernorm", hidden))
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
