"""A bundle is whole or not there."""

import json
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from checkpoints import Tiny, write_tiny

from ferrule_convert.checkpoint import open_checkpoint
from ferrule_convert.pack import Options, convert
from ferrule_convert.recipe import load_recipe
from ferrule_runtime.bundle import Bundle, open_bundle
from ferrule_runtime.errors import BundleError, CheckpointError, RecipeError, UsageError
from ferrule_runtime.golden import replay
from ferrule_targets.target import load_target


def make(tiny: Tiny, out: Path, recipe: str = "w8", options: Options = Options(), target: str = "host") -> Bundle:  # noqa: B008 - frozen
    return convert(
        open_checkpoint(tiny.path), load_target(target), load_recipe(recipe), out, options, lambda text: None
    )


def test_a_bundle_opens_answers_its_golden_calls_and_keeps_its_recipe(tiny: Tiny, tmp_path: Path) -> None:
    made = make(tiny, tmp_path / "b", "w4g32_head4")
    bundle = open_bundle(tmp_path / "b")
    assert bundle.hash == made.hash
    assert bundle.manifest == made.manifest
    assert all(verdict.passed for verdict in replay(bundle))
    rules = bundle.manifest.recipe["rules"]
    assert rules[-1]["scheme"] == {"bits": 4, "group": 32, "zero": False, "method": "rtn"}
    assert bundle.manifest.fidelity["positions"] > 2000
    assert not list(tmp_path.glob(".b.partial*"))


def test_bits_per_weight_are_the_bytes_on_disk(tiny: Tiny, tmp_path: Path) -> None:
    manifest = make(tiny, tmp_path / "b", "w4g32", Options(fidelity=False)).manifest
    matrices = sum(tensor.size for tensor in tiny.tensors.values() if tensor.ndim == 2)
    table = tiny.tensors["model.embed_tokens.weight"].size
    # 4 bits and a 32-bit scale per 32 weights are 5 bits; the 8-bit table is 9.
    assert manifest.recipe["bits_per_weight"] == pytest.approx(
        (5 * (matrices - table) + 9 * table) / matrices, abs=1e-3
    )
    assert manifest.fidelity["skipped"] == "--no-fidelity"


def test_the_same_inputs_give_the_same_files(tiny: Tiny, tmp_path: Path) -> None:
    one, two = (make(tiny, tmp_path / name, "w4g32", Options(fidelity=False)).manifest for name in ("a", "b"))
    assert one.files == two.files


def test_an_existing_folder_is_not_touched(tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "mine").write_text("keep")
    with pytest.raises(UsageError, match="exists already"):
        make(tiny, tmp_path / "b")
    assert (tmp_path / "b" / "mine").read_text() == "keep"


def test_what_fails_half_way_leaves_nothing(tmp_path: Path) -> None:
    broken = write_tiny(tmp_path / "m.gguf", poison="blk.1.ffn_down.weight")
    with pytest.raises(CheckpointError, match="not finite"):
        make(broken, tmp_path / "out" / "b")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_kl_above_the_limit_fails_the_conversion(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"--max-kl allows 0\.0000"):
        make(tiny, tmp_path / "b", "w4g32_head4", Options(max_kl=1e-5))
    assert not (tmp_path / "b").exists()
    with pytest.raises(UsageError, match="needs the fidelity check"):
        make(tiny, tmp_path / "b", options=Options(fidelity=False, max_kl=1.0))


def test_a_recipe_that_the_target_does_not_take_is_refused_before_anything_is_written(
    tiny: Tiny, tmp_path: Path
) -> None:
    with pytest.raises(RecipeError, match="target `rpi5` takes 4/8 bits"):
        make(tiny, tmp_path / "b", "w2g32", target="rpi5")
    assert not (tmp_path / "b").exists()


def test_a_context_beyond_the_model_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the model reaches 2048"):
        make(tiny, tmp_path / "b", options=Options(context=4096))


def test_a_context_that_does_not_hold_the_golden_calls_is_refused_and_one_that_does_is_not(
    tiny: Tiny, tmp_path: Path
) -> None:
    with pytest.raises(BundleError, match="a context of 100 tokens does not hold the golden calls") as caught:
        make(tiny, tmp_path / "b", options=Options(context=100))
    needed = int(re.findall(r"--context (\d+) or more", caught.value.hint or "")[0])
    with pytest.raises(BundleError, match=f"which take {needed}"):
        make(tiny, tmp_path / "b", options=Options(context=needed - 1))
    bundle = make(tiny, tmp_path / "b", options=Options(context=needed))
    assert bundle.manifest.fidelity["positions"] > 2000
    assert all(verdict.passed for verdict in replay(bundle))


def _command(tiny: Tiny, out: Path) -> list[str]:
    return [sys.executable, "-m", "ferrule_runtime", "convert", str(tiny.path), "--target", "host", "-o", str(out)]


def test_a_disk_that_fills_up_is_an_error_and_leaves_nothing(tiny: Tiny, tmp_path: Path) -> None:
    # A limit on file size stands for a full disk: the write fails in the same place, with another number.
    limit = "import resource, signal, sys, os; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
    limit += "resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000)); os.execv(sys.argv[1], sys.argv[1:])"
    command = [sys.executable, "-c", limit, *_command(tiny, tmp_path / "out" / "b")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "cannot be written" in done.stderr
    assert "hint:" in done.stderr
    assert "Traceback" not in done.stderr
    assert list((tmp_path / "out").iterdir()) == []


def test_ctrl_c_in_the_middle_leaves_nothing(tiny: Tiny, tmp_path: Path) -> None:
    with subprocess.Popen(_command(tiny, tmp_path / "out" / "b"), stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        while "comparing" not in line:
            assert line, "ended before the comparison"
            line = process.stderr.readline()
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
        assert process.wait(timeout=60) == 1
    assert "error: interrupted" in rest
    assert "hint:" in rest
    assert "Traceback" not in rest
    assert list((tmp_path / "out").iterdir()) == []


def test_a_template_that_drops_the_tools_fails_the_gate(tmp_path: Path, tiny: Tiny) -> None:
    checkpoint = replace(
        open_checkpoint(tiny.path), template="<tool_call> tools {% for m in messages %}{{ m.content }}{% endfor %}"
    )
    with pytest.raises(BundleError, match="drops 3 of 3 tools"):
        convert(checkpoint, load_target("host"), load_recipe("w8"), tmp_path / "b", Options(), lambda text: None)
    assert list(tmp_path.glob(".b*")) == []


def test_a_flipped_byte_in_any_file_is_found_at_first_open(tiny: Tiny, tmp_path: Path) -> None:
    bundle = make(tiny, tmp_path / "b", options=Options(fidelity=False))
    for name in bundle.manifest.files:
        path = bundle.file(name)
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        with pytest.raises(BundleError, match="sha256"):
            open_bundle(bundle.path)
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    open_bundle(bundle.path)


def test_a_newer_schema_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    bundle = make(tiny, tmp_path / "b", options=Options(fidelity=False))
    path = bundle.path / "manifest.json"
    raw = json.loads(path.read_text())
    raw["schema_version"] = 99
    path.write_text(json.dumps(raw))
    with pytest.raises(BundleError, match="schema 99 is newer"):
        open_bundle(bundle.path)
