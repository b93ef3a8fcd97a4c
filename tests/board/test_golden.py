"""Golden calls: recorded with one engine, played with another, and believed only where that is sound."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from tiny import Recurrent, manifest_of, tiny_bundle

from ferrule_runtime import __main__ as command
from ferrule_runtime.bundle import MANIFEST, Bundle, open_bundle
from ferrule_runtime.constrain import Vocabulary
from ferrule_runtime.dialects import chatml_json
from ferrule_runtime.errors import BundleError, ContextError, EngineError
from ferrule_runtime.golden import (
    GOLDEN_FILE,
    Case,
    Player,
    golden_cases,
    preferences,
    read_golden,
    record,
    replay,
    whole_request,
)
from ferrule_runtime.talk import Talk
from ferrule_runtime.tokenizer import Tokenizer


def cases_of(bundle: Bundle) -> list[Case]:
    talk = Talk.of(bundle)
    return golden_cases(talk, Vocabulary.of(bundle, talk.tokenizer))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return tiny_bundle(tmp_path_factory.mktemp("golden") / "b")


def call_logits(bundle: Bundle, case: Case, seed: int = 1) -> np.ndarray:
    """The logits before each token of the call, each from a fresh engine that is fed all before it."""
    rows = []
    for at in range(len(case.call)):
        engine = Recurrent(bundle, seed=seed)
        rows.append(engine.logits(engine.feed([*case.prompt, *case.call[:at]]))[0])
    return np.stack(rows)


@pytest.fixture(scope="module")
def recorded(plain: Bundle) -> dict[str, Any]:
    cases = cases_of(plain)
    return record(cases, [call_logits(plain, case) for case in cases], noise=0.01)


@pytest.fixture
def make(tmp_path: Path, recorded: dict[str, Any]) -> Callable[..., Bundle]:
    """Return a writer of bundles with golden calls that differ from the recorded ones."""

    def write(raw: Any = None, **changes: Any) -> Bundle:
        content = {**recorded, **changes} if raw is None else raw
        text = content if isinstance(content, str) else json.dumps(content)
        return tiny_bundle(tmp_path / "b", more={GOLDEN_FILE: text})

    return write


def test_cases_are_the_template_written_out_and_the_call_that_answers(plain: Bundle) -> None:
    cases = cases_of(plain)
    tokenizer = Tokenizer(plain.file("tokenizer.json"))
    assert [tokenizer.decode(case.call) for case in cases] == [
        f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
        for name, arguments in (
            ("set_alarm", {"hour": 7, "label": "early train"}),
            ("set_light", {"room": "kitchen", "on": False}),
            ("read_sensor", {"sensor": "water"}),
        )
    ]
    for case in cases:
        text = tokenizer.decode(case.prompt, keep=("<|im_start|>", "<|im_end|>"))
        assert text.startswith("<|im_start|>system\n")
        assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")
        assert all(f'"name": "{name}"' in text for name in ("set_alarm", "set_light", "read_sensor"))
        assert all(token in ids for token, ids in zip(case.call, case.allowed, strict=True))
    assert whole_request(plain) == (list(cases[0].prompt), list(cases[0].call))


def test_what_must_be_written_is_forced_and_what_may_be_chosen_is_free(plain: Bundle) -> None:
    (_, light, sensor) = cases_of(plain)
    tokenizer = Tokenizer(plain.file("tokenizer.json"))
    free = [
        (tokenizer.decode([token]), tokenizer.decode(ids))
        for token, ids in zip(sensor.call, sensor.allowed, strict=True)
        if len(ids) > 1
    ]
    # Which tool: set_ or read_; which sensor: door, water or smoke.
    assert [(said, sorted(could)) for said, could in free] == [("r", ["r", "s"]), ("w", ["d", "s", "w"])]
    free = [tokenizer.decode([token]) for token, ids in zip(light.call, light.allowed, strict=True) if len(ids) > 1]
    # set_ rather than read_, light rather than alarm, kitchen rather than hall, false rather than true.
    assert free == ["s", "l", "k", "f"]


@given(
    arrays(np.float32, (4, 9), elements=st.floats(-100, 100, width=32)),
    st.lists(st.lists(st.integers(0, 8), min_size=1, max_size=9, unique=True).map(sorted), min_size=4, max_size=4),
)
def test_preferences_are_the_best_allowed_and_how_far_they_lead(logits: np.ndarray, allowed: list[list[int]]) -> None:
    best, margins = preferences(logits, [np.array(ids) for ids in allowed])
    for row, ids, chosen, margin in zip(logits, allowed, best, margins, strict=True):
        ranked = sorted((float(row[index]) for index in ids), reverse=True)
        assert chosen in ids
        assert row[chosen] == ranked[0]
        if len(ids) == 1:
            assert margin is None
        else:
            assert margin == pytest.approx(ranked[0] - ranked[1], abs=1e-4)
            assert margin >= 0


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_logit_that_is_not_finite_has_no_preferences(value: float) -> None:
    logits = np.zeros((2, 4), dtype=np.float32)
    logits[1, 2] = value
    with pytest.raises(EngineError, match="not finite"):
        preferences(logits, [np.arange(4), np.arange(2)])


def test_what_is_recorded_is_what_one_would_find_by_hand(plain: Bundle, recorded: dict[str, Any]) -> None:
    assert json.loads(json.dumps(recorded)) == recorded
    assert (recorded["schema_version"], recorded["noise"]) == (1, 0.01)
    for case, kept in zip(cases_of(plain), recorded["cases"], strict=True):
        assert (kept["prompt"], kept["call"]) == (list(case.prompt), list(case.call))
        rows = call_logits(plain, case)
        for row, ids, best in zip(rows, case.allowed, kept["best"], strict=True):
            assert best == max(ids.tolist(), key=lambda index, row=row: float(row[index]))
    free = [margin for kept in recorded["cases"] for margin in kept["margins"] if margin is not None]
    # The tests below count on preferences that are clear, and on some that are not those of the call.
    assert min(free) > 0.01
    assert any(kept["best"] != kept["call"] for kept in recorded["cases"])


def test_the_same_engine_passes_whatever_it_prefers(make: Callable[..., Bundle]) -> None:
    bundle = make(noise=0)
    verdicts = replay(bundle, Recurrent(bundle))
    assert [verdict.passed for verdict in verdicts] == [True] * 3
    assert all("all as recorded" in verdict.detail for verdict in verdicts)


def test_another_model_fails_and_the_token_is_named(make: Callable[..., Bundle]) -> None:
    bundle = make(noise=0)
    verdicts = replay(bundle, Recurrent(bundle, seed=2))
    failed = [verdict.detail for verdict in verdicts if not verdict.passed]
    assert failed
    assert all("differs; it was preferred by" in detail and "the noise is 0.000" in detail for detail in failed)


def test_a_difference_passes_within_the_noise_and_not_beyond_it(
    make: Callable[..., Bundle], recorded: dict[str, Any]
) -> None:
    (case,) = recorded["cases"][2:]
    at = next(index for index, margin in enumerate(case["margins"]) if margin is not None)
    margin = case["margins"][at]
    # As if the machine that recorded it had preferred another token there, as narrowly as this one does.
    swapped = {**case, "best": [*case["best"]]}
    swapped["best"][at] = swapped["best"][at] + 1
    bundle = make(cases=[swapped], noise=margin)
    (verdict,) = replay(bundle, Recurrent(bundle))
    assert verdict.passed
    assert f"1 within the noise of {margin:.3f}" in verdict.detail


@pytest.mark.parametrize("noise", [0.0, 0.009])
def test_a_difference_beyond_the_noise_fails(
    make: Callable[..., Bundle], recorded: dict[str, Any], noise: float
) -> None:
    (case,) = recorded["cases"][2:]
    at = next(index for index, margin in enumerate(case["margins"]) if margin is not None)
    swapped = {**case, "best": [*case["best"]]}
    swapped["best"][at] = swapped["best"][at] + 1
    bundle = make(cases=[swapped], noise=noise)
    (verdict,) = replay(bundle, Recurrent(bundle))
    assert not verdict.passed
    assert f"token {at} of {len(case['call'])} differs" in verdict.detail


def test_a_forced_token_that_differs_fails_whatever_the_noise(
    make: Callable[..., Bundle], recorded: dict[str, Any]
) -> None:
    (case,) = recorded["cases"][2:]
    assert case["margins"][0] is None
    bundle = make(cases=[{**case, "best": [7, *case["best"][1:]]}], noise=1e6)
    (verdict,) = replay(bundle, Recurrent(bundle))
    assert not verdict.passed
    assert "token 0" in verdict.detail
    assert "it was forced" in verdict.detail


def test_rounding_of_the_size_of_the_noise_is_forgiven(make: Callable[..., Bundle]) -> None:
    bundle = make(noise=3.0)
    # Errors of up to 1 on each logit change a lead by up to 2.
    assert all(verdict.passed for verdict in replay(bundle, Recurrent(bundle, noise=1.0)))


CHANGES: list[dict[str, Any]] = [
    {"noise": float("nan")},
    {"noise": float("inf")},
    {"noise": -0.1},
    {"noise": "0.1"},
    {"noise": None},
    {"noise": True},
    {"cases": []},
    {"cases": {}},
    {"cases": 3},
    {"cases": [None]},
    {"cases": ["case"]},
]


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_golden_calls_that_are_malformed_are_refused(make: Callable[..., Bundle], change: dict[str, Any]) -> None:
    with pytest.raises(BundleError, match=f"{GOLDEN_FILE}: malformed"):
        read_golden(make(**change))


@pytest.mark.parametrize("key", ["prompt", "call", "best", "margins"])
@pytest.mark.parametrize(
    "value", [None, [], "text", 7, [True], [-1], [1.5], [10**9], ["a"], [[1]], [float("nan")]], ids=str
)
def test_a_case_that_is_malformed_is_refused(
    make: Callable[..., Bundle], recorded: dict[str, Any], key: str, value: Any
) -> None:
    case = {**recorded["cases"][0], key: value}
    with pytest.raises(BundleError, match=f"{GOLDEN_FILE}: malformed"):
        read_golden(make(cases=[case]))


@pytest.mark.parametrize("key", ["call", "best", "margins"])
def test_steps_that_do_not_match_are_refused(make: Callable[..., Bundle], recorded: dict[str, Any], key: str) -> None:
    case = {**recorded["cases"][0], key: recorded["cases"][0][key][:-1]}
    with pytest.raises(BundleError, match=f"{GOLDEN_FILE}: malformed"):
        read_golden(make(cases=[case]))


@pytest.mark.parametrize("raw", ["", "{", "[]", "3", "[" * 100_000, "{}"])
def test_what_is_no_golden_file_is_refused(make: Callable[..., Bundle], raw: str) -> None:
    with pytest.raises(BundleError, match=f"{GOLDEN_FILE}: malformed"):
        read_golden(make(raw))


@pytest.mark.parametrize("version", [0, 2, None, "1"])
def test_golden_calls_of_another_schema_are_refused(make: Callable[..., Bundle], version: Any) -> None:
    with pytest.raises(BundleError, match=f"schema {version!r}, known here is 1"):
        read_golden(make(schema_version=version))


def test_a_bundle_without_golden_calls_says_so(plain: Bundle) -> None:
    with pytest.raises(BundleError, match=r"no `golden\.json` in the bundle"):
        replay(plain, Recurrent(plain))


@pytest.mark.parametrize("noise", [float("nan"), float("inf")])
def test_a_noise_that_would_forgive_everything_is_not_recorded(plain: Bundle, noise: float) -> None:
    case = cases_of(plain)[0]
    logits = np.zeros((len(case.call), plain.manifest.tables["head"].rows), dtype=np.float32)
    assert record([case], [logits], noise=0.0)["cases"]
    with pytest.raises(EngineError, match=f"the noise of the golden calls is {noise}"):
        record([case], [logits], noise=noise)


def test_a_context_that_is_too_short_for_a_call_is_an_error_not_a_pass(make: Callable[..., Bundle]) -> None:
    bundle = make()
    with pytest.raises(ContextError):
        replay(bundle, Recurrent(bundle, context=64))


def test_a_player_takes_the_calls_tokens_whatever_the_model_prefers(plain: Bundle) -> None:
    engine = Recurrent(plain)
    engine.feed([1, 2, 3])
    player = Player(plain, engine)
    prompt, call = whole_request(plain)
    assert player.play(prompt, call) > 0
    # From the start, and all but the last token, behind which nothing is asked.
    assert engine.position == len(prompt) + len(call) - 1
    best, margins = player.preferences(prompt, call)
    assert len(best) == len(margins) == len(call)


def _templated(folder: Path, template: str) -> Bundle:
    bundle = tiny_bundle(folder)
    (folder / "template.jinja").write_text(template)
    manifest = bundle.manifest
    (folder / MANIFEST).write_text(
        manifest_of(folder, list(manifest.files), tables=manifest.tables, stop_tokens=manifest.stop_tokens).to_json()
    )
    return open_bundle(folder)


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("tool.function | tojson", "''", "drops 3 of 3 tools"),
        ("<tool_response>\n' + message.content + '", "<tool_response>\n' + '", "drops the results of tools"),
        ("message.content + '<|im_end|>\n' }}\n{%- endif", "'<|im_end|>\n' }}\n{%- endif", "do not survive"),
    ],
)
def test_a_template_that_loses_something_has_no_golden_calls(tmp_path: Path, old: str, new: str, why: str) -> None:
    assert chatml_json.TEMPLATE.count(old) == 1
    with pytest.raises(BundleError, match=why):
        cases_of(_templated(tmp_path / "b", chatml_json.TEMPLATE.replace(old, new)))


def test_the_command_names_an_engine_that_does_not_exist(
    tmp_path: Path, recorded: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "b"
    manifest = tiny_bundle(folder, more={GOLDEN_FILE: json.dumps(recorded)}).manifest
    (folder / MANIFEST).write_text(
        manifest_of(
            folder, list(manifest.files), tables=manifest.tables, stop_tokens=manifest.stop_tokens, engine="onyx"
        ).to_json()
    )
    assert command.main(["selftest", str(folder)]) == 1
    said = capsys.readouterr().err
    assert "error: unknown engine `onyx`" in said
    assert "did you mean `onnx`?" in said
