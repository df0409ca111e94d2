"""activations="auto": the first steps measure, then each block has its own way, within the budget."""

from __future__ import annotations

import errno
import json
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity_engine
from infinity_engine.accel import CpuAccelerator
from infinity_engine.activation import ActivationOffload
from infinity_engine.activation.agreeing import Agreement, ChosenAlone, ChosenTogether
from infinity_engine.activation.blocks import RepeatedBlock, find_blocks
from infinity_engine.activation.deciding import MeasuredWays
from infinity_engine.activation.lifetimes import Lifetimes
from infinity_engine.activation.moving import SharedRoom
from infinity_engine.activation.probing import Homes
from infinity_engine.engine.engine import Engine
from infinity_engine.errors import ConfigError, TransferError
from infinity_engine.lanes.meter import Meter
from infinity_engine.memory import Ledger
from infinity_engine.placement.activations import ActivationRates, ActivationRoom, BlockWay
from infinity_engine.plan import HostOnly, ResolvedBudget, Tier
from infinity_engine.storage import Hop, Place, SwapFile
from infinity_engine.telemetry import NullTelemetry
from support.block_ways import activations_by_block, take_turns
from support.engine_bits import Bits, bits_of, differing
from support.nvme_training import Case, opened
from support.small_models import MODELS
from support.warm_programs import WITH_SUPPORT, run_warm

ROWS = 64
SAVED = ROWS * (3 * 256 + 64) * 4  # of a block, about


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Stack(nn.Module):
    """Wide blocks, and a loss."""

    def __init__(self, depth: int = 6) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
            for _ in range(depth)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return torch.as_tensor(x.square().mean())


def batch(seed: int, rows: int = ROWS) -> torch.Tensor:
    x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(seed))
    return x.requires_grad_()


@contextmanager
def stack_of(
    drive: Path | None, activations: object, **settings: Any
) -> Iterator[tuple[Engine, Stack]]:
    torch.manual_seed(0)
    model = Stack()
    budget: dict[str, object] = {"host": "64MiB"}
    if drive is not None:
        budget["nvme"] = {str(drive): "64MiB"}
    with infinity_engine.initialize(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        accelerator="cpu",
        budget=budget,
        strategy="host_only",
        calibration="off",
        **{"activations": activations, **settings},
    ) as engine:
        yield engine, model


def train(engine: Engine, steps: int, *, first: int = 0, rows: int = ROWS) -> None:
    for seed in range(first, first + steps):
        engine.backward(engine(batch(seed, rows)))
        engine.step()


def ways_of(engine: Engine) -> dict[str, int]:
    counts: dict[str, int] = {}
    for use in engine.report().blocks:
        counts[use.way] = counts.get(use.way, 0) + 1
    return counts


def auto(resident: int, **more: object) -> dict[str, object]:
    return {"at": "auto", "resident_bytes": resident, "small_bytes": 0, **more}


def test_the_first_steps_hold_least_and_then_all_is_kept_that_fits(tmp_path: Path) -> None:
    with stack_of(None, auto(8 << 20)) as (engine, _):
        train(engine, 2)
        assert ways_of(engine) == {"recomputed": 6}
        train(engine, 1, first=2)
        assert ways_of(engine) == {"kept": 6}
        assert "6 kept" in str(engine.report())
        assert "1 GiB more would save nothing" in str(engine.report())


def test_the_report_has_activations_over_time_by_block() -> None:
    with stack_of(None, auto(3 * SAVED + 6 * ROWS * 64 * 4)) as (engine, _):
        train(engine, 3)
        report = engine.report()
    ways = {use.name: use.way for use in report.blocks}
    again = {name for name, way in ways.items() if way == "recomputed"}
    assert again
    assert {part.block for part in report.held.parts if part.held == "kept"} == set(ways)
    assert {part.block for part in report.held.parts if part.held == "made again"} == again
    parts = {
        held: [part for part in report.held.parts if part.held == held]
        for held in ("kept", "made again")
    }
    # No block's backward begins, and so none is made again, before all have run forward.
    last_forward = max(part.start_ns for part in parts["kept"])
    assert last_forward <= min(part.start_ns for part in parts["made again"])
    # Blocks come one after another, and nothing is left.
    kept = [nbytes for _, nbytes in report.held.points("kept")]
    assert 0 < kept[0] < max(kept) > kept[-1] == 0
    assert "activations made again" in str(report)


