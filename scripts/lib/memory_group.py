"""A control group of its own for some processes, with a limit on their memory or without, for the
length of a `with`.

Page cache counts in it, and swap is not used. Needs root and the memory controller of version 1 or
2, which is mounted or switched on where it is not yet and can be: `memory_group` raises
GroupUnavailableError with the reason elsewhere.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

__all__ = ["CGROUPS", "Group", "GroupUnavailableError", "memory_group", "memory_limited_group"]

CGROUPS = Path("/sys/fs/cgroup")
_EMPTY_WITHIN_S = 10.0


class GroupUnavailableError(Exception):
    """No group can be made here; the text says why."""


@dataclass(frozen=True)
class _Files:
    """What a version of control groups calls its files."""

    limit: str
    unlimited: str
    peak: str
    events: str
    no_swap: Mapping[str, str]


_V1 = _Files(
    limit="memory.limit_in_bytes",
    unlimited="-1",
    peak="memory.max_usage_in_bytes",
    events="memory.oom_control",
    no_swap=MappingProxyType({"memory.swappiness": "0"}),
)
_V2 = _Files(
    limit="memory.max",
    unlimited="max",
    peak="memory.peak",
    events="memory.events",
    no_swap=MappingProxyType({"memory.swap.max": "0"}),
)


@dataclass(frozen=True)
class Group:
    """A control group by its directory."""

    directory: Path
    _files: _Files

    @property
    def launcher(self) -> list[str]:
        """Return the start of a command line whose rest runs in the group."""
        return ["sh", "-c", f'echo $$ > "{self.directory}/cgroup.procs" && exec "$@"', "in-group"]

    @property
    def peak_bytes(self) -> int | None:
        """The most memory that its processes had at a time, page cache included; None where the
        kernel is too old.
        """
        with suppress(FileNotFoundError):
            return int((self.directory / self._files.peak).read_text())
        return None

    @property
    def kills(self) -> int:
        """How many of its processes the kernel has killed because of the limit."""
        lines = (self.directory / self._files.events).read_text().splitlines()
        counts = {name: int(count) for name, count in (line.split() for line in lines)}
        return counts["oom_kill"]


@contextmanager
def memory_limited_group(limit_bytes: int) -> Iterator[Group]:
    """Yield a group whose processes may use `limit_bytes` of memory; what still runs in it at the
    end is killed.
    """
    with memory_group(limit_bytes) as group:
        yield group


@contextmanager
def memory_group(limit_bytes: int | None) -> Iterator[Group]:
    """Yield a group with a limit, or with None one that only tells what its processes use."""
    with _memory_hierarchy() as (hierarchy, files):
        try:
            directory = Path(tempfile.mkdtemp(prefix="infinity-", dir=hierarchy))
        except OSError as error:
            raise GroupUnavailableError(
                f"cannot make a group in {hierarchy}: {error.strerror}"
            ) from error
        try:
            _write(
                directory / files.limit,
                files.unlimited if limit_bytes is None else str(limit_bytes),
            )
            for name, value in files.no_swap.items():
                if (directory / name).exists():  # a kernel without swap has no such file
                    _write(directory / name, value)
            yield Group(directory, files)
        finally:
            _empty(directory)
            directory.rmdir()


@contextmanager
def _memory_hierarchy() -> Iterator[tuple[Path, _Files]]:
    """Yield where groups with a limited memory are made, and what their files are called."""
    if (CGROUPS / "memory" / _V1.limit).exists():
        yield CGROUPS / "memory", _V1
    elif "memory" in _words(CGROUPS / "cgroup.controllers"):
        if "memory" not in _words(CGROUPS / "cgroup.subtree_control"):
            _write(CGROUPS / "cgroup.subtree_control", "+memory")
        yield CGROUPS, _V2
    else:
        with tempfile.TemporaryDirectory(prefix="infinity-cgroup-") as place:
            mount = ["mount", "-t", "cgroup", "-o", "memory", "none", place]
            try:
                done = subprocess.run(mount, capture_output=True, text=True, check=False)
            except OSError as error:
                raise GroupUnavailableError(
                    f"no memory controller at {CGROUPS}, and no mount: {error}"
                ) from error
            if done.returncode != 0:
                raise GroupUnavailableError(
                    f"no memory controller of control groups is mounted at {CGROUPS}, and it "
                    "cannot be mounted: "
                    f"{done.stderr.strip()}"
                )
            try:
                yield Path(place), _V1
            finally:
                subprocess.run(["umount", place], check=True)


def _words(path: Path) -> list[str]:
    return path.read_text().split() if path.exists() else []


def _write(path: Path, value: str) -> None:
    try:
        path.write_text(value)
    except OSError as error:
        raise GroupUnavailableError(f"cannot write {path}: {error.strerror}") from error


def _empty(directory: Path) -> None:
    """Kill what a process of the group has left running, and wait until it is gone."""
    end = time.monotonic() + _EMPTY_WITHIN_S
    while (left := _words(directory / "cgroup.procs")) and time.monotonic() < end:
        for process in left:
            with suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)
        time.sleep(0.01)
