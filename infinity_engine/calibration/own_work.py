"""How long a piece of the engine's own work takes where it happens: between modules that compute.

They leave little of its code in the caches, which makes it take many times as long as in a loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import cycle

import torch

from infinity_engine.accel import Accelerator
from infinity_engine.calibration.effort import MeasuringTime
from infinity_engine.memory import DeviceMemory, Lease, Ledger, Views
from infinity_engine.plan import Figure, ResolvedBudget, Tier, Unit
from infinity_engine.schedule import ResidentSet, Use

__all__ = ["measure_lease"]

_MEMBERS, _NBYTES = 16, 4096
_RESIDENT = _MEMBERS // 2
_AHEAD = 4
_LEAST = 8  # leases of a sample
_WIDTH, _ROWS = 2048, 64  # of the products between them: 16 MiB of weights, a few milliseconds


def measure_lease(accelerator: Accelerator, nbytes: int, part: MeasuringTime) -> Figure:
    """Measure what it takes to make room for a parameter, to lease its memory and to choose what
    comes next, where not all fit. Between two of them the host multiplies, in about so much memory.
    """
    computing = _products(nbytes)
    with _leases(accelerator) as lease:
        for _ in range(2 * _MEMBERS):  # until others have to leave, and all code has run
            lease()

        def sample(_: str, sample_s: float) -> float:
            taken_s, begun, leases = 0.0, time.perf_counter(), 0
            while leases < _LEAST or time.perf_counter() - begun < sample_s:
                computing()
                start = time.perf_counter()
                if lease():
                    taken_s, leases = taken_s + time.perf_counter() - start, leases + 1
            return taken_s / leases

        [samples] = part.in_turn(["leases"], sample).values()
    return Figure.of(samples, Unit.SECONDS)


@contextmanager
def _leases(accelerator: Accelerator) -> Iterator[Callable[[], bool]]:
    """Yield what uses the next one of some parameters, and tells whether it had to be leased."""
    nbytes = _MEMBERS * _NBYTES
    ledger = Ledger(ResolvedBudget(device=nbytes, host=nbytes, nvme={}))
    uses = [Use(f"module {number}", (number,)) for number in range(_MEMBERS)]
    numbers = cycle(range(_MEMBERS))
    resident = ResidentSet[Lease](dict.fromkeys(range(_MEMBERS), _NBYTES), _RESIDENT * _NBYTES)
    with ExitStack() as resources:
        reservation = ledger.reserve(Tier.DEVICE, nbytes, holder="leases that are measured")
        memory = DeviceMemory(accelerator, resources.enter_context(reservation))
        resources.callback(memory.close)

        def lease() -> bool:
            number = next(numbers)
            if not number:
                resident.expect(uses)
            resident.record_use(uses[number])
            if is_new := number not in resident:
                for gone in resident.evictions(_NBYTES):
                    resident.remove(gone).close()
                leased = memory.lease(_NBYTES, holder="a parameter", views=Views.KEEP)
                leased.tensor(torch.bfloat16, (_NBYTES // 2,))
                resident.admit(number, leased)
            resident.choose(resident.upcoming(_AHEAD))
            return is_new

        try:
            yield lease
        finally:
            for number in list(resident):
                resident.remove(number).close()


def _products(nbytes: int) -> Callable[[], object]:
    """Return what multiplies by the next one of some weights, of about so many bytes together."""
    count = max(nbytes // (4 * _WIDTH**2), 1)
    weights = cycle(torch.full((count, _WIDTH, _WIDTH), 0.01))
    rows = torch.ones(_ROWS, _WIDTH)
    return lambda: torch.mm(rows, next(weights))
