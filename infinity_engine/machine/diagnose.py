"""From facts about a machine to findings: what keeps the engine from running, what slows it down, and what to do.

Pure functions: they ask nothing and start nothing, so that every finding is tested on every machine. Imports nothing
that needs a native module, for one of the findings is that there is none.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from infinity_engine.machine.packages import OLDEST_TORCH, is_torch_new_enough
from infinity_engine.units import GiB, format_bytes

if TYPE_CHECKING:
    from deepnvme.probing import DirectoryProbe, Drive, SystemProbe
    from infinity_engine.machine.gpus import Gpu
    from infinity_engine.machine.survey import Machine
    from infinity_engine.machine.system import System

__all__ = ["Finding", "Severity", "can_run", "diagnose", "diagnose_system"]

# Below this, buffers of a useful size cannot be registered with io_uring.
_ENOUGH_MEMLOCK = 1 * GiB
# A process that may use less than this share of the machine's memory is probably in a container by oversight.
_SMALL_SHARE = 0.5
_X86 = ("x86_64", "AMD64")
_VIRTUAL_DRIVES = ("vd", "xvd")


class Severity(str, Enum):
    """How much a finding matters, worst first."""

    BLOCKER = "blocker"  # the engine cannot run
    WEAK = "weak"  # it runs, slower or smaller than this machine could
    NOTE = "note"  # worth knowing; nothing is lost


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing about the machine: what it is about, what was found, what to do."""

    severity: Severity
    subject: str
    what: str
    remedy: str


def diagnose(machine: Machine) -> tuple[Finding, ...]:
    """Return the findings about `machine`, worst first."""
    found = [
        *diagnose_system(machine.system),
        *_about_torch(machine),
        *_about_gpus(machine),
        *_about_cpu(machine),
        *_about_memory(machine),
        *_about_storage(machine.storage, machine.system.architecture),
    ]
    for directory in machine.directories:
        found += _about_directory(directory)
    return tuple(sorted(found, key=lambda finding: list(Severity).index(finding.severity)))


def diagnose_system(system: System) -> tuple[Finding, ...]:
    """Return the findings that can be made before anything else is known: does anything of ours run here at all?"""
    return tuple(_about_system(system))


def can_run(findings: Sequence[Finding]) -> bool:
    """Tell whether the engine can run on a machine with these findings."""
    return all(finding.severity is not Severity.BLOCKER for finding in findings)


def _blocker(subject: str, what: str, remedy: str) -> Finding:
    return Finding(severity=Severity.BLOCKER, subject=subject, what=what, remedy=remedy)


def _weak(subject: str, what: str, remedy: str) -> Finding:
    return Finding(severity=Severity.WEAK, subject=subject, what=what, remedy=remedy)


def _note(subject: str, what: str, remedy: str) -> Finding:
    return Finding(severity=Severity.NOTE, subject=subject, what=what, remedy=remedy)


def _about_system(system: System) -> Iterator[Finding]:
    if (system.name, system.pointer_bits, system.byte_order) != ("Linux", 64, "little"):
        yield _blocker(
            "platform",
            f"{system.name} on {system.architecture}, {system.pointer_bits} bits, {system.byte_order}-endian",
            "use 64-bit little-endian Linux (x86-64 or aarch64)",
        )
    if system.native_problem is not None:
        yield _blocker(
            "native modules",
            f"they cannot be loaded: {system.native_problem}",
            "install again for this Python: pip install --force-reinstall --no-deps infinity-engine",
        )


def _about_torch(machine: Machine) -> Iterator[Finding]:
    torch, oldest = machine.packages.torch, ".".join(map(str, OLDEST_TORCH))
    install = "pip install 'infinity-engine[torch]', or your own build of PyTorch"
    if torch is None:
        yield _blocker("torch", "PyTorch is not installed", install)
    elif not is_torch_new_enough(torch):
        yield _blocker("torch", f"PyTorch {torch} is older than {oldest}", install)


def _about_gpus(machine: Machine) -> Iterator[Finding]:
    if not machine.gpus.devices:
        yield _weak(
            "GPU",
            f"{machine.gpus.reason or 'none found'}; training runs on the CPU",
            "install the NVIDIA driver; in a container, start it with GPUs: docker run --gpus all",
        )
        return
    build = machine.packages.torch_build
    if build is not None and build.cuda is None:
        yield _weak(
            "torch",
            "this build of PyTorch has no CUDA, so that the GPUs stay unused",
            "install a CUDA build of PyTorch: https://pytorch.org/get-started/locally",
        )
    if machine.packages.cupy is None:
        extra = "cuda12" if build is not None and (build.cuda or "").startswith("12.") else "cuda"
        yield _weak(
            "cupy",
            "not installed: optimizer updates run on the CPU alone",
            f"pip install 'infinity-engine[{extra}]'",
        )
    for gpu in machine.gpus.devices:
        yield from _about_link(gpu)


def _about_link(gpu: Gpu) -> Iterator[Finding]:
    if gpu.link is not None and gpu.link.width < gpu.link.max_width:
        yield _weak(
            f"GPU {gpu.bus_id}",
            f"its PCIe link has {gpu.link.width} of {gpu.link.max_width} lanes",
            "seat the card in a slot wired for all lanes, and look at bifurcation in the firmware's settings",
        )


