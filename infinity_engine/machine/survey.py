"""Collects the facts about one machine. Needs native modules; `diagnose` decides what they mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from deepnvme.machine.probing import (
    HOST_ROOTS,
    DirectoryProbe,
    SystemProbe,
    SystemRoots,
    probe_directory,
)
from deepnvme.machine.probing import probe_system as probe_storage
from infinity_engine.machine.cpu import Cpu, probe_cpu
from infinity_engine.machine.gpus import Gpus, probe_gpus
from infinity_engine.machine.memory import Memory, probe_memory
from infinity_engine.machine.packages import Packages, probe_packages
from infinity_engine.machine.system import System

__all__ = ["Machine", "survey"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Everything known about a machine, and about the directories that were asked for."""

    system: System
    cpu: Cpu
    memory: Memory
    gpus: Gpus
    packages: Packages
    storage: SystemProbe
    directories: tuple[DirectoryProbe, ...]


def survey(system: System, directories: Sequence[Path], roots: SystemRoots = HOST_ROOTS) -> Machine:
    """Collect all facts about the machine, and which I/O works in each of `directories`."""
    return Machine(
        system=system,
        cpu=probe_cpu(roots),
        memory=probe_memory(roots),
        gpus=probe_gpus(roots=roots),
        packages=probe_packages(),
        storage=probe_storage(roots),
        directories=tuple(probe_directory(directory, roots) for directory in directories),
    )
