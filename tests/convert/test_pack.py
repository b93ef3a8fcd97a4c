"""A bundle is whole or not there."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from checkpoints import Tiny, write_tiny
from folders import write_qwen35
from tokenizers import Tokenizer

from ferrule_convert.archs import build
from ferrule_convert.check import measure_fidelity
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


# Each limit stops another write.
@pytest.mark.parametrize("limit", [0, 100, 20000, 120000])
def test_a_disk_that_fills_up_is_an_error_and_leaves_nothing(tiny: Tiny, tmp_path: Path, limit: int) -> None:
    # A limit on file size stands for a full disk: the write fails in the same place, with another number.
    code = "import resource, signal, sys, os; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
    code += f"resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit})); os.execv(sys.argv[1], sys.argv[1:])"
    command = [sys.executable, "-c", code, *_command(tiny, tmp_path / "out" / "b")]
    environment = os.environ | {"TMPDIR": str(tmp_path / "scratch")}
    (tmp_path / "scratch").mkdir()
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert done.returncode == 1
    assert "b: cannot be written" in done.stderr
    assert "hint:" in done.stderr
    assert "Traceback" not in done.stderr
    assert list((tmp_path / "out").glob("*")) == []
    # onnxruntime leaves a file of its own there.
    assert list((tmp_path / "scratch").glob("ferrule-*")) == []


def _group_is_gone(group: int) -> bool:
    """Wait until no process of a group is left, for some seconds."""
    for _ in range(100):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


@pytest.mark.parametrize("said", ["checking template", "writing", "running", "comparing"])
def test_ctrl_c_at_any_time_leaves_nothing_and_nobody(tiny: Tiny, tmp_path: Path, said: str) -> None:
    environment = os.environ | {"TMPDIR": str(tmp_path / "scratch")}
    (tmp_path / "scratch").mkdir()
    with subprocess.Popen(
        _command(tiny, tmp_path / "out" / "b"),
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    ) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        while said not in line:
            assert line, f"ended before {said}"
            line = process.stderr.readline()
        # Anywhere within what it just said that it would do.
        time.sleep(random.random() * 0.2)
        # As a terminal does: the whole group gets it.
        os.killpg(process.pid, signal.SIGINT)
        rest = process.stderr.read()
        code = process.wait(timeout=60)
    assert _group_is_gone(process.pid)
    assert "Traceback" not in rest
    # onnxruntime leaves a file of its own there.
    assert list((tmp_path / "scratch").glob("ferrule-*")) == []
    if code == 0:  # it was done already
        assert said == "comparing"
        assert open_bundle(tmp_path / "out" / "b")
        return
    assert code == 1
    assert "error: interrupted" in rest
    assert "hint:" in rest
    assert [path.name for path in (tmp_path / "out").iterdir() if path.name != "b"] == []
    assert not (tmp_path / "out" / "b").exists() or open_bundle(tmp_path / "out" / "b")


def test_of_two_conversions_into_one_folder_one_wins_and_the_other_leaves_nothing(tiny: Tiny, tmp_path: Path) -> None:
    command = [*_command(tiny, tmp_path / "out" / "b"), "--no-fidelity"]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=120)[1] for process in both]
    assert sorted(process.returncode for process in both) == [0, 2]
    loser = said[0] if both[0].returncode else said[1]
    assert "b: exists already" in loser
    assert "Traceback" not in loser
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["b"]
    assert all(verdict.passed for verdict in replay(open_bundle(tmp_path / "out" / "b", verify=True)))


@pytest.mark.parametrize("what", ["folder", "full folder", "file", "link"])
def test_a_name_that_is_taken_meanwhile_is_left_as_it_is(tiny: Tiny, tmp_path: Path, what: str) -> None:
    out = tmp_path / "out" / "b"

    def progress(text: str) -> None:
        if "running" in text:
            out.mkdir() if "folder" in what else out.write_text("x") if what == "file" else out.symlink_to("nowhere")
            if what == "full folder":
                (out / "mine").write_text("keep")

    chosen = (load_target("host"), load_recipe("w8"), out, Options(fidelity=False), progress)
    with pytest.raises(UsageError, match="exists already"):
        convert(open_checkpoint(tiny.path), *chosen)
    assert list(out.parent.iterdir()) == [out]
    assert (
        out.is_symlink() or out.is_file() or [path.name for path in out.iterdir()] == ["mine"][: what == "full folder"]
    )


@pytest.mark.parametrize("name", ["/", ".", "..", "x/.."])
def test_what_names_no_folder_is_refused_before_anything_is_done(tiny: Tiny, name: str) -> None:
    with pytest.raises(UsageError, match="names no new folder"):
        make(tiny, Path(name))


@pytest.mark.parametrize("name", ["m" * 300, "file/b"])
def test_a_name_that_cannot_be_is_an_error(tiny: Tiny, tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(BundleError, match="cannot be written"):
        make(tiny, tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_bundle_is_not_compared_by_a_tokenizer_with_more_ids_than_the_model(tiny: Tiny, tmp_path: Path) -> None:
    bundle = make(tiny, tmp_path / "b", options=Options(fidelity=False))
    checkpoint = open_checkpoint(tiny.path)
    tokenizer = Tokenizer.from_str(checkpoint.tokenizer_json)
    tokenizer.add_tokens(["agent"])
    more = replace(checkpoint, tokenizer_json=tokenizer.to_str())
    with pytest.raises(CheckpointError, match="gives `agent` the id 268, its configuration has 268 ids"):
        measure_fidelity(bundle, more, build(checkpoint), lambda text: None)


def test_a_bundle_is_not_compared_with_a_model_of_another_vocabulary(tiny: Tiny, tmp_path: Path) -> None:
    bundle = make(tiny, tmp_path / "b", options=Options(fidelity=False))
    write_qwen35(tmp_path / "m")
    other = open_checkpoint(tmp_path / "m")
    with pytest.raises(CheckpointError, match="a vocabulary of 272, the bundle's is of 268"):
        measure_fidelity(bundle, other, build(other), lambda text: None)


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
