"""From what was probed to findings: what keeps storage from working, what slows it down, and what
to do about it.

Pure functions: they ask nothing and start nothing, so that every finding is tested on every
machine. Imports nothing that needs the native module. Used by both doctors; `infinity_engine` adds
findings of its own to these.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

from deepnvme.sizes import format_bytes

if TYPE_CHECKING:
    from deepnvme.machine.probing import DirectoryProbe, Drive, SystemProbe

__all__ = [
    "Chosen",
    "Finding",
    "Severity",
    "about_directory",
    "about_system",
    "blocker",
    "can_work",
    "note",
    "weak",
    "worst_first",
]

_ENOUGH_MEMLOCK = 1 << 30  # below this, buffers of a useful size cannot be registered with io_uring
_VIRTUAL_DRIVES = ("vd", "xvd")
_OTHER_DRIVE = "free space, or name a directory on another drive"


class Severity(str, Enum):
    """How much a finding matters, worst first."""

    BLOCKER = "blocker"  # what was asked for cannot be done
    WEAK = "weak"  # it can, slower or smaller than this machine could
    NOTE = "note"  # worth knowing; nothing is lost


class Chosen(Enum):
    """How a directory came to be looked at."""

    BY_NAME = "by name"  # the user named it: if it cannot be used, that is a blocker
    BY_DEFAULT = "by default"  # the command was started there: the user may name another one


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing: what it is about, what was found, what to do.

    `id` names the kind of finding, for scripts.
    """

    id: str
    severity: Severity
    subject: str
    what: str
    remedy: str


def blocker(id: str, subject: str, what: str, remedy: str) -> Finding:
    """Return a finding with which deepnvme cannot work here."""
    return Finding(id=id, severity=Severity.BLOCKER, subject=subject, what=what, remedy=remedy)


def weak(id: str, subject: str, what: str, remedy: str) -> Finding:
    """Return a finding that costs speed or room."""
    return Finding(id=id, severity=Severity.WEAK, subject=subject, what=what, remedy=remedy)


def note(id: str, subject: str, what: str, remedy: str) -> Finding:
    """Return a finding that costs nothing."""
    return Finding(id=id, severity=Severity.NOTE, subject=subject, what=what, remedy=remedy)


def worst_first(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Return the findings in the order of their severity."""
    return tuple(sorted(findings, key=lambda finding: list(Severity).index(finding.severity)))


def can_work(findings: Sequence[Finding]) -> bool:
    """Tell whether none of the findings is a blocker."""
    return all(finding.severity is not Severity.BLOCKER for finding in findings)


def about_system(system: SystemProbe, architecture: str) -> Iterator[Finding]:
    """Yield the findings about what this process may use of the kernel."""
    refusal = system.uring.refusal
    if refusal is not None:
        yield weak(
            "io-uring-unavailable",
            "io_uring",
            f"not available ({system.uring.errno_name}): {refusal.cause}; {system.backend.value} "
            "is used instead",
            refusal.advice,
        )
    elif not system.uring.defer_taskrun:
        yield weak(
            "io-uring-without-deferral",
            "kernel",
            f"the io_uring of Linux {system.kernel_release} cannot defer completions (since 6.1), "
            "which costs CPU time per request",
            "boot Linux 6.1 or newer",
        )
    if architecture == "x86_64" and not system.liburing.usable:
        yield weak(
            "python-liburing-unusable",
            "python-liburing",
            f"{system.liburing.reason}; our own ring does its work",
            "pip install --upgrade liburing",
        )
    limit = system.memlock.soft_bytes
    if limit is not None and limit < _ENOUGH_MEMLOCK and not system.memlock.exempt:
        yield weak(
            "memlock-limit-low",
            "memlock",
            f"only {format_bytes(limit)} may be locked: I/O buffers cannot be registered with "
            "io_uring, which costs CPU time per request",
            "ulimit -l unlimited, or 'memlock unlimited' in /etc/security/limits.conf; docker run "
            "--ulimit memlock=-1",
        )
    if system.huge_pages == "never":
        yield weak(
            "huge-pages-off",
            "huge pages",
            "transparent huge pages are off: I/O buffers lie in scattered 4 KiB pages",
            "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled",
        )


def about_directory(
    directory: DirectoryProbe, chosen: Chosen = Chosen.BY_NAME
) -> Iterator[Finding]:
    """Yield the findings about one directory and its drive."""
    path = directory.path
    if directory.plain_errno is not None or directory.free_bytes == 0:
        finding = _about_unusable(directory)
        if chosen is Chosen.BY_DEFAULT:
            remedy = (
                "name the directory that is to hold the data: doctor DIR (none was named; this is "
                "the current one)"
            )
            finding = replace(finding, severity=Severity.WEAK, remedy=remedy)
        yield finding
        return
    if directory.in_memory:
        yield weak(
            "directory-in-memory",
            path,
            f"{directory.file_system} is host memory, not a drive",
            "name a directory on an NVMe drive",
        )
    elif directory.direct_errno is not None:
        yield weak(
            "direct-io-refused",
            path,
            f"{directory.file_system} refuses O_DIRECT ({directory.direct_errno}): reads and "
            "writes go through the page cache and take host memory",
            "use a directory on ext4 or xfs",
        )
    if directory.drive is not None and directory.drive.rotational:
        yield _about_rotation(path, directory.drive)
    if directory.discard:
        yield note(
            "mounted-with-discard",
            path,
            "mounted with 'discard': space that is freed and written again costs a trim and new "
            "allocation",
            "mount with nodiscard and let fstrim.timer trim",
        )


def _about_rotation(path: str, drive: Drive) -> Finding:
    if drive.name.startswith(_VIRTUAL_DRIVES):
        return note(
            "drive-virtual-rotating",
            path,
            f"the virtual drive {drive.name} says that it rotates, which virtual drives often do",
            "none needed where the host's drive is solid",
        )
    return weak(
        "drive-rotating",
        path,
        f"{drive.name} is a rotating drive",
        "use a directory on an NVMe drive",
    )


def _about_unusable(directory: DirectoryProbe) -> Finding:
    path, quoted = directory.path, shlex.quote(directory.path)
    error = directory.plain_errno or "ENOSPC"
    reasons = {
        "ENOTDIR": (
            "directory-is-a-file",
            "this is not a directory",
            "name the directory that holds it",
        ),
        "EACCES": (
            "directory-not-writable",
            "this user may not write here",
            f"name one that this user may write, or: sudo install -d -o $USER {quoted}/$USER",
        ),
        "EROFS": (
            "directory-read-only",
            "mounted read-only",
            f"sudo mount -o remount,rw {shlex.quote(directory.mount_point or path)}",
        ),
        "ENOSPC": ("drive-full", "no space is left", _OTHER_DRIVE),
        "EDQUOT": ("quota-used-up", "this user's quota is used up", _OTHER_DRIVE),
    }
    if directory.total_bytes is None and error == "ENOENT":
        id, what, remedy = "directory-missing", "there is no such directory", f"mkdir -p {quoted}"
    else:
        unknown = ("directory-unusable", "no file can be written here", "name another directory")
        id, what, remedy = reasons.get(error, unknown)
    return blocker(id, path, f"{what} ({error})", remedy)
