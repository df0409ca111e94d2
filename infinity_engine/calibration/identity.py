"""What tells machines, devices and drives apart, as texts: figures hold while these stay the same.

Asks the system, measures nothing, imports no torch.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from deepnvme.machine.profile import Settings, drive_key
from infinity_engine.machine.cpu import probe_cpu
from infinity_engine.machine.gpus import probe_gpus
from infinity_engine.machine.packages import probe_packages
from infinity_engine.plan import CALIBRATION_VERSION
from infinity_engine.units import format_known

__all__ = ["default_device", "drive_identity", "gpu_device", "machine_identity", "usable_cores"]


def machine_identity(device: str) -> dict[str, str]:
    """Return what a calibration of this machine with this device holds for."""
    cpu = probe_cpu()
    packages = probe_packages()
    return {
        # Another format, or another version's kernels, make earlier figures useless.
        "format": str(CALIBRATION_VERSION),
        "infinity_engine": metadata.version("infinity-engine"),
        "cpu": cpu.model,
        "cores": f"{cpu.usable_cores} of {cpu.logical_cores}",
        "quota": format_known(cpu.quota_cores, "{:g} cores", "none"),
        "simd": cpu.simd.level or "none",
        "kernel": platform.release(),
        "torch": packages.torch or "none",
        "cupy": packages.cupy or "none",
        "device": device,
    }


def usable_cores() -> int:
    """Return how many threads can run at once: cores of this process, within its quota of time."""
    cpu = probe_cpu()
    return (
        cpu.usable_cores
        if cpu.quota_cores is None
        else max(1, min(cpu.usable_cores, round(cpu.quota_cores)))
    )


def default_device() -> str:
    """Return the device that an engine here would compute on, without asking torch."""
    # Must say what `device_identity` says of the accelerator that would be opened.
    gpus = probe_gpus()
    build = probe_packages().torch_build
    return gpu_device() if gpus.visible_count and build is not None and build.cuda else "cpu"


def gpu_device() -> str:
    """Return what the GPUs of this machine are called, with their driver."""
    gpus = probe_gpus()
    # Which GPUs are visible decides which one is measured.
    visible = format_known(gpus.visible_devices, ", of which {}")
    return f"cuda: {', '.join(gpu.name for gpu in gpus.devices)}{visible}; driver {gpus.driver}"


def drive_identity(directory: str, *, backend: str, settings: Settings) -> Mapping[str, str]:
    """Return what figures of a directory hold for: where it is, which drive, how it is used.

    Raises:
        OSError: there is no such directory.
    """
    # The real path: two names of one directory share its figures.
    place = Path(directory).resolve(strict=True)
    return {
        "directory": os.fspath(place),
        "drive": drive_key(place),
        "backend": backend,
        "chunk_bytes": str(settings.chunk_bytes),
        "inflight_bytes": str(settings.inflight_bytes),
        "user_memory": settings.user_memory.name.lower(),
    }
