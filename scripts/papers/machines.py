"""The machines of the papers, each number with its source, and what their networks and drives give
one GPU.

Pure data in the planner's own form: `infinity_engine.sim.hardware` has the machines that a user may
plan for.
"""

from __future__ import annotations

from types import MappingProxyType

from infinity_engine.errors import ConfigError
from infinity_engine.sim.bound import HOST_UPDATE_BYTES
from infinity_engine.sim.hardware import (
    GPU_AT_PEAK,
    GPU_UPDATE_BYTES,
    H100_ACHIEVED_FLOPS_PER_S,
    H100_PEAK_FLOPS_PER_S,
    H100_UTILISATION,
    HOST_AT_PEAK,
    Drives,
    GpuModel,
    Host,
    HostLink,
    MachineModel,
)
from infinity_engine.units import GB, GiB

__all__ = ["DGX2", "JLSE_H100", "V100_NODE", "drive_bytes_per_s", "wire_bytes_per_s"]

_BILLION = 10**9
_TERA = 10**12
_ZI = "ZeRO-Infinity"
_DOS = "Deep Optimizer States"


def wire_bytes_per_s(machine: MachineModel, nodes: int) -> float:
    """Return what one GPU gets of the others' parts in a collective: inside its node, or over the
    network.

    A byte enters each node once, so all GPUs of a node get what its network carries.

    Raises:
        ConfigError: this machine has no such wire that is known.
    """
    rate = machine.gpu_gpu_bytes_per_s if nodes == 1 else machine.network_bytes_per_s
    if rate is None:
        name, known = (
            ("gpu_gpu_bytes_per_s", "1 GPU") if nodes == 1 else ("network_bytes_per_s", "1 node")
        )
        raise ConfigError(
            field=f"{machine.name}.{name}", value=None, expected=f"a rate, to use more than {known}"
        )
    return rate


def drive_bytes_per_s(machine: MachineModel, ranks: int) -> tuple[float, float]:
    """Return what one of so many ranks of a node reads and writes, over its own link at most.

    Raises:
        ConfigError: no rates of drives are known for this machine.
    """
    drives = machine.drives
    if drives is None or drives.read_bytes_per_s is None or drives.write_bytes_per_s is None:
        raise ConfigError(
            field=f"{machine.name}.drives", value=drives, expected="drives with their rates"
        )
    up, down = machine.link.h2d_bytes_per_s, machine.link.d2h_bytes_per_s
    return min(drives.read_bytes_per_s / ranks, up), min(drives.write_bytes_per_s / ranks, down)


DGX2 = MachineModel(
    name="dgx2",
    title="DGX-2 (16 V100 of 32 GB)",
    gpus=16,
    gpu=GpuModel(
        name="V100 SXM3 32 GB",
        memory_bytes=32 * GiB,
        peak_flops_per_s=125 * _TERA,
        achieved_flops_per_s=70 * _TERA,
        hbm_bytes_per_s=900 * GB,
        update_params_per_s=900 * GB / GPU_UPDATE_BYTES,
    ),
    link=HostLink(h2d_bytes_per_s=12 * GB, d2h_bytes_per_s=12 * GB, node_bytes_per_s=16 * 3 * GB),
    host=Host(
        memory_bytes=1536 * GiB,
        dram_bytes_per_s=256 * GB,
        update_params_per_s=256 * GB / HOST_UPDATE_BYTES,
    ),
    drives=Drives(
        capacity_bytes=28 * _TERA, read_bytes_per_s=16 * 1.6 * GB, write_bytes_per_s=16 * 1.6 * GB
    ),
    gpu_gpu_bytes_per_s=150 * GB,
    network_bytes_per_s=100 * GB,
    sources=MappingProxyType(
        {
            "gpus": f"{_ZI}, section 8.1",
            "gpu.memory_bytes": f"{_ZI}, section 8.1; one GPU's",
            "gpu.peak_flops_per_s": "NVIDIA V100 data sheet, tensor cores; one GPU's",
            "gpu.achieved_flops_per_s": f"{_ZI}, Table 3: achievable peak of 0.07 PFLOP/s; one "
            "GPU's",
            "gpu.hbm_bytes_per_s": f"{_ZI}, Figure 2b prints 600-900 GB/s, of which this is the "
            "peak; one GPU's",
            "gpu.update_params_per_s": GPU_AT_PEAK,
            "link.h2d_bytes_per_s": f"{_ZI}, Figure 2b: one GPU that reads alone",
            "link.d2h_bytes_per_s": f"{_ZI}, Figure 2b, taken to be as fast down as up: one GPU "
            "alone",
            "link.node_bytes_per_s": f"{_ZI}, Figure 2b: 3.0 GB/s for each of 16 GPUs; the node's",
            "host.memory_bytes": f"{_ZI}, Figure 2b: 1.5 TB; the node's",
            "host.dram_bytes_per_s": "Intel Xeon Platinum 8168: 2 x 6 channels of DDR4-2666, a "
            "peak; the node's",
            "host.update_params_per_s": HOST_AT_PEAK,
            "drives.capacity_bytes": f"{_ZI}, Figure 2b; the node's",
            "drives.read_bytes_per_s": f"{_ZI}, Figure 2b: 1.6 GB/s for each of 16 GPUs; the "
            "node's",
            "drives.write_bytes_per_s": f"{_ZI}, Figure 2b, which gives reads and writes one "
            "number; the node's",
            "gpu_gpu_bytes_per_s": f"{_ZI}, Figure 2b prints 150-300 GB/s inside a node; one GPU's",
            "network_bytes_per_s": f"{_ZI}, section 8.1: 800 Gb/s (Figure 2b: 60-100 GB/s); the "
            "node's",
        }
    ),
)

