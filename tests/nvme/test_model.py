"""Random operations against a model of the file: sizes, places, memory, handles, overlaps, faults.

Operations of one round are under way together and may overlap. Afterwards each byte must be one
that it may have: what it was, where no write of the round covered it, else that of a write that did.
A write that failed, was stopped or came too late may have left its bytes or not.
"""

from __future__ import annotations

import errno
import gc
import os
import random
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from deepnvme import (
    DeadlineError,
    Direct,
    FaultPlan,
    File,
    IOFuture,
    IOQueue,
    NVMeError,
    Pool,
    Priority,
    Requests,
    ShortReadError,
)
from support.nvme_io import CHUNK, PAGE, TIMEOUT_S, Bytes, Home, memory

LARGEST_FILE = 12 * CHUNK
HANDLES = 3
WAYS = (Direct.AUTO, Direct.AUTO, Direct.NEVER)  # of the handles beside the first
SHORT_ROUNDS = 12
SLOW_S = float(os.environ.get("DEEPNVME_MODEL_S", "120"))  # for each backend: five make ten minutes
QUEUES: tuple[dict[str, Any], ...] = (
    {"chunk_bytes": CHUNK, "inflight_bytes": 4 * CHUNK},  # partial pages through the page cache
    {"chunk_bytes": CHUNK, "inflight_bytes": 32 * CHUNK},  # unaligned reads through blocks
    {},
)


@dataclass
class Part:
    """A piece of memory of an operation, and its place in the file."""

    offset: int
    memory: Bytes


@dataclass
class Step:
    """An operation under way."""

    writes: bool
    parts: list[Part]
    future: IOFuture[int]
    certain: bool = True
    stops_at_end: bool = False


@dataclass
class Model:
    """What the file holds, and for the round under way what it may hold."""

    content: Bytes
    choices: list[Part] = field(default_factory=list)

    def may_hold(self, offset: int, seen: Bytes) -> bool:
        """Whether each byte is what it was or what a write of this round wrote there."""
        known = self.content[offset : offset + len(seen)]
        right = self.of_a_write(offset, seen)
        right[: len(known)] |= seen[: len(known)] == known
        right[len(known) :] |= seen[len(known) :] == 0  # a hole, as the file may have grown
        return bool(right.all())

    def of_a_write(self, offset: int, seen: Bytes) -> NDArray[np.bool_]:
        """Return for each byte whether it is what a write of this round wrote there."""
        right = np.zeros(len(seen), bool)
        for write in self.choices:
            first = max(offset, write.offset)
            end = min(offset + len(seen), write.offset + len(write.memory))
            if first < end:
                ours = slice(first - offset, end - offset)
                theirs = slice(first - write.offset, end - write.offset)
                right[ours] |= seen[ours] == write.memory[theirs]
        return right


