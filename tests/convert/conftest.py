from pathlib import Path

import pytest
from checkpoints import Tiny, write_tiny


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """A random Llama in float32."""
    return write_tiny(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.fixture
def tiny_path(tiny: Tiny) -> Path:
    return tiny.path
