import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import TEMPLATE, Sizes, Tiny, write_tiny
from folders import QWEN35, write_llama, write_qwen35, write_safetensors
from hypothesis import given, settings
from hypothesis import strategies as st

from ferrule_convert.archs import build
from ferrule_convert.checkpoint import open_checkpoint
from ferrule_convert.estimate import describe
from ferrule_convert.graph import Rope
from ferrule_convert.pack import Options, convert
from ferrule_convert.recipe import load_recipe
from ferrule_convert.tokenizer import load
from ferrule_runtime.bundle import file_sha256
from ferrule_runtime.errors import CheckpointError
from ferrule_targets.target import load_target


@pytest.mark.parametrize(
    "how",
    [{}, {"dtype": "BF16"}, {"multimodal": True}, {"shards": 3}, {"multimodal": True, "shards": 2, "dtype": "F16"}],
)
def test_every_way_to_store_it_gives_the_same_model(tmp_path: Path, how: dict) -> None:
    expected = write_qwen35(tmp_path / "m", **how)
    checkpoint = open_checkpoint(tmp_path / "m")
    assert {name for name in expected if name.startswith("model.layers")} <= set(checkpoint.tensors)
    assert not [name for name in checkpoint.tensors if "visual" in name or "mtp" in name]
    for name, weight in checkpoint.tensors.items():
        np.testing.assert_array_equal(weight.all(), expected[name], err_msg=name)
    assert build(checkpoint).family == "qwen3_5"


def test_what_is_left_out_and_what_disagrees_is_said(tmp_path: Path) -> None:
    write_qwen35(tmp_path / "m", multimodal=True)
    checkpoint = open_checkpoint(tmp_path / "m")
    notes = " / ".join(checkpoint.notes)
    assert "1 tensors of the vision tower left out" in notes
    assert "1 tensors of the multi-token prediction head left out" in notes
    assert "ends replies at [0, 2], config.json at [2]" in notes
    assert checkpoint.stop_tokens == (0, 2)
    assert checkpoint.licence == "apache-2.0"
    assert checkpoint.template


def test_the_identity_changes_with_any_file_that_matters_and_with_no_other(tmp_path: Path) -> None:
    write_qwen35(tmp_path / "m")
    first = open_checkpoint(tmp_path / "m").sha256()
    (tmp_path / "m" / "notes.txt").write_text("x")
    assert open_checkpoint(tmp_path / "m").sha256() == first
    (tmp_path / "m" / "chat_template.jinja").write_text("{{ messages }}")
    assert open_checkpoint(tmp_path / "m").sha256() != first


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("config.json", "no config.json"),
        ("tokenizer.json", "no tokenizer.json"),
        ("model.safetensors", "neither model.safetensors nor"),
    ],
)
def test_a_missing_part_is_named(tmp_path: Path, name: str, says: str) -> None:
    write_qwen35(tmp_path / "m")
    (tmp_path / "m" / name).unlink()
    with pytest.raises(CheckpointError, match=says):
        open_checkpoint(tmp_path / "m")


