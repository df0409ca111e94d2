"""How much time and memory a calibration takes, and how often it measures each figure.

Pure but for the work and the clocks that it is handed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from deepnvme.measuring.measure import in_turn
from infinity_engine.errors import ConfigError
from infinity_engine.units import GiB, MiB

__all__ = ["FULL", "QUICK", "Effort", "MeasuringTime", "repeated", "thread_counts"]

_SAMPLING_SHARE = 0.8  # the rest is for what lies between samples, and for the last work of each
_Point = TypeVar("_Point")
_Result = TypeVar("_Result")
_EACH_UP_TO = 4  # threads; beyond, two numbers for each doubling


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuringTime:
    """What some measuring may take: seconds, rounds, and the shortest time of a sample."""

    seconds: float
    rounds: int
    shortest_s: float

    def share(self, share: float) -> MeasuringTime:
        """Return a share of it."""
        return replace(self, seconds=self.seconds * share)

    def in_turn(
        self,
        points: Sequence[_Point],
        measure: Callable[[_Point, float], _Result],
        *,
        samples: int = 1,
    ) -> dict[_Point, list[_Result]]:
        """Measure every point once per round; `measure` gets the seconds for each of its samples.

        It takes `samples` of them.

        The first round is always whole; later ones stop when the time is up.
        """
        sample_s = self.sample_s(samples * len(points))
        return in_turn(
            points, lambda point: measure(point, sample_s), rounds=self.rounds, seconds=self.seconds
        )

    def sample_s(self, samples: int) -> float:
        """Return how long each sample takes where there are so many in a round."""
        # Never shorter than a clock can measure, even if that takes longer than asked.
        return max(_SAMPLING_SHARE * self.seconds / (self.rounds * samples), self.shortest_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class Effort:
    """What measuring may take: about `seconds` in all, and bytes of memory and of a file."""

    seconds: float
    rounds: int
    update_bytes: int  # that updates go through
    io_bytes: int  # that copies, reads and writes go through
    file_bytes: int
    compute_bytes: int = 64 * MiB  # that computing goes through, before all else and not beside it
    beside_bytes: int = 64 * MiB  # that computing beside drives goes through
    shortest_s: float = 0.02  # of a sample

    @property
    def memory_bytes(self) -> int:
        """Host memory that is held at most."""
        # Not their sum: computing is measured before the memory for the rest is taken.
        return max(self.update_bytes + self.io_bytes + self.beside_bytes, self.compute_bytes)

    def beside_a_gpu(self) -> Effort:
        """Return it with the memory that the host of a GPU has for it.

        The caches of many cores hold less of it, and copies are long enough to reach a link's rate.
        """
        return replace(
            self,
            update_bytes=max(self.update_bytes, GiB),
            io_bytes=max(self.io_bytes, 128 * MiB),
            beside_bytes=0,  # the host computes nothing
        )

    def part(self, share: float) -> MeasuringTime:
        """Return what a share of the time allows."""
        return MeasuringTime(
            seconds=self.seconds * share, rounds=self.rounds, shortest_s=self.shortest_s
        )


FULL = Effort(
    seconds=60.0,
    rounds=5,
    update_bytes=128 * MiB,
    io_bytes=64 * MiB,
    file_bytes=GiB,
    compute_bytes=320 * MiB,
    beside_bytes=128 * MiB,
)
QUICK = Effort(seconds=4.0, rounds=3, update_bytes=32 * MiB, io_bytes=16 * MiB, file_bytes=64 * MiB)


def thread_counts(cores: int) -> tuple[int, ...]:
    """Return the numbers of threads to measure: 1 2 3 4 6 8 12 16 24 and so on, and all cores."""
    if cores < 1:
        raise ConfigError(field="cores", value=cores, expected="1 or more")
    counts = set(range(1, min(cores, _EACH_UP_TO) + 1))
    step = _EACH_UP_TO
    while step < cores:
        counts |= {step + step // 2, 2 * step}
        step *= 2
    # All cores in any case.
    return (*sorted(count for count in counts if count < cores), cores)


def repeated(
    work: Callable[[], object],
    amount: int,
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Do `work` for so long, at least once; return the rate of the `amount` that each time does."""
    start = clock()
    times = 0
    while True:
        work()
        times += 1
        passed = clock() - start
        # `passed > 0`: a clock may not have moved after work that is too short for it.
        if passed >= seconds and passed > 0:
            return amount * times / passed
