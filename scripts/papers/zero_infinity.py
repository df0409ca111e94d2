"""ZeRO-Infinity (2021): its memory and bandwidth tables by its formulas, its runs by its formulas
and machine rates.

Inputs are the shapes of its tables and the rates of its DGX-2 (hardware.DGX2). Seconds are given
with both ends: work and transfers one after the other, and each resource at the same time as the
others; the optimizer's step is never hidden. A node's network carries each parameter once for each
pass, whatever the model parallelism. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from infinity_engine.plan.tier import Tier
from infinity_engine.units import GB, GiB, TiB
from papers.charts import Chart, Series
from papers.comparison import Cell, Comparison, about, at_least, at_most, between, exactly, printed
from papers.machines import DGX2, drive_bytes_per_s, wire_bytes_per_s
from papers.transformer import STATE_BYTES, Shape

__all__ = ["Run", "Strategy", "efficiency", "experiments"]

_TERA = 10**12
_SEQUENCE = 1024
_PEAK = 70 * _TERA  # What the paper's bandwidth figures take a V100 to reach.
_PARAMETER_BYTES, _OPTIMIZER_BYTES = 2, 16
# Parameters are loaded for forward, recomputation and backward, gradients stored once.
_PASSES = 4
_K = 1024


def efficiency(intensity: float, bytes_per_s: float, peak: float = _PEAK) -> float:
    """Return the part of `peak` that work of this many FLOP for each byte reaches, without
    overlap.
    """
    return intensity * bytes_per_s / (intensity * bytes_per_s + peak)


def experiments() -> tuple[Comparison, ...]:
    """Return every figure and table that can be computed, beside what the paper prints."""
    return (
        _memory(),
        _aggregates(),
        _bandwidth(),
        _configurations(),
        _trillions(),
        _superlinear(),
        _one_node(),
        _ladder(),
        _tiling(),
        _gradient_offload(),
        _overlap(),
        _checkpoint_offload(),
        _future(),
    )


# --- memory and bandwidth -------------------------------------------------------------------------

# Of each row of Figure 2a: shape, then the cells as printed.
_MEMORY_ROWS = (
    (Shape(80, 10 * _K, 128), ("0.10", "1.83", "2.03", "0.05", "1.95", "1.63")),
    (Shape(100, 20 * _K, 160), ("0.50", "9.16", "3.91", "0.12", "6.25", "2.50")),
    (Shape(128, 25 * _K, 256), ("1.01", "18.31", "7.13", "0.20", "9.77", "3.56")),
    (Shape(195, 64 * _K, 512), ("10.05", "182.81", "24.38", "0.76", "64.00", "8.00")),
    (Shape(315, 160 * _K, 1024), ("101.47", "1845.70", "88.59", "3.08", "400.00", "18.00")),
)
_CHECKPOINT_BATCH, _WORKING_BATCH, _ALL_ACTIVATIONS_BATCH = 32, 4, 64


def _memory() -> Comparison:
    cells = []
    for shape, (params, states, activations, checkpoints, operator, working) in _MEMORY_ROWS:
        name = f"{params} T"
        all_activations = shape.layers * shape.working_bytes(_CHECKPOINT_BATCH, _SEQUENCE) / TiB
        at_double = shape.layers * shape.working_bytes(_ALL_ACTIVATIONS_BATCH, _SEQUENCE) / TiB
        cells += [
            Cell(
                what=f"{name}: parameters",
                published=printed(params),
                ours=shape.params / _TERA,
                unit="T",
            ),
            Cell(
                what=f"{name}: model states",
                published=printed(states),
                ours=shape.state_bytes / TiB,
                unit="TiB",
            ),
            Cell(
                what=f"{name}: activations, a node",
                published=printed(activations),
                ours=all_activations,
                unit="TiB",
                contradiction=f"at batch 32, that of the next column; at 64 it is {at_double:.2f}",
            ),
            Cell(
                what=f"{name}: checkpoints, a node",
                published=printed(checkpoints),
                ours=shape.checkpoint_bytes(_CHECKPOINT_BATCH, _SEQUENCE) / TiB,
                unit="TiB",
            ),
            Cell(
                what=f"{name}: working memory of an operator",
                published=printed(operator),
                ours=shape.operator_bytes / GiB,
                unit="GiB",
                contradiction="16 hd^2 gives the other rows; this one is 20 hd^2, "
                f"{20 * shape.hidden**2 / GiB:.2f}",
            ),
            Cell(
                what=f"{name}: working memory of activations",
                published=printed(working),
                ours=shape.working_bytes(_WORKING_BATCH, _SEQUENCE) / GiB,
                unit="GiB",
            ),
        ]
    return Comparison(
        names=("figure 2a",),
        title="Memory that training takes",
        cells=tuple(cells),
        remarks=(
            "Sequence 1024; the printed TB and GB are TiB and GiB. Batches: 32 for checkpoints, 4 "
            "for working memory.",
        ),
    )


def _aggregates() -> Comparison:
    rows = (
        (1, 1, "0.032", "1.5", "28.0", None, "12.0", "12.0"),
        (1, 16, "0.5", "1.5", "28.0", (150, 300), "3.0", "1.6"),
        (4, 64, "2.0", "6.0", "112.0", (60, 100), "3.0", "1.6"),
        (16, 256, "8.0", "24.0", "448.0", (60, 100), "3.0", "1.6"),
        (64, 1024, "32.0", "96.0", "1792.0", (60, 100), "3.0", "1.6"),
        (96, 1536, "48.0", "144.0", "2688.0", (60, 100), "3.0", "1.6"),
    )
    cells = []
    for nodes, gpus, gpu, cpu, nvme, wire, cpu_rate, nvme_rate in rows:
        ranks, name = min(gpus, DGX2.gpus), f"{gpus} GPU{'s' if gpus > 1 else ''}"
        ours = {
            "GPU memory": (
                printed(gpu),
                gpus * DGX2.gpu.memory_bytes / (1000 if gpus == 1 else 1024) / GiB,
                "TB",
            ),
            "CPU memory": (printed(cpu), nodes * DGX2.host.memory_bytes / TiB, "TB"),
            "NVMe": (printed(nvme), nodes * DGX2.drive_capacity_bytes / _TERA, "TB"),
            "CPU to a GPU": (printed(cpu_rate), DGX2.link.share(ranks)[0] / GB, "GB/s"),
            "NVMe to a GPU": (printed(nvme_rate), drive_bytes_per_s(DGX2, ranks)[0] / GB, "GB/s"),
        }
        for what, (published, value, unit) in ours.items():
            cells.append(
                Cell(what=f"{name}: {what}", published=published, ours=value, unit=unit, digits=3)
            )
        if wire is not None:
            rate = wire_bytes_per_s(DGX2, nodes)
            cells.append(
                Cell(
                    what=f"{name}: GPU to GPU",
                    published=between(*wire),
                    ours=rate / GB,
                    unit="GB/s",
                )
            )
    return Comparison(
        names=("figure 2b",),
        title="Memory and bandwidth of DGX-2 nodes together",
        cells=tuple(cells),
        remarks=(
            "Rates are inputs of hardware.DGX2; this table shows that it holds them as printed.",
        ),
    )


def _bandwidth() -> Comparison:
    shape = Shape(1, 8 * _K)

    def curve(name: str, intensity: float, most: float) -> Series:
        rates = [most * part / 20 for part in range(1, 21)]
        return Series(name, tuple((rate, efficiency(intensity, rate * GB)) for rate in rates))

    cells = (
        Cell(
            what="parameters and gradients, batch 1: rate for 50%",
            published=about(70),
            ours=_rate_for(0.5, _SEQUENCE) / GB,
            unit="GB/s",
            digits=1,
            note="intensity seq x bsz",
        ),
        Cell(
            what="optimizer states, batch 2: rate for 90%",
            published=about(1.5, "nearly 1.5"),
            ours=_rate_for(0.9, _SEQUENCE * 2 / 4) / _TERA,
            unit="TB/s",
            contradiction=(
                f"intensity seq bsz / 4 = 512 FLOP/B: 9 x 70 TFLOP/s / 512 = 1.23 TB/s; "
                f"1.5 TB/s gives {efficiency(512, 1.5 * _TERA):.1%}"
            ),
        ),
        Cell(
            what="checkpoints, hidden 2K: rate for 50%",
            published=between(1, 4),
            ours=_rate_for(0.5, 24 * 2 * _K) / GB,
            unit="GB/s",
            note="intensity 24 hd ci",
        ),
        *(
            Cell(
                what=f"checkpoints, hidden {hidden}K: part of peak at 1 GB/s",
                published=None,
                ours=efficiency(24 * hidden * _K, 1 * GB),
            )
            for hidden in (8, 32, 64)
        ),
    )
    batches = (1, 2, 4, 8, 16)
    return Comparison(
        names=("figure 3",),
        title="Efficiency by bandwidth, without overlap, at a peak of 70 TFLOP/s",
        cells=cells,
        remarks=(
            f"A parameter takes {shape.flops(1, _SEQUENCE) / shape.params:,.0f} FLOP at batch 1.",
            "The plots themselves were not at hand: published numbers are those of the text.",
        ),
        charts=(
            _efficiency_chart(
                "Parameters and gradients",
                [curve(f"batch {b}", _SEQUENCE * b, 200) for b in batches],
                "3a",
            ),
            _efficiency_chart(
                "Optimizer states",
                [curve(f"batch {b}", _SEQUENCE * b / 4, 3000) for b in batches],
                "3b",
            ),
            _efficiency_chart(
                "Activation checkpoints",
                [curve(f"hidden {h}K", 24 * h * _K, 8) for h in (2, 8, 16, 32, 64)],
                "3c",
            ),
        ),
    )


def _rate_for(part: float, intensity: float) -> float:
    return part / (1 - part) * _PEAK / intensity


def _efficiency_chart(title: str, series: list[Series], figure: str) -> Chart:
    return Chart(title=f"{figure}: {title}", x="GB/s", y="part of peak", series=tuple(series))


# --- runs -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A model on so many DGX-2, with the sequences of one iteration for each GPU and where its
    states are.
    """

    shape: Shape
    nodes: int
    batch: float
    parameters: Tier
    states: Tier

    @property
    def gpus(self) -> int:
        """All GPUs together."""
        return self.nodes * DGX2.gpus

    @property
    def flops(self) -> float:
        """The work of one GPU in an iteration."""
        return self.shape.flops(self.batch, _SEQUENCE)

    def seconds(self) -> Mapping[str, float]:
        """Return what each part of an iteration takes by itself."""
        params, gpus = self.shape.params, self.gpus
        moved = _PASSES * _PARAMETER_BYTES * params
        wire = wire_bytes_per_s(DGX2, self.nodes)
        link, nvme = DGX2.link.share(DGX2.gpus)[0], drive_bytes_per_s(DGX2, DGX2.gpus)[0]
        # Written in forward, read in backward. In one node with little to keep they stay on the
        # GPUs.
        checkpoints = (
            0.0
            if self.parameters is Tier.DEVICE
            else 2 * self.shape.checkpoint_bytes(self.batch, _SEQUENCE)
        )
        slow = {Tier.DEVICE: 0.0, Tier.HOST: moved / gpus / link, Tier.NVME: moved / gpus / nvme}
        on_drives = 2 * _OPTIMIZER_BYTES * params / gpus / nvme
        on_host = params / self.nodes / DGX2.host.update_params_per_s
        on_gpu = params / gpus / DGX2.gpu.update_params_per_s
        return {
            "compute": self.flops / _PEAK,
            "GPU to GPU": moved / wire,
            "slow memory": slow[self.parameters] + checkpoints / link,
            "states": on_drives if self.states is Tier.NVME else 0.0,
            "update": on_gpu if self.states is Tier.DEVICE else on_host,
        }

    def step_seconds(self) -> tuple[float, float]:
        """Return an iteration with everything at once that can be, and with one thing after the
        other.
        """
        parts = self.seconds()
        passes = max(parts["compute"], parts["GPU to GPU"], parts["slow memory"])
        return passes + max(parts["states"], parts["update"]), sum(parts.values())

    def tflops(self) -> tuple[float, float]:
        """Return the TFLOP/s of one GPU: one thing after the other, and all at once."""
        fast, slow = self.step_seconds()
        return self.flops / slow / _TERA, self.flops / fast / _TERA

    def fill(self) -> float:
        """Return how full the fullest tier is, of parameters with their gradients, and of optimizer
        states.
        """
        room = {
            Tier.DEVICE: self.gpus * DGX2.gpu.memory_bytes,
            Tier.HOST: self.nodes * DGX2.host.memory_bytes,
            Tier.NVME: self.nodes * DGX2.drive_capacity_bytes,
        }
        held = dict.fromkeys(room, 0)
        held[self.parameters] += (STATE_BYTES - _OPTIMIZER_BYTES) * self.shape.params
        held[self.states] += _OPTIMIZER_BYTES * self.shape.params
        return max(held[place] / room[place] for place in room)


