"""`Provider`: what modules and the engine ask of the object that brings and evicts parameters.

The fetcher is one, for parameters that this process has whole. Of those that are cut over ranks,
the gatherer has whole what modules need, and replicas are whole all the time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from infinity_engine.errors import TraceMismatch
from infinity_engine.parameters.deferred import DeferredUpdate
from infinity_engine.parameters.showing import ShownParameters
from infinity_engine.schedule import FetchingStats, ResidentSet, Use
from infinity_engine.storage import Place
from infinity_engine.units import format_bytes

__all__ = ["ModuleProvider", "NothingFetched", "Provider", "WorkBeside", "stay_absent"]


class WorkBeside(Protocol):
    """Work beside the modules, which goes on when they need something."""

    def go_on(self) -> None:
        """Do what waits for nothing."""


class Provider(Protocol):
    """Has parameters where modules compute, if they are not at home there; takes changes home."""

    def gathered(self, numbers: Iterable[int]) -> AbstractContextManager[None]:
        """Have these shown and held within the body."""

    def give_up(self) -> None:
        """Release everything: an update is about to change the values at home."""

    def follow_update(self, update: DeferredUpdate | None) -> None:
        """Fetch nothing from here on that this update has not made yet; None: all of it is made."""

    def moved(self, places: Mapping[int, Place]) -> None:
        """Note that the current values of these rest at other places."""

    def changed(self, numbers: Iterable[int]) -> None:
        """Note that the values of these are others now, at home."""

    def write_home(self, number: int) -> None:
        """Bring the values home that code of the caller wrote into a shown parameter."""

    def copy_of(self, number: int) -> torch.Tensor:
        """Return a flat copy, on the host, of the values at home."""

    def end_step(self) -> TraceMismatch | None:
        """Begin with the next step; return where this one went another way than the one before."""

    @property
    def stats(self) -> FetchingStats:
        """What was fetched."""

    def leave_absent(self) -> None:
        """Let parameters show no values after `close`, which then reads and copies nothing."""

    def close(self) -> None:
        """Give all values their own ordinary memory, and all leases back."""


class ModuleProvider(Provider, Protocol):
    """Shows parameters to modules while they are needed."""

    resident: ResidentSet[Any]
    shown: ShownParameters

    def need(self, use: Use) -> None:
        """Let the parameters of `use` be where modules compute, and shown."""

    def version_of(self, number: int) -> int:
        """Return how often the values of a parameter were changed."""

    def begin_pass(self) -> None:
        """Note that the outermost call of a module begins."""

    def end_pass(self) -> None:
        """Note that this call has ended and no backward follows, so that it may come again."""


class NothingFetched:
    """Stands where all values stay where modules compute: there is nothing to bring or to evict."""

    stats = FetchingStats()

    def gathered(self, numbers: Iterable[int]) -> AbstractContextManager[None]:
        """Do nothing around the body."""
        return nullcontext()

    def give_up(self) -> None:
        """Do nothing."""

    def follow_update(self, update: DeferredUpdate | None) -> None:
        """Do nothing."""

    def moved(self, places: Mapping[int, Place]) -> None:
        """Do nothing."""

    def changed(self, numbers: Iterable[int]) -> None:
        """Do nothing."""

    def write_home(self, number: int) -> None:
        """Do nothing: what the caller writes is written at home."""

    def copy_of(self, number: int) -> torch.Tensor:
        """Refuse: the caller has the values."""
        raise LookupError(f"parameter {number} is not fetched")

    def end_step(self) -> TraceMismatch | None:
        """Return nothing."""
        return None

    def leave_absent(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def stay_absent(nbytes: int, free: int) -> str:
    """Return the warning of a close without memory for copies of `nbytes` of parameters."""
    return (
        f"After close() the model's parameters show NaN. They take {nbytes} B "
        f"({format_bytes(nbytes)}), and the "
        f"machine or its memory group has {free} B ({format_bytes(free)}) left for copies. Save "
        "what you need before "
        "close(): with engine.state_dict(), or parameter by parameter under engine.gathered(). If "
        "you have, call "
        "close(restore=False)"
    )
