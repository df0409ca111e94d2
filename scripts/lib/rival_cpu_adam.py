"""AdamW steps as torch and DeepSpeed take them, for scripts/bench/cpu_adam, which imports this and
runs it.

As a program in DeepSpeed's own environment it answers one line of JSON per order, [case, numel,
seconds], on standard output, in parameters per second; whatever DeepSpeed prints goes to standard
error.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import IO, Any

__all__ = [
    "CLIP",
    "LR",
    "SCALE",
    "Rival",
    "deepspeed_optimizer",
    "main",
    "rate_of",
    "serve",
    "torch_step",
]

LR, SCALE, CLIP = 1e-3, 1024.0, 1.0


def rate_of(step: Callable[[], object], numel: int, seconds: float) -> float:
    """Repeat `step` until `seconds` have passed, at least once; return the parameters per
    second.
    """
    step_count, started = 0, time.perf_counter()
    while step_count == 0 or time.perf_counter() - started < seconds:
        step()
        step_count += 1
    return step_count * numel / (time.perf_counter() - started)


def torch_step(make: Callable[[Any], Any], numel: int, case: str) -> Callable[[], None]:
    """Return a step of the optimizer that `make` makes of one parameter.

    "update": the update alone, fp32 gradients. "whole": from a scaled bf16 gradient to a bf16
    parameter: convert, norm, unscale and clip, update, convert. Everything is allocated before.
    """
    import torch

    parameter = torch.nn.Parameter(torch.full((numel,), 0.5))
    parameter.grad = torch.full((numel,), 0.01)
    optimizer = make(parameter)

    def update() -> None:
        optimizer.step()

    if case == "update":
        return update
    gradient = torch.full((numel,), 0.01 * SCALE, dtype=torch.bfloat16)
    copy = torch.zeros(numel, dtype=torch.bfloat16)
    grad = parameter.grad

    def step() -> None:
        grad.copy_(gradient)
        norm = float(torch.linalg.vector_norm(grad)) / SCALE
        grad.mul_(min(1.0, CLIP / (norm + 1e-6)) / SCALE)
        optimizer.step()
        with torch.no_grad():
            copy.copy_(parameter)

    return step


def deepspeed_optimizer(parameter: Any) -> Any:
    """Return DeepSpeedCPUAdam; compiled at its first use."""
    return import_module("deepspeed.ops.adam").DeepSpeedCPUAdam([parameter], lr=LR, adamw_mode=True)


class Rival:
    """The program in its own process; `close()` it."""

    def __init__(self, python: Path, environ: Mapping[str, str], log: Path, limit_s: float) -> None:
        """Start it; its standard error becomes `log`."""
        self._log, self._limit_s = log, limit_s
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [str(python), __file__],
                env=environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def measure(self, case: str, numel: int, seconds: float) -> float:
        """Return parameters per second.

        Raises:
            RuntimeError: the program died or did not answer in time.
        """
        timer = threading.Timer(self._limit_s, self._process.kill)
        timer.start()
        try:
            print(json.dumps([case, numel, seconds]), file=_pipe(self._process.stdin), flush=True)
            line = _pipe(self._process.stdout).readline()
        except BrokenPipeError:
            line = ""
        finally:
            timer.cancel()
        if not line:
            words = " | ".join(self._log.read_text(errors="replace").splitlines()[-5:])
            raise RuntimeError(
                f"the rival ended with status {self._process.wait()}; its last words: {words}"
            )
        return float(json.loads(line))

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
        _pipe(self._process.stdin).close()
        _pipe(self._process.stdout).close()


def _pipe(pipe: IO[str] | None) -> IO[str]:
    if pipe is None:
        raise TypeError("the program was started without pipes")
    return pipe


@cache
def _step_of(case: str, numel: int) -> Callable[[], None]:
    return torch_step(deepspeed_optimizer, numel, case)


def serve(
    orders: IO[str], answers: IO[str], step_of: Callable[[str, int], Callable[[], None]] = _step_of
) -> None:
    """Answer every order until there are no more."""
    for line in orders:
        case, numel, seconds = json.loads(line)
        print(json.dumps(rate_of(step_of(case, numel), numel, seconds)), file=answers, flush=True)


def main() -> None:
    """Serve; DeepSpeed, which prints to standard output from Python and C++, gets standard
    error.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(sys.stdin, answers)


if __name__ == "__main__":
    main()
