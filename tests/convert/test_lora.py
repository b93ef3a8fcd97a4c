import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import Tiny
from folders import write_llama, write_safetensors
from hypothesis import given, settings
from hypothesis import strategies as st

from ferrule_convert.archs import build
from ferrule_convert.checkpoint import open_checkpoint
from ferrule_convert.interpret import interpret
from ferrule_convert.pack import Options, convert
from ferrule_convert.recipe import load_recipe
from ferrule_runtime.errors import CheckpointError
from ferrule_targets.target import load_target

MODULES = ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj")


def write_adapter(
    folder: Path, tiny: Tiny, change: dict[str, Any] | None = None, *, dtype: str = "F32"
) -> dict[str, np.ndarray]:
    """Write an adapter of rank 4, alpha 6; return the changed matrices: W + alpha / r · B · A."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(3)
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "bias": "none", "base_model_name_or_path": "org/tiny"}
    config |= change or {}
    tensors: dict[str, np.ndarray] = {}
    for module in MODULES:
        rows, columns = tiny.tensors[f"{module}.weight"].shape
        name = f"base_model.model.{module}"
        rank = config.get("rank_pattern", {}).get(module.rsplit(".", 1)[1], 4)
        tensors[f"{name}.lora_A.weight"] = rng.standard_normal((rank, columns)).astype(np.float32)
        tensors[f"{name}.lora_B.weight"] = rng.standard_normal((rows, rank)).astype(np.float32)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    found = write_safetensors(folder / "adapter_model.safetensors", tensors, dtype)
    merged = {}
    for module in MODULES:
        a, b = (found[f"base_model.model.{module}.lora_{half}.weight"].astype(np.float64) for half in "AB")
        scale = (config["lora_alpha"] or 0) / (np.sqrt(len(a)) if config.get("use_rslora") else len(a))
        merged[f"{module}.weight"] = tiny.tensors[f"{module}.weight"] + scale * (b @ a)
    return merged


def check(tiny: Tiny, base: Path, adapter: Path, merged: dict[str, np.ndarray]) -> None:
    checkpoint = open_checkpoint(base, adapter)
    for name, weight in checkpoint.tensors.items():
        expected = merged.get(name, tiny.tensors[name])
        np.testing.assert_allclose(weight.all(), expected, atol=1e-4 if name in merged else 0, err_msg=name)
    for name in merged:
        weight = checkpoint.tensors[name]
        blocks = np.concatenate([weight.rows(*span) for span in weight.spans(elements=300)])
        np.testing.assert_allclose(blocks, merged[name], atol=1e-4)


@pytest.mark.parametrize("change", [{}, {"use_rslora": True}, {"rank_pattern": {"down_proj": 7}}])
@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_rows_are_those_of_the_base_plus_the_scaled_product(
    tiny: Tiny, tmp_path: Path, change: dict[str, Any], dtype: str
) -> None:
    merged = write_adapter(tmp_path / "a", tiny, change, dtype=dtype)
    check(tiny, tiny.path, tmp_path / "a", merged)
    write_llama(tmp_path / "m", tiny, shards=2)
    check(tiny, tmp_path / "m", tmp_path / "a", merged)


def test_an_alpha_of_its_own_is_taken(tiny: Tiny, tmp_path: Path) -> None:
    merged = write_adapter(tmp_path / "a", tiny, {"alpha_pattern": {"0.self_attn.q_proj": 2}})
    name = f"{MODULES[0]}.weight"
    # A third of the alpha is a third of the change.
    merged[name] = tiny.tensors[name] + (merged[name] - tiny.tensors[name]) / 3
    check(tiny, tiny.path, tmp_path / "a", merged)


def test_a_merged_model_computes_what_a_model_of_the_merged_weights_does(tiny: Tiny, tmp_path: Path) -> None:
    merged = write_adapter(tmp_path / "a", tiny)
    other = Tiny(tmp_path / "m", tiny.sizes, tiny.tokens, tiny.tensors | merged)
    write_llama(tmp_path / "m", other)
    tokens = list(range(3, 60))
    ours = interpret(build(open_checkpoint(tiny.path, tmp_path / "a")), tokens)
    np.testing.assert_allclose(ours, interpret(build(open_checkpoint(tmp_path / "m")), tokens), atol=1e-3)
    assert np.abs(ours - interpret(build(open_checkpoint(tiny.path)), tokens)).max() > 0.1


def test_an_adapter_of_a_multimodal_release_fits_its_text_model(tiny: Tiny, tmp_path: Path) -> None:
    merged = write_adapter(tmp_path / "a", tiny)
    path = tmp_path / "a" / "adapter_model.safetensors"
    raw = path.read_bytes().replace(b"base_model.model.model.", b"base_model.model.language_model.model.")
    length = len(raw) - len(path.read_bytes()) + int.from_bytes(raw[:8], "little")
    path.write_bytes(length.to_bytes(8, "little") + raw[8:])
    check(tiny, tiny.path, tmp_path / "a", merged)


def test_a_bundle_says_what_was_merged_and_has_another_identity(tiny: Tiny, tmp_path: Path) -> None:
    write_adapter(tmp_path / "a", tiny)
    plain, merged = open_checkpoint(tiny.path), open_checkpoint(tiny.path, tmp_path / "a")
    assert merged.name == f"{plain.name} + a"
    assert merged.sha256() != plain.sha256()
    write_adapter(tmp_path / "other", tiny, {"lora_alpha": 7})
    assert merged.sha256() != open_checkpoint(tiny.path, tmp_path / "other").sha256()
    chosen = (load_target("host"), load_recipe("w8"), tmp_path / "b", Options(fidelity=False))
    manifest = convert(merged, *chosen, lambda text: None).manifest
    assert manifest.checkpoint["sha256"] == merged.sha256()
    assert manifest.made["notes"] == ["LoRA `a` merged into 2 matrices; made for `org/tiny`"]
    assert "F32+LoRA" in {weight.stored for weight in merged.tensors.values()}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"use_dora": True}, "its `use_dora` is True"),
        ({"modules_to_save": ["lm_head"]}, "its `modules_to_save` is"),
        ({"bias": "all"}, "its `bias` is `all`"),
        ({"fan_in_fan_out": True}, "its `fan_in_fan_out` is True"),
        ({"init_lora_weights": "pissa_niter_4"}, "its `init_lora_weights` is"),
        ({"peft_type": "LOHA"}, "an adapter of kind `LOHA`"),
        ({"r": 0}, "`r` is 0"),
        ({"r": 5}, "rank 5"),
        ({"lora_alpha": None}, "`lora_alpha` is None"),
        ({"lora_alpha": float("inf")}, "`lora_alpha` is inf"),
        ({"alpha_pattern": {"(a+)+$": 3}}, "only plain names are read"),
        ({"alpha_pattern": [1]}, "`alpha_pattern` is"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    tiny: Tiny, tmp_path: Path, change: dict[str, Any], says: str
) -> None:
    write_adapter(tmp_path / "a", tiny, change)
    with pytest.raises(CheckpointError, match=says):
        open_checkpoint(tiny.path, tmp_path / "a")


def test_the_commands_take_an_adapter(tiny: Tiny, tmp_path: Path) -> None:
    write_adapter(tmp_path / "a", tiny)
    command = [sys.executable, "-m", "ferrule_runtime"]
    adapter = ["--lora", str(tmp_path / "a")]
    made = [*command, "convert", str(tiny.path), *adapter, "--target", "host", "--recipe", "fp32", "--no-fidelity"]
    done = subprocess.run([*made, "-o", str(tmp_path / "b")], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "LoRA `a` merged into 2 matrices" in done.stderr
    # Unquantised, the bundle is the merged model to rounding, and far from the base alone.
    found = []
    for extra in (adapter, []):
        check = [*command, "check", str(tmp_path / "b"), "--against", str(tiny.path), *extra, "--json"]
        done = subprocess.run(check, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout)["fidelity"]["kl"])
    assert found[0] < 1e-5
    assert found[1] > 0.01


A, B = (f"base_model.model.{MODULES[0]}.lora_{half}.weight" for half in "AB")


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({A: (4, 64), B: (32, 4)}, r"`model\.layers\.0\.self_attn\.q_proj\.weight` is \(64, 64\) in the base"),
        ({A: (4, 32), B: (64, 4)}, r"is \(64, 64\) in the base; the adapter has lora_A \(4, 32\)"),
        ({A: (4, 64), B: (64, 5)}, r"has lora_A \(4, 64\), lora_B \(64, 5\), rank 4"),
        ({A.replace("rs.0", "rs.9"): (4, 64), B.replace("rs.0", "rs.9"): (64, 4)}, "is not in the base"),
        ({A: (4, 64)}, "has lora_A alone"),
        ({name.replace("model.layers", where): (4, 64) if "_A" in name else (64, 4)
          for name in (A, B) for where in ("model.layers", "model.language_model.layers")}, "two adapters are for"),
        ({A.replace("lora_A.weight", "lora_magnitude_vector"): (64, 1)}, "is no half of"),
        ({"base_model.model.model.embed_tokens.lora_embedding_A": (4, 272)}, "is no half of"),
        ({"base_model.model.lm_head.lora_A.weight": (4, 64), "base_model.model.lm_head.lora_B.weight": (272, 4)},
         "adapts `lm_head.weight`, but the base's head is its embedding"),
        ({"base_model.model.visual.q.lora_A.weight": (4, 64), "base_model.model.visual.q.lora_B.weight": (64, 4)},
         "adapts nothing of the text model"),
        ({}, "no adapter in it"),
    ],
)  # fmt: skip
def test_an_adapter_of_another_base_or_in_pieces_is_refused(
    tiny: Tiny, tmp_path: Path, tensors: dict[str, tuple[int, ...]], says: str
) -> None:
    write_adapter(tmp_path / "a", tiny)
    filled = {name: np.ones(shape, np.float32) for name, shape in tensors.items()}
    write_safetensors(tmp_path / "a" / "adapter_model.safetensors", filled)
    with pytest.raises(CheckpointError, match=says):
        open_checkpoint(tiny.path, tmp_path / "a")


def test_a_missing_part_is_named_and_values_that_are_not_finite_too(tiny: Tiny, tmp_path: Path) -> None:
    write_adapter(tmp_path / "a", tiny)
    path = tmp_path / "a" / "adapter_model.safetensors"
    write_safetensors(path, {A: np.full((4, 64), np.nan, np.float32), B: np.ones((64, 4))})
    with pytest.raises(CheckpointError, match=r"lora_A\.weight` holds 256 values that are not finite"):
        open_checkpoint(tiny.path, tmp_path / "a").tensors[f"{MODULES[0]}.weight"].rows(0, 2)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"no adapter_model\.safetensors in it"):
        open_checkpoint(tiny.path, tmp_path / "a")
    (tmp_path / "a" / "adapter_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"no adapter_config\.json in it"):
        open_checkpoint(tiny.path, tmp_path / "a")


@given(
    key=st.sampled_from(["r", "lora_alpha", "rank_pattern", "alpha_pattern", "bias", "peft_type", "use_dora"])
    | st.sampled_from(["init_lora_weights", "base_model_name_or_path", "use_rslora", "modules_to_save"]),
    value=st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
    | st.lists(st.integers(), max_size=2) | st.dictionaries(st.text(max_size=5), st.integers() | st.none(), max_size=2),
)  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_any_option_is_taken_or_refused_with_a_reason(
    tmp_path_factory: pytest.TempPathFactory, tiny: Tiny, key: str, value: Any
) -> None:
    folder = tmp_path_factory.getbasetemp() / "any-adapter"
    if not folder.is_dir():
        write_adapter(folder, tiny)
    path = folder / "adapter_config.json"
    before = path.read_text()
    try:
        path.write_text(json.dumps(json.loads(before) | {key: value}))
        said = ""
        try:
            merged = open_checkpoint(tiny.path, folder)
        except CheckpointError as error:
            said = str(error)
        else:
            assert np.isfinite(merged.tensors[f"{MODULES[0]}.weight"].rows(0, 2)).all()
        assert said.isprintable()
    finally:
        path.write_text(before)
