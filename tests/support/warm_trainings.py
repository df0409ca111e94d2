"""Trainings of benches in processes that have imported torch and the engine already."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import env
from support.warm_programs import run_warm
from trained_apart import Job, Ran, _ran, train_apart

__all__ = ["train_warm"]

PROGRAM = "from trained_apart import main\nmain()\n"


def train_warm(
    python: Path,
    environ: Mapping[str, str],
    job: Job,
    *,
    log: Path,
    within_s: float,
    limit_bytes: int | None = None,
) -> Ran:
    """Train as train_apart does; what is within a limit of memory is a process of its own."""
    if limit_bytes is not None:
        return train_apart(
            python, environ, job, log=log, within_s=within_s, limit_bytes=limit_bytes
        )
    done = run_warm(
        PROGRAM,
        json.dumps(asdict(job)),
        folder=log.parent,
        environment={**environ, "PYTHONPATH": str(env.ROOT / "scripts" / "lib")},
        timeout_s=within_s,
    )
    log.write_text(done.stderr)
    events = [json.loads(line) for line in done.stdout.splitlines()]
    return _ran(events, done.returncode, log, kills=0, peak=None)