# Table 1, by the parameters as printed.
_RUNS: Mapping[tuple[int, str], Run] = MappingProxyType(
    {
        (1, "10 B"): Run(
            shape=Shape(50, 4 * _K), nodes=1, batch=8, parameters=Tier.DEVICE, states=Tier.DEVICE
        ),
        (1, "50 B"): Run(
            shape=Shape(62, 8 * _K), nodes=1, batch=26, parameters=Tier.HOST, states=Tier.NVME
        ),
        (1, "100 B"): Run(
            shape=Shape(125, 8 * _K), nodes=1, batch=24, parameters=Tier.HOST, states=Tier.NVME
        ),
        (1, "0.5 T"): Run(
            shape=Shape(124, 18 * _K), nodes=1, batch=8, parameters=Tier.NVME, states=Tier.NVME
        ),
        (1, "1 T"): Run(
            shape=Shape(128, 25 * _K), nodes=1, batch=7, parameters=Tier.NVME, states=Tier.NVME
        ),
        (32, "0.5 T"): Run(
            shape=Shape(124, 18 * _K), nodes=32, batch=7, parameters=Tier.DEVICE, states=Tier.DEVICE
        ),
        (32, "1 T"): Run(
            shape=Shape(128, 25 * _K), nodes=32, batch=5, parameters=Tier.DEVICE, states=Tier.DEVICE
        ),
        (32, "5 T"): Run(
            shape=Shape(174, 48 * _K), nodes=32, batch=3, parameters=Tier.NVME, states=Tier.NVME
        ),
        (32, "10 T"): Run(
            shape=Shape(200, 64 * _K), nodes=32, batch=2, parameters=Tier.NVME, states=Tier.NVME
        ),
        (32, "20 T"): Run(
            shape=Shape(205, 88 * _K), nodes=32, batch=1.25, parameters=Tier.NVME, states=Tier.NVME
        ),
    }
)


