"""Measures how fast saved tensors leave and come back, through what moves them in training."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from infinity_engine.activation.offloading import ActivationOffload
from infinity_engine.errors import InfinityError
from infinity_engine.placement.activations import ActivationRates
from infinity_engine.plan import Tier

__all__ = ["measured_rates"]

_PROBED_BYTES = 32 << 20


def measured_rates(
    offloads: Mapping[Tier, ActivationOffload], *, over_link: bool
) -> ActivationRates:
    """Return the rates of each way out and back; a way that fails is left out.

    `over_link`: what goes to drives passes the host.
    """
    # A failure here would come from step(), which has updated by then.
    rates = {
        tier: found
        for tier, offload in offloads.items()
        if (found := _rates_of(offload)) is not None
    }
    to_host, from_host = rates.get(Tier.HOST, (None, None))
    to_drives, from_drives = rates.get(Tier.NVME, (None, None))
    return ActivationRates(
        to_host=to_host,
        from_host=from_host,
        to_drives=to_drives,
        from_drives=from_drives,
        over_link=over_link,
    )


def _rates_of(offload: ActivationOffload) -> tuple[float, float] | None:
    nbytes = min(_PROBED_BYTES, offload.most_in_flight)
    if not nbytes:
        return None
    try:
        # Twice: the first time, the drive's room grows.
        offload.time_moves(nbytes)
        out_s, back_s = offload.time_moves(nbytes)
    except (InfinityError, torch.OutOfMemoryError):
        return None
    return nbytes / max(out_s, 1e-9), nbytes / max(back_s, 1e-9)
