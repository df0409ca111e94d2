"""How much host memory this process may use: the machine's, less the limits of its control groups.

Facts only. Called by doctor, and by engine and calibration for a default host budget.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import psutil

from deepnvme.machine.probing import HOST_ROOTS, SystemRoots
from infinity_engine.machine.cgroup import cgroup_directories, read_number

__all__ = ["CgroupMemory", "Memory", "probe_cgroup_limits", "probe_cgroup_memory", "probe_memory"]

# A limit and the usage that counts against it: version 2, its throttling limit, version 1.
_LIMIT_FILES = (
    ("memory.max", "memory.current"),
    ("memory.high", "memory.current"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes"),
)
# Version 1 writes "no limit" as the largest multiple of the page size, which differs.
_NO_LIMIT = 2**62


@dataclass(frozen=True, kw_only=True, slots=True)
class CgroupMemory:
    """The tightest memory limit of the groups around this process, and what is used of it.

    `used_bytes` is None where it cannot be read.
    """

    limit_bytes: int
    used_bytes: int | None
    directory: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """The machine's memory; `usable_bytes` is the most that this process may have of it."""

    total_bytes: int
    available_bytes: int
    usable_bytes: int
    cgroup: CgroupMemory | None


def probe_memory(roots: SystemRoots = HOST_ROOTS) -> Memory:
    """Read the machine's memory and the limits on this process."""
    machine = psutil.virtual_memory()
    cgroup = probe_cgroup_memory(roots)
    return Memory(
        total_bytes=machine.total,
        available_bytes=machine.available,
        usable_bytes=min(machine.total, cgroup.limit_bytes) if cgroup else machine.total,
        cgroup=cgroup,
    )


def probe_cgroup_memory(roots: SystemRoots = HOST_ROOTS) -> CgroupMemory | None:
    """Return the tightest memory limit on this process, None where no group has one."""
    return min(probe_cgroup_limits(roots), key=lambda limit: limit.limit_bytes, default=None)


def probe_cgroup_limits(roots: SystemRoots = HOST_ROOTS) -> Iterator[CgroupMemory]:
    """Yield every memory limit on this process: of its groups and of those above, shared or not."""
    for directory in cgroup_directories("memory", roots):
        for limit_file, used_file in _LIMIT_FILES:
            limit = read_number(directory / limit_file)
            # Version 2 writes "max" for no limit, which is no number.
            if limit is not None and limit < _NO_LIMIT:
                used = read_number(directory / used_file)
                yield CgroupMemory(limit_bytes=limit, used_bytes=used, directory=str(directory))
