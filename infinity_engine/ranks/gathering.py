"""`ParameterGatherer`: parameters cut over the ranks, gathered around modules that use them.

Gathers what is needed, ahead what the trace has next, and evicts what is needed last. Shards are at
home wherever `LocalShards` has them. See [Note: all ranks decide alike] in gathers.py.
"""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from infinity_engine.errors import CollectiveError, TraceMismatch
from infinity_engine.kept_errors import kept, raise_any
from infinity_engine.lanes.lanes import Lanes
from infinity_engine.machine.capacity import free_for_copies
from infinity_engine.memory import DeviceMemory, Lease
from infinity_engine.parameters.deferred import DeferredUpdate
from infinity_engine.parameters.parameters import TrainedParameter
from infinity_engine.parameters.providing import (
    ModuleProvider,
    NothingFetched,
    Provider,
    WorkBeside,
    stay_absent,
)
from infinity_engine.parameters.resident import ResidentParameters
from infinity_engine.ranks.gathers import CutParameter, Gather, Gathers, LocalShards
from infinity_engine.ranks.ranks import Ranks
from infinity_engine.schedule import ResidentSet, Use
from infinity_engine.storage import Place

__all__ = ["ParameterGatherer"]

_LOOK_AHEAD = 2  # uses
_LETS_GO_S = 0.5  # how long threads of torch.distributed have to drop their tensors
_PAUSE_S = 0.1e-3


@dataclass(frozen=True, slots=True)
class _Whole:
    """A parameter that is whole here, or on its way to be."""

    lease: Lease
    gather: Gather


