"""Plans: parts that add up, grow with what they hold, and refuse with numbers that are true."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ferrule_runtime.budget import baseline, largest_context, make_plan, plan_within
from ferrule_runtime.bundle import MemoryFacts
from ferrule_runtime.commandline import byte_size
from ferrule_runtime.errors import OverBudget

MIB = 1 << 20
INTERPRETER = 60 * MIB
FACTS = MemoryFacts(
    mapped=16 * MIB, packed=80 * MIB, table=30 * MIB, head_packed=36 * MIB, kv_per_token=46080, state=0,
    work_per_token=40000, scores_per_pair=36, graph=2 * MIB, vocabulary=49152, tokenizer=2 * MIB,
)  # fmt: skip
facts = st.builds(
    MemoryFacts, mapped=st.integers(0, 1 << 30), packed=st.integers(0, 1 << 30), table=st.integers(0, 1 << 30),
    head_packed=st.integers(0, 1 << 30), kv_per_token=st.integers(1, 1 << 18), state=st.integers(0, 1 << 24),
    work_per_token=st.integers(1, 1 << 18), scores_per_pair=st.integers(1, 256), graph=st.integers(0, 1 << 24),
    vocabulary=st.integers(1, 1 << 18), tokenizer=st.integers(0, 1 << 25),
)  # fmt: skip
contexts = st.integers(1, 8192)


@given(facts, contexts, st.integers(1, 512))
def test_parts_add_up_and_more_context_or_chunk_never_needs_less(f: MemoryFacts, context: int, chunk: int) -> None:
    plan = make_plan(f, context=context, chunk=chunk, interpreter=INTERPRETER)
    assert plan.total == sum(part.bytes for part in plan.parts)
    assert all(part.bytes > 0 for part in plan.parts)
    assert make_plan(f, context=context + 64, chunk=chunk, interpreter=INTERPRETER).total >= plan.total
    assert make_plan(f, context=context, chunk=chunk + 16, interpreter=INTERPRETER).total >= plan.total


@given(facts, st.integers(64 * MIB, 4096 * MIB))
def test_the_largest_context_fits_and_the_next_does_not(f: MemoryFacts, budget: int) -> None:
    best = largest_context(f, budget, chunk=16, interpreter=INTERPRETER, most=8192)
    assert best % 64 == 0
    if best:
        assert make_plan(f, context=best, chunk=16, interpreter=INTERPRETER).total <= budget
    if best < 8192:
        assert make_plan(f, context=best + 64, chunk=16, interpreter=INTERPRETER).total > budget


@given(
    facts, st.integers(16 * MIB, 8192 * MIB), st.none() | contexts, st.none() | contexts, st.none() | st.integers(1, 99)
)
def test_a_plan_is_within_the_budget_and_within_what_the_user_allows_or_refused(
    f: MemoryFacts, budget: int, context: int | None, least: int | None, chunk: int | None
) -> None:
    wanted = {"context": context, "min_context": least, "chunk": chunk}
    try:
        plan = plan_within(f, budget, interpreter=INTERPRETER, most_context=8192, **wanted)
    except OverBudget as error:
        proposed = byte_size(re.search(r"--memory (\d+MiB) fits", error.hint)[1])
        wanted["min_context"] = None
        assert plan_within(f, proposed, interpreter=INTERPRETER, most_context=8192, **wanted).total <= proposed
        return
    assert plan.total <= budget
    asked = context or 2048
    assert plan.context == asked or (least is not None and least <= plan.context < asked)
    assert chunk is None or plan.chunk == min(chunk, plan.context)


def test_keys_and_values_are_exact() -> None:
    # 30 layers, keys and values, 3 heads of 64, float32: SmolLM2-135M's own sizes.
    plan = make_plan(FACTS, context=512, chunk=64, interpreter=INTERPRETER)
    (part,) = [part for part in plan.parts if part.name == "keys and values"]
    assert part.bytes == 512 * 30 * 2 * 3 * 64 * 4


def test_a_chunk_shrinks_before_anything_is_refused() -> None:
    large = make_plan(FACTS, context=2048, chunk=64, interpreter=INTERPRETER).total
    plan = plan_within(FACTS, large - 1, interpreter=INTERPRETER, most_context=8192)
    assert (plan.context, plan.chunk) == (2048, 32)


def test_a_context_that_would_fit_is_named() -> None:
    with pytest.raises(OverBudget) as caught:
        plan_within(FACTS, 330 * MIB, interpreter=INTERPRETER, most_context=8192)
    context = int(re.search(r"--context (\d+) fits", caught.value.hint)[1])
    assert plan_within(FACTS, 330 * MIB, interpreter=INTERPRETER, most_context=8192, context=context).context == context


def test_less_than_the_interpreter_is_refused_with_no_context() -> None:
    with pytest.raises(OverBudget, match=r"12\.0 MiB allowed") as caught:
        plan_within(FACTS, 12 * MIB, interpreter=INTERPRETER, most_context=8192)
    assert "no context fits" in caught.value.hint


def test_the_interpreter_is_measured_once_and_is_a_sane_size() -> None:
    first = baseline()
    assert 20 * MIB < first < 400 * MIB
    assert baseline() == first
