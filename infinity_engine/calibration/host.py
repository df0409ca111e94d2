"""How fast this host updates and sweeps its memory, by number of threads, with training's kernels.

Holds the memory that is measured on until it is forgotten. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import numpy as np

from deepnvme import Pool
from deepnvme.memory.checksum import CHECKSUM_BYTES
from infinity_engine import _native
from infinity_engine.calibration.effort import MeasuringTime, repeated
from infinity_engine.errors import ConfigError
from infinity_engine.optim import (
    NORM_BLOCK,
    SGD,
    Adagrad,
    Adam,
    AdamW,
    FloatFormat,
    Formats,
    HostKernels,
    Lion,
    Rule,
    Segment,
    Subgroup,
    SubgroupState,
    SummedMemory,
    Update,
    UpdateThreads,
    Values,
    update_records,
)
from infinity_engine.plan import Figure, Unit
from infinity_engine.units import align_down

__all__ = [
    "FORMATS",
    "RULES",
    "STATE_BYTES",
    "SWEEP_BYTES",
    "HostPoint",
    "HostUpdates",
    "Kernels",
    "name_of",
    "steps_of",
    "updates_state",
]

_LR = 1e-6  # so small that values stay ordinary numbers however often they are updated
RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "adamw": AdamW(lr=_LR),
        "adam": Adam(lr=_LR),
        "lion": Lion(lr=_LR),
        "adagrad": Adagrad(lr=_LR),
        "sgd": SGD(lr=_LR, momentum=0.9),
    }
)
FORMATS = Formats(parameter=FloatFormat.BF16)
STATE_BYTES = 16
"""Of memory for each parameter: gradient and parameter of 16 bits, fp32 master, two fp32 states."""
SWEEP_BYTES = 28
"""Bytes that a sweep reads (16) and writes (12) for each parameter, in the order of AdamW."""


class Kernels(Protocol):
    """The kernels of the host or of a GPU."""

    def update(self, update: Update) -> None:
        """Carry out an update, or start it."""


@dataclass(frozen=True, slots=True)
class HostPoint:
    """What is measured: one optimizer's updates, or the bare sweep (None), by so many threads."""

    optimizer: str | None
    threads: int