def _about_cpu(machine: Machine) -> Iterator[Finding]:
    cpu = machine.cpu
    if cpu.simd.problem is not None:
        yield _blocker("SIMD", cpu.simd.problem, "unset INFINITY_SIMD")
    if cpu.simd.level == "scalar" and machine.system.architecture in _X86:
        able = "avx2" in cpu.simd.features
        yield _weak(
            "SIMD",
            "INFINITY_SIMD asks for scalar kernels" if able else "no AVX2: updates on the CPU use scalar kernels",
            "unset INFINITY_SIMD"
            if able
            else "use a CPU with AVX2; in a virtual machine, pass the host's CPU model on",
        )
    if cpu.quota_cores is not None and cpu.quota_cores < cpu.usable_cores:
        yield _weak(
            "CPU quota",
            f"a control group grants the time of {cpu.quota_cores:g} cores, {cpu.usable_cores} are visible: "
            "threads for all of them will be throttled",
            "raise the quota (docker run --cpus, Kubernetes limits.cpu), or set OMP_NUM_THREADS to it",
        )


def _about_memory(machine: Machine) -> Iterator[Finding]:
    memory = machine.memory
    if memory.cgroup is not None and memory.usable_bytes < memory.total_bytes * _SMALL_SHARE:
        yield _weak(
            "memory limit",
            f"a control group allows {format_bytes(memory.usable_bytes)} of the machine's "
            f"{format_bytes(memory.total_bytes)} ({memory.cgroup.directory})",
            "raise it where the machine is yours: docker run --memory, Kubernetes limits.memory, Slurm --mem",
        )


def _about_storage(storage: SystemProbe, architecture: str) -> Iterator[Finding]:
    refusal = storage.uring.refusal
    if refusal is not None:
        yield _weak(
            "io_uring",
            f"not available ({storage.uring.errno_name}): {refusal.cause}; {storage.backend.value} is used instead",
            refusal.advice,
        )
    elif not storage.uring.defer_taskrun:
        yield _weak(
            "kernel",
            f"the io_uring of Linux {storage.kernel_release} cannot defer completions (since 6.1), "
            "which costs CPU time per request",
            "boot Linux 6.1 or newer",
        )
    if architecture in _X86 and not storage.liburing.usable:
        yield _weak(
            "python-liburing",
            f"{storage.liburing.reason}; our own ring does its work",
            "pip install --upgrade liburing",
        )
    limit = storage.memlock.soft_bytes
    if limit is not None and limit < _ENOUGH_MEMLOCK and not storage.memlock.exempt:
        yield _weak(
            "memlock",
            f"only {format_bytes(limit)} may be locked: I/O buffers cannot be registered with io_uring, "
            "which costs CPU time per request",
            "ulimit -l unlimited, or 'memlock unlimited' in /etc/security/limits.conf; docker run --ulimit memlock=-1",
        )
    if storage.huge_pages == "never":
        yield _weak(
            "huge pages",
            "transparent huge pages are off: I/O buffers lie in scattered 4 KiB pages",
            "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled",
        )


def _about_directory(directory: DirectoryProbe) -> Iterator[Finding]:
    path = directory.path
    if directory.plain_errno is not None or directory.free_bytes == 0:
        yield _unusable(directory)
        return
    if directory.in_memory:
        yield _weak(path, f"{directory.file_system} is host memory, not a drive", "name a directory on an NVMe drive")
    elif directory.direct_errno is not None:
        yield _weak(
            path,
            f"{directory.file_system} refuses O_DIRECT ({directory.direct_errno}): reads and writes go through the "
            "page cache and take host memory",
            "use a directory on ext4 or xfs",
        )
    if directory.drive is not None and directory.drive.rotational:
        yield _about_rotation(path, directory.drive)
    if directory.discard:
        yield _note(
            path,
            "mounted with 'discard': space that is freed and written again costs a trim and new allocation",
            "mount with nodiscard and let fstrim.timer trim",
        )


def _about_rotation(path: str, drive: Drive) -> Finding:
    if drive.name.startswith(_VIRTUAL_DRIVES):
        return _note(
            path,
            f"the virtual drive {drive.name} says that it rotates, which virtual drives often do",
            "none needed where the host's drive is solid",
        )
    return _weak(path, f"{drive.name} is a rotating drive", "use a directory on an NVMe drive")


def _unusable(directory: DirectoryProbe) -> Finding:
    path, quoted = directory.path, shlex.quote(directory.path)
    error = directory.plain_errno or "ENOSPC"
    reasons = {
        "ENOTDIR": ("this is not a directory", "name the directory that holds it"),
        "EACCES": (
            "this user may not write here",
            f"name one that this user may write, or: sudo install -d -o $USER {quoted}/infinity",
        ),
        "EROFS": ("mounted read-only", f"sudo mount -o remount,rw {shlex.quote(directory.mount_point or path)}"),
        "ENOSPC": ("no space is left", "free space, or name a directory on another drive"),
        "EDQUOT": ("this user's quota is used up", "free space, or name a directory on another drive"),
    }
    if directory.total_bytes is None and error == "ENOENT":
        what, remedy = "there is no such directory", f"mkdir -p {quoted}"
    else:
        what, remedy = reasons.get(error, ("no file can be written here", "name another directory"))
    return _blocker(path, f"{what} ({error})", remedy)
