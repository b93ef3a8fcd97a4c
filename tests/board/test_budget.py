"""Plans: parts that add up, grow with what they hold, and refuse with numbers that are true."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import write_tiny

from ferrule_runtime import __main__ as command
from ferrule_runtime import budget as budgets
from ferrule_runtime.budget import baseline, largest_context, make_plan, plan_within
from ferrule_runtime.bundle import MANIFEST, MemoryFacts, state_folder
from ferrule_runtime.commandline import byte_size, human
from ferrule_runtime.errors import ContextError, EngineError, OverBudget, UsageError

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
    except UsageError:
        assert least is not None
        assert context is not None
        assert least > context
        return
    except OverBudget as error:
        proposed = byte_size(re.search(r"--memory (\d+MiB) fits", error.hint)[1])
        wanted["min_context"] = None
        assert plan_within(f, proposed, interpreter=INTERPRETER, most_context=8192, **wanted).total <= proposed
        return
    assert plan.total <= budget
    asked = context or max(2048, least or 0)
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
    assert "not even 64 tokens fit" in caught.value.hint


def test_the_interpreter_is_measured_once_and_is_a_sane_size() -> None:
    first = baseline()
    assert 20 * MIB < first < 400 * MIB
    assert baseline() == first


@given(facts, contexts, st.integers(1, 512), st.integers(1, 64 * MIB))
def test_more_of_anything_never_needs_less(f: MemoryFacts, context: int, chunk: int, more: int) -> None:
    plan = make_plan(f, context=context, chunk=chunk, interpreter=INTERPRETER)
    assert plan.context == context
    assert plan.chunk == min(chunk, context)
    assert make_plan(f, context=context, chunk=chunk, interpreter=INTERPRETER + more).total == plan.total + more
    for name, value in vars(f).items():
        larger = MemoryFacts(**{**vars(f), name: value + more})
        assert make_plan(larger, context=context, chunk=chunk, interpreter=INTERPRETER).total >= plan.total


@given(facts, st.integers(16 * MIB, 512 * MIB), contexts)
def test_a_refusal_names_every_part_and_what_really_fits(f: MemoryFacts, allowed: int, context: int) -> None:
    plan = make_plan(f, context=context, chunk=16, interpreter=INTERPRETER)
    wanted = {"interpreter": INTERPRETER, "most_context": 8192}
    if plan.total <= allowed:
        assert plan_within(f, allowed, context=context, **wanted).total <= allowed
        return
    with pytest.raises(OverBudget) as caught:
        plan_within(f, allowed, context=context, **wanted)
    text, hint = str(caught.value), caught.value.hint
    assert text.startswith(f"{human(plan.total)} needed, {human(allowed)} allowed: ")
    for part in plan.parts:
        assert re.search(rf"^ *{part.name} +{re.escape(human(part.bytes))}  ", text, re.MULTILINE)
    fitting = re.search(r"--context (\d+) fits", hint)
    if fitting:
        assert int(fitting[1]) < context
        assert plan_within(f, allowed, context=int(fitting[1]), **wanted).total <= allowed
    else:
        assert f"{human(plan.total)} would hold {context} tokens" in hint
        assert context < 64 or make_plan(f, context=64, chunk=16, interpreter=INTERPRETER).total > allowed


def test_while_the_head_is_packed_its_table_counts_too() -> None:
    small = MemoryFacts(**{**vars(FACTS), "packed": 0, "table": 500 * MIB, "head_packed": 600 * MIB})
    plan = make_plan(small, context=64, chunk=16, interpreter=INTERPRETER)
    # The copy, the table beside it, and the interpreter; the sessions are 20 MiB.
    assert plan.total == (500 + 600 + 20) * MIB + INTERPRETER
    assert "packing the head" in [part.name for part in plan.parts]


def test_a_chunk_that_the_user_chose_does_not_shrink() -> None:
    large = make_plan(FACTS, context=2048, chunk=64, interpreter=INTERPRETER).total
    with pytest.raises(OverBudget):
        plan_within(FACTS, large - 1, interpreter=INTERPRETER, most_context=8192, chunk=64)


def test_a_context_shrinks_only_where_that_is_allowed_and_no_further() -> None:
    allowed = make_plan(FACTS, context=1024, chunk=16, interpreter=INTERPRETER).total
    wanted = {"interpreter": INTERPRETER, "most_context": 8192}
    with pytest.raises(OverBudget, match="needed"):
        plan_within(FACTS, allowed, **wanted)
    with pytest.raises(OverBudget, match="needed"):
        plan_within(FACTS, allowed, min_context=1088, **wanted)
    for least in (64, 1000, 1024):
        assert plan_within(FACTS, allowed, min_context=least, **wanted).context == 1024


def test_the_least_that_is_allowed_is_tried_although_it_is_no_multiple_of_64() -> None:
    allowed = make_plan(FACTS, context=1000, chunk=16, interpreter=INTERPRETER).total
    plan = plan_within(FACTS, allowed, interpreter=INTERPRETER, most_context=8192, min_context=1000)
    assert (plan.context, plan.total) == (1000, allowed)


def test_the_default_grows_to_the_least_that_is_asked_for() -> None:
    wanted = {"interpreter": INTERPRETER, "most_context": 8192}
    assert plan_within(FACTS, None, **wanted).context == 2048
    assert plan_within(FACTS, None, min_context=4000, **wanted).context == 4000
    assert plan_within(FACTS, None, interpreter=INTERPRETER, most_context=512).context == 512


def test_contradictions_and_what_the_model_does_not_reach_are_refused() -> None:
    with pytest.raises(UsageError, match="a context of 512 tokens cannot shrink to 1024"):
        plan_within(FACTS, None, interpreter=INTERPRETER, most_context=8192, context=512, min_context=1024)
    for wanted, option in (({"context": 8193}, "--context"), ({"min_context": 8193}, "--min-context")):
        with pytest.raises(ContextError, match=r"a context of 8193 tokens was asked for, .* reach 8192") as caught:
            plan_within(FACTS, None, interpreter=INTERPRETER, most_context=8192, **wanted)
        assert caught.value.hint == f"{option} 8192 or less"


@pytest.mark.parametrize("known", ["{", "[]", "3", '{"key": 1}', "null"])
def test_a_damaged_note_of_the_interpreters_size_is_not_believed(known: str) -> None:
    state_folder().mkdir(parents=True)
    (state_folder() / "baseline.json").write_text(known)
    assert baseline() > 20 * MIB


def test_a_size_that_no_interpreter_has_is_measured_again() -> None:
    first = baseline()
    path = state_folder() / "baseline.json"
    for wrong in (0, 1000, 1e9):
        path.write_text(json.dumps({**json.loads(path.read_text()), "bytes": wrong}))
        assert abs(baseline() - first) < first / 2


def test_a_state_folder_that_cannot_be_written_costs_only_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("FERRULE_STATE", str(tmp_path / "file"))
    assert baseline() > 20 * MIB


def test_a_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budgets, "_LIBRARIES", ("numpy", "no-such-engine"))
    with pytest.raises(EngineError, match="no-such-engine is not installed") as caught:
        baseline()
    assert "pip install" in caught.value.hint


def test_a_budget_below_the_interpreters_own_size_ends_the_command_with_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tiny(tmp_path / "b")
    assert command.main(["fit", str(tmp_path / "b"), "--memory", "12MiB"]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert "12.0 MiB allowed" in said.err
    assert re.search(r"interpreter and libraries +\d+\.\d MiB  measured on this machine", said.err)
    proposed = re.search(r"--memory (\d+MiB) fits", said.err)[1]
    assert command.main(["fit", str(tmp_path / "b"), "--memory", proposed]) == 0
    assert command.main(["fit", str(tmp_path / "b"), "--memory", proposed, "--context", "4096"]) == 1
    assert "tables reach 2048" in capsys.readouterr().err
    assert command.main(["fit", str(tmp_path / "b"), "--recipe", "w8"]) == 2
    assert "a bundle has its recipe already" in capsys.readouterr().err
    assert command.main(["inspect", str(tmp_path / "b"), "--context", "4096"]) == 1
    assert "it reaches 2048" in capsys.readouterr().err
    assert (tmp_path / "b" / MANIFEST).is_file()
