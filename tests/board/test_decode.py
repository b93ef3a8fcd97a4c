"""Greedy decoding, against a loop that starts from nothing at every token."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from tiny import Recurrent, tiny_bundle

from ferrule_runtime.bundle import Bundle
from ferrule_runtime.constrain import Constraint, Vocabulary
from ferrule_runtime.decode import generate
from ferrule_runtime.errors import ContextError, EngineError
from ferrule_runtime.tokenizer import Tokenizer

NONE: frozenset[int] = frozenset()


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return tiny_bundle(tmp_path_factory.mktemp("decode") / "b")


@pytest.fixture(scope="module")
def tokenizer(bundle: Bundle) -> Tokenizer:
    return Tokenizer(bundle.file("tokenizer.json"))


def slowly(bundle: Bundle, prompt: Sequence[int], count: int) -> list[int]:
    """The same tokens, each from a fresh engine that is fed everything at once."""
    said: list[int] = []
    for _ in range(count):
        engine = Recurrent(bundle)
        row = engine.logits(engine.feed([*prompt, *said]))[0].tolist()
        said.append(row.index(max(row)))
    return said


prompts = st.lists(st.integers(0, 255), min_size=1, max_size=12)


@given(prompts, st.integers(1, 12))
def test_tokens_are_those_of_whole_passes(bundle: Bundle, prompt: list[int], limit: int) -> None:
    found = generate(Recurrent(bundle), prompt, stops=NONE, limit=limit)
    assert list(found.tokens) == slowly(bundle, prompt, limit)
    assert not found.complete
    assert found.first_token_s is not None
    assert 0 < found.first_token_s <= found.seconds


@given(prompts, st.integers(0, 7))
def test_a_stop_token_ends_the_reply_and_is_no_part_of_it(bundle: Bundle, prompt: list[int], at: int) -> None:
    whole = slowly(bundle, prompt, 8)
    found = generate(Recurrent(bundle), prompt, stops=frozenset({whole[at], 100_000}), limit=8)
    assert list(found.tokens) == whole[: whole.index(whole[at])]
    assert found.complete


@given(prompts, prompts)
def test_a_conversation_goes_on_behind_what_was_fed(bundle: Bundle, first: list[int], second: list[int]) -> None:
    engine = Recurrent(bundle)
    engine.feed(first)
    assert list(generate(engine, second, stops=NONE, limit=3).tokens) == slowly(bundle, first + second, 3)
    # The last token is known, but nothing was asked behind it.
    assert engine.position == len(first) + len(second) + 2


@pytest.mark.parametrize(("fed", "prompt", "context"), [(0, 8, 8), (0, 9, 8), (3, 5, 8), (8, 1, 8)])
def test_a_prompt_that_leaves_no_room_is_refused_before_it_is_fed(
    bundle: Bundle, fed: int, prompt: int, context: int
) -> None:
    engine = Recurrent(bundle, context)
    if fed:
        engine.feed([7] * fed)
    before = engine.snapshot()
    with pytest.raises(
        ContextError, match=f"a prompt of {prompt} tokens behind {fed} leaves no room in {context}"
    ) as caught:
        generate(engine, [5] * prompt, stops=NONE, limit=4)
    assert "--context" in caught.value.hint
    assert engine.position == fed
    assert np.array_equal(engine.snapshot().arrays["state"], before.arrays["state"])


@pytest.mark.parametrize("room", [1, 2, 5])
def test_a_full_context_cuts_the_reply_off(bundle: Bundle, room: int) -> None:
    found = generate(Recurrent(bundle, 4 + room), [1, 2, 3, 4], stops=NONE, limit=50)
    assert list(found.tokens) == slowly(bundle, [1, 2, 3, 4], room)
    assert not found.complete


def test_where_no_token_was_asked_for_there_is_no_time_of_the_first(bundle: Bundle) -> None:
    found = generate(Recurrent(bundle), [1], stops=NONE, limit=0)
    assert (found.tokens, found.complete, found.first_token_s) == ((), False, None)


class Broken(Recurrent):
    """An engine whose head overflows from a position on."""

    def __init__(self, bundle: Bundle, at: int, value: float, token: int) -> None:
        super().__init__(bundle)
        self._at, self._value, self._token = at, value, token

    def logits(self, hidden: NDArray[np.float32]) -> NDArray[np.float32]:
        found = super().logits(hidden)
        if self.position >= self._at:
            found[:, self._token] = self._value
        return found


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("constrained", [False, True])
def test_a_logit_that_is_not_finite_is_an_error_and_no_token(
    bundle: Bundle, tokenizer: Tokenizer, value: float, constrained: bool
) -> None:
    (letter,) = tokenizer.encode("b")
    constraint = limited(bundle, tokenizer, "start: /[a-c]{9}/") if constrained else None
    with pytest.raises(EngineError, match=f"logit of token {letter} at position 4 is {value}"):
        generate(Broken(bundle, 4, value, letter), [1, 2], stops=NONE, limit=9, constraint=constraint)


def limited(bundle: Bundle, tokenizer: Tokenizer, grammar: str) -> Constraint:
    rows, stop = bundle.manifest.tables["head"].rows, min(bundle.manifest.stop_tokens)
    return Constraint(Vocabulary(tokenizer, rows, stop), grammar)


def test_every_token_is_the_best_of_those_allowed(bundle: Bundle, tokenizer: Tokenizer) -> None:
    ids = {letter: tokenizer.encode(letter)[0] for letter in "abcd"}
    found = generate(
        Recurrent(bundle), [9, 8, 7], stops=NONE, limit=40, constraint=limited(bundle, tokenizer, "start: /[a-d]{12}/")
    )
    said: list[int] = []
    for _ in range(12):
        engine = Recurrent(bundle)
        row = engine.logits(engine.feed([9, 8, 7, *said]))[0]
        said.append(max(ids.values(), key=lambda token: float(row[token])))
    assert list(found.tokens) == said
    assert found.complete


def test_a_reply_ends_where_its_grammar_does_without_a_stop_token(bundle: Bundle, tokenizer: Tokenizer) -> None:
    constraint = limited(bundle, tokenizer, 'start: "yes"')
    found = generate(Recurrent(bundle), [4], stops=NONE, limit=50, constraint=constraint)
    assert tokenizer.decode(found.tokens) == "yes"
    assert found.complete


def test_a_reply_that_the_limit_cuts_off_is_not_complete(bundle: Bundle, tokenizer: Tokenizer) -> None:
    found = generate(Recurrent(bundle), [4], stops=NONE, limit=2, constraint=limited(bundle, tokenizer, 'start: "yes"'))
    assert tokenizer.decode(found.tokens) == "ye"
    assert not found.complete


def test_a_stop_token_ends_a_reply_that_may_end(bundle: Bundle, tokenizer: Tokenizer) -> None:
    stop = min(bundle.manifest.stop_tokens)

    class Tired(Recurrent):
        """Would rather stop than say anything, once three tokens are said."""

        def logits(self, hidden: NDArray[np.float32]) -> NDArray[np.float32]:
            found = super().logits(hidden)
            found[:, stop] = 1000 if self.position >= 4 else -1000
            return found

    constraint = limited(bundle, tokenizer, "start: /[ab]*/")
    found = generate(Tired(bundle), [4], stops=frozenset({stop}), limit=50, constraint=constraint)
    assert len(found.tokens) == 3
    assert set(tokenizer.decode(found.tokens)) <= set("ab")
    assert found.complete


def test_the_tests_engine_keeps_the_protocol(bundle: Bundle) -> None:
    tokens = [5, 3, 250, 17, 5]
    whole, steps = Recurrent(bundle), Recurrent(bundle)
    every = whole.feed(tokens, every=True)
    assert every.shape == (5, 32)
    for row, token in zip(every, tokens, strict=True):
        assert np.array_equal(steps.feed([token])[0], row)
    kept = steps.snapshot()
    after = steps.feed([1, 2])
    steps.restore(kept)
    assert np.array_equal(steps.feed([1, 2]), after)
    steps.reset()
    assert steps.position == 0
    assert np.array_equal(steps.feed(tokens), every[-1:])
    with pytest.raises(ContextError):
        Recurrent(bundle, 2).feed([1, 2, 3])


def test_the_table_is_the_head_of_the_tests_engine(tmp_path: Path) -> None:
    for bits in (8, 32):
        bundle = tiny_bundle(tmp_path / str(bits), bits=bits)
        engine = Recurrent(bundle)
        hidden = engine.feed([1, 2, 3])
        assert engine.logits(hidden).shape == (1, bundle.manifest.tables["head"].rows)
