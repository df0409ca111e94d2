"""`Lanes`: one engine's streams, pools and kernels; copies between host and device begin here.

Every copy is counted, and holds the leases of both its sides until it has ended. Decides nothing.
Called by the code that keeps gradients, states or fetched parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from infinity_engine.accel import Accelerator, Event, Stream, UpdateCost
from infinity_engine.lanes.kernels import DeviceKernels
from infinity_engine.lanes.meter import Cargo, Meter
from infinity_engine.memory import DeviceMemory, Lease, PinnedPool
from infinity_engine.optim import HostKernels
from infinity_engine.plan.ops import Lane

__all__ = ["Lanes"]


@dataclass(frozen=True)
class Lanes:
    """The streams, memory and kernels that gradients and states are moved and computed with."""

    accelerator: Accelerator
    compute: Stream
    upload: Stream  # without copies where DEVICE and HOST are one memory
    download: Stream
    kernels: HostKernels
    device_kernels: DeviceKernels  # for work that the device is given
    host: PinnedPool
    device: DeviceMemory[Any]
    meter: Meter

    def copy(
        self,
        lane: Lane,
        cargo: Cargo,
        target: torch.Tensor | Lease,
        source: torch.Tensor | Lease,
        *,
        name: str,
        after: Sequence[Event] = (),
        **fields: object,
    ) -> Event:
        """Copy bytes up or down after all of `after`; `name` and `fields` are for the timeline."""
        stream = self.upload if lane is Lane.H2D else self.download
        bytes_of = [side.flat() if isinstance(side, Lease) else side for side in (target, source)]
        event = self.accelerator.copy(*bytes_of, stream=stream, after=after)
        for side in (target, source):
            if isinstance(side, Lease):
                # A lease may be closed at once: its memory goes back only after the copy.
                side.until(event)
        # Counted after the submission: a refused copy carries nothing.
        self.meter.count_copy(lane, cargo, bytes_of[0].numel(), event, name=name, **fields)
        return event

    def on_device(
        self,
        work: Callable[[], object],
        params: int,
        *,
        name: str,
        after: Sequence[Event] = (),
        **fields: object,
    ) -> Event:
        """Run work on so many parameters on the device, after all that it was given before."""
        # The modules' own stream on a GPU: the work follows their kernels.
        event = self.accelerator.run(
            work, stream=self.compute, cost=UpdateCost(params), after=after
        )
        self.meter.note_work(event, name=name, params=params, **fields)
        return event
