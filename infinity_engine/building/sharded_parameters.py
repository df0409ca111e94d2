"""`ShardedParameters`: parameters that all ranks build together; each has its shards on its drives.

Decides which parameters are away, the same ones on all ranks, and gathers those that are used
again. Shards go to the drives as parameters of one rank do. Called by all ranks in one order, as
they run one program.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch

from infinity_engine.building.built_parameter import BuiltParameter, nbytes_of, plainly
from infinity_engine.building.built_parameters import CACHE_PART, BuiltParameters
from infinity_engine.memory import Ledger
from infinity_engine.partition import GroupMember, Partitioner, ShardGroup, ShardSpec
from infinity_engine.partition.digest import digest_of
from infinity_engine.plan import Tier
from infinity_engine.ranks.ranks import Ranks, wire_of
from infinity_engine.storage import Place, SwapFile

__all__ = ["ShardedParameters"]

_WIRE_PART = 16  # the buffer of gathers takes one in so many bytes of the host's free budget


class ShardedParameters(BuiltParameters):
    """Keeps as many bytes of values on every rank as the rank with the smallest `cache` has.

    Each rank writes its shards to its own `swap`.
    """

    def __init__(
        self,
        swap: SwapFile,
        ledger: Ledger,
        budget: Mapping[str, int],
        cache: int | None,
        written: Callable[[int], None],
        *,
        ranks: Ranks,
    ) -> None:
        # Asked before super().__init__ reserves all of it.
        free = ledger.free(Tier.HOST)
        # The least of all ranks: the cache decides what is away, which must be the same everywhere.
        least = ranks.least(
            "cache of a model that is built", free // CACHE_PART if cache is None else cache
        )
        self._most_wire = min(
            ranks.config.bucket_bytes,
            ranks.least("buffer of a model that is built", free // _WIRE_PART),
        )
        super().__init__(swap, ledger, budget, least, written)
        self._ranks = ranks
        self._partitioner = Partitioner(ranks.shards.size)
        # Elements and bytes, least recently used first. The same on all ranks, as the uses are.
        self._recent: dict[BuiltParameter, tuple[int, int]] = {}
        self._recent_bytes = 0

    # --- which there are --------------------------------------------------------------------------

    def adopt_part(
        self, parameter: torch.Tensor, name: str, spec: ShardSpec, place: Place | None
    ) -> None:
        """Take over a parameter of which this rank's part is in `place`, and nothing in memory."""
        record = self._records.add(parameter, BuiltParameter(parameter, name, place))
        record.cut(spec, self._ranks.shards.rank)
        # Stands for a digest: the ranks have compared the files.
        record.mark_away("values of files")

    def digest_of(self, parameter: torch.Tensor) -> str:
        """Return text that differs where values do, as far as this rank has seen them."""
        return self._of(parameter).digest if self.is_absent(parameter) else digest_of(parameter)

    def agree(self) -> None:
        """Check that all ranks have built the same model.

        Raises:
            CollectiveError: they have not; names what differs. Or one has failed.
        """
        built = {}
        # By number: names of different parameters may be the same.
        for number, parameter in enumerate(self.parameters()):
            kind = f"{str(parameter.dtype).removeprefix('torch.')} {list(parameter.shape)}"
            name = f"parameter {number}, {self._of(parameter).name}"
            built[name] = f"{kind} with {self.digest_of(parameter)}"
        self._ranks.agree_on("the model that was built", built)

    # --- where they are ---------------------------------------------------------------------------

    @contextmanager
    def using(
        self, parameters: Collection[torch.Tensor], replaced: torch.Tensor | None = None
    ) -> Iterator[None]:
        """Have the values of these in host memory within the body, on all ranks.

        Those that are away are gathered.

        Raises:
            CapacityError: the host's budget has no room for all of them.
            CollectiveError: another rank does something else, or has failed.
            TransferError: a part could not be read, or one that had to make room could not be
                written.
        """
        with self._using(parameters):
            away = [
                parameter
                for parameter in parameters
                # What the body replaces needs no old values.
                if parameter is not replaced and self._of(parameter).is_away
            ]
            # Gathers go one after another, so the largest is room enough for all.
            beside = max(
                (self._beside(self._of(parameter), parameter) for parameter in away), default=0
            )
            # Also for values that this rank still has: the others count them too.
            needed = sum(nbytes_of(parameter) for parameter in away) + beside
            # Marked first, on all ranks alike; making room then depends on this rank's memory.
            self._mark_oldest_away(self._cache - needed)
            self.make_room(needed)
            for parameter in away:
                beside = self._beside(self._of(parameter), parameter)
                taken = nbytes_of(parameter) + beside
                # Held until _note() counts the values as the parameter's.
                self._host.hold(taken)
                try:
                    self._gather(self._of(parameter), parameter)
                finally:
                    self._host.release(taken)
                self._note(parameter)
                self._freed.freed(beside)
            yield
            # The body may have changed sizes: noted again.
            for parameter in parameters:
                self._note(parameter)

    def drop_unreferenced(self) -> None:
        """Drop references that keep parameters alive, and cycles: all ranks then have the same."""
        super().drop_unreferenced()
        gc.collect()

    def evict_all(self) -> None:
        """Mark all values as away: the model is built."""
        self._mark_oldest_away(0)
        super().evict_all()

    def read_whole(self, parameter: torch.Tensor, first_element: int, values: torch.Tensor) -> None:
        """Gather a parameter on all ranks, and fill a flat tensor with its elements.

        `first_element` is the first of them.
        """
        record = self._of(parameter)
        if not record.is_away:  # it has no elements, or a call is using it
            super().read_whole(parameter, first_element, values)
            return
        # Gathered whole, as a gather has no parts; `values` may be one.
        with plainly():
            whole = self._gathered(record, parameter)
            values.copy_(whole[first_element : first_element + values.numel()])

    def bring(self, parameter: torch.Tensor) -> None:
        """Give a parameter ordinary memory with its values, on all ranks, and forget it."""
        record = self._of(parameter)
        if record.is_away:
            self._gather(record, parameter)
        self.forget(parameter)

    def room_for(self, parameters: Iterable[torch.Tensor]) -> tuple[int, int]:
        """Return how many bytes all of these need on every rank, and the least that one has."""
        # The least of all ranks: one that has too little makes all refuse, together.
        free = self._ranks.least("room for values of a model", self._ledger.free(Tier.HOST))
        return sum(nbytes_of(parameter) for parameter in parameters), free

    # --- what is away -----------------------------------------------------------------------------

    def _note(self, parameter: torch.Tensor) -> None:
        record = self._of(parameter)
        # Taken out and put in again: it is the newest use now.
        _, before = self._recent.pop(record, (0, 0))
        self._recent_bytes -= before
        nbytes = nbytes_of(parameter)
        if nbytes > before:
            self._mark_oldest_away(self._cache - nbytes)
        super()._note(parameter)
        # It is in use here, so it is not away, whatever it was before.
        record.mark_back()
        if nbytes:
            self._recent[record] = parameter.numel(), nbytes
            self._recent_bytes += nbytes
        else:
            # Empty on all ranks: there is nothing to gather.
            record.cut(None, self._ranks.shards.rank)

    # [Note: what is away] A use of a parameter that is away gathers it, which all ranks do
    # together. So the same parameters must be away on all ranks. The order and the sizes of the
    # uses decide that, and nothing else: not what could leave host memory, which depends on views
    # and on when Python's collector runs, nor which parameters have died. A parameter that is away
    # and could not leave the memory of this rank takes part in the gather as well, and ignores what
    # comes.
    def _mark_oldest_away(self, nbytes: int) -> None:
        """Mark what was used longest ago as away, down to `nbytes`: [Note: what is away]."""
        # A copy, as records are taken out.
        for record in list(self._recent):
            if self._recent_bytes <= nbytes:
                return
            # One that has died here is marked as well: other ranks may have it.
            parameter = record.parameter
            if parameter is not None and id(parameter) in self._in_use:
                continue
            numel, taken = self._recent.pop(record)
            self._recent_bytes -= taken
            # A new size: it was cut for another one, or never.
            if record.spec is None or record.spec.numel != numel:
                record.cut(self._partitioner.cut(numel), self._ranks.shards.rank)
            record.mark_away()
            # Only this rank's memory depends on whether it may leave.
            if parameter is not None and parameter in self and record.may_leave(parameter):
                self._leave(parameter)

    def _idle(self, number: int) -> torch.Tensor | None:
        record = self._records.get(number)
        # Only what is away may leave: the rest is in memory on all ranks, and not gathered.
        return None if record is None or not record.is_away else super()._idle(number)

    # --- one parameter ----------------------------------------------------------------------------

    def _gather(self, record: BuiltParameter, parameter: torch.Tensor) -> None:
        """Give a parameter its values in memory, on all ranks."""
        if record.is_absent:
            record.check_untouched(parameter)
        values = self._gathered(record, parameter)
        # Where the values are still here, what was gathered is ignored.
        if record.is_absent:
            record.set_values(parameter, values.view(parameter.shape))

    def _gathered(self, record: BuiltParameter, parameter: torch.Tensor) -> torch.Tensor:
        """Return the whole values, flat, in new memory."""
        assert record.part is not None, "what is away was cut"
        # The context's body may have set another default device, on which the gather would make
        # its own buffers.
        with plainly(), torch.device("cpu"):
            shard = torch.empty(record.part.numel, dtype=parameter.dtype)
            # This rank's shard, from memory or from its drives.
            self.read_into(parameter, 0, shard)
            values = torch.empty(parameter.numel(), dtype=parameter.dtype)
            group = self._group(record, parameter.dtype)
            wire = torch.empty(self._wire_of(group), dtype=torch.uint8)
            group.gather([shard], [values], wire=wire).wait()
            return values

    def _beside(self, record: BuiltParameter, parameter: torch.Tensor) -> int:
        """Return the bytes that a gather takes beside the values, on the rank with the most."""
        assert record.spec is not None, "what is away was cut"
        largest = max(shard.numel for shard in record.spec.shards)
        return largest * parameter.element_size() + self._wire_of(
            self._group(record, parameter.dtype)
        )

    def _group(self, record: BuiltParameter, dtype: torch.dtype) -> ShardGroup:
        assert record.spec is not None, "what is away was cut"
        return self._ranks.group(record.name, [GroupMember(record.name, record.spec, dtype)])

    def _wire_of(self, group: ShardGroup) -> int:
        return wire_of(group.gather_bytes(), self._ranks.shards.size + 1, self._most_wire)