def test_a_small_limit_keeps_some_and_recomputes_some() -> None:
    with stack_of(None, auto(3 * SAVED + 6 * ROWS * 64 * 4)) as (engine, _):
        train(engine, 3)
        ways = ways_of(engine)
        assert set(ways) == {"kept", "recomputed"}
        assert "1 GiB more of DEVICE would save" in str(engine.report())


def test_what_is_held_stays_within_the_limit(tmp_path: Path) -> None:
    limit = 3 * SAVED
    most = 0
    with stack_of(tmp_path, auto(limit)) as (engine, model):
        by_block = activations_by_block(engine)

        def look(*_: object) -> None:
            nonlocal most
            most = max(most, by_block._lifetimes.kept)

        for block in model.blocks:
            block.register_forward_hook(look)
        for seed in range(5):
            # Two graphs at a time, which the choice knows nothing of.
            losses = [engine(batch(seed)), engine(batch(seed + 9))]
            for loss in losses:
                engine.backward(loss)
            engine.step()
        assert 0 < most <= limit


def test_moves_use_room_of_kept_blocks_only_while_these_do_not(tmp_path: Path) -> None:
    limit = 3 * SAVED
    held: list[int] = []
    with stack_of(tmp_path, auto(limit)) as (engine, model):
        train(engine, 2)
        by_block = activations_by_block(engine)
        drives = by_block._keepers[Tier.NVME]
        assert isinstance(drives, ActivationOffload)
        # As chosen where the drive is about as fast as computing, whatever this machine's is.
        ways = [BlockWay.DRIVE] * 5 + [BlockWay.KEEP]
        decider = by_block._decider
        assert isinstance(decider, MeasuredWays)
        decider.adopt(ways)

        def look(*_: object) -> None:
            moves = drives._moves
            held.append(by_block._lifetimes.kept + moves.resident._used + moves._evicting_bytes)

        for block in model.blocks:
            block.register_forward_hook(look)
            block.register_full_backward_hook(look)
        train(engine, 3, first=2)
        assert [use.way for use in engine.report().blocks] == [way.value for way in ways]
    assert 0 < max(held) <= limit


@pytest.mark.parametrize("resident", [2 * SAVED, 4 * SAVED, 32 << 20])
@pytest.mark.parametrize("drives", [True, False])
def test_chosen_ways_train_with_the_same_bits(resident: int, drives: bool, tmp_path: Path) -> None:
    def trained(activations: object) -> Bits:
        with stack_of(tmp_path if drives else None, activations) as (engine, _):
            train(engine, 5)
            return bits_of(engine)

    assert differing(trained({}), trained(auto(resident))) == []


