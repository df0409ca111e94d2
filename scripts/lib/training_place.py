"""Where benches let processes train that may be killed: a directory of the checkout's drive, gone
with the bench.

Knows which Python has which system, and what a training takes of the drive. Trains nothing itself.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType

import bench
import env
from memory_group import GroupUnavailableError
from trained_apart import Job, Ran, parameters_of, train_apart

__all__ = [
    "CONTEXT",
    "DEEPSPEED",
    "GIB",
    "NVME_BYTES",
    "OURS",
    "PACKAGES",
    "PLAIN",
    "RIVAL",
    "SYSTEM_OF",
    "Place",
    "environ_of_training",
    "nvme_bytes",
    "tuned",
]

RIVAL = "deepspeed==0.19.8"
PACKAGES = (env.TORCH, "numpy", "ninja", "setuptools", "wheel", RIVAL)
OURS, PLAIN, DEEPSPEED = "ours", "plain torch", "DeepSpeed"
SYSTEM_OF = MappingProxyType({OURS: "ours", PLAIN: "plain", DEEPSPEED: "deepspeed"})
CONTEXT = 256  # bytes of text in a step
GIB = 1 << 30
# per parameter: states, gradient, the values of a model that is being made, and room between them
NVME_BYTES = 21


def environ_of_training(threads: int | None = None) -> dict[str, str]:
    """Return the environment that trainings here have: what is to tell their time has to have it as
    well.
    """
    return tuned(dict(os.environ), threads or len(os.sched_getaffinity(0)))


def tuned(environ: Mapping[str, str], threads: int) -> dict[str, str]:
    """Return an environment in which torch has so many threads and glibc keeps little it frees."""
    # Else glibc keeps more and more of what torch has freed.
    return {**environ, "OMP_NUM_THREADS": str(threads), "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}


def nvme_bytes(job: Job, host: int = 0) -> int:
    """Return what a training takes of its drive at most, with so much of the host."""
    return NVME_BYTES * parameters_of(job.width, job.depth, job.context) + GIB // 2 - host


class Place:
    """Where the trainings happen: a directory of the checkout's drive, gone with the bench."""

    def __init__(self, until_end: ExitStack) -> None:
        self.threads = len(os.sched_getaffinity(0))
        self._folder = Path(
            until_end.enter_context(tempfile.TemporaryDirectory(prefix="bench-ram-", dir=env.BUILD))
        )

    def job(self, name: str, width: int, depth: int, steps: int) -> Job:
        """Return a training on the project's texts, which are written down: every process is to
        read the same. In bf16, or in fp32 where the CPU multiplies bf16 a hundred times slower.
        """
        from tiny_gpt import corpus, fast_precision

        text = self._folder / "text"
        if not text.exists():
            text.write_bytes(bytes(corpus(env.ROOT).tolist()))
        nvme = self._folder / "nvme"
        return Job(
            SYSTEM_OF[name],
            width,
            depth,
            CONTEXT,
            steps,
            self.threads,
            str(text),
            str(nvme),
            dtype={"bf16": "bfloat16", "fp32": "float32"}[fast_precision()],
        )

    def run(self, job: Job, log: str, *, within_s: float, limit_bytes: int | None) -> Ran:
        """Train, with the drive as it was before and after.

        Raises:
            UnavailableError: that cannot be done here.
        """
        python, environ = self._python(job)
        folder = Path(job.folder)
        self._check_room(self._drive_bytes(job))
        env.LOGS.mkdir(parents=True, exist_ok=True)
        folder.mkdir()
        try:
            return train_apart(
                python, environ, job, log=env.LOGS / log, within_s=within_s, limit_bytes=limit_bytes
            )
        except GroupUnavailableError as reason:
            raise bench.UnavailableError(str(reason)) from None
        finally:
            shutil.rmtree(folder)

    def steps_in_turns(self, job: Job, *, within_s: float) -> dict[str, float]:
        """Return the seconds of a step by each way of steps_in_turns.py.

        Raises:
            UnavailableError: that cannot be done here.
        """
        python, environ = self._python(job)
        folder = Path(job.folder)
        self._check_room(2 * self._drive_bytes(job))
        folder.mkdir()
        program = Path(__file__).with_name("steps_in_turns.py")
        try:
            ran = subprocess.run(
                [python, program, json.dumps(asdict(job))],
                env=environ,
                capture_output=True,
                text=True,
                timeout=within_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise bench.UnavailableError(f"it took longer than {within_s:.0f} s") from None
        finally:
            shutil.rmtree(folder, ignore_errors=True)  # its own process may be about to end
        if ran.returncode:
            raise bench.UnavailableError(ran.stderr[-2000:])
        found: dict[str, float] = json.loads(ran.stdout)
        return found

    def _drive_bytes(self, job: Job) -> int:
        """Return what it may take of the drive: what its budget says, or what DeepSpeed writes."""
        limits: Mapping[str, int] = job.settings.get("budget", {}).get("nvme", {})
        return sum(limits.values()) or (nvme_bytes(job) if job.system == "deepspeed" else 0)

    def _check_room(self, needed: int) -> None:
        free = shutil.disk_usage(self._folder).free
        if needed > free:
            raise bench.UnavailableError(
                f"it takes {needed / 1e9:.1f} GB of the drive of {env.BUILD}, where "
                f"{free / 1e9:.1f} GB are free; make "
                f"{(needed - free) / 1e9:.1f} GB of room, or let build/ be a link to a drive that "
                "has it"
            )

    def _python(self, job: Job) -> tuple[Path, dict[str, str]]:
        python, environ = Path(sys.executable), environ_of_training(job.threads)
        if job.system.startswith("deepspeed"):
            try:
                python = env.rival_venv("deepspeed", PACKAGES)
            except env.EnvironmentMissingError as problem:
                raise bench.UnavailableError(
                    f"{RIVAL} cannot be installed: {str(problem).splitlines()[0]}"
                ) from None
            environ = tuned(env.rival_environ(python), job.threads)
        return python, environ
