"""A training of a bench, within a memory limit or without, that happens when it is first asked for.

Turns what became of it into what benches measure.
"""

from __future__ import annotations

import statistics
import sys
from functools import cached_property
from pathlib import Path

from rival_step_host import PHASES
from training_place import Place

import bench
from trained_apart import Ending, Job, Ran, Result, parameters_of

__all__ = ["MB", "Training", "differences"]

MB = 10**6
LIMIT_S = 900.0


def differences(one: Ran, other: Ran, steps: int) -> dict[str, float]:
    """Count the losses that two trainings do not share, and the parameters whose values or states
    they do not.

    Raises:
        UnavailableError: one of them failed.
    """
    for ran in (one, other):
        if ran.ending is Ending.FAILED:
            raise bench.UnavailableError(ran.words)
    same = sum(
        mine.loss == theirs.loss for mine, theirs in zip(one.steps, other.steps, strict=False)
    )
    digests, others = ({} if ran.result is None else ran.result.digests for ran in (one, other))
    unlike = [
        name for name in digests.keys() | others.keys() if digests.get(name) != others.get(name)
    ]
    if not digests and not others:
        raise bench.UnavailableError("neither training came to its end")
    return {"losses": steps - same, "parameters": len(unlike)}


class Training:
    """One training, which happens when something about it is asked for the first time."""

    def __init__(
        self,
        name: str,
        place: Place,
        job: Job,
        *,
        limit_bytes: int | None = None,
        within_s: float = LIMIT_S,
        unless: Training | None = None,
    ) -> None:
        """`unless` it is known already that it does not train without a limit either."""
        self._name, self._place, self._job = name, place, job
        self._limit_bytes, self._within_s, self._control = limit_bytes, within_s, unless

    def register(self, run: bench.Bench, name: str) -> None:
        """Register what is measured of it."""
        run.system(name, self.learning, unit="")
        run.system(f"{name}, memory", self.memory, unit="MB")
        run.system(f"{name}, step", self.seconds, unit="s")
        run.system(f"{name}, drive", self.traffic, unit="B/param")

    @cached_property
    def ran(self) -> Ran:
        """How it went."""
        parameters = parameters_of(self._job.width, self._job.depth, self._job.context)
        limit = (
            "no limit"
            if self._limit_bytes is None
            else f"a limit of {self._limit_bytes / MB:.0f} MB"
        )
        told = f"{self._name}, {parameters / 1e6:.0f} M parameters, {limit}"
        log = f"{Path(sys.argv[0]).name}-{told.replace(',', '').replace(' ', '-')}.log"
        ran = self._place.run(
            self._job, log, within_s=self._within_s, limit_bytes=self._limit_bytes
        )
        words = f" ({ran.words})" if ran.words else ""
        print(f"  {told}: {ran.ending.value}{words}, {len(ran.steps)} steps", flush=True)
        return ran

    def learning(self) -> dict[str, float]:
        """Return how far it came, and what that did to the loss."""
        losses = [step.loss for step in self.ran.steps]
        if not losses:
            raise bench.UnavailableError(f"{self.ran.ending.value}: {self.ran.words}")
        some = max(1, len(losses) // 4)
        return {
            "parameters": self._parameters,
            "steps": len(losses),
            "first loss": statistics.fmean(losses[:some]),
            "last loss": statistics.fmean(losses[-some:]),
        }

    def fate(self) -> dict[str, float]:
        """Return whether the limit killed it, and after how many steps.

        Raises:
            UnavailableError: it failed for another reason, or without a limit too.
        """
        if self._control is not None and self._control.ran.ending is not Ending.TRAINED:
            raise bench.UnavailableError(
                f"it does not train without a limit either: {self._control.ran.words}"
            )
        if self.ran.ending is Ending.FAILED:
            raise bench.UnavailableError(self.ran.words)
        return {"killed": self.ran.ending is Ending.OUT_OF_MEMORY, "steps": len(self.ran.steps)}

    def memory(self) -> dict[str, float]:
        """Return the memory that it took, and what it might have."""
        result = self._result
        taken = {
            "states": self._job.state_bytes * self._parameters,
            "baseline": result.baseline_bytes,
            "computing": result.computing_bytes,
            "growth": result.peak_bytes - result.baseline_bytes,
            "steady growth": result.steady_bytes - result.baseline_bytes,
        }
        if self._limit_bytes is not None:
            taken["limit"] = self._limit_bytes
        if self.ran.group_peak_bytes is not None:
            taken["peak of its group"] = self.ran.group_peak_bytes
        for tier, (held, _) in result.tiers.items():
            place = "on the host" if tier == "HOST" else "on the device"
            # Directories are named by their paths.
            taken["held on drives" if "/" in tier else f"held {place}"] = held
        return {what: nbytes / MB for what, nbytes in taken.items()}

    def seconds(self) -> dict[str, float]:
        """Return the seconds of a step by phase, without the first step, which makes what the
        others find.
        """
        steps = self._trained.steps[1:]
        phases = {
            phase: statistics.median(step.seconds[phase] for step in steps) for phase in PHASES
        }
        return {**phases, "step": statistics.median(sum(step.seconds.values()) for step in steps)}

    def traffic(self) -> dict[str, float]:
        """Return what went from and to drives in a step."""
        moved = {"read": self._result.read_bytes, "written": self._result.written_bytes}
        return {
            what: nbytes / len(self.ran.steps) / self._parameters for what, nbytes in moved.items()
        }

    @property
    def _parameters(self) -> int:
        return parameters_of(self._job.width, self._job.depth, self._job.context)

    @property
    def _trained(self) -> Ran:
        """How it went, where it came to its end."""
        if self.ran.ending is not Ending.TRAINED:
            raise bench.UnavailableError(f"{self.ran.ending.value}: {self.ran.words}")
        return self.ran

    @property
    def _result(self) -> Result:
        result = self._trained.result
        assert result is not None, "what has trained has a result"
        return result