class ParameterGatherer(ResidentParameters[_Whole]):
    """Gathers `parameters` into `memory`, of which it uses `limit` bytes, the same on all ranks.

    Gathers go through buffers of `wire_bytes` each. Parameters of `small` stay whole from one
    update to the next, and are gathered together. `below` brings the shards of `fetched`, which are
    at home elsewhere, to the device; those of gathers in flight are at most `below_bytes`, on the
    rank that has most. `beside` goes on whenever modules need something.
    """

    def __init__(
        self,
        parameters: Sequence[CutParameter],
        ranks: Ranks,
        lanes: Lanes,
        memory: DeviceMemory[Any],
        *,
        limit: int,
        wire_bytes: int,
        small: Collection[int] = (),
        below: ModuleProvider | None,
        below_bytes: int | None = None,
        fetched: Collection[int] = (),
        beside: WorkBeside,
    ) -> None:
        # Parameters without elements are never gathered; below they get an empty tensor once.
        self._cut = {cut.whole.number: cut for cut in parameters if cut.spec.numel}
        # In the order of their numbers: a set may be in another order on another rank.
        self._small = tuple(number for number in sorted(small) if number in self._cut)
        nbytes = {number: cut.nbytes for number, cut in self._cut.items()}
        # What views have left of evicted ones differs between ranks, so it does not count here.
        resident = ResidentSet[_Whole](nbytes, limit, pinned=self._small)
        wholes = {number: cut.whole for number, cut in self._cut.items()}
        super().__init__(wholes, resident, lanes, memory)
        where = lanes.accelerator.torch_device
        for whole in (cut.whole for cut in parameters if not cut.spec.numel):
            whole.show(torch.empty(whole.parameter.shape, dtype=whole.dtype, device=where))
            whole.note_values()
        self._ranks = ranks
        self._beside = beside
        self._versions = dict.fromkeys(self._cut, 0)
        self._below: Provider = NothingFetched() if below is None else below
        self._shards = LocalShards(self._cut, below, fetched, where, below_bytes)
        self._gathers = Gathers(
            self._cut, ranks, lanes, memory, shards=self._shards, wire_bytes=wire_bytes
        )
        # From here on the memory may ask `evict_one`.
        memory.attach(self)

    # --- what modules need ------------------------------------------------------------------------

    def need(self, use: Use) -> None:
        """Have the parameters of `use` whole and shown, and start to gather what comes next.

        Raises:
            CapacityError: they and what is held do not fit into the limit together.
            CollectiveError: another rank does something else, or has failed.
            RuntimeError: code outside of the engine has changed a parameter that has to be evicted,
                or an update that was deferred has failed.
            TransferError: a shard could not be fetched.
        """
        self.resident.record_use(use)
        # Held before anything is brought: making room for one of them must not evict another.
        self.resident.hold(use.parameters)
        try:
            self._provide(use)
            self._gather_ahead()
            self._beside.go_on()
        finally:
            self.resident.let_go(use.parameters)

    def begin_pass(self) -> None:
        """Do nothing: on several ranks, steps alone are predicted."""

    def end_pass(self) -> None:
        """Do nothing."""

    def version_of(self, number: int) -> int:
        """Return how often a parameter's values were changed.

        The backward of an earlier forward would need other values.
        """
        return self._versions[number]

    # --- what the memory asks ---------------------------------------------------------------------

    def evict_one(self) -> bool:
        """Free what only dead objects have views of: [Note: all ranks decide alike].

        Those are cycles of the caller's own, and collectives that have ended: the thread of
        torch.distributed that carried one drops its tensors a moment after it has said so.
        """
        # Views in the caller's cycles go with the collector. Those of torch's threads go by
        # themselves.
        viewed = self._memory.kept_bytes()
        gc.collect()
        late = time.monotonic() + _LETS_GO_S
        while viewed and self._memory.kept_bytes() >= viewed and time.monotonic() < late:
            time.sleep(_PAUSE_S)
        return self._memory.kept_bytes() < viewed

    # --- steps ------------------------------------------------------------------------------------

    def give_up(self) -> None:
        """Evict everything: an update is about to change the shards.

        Raises:
            RuntimeError: code outside of the engine has changed a parameter, or it is held.
        """
        # First the wholes: that ends the gathers, which read the shards below.
        self._evict_all()
        self._below.give_up()
        for number, cut in self._cut.items():
            # A frozen parameter keeps its values through an update.
            if isinstance(cut.whole, TrainedParameter):
                self._versions[number] += 1

    def follow_update(self, update: DeferredUpdate | None) -> None:
        """Gather nothing from here on that this update has not made yet; None: all is made."""
        self._below.follow_update(update)

    def moved(self, places: Mapping[int, Place]) -> None:
        """Note that the current values of these shards rest at other places."""
        self._below.moved(places)

    def changed(self, numbers: Iterable[int]) -> None:
        """Note that these have other values at home now."""
        numbers = [number for number in numbers if number in self._cut]
        for number in numbers:
            self._versions[number] += 1
        self._below.changed(numbers)

    def write_home(self, number: int) -> None:
        """Bring this rank's shard of what code of the caller wrote into a shown parameter home."""
        if number not in self._cut:
            return
        # A view of the whole that modules see; only this rank's part of it goes home.
        cut = self._cut[number]
        own = self._ranks.own(cut.spec, cut.whole.parameter.data.reshape(-1))
        with self._shards.on_device(number) as shard:
            shard.copy_(own)
            self._shards.write_home(number)
        # A graph from before this write would compute with other values.
        self._versions[number] += 1
        # The write is the engine's own from here on: the next check must not report it.
        cut.whole.note_values()

    def copy_of(self, number: int) -> torch.Tensor:
        """Return a flat copy, on the host of every rank, of the values at home; all ranks ask."""
        cut = self._cut[number]
        with self._shards.on_device(number) as shard:
            [whole] = self._ranks.wholes(f"a copy of {cut.whole.name}", cut.spec, [shard])
        return whole

    def end_step(self) -> TraceMismatch | None:
        """Start with the next step; return where this one left the trace of the one before."""
        self._below.end_step()
        return self.resident.end_step()

    def close(self) -> None:
        """Give whole parameters ordinary memory, on every rank, and all leases back; all ranks
        close.

        They read as NaN where the ranks of a machine have no memory for all of them, which a
        warning says, and where the ranks have stopped to work together.

        Raises:
            CollectiveError: another rank does something else, or has failed. All else is done.
        """
        failed: CollectiveError | None = None
        # Values are gathered before anything is closed: gathers need the shards and the buffers.
        try:
            values = self._whole_again()
        except CollectiveError as error:
            # The rest is closed all the same, and the error is raised at the end.
            failed, values = kept(error), {}
        for number in list(self.resident):
            self.resident.remove(number).lease.close()
        for number in self._cut:
            self.shown.end(number, values.get(number))
        self._gathers.close()
        self._below.leave_absent()  # modules do not see shards
        raise_any(failed)

    def _whole_again(self) -> dict[int, torch.Tensor]:
        """Return all values in ordinary memory, none where that cannot be."""
        if not self._restores or self._ranks.collectives.failed:
            return {}
        # Every rank keeps a whole copy, and the ranks of a machine share its memory.
        nbytes = sum(cut.nbytes for cut in self._cut.values())
        free = self._ranks.least(
            "memory for whole parameters", free_for_copies() // self._ranks.neighbours
        )
        if free < nbytes:
            # The same decision everywhere: `least` is the smallest answer, and gathers need all
            # ranks.
            warnings.warn(stay_absent(nbytes, free), RuntimeWarning, stacklevel=2)
            return {}
        return {
            number: self.copy_of(number)
            .view(cut.whole.parameter.shape)
            .to(cut.whole.parameter.device)
            for number, cut in self._cut.items()
        }

    # --- bringing and evicting --------------------------------------------------------------------

    def _bring(self, name: str, numbers: Sequence[int]) -> None:
        # Small ones are gathered together; what is left is missing by itself.
        missing = self._gather_small(numbers)
        if missing:
            # All at once: room that is made for one of them must not come from another.
            self._make_room(sum(self._cut[number].nbytes for number in missing))
            self._gather(name, missing)

    def _gather_ahead(self) -> None:
        """Start to gather what the next uses need, as far as there is room."""
        for position, use in self.resident.upcoming(_LOOK_AHEAD):
            missing = [
                number for number in dict.fromkeys(use.parameters) if number not in self.resident
            ]
            missing = self._gather_small(missing)
            if not missing:
                continue
            # Pure, and of the trace alone: [Note: all ranks decide alike].
            chosen = self.resident.choose([(position, use)])
            if not chosen.provided:
                return
            for number in chosen.evicted:
                self._evict(number)
            self._gather(use.name, missing)

    def _gather_small(self, missing: Sequence[int]) -> list[int]:
        """Start to gather all small ones if one is missing; return what else is missing."""
        if any(number in self._small for number in missing):
            small = [number for number in self._small if number not in self.resident]
            self._make_room(sum(self._cut[number].nbytes for number in small))
            self._gather("small parameters", small)
        return [number for number in missing if number not in self._small]

    def _gather(self, name: str, numbers: Sequence[int]) -> None:
        """Start to make these whole, none of which is resident, in as many gathers as it takes."""
        for part in self._gathers.parts(name, numbers):
            self._gathers.make_way(part)
            gather, leases = self._gathers.start(name, part, self._lease)
            for number, lease in zip(part, leases, strict=True):
                self.resident.admit(number, _Whole(lease, gather))

    def _arrived(self, number: int) -> Lease:
        # A gather makes several parameters whole; the first that is asked for waits for all of it.
        whole = self.resident[number]
        self._gathers.end(whole.gather)
        return whole.lease

    def _evict(self, number: int) -> None:
        whole = self.resident[number]
        # A gather writes to this memory until it has ended.
        self._gathers.end(whole.gather)
        # Hidden first: from here on a forgotten access reads NaN, not memory of another parameter.
        self.shown.hide(number)
        self.resident.remove(number)
        # Kernels that were given views may still run: the memory waits for them.
        whole.lease.until(self.last_use())
        whole.lease.close()
