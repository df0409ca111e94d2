"""Steps of one training in turns, in one process: with activations kept, with activations on the
drive, and with activations kept while another process moves as many bytes over the drive.

    python steps_in_turns.py JOB

JOB is one of trained_apart.py's, as JSON, whose settings let activations wait on the drive. Prints
the seconds of each way as JSON, medians of the steps after the first two, and how long the other
process still moved bytes when its steps had ended. What makes the machine slower for a while makes
all ways slower, as their steps take turns. The third way shows what moving the bytes costs by
itself: a virtual drive needs the processors that modules compute on.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO

from trained_apart import Job, Step, drive_bytes, take_step, trainer_of

__all__ = ["BESIDE", "DRIVE", "KEPT", "LATE", "main"]

KEPT, DRIVE, BESIDE, LATE = "kept", "on the drive", "kept beside a stream", "the stream is late"
WARMING_UP = 2  # steps
PIECE, PENDING = 4 << 20, 4
SPREAD = 0.9  # of the time of a forward, or a backward, the stream moves its bytes
_STREAM = "stream"
_WRITTEN, _READ = "write_bytes", "read_bytes"


def main(job: Job) -> dict[str, float]:
    """Train every way, a step of each in turn; return what their steps take."""
    import torch

    from tiny_gpt import batches

    torch.set_num_threads(job.threads)
    kept = replace(job, settings={**job.settings, "activations": {"at": "device"}})
    trainers = {KEPT: trainer_of(kept), DRIVE: trainer_of(job), BESIDE: trainer_of(kept)}
    text = torch.frombuffer(bytearray(Path(job.text).read_bytes()), dtype=torch.uint8)
    data = batches(text.long(), sequences=1, length=job.context, seed=job.seed)
    steps: dict[str, list[Step]] = {name: [] for name in trainers}
    moved = {_WRITTEN: 0, _READ: 0}
    late: list[float] = []
    ways = list(trainers)
    with _stream(Path(job.folder) / "stream") as stream:
        for number in range(job.steps):
            batch, first = next(data), number % len(ways)
            for name in ways[first:] + ways[:first]:  # each begins in turn
                before = drive_bytes()
                begins = stream.beside(steps[KEPT][-1], moved) if name == BESIDE else _nothing
                steps[name].append(take_step(trainers[name], batch, begins))
                if name == BESIDE:
                    late.append(stream.end_s())
                if name == DRIVE:
                    moved = {way: drive_bytes()[way] - before[way] for way in moved}
    seconds = {
        name: statistics.median(sum(step.seconds.values()) for step in taken[WARMING_UP:])
        for name, taken in steps.items()
    }
    return {**seconds, LATE: statistics.median(late[WARMING_UP:])}


def _nothing(phase: str) -> None:
    pass


class _Stream:
    """Another process, which moves bytes over the drive when it is asked to."""

    def __init__(self, asks: IO[str], tells: IO[str]) -> None:
        self._asks, self._tells = asks, tells
        self._begun = 0

    def beside(self, step: Step, moved: Mapping[str, int]) -> Callable[[str], None]:
        """Return what lets it move so many bytes evenly beside the phases of such a step."""

        def begin(phase: str) -> None:
            way = {"forward": _WRITTEN, "backward": _READ}.get(phase)
            if way is not None:
                self._begun += 1
                seconds = SPREAD * step.seconds[phase]
                print(way, moved[way], seconds, file=self._asks, flush=True)

        return begin

    def end_s(self) -> float:
        """Wait until it has moved all; return for how long."""
        start = time.perf_counter()
        while self._begun:
            if not self._tells.readline():
                raise RuntimeError("the process that moves bytes over the drive has ended early")
            self._begun -= 1
        return time.perf_counter() - start


@contextmanager
def _stream(file: Path) -> Iterator[_Stream]:
    with subprocess.Popen(
        [sys.executable, __file__, _STREAM, str(file)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield _Stream(process.stdin, process.stdout)


def move(path: Path) -> None:
    """Move bytes of a new file as standard input says, and tell on standard output."""
    import deepnvme

    pool = deepnvme.Pool(PENDING * PIECE)
    buffers = [pool.buffer(PIECE) for _ in range(PENDING)]
    with deepnvme.IOQueue(pool=pool) as queue, queue.open(path, "w") as file:
        there = 1
        file.pwrite(buffers[0]).result()
        for line in sys.stdin:
            way, nbytes, seconds = line.split()
            pieces, begun = int(nbytes) // PIECE, time.perf_counter()
            if way == _WRITTEN:
                there = max(there, pieces)  # pieces that can be read
            futures: deque[deepnvme.IOFuture[int]] = deque()
            for number in range(pieces):
                due = begun + float(seconds) * number / pieces
                time.sleep(max(due - time.perf_counter(), 0.0))
                if len(futures) == PENDING:
                    futures.popleft().result()
                verb = file.pwrite if way == _WRITTEN else file.pread
                futures.append(verb(buffers[number % PENDING], number % there * PIECE))
            for future in futures:
                future.result()
            print("moved", flush=True)
    path.unlink(missing_ok=True)  # who asked may have ended, and removed the folder


if __name__ == "__main__":
    if sys.argv[1] == _STREAM:
        move(Path(sys.argv[2]))
    else:
        print(json.dumps(main(Job(**json.loads(sys.argv[1])))))
