"""Trainings and means for the planner's tests: small ones, and random ones of any proportions."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from math import isqrt

import pytest

from infinity_engine.advice.means import with_drives, with_links, with_updates
from infinity_engine.optim import FloatFormat, Formats
from infinity_engine.placement.adapters import freeze, with_lora
from infinity_engine.placement.models import (
    UNKNOWN_ACTIVATIONS,
    Activations,
    ModelShape,
    ModuleShape,
    ParameterShape,
)
from infinity_engine.placement.training import Means, Training
from infinity_engine.plan import DriveRates, Rates, ResolvedBudget
from infinity_engine.sim.planner import Planner


@contextmanager
def equal_questions_searched_once() -> Iterator[None]:
    """Keep what the planner finds: tests ask for other figures of the same model and machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Planner, "decide", cache(Planner.decide))
        patch.setattr(Planner, "look", cache(Planner.look))
        yield


def model_of(*numels: int, activations: Activations = UNKNOWN_ACTIVATIONS) -> ModelShape:
    """Return a model of linear modules with so many parameters each."""
    modules = tuple(
        ModuleShape(
            name=f"m{at}",
            parameters=(ParameterShape(f"m{at}.weight", numel),),
            flops_per_token=2 * numel,
        )
        for at, numel in enumerate(numels)
    )
    return ModelShape(
        name="linear", modules=modules, deepest_numel=max(numels), activations=activations
    )


def training_of(
    model: ModelShape, *, bits: int = 16, accumulation: int = 1, checkpointing: bool = True
) -> Training:
    """Return a training with Adam."""
    return Training(
        model=model,
        batch=1,
        sequence=2048,
        accumulation_steps=accumulation,
        checkpointing=checkpointing,
        formats=Formats(parameter=FloatFormat.BF16 if bits == 16 else None),
        state_names=("exp_avg", "exp_avg_sq"),
        small_bytes=65536,
    )


def random_case(seed: int) -> tuple[Training, Means]:
    """Return a training on a machine, with memory for much, little or hardly anything, and any
    rates.
    """
    chance = random.Random(seed)

    def around(value: float, times: float) -> float:
        return value * float(times ** chance.uniform(-1, 1))

    blocks = chance.choice([4, 8, 16])
    numel = round(around(4e9, 10) / blocks)
    hidden = max(round((numel / 12) ** 0.5), 64)
    known = Activations(
        blocks=blocks, hidden=hidden, elements=16 * hidden, fp32=2 * hidden, logits=32000
    )
    model = model_of(
        *(numel for _ in range(blocks)),
        32000 * hidden,
        activations=known if chance.random() < 0.7 else UNKNOWN_ACTIVATIONS,
    )
    training = training_of(
        model, bits=chance.choice([16, 16, 32]), accumulation=chance.choice([1, 1, 4])
    )
    every = model.numel
    unified = chance.random() < 0.15
    drives = chance.random() < 0.6
    link = around(25e9, 4)
    rates = Rates(
        h2d_bytes_per_s=link,
        d2h_bytes_per_s=around(link, 1.5),
        host_update_params_per_s=around(1.5e9, 4),
        device_update_params_per_s=around(30e9, 4),
        nvme={"a": DriveRates(read_bytes_per_s=around(8e9, 3), write_bytes_per_s=around(5e9, 3))}
        if drives
        else {},
    )
    budget = ResolvedBudget(
        device=round(every * around(4, 6)) + (6 << 30),
        host=round(every * around(10 if drives else 24, 3)) + (8 << 30),
        nvme={"a": round(every * 40)} if drives else {},
    )
    flops = around(80e12, 4) if chance.random() < 0.9 else None
    return training, Means(
        budget=budget, rates=rates, unified=unified, flops_per_s=flops, io_bytes=16 << 20
    )


def varied_case(seed: int) -> tuple[Training, Means]:
    """Return a random case as the command line asks about it: with any overlap, and perhaps with
    several ranks, a part of the model frozen, adapters, rates of what works alone, or a cost for
    each op.
    """
    training, means = random_case(seed)
    chance = random.Random(f"varied {seed}")
    if not means.unified:
        means = replace(means, ranks=chance.choice([1, 1, 2, 4]), wire_bytes_per_s=50e9)
    if chance.random() < 0.5:
        alone = means
        for faster in (with_links, with_updates, with_drives):
            alone = faster(alone, chance.uniform(1, 1.5))
        means = replace(means, alone=alone.rates)
    if chance.random() < 0.5:
        means = _with_starts(means, chance.choice([2e-5, 2e-4, 4e-3]))
    part = chance.random()
    if part < 0.5:
        model = training.model
        model = with_lora(_with_sides(model), 64) if part < 0.25 else freeze(model, "m[0-2]")
        training = replace(training, model=model)
    return replace(training, overlap=None), means


def wired_case(seed: int) -> tuple[Training, Means]:
    """Return a varied case of several ranks that send one another little in a second."""
    training, means = varied_case(seed)
    chance = random.Random(f"wired {seed}")
    wire = chance.choice([2e9, 6e9, 12e9, 25e9])
    return training, replace(
        means, unified=False, ranks=chance.choice([2, 4, 8]), wire_bytes_per_s=wire
    )


def _with_starts(means: Means, start_s: float) -> Means:
    """Return the means where each op costs so much before it moves or updates anything."""

    def started(rates: Rates) -> Rates:
        return replace(
            rates,
            host_start_s=start_s,
            device_start_s=start_s,
            copy_start_s=start_s,
            io_start_s=start_s,
        )

    alone = None if means.alone is None else started(means.alone)
    return replace(means, rates=started(means.rates), alone=alone)


def _with_sides(model: ModelShape) -> ModelShape:
    """Return the model with modules that adapters know the sides of: about square ones."""
    modules = (
        replace(module, sides=(isqrt(module.numel), isqrt(module.numel)))
        for module in model.modules
    )
    return replace(model, modules=tuple(modules))
