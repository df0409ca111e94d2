"""An engine whose drives fail: errors that say what, where and which bytes, and training that goes
on from there.
"""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

import pytest
import torch

import deepnvme
import infinity_engine
from deepnvme import FaultPlan, IOQueue
from deepnvme.queue.faults import Requests
from infinity_engine.engine.engine import Engine
from infinity_engine.errors import CapacityError, ConfigError, DamageError, TransferError
from infinity_engine.parameters.fetching import ParameterFetcher
from infinity_engine.storage import IOHop, Place, SwapFile
from support.engine_bits import bits_of, differing
from support.nvme_disks import DiskUnavailableError, tmpfs
from support.nvme_training import STREAMED, Case, Trained, emulated, made, opened, trained
from support.small_models import Task
from support.unnamed_files import unnamed_files

Result = TypeVar("Result")
CASE = STREAMED
BEFORE_TRAINING = {Requests.READS: 0, Requests.WRITES: 50}
"""So many requests `initialize` may take, whose failure is another test's."""


@cache
def undisturbed() -> Trained:
    return trained(
        replace(CASE, host="256MiB", parameters="auto", strategy=Case().strategy), None, None
    )


def without_frames(error: BaseException) -> BaseException:
    """Return an error that does not hold the tensors of whoever was interrupted by it."""
    seen: list[BaseException] = []
    each: BaseException | None = error
    while each is not None and each not in seen:
        seen.append(each)
        each.__traceback__ = None
        each = each.__cause__ or each.__context__
    return error


def patiently(action: Callable[[], Result], told: list[BaseException]) -> Result:
    """Do it until it succeeds; note what it raised."""
    for _ in range(40):
        try:
            return action()
        except (RuntimeError, TransferError) as error:
            told.append(without_frames(error))
    raise AssertionError("it never succeeds") from told[-1]


def one_step(engine: Engine, task: Task, seed: int, told: list[BaseException]) -> None:
    def gradients() -> None:
        engine.zero_grad()
        engine.backward(engine(task.batch(seed)))

    def step() -> None:
        try:
            engine.step()
        except TransferError:  # a gradient is lost
            gradients()
            raise

    patiently(gradients, told)
    patiently(step, told)


def cause_of(error: BaseException) -> TransferError:
    found: BaseException | None = error
    while found is not None and not isinstance(found, TransferError):
        found = found.__cause__ or found.__context__
    assert found is not None, f"it does not say which I/O failed: {error!r}"
    return found


# By default, what fails often fails with checksums, and what fails seldom without.
@pytest.mark.parametrize("accelerator", ["cpu", "emulated"])
@pytest.mark.parametrize("requests", [Requests.READS, Requests.WRITES])
@pytest.mark.parametrize(
    ("every", "checksum"),
    [
        (31, "crc32c"),
        (97, "off"),
        *(
            pytest.param(every, checksum, marks=pytest.mark.slow)
            for every, checksum in ((31, "off"), (61, "off"), (61, "crc32c"), (97, "crc32c"))
        ),
    ],
)
def test_where_each_nth_io_fails_training_goes_on_and_ends_with_the_same_bits(
    checksum: str, accelerator: str, requests: Requests, every: int, tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    case = replace(CASE, checksum=checksum, host=CASE.host if checksum == "off" else 17_110_000)
    on = emulated(every) if accelerator == "emulated" else None
    told: list[BaseException] = []
    plan = FaultPlan(seed=every)
    for nth in range(BEFORE_TRAINING[requests] + 1, 2000, every):
        plan.fail(nth=nth, requests=requests)
    # Closing reads, too; what could not be read is told, and all else is done.
    with (
        IOQueue(faults=plan) as queue,
        suppress(TransferError),
        opened(case, on, tmp_path, queue=queue) as (engine, task),
    ):
        for seed in range(case.steps):
            one_step(engine, task, seed, told)
        bits = patiently(engine.state_dict, told)
        for name, parameter in task.named_parameters():
            if parameter.numel():
                state = patiently(partial(engine.state_of, parameter), told)
                bits.update(
                    {f"{name}: {key}": torch.as_tensor(value) for key, value in state.items()}
                )
    if on is not None:
        on.close()

    assert told
    for error in told:
        cause = cause_of(error)
        assert any(name in str(cause) for name, _ in task.named_parameters()), cause
        assert f"at offset {cause.offset}" in str(cause)
        assert str(tmp_path) in cause.path
    assert differing(bits, {name: undisturbed().bits[name] for name in bits}) == []


def test_where_nothing_can_be_written_at_the_beginning_the_model_is_as_it_was(
    tmp_path: Path,
) -> None:
    task, optimizer = made("gpt")
    before = {name: each.detach().clone() for name, each in task.named_parameters()}
    with (
        IOQueue(faults=FaultPlan().fail(nth=20, requests=Requests.WRITES)) as queue,
        pytest.raises(TransferError),
    ):
        infinity_engine.initialize(
            task,
            optimizer,
            accelerator="cpu",
            strategy="nvme_streamed",
            parameters="nvme",
            precision="bf16",
            storage={"small_bytes": 256},
            subgroup_numel=4096,
            budget={"host": "64MiB", "nvme": {str(tmp_path): "16MiB"}},
            queue=queue,
        )

    assert unnamed_files(tmp_path) == []
    assert [
        name for name, each in task.named_parameters() if not torch.equal(each, before[name])
    ] == []
    loss = task(task.batch(0))
    loss.backward()
    optimizer.step()


def test_a_budget_without_room_on_the_drives_is_refused_and_says_what_is_needed(
    tmp_path: Path,
) -> None:
    task, optimizer = made("gpt")
    with pytest.raises(CapacityError, match="raise the budget's nvme") as refused:
        infinity_engine.initialize(
            task,
            optimizer,
            accelerator="cpu",
            strategy="nvme_streamed",
            parameters="nvme",
            subgroup_numel=4096,
            storage={"small_bytes": 256},
            budget={"host": 17_300_000, "nvme": {str(tmp_path): "64KiB"}},
        )

    assert refused.value.tier == "NVME"
    assert str(tmp_path) in str(refused.value)


def test_without_a_directory_nothing_can_rest_on_drives() -> None:
    task, optimizer = made("gpt")
    with pytest.raises(ConfigError, match=r"budget\.nvme: expected directories of drives"):
        infinity_engine.initialize(task, optimizer, accelerator="cpu", strategy="nvme_streamed")


def test_start_removes_nothing_from_the_drives_directory(tmp_path: Path) -> None:
    foreign = tmp_path / "deepnvme-swap-thesis" / "data"
    foreign.parent.mkdir()
    foreign.write_text("a user's file")
    member = [tmp_path / "deepnvme-swap-checkpoint"]
    deepnvme.save({"w": torch.ones(4)}, member)

    with opened(CASE, None, tmp_path):
        assert foreign.read_text() == "a user's file"
        assert deepnvme.load(member)["w"].sum() == 4


def test_killed_run_leaves_nothing_on_the_drive(tmp_path: Path) -> None:
    killed = (
        f"import os, deepnvme; v = deepnvme.Volume.temporary([{str(tmp_path)!r}], capacity=1 << "
        "20); os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", killed], check=False).returncode == 9
    assert list(tmp_path.iterdir()) == []


