"""P1 on a device that is another one to torch, as a GPU is: its tensors do not mix with the CPU's.

What a GPU alone can show is the arithmetic of its own kernels and that streams order what they should; what the engine
does with tensors, streams and memory that are not the host's is shown here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path

import pytest
import torch

import infinity_engine
from infinity_engine.plan import HostOnly, Interleaved, NvmeStreamed, Strategy
from infinity_engine.plan.strategy import DeviceOnly
from support.device_training import STRATEGIES, trained
from support.engine_bits import Bits, differing
from support.far_programs import MIB, far_process, gradients_seen, limits_of_modules, room_for_modules, trained_far
from support.session import SHARED
from support.small_models import MODELS

Reference = Callable[[str, str, int, float | None], tuple[Bits, list[float]]]
pytestmark = pytest.mark.usefixtures("deterministic")


@pytest.fixture(scope="module")
def far(request: pytest.FixtureRequest) -> Iterator[ProcessPoolExecutor]:
    with far_process(request.config.stash[SHARED]) as process:
        yield process


@pytest.fixture(scope="module")
def reference(far: ProcessPoolExecutor) -> Reference:
    """Return what trains on the far device with everything where modules compute but the states."""

    @cache
    def reference(model: str, precision: str, accumulation: int, clip: float | None) -> tuple[Bits, list[float]]:
        settings = {"precision": precision, "accumulation": accumulation, "clip": clip, "parameters": "device"}
        return far.submit(trained_far, model, HostOnly(), **settings).result()

    return reference


@pytest.mark.parametrize("model", MODELS)
def test_it_trains_as_the_cpu_does(model: str, reference: Reference) -> None:
    """Its operators are the CPU's, but torch puts some together of others there: the bits are not the same."""
    expected, losses = trained(model, None, HostOnly())

    bits, found = reference(model, "fp32", 1, None)

    assert found == pytest.approx(losses, rel=1e-4)
    for name, tensor in expected.items():
        assert torch.allclose(bits[name], tensor, rtol=1e-3, atol=1e-5), name


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
    far: ProcessPoolExecutor,
    reference: Reference,
) -> None:
    expected, losses = reference("gpt", precision, accumulation, clip)

    settings = {"precision": precision, "accumulation": accumulation, "clip": clip, "parameters": parameters}
    bits, same = far.submit(trained_far, "gpt", strategy, **settings).result()

    assert differing(expected, bits) == []
    assert same == losses


@pytest.mark.parametrize("parameters", ["device", "host"])
@pytest.mark.parametrize("model", MODELS)
def test_every_model_is_trained_alike_with_parameters_on_the_device_and_on_the_host(
    model: str, parameters: str, far: ProcessPoolExecutor, reference: Reference
) -> None:
    expected, losses = reference(model, "fp32", 1, None)

    bits, same = far.submit(trained_far, model, Interleaved(share=0.5), parameters=parameters).result()

    assert differing(expected, bits) == []
    assert same == losses


@pytest.mark.parametrize("parameters", ["device", "host", "nvme"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_drives_give_the_same_bits(
    precision: str, parameters: str, far: ProcessPoolExecutor, reference: Reference, tmp_path: Path
) -> None:
    expected, losses = reference("llama", precision, 2, 0.05)
    strategy = NvmeStreamed(update=Interleaved(share=0.5))
    drives = {str(tmp_path): "64MiB"}

    settings = {"precision": precision, "accumulation": 2, "clip": 0.05, "parameters": parameters, "nvme": drives}
    bits, same = far.submit(trained_far, "llama", strategy, **settings).result()

    assert differing(expected, bits) == []
    assert same == losses


def test_the_devices_budget_holds_for_what_modules_make_too(far: ProcessPoolExecutor) -> None:
    found = far.submit(limits_of_modules).result()

    tier, asked, limit, holders, change = found["told"]
    assert (tier, asked, limit) == ("DEVICE", 2 * MIB, 4 * MIB)
    assert holders["modules"] >= 2 * MIB
    assert "activation_bytes" in change
    assert found["cause"] is torch.OutOfMemoryError
    assert found["taken"] <= 4 * MIB
    assert found["outcome"] is infinity_engine.Outcome.UPDATED
    assert found["left"] == 0
    assert found["beyond it"] == 8 * MIB  # nothing is capped any more


def test_the_plan_leaves_modules_what_it_is_told_to(far: ProcessPoolExecutor) -> None:
    found = far.submit(room_for_modules).result()

    assert found["nothing left"] == "DEVICE"
    assert 0 < found["reserved"] <= MIB


def test_gradients_can_be_seen_wherever_they_are(far: ProcessPoolExecutor) -> None:
    on_host, on_device = (far.submit(gradients_seen, each).result() for each in (HostOnly(), DeviceOnly()))

    assert differing(on_host, on_device) == []
    assert {each.device.type for each in on_device.values()} == {"cpu"}
    assert all(each.abs().sum() > 0 and each.isfinite().all() for each in on_device.values())
