"""What known machines can do, by their vendors' sheets and by what was published: each number with
its source.

Pure data, and its one use: the Rates of one rank while the other ranks of its node work too.
Measures nothing: calibration gives the rates of the machine at hand. Called by `infinity plan`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from types import MappingProxyType

from infinity_engine.errors import ConfigError
from infinity_engine.machine.catalogue import PCIE_BYTES_PER_S, DriveSheet, GpuSheet
from infinity_engine.plan.rates import DriveRates, Rates
from infinity_engine.sim.bound import HOST_UPDATE_BYTES
from infinity_engine.units import GB, TB, GiB

__all__ = [
    "DESKTOP_4090",
    "GH200",
    "GPU_AT_PEAK",
    "GPU_UPDATE_BYTES",
    "H100_ACHIEVED_FLOPS_PER_S",
    "H100_PEAK_FLOPS_PER_S",
    "H100_UTILISATION",
    "H200_NODE",
    "HOST_AT_PEAK",
    "MACHINES",
    "Drives",
    "GpuModel",
    "Host",
    "HostLink",
    "MachineModel",
    "machine",
    "sharing_memory",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuModel:
    """One GPU.

    Work is of 16 bits, dense, but for the rate in fp32; `achieved_flops_per_s` is what training of
    large models gets of the peak.
    """

    name: str
    memory_bytes: int
    peak_flops_per_s: float
    hbm_bytes_per_s: float
    update_params_per_s: float
    achieved_flops_per_s: float | None = None
    fp32_flops_per_s: float | None = None
    """A peak, without TF32."""

    def training_flops_per_s(self, *, fp32: bool) -> float | None:
        """Return what training gets of a peak where no achieved rate is published; None: not
        known.
        """
        if fp32:
            return None if self.fp32_flops_per_s is None else _OF_PEAK * self.fp32_flops_per_s
        return self.achieved_flops_per_s or _OF_PEAK * self.peak_flops_per_s


@dataclass(frozen=True, kw_only=True, slots=True)
class HostLink:
    """The link of each GPU to its host; `duplex` rates are those of each way while the other one is
    busy as well.

    `node_bytes_per_s` is what all links of a node carry at once, each way: None where each GPU has
    its whole link while the others use theirs.
    """

    h2d_bytes_per_s: float
    d2h_bytes_per_s: float
    duplex_h2d_bytes_per_s: float | None = None
    duplex_d2h_bytes_per_s: float | None = None
    node_bytes_per_s: float | None = None

    def share(self, ranks: int) -> tuple[float, float]:
        """Return what one of so many ranks gets, up and down, while all of them use their links."""
        most = self._most(ranks)
        return min(self.h2d_bytes_per_s, most), min(self.d2h_bytes_per_s, most)

    def duplex_share(self, ranks: int) -> tuple[float | None, float | None]:
        """Return the same while all of them use both ways, None where that is not known."""
        most = self._most(ranks)
        up, down = (
            None if rate is None else min(rate, most)
            for rate in (self.duplex_h2d_bytes_per_s, self.duplex_d2h_bytes_per_s)
        )
        return up, down

    def _most(self, ranks: int) -> float:
        return inf if self.node_bytes_per_s is None else self.node_bytes_per_s / ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """The host memory and CPUs of one node.

    `downscale_params_per_s` is fp32 turned into 16 bits, by one rank.
    """

    memory_bytes: int
    dram_bytes_per_s: float
    update_params_per_s: float
    downscale_params_per_s: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Drives:
    """The drives of one node together, at the rates that they hold for hours."""

    capacity_bytes: int
    read_bytes_per_s: float | None = None
    write_bytes_per_s: float | None = None
    mixed_bytes_per_s: float | None = None

    def divided(self, ranks: int) -> DriveRates:
        """Return what each of so many ranks has that use the drives at once."""
        return DriveRates(
            read_bytes_per_s=self.read_bytes_per_s,
            write_bytes_per_s=self.write_bytes_per_s,
            mixed_bytes_per_s=self.mixed_bytes_per_s,
        ).divided(ranks)


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineModel:
    """One node, or many that are alike.

    `gpu_gpu_bytes_per_s` is one GPU's, `network_bytes_per_s` one node's, one way.

    `sources` says of each number, by its dotted name, where it is from, and if it is of one rank
    or of one node.
    """

    name: str
    title: str
    gpus: int
    gpu: GpuModel
    link: HostLink
    host: Host
    sources: Mapping[str, str]
    drives: Drives | None = None
    gpu_gpu_bytes_per_s: float | None = None
    network_bytes_per_s: float | None = None

    def rates(self, ranks: int | None = None) -> Rates:
        """Return what one rank gets while so many ranks of a node work; by default one for each
        GPU.

        Raises:
            ConfigError: a node has no GPU for so many ranks.
        """
        count = self.check_ranks(self.gpus if ranks is None else ranks)
        h2d, d2h = self.link.share(count)
        duplex_h2d, duplex_d2h = self.link.duplex_share(count)
        return Rates(
            h2d_bytes_per_s=h2d,
            d2h_bytes_per_s=d2h,
            duplex_h2d_bytes_per_s=duplex_h2d,
            duplex_d2h_bytes_per_s=duplex_d2h,
            dram_bytes_per_s=self.host.dram_bytes_per_s / count,
            host_update_params_per_s=self.host.update_params_per_s / count,
            device_update_params_per_s=self.gpu.update_params_per_s,
            nvme={} if self.drives is None else {self.drives_name: self.drives.divided(count)},
        )

    def wire_bytes_per_s(self, ranks: int) -> float:
        """Return what one GPU sends the others while so many ranks do, one way.

        Without links between GPUs, bytes go down to the host and up again, through its memory.
        """
        if self.gpu_gpu_bytes_per_s is not None:
            return self.gpu_gpu_bytes_per_s
        through_memory = self.host.dram_bytes_per_s / (2 * ranks)
        return min(self.link.h2d_bytes_per_s, self.link.d2h_bytes_per_s, through_memory)

    def with_gpu(self, sheet: GpuSheet) -> MachineModel:
        """Return the same machine with such GPUs, each in a slot of its own generation."""
        gpu = GpuModel(
            name=sheet.name,
            memory_bytes=sheet.memory_bytes,
            peak_flops_per_s=sheet.flops_per_s,
            hbm_bytes_per_s=sheet.memory_bytes_per_s,
            update_params_per_s=sheet.memory_bytes_per_s / GPU_UPDATE_BYTES,
            fp32_flops_per_s=sheet.fp32_flops_per_s,
        )
        between = sheet.gpu_gpu_bytes_per_s
        changed = replace(self, gpu=gpu, gpu_gpu_bytes_per_s=between)
        return changed.with_link(PCIE_BYTES_PER_S[sheet.pcie])

    def with_link(self, bytes_per_s: float) -> MachineModel:
        """Return the same machine with links of this rate, each way."""
        link = HostLink(h2d_bytes_per_s=bytes_per_s, d2h_bytes_per_s=bytes_per_s)
        return replace(self, link=link)

    def with_drives(self, sheets: Sequence[DriveSheet]) -> MachineModel:
        """Return the same machine with these drives, which work at once."""
        drives = Drives(
            capacity_bytes=sum(sheet.capacity_bytes for sheet in sheets),
            read_bytes_per_s=sum(sheet.read_bytes_per_s for sheet in sheets),
            write_bytes_per_s=sum(sheet.write_bytes_per_s for sheet in sheets),
        )
        return replace(self, drives=drives)

    def check_ranks(self, ranks: int) -> int:
        """Return `ranks` if one node has a GPU for each of them."""
        if not 1 <= ranks <= self.gpus:
            expected = f"1 to {self.gpus}: a node of {self.title} has so many GPUs"
            raise ConfigError(field="ranks", value=ranks, expected=expected)
        return ranks

    @property
    def drive_capacity_bytes(self) -> int:
        """What the drives of a node hold, 0 where there are none."""
        return 0 if self.drives is None else self.drives.capacity_bytes

    @property
    def drives_name(self) -> str:
        """What the node's drives are called in Rates."""
        return f"{self.name} drives"