def _configurations() -> Comparison:
    cells = []
    for (nodes, name), run in _RUNS.items():
        number, unit = name.split()
        ours = run.shape.params / (10**9 if unit == "B" else _TERA)
        what = (
            f"{nodes} node{'s' if nodes > 1 else ''}, {run.shape.layers} x "
            f"{run.shape.hidden // _K}K"
        )
        cells += [
            Cell(what=f"{what}: parameters", published=about(float(number)), ours=ours, unit=unit),
            Cell(
                what=f"{what}: part of the fullest tier",
                published=at_most(1, "fits"),
                ours=run.fill(),
                note=f"parameters and gradients on {run.parameters.value}, optimizer states on "
                f"{run.states.value}",
                contradiction=(
                    f"20 B for a parameter are {run.shape.state_bytes / _TERA:.1f} TB, the GPUs "
                    "have "
                    f"{run.gpus * DGX2.gpu.memory_bytes / _TERA:.1f}; the abstract needs 800 GPUs. "
                    "At 16 B it fits"
                ),
            ),
        ]
    return Comparison(
        names=("table 1",),
        title="Configurations, and whether they fit where they are put",
        cells=tuple(cells),
    )


def _tflops_cell(
    run: Run, what: str, published: float | None, text: str = "", *, bound: bool = False
) -> Cell:
    slow, fast = run.tflops()
    claim = (
        None
        if published is None
        else at_least(published, text)
        if bound
        else about(published, text)
    )
    parts = ", ".join(f"{name} {seconds:,.0f} s" for name, seconds in run.seconds().items())
    return Cell(
        what=what,
        published=claim,
        ours=slow,
        upper=fast,
        unit="TFLOP/s a GPU",
        digits=1,
        note=parts,
    )


