"""A bundle behind messages: prompt, constraint and reading together, with a small engine that really computes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from talking import tool
from tiny import Recurrent, tiny_bundle

from ferrule_runtime.budget import plan_within
from ferrule_runtime.bundle import Bundle
from ferrule_runtime.engines import Engine
from ferrule_runtime.errors import ContextError, ModelError
from ferrule_runtime.messages import Message
from ferrule_runtime.models import local
from ferrule_runtime.models.local import LocalModel
from ferrule_runtime.tokenizer import Tokenizer
from ferrule_runtime.tools import check_arguments

LIGHT = tool("set_light", {"on": {"type": "boolean"}, "room": {"enum": ["hall", "attic"]}})
NOTE = tool("write_note", {"text": {"type": "string"}})
SAID = [Message("system", "Be brief."), Message("user", "Light, please.")]


class Writer(Recurrent):
    """Writes a text, token by token, whatever was said before; then it stops."""

    def __init__(self, bundle: Bundle, context: int, text: str) -> None:
        super().__init__(bundle, context)
        self._tokens = [*Tokenizer(bundle.file("tokenizer.json")).encode(text), min(bundle.manifest.stop_tokens)]
        self._said = 0

    def reset(self) -> None:
        super().reset()
        self._said = 0

    def logits(self, hidden: NDArray[np.float32]) -> NDArray[np.float32]:
        found = super().logits(hidden)
        found[:, self._tokens[min(self._said, len(self._tokens) - 1)]] = 1e4
        self._said += 1
        return found


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return tiny_bundle(tmp_path / "b")


def loaded(bundle: Bundle, monkeypatch: pytest.MonkeyPatch, *, text: str | None = None, **limits: Any) -> LocalModel:
    """The model with an engine of these tests in the place of onnxruntime, which needs a graph."""

    def load(bundle: Bundle, *, threads: int, context: int, chunk: int) -> Engine:
        return Recurrent(bundle, context) if text is None else Writer(bundle, context, text)

    monkeypatch.setattr(local, "load_engine", load)
    facts, reach = bundle.manifest.memory, bundle.manifest.context
    return LocalModel(bundle, plan_within(facts, None, interpreter=1, most_context=reach, **limits))


def test_a_call_that_is_wanted_is_a_call_that_fits(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    model = loaded(bundle, monkeypatch)
    reply = model.reply(SAID, [LIGHT], "call")
    (call,) = reply.calls
    assert reply.text == ""
    assert check_arguments(LIGHT, call.arguments).keys() == {"on", "room"}
    assert reply.usage.new_tokens == len(reply.raw)
    assert not reply.usage.simulated
    assert 0 < reply.usage.first_token_s <= reply.usage.seconds
    assert model.reply(SAID, [LIGHT], "call").calls == reply.calls
    assert model.label == "tiny (onnx)"


def test_a_call_that_does_not_end_is_an_error(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    start = '<tool_call>\n{"name": "write_note", "arguments": {"text": "'
    model = loaded(bundle, monkeypatch, text=start + "on and " * 60)
    with pytest.raises(ModelError, match="the call was cut off at 256 tokens"):
        model.reply(SAID, [NOTE], "call")
    with pytest.raises(ModelError):
        model.reply(SAID, [NOTE], "either")


CALL = '<tool_call>\n{"name": "set_light", "arguments": {"on": true, "room": "hall"}}\n</tool_call>'


@pytest.mark.parametrize("want", ["call", "either"])
def test_what_the_model_writes_is_read(bundle: Bundle, monkeypatch: pytest.MonkeyPatch, want: Any) -> None:
    reply = loaded(bundle, monkeypatch, text=CALL).reply(SAID, [LIGHT], want)
    assert [(call.name, dict(call.arguments)) for call in reply.calls] == [("set_light", {"on": True, "room": "hall"})]
    assert reply.raw == CALL
    assert reply.usage.new_tokens == len(CALL)


def test_where_text_is_wanted_a_call_is_text(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    reply = loaded(bundle, monkeypatch, text=CALL).reply(SAID, [LIGHT], "text")
    assert reply.calls == ()
    assert reply.text == CALL


def test_plain_text_is_plain_text(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    reply = loaded(bundle, monkeypatch, text="It is on.").reply(SAID, [LIGHT], "either")
    assert (reply.text, reply.calls) == ("It is on.", ())


def test_a_prompt_that_does_not_fit_says_what_would(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    model = loaded(bundle, monkeypatch, context=128)
    with pytest.raises(ContextError, match=r"the prompt has (\d+) tokens \(1 tools\), the context holds 128") as caught:
        model.reply(SAID, [LIGHT], "call")
    enough = int(caught.value.hint.split()[1].rstrip(","))
    assert loaded(bundle, monkeypatch, context=enough).reply(SAID, [LIGHT], "call").calls
