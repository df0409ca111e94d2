"""From facts about a machine to findings: what stops or slows the engine, and what to do.

Adds the engine's findings to those of `deepnvme.diagnosis` about storage. Pure functions: they ask
nothing and start nothing, so that every finding is tested on every machine. Imports nothing that
needs a native module, because one of the findings is that it is missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from deepnvme.machine.diagnosis import (
    Chosen,
    Finding,
    about_directory,
    about_system,
    blocker,
    weak,
    worst_first,
)
from infinity_engine.machine.packages import OLDEST_TORCH, is_torch_new_enough
from infinity_engine.units import format_bytes

if TYPE_CHECKING:
    from infinity_engine.machine.gpus import Gpu
    from infinity_engine.machine.survey import Machine
    from infinity_engine.machine.system import System

__all__ = ["diagnose", "diagnose_system"]

# Less than this share of the machine's memory is probably a container's limit set by oversight.
_SMALL_SHARE = 0.5
_X86 = ("x86_64", "AMD64")


def diagnose(machine: Machine, chosen: Chosen = Chosen.BY_NAME) -> tuple[Finding, ...]:
    """Return the findings about `machine`, worst first; `chosen`: how directories were chosen."""
    found = [
        *diagnose_system(machine.system),
        *_about_torch(machine),
        *_about_gpus(machine),
        *_about_cpu(machine),
        *_about_memory(machine),
        *about_system(machine.storage, machine.system.architecture),
    ]
    for directory in machine.directories:
        found += about_directory(directory, chosen)
    return worst_first(found)


def diagnose_system(system: System) -> tuple[Finding, ...]:
    """Return the findings that need no other facts: whether the packages run here at all."""
    return tuple(_about_system(system))


def _about_system(system: System) -> Iterator[Finding]:
    if (system.name, system.pointer_bits, system.byte_order) != ("Linux", 64, "little"):
        yield blocker(
            "platform-unsupported",
            "platform",
            f"{system.name} on {system.architecture}, {system.pointer_bits} bits, "
            f"{system.byte_order}-endian",
            "use 64-bit little-endian Linux (x86-64 or aarch64)",
        )
    if system.native_problem is not None:
        yield blocker(
            "native-modules-not-loaded",
            "native modules",
            f"they cannot be loaded: {system.native_problem}",
            # Without dependencies: they are there, and pip would install them anew.
            "install again for this Python: pip install --force-reinstall --no-deps "
            "infinity-engine",
        )


def _about_torch(machine: Machine) -> Iterator[Finding]:
    torch, oldest = machine.packages.torch, ".".join(map(str, OLDEST_TORCH))
    install = "pip install 'infinity-engine[torch]', or your own build of PyTorch"
    if torch is None:
        yield blocker("torch-missing", "torch", "PyTorch is not installed", install)
    elif not is_torch_new_enough(torch):
        yield blocker("torch-too-old", "torch", f"PyTorch {torch} is older than {oldest}", install)


def _about_gpus(machine: Machine) -> Iterator[Finding]:
    gpus, build = machine.gpus, machine.packages.torch_build
    if not gpus.devices:
        yield weak(
            "gpu-missing",
            "GPU",
            f"{gpus.reason or 'none found'}; training runs on the CPU",
            "install the NVIDIA driver; in a container, start it with GPUs: docker run --gpus all",
        )
        # No GPU: the rest is about using one.
        return
    if gpus.visible_count == 0:
        yield weak(
            "gpus-hidden",
            "GPU",
            f"CUDA_VISIBLE_DEVICES={gpus.visible_devices!r} hides all {len(gpus.devices)} from "
            "this process; training runs on the CPU",
            "unset CUDA_VISIBLE_DEVICES, or list GPUs in it: CUDA_VISIBLE_DEVICES=0",
        )
        # As without one: what else is wrong with them does not matter to this process.
        return
    if build is not None and build.cuda is None:
        yield weak(
            "torch-without-cuda",
            "torch",
            "this build of PyTorch has no CUDA, so that the GPUs stay unused",
            "install a CUDA build of PyTorch: https://pytorch.org/get-started/locally",
        )
    # Minor versions are compatible: CUDA 12.8's builds run on drivers for 12.0.
    elif build is not None and gpus.cuda is not None and _major(build.cuda) > _major(gpus.cuda):
        yield weak(
            "torch-cuda-too-new",
            "torch",
            f"this build of PyTorch is for CUDA {build.cuda}, and the NVIDIA driver {gpus.driver} "
            f"goes up to CUDA {gpus.cuda}, so that the GPUs stay unused",
            f"update the driver, or install a build of PyTorch for CUDA {_major(gpus.cuda)}: "
            "https://pytorch.org/get-started/locally",
        )
    if machine.packages.cupy is None:
        # The wheel of cupy has to be of torch's CUDA version.
        extra = "cuda12" if build is not None and (build.cuda or "").startswith("12.") else "cuda"
        yield weak(
            "cupy-missing",
            "cupy",
            "not installed: optimizer updates run on the CPU alone",
            f"pip install 'infinity-engine[{extra}]'",
        )
    for gpu in gpus.devices:
        yield from _about_link(gpu)


def _major(version: str | None) -> int:
    """Return the first number of a version such as "13.0": drivers run builds of the same one."""
    first = (version or "").split(".")[0]
    return int(first) if first.isdecimal() else 0


def _about_link(gpu: Gpu) -> Iterator[Finding]:
    # The width only: an idle GPU lowers the generation of its link.
    if gpu.link is not None and gpu.link.width < gpu.link.max_width:
        yield weak(
            "gpu-lanes-missing",
            f"GPU {gpu.bus_id}",
            f"its PCIe link has {gpu.link.width} of {gpu.link.max_width} lanes",
            "seat the card in a slot wired for all lanes, and look at bifurcation in the "
            "firmware's settings",
        )


def _about_cpu(machine: Machine) -> Iterator[Finding]:
    cpu = machine.cpu
    if cpu.simd.problem is not None:
        yield blocker("simd-level-impossible", "SIMD", cpu.simd.problem, "unset INFINITY_SIMD")
    if cpu.simd.level == "scalar" and machine.system.architecture in _X86:
        # The CPU could do better, so the variable is the reason.
        if "avx2" in cpu.simd.features:
            yield weak(
                "simd-lowered",
                "SIMD",
                "INFINITY_SIMD asks for scalar kernels",
                "unset INFINITY_SIMD",
            )
        else:
            yield weak(
                "simd-missing",
                "SIMD",
                "no AVX2: updates on the CPU use scalar kernels",
                "use a CPU with AVX2; in a virtual machine, pass the host's CPU model on",
            )
    if (
        machine.system.architecture in _X86
        and "avx512f" not in cpu.simd.features
        and _computes_on_cpu(machine)
    ):
        yield weak(
            "half-precision-slow",
            "CPU",
            "no AVX-512: PyTorch multiplies matrices in bf16 and fp16 many times slower than in "
            "fp32 here",
            "where the CPU computes, train with precision='fp32'",
        )
    if cpu.quota_cores is not None and cpu.quota_cores < cpu.usable_cores:
        yield weak(
            "cpu-quota",
            "CPU quota",
            f"a control group grants the time of {cpu.quota_cores:g} cores, {cpu.usable_cores} are "
            "visible: threads for all of them will be throttled",
            "raise the quota (docker run --cpus, Kubernetes limits.cpu), or set OMP_NUM_THREADS to "
            "it",
        )


def _computes_on_cpu(machine: Machine) -> bool:
    """Tell whether modules compute on the CPU, as there is no GPU that PyTorch could use."""
    build = machine.packages.torch_build
    has_cuda = build is None or build.cuda is not None
    return not (machine.gpus.devices and machine.gpus.visible_count and has_cuda)


def _about_memory(machine: Machine) -> Iterator[Finding]:
    memory = machine.memory
    # Only where a group sets it: usable is the machine's total otherwise.
    if memory.cgroup is not None and memory.usable_bytes < memory.total_bytes * _SMALL_SHARE:
        yield weak(
            "memory-limit",
            "memory limit",
            f"a control group allows {format_bytes(memory.usable_bytes)} of the machine's "
            f"{format_bytes(memory.total_bytes)} ({memory.cgroup.directory})",
            "raise it where the machine is yours: docker run --memory, Kubernetes limits.memory, "
            "Slurm --mem",
        )