def sharing_memory(rates: Rates, *, links: bool, drives: bool) -> Rates:
    """Return the rates while updates of the host, copies and drives share the host's memory.

    Where all of them together ask for more than its rate, each gets the same part of its own.
    """
    update, dram = rates.host_update_params_per_s, rates.dram_bytes_per_s
    if update is None or dram is None:
        return rates
    ways = (rates.h2d_bytes_per_s, rates.d2h_bytes_per_s) if links else ()
    asked = HOST_UPDATE_BYTES * update + sum(way or 0 for way in ways)
    for drive in rates.nvme.values() if drives else ():
        both = drive.both_at_once()
        asked += (both.read_bytes_per_s or 0) + (both.write_bytes_per_s or 0)
    part = min(dram / asked, 1.0)
    found: dict[str, float | None] = {name: getattr(rates, name) for name in _OF_MEMORY}
    for name, rate in found.items():
        found[name] = None if rate is None else part * rate
    return replace(rates, **found)  # type: ignore[arg-type]


def machine(name: str) -> MachineModel:
    """Return the machine of that name.

    Raises:
        ConfigError: there is none.
    """
    if name not in MACHINES:
        raise ConfigError.unknown_name(field="machine", name=name, known=MACHINES)
    return MACHINES[name]


_OF_MEMORY = (
    "h2d_bytes_per_s",
    "d2h_bytes_per_s",
    "duplex_h2d_bytes_per_s",
    "duplex_d2h_bytes_per_s",
    "host_update_params_per_s",
)
_OF_PEAK = 0.4  # of its peak a GPU computes, where no achieved rate is published
_BILLION = 10**9  # updates
_TERA = 10**12  # operations
GPU_UPDATE_BYTES = 28
"""What Adam on a GPU reads and writes for a parameter: master, moments, the 16-bit gradient and
parameter.
"""

