"""A memory-limited control group that exists for the length of a `with`, and a launcher that starts commands in it.

Needs root and a writable hierarchy: `memory_limited_group` raises GroupUnavailableError with the reason elsewhere.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")


class GroupUnavailableError(Exception):
    """No memory-limited group can be made here; the text says why."""


@dataclass(frozen=True)
class Group:
    """A control group by its directory."""

    directory: Path

    @property
    def launcher(self) -> list[str]:
        """Return the start of a command line whose rest runs in the group."""
        return ["sh", "-c", f'echo $$ > "{self.directory}/cgroup.procs" && exec "$@"', "in-group"]


@contextmanager
def memory_limited_group(limit_bytes: int) -> Iterator[Group]:
    """Yield a group whose processes may use `limit_bytes` of memory; remove it afterwards."""
    hierarchy, limit_file = _memory_hierarchy()
    directory = hierarchy / f"infinity-test-{os.getpid()}"
    try:
        directory.mkdir()
    except OSError as error:
        raise GroupUnavailableError(f"cannot make {directory}: {error.strerror}") from error
    try:
        try:
            (directory / limit_file).write_text(str(limit_bytes))
        except OSError as error:
            raise GroupUnavailableError(f"cannot write {directory / limit_file}: {error.strerror}") from error
        yield Group(directory)
    finally:
        directory.rmdir()


def _memory_hierarchy() -> tuple[Path, str]:
    if (CGROUPS / "memory" / "memory.limit_in_bytes").exists():
        return CGROUPS / "memory", "memory.limit_in_bytes"
    controllers = CGROUPS / "cgroup.subtree_control"
    if controllers.exists() and "memory" in controllers.read_text().split():
        return CGROUPS, "memory.max"
    raise GroupUnavailableError("no memory controller of control groups is mounted at /sys/fs/cgroup")
