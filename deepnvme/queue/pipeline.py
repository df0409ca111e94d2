"""How many pieces of memory travel at once: operations under way in a bounded number of bytes,
small ones together.

What the store and safetensors files share: which small pieces one operation moves, the staging
memory that it moves them through, and the order in which operations are waited for. Whatever fails,
no memory is let go while a drive may use it. Called by volumes, stores and safetensors files.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from deepnvme.errors import ClosedError, ForkedError, QueueFull
from deepnvme.memory.buffers import Memory, memory_of
from deepnvme.memory.pool import Pool
from deepnvme.queue.queue import Batch, IOQueue
from deepnvme.sizes import PAGE, whole_pages

__all__ = [
    "GAP_BYTES",
    "MOST_BYTES",
    "RUN_BYTES",
    "STAGED_RUNS",
    "Piece",
    "Pipeline",
    "Staged",
    "Stretch",
    "once_there_is_room",
    "together",
]

_T = TypeVar("_T")

RUN_BYTES = 8 << 20
"""The most bytes that one operation on several small pieces moves."""

MOST_BYTES = 64 << 20
"""Bytes under way on each drive from which on no further operations begin."""

GAP_BYTES = 128 << 10
"""A gap between two reads that is cheaper to read over than to skip with another operation."""

STAGED_RUNS = 4
"""How many operations on small pieces have staging memory at one time."""

# how long a queue that refuses to wait is left alone before it is asked again
_UNTIL_ROOM_S = 0.001


def once_there_is_room(submit: Callable[[], _T]) -> _T:
    """Return what `submit` returns once its queue has room, also a queue that would raise.

    What is submitted here belongs to calls that wait for the drive anyway.
    """
    while True:
        try:
            return submit()
        except QueueFull:
            time.sleep(_UNTIL_ROOM_S)


def _nothing() -> None:
    """Do nothing."""


@dataclass(frozen=True)
class _Step:
    """Operations under way; `land` is called when they succeeded, then `release` in any case.

    A second call of `release` does no harm.
    """

    nbytes: int
    batch: Batch
    land: Callable[[], None]
    release: Callable[[], None]


class Pipeline:
    """The operations of one call, oldest first, about `MOST_BYTES` at once for each drive.

    At the end of its `with` block none is under way.
    """

    def __init__(self, *, drives: int = 1) -> None:
        self._steps: deque[_Step] = deque()
        self._nbytes = 0
        self._most_bytes = drives * MOST_BYTES

    @property
    def empty(self) -> bool:
        """Whether nothing is under way."""
        return not self._steps

    def start(
        self,
        nbytes: int,
        *,
        land: Callable[[], None] = _nothing,
        release: Callable[[], None] = _nothing,
    ) -> Batch:
        """Return the batch for operations on so many bytes, once there is room for them."""
        step = _Step(nbytes, Batch(), land, release)
        try:
            self.wait_for_room()
        except BaseException:
            release()  # the step is not among those that __exit__ releases
            raise
        self._steps.append(step)
        self._nbytes += nbytes
        return step.batch

    def wait_for_room(self) -> None:
        """End the oldest steps until there is room for another."""
        # Before the step counts: one that is larger than the limit travels alone, and never waits
        # for ever.
        while self._nbytes >= self._most_bytes:
            self.finish_oldest()

    def finish_oldest(self) -> None:
        """Wait for the oldest step and land it."""
        # It stays listed: where wait() or land() raises, __exit__ still drains and releases it.
        step = self._steps[0]
        step.batch.wait()
        # Before its memory is released: landing copies out of it.
        step.land()
        self._drop()

    def _drop(self) -> None:
        step = self._steps[0]
        # After a failed wait there are futures left; after a good one this does nothing.
        step.batch.drain()
        step.release()
        self._steps.popleft()  # not before: interrupted, all of it is done again
        self._nbytes -= step.nbytes

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        interrupted = False
        try:
            if kind is not None and not issubclass(kind, Exception):
                # Ctrl-C may have come after an operation was submitted and before its step was
                # noted. Memory is free only once no reference to it is left.
                self._steps = deque(replace(step, release=_nothing) for step in self._steps)
            while self._steps and kind is None:
                self.finish_oldest()
        finally:
            while self._steps:  # whatever happens: drives may be at work on this memory
                try:
                    self._drop()
                except KeyboardInterrupt:
                    # Ctrl-C does not end this: memory that a drive still writes to would be used
                    # again.
                    interrupted = True
        if interrupted:
            raise KeyboardInterrupt


class Staged:
    """Staging memory for a few operations of up to `run_bytes`, registered with queues.

    Any thread may ask. The memory of one operation is made when it is first needed, that of the
    others when a second one needs its own.
    """

    def __init__(
        self, queues: Collection[IOQueue], *, runs: int = STAGED_RUNS, run_bytes: int = RUN_BYTES
    ) -> None:
        self._queues = queues
        self.run_bytes = run_bytes
        self._taking = threading.Lock()  # between asking what is free and taking it
        self._making = threading.Lock()  # for long: it maps memory and registers it
        self._to_make = (1, runs - 1) if runs > 1 else (1,)  # runs of each pool
        self._pools: list[Pool] = []  # only appended to
        self._closed = False
        # For those that are never closed: queues that go on would keep the pools.
        self._finalizer = weakref.finalize(self, _let_go, queues, self._pools)
        self._finalizer.atexit = False  # the queues close then

    def take(self, pipeline: Pipeline) -> Memory:
        """Return free memory for one run.

        Ends the pipeline's oldest steps for it before it waits for other calls.

        It is free again when the caller gives it back, and at the latest when no reference is left:
        Ctrl-C cannot lose it.
        """
        while True:
            memory = self.take_unless_others_have_it(pipeline)
            if memory is not None:
                return memory
            # Nothing tells when memory is free because its last reference is gone.
            time.sleep(_UNTIL_ROOM_S)

    def take_unless_others_have_it(self, pipeline: Pipeline) -> Memory | None:
        """Return free memory for one run as `take` does, or None where other calls have all of it.

        Waits for none.
        """
        while True:
            pools = tuple(self._pools)
            block = self._free_block(pools)
            if block is not None:
                return Memory(memory_of(block, writable=True).address, block.nbytes, block)
            if len(pools) < len(self._to_make):
                self._make_more(len(pools))
            elif pipeline.empty:
                return None
            else:
                pipeline.finish_oldest()

    def _free_block(self, pools: Iterable[Pool]) -> memoryview | None:
        with self._taking:
            for pool in pools:
                if pool.largest_free >= self.run_bytes:
                    return pool.buffer(self.run_bytes)
        return None

    def _make_more(self, before: int) -> None:
        """Make a pool for one operation, then one for all others: each registers all anew."""
        with self._making:
            if self._closed:  # the registration would never be taken back
                raise ClosedError(
                    "the store or file of this staging memory is closed: open it again to use it"
                )
            if len(self._pools) != before:  # another thread did
                return
            # Two pools at most: one run is all that many programs need, and each registration waits
            # for idle drives.
            pool = Pool(self._to_make[before] * whole_pages(self.run_bytes))
            # first: interrupted, it costs more CPU, and close() knows of it
            self._pools.append(pool)
            for queue in self._queues:
                queue.use_pool(pool)

    @staticmethod
    def give(memory: Memory) -> None:
        """Free the memory for another operation. Again: does nothing."""
        assert isinstance(memory.holder, memoryview)
        memory.holder.release()

    def close(self) -> None:
        """Let go of the memory, which queues that go on would keep.

        A thread that still reads or writes gets no more memory.
        """
        with self._making, suppress(ForkedError):  # the parent's queues are none of ours
            self._closed = True
            for pool in self._pools:
                for queue in self._queues:
                    queue.forget_pool(pool)
            self._finalizer.detach()


def _let_go(queues: Collection[IOQueue], pools: Iterable[Pool]) -> None:
    """Let the queues forget the pools. Waits for no drive: any thread may collect garbage."""
    with suppress(ForkedError):
        for pool in pools:
            for queue in queues:
                queue._native.forget_pool(pool._native)


@dataclass(frozen=True)
class Piece(Generic[_T]):
    """`nbytes` at `offset` of the file with that number, and what they are."""

    file: int
    offset: int
    nbytes: int
    what: _T


@dataclass(frozen=True)
class Stretch(Generic[_T]):
    """Whole pages of a file that are read at once, and the pieces among them."""

    file: int
    start: int
    nbytes: int
    pieces: Sequence[Piece[_T]]


def together(pieces: Iterable[Piece[_T]]) -> Iterator[Stretch[_T]]:
    """Yield what lies close together as one stretch, each small enough for staging memory.

    In the order of the bytes.

    Raises:
        ValueError: the pieces are not in that order.
    """
    group: list[Piece[_T]] = []
    file = start = end = 0
    last = (-1, -1)
    for piece in pieces:
        if (piece.file, piece.offset) < last:
            raise ValueError(
                f"expected pieces in the order of their bytes, got {piece} after one at {last}"
            )
        last = (piece.file, piece.offset)
        until = piece.offset + piece.nbytes
        close = (
            piece.file == file
            and piece.offset - end <= GAP_BYTES
            and whole_pages(until) - start <= RUN_BYTES
        )
        if group and not close:
            yield Stretch(file, start, whole_pages(end) - start, group)
            group = []
        if not group:
            file, start, end = piece.file, piece.offset - piece.offset % PAGE, 0
        group.append(piece)
        end = max(end, until)
    if group:
        yield Stretch(file, start, whole_pages(end) - start, group)
