"""What is read before it is asked for: which tensors, in which order, and how many bytes of them at
once.

Takes no lock and starts no thread: the store calls it with its own lock held, and says how a read
is begun.
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
    """Tensors wanted, in their order, and those that are read and were not taken yet."""

    def __init__(self) -> None:
        self._wanted: dict[str, int] = {}  # bytes by name
        self._begun: dict[str, _Begun] = {}
        self._nbytes = 0  # of those that have begun
        self._most_bytes = 0

    def want(self, sizes: Mapping[str, int], most_bytes: int) -> None:
        """Want tensors of these names and sizes, behind those wanted already."""
        # The latest call decides, for what was wanted before as well.
        self._most_bytes = most_bytes
        self._wanted.update(
            # A name that was wanted keeps its place; one that has begun would be read twice.
            {name: nbytes for name, nbytes in sizes.items() if name not in self._begun}
        )

    def begin(self, read: Callable[[str], StoreFuture[Any]]) -> None:
        """Begin with as many as there is room for: one in any case, where nothing has begun."""
        while self._wanted:
            name, nbytes = next(iter(self._wanted.items()))
            if self._begun and self._nbytes + nbytes > self._most_bytes:
                return
            try:
                future = read(name)
            except (ClosedError, RuntimeError):
                # the store is closing, or no thread can be had: `get` will read it
                self._wanted.clear()
                return
            # After `read`, which may raise: a name is either wanted or begun, never neither.
            del self._wanted[name]
            self._begun[name] = _Begun(nbytes, future)
            self._nbytes += nbytes

    def knows(self, name: str) -> bool:
        """Return whether a tensor is wanted, or was begun and not taken."""
        return name in self._wanted or name in self._begun

    def take(self, name: str) -> StoreFuture[Any] | None:
        """Return the read of a tensor, now the caller's own; None where it has not begun."""
        self._wanted.pop(name, None)
        begun = self._begun.pop(name, None)
        if begun is None:
            return None
        self._nbytes -= begun.nbytes
        return begun.future

    def forget(self, names: Iterable[str] | None = None) -> None:
        """Let go of `names`, or of all; those that wait for a thread are not read any more."""
        held = {*self._wanted, *self._begun}
        for name in held if names is None else held.intersection(names):
            future = self.take(name)
            if future is not None:
                future.cancel()


def streamed(
    names: Iterable[_Names], read: Callable[[_Names], StoreFuture[_Read]], depth: int
) -> Iterator[tuple[_Names, StoreFuture[_Read]]]:
    """Yield what is read at once with its read, when `depth` more have begun.

    Those that were begun and not yielded are cancelled.

    Raises:
        ValueError: the depth is not at least 1.
    """
    if depth < 1:
        raise ValueError(f"depth must be at least 1, got {depth}")
    begun: deque[tuple[_Names, StoreFuture[_Read]]] = deque()
    try:
        # A copy: the caller may change its own between two of these.
        for name in list(names):
            begun.append((name, read(name)))
            if len(begun) > depth:
                yield begun.popleft()
        while begun:
            yield begun.popleft()
    finally:
        # Also where the caller left its loop early: no thread reads what is not looked at.
        for _, future in begun:
            future.cancel()