_DOS = "Deep Optimizer States"
GPU_AT_PEAK = (
    "computed, a peak: HBM rate over the 28 bytes that Adam touches for a parameter; one GPU's"
)
HOST_AT_PEAK = (
    "computed, a peak: DRAM rate over the 32 bytes that Adam touches for a parameter; the node's"
)
H100_UTILISATION = (
    "Megatron-LM's README: 41% model FLOP utilisation on H100 for its smallest models, of 989.4 "
    "TFLOP/s; one GPU's"
)
_H100_CLASS = "as measured on JLSE: its CPUs have as much DRAM bandwidth; the node's"

H100_PEAK_FLOPS_PER_S = 989.4 * _TERA
H100_ACHIEVED_FLOPS_PER_S = 0.41 * H100_PEAK_FLOPS_PER_S

H200_NODE = MachineModel(
    name="h200_node",
    title="DGX H200 (8 H200 of 141 GB)",
    gpus=8,
    gpu=GpuModel(
        name="H200 SXM 141 GB",
        memory_bytes=143_771 << 20,
        peak_flops_per_s=H100_PEAK_FLOPS_PER_S,
        achieved_flops_per_s=H100_ACHIEVED_FLOPS_PER_S,
        fp32_flops_per_s=67 * _TERA,
        hbm_bytes_per_s=4800 * GB,
        update_params_per_s=4800 * GB / GPU_UPDATE_BYTES,
    ),
    link=HostLink(h2d_bytes_per_s=55 * GB, d2h_bytes_per_s=55 * GB),
    host=Host(
        memory_bytes=2048 * GiB, dram_bytes_per_s=614.4 * GB, update_params_per_s=8 * _BILLION
    ),
    drives=Drives(
        capacity_bytes=30_720 * GB, read_bytes_per_s=8 * 6.5 * GB, write_bytes_per_s=8 * 3.5 * GB
    ),
    gpu_gpu_bytes_per_s=450 * GB,
    network_bytes_per_s=400 * GB,
    sources=MappingProxyType(
        {
            "gpus": "NVIDIA DGX H200 data sheet",
            "gpu.memory_bytes": "as its driver shows it; one GPU's",
            "gpu.peak_flops_per_s": "NVIDIA H200 data sheet, dense; one GPU's",
            "gpu.achieved_flops_per_s": f"{H100_UTILISATION}; the H200 computes as fast",
            "gpu.fp32_flops_per_s": "NVIDIA H200 data sheet; one GPU's",
            "gpu.hbm_bytes_per_s": "NVIDIA H200 data sheet; one GPU's",
            "gpu.update_params_per_s": GPU_AT_PEAK,
            "link.h2d_bytes_per_s": f"PCIe 5 x16, as {_DOS} measured it on JLSE; one GPU's",
            "link.d2h_bytes_per_s": f"PCIe 5 x16, as {_DOS} measured it on JLSE; one GPU's",
            "host.memory_bytes": "NVIDIA DGX H200 data sheet; the node's",
            "host.dram_bytes_per_s": "Intel Xeon Platinum 8480C: 2 x 8 channels of DDR5-4800, a "
            "peak; the node's",
            "host.update_params_per_s": _H100_CLASS,
            "drives.capacity_bytes": "NVIDIA DGX H200 data sheet: 8 of 3.84 TB; the node's",
            "drives.read_bytes_per_s": "assumed: 6.5 GB/s a drive, as PCIe 4 data-centre drives "
            "are sold; the node's",
            "drives.write_bytes_per_s": "assumed: 3.5 GB/s a drive, as PCIe 4 data-centre drives "
            "are sold; the node's",
            "gpu_gpu_bytes_per_s": "NVIDIA H200 data sheet: NVLink 900 GB/s both ways, so half; "
            "one GPU's",
            "network_bytes_per_s": "NVIDIA DGX H200 data sheet: 8 x 400 Gb/s for computing; the "
            "node's",
        }
    ),
)

