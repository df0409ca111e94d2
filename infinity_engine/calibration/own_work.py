"""How long a piece of the engine's own work takes where it happens: between modules that compute.

They leave none of its code in the caches, which makes it take ten times as long as in a loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable

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
_LEASES = 8  # of a sample


def measure_lease(
    accelerator: Accelerator, computing: Callable[[float], float], part: MeasuringTime
) -> Figure:
    """Measure what it takes to make room for a parameter, to lease its memory and to choose what
    comes next, where one does not fit with all others. `computing` lets modules compute.
    """
    nbytes = _MEMBERS * _NBYTES
    ledger = Ledger(ResolvedBudget(device=nbytes, host=nbytes, nvme={}))
    with ledger.reserve(Tier.DEVICE, nbytes, holder="leases that are measured") as reservation:
        memory = DeviceMemory(accelerator, reservation)
        resident = ResidentSet[Lease](dict.fromkeys(range(_MEMBERS), _NBYTES), _RESIDENT * _NBYTES)
        uses = [Use(f"module {number}", (number,)) for number in range(_MEMBERS)]

        def lease(number: int) -> None:
            if not number:
                resident.expect(uses)
            resident.record_use(uses[number])
            if number not in resident:
                for gone in resident.evictions(_NBYTES):
                    resident.remove(gone).close()
                leased = memory.lease(_NBYTES, holder="a parameter", views=Views.KEEP)
                leased.tensor(torch.bfloat16, (_NBYTES // 2,))
                resident.admit(number, leased)
            resident.choose(resident.upcoming(_AHEAD))

        def sample(_: str, sample_s: float) -> float:
            taken_s, begun, times = 0.0, time.perf_counter(), 0
            while times < _LEASES or time.perf_counter() - begun < sample_s:
                computing(0.0)
                start = time.perf_counter()
                lease(times % _MEMBERS)
                taken_s, times = taken_s + time.perf_counter() - start, times + 1
            return taken_s / times

        [samples] = part.in_turn(["leases"], sample).values()
        for number in list(resident):
            resident.remove(number).close()
        memory.close()
    return Figure.of(samples, Unit.SECONDS)
