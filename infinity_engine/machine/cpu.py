"""The processor: cores this process may use, NUMA nodes, and the SIMD level of the update kernels.

Facts only; starts nothing and measures nothing. Called by doctor and by the planner's defaults.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator
from dataclasses import dataclass

import psutil

from deepnvme.machine.probing import HOST_ROOTS, SystemRoots, read_kernel_file
from infinity_engine import _native
from infinity_engine.machine.cgroup import cgroup_directories, read_number

__all__ = ["Cpu", "Simd", "probe_cpu", "probe_cpu_quota", "probe_simd"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Simd:
    """The instruction sets that matter here, and the level chosen; `problem`: why there is none."""

    features: tuple[str, ...]
    level: str | None
    problem: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Cpu:
    """The processor as this process sees it.

    `usable_cores` is the affinity mask's size; `quota_cores` the time control groups grant, in
    cores, None without a quota; `physical_cores` is None where the system does not say.
    """

    model: str
    logical_cores: int
    physical_cores: int | None
    usable_cores: int
    quota_cores: float | None
    numa_nodes: int
    simd: Simd


def probe_cpu(roots: SystemRoots = HOST_ROOTS) -> Cpu:
    """Read the processor's facts and how much of it this process may use."""
    logical_cores = os.cpu_count() or 1
    return Cpu(
        model=_model_name(roots),
        logical_cores=logical_cores,
        physical_cores=psutil.cpu_count(logical=False),
        # The affinity mask, which a scheduler or taskset may have made smaller; macOS has none.
        usable_cores=len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else logical_cores,
        quota_cores=probe_cpu_quota(roots),
        # Without the directory there is one node.
        numa_nodes=max(1, sum(1 for _ in (roots.sys / "devices/system/node").glob("node[0-9]*"))),
        simd=probe_simd(os.environ.get("INFINITY_SIMD")),
    )


def probe_simd(wanted: str | None) -> Simd:
    """Return the SIMD level that kernels will run at when INFINITY_SIMD is `wanted`."""
    features = tuple(_native.cpu_features())
    try:
        return Simd(features=features, level=_native.chosen_simd(wanted), problem=None)
    except ValueError as error:
        return Simd(features=features, level=None, problem=str(error))


def probe_cpu_quota(roots: SystemRoots = HOST_ROOTS) -> float | None:
    """Return the least time that groups around this process grant, in cores; None: no quota."""
    return min(_cgroup_quotas(roots), default=None)


def _cgroup_quotas(roots: SystemRoots) -> Iterator[float]:
    for directory in cgroup_directories("cpu", roots):
        quota, period = (
            read_number(directory / "cpu.cfs_quota_us"),
            read_number(directory / "cpu.cfs_period_us"),
        )
        if quota is None:  # version 2 writes both into one file
            both = re.match(r"(\d+) (\d+)", read_kernel_file(directory / "cpu.max"))
            quota, period = (int(both[1]), int(both[2])) if both else (None, None)
        # Version 1 writes -1 where there is no quota.
        if quota is not None and period and quota > 0:
            yield quota / period


def _model_name(roots: SystemRoots) -> str:
    # The kernel writes no model name on ARM.
    named = re.search(
        r"^model name\s*:\s*(.+)$", read_kernel_file(roots.proc / "cpuinfo"), re.MULTILINE
    )
    return named[1] if named else platform.machine()
