"""Small files of the kernel: /proc, /sys and control groups.

They are read under a root, so that a tree of another machine can be read too.
A value that is not there raises `Absent` with the reason, which callers record beside a null.
"""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["Absent", "boot_id", "cpu_list", "cpu_quota", "field", "kib", "maybe", "memory_limit", "number", "read_text"]

# cgroup v1 writes "no limit" as the largest multiple of the page size; anything near it is none.
_V1_UNLIMITED = 1 << 62


class Absent(Exception):  # noqa: N818 - carries a reason, is not a failure
    """A fact is not to be had here; the text says why."""


def read_text(path: Path) -> str:
    """Return a small file's text without surrounding blanks and NULs.

    Raises:
      Absent: The file is not there or cannot be read.
    """
    try:
        return path.read_bytes().decode("utf-8", "replace").strip(" \t\n\0")
    except FileNotFoundError:
        raise Absent(f"no {_shown(path)}") from None
    except OSError as error:
        raise Absent(f"{_shown(path)}: {error.strerror or error}") from None


def _shown(path: Path) -> str:
    """Name a path as it is called on the machine, without the root it was read under."""
    text = str(path)
    starts = [text.find(part) for part in ("/proc/", "/sys/", "/etc/", "/usr/") if part in text]
    return text[min(starts) :] if starts else text


def number(path: Path) -> float:
    """Return a file's only number.

    Raises:
      Absent: No such file, or not a number.
    """
    text = read_text(path)
    try:
        return float(text)
    except ValueError:
        raise Absent(f"{_shown(path)}: `{text[:40]}` is not a number") from None


def maybe(path: Path, scale: float = 1.0) -> float | None:
    """Return a file's only number times `scale`, or None where there is none."""
    try:
        return number(path) * scale
    except Absent:
        return None


def field(path: Path, name: str) -> str:
    """Return the value of a `name : value` line.

    Raises:
      Absent: No such file or no such line.
    """
    for line in read_text(path).splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    raise Absent(f"no `{name}` in {_shown(path)}")


def kib(path: Path, name: str) -> int:
    """Return the bytes of a `name : 123 kB` line; the kernel's kB are 1024 bytes.

    Raises:
      Absent: No such file or line, or another unit.
    """
    value = field(path, name)
    if not re.fullmatch(r"\d+ kB", value):
        raise Absent(f"{_shown(path)}: `{name}` is `{value}`, not kB")
    return int(value.split()[0]) * 1024


def cpu_list(text: str) -> set[int]:
    """Read the kernel's list format: `0-3,6`.

    Raises:
      Absent: The text is not such a list.
    """
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise Absent(f"`{text[:40]}` is not a list of cores")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def boot_id(root: Path = Path("/")) -> str | None:
    """Return the kernel's name for this boot, or None: times on its monotonic clock compare only within one boot."""
    try:
        return read_text(root / "proc/sys/kernel/random/boot_id")
    except Absent:
        return None


def _groups(root: Path) -> dict[str, list[Path]]:
    """Return, per controller (`""` is version 2), this process's control group and its parents, innermost first."""
    found: dict[str, list[Path]] = {}
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, inside = rest.partition(":")
        for controller in controllers.split(","):
            mounts = ["unified", ""] if controller == "" else [controller]
            for mount in mounts:
                top = root / "sys/fs/cgroup" / mount
                # In a container the path may be the host's; then only the top is visible, and it is ours.
                inner = top / inside.lstrip("/")
                steps = [inner, *inner.parents]
                found.setdefault(controller, []).extend(steps[: steps.index(top) + 1])
    return found


def memory_limit(root: Path) -> int:
    """Return the tightest memory limit, in bytes, of the control groups that this process is in.

    Raises:
      Absent: No control group sets one.
    """
    groups = _groups(root)
    limits = [maybe(group / "memory.max") for group in groups.get("", [])]
    limits += [maybe(group / "memory.limit_in_bytes") for group in groups.get("memory", [])]
    known = [limit for limit in limits if limit is not None and limit < _V1_UNLIMITED]
    if not known:
        raise Absent("no control group sets a limit")
    return int(min(known))


def cpu_quota(root: Path) -> float:
    """Return the tightest limit of processor time, in cores, of the control groups that this process is in.

    Raises:
      Absent: No control group sets one.
    """
    groups = _groups(root)
    quotas = []
    for group in groups.get("", []):
        try:
            quota, _, period = read_text(group / "cpu.max").partition(" ")
        except Absent:
            continue
        if quota.isdigit() and period.isdigit():
            quotas.append(int(quota) / int(period))
    for group in groups.get("cpu", []):
        amount, span = maybe(group / "cpu.cfs_quota_us"), maybe(group / "cpu.cfs_period_us")
        if amount is not None and span and amount > 0:
            quotas.append(amount / span)
    if not quotas:
        raise Absent("no control group sets a quota")
    return min(quotas)
