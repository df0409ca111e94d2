"""DeepSpeed's DeepNVMe under measurement.

Run as a program in DeepSpeed's own environment, it measures what it is told.

One line of JSON comes in on standard input per Order, one goes out on standard output per answer;
whatever DeepSpeed prints goes to standard error. Imported, it gives scripts/bench/nvme_vs_deepspeed
the other end, `Rival`, and `moved`, by which both sides are measured. Imports torch and deepspeed
only as a program.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import IO, Any, Literal, TextIO

import bench

__all__ = [
    "CPU",
    "GIB",
    "RATE",
    "Order",
    "Rival",
    "Tensors",
    "Verb",
    "Waiting",
    "measure",
    "moved",
    "serve",
]

GIB = 1 << 30
RATE, CPU = "GiB/s", "CPU s/GiB"
Verb = Literal["read", "write"]
Tensors = Literal["ordinary", "pinned"]
Waiting = Literal["sync", "async"]

_BLOCK = 1 << 20
_NO_LIBAIO = (
    "DeepNVMe needs the headers of libaio (Debian, Ubuntu: apt install libaio-dev; Fedora: dnf "
    "install libaio-devel)"
)


@dataclass(frozen=True)
class Order:
    """One measurement: move the whole tensor from or to the file again and again, with these
    settings of aio_handle.
    """

    verb: Verb
    tensors: Tensors
    path: str
    nbytes: int
    seconds: float
    queue_depth: int
    threads: int
    waiting: Waiting

    @property
    def settings(self) -> str:
        """What was chosen of what DeepNVMe offers."""
        return f"queue depth {self.queue_depth}, threads {self.threads}, {self.waiting}"


def moved(transfer: Callable[[], object], nbytes: int, seconds: float) -> dict[str, float]:
    """Repeat a transfer of `nbytes` until `seconds` have passed, at least once; return its rate and
    its CPU seconds.
    """
    times = 0

    def work() -> None:
        nonlocal times
        end = time.perf_counter() + seconds
        while times == 0 or time.perf_counter() < end:
            transfer()
            times += 1

    cost = bench.cost_of(work)
    gib = times * nbytes / GIB
    return {RATE: gib / cost.wall_s, CPU: cost.cpu_s / gib}


# --- the end that asks ----------------------------------------------------------------------------


class Rival:
    """The program in its own process. Use it as a context manager, or `close()` it."""

    def __init__(
        self,
        command: Sequence[str | Path],
        environ: Mapping[str, str],
        folder: Path,
        limit_s: float,
    ) -> None:
        """Start `command` in `folder`, where its standard error becomes rival.log."""
        self._log = folder / "rival.log"
        self._limit_s = limit_s
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command,
                cwd=folder,
                env=environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def measure(self, order: Order) -> dict[str, float]:
        """Return the numbers of one measurement.

        Raises:
            bench.UnavailableError: it cannot be measured on this machine.
            RuntimeError: the program died, or answered nothing within its limit and was killed.
        """
        timer = threading.Timer(self._limit_s, self._process.kill)
        timer.start()
        try:
            line = self._exchange(json.dumps(asdict(order)))
        finally:
            timer.cancel()
        if not line:
            status = self._process.wait()
            raise RuntimeError(
                f"the rival ended with status {status} at {order}; its last words: "
                f"{self._last_words()}"
            )
        answer: dict[str, Any] = json.loads(line)
        if "unavailable" in answer:
            raise bench.UnavailableError(answer["unavailable"])
        return answer

    def close(self) -> None:
        """End the program."""
        with suppress(BrokenPipeError):  # it died before it read what is still buffered
            _pipe(self._process.stdin).close()
        self._process.wait()
        _pipe(self._process.stdout).close()

    def __enter__(self) -> Rival:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def _last_words(self) -> str:
        return " | ".join(self._log.read_text(errors="replace").splitlines()[-5:])

    def _exchange(self, line: str) -> str:
        try:
            print(line, file=_pipe(self._process.stdin), flush=True)
        except BrokenPipeError:
            return ""
        return _pipe(self._process.stdout).readline()


def _pipe(pipe: IO[str] | None) -> IO[str]:
    if pipe is None:
        raise TypeError("the program was started without pipes")
    return pipe


# --- the end that measures ------------------------------------------------------------------------


def serve(measure: Callable[[Order], dict[str, float]], orders: TextIO, answers: TextIO) -> None:
    """Answer every order until there are no more."""
    for line in orders:
        try:
            answer: Mapping[str, object] = measure(Order(**json.loads(line)))
        except bench.UnavailableError as reason:
            answer = {"unavailable": str(reason)}
        print(json.dumps(answer), file=answers, flush=True)


def measure(order: Order) -> dict[str, float]:
    """Measure DeepNVMe."""
    import torch

    handle = _async_io().aio_handle(_BLOCK, order.queue_depth, False, True, order.threads)
    if order.tensors == "pinned":
        tensor = handle.new_cpu_locked_tensor(order.nbytes, torch.empty(0, dtype=torch.uint8))
    else:
        tensor = torch.empty(order.nbytes, dtype=torch.uint8)
    tensor.fill_(1)
    verb = getattr(handle, f"{order.waiting}_p{order.verb}")

    def transfer() -> None:
        verb(tensor, order.path, 0)
        if order.waiting == "async":
            handle.wait()

    numbers = moved(transfer, order.nbytes, order.seconds)
    if order.tensors == "pinned":
        handle.free_cpu_locked_tensor(tensor)
    return numbers


@cache
def _async_io() -> Any:
    """Return DeepNVMe's native module, compiled at its first use."""
    builder = import_module("deepspeed.ops.op_builder").AsyncIOBuilder()
    if not builder.is_compatible(verbose=False):
        raise bench.UnavailableError(_NO_LIBAIO)
    return builder.load(verbose=False)


if __name__ == "__main__":
    # DeepSpeed prints to standard output, from Python and from C++: it gets standard error, answers
    # keep the pipe.
    answers_ = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(measure, sys.stdin, answers_)
