"""`ResidentParameters`: parameters that modules see only while they are resident on the device.

What fetching and gathering share: needs, holders, room, and what modules see. A subclass brings
parameters to the device and takes them off it, each in its own way.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Generic, TypeVar

from infinity_engine.errors import CapacityError
from infinity_engine.lanes.lanes import Lanes
from infinity_engine.memory import DeviceMemory, Lease, Views, Waitable
from infinity_engine.parameters.parameters import ModelParameter
from infinity_engine.parameters.showing import ShownParameters
from infinity_engine.schedule import FetchingStats, ResidentSet, Use

__all__ = ["ResidentParameters"]

_Entry = TypeVar("_Entry")


class ResidentParameters(ABC, Generic[_Entry]):
    """`parameters`, by number, in `memory`: which of them are resident, and which modules see."""

    def __init__(
        self,
        parameters: Mapping[int, ModelParameter],
        resident: ResidentSet[_Entry],
        lanes: Lanes,
        memory: DeviceMemory[Any],
    ) -> None:
        self._parameters = parameters
        self.resident = resident
        self._lanes = lanes
        self._memory = memory
        self.shown = ShownParameters(parameters, lanes.accelerator.torch_device)
        self._restores = True

    # --- what modules ask -------------------------------------------------------------------------

    @contextmanager
    def gathered(self, numbers: Iterable[int]) -> Iterator[None]:
        """Have these resident, shown and held within the body. The trace does not record it."""
        # Parameters without elements have nothing to bring.
        numbers = tuple(number for number in numbers if number in self._parameters)
        self.resident.hold(numbers)
        try:
            self._provide(Use("parameters that were asked for", numbers))
            yield
        finally:
            self.resident.let_go(numbers)

    @property
    def stats(self) -> FetchingStats:
        """What was brought since the beginning."""
        # A copy: the caller's figures do not go on counting.
        return replace(self.resident.stats)

    def last_use(self) -> Waitable:
        """Return the end of all that was submitted so far and may use views of parameters."""
        return self._lanes.accelerator.record(self._lanes.compute)

    def leave_absent(self) -> None:
        """Let parameters read as NaN after `close`, which then reads and copies nothing."""
        self._restores = False

    # --- what an update asks ----------------------------------------------------------------------

    def _evict_all(self) -> None:
        """Evict every member: an update is about to change the values, and wants the memory.

        Raises:
            RuntimeError: a parameter was changed outside of the engine, or is held.
        """
        # Modules have returned by now, so what is held is the caller's.
        if self.resident.held:
            names = ", ".join(self._parameters[number].name for number in self.resident.held)
            raise RuntimeError(
                f"engine.step() updates {names}, which `with engine.gathered(...)` still holds. "
                "Call step() outside of its body"
            )
        for number in list(self.resident):
            self._evict(number)

    # --- bringing and evicting --------------------------------------------------------------------

    def _provide(self, use: Use) -> None:
        """Have the parameters of a use, which are held, resident and shown."""
        hidden = [number for number in dict.fromkeys(use.parameters) if number not in self.shown]
        # Two passes: all of them are on their way before the first is waited for.
        self._bring(use.name, self.resident.note_needs(hidden))
        for number in hidden:
            # Showing replaces the data, and would hide what other code has set.
            self.shown.check_untouched(number)
            parameter = self._parameters[number]
            lease = self._arrived(number)
            self.shown.show(number, lease.tensor(parameter.dtype, parameter.parameter.shape))

    def _make_room(self, nbytes: int) -> None:
        """Evict what is needed last until the limit has room for so many bytes, or all is held."""
        for number in self.resident.evictions(nbytes):
            self._evict(number)

    def _lease(self, number: int) -> Lease:
        """Return memory for a parameter that is needed now.

        Raises:
            CapacityError: the budget has no room for it beside what is held.
        """
        name = self._parameters[number].name
        try:
            return self._memory.lease(
                self._parameters[number].nbytes, holder=f"parameter {name}", views=Views.KEEP
            )
        except CapacityError as error:
            raise CapacityError(
                tier=error.tier,
                asked=error.asked,
                free=error.free,
                limit=error.limit,
                holders=error.holders,
                change=f"raise the budget's {self._memory.reservation.tier.name.lower()}. {name} "
                "is needed together with these: what a module uses stays until it returns, and "
                "until its backward has ended where torch's checkpoint runs it again; what your "
                "code reads outside of modules stays until engine.step()",
            ) from None

    @abstractmethod
    def _bring(self, name: str, numbers: Sequence[int]) -> None:
        """Make room for these, which `name` needs now, and start to bring them."""

    @abstractmethod
    def _arrived(self, number: int) -> Lease:
        """Return a member's memory, once its values are there for what computes with them."""

    @abstractmethod
    def _evict(self, number: int) -> None:
        """Take a member, or a reservation, off the device; modules do not see it any more.

        Raises:
            RuntimeError: code outside of the engine has changed the parameter's data.
        """
