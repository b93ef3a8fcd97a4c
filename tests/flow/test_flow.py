"""The whole story with a tiny random model, from checkpoint to report; and everything that is refused."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from checkpoints import write_tiny
from quantised import write_quantised

Ferrule = Callable[..., SimpleNamespace]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("flow")


@pytest.fixture(scope="module")
def ferrule(folder: Path) -> Ferrule:
    """Run the command as a user does, in a process of its own."""
    environment = os.environ | {"FERRULE_STATE": str(folder / "state"), "FERRULE_CACHE": str(folder / "cache")}

    def run(*arguments: str | Path, **more: str) -> SimpleNamespace:
        command = [sys.executable, "-m", "ferrule_runtime", *map(str, arguments)]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=300, check=False, cwd=folder, env=environment | more
        )
        assert "Traceback" not in done.stderr, done.stderr
        return SimpleNamespace(code=done.returncode, out=done.stdout, err=done.stderr)

    return run


@pytest.fixture(scope="module")
def checkpoint(folder: Path) -> Path:
    return write_tiny(folder / "tiny.gguf").path


@pytest.fixture(scope="module")
def bundles(ferrule: Ferrule, checkpoint: Path, folder: Path) -> dict[str, Path]:
    made = {}
    for recipe in ("fp32", "w8", "w4g32_head4"):
        done = ferrule("convert", checkpoint, "--target", "host", "--recipe", recipe, "-o", folder / recipe)
        assert done.code == 0, done.err
        made[recipe] = folder / recipe
    return made


@pytest.fixture(scope="module")
def runs(ferrule: Ferrule, bundles: dict[str, Path], folder: Path) -> Path:
    short = ("--prompt", "32", "--decode", "8", "--repeat", "2", "--launches", "2")
    done = ferrule("profile", *bundles.values(), *short, "-o", folder / "runs.jsonl")
    assert done.code == 0, done.err
    return folder / "runs.jsonl"


def test_a_checkpoint_is_described_before_anything_is_converted(ferrule: Ferrule, checkpoint: Path) -> None:
    done = ferrule("inspect", checkpoint, "--json")
    found = json.loads(done.out)
    assert found["schema_version"] == 1
    assert found["checkpoint"]["layers"] == 2
    assert found["recipes"]["w4g32"]["bytes"] < found["recipes"]["w8"]["bytes"] < found["recipes"]["fp32"]["bytes"]
    assert "128 does not divide" in found["refused"]["w4g128"]


def test_what_inspect_foresaw_is_what_the_bundle_weighs(
    ferrule: Ferrule, checkpoint: Path, bundles: dict[str, Path]
) -> None:
    foreseen = json.loads(ferrule("inspect", checkpoint, "--json").out)["recipes"]["w8"]
    bundle = json.loads(ferrule("inspect", bundles["w8"], "--json").out)
    weights = sum(
        bundle["bundle"]["files"][name]["size"] for name in ("weights.bin", "embedding.bin", "tokenizer.json")
    )
    tensors = 2 * (2 * 7 + 1)  # integers and scales of seven matrices a layer, and of the table
    assert 0.9 * foreseen["bytes"] < weights < foreseen["bytes"] + tensors * 4096  # each starts a page
    assert bundle["memory"]["total"] == pytest.approx(foreseen["memory"]["total"], rel=0.01)


def test_a_bundle_passes_its_own_checks(ferrule: Ferrule, bundles: dict[str, Path], checkpoint: Path) -> None:
    assert ferrule("selftest", bundles["w8"]).code == 0
    done = ferrule("check", bundles["w8"], "--against", checkpoint, "--json")
    found = json.loads(done.out)
    assert done.code == 0
    assert all(case["passed"] for case in found["golden"])
    stored = json.loads((bundles["w8"] / "manifest.json").read_text())["fidelity"]
    assert found["fidelity"]["kl"] == pytest.approx(stored["kl"], rel=0.05)


def test_a_gptq_release_keeps_its_integers_from_inspection_to_bundle(ferrule: Ferrule, folder: Path) -> None:
    write_quantised(folder / "gptq", act_order=True, group=64)
    seen = ferrule("inspect", folder / "gptq")
    assert seen.code == 0, seen.err
    assert "14 of 15 matrices keep their integers" in seen.out
    assert "14 requantised from GPTQ int4: 4 bits where the recipe has 8" in seen.out
    done = ferrule("convert", folder / "gptq", "--target", "host", "--recipe", "w4g32", "-o", folder / "kept")
    assert done.code == 0, done.err
    assert "14 of 15 matrices keep their integers" in done.err
    assert ferrule("selftest", folder / "kept").code == 0
    assert "14 matrices with the checkpoint's own integers" in ferrule("inspect", folder / "kept").out
    foreseen = json.loads(ferrule("inspect", folder / "gptq", "--json").out)["recipes"]["w4g32"]["memory"]["total"]
    bundle = json.loads(ferrule("inspect", folder / "kept", "--json").out)["memory"]["total"]
    assert bundle == pytest.approx(foreseen, rel=0.01)


def test_fit_and_run_refuse_with_every_part_before_loading(ferrule: Ferrule, bundles: dict[str, Path]) -> None:
    for command in (("fit", bundles["w8"]), ("run", bundles["w8"], "hello")):
        done = ferrule(*command, "--memory", "20MiB")
        assert done.code == 1
        for part in ("interpreter and libraries", "weights", "keys and values", "workspace", "tokenizer", "total"):
            assert part in done.err
        assert "hint:" in done.err


def test_what_the_refusal_proposes_fits(ferrule: Ferrule, bundles: dict[str, Path]) -> None:
    done = ferrule("fit", bundles["fp32"], "--memory", "20MiB")
    proposed = done.err.split("--memory ")[1].split()[0]
    assert ferrule("fit", bundles["fp32"], "--memory", proposed).code == 0


def test_a_scripted_run_recovers_and_says_it_is_simulated(ferrule: Ferrule, folder: Path) -> None:
    from ferrule_benchmarks.world import policy

    request = "send a message to Ana saying I am on my way"
    model = f"scripted:{policy('recovers')}"
    tools = ("--tools", "ferrule_benchmarks.world", "--trace", folder / "trace.jsonl")
    done = ferrule("run", request, "--model", model, *tools)
    assert done.code == 0, done.err
    assert "simulated" in done.out
    assert "the message was sent to Ana" in done.out
    steps = [json.loads(line) for line in (folder / "trace.jsonl").read_text().splitlines()]
    failed = [step["call"] for step in steps if step.get("failure")]
    assert len(failed) == 2


def test_a_stubborn_model_is_stopped(ferrule: Ferrule) -> None:
    from ferrule_benchmarks.world import policy

    tools = ("--tools", "ferrule_benchmarks.world")
    done = ferrule("run", "send a message to Ana", "--model", f"scripted:{policy('stubborn')}", *tools, "--json")
    found = json.loads(done.out)
    assert done.code == 1
    assert found["ending"] == "gave_up"
    assert sum(step["kind"] == "act" for step in found["steps"]) == 1


def test_random_weights_still_make_a_call_that_fits_the_schema(
    ferrule: Ferrule, bundles: dict[str, Path], folder: Path
) -> None:
    (folder / "lamp.py").write_text(
        "from typing import Literal\nfrom ferrule_runtime.tools import tool\n\n\n@tool()\n"
        "def set_lamp(room: Literal['hall', 'kitchen'], on: bool) -> str:\n"
        '    """Switch a lamp."""\n    return f"{room} {on}"\n'
    )
    arguments = ("--tools", "lamp", "--call", "--steps", "1", "--context", "1024", "--json")
    done = ferrule("run", bundles["w8"], "light in the hall, please", *arguments, PYTHONPATH=str(folder))
    found = json.loads(done.out)
    call = found["steps"][0]["call"]
    assert call["name"] == "set_lamp"
    assert call["arguments"]["room"] in ("hall", "kitchen")
    assert isinstance(call["arguments"]["on"], bool)
    assert found["steps"][0]["result"] == f"{call['arguments']['room']} {call['arguments']['on']}"


def test_records_carry_their_conditions_and_null_power_has_a_reason(runs: Path) -> None:
    records = [json.loads(line) for line in runs.read_text().splitlines()]
    assert len(records) == 3
    for record in records:
        assert record["figures"]["decode@32"]["low"] <= record["figures"]["decode@32"]["median"]
        assert record["figures"]["request_to_call"]["median"] > 0
        assert record["figures"]["peak_rss"]["median"] > record["figures"]["unevictable"]["median"]
        power = [value for key, value in record["figures"].items() if "energy" in key]
        assert all(value["median"] is not None or value["reason"] for value in power)
        assert record["machine"]["cores"] >= 1


def test_a_pick_names_its_reasons_and_the_report_is_one_page(ferrule: Ferrule, runs: Path, folder: Path) -> None:
    done = ferrule("pick", runs, "--target", "host", "--max-kl", "1e-3", "--json")
    found = json.loads(done.out)
    assert done.code == 0, done.err
    assert found["schema_version"] == 1
    text = ferrule("pick", runs, "--target", "host", "--max-kl", "1e-3").out
    assert "fp32" in text.splitlines()[0]
    assert "w4g32_head4" in text
    assert ferrule("report", runs, "-o", folder / "report.html").code == 0
    page = (folder / "report.html").read_text()
    assert page.count("<html") == 1
    assert 'src="http' not in page
    assert "w4g32_head4" in page


def test_limits_that_nothing_meets_say_what_is_nearest(ferrule: Ferrule, runs: Path) -> None:
    done = ferrule("pick", runs, "--target", "host", "--max-memory", "10MiB")
    assert done.code == 1
    assert "peak RSS" in done.err
    assert "hint:" in done.err


@pytest.mark.parametrize(
    ("command", "code", "says"),
    [
        (("convert", "nothing.gguf", "--target", "host", "-o", "x"), 1, "no such checkpoint"),
        (("convert", "tiny.gguf", "--target", "rpi6", "-o", "x"), 1, "did you mean `rpi"),
        (("convert", "tiny.gguf", "--target", "host", "--recipe", "w4g23", "-o", "x"), 1, "group 23"),
        (("convert", "tiny.gguf", "--target", "host", "--recipe", "wg32", "-o", "x"), 1, "did you mean `w4g32`"),
        (("convert", "tiny.gguf", "--target", "host", "--dialect", "klingon", "-o", "x"), 1, "unknown dialect"),
        (("convert", "tiny.gguf", "-o", "x"), 2, "--target"),
        (("fetch", "smollm2-1350m"), 1, "did you mean `smollm2-135m`"),
        (("fit", "w8", "--memory", "12"), 2, "`12` has no unit"),
        (("fit", "w8", "--memory=-1GiB"), 2, "-1GiB"),
        (("run", "w8", "  "), 2, "the request is empty"),
        (("run", "hello"), 2, "no bundle to run"),
        (("run", "hello", "--model", "openai:x"), 2, "unknown model"),
        (("run", "w8", "hello", "--tools", "no_such_module"), 2, "no_such_module"),
        (("run", "w8", "hello", "--context", "999999"), 1, "reach"),
        (("inspect", "nothing"), 1, "no such checkpoint"),
        (("selftest", "nothing"), 1, "no such bundle"),
        (("recipes", "w9"), 1, "9 bits"),
        (("targets", "rpi55"), 1, "did you mean `rpi5`"),
        (("frobnicate",), 2, "unknown command"),
        (("pick", "nothing.jsonl", "--target", "host"), 1, "nothing.jsonl"),
    ],
)
def test_bad_input_is_one_error_with_a_hint(
    ferrule: Ferrule, bundles: dict[str, Path], folder: Path, command: tuple[str, ...], code: int, says: str
) -> None:
    assert bundles
    done = ferrule(*command)
    assert done.code == code, done.err
    assert done.err.count("error:") == 1
    assert says in done.err
    assert "hint:" in done.err
    assert not (folder / "x").exists()


def test_a_damaged_and_a_newer_bundle_are_refused(ferrule: Ferrule, bundles: dict[str, Path], folder: Path) -> None:
    import shutil

    shutil.copytree(bundles["w8"], folder / "damaged")
    weights = folder / "damaged" / "weights.bin"
    data = bytearray(weights.read_bytes())
    data[5000] ^= 4
    weights.write_bytes(data)
    done = ferrule("run", "damaged", "hello")
    assert done.code == 1
    assert "weights.bin: sha256" in done.err
    manifest = folder / "damaged" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"schema_version": 1', '"schema_version": 7', 1))
    done = ferrule("inspect", "damaged")
    assert done.code == 1
    assert "schema 7 is newer" in done.err
    assert "update" in done.err


def test_no_network_and_a_cache_in_the_way_are_errors(ferrule: Ferrule, folder: Path) -> None:
    offline = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": "/dev/null", "PIP_FIND_LINKS": "", "HF_HUB_OFFLINE": "1"}
    done = ferrule("fetch", "smollm2-135m", "--to", folder / "models", **offline, FERRULE_MODELS="")
    assert done.code == 1
    assert "is not to be had" in done.err
    assert "FERRULE_MODELS" in done.err
    assert not (folder / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf").exists()
    (folder / "file").write_text("in the way")
    done = ferrule("fetch", "smollm2-135m", **offline, FERRULE_MODELS="", FERRULE_CACHE=str(folder / "file"))
    assert done.code == 1
    assert "cannot be written" in done.err


def test_every_report_has_json_with_a_schema(ferrule: Ferrule, bundles: dict[str, Path], runs: Path) -> None:
    for command in (
        ("targets",), ("targets", "rpi5"), ("recipes",), ("recipes", "w4g32"), ("doctor",), ("fetch",),
        ("inspect", bundles["w8"]), ("fit", bundles["w8"]), ("selftest", bundles["w8"]),
        ("pick", runs, "--target", "host"),
    ):  # fmt: skip
        done = ferrule(*command, "--json")
        assert done.code == 0, (command, done.err)
        assert json.loads(done.out)["schema_version"] == 1
