"""Turns the settings of activations into what keeps saved tensors.

The planner has left room for what is reserved here (planning/planning.py).
"""

from __future__ import annotations

from contextlib import ExitStack

from infinity_engine.activation import ActivationOffload, KeptActivations, SavedTensors
from infinity_engine.activation.drive_room import DriveRoom
from infinity_engine.activation.moving import ActivationLimits
from infinity_engine.config import ActivationsAt, EngineConfig
from infinity_engine.lanes.lanes import Lanes
from infinity_engine.memory import BorrowedMemory, Ledger, PinnedPool
from infinity_engine.plan import Tier
from infinity_engine.planning.planning import Planned, saved_on_host
from infinity_engine.residence import Mover
from infinity_engine.storage import SwapFile

__all__ = ["activations_of"]


def activations_of(
    config: EngineConfig,
    planned: Planned,
    lanes: Lanes,
    *,
    ledger: Ledger,
    swap: SwapFile | None,
    resources: ExitStack,
) -> SavedTensors:
    """Return what keeps saved tensors; on drives, in `swap`.

    Raises:
        CapacityError: the budget has no room for it.
    """
    settings = config.activations
    if settings.at is ActivationsAt.DEVICE:
        return KeptActivations()
    accelerator = planned.accelerator
    passes = accelerator.torch_device.type != "cpu"
    reserved = saved_on_host(settings, accelerator)
    in_flight = settings.resident_bytes // 2
    room, host = None, lanes.host
    if settings.at is ActivationsAt.NVME:
        assert swap is not None, "it was opened for what is saved"
        room = DriveRoom(swap, planned.budget.nvme)
    # On the CPU for what stays in memory; else for what passes the host, or stays there.
    reservation = resources.enter_context(
        ledger.reserve(Tier.HOST, reserved, holder="saved activations")
    )
    if passes:
        host = PinnedPool(reservation)
        resources.callback(host.close)
        if swap is not None and settings.at is ActivationsAt.NVME:
            host.register_with(swap.queue)
            in_flight = min(in_flight, reserved // 2)
    here = Tier.DEVICE if passes else Tier.HOST
    nothing = resources.enter_context(ledger.reserve(here, 0, holder="memory of saved tensors"))
    activations = ActivationOffload(
        lanes,
        Mover(accelerator, host, lanes.device, swap),
        BorrowedMemory(here, nothing),
        ActivationLimits(
            resident=settings.resident_bytes, in_flight=in_flight, small=settings.small_bytes
        ),
        home=Tier.NVME if settings.at is ActivationsAt.NVME else Tier.HOST,
        here=here,
        room=room,
    )
    resources.callback(activations.close)
    return activations