def _trillions() -> Comparison:
    published = {"0.5 T": None, "1 T": None, "5 T": 49.0, "10 T": None, "20 T": 34.0}
    runs = {name: _RUNS[32, name] for name in published}
    cells = tuple(
        _tflops_cell(runs[name], f"{name} on 512 GPUs", value) for name, value in published.items()
    )
    points = {name: (run.shape.params / _TERA, run.tflops()) for name, run in runs.items()}
    return Comparison(
        names=("figure 5a",),
        title="Throughput on 512 GPUs",
        cells=cells,
        remarks=(
            "Given for 20 T: a batch too small, as checkpoints fill CPU memory. By these rates the "
            "network binds too: "
            "the parts are listed.",
            "The runs with NVMe do 3 and 1.25 sequences a GPU with model parallelism; both ends "
            "assume that all tensor "
            "slicing is free, so the lower end is not a bound.",
        ),
        charts=(
            Chart(
                title="5a: TFLOP/s of a GPU, 512 GPUs",
                x="parameters, T",
                y="TFLOP/s",
                log_x=True,
                series=(
                    Series(
                        "one after the other", tuple((x, slow) for x, (slow, _) in points.values())
                    ),
                    Series("all at once", tuple((x, fast) for x, (_, fast) in points.values())),
                    Series(
                        "published",
                        (
                            (runs["5 T"].shape.params / _TERA, 49.0),
                            (runs["20 T"].shape.params / _TERA, 34.0),
                        ),
                        dashed=True,
                    ),
                ),
            ),
        ),
    )


