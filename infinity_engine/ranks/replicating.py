"""`ParameterReplicas`: parameters that every rank has whole, and of which each updates its shards.

Gathers all after an update, in groups of so many bytes, into the memory that modules compute with.
Fetches nothing: no module waits for anything, so they may be compiled, and ranks may run different
ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from infinity_engine.errors import TraceMismatch
from infinity_engine.lanes.lanes import Lanes
from infinity_engine.lanes.meter import Wait
from infinity_engine.memory import DeviceMemory, Lease
from infinity_engine.parameters.deferred import DeferredUpdate
from infinity_engine.partition import ShardGroup
from infinity_engine.ranks.gathers import CutParameter
from infinity_engine.ranks.ranks import Ranks, wire_of
from infinity_engine.ranks.reducing import buckets_of
from infinity_engine.schedule import FetchingStats
from infinity_engine.storage import Place

__all__ = ["ParameterReplicas", "room_of_gathers"]


def room_of_gathers(parameters: Sequence[CutParameter], ranks: Ranks) -> int:
    """Return the bytes of the buffer that gathers go through."""
    needed = max((group.gather_bytes() for _, group in _groups(parameters, ranks)), default=0)
    return wire_of(needed, ranks.shards.size + 1, ranks.config.bucket_bytes)


def _groups(
    parameters: Sequence[CutParameter], ranks: Ranks
) -> list[tuple[tuple[int, ...], ShardGroup]]:
    """Return what is gathered together, with the numbers of its parameters."""
    some = [cut for cut in parameters if cut.spec.numel]
    found = []
    for bucket in buckets_of([cut.member for cut in some], ranks.config.bucket_bytes):
        members = [some[place].member for place in bucket]
        name = members[0].name if len(members) == 1 else f"{members[0].name} to {members[-1].name}"
        found.append(
            (tuple(some[place].whole.number for place in bucket), ranks.group(name, members))
        )
    return found


class ParameterReplicas:
    """Keeps `parameters` whole in `memory`, and gathers them through a buffer of `wire_bytes`."""

    def __init__(
        self,
        parameters: Sequence[CutParameter],
        ranks: Ranks,
        lanes: Lanes,
        memory: DeviceMemory[Any],
        *,
        wire_bytes: int,
    ) -> None:
        self._parameters = {cut.whole.number: cut for cut in parameters if cut.spec.numel}
        self._ranks = ranks
        self._lanes = lanes
        self._wire = memory.lease(wire_bytes, holder="buffers of collectives")
        self._leases: dict[int, Lease] = {}
        self._gathered_bytes = 0
        for number, cut in self._parameters.items():
            self._leases[number] = memory.lease(cut.nbytes, holder=f"parameter {cut.whole.name}")
        self._groups = _groups(list(self._parameters.values()), ranks)
        # Gathered before they are shown: modules never see memory without values.
        self.changed(self._parameters)
        for cut in parameters:
            shape = cut.whole.parameter.shape
            lease = self._leases.get(cut.whole.number)
            cut.whole.show(
                torch.empty(shape, dtype=cut.dtype)
                if lease is None
                else lease.tensor(cut.dtype, shape)
            )

    # --- what modules need ------------------------------------------------------------------------

    @contextmanager
    def gathered(self, numbers: Iterable[int]) -> Iterator[None]:
        """Have these whole, as they are."""
        yield

    # --- steps ------------------------------------------------------------------------------------

    def changed(self, numbers: Iterable[int]) -> None:
        """Gather the values of these, of which ranks have new shards; all ranks come to this.

        Raises:
            CollectiveError: another rank does something else, or has failed.
        """
        changed = set(numbers)
        with self._lanes.meter.timed_wait(Wait.PARAMETERS):
            for members, group in self._groups:
                if changed.intersection(members):
                    self._gather(members, group)

    def _gather(self, numbers: Sequence[int], group: ShardGroup) -> None:
        """Gather what goes together, one group after another, as they share a buffer."""
        shards, into = [], []
        for number in numbers:
            cut = self._parameters[number]
            shards.append(cut.shard.values if cut.shard.numel else torch.empty(0, dtype=cut.dtype))
            into.append(self._leases[number].tensor(cut.dtype))
            self._gathered_bytes += cut.nbytes
        # Waited for: the next group uses the same buffer.
        group.gather(shards, into, wire=self._wire.flat() if group.gather_bytes() else None).wait()

    def write_home(self, number: int) -> None:
        """Copy what code of the caller wrote into a parameter to this rank's shard of it."""
        cut = self._parameters.get(number)
        if cut is not None:
            if cut.shard.numel:
                cut.shard.values.copy_(
                    self._ranks.own(cut.spec, cut.whole.parameter.detach().reshape(-1))
                )
            cut.whole.note_values()

    def copy_of(self, number: int) -> torch.Tensor:
        """Return a flat copy, on the host, of a parameter's values."""
        return self._parameters[number].whole.parameter.detach().reshape(-1).cpu().clone()

    def give_up(self) -> None:
        """Nothing: what is whole stays."""

    def follow_update(self, update: DeferredUpdate | None) -> None:
        """Nothing: parameters wait for no update that goes on after its step."""

    def moved(self, places: Mapping[int, Place]) -> None:
        """Nothing: values rest on no drives."""

    def end_step(self) -> TraceMismatch | None:
        """Return nothing: no trace is followed."""
        return None

    @property
    def stats(self) -> FetchingStats:
        """What was gathered, which only steps have waited for."""
        return FetchingStats(fetched=0, fetched_bytes=self._gathered_bytes, in_time=0, late=0)

    def leave_absent(self) -> None:
        """Do nothing: replicas are ordinary values already."""

    def close(self) -> None:
        """Give all parameters ordinary memory, and all leases back."""
        for number, lease in self._leases.items():
            whole = self._parameters[number].whole
            # A copy in the caller's memory, before the lease of the engine's ends.
            whole.show(whole.parameter.detach().clone())
            lease.close()
        self._leases.clear()
        self._wire.close()
