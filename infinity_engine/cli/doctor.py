"""`infinity doctor`: what this machine can do, and what to do where it could do more.

Prints what `survey` and `diagnose` return, as tables or as one JSON object; finds out nothing by
itself. Exit status: 0 the engine can run here, 1 it cannot.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from deepnvme.cli.report import Rows, drive_rows, installed_version, show, system_rows
from deepnvme.machine.diagnosis import Chosen, can_work
from infinity_engine.machine.diagnose import diagnose, diagnose_system
from infinity_engine.machine.system import System, probe_system
from infinity_engine.units import format_bytes, format_known

if TYPE_CHECKING:
    from infinity_engine.machine.cpu import Cpu
    from infinity_engine.machine.gpus import Gpu, Gpus
    from infinity_engine.machine.memory import Memory
    from infinity_engine.machine.packages import Packages
    from infinity_engine.machine.survey import Machine

__all__ = ["HELP", "NAME", "SCHEMA", "add_arguments", "run"]

NAME = "doctor"
HELP = "Tell what this machine can do, and what to do about its weak points."
SCHEMA = 2  # of the JSON object: raised when a field changes its meaning or goes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `infinity doctor`."""
    parser.add_argument(
        "directories",
        nargs="*",
        type=Path,
        metavar="DIR",
        help="probe the drives of these directories (default: the current one)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of tables"
    )


def run(options: argparse.Namespace) -> int:
    """Survey, diagnose, print; return 0 when the engine can run here, 1 when it cannot."""
    chosen = Chosen.BY_NAME if options.directories else Chosen.BY_DEFAULT
    system = probe_system()
    findings = diagnose_system(system)
    facts: dict[str, object] = {"system": asdict(system)}
    sections = [("System", _system_rows(system))]
    # Else these findings are all: the rest needs the native modules.
    if can_work(findings):
        from infinity_engine.machine.survey import survey  # needs the native modules

        # Path() is the current directory.
        machine = survey(system, options.directories or [Path()])
        findings = diagnose(machine, chosen)
        facts = asdict(machine)
        sections += _sections(machine)
    if options.json:
        report = {
            "schema": SCHEMA,
            "version": installed_version(),
            "can_run": can_work(findings),
            "findings": list(map(asdict, findings)),
            "machine": facts,
        }
        print(json.dumps(report, indent=2))
    else:
        show(
            sections,
            findings,
            cannot="The engine cannot run here, because of:",
            can="The engine can run here",
        )
    return 0 if can_work(findings) else 1


def _sections(machine: Machine) -> Iterator[tuple[str, Rows]]:
    yield "CPU", _cpu_rows(machine.cpu)
    yield "Memory", _memory_rows(machine.memory)
    yield "GPUs", _gpus_rows(machine.gpus)
    for number, gpu in enumerate(machine.gpus.devices):
        yield f"GPU {number}", _gpu_rows(gpu)
    for directory in machine.directories:
        yield f"Drive under {directory.path}", drive_rows(directory)
    yield "I/O", system_rows(machine.storage)
    yield "Packages", _package_rows(machine.packages)


def _system_rows(system: System) -> Rows:
    yield "system", f"{system.name} {system.release} on {system.architecture}"
    yield "Python", system.python
    yield "native modules", "cannot be loaded" if system.native_problem else "loaded"


def _cpu_rows(cpu: Cpu) -> Rows:
    yield "model", cpu.model
    physical = format_known(cpu.physical_cores, " ({} physical)")
    yield "cores", f"{cpu.usable_cores} usable of {cpu.logical_cores}{physical}"
    yield "cgroup quota", format_known(cpu.quota_cores, "the time of {:g} cores", "none")
    yield "NUMA nodes", str(cpu.numa_nodes)
    yield (
        "SIMD",
        f"{cpu.simd.level or 'none'} chosen; the CPU has "
        f"{', '.join(cpu.simd.features) or 'nothing beyond its base'}",
    )


def _memory_rows(memory: Memory) -> Rows:
    yield "total", format_bytes(memory.total_bytes)
    yield "available", format_bytes(memory.available_bytes)
    if memory.cgroup is None:
        yield "cgroup limit", "none"
    else:
        used = (
            ""
            if memory.cgroup.used_bytes is None
            else f", {format_bytes(memory.cgroup.used_bytes)} of it used"
        )
        yield (
            "cgroup limit",
            f"{format_bytes(memory.cgroup.limit_bytes)} by {memory.cgroup.directory}{used}",
        )


def _gpus_rows(gpus: Gpus) -> Rows:
    if not gpus.devices:
        yield "found", f"none: {gpus.reason}"
        return
    yield "driver", f"{gpus.driver}{f', for CUDA up to {gpus.cuda}' if gpus.cuda else ''}"
    told = format_known(gpus.visible_devices, " (CUDA_VISIBLE_DEVICES={})")
    yield "visible", f"{gpus.visible_count} of {len(gpus.devices)}{told}"


def _gpu_rows(gpu: Gpu) -> Rows:
    yield "model", gpu.name
    if gpu.total_bytes is not None and gpu.free_bytes is not None:
        yield "memory", f"{format_bytes(gpu.free_bytes)} free of {format_bytes(gpu.total_bytes)}"
    if gpu.link is not None:
        now, most = gpu.link, f"generation {gpu.link.max_generation} x{gpu.link.max_width}"
        yield "PCIe link", f"{most}; at present generation {now.generation} x{now.width}"
    node = format_known(gpu.numa_node, ", NUMA node {}")
    yield "bus", f"{gpu.bus_id or 'not reported'}{node}"


def _package_rows(packages: Packages) -> Rows:
    build = packages.torch_build
    cuda = "" if build is None else f" (CUDA {build.cuda})" if build.cuda else " (without CUDA)"
    yield "torch", f"{packages.torch or 'not installed'}{cuda}"
    yield "cupy", packages.cupy or "not installed"
    yield "numpy", packages.numpy or "not installed"
    yield "liburing", packages.liburing or "not installed"
    yield "safetensors", packages.safetensors or "not installed"