def _superlinear() -> Comparison:
    def on(nodes: int) -> Run:
        return Run(
            shape=Shape(128, 25 * _K), nodes=nodes, batch=5, parameters=Tier.NVME, states=Tier.NVME
        )

    scaled = (4, 8, 16, 32)
    first, last = on(4).tflops(), on(32).tflops()
    pflops = on(32).gpus * last[0] / 1000, on(32).gpus * last[1] / 1000
    gain = sorted((last[0] / first[0], last[1] / first[1]))
    ends = {"one after the other": 0, "all at once": 1}
    return Comparison(
        names=("figure 5b",),
        title="1 T on 64 to 512 GPUs, the batch of a GPU held",
        cells=(
            _tflops_cell(on(4), "64 GPUs", 44),
            *(_tflops_cell(on(nodes), f"{nodes * DGX2.gpus} GPUs", None) for nodes in scaled[1:-1]),
            Cell(
                what="512 GPUs together",
                published=at_least(25, "over 25"),
                ours=pflops[0],
                upper=pflops[1],
                unit="PFLOP/s",
                digits=1,
            ),
            Cell(
                what="a GPU of 512 against one of 64",
                published=at_least(1, "over 1"),
                ours=gain[0],
                upper=gain[1],
                note="each GPU has fewer states to read and write; the printed rates are 25 / (8 x "
                "2.8) = 1.1",
            ),
        ),
        remarks=(
            "The batch is taken to be the 5 of Table 1's 1 T run; parameters and states on NVMe.",
        ),
        charts=(
            Chart(
                title="5b: TFLOP/s of a GPU, 1 T",
                x="GPUs",
                y="TFLOP/s",
                series=tuple(
                    Series(
                        name, tuple((on(nodes).gpus, on(nodes).tflops()[end]) for nodes in scaled)
                    )
                    for name, end in ends.items()
                ),
            ),
        ),
    )


