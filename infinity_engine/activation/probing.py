"""Measures how fast saved tensors leave and come back, through what moves them in training."""

from __future__ import annotations

from collections.abc import Mapping

from infinity_engine.activation.moving import SharedRoom
from infinity_engine.activation.offloading import ActivationOffload
from infinity_engine.errors import InfinityError
from infinity_engine.placement.activations import ActivationRates
from infinity_engine.plan import Tier

__all__ = ["Homes"]

_PROBED_BYTES = 32 << 20
_NO_RATES = (None, None)


class Homes:
    """The tiers where saved tensors can wait, and what moves them to each, in `shared` room.

    `over_link`: what goes to drives passes the host.
    """

    def __init__(
        self, moved: Mapping[Tier, ActivationOffload], shared: SharedRoom, *, over_link: bool
    ) -> None:
        self.tiers = tuple(moved)
        self.shared = shared
        self._moved = moved
        self._over_link = over_link

    def waiting(self, tier: Tier) -> int:
        """Return the bytes that are there, or on their way."""
        return self._moved[tier].saved_bytes()

    def rates(self) -> ActivationRates:
        """Measure the rates of each way out and back; a way that fails is left out."""
        # A failure here would come from step(), which has updated by then.
        rates = {tier: _rates_of(offload) for tier, offload in self._moved.items()}
        to_host, from_host = rates.get(Tier.HOST, _NO_RATES)
        to_drives, from_drives = rates.get(Tier.NVME, _NO_RATES)
        return ActivationRates(
            to_host=to_host,
            from_host=from_host,
            to_drives=to_drives,
            from_drives=from_drives,
            over_link=self._over_link,
        )


def _rates_of(offload: ActivationOffload) -> tuple[float | None, float | None]:
    nbytes = min(_PROBED_BYTES, offload.most_in_flight)
    if not nbytes:
        return _NO_RATES
    try:
        # Twice: the first time, the drive's room grows.
        offload.time_moves(nbytes)
        out_s, back_s = offload.time_moves(nbytes)
    # Torch has no error of its own for a CPU without memory.
    except (InfinityError, MemoryError, RuntimeError):
        return _NO_RATES
    return nbytes / max(out_s, 1e-9), nbytes / max(back_s, 1e-9)
