"""What both doctors print: facts in sections, findings with their remedies, a verdict; the rows
about drives and I/O.

Only words and tables; finds out nothing by itself. Imports nothing that needs the native module, as
`infinity doctor` reports also where there is none.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from deepnvme.machine.diagnosis import Finding, Severity
from deepnvme.sizes import format_bytes
from deepnvme.version import __version__

if TYPE_CHECKING:
    from deepnvme.machine.probing import DirectoryProbe, LiburingProbe, Memlock, SystemProbe

__all__ = [
    "Output",
    "Rows",
    "complain",
    "drive_rows",
    "explained",
    "installed_version",
    "show",
    "system_rows",
]

Rows = Iterable[tuple[str, str]]

_STYLES = MappingProxyType(
    {Severity.BLOCKER: "bold red", Severity.WEAK: "yellow", Severity.NOTE: "cyan"}
)


class Output(Console):
    """Standard output, for tables. `main` handles the error of a pipe that its reader closed."""

    def __init__(self) -> None:
        super().__init__(highlight=False)

    def on_broken_pipe(self) -> None:
        """Raise as `print` does; rich would end the program with status 1."""
        raise BrokenPipeError


# What to do about an error that the system names and no message of deepnvme explains.
_REMEDIES = MappingProxyType(
    {
        errno.ENOENT: "check the name, and whether the drive is mounted",
        errno.ENOTDIR: "a part of the path is a file: check the name",
        errno.EISDIR: "name a file",
        errno.EACCES: "run this as a user with that right, or have its owner give it (chmod)",
        errno.EPERM: "run this as a user with that right",
        errno.EROFS: "name a place on another drive, or mount this one for writing",
        errno.ENOSPC: "free some space, or name a place on another drive",
        errno.EDQUOT: "free some of this user's space, or name a place on another drive",
        errno.EMFILE: "allow this process more open files (ulimit -n)",
        errno.ENAMETOOLONG: "choose a shorter name",
    }
)


def explained(error: OSError) -> str:
    """Return what happened, with what to do where the system's own words are all there is."""
    text = error.strerror or str(error)
    remedy = _REMEDIES.get(error.errno or 0)
    is_bare = remedy is not None and text.endswith(os.strerror(error.errno or 0))
    return f"{text}; {remedy}" if is_bare else text


def complain(text: str) -> None:
    """Print to standard error; do nothing where that is closed or full, as no one can be told."""
    if sys.stderr is not None:
        with suppress(OSError):
            print(text, file=sys.stderr, flush=True)


def installed_version() -> str:
    """Return the version of deepnvme, which is also that of the engine beside it."""
    return __version__


def show(
    sections: Iterable[tuple[str, Rows]], findings: Sequence[Finding], *, cannot: str, can: str
) -> None:
    """Print the sections, the findings and the verdict, which starts with `cannot` or `can`."""
    console = Output()
    for title, rows in sections:
        table = _table(first_column=len("python-liburing"))
        for label, value in rows:
            table.add_row(Text(label, style="dim"), Text(value))
        _show_section(console, title, table)
    if findings:
        table = _table(first_column=len(Severity.BLOCKER.name))
        for finding in findings:
            table.add_row(*_cells(finding))
        _show_section(console, "Findings", table)
    console.print(_verdict(findings, cannot, can))


def drive_rows(directory: DirectoryProbe) -> Iterator[tuple[str, str]]:
    """Yield the rows about a directory and the drive that it is on."""
    if directory.file_system is not None:
        yield (
            "file system",
            f"{directory.file_system} on {directory.source}, mounted at {directory.mount_point}",
        )
    if directory.free_bytes is not None and directory.total_bytes is not None:
        yield (
            "space",
            f"{format_bytes(directory.free_bytes)} free of {format_bytes(directory.total_bytes)}",
        )
    if directory.drive is not None:
        kinds = {True: "reported as rotating", False: "solid-state", None: "rotation not reported"}
        kind = kinds[directory.drive.rotational]
        yield "drive", ", ".join(filter(None, (directory.drive.name, directory.drive.model, kind)))
    yield (
        "writing",
        "works" if directory.plain_errno is None else f"fails ({directory.plain_errno})",
    )
    if directory.plain_errno is None:
        yield "O_DIRECT", _direct_io(directory)


def system_rows(system: SystemProbe) -> Iterator[tuple[str, str]]:
    """Yield the rows about what this process may use of the kernel."""
    # Imported here: where there is a probe to show, the native module could be loaded.
    from deepnvme.machine.backends import BACKEND_VARIABLE

    wanted = os.environ.get(BACKEND_VARIABLE)
    yield (
        "best backend",
        system.backend.value + (f"; {BACKEND_VARIABLE} asks for {wanted}" if wanted else ""),
    )
    if system.uring.refusal is not None:
        yield "io_uring", f"not available ({system.uring.errno_name}): {system.uring.refusal.cause}"
    else:
        yield (
            "io_uring",
            f"available{', with deferred completions' if system.uring.defer_taskrun else ''}",
        )
    yield (
        "Linux AIO",
        "available" if system.aio.available else f"not available ({system.aio.errno_name})",
    )
    yield "python-liburing", _liburing(system.liburing)
    yield "memlock", _memlock(system.memlock)
    yield "huge pages", system.huge_pages or "not reported"


def _show_section(console: Console, title: str, table: Table) -> None:
    console.print(Text(title, style="bold"))
    console.print(table)
    console.print()


def _table(*, first_column: int) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 0, 0, 2))
    table.add_column(width=first_column, no_wrap=True)
    table.add_column(overflow="fold")
    return table


def _cells(finding: Finding) -> tuple[Text, Text]:
    severity = Text(finding.severity.name, style=_STYLES[finding.severity])
    return severity, Text.assemble(
        (finding.subject, "bold"), f": {finding.what}\n", f"-> {finding.remedy}"
    )


def _verdict(findings: Sequence[Finding], cannot: str, can: str) -> Text:
    blockers = [finding for finding in findings if finding.severity is Severity.BLOCKER]
    weak = [finding for finding in findings if finding.severity is Severity.WEAK]
    if blockers:
        return Text(
            f"{cannot} {', '.join(dict.fromkeys(blocker.subject for blocker in blockers))}",
            style="bold red",
        )
    points = {0: "with no weak point", 1: "with 1 weak point"}.get(
        len(weak), f"with {len(weak)} weak points"
    )
    return Text(f"{can}, {points}.", style="bold green")


def _direct_io(directory: DirectoryProbe) -> str:
    if directory.direct_errno is not None:
        return f"refused ({directory.direct_errno})"
    if directory.memory_align is None or directory.offset_align is None:
        return "works; alignment not reported"
    return (
        f"works; memory aligned to {directory.memory_align} B, offsets to {directory.offset_align} "
        "B"
    )


def _liburing(liburing: LiburingProbe) -> str:
    if not liburing.usable:
        return f"not used: {liburing.reason}"
    if not liburing.fits_cpu:
        return (
            "used only when named: its builds are for CPUs with AVX-512; our own ring does the same"
        )
    return "usable"


def _memlock(memlock: Memlock) -> str:
    soft, hard = (
        "unlimited" if limit is None else format_bytes(limit)
        for limit in (memlock.soft_bytes, memlock.hard_bytes)
    )
    both = soft if soft == hard else f"{soft}, can be raised to {hard}"
    return f"{both}; not enforced, as this process has CAP_IPC_LOCK" if memlock.exempt else both