def _one_node() -> Comparison:
    names = ("10 B", "50 B", "100 B", "0.5 T", "1 T")
    runs = {name: _RUNS[1, name] for name in names}
    to_100_b = {"10 B", "50 B", "100 B"}
    return Comparison(
        names=("figure 5c",),
        title="Throughput on one DGX-2, without model parallelism",
        cells=tuple(
            _tflops_cell(
                run, f"{name} on 16 GPUs", 40 if name in to_100_b else None, "over 40", bound=True
            )
            for name, run in runs.items()
        ),
        remarks=("3D parallelism ends at 20 B on this node: see figure 6a.",),
    )


# --- what fits ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Strategy:
    """Table 2: what keeps which bytes of a parameter where.

    `gpu_whole` bytes are on each GPU, `gpu_part` bytes are divided among all; `host` bytes may be
    on CPUs, and where `spills` on GPUs as well; `nvme` bytes on drives.
    """

    name: str
    gpu_whole: int = 0
    gpu_part: int = 0
    host: int = 0
    nvme: int = 0

    def fits(self, shape: Shape) -> bool:
        """Tell whether one DGX-2 holds a model with one sequence for each GPU."""
        gpu, host, nvme = self.bytes(shape)
        room = DGX2.gpu.memory_bytes - gpu
        if room < 0 or nvme > DGX2.drive_capacity_bytes:
            return False
        # What the paper has on [CPU, GPU] may lie in what the GPUs have left.
        return host <= DGX2.host.memory_bytes + (
            DGX2.gpus * room if self.gpu_part + self.gpu_whole == 0 else 0
        )

    def bytes(self, shape: Shape) -> tuple[float, float, float]:
        """Return the bytes of each GPU, of the host and of the drives."""
        activations = shape.checkpoint_bytes(1, _SEQUENCE) + shape.working_bytes(1, _SEQUENCE)
        gpu = shape.params * (self.gpu_whole + self.gpu_part / DGX2.gpus) + activations
        return gpu, shape.params * self.host, shape.params * self.nvme


_STRATEGIES = (
    (Strategy(name="data parallel", gpu_whole=STATE_BYTES), "1.4B"),
    (Strategy(name="ZeRO-2", gpu_whole=2, gpu_part=STATE_BYTES - 2), "10B"),
    (Strategy(name="ZeRO-Offload", gpu_whole=2, host=STATE_BYTES - 2), "13B"),
    (Strategy(name="3D parallelism", gpu_part=STATE_BYTES), "20B"),
    (Strategy(name="ZeRO-3", gpu_part=STATE_BYTES), "20B"),
    (Strategy(name="ZeRO-Inf-CPU", host=STATE_BYTES), "70B"),
    (Strategy(name="ZeRO-Inf-NVMe", nvme=STATE_BYTES), "1000B"),
)
# Table 4, and one more rung that nothing can hold.
_RUNGS: Mapping[str, Shape] = MappingProxyType(
    {
        "1.4B": Shape(40, 1536, 16),
        "10B": Shape(50, 4096, 16),
        "13B": Shape(64, 4096, 16),
        "20B": Shape(98, 4096, 32),
        "70B": Shape(125, 8192, 32),
        "1000B": Shape(128, 25600, 256),
        "10000B": Shape(195, 64 * _K, 512),
    }
)


def _ladder() -> Comparison:
    cells = []
    rungs = list(_RUNGS)
    for strategy, published in _STRATEGIES:
        largest = max((rung for rung in rungs if strategy.fits(_RUNGS[rung])), key=rungs.index)
        following = rungs[rungs.index(largest) + 1]
        here, there = (_listed(strategy.bytes(_RUNGS[rung])) for rung in (largest, following))
        cells.append(
            Cell(
                what=f"{strategy.name}: largest rung of Table 4 that fits",
                published=exactly(
                    float(published.removesuffix("B")),
                    "10 (by Table 4)" if strategy.name == "ZeRO-2" else "",
                ),
                ours=float(largest.removesuffix("B")),
                unit="B",
                digits=1,
                note=f"{here}; {following} needs {there}",
            )
        )
    most = (DGX2.host.memory_bytes + DGX2.gpus * DGX2.gpu.memory_bytes) / STATE_BYTES / 10**9
    alone = DGX2.host.memory_bytes / STATE_BYTES / 10**9
    cells.append(
        Cell(
            what="ZeRO-Inf-CPU: most parameters by bytes",
            published=about(100, "almost 100"),
            ours=alone,
            upper=most,
            unit="B",
            digits=0,
            note="CPU memory alone, and with that of the GPUs",
        )
    )
    return Comparison(
        names=("figure 6a", "table 2", "table 4"),
        title="Model scale on one DGX-2: what fits",
        cells=tuple(cells),
        remarks=(
            "20 B for a parameter; one sequence for each GPU; a GPU has 32 GiB, the host 1.5 TiB, "
            "the drives 28 TB.",
            f"The row called 70B is 125 x 8192: {_RUNGS['70B'].params / 1e9:.1f} B parameters, the "
            "'almost 100 B'.",
            "The text has 13 B for ZeRO-2 with offload; Table 4's row of 10B, which no other has, "
            "is ZeRO-2's alone.",
        ),
    )


