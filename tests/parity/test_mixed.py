"""P1 for models that mix dtypes: the same bits on every tier, and those of plain torch with fp32
masters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

import infinity_engine
from infinity_engine.plan import HostOnly, Interleaved, NvmeStreamed, StaticSplit, Strategy
from infinity_engine.plan.strategy import DeviceOnly
from support.engine_bits import Bits, differing
from support.mixed_models import MIXED
from support.nvme_training import Case, Trained, emulated, trained
from support.small_models import Task

pytestmark = pytest.mark.usefixtures("deterministic")
CASE = Case(model="mixed", precision="model", accumulation=2, clip=0.05, steps=3)
STRATEGIES: tuple[Strategy, ...] = (
    HostOnly(),
    DeviceOnly(),
    StaticSplit(ratio=0.4),
    Interleaved(share=0.5),
)
LR, MOMENTUM = 0.05, 0.9


@cache
def in_memory(case: Case) -> Trained:
    return trained(case, None, None)


def plainly_trained(make: Callable[[], Task], steps: int) -> tuple[Bits, list[float]]:
    """Train with plain torch, and an fp32 master beside each 16-bit parameter."""
    torch.manual_seed(0)
    task = make()
    ours = [each for each in task.parameters() if each.requires_grad]
    masters = [each.detach().clone().float() for each in ours]
    optimizer = torch.optim.SGD(masters, lr=LR, momentum=MOMENTUM)
    losses = []
    for seed in range(steps):
        loss = task(task.batch(seed))
        loss.backward()
        for parameter, master in zip(ours, masters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None
        optimizer.step()
        for parameter, master in zip(ours, masters, strict=True):
            parameter.data.copy_(master)
        losses.append(loss.item())
    return {name: tensor.detach().clone() for name, tensor in task.state_dict().items()}, losses


def test_a_mixed_model_is_trained_as_by_plain_torch_with_fp32_masters() -> None:
    expected, losses = plainly_trained(MIXED["mixed"], 8)
    torch.manual_seed(0)
    task = MIXED["mixed"]()
    optimizer = torch.optim.SGD(task.parameters(), lr=LR, momentum=MOMENTUM)

    with infinity_engine.initialize(
        task, optimizer, accelerator="cpu", budget={"host": "64MiB"}
    ) as engine:
        same = []
        for seed in range(8):
            loss = engine(task.batch(seed))
            engine.backward(loss)
            engine.step()
            same.append(loss.item())

    assert same == losses
    assert differing(expected, task.state_dict()) == []


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: str(strategy.name))
@pytest.mark.parametrize("parameters", ["device", "host"])
def test_a_mixed_model_has_the_same_bits_with_every_strategy(
    strategy: Strategy, parameters: str
) -> None:
    case = replace(CASE, strategy=strategy, parameters=parameters, device="1MiB")
    got = trained(case, emulated(3), None)
    assert differing(in_memory(CASE).bits, got.bits) == []
    assert got.losses == in_memory(CASE).losses


@pytest.mark.parametrize(
    "update", [HostOnly(), Interleaved(share=0.5)], ids=lambda strategy: str(strategy.name)
)
@pytest.mark.parametrize("parameters", ["device", "nvme"])
@pytest.mark.parametrize("accelerator", ["cpu", "emulated"])
def test_a_mixed_model_has_the_same_bits_on_drives(
    accelerator: str, parameters: str, update: Strategy, tmp_path: Path
) -> None:
    case = replace(CASE, strategy=NvmeStreamed(update=update), parameters=parameters)  # type: ignore[arg-type]
    got = trained(case, emulated(3) if accelerator == "emulated" else None, tmp_path)
    assert differing(in_memory(CASE).bits, got.bits) == []
    assert got.loads > 0
    assert all(torch.equal(in_memory(CASE).after[name], it) for name, it in got.after.items())


@pytest.mark.parametrize("accumulation", [1, 2])
def test_early_updates_of_a_mixed_model_have_the_same_bits(
    accumulation: int, tmp_path: Path
) -> None:
    expected = replace(CASE, clip=None, accumulation=accumulation)
    case = replace(expected, strategy=NvmeStreamed(), parameters="nvme", early=True)
    assert differing(in_memory(expected).bits, trained(case, None, tmp_path).bits) == []


def test_one_fp16_parameter_scales_the_loss_of_all(tmp_path: Path) -> None:
    case = replace(CASE, model="mixed with fp16")
    expected = in_memory(case)
    for drive, parameters, strategy in (
        (None, "host", Interleaved(share=0.5)),
        (tmp_path, "nvme", NvmeStreamed()),
    ):
        got = trained(replace(case, strategy=strategy, parameters=parameters), emulated(3), drive)
        assert differing(expected.bits, got.bits) == []