class Looped(Stack):
    """Blocks that are called twice in a forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in (*self.blocks, *self.blocks):
            x = x + block(x)
        return torch.as_tensor(x.square().mean())


def test_blocks_that_are_called_twice_are_chosen_for_both_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(globals(), "Stack", Looped)
    with stack_of(None, auto(7 * SAVED)) as (engine, _):
        train(engine, 3)
        chosen, ways = bits_of(engine), ways_of(engine)
        by_block = activations_by_block(engine)
        assert isinstance(by_block._decider, MeasuredWays)
        assert {cost.calls for cost in by_block._decider.costs()} == {2}
        choice = by_block._decider.choice
    assert choice is not None
    # Not more is kept than fits: then no call has to go another way than was chosen.
    assert set(ways) == {"kept", "recomputed"}
    assert ways == {way.value: count for way, count in choice.counts().items()}
    with stack_of(None, {}) as (engine, _):
        train(engine, 3)
        assert differing(chosen, bits_of(engine)) == []


@pytest.mark.parametrize("model", MODELS)
def test_every_model_trains_with_the_same_bits(model: str, tmp_path: Path) -> None:
    case = Case(model=model, strategy=HostOnly(), steps=4, small_bytes=0)

    def trained(**settings: Any) -> Bits:
        with opened(case, None, tmp_path, **settings) as (engine, task):
            for seed in range(case.steps):
                engine.backward(engine(task.batch(seed)))
                engine.step()
            return bits_of(engine)

    expected = trained()
    assert differing(expected, trained(activations=auto(4096))) == []
    assert differing(expected, trained(activations={"recompute": "blocks"})) == []


def test_text_in_place_of_the_section_is_enough() -> None:
    with stack_of(None, "auto") as (engine, _):
        train(engine, 3)
        assert "6 kept" in str(engine.report())


def test_longer_batches_are_measured_again_and_chosen_for() -> None:
    with stack_of(None, auto(8 * SAVED)) as (engine, _):
        train(engine, 3)
        assert ways_of(engine) == {"kept": 6}
        train(engine, 1, first=3, rows=4 * ROWS)
        # Within the limit meanwhile: blocks that do not fit are recomputed.
        assert engine._parts.activations.described().startswith("blocks have saved more")
        train(engine, 2, first=4, rows=4 * ROWS)
        assert "recomputed" in ways_of(engine) or "kept" in ways_of(engine)
        assert "predicted" in engine._parts.activations.described()


def test_nothing_is_chosen_for_models_without_blocks() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    with infinity_engine.initialize(
        model,
        torch.optim.AdamW(model.parameters()),
        accelerator="cpu",
        budget={"host": "64MiB"},
        calibration="off",
        activations="auto",
    ) as engine:
        for _ in range(3):
            engine.backward(engine(torch.randn(4, 8)).square().mean())
            engine.step()
        assert "no repeated blocks" in str(engine.report())


def test_recompute_beside_auto_is_refused() -> None:
    with (
        pytest.raises(ConfigError, match=r"activations\.recompute"),
        stack_of(None, auto(1 << 20, recompute="blocks")),
    ):
        pass


# --- faults ---------------------------------------------------------------------------------------


def failing(method: str, patch: pytest.MonkeyPatch) -> None:
    """Let the next operation of swap files with activations fail."""
    real, left = getattr(SwapFile, method), [1]

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


@pytest.mark.parametrize("method", ["write", "read"])
def test_a_drive_that_fails_among_mixed_ways_is_named_and_the_batch_runs_again(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stack_of(None, {}) as (engine, _):
        train(engine, 3)
        expected = bits_of(engine)
    with stack_of(tmp_path, auto(2048)) as (engine, _):
        take_turns(engine)
        train(engine, 2)
        with monkeypatch.context() as patch:
            failing(method, patch)
            with pytest.raises(TransferError, match="activation"):
                engine.backward(engine(batch(2)))
        engine.zero_grad()
        engine.backward(engine(batch(2)))
        engine.step()
        assert differing(expected, bits_of(engine)) == []


@pytest.mark.parametrize("method", ["write", "read"])
def test_a_drive_that_fails_while_it_is_measured_is_left_out(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stack_of(tmp_path, auto(4 * SAVED)) as (engine, _):
        train(engine, 1)
        with monkeypatch.context() as patch:
            failing(method, patch)
            train(engine, 1, first=1)
        train(engine, 1, first=2)
        assert not any("drives" in way for way in ways_of(engine))


KILLED = """
import os, signal, sys
from pathlib import Path
import torch
from torch import nn
import infinity_engine
from support.block_ways import take_turns
from support.unnamed_files import unnamed_files