def _listed(amounts: tuple[float, float, float]) -> str:
    named = zip(amounts, ("a GPU", "CPU", "NVMe"), strict=True)
    return ", ".join(f"{amount / GB:,.1f} GB {where}" for amount, where in named if amount)


def _tiling() -> Comparison:
    chunk = 2 * GiB

    def largest(tiles: int) -> int:
        sizes = (8, 16, 32, 64)
        return max(
            (size for size in sizes if Shape(1, size * _K).operator_bytes / tiles <= chunk),
            default=0,
        )

    def needed(size: int, tiles: int) -> float:
        return Shape(1, size * _K).operator_bytes / tiles / GiB

    same = (
        f"16 hd^2 / tiles: 16K in 1 tile {needed(16, 1):.0f} GiB, 64K in 16 tiles "
        f"{needed(64, 16):.0f} GiB"
    )
    return Comparison(
        names=("figure 6b", "table 5"),
        title="Largest hidden size where memory is in chunks of 2 GB",
        cells=(
            Cell(
                what="without tiling", published=printed("8"), ours=largest(1), unit="K", digits=0
            ),
            Cell(
                what="in 16 tiles",
                published=printed("64"),
                ours=largest(16),
                unit="K",
                digits=0,
                contradiction=f"{same}: the same bytes, so either both fit in a chunk or neither "
                "does",
            ),
        ),
        remarks=(
            "An operator's bytes grow with hd^2: 16 tiles make 4 times the hidden size, the paper "
            "has 8 times.",
        ),
    )


# --- what features give ---------------------------------------------------------------------------

_EIGHT_B = Shape(10, 8 * _K, 16)


def _gradient_offload() -> Comparison:
    def times(gpus: int) -> tuple[float, float, float]:
        """Return the work of a backward, its gradients over one link, and over all."""
        work = 3 / 4 * _EIGHT_B.flops(2, _SEQUENCE) / _PEAK
        gradients = _PARAMETER_BYTES * _EIGHT_B.params
        alone = gradients / DGX2.link.share(1)[1]
        return work, alone, gradients / gpus / DGX2.link.share(min(gpus, DGX2.gpus))[1]

    cells, points = [], []
    for gpus in (4, 16, 32, 64):
        work, alone, spread = times(gpus)
        slow, fast = (work + alone) / (work + spread), (work + alone) / max(work, spread)
        points.append((float(gpus), slow))
        cells.append(
            Cell(
                what=f"{gpus} GPUs: backward of ZeRO-Offload over ZeRO-Infinity's",
                published=about(2, "nearly 2") if gpus == 64 else None,
                ours=slow,
                upper=fast,
                unit="x",
                note=f"work {work:.2f} s, gradients {alone:.2f} s over one link, {spread:.2f} s "
                "over all",
            )
        )
    return Comparison(
        names=("figure 6c", "table 6"),
        title="Backward against ZeRO-Offload, 8 B, batch 2",
        cells=tuple(cells),
        remarks=(
            "Gradients leave over one GPU's link, or each rank's part over its own; collectives "
            "are alike in both.",
        ),
        charts=(
            Chart(
                title="6c: backward, times faster",
                x="GPUs",
                y="x",
                series=(Series("not overlapped", tuple(points)),),
            ),
        ),
    )


