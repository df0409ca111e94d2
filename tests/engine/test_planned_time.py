"""The planner's seconds of a step are those of the engine on the emulated device, with the update
beside the forward.

On the virtual clock, with modules whose computing takes the device's time, as on a GPU: the thread
that calls them goes on ahead of it. So what is compared is the order of things alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import cycle, dropwhile, islice
from typing import Any

import pytest
import torch
from torch import nn

import infinity_engine
from infinity_engine.accel import Emulation, Stream, StreamKind, TimeCost, VirtualAccelerator
from infinity_engine.config import Precision
from infinity_engine.engine.engine import Engine
from infinity_engine.optim import FloatFormat, Formats
from infinity_engine.parameters.describing import shape_of
from infinity_engine.parameters.parameters import collect_parameters
from infinity_engine.placement.training import Means, Training
from infinity_engine.plan import (
    HostOnly,
    Interleaved,
    Lane,
    Rates,
    ResolvedBudget,
    StaticSplit,
    Strategy,
    Tier,
)
from infinity_engine.schedule import ResidentSet
from infinity_engine.sim.planner import Decision, decide
from infinity_engine.sim.report import report_of
from infinity_engine.sim.timeline import time_step

RATES = Rates(
    h2d_bytes_per_s=55e6,
    d2h_bytes_per_s=55e6,
    host_update_params_per_s=2e6,
    device_update_params_per_s=25e6,
)
WIDTH = 64
SUBGROUP = WIDTH * WIDTH
ROWS = 2
LAYERS = 24
ROUNDED = 1e-5  # part of a step: what moves and computes is rounded up to nanoseconds
STEPS = 3  # of which the last is as all that follow


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Let torch compute on one thread: others would spin between operations on a few kilobytes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class _Product(torch.autograd.Function):
    """A product whose forward and backward take time, from when their parameter is there."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, passes: Callable[[int], None]
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.passes = passes
        passes(len(weight) // WIDTH)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight = ctx.saved_tensors
        ctx.passes(2 * len(weight) // WIDTH)
        return gradients[0] @ weight, gradients[0].T @ x, None


class Layer(nn.Module):
    """The sum of `size` products."""

    def __init__(self, size: int, passes: Callable[[int], None]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size * WIDTH, WIDTH) / WIDTH**0.5)
        self._passes = passes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # torch is
        products = _Product.apply(x, self.weight, self._passes)  # type: ignore[no-untyped-call]
        return torch.as_tensor(products).view(len(x), -1, WIDTH).sum(1)


@dataclass
class Computing:
    """The device's computing of modules, in the engine's own stream."""

    device: VirtualAccelerator
    ns: int
    engine: Engine | None = None

    def passes(self, forwards: int) -> None:
        self.device.run(lambda: None, stream=self._stream, cost=TimeCost(forwards * self.ns))

    def end(self) -> None:
        self.device.record(self._stream).wait()

    @property
    def _stream(self) -> Stream:
        assert self.engine is not None, "it trains"
        return self.engine._parts.gradients._lanes.compute


@dataclass(frozen=True)
class Case:
    """What is trained: `forward_s` of all layers, which are as large as `sizes` says by turns, and
    `room` on the device in parts of all parameters and states.
    """

    strategy: Strategy
    parameters: Tier
    forward_s: float = 0.02
    room: float = 1.0
    overlap: str = "auto"
    layers: int = LAYERS
    sizes: tuple[int, ...] = (1,)
    subgroup: int = SUBGROUP
    rates: Rates = RATES
    micro_batches: int = 1

    @property
    def numel(self) -> int:
        return sum(self.sizes) * self.layers // len(self.sizes) * WIDTH * WIDTH

    def model(self, passes: Callable[[int], None]) -> nn.Module:
        sizes = islice(cycle(self.sizes), self.layers)
        return nn.Sequential(*(Layer(size, passes) for size in sizes))

    @property
    def product_ns(self) -> int:
        """What the forward of one product takes."""
        return round(self.forward_s * WIDTH * WIDTH / self.numel * 1e9)


def planned(case: Case, model: nn.Module, optimizer: torch.optim.Optimizer) -> Decision:
    """Return the plan at the device's rates."""
    training = Training(
        model=shape_of(model, collect_parameters(model, optimizer, Precision.BF16), ()),
        batch=ROWS,
        sequence=1,
        accumulation_steps=case.micro_batches,
        checkpointing=False,
        formats=Formats(parameter=FloatFormat.BF16),
        state_names=("exp_avg", "exp_avg_sq"),
        small_bytes=256,
        overlap=case.overlap != "off",
    )
    there = Means(
        budget=ResolvedBudget(
            device=int(case.room * 16 * case.numel), host=64 * case.numel + (1 << 20), nvme={}
        ),
        rates=case.rates,
        for_all=False,
        flops_per_s=2 * ROWS * SUBGROUP * 1e9 / case.product_ns,
    )
    return decide(
        training,
        there,
        strategy=case.strategy,
        parameters=case.parameters,
        subgroup_numel=case.subgroup,
    )


def compared(case: Case) -> tuple[float, float]:
    """Return the seconds of a step: as planned, and as the engine takes that trains by the plan."""
    decision, ends, _ = trained(case, lambda _: None)
    return decision.best.step_s, (ends[-1] - ends[-2]) / 1e9


def trained(
    case: Case, before_step: Callable[[VirtualAccelerator], None]
) -> tuple[Decision, list[int], VirtualAccelerator]:
    """Train by the plan; return that, when each step ended, and the device."""
    torch.manual_seed(0)
    with VirtualAccelerator(
        Emulation(rates=case.rates, capacity_bytes=1 << 28, host_takes_time=True)
    ) as device:
        computing = Computing(device, case.product_ns)
        model = case.model(computing.passes)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        decision = planned(case, model, optimizer)
        budget = decision.means.budget
        settings: dict[str, Any] = {"overlap": case.overlap, **report_of(decision).settings}
        with infinity_engine.initialize(
            model,
            optimizer,
            device=device,
            precision="bf16",
            replanning="off",
            budget={"device": budget.device, "host": budget.host},
            **settings,
        ) as engine:
            computing.engine = engine
            ends = []
            for _ in range(STEPS):
                for _ in range(case.micro_batches):
                    rows = torch.ones(ROWS, WIDTH, dtype=torch.bfloat16)
                    engine.backward(engine(rows).float().sum())
                computing.end()
                before_step(device)
                engine.step()
                ends.append(device.now_ns)
    return decision, ends, device


EVERYWHERE = [
    HostOnly(),
    StaticSplit(ratio=0.3),
    Interleaved(share=0.2),
    Interleaved(share=0.5, resident=0.2),
    Interleaved(share=0.8),
    Interleaved(share=1.0),
]


@pytest.mark.parametrize("parameters", [Tier.DEVICE, Tier.HOST])
@pytest.mark.parametrize("strategy", EVERYWHERE)
def test_a_step_takes_as_long_as_planned(strategy: Strategy, parameters: Tier) -> None:
    expected, measured = compared(Case(strategy, parameters))

    assert measured == pytest.approx(expected, rel=ROUNDED)


@pytest.mark.parametrize("forward_s", [0.002, 0.1])
@pytest.mark.parametrize("parameters", [Tier.DEVICE, Tier.HOST])
def test_it_does_so_whichever_of_update_and_forward_is_longer(
    parameters: Tier, forward_s: float
) -> None:
    expected, measured = compared(Case(Interleaved(share=0.4), parameters, forward_s=forward_s))

    assert measured == pytest.approx(expected, rel=ROUNDED)


@pytest.mark.parametrize("parameters", [Tier.DEVICE, Tier.HOST])
def test_it_does_so_without_overlap(parameters: Tier) -> None:
    expected, measured = compared(Case(Interleaved(share=0.4), parameters, overlap="off"))

    assert measured == pytest.approx(expected, rel=ROUNDED)


@pytest.mark.parametrize("overlap", ["auto", "off"])
@pytest.mark.parametrize(
    ("parameters", "room", "rates"),
    [
        (Tier.DEVICE, 1.0, RATES),
        (Tier.HOST, 0.03, RATES),
        # Gradients come down more slowly than forward and backward make them.
        (Tier.DEVICE, 1.0, replace(RATES, d2h_bytes_per_s=55e6 / 20)),
    ],
)
def test_it_does_so_with_several_micro_batches(
    parameters: Tier, room: float, rates: Rates, overlap: str
) -> None:
    case = Case(HostOnly(), parameters, room=room, overlap=overlap, rates=rates, micro_batches=3)

    expected, measured = compared(case)

    assert measured == pytest.approx(expected, rel=ROUNDED)


# --- what moves and computes, in which order and when ---------------------------------------------

# At these rates whatever a step moves, computes or updates takes whole nanoseconds.
EVEN = replace(RATES, h2d_bytes_per_s=51.2e6, d2h_bytes_per_s=51.2e6)
EVEN_S = 1e-3
"""What the forward of one product takes."""


@pytest.mark.parametrize("sizes", [(1,), (3, 1, 1, 2)])
@pytest.mark.parametrize("overlap", ["auto", "off"])
@pytest.mark.parametrize(
    ("strategy", "room"),
    [
        (HostOnly(), 0.02),
        (HostOnly(), 0.03),
        (HostOnly(), 0.06),
        (HostOnly(), 0.2),
        (Interleaved(share=0.4), 0.12),
        (StaticSplit(ratio=0.3), 0.34),
    ],
)
def test_a_step_runs_to_the_nanosecond_as_planned_in_the_same_order(
    strategy: Strategy,
    room: float,
    overlap: str,
    sizes: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = Case(strategy, Tier.HOST, room=room, overlap=overlap, sizes=sizes, rates=EVEN)
    case = replace(case, forward_s=EVEN_S * case.numel / SUBGROUP)
    moves = moves_of_sets(monkeypatch)
    ends: list[int] = []
    begun: list[int] = []

    def before_step(device: VirtualAccelerator) -> None:
        ends.append(len(moves))
        # The update begins when the last gradient has come down.
        begun.append(max(record.end_ns for record in device.timeline()))

    decision, stepped, device = trained(case, before_step)
    # A step evicts everything, and fetches what the next forward needs first.
    executed = list(dropwhile(lambda move: move[0] == "evict", moves[ends[-2] : ends[-1]]))
    moves.clear()
    best = decision.best
    training = replace(decision.training, overlap=overlap != "off")
    timeline = time_step(best.plan, best.sizing, training, decision.means)

    assert executed == moves
    assert {number for kind, number in moves if kind == "fetch"} == set(range(LAYERS))
    assert stepped[-1] - stepped[-2] == begun[-1] - begun[-2] == timeline.ns
    for lane, kind in (
        (Lane.H2D, StreamKind.H2D),
        (Lane.D2H, StreamKind.D2H),
        (Lane.DEVICE, StreamKind.COMPUTE),
    ):
        took = sorted(
            (record.start_ns - begun[-2], record.end_ns - begun[-2])
            for record in device.timeline()
            if record.stream.startswith(kind.value)
            and begun[-2] <= record.start_ns < record.end_ns <= begun[-1]
        )
        expected = sorted(
            (span.start_ns, span.end_ns) for span in timeline.spans if span.lane is lane
        )
        if lane is Lane.D2H:  # a gradient goes down in pieces
            took, expected = joined(took), joined(expected)
        assert took == expected != [], lane


def joined(times: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return times in order, each with those that follow without a pause."""
    found: list[tuple[int, int]] = []
    for start, end in times:
        follows = found and found[-1][1] == start
        found.append((found.pop()[0] if follows else start, end))
    return found


def moves_of_sets(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Return a list that all resident sets write their members into as they come and leave."""
    moves: list[tuple[str, int]] = []
    admit, remove = ResidentSet.admit, ResidentSet.remove

    def admitted(members: ResidentSet[Any], number: int, entry: object) -> None:
        moves.append(("fetch", number))
        admit(members, number, entry)

    def removed(members: ResidentSet[Any], number: int) -> object:
        moves.append(("evict", number))
        return remove(members, number)

    monkeypatch.setattr(ResidentSet, "admit", admitted)
    monkeypatch.setattr(ResidentSet, "remove", removed)
    return moves


# --- what ops cost --------------------------------------------------------------------------------

# What an op costs, however small it is: as much as a tenth of a subgroup of 60 takes.
COSTLY = replace(RATES, host_start_s=2e-3, device_start_s=1e-3, copy_start_s=1e-3)


WAYS = pytest.mark.parametrize(
    ("strategy", "parameters"),
    [
        (HostOnly(), Tier.DEVICE),
        (Interleaved(share=0.4), Tier.DEVICE),
        (Interleaved(share=0.4), Tier.HOST),
    ],
)


@WAYS
@pytest.mark.parametrize("layers_of_each", [1, 8])
def test_many_subgroups_and_few_take_as_long_as_planned_where_ops_have_a_cost(
    layers_of_each: int, strategy: Strategy, parameters: Tier
) -> None:
    check_costly_ops(Case(strategy, parameters, layers=64, subgroup=layers_of_each * SUBGROUP))


@pytest.mark.parametrize(
    ("strategy", "parameters"),
    [
        (StaticSplit(ratio=0.25), Tier.DEVICE),
        (Interleaved(share=0.4), Tier.DEVICE),
        (Interleaved(share=0.4), Tier.HOST),
    ],
)
def test_each_tensor_of_a_subgroup_is_a_copy_that_has_its_start(
    strategy: Strategy, parameters: Tier
) -> None:
    """Of states a subgroup has one; of parameters and gradients, one for each tensor."""
    rates = replace(RATES, copy_start_s=5e-3)
    expected, measured = compared(Case(strategy, parameters, subgroup=4 * SUBGROUP, rates=rates))

    assert measured == pytest.approx(expected, rel=ROUNDED)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@WAYS
@pytest.mark.parametrize("layers_of_each", [1, 10])
def test_595_subgroups_and_a_tenth_of_them_take_as_long_as_planned(
    layers_of_each: int, strategy: Strategy, parameters: Tier
) -> None:
    """595 subgroups are those of a published log, where each took 4.3 ms whatever its size."""
    case = Case(strategy, parameters, layers=595, subgroup=layers_of_each * SUBGROUP)
    check_costly_ops(replace(case, forward_s=0.2))


def check_costly_ops(case: Case) -> None:
    """Check that a step is as planned, and that what ops cost is part of it."""
    expected, measured = compared(replace(case, rates=COSTLY))

    assert measured == pytest.approx(expected, rel=0.05)
    assert expected > 1.05 * compared_without_costs(case)


def compared_without_costs(case: Case) -> float:
    """Return the seconds of the same step where starting an op costs nothing, as planned."""
    with VirtualAccelerator(Emulation(rates=RATES, capacity_bytes=1 << 20)) as device:
        computing = Computing(device, 0)
        model = case.model(computing.passes)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        return planned(case, model, optimizer).best.step_s
