"""`OwnWork`: how long the engine keeps the thread that calls modules for itself, by what it does.

Pure. On one memory nothing computes meanwhile. Counted in leases: what one takes was measured on a
machine, and what the rest takes as many times as long (decision 0061).
"""

from __future__ import annotations

from dataclasses import dataclass

from infinity_engine.units import NS_PER_S

__all__ = ["OwnWork"]

# In leases (calibration/own_work.py).
_PARAMETER = 0.36  # a parameter in a pass, wherever its values are
_FETCH = 3.4  # to bring it before that, and to give its memory up
_UPDATE = 2.0  # a subgroup in an update
_FROM_DRIVES = 8.8  # to read its states before that, and to write them


@dataclass(frozen=True, slots=True)
class OwnWork:
    """The engine's own work, where a lease takes `lease_s`; 0 where that is not known."""

    lease_s: float = 0.0

    def passing_ns(self, parameters: int) -> int:
        """Return what so many parameters take in a pass."""
        return self._ns(_PARAMETER * parameters)

    def fetching_ns(self, parameters: int) -> int:
        """Return what fetching so many takes."""
        return self._ns(_FETCH * parameters)

    @property
    def updating_s(self) -> float:
        """What each subgroup takes in an update."""
        return _UPDATE * self.lease_s

    @property
    def swapping_s(self) -> float:
        """What each takes beyond that where its states are on drives."""
        return _FROM_DRIVES * self.lease_s

    def _ns(self, leases: float) -> int:
        return round(leases * self.lease_s * NS_PER_S)
