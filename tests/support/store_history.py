"""A history that a store goes through, one commit per step, and a program that goes through it
until it is killed.

Whoever opens the store afterwards asks `state_after` what its generation must hold. `Nursery`
starts the program once and lets it fork a writer for each kill, as starting Python takes longer
than what is to be tested.
"""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import numpy as np

from deepnvme import IOQueue
from deepnvme.memory.arrays import Returns
from deepnvme.store.store import TensorStore

__all__ = ["CAPACITY", "Nursery", "contents", "make", "opened", "state_after", "take_step"]

CAPACITY = 16 << 20
_NOISE = random.Random(7).randbytes(1 << 20)


def make(places: Sequence[Path], queue: IOQueue) -> None:
    """Make the store that the history begins with: generation 1, empty, which is step 0."""
    TensorStore.create(places, CAPACITY, queue=queue).close()


def opened(places: Sequence[Path], queue: IOQueue, **options: Any) -> TensorStore:
    return TensorStore.open(places, queue=queue, returns=Returns.NUMPY, **options)


def take_step(store: TensorStore, step: int) -> None:
    """Put and delete what the step does."""
    puts, gone = _changes(step)
    store.put_many(puts)
    for name in gone:
        if name in store:
            store.delete(name)
    store.put_state("state", {"step": step, "values": np.full(1000, step)})


def state_after(step: int) -> dict[str, bytes]:
    """Return what the store holds after the step, the state dict under its name."""
    state: dict[str, bytes] = {}
    for each in range(1, step + 1):
        puts, gone = _changes(each)
        state.update(puts)
        for name in gone:
            state.pop(name, None)
    if step:
        state["state"] = repr(step).encode() + np.full(1000, step).tobytes()
    return state


def contents(store: TensorStore) -> dict[str, bytes]:
    """Return what the store holds, in the form of `state_after`."""
    found = {name: store.get(name).tobytes() for name in store if not name.startswith("state/")}
    if store.states:
        state = store.get_state("state")
        found["state"] = repr(state["step"]).encode() + state["values"].tobytes()
    return found


def _changes(step: int) -> tuple[dict[str, bytes], list[str]]:
    sizes = [100 + step % 7, 4096, 9000 + step % 1000]
    puts = {
        f"t{(step * 3 + index) % 11}": _NOISE[step % 997 :][:size]
        for index, size in enumerate(sizes)
    }
    puts[f"large {step % 3}"] = _NOISE[step % 991 :][: 700_000 + step % 5000]
    return puts, [f"t{(step * 5 + 1) % 11}"] if f"t{(step * 5 + 1) % 11}" not in puts else []


class Nursery:
    """Starts writers that go on with the history of a store, and kills them."""

    def __init__(self, places: Sequence[Path]) -> None:
        folder = Path(__file__).parents[1]
        environment = {
            **os.environ,
            "DEEPNVME_PROFILE": "",
            "PYTHONPATH": str(folder),
            "OPENBLAS_NUM_THREADS": "1",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "support.store_history", *map(str, places)],
            env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert self._process.stdout is not None
        self._ear = self._process.stdout.fileno()
        self._heard = b""
        self.pid = 0  # of the writer
        # generations: the last commit that was begun, and the last one that returned
        self.begun = self.done = 0
        self.dead = 0  # how the one before ended
        self.calls = 0  # of its first commit, where they were counted

    def start(self, die_at_call: int = 0) -> None:
        """Start a writer; one that counts the calls of its first commit and dies before that one,
        if not 0.
        """
        assert self._process.stdin is not None
        self.begun = self.done = self.calls = 0
        self._process.stdin.write(f"{die_at_call}\n".encode())
        self._process.stdin.flush()
        self.hear("pid")

    def hear(self, word: str) -> None:
        """Listen to the writer until it says that."""
        while (said := self._next_word()) != word:
            if said == "dead":
                raise AssertionError(f"the writer ended before it said {word!r}")

    def hear_all(self) -> None:
        """Listen to what the writer has said by now."""
        while b"\n" in self._heard or select.select([self._ear], [], [], 0)[0]:
            self._next_word()

    def _next_word(self) -> str:
        while b"\n" not in self._heard:
            more = os.read(self._ear, 1 << 16)
            if not more:
                raise AssertionError("whoever starts the writers has ended")
            self._heard += more
        line, self._heard = self._heard.split(b"\n", 1)
        word, number = line.decode().split()
        setattr(self, word, int(number))
        return word

    def kill(self) -> None:
        """Kill the writer, and hear what it had said."""
        os.kill(self.pid, signal.SIGKILL)
        self.hear("dead")
        self.pid = 0

    def __enter__(self) -> Nursery:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None and self.pid:  # a stopped or a living one would keep the files in use
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        self._process.communicate()


def _say(word: str, number: int) -> None:
    os.write(1, f"{word} {number}\n".encode())  # at once, and in one piece


def _write_for_ever(places: Sequence[Path], die_at_call: int) -> None:
    calls = 0

    def die_in_time(frame: FrameType, event: str, _: object) -> None:
        nonlocal calls
        if event in ("call", "c_call"):
            calls += 1
            if calls == die_at_call:
                os.kill(os.getpid(), signal.SIGKILL)

    with IOQueue("threads") as queue, opened(places, queue) as store:
        while True:
            step = store.generation
            take_step(store, step)
            _say("begun", step + 1)
            if die_at_call:
                sys.setprofile(die_in_time)
            store.commit()
            if die_at_call:
                sys.setprofile(None)
                _say("calls", calls)
            _say("done", step + 1)


def _main() -> None:
    places = [Path(place) for place in sys.argv[1:]]
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            try:
                _write_for_ever(places, int(line))
            finally:
                os._exit(1)
        _say("pid", pid)
        _, status = os.waitpid(pid, 0)
        _say("dead", status)


if __name__ == "__main__":
    _main()
