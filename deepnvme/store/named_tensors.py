"""Tensors by name: written and then named in one step; held, which keeps their space, and read.

Refuses calls on a store that is closed, read-only or poisoned.

Owns the one lock over what a store holds. A thread that has it neither waits for a drive nor moves
bytes. `Holdings` knows what a name means, and which space has users. Called by the store, from any
thread.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from numbers import Number
from typing import Any

from deepnvme.errors import ChecksumError, ClosedError, NVMeError, StoreError
from deepnvme.memory.arrays import ITEMSIZES, Storable, described
from deepnvme.memory.buffers import Memory, memory_of
from deepnvme.memory.filling import Repeated, element_of
from deepnvme.queue.pipeline import RUN_BYTES
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
"""Modules of types that are described without running the caller's code."""


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
        """Yield the holdings with the lock held; refuse a closed store."""
        # First: in a forked child, the thread that has the lock may not exist.
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
        """As `opened`; refuse a store that cannot be changed."""
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
        """Write tensors, then call `name` with their records, with the lock held. Where it raises,
        it must have changed nothing.
        """
        with self.changing():  # to refuse now, and not after all was written
            pass
        # A copy, as tensors are described later, while the drives are busy. But not those whose
        # description runs the caller's code: that may call this store, and then wait for the
        # staging memory that this call has by then.
        given = {check_name(name): tensor for name, tensor in tensors.items()}
        foreign = {
            name: tensor for name, tensor in given.items() if type(tensor).__module__ not in _KNOWN
        }
        first = {name: described(name, tensor, description) for name, tensor in foreign.items()}
        # A generator: a tensor is described when those before it are on their way to the drives.
        records = self.io.write(
            first.get(name) or described(name, tensor, description)
            for name, tensor in given.items()
        )
        with self.lock:
            try:
                self._check_open()
                self._check_changing()
                name(dict(zip(given, records, strict=True)))
            # Not for every error: where Ctrl-C came in `name`, the names may have the space.
            except NVMeError:  # a commit has failed meanwhile, or the store was closed
                self.holdings.give_back(records)
                raise

    def read(
        self,
        held: Mapping[str, Record],
        target: Callable[[str, Record], Any],
        new: Container[str] = (),
    ) -> dict[str, Any]:
        """Read held tensors into what `target` returns for them; return that, and let them go.

        For names in `new`, `target` makes new memory.
        """
        # In the order of `held`, which is not the order of reading.
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
        self, name: str, key: Any, tensor: Storable | Number, *, has_commits: bool
    ) -> Iterable[str]:
        """Write a part of a tensor, or fill it with a number; return the names that have other
        content now.

        The caller lets no commit begin meanwhile.
        """
        with self.changing() as holdings:
            record = holdings.record(name)
            part = select(record.shape, ITEMSIZES[record.dtype], key)
            source = _source_for(name, record.dtype, part, tensor)
            # Any other user of the space would find changed bytes: a commit, or a reader that
            # compares them with checksums.
            may_change = not (has_commits or self._summing)
            in_place = may_change or holdings.is_only_named(record)
            # After is_only_named(), which would count this reader too.
            held = holdings.hold((name,))
            if in_place and record.checksums is not None:
                # While the bytes change, no reader may compare them with the old checksums.
                holdings.revise(name, record, record.without_checksums())
        with self._until_read(held):
            after, is_unchanged = record, True
            try:
                memory = source()
                is_unchanged = False
                if in_place:
                    after = self._slices.write_in_place(name, record, part.runs(), memory)
            except BaseException as error:
                # Damage that was found is to be found again.
                if in_place and (is_unchanged or isinstance(error, ChecksumError)):
                    with self.lock:
                        self.holdings.revise(name, record, record)
                raise
            if in_place:
                with self.lock:
                    self.holdings.revise(name, record, after)
            else:
                self._write_copy(name, record, part, memory)
        return (name,)

    def _write_copy(
        self, name: str, record: Record, part: Selection, memory: Memory | Repeated
    ) -> None:
        """Write the tensor with this part changed to other space, and give that the name."""
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
            except (NVMeError, KeyError):  # only then is it certain that no name has the space
                self.holdings.give_back((after,))
                raise

    def damage(self, names: Iterable[str], progress: Callable[[str, int], None]) -> list[Damage]:
        """Read the tensors of these names; call `progress` after each, return the damage."""
        with self.opened() as holdings:
            held = holdings.hold([name for name in names if name in holdings])
        found: list[Damage] = []
        with self._until_read(held):
            # Together is faster. Where that finds damage, each is read again to find which it is.
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


def _source_for(
    name: str, code: str, part: Selection, tensor: Storable | Number
) -> Callable[[], Memory | Repeated]:
    """Return what makes the memory that is written to a part, which may copy `tensor`.

    Raises:
        TypeError, ValueError: the tensor or number does not fit the part.
    """
    if isinstance(tensor, Number):
        element = described(name, tensor, partial(element_of, code))
        return partial(Repeated, element, min(part.run_nbytes, RUN_BYTES))
    if (tensor.code, tensor.shape) != (code, part.shape):
        raise ValueError(
            f"the part of {name!r} is {code} of shape {part.shape}; what is to be put there is "
            f"{tensor.code} of shape {tensor.shape}: give it that dtype and shape, or a number"
        )
    given = tensor
    return lambda: given.gathered().memory
