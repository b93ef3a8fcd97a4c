"""What a checkpoint would need, before anything is converted."""

from pathlib import Path

import pytest
from checkpoints import Sizes, write_tiny
from folders import QWEN35, write_qwen35

from ferrule_convert.estimate import describe
from ferrule_runtime import __main__ as command


def test_of_a_hybrid_model_few_layers_grow_with_the_context(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_qwen35(tmp_path / "m")
    found = describe(str(tmp_path / "m"), "rpi5")
    assert (found.facts["attention_layers"], found.facts["recurrent_layers"]) == (1, 3)
    facts = found.memory["w8"]
    # Keys and values of one layer; of three, the last three inputs of the filter and a state a head, in two copies.
    assert facts.kv_per_token == 2 * QWEN35["num_key_value_heads"] * QWEN35["head_dim"] * 4
    assert facts.state == 2 * 4 * 3 * (3 * (2 * 4 * 16 + 4 * 16) + 4 * 16 * 16)
    assert command.main(["inspect", str(tmp_path / "m"), "--target", "rpi5"]) == 0
    said = capsys.readouterr().out
    assert "remembers   1 of 4 layers keep keys and values, 1.0 KiB a token; 3 a constant state, 37.5 KiB" in said


def test_a_context_beyond_the_model_is_refused_not_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny = write_tiny(tmp_path / "m.gguf", Sizes(context=512))
    assert command.main(["inspect", str(tiny.path), "--context", "513"]) == 1
    assert "a context of 513 tokens, it reaches 512" in capsys.readouterr().err
    assert command.main(["inspect", str(tiny.path), "--context", "512"]) == 0
    assert "at context 512" in capsys.readouterr().out
