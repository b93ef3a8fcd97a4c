"""The hub's own library against a small hub on this machine, in the command's process."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import Tiny
from folders import write_llama, write_safetensors
from quantised import write_quantised

from ferrule_convert.hub import is_hub_id

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """Serves one folder as `org/tiny`: its list of files, and the files, whole or in part."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # File and bytes sent, of every answer with a body.
        self.sent: list[tuple[str, int]] = []
        # A server that sends whole files, whatever range it is asked for, and how much of them it got rid of.
        self.whole, self.taken = False, 0
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args: Any) -> None:
                pass

            def do_HEAD(self) -> None:
                self.do_GET()

            def do_GET(self) -> None:
                path = self.path.split("?")[0]
                kind = {"Content-Type": "application/json"}
                if path == f"/api/models/org/tiny/tree/{COMMIT}":
                    found = [
                        {"type": "file", "path": one.name, "size": one.stat().st_size, "oid": one.name}
                        for one in sorted(folder.iterdir())
                    ]
                    return self.answer(200, json.dumps(found).encode(), kind)
                if path.startswith("/api/models/org/tiny/revision"):
                    files = [{"rfilename": one.name} for one in sorted(folder.iterdir())]
                    about = {"id": "org/tiny", "sha": COMMIT, "siblings": files, "private": False}
                    return self.answer(200, json.dumps(about).encode(), kind)
                name = path.rsplit("/", 1)[1]
                if not path.startswith(f"/org/tiny/resolve/{COMMIT}/") or not (folder / name).is_file():
                    return self.answer(404, b"", {"X-Error-Code": "RepoNotFound"})
                data, code = (folder / name).read_bytes(), 200
                extra = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT}
                if (wanted := self.headers.get("Range")) and not hub.whole:
                    first, last = (int(part) for part in wanted.removeprefix("bytes=").split("-"))
                    extra["Content-Range"] = f"bytes {first}-{min(last, len(data) - 1)}/{len(data)}"
                    data, code = data[first : last + 1], 206
                return self.answer(code, data, extra, name)

            def answer(self, code: int, data: bytes, headers: dict[str, str], name: str = "") -> None:
                self.send_response(code)
                for key, value in (headers | {"Content-Length": str(len(data))}).items():
                    self.send_header(key, value)
                self.end_headers()
                if self.command == "GET":
                    if name:
                        hub.sent.append((name, len(data)))
                    for at in range(0, len(data), 1 << 16):
                        try:
                            self.wfile.write(data[at : at + (1 << 16)])
                        except OSError:  # the other side has hung up
                            self.close_connection = True
                            return
                        hub.taken += len(data[at : at + (1 << 16)])

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"


@pytest.fixture
def hub(tiny: Tiny, tmp_path: Path) -> Iterator[Hub]:
    write_llama(tmp_path / "m", tiny, shards=2)
    (tmp_path / "m" / "README.md").write_text("---\nlicense: mit\n---\n")
    (tmp_path / "m" / "pytorch_model.bin").write_bytes(bytes(1000))
    hub = Hub(tmp_path / "m")
    thread = threading.Thread(target=hub.server.serve_forever)
    thread.start()
    yield hub
    hub.server.shutdown()
    thread.join()
    hub.server.server_close()


def ferrule(hub: Hub, tmp_path: Path, *words: str, offline: bool = False) -> subprocess.CompletedProcess[str]:
    mine = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    mine |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": str(int(offline))}
    mine |= {"HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    command = [sys.executable, "-m", "ferrule_runtime", *words]
    return subprocess.run(command, cwd=tmp_path, env=mine, capture_output=True, text=True, timeout=120, check=False)


def test_inspect_asks_for_headers_alone(hub: Hub, tiny: Tiny, tmp_path: Path) -> None:
    done = ferrule(hub, tmp_path, "inspect", "org/tiny", "--target", "host", "--json")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)["checkpoint"]
    assert (facts["name"], facts["file"], facts["licence"]) == ("org/tiny", COMMIT, "mit")
    assert facts["parameters"] == sum(values.size for values in tiny.tensors.values())
    asked = {name: size for name, size in hub.sent if name.endswith(".safetensors")}
    # The files are of some 200 kB each; the first request takes 100 kB, whatever the header.
    assert set(asked) == {"model-00000.safetensors", "model-00001.safetensors"}
    for name, size in asked.items():
        assert size == 100_000 < (hub.folder / name).stat().st_size
    assert not [path for path in (tmp_path / "home").rglob("*") if path.name.endswith(".safetensors")]
    assert "pytorch_model.bin" not in dict(hub.sent)


