"""Saved tensors that wait for the backward on drives: the same bits, whatever the backward asks for
in which order, within the limit; what fails is named and can be repeated.
"""

from __future__ import annotations

import errno
import os
import random
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import infinity_engine
from infinity_engine.activation import ActivationOffload, read_back
from infinity_engine.activation.memories import AT_REST, _SmallViews
from infinity_engine.engine.engine import Engine
from infinity_engine.errors import CapacityError, ConfigError, TransferError
from infinity_engine.lanes.meter import Cargo
from infinity_engine.plan import HostOnly, Lane, NvmeStreamed, Strategy
from infinity_engine.storage import Hop, Place, SwapFile
from support.engine_bits import Bits, bits_of, differing
from support.nvme_training import Case, emulated, opened
from support.small_models import MODELS, Task

Use = Callable[[Engine, Task], Bits]
PAGES_FROM = read_back._PAGES_FROM
ON_DRIVES: dict[str, object] = {
    "at": "nvme",
    "resident_bytes": 1024,  # so little that almost all of it leaves
    "small_bytes": 0,
}
CASES = (
    Case(strategy=HostOnly(), steps=3, small_bytes=0),
    Case(strategy=NvmeStreamed(), parameters="nvme", precision="bf16", steps=3, small_bytes=0),
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def reading_into_memory_that_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    # The models here are so small that their saved tensors would have fresh memory.
    monkeypatch.setattr(read_back, "_PAGES_FROM", 0)


def offload_of(engine: Engine) -> ActivationOffload:
    found = engine._parts.activations
    assert isinstance(found, ActivationOffload)
    return found


@contextmanager
def offloading(
    case: Case, drive: Path, on: Any = None, **activations: object
) -> Iterator[tuple[Engine, Task]]:
    with opened(case, on, drive, activations={**ON_DRIVES, **activations}) as (engine, task):
        yield engine, task


def engine_of(
    model: torch.nn.Module, drive: Path, *, nvme: str = "64MiB", **settings: Any
) -> Engine:
    """Return an engine with everything in memory, but what `settings` say of activations."""
    return infinity_engine.initialize(
        model,
        torch.optim.AdamW(model.parameters()),
        accelerator="cpu",
        budget={"host": "64MiB", "nvme": {str(drive): nvme}},
        strategy="host_only",
        calibration="off",
        **settings,
    )


def same_as_kept(use: Use, case: Case, drive: Path, on: Any = None) -> None:
    with opened(case, on, drive) as (engine, task):
        expected = use(engine, task)
    with offloading(case, drive, on and emulated(3)) as (engine, task):
        found = use(engine, task)
        assert "nvme write" in str(engine.report()), "it went to the drive"
    assert differing(expected, found) == []


def step_by_step(engine: Engine, task: Task) -> Bits:
    for seed in range(3):
        engine.backward(engine(task.batch(seed)))
        engine.step()
    return bits_of(engine)


@pytest.mark.parametrize("case", CASES, ids=["host", "drives"])
@pytest.mark.parametrize("model", MODELS)
def test_every_model_trains_with_the_same_bits(model: str, case: Case, tmp_path: Path) -> None:
    same_as_kept(step_by_step, replace(case, model=model), tmp_path)


@pytest.mark.parametrize("accelerator", ["cpu", "emulated"])
def test_micro_batches_are_summed_with_the_same_bits(accelerator: str, tmp_path: Path) -> None:
    on = emulated(3) if accelerator == "emulated" else None

    def accumulated(engine: Engine, task: Task) -> Bits:
        for seed in range(6):
            engine.backward(engine(task.batch(seed)))
            engine.step()
        return bits_of(engine)

    same_as_kept(accumulated, replace(CASES[1], accumulation=2), tmp_path, on)


@pytest.mark.parametrize("order", ["first to last", "last to first"])
def test_several_forwards_come_before_their_backwards(order: str, tmp_path: Path) -> None:
    def used(engine: Engine, task: Task) -> Bits:
        for seed in range(3):
            losses = [engine(task.batch(3 * seed + number)) for number in range(3)]
            for loss in losses if order == "first to last" else reversed(losses):
                engine.backward(loss)
            engine.step()
        return bits_of(engine)

    same_as_kept(used, replace(CASES[0], accumulation=3), tmp_path)


def test_a_retained_graph_is_differentiated_twice(tmp_path: Path) -> None:
    def used(engine: Engine, task: Task) -> Bits:
        for seed in range(2):
            loss = engine(task.batch(seed))
            engine.backward(loss, retain_graph=True)
            engine.backward(loss * 0.5)
            engine.step()
        return bits_of(engine)

    same_as_kept(used, CASES[0], tmp_path)


def test_an_evaluation_comes_between_forward_and_backward(tmp_path: Path) -> None:
    def used(engine: Engine, task: Task) -> Bits:
        for seed in range(2):
            loss = engine(task.batch(seed))
            with torch.no_grad():
                engine(task.batch(7))
            engine(task.batch(8))  # a graph that no backward uses
            engine.backward(loss)
            engine.step()
        return bits_of(engine)

    same_as_kept(used, CASES[0], tmp_path)


class Doubled(torch.nn.Module):
    """A loss with the gradient of its own input in it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(16, 64), torch.nn.Linear(64, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        out = self.second(self.first(x).tanh()).square().sum()
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        return torch.as_tensor(out + slope.square().sum())


def test_a_gradient_is_differentiated_again(tmp_path: Path) -> None:
    def trained(**settings: Any) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = Doubled()
        with engine_of(model, tmp_path, **settings) as engine:
            for seed in range(3):
                x = torch.randn(8, 16, generator=torch.Generator().manual_seed(seed))
                engine.backward(engine(x))
                engine.step()
            found: dict[str, torch.Tensor] = engine.state_dict()
            return found

    assert differing(trained(), trained(activations=ON_DRIVES)) == []


class Blocks(torch.nn.Module):
    """Wide blocks, each recomputed or not."""

    def __init__(self, recompute: str | None = None) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
            for _ in range(6)
        )
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if self.recompute is None:
                x = x + block(x)
            else:
                x = x + checkpoint(block, x, use_reentrant=self.recompute == "reentrant")
        return torch.as_tensor(x.square().mean())


@contextmanager
def blocks(
    drive: Path, recompute: str | None = None, **settings: Any
) -> Iterator[tuple[Engine, Blocks]]:
    torch.manual_seed(0)
    model = Blocks(recompute)
    with engine_of(model, drive, **settings) as engine:
        yield engine, model


def batch(seed: int, rows: int = 64) -> torch.Tensor:
    x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(seed))
    return x.requires_grad_()


@pytest.mark.parametrize("recompute", ["reentrant", "not reentrant"])
def test_the_inputs_of_recomputed_blocks_leave_too(recompute: str, tmp_path: Path) -> None:
    def trained(**settings: Any) -> Bits:
        with blocks(tmp_path, recompute, **settings) as (engine, _):
            for seed in range(3):
                engine.backward(engine(batch(seed)))
                engine.step()
            return bits_of(engine)

    assert differing(trained(), trained(activations=ON_DRIVES)) == []


def test_what_is_here_or_on_its_way_stays_within_the_limit(tmp_path: Path) -> None:
    limit = 256 << 10
    most = 0
    with blocks(
        tmp_path, activations={"at": "nvme", "resident_bytes": limit, "small_bytes": 0}
    ) as (engine, model):
        moves = offload_of(engine)._moves

        def look(*_: object) -> None:
            nonlocal most
            here = sum(moves.resident[number].record.nbytes for number in moves.resident)
            most = max(most, here + moves._evicting_bytes + moves._read_back.idle_bytes)

        for block in model.blocks:
            block.register_forward_hook(look)
            block.register_full_backward_hook(look)
        for seed in range(3):
            engine.backward(engine(batch(seed)))
            engine.step()
        whole = 6 * 64 * (64 + 2 * 256) * 4  # what the blocks save in a step
        assert most <= limit < whole


@pytest.mark.parametrize("limit", [1 << 20, 640 << 10], ids=["all fits", "most fits"])
def test_a_step_as_the_one_before_moves_no_more_than_there_is_no_room_for(
    limit: int, tmp_path: Path
) -> None:
    largest = 64 * 256 * 4
    whole = 6 * 64 * (64 + 2 * 256) * 4  # what the blocks save in a step
    with blocks(
        tmp_path, activations={"at": "nvme", "resident_bytes": limit, "small_bytes": 0}
    ) as (engine, _):
        written = []
        for seed in range(3):
            engine.backward(engine(batch(seed)))
            engine.step()
            link = engine.report().links.get(Lane.NVME_WRITE)
            written.append(0 if link is None else link.nbytes[Cargo.ACTIVATIONS])
    assert written[0] > 0, "nothing was known of the first step"
    needed = max(whole - limit, 0)
    assert needed <= written[2] <= needed + (2 * largest if needed else 0)


def test_memory_that_was_read_back_into_is_used_again_and_given_back(tmp_path: Path) -> None:
    limit = 256 << 10
    idle: list[int] = []
    with blocks(
        tmp_path, activations={"at": "nvme", "resident_bytes": limit, "small_bytes": 0}
    ) as (engine, model):
        memory = offload_of(engine)._moves._read_back

        def look(*_: object) -> None:
            idle.append(memory.idle_bytes)

        for block in model.blocks:
            block.register_full_backward_hook(look)
        for seed in range(2):
            loss = engine(batch(seed))
            assert memory.idle_bytes == 0  # what a forward saves has the room
            engine.backward(loss)
            engine.step()
            assert memory.idle_bytes == 0
        assert 0 < max(idle) <= limit
        engine.backward(engine(batch(2)))
    assert memory.idle_bytes == 0


def test_one_memory_is_kept_once_whatever_views_of_it_are_saved(tmp_path: Path) -> None:
    class Views(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            return torch.as_tensor((y.t() @ y + (y.view(-1)[::2].square().sum() * y.sum())).sum())

    torch.manual_seed(0)
    model = Views()
    with engine_of(
        model, tmp_path, activations={"at": "nvme", "resident_bytes": "8MiB", "small_bytes": 1024}
    ) as engine:
        loss = engine(batch(0))
        sizes = [memory.record.nbytes for memory in offload_of(engine)._memories.by_number.values()]
        assert sizes.count(64 * 64 * 4) == 2  # the input, and y
        engine.backward(loss)


class Parts(torch.nn.Module):
    """Saves a tensor in parts, each of which is a small view of it."""

    def __init__(self, sizes: list[int], order: list[int]) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(64, 128)
        self.sizes, self.order = sizes, order

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.linear(x).split(self.sizes)
        return torch.stack([parts[number].square().sum() for number in self.order]).sum()


@pytest.mark.parametrize(
    ("sizes", "order"),
    [([50, 7, 7], [0, 1, 2]), ([50, 7, 7], [1, 2, 0]), ([8] * 8, list(range(8)))],
    ids=["the largest first", "the largest last", "all small"],
)
def test_memory_that_is_saved_in_small_views_leaves_with_all_of_them(
    sizes: list[int], order: list[int], tmp_path: Path
) -> None:
    def trained(**settings: Any) -> Bits:
        torch.manual_seed(0)
        with engine_of(Parts(sizes, order), tmp_path, **settings) as engine:
            for seed in range(2):
                loss = engine(batch(seed))
                if settings:
                    memories = offload_of(engine)._memories.by_number.values()
                    whole = [one.views for one in memories if one.record.nbytes == 64 * 128 * 4]
                    assert whole == [len(sizes)]
                engine.backward(loss)
                engine.step()
            return bits_of(engine)

    much = {"at": "nvme", "resident_bytes": "8MiB", "small_bytes": 0}
    assert differing(trained(), trained(activations=much)) == []


def test_a_small_view_of_a_data_set_stays(tmp_path: Path) -> None:
    rows = torch.randn(64 * 64, 64)
    with blocks(tmp_path, activations=ON_DRIVES) as (engine, _):
        loss = engine(rows[:64])
        saved = offload_of(engine)._memories.by_number.values()
        assert max(memory.record.nbytes for memory in saved) < rows.numel() * 4
        engine.backward(loss)


class OfParts(torch.nn.Module):
    """Computes its loss of a linear layer's output, as `compute` says."""

    def __init__(self, compute: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(64, 128)
        self.compute = compute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.compute(self.linear(x))


ALL_STAYS = {"at": "nvme", "resident_bytes": "8MiB", "small_bytes": 0}


def test_overlapping_windows_of_a_data_set_stay(tmp_path: Path) -> None:
    rows = torch.randn(1024, 128)

    def compute(y: torch.Tensor) -> torch.Tensor:
        return torch.stack([(y * rows[8 * n : 8 * n + 64]).sum() for n in range(20)]).sum()

    with engine_of(OfParts(compute), tmp_path, activations=ALL_STAYS) as engine:
        loss = engine(batch(0))
        saved = offload_of(engine)._memories.by_number.values()
        assert max(memory.record.nbytes for memory in saved) < rows.numel() * 4
        engine.backward(loss)


def test_bytes_that_several_small_views_cover_count_once() -> None:
    drawn = random.Random(0)
    for _ in range(50):
        views, covered = _SmallViews(version=0), set[int]()
        for _ in range(20):
            begin = drawn.randrange(200)
            end = begin + drawn.randrange(30)
            views.cover(begin, end)
            covered.update(range(begin, end))
            assert views.covered == len(covered)


def test_small_views_that_are_gone_do_not_count(tmp_path: Path) -> None:
    def compute(y: torch.Tensor) -> torch.Tensor:
        for number in range(7):
            y[8 * number : 8 * number + 8].square()  # saves a view, as long as its result is there
        return y[56:].square().sum()

    with engine_of(OfParts(compute), tmp_path, activations=ALL_STAYS) as engine:
        loss = engine(batch(0))
        saved = offload_of(engine)._memories.by_number.values()
        assert 64 * 128 * 4 not in [memory.record.nbytes for memory in saved]
        engine.backward(loss)


def change_between(y: torch.Tensor) -> torch.Tensor:
    first = y[:8].square().sum()
    with torch.no_grad():
        y.add_(1.0)
    return first + torch.stack([y[8 * n : 8 * n + 8].square().sum() for n in range(1, 8)]).sum()


def change_another_alias(y: torch.Tensor) -> torch.Tensor:
    alias = y.data  # of the same memory, with a version of its own
    loss = (y[:8] * alias[:8]).sum() + y[8:16].square().sum()
    alias.add_(1.0)
    return loss


def change_another_alias_of_all(y: torch.Tensor) -> torch.Tensor:
    alias = y.data
    loss = y.square().sum() + (y * alias).sum()
    alias.add_(1.0)
    return loss


@pytest.mark.parametrize(
    "compute", [change_between, change_another_alias, change_another_alias_of_all]
)
def test_a_change_of_a_view_is_an_error_as_in_torch(
    compute: Callable[[torch.Tensor], torch.Tensor], tmp_path: Path
) -> None:
    cases: tuple[dict[str, Any], ...] = (
        {},
        {"activations": ALL_STAYS},
        {"activations": ON_DRIVES},
    )
    for settings in cases:
        with engine_of(OfParts(compute), tmp_path, **settings) as engine:
            loss = engine(batch(0))
            if settings:
                saved = offload_of(engine)._memories.by_number.values()
                assert 64 * 128 * 4 in [memory.record.nbytes for memory in saved]
            with pytest.raises(RuntimeError, match=r"modified by an in-?place operation"):
                engine.backward(loss)


@pytest.mark.parametrize("use", ["a retained graph", "two forwards"])
def test_memory_that_left_in_small_views_comes_back_whenever_it_is_needed(
    use: str, tmp_path: Path
) -> None:
    def trained(**settings: Any) -> Bits:
        torch.manual_seed(0)
        with engine_of(
            Parts([8] * 8, list(range(8))), tmp_path, accumulation_steps=2, **settings
        ) as engine:
            for seed in range(2):
                if use == "two forwards":
                    losses = [engine(batch(seed)), engine(batch(seed + 7))]
                    for loss in losses:
                        engine.backward(loss)
                else:
                    loss = engine(batch(seed))
                    engine.backward(loss, retain_graph=True)
                    engine.backward(loss)
                engine.step()
            return bits_of(engine)

    assert differing(trained(), trained(activations=ON_DRIVES)) == []


class OfTwo(torch.nn.Module):
    """Saves both of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(64, 8), torch.nn.Linear(64, 8)

    def forward(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(
            self.first(first).square().sum() + self.second(second).square().sum()
        )


@pytest.mark.parametrize("rows", [64, 2048])
@pytest.mark.parametrize("settings", [ALL_STAYS, ON_DRIVES], ids=["stays", "leaves"])
def test_storages_of_two_sizes_at_one_address_are_two(
    rows: int, settings: dict[str, object], tmp_path: Path
) -> None:
    values = np.random.default_rng(0).standard_normal((rows, 64)).astype(np.float32)

    def trained(**more: Any) -> Bits:
        torch.manual_seed(0)
        with engine_of(OfTwo(), tmp_path, **more) as engine:
            for _ in range(2):
                part, whole = torch.from_numpy(values[: rows // 2]), torch.from_numpy(values)
                engine.backward(engine(part, whole))
                engine.step()
            return bits_of(engine)

    assert differing(trained(), trained(activations=settings)) == []


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_stay_where_they_are(tmp_path: Path) -> None:
    class Nested(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(64, 64)

        def forward(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
            y = self.linear(torch.nested.as_nested_tensor([first, second]))
            return torch.as_tensor(torch.nested.to_padded_tensor(y * y, 0.0).sum())

    def trained(**settings: Any) -> Bits:
        torch.manual_seed(0)
        with engine_of(Nested(), tmp_path, parameters="device", **settings) as engine:
            engine.backward(engine(batch(0, rows=3).detach(), batch(1, rows=5).detach()))
            engine.step()
            return bits_of(engine)

    assert differing(trained(), trained(activations=ON_DRIVES)) == []


def test_many_tiny_tensors_take_about_the_memory_that_they_are_counted_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_back, "_PAGES_FROM", PAGES_FROM)  # as for users

    class Tiny(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(64, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x[:1])
            for _ in range(1000):
                y = y.exp().log()
                y.register_hook(look)
            return torch.as_tensor(y.sum())

    taken: list[int] = []

    def look(_: torch.Tensor) -> None:
        moves = offload_of(engine)._moves
        there = [moves.resident[number] for number in moves.resident]
        taken.extend(
            moves.lease(memory).flat().untyped_storage().nbytes()
            for memory in there
            if memory.transfer is AT_REST and not memory.is_original
        )

    torch.manual_seed(0)
    few = {"at": "nvme", "resident_bytes": 4096, "small_bytes": 0}
    with engine_of(Tiny(), tmp_path, activations=few) as engine:
        engine.backward(engine(batch(0)))
    assert taken
    assert max(taken) <= 64


def test_a_graph_that_is_dropped_gives_its_places_back(tmp_path: Path) -> None:
    with blocks(tmp_path, activations=ON_DRIVES) as (engine, _):
        engine.backward(engine(batch(0)))
        engine.step()
        swap = engine._parts.drives._swap
        assert swap is not None
        free, capacity = swap.free_bytes, swap.capacity
        for seed in range(5):
            engine(batch(seed))
        engine.backward(engine(batch(0)))
        engine.step()
        assert swap.free_bytes - free == swap.capacity - capacity
        assert not offload_of(engine)._memories.by_number


def test_a_change_in_place_after_saving_is_an_error_as_in_torch(tmp_path: Path) -> None:
    class Spoils(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x).exp()  # saves its result
            z = y * 1.0
            y.add_(1.0)
            return torch.as_tensor(z.sum() + y.sum())

    torch.manual_seed(0)
    model = Spoils()
    with engine_of(
        model, tmp_path, activations={"at": "nvme", "resident_bytes": "8MiB", "small_bytes": 0}
    ) as engine:
        loss = engine(batch(0))
        with pytest.raises(RuntimeError, match="modified by an in-place operation"):
            engine.backward(loss)


def test_a_change_of_what_has_left_is_an_error_as_in_torch(tmp_path: Path) -> None:
    class Shows(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(64, 64)
            self.results: list[torch.Tensor] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.results = [self.linear(x).exp() for _ in range(8)]  # each saves its result
            return torch.stack(self.results).sum()

    torch.manual_seed(0)
    model = Shows()
    few = {"at": "nvme", "resident_bytes": 4 * 64 * 64 * 4, "small_bytes": 0}
    with engine_of(model, tmp_path, activations=few) as engine:
        loss = engine(batch(0))
        moves = offload_of(engine)._moves
        moves._wait_for_evictions(0)
        saved = moves._memories.by_number.values()
        left = {memory.place.address for memory in saved if not memory.is_original}
        changed = next(each for each in model.results if each.data_ptr() in left)
        with torch.no_grad():
            changed.add_(1.0)
        with pytest.raises(RuntimeError, match=r"shape \(64, 64\) .* modified by"):
            engine.backward(loss)


def failing(method: str, times: int, patch: pytest.MonkeyPatch) -> None:
    """Let the next operations of swap files with activations fail."""
    real, left = getattr(SwapFile, method), [times]

    class Failed:
        def done(self) -> bool:
            return True

        def wait(self) -> int:
            raise TransferError(
                errno=errno.EIO, path="drive", offset=0, asked=1, done=0, what="activation"
            )

    def operation(swap: SwapFile, place: Place, memory: object, *, what: str = "") -> Hop:
        if what.startswith("activation") and left[0]:
            left[0] -= 1
            return Failed()
        hop: Hop = real(swap, place, memory, what=what)
        return hop

    patch.setattr(SwapFile, method, operation)


class Unhurried:
    """An I/O that has not ended until it is waited for."""

    def __init__(self, hop: Hop) -> None:
        self._hop = hop
        self._waited = False

    def done(self) -> bool:
        return self._waited

    def wait(self) -> int:
        self._waited = True
        return self._hop.wait()


@pytest.fixture
def slow_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no write of an activation end before something waits for it."""
    real = SwapFile.write

    def write(swap: SwapFile, place: Place, memory: Any, *, what: str = "") -> Any:
        hop = real(swap, place, memory, what=what)
        return Unhurried(hop) if what.startswith("activation") else hop

    monkeypatch.setattr(SwapFile, "write", write)


@pytest.mark.usefixtures("slow_writes")
def test_a_graph_that_goes_while_it_is_written_spoils_no_later_step(tmp_path: Path) -> None:
    def trained(**settings: Any) -> Bits:
        with blocks(tmp_path, **settings) as (engine, _):
            for seed in range(4):
                engine(batch(seed + 10))  # no backward uses it
                engine.backward(engine(batch(seed)))
                engine.step()
            return bits_of(engine)

    few = {"at": "nvme", "resident_bytes": 80_000, "small_bytes": 0}
    assert differing(trained(), trained(activations=few)) == []


@pytest.mark.usefixtures("slow_writes")
def test_a_buffer_that_is_filled_anew_while_it_is_written_is_saved_anew(tmp_path: Path) -> None:
    def trained(**settings: Any) -> Bits:
        with blocks(tmp_path, **settings) as (engine, _):
            buffer = np.zeros((64, 64), np.float32)
            x = torch.from_numpy(buffer).requires_grad_()
            for seed in range(4):
                np.copyto(buffer, batch(seed + 10).detach().numpy())
                first = engine(x)
                np.copyto(buffer, batch(seed).detach().numpy())
                engine.backward(engine(x))
                del first
                engine.step()
            return bits_of(engine)

    few = {"at": "nvme", "resident_bytes": 80_000, "small_bytes": 0}
    assert differing(trained(), trained(activations=few)) == []


def test_failed_moves_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with blocks(tmp_path, activations=ON_DRIVES) as (engine, _):
        for seed in range(5):
            with monkeypatch.context() as patch:
                failing("write", 1, patch)
                with pytest.raises(TransferError, match="activation"):
                    engine.backward(engine(batch(seed)))
            engine.zero_grad()
        engine.backward(engine(batch(0)))
        engine.step()
        assert offload_of(engine)._moves._mover._transfers == []


class Late:
    """A write that fails when it is waited for, and has ended when a test says so."""

    def __init__(self, hop: Hop) -> None:
        self._hop = hop
        self.over = False

    def done(self) -> bool:
        return self.over

    def wait(self) -> int:
        self._hop.wait()
        raise TransferError(
            errno=errno.EIO, path="drive", offset=0, asked=1, done=0, what="activation"
        )


def write_late(patch: pytest.MonkeyPatch, writes: list[Late]) -> None:
    """Let writes of activations fail so, and note them."""
    real = SwapFile.write

    def write(swap: SwapFile, place: Place, memory: Any, *, what: str = "") -> Any:
        hop = real(swap, place, memory, what=what)
        if not what.startswith("activation"):
            return hop
        writes.append(Late(hop))
        return writes[-1]

    patch.setattr(SwapFile, "write", write)


def test_a_write_that_fails_late_does_not_fail_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with blocks(
        tmp_path, activations={"at": "nvme", "resident_bytes": 1_600_000, "small_bytes": 0}
    ) as (engine, _):
        engine.backward(engine(batch(0)))
        writes: list[Late] = []
        with monkeypatch.context() as patch:
            write_late(patch, writes)
            kept = engine(batch(7))
        for write in writes:
            write.over = True
        assert engine.step().outcome is infinity_engine.Outcome.UPDATED
        with pytest.raises(TransferError, match="activation"):
            engine(batch(1))
        del kept


def test_tensors_of_the_caller_can_be_resized_afterwards(tmp_path: Path) -> None:
    with blocks(tmp_path, activations=ON_DRIVES) as (engine, _):
        x = batch(0)
        engine.backward(engine(x))
        x.grad = None
        x.detach().untyped_storage().resize_(1 << 16)
        engine.step()


@pytest.mark.parametrize("method", ["write", "read"])
def test_a_drive_that_fails_ends_the_pass_and_its_batch_can_be_run_again(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with blocks(tmp_path) as (engine, _):
        for seed in range(2):
            engine.backward(engine(batch(seed)))
            engine.step()
        expected = bits_of(engine)
    with blocks(tmp_path, activations=ON_DRIVES) as (engine, _):
        engine.backward(engine(batch(0)))
        engine.step()
        with monkeypatch.context() as patch:
            failing(method, 1, patch)
            with pytest.raises(TransferError, match="activation"):
                engine.backward(engine(batch(1)))
        engine.zero_grad()
        engine.backward(engine(batch(1)))
        engine.step()
        assert differing(expected, bits_of(engine)) == []


def test_a_read_that_failed_can_be_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with blocks(tmp_path) as (engine, _):
        engine.backward(engine(batch(0)))
        engine.step()
        expected = bits_of(engine)
    with blocks(tmp_path, activations=ON_DRIVES) as (engine, _):
        loss = engine(batch(0))
        with monkeypatch.context() as patch:
            failing("read", 1, patch)
            with pytest.raises(TransferError, match="activation"):
                engine.backward(loss, retain_graph=True)
        engine.zero_grad()
        engine.backward(loss)
        engine.step()
        assert differing(expected, bits_of(engine)) == []


def test_writes_that_fail_together_are_told_once_though_their_graph_is_still_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with blocks(tmp_path) as (engine, _):
        engine.backward(engine(batch(0)))
        engine.step()
        expected = bits_of(engine)
    writes: list[Late] = []
    few = {"at": "nvme", "resident_bytes": 1_200_000, "small_bytes": 0}
    with blocks(tmp_path, activations=few) as (engine, _):
        with monkeypatch.context() as patch:
            write_late(patch, writes)
            loss = engine(batch(0))
        assert len(writes) > 1
        writes[0].over = True
        with pytest.raises(TransferError, match="activation"):
            engine.backward(loss)
        for write in writes:
            write.over = True
        engine.zero_grad()
        loss = engine(batch(0))  # the graph that failed is there until this returns
        engine.backward(loss)
        engine.step()
        assert differing(expected, bits_of(engine)) == []


def test_a_graph_in_a_forked_child_says_whose_it_is(tmp_path: Path) -> None:
    with blocks(tmp_path, activations=ON_DRIVES) as (engine, _):
        loss = engine(batch(0))
        reads, writes = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                loss.backward()
            except BaseException as error:
                os.write(writes, f"{type(error).__name__}: {error}".encode())
            os._exit(0)
        os.close(writes)
        with open(reads, "rb") as pipe:
            said = pipe.read().decode()
        os.waitpid(child, 0)
        assert said.startswith(f"RuntimeError: This graph belongs to process {os.getpid()}")
        engine.backward(loss)
        engine.step()


def test_drives_that_are_too_small_refuse_by_name(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Blocks()
    with engine_of(model, tmp_path, nvme="256KiB", activations=ON_DRIVES) as engine:
        with pytest.raises(CapacityError, match="activation") as refused:
            engine(batch(0))
        assert str(tmp_path) in str(refused.value)
        del refused  # its frames have the graph that did not fit
        engine.backward(engine(batch(0, rows=1)))
        engine.step()


def test_what_an_engine_has_saved_goes_when_it_is_closed(tmp_path: Path) -> None:
    with blocks(tmp_path, activations=ON_DRIVES) as (engine, _):
        loss = engine(batch(0))
    with pytest.raises(RuntimeError, match="The engine was closed before this backward"):
        loss.backward()
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == []


def test_what_stays_goes_with_its_engine_too(tmp_path: Path) -> None:
    held: list[weakref.ref[torch.UntypedStorage]] = []

    def note(y: torch.Tensor) -> torch.Tensor:
        z = y.exp()
        held.append(weakref.ref(z.untyped_storage()))
        return z.sum()

    with engine_of(OfParts(note), tmp_path, activations=ALL_STAYS) as engine:
        loss = engine(batch(0))
        assert offload_of(engine)._moves.resident.used
    assert [held[0]() is None, offload_of(engine)._moves.resident.used] == [True, 0]
    del loss


@pytest.mark.parametrize(
    ("settings", "budget", "said"),
    [
        ({"at": "host"}, {"nvme": True}, "in host memory already"),
        ({"at": "nvme"}, {}, "a budget with nvme"),
        ({"at": "nowhere"}, {}, "activations.at"),
        ({"resident_bytes": "many"}, {}, "activations.resident_bytes"),
    ],
)
def test_settings_that_move_nothing_are_refused(
    settings: dict[str, object], budget: dict[str, object], said: str, tmp_path: Path
) -> None:
    model = Blocks()
    whole: dict[str, object] = {"host": "64MiB"}
    if budget:
        whole["nvme"] = {str(tmp_path): "64MiB"}
    with pytest.raises(ConfigError, match=said):
        infinity_engine.initialize(
            model, "adamw", accelerator="cpu", budget=whole, activations=settings
        )


def test_a_host_without_room_for_what_stays_is_refused(tmp_path: Path) -> None:
    model = Blocks()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(
        CapacityError,
        match=r"at least 3[3-9]\d{6} B \(activations\.resident_bytes alone is 33554432 B\), or "
        r"lower activations\.resident_bytes, or",
    ) as refused:
        infinity_engine.initialize(
            model,
            "adamw",
            accelerator="cpu",
            budget={"host": "24MiB", "nvme": {str(tmp_path): "64MiB"}},
            strategy="host_only",
            calibration="off",
            activations={"at": "nvme", "resident_bytes": "32MiB"},
        )
    assert all(map(torch.equal, before, model.parameters()))
    assert refused.value.limit == 24 << 20
    assert (
        refused.value.asked < 4 << 20
    )  # without what is saved, which is no part of what was asked
    assert max(nbytes for _, nbytes in refused.value.holders) == 24 << 20


def test_the_report_counts_what_left(tmp_path: Path) -> None:
    with blocks(tmp_path, activations=ON_DRIVES) as (engine, _):
        engine.backward(engine(batch(0)))
        engine.step()
        report = engine.report()
        hits = report.hits[Cargo.ACTIVATIONS]
        assert hits.found + hits.missing > 6 * 64 * (64 + 2 * 256) * 4
        assert hits.missing > hits.found
        assert "nvme write" in str(report)
        assert "wait for activations" in str(report)


@pytest.mark.parametrize("strategy", [HostOnly(), NvmeStreamed()])
def test_a_model_that_is_called_past_the_engine_can_be_trained_too(
    strategy: Strategy, tmp_path: Path
) -> None:
    case = replace(CASES[1], strategy=strategy, parameters="auto")

    def past(engine: Engine, task: Task) -> Bits:
        for seed in range(2):
            engine.backward(task(task.batch(seed)))
            engine.step()
        return bits_of(engine)

    with opened(case, None, tmp_path) as (engine, task):
        expected = past(engine, task)
    with offloading(case, tmp_path) as (engine, task):
        found = past(engine, task)
    assert differing(expected, found) == []
