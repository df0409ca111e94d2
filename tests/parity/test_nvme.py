"""P1 with drives: wherever parameters, gradients and states rest, weights, states and losses have
the same bits.

Each plan is given the least host budget that it can be made with, so that everything that may rest
on drives does.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from infinity_engine.plan import HostOnly, Interleaved, NvmeStreamed, Strategy
from support.nvme_training import Case, Trained, emulated, trained
from support.small_models import MODELS

STREAMED = NvmeStreamed()
VISITED = NvmeStreamed(update=Interleaved(share=0.5))
VISITED_RESIDENT = NvmeStreamed(update=Interleaved(share=0.5, resident=0.3))
ONE_MEMORY = [("device", STREAMED), ("nvme", STREAMED), ("nvme", HostOnly())]
TWO_MEMORIES = [
    *[
        (parameters, strategy)
        for parameters in ("device", "host", "nvme")
        for strategy in (STREAMED, VISITED)
    ],
    ("device", VISITED_RESIDENT),
    ("nvme", VISITED_RESIDENT),
    ("nvme", HostOnly()),
]
PLACES = [*[("cpu", *each) for each in ONE_MEMORY], *[("emulated", *each) for each in TWO_MEMORIES]]
pytestmark = pytest.mark.usefixtures("deterministic")


@cache
def in_memory(case: Case) -> Trained:
    return trained(case, None, None)


def same(got: Trained, expected: Trained) -> None:
    assert [
        name for name in expected.bits if not torch.equal(got.bits[name], expected.bits[name])
    ] == []
    assert got.losses == expected.losses
    values = {name: each.float() for name, each in got.after.items()}
    assert [
        name for name in values if not torch.equal(values[name], expected.after[name].float())
    ] == []


# Everywhere, with all of it together; with nothing more in every other place, which have all
# accelerators, strategies and homes of parameters; in fp16, which scales its loss alike wherever
# things rest, in the place where most moves.
PLAIN, TOGETHER = ("fp32", 1, None, "off"), ("bf16", 3, 0.05, "crc32c")
WAYS = [
    PLAIN,
    ("bf16", 1, 0.05, "off"),
    ("bf16", 3, 0.05, "off"),
    ("bf16", 3, None, "off"),
    ("fp16", 1, None, "off"),
    ("fp32", 1, None, "crc32c"),
    TOGETHER,
]
FAR_FP16 = (("emulated", "nvme", VISITED_RESIDENT), WAYS[4])
PLAIN_PLACES = (
    ("cpu", "device", STREAMED),
    ("cpu", "nvme", HostOnly()),
    ("emulated", "host", STREAMED),
    ("emulated", "nvme", VISITED),
    ("emulated", "device", VISITED_RESIDENT),
)


@pytest.mark.parametrize(
    ("accelerator", "parameters", "strategy", "precision", "accumulation", "clip", "checksum"),
    [
        pytest.param(
            *place,
            *way,
            marks=[]
            if way == TOGETHER
            or (way == PLAIN and place in PLAIN_PLACES)
            or (place, way) == FAR_FP16
            else pytest.mark.slow,
        )
        for place in PLACES
        for way in WAYS
    ],
    ids=str,
)
def test_wherever_things_rest_the_bits_are_the_same(
    accelerator: str,
    parameters: str,
    strategy: Strategy,
    precision: str,
    accumulation: int,
    clip: float | None,
    checksum: str,
    tmp_path: Path,
) -> None:
    case = Case(precision=precision, accumulation=accumulation, clip=clip)
    on = emulated(accumulation) if accelerator == "emulated" else None
    placed = replace(case, parameters=parameters, strategy=strategy, checksum=checksum)

    got = trained(placed, on, tmp_path)

    assert got.loads > 0
    same(got, in_memory(case))


# Beside a device, another test trains every model, and this one where a gradient may be missing.
@pytest.mark.parametrize(
    ("accelerator", "model"),
    [
        pytest.param(
            accelerator,
            model,
            marks=[]
            if accelerator == "cpu" or model in ("gpt", "mixture of experts")
            else pytest.mark.slow,
        )
        for accelerator in ("cpu", "emulated")
        for model in MODELS
    ],
)
def test_every_model_is_trained_alike_from_drives(
    model: str, accelerator: str, tmp_path: Path
) -> None:
    case = Case(model=model, precision="bf16", accumulation=2, clip=0.05)
    on = emulated(3) if accelerator == "emulated" else None
    placed = replace(case, parameters="nvme", strategy=STREAMED)

    same(trained(placed, on, tmp_path), in_memory(case))


@pytest.mark.parametrize("model", MODELS)
def test_every_model_whose_masters_visit_the_device_from_drives_is_trained_alike(
    model: str, tmp_path: Path
) -> None:
    case = Case(model=model, precision="fp32", clip=0.05)
    placed = replace(case, parameters="device", strategy=VISITED)

    same(trained(placed, emulated(1), tmp_path), in_memory(case))


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("accelerator", "parameters", "strategy"), PLACES, ids=str)
@pytest.mark.parametrize(
    ("precision", "accumulation", "clip"), [("fp32", 1, 0.05), ("bf16", 2, None), ("fp16", 2, 0.1)]
)
def test_fifty_steps_of_every_model_wherever_things_rest(
    model: str,
    accelerator: str,
    parameters: str,
    strategy: Strategy,
    precision: str,
    accumulation: int,
    clip: float | None,
    tmp_path: Path,
) -> None:
    case = Case(model=model, precision=precision, accumulation=accumulation, clip=clip, steps=50)
    on = emulated(accumulation) if accelerator == "emulated" else None
    placed = replace(case, parameters=parameters, strategy=strategy)

    same(trained(placed, on, tmp_path), in_memory(case))
