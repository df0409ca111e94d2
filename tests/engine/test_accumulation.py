"""Micro-batches are counted by their backwards, whoever calls step() and when."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from infinity_engine import Outcome
from infinity_engine.engine.engine import Engine
from infinity_engine.errors import CapacityError
from infinity_engine.lanes.meter import MICRO_BATCHES
from infinity_engine.plan import HostOnly, NvmeStreamed
from infinity_engine.telemetry import Timeline
from support.engine_bits import Bits, bits_of, differing
from support.nvme_training import Case, emulated, made, opened
from support.small_models import Task

MEMORY = Case(accumulation=2)
PLACES = {
    "memory": MEMORY,
    "device": replace(MEMORY, precision="bf16"),
    "drives": replace(
        MEMORY, precision="bf16", strategy=NvmeStreamed(), parameters="nvme", host=17_100_000
    ),
    "early": replace(
        MEMORY,
        precision="bf16",
        strategy=NvmeStreamed(),
        parameters="nvme",
        early=True,
        host=17_460_000,
    ),
}
FULL = replace(PLACES["drives"], accumulation=1, host=16_970_000)
"""So little of the host that there is no room to add up the gradients of a second micro-batch."""
pytestmark = pytest.mark.usefixtures("deterministic")


@contextmanager
def engine_at(place: str, folder: Path) -> Iterator[tuple[Engine, Task]]:
    on = emulated(3) if place == "device" else None
    drive = folder if place in {"drives", "early"} else None
    with opened(PLACES[place], on, drive) as (engine, task):
        yield engine, task


def loss_of(engine: Engine, task: Task, seed: int) -> torch.Tensor:
    return torch.as_tensor(engine(task.batch(seed).to(engine.device)))


def past_the_engine(loss: torch.Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]  # torch is


BACKWARDS: Mapping[str, Callable[[Engine, torch.Tensor], object]] = {
    "engine": Engine.backward,
    "loss": lambda _engine, loss: past_the_engine(loss),
}


def backwards(engine: Engine, task: Task, seeds: Sequence[int], *, scale: bool = True) -> None:
    for seed in seeds:
        engine.backward(loss_of(engine, task, seed), scale=scale)


def in_plain_torch(steps: Sequence[Sequence[int]], divisor: int) -> Bits:
    """Return the weights after these steps, of which each divides the loss of each batch."""
    task, optimizer = made("gpt")
    for seeds in steps:
        for seed in seeds:
            past_the_engine(task(task.batch(seed)) / divisor)
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach().clone() for name, parameter in task.named_parameters()}


def assert_close(task: Task, expected: Bits) -> None:
    for name, parameter in task.named_parameters():
        torch.testing.assert_close(parameter.detach(), expected[name], rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize("place", PLACES)
def test_one_step_after_k_backwards_updates_as_k_steps_do(place: str, tmp_path: Path) -> None:
    found = []
    for each_backward in (True, False):
        with engine_at(place, tmp_path) as (engine, task):
            outcomes = []
            for seed in range(4):
                backwards(engine, task, [seed])
                if each_backward or seed % 2:
                    outcomes.append(engine.step().outcome)
            found.append(bits_of(engine))
            assert engine.steps == 2
            left, updated = Outcome.ACCUMULATED, Outcome.UPDATED
            assert outcomes == ([left, updated] * 2 if each_backward else [updated] * 2)

    assert differing(*found) == []


def test_a_step_is_not_a_micro_batch() -> None:
    with opened(MEMORY, None, None) as (engine, task):
        backwards(engine, task, [0])

        assert [engine.step().outcome for _ in range(3)] == [Outcome.ACCUMULATED] * 3


def test_step_with_update_true_uses_what_has_come() -> None:
    with opened(MEMORY, None, None) as (engine, task):
        for seeds in ([0, 1], [2]):
            backwards(engine, task, seeds)
            assert engine.step(update=True).outcome is Outcome.UPDATED

        assert_close(task, in_plain_torch([[0, 1], [2]], divisor=2))


def test_step_with_update_false_never_updates() -> None:
    with opened(MEMORY, None, None) as (engine, task):
        for seed in range(3):
            backwards(engine, task, [seed])
            assert engine.step(update=False).outcome is Outcome.ACCUMULATED
        engine.step()

        assert_close(task, in_plain_torch([[0, 1, 2]], divisor=2))


def test_step_with_update_true_needs_a_gradient() -> None:
    with (
        opened(MEMORY, None, None) as (engine, _),
        pytest.raises(RuntimeError, match="no gradient to update with"),
    ):
        engine.step(update=True)


@pytest.mark.parametrize("place", PLACES)
def test_backward_without_scale_adds_gradients_up(place: str, tmp_path: Path) -> None:
    def trained(divides: bool) -> Bits:
        with engine_at(place, tmp_path) as (engine, task):
            for seeds in ([0, 1], [2, 3]):
                for seed in seeds:
                    loss = loss_of(engine, task, seed)
                    engine.backward(loss if divides else loss / 2, scale=divides)
                engine.step()
            return bits_of(engine)

    # dividing by a power of two rounds nothing
    assert differing(trained(True), trained(False)) == []


def test_scaled_and_unscaled_backwards_in_one_step_are_refused() -> None:
    with opened(MEMORY, None, None) as (engine, task):
        for backward in BACKWARDS.values():
            backwards(engine, task, [0], scale=False)
            with pytest.raises(RuntimeError, match=r"1 micro-batch.* not divided.*same `scale`"):
                backward(engine, loss_of(engine, task, 1))
            backwards(engine, task, [1], scale=False)
            engine.step()

        assert_close(task, in_plain_torch([[0, 1]] * 2, divisor=1))


def test_without_accumulation_both_scales_may_mix() -> None:
    with opened(Case(), None, None) as (engine, task):
        backwards(engine, task, [0], scale=False)
        backwards(engine, task, [1], scale=True)
        engine.step()

        assert_close(task, in_plain_torch([[0, 1]], divisor=1))


def test_losses_of_a_retained_graph_are_one_micro_batch() -> None:
    with opened(MEMORY, None, None) as (engine, task):
        for expected in (Outcome.ACCUMULATED, Outcome.UPDATED):
            loss = loss_of(engine, task, 0)
            engine.backward(loss, retain_graph=True)
            engine.backward(loss)
            assert engine.step().outcome is expected


@pytest.mark.parametrize("ends", [lambda engine: engine.step(), lambda engine: None])
def test_a_graph_retained_for_nothing_still_counts(ends: Callable[[Engine], object]) -> None:
    with opened(MEMORY, None, None) as (engine, task):
        for seed in range(2):
            engine.backward(loss_of(engine, task, seed), retain_graph=True)
            if not seed:
                ends(engine)

        assert engine.step().outcome is Outcome.UPDATED


def test_backwards_past_the_engine_are_counted() -> None:
    with opened(MEMORY, None, None) as (engine, task):
        for seed in range(2):
            past_the_engine(loss_of(engine, task, seed))

        assert engine.step().outcome is Outcome.UPDATED
        assert_close(task, in_plain_torch([[0, 1]], divisor=2))


def test_any_number_of_backwards_updates_where_one_is_planned() -> None:
    with opened(Case(), None, None) as (engine, task):
        backwards(engine, task, [0, 1, 2])

        assert engine.step().outcome is Outcome.UPDATED
        assert_close(task, in_plain_torch([[0, 1, 2]], divisor=1))


def test_evaluation_between_backwards_is_not_counted() -> None:
    with opened(MEMORY, None, None) as (engine, task):
        backwards(engine, task, [0])
        with torch.no_grad():
            loss_of(engine, task, 7)

        assert engine.step().outcome is Outcome.ACCUMULATED


def test_zero_grad_begins_to_count_again() -> None:
    with opened(MEMORY, None, None) as (engine, task):
        backwards(engine, task, [0], scale=False)
        engine.zero_grad()
        backwards(engine, task, [1])

        assert engine.step().outcome is Outcome.ACCUMULATED


def micro_batches_of(timeline: Timeline) -> list[int]:
    return [int(step.counters[MICRO_BATCHES]) for step in timeline.steps]


@pytest.mark.parametrize("whose", BACKWARDS)
def test_telemetry_counts_backwards(whose: str) -> None:
    with opened(MEMORY, None, None) as (engine, task):
        for seeds in ([0, 1], [2]):
            for seed in seeds:
                BACKWARDS[whose](engine, loss_of(engine, task, seed))
            engine.step(update=True)

        assert micro_batches_of(engine.timeline()) == [2, 1]


@pytest.mark.parametrize("whose", BACKWARDS)
def test_more_than_planned_is_refused_before_anything_is_lost(whose: str, tmp_path: Path) -> None:
    def trained(case: Case, drive: Path | None, *, too_many: bool) -> Bits:
        with opened(case, None, drive) as (engine, task):
            backwards(engine, task, [0])
            if too_many:
                with pytest.raises(CapacityError, match=r"plans for 1 in a step.*Nothing was lost"):
                    BACKWARDS[whose](engine, loss_of(engine, task, 1))
            engine.step()
            backwards(engine, task, [1])
            engine.step()
            return bits_of(engine)

    in_memory = replace(FULL, strategy=HostOnly(), parameters="auto", host="256MiB")
    expected = trained(in_memory, None, too_many=False)
    assert differing(trained(FULL, tmp_path, too_many=True), expected) == []