def test_a_header_longer_than_the_first_request_is_asked_for_again(hub: Hub, tmp_path: Path) -> None:
    path = hub.folder / "model-00000.safetensors"
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    path.write_bytes(
        (length + 150_000).to_bytes(8, "little") + raw[8 : 8 + length] + b" " * 150_000 + raw[8 + length :]
    )
    done = ferrule(hub, tmp_path, "inspect", "org/tiny", "--target", "host")
    assert done.returncode == 0, done.stderr
    assert [size for name, size in hub.sent if name == path.name] == [100_000, length + 150_008]


def test_no_more_than_the_header_is_taken_from_a_server_that_sends_everything(
    hub: Hub, tiny: Tiny, tmp_path: Path
) -> None:
    large = {"visual.table": np.zeros((4096, 4096), dtype=np.float32)}
    for path in hub.folder.glob("*.safetensors*"):
        path.unlink()
    write_safetensors(hub.folder / "model.safetensors", tiny.tensors | large)
    hub.whole = True
    done = ferrule(hub, tmp_path, "inspect", "org/tiny", "--target", "host")
    assert done.returncode == 0, done.stderr
    # What lies in the sockets' buffers counts as sent.
    assert hub.taken < 16 << 20 < large["visual.table"].nbytes


def test_headers_of_a_quantised_release_say_what_its_recipes_keep(hub: Hub, tmp_path: Path) -> None:
    for path in hub.folder.iterdir():
        path.unlink()
    write_quantised(hub.folder, act_order=True, layers=4)
    done = ferrule(hub, tmp_path, "inspect", "org/tiny", "--target", "host", "--json")
    assert done.returncode == 0, done.stderr
    assert [name for name, _ in hub.sent if name.endswith(".safetensors")] == ["model.safetensors"]
    found = json.loads(done.stdout)
    assert found["recipes"]["w4g32"]["matrices"]["kept"] == 28
    assert "it is not counted" in found["checkpoint"]["notes"][-1]


def test_convert_brings_what_it_reads_and_then_needs_no_hub(hub: Hub, tmp_path: Path) -> None:
    words = ["org/tiny", "--target", "host", "--no-fidelity", "-o"]
    done = ferrule(hub, tmp_path, "convert", *words, "one")
    assert done.returncode == 0, done.stderr
    manifest = json.loads((tmp_path / "one" / "manifest.json").read_text())
    assert manifest["checkpoint"]["name"] == "org/tiny"
    assert manifest["made"]["notes"][0] == f"from the hub at {COMMIT}"
    assert "pytorch_model.bin" not in dict(hub.sent)
    count = len(hub.sent)
    done = ferrule(hub, tmp_path, "convert", *words, "two", offline=True)
    assert done.returncode == 0, done.stderr
    assert len(hub.sent) == count
    assert json.loads((tmp_path / "two" / "manifest.json").read_text())["files"] == manifest["files"]


def test_what_is_not_to_be_had_is_said(hub: Hub, tmp_path: Path) -> None:
    for words in (["org/tiny"], ["org/nothing"]):
        done = ferrule(hub, tmp_path, "inspect", *words, "--target", "host", offline=words == ["org/tiny"])
        assert done.returncode == 1
        assert f"`{words[0]}` is no path here, and not to be had from the hub" in done.stderr
        assert "hint:" in done.stderr
        assert "Traceback" not in done.stderr


def test_an_index_that_names_files_elsewhere_is_refused(hub: Hub, tmp_path: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "../../model.safetensors"}}
    (hub.folder / "model.safetensors.index.json").write_text(json.dumps(index))
    done = ferrule(hub, tmp_path, "inspect", "org/tiny", "--target", "host")
    assert done.returncode == 1
    assert "no `weight_map` of plain file names" in done.stderr


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Qwen/Qwen3.5-0.8B", True), ("org/tiny@main", True), ("org/tiny@refs/pr/1", True),
        ("smollm2-135m", False), ("models/m.gguf", False), ("/a/b", False), ("../a", False), ("a/b/c", False),
        ("./a", False), ("a/", False),
    ],
)  # fmt: skip
def test_a_hub_id_is_told_from_a_path(name: str, expected: bool) -> None:
    assert is_hub_id(name) == expected
