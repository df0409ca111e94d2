"""Transfers: every part of a hop is waited for, nothing is swallowed, and an error is the same each
time it is told.
"""

from __future__ import annotations

import errno
import gc
import traceback
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deepnvme import FaultPlan, IOQueue
from deepnvme.queue.faults import Requests
from infinity_engine.errors import TransferError
from infinity_engine.memory import Ledger
from infinity_engine.plan import ResolvedBudget
from infinity_engine.storage import Hops, PlannedHop, SwapFile, Transfer

PAGE = 4096


def stage(
    start: Callable[[], None], *, undone: list[str] | None = None, name: str = ""
) -> PlannedHop:
    def begin() -> None:
        start()

    return PlannedHop(begin, lambda: None, lambda: None if undone is None else undone.append(name))


def fail() -> None:
    raise TransferError(errno=errno.EIO, path="x", offset=0, asked=1, done=0)


def interrupt() -> None:
    raise KeyboardInterrupt


def test_a_write_to_two_drives_has_ended_on_both_when_one_fails(tmp_path: Path) -> None:
    directories = [tmp_path / name for name in "ab"]
    for directory in directories:
        directory.mkdir()
    sizes = {str(directory): 5 * PAGE for directory in directories}
    ledger = Ledger(ResolvedBudget(device=0, host=64 << 20, nvme=sizes))
    writes = Requests.WRITES
    plan = FaultPlan().fail(nth=1, requests=writes).delay(nth=2, delay_us=300_000, requests=writes)
    with (
        IOQueue(faults=plan) as queue,
        SwapFile(sizes, ledger, rates=dict.fromkeys(sizes, 1.0), queue=queue) as swap,
    ):
        place = swap.allocate(6 * PAGE, holder="w")
        assert len(place.extents) == 2
        hop = swap.write(place, memoryview(bytes(6 * PAGE)))

        with pytest.raises(TransferError):
            hop.wait()

        assert hop.done()


def test_an_interrupt_while_a_hop_starts_is_raised_and_what_was_begun_is_undone() -> None:
    undone: list[str] = []

    with pytest.raises(KeyboardInterrupt):
        Transfer([stage(interrupt, undone=undone, name="first")])

    assert undone == ["first"]


def test_a_move_that_was_interrupted_is_told_as_given_up_afterwards() -> None:
    class Pending:
        ended = False

        def done(self) -> bool:
            return self.ended

        def wait(self) -> int:
            return 0

    pending = Pending()
    transfer = Transfer([PlannedHop(lambda: pending, lambda: None, lambda: None), stage(interrupt)])
    pending.ended = True
    with pytest.raises(KeyboardInterrupt):
        transfer.poll()

    assert (transfer.done(), transfer.unreported) == (True, None)
    with pytest.raises(TransferError) as told:
        transfer.result()
    assert told.value.errno == errno.ECANCELED


def test_what_follows_a_stage_that_failed_is_undone_too() -> None:
    undone: list[str] = []

    stages = [
        stage(each, undone=undone, name=name)
        for name, each in (("a", fail), ("b", interrupt), ("c", fail))
    ]
    Transfer(stages).wait()

    assert undone == ["a", "b", "c"]


def test_an_error_that_is_raised_again_is_not_longer() -> None:
    transfer = Transfer([stage(fail)])
    lengths = set()

    for _ in range(3):
        with pytest.raises(TransferError) as told:
            transfer.result()
        lengths.add(len(traceback.extract_tb(told.value.__traceback__)))

    assert len(lengths) == 1


def test_a_mistake_in_the_code_is_told_with_where_it_is() -> None:
    def mistaken() -> None:
        raise KeyError("no such thing")

    transfer = Transfer([stage(mistaken)])
    with pytest.raises(KeyError):
        transfer.result()

    with pytest.raises(KeyError) as told:
        transfer.result()

    assert [frame.name for frame in traceback.extract_tb(told.value.__traceback__)].count(
        "mistaken"
    ) == 1


# --- what errors keep -----------------------------------------------------------------------------


class FailedHop:
    def done(self) -> bool:
        return True

    def wait(self) -> int:
        raise TransferError(errno=errno.EIO, path="x", offset=0, asked=1, done=0)


class Buffer:
    """Stands for memory that a function has in a local while it waits."""


def told_beside_a_buffer(wait: Callable[[], object]) -> weakref.ref[Buffer]:
    """Wait, be told what failed, and return a reference to a buffer that is held meanwhile."""
    buffer = Buffer()
    with pytest.raises(TransferError):
        wait()
    return weakref.ref(buffer)


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize(
    "failed", [Hops([FailedHop()]).wait, Transfer([stage(fail)]).result], ids=["event", "move"]
)
def test_an_error_keeps_no_buffer_of_those_that_it_passed(failed: Callable[[], object]) -> None:
    assert [told_beside_a_buffer(failed)() for _ in range(2)] == [None, None]