DESKTOP_4090 = MachineModel(
    name="desktop_4090",
    title="desktop with one RTX 4090",
    gpus=1,
    gpu=GpuModel(
        name="RTX 4090 24 GB",
        memory_bytes=24 * GiB,
        peak_flops_per_s=165.2 * _TERA,
        fp32_flops_per_s=82.6 * _TERA,
        hbm_bytes_per_s=1008 * GB,
        update_params_per_s=1008 * GB / GPU_UPDATE_BYTES,
    ),
    link=HostLink(h2d_bytes_per_s=25 * GB, d2h_bytes_per_s=25 * GB),
    host=Host(
        memory_bytes=64 * GiB,
        dram_bytes_per_s=89.6 * GB,
        update_params_per_s=89.6 * GB / HOST_UPDATE_BYTES,
    ),
    drives=Drives(capacity_bytes=2 * TB, read_bytes_per_s=7.45 * GB, write_bytes_per_s=1.4 * GB),
    sources=MappingProxyType(
        {
            "gpus": "assumed",
            "gpu.memory_bytes": "NVIDIA RTX 4090 specifications; one GPU's",
            "gpu.peak_flops_per_s": "NVIDIA Ada white paper: BF16, sums in FP32, dense; one GPU's",
            "gpu.fp32_flops_per_s": "NVIDIA Ada white paper; one GPU's",
            "gpu.hbm_bytes_per_s": "NVIDIA RTX 4090 specifications; one GPU's",
            "gpu.update_params_per_s": GPU_AT_PEAK,
            "link.h2d_bytes_per_s": f"{_DOS}, section 4.1: achievable on PCIe 4; one GPU's",
            "link.d2h_bytes_per_s": f"{_DOS}, section 4.1: achievable on PCIe 4; one GPU's",
            "host.memory_bytes": "assumed; the node's",
            "host.dram_bytes_per_s": "two channels of DDR5-5600, a peak; the node's",
            "host.update_params_per_s": HOST_AT_PEAK,
            "drives.capacity_bytes": "assumed: one drive; the node's",
            "drives.read_bytes_per_s": "Samsung 990 PRO 2 TB data sheet, sequential; the node's",
            "drives.write_bytes_per_s": "assumed: 1.4 GB/s, what TLC drives of its class hold once "
            "their cache is full (the data sheet has 6.9 GB/s, in bursts); the node's",
        }
    ),
)

GH200 = MachineModel(
    name="gh200",
    title="GH200 Grace Hopper (96 GB HBM3, 480 GB LPDDR5X)",
    gpus=1,
    gpu=GpuModel(
        name="H100 of a GH200, 96 GB",
        memory_bytes=96 * GB,
        peak_flops_per_s=H100_PEAK_FLOPS_PER_S,
        achieved_flops_per_s=H100_ACHIEVED_FLOPS_PER_S,
        fp32_flops_per_s=67 * _TERA,
        hbm_bytes_per_s=4000 * GB,
        update_params_per_s=4000 * GB / GPU_UPDATE_BYTES,
    ),
    link=HostLink(
        h2d_bytes_per_s=450 * GB,
        d2h_bytes_per_s=450 * GB,
        duplex_h2d_bytes_per_s=450 * GB,
        duplex_d2h_bytes_per_s=450 * GB,
    ),
    host=Host(
        memory_bytes=480 * GB,
        dram_bytes_per_s=512 * GB,
        update_params_per_s=512 * GB / HOST_UPDATE_BYTES,
    ),
    sources=MappingProxyType(
        {
            "gpus": "NVIDIA GH200 data sheet",
            "gpu.memory_bytes": "NVIDIA GH200 data sheet; one GPU's",
            "gpu.peak_flops_per_s": "NVIDIA GH200 data sheet, dense; one GPU's",
            "gpu.achieved_flops_per_s": f"{H100_UTILISATION}; its GPU is an H100",
            "gpu.fp32_flops_per_s": "NVIDIA GH200 data sheet; one GPU's",
            "gpu.hbm_bytes_per_s": "NVIDIA GH200 data sheet; one GPU's",
            "gpu.update_params_per_s": GPU_AT_PEAK,
            "link.h2d_bytes_per_s": "NVIDIA GH200 data sheet: NVLink-C2C 900 GB/s both ways, so "
            "half; one GPU's",
            "link.d2h_bytes_per_s": "NVIDIA GH200 data sheet: NVLink-C2C 900 GB/s both ways, so "
            "half; one GPU's",
            "link.duplex_h2d_bytes_per_s": "NVIDIA GH200 data sheet: 900 GB/s is both ways "
            "together; one GPU's",
            "link.duplex_d2h_bytes_per_s": "NVIDIA GH200 data sheet: 900 GB/s is both ways "
            "together; one GPU's",
            "host.memory_bytes": "NVIDIA GH200 data sheet; the node's",
            "host.dram_bytes_per_s": "NVIDIA GH200 data sheet: up to 512 GB/s, a peak (less with "
            "480 GB); the node's",
            "host.update_params_per_s": HOST_AT_PEAK,
        }
    ),
)

MACHINES: Mapping[str, MachineModel] = MappingProxyType(
    {known.name: known for known in (H200_NODE, DESKTOP_4090, GH200)}
)
