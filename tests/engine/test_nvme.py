"""Engines with what rests on drives, used in every way but the usual one."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch

import infinity_engine
from deepnvme import Volume
from infinity_engine.accel import Accelerator
from infinity_engine.config import EngineConfig, ParametersAt, Precision, StorageConfig
from infinity_engine.engine.engine import Engine
from infinity_engine.engine.optimizers import LionOptimizer
from infinity_engine.errors import CapacityError, ConfigError, TransferError
from infinity_engine.optim import FloatFormat, Formats, cut_into_subgroups
from infinity_engine.parameters.describing import wish_of
from infinity_engine.placement.placing import Plan, place
from infinity_engine.placement.sizing import Sizing, cut
from infinity_engine.plan import HostOnly, Interleaved, NvmeStreamed, ResolvedBudget, Tier
from infinity_engine.storage import Hop, Place, SwapFile
from support.engine_bits import Bits, bits_of, differing
from support.nvme_training import RATES, Case, emulated, opened
from support.small_models import MODELS, Task
from support.unnamed_files import unnamed_files

Use = Callable[[Engine, Task], Bits]
CASE = Case(precision="bf16", strategy=NvmeStreamed(), parameters="nvme")
LITTLE = MappingProxyType({"cpu": 16_970_000, "emulated": 17_100_000})
"""So little of the host that gradients rest on the drives as well."""
BF16 = Formats(parameter=FloatFormat.BF16)
ACCELERATORS = tuple(LITTLE)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def device(accelerator: str) -> Accelerator | None:
    return emulated(3) if accelerator == "emulated" else None


def same_as_in_memory(use: Use, case: Case, accelerator: str, drive: Path) -> None:
    with opened(
        replace(case, host="256MiB", parameters="auto", strategy=HostOnly()), None, None
    ) as (engine, task):
        expected = use(engine, task)
    with opened(replace(case, host=LITTLE[accelerator]), device(accelerator), drive) as (
        engine,
        task,
    ):
        got = use(engine, task)

    assert [
        name for name, each in expected.items() if not torch.equal(each.float(), got[name].float())
    ] == []


@pytest.mark.parametrize("accelerator", ACCELERATORS)
def test_a_norm_asked_for_by_hand_is_that_of_gradients_that_are_still_on_their_way(
    accelerator: str, tmp_path: Path
) -> None:
    def clipped(engine: Engine, task: Task) -> Bits:
        norms = []
        for seed in range(3):
            engine.backward(engine(task.batch(seed)))
            norms.append(engine.clip_grad_norm_(0.05))
            engine.step()
        return {"norms": torch.tensor(norms), **bits_of(engine)}

    same_as_in_memory(clipped, CASE, accelerator, tmp_path)


@pytest.mark.parametrize("accelerator", ACCELERATORS)
def test_states_can_be_seen_and_masters_changed_between_backward_and_step(
    accelerator: str, tmp_path: Path
) -> None:
    def looked_at(engine: Engine, task: Task) -> Bits:
        seen: Bits = {}
        weight = task.get_parameter("embed.weight")
        for seed in range(3):
            engine.backward(engine(task.batch(seed)))
            seen.update({f"{seed} {name}": each for name, each in bits_of(engine).items()})
            with engine.gathered(weight, modify=True), torch.no_grad():
                weight.mul_(1.5)
            engine.step()
        return {**seen, **bits_of(engine)}

    same_as_in_memory(looked_at, CASE, accelerator, tmp_path)


@pytest.mark.parametrize("accelerator", ACCELERATORS)
def test_a_change_whose_master_could_not_be_written_is_not_lost_unseen(
    accelerator: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(_: SwapFile, _place: Place, _data: object, *, what: str, **_more: Any) -> Hop:
        raise TransferError(errno=errno.EIO, path="drive", offset=0, asked=1, done=0, what=what)

    with opened(replace(CASE, host=LITTLE[accelerator]), device(accelerator), tmp_path) as (
        engine,
        task,
    ):
        weight = task.get_parameter("embed.weight")
        engine.backward(engine(task.batch(0)))
        engine.step()

        def change(drive: pytest.MonkeyPatch) -> None:
            with engine.gathered(weight, modify=True), torch.no_grad():
                weight.fill_(7.0)
                drive.setattr(SwapFile, "write", failing)

        def train() -> None:
            engine.backward(engine(task.batch(1)))
            engine.step()

        with monkeypatch.context() as drive, pytest.raises(TransferError, match="states of"):
            change(drive)
        with pytest.raises(
            RuntimeError, match=r"embed\.weight was changed.*gathered\(\[parameter\], modify=True\)"
        ):
            train()
        engine.zero_grad()
        with engine.gathered(weight, modify=True):
            pass

        for found in (
            engine.state_dict()["embed.weight"],
            torch.as_tensor(engine.state_of(weight)["master"]),
        ):
            assert torch.equal(found.float(), torch.full(weight.shape, 7.0))
        train()


class Lost:
    """A write that fails."""

    def done(self) -> bool:
        return True

    def wait(self) -> int:
        raise TransferError(
            errno=errno.EIO, path="drive", offset=0, asked=1, done=0, what="gradient of it"
        )


@pytest.mark.parametrize("accelerator", ACCELERATORS)
def test_no_step_is_made_of_gradients_of_which_one_is_lost_until_they_are_dropped(
    accelerator: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = SwapFile.write

    def lose_one(
        swap: SwapFile, place: Place, source: memoryview, *, what: str = "", **more: Any
    ) -> Hop:
        if not what.startswith("gradient of"):
            return write(swap, place, source, what=what, **more)
        monkeypatch.setattr(SwapFile, "write", write)
        return Lost()

    def trained(engine: Engine, task: Task) -> Bits:
        for seed in range(3):
            engine.backward(engine(task.batch(seed)))
            engine.step()
        return bits_of(engine)

    def with_one_lost(engine: Engine, task: Task) -> Bits:
        engine.backward(engine(task.batch(0)))
        engine.step()
        monkeypatch.setattr(SwapFile, "write", lose_one)
        engine.backward(engine(task.batch(1)))
        for _ in range(2):
            with pytest.raises(TransferError, match="gradient of it"):
                engine.step()
        engine.zero_grad()
        for seed in (1, 2):
            engine.backward(engine(task.batch(seed)))
            engine.step()
        return bits_of(engine)

    case = replace(CASE, host=LITTLE[accelerator])
    with opened(case, device(accelerator), tmp_path) as (engine, task):
        expected = trained(engine, task)
    with opened(case, device(accelerator), tmp_path) as (engine, task):
        got = with_one_lost(engine, task)

    assert [name for name in expected if not torch.equal(expected[name], got[name])] == []


@pytest.mark.parametrize("accelerator", ACCELERATORS)
def test_more_gradients_than_there_is_room_for_are_refused_with_what_to_do_and_training_goes_on(
    accelerator: str, tmp_path: Path
) -> None:
    def once(engine: Engine, task: Task) -> Bits:
        if engine.plan.buffer_bytes:
            first, second = (engine(task.batch(seed)) for seed in (7, 8))
            engine.backward(first, retain_graph=True)
            with pytest.raises(CapacityError, match=r"engine\.backward\(first \+ second\)"):
                engine.backward(second)
            engine.zero_grad()
        engine.backward(engine(task.batch(0)))
        engine.step()
        return bits_of(engine)

    same_as_in_memory(once, CASE, accelerator, tmp_path)


def gradients_of_two_losses(engine: Engine, task: Task) -> Bits:
    for seed in range(2):
        for again in range(3):
            engine.backward(engine(task.batch(10 * seed + again)))
        engine.step()
    return bits_of(engine)


@pytest.mark.parametrize("gradients", ["in memory", "on drives"])
@pytest.mark.parametrize("accelerator", ACCELERATORS)
@pytest.mark.parametrize("clip", [None, 0.05])
def test_further_gradients_of_a_step_take_what_the_budget_has_left(
    clip: float | None, accelerator: str, gradients: str, tmp_path: Path
) -> None:
    case = replace(CASE, clip=clip)
    with opened(
        replace(case, host="256MiB", parameters="auto", strategy=HostOnly()), None, None
    ) as (engine, task):
        expected = gradients_of_two_losses(engine, task)
    in_memory = gradients == "in memory"
    host = "32MiB" if in_memory else LITTLE[accelerator]
    with opened(replace(case, host=host), device(accelerator), tmp_path) as (engine, task):
        if not in_memory:  # a plan leaves nothing where there is so little
            engine._parts.ledger._memory[Tier.HOST].limit += 4 << 20
        reserved = engine.usage()[-2].reserved
        got = gradients_of_two_losses(engine, task)
        engine.zero_grad()

        assert differing(expected, got) == []
        assert engine.usage()[-2].reserved == reserved


# --- optimizers and budgets -----------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "amsgrad": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, amsgrad=True),
    "lion": lambda parameters: LionOptimizer(parameters, lr=1e-3),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "no states at all": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
}


def stepped(optimizer: str, precision: str, host: int | str, **settings: Any) -> Bits:
    """Train, with at least that much of the host."""
    while True:
        torch.manual_seed(0)
        task = MODELS["gpt"]()
        budget = {"host": host, "device": "32MiB", **settings.pop("budget", {})}
        try:
            with infinity_engine.initialize(
                task,
                OPTIMIZERS[optimizer](task.parameters()),
                accelerator="cpu",
                precision=precision,
                subgroup_numel=4096,
                storage={"small_bytes": 256},
                rates=RATES,
                budget=budget,
                **settings,
            ) as engine:
                for seed in range(3):
                    engine.backward(engine(task.batch(seed)))
                    engine.step()
                usage = engine.usage()
                assert [
                    each for each in usage if max(each.peak_held, each.peak_reserved) > each.limit
                ] == []
                return bits_of(engine)
        except CapacityError as refused:
            if "nvme" not in budget or not isinstance(host, int) or refused.asked <= host:
                raise
            host = refused.asked
            settings["budget"] = {"nvme": budget["nvme"]}


@cache
def stepped_in_memory(optimizer: str, precision: str) -> Bits:
    return stepped(optimizer, precision, "256MiB")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_parameters_that_are_all_too_small_for_drives_have_room_in_memory(
    precision: str, tmp_path: Path
) -> None:
    """Whatever the strategy: it was what host memory had left, and so too little, where they were
    to rest on drives.
    """
    with emulated(0) as device:
        task = MODELS["llama"]()
        with infinity_engine.initialize(
            task,
            torch.optim.AdamW(task.parameters()),
            device=device,
            strategy=NvmeStreamed(update=Interleaved(share=0.5)),
            precision=precision,
            parameters="nvme",
            accumulation_steps=2,
            rates=RATES,
            budget={"host": "256MiB", "device": "32MiB", "nvme": {str(tmp_path): "64MiB"}},
        ) as engine:
            for micro_batch in range(4):
                engine.backward(engine(task.batch(micro_batch)))
                result = engine.step()

            assert result.outcome is infinity_engine.Outcome.UPDATED
            assert [each.held for each in engine.usage() if each.tier is Tier.NVME] == [0]


@pytest.mark.parametrize(
    ("accelerator", "parameters"), [("cpu", "nvme"), ("cpu", "device"), ("emulated", "nvme")]
)
@pytest.mark.parametrize(
    ("optimizer", "precision"),
    [
        ("amsgrad", "bf16"),
        ("lion", "fp32"),
        ("momentum", "fp32"),
        *product(["no states at all"], ["fp32", "bf16"]),
    ],
)
def test_every_optimizer_updates_alike_from_drives_with_what_a_refusal_asked_for(
    accelerator: str, parameters: str, precision: str, optimizer: str, tmp_path: Path
) -> None:
    update = Interleaved(share=0.5) if accelerator == "emulated" else HostOnly()
    got = stepped(
        optimizer,
        precision,
        1 << 20,
        device=device(accelerator),
        strategy=NvmeStreamed(update=update),
        parameters=parameters,
        budget={"nvme": {str(tmp_path): "64MiB"}},
    )

    expected = stepped_in_memory(optimizer, precision)
    assert [name for name, each in expected.items() if not torch.equal(each, got[name])] == []


@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize("parameters", ["device", "nvme"])
@pytest.mark.parametrize(("precision", "micro_batches"), [("fp32", 3), ("bf16", 1), ("bf16", 3)])
def test_what_stays_in_memory_has_room_there_whatever_the_budget(
    unified: bool, parameters: str, precision: str, micro_batches: int
) -> None:
    width = 4 if precision == "fp32" else 2
    numels = [5_000_001] * 6 + [1000] * 10 + [12_000_000]
    sizing = Sizing(
        subgroups=cut_into_subgroups(numels, 4 << 20, Formats() if precision == "fp32" else BF16),
        state_names=("exp_avg", "exp_avg_sq"),
        parameters=tuple(width * numel for numel in numels),
        deepest=width * numels[-1],
        unified=unified,
        sums=micro_batches > 1,
    )
    config = EngineConfig(
        precision=Precision(precision),
        accumulation_steps=micro_batches,
        strategy=NvmeStreamed(),
        parameters=ParametersAt(parameters),
    )

    def plan(host: int) -> Plan:
        budget = ResolvedBudget(device=8 << 30, host=host, nvme={"/a": 1 << 40})
        return place(sizing, wish_of(config, None), budget, io_bytes=0)

    with pytest.raises(CapacityError) as refused:
        plan(1)
    least = refused.value.asked
    with pytest.raises(CapacityError):
        plan(least - 1)

    kept = []
    for host in range(least, least + (700 << 20), 23 << 20):
        made = plan(host)
        demand = made.demand
        assert demand.host + demand.window + (demand.device if unified else 0) <= host
        kept.append(len(sizing.subgroups) - len(made.resting.states))
    assert kept[0] < kept[-1]


def test_with_updates_in_the_backward_what_stays_in_memory_is_spread_among_what_does_not() -> None:
    numels = [1000, *[4 << 20] * 24]
    sizing = Sizing(
        subgroups=cut([(numel, BF16) for numel in numels], 4 << 20, small_bytes=1 << 16),
        state_names=("exp_avg", "exp_avg_sq"),
        parameters=tuple(2 * numel for numel in numels),
        deepest=2 * numels[-1],
        unified=True,
    )
    budget = ResolvedBudget(device=8 << 30, host=900 << 20, nvme={"/a": 1 << 40})

    def resting(*, early: bool) -> list[bool]:
        storage = StorageConfig(early_updates=early)
        config = EngineConfig(
            precision=Precision.BF16,
            strategy=NvmeStreamed(),
            parameters=ParametersAt.NVME,
            storage=storage,
        )
        plan = place(sizing, wish_of(config, None), budget, io_bytes=0)
        return [each.index in plan.resting.states for each in sizing.subgroups]

    first_stay, spread = resting(early=False), resting(early=True)
    assert first_stay == sorted(first_stay)
    # no update in a backward is possible of what stays in memory, and a step waits for it
    assert not spread[0]
    longest = max(len(run) for run in "".join("-+"[stays] for stays in spread[1:]).split("+"))
    share = spread[1:].count(True) / 24
    assert 0.2 < share < 0.8
    assert longest <= 1 / share


# --- directories ----------------------------------------------------------------------------------


def test_two_engines_train_side_by_side_on_one_directory_which_is_empty_after_them(
    tmp_path: Path,
) -> None:
    with (
        opened(CASE, None, tmp_path) as (first, task),
        opened(CASE, None, tmp_path) as (second, other),
    ):
        for seed in range(2):
            for engine, model in ((first, task), (second, other)):
                engine.backward(engine(model.batch(seed)))
                engine.step()
        ours, theirs = bits_of(first), bits_of(second)
        assert len(unnamed_files(tmp_path)) == 2

    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    assert unnamed_files(tmp_path) == []


def test_an_exception_in_the_forward_leaves_nothing_on_the_drives_and_closing_twice_is_harmless(
    tmp_path: Path,
) -> None:
    with pytest.raises(IndexError), opened(CASE, None, tmp_path) as (engine, task):
        engine(torch.full((3, 12), 999))

    engine.close()
    assert unnamed_files(tmp_path) == []
    assert not task.get_parameter("embed.weight").isnan().any()


def test_a_directory_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    task = MODELS["gpt"]()
    before = {name: each.clone() for name, each in task.state_dict().items()}

    with pytest.raises(ConfigError, match="not mounted"):
        infinity_engine.initialize(
            task,
            torch.optim.AdamW(task.parameters()),
            accelerator="cpu",
            strategy="nvme_streamed",
            budget={"nvme": {str(tmp_path / "not mounted"): "64MiB"}},
        )

    assert [
        name for name, each in task.state_dict().items() if not torch.equal(each, before[name])
    ] == []


def test_a_directory_that_nothing_can_be_written_to_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(tmp_path / "deepnvme-swap"))

    monkeypatch.setattr(Volume, "temporary", read_only)
    with (
        pytest.raises(ConfigError, match=r"Budget\.nvme: .*Read-only file system") as refused,
        opened(CASE, None, tmp_path),
    ):
        pass

    assert str(tmp_path) in str(refused.value)
