"""Buffers, kept parameters, and what `precision` leaves behind."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import infinity_engine
from deepnvme.sizes import PAGE
from infinity_engine.engine.engine import Engine
from infinity_engine.errors import CapacityError, ConfigError
from infinity_engine.plan import Tier
from infinity_engine.plan.budget import Capacity
from infinity_engine.planning import planning
from infinity_engine.units import align_up
from support.engine_bits import bits_of, differing
from support.mixed_models import MIXED, Mixed
from support.nvme_training import emulated
from support.small_models import MODELS, Task

PRECISIONS = ["model", "fp32", "bf16", "fp16", "bf16_autocast", "fp16_autocast"]


def opened(task: nn.Module, *, unified: bool = True, **settings: Any) -> Engine:
    optimizer = torch.optim.AdamW(task.parameters(), lr=1e-3)
    settings = {"budget": {"host": "64MiB", "device": "32MiB"}, **settings}
    on = None if unified else emulated(1)
    return infinity_engine.initialize(task, optimizer, accelerator="cpu", device=on, **settings)


class Rotary(Task):
    """A linear layer and an fp32 buffer of frequencies."""

    inv_freq: torch.Tensor
    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("inv_freq", 1 / 10_000 ** (torch.arange(8) / 8), persistent=False)
        self.register_buffer("seen", torch.zeros(()))

    def batch(self, seed: int) -> torch.Tensor:
        return torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        x = self.linear(batch.to(self.linear.weight.dtype))
        return torch.as_tensor((x.float() * (4096 * self.inv_freq).cos()).pow(2).mean())


@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_buffers_keep_their_dtype_and_what_the_model_wrote(precision: str, unified: bool) -> None:
    task = Rotary()
    inv_freq = task.inv_freq.clone()
    with opened(task, unified=unified, precision=precision) as engine:
        engine.backward(engine(task.batch(0).to(engine.device)))
        engine.step()
        assert (task.inv_freq.dtype, task.seen.dtype) == (torch.float32, torch.float32)
    assert torch.equal(task.inv_freq, inv_freq)
    assert task.seen.item() == 1
    assert task.seen.dtype == torch.float32


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_batch_norm_trains_in_16_bits_with_fp32_statistics(precision: str) -> None:
    torch.manual_seed(0)
    task = MODELS["conv net"]()
    with opened(task, precision=precision) as engine:
        for seed in range(3):
            engine.backward(engine(task.batch(seed)))
            engine.step()
    assert {str(buffer.dtype) for buffer in task.buffers()} == {"torch.float32", "torch.int64"}
    assert task.get_buffer("layers.1.running_mean").abs().sum() > 0


def test_parameters_have_the_dtypes_that_they_had_once_closed() -> None:
    task = Mixed()
    before = {name: each.dtype for name, each in task.state_dict().items()}
    with opened(task, unified=False, parameters="host") as engine:
        engine.backward(engine(task.batch(0).to(engine.device)))
        engine.step()
    assert {name: each.dtype for name, each in task.state_dict().items()} == before


@pytest.mark.parametrize("unified", [True, False])
def test_a_mixed_model_that_was_built_on_drives_has_the_same_bits(
    unified: bool, tmp_path: Path
) -> None:
    budget = {"host": "64MiB", "device": "8MiB", "nvme": {str(tmp_path): "600MiB"}}
    found = []
    for context in (nullcontext(), infinity_engine.init_context(budget=budget, cache=1 << 16)):
        torch.manual_seed(0)
        with context as built:
            task = Mixed()
        settings = {} if built is None else {"strategy": "nvme_streamed", "parameters": "nvme"}
        with opened(
            task, unified=unified, budget=budget, subgroup_numel=4096, **settings
        ) as engine:
            engine.backward(engine(task.batch(0).to(engine.device)))
            engine.step()
            found.append(bits_of(engine))
    assert differing(*found) == []


def test_masters_of_16_bit_parameters_are_fp32() -> None:
    task = Mixed()
    with opened(task) as engine:
        for parameter in (task.down, task.get_parameter("head.weight")):
            assert torch.as_tensor(engine.state_of(parameter)["master"]).dtype == torch.float32


def test_the_loss_is_scaled_where_a_trained_parameter_is_fp16() -> None:
    scales = []
    for make in MIXED.values():
        task = make()
        with opened(task) as engine:
            engine.backward(engine(task.batch(0)))
            scales.append(engine.step().loss_scale)
    assert scales[0] == 1.0
    assert scales[1] > 1.0


def test_an_fp64_parameter_is_refused_and_the_model_is_untouched() -> None:
    task = Rotary()
    task.linear.bias = nn.Parameter(torch.zeros(8, dtype=torch.float64))
    with pytest.raises(ConfigError, match=r"linear\.bias: expected torch\.float32"):
        opened(task)
    assert task.linear.bias.dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_that_are_not_cast_keep_their_memory_and_it_counts(dtype: torch.dtype) -> None:
    task = Rotary().to(dtype)
    memory = task.linear.weight.data_ptr()
    streams = 2 if dtype is torch.float32 else 3  # fp32 parameters are masters
    with opened(task) as engine:
        assert task.linear.weight.data_ptr() == memory
        (host,) = (usage for usage in engine.usage() if usage.tier is Tier.HOST)
        # Each lease is of whole pages.
        states = align_up(streams * 4 * 72, PAGE)
        assert host.held == states + 72 * dtype.itemsize
        engine.backward(engine(task.batch(0).to(dtype)))
        engine.step()
    assert task.linear.weight.data_ptr() == memory
    assert all(not usage.held for usage in engine.usage())


def test_a_parameter_that_is_cast_has_memory_of_the_budget() -> None:
    task = Rotary()
    memory = task.linear.weight.data_ptr()
    with opened(task, precision="bf16"):
        assert task.linear.weight.data_ptr() != memory


def mapped(folder: Path) -> torch.Tensor:
    torch.save(torch.randn(8, 8), folder / "weight.pt")
    return torch.as_tensor(torch.load(folder / "weight.pt", mmap=True))


def read_only(folder: Path) -> torch.Tensor:
    np.save(folder / "weight.npy", np.ones((8, 8), dtype=np.float32))
    rows = np.load(folder / "weight.npy", mmap_mode="r")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it could be written to
        return torch.from_numpy(rows)


def part(_folder: Path) -> torch.Tensor:
    return torch.randn(128, 8)[64:72]


def shared(_folder: Path) -> torch.Tensor:
    values = torch.randn(8, 8)
    values.share_memory_()  # type: ignore[no-untyped-call]  # torch is
    return values


@pytest.mark.parametrize("source", [mapped, read_only, part, shared])
def test_memory_that_is_not_a_parameters_alone_is_left_to_its_user(
    source: Callable[[Path], torch.Tensor], tmp_path: Path
) -> None:
    task = Rotary()
    given = source(tmp_path)
    before = given.clone()
    task.linear.weight = nn.Parameter(given)
    with opened(task) as engine:
        assert task.linear.weight.data_ptr() != given.data_ptr()
        engine.backward(engine(task.batch(0)))
        engine.step()
        assert not torch.equal(task.linear.weight, before)
    assert torch.equal(given, before)


def test_no_parameter_keeps_a_flat_tensor_that_others_were_parts_of() -> None:
    task = Rotary()
    flat = torch.randn(128)
    task.linear.weight = nn.Parameter(flat[:64].view(8, 8))
    task.linear.bias = nn.Parameter(flat[64:72])
    whole = StorageWeakRef(flat.untyped_storage())  # type: ignore[no-untyped-call]
    del flat
    with opened(task):
        gc.collect()
        assert whole.expired()  # type: ignore[no-untyped-call]


def test_frozen_parameters_that_share_memory_are_of_the_default_budget_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, other, trained = (nn.Linear(512, 512, bias=False) for _ in range(3))
    one.weight.requires_grad_(False)
    other.weight = nn.Parameter(one.weight.detach(), requires_grad=False)
    task = nn.ModuleList([one, other, trained])
    free = Capacity(device=0, host=8 << 20, nvme={})
    monkeypatch.setattr(planning, "probe_capacity", lambda *_, **__: free)
    optimizer = torch.optim.SGD(trained.parameters(), lr=1e-3)
    with infinity_engine.initialize(task, optimizer, accelerator="cpu") as engine:
        (host,) = (usage for usage in engine.usage() if usage.tier is Tier.HOST)
        assert host.limit == (8 << 20) + 2 * 512 * 512 * 4


def test_a_model_whose_parameters_alone_exceed_the_budget_is_refused() -> None:
    task = nn.Linear(256, 256, bias=False)
    optimizer = torch.optim.SGD(task.parameters(), lr=1e-3)
    with pytest.raises(CapacityError, match="HOST"):
        infinity_engine.initialize(
            task, optimizer, accelerator="cpu", budget={"host": 256 * 256 * 4 - PAGE}
        )


def test_by_default_the_memory_that_parameters_have_already_is_of_the_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    task = nn.Linear(1024, 1024, bias=False)
    optimizer = torch.optim.SGD(task.parameters(), lr=1e-3)
    free = Capacity(device=0, host=8 << 20, nvme={})
    monkeypatch.setattr(planning, "probe_capacity", lambda *_, **__: free)
    with infinity_engine.initialize(task, optimizer, accelerator="cpu") as engine:
        (host,) = (usage for usage in engine.usage() if usage.tier is Tier.HOST)
        assert host.limit == (8 << 20) + 1024 * 1024 * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_early_updates_without_bf16_parameters_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ConfigError, match="only bf16 parameters are updated in the backward"):
        opened(Rotary().to(dtype), storage={"early_updates": True})