def _overlap() -> Comparison:
    wire = wire_bytes_per_s(DGX2, 4)
    moved = _PASSES * _PARAMETER_BYTES * _EIGHT_B.params / wire

    def gain(batch: int) -> float:
        work = _EIGHT_B.flops(batch, _SEQUENCE) / _PEAK
        return (work + moved) / max(work, moved)

    batches = (2, 4, 8, 10, 14, 16)
    return Comparison(
        names=("figure 6d", "table 7"),
        title="What prefetching and overlap give, 8 B on 64 GPUs",
        cells=(
            *(
                Cell(what=f"batch {b}: times faster", published=None, ours=gain(b), unit="x")
                for b in batches
            ),
            Cell(
                what="gain at batch 2 over that at 16",
                published=at_least(1, "over 1"),
                ours=(gain(2) - 1) / (gain(16) - 1),
                unit="x",
                note="the paper: crucial at small batches, diminishing at large ones",
            ),
        ),
        charts=(
            Chart(
                title="6d: overlap, times faster",
                x="batch of a GPU",
                y="x",
                series=(Series("ours", tuple((b, gain(b)) for b in batches)),),
            ),
        ),
    )


def _checkpoint_offload() -> Comparison:
    link = DGX2.link.share(DGX2.gpus)[0]
    sizes = (2, 8, 16, 32, 64)

    def slowdown(hidden: int) -> float:
        return 1 / efficiency(24 * hidden * _K, link)

    published = {
        2: about(1.2, "up to 1.2"),
        32: about(1.0, "minimal, 1.0"),
        64: about(1.0, "minimal, 1.0"),
    }
    return Comparison(
        names=("figure 6e", "table 8"),
        title="What offloading checkpoints to the CPU costs",
        cells=tuple(
            Cell(
                what=f"hidden {size}K: times slower",
                published=published.get(size),
                ours=1.0,
                upper=slowdown(size),
                unit="x",
                note=f"fully overlapped, and not at all, at {link / GB:g} GB/s a GPU",
            )
            for size in sizes
        ),
        charts=(
            Chart(
                title="6e: times slower, without overlap",
                x="hidden, K",
                y="x",
                series=(
                    Series("not overlapped", tuple((size, slowdown(size)) for size in sizes)),
                    Series("published", ((2, 1.2), (32, 1.0), (64, 1.0)), dashed=True),
                ),
            ),
        ),
    )


def _future() -> Comparison:
    devices, cells = 512, []
    rows = (
        ("V100", 1, "3.0", "1.5", "70.0"),
        ("10x", 10, "30.0", "15.0", "700.0"),
        ("100x", 100, "300.0", "150.0", "7000.0"),
    )
    for name, times, slow, together, wire in rows:
        each = DGX2.link.share(DGX2.gpus)[0] * times
        cells += [
            Cell(
                what=f"{name}: slow memory, a device",
                published=printed(slow),
                ours=each / GB,
                unit="GB/s",
                digits=1,
            ),
            Cell(
                what=f"{name}: slow memory together",
                published=printed(together),
                ours=devices * each / _TERA,
                unit="TB/s",
                digits=1,
                contradiction=f"512 x {slow} GB/s is {0.512 * float(slow):.2f} TB/s; printed is a "
                "multiple of 1.5",
            ),
            Cell(
                what=f"{name}: GPU to GPU",
                published=about(float(wire), wire),
                ours=_rate_for(0.5, _SEQUENCE) * times / GB,
                unit="GB/s",
                digits=1,
                note="50% at batch 1, without overlap",
            ),
        ]
    needed = _rate_for(0.9, _SEQUENCE * 2 / 4) / _TERA
    return Comparison(
        names=("table 3",),
        title="Bandwidth that 10 and 100 times faster devices would need",
        cells=tuple(cells),
        remarks=(
            "What is needed grows as the peak does. 1.5 TB/s for 512 devices is what Figure 3b has "
            "for 90% at batch 2; "
            f"its formula says {needed:.2f} TB/s.",
        ),
    )
