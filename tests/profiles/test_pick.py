"""Choosing: hard limits, dominance, preferences, ties, and every reason in numbers."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ferrule_profiles.limits import Limits, NothingFits
from ferrule_profiles.pick import PREFERENCES, pick
from ferrule_profiles.run import Figure, Missing, Run
from ferrule_runtime.errors import FerruleError, RecordError, UsageError

MakeRun = Callable[..., Run]
MIB = 1 << 20


@pytest.fixture
def three(make_run: MakeRun) -> list[Run]:
    """A slow exact recipe, a middle one, and a small fast coarse one. Latency: first + 60 / decode."""
    return [
        make_run("fp32", first=2.0, decode=5.0, peak=800 * MIB, size=500 * MIB, kl=0.0),
        make_run("w8", first=1.0, decode=15.0, peak=300 * MIB, size=150 * MIB, kl=0.005),
        make_run("w4g32", first=0.8, decode=20.0, peak=200 * MIB, size=90 * MIB, kl=0.2),
    ]


def reason(choice_lost: Sequence[tuple[str, str]], name: str) -> str:
    return dict(choice_lost)[name]


def test_latency_is_preferred_and_said_with_its_interval(three: list[Run]) -> None:
    choice = pick(three, "rpi5")
    assert choice.winner.name == "w4g32"
    # 0.8 + 60 / 20 = 3.8 s, with one per cent about each.
    latency = choice.winner.values["latency"]
    assert isinstance(latency, Figure)
    assert latency.median == pytest.approx(3.8)
    assert latency.low < 3.8 < latency.high
    assert "`w4g32`: of 3 recipes on `rpi5` it has the lowest latency, 3.80 s [" in choice.sentence
    assert choice.sentence.count(". ") == 0, "one sentence"
    assert set(dict(choice.lost)) == {"fp32", "w8"}
    assert "latency 14.0 s [" in reason(choice.lost, "fp32")
    assert "against 3.80 s [" in reason(choice.lost, "fp32")
    assert "better in KL to float < 1e-06 nats against 0.200 nats" in reason(choice.lost, "fp32")


def test_the_winner_is_the_best_only_of_what_meets_the_limits(three: list[Run]) -> None:
    alone = pick(three, "rpi5", Limits(max_kl=0.001)).sentence
    assert "the only one of 3 recipes on `rpi5` within the limits, with latency 14.0 s [" in alone
    assert "lowest" not in alone
    assert "`w8`: of the 2 of 3 recipes within the limits on `rpi5` it has the lowest latency" in (
        pick(three, "rpi5", Limits(max_kl=0.1)).sentence
    )


@pytest.mark.parametrize(
    ("prefer", "winner"), [("latency", "w4g32"), ("memory", "w4g32"), ("size", "w4g32"), ("fidelity", "fp32")]
)
def test_preference_decides(three: list[Run], prefer: str, winner: str) -> None:
    assert pick(three, "rpi5", prefer=prefer).winner.name == winner


@pytest.mark.parametrize(
    ("limits", "winner"),
    [
        (Limits(max_kl=0.1), "w8"),
        (Limits(max_kl=0.001), "fp32"),
        (Limits(max_size=100 * MIB), "w4g32"),
        (Limits(max_memory=400 * MIB, max_kl=0.1), "w8"),
        (Limits(min_decode=14), "w4g32"),
        (Limits(max_first_token=1.5, max_kl=0.1), "w8"),
    ],
)
def test_limits_come_before_preference(three: list[Run], limits: Limits, winner: str) -> None:
    choice = pick(three, "rpi5", limits)
    assert choice.winner.name == winner
    assert "meets every limit: " in choice.sentence


def test_limit_that_is_not_met_is_said_with_how_much_is_missing(three: list[Run]) -> None:
    choice = pick(three, "rpi5", Limits(max_memory=256 * MIB, min_decode=10))
    assert "peak RSS" in reason(choice.lost, "w8")
    # The most of 297, 300, 303 MiB.
    assert "303.0 MiB at the most is over --max-memory 256.0 MiB by 47.0 MiB" in reason(choice.lost, "w8")
    # The 5 % end of 4.95, 5, 5.05 tok/s.
    assert "decode 4.96 tok/s at the 5 % end is under --min-decode 10.0 tok/s by 5.04 tok/s" in reason(
        choice.lost, "fp32"
    )


def test_limits_hold_at_the_unfavourable_end_of_the_interval(make_run: MakeRun) -> None:
    runs = [make_run("steady", peak=[299 * MIB] * 3), make_run("unsteady", peak=[200 * MIB, 290 * MIB, 301 * MIB])]
    choice = pick(runs, "rpi5", Limits(max_memory=300 * MIB))
    assert choice.winner.name == "steady"
    decode = [make_run("steady", decode=[10.1] * 3), make_run("unsteady", decode=[8.0, 20.0, 30.0])]
    assert pick(decode, "rpi5", Limits(min_decode=10)).winner.name == "steady"


def test_missing_figure_meets_no_limit(make_run: MakeRun) -> None:
    runs = [make_run("measured", joules=(2.0, 0.05)), make_run("not", decode=30.0)]
    assert pick(runs, "rpi5").winner.name == "not"
    choice = pick(runs, "rpi5", Limits(max_energy_per_task=10))
    assert choice.winner.name == "measured"
    assert reason(choice.lost, "not") == (
        "energy per task is null (not measured here), and a missing figure does not meet --max-energy-per-task"
    )


def test_energy_of_a_task_is_prefill_and_sixty_tokens(make_run: MakeRun) -> None:
    energy = pick([make_run("w8", joules=(2.0, 0.05))], "rpi5").winner.values["energy"]
    assert isinstance(energy, Figure)
    assert energy.median == pytest.approx(2.0 + 60 * 0.05)


def test_nothing_fits_lists_the_nearest_first_and_by_how_much(three: list[Run]) -> None:
    with pytest.raises(NothingFits, match="no recipe of 3 on `rpi5` meets the limits") as caught:
        pick(three, "rpi5", Limits(max_memory=150 * MIB))
    assert [name for name, _ in caught.value.nearest] == ["w4g32", "w8", "fp32"]
    assert "over --max-memory 150.0 MiB by 52.0 MiB" in str(caught.value)
    assert caught.value.exit_code == 1
    assert caught.value.hint


def test_what_is_near_is_told_apart_even_where_a_figure_is_missing_everywhere(three: list[Run]) -> None:
    with pytest.raises(NothingFits) as caught:
        pick(three, "rpi5", Limits(max_memory=150 * MIB, max_energy_per_task=1))
    assert [name for name, _ in caught.value.nearest] == ["w4g32", "w8", "fp32"]


def test_overlapping_intervals_cannot_be_separated_and_memory_decides(make_run: MakeRun) -> None:
    runs = [
        make_run("quicker", decode=[20.0, 21.0, 23.0], peak=300 * MIB),
        make_run("smaller", decode=[19.0, 20.0, 22.0], peak=200 * MIB),
    ]
    choice = pick(runs, "rpi5")
    assert choice.winner.name == "smaller"
    assert "it and `quicker` cannot be separated by latency (" in choice.sentence
    assert "and it has the least peak RSS, 200.0 MiB [" in choice.sentence
    assert reason(choice.lost, "quicker").startswith(
        "cannot be separated from `smaller` by latency; peak RSS 300.0 MiB"
    )


def test_recipes_that_nothing_separates_are_said_to_be_so(make_run: MakeRun) -> None:
    runs = [make_run("a", decode=[20.0, 21.0, 23.0]), make_run("b", decode=[19.0, 20.5, 22.0])]
    choice = pick(runs, "rpi5")
    assert choice.winner.name == "a"
    assert "cannot be separated by latency" in choice.sentence
    assert "nor by anything else, so the smaller median decided" in choice.sentence
    assert "cannot be separated from `a` by latency or peak RSS or size" in reason(choice.lost, "b")


def test_dominated_recipe_is_told_by_what(make_run: MakeRun) -> None:
    runs = [make_run("good", peak=200 * MIB), make_run("bad", peak=300 * MIB)]
    choice = pick(runs, "rpi5")
    assert choice.front == ("good",)
    assert reason(choice.lost, "bad").startswith(
        "`good` is at least as good in everything and better in peak RSS (200.0"
    )


def test_front_leaves_out_only_the_dominated(three: list[Run], make_run: MakeRun) -> None:
    worse = make_run("worse", first=1.1, decode=14.0, peak=310 * MIB, size=160 * MIB, kl=0.006)
    assert pick([*three, worse], "rpi5").front == ("fp32", "w8", "w4g32")


def test_missing_fidelity_neither_wins_nor_is_ignored(make_run: MakeRun) -> None:
    runs = [make_run("checked", kl=0.5), make_run("unchecked", kl=None)]
    choice = pick(runs, "rpi5", prefer="fidelity")
    assert choice.winner.name == "checked"
    with pytest.raises(RecordError, match=r"KL to float is null everywhere \(--no-fidelity\)"):
        pick([make_run("unchecked", kl=None)], "rpi5", prefer="fidelity")


def test_time_from_request_to_call_is_used_where_it_was_measured(make_run: MakeRun) -> None:
    run = make_run("w8")
    call = Figure(9.0, 8.5, 9.5, "s", ((8.5, 9.0, 9.5),), "measured")
    run = make_run("w8", figures={**run.figures, "request_to_call": call})
    assert pick([run], "rpi5").winner.values["latency"] == call


def test_only_run_is_picked_as_such(make_run: MakeRun) -> None:
    choice = pick([make_run("w8")], "rpi5")
    assert "ship `w8`: the only recipe measured on `rpi5`" in choice.sentence
    assert choice.lost == ()


def test_newest_run_of_a_recipe_counts(make_run: MakeRun) -> None:
    choice = pick([make_run("w8", decode=5.0), make_run("w8", decode=10.0)], "rpi5")
    decode = choice.winner.values["decode"]
    assert isinstance(decode, Figure)
    assert decode.median == 10.0
    assert "1 older left out" in choice.notes[0]


def test_unlike_runs_are_refused_with_the_differences(make_run: MakeRun) -> None:
    runs = [make_run("w8"), make_run("w4g32", machine={"cores": 2, "kernel": "6.1"})]
    with pytest.raises(RecordError, match="unlike, so they are not compared: cores: `4` against `2`; kernel:"):
        pick(runs, "rpi5")


def test_an_old_run_on_another_kernel_does_not_stand_in_the_way(make_run: MakeRun) -> None:
    runs = [make_run("w8", machine={"kernel": "6.1"}), make_run("w8"), make_run("w4g32")]
    assert len(pick(runs, "rpi5").considered) == 2


def test_several_checkpoints_are_refused(make_run: MakeRun) -> None:
    other = make_run("w4g32")
    other = make_run("w4g32", bundle=type(other.bundle)(**{**vars(other.bundle), "checkpoint_sha256": "d" * 64}))
    with pytest.raises(RecordError, match="different checkpoints"):
        pick([make_run("w8"), other], "rpi5")


def test_runs_of_other_targets_are_left_alone(three: list[Run], make_run: MakeRun) -> None:
    assert pick([*three, make_run("w2", target="rpi4", decode=99.0)], "rpi5").winner.name == "w4g32"


@pytest.mark.parametrize(
    ("runs", "target", "said", "hint"),
    [(0, "rpi5", "there are no runs", "ferrule profile"), (3, "rpi", "unknown target among the runs `rpi`", "`rpi5`")],
)
def test_no_runs_for_a_target_are_refused(three: list[Run], runs: int, target: str, said: str, hint: str) -> None:
    with pytest.raises(RecordError, match=said) as caught:
        pick(three[:runs], target)
    assert hint in caught.value.hint


def test_accuracy_without_scores_is_refused_and_not_ignored(three: list[Run]) -> None:
    with pytest.raises(RecordError, match="no score for `fp32`, `w8`, `w4g32`"):
        pick(three, "rpi5", Limits(max_accuracy_loss=5))


def test_unknown_preference_and_prompt_are_refused(three: list[Run]) -> None:
    with pytest.raises(FerruleError, match="unknown preference `speed`"):
        pick(three, "rpi5", prefer="speed")
    with pytest.raises(UsageError, match="no figures for a prompt of 999 tokens"):
        pick(three, "rpi5", prompt=999)


def test_few_launches_are_noted(make_run: MakeRun) -> None:
    assert "1 launch(es)" in pick([make_run("w8", before=({},))], "rpi5").notes[0]
    assert pick([make_run("w8")], "rpi5").notes == ()


def test_recipes_of_one_name_are_told_apart(make_run: MakeRun) -> None:
    run = make_run("w8")
    other = make_run("w8", bundle=type(run.bundle)(**{**vars(run.bundle), "recipe_key": "w8@ffffffff", "name": "b2"}))
    names = [candidate.name for candidate in pick([run, other], "rpi5").considered]
    assert len(set(names)) == 2
    assert all("w8@" in name for name in names)


def test_choice_is_json(three: list[Run]) -> None:
    stored = json.loads(json.dumps(pick(three, "rpi5", Limits(max_kl=0.1)).to_dict()))
    assert stored["recipe_key"] == "w8@12345678"
    assert stored["limits"] == {"max_kl": 0.1}
    assert stored["request"] == {"prompt": 128, "tokens": 60}
    assert stored["considered"]["fp32"]["size"]["median"] == 500 * MIB


shapes = st.lists(
    st.tuples(
        st.floats(0.1, 5), st.floats(1, 50), st.integers(50, 900), st.integers(10, 500), st.none() | st.floats(0, 1)
    ),
    min_size=1, max_size=5,
)  # fmt: skip


@given(shapes, st.sampled_from(sorted(PREFERENCES)), st.none() | st.integers(50, 900))
def test_choice_meets_its_limits_whatever_the_runs(
    make_run: MakeRun, shapes: list[tuple[Any, ...]], prefer: str, memory: int | None
) -> None:
    runs = [
        make_run(f"r{n}", first=first, decode=decode, peak=peak * MIB, size=size * MIB, kl=kl)
        for n, (first, decode, peak, size, kl) in enumerate(shapes)
    ]
    highs = {f"r{n}": peak * 1.01 * MIB for n, (_, _, peak, _, _) in enumerate(shapes)}
    limits = Limits(max_memory=memory * MIB) if memory else Limits()
    fitting = {name for name, high in highs.items() if not memory or high <= memory * MIB}
    try:
        choice = pick(runs, "rpi5", limits, prefer)
    except NothingFits:
        assert not fitting
        return
    except RecordError:
        assert prefer == "fidelity"
        assert all(kl is None for n, (*_, kl) in enumerate(shapes) if f"r{n}" in fitting)
        return
    assert choice.winner.name in fitting
    assert choice.winner.name in choice.front
    assert {name for name, _ in choice.lost} == highs.keys() - {choice.winner.name}
    # Nobody who fits is clearly better in what was preferred.
    mine = choice.winner.values[PREFERENCES[prefer][0]]
    assert isinstance(mine, Figure)
    others = [c.values[PREFERENCES[prefer][0]] for c in choice.considered if c.name in fitting]
    assert all(isinstance(other, Missing) or other.high >= mine.low for other in others)
    # The order of the records decides nothing.
    for order in itertools.islice(itertools.permutations(runs), 3):
        assert pick(order, "rpi5", limits, prefer).winner.name == choice.winner.name