class HostUpdates:
    """One state in `pool`'s memory, within `nbytes`, and a pool for each number of threads."""

    def __init__(self, pool: Pool, nbytes: int, threads: Iterable[int]) -> None:
        # At least one block, whatever `nbytes` is.
        self.numel = max(align_down(nbytes // STATE_BYTES, NORM_BLOCK), NORM_BLOCK)
        self.counts = tuple(threads)
        narrow = [pool.empty(self.numel, np.uint16) for _ in range(2)]
        wide = [pool.empty(self.numel, np.float32) for _ in range(3)]
        for values in narrow:
            # A bf16 number is the upper half of an fp32 one.
            values.fill(np.float32(0.01).view(np.uint32) >> 16)
        for values, value in zip(wide, (0.5, 0.01, 1e-4), strict=True):
            values.fill(value)
        self._gradient, self._parameter = (
            Values.of(values, format=FloatFormat.BF16) for values in narrow
        )
        master, first, second = map(Values.of, wide)
        self._kernels = {count: HostKernels(UpdateThreads.anywhere(count)) for count in self.counts}
        self._steps = {
            name: steps_of(
                # Rules with one state use the first: all rules share one memory.
                rule,
                updates_state(self.numel, master, (first, second)[: len(rule.states)]),
                self._gradient,
                self._parameter,
            )
            for name, rule in RULES.items()
        }
        self._held = master, first, second
        self._smallest = steps_of(
            RULES["adamw"],
            updates_state(
                NORM_BLOCK,
                Values.of(wide[0][:NORM_BLOCK]),
                tuple(Values.of(values[:NORM_BLOCK]) for values in wide[1:]),
            ),
            *(Values.of(values[:NORM_BLOCK], format=FloatFormat.BF16) for values in narrow),
        )
        self._swept = update_records(
            updates_state(self.numel, master, (first, second)),
            rules=[RULES["adamw"]],
            gradients=[self._gradient],
            parameters=[self._parameter],
        )

    def points(self, optimizers: Iterable[str | None]) -> list[HostPoint]:
        """Return a point for each of these with each number of threads."""
        return [HostPoint(optimizer, count) for optimizer in optimizers for count in self.counts]

    def measure(self, part: MeasuringTime) -> dict[HostPoint, Figure]:
        """Measure the sweep and every optimizer, with every number of threads."""
        found = part.in_turn(self.points([None, *RULES]), self.rate)
        return {
            point: Figure.of(samples, Unit.BYTES if point.optimizer is None else Unit.PARAMETERS)
            for point, samples in found.items()
        }

    def measure_start(self, part: MeasuringTime) -> Figure:
        """Measure what an update by all threads costs, however small it is: one of one block."""
        kernels = self._kernels[max(self.counts)]
        [samples] = part.in_turn(
            ["start"], lambda _, seconds: repeated(lambda: self._smallest(kernels), 1, seconds)
        ).values()
        return Figure.of([1 / sample for sample in samples], Unit.SECONDS)

    def rate(self, point: HostPoint, seconds: float) -> float:
        """Measure a point for so long: parameters per second, or bytes per second of a sweep."""
        kernels = self._kernels[point.threads]
        if point.optimizer is None:
            # The update's own records: the same memory, in the same order.
            records, threads, home = self._swept.records, kernels.threads.native, kernels.home
            return repeated(
                lambda: _native.sweep(records, threads, home), self.numel * SWEEP_BYTES, seconds
            )
        step = self._steps[point.optimizer]
        return repeated(lambda: step(kernels), self.numel, seconds)

    def measure_summing(self, part: MeasuringTime) -> dict[HostPoint, Figure]:
        """Measure the part of its rate that each optimizer keeps with the checksums of states."""

        def part_left(point: HostPoint, seconds: float) -> float:
            before = self.rate(point, seconds)
            summing = self.summing_rate(point, seconds)
            return 2 * summing / (before + self.rate(point, seconds))

        found = part.in_turn(self.points(RULES), part_left, samples=3)
        return {point: Figure.of(parts, Unit.PART) for point, parts in found.items()}

    def summing_rate(self, point: HostPoint, seconds: float) -> float:
        """Measure updates as they are of states on drives: with the checksums of what was read and
        of what is to be written.
        """
        assert point.optimizer is not None, "a sweep has no states"
        step = self._steps[point.optimizer]
        kernels = _SummingKernels(
            self._kernels[point.threads],
            [
                SummedMemory(values.address, 4 * self.numel, CHECKSUM_BYTES, with_before=True)
                for values in self._held[: 1 + len(RULES[point.optimizer].states)]
            ],
        )
        return repeated(lambda: step(kernels), self.numel, seconds)


@dataclass(frozen=True, slots=True)
class _SummingKernels:
    """Kernels of the host whose updates make the checksums of these memories as well."""

    kernels: HostKernels
    memories: Sequence[SummedMemory]

    def update(self, update: Update) -> None:
        """Carry out an update."""
        self.kernels.update_and_sum(update, self.memories)


def name_of(rule: Rule) -> str:
    """Return what a calibration calls an optimizer.

    Raises:
        ConfigError: it measures no such one.
    """
    for name, known in RULES.items():
        if type(known) is type(rule):
            return name
    raise ConfigError.unknown_name(field="optimizer", name=type(rule).__name__, known=RULES)


def updates_state(numel: int, master: Values, states: tuple[Values, ...]) -> SubgroupState:
    """Return a state of one segment."""
    segment = Segment(parameter=0, first_element=0, numel=numel, offset=0)
    return SubgroupState(subgroup=Subgroup(0, (segment,), FORMATS), master=master, states=states)


def steps_of(
    rule: Rule, state: SubgroupState, gradient: Values, parameter: Values
) -> Callable[[Kernels], None]:
    """Return what makes one step of the rule, by the kernels of the device that has the memory."""

    def step(kernels: Kernels) -> None:
        update = update_records(state, rules=[rule], gradients=[gradient], parameters=[parameter])
        kernels.update(update)
        # Counted on, as an engine does: bias corrections depend on the number of steps.
        state.steps[:] = update.steps

    return step
