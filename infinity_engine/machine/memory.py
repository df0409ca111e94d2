"""How much host memory this process may use: the machine's, less the limits of its control groups.

Facts only. Called by doctor, and by engine and calibration for a default host budget.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from deepnvme.machine.probing import HOST_ROOTS, SystemRoots, read_kernel_file
from infinity_engine.machine.cgroup import cgroup_directories, read_number

__all__ = [
    "CgroupMemory",
    "Memory",
    "free_host_bytes",
    "probe_cgroup_limits",
    "probe_cgroup_memory",
    "probe_memory",
]

# A limit and the usage that counts against it: version 2, its throttling limit, version 1.
_LIMIT_FILES = (
    ("memory.max", "memory.current"),
    ("memory.high", "memory.current"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes"),
)
# Version 1 writes "no limit" as the largest multiple of the page size, which differs.
_NO_LIMIT = 2**62
# File cache not used lately: as version 2 writes it, and version 1 with that of the groups below.
_RECLAIMABLE = re.compile(r"^(?:total_)?inactive_file (\d+)$", re.MULTILINE)


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
    import psutil  # here, as a plan for another machine does not ask this one

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


def free_host_bytes(roots: SystemRoots = HOST_ROOTS) -> int:
    """Return what this process may still take of the machine and within the limits on it."""
    # Not the smallest limit alone: a larger one above it may be used up by others.
    left = [limit.limit_bytes - _used_for_good(limit) for limit in probe_cgroup_limits(roots)]
    # MemAvailable counts the file cache that the kernel can drop as free.
    return max(min([probe_memory(roots).available_bytes, *left]), 0)


def _used_for_good(cgroup: CgroupMemory) -> int:
    """Return the bytes that the group uses, less file cache that the kernel can drop.

    Without this, a group that has read as many bytes of files as its limit would have nothing left.
    """
    # Version 1 lists the group's own figure and the total with the groups below: the larger counts.
    reclaimable = _RECLAIMABLE.findall(read_kernel_file(Path(cgroup.directory) / "memory.stat"))
    return max((cgroup.used_bytes or 0) - max(map(int, reclaimable), default=0), 0)