def test_a_directory_in_memory_is_warned_of(tmp_path: Path) -> None:
    with ExitStack() as until_end:
        try:
            folder = until_end.enter_context(tmpfs(tmp_path, 100 << 20))
        except DiskUnavailableError as reason:
            pytest.skip(str(reason))
        with pytest.warns(RuntimeWarning, match="is on tmpfs, which is host memory"):
            until_end.enter_context(opened(CASE, None, folder))


# --- bytes that a drive returns as others ---------------------------------------------------------

KINDS = MappingProxyType(
    {"states": "states of subgroup", "parameters": "embed.weight", "gradients": "gradient of "}
)


class BadRead:
    """Lets the first read of a kind find a bit flipped on the drive, which is as it was
    afterwards.
    """

    def __init__(self, kind: str, drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.what = ""
        self.offset = 0
        self._begins_with = KINDS[kind]
        self._drive = drive
        self._read = SwapFile.read

        def read(
            swap: SwapFile, place: Place, into: memoryview, *, what: str = "", compared: bool = True
        ) -> IOHop:
            return self._read_badly_once(swap, place, into, what, compared)

        monkeypatch.setattr(SwapFile, "read", read)

    @property
    def path(self) -> Path:
        [path] = unnamed_files(self._drive)
        return path

    def _read_badly_once(
        self, swap: SwapFile, place: Place, into: memoryview, what: str, compared: bool
    ) -> IOHop:
        if self.what or not what.startswith(self._begins_with):
            return self._read(swap, place, into, what=what, compared=compared)
        last = place.extents[-1]
        self.what, self.offset = what, last.offset + last.nbytes - 1
        flip(self.path, self.offset)
        hop = self._read(swap, place, into, what=what, compared=compared)
        while not hop.done():
            pass
        flip(self.path, self.offset)
        return hop


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        [byte] = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def test_swapped_bytes_are_checked_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[BaseException] = []
    with opened(replace(CASE, checksum=None), None, tmp_path) as (engine, task):
        one_step(engine, task, 0, told)
        BadRead("parameters", tmp_path, monkeypatch)
        one_step(engine, task, 1, told)

    assert [type(cause_of(error)) for error in told] == [DamageError]


@pytest.mark.parametrize("accelerator", ["cpu", "emulated"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_bit_that_a_drive_returns_flipped_is_told_and_training_goes_on_to_the_same_bits(
    kind: str, accelerator: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    on = emulated(1) if accelerator == "emulated" else None
    # so little that gradients rest on the drives as well
    host = 16_980_000 if on is None else 17_120_000
    told: list[BaseException] = []
    with opened(replace(CASE, checksum="crc32c", host=host), on, tmp_path) as (engine, task):
        one_step(engine, task, 0, told)
        assert told == []
        bad, path = BadRead(kind, tmp_path, monkeypatch), str(tmp_path / "(unnamed)")
        for seed in range(1, CASE.steps):
            one_step(engine, task, seed, told)
        bits = bits_of(engine)
    if on is not None:
        on.close()

    assert told
    for error in told:
        damage = cause_of(error)
        assert isinstance(damage, DamageError)
        assert (damage.what, damage.path) == (bad.what, path)
        assert damage.offset <= bad.offset < damage.offset + damage.asked
        assert damage.expected != damage.found
    assert differing(bits, undisturbed().bits) == []


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("parameters", ["device", "nvme"])
def test_an_update_from_a_flipped_bit_changes_nothing_that_is_not_made_again(
    precision: str, parameters: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    case = replace(
        CASE, precision=precision, parameters=parameters, checksum="crc32c", host=17_000_000
    )
    in_memory = replace(case, parameters="auto", strategy=Case().strategy)
    told: list[BaseException] = []
    with opened(case, None, tmp_path) as (engine, task):
        one_step(engine, task, 0, told)
        BadRead("states", tmp_path, monkeypatch)
        for seed in range(1, case.steps):
            one_step(engine, task, seed, told)
        bits = bits_of(engine)

    assert [type(cause_of(error)) for error in told] == [DamageError]
    assert differing(bits, trained(in_memory, None, None).bits) == []


def test_an_early_update_from_a_flipped_bit_is_left_to_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    case = replace(CASE, clip=None, early=True, checksum="crc32c", host=17_500_000)
    told: list[BaseException] = []
    with opened(case, None, tmp_path) as (engine, task):
        one_step(engine, task, 0, told)
        bad = BadRead("states", tmp_path, monkeypatch)
        for seed in range(1, case.steps):
            one_step(engine, task, seed, told)
        bits = bits_of(engine)

    assert bad.what.startswith("states of subgroup")
    assert told == []
    in_memory = replace(
        case, host="256MiB", parameters="auto", strategy=Case().strategy, early=False
    )
    assert differing(bits, trained(in_memory, None, None).bits) == []


def test_what_a_drive_has_damaged_for_good_is_told_each_time_and_all_else_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    with opened(replace(CASE, checksum="crc32c"), None, tmp_path) as (engine, task):
        one_step(engine, task, 0, [])
        expected = bits_of(engine)
        bad = BadRead("states", tmp_path, monkeypatch)
        with pytest.raises(DamageError, match=r"^states of subgroup 1 \(position, embed\.weight"):
            engine.state_of(task.get_parameter("embed.weight"))
        flip(bad.path, bad.offset)
        for name in ("position", "embed.weight"):
            with pytest.raises(DamageError, match=r"^states of subgroup 1 "):
                engine.state_of(task.get_parameter(name))
        master = engine.state_of(task.get_parameter("blocks.1.attention.qkv.weight"))["master"]
        values = engine.state_dict()

    assert torch.equal(torch.as_tensor(master), expected["blocks.1.attention.qkv.weight: master"])
    assert [name for name, each in values.items() if not torch.equal(each, expected[name])] == []


# --- what errors leave behind ---------------------------------------------------------------------


@contextmanager
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def held_at_rest(engine: Engine) -> list[int]:
    """Return what the pools have given out once nothing is fetched or under way."""
    lanes, fetcher = engine._parts.states._lanes, engine._parts.fetcher
    assert isinstance(fetcher, ParameterFetcher)
    until_it_succeeds(fetcher.give_up)
    for pool in (lanes.host, lanes.device):
        pool.release_ended()
    return [lanes.host.stats().held, lanes.device.reservation.held]


def until_it_succeeds(action: Callable[[], object]) -> int:
    """Do it as often as it fails, and keep nothing of the errors; return how many there were."""
    for failed in range(40):
        try:
            action()
        except (RuntimeError, TransferError):
            continue
        return failed
    raise AssertionError("it never succeeds")


@pytest.mark.parametrize(
    ("accelerator", "requests"), [("cpu", Requests.WRITES), ("emulated", Requests.READS)]
)
def test_errors_of_drives_hold_no_buffer_without_the_collector(
    accelerator: str, requests: Requests, tmp_path: Path
) -> None:
    on = emulated(0) if accelerator == "emulated" else None
    plan = FaultPlan()
    for nth in range(BEFORE_TRAINING[requests] + 1, 4000, 31):
        plan.fail(nth=nth, requests=requests)
    failed = 0
    at_rest: list[list[int]] = []
    with (
        without_collector(),
        IOQueue(faults=plan) as queue,
        suppress(TransferError),
        opened(CASE, on, tmp_path, queue=queue) as (engine, task),
    ):

        def step(seed: int) -> None:
            if not engine._parts.states.begun:
                engine.zero_grad()
                engine.backward(engine(task.batch(seed)))
            engine.step()

        for seed in range(3):
            failed += until_it_succeeds(partial(step, seed)) + until_it_succeeds(
                engine._updates.end
            )
            at_rest.append(held_at_rest(engine))
    if on is not None:
        on.close()
    assert failed
    assert at_rest == [at_rest[0]] * len(at_rest)