JLSE_H100 = MachineModel(
    name="jlse_h100",
    title="JLSE node (4 H100 of 80 GB)",
    gpus=4,
    gpu=GpuModel(
        name="H100 SXM5 80 GB",
        memory_bytes=80 * GiB,
        peak_flops_per_s=H100_PEAK_FLOPS_PER_S,
        achieved_flops_per_s=H100_ACHIEVED_FLOPS_PER_S,
        hbm_bytes_per_s=3350 * GB,
        update_params_per_s=25 * _BILLION,
    ),
    link=HostLink(
        h2d_bytes_per_s=55 * GB,
        d2h_bytes_per_s=55 * GB,
        duplex_h2d_bytes_per_s=55 * GB,
        duplex_d2h_bytes_per_s=55 * GB,
    ),
    host=Host(
        memory_bytes=512 * GiB,
        dram_bytes_per_s=614.4 * GB,
        update_params_per_s=8 * _BILLION,
        downscale_params_per_s=62 * GB / 4,
    ),
    drives=Drives(capacity_bytes=3 * _TERA),
    gpu_gpu_bytes_per_s=133 * GB,
    sources=MappingProxyType(
        {
            "gpus": f"{_DOS}, section 5.1",
            "gpu.memory_bytes": f"{_DOS}, section 5.1; one GPU's",
            "gpu.peak_flops_per_s": "NVIDIA H100 data sheet, SXM5, dense; one GPU's",
            "gpu.achieved_flops_per_s": H100_UTILISATION,
            "gpu.hbm_bytes_per_s": "NVIDIA H100 data sheet, SXM5; one GPU's",
            "gpu.update_params_per_s": f"{_DOS}, section 1: ~100 G/s for the node's four; one "
            "GPU's",
            "link.h2d_bytes_per_s": f"{_DOS}, section 5.1: ~55 GB/s, each GPU on a link of its "
            "own; one GPU's",
            "link.d2h_bytes_per_s": f"{_DOS}, section 5.1: ~55 GB/s, each GPU on a link of its "
            "own; one GPU's",
            "link.duplex_h2d_bytes_per_s": f"{_DOS}, section 4.1: full duplex, no rate of its own; "
            "one GPU's",
            "link.duplex_d2h_bytes_per_s": f"{_DOS}, section 4.1: full duplex, no rate of its own; "
            "one GPU's",
            "host.memory_bytes": f"{_DOS}, section 5.1; the node's",
            "host.dram_bytes_per_s": "Intel Xeon Platinum 8468: 2 x 8 channels of DDR5-4800, a "
            "peak; the node's",
            "host.update_params_per_s": f"{_DOS}, section 1: ~8 G/s; the node's",
            "host.downscale_params_per_s": f"{_DOS}, Table 1: 62 GB/s, 4 bytes for a parameter; "
            "one rank's",
            "drives.capacity_bytes": f"{_DOS}, section 5.1: 2 of 1.5 TB, no rates given; the "
            "node's",
            "gpu_gpu_bytes_per_s": f"{_DOS}, section 5.1: NVLink, one way; one GPU's",
        }
    ),
)

V100_NODE = MachineModel(
    name="v100_node",
    title="node with 4 V100 of 32 GB",
    gpus=4,
    gpu=GpuModel(
        name="V100 32 GB",
        memory_bytes=32 * GiB,
        peak_flops_per_s=125 * _TERA,
        hbm_bytes_per_s=900 * GB,
        update_params_per_s=35 * _BILLION,
    ),
    link=HostLink(h2d_bytes_per_s=12 * GB, d2h_bytes_per_s=12 * GB),
    host=Host(
        memory_bytes=192 * GiB,
        dram_bytes_per_s=256 * GB,
        update_params_per_s=2 * _BILLION,
        downscale_params_per_s=8.7 * _BILLION,
    ),
    sources=MappingProxyType(
        {
            "gpus": f"{_DOS}, section 5.4",
            "gpu.memory_bytes": f"{_DOS}, section 5.4; one GPU's",
            "gpu.peak_flops_per_s": "NVIDIA V100 data sheet, tensor cores; one GPU's",
            "gpu.hbm_bytes_per_s": "NVIDIA V100 data sheet, a peak; one GPU's",
            "gpu.update_params_per_s": f"{_DOS}, section 5.4: 35 G/s; read as one GPU's: its HBM "
            "allows 32",
            "link.h2d_bytes_per_s": f"{_DOS}, section 5.4: B of 3 G params/s of 4 bytes; one GPU's",
            "link.d2h_bytes_per_s": f"{_DOS}, section 5.4: B of 3 G params/s of 4 bytes; one GPU's",
            "host.memory_bytes": f"{_DOS}, section 5.4; the node's",
            "host.dram_bytes_per_s": "Intel Xeon Gold 6152: 2 x 6 channels of DDR4-2666, a peak; "
            "the node's",
            "host.update_params_per_s": f"{_DOS}, section 5.4: 2 G/s; read as the node's, as on "
            "JLSE",
            "host.downscale_params_per_s": f"{_DOS}, section 5.4: 8.7 G/s; read as one rank's, as "
            "on JLSE",
        }
    ),
)
