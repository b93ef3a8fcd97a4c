"""`local:` is this machine, with real processes. It is also the stand-in for a board in tests."""

from __future__ import annotations

import contextlib
import os
import selectors
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from pathlib import Path

from ferrule_runtime.errors import LinkError, UsageError

from . import Completed, check_timeout, failure, last_words

__all__ = ["LocalLink", "connect"]

_BLOCK = 1 << 16
_TAIL_BYTES = 1 << 14

# Seconds between asking a process group to end and ending it.
_GRACE = 1.0
_POLL = 0.01


def _text(data: bytes | bytearray) -> str:
    return data.decode("utf-8", "backslashreplace")


class _Process:
    """One command in a process group of its own, read with a deadline."""

    def __init__(self, argv: Sequence[str], timeout: float) -> None:
        self.argv = tuple(argv)
        self._timeout = check_timeout(timeout)
        self._deadline = time.monotonic() + timeout
        self._said = b""
        try:
            # A session of its own: the whole group can be ended, and Ctrl-C reaches it through us alone.
            self._child = subprocess.Popen(
                self.argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise LinkError(
                f"`{self.argv[0]}` cannot be started here: {error.strerror}", hint="is it installed and on PATH?"
            ) from None

    def blocks(self) -> Generator[tuple[bool, bytes], None, None]:
        """Yield what the command prints, as it comes: whether it is standard output, and the bytes.

        Raises:
          LinkError: Time is up before both outputs were closed and the command ended.
        """
        assert self._child.stdout is not None
        assert self._child.stderr is not None
        with selectors.DefaultSelector() as selector:
            for stream, is_out in ((self._child.stdout, True), (self._child.stderr, False)):
                selector.register(stream, selectors.EVENT_READ, is_out)
            while selector.get_map():
                for key, _ in selector.select(self._left()):
                    data = os.read(key.fd, _BLOCK)
                    if not data:
                        selector.unregister(key.fileobj)
                        continue
                    if not key.data:
                        self._said = (self._said + data)[-_TAIL_BYTES:]
                    yield key.data, data

    @property
    def said(self) -> str:
        """The end of what it printed on standard error so far."""
        return _text(self._said)

    def _left(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise LinkError(
                f"`{shlex.join(self.argv)}` took longer than {self._timeout:g} s: {last_words(self.said)}",
                hint="allow it more time, or find out what it waits for",
            )
        return left

    def wait(self) -> int:
        """Return the exit status, waiting for it until the deadline."""
        while True:
            try:
                return self._child.wait(self._left())
            except subprocess.TimeoutExpired:
                continue

    def end(self) -> None:
        """End the process group unless the command has ended and was waited for; close its outputs."""
        # While the leader is not waited for, the number of its group cannot have been given to another one.
        if self._child.returncode is None:
            try:
                self._signal(signal.SIGTERM)
                stop = time.monotonic() + _GRACE
                while time.monotonic() < stop and self._running():
                    time.sleep(_POLL)
            finally:
                self._signal(signal.SIGKILL)
                self._child.wait()
        for stream in (self._child.stdout, self._child.stderr):
            assert stream is not None
            stream.close()

    def _running(self) -> bool:
        return os.waitid(os.P_PID, self._child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):  # everything in it has ended
            os.killpg(self._child.pid, number)


class LocalLink:
    """This machine as a board."""

    url = "local:"

    @property
    def ferrule(self) -> tuple[str, ...]:
        """This interpreter, so that it works without an activated environment. `-P`: not from the working folder."""
        return (sys.executable, "-P", "-m", "ferrule_runtime")

    def run(self, argv: Sequence[str], timeout: float) -> Completed:
        """Run a command to its end; see `Link.run`."""
        process = _Process(argv, timeout)
        out, err = bytearray(), bytearray()
        try:
            for is_out, data in process.blocks():
                (out if is_out else err).extend(data)
            code = process.wait()
        finally:
            process.end()
        return Completed(process.argv, code, _text(out), _text(err))

    def lines(self, argv: Sequence[str], timeout: float) -> Generator[str, None, None]:
        """Run a command and yield its lines while it runs; see `Link.lines`."""
        process = _Process(argv, timeout)
        rest = b""
        try:
            for is_out, data in process.blocks():
                if is_out:
                    *whole, rest = (rest + data).split(b"\n")
                    yield from (_text(line.removesuffix(b"\r")) for line in whole)
            if rest:
                yield _text(rest)
            if code := process.wait():
                raise failure(process.argv, code, process.said)
        finally:
            process.end()

    def push(self, source: Path, destination: str) -> None:
        """Copy a file or folder; see `Link.push`. Written beside the destination, then renamed."""
        target = Path(destination)
        part = target.with_name(f".{target.name}.part")
        if source.is_dir() and target.exists():
            raise LinkError(f"`{target}` exists already", hint="remove it, or push to another name")
        try:
            if source.is_dir():
                shutil.copytree(source, part)
            else:
                shutil.copy2(source, part)
            part.replace(target)
        except OSError as error:
            raise LinkError(
                f"`{source}` could not be copied to `{target}`: {error.strerror or error}",
                hint="is there room, and may this user write there?",
            ) from None
        finally:
            if part.is_dir():
                shutil.rmtree(part)
            else:
                part.unlink(missing_ok=True)


def connect(url: str) -> LocalLink:
    """Open `local:`.

    Raises:
      UsageError: Something follows the colon.
    """
    if url != LocalLink.url:
        raise UsageError(f"`{url}`: nothing follows `local:`", hint="there is one local machine: write `local:`")
    return LocalLink()
