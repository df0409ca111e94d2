"""How fast saved tensors leave and come back, as the engine measures it at the end of a step."""

from __future__ import annotations

import pytest
import torch

from infinity_engine.accel import CpuAccelerator
from infinity_engine.activation.lifetimes import Lifetimes
from infinity_engine.activation.moving import SharedRoom
from infinity_engine.activation.probing import Homes
from infinity_engine.errors import CapacityError
from infinity_engine.lanes.meter import Meter
from infinity_engine.memory import Ledger
from infinity_engine.plan import ResolvedBudget, Tier
from infinity_engine.telemetry import NullTelemetry

MIB = 1 << 20
LEDGER = Ledger(ResolvedBudget(device=0, host=0, nvme={}))
ROOM = SharedRoom(Lifetimes(Meter(NullTelemetry(), CpuAccelerator(), LEDGER)))
FULL = CapacityError(tier="HOST", asked=2, free=1, limit=1, change="less")


class Moves:
    """What moves saved tensors in the given seconds, or fails."""

    most_in_flight = MIB

    def __init__(self, seconds: tuple[float, float], error: Exception | None = None) -> None:
        self.seconds, self.error = seconds, error

    def time_moves(self, nbytes: int) -> tuple[float, float]:
        if self.error is not None:
            raise self.error
        return self.seconds


def test_rates_are_bytes_over_seconds_each_way() -> None:
    moves = {Tier.HOST: Moves((0.5, 0.25)), Tier.NVME: Moves((2.0, 1.0))}

    found = Homes(moves, ROOM, over_link=True).rates()  # type: ignore[arg-type]

    assert (found.to_host, found.from_host) == (2 * MIB, 4 * MIB)
    assert (found.to_drives, found.from_drives) == (MIB / 2, MIB)


@pytest.mark.parametrize("error", [FULL, torch.OutOfMemoryError("the GPU is full")], ids=type)
def test_a_way_without_room_for_its_measurement_is_left_out(error: Exception) -> None:
    """The step has updated by then, so it must not fail."""
    moves = {Tier.HOST: Moves((1.0, 1.0), error), Tier.NVME: Moves((1.0, 1.0))}

    found = Homes(moves, ROOM, over_link=True).rates()  # type: ignore[arg-type]

    assert found.to_host is found.from_host is None
    assert found.to_drives == MIB
