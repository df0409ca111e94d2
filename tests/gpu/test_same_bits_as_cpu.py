"""Training on a GPU has the bits of training on the CPU, where gradients have them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from infinity_engine.accel import Accelerator
from infinity_engine.plan import HostOnly, Interleaved, NvmeStreamed, Strategy
from infinity_engine.plan.ops import LoadStates
from support.device_training import STRATEGIES
from support.engine_bits import Bits, bits_of, differing
from support.exact_training import OPTIMIZERS, opened_exact, trained_exact
from support.nvme_training import Case, train

pytest.importorskip("cupy")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
    # torch, in a backward's own thread
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning"),
]
# cuBLAS takes 32 MiB of it for each thread that computes, and for some products as much again
DEVICE = "1GiB"
STEPS = 10
PRECISIONS = [("fp32", 1, None), ("bf16", 2, 0.05), ("fp16", 2, 0.05)]


@cache
def on_cpu(precision: str, accumulation: int, clip: float | None, optimizer: str) -> Bits:
    """Return what the CPU makes of it, with everything in its memory."""
    return trained_exact(
        Case(precision=precision, accumulation=accumulation, clip=clip, steps=STEPS),
        None,
        optimizer=optimizer,
    )


def same(found: Bits, case: Case, optimizer: str) -> None:
    expected = on_cpu(case.precision, case.accumulation, case.clip, optimizer)
    assert differing(expected, found) == []
    steps = [int(each) for name, each in found.items() if name.endswith(": step")]
    # one parameter is empty; fp16 may skip the first steps
    assert max(steps) >= STEPS // 2


@pytest.mark.parametrize("parameters", ["device", "host"])
@pytest.mark.parametrize(("precision", "accumulation", "clip"), PRECISIONS)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: str(strategy.to_plain()))
def test_every_strategy_has_the_bits_of_the_cpu(
    strategy: Strategy,
    precision: str,
    accumulation: int,
    clip: float | None,
    parameters: str,
    device: Accelerator,
) -> None:
    case = Case(
        strategy=strategy,
        precision=precision,
        accumulation=accumulation,
        clip=clip,
        parameters=parameters,
        steps=STEPS,
        device=DEVICE,
    )

    same(trained_exact(case, device), case, "adamw")


@pytest.mark.parametrize("strategy", STRATEGIES[1:4], ids=lambda strategy: str(strategy.to_plain()))
@pytest.mark.parametrize("optimizer", OPTIMIZERS[1:])
def test_every_rule_has_the_bits_of_the_cpu(
    optimizer: str, strategy: Strategy, device: Accelerator
) -> None:
    case = Case(
        strategy=strategy,
        precision="bf16",
        accumulation=2,
        clip=0.05,
        parameters="host",
        steps=STEPS,
        device=DEVICE,
    )

    same(trained_exact(case, device, optimizer=optimizer), case, optimizer)


@pytest.mark.parametrize(
    "update", [HostOnly(), Interleaved(share=0.5)], ids=lambda it: str(it.to_plain())
)
@pytest.mark.parametrize(("precision", "accumulation", "clip"), PRECISIONS)
def test_states_on_drives_have_the_bits_of_the_cpu(
    precision: str,
    accumulation: int,
    clip: float | None,
    update: HostOnly | Interleaved,
    device: Accelerator,
    tmp_path: Path,
) -> None:
    case = Case(
        strategy=NvmeStreamed(update=update),
        precision=precision,
        accumulation=accumulation,
        clip=clip,
        parameters="nvme",
        steps=STEPS,
        small_bytes=0,
        host="32MiB",
        device=DEVICE,
    )

    with opened_exact(case, device, tmp_path) as (engine, task):
        train(engine, task, case)
        found = bits_of(engine)
        assert any(isinstance(op, LoadStates) for op in engine.plan.ops)

    same(found, case, "adamw")


@pytest.mark.parametrize("optimizer", OPTIMIZERS[1:])
def test_every_rule_on_drives_has_the_bits_of_the_cpu(
    optimizer: str, device: Accelerator, tmp_path: Path
) -> None:
    case = Case(
        strategy=NvmeStreamed(update=Interleaved(share=0.5)),
        precision="bf16",
        accumulation=2,
        clip=0.05,
        parameters="nvme",
        steps=STEPS,
        small_bytes=0,
        host="32MiB",
        device=DEVICE,
    )

    same(trained_exact(case, device, tmp_path, optimizer), case, optimizer)


def test_a_run_can_be_repeated_with_other_work_beside_it(device: Accelerator) -> None:
    """What streams do not order shows where the device is busy."""
    case = Case(strategy=Interleaved(share=0.5), precision="bf16", parameters="host", device=DEVICE)
    case = replace(case, accumulation=2, clip=0.05, steps=STEPS)
    busy = torch.ones(2048, 2048, device=device.torch_device)
    beside = torch.cuda.Stream(device.torch_device)  # type: ignore[no-untyped-call]  # torch's
    torch.cuda.synchronize()

    with opened_exact(case, device, None) as (engine, task):
        for seed in range(case.steps * case.accumulation):
            with torch.cuda.stream(beside):
                for _ in range(8):
                    torch.mm(busy, busy)
            engine.backward(engine(task.batch(seed).to(engine.device)))
            engine.step()
        found = bits_of(engine)
    torch.cuda.synchronize()

    same(found, case, "adamw")
