"""A fixed mix of operations on several files, and the judge of how it went: a model of every file.

Operations of a round run at the same time and touch no common byte of which one writes it. What a
failed write leaves is its certain prefix and, byte by byte behind it, the old or the new;
everything else is exact.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from deepnvme import File, IOFuture, IOQueue, NVMeError
from support.nvme_io import CHUNK, TIMEOUT_S, assert_same, contents

FILES = 4
LENGTH = 2 * CHUNK + 777  # of each file, but while it is extended
EDGES = (0, 1, 511, 512, 4095, 4096, 4097, CHUNK - 1, CHUNK, CHUNK + 1, LENGTH - 1)


@dataclass(frozen=True)
class Call:
    """One operation. `data` is what a write writes; reads read as much."""

    name: str
    file: int
    offset: int
    data: bytes

    @property
    def end(self) -> int:
        """The first byte behind it."""
        return self.offset + len(self.data)

    def collides_with(self, other: Call) -> bool:
        """Tell whether the order of the two would matter."""
        if self.file != other.file or "pwrite" not in (self.name, other.name):
            return False
        return self.offset < other.end and other.offset < self.end


@dataclass(frozen=True)
class Workload:
    """Rounds of calls."""

    rounds: tuple[tuple[Call, ...], ...]

    def __len__(self) -> int:
        return sum(map(len, self.rounds))


@dataclass
class Run:
    """The files of one run as they should be, and the errors so far."""

    queue: IOQueue
    paths: list[Path]
    models: list[bytearray] = field(
        default_factory=lambda: [bytearray(LENGTH) for _ in range(FILES)]
    )
    errors: list[NVMeError] = field(default_factory=list)
    requests: int = 0
    """How many the queue made of the calls."""


def make_workload(seed: int, rounds: int = 24, width: int = 8) -> Workload:
    """Return the same workload for the same seed: every third round is one call at the end of a
    file.
    """
    source = random.Random(seed)
    made = []
    for number in range(rounds):
        made.append(tuple(_round(source, width)))
        if number % 3 == 0:
            offset = LENGTH - source.choice(EDGES[:7])
            name = "pwrite" if number % 2 else "readinto"
            made.append(
                (
                    Call(
                        name,
                        source.randrange(FILES),
                        offset,
                        source.randbytes(source.choice(EDGES[1:])),
                    ),
                )
            )
    return Workload(tuple(made))


def _round(source: random.Random, width: int) -> Iterator[Call]:
    calls: list[Call] = []
    while len(calls) < width:
        name = source.choice(("pwrite", "pwrite", "pwrite", "pread", "pread", "readinto", "sync"))
        offset = source.choice((source.choice(EDGES), source.randrange(LENGTH)))
        nbytes = min(source.choice((source.randrange(9000), source.choice(EDGES))), LENGTH - offset)
        data = b"" if name == "sync" else source.randbytes(nbytes)
        call = Call(name, source.randrange(FILES), offset, data)
        if not any(call.collides_with(other) for other in calls):
            calls.append(call)
    yield from calls


def run_workload(queue: IOQueue, folder: Path, workload: Workload) -> Run:
    """Do it all, judging every result and in the end every byte of every file."""
    run = Run(queue, [folder / f"file{number}" for number in range(FILES)])
    with ExitStack() as stack:
        files = [stack.enter_context(queue.open(path, "w")) for path in run.paths]
        for file in files:
            file.truncate(LENGTH)
        for calls in workload.rounds:
            _run_round(run, files, calls)
        drives = queue.stats().drives.values()
        run.requests = sum(
            one.chunks + one.short_transfers + one.retries + one.direct_refused for one in drives
        )
        for path, model in zip(run.paths, run.models, strict=True):
            assert_same(contents(queue, path), model)
    return run


def _run_round(run: Run, files: list[File], calls: tuple[Call, ...]) -> None:
    buffers = [
        bytearray(call.data if call.name == "pwrite" else b"\xee" * len(call.data))
        for call in calls
    ]
    futures = [
        _submit(files[call.file], call, buffer) for call, buffer in zip(calls, buffers, strict=True)
    ]
    ends = [
        (call, buffer, future.exception(TIMEOUT_S))
        for call, buffer, future in zip(calls, buffers, futures, strict=True)
    ]
    for (call, buffer, error), future in zip(ends, futures, strict=True):
        if error is None:
            _judge_success(run, call, buffer, future.result())
    failures = [(call, buffer, error) for call, buffer, error in ends if error is not None]
    for call, buffer, error in failures:
        assert isinstance(error, NVMeError), error
        _judge_failure(run, call, buffer, error)
    for number in {call.file for call, _, _ in failures if call.name == "pwrite"}:
        torn = [call for call, _, _ in failures if call.name == "pwrite" and call.file == number]
        run.models[number][:] = _judge_remains(run, number, torn)
    for file, model in ((files[call.file], run.models[call.file]) for call in calls):
        if len(model) != LENGTH:
            file.truncate(LENGTH)
            del model[LENGTH:]


def _submit(file: File, call: Call, buffer: bytearray) -> IOFuture[int]:
    if call.name == "sync":
        return file.sync()
    submit = {"pwrite": file.pwrite, "pread": file.pread, "readinto": file.readinto}[call.name]
    return submit(buffer, call.offset)


def _judge_success(run: Run, call: Call, buffer: bytearray, count: int) -> None:
    model = run.models[call.file]
    if call.name == "pwrite":
        assert count == len(buffer)
        model[call.offset : call.end] = call.data
    elif call.name != "sync":
        assert count == len(model[call.offset : call.end])
        assert_same(buffer[:count], model[call.offset : call.end])


def _judge_failure(run: Run, call: Call, buffer: bytearray, error: NVMeError) -> None:
    run.errors.append(error)
    assert error.path == str(run.paths[call.file])
    assert 0 <= error.done <= error.asked == len(call.data)
    certain = slice(call.offset, call.offset + error.done)
    if call.name in ("pread", "readinto"):
        assert_same(buffer[: error.done], run.models[call.file][certain])
    elif call.name == "pwrite" and error.done:
        seen = contents(run.queue, run.paths[call.file])
        assert_same(seen[certain], call.data[: error.done])


def _judge_remains(run: Run, number: int, torn: list[Call]) -> bytearray:
    """Return what the file holds after these writes failed, once every byte is seen to be the old
    one or a new one.
    """
    model, seen = run.models[number], bytearray(contents(run.queue, run.paths[number]))
    assert len(model) <= len(seen) <= max(len(model), *(call.end for call in torn))
    is_now = np.frombuffer(seen, np.uint8)
    explained = is_now == np.frombuffer(model.ljust(len(seen), b"\0"), np.uint8)
    for call in torn:
        new = np.frombuffer(call.data, np.uint8)[: max(0, len(seen) - call.offset)]
        explained[call.offset : call.end] |= is_now[call.offset : call.end] == new
    assert bool(explained.all()), (
        f"byte {int(np.argmin(explained))} of file {number} is neither old nor new"
    )
    return seen
