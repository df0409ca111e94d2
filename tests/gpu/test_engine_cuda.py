"""The engine on a real GPU: P1 there, drives behind it, and the budget of its memory.

tests/parity/test_far_device.py shows the same on a device that only torch takes for another one.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

import infinity_engine
from infinity_engine.accel import Accelerator, open_accelerator
from infinity_engine.errors import CapacityError
from infinity_engine.plan import HostOnly, Interleaved, NvmeStreamed, Strategy
from support.device_training import STRATEGIES, wide_engine
from support.engine_bits import bits_of, differing
from support.nvme_training import RATES, Case, Trained, made, train, trained
from support.small_models import MODELS

pytest.importorskip("cupy")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
    pytest.mark.usefixtures("exact"),
    # what `exact` asks for, where torch has it not
    pytest.mark.filterwarnings("ignore:.*deterministic:UserWarning"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning"),
    # torch, in a backward's own thread
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning"),
]
MIB = 1 << 20
# cuBLAS takes 32 MiB of it for each thread that computes, and for some products as much again
DEVICE = "1GiB"


@cache
def reference(case: Case) -> Trained:
    return trained(
        replace(case, strategy=HostOnly(), parameters="device"), open_accelerator("cuda"), None
    )


def same(found: Trained, case: Case) -> None:
    expected = reference(replace(case, strategy=HostOnly(), parameters="device"))
    assert differing(expected.bits, found.bits) == []
    assert found.losses == expected.losses


@pytest.mark.parametrize("parameters", ["device", "host"])
@pytest.mark.parametrize(
    ("precision", "accumulation", "clip"), [("fp32", 1, None), ("bf16", 3, 0.05), ("fp16", 1, 0.05)]
)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: str(strategy.to_plain()))
def test_every_strategy_gives_the_same_bits(
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
        steps=20,
        device=DEVICE,
    )

    same(trained(case, device, None), case)


@pytest.mark.parametrize("model", MODELS)
def test_every_model_is_trained_alike_with_parameters_on_the_device_and_on_the_host(
    model: str, device: Accelerator
) -> None:
    case = Case(
        model=model, strategy=Interleaved(share=0.5), parameters="host", steps=20, device=DEVICE
    )

    same(trained(case, device, None), case)


@pytest.mark.parametrize("parameters", ["device", "host", "nvme"])
def test_drives_give_the_same_bits(parameters: str, device: Accelerator, tmp_path: Path) -> None:
    case = Case(
        model="llama",
        strategy=NvmeStreamed(update=Interleaved(share=0.5)),
        parameters=parameters,
        precision="bf16",
        accumulation=2,
        clip=0.05,
        small_bytes=0,
        steps=20,
        device=DEVICE,
    )

    found = trained(case, device, tmp_path)

    same(found, case)
    assert found.loads > 0


@pytest.mark.parametrize("parameters", ["device", "host", "nvme"])
def test_a_model_that_was_built_on_drives_gives_the_same_bits(
    parameters: str, device: Accelerator, tmp_path: Path
) -> None:
    case = Case(precision="bf16", accumulation=2, clip=0.05, strategy=NvmeStreamed(), device=DEVICE)
    budget = {"host": "64MiB", "nvme": {str(tmp_path): "1GiB"}}
    with infinity_engine.init_context(budget=budget, cache="64KiB"):
        task, optimizer = made(case.model)
    with infinity_engine.initialize(
        task,
        optimizer,
        device=device,
        strategy=case.strategy,
        rates=RATES,
        parameters=parameters,
        precision=case.precision,
        accumulation_steps=case.accumulation,
        max_grad_norm=case.clip,
        subgroup_numel=case.subgroup_numel,
        update_threads=2,
        storage={"small_bytes": case.small_bytes},
        budget={**budget, "device": case.device},
    ) as engine:
        losses = train(engine, task, case)
        bits = bits_of(engine)

    expected = reference(replace(case, strategy=HostOnly(), parameters="device"))
    assert losses == expected.losses
    assert differing(expected.bits, bits) == []


def test_the_devices_budget_holds_for_what_modules_make_too(device: Accelerator) -> None:
    """The budget is large, as torch's allocator reserves blocks of 2 and 20 MiB.

    A batch takes 96 MiB of it.
    """
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device.torch_device)
    with wide_engine(device, budget={"host": "64MiB", "device": "256MiB"}) as engine:
        before = torch.cuda.memory_reserved(device.torch_device)
        with pytest.raises(CapacityError, match="activation_bytes"):
            engine(torch.randn(3 * MIB // 2, 16, device=device.torch_device))
        assert torch.cuda.max_memory_reserved(device.torch_device) - before <= 256 * MIB

        engine.backward(engine(torch.randn(1024, 16, device=device.torch_device)))
        assert engine.step().outcome is infinity_engine.Outcome.UPDATED


def test_forward_and_backward_do_not_wait_for_the_device(device: Accelerator) -> None:
    with wide_engine(
        device, budget={"host": "64MiB", "device": "256MiB"}, parameters="device"
    ) as engine:
        batch = torch.randn(1024, 16, device=device.torch_device)
        for _ in range(2):
            engine.backward(engine(batch))
            engine.step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            engine.backward(engine(batch))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        engine.step()