def test_shards_that_are_missing_doubled_or_disagree_with_the_index_are_refused(tmp_path: Path) -> None:
    expected = write_qwen35(tmp_path / "m", shards=3)
    folder = tmp_path / "m"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    name = next(iter(index["weight_map"]))
    doubled = {**index["weight_map"], "extra": "model-00003.safetensors"}
    write_safetensors(folder / "model-00003.safetensors", {name: expected[name], "extra": expected[name]})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": doubled}))
    with pytest.raises(CheckpointError, match="is in another shard too"):
        open_checkpoint(folder)
    moved = {**index["weight_map"], name: "model-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": moved}))
    with pytest.raises(CheckpointError, match="but not in both"):
        open_checkpoint(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model-00001.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"shard `model-00001\.safetensors` is missing"):
        open_checkpoint(folder)
    for wrong in ("../m/model-00000.safetensors", "m" * 300, "a\0b", "", ".", ".."):
        placed = dict.fromkeys(index["weight_map"], wrong)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
        with pytest.raises(CheckpointError, match=r"is missing|Is a directory"):
            open_checkpoint(folder)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"hidden_size": None}, "no `hidden_size`"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "is scaled by `dynamic`"),
        ({"layer_types": ["linear_attention"] * 3}, r"layer types \[.*\] for 4 layers"),
        ({"layer_types": ["mamba"] * 4}, "layer types"),
        ({"model_type": "mamba"}, "unknown model family"),
        ({"intermediate_size": 128}, "its configuration says"),
        ({"hidden_size": "64"}, "`hidden_size` is 64"),
        ({"hidden_size": 1 << 62}, "`hidden_size` is"),
        ({"num_attention_heads": 0, "head_dim": None}, "`num_attention_heads` is 0"),
        ({"rms_norm_eps": float("nan")}, "`rms_norm_eps` is nan"),
        ({"rope_parameters": [1]}, "`rope_parameters` is"),
        ({"text_config": 3}, "`text_config` is 3"),
        ({"quantization_config": {"quant_method": "fp8"}}, r"quantised already \(fp8\)"),
        ({"mlp_bias": True}, "`mlp_bias` is set"),
        ({"eos_token_id": 272}, "`eos_token_id` 272 of 272 tokens"),
        ({"eos_token_id": "2"}, "`eos_token_id` 2 of 272 tokens"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(tmp_path: Path, change: dict, says: str) -> None:
    write_qwen35(tmp_path / "m")
    (tmp_path / "m" / "config.json").write_text(json.dumps(QWEN35 | change))
    with pytest.raises(CheckpointError, match=says):
        build(open_checkpoint(tmp_path / "m"))


@pytest.mark.parametrize("text", ["{", "[1]", '"x"'])
def test_json_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    write_qwen35(tmp_path / "m")
    (tmp_path / "m" / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        open_checkpoint(tmp_path / "m")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_a_llama_is_read_as_it_was_stored(tmp_path: Path, dtype: str, tied: bool) -> None:
    tiny = write_tiny(tmp_path / "m.gguf", Sizes(tied=tied))
    expected = write_llama(tmp_path / "m", tiny, dtype=dtype, shards=2)
    checkpoint = open_checkpoint(tmp_path / "m")
    assert set(checkpoint.tensors) == set(expected)
    for name, weight in checkpoint.tensors.items():
        np.testing.assert_array_equal(weight.all(), expected[name], err_msg=name)
    assert checkpoint.stored == f"safetensors {dtype}"
    assert checkpoint.template == TEMPLATE
    assert checkpoint.stop_tokens == (2,)
    assert checkpoint.notes == ()
    assert build(checkpoint).tied == tied


def test_the_same_weights_give_the_same_bundle_from_gguf_and_from_safetensors(tiny: Tiny, tmp_path: Path) -> None:
    write_llama(tmp_path / "m", tiny, shards=3)
    made = [
        convert(open_checkpoint(path), load_target("host"), load_recipe("w4g32"), tmp_path / name,
                Options(fidelity=False), lambda text: None).manifest
        for name, path in (("a", tiny.path), ("b", tmp_path / "m"))
    ]  # fmt: skip
    weights = [{name: made.files[name] for name in made.files if name.endswith((".onnx", ".bin"))} for made in made]
    assert len(weights[0]) >= 3
    assert weights[0] == weights[1]
    assert made[1].checkpoint["sha256"] == open_checkpoint(tmp_path / "m").sha256()
    assert made[0].checkpoint["sha256"] == file_sha256(tiny.path)


def test_a_folder_is_described_like_a_file(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_llama(tmp_path / "m", tiny)
    monkeypatch.chdir(tmp_path / "m")
    ours, theirs = describe(".", "host"), describe(str(tiny.path), "host")
    assert ours.facts["name"] == ours.facts["file"] == "m"
    assert ours.facts["parameters"] == theirs.facts["parameters"]
    # The two carry tokenizers of different lengths, nothing else differs.
    lengths = [len(open_checkpoint(path).tokenizer_json.encode()) for path in (Path(), tiny.path)]
    assert {name: size - lengths[0] for name, size in ours.bytes.items()} == {
        name: size - lengths[1] for name, size in theirs.bytes.items()
    }


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_that_the_configuration_does_not_speak_of_is_found_by_its_weights(tmp_path: Path, tied: bool) -> None:
    tiny = write_tiny(tmp_path / "m.gguf", Sizes(tied=tied))
    write_llama(tmp_path / "m", tiny, change={"tie_word_embeddings": None})
    checkpoint = open_checkpoint(tmp_path / "m")
    assert build(checkpoint).tied == tied
    assert "does not say whether its head is tied" in checkpoint.notes[0]


def test_a_stored_head_is_left_out_where_the_configuration_ties_it(tmp_path: Path) -> None:
    tiny = write_tiny(tmp_path / "m.gguf", Sizes(tied=False))
    write_llama(tmp_path / "m", tiny, change={"tie_word_embeddings": True})
    checkpoint = open_checkpoint(tmp_path / "m")
    assert build(checkpoint).tied
    assert checkpoint.notes == ("lm_head.weight left out: config.json ties the head to the embedding",)


def test_weights_of_the_vision_tower_may_be_of_any_type(tmp_path: Path) -> None:
    write_qwen35(tmp_path / "m", multimodal=True, shards=2)
    index = tmp_path / "m" / "model.safetensors.index.json"
    raw = json.loads(index.read_text())
    raw["weight_map"]["model.visual.positions"] = "model-9.safetensors"
    index.write_text(json.dumps(raw))
    text = json.dumps({"model.visual.positions": {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]}}).encode()
    (tmp_path / "m" / "model-9.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    assert "2 tensors of the vision tower left out" in open_checkpoint(tmp_path / "m").notes


def test_two_models_in_one_folder_are_refused_and_a_stray_file_is_named(tiny: Tiny, tmp_path: Path) -> None:
    expected = write_llama(tmp_path / "m", tiny, shards=2)
    write_safetensors(tmp_path / "m" / "old.safetensors", {"a": np.ones(3)})
    assert open_checkpoint(tmp_path / "m").notes == ("not in the index, so not read: old.safetensors",)
    write_safetensors(tmp_path / "m" / "model.safetensors", expected)
    with pytest.raises(CheckpointError, match=r"model\.safetensors and model\.safetensors\.index\.json in it"):
        open_checkpoint(tmp_path / "m")


def test_two_tensors_for_one_place_are_refused(tiny: Tiny, tmp_path: Path) -> None:
    expected = write_llama(tmp_path / "m", tiny)
    doubled = expected | {"model.language_model.norm.weight": expected["model.norm.weight"]}
    write_safetensors(tmp_path / "m" / "model.safetensors", doubled)
    with pytest.raises(CheckpointError, match=r"two tensors are `model\.norm\.weight`"):
        open_checkpoint(tmp_path / "m")


def test_an_index_that_places_a_tensor_twice_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    write_llama(tmp_path / "m", tiny, shards=2)
    index = tmp_path / "m" / "model.safetensors.index.json"
    twice = index.read_text().replace('"weight_map": {', '"weight_map": {"model.norm.weight": "x", ')
    index.write_text(twice)
    with pytest.raises(CheckpointError, match=r"`model\.norm\.weight` stands in it twice"):
        open_checkpoint(tmp_path / "m")


def test_a_slow_tokenizer_is_named(tiny: Tiny, tmp_path: Path) -> None:
    write_llama(tmp_path / "m", tiny)
    (tmp_path / "m" / "tokenizer.json").rename(tmp_path / "m" / "tokenizer.model")
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json in it, only tokenizer\.model"):
        open_checkpoint(tmp_path / "m")


def test_weights_alone_are_no_model(tiny: Tiny, tmp_path: Path) -> None:
    write_llama(tmp_path / "m", tiny)
    with pytest.raises(CheckpointError, match="weights alone are no model"):
        open_checkpoint(tmp_path / "m" / "model.safetensors")


@pytest.mark.parametrize(
    ("card", "licence"),
    [
        ("---\nlicense: mit\n---\n", "mit"),
        ('---\r\nlicense: "apache-2.0"\r\n---\r\n', "apache-2.0"),
        ("---\nlanguage: en\n---\nlicense: mit\n---\n", None),
        ("license: mit\n", None),
    ],
)
def test_the_licence_is_the_front_matters(tiny: Tiny, tmp_path: Path, card: str, licence: str | None) -> None:
    write_llama(tmp_path / "m", tiny)
    (tmp_path / "m" / "README.md").write_bytes(card.encode())
    assert open_checkpoint(tmp_path / "m").licence == licence


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
PLACES = [
    *(("config.json", key) for key in (*QWEN35, "text_config", "rope_scaling", "quantization_config")),
    ("generation_config.json", "eos_token_id"),
    *(("tokenizer_config.json", key) for key in ("chat_template", "eos_token", "bos_token")),
    ("chat_template.json", "chat_template"),
    ("model.safetensors.index.json", "weight_map"),
]


@given(place=st.sampled_from(PLACES), value=JSON)
@settings(max_examples=300, deadline=None)
def test_any_value_in_any_place_is_taken_or_refused_with_a_reason(
    tmp_path_factory: pytest.TempPathFactory, place: tuple[str, str], value: Any
) -> None:
    folder = tmp_path_factory.getbasetemp() / "any"
    if not folder.is_dir():
        write_qwen35(folder)
    name, key = place
    before = (folder / name).read_bytes() if (folder / name).is_file() else None
    try:
        known = json.loads(before) if before else {}
        (folder / name).write_text(json.dumps(known | {key: value}))
        said = ""
        try:
            checkpoint = open_checkpoint(folder)
            build(checkpoint)
        except CheckpointError as error:
            said = str(error)
        else:
            assert all(0 <= stop < QWEN35["vocab_size"] for stop in checkpoint.stop_tokens) or key == "vocab_size"
        assert said.isprintable()
    finally:
        (folder / name).unlink()
        if before is not None:
            (folder / name).write_bytes(before)


def test_added_tokens_behind_the_last_row_are_left_out_openly_unless_the_template_writes_them(
    tmp_path: Path, tiny: Tiny
) -> None:
    write_llama(tmp_path, tiny)
    path = tmp_path / "tokenizer.json"
    raw = json.loads(path.read_text())
    token = {**raw["added_tokens"][0], "id": len(tiny.tokens), "content": "<image_soft_token>"}
    path.write_text(json.dumps(raw | {"added_tokens": [*raw["added_tokens"], token]}))
    checkpoint = open_checkpoint(tmp_path)
    said = [note for note in checkpoint.notes if "1 added tokens beyond the model's" in note]
    assert "`<image_soft_token>`" in said[0]
    assert json.loads(checkpoint.tokenizer_json) == raw
    (tmp_path / "chat_template.jinja").write_text("<image_soft_token> tools <tool_call>")
    kept = open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="gives `<image_soft_token>` the id"):
        load(kept.tokenizer_json, "here", kept.config["vocab_size"])


def test_a_rotary_base_of_a_million_tokens_is_a_number(tmp_path: Path, tiny: Tiny) -> None:
    write_llama(tmp_path, tiny, change={"rope_theta": 3_580_165_449.0})
    table = next(node.table for node in build(open_checkpoint(tmp_path)).nodes if isinstance(node, Rope))
    assert table.frequencies[1] == pytest.approx(3_580_165_449.0 ** (-2 / 16))