torch.manual_seed(0)
drive = Path(sys.argv[1])
model = nn.Sequential(
    *(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(8))
)
engine = infinity_engine.initialize(
    model,
    torch.optim.AdamW(model.parameters()),
    accelerator="cpu",
    budget={"host": "64MiB", "nvme": {str(drive): "64MiB"}},
    strategy="host_only",
    calibration="off",
    activations={"at": "auto", "resident_bytes": 2048, "small_bytes": 0},
)
take_turns(engine)
loss = engine(torch.randn(64, 64, requires_grad=True)).square().mean()
model[2][0].weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
print(*unnamed_files(drive), flush=True)
engine.backward(loss)
"""


def test_a_kill_in_the_backward_leaves_nothing_on_the_drive(tmp_path: Path) -> None:
    drive = tmp_path / "drive"
    drive.mkdir()
    done = run_warm(KILLED, drive, folder=tmp_path, environment=WITH_SUPPORT)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert done.stdout.strip(), "what was saved was on the drive, in files that end with a process"
    assert list(drive.iterdir()) == []


# --- the decider ----------------------------------------------------------------------------------

MIB = 1 << 20
NO_MOVES = ActivationRates()


class KnownHomes(Homes):
    """Homes with these rates, where so many bytes wait."""

    def __init__(
        self, shared: SharedRoom, tiers: tuple[Tier, ...], rates: ActivationRates, waiting: int
    ) -> None:
        super().__init__({}, shared, over_link=False)
        self.tiers, self.known, self.bytes_waiting = tiers, rates, waiting

    def waiting(self, tier: Tier) -> int:
        return self.bytes_waiting

    def rates(self) -> ActivationRates:
        return self.known


def decider(
    room: ActivationRoom,
    rates: ActivationRates = NO_MOVES,
    homes: tuple[Tier, ...] = (),
    agreement: Agreement = ChosenAlone(),  # noqa: B008  # it has no state
    waiting: int = 0,
) -> tuple[MeasuredWays, tuple[RepeatedBlock, ...]]:
    blocks = find_blocks(Stack(4))
    ticks = iter(range(10**6))
    ledger = Ledger(ResolvedBudget(device=0, host=0, nvme={}))
    meter = Meter(NullTelemetry(), CpuAccelerator(), ledger)
    ways = MeasuredWays(
        blocks,
        room,
        KnownHomes(SharedRoom(Lifetimes(meter)), homes, rates, waiting),
        clock=lambda: float(next(ticks)),
        agreement=agreement,
    )
    return ways, blocks


def measured(
    ways: MeasuredWays, blocks: tuple[RepeatedBlock, ...], saved: int, steps: int = 2
) -> Mapping[str, BlockWay]:
    """Let some steps be measured; return the ways of the next forward."""
    for _ in range(steps):
        for block in blocks:
            ways.way(block, inputs=MIB, held=0)
            ways.note_call(block, saved=saved, inputs=MIB, seconds=1.0)
        for start, block in enumerate(reversed(blocks)):
            ways.note_run_again(block, start=3.0 * start, seconds=1.0)
        ways.end_step()
    return {block.name: ways.way(block, inputs=MIB, held=0) for block in blocks}


def test_times_of_blocks_of_one_kind_are_put_together() -> None:
    ways, blocks = decider(ActivationRoom(device=1 << 30))
    measured(ways, blocks, 10 * MIB, steps=1)
    for block in blocks:
        ways.note_call(block, saved=10 * MIB, inputs=MIB, seconds=1.0)
    for start, block in enumerate(reversed(blocks)):
        ways.note_run_again(block, start=3.0 * start, seconds=1.0)
    costs = ways.costs()
    assert {(cost.forward_s, cost.backward_s, cost.recompute_s) for cost in costs} == {
        (1.0, 2.0, 1.0)
    }


def test_a_block_that_cannot_run_again_is_never_asked_to() -> None:
    ways, blocks = decider(ActivationRoom(device=25 * MIB))
    ways.refuse_recompute(blocks[1], "as asked")
    chosen = measured(ways, blocks, 10 * MIB)
    assert not chosen[blocks[1].name].recomputes
    assert chosen[blocks[0].name].recomputes
    assert "1 kept: as asked" in ways.described() or "kept: as asked" in ways.described()


def test_blocks_are_recomputed_where_more_is_held_than_expected() -> None:
    ways, blocks = decider(ActivationRoom(device=100 * MIB))
    assert set(measured(ways, blocks, 10 * MIB).values()) == {BlockWay.KEEP}
    assert ways.way(blocks[0], inputs=MIB, held=95 * MIB) is BlockWay.RECOMPUTE


def test_room_for_moves_is_left_free_only_where_something_moves() -> None:
    ways, blocks = decider(
        ActivationRoom(device=40 * MIB, drives=1 << 40, staging=10 * MIB),
        ActivationRates(to_drives=1.0, from_drives=1.0),
        homes=(Tier.NVME,),
    )
    assert set(measured(ways, blocks, 10 * MIB).values()) == {BlockWay.KEEP}
    assert ways.way(blocks[3], inputs=MIB, held=30 * MIB) is BlockWay.KEEP


def test_inputs_go_to_drives_where_they_do_not_fit_either() -> None:
    ways, blocks = decider(
        ActivationRoom(device=100 * MIB, drives=1 << 40),
        ActivationRates(to_drives=1e9, from_drives=1e9),
        homes=(Tier.NVME,),
    )
    assert ways.way(blocks[0], inputs=MIB, held=100 * MIB) is BlockWay.RECOMPUTE_DRIVE


def test_a_home_without_room_is_not_taken() -> None:
    rates = ActivationRates(to_host=1e9, from_host=1e9, to_drives=1e8, from_drives=1e8)
    room = ActivationRoom(device=100 * MIB, host=50 * MIB, drives=1 << 40)
    homes = (Tier.HOST, Tier.NVME)
    ways, blocks = decider(room, rates, homes=homes)
    full, _ = decider(room, rates, homes=homes, waiting=50 * MIB)
    assert ways.way(blocks[0], inputs=MIB, held=100 * MIB) is BlockWay.RECOMPUTE_HOST
    assert full.way(blocks[0], inputs=MIB, held=100 * MIB) is BlockWay.RECOMPUTE_DRIVE


def test_what_is_saved_outside_of_blocks_is_counted() -> None:
    ways, blocks = decider(ActivationRoom(device=50 * MIB))
    ways.end_forward(20 * MIB)
    assert BlockWay.RECOMPUTE in measured(ways, blocks, 10 * MIB).values()
    assert "beside 20 MiB outside of blocks" in ways.described()


def test_every_call_of_a_block_in_a_forward_counts() -> None:
    ways, blocks = decider(ActivationRoom(device=120 * MIB))
    for _ in range(2):
        for block in 3 * blocks:
            ways.way(block, inputs=MIB, held=0)
            ways.note_call(block, saved=10 * MIB, inputs=MIB, seconds=1.0)
        ways.end_forward(0)
        ways.end_step()
    assert [cost.calls for cost in ways.costs()] == [3] * 4
    assert ways.choice is not None
    assert ways.choice.ways == (BlockWay.KEEP,) * 4
    assert ways.choice.predicted.device == 120 * MIB


def test_a_room_that_is_too_small_is_said_and_the_least_is_held() -> None:
    ways, blocks = decider(ActivationRoom(device=MIB))
    assert set(measured(ways, blocks, 10 * MIB).values()) == {BlockWay.RECOMPUTE}
    assert "too much" in ways.described()


def test_steps_without_blocks_are_not_measured() -> None:
    ways, _ = decider(replace(ActivationRoom(device=MIB)))
    for _ in range(5):
        ways.end_step()
    assert ways.choice is None
    assert "no block of the model has saved anything" in ways.described()


def test_a_rank_that_holds_more_moves_but_runs_no_other_block_again() -> None:
    ways, blocks = decider(
        ActivationRoom(device=100 * MIB, drives=1 << 40),
        ActivationRates(to_drives=1e9, from_drives=1e9),
        homes=(Tier.NVME,),
        agreement=ChosenTogether(lambda _, value: [json.loads(json.dumps(value))]),
    )
    assert set(measured(ways, blocks, 10 * MIB).values()) == {BlockWay.KEEP}
    assert ways.way(blocks[0], inputs=MIB, held=95 * MIB) is BlockWay.DRIVE
