"""Scale on paper: what a step takes on 1 to 1,024 nodes, for 10 B to 100 T parameters, and which
resource binds.

Sums of work and bytes over the rates of a MachineModel, no simulation: docs/scale.md says what is
assumed. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from infinity_engine.errors import ConfigError
from infinity_engine.plan.tier import Tier
from infinity_engine.sim.hardware import MachineModel
from papers.charts import Chart, Series
from papers.machines import drive_bytes_per_s, wire_bytes_per_s
from papers.transformer import STATE_BYTES, Shape

__all__ = [
    "MODELS",
    "NODES",
    "Bottleneck",
    "Partitioning",
    "Point",
    "Scaling",
    "charts",
    "points",
    "tables",
]

MODELS: Mapping[str, Shape] = MappingProxyType(
    {
        "10 B": Shape(50, 4 * 1024),
        "100 B": Shape(80, 10 * 1024),
        "1 T": Shape(128, 25 * 1024),
        "10 T": Shape(195, 64 * 1024),
        "100 T": Shape(315, 160 * 1024),
    }
)
"""Shapes of ZeRO-Infinity's Table 1 and Figure 2a."""

NODES = (1, 4, 16, 64, 256, 1024)
_SEQUENCE = 1024
_WEAK_BATCH = 2
_GLOBAL_BATCH = 2048
_MICRO_BATCH = 4  # At most: a larger batch of a GPU is done in rounds.
_OPTIMIZER_BYTES = 16
_PARAMETER_BYTES = 2
# Parameters are loaded for forward, recomputation and backward; gradients are stored once.
_MOVED_BYTES = 4 * _PARAMETER_BYTES


_Rate = Callable[[int], float]


class Partitioning(Enum):
    """How a parameter that is not on the GPUs comes to all of them."""

    # Each rank fetches its part over its own link, then all gather.
    BANDWIDTH_CENTRIC = "bandwidth-centric"
    # The one rank that has it fetches it over its link and sends it to all.
    BROADCAST = "broadcast"


class Scaling(Enum):
    """What is held while nodes are added."""

    WEAK = "weak"  # 2 sequences of 1024 tokens for each GPU.
    # 2048 sequences for all GPUs together; where that is less than one for each, a GPU has a part.
    STRONG = "strong"


class Bottleneck(Enum):
    """What a step can be bound by."""

    COMPUTE = "compute"
    WIRE = "network"  # GPU to GPU: inside the node, or between nodes.
    LINK = "link"  # Between the GPUs and their hosts.
    DRIVES = "drives"
    HOST = "host update"
    DEVICE = "device update"


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """A model on so many nodes: a step does `micro_batch` sequences for each GPU, `rounds` times,
    and one update.

    `parameters` with their gradients, `states` and activation `checkpoints` are each in one tier.
    """

    machine: MachineModel
    shape: Shape
    nodes: int
    partitioning: Partitioning
    micro_batch: float
    rounds: float
    parameters: Tier
    states: Tier
    checkpoints: Tier

    def passes(self) -> Mapping[Bottleneck, float]:
        """Return the seconds that forward and backward take of each resource; they go on at the
        same time.
        """
        compute = self.shape.flops(self.micro_batch, _SEQUENCE) / _achieved(self.machine)
        moved = _MOVED_BYTES * self.shape.params
        kept = 2 * self.shape.checkpoint_bytes(self.micro_batch, _SEQUENCE)
        link, drives = 0.0, 0.0
        if self.parameters is not Tier.DEVICE:
            link += self._fetch(moved, self._link)
        if self.parameters is Tier.NVME:
            drives += self._fetch(moved, self._drive)
        if self.checkpoints is not Tier.DEVICE:
            link += kept / self._link(self.machine.gpus)
        if self.checkpoints is Tier.NVME:
            drives += kept / self._drive(self.machine.gpus)
        seconds = {
            Bottleneck.COMPUTE: compute,
            Bottleneck.WIRE: self._wire(moved),
            Bottleneck.LINK: link,
            Bottleneck.DRIVES: drives,
        }
        return {bottleneck: self.rounds * one for bottleneck, one in seconds.items()}

    def update(self) -> Mapping[Bottleneck, float]:
        """Return the seconds that the update takes of each resource; they go on at the same
        time.
        """
        machine, params = self.machine, self.shape.params
        own = params / (self.nodes * machine.gpus)
        if self.states is Tier.DEVICE:
            return {Bottleneck.DEVICE: own / machine.gpu.update_params_per_s}
        seconds = {Bottleneck.HOST: params / self.nodes / machine.host.update_params_per_s}
        if self.parameters is Tier.DEVICE:
            seconds[Bottleneck.LINK] = 2 * _PARAMETER_BYTES * own / self._link(machine.gpus)
        if self.states is Tier.NVME:
            read, write = drive_bytes_per_s(machine, machine.gpus)
            seconds[Bottleneck.DRIVES] = _OPTIMIZER_BYTES * own * (1 / read + 1 / write)
        return seconds

    @property
    def seconds(self) -> float:
        """A step: the passes with all resources at once, then the update in the same way."""
        return max(self.passes().values()) + max(self.update().values())

    @property
    def efficiency(self) -> float:
        """The part of a step that computing alone would take."""
        return self.passes()[Bottleneck.COMPUTE] / self.seconds

    @property
    def binding(self) -> Bottleneck:
        """What takes longest in the longer of the two: passes or update."""
        phase = max((self.passes(), self.update()), key=lambda parts: max(parts.values()))
        return max(phase, key=lambda bottleneck: phase[bottleneck])

    def _fetch(self, nbytes: float, rate: _Rate) -> float:
        """Return the seconds until every GPU can have `nbytes` of slow memory, at what ranks of a
        node get of it.
        """
        if self.partitioning is Partitioning.BROADCAST:
            return nbytes / rate(1)
        return nbytes / (self.nodes * self.machine.gpus) / rate(self.machine.gpus)

    def _link(self, ranks: int) -> float:
        return min(self.machine.link.share(ranks))

    def _drive(self, ranks: int) -> float:
        return min(drive_bytes_per_s(self.machine, ranks))

    def _wire(self, nbytes: float) -> float:
        gpus = self.machine.gpus
        inside = nbytes * (gpus - 1) / gpus / wire_bytes_per_s(self.machine, 1) if gpus > 1 else 0.0
        if self.nodes == 1:
            return inside
        between = (
            nbytes * (self.nodes - 1) / self.nodes / wire_bytes_per_s(self.machine, self.nodes)
        )
        return max(inside, between)


