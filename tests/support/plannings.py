"""Trainings and means for the planner's tests: small ones, and random ones of any proportions."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import pytest

from infinity_engine.optim import FloatFormat, Formats
from infinity_engine.placement.models import Activations, ModelShape, ModuleShape, ParameterShape
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


def model_of(*numels: int, activations: Activations | None = None) -> ModelShape:
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
        activations=known if chance.random() < 0.7 else None,
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
