"""What every test gets: folders of its own, plain output of a fixed width, and `--update-golden`."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Properties are checked for what they find, never for how long it took on this machine.
settings.register_profile("ferrule", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ferrule")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the golden files anew instead of comparing")


@pytest.fixture(autouse=True)
def own_folders(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep tests away from the user's state and cache; a test marked `real` keeps the cache, where the models are."""
    monkeypatch.setenv("FERRULE_STATE", str(tmp_path / "ferrule-state"))
    if request.node.get_closest_marker("real") is None:
        monkeypatch.setenv("FERRULE_CACHE", str(tmp_path / "ferrule-cache"))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The small real model's file, for tests marked `real`."""
    from ferrule_convert.fetch import find  # a board has no converters, and no such tests

    path = find("smollm2-135m")
    if path is None and "CI" in os.environ:
        pytest.fail("smollm2-135m is in neither FERRULE_MODELS nor the cache: `make models` comes before the tests")
    if path is None:
        pytest.skip("smollm2-135m is in neither FERRULE_MODELS nor the cache: `make models` fetches it")
    return path


@pytest.fixture(scope="session")
def qwen25_coder() -> Path:
    """The file of a real model that the user must bring, for tests marked `real`."""
    from ferrule_convert.fetch import find

    path = find("qwen2.5-coder-0.5b")
    if path is None:
        pytest.skip("qwen2.5-coder-0.5b is not in FERRULE_MODELS, and there is no address to fetch it from")
    return path


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compare a text with `tests/golden/NAME`; `--update-golden` writes the file instead."""

    def compare(name: str, text: str) -> None:
        path = Path(__file__).parent / "golden" / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.is_file(), f"no {path}: run pytest --update-golden, and read what it wrote"
        assert text == path.read_text(encoding="utf-8"), f"{path} differs: if it should, run pytest --update-golden"

    return compare
