"""A machine about which there is nothing to say: tests change one fact and look at what is said
then.
"""

from __future__ import annotations

from deepnvme.machine.probing import (
    AioProbe,
    Backend,
    DirectoryProbe,
    Drive,
    LiburingProbe,
    Memlock,
    SystemProbe,
    UringProbe,
)
from infinity_engine.machine.cpu import Cpu, Simd
from infinity_engine.machine.gpus import Gpu, Gpus, PcieLink
from infinity_engine.machine.memory import Memory
from infinity_engine.machine.packages import Packages, TorchBuild
from infinity_engine.machine.survey import Machine
from infinity_engine.machine.system import System
from infinity_engine.units import GiB, TiB


def good_machine() -> Machine:
    """Return a machine without a weak point."""
    return Machine(
        system=System(
            name="Linux",
            release="6.8.0",
            architecture="x86_64",
            pointer_bits=64,
            byte_order="little",
            python="3.12.1",
            native_problem=None,
        ),
        cpu=Cpu(
            model="Imaginary 9000",
            logical_cores=16,
            physical_cores=8,
            usable_cores=16,
            quota_cores=None,
            numa_nodes=1,
            simd=Simd(
                features=("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl"),
                level="avx512",
                problem=None,
            ),
        ),
        memory=Memory(
            total_bytes=64 * GiB, available_bytes=60 * GiB, usable_bytes=64 * GiB, cgroup=None
        ),
        gpus=good_gpus(good_gpu()),
        packages=Packages(
            torch="2.13.0+cu130",
            torch_build=TorchBuild(cuda="13.0"),
            cupy="13.6.0",
            numpy="2.4.6",
            liburing="2026.3.30",
            safetensors="0.8.0",
        ),
        storage=SystemProbe(
            kernel_release="6.8.0",
            uring=UringProbe(
                available=True,
                errno_name=None,
                refusal=None,
                features=0x3FFFF,
                defer_taskrun=True,
                opcodes=(4, 5, 22, 23),
            ),
            aio=AioProbe(available=True, errno_name=None),
            liburing=LiburingProbe(version="2026.3.30", usable=True, reason=None, fits_cpu=True),
            memlock=Memlock(soft_bytes=None, hard_bytes=None, exempt=False),
            huge_pages="madvise",
            backend=Backend.LIBURING,
        ),
        directories=(good_directory(),),
    )


def good_gpus(*devices: Gpu) -> Gpus:
    """Return these GPUs, all of them visible, under a driver that is new enough."""
    return Gpus(
        devices=devices,
        driver="570.86.15",
        cuda="13.0",
        reason=None,
        visible_devices=None,
        visible_count=len(devices),
    )


def no_gpus(reason: str) -> Gpus:
    """Return what is known where there is no GPU."""
    return Gpus(
        devices=(), driver=None, cuda=None, reason=reason, visible_devices=None, visible_count=0
    )


def good_gpu() -> Gpu:
    """Return a GPU with all its lanes."""
    return Gpu(
        name="Imaginary GPU",
        total_bytes=24 * GiB,
        free_bytes=23 * GiB,
        bus_id="00000000:3B:00.0",
        numa_node=0,
        link=PcieLink(generation=1, max_generation=4, width=16, max_width=16),
    )


def good_directory() -> DirectoryProbe:
    """Return a directory on an NVMe drive."""
    return DirectoryProbe(
        path="/mnt/a",
        plain_errno=None,
        direct_errno=None,
        memory_align=4,
        offset_align=512,
        file_system="xfs",
        in_memory=False,
        discard=False,
        mount_point="/mnt/a",
        source="/dev/nvme0n1p1",
        total_bytes=1 * TiB,
        free_bytes=400 * GiB,
        drive=Drive(name="nvme0n1", model="Imaginary SSD 990", rotational=False),
    )
