"""Tensors by name: written and then named in one step, held by name and then read.

Refuses what must not be done now.

Owns the one lock over what a store holds. No thread waits for a drive while it has that lock, or
reads or writes space. `Holdings` knows what a name means, and which space is needed. Called by the
store, from any thread.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from deepnvme.errors import ClosedError, NVMeError, StoreError
from deepnvme.memory.arrays import ITEMSIZES, Storable, described
from deepnvme.memory.buffers import Memory, memory_of
from deepnvme.store.commits import Commits
from deepnvme.store.holdings import Holdings
from deepnvme.store.manifest import Record, check_name
from deepnvme.store.selection import Selection, select
from deepnvme.store.slice_io import SliceIO
from deepnvme.store.tensor_io import Damage, TensorIO
from deepnvme.volume.member import Access
from deepnvme.volume.volume import Volume

__all__ = ["NamedTensors"]

_KNOWN = frozenset(
    {"array", "builtins", "deepnvme.memory.arrays", "mmap", "numpy", "torch", "torch.nn.parameter"}
)
"""Modules of the types that are described without running anybody's code."""


class NamedTensors:
    """What a store holds, and the way to its bytes."""

    def __init__(self, volume: Volume, commits: Commits, *, summing: bool) -> None:
        self.io = TensorIO(volume, summing=summing)
        self._slices = SliceIO(volume, self.io.staged, summing=summing)
        self._summing = summing
        self.holdings = Holdings(volume.directories[0], self.io.release)
        self.lock = threading.Lock()
        self._volume = volume
        self._commits = commits

    # --- what may be done now ---------------------------------------------------------------------

    def check_access(self) -> None:
        """Refuse to change a store that was opened for reading.

        Raises:
            StoreError: it was.
        """
        if self._volume.access is Access.READ:
            raise StoreError(
                errno.EBADF,
                "the store was opened for reading: open it with access=Access.WRITE to change it",
                path=str(self._volume.directories[0]),
            )

    @contextmanager
    def opened(self) -> Iterator[Holdings]:
        """Lock out other threads, which read or change what is held; refuse a closed store."""
        # First: in a forked child, the thread that had the lock may not exist.
        self.io.refuse_if_forked()
        with self.lock:
            self._check_open()
            yield self.holdings

    @contextmanager
    def looking(self) -> Iterator[Holdings]:
        """As `opened`, also when the store is closed."""
        self.io.refuse_if_forked()
        with self.lock:
            yield self.holdings

    @contextmanager
    def changing(self) -> Iterator[Holdings]:
        """As `opened`, if the store can be changed."""
        with self.opened() as holdings:
            self._check_changing()
            yield holdings

    def _check_open(self) -> None:
        if self.holdings.closed:
            raise ClosedError("the store is closed: open it again to use it")

    def _check_changing(self) -> None:
        self.check_access()
        self._commits.check()

    # --- bytes ------------------------------------------------------------------------------------

    def write(
        self,
        tensors: Mapping[str, Any],
        description: Callable[[Any], Storable],
        name: Callable[[Mapping[str, Record]], None],
    ) -> None:
        """Write tensors, then let `name` do what follows of it, in one step; it raises before it
        changes anything.
        """
        with self.changing():  # now, and not after all was written
            pass
        # Whatever becomes of `tensors` meanwhile: they are described while the drives are busy.
        # Except for what may run the caller's code, which may want from this store what waits for
        # the staging memory that is taken by then.
        given = {check_name(name): tensor for name, tensor in tensors.items()}
        foreign = {
            name: tensor for name, tensor in given.items() if type(tensor).__module__ not in _KNOWN
        }
        first = {name: described(name, tensor, description) for name, tensor in foreign.items()}
        # A generator: each is described when those before it are on their way to the drives.
        records = self.io.write(
            first.get(name) or described(name, tensor, description)
            for name, tensor in given.items()
        )
        with self.lock:
            try:
                self._check_open()
                self._check_changing()
                name(dict(zip(given, records, strict=True)))
            # Not after any error: where Ctrl-C came in `name`, the names may have the space
            # already.
            except NVMeError:  # a commit has failed meanwhile, or the store was closed
                self.holdings.give_back(records)
                raise

    def read(
        self,
        held: Mapping[str, Record],
        target: Callable[[str, Record], Any],
        new: Container[str] = (),
    ) -> dict[str, Any]:
        """Read held tensors into what `target` returns for each; return that, and let them go.

        What it returns for names in `new` was made just then.
        """
        # In the order asked for, which is not the order of reading.
        results = dict.fromkeys(held)

        def memory(name: str) -> Memory:
            results[name] = target(name, held[name])
            return memory_of(results[name], writable=True)

        with self._until_read(held):
            self.io.read(held, memory, new)
        return results

    def read_part(self, name: str, key: Any, target: Callable[[str, tuple[int, ...]], Any]) -> Any:
        """Read a part of a tensor into what `target` makes of its dtype and shape; return that."""
        with self.opened() as holdings:
            held = holdings.hold((name,))
        record = held[name]
        with self._until_read(held):
            part = select(record.shape, ITEMSIZES[record.dtype], key)
            result = target(record.dtype, part.shape)
            self._slices.read(name, record, part.runs(), memory_of(result, writable=True))
        return result

    def write_part(
        self, name: str, key: Any, tensor: Storable, *, has_commits: bool
    ) -> Iterable[str]:
        """Write a part of a tensor; return the names that have other content now.

        The caller lets no commit begin meanwhile.
        """
        with self.changing() as holdings:
            record = holdings.record(name)
            part = select(record.shape, ITEMSIZES[record.dtype], key)
            if (tensor.code, tensor.shape) != (record.dtype, part.shape):
                raise ValueError(
                    f"the part of {name!r} is {record.dtype} of shape {part.shape}; what is to be "
                    f"put there is {tensor.code} of shape {tensor.shape}: give it that dtype and "
                    "shape"
                )
            # Whatever else needs the space would find changed bytes: a commit, or a reader that
            # compares them with checksums.
            may_change = not (has_commits or self._summing)
            in_place = may_change or holdings.is_only_named(record)
            # After the question above, which would count this reader too.
            held = holdings.hold((name,))
            if in_place and record.checksums is not None:
                # Until the bytes are written, a reader must not compare them with old checksums.
                holdings.revise(name, record, record.without_checksums())
        with self._until_read(held):
            memory = tensor.gathered().memory
            if in_place:
                after = self._slices.write_in_place(name, record, part.runs(), memory)
                with self.lock:
                    self.holdings.revise(name, record, after)
            else:
                self._write_copy(name, record, part, memory)
        return (name,)

    def _write_copy(self, name: str, record: Record, part: Selection, memory: Memory) -> None:
        """Write the tensor with another part to other space, and let the name mean that."""
        extents = self._volume.allocate(record.nbytes)
        try:
            after = self._slices.write_copy(name, record, extents, part.runs(), memory)
        except BaseException:
            self._volume.release(extents)
            raise
        with self.lock:
            try:
                self._check_open()
                self._check_changing()
                if self.holdings.record(name).places != record.places:
                    raise StoreError(
                        errno.EBUSY,
                        f"{name!r} was replaced while a part of it was written: put the part again",
                        path=str(self._volume.directories[0]),
                    )
                self.holdings.name({name: after})
            except (NVMeError, KeyError):  # of these alone it is certain that no name has the space
                self.holdings.give_back((after,))
                raise

    def damage(self, names: Iterable[str], progress: Callable[[str, int], None]) -> list[Damage]:
        """Read the tensors of these names; tell `progress` of each, return what is damaged."""
        with self.opened() as holdings:
            held = holdings.hold([name for name in names if name in holdings])
        found: list[Damage] = []
        with self._until_read(held):
            # Many small ones are fast together; where one is damaged, each is read again to find
            # it.
            sound = len(held) > 1 and self.io.are_sound(held)
            for name, record in held.items():
                if not sound:
                    found += self.io.damage(name, record)
                progress(name, record.nbytes)
        return found

    @contextmanager
    def _until_read(self, held: Mapping[str, Record]) -> Iterator[None]:
        try:
            yield
        finally:
            with self.lock:
                self.holdings.let_go(held)