def points(
    machine: MachineModel, scaling: Scaling, partitioning: Partitioning
) -> Iterator[tuple[str, int, Point | None]]:
    """Yield each model on each number of nodes, None where nothing holds it."""
    for name, shape in MODELS.items():
        for nodes in NODES:
            yield name, nodes, _point(machine, shape, nodes, scaling, partitioning)


def tables(machine: MachineModel) -> str:
    """Return the efficiency of each point and what binds it, as tables of text."""
    found = []
    for scaling in Scaling:
        for partitioning in Partitioning:
            rows: dict[str, list[str]] = {name: [name] for name in MODELS}
            for name, _, point in points(machine, scaling, partitioning):
                rows[name].append(
                    "-" if point is None else f"{point.efficiency:.0%} {point.binding.value}"
                )
            head = ["", *(f"{nodes} node{'s' if nodes > 1 else ''}" for nodes in NODES)]
            found.append(
                f"{machine.title}, {scaling.value} scaling, "
                f"{partitioning.value}\n\n{_aligned([head, *rows.values()])}"
            )
    return "\n\n".join(found)


def charts(machine: MachineModel) -> tuple[Chart, ...]:
    """Return a chart of efficiency by nodes for each scaling; broadcast is dashed, where it
    differs.
    """
    return tuple(
        Chart(
            title=f"{machine.title}: {scaling.value} scaling",
            x="nodes",
            y="part of a step that is computing",
            log_x=True,
            series=tuple(_series(machine, scaling)),
        )
        for scaling in Scaling
    )


def _series(machine: MachineModel, scaling: Scaling) -> Iterator[Series]:
    lines: dict[Partitioning, dict[str, list[tuple[float, float]]]] = {}
    for partitioning in Partitioning:
        lines[partitioning] = {name: [] for name in MODELS}
        for name, nodes, point in points(machine, scaling, partitioning):
            if point is not None:
                lines[partitioning][name].append((nodes, point.efficiency))
    for name in MODELS:
        best, other = (tuple(lines[partitioning][name]) for partitioning in Partitioning)
        if best:
            yield Series(name, best)
        if other != best:
            yield Series(f"{name}, broadcast", other, dashed=True)


def _point(
    machine: MachineModel, shape: Shape, nodes: int, scaling: Scaling, partitioning: Partitioning
) -> Point | None:
    gpus = nodes * machine.gpus
    batch = _WEAK_BATCH if scaling is Scaling.WEAK else _GLOBAL_BATCH / gpus
    micro_batch = min(batch, _MICRO_BATCH)
    placed = _placed(machine, shape, nodes, micro_batch)
    if placed is None:
        return None
    parameters, states, checkpoints = placed
    return Point(
        machine=machine,
        shape=shape,
        nodes=nodes,
        partitioning=partitioning,
        micro_batch=micro_batch,
        rounds=batch / micro_batch,
        parameters=parameters,
        states=states,
        checkpoints=checkpoints,
    )


def _placed(
    machine: MachineModel, shape: Shape, nodes: int, micro_batch: float
) -> tuple[Tier, Tier, Tier] | None:
    """Return the tiers of parameters with gradients, of states and of checkpoints: in turn, the
    fastest with room.
    """
    room: dict[Tier, float] = {
        Tier.DEVICE: nodes * machine.gpus * machine.gpu.memory_bytes,
        Tier.HOST: nodes * machine.host.memory_bytes,
        Tier.NVME: nodes * machine.drive_capacity_bytes,
    }
    checkpoints = nodes * machine.gpus * shape.checkpoint_bytes(micro_batch, _SEQUENCE)
    chosen = []
    # What each pass needs comes first, then what one update needs; checkpoints may go where there
    # is room left.
    for nbytes in (
        (STATE_BYTES - _OPTIMIZER_BYTES) * shape.params,
        _OPTIMIZER_BYTES * shape.params,
        checkpoints,
    ):
        tier = next((tier for tier in Tier if room[tier] >= nbytes), None)
        if tier is None:
            return None
        room[tier] -= nbytes
        chosen.append(tier)
    return chosen[0], chosen[1], chosen[2]


def _achieved(machine: MachineModel) -> float:
    rate = machine.gpu.achieved_flops_per_s
    if rate is None:
        raise ConfigError(
            field=f"{machine.name}.gpu.achieved_flops_per_s",
            value=None,
            expected="a rate: a step needs it",
        )
    return rate


def _aligned(rows: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
