"""`deepnvme doctor`: what storage this process can use and how, and what to do where it could do better.

Prints what `deepnvme.probing` and `findings` return, as tables or as one JSON object; finds out nothing by itself.
Exit status: 0 some backend works in each directory, 1 in one of them none does.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType

from rich.console import Console
from rich.table import Table
from rich.text import Text

from deepnvme.backends import BACKEND_VARIABLE
from deepnvme.cli.findings import Finding, Severity, about_directory, about_system, can_work, worst_first
from deepnvme.cli.sizes import format_bytes
from deepnvme.probing import DirectoryProbe, LiburingProbe, Memlock, SystemProbe, probe_directory, probe_system
from deepnvme.profile import Profile, Settings, load_profile, profile_path, settle

__all__ = ["HELP", "NAME", "SCHEMA", "add_arguments", "run", "settings_record", "settings_text"]

NAME = "doctor"
HELP = "Tell what storage can be used here and how, and what to do about its weak points."
SCHEMA = 1  # of the JSON object: raised when a field changes its meaning or goes

_STYLES = MappingProxyType({Severity.BLOCKER: "bold red", Severity.WEAK: "yellow", Severity.NOTE: "cyan"})
_Rows = Iterable[tuple[str, str]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `deepnvme doctor`."""
    parser.add_argument(
        "directories",
        nargs="*",
        type=Path,
        metavar="DIR",
        default=[Path()],
        help="directories to look at (default: the current one)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def run(options: argparse.Namespace) -> int:
    """Probe, judge, print; return 0 when deepnvme works in each directory, 1 when not."""
    system = probe_system()
    directories = [probe_directory(directory) for directory in options.directories]
    profile = load_profile()
    found = list(about_system(system, platform.machine()))
    for directory in directories:
        found += about_directory(directory)
    findings = worst_first(found)
    if options.json:
        report = {
            "schema": SCHEMA,
            "works": can_work(findings),
            "findings": list(map(asdict, findings)),
            "system": asdict(system),
            "directories": [
                {**asdict(directory), "settings": settings_record(profile.for_path(directory.path))}
                for directory in directories
            ],
        }
        print(json.dumps(report, indent=2))
    else:
        sections = [(f"Drive under {it.path}", _drive_rows(it, profile)) for it in directories]
        _show(Console(highlight=False), [*sections, ("I/O", _system_rows(system))], findings)
    return 0 if can_work(findings) else 1


def settings_text(measured: Settings | None) -> str:
    """Return in words what a queue that is told nothing does with a drive."""
    settings = settle(measured)
    return (
        f"chunks of {format_bytes(settings.chunk_bytes)}, {format_bytes(settings.inflight_bytes)} in flight, "
        f"ordinary memory by {settings.user_memory.name.lower().replace('_', ' ')} "
        f"({'the defaults' if measured is None else f'measured, in {profile_path()}'})"
    )


def settings_record(measured: Settings | None) -> dict[str, object]:
    """Return the same for JSON."""
    settings = settle(measured)
    return {
        "chunk_bytes": settings.chunk_bytes,
        "inflight_bytes": settings.inflight_bytes,
        "user_memory": settings.user_memory.name.lower(),
        "measured": measured is not None,
    }


def _show(console: Console, sections: Iterable[tuple[str, _Rows]], findings: Sequence[Finding]) -> None:
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
    console.print(_verdict(findings))


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
    return severity, Text.assemble((finding.subject, "bold"), f": {finding.what}\n", f"-> {finding.remedy}")


def _verdict(findings: Sequence[Finding]) -> Text:
    blockers = [finding for finding in findings if finding.severity is Severity.BLOCKER]
    weak = [finding for finding in findings if finding.severity is Severity.WEAK]
    if blockers:
        return Text(f"deepnvme cannot work in {', '.join(it.subject for it in blockers)}", style="bold red")
    points = {0: "with no weak point", 1: "with 1 weak point"}.get(len(weak), f"with {len(weak)} weak points")
    return Text(f"deepnvme works here, {points}.", style="bold green")


def _drive_rows(directory: DirectoryProbe, profile: Profile) -> Iterator[tuple[str, str]]:
    if directory.file_system is not None:
        yield "file system", f"{directory.file_system} on {directory.source}, mounted at {directory.mount_point}"
    if directory.free_bytes is not None and directory.total_bytes is not None:
        yield "space", f"{format_bytes(directory.free_bytes)} free of {format_bytes(directory.total_bytes)}"
    if directory.drive is not None:
        kinds = {True: "reported as rotating", False: "solid-state", None: "rotation not reported"}
        kind = kinds[directory.drive.rotational]
        yield "drive", ", ".join(filter(None, (directory.drive.name, directory.drive.model, kind)))
    yield "writing", "works" if directory.plain_errno is None else f"fails ({directory.plain_errno})"
    if directory.plain_errno is None:
        yield "O_DIRECT", _direct_io(directory)
        yield "settings", settings_text(profile.for_path(directory.path))


def _direct_io(directory: DirectoryProbe) -> str:
    if directory.direct_errno is not None:
        return f"refused ({directory.direct_errno})"
    if directory.memory_align is None or directory.offset_align is None:
        return "works; alignment not reported"
    return f"works; memory aligned to {directory.memory_align} B, offsets to {directory.offset_align} B"


def _system_rows(system: SystemProbe) -> Iterator[tuple[str, str]]:
    told = os.environ.get(BACKEND_VARIABLE)
    yield "best backend", system.backend.value + (f"; {BACKEND_VARIABLE} asks for {told}" if told else "")
    if system.uring.refusal is not None:
        yield "io_uring", f"not available ({system.uring.errno_name}): {system.uring.refusal.cause}"
    else:
        yield "io_uring", f"available{', with deferred completions' if system.uring.defer_taskrun else ''}"
    yield "Linux AIO", "available" if system.aio.available else f"not available ({system.aio.errno_name})"
    yield "python-liburing", _liburing(system.liburing)
    yield "memlock", _memlock(system.memlock)
    yield "huge pages", system.huge_pages or "not reported"


def _liburing(liburing: LiburingProbe) -> str:
    if not liburing.usable:
        return f"not used: {liburing.reason}"
    if not liburing.fits_cpu:
        return "used only when named: its builds are for CPUs with AVX-512; our own ring does the same"
    return "usable"


def _memlock(memlock: Memlock) -> str:
    soft, hard = ("unlimited" if n is None else format_bytes(n) for n in (memlock.soft_bytes, memlock.hard_bytes))
    both = soft if soft == hard else f"{soft}, can be raised to {hard}"
    return f"{both}; not enforced, as this process has CAP_IPC_LOCK" if memlock.exempt else both
