"""On which devices an engine is made: what is refused, and what is warned of, with the model as it
was.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import infinity_engine
from infinity_engine.accel import Emulation, VirtualAccelerator
from infinity_engine.errors import ConfigError, MissingDependencyError
from infinity_engine.planning.planning import check_device
from support.nvme_training import RATES


@contextmanager
def device_of(kind: str) -> Iterator[VirtualAccelerator]:
    """Return a device that says it is another one to torch."""
    with VirtualAccelerator(Emulation(rates=RATES, capacity_bytes=64 << 20)) as device:
        device.torch_device = torch.device(kind, 0)
        yield device


def test_a_gpu_without_cupy_is_refused_and_the_model_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    model = torch.nn.Linear(4, 4)
    before = model.weight.detach().clone()
    with (
        device_of("cuda") as device,
        pytest.raises(MissingDependencyError, match=r"infinity-engine\[cuda\]"),
    ):
        infinity_engine.initialize(model, "adamw", device=device, strategy="host_only", rates=RATES)
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize("kind", ["cpu", "cuda", "hpu"])
def test_one_rank_may_compute_on_any_device(kind: str) -> None:
    with device_of(kind) as device:
        check_device(device, alone=True)  # a warning would be an error here


@pytest.mark.parametrize("kind", ["cuda", "hpu"])
def test_several_ranks_are_refused_where_they_do_not_compute_on_the_cpu(kind: str) -> None:
    with (
        device_of(kind) as device,
        pytest.raises(ConfigError, match=r"one GPU, or on several ranks of the CPU"),
    ):
        check_device(device, alone=False)


def test_several_ranks_compute_on_the_cpu() -> None:
    with device_of("cpu") as device:
        check_device(device, alone=False)


class InAnotherStream(VirtualAccelerator):
    """A device that modules compute on in a stream that the engine does not know."""

    def check_current(self) -> None:
        raise RuntimeError("another stream")


def test_a_model_in_a_stream_that_the_engine_does_not_know_is_not_called() -> None:
    called: list[str] = []
    model = torch.nn.Linear(4, 4)
    model.register_forward_hook(lambda *_: called.append("forward"))
    with (
        InAnotherStream(Emulation(rates=RATES, capacity_bytes=64 << 20)) as device,
        infinity_engine.initialize(
            model,
            "adamw",
            device=device,
            strategy="host_only",
            rates=RATES,
            budget={"host": "32MiB", "device": "32MiB"},
        ) as engine,
        pytest.raises(RuntimeError, match="another stream"),
    ):
        engine(torch.ones(1, 4))

    assert called == []
