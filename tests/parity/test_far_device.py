"""P1 on a device that is another one to torch, as a GPU is: its tensors do not mix with the CPU's.

What a GPU alone can show is the arithmetic of its own kernels and that streams order what they
should; what the engine does with tensors, streams and memory that are not the host's is shown here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

import infinity_engine
from infinity_engine.plan import HostOnly, Interleaved, NvmeStreamed, Strategy
from infinity_engine.plan.strategy import DeviceOnly
from support.device_training import STRATEGIES
from support.engine_bits import differing
from support.exact_training import trained_exact
from support.far_programs import (
    MIB,
    exact_far,
    failed_write_far,
    far_process,
    gradients_seen,
    limits_of_modules,
    offloaded_far,
    room_for_modules,
    saved_beside_training,
    trained_far,
)
from support.nvme_training import Case, Trained, trained
from support.session import SHARED
from support.small_models import MODELS

Reference = Callable[[Case], Trained]
pytestmark = pytest.mark.usefixtures("deterministic")


@pytest.fixture(scope="module")
def far(request: pytest.FixtureRequest) -> Iterator[ProcessPoolExecutor]:
    with far_process(request.config.stash[SHARED]) as process:
        yield process


@pytest.fixture(scope="module")
def reference(far: ProcessPoolExecutor) -> Reference:
    """Return what trains on the far device with everything where modules compute but the states."""

    @cache
    def of(case: Case) -> Trained:
        return far.submit(trained_far, case).result()

    def reference(case: Case) -> Trained:
        return of(replace(case, strategy=HostOnly(), parameters="device"))

    return reference


def same(found: Trained, expected: Trained) -> None:
    assert differing(expected.bits, found.bits) == []
    assert found.losses == expected.losses


@pytest.mark.parametrize("model", MODELS)
def test_it_trains_as_the_cpu_does(model: str, reference: Reference) -> None:
    """Its operators are the CPU's, but torch puts some together of others there: the bits are not
    the same.
    """
    expected = trained(Case(model=model, small_bytes=0), None, None)

    found = reference(Case(model=model, small_bytes=0))

    assert found.losses == pytest.approx(expected.losses, rel=1e-4)
    for name, tensor in expected.bits.items():
        assert torch.allclose(found.bits[name], tensor, rtol=1e-3, atol=1e-5), name


# What a model saves leaves alike wherever its parameters are: by default all four pairs are seen
# with one model, and the others have one of two pairs, in turn.
@pytest.mark.parametrize(
    ("model", "parameters", "at"),
    [
        pytest.param(
            model,
            parameters,
            at,
            marks=[]
            if model == "gpt"
            or (parameters, at) == (("device", "host"), ("host", "nvme"))[number % 2]
            else pytest.mark.slow,
        )
        for number, model in enumerate(MODELS)
        for parameters in ("device", "host")
        for at in ("host", "nvme")
    ],
)
def test_saved_tensors_leave_the_device_and_come_back_with_the_same_bits(
    far: ProcessPoolExecutor,
    reference: Reference,
    tmp_path: Path,
    model: str,
    parameters: str,
    at: str,
) -> None:
    case = Case(model=model, small_bytes=0)
    activations = {"at": at, "resident_bytes": 8192, "host_bytes": "1MiB", "small_bytes": 0}

    bits, report = far.submit(
        offloaded_far, replace(case, parameters=parameters), tmp_path, activations
    ).result()

    assert differing(reference(case).bits, bits) == []
    assert "activations" in report


def test_a_write_that_fails_behind_the_copy_to_the_host_loses_nothing(
    far: ProcessPoolExecutor, reference: Reference, tmp_path: Path
) -> None:
    case = Case(model="llama", small_bytes=0, steps=2)
    activations = {"at": "nvme", "resident_bytes": 8192, "host_bytes": "1MiB", "small_bytes": 0}

    bits, still_there = far.submit(failed_write_far, case, tmp_path, activations).result()

    assert differing(reference(case).bits, bits) == []
    assert still_there == [True]


@pytest.mark.parametrize(
    "activations",
    [
        {"recompute": "blocks"},
        {"at": "host", "recompute": "blocks"},
        {"at": "nvme", "recompute": "blocks"},
        {"at": "auto"},
    ],
    ids=str,
)
@pytest.mark.parametrize("parameters", ["device", "host"])
def test_blocks_run_again_on_the_device_with_the_same_bits(
    far: ProcessPoolExecutor,
    reference: Reference,
    tmp_path: Path,
    parameters: str,
    activations: dict[str, object],
) -> None:
    # The attentions of this model are in a list.
    case = Case(model="llama", small_bytes=0, steps=4)
    few = {"resident_bytes": 8192, "host_bytes": "1MiB", "small_bytes": 0}

    bits, report = far.submit(
        offloaded_far, replace(case, parameters=parameters), tmp_path, {**few, **activations}
    ).result()

    assert differing(reference(case).bits, bits) == []
    assert "activations of attention.0" in report


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("host only", "device"), ("interleaved", "host"), ("device only", "device"), ("nvme", "nvme")],
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_is_saved_beside_training_and_loaded(
    far: ProcessPoolExecutor, tmp_path: Path, precision: str, name: str, parameters: str
) -> None:
    strategy: Strategy = {
        "host only": HostOnly(),
        "interleaved": Interleaved(share=0.5, resident=0.3),
        "device only": DeviceOnly(),
        "nvme": NvmeStreamed(update=Interleaved(share=0.5)),
    }[name]
    case = Case(strategy=strategy, precision=precision, parameters=parameters, small_bytes=0)
    drive = tmp_path / "drive" if name == "nvme" else None
    if drive is not None:
        drive.mkdir()
    assert far.submit(saved_beside_training, case, tmp_path / "c", drive).result() == []


WAYS = (("fp32", 1, None), ("bf16", 3, 0.05), ("fp16", 1, 0.05))


# By default every pair of strategy, precision and home of parameters, not every triple.
@pytest.mark.parametrize(
    ("strategy", "precision", "accumulation", "clip", "parameters"),
    [
        pytest.param(
            strategy,
            *way,
            parameters,
            id=f"{strategy.to_plain()}-{way[0]}-{parameters}",
            marks=[] if (kind + number + home) % 2 == 0 else pytest.mark.slow,
        )
        for kind, strategy in enumerate(STRATEGIES)
        for number, way in enumerate(WAYS)
        for home, parameters in enumerate(("device", "host"))
    ],
)
def test_every_strategy_gives_the_same_bits(
    strategy: Strategy,
    precision: str,
    accumulation: int,
    clip: float | None,
    parameters: str,
    far: ProcessPoolExecutor,
    reference: Reference,
) -> None:
    case = Case(
        strategy=strategy,
        precision=precision,
        accumulation=accumulation,
        clip=clip,
        parameters=parameters,
        device="16MiB",
    )

    same(far.submit(trained_far, case).result(), reference(case))


# By default each model has one home, and one model both.
@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        pytest.param(
            model,
            parameters,
            marks=[] if number == 0 or (number + home) % 2 == 0 else pytest.mark.slow,
        )
        for number, model in enumerate(MODELS)
        for home, parameters in enumerate(("device", "host"))
    ],
)
def test_every_model_is_trained_alike_with_parameters_on_the_device_and_on_the_host(
    model: str, parameters: str, far: ProcessPoolExecutor, reference: Reference
) -> None:
    case = Case(model=model, strategy=Interleaved(share=0.5), parameters=parameters, device="16MiB")

    same(far.submit(trained_far, case).result(), reference(case))


@pytest.mark.parametrize("parameters", ["device", "host"])
@pytest.mark.parametrize("strategy", STRATEGIES[:4:3], ids=lambda strategy: strategy.name)
def test_exact_gradients_give_the_bits_of_the_cpu(
    strategy: Strategy, parameters: str, far: ProcessPoolExecutor
) -> None:
    """One of the parameters is empty, which torch wants on the device as well."""
    case = Case(
        strategy=strategy, precision="bf16", clip=0.05, parameters=parameters, device="56MiB"
    )

    found = far.submit(exact_far, case).result()

    assert differing(trained_exact(case, None), found) == []


@pytest.mark.parametrize("parameters", ["device", "host", "nvme"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_drives_give_the_same_bits(
    precision: str, parameters: str, far: ProcessPoolExecutor, reference: Reference, tmp_path: Path
) -> None:
    case = Case(
        model="llama",
        strategy=NvmeStreamed(update=Interleaved(share=0.5)),
        parameters=parameters,
        precision=precision,
        accumulation=2,
        clip=0.05,
        small_bytes=0,
        device="16MiB",
    )

    found = far.submit(trained_far, case, tmp_path).result()

    same(found, reference(case))
    assert found.loads > 0


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
    on_host, on_device = (
        far.submit(gradients_seen, each).result() for each in (HostOnly(), DeviceOnly())
    )

    assert differing(on_host, on_device) == []
    assert {each.device.type for each in on_device.values()} == {"cpu"}
    assert all(each.abs().sum() > 0 and each.isfinite().all() for each in on_device.values())
