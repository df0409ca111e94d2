"""The engine on a real GPU: P1 there, drives behind it, and the budget of its memory. Written without a GPU at hand.

tests/parity/test_far_device.py shows the same on a device that only torch takes for another one.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

import infinity_engine
from infinity_engine.accel import Accelerator, open_accelerator
from infinity_engine.errors import CapacityError
from infinity_engine.plan import HostOnly, Interleaved, NvmeStreamed, Strategy
from support.device_training import STRATEGIES, trained, wide_engine
from support.engine_bits import Bits, differing
from support.small_models import MODELS

pytest.importorskip("cupy")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
    pytest.mark.usefixtures("exact"),
]
MIB = 1 << 20


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let torch compute the same bits each time."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def device() -> Iterator[Accelerator]:
    with open_accelerator("cuda") as accelerator:
        yield accelerator


@cache
def reference(model: str, precision: str, accumulation: int, clip: float | None) -> tuple[Bits, list[float]]:
    with open_accelerator("cuda") as accelerator:
        return trained(
            model,
            accelerator,
            HostOnly(),
            precision=precision,
            accumulation=accumulation,
            clip=clip,
            parameters="device",
            steps=20,
        )


@pytest.mark.parametrize("parameters", ["device", "host"])
@pytest.mark.parametrize(
    ("precision", "accumulation", "clip"), [("fp32", 1, None), ("bf16", 3, 0.05), ("fp16", 1, 0.05)]
)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: str(strategy.to_plain()))
def test_every_strategy_gives_the_same_bits(
    strategy: Strategy, precision: str, accumulation: int, clip: float | None, parameters: str, device: Accelerator
) -> None:
    expected, losses = reference("gpt", precision, accumulation, clip)

    bits, same = trained(
        "gpt",
        device,
        strategy,
        precision=precision,
        accumulation=accumulation,
        clip=clip,
        parameters=parameters,
        steps=20,
    )

    assert differing(expected, bits) == []
    assert same == losses


@pytest.mark.parametrize("model", MODELS)
def test_every_model_is_trained_alike_with_parameters_on_the_device_and_on_the_host(
    model: str, device: Accelerator
) -> None:
    expected, losses = reference(model, "fp32", 1, None)

    bits, same = trained(model, device, Interleaved(share=0.5), parameters="host", steps=20)

    assert differing(expected, bits) == []
    assert same == losses


@pytest.mark.parametrize("parameters", ["device", "host", "nvme"])
def test_drives_give_the_same_bits(parameters: str, device: Accelerator, tmp_path: Path) -> None:
    expected, losses = reference("llama", "bf16", 2, 0.05)

    bits, same = trained(
        "llama",
        device,
        NvmeStreamed(update=Interleaved(share=0.5)),
        precision="bf16",
        accumulation=2,
        clip=0.05,
        parameters=parameters,
        nvme={str(tmp_path): "64MiB"},
        steps=20,
    )

    assert differing(expected, bits) == []
    assert same == losses


def test_the_devices_budget_holds_for_what_modules_make_too(device: Accelerator) -> None:
    """The budget is large, as torch's allocator reserves blocks of 2 and 20 MiB."""
    with wide_engine(device, budget={"host": "64MiB", "device": "256MiB"}) as engine:
        before = torch.cuda.memory_reserved(device.torch_device)
        with pytest.raises(CapacityError, match="activation_bytes"):
            engine(torch.randn(4 * MIB, 16, device=device.torch_device))
        assert torch.cuda.max_memory_reserved(device.torch_device) - before <= 256 * MIB

        engine.backward(engine(torch.randn(1024, 16, device=device.torch_device)))
        assert engine.step().outcome is infinity_engine.Outcome.UPDATED


def test_forward_and_backward_do_not_wait_for_the_device(device: Accelerator) -> None:
    with wide_engine(device, budget={"host": "64MiB", "device": "256MiB"}, parameters="device") as engine:
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
