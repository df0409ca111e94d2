"""Prefetching: which tensors are read before a `get` asks for them, in which order, and how many
bytes of them at once.

Takes no lock and starts no thread: the store calls it with its own lock held, and passes the
function that begins a read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from deepnvme.errors import ClosedError
from deepnvme.store.lane import StoreFuture

__all__ = ["ReadAhead", "streamed"]

_Names = TypeVar("_Names")
_Read = TypeVar("_Read")


@dataclass(frozen=True)
class _Begun:
    nbytes: int
    future: StoreFuture[Any]


class ReadAhead:
    """The tensors wanted, in order, and the reads that have begun and that no `get` has taken."""

    def __init__(self) -> None:
        self._wanted: dict[str, int] = {}  # bytes by name
        self._begun: dict[str, _Begun] = {}
        self._nbytes = 0  # of the reads that have begun
        self._most_bytes = 0

    @property
    def futures(self) -> tuple[StoreFuture[Any], ...]:
        """The reads that have begun."""
        return tuple(begun.future for begun in self._begun.values())

    def want(self, sizes: Mapping[str, int], most_bytes: int) -> None:
        """Want tensors of these names and sizes, behind those wanted already."""
        # The latest call decides, also for what was wanted before.
        self._most_bytes = most_bytes
        self._wanted.update(
            # A name that was wanted already keeps its place. One that has begun is not read twice.
            {name: nbytes for name, nbytes in sizes.items() if name not in self._begun}
        )

    def begin(self, read: Callable[[str], StoreFuture[Any]]) -> None:
        """Begin as many reads as there is room for, and one in any case if none has begun."""
        while self._wanted:
            name, nbytes = next(iter(self._wanted.items()))
            if self._begun and self._nbytes + nbytes > self._most_bytes:
                return
            try:
                future = read(name)
            except (ClosedError, RuntimeError):
                # The store is closing, or no thread can be started: `get` will read them.
                self._wanted.clear()
                return
            # After `read`, which may raise: a name is either wanted or begun, never neither.
            del self._wanted[name]
            self._begun[name] = _Begun(nbytes, future)
            self._nbytes += nbytes

    def knows(self, name: str) -> bool:
        """Return whether a tensor is wanted, or its read has begun and was not taken."""
        return name in self._wanted or name in self._begun

    def take(self, name: str) -> StoreFuture[Any] | None:
        """Hand over the read of a tensor; return None where it has not begun."""
        self._wanted.pop(name, None)
        begun = self._begun.pop(name, None)
        if begun is None:
            return None
        self._nbytes -= begun.nbytes
        return begun.future

    def forget(self, names: Iterable[str] | None = None) -> None:
        """Let go of `names`, or of all. Cancels reads that wait for a thread."""
        held = {*self._wanted, *self._begun}
        for name in held if names is None else held.intersection(names):
            future = self.take(name)
            if future is not None:
                future.cancel()


def streamed(
    names: Iterable[_Names], read: Callable[[_Names], StoreFuture[_Read]], depth: int
) -> Iterator[tuple[_Names, StoreFuture[_Read]]]:
    """Yield each of `names` with its read, once `depth` more reads have begun.

    Reads that have begun and were not yielded are cancelled at the end.

    Raises:
        ValueError: the depth is not at least 1.
    """
    if depth < 1:
        raise ValueError(f"depth must be at least 1, got {depth}")
    begun: deque[tuple[_Names, StoreFuture[_Read]]] = deque()
    try:
        # A copy: the caller may change `names` between two of these.
        for name in list(names):
            begun.append((name, read(name)))
            if len(begun) > depth:
                yield begun.popleft()
        while begun:
            yield begun.popleft()
    finally:
        # The caller may have left its loop early: no thread reads what it does not look at.
        for _, future in begun:
            future.cancel()
