"""`infinity doctor`: what this machine can do, and what to do where it could do more.

Prints what `survey` and `diagnose` return, as tables or as one JSON object; finds out nothing by itself.
Exit status: 0 the engine can run here, 1 it cannot.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from infinity_engine.machine.diagnose import Finding, Severity, can_run, diagnose, diagnose_system
from infinity_engine.machine.system import System, probe_system
from infinity_engine.units import format_bytes

if TYPE_CHECKING:
    from deepnvme.probing import DirectoryProbe, LiburingProbe, Memlock, SystemProbe
    from infinity_engine.machine.cpu import Cpu
    from infinity_engine.machine.gpus import Gpu
    from infinity_engine.machine.memory import Memory
    from infinity_engine.machine.packages import Packages
    from infinity_engine.machine.survey import Machine

__all__ = ["HELP", "NAME", "SCHEMA", "add_arguments", "run"]

NAME = "doctor"
HELP = "Tell what this machine can do, and what to do about its weak points."
SCHEMA = 1  # of the JSON object: raised when a field changes its meaning or goes

_STYLES = MappingProxyType({Severity.BLOCKER: "bold red", Severity.WEAK: "yellow", Severity.NOTE: "cyan"})
_Rows = Iterable[tuple[str, str]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `infinity doctor`."""
    parser.add_argument(
        "directories",
        nargs="*",
        type=Path,
        metavar="DIR",
        default=[Path()],
        help="directories whose drives are probed (default: the current one)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def run(options: argparse.Namespace) -> int:
    """Survey, diagnose, print; return 0 when the engine can run here, 1 when it cannot."""
    system = probe_system()
    findings = diagnose_system(system)
    facts: dict[str, object] = {"system": asdict(system)}
    sections = [("System", _system_rows(system))]
    if can_run(findings):
        from infinity_engine.machine.survey import survey  # needs the native modules

        machine = survey(system, options.directories)
        findings = diagnose(machine)
        facts = asdict(machine)
        sections += _sections(machine)
    if options.json:
        report = {"schema": SCHEMA, "can_run": can_run(findings), "findings": list(map(asdict, findings))}
        print(json.dumps({**report, "machine": facts}, indent=2))
    else:
        _show(Console(highlight=False), sections, findings)
    return 0 if can_run(findings) else 1


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
        subjects = ", ".join(dict.fromkeys(finding.subject for finding in blockers))
        return Text(f"The engine cannot run here, because of: {subjects}", style="bold red")
    points = {0: "with no weak point", 1: "with 1 weak point"}.get(len(weak), f"with {len(weak)} weak points")
    return Text(f"The engine can run here, {points}.", style="bold green")


def _sections(machine: Machine) -> Iterator[tuple[str, _Rows]]:
    yield "CPU", _cpu_rows(machine.cpu)
    yield "Memory", _memory_rows(machine.memory)
    if not machine.gpus.devices:
        yield "GPUs", [("found", f"none: {machine.gpus.reason}")]
    for number, gpu in enumerate(machine.gpus.devices):
        yield f"GPU {number}", _gpu_rows(gpu)
    for directory in machine.directories:
        yield f"Drive under {directory.path}", _drive_rows(directory)
    yield "I/O", _storage_rows(machine.storage)
    yield "Packages", _package_rows(machine.packages)


def _system_rows(system: System) -> _Rows:
    yield "system", f"{system.name} {system.release} on {system.architecture}"
    yield "Python", system.python
    yield "native modules", "cannot be loaded" if system.native_problem else "loaded"


def _cpu_rows(cpu: Cpu) -> _Rows:
    yield "model", cpu.model
    physical = "" if cpu.physical_cores is None else f" ({cpu.physical_cores} physical)"
    yield "cores", f"{cpu.usable_cores} usable of {cpu.logical_cores}{physical}"
    yield "cgroup quota", "none" if cpu.quota_cores is None else f"the time of {cpu.quota_cores:g} cores"
    yield "NUMA nodes", str(cpu.numa_nodes)
    yield (
        "SIMD",
        f"{cpu.simd.level or 'none'} chosen; the CPU has {', '.join(cpu.simd.features) or 'nothing beyond its base'}",
    )


def _memory_rows(memory: Memory) -> _Rows:
    yield "total", format_bytes(memory.total_bytes)
    yield "available", format_bytes(memory.available_bytes)
    if memory.cgroup is None:
        yield "cgroup limit", "none"
    else:
        used = "" if memory.cgroup.used_bytes is None else f", {format_bytes(memory.cgroup.used_bytes)} of it used"
        yield "cgroup limit", f"{format_bytes(memory.cgroup.limit_bytes)} by {memory.cgroup.directory}{used}"


def _gpu_rows(gpu: Gpu) -> _Rows:
    yield "model", gpu.name
    if gpu.total_bytes is not None and gpu.free_bytes is not None:
        yield "memory", f"{format_bytes(gpu.free_bytes)} free of {format_bytes(gpu.total_bytes)}"
    if gpu.link is not None:
        now, most = gpu.link, f"generation {gpu.link.max_generation} x{gpu.link.max_width}"
        yield "PCIe link", f"{most}; at present generation {now.generation} x{now.width}"
    node = "" if gpu.numa_node is None else f", NUMA node {gpu.numa_node}"
    yield "bus", f"{gpu.bus_id or 'not reported'}{node}"


def _drive_rows(directory: DirectoryProbe) -> _Rows:
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


def _direct_io(directory: DirectoryProbe) -> str:
    if directory.direct_errno is not None:
        return f"refused ({directory.direct_errno})"
    if directory.memory_align is None or directory.offset_align is None:
        return "works; alignment not reported"
    return f"works; memory aligned to {directory.memory_align} B, offsets to {directory.offset_align} B"


def _storage_rows(storage: SystemProbe) -> _Rows:
    yield "best backend", storage.backend.value
    if storage.uring.refusal is not None:
        yield "io_uring", f"not available ({storage.uring.errno_name}): {storage.uring.refusal.cause}"
    else:
        yield "io_uring", f"available{', with deferred completions' if storage.uring.defer_taskrun else ''}"
    yield "Linux AIO", "available" if storage.aio.available else f"not available ({storage.aio.errno_name})"
    yield "python-liburing", _liburing(storage.liburing)
    yield "memlock", _memlock(storage.memlock)
    yield "huge pages", storage.huge_pages or "not reported"


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


def _package_rows(packages: Packages) -> _Rows:
    build = packages.torch_build
    cuda = "" if build is None else f" (CUDA {build.cuda})" if build.cuda else " (without CUDA)"
    yield "torch", f"{packages.torch or 'not installed'}{cuda}"
    yield "cupy", packages.cupy or "not installed"
    yield "numpy", packages.numpy or "not installed"
    yield "liburing", packages.liburing or "not installed"
    yield "safetensors", packages.safetensors or "not installed"