class Player:
    """Plays rounds on one queue and compares the file with the model after each."""

    def __init__(self, rng: random.Random, queue: IOQueue, path: Path, pool: Pool) -> None:
        self.rng, self.queue, self.path, self.pool = rng, queue, path, pool
        self.model = Model(np.zeros(0, np.uint8))

    def play(self, files: list[File]) -> None:
        """Truncate, submit, wait, compare."""
        # An error and the frames that it came through refer to one another, and hold memory.
        if self.pool.largest_free < self.pool.capacity // 2:
            gc.collect()
        if self.rng.random() < 0.3:
            self.truncate(self.rng.choice(files))
        steps = [self.submit(self.rng.choice(files)) for _ in range(self.rng.randrange(1, 24))]
        syncs = [self.rng.choice(files).sync() for _ in range(self.rng.randrange(2))]
        self.take_back(steps)
        self.rng.shuffle(steps)
        for sync in syncs:
            assert sync.result(TIMEOUT_S) == 0
        for step in steps:
            self.finish(step)
        self.compare(self.rng.choice(files), [step for step in steps if step.writes])

    def truncate(self, file: File) -> None:
        length = self.rng.randrange(LARGEST_FILE)
        file.truncate(length)
        kept = self.model.content[:length]
        self.model.content = np.concatenate([kept, np.zeros(length - len(kept), np.uint8)])

    def submit(self, file: File) -> Step:
        writes = self.rng.random() < 0.6
        count = self.rng.randrange(1, 9) if self.rng.random() < 0.2 else 1
        parts = [self.part(writes) for _ in range(count)]
        urgency = self.rng.choice(list(Priority))
        hurries = self.rng.random() < 0.1
        deadline_s = self.rng.choice([0.0, 0.001]) if hurries else None
        terms: dict[str, Any] = {"priority": urgency, "deadline_s": deadline_s}
        if writes:
            self.model.choices += parts
        if count > 1:
            buffers, offsets = [part.memory for part in parts], [part.offset for part in parts]
            many = file.pwrite_many if writes else file.pread_many
            return Step(writes, parts, many(buffers, offsets, **terms), not hurries)
        (part,) = parts
        if writes:
            return Step(writes, parts, file.pwrite(part.memory, part.offset, **terms), not hurries)
        stops = self.rng.random() < 0.5
        read = file.readinto if stops else file.pread
        future = read(part.memory, part.offset, **terms)
        return Step(writes, parts, future, not hurries, stops)

    def part(self, writes: bool) -> Part:
        unit = self.rng.choice([1, 512, PAGE])
        largest = self.rng.choice([PAGE // 2, 3 * PAGE, CHUNK, 5 * CHUNK])
        nbytes = max(1, self.rng.randrange(largest) // unit * unit)
        offset = self.rng.randrange(LARGEST_FILE - nbytes) // unit * unit
        buffer = memory(self.rng.choice(list(Home)), nbytes, self.pool)
        if writes:
            buffer[:] = np.frombuffer(self.rng.randbytes(nbytes), np.uint8)
        return Part(offset, buffer)

    def take_back(self, steps: list[Step]) -> None:
        for step in steps:
            if self.rng.random() < 0.05:
                step.certain = False
                self.rng.choice([step.future.cancel, step.future.stop])()

    def finish(self, step: Step) -> None:
        """Wait for an operation, and compare what a read has read."""
        asked = sum(len(part.memory) for part in step.parts)
        try:
            done = step.future.result(TIMEOUT_S)
        except CancelledError:
            assert not step.certain
            return
        except ShortReadError as error:
            if step.writes or error.done >= asked:
                raise
            return
        except NVMeError as error:
            injected = error.errno == errno.ENOTRECOVERABLE
            late = isinstance(error, DeadlineError) or error.errno == errno.ECANCELED
            if not injected and (step.certain or not late):
                raise
            step.certain = False
            return
        assert done == asked or step.stops_at_end
        if not step.writes:
            for part in step.parts:
                assert self.model.may_hold(part.offset, part.memory[: min(done, asked)])

    def compare(self, file: File, writes: list[Step]) -> None:
        """Compare the file, as the queue and as any other program reads it, with the model."""
        length = file.size
        seen = np.zeros(length, np.uint8)
        if length:
            assert self.read(file, seen) == length
        if self.queue.backend != "memory":
            outside = np.frombuffer(self.path.read_bytes(), np.uint8)
            assert np.array_equal(seen, outside)
        assert self.model.may_hold(0, seen)
        for write in writes:
            for part in write.parts:
                if write.certain:
                    self.check_written(part, seen)
        self.model = Model(seen)

    def check_written(self, part: Part, seen: Bytes) -> None:
        """Compare with a write that succeeded: what is not its own is of another one."""
        end = part.offset + len(part.memory)
        assert end <= len(seen)
        assert self.model.of_a_write(part.offset, seen[part.offset : end]).all()

    def read(self, file: File, into: Bytes) -> int:
        """Read the whole file, past the faults that the plan still has."""
        for _ in range(50):
            try:
                return file.pread(into).result(TIMEOUT_S)
            except NVMeError as error:
                if error.errno != errno.ENOTRECOVERABLE:
                    raise
        raise AssertionError("each of 50 reads failed")


def plan(rng: random.Random) -> FaultPlan | None:
    """Return faults that a queue has to mend, and a few that it has to report."""
    if rng.random() < 0.3:
        return None
    faults = FaultPlan(seed=rng.randrange(1 << 30))
    faults.shorten(probability=0.2)
    faults.delay(probability=0.1, delay_us=300)
    faults.reorder(probability=0.2, hold=3)
    faults.fail(probability=0.1, errno=rng.choice([errno.EINTR, errno.EAGAIN, errno.ECANCELED]))
    for requests in (Requests.READS, Requests.WRITES):  # a sync never fails here
        faults.fail(probability=0.01, errno=errno.ENOTRECOVERABLE, requests=requests)
    return faults


def rounds(seconds: float) -> Iterator[int]:
    """Count rounds, for a while or the few of the short form."""
    end_s = time.monotonic() + seconds
    number = 0
    while number < SHORT_ROUNDS or time.monotonic() < end_s:
        yield number
        number += 1


def play(backend: str, folder: Path, pool: Pool, seed: int, seconds: float) -> None:
    rng = random.Random(seed)
    for number in rounds(seconds):
        path = folder / f"file{number}"
        faults = plan(rng)
        settings = rng.choice(QUEUES)
        with ExitStack() as stack:
            queue = stack.enter_context(
                IOQueue(
                    backend,
                    pool=pool if rng.random() < 0.5 else None,
                    faults=faults,
                    **settings,
                )
            )
            files = [stack.enter_context(queue.open(path, "w"))]
            files += [
                stack.enter_context(queue.open(path, "r+", direct=rng.choice(WAYS)))
                for _ in range(HANDLES - 1)
            ]
            player = Player(rng, queue, path, pool)
            for _ in range(4):
                player.play(files)
        path.unlink(missing_ok=True)


@pytest.mark.parametrize("seed", [1, 2])
def test_no_byte_is_lost_whatever_is_under_way_together(
    tmp_path: Path, backend: str, seed: int
) -> None:
    play(backend, tmp_path, Pool(16 << 20), seed, 0)


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_no_byte_is_lost_in_ten_minutes(tmp_path: Path, backend: str) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    play(backend, tmp_path, Pool(16 << 20), seed, SLOW_S)
