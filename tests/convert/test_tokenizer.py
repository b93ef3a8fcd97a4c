import json
from pathlib import Path
from typing import Any

import pytest
from folders import write_qwen35, write_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from ferrule_convert.apart import apart
from ferrule_convert.chat_format import chat_format
from ferrule_convert.checkpoint import open_checkpoint
from ferrule_convert.tokenizer import encode, load
from ferrule_runtime.errors import CheckpointError


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return dict(json.loads((folder / "tokenizer.json").read_text()))


def changed(good: dict[str, Any], *path: Any) -> str:
    """Return the tokenizer with one place, the keys before the last argument, set to that."""
    *keys, last, value = path
    raw = owner = json.loads(json.dumps(good))
    for key in keys:
        owner = owner[key]
    owner[last] = value
    return json.dumps(raw)


@pytest.mark.parametrize(
    "path",
    [
        ("model", None),
        ("model", "vocab", []),
        ("model", "vocab", "a", -1),
        ("model", "vocab", "a", 2**40),
        ("model", "merges", [["q", "zz"]]),
        ("model", "merges", 3),
        ("model", {"type": "Unigram", "vocab": [["a", 0.0]], "unk_id": 7}),
        ("pre_tokenizer", {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}),
        ("added_tokens", 0, "id", -1),
        # The library panics.
        ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
    ],
)
def test_what_the_library_does_not_take_is_refused(good: dict[str, Any], path: tuple[Any, ...]) -> None:
    with pytest.raises(CheckpointError, match=r"m: its tokenizer cannot be read: .") as caught:
        load(changed(good, *path), "m", 268)
    assert str(caught.value).isprintable()


def test_ids_beyond_the_vocabulary_are_refused_by_name(good: dict[str, Any]) -> None:
    load(json.dumps(good), "m", 268)
    with pytest.raises(CheckpointError, match="gives `ong` the id 267, its configuration has 267 ids"):
        load(json.dumps(good), "m", 267)
    with pytest.raises(CheckpointError, match="gives `zzz` the id 4294967295"):
        load(changed(good, "model", "vocab", "zzz", 2**32 - 1), "m", 268)


FIXED = {"strategy": {"Fixed": 10**9}, "direction": "Right", "pad_id": 0, "pad_type_id": 0, "pad_token": "x"}
CUT = {"max_length": 1, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}


@pytest.mark.parametrize("path", [("padding", FIXED | {"pad_to_multiple_of": None}), ("truncation", CUT)])
def test_neither_padding_nor_cutting_is_done(good: dict[str, Any], path: tuple[Any, ...]) -> None:
    found = [encode(load(text, "m"), "the song", "m") for text in (json.dumps(good), changed(good, *path))]
    assert found[0] == found[1]
    assert len(found[0]) > 1


@pytest.mark.parametrize(
    "path",
    [
        ("model", {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "b"}),
        # A pattern that would take for ever, which the library stops by a panic.
        ("pre_tokenizer", {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated", "invert": False}),
    ],
)
def test_a_tokenizer_that_fails_on_a_text_is_refused(good: dict[str, Any], path: tuple[Any, ...]) -> None:
    with pytest.raises(CheckpointError, match=r"m: its tokenizer fails: ."):
        encode(load(changed(good, *path), "m"), "x" * 40, "m")


def test_a_panic_in_a_process_of_its_own_is_the_same_error_and_prints_nothing(
    good: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_qwen35(tmp_path / "m")
    broken = changed(good, "normalizer", {"type": "Precompiled", "precompiled_charsmap": "AAAA"})
    (tmp_path / "m" / "tokenizer.json").write_text(broken)
    checkpoint = open_checkpoint(tmp_path / "m")
    with pytest.raises(CheckpointError, match="its tokenizer cannot be read: Precompiled"):
        apart(_chat_format, str(tmp_path / "m"))
    assert checkpoint.tokenizer_json == broken
    assert capfd.readouterr().err == ""


def _chat_format(path: str) -> None:
    chat_format(open_checkpoint(Path(path)))


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place of a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(place for key, inner in items for place in places(inner, (*at, key)))]


ODD = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 2**33), st.floats(), st.text(max_size=3), st.just([]), st.just({})
)


@given(st.data())
@settings(max_examples=200)
def test_any_value_in_any_place_is_taken_or_refused(good: dict[str, Any], data: st.DataObject) -> None:
    every = [place for place in places(good) if place]
    shallow = [place for place in every if len(place) < 3]
    text = changed(good, *data.draw(st.sampled_from(shallow) | st.sampled_from(every)), data.draw(ODD))
    said = ""
    try:
        ids = encode(load(text, "m", 268), "the song of the 7 <|im_end|> é", "m")
    except CheckpointError as error:
        said = str(error)
    else:
        assert all(0 <= one < 268 for one in ids)
    assert said.isprintable()
