"""From what was probed to findings: what keeps deepnvme from working, what slows it down, and what to do about it.

Pure functions: they ask nothing and start nothing, so that every finding is tested on every machine.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from deepnvme.cli.sizes import format_bytes
from deepnvme.probing import DirectoryProbe, Drive, SystemProbe

__all__ = ["Finding", "Severity", "about_directory", "about_system", "can_work", "worst_first"]

_ENOUGH_MEMLOCK = 1 << 30  # below this, buffers of a useful size cannot be registered with io_uring
_VIRTUAL_DRIVES = ("vd", "xvd")


class Severity(str, Enum):
    """How much a finding matters, worst first."""

    BLOCKER = "blocker"  # nothing works there
    WEAK = "weak"  # it works, slower than this machine could
    NOTE = "note"  # worth knowing; nothing is lost


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing: what it is about, what was found, what to do."""

    severity: Severity
    subject: str
    what: str
    remedy: str


def worst_first(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Return the findings in the order of their severity."""
    return tuple(sorted(findings, key=lambda finding: list(Severity).index(finding.severity)))


def can_work(findings: Sequence[Finding]) -> bool:
    """Tell whether some backend works in each directory that the findings are about."""
    return all(finding.severity is not Severity.BLOCKER for finding in findings)


def about_system(system: SystemProbe, architecture: str) -> Iterator[Finding]:
    """Yield what there is to say about what this process may ask of the kernel."""
    refusal = system.uring.refusal
    if refusal is not None:
        yield _weak(
            "io_uring",
            f"not available ({system.uring.errno_name}): {refusal.cause}; {system.backend.value} is used instead",
            refusal.advice,
        )
    elif not system.uring.defer_taskrun:
        yield _weak(
            "kernel",
            f"the io_uring of Linux {system.kernel_release} cannot defer completions (since 6.1), "
            "which costs CPU time per request",
            "boot Linux 6.1 or newer",
        )
    if architecture == "x86_64" and not system.liburing.usable:
        yield _weak(
            "python-liburing",
            f"{system.liburing.reason}; our own ring does its work",
            "pip install --upgrade liburing",
        )
    limit = system.memlock.soft_bytes
    if limit is not None and limit < _ENOUGH_MEMLOCK and not system.memlock.exempt:
        yield _weak(
            "memlock",
            f"only {format_bytes(limit)} may be locked: I/O buffers cannot be registered with io_uring, "
            "which costs CPU time per request",
            "ulimit -l unlimited, or 'memlock unlimited' in /etc/security/limits.conf; docker run --ulimit memlock=-1",
        )
    if system.huge_pages == "never":
        yield _weak(
            "huge pages",
            "transparent huge pages are off: I/O buffers lie in scattered 4 KiB pages",
            "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled",
        )


def about_directory(directory: DirectoryProbe) -> Iterator[Finding]:
    """Yield what there is to say about one directory and its drive."""
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
        yield Finding(
            severity=Severity.NOTE,
            subject=path,
            what="mounted with 'discard': space that is freed and written again costs a trim and new allocation",
            remedy="mount with nodiscard and let fstrim.timer trim",
        )


def _weak(subject: str, what: str, remedy: str) -> Finding:
    return Finding(severity=Severity.WEAK, subject=subject, what=what, remedy=remedy)


def _about_rotation(path: str, drive: Drive) -> Finding:
    if drive.name.startswith(_VIRTUAL_DRIVES):
        return Finding(
            severity=Severity.NOTE,
            subject=path,
            what=f"the virtual drive {drive.name} says that it rotates, which virtual drives often do",
            remedy="none needed where the host's drive is solid",
        )
    return _weak(path, f"{drive.name} is a rotating drive", "use a directory on an NVMe drive")


def _unusable(directory: DirectoryProbe) -> Finding:
    path, quoted = directory.path, shlex.quote(directory.path)
    error = directory.plain_errno or "ENOSPC"
    reasons = {
        "ENOTDIR": ("this is not a directory", "name the directory that holds it"),
        "EACCES": (
            "this user may not write here",
            f"name one that this user may write, or: sudo install -d -o $USER {quoted}/deepnvme",
        ),
        "EROFS": ("mounted read-only", f"sudo mount -o remount,rw {shlex.quote(directory.mount_point or path)}"),
        "ENOSPC": ("no space is left", "free space, or name a directory on another drive"),
        "EDQUOT": ("this user's quota is used up", "free space, or name a directory on another drive"),
    }
    if directory.total_bytes is None and error == "ENOENT":
        what, remedy = "there is no such directory", f"mkdir -p {quoted}"
    else:
        what, remedy = reasons.get(error, ("no file can be written here", "name another directory"))
    return Finding(severity=Severity.BLOCKER, subject=path, what=f"{what} ({error})", remedy=remedy)
