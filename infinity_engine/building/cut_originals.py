"""`CutOriginals`: parameters that all ranks build together, of which each has a shard on its
drives.

Decides which are away, which is the same on all ranks, and gathers what is asked for again. What a
shard is, and how it goes to the drives, is as for one rank. Called by all ranks in one order, as
they run one program.

[Note: what is away] Who asks for a parameter that is away gathers it, so what is away must be the
same on all ranks. It is decided by the order and the sizes of what was asked for, and by nothing
else: not by what could leave host memory, which depends on views and on when Python's collector
finds garbage, nor by what has died. What is away and could not leave here is gathered as well, and
what comes is not looked at.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch

from infinity_engine.building.original import Original, nbytes_of, plainly
from infinity_engine.building.originals import CACHE_PART, Originals
from infinity_engine.memory import Ledger
from infinity_engine.partition import GroupMember, Partitioner, ShardGroup, ShardSpec
from infinity_engine.partition.digest import digest_of
from infinity_engine.plan import Tier
from infinity_engine.ranks.ranks import Ranks, wire_of
from infinity_engine.storage import Place, SwapFile

__all__ = ["CutOriginals"]

_WIRE_PART = 16  # of the host's budget, for the buffer that gathers go through


class CutOriginals(Originals):
    """Keeps `cache` bytes of values on every rank, the least that any has; each writes its shards
    to its `swap`.
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
        free = ledger.free(Tier.HOST)
        least = ranks.least(
            "cache of a model that is built", free // CACHE_PART if cache is None else cache
        )
        self._most_wire = min(
            ranks.config.bucket_bytes,
            ranks.least("buffer of a model that is built", free // _WIRE_PART),
        )
        super().__init__(swap, ledger, budget, least, written)
        self._ranks = ranks
        self._partitioner = Partitioner(ranks.shards.size, ranks.partitioning)
        # elements and bytes; the one that was used last at the end
        self._recent: dict[Original, tuple[int, int]] = {}
        self._recent_bytes = 0

    # --- which there are --------------------------------------------------------------------------

    def adopt_part(
        self, parameter: torch.Tensor, name: str, spec: ShardSpec, place: Place | None
    ) -> None:
        """Take over a parameter that shows no values: this rank's part of them is in this place."""
        original = self._add(parameter, Original(parameter, name, place))
        original.cut(spec, self._ranks.shards.rank)
        original.goes_away("values of files")

    def digest_of(self, parameter: torch.Tensor) -> str:
        """Return words that differ where values do, as far as this rank has seen them."""
        return self._of(parameter).digest if self.is_absent(parameter) else digest_of(parameter)

    def agree(self) -> None:
        """Make sure that all ranks have built the same.

        Raises:
            CollectiveError: they have not; names what differs. Or one has failed.
        """
        built = {}
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
        """Have the values of these in host memory within the body; all ranks do, and gather what is
        away.

        Raises:
            CapacityError: the host's budget has no room for all of them.
            CollectiveError: another rank does something else, or has failed.
            TransferError: a part could not be read, or what had to make room not be written.
        """
        with self._using(parameters):
            away = [each for each in parameters if each is not replaced and self._of(each).is_away]
            beside = max((self._beside(self._of(each), each) for each in away), default=0)
            needed = sum(nbytes_of(each) for each in away) + beside
            self._let_go(self._cache - needed)
            self._make_room(needed)
            for each in away:
                beside = self._beside(self._of(each), each)
                taken = nbytes_of(each) + beside
                self._host.hold(taken)
                try:
                    self._gather(self._of(each), each)
                finally:
                    self._host.release(taken)
                self._note(each)
                self._has_freed(beside)
            yield
            for each in parameters:
                self._note(each)

    def keep_no_others(self) -> None:
        """Let parameters go that nobody else has, also those in cycles, which are collected at any
        time.
        """
        super().keep_no_others()
        gc.collect()

    def leave_all(self) -> None:
        """Let all values be away: the model is built."""
        self._let_go(0)
        super().leave_all()

    def read_whole(self, parameter: torch.Tensor, first_element: int, values: torch.Tensor) -> None:
        """Gather a parameter on all ranks, and fill a flat tensor with its elements from the first
        on.
        """
        original = self._of(parameter)
        if not original.is_away:  # it has no elements, or is in use
            super().read_whole(parameter, first_element, values)
            return
        with plainly():
            whole = self._gathered(original, parameter)
            values.copy_(whole[first_element : first_element + values.numel()])

    def bring(self, parameter: torch.Tensor) -> None:
        """Give a parameter ordinary memory with its values, on all ranks, and forget it."""
        original = self._of(parameter)
        if original.is_away:
            self._gather(original, parameter)
        self.forget(parameter)

    def room_for(self, parameters: Iterable[torch.Tensor]) -> tuple[int, int]:
        """Return how many bytes all of these need on every rank, and the least that one has."""
        free = self._ranks.least("room for values of a model", self._ledger.free(Tier.HOST))
        return sum(nbytes_of(each) for each in parameters), free

    # --- what is away -----------------------------------------------------------------------------

    def _note(self, parameter: torch.Tensor) -> None:
        original = self._of(parameter)
        _, before = self._recent.pop(original, (0, 0))
        self._recent_bytes -= before
        nbytes = nbytes_of(parameter)
        if nbytes > before:
            self._let_go(self._cache - nbytes)
        super()._note(parameter)
        original.comes_back()
        if nbytes:
            self._recent[original] = parameter.numel(), nbytes
            self._recent_bytes += nbytes
        else:
            original.cut(None, self._ranks.shards.rank)

    def _let_go(self, nbytes: int) -> None:
        """Let what was asked for longest ago be away until the rest takes no more: [Note: what is
        away].
        """
        for original in list(self._recent):
            if self._recent_bytes <= nbytes:
                return
            parameter = original.parameter
            if parameter is not None and id(parameter) in self._in_use:
                continue
            numel, taken = self._recent.pop(original)
            self._recent_bytes -= taken
            if original.spec is None or original.spec.numel != numel:
                original.cut(self._partitioner.cut(numel), self._ranks.shards.rank)
            original.goes_away()
            if parameter is not None and parameter in self and original.may_leave(parameter):
                self._leave(parameter)

    def _idle(self, number: int) -> torch.Tensor | None:
        original = self._originals.get(number)
        return None if original is None or not original.is_away else super()._idle(number)

    # --- one parameter ----------------------------------------------------------------------------

    def _gather(self, original: Original, parameter: torch.Tensor) -> None:
        """Let a parameter have its values in memory, on all ranks."""
        if original.is_absent:
            original.check_untouched(parameter)
        values = self._gathered(original, parameter)
        if original.is_absent:
            original.give(parameter, values.view(parameter.shape))

    def _gathered(self, original: Original, parameter: torch.Tensor) -> torch.Tensor:
        """Return the whole values, flat, in new memory."""
        assert original.part is not None, "what is away was cut"
        # The device is said for those who make buffers within: the body may have another one as
        # torch's default.
        with plainly(), torch.device("cpu"):
            shard = torch.empty(original.part.numel, dtype=parameter.dtype)
            self.read_into(parameter, 0, shard)
            values = torch.empty(parameter.numel(), dtype=parameter.dtype)
            group = self._group(original, parameter.dtype)
            wire = torch.empty(self._wire_of(group), dtype=torch.uint8)
            group.gather([shard], [values], wire=wire).wait()
            return values

    def _beside(self, original: Original, parameter: torch.Tensor) -> int:
        """Return what a gather takes beside the values, on the rank that has the largest part."""
        assert original.spec is not None, "what is away was cut"
        largest = max(shard.numel for shard in original.spec.shards)
        return largest * parameter.element_size() + self._wire_of(
            self._group(original, parameter.dtype)
        )

    def _group(self, original: Original, dtype: torch.dtype) -> ShardGroup:
        assert original.spec is not None, "what is away was cut"
        return self._ranks.group(original.name, [GroupMember(original.name, original.spec, dtype)])

    def _wire_of(self, group: ShardGroup) -> int:
        return wire_of(group.gather_bytes(), self._ranks.shards.size + 1, self._most_wire)
