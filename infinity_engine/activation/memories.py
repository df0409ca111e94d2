"""`SavedMemories`: the memory that graphs have saved tensors in, each memory once.

Counts the saved tensors of each and tells when the last one has gone. Decides nothing and moves
nothing: `ActivationOffload` and `ActivationMoves` do.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch

from infinity_engine.activation.saved import changed_since
from infinity_engine.memory import BorrowedMemory, Lease
from infinity_engine.residence import ShardRecord
from infinity_engine.schedule import Use
from infinity_engine.storage import Transfer

__all__ = ["AT_REST", "SavedMemories", "SavedMemory", "SavedPiece", "SavedView"]

AT_REST = Transfer(())
"""The move of what is in none: it has ended, and moved nothing."""
_SMALLEST_PART = 4  # less than a fourth of a memory stays: the rest is not autograd's


class _Place(NamedTuple):
    """Where a memory lies. Others may begin at its address, such as slices of one numpy array."""

    address: int
    nbytes: int


@dataclass(eq=False, slots=True)
class SavedMemory:
    """One memory that autograd has saved, and how many saved tensors lie in it."""

    number: int
    use: Use
    record: ShardRecord
    place: _Place  # of the memory that was saved
    shape: tuple[int, ...]  # of the first tensor in it
    # A tensor in it that knows its version, and that when it was saved. Once the memory is a copy
    # of ours, the tensor has no memory any more.
    watched: tuple[torch.Tensor, int]
    is_original: bool = True
    transfer: Transfer = AT_REST  # its last move, or none
    views: int = 0
    changed: RuntimeError | None = None
    stays: bool = False  # it is on its way out, and needed: its memory here is not given back

    def drop_original(self) -> None:
        """Let the original go: the record has a copy of it elsewhere."""
        self.note_change()
        self.is_original = False
        watched = self.watched[0]
        # Assigned: unlike other ways to take its memory away, that is no change in place.
        with torch.inference_mode(False):
            watched.data = watched.new_empty(0)

    def note_change(self) -> None:
        """Remember an in-place change of what was saved."""
        tensor, version = self.watched
        if self.changed is None and tensor._version != version:
            self.changed = changed_since(self.shape, version, tensor._version)

    def add_view(self) -> None:
        """Count one more saved tensor in this memory."""
        self.views += 1

    def drop_view(self) -> None:
        """Count one less."""
        self.views -= 1

    def stay(self, stays: bool) -> None:
        """Note whether its memory here is to stay when its move out has ended."""
        self.stays = stays

    def begin_move(self, transfer: Transfer) -> None:
        """Note the move that has begun."""
        self.transfer = transfer

    def end_move(self) -> Transfer:
        """Note that its move has ended; return that."""
        transfer, self.transfer = self.transfer, AT_REST
        return transfer


class SavedView:
    """What autograd holds in place of a tensor: a view of a saved memory.

    Not all tensors in one memory have one version: what `.data` returns has its own. So all but the
    first that was saved of a memory are watched as well.
    """

    __slots__ = ("_dtype", "_gone", "_offset", "_stride", "_watched", "memory", "shape")

    def __init__(self, memory: SavedMemory, tensor: torch.Tensor, gone: deque[SavedMemory]) -> None:
        self.memory = memory
        self._dtype = tensor.dtype
        self.shape = tuple(tensor.shape)
        self._stride = tensor.stride()
        self._offset = int(tensor.storage_offset())
        self._gone = gone
        self._watched: tuple[torch.Tensor, int] | None = None

    def watch(self, alias: torch.Tensor, version: int) -> None:
        """Note in-place changes of a tensor since this version, by an alias, whose memory goes."""
        self._watched = alias, version
        # Without memory it still knows its version.
        with torch.inference_mode(False):
            alias.data = alias.new_empty(0)

    def check(self) -> None:
        """Refuse a tensor that was changed in place since it was saved.

        Raises:
            ChangedInPlaceError: it was.
        """
        self.memory.note_change()
        if self.memory.changed is not None:
            raise self.memory.changed
        if self._watched is not None:
            alias, version = self._watched
            if alias._version != version:
                raise changed_since(self.shape, version, alias._version)

    # Runs wherever a graph goes, also within a call of the offload: it only appends.
    def __del__(self) -> None:
        self._gone.append(self.memory)

    def tensor(self, lease: Lease) -> torch.Tensor:
        """Return the tensor that was saved, in the memory of `lease`."""
        flat = lease.flat()
        begin, beyond = divmod(int(flat.storage_offset()), self._dtype.itemsize)
        assert not beyond, "memory of a lease is aligned for every dtype"
        # One operation: views of views would cost several for each saved tensor.
        return torch.empty(0, dtype=self._dtype, device=flat.device).set_(
            flat.untyped_storage(), begin + self._offset, self.shape, self._stride
        )


class SavedPiece:
    """What autograd holds in place of a view of a small part of its memory.

    That is the tensor, as it was `kept`, until so much is saved of the memory that it may leave.
    """

    __slots__ = ("__weakref__", "_alias", "_version", "held")

    def __init__(self, tensor: torch.Tensor, kept: object) -> None:
        self.held = kept  # or the view that it has become
        self._alias = tensor.detach()
        self._version = self._alias._version

    def become_view(self, make_view: Callable[[torch.Tensor], SavedView]) -> None:
        """Be a view of saved memory from here on."""
        view = self.held = make_view(self._alias)
        view.watch(self._alias, self._version)


@dataclass(slots=True)
class _SmallViews:
    """The small views that were saved of one memory at one version, and the bytes they cover."""

    version: int
    covered: int = 0
    # Of the parts that are covered, which do not touch one another, in their order.
    begins: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    pieces: weakref.WeakSet[SavedPiece] = field(default_factory=weakref.WeakSet)

    def cover(self, begin: int, end: int) -> None:
        """Count the bytes of a part that no part before it has covered."""
        first, last = bisect_left(self.ends, begin), bisect_right(self.begins, end)
        begins, ends = self.begins[first:last], self.ends[first:last]
        begin, end = min([begin, *begins]), max([end, *ends])
        self.begins[first:last], self.ends[first:last] = [begin], [end]
        self.covered += end - begin - sum(ends) + sum(begins)


class SavedMemories:
    """Every memory that has saved tensors; `by_number` is for others to read."""

    def __init__(self, borrowed: BorrowedMemory) -> None:
        self.by_number: dict[int, SavedMemory] = {}
        self._borrowed = borrowed
        # Of those that are still the original, so that a tensor saved again is recognized.
        self._by_place: dict[_Place, SavedMemory] = {}
        # Of the memories that stay for now.
        self._small_views: dict[_Place, _SmallViews] = {}
        self._next = 0
        self._gone: deque[SavedMemory] = deque()  # once for each saved view that has gone

    def find(self, tensor: torch.Tensor) -> SavedMemory | None:
        """Return the memory of a tensor, where it was saved at the same version and is here."""
        memory = self._by_place.get(_place_of(tensor))
        if memory is None or not memory.is_original or memory.watched[1] != tensor._version:
            return None
        return memory

    def may_leave(self, tensor: torch.Tensor) -> bool:
        """Tell whether enough of a tensor's memory is saved for it to leave, with this tensor."""
        place, extent = _place_of(tensor), _extent_of(tensor)
        if extent * _SMALLEST_PART >= place.nbytes:
            return True
        known = self._small_views.get(place)
        # Where all of them are gone, another memory may have got the address.
        if known is None or not known.pieces or known.version != tensor._version:
            known = self._small_views[place] = _SmallViews(tensor._version)
        begin = int(tensor.storage_offset()) * tensor.element_size()
        known.cover(begin, begin + extent)
        return known.covered * _SMALLEST_PART >= place.nbytes

    def keep_piece(self, tensor: torch.Tensor, kept: object) -> SavedPiece:
        """Return what autograd saves in place of a tensor whose memory may not leave yet, and that
        was `kept`.
        """
        piece = SavedPiece(tensor, kept)
        self._small_views[_place_of(tensor)].pieces.add(piece)
        return piece

    def forget_pieces(self) -> None:
        """Forget the small views saved so far: each keeps its tensor, and later views do not count
        with them.
        """
        self._small_views.clear()

    def add(self, tensor: torch.Tensor) -> SavedMemory:
        """Number the memory of a tensor that was not saved yet, for the pieces of it as well."""
        number, self._next = self._next, self._next + 1
        name = f"activation {number}"
        storage = tensor.untyped_storage()
        flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        memory = SavedMemory(
            number,
            Use(name, (number,)),
            ShardRecord(name, self._borrowed.borrow(flat, holder=name)),
            _place_of(tensor),
            tuple(tensor.shape),
            # Detached: the tensor itself would hold its graph, and the graph holds what is saved.
            (tensor.detach(), tensor._version),
        )
        self.by_number[number] = self._by_place[memory.place] = memory
        self._move_pieces_to(memory)
        return memory

    def _move_pieces_to(self, memory: SavedMemory) -> None:
        known = self._small_views.pop(memory.place, None)
        if known is None or known.version != memory.watched[1]:
            return
        # One that is there has its memory, so no other tensor has got the address.
        for piece in known.pieces:
            piece.become_view(partial(self.view, memory))

    def view(self, memory: SavedMemory, tensor: torch.Tensor) -> SavedView:
        """Return what autograd saves in place of a tensor that lies in `memory`."""
        memory.add_view()
        return SavedView(memory, tensor, self._gone)

    def another_view(self, memory: SavedMemory, tensor: torch.Tensor) -> SavedView:
        """Return the same for a tensor that was not the first in `memory`."""
        view = self.view(memory, tensor)
        view.watch(tensor.detach(), tensor._version)
        return view

    def drop_unused(self) -> Iterator[SavedMemory]:
        """Yield every memory whose last saved tensor has gone; it is not among these any more."""
        while self._gone:
            memory = self._gone.popleft()
            memory.drop_view()
            if not memory.views and memory.number in self.by_number:
                del self.by_number[memory.number]
                self.forget_place(memory)
                yield memory

    def forget_place(self, memory: SavedMemory) -> None:
        """Share the memory with no tensor that is saved from here on."""
        if self._by_place.get(memory.place) is memory:
            del self._by_place[memory.place]

    def uses_down_from(self, number: int) -> list[Use]:
        """Return the uses of what was saved up to `number`, the last first."""
        return [
            self.by_number[saved].use
            for saved in sorted(self.by_number, reverse=True)
            if saved <= number
        ]

    def number_anew(self) -> None:
        """Begin the numbers of the next step at 0, as those of the step before."""
        self._next = 0

    def clear(self) -> None:
        """Forget them all."""
        self.by_number.clear()
        self._by_place.clear()
        self._small_views.clear()


def _place_of(tensor: torch.Tensor) -> _Place:
    storage = tensor.untyped_storage()
    return _Place(storage.data_ptr(), storage.nbytes())


def _extent_of(tensor: torch.Tensor) -> int:
    """Return the bytes from a tensor's first element to its last."""
    if not tensor.numel():
        return 0
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.element_size() * (1 + sum((size - 1) * stride for size, stride in strides))
