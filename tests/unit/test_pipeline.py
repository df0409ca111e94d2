"""Small pieces share operations, a bounded number of bytes travels at once, and no memory is let go
too early.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepnvme.errors import ClosedError, QueueFull
from deepnvme.memory.buffers import Memory
from deepnvme.memory.pool import Pool
from deepnvme.queue import pipeline as pipeline_module
from deepnvme.queue.pipeline import RUN_BYTES, Piece, Pipeline, Staged, once_there_is_room, together
from deepnvme.queue.queue import IOQueue
from deepnvme.sizes import PAGE, SMALL_BYTES
from support.interrupts import interruptions

MIB = 1 << 20
TIMEOUT_S = 5


def in_order(pieces: list[Piece[int]]) -> list[Piece[int]]:
    return sorted(pieces, key=lambda piece: (piece.file, piece.offset))


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 64 * MIB), st.integers(1, SMALL_BYTES)))
)
def test_every_piece_lies_in_one_stretch_of_whole_pages_that_fits_into_staging_memory(
    places: list[tuple[int, int, int]],
) -> None:
    pieces = [Piece(*place, number) for number, place in enumerate(places)]
    stretches = list(together(in_order(pieces)))
    assert sorted(piece.what for stretch in stretches for piece in stretch.pieces) == list(
        range(len(pieces))
    )
    for stretch in stretches:
        assert stretch.start % PAGE == stretch.nbytes % PAGE == 0
        assert stretch.nbytes <= RUN_BYTES
        for piece in stretch.pieces:
            assert piece.file == stretch.file
            assert stretch.start <= piece.offset
            assert piece.offset + piece.nbytes <= stretch.start + stretch.nbytes


def test_neighbours_share_a_stretch_and_what_is_far_does_not() -> None:
    near, gap = (
        [Piece(0, at * PAGE, 100, at) for at in range(5)],
        Piece(0, 5 * PAGE + 200 * 1024, 100, 5),
    )
    other = Piece(1, PAGE, 100, 6)
    found = [[piece.what for piece in stretch.pieces] for stretch in together([*near, gap, other])]
    assert found == [[0, 1, 2, 3, 4], [5], [6]]


def test_pieces_that_are_not_in_order_are_refused() -> None:
    for pieces in (
        [Piece(0, PAGE, 1, 0), Piece(0, 0, 1, 1)],
        [Piece(1, 0, 1, 0), Piece(0, PAGE, 1, 1)],
    ):
        with pytest.raises(ValueError, match="in the order of their bytes"):
            list(together(pieces))


def test_steps_land_and_release_in_their_order_as_soon_as_too_much_is_under_way() -> None:
    told: list[str] = []

    def tell(what: str) -> Callable[[], None]:
        return lambda: told.append(what)

    with Pipeline() as pipeline:
        for number in range(4):
            pipeline.start(32 * MIB, land=tell(f"land {number}"), release=tell(f"release {number}"))
        assert told == ["land 0", "release 0", "land 1", "release 1"]
    assert told[4:] == ["land 2", "release 2", "land 3", "release 3"]


def test_after_a_failure_what_is_under_way_is_released_and_does_not_land() -> None:
    told: list[str] = []

    def fail() -> None:
        with Pipeline() as pipeline:
            pipeline.start(
                1, land=lambda: told.append("land"), release=lambda: told.append("release")
            )
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert told == ["release"]


def test_a_full_queue_is_asked_again_and_other_errors_are_raised() -> None:
    answers: list[Exception | int] = [QueueFull(1), QueueFull(1), 7, OSError("broken")]

    def submit() -> int:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert once_there_is_room(submit) == 7
    with pytest.raises(OSError, match="broken"):
        once_there_is_room(submit)


class Registrations:
    """A queue, as far as staging memory knows one."""

    def __init__(self) -> None:
        self.pools: list[Pool] = []
        self._native = SimpleNamespace(forget_pool=self._forget)  # which a finalizer asks

    def use_pool(self, pool: Pool) -> None:
        self.pools.append(pool)

    def forget_pool(self, pool: Pool) -> None:
        self._forget(pool._native)

    def _forget(self, native: object) -> None:
        self.pools = [pool for pool in self.pools if pool._native is not native]


@pytest.fixture
def queue() -> Registrations:
    return Registrations()


def staged_by(queue: Registrations) -> Staged:
    return Staged([cast(IOQueue, queue)], runs=4, run_bytes=2 * PAGE)


@pytest.fixture
def staged(queue: Registrations) -> Staged:
    return staged_by(queue)


def test_one_operation_takes_the_staging_memory_of_one(
    queue: Registrations, staged: Staged
) -> None:
    assert not queue.pools
    with Pipeline() as pipeline:
        for _ in range(3):
            staged.give(staged.take(pipeline))
    assert [pool.capacity for pool in queue.pools] == [2 * PAGE]


def test_a_second_operation_beside_it_makes_the_rest_at_once(
    queue: Registrations, staged: Staged
) -> None:
    with Pipeline() as pipeline:
        taken = [staged.take(pipeline) for _ in range(4)]
    assert [pool.capacity for pool in queue.pools] == [2 * PAGE, 3 * 2 * PAGE]
    assert len({memory.address for memory in taken}) == 4
    assert {memory.nbytes for memory in taken} == {2 * PAGE}
    staged.close()
    assert not queue.pools


def test_where_all_is_taken_the_oldest_step_ends_first(staged: Staged) -> None:
    with Pipeline() as pipeline:
        taken = [staged.take(pipeline) for _ in range(4)]
        for memory in taken:
            pipeline.start(memory.nbytes, release=partial(staged.give, memory))
        assert staged.take(pipeline).address == taken[0].address


def test_where_others_have_all_it_is_waited_for(staged: Staged) -> None:
    with Pipeline() as others, Pipeline() as own:
        taken = [staged.take(others) for _ in range(4)]
        giving = threading.Timer(0.05, staged.give, [taken[2]])
        giving.start()
        assert staged.take(own).address == taken[2].address
        giving.join()


def test_memory_that_is_given_back_twice_is_free_once(staged: Staged) -> None:
    with Pipeline() as pipeline:
        first = staged.take(pipeline)
        staged.give(first)
        second = staged.take(pipeline)
        staged.give(first)
        assert staged.take(pipeline).address != second.address


def used(staged: Staged) -> None:
    """Use more runs than there are, some for operations."""
    with Pipeline() as pipeline:
        for _ in range(6):
            memory = staged.take(pipeline)
            pipeline.start(memory.nbytes, release=partial(staged.give, memory))


def all_can_be_taken(staged: Staged) -> bool:
    """Tell whether a call that holds none can have all four runs, before long."""
    taken: set[int] = set()

    def take() -> None:
        with Pipeline() as pipeline:
            memories = [staged.take(pipeline) for _ in range(4)]
            taken.update(memory.address for memory in memories)

    taking = threading.Thread(target=take, daemon=True)
    taking.start()
    taking.join(TIMEOUT_S)
    return len(taken) == 4


def test_no_staging_memory_is_lost_wherever_it_is_interrupted(queue: Registrations) -> None:
    staged = staged_by(queue)

    def prepared() -> Callable[[], object]:
        nonlocal staged
        staged = staged_by(queue)
        return partial(used, staged)

    for _ in interruptions(prepared, pipeline_module):
        assert all_can_be_taken(staged)
        staged.close()
        assert not queue.pools


def test_memory_of_an_operation_that_nobody_noted_is_not_used_again_before_it_ends(
    staged: Staged,
) -> None:
    under_way: list[Memory] = []

    def interrupted_put() -> None:
        with Pipeline() as pipeline:
            memory = staged.take(pipeline)
            pipeline.start(memory.nbytes, release=partial(staged.give, memory))
            under_way.append(memory)
            raise KeyboardInterrupt

    with suppress(KeyboardInterrupt):
        interrupted_put()
    address = under_way[0].address
    with Pipeline() as pipeline:
        others = [staged.take(pipeline) for _ in range(3)]
        assert address not in {memory.address for memory in others}
        under_way.clear()
        assert staged.take(pipeline).address == address


def test_after_close_no_queue_gets_staging_memory(queue: Registrations, staged: Staged) -> None:
    with Pipeline() as pipeline:
        held = staged.take(pipeline)
        staged.close()
        with pytest.raises(ClosedError, match="closed"):
            staged.take(pipeline)
        staged.give(held)
    assert not queue.pools


def test_staging_memory_that_is_made_while_another_thread_closes_is_taken_back(
    queue: Registrations, staged: Staged, monkeypatch: pytest.MonkeyPatch
) -> None:
    closing = threading.Thread(target=staged.close, daemon=True)

    def closed_meanwhile(nbytes: int) -> Pool:
        closing.start()
        closing.join(0.05)
        return Pool(nbytes)

    monkeypatch.setattr(pipeline_module, "Pool", closed_meanwhile)
    with Pipeline() as pipeline:
        staged.take(pipeline)
    closing.join(TIMEOUT_S)
    assert not queue.pools
