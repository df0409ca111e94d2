"""Training steps of the systems that scripts/bench/step_host compares, each in a process of its
own.

As a program it trains one GPT with one system, in whichever environment has that system: the Job is
its argument, each line of standard input a number of steps, each line of standard output the Answer
in JSON; whatever else prints gets standard error. Imported, it gives the other end, `Program`.
Imports torch and the systems only as a program.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import env

if TYPE_CHECKING:
    import torch

__all__ = [
    "LR",
    "PHASES",
    "SYSTEMS",
    "Answer",
    "Job",
    "Program",
    "Trainer",
    "Training",
    "Wrap",
    "main",
    "make_one_rank",
    "memory_bytes",
    "serve",
]

LR = 2e-5
PHASES = ("forward", "backward", "update")


@dataclass(frozen=True)
class Job:
    """What one program trains: which of SYSTEMS, a GPT of this shape, one sequence per step, with
    so many threads.
    """

    system: str
    width: int
    depth: int
    context: int
    threads: int


@dataclass(frozen=True)
class Answer:
    """What some steps took."""

    seconds: list[dict[str, float]]
    """Of each step, by phase."""
    losses: list[float]
    """Of each step."""
    bytes_per_parameter: dict[str, float]
    """Of host memory, since the program began."""


# --- the end that asks ----------------------------------------------------------------------------


class Program:
    """The program in its own process; `close()` it."""

    def __init__(
        self, python: Path, environ: Mapping[str, str], job: Job, log: Path, limit_s: float
    ) -> None:
        """Start it; its standard error becomes `log`."""
        self._log, self._limit_s = log, limit_s
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [python, __file__, json.dumps(asdict(job))],
                env=environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def train(self, steps: int) -> Answer:
        """Let it train so many steps more.

        Raises:
            RuntimeError: it failed, died, or answered nothing within its limit and was killed.
        """
        timer = threading.Timer(self._limit_s, self._process.kill)
        timer.start()
        try:
            line = self._exchange(str(steps))
        finally:
            timer.cancel()
        if not line:
            words = " | ".join(self._log.read_text(errors="replace").splitlines()[-3:])
            raise RuntimeError(
                f"its program ended with status {self._process.wait()}; its last words: {words}"
            )
        answer = json.loads(line)
        if "failed" in answer:
            raise RuntimeError(f"{answer['failed']} ({self._log.name} has the rest)")
        return Answer(**answer)

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
        with suppress(BrokenPipeError):  # it died before it read what is still buffered
            _pipe(self._process.stdin).close()
        _pipe(self._process.stdout).close()

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


# --- the end that trains --------------------------------------------------------------------------


@dataclass(frozen=True)
class Trainer:
    """A model in the hands of one system."""

    forward: Callable[[torch.Tensor], torch.Tensor]
    backward: Callable[[torch.Tensor], object]
    update: Callable[[], object]
    """Ends with no gradients left."""
    accounted_bytes: Callable[[], int] | None = None
    """The most host memory that it says it ever held."""
    close: Callable[[], object] = lambda: None


Wrap = Callable[["torch.nn.Module"], Trainer]


class Training:
    """One model in training, from its first step on.

    All systems get the same weights and the same text.
    """

    def __init__(self, job: Job) -> None:
        import torch

        torch.set_num_threads(job.threads)
        wrap = SYSTEMS[job.system](job.threads)
        from tiny_gpt import TinyGPT, batches

        self._baseline_bytes = memory_bytes("VmRSS")
        torch.manual_seed(0)
        model = TinyGPT(
            width=job.width, depth=job.depth, heads=job.width // 64, context=job.context
        )
        self._parameters = sum(parameter.numel() for parameter in model.parameters())
        self._trainer = wrap(model)
        self._begun_bytes = memory_bytes("VmHWM")
        # Not all of the project's texts: another environment that starts a moment later must read
        # the same.
        text = torch.frombuffer(
            bytearray((env.ROOT / "LICENSE").read_bytes()), dtype=torch.uint8
        ).long()
        self._data = batches(text, sequences=1, length=job.context, seed=0)

    def close(self) -> None:
        """End the training."""
        self._trainer.close()

    def train(self, steps: int) -> Answer:
        """Take so many steps."""
        taken = [self._step() for _ in range(steps)]
        peaks = {"peak": memory_bytes("VmHWM"), "peak of initialization": self._begun_bytes}
        memory = {name: nbytes - self._baseline_bytes for name, nbytes in peaks.items()}
        if self._trainer.accounted_bytes is not None:
            memory["by its own accounts"] = self._trainer.accounted_bytes()
        return Answer(
            seconds=[seconds for seconds, _ in taken],
            losses=[loss for _, loss in taken],
            bytes_per_parameter={
                name: nbytes / self._parameters for name, nbytes in memory.items()
            },
        )

    def _step(self) -> tuple[dict[str, float], float]:
        from torch.nn import functional

        inputs, targets = next(self._data)
        times = [time.perf_counter()]
        loss = functional.cross_entropy(
            self._trainer.forward(inputs).flatten(0, 1), targets.flatten()
        )
        times.append(time.perf_counter())
        self._trainer.backward(loss)
        times.append(time.perf_counter())
        self._trainer.update()
        times.append(time.perf_counter())
        took = (end - start for start, end in pairwise(times))
        return dict(zip(PHASES, took, strict=True)), loss.item()


def memory_bytes(field: str) -> int:
    """Return what the kernel says of this process: VmRSS is resident now, VmHWM was at the most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def _torch_trainer(model: torch.nn.Module) -> Trainer:
    """Train with torch's own fused AdamW."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return Trainer(model, torch.Tensor.backward, update)


def _plain(_threads: int) -> Wrap:
    return _torch_trainer


def _ours(threads: int) -> Wrap:
    import torch

    import infinity_engine
    from infinity_engine.plan import Tier

    def wrap(model: torch.nn.Module) -> Trainer:
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
        engine = infinity_engine.initialize(
            model,
            optimizer,
            strategy="host_only",
            accelerator="cpu",
            precision="fp32",
            update_threads=threads,
        )
        return Trainer(
            engine,
            engine.backward,
            engine.step,
            lambda: sum(usage.peak_held for usage in engine.usage() if usage.tier is Tier.HOST),
            engine.close,
        )

    return wrap


def _deepspeed(_threads: int) -> Wrap:
    make_one_rank()
    deepspeed: Any = import_module("deepspeed")
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,  # its default is 1.0, and nobody else clips here
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": LR, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01},
        },
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu"},
            "offload_param": {"device": "cpu"},
        },
    }

    def wrap(model: torch.nn.Module) -> Trainer:
        engine, *_ = deepspeed.initialize(model=model, config=config)
        return Trainer(engine, engine.backward, engine.step)

    return wrap


def _fsdp2(_threads: int) -> Wrap:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
    from torch.nn import ModuleList

    make_one_rank()
    mesh = init_device_mesh("cpu", (1,))

    def wrap(model: torch.nn.Module) -> Trainer:
        blocks = model.get_submodule("blocks")
        assert isinstance(blocks, ModuleList), "TinyGPT has a list of blocks"
        # There is no accelerator that memory could be pinned for.
        for module in (*blocks, model):
            fully_shard(module, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
        return _torch_trainer(model)

    return wrap


def make_one_rank() -> None:
    """Be a whole process group, without a port."""
    from torch import distributed

    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    store = distributed.HashStore()  # type: ignore[attr-defined]  # its users' name for it
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)


SYSTEMS: Mapping[str, Callable[[int], Wrap]] = {
    "ours": _ours,
    "plain": _plain,
    "deepspeed": _deepspeed,
    "fsdp2": _fsdp2,
}
"""Each takes a number of threads, loads what the system needs, and returns what puts a model into
its hands.
"""


def serve(start: Callable[[], Training], orders: IO[str], answers: IO[str]) -> None:
    """Start a training with the first order and answer every order; after a failure, with the
    failure.
    """
    try:
        training = None
        for line in orders:
            training = training or start()
            print(json.dumps(asdict(training.train(int(line)))), file=answers, flush=True)
    except Exception as error:
        traceback.print_exc()
        failed = " ".join(f"{type(error).__name__}: {error}".split())
        print(json.dumps({"failed": failed}), file=answers, flush=True)


def main() -> None:
    """Serve; standard output belongs to the answers alone."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    job = Job(**json.loads(sys.argv[1]))
    serve(lambda: Training(job), sys.stdin, answers)


if __name__ == "__main__":
    main()
