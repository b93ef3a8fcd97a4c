"""onnxruntime that is not there, is broken, or is interrupted while it loads: three different things."""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

from ferrule_runtime.engines.onnx import Head
from ferrule_runtime.errors import EngineError


class Refusing:
    """Finds onnxruntime, and fails as its import does."""

    def __init__(self, error: BaseException, cause: BaseException | None) -> None:
        self.error, self.cause = error, cause

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name == "onnxruntime":
            raise self.error from self.cause
        return None


@pytest.mark.parametrize(
    ("error", "cause", "raised", "says"),
    [
        (ModuleNotFoundError("no such module"), None, EngineError, "onnxruntime is not installed"),
        (ImportError("a library of it is missing"), None, EngineError, "cannot be loaded: a library of it is missing"),
        # Seen when Ctrl-C comes while its binary module is initialised.
        (ImportError("initialization failed"), KeyboardInterrupt(), KeyboardInterrupt, ""),
    ],
)
def test_what_keeps_it_from_loading_is_told(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    cause: BaseException | None,
    raised: type[BaseException],
    says: str,
) -> None:
    monkeypatch.delitem(sys.modules, "onnxruntime", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Refusing(error, cause), *sys.meta_path])
    with pytest.raises(raised) as caught:
        Head(tmp_path / "head.onnx", threads=1)
    assert says in str(caught.value)
