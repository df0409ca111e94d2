"""`TensorStore`: named tensors on one or several drives, checksummed, and durable when asked.

The class that callers use, made of parts: `NamedTensors` knows what the store holds and moves its
bytes, `Commits` makes it durable, `StoreThreads` runs calls that do not block, `ReadAhead` decides
what to prefetch.
"""

from __future__ import annotations

import importlib
import threading
import warnings
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from copy import deepcopy
from enum import Enum
from functools import partial
from numbers import Number
from types import TracebackType
from typing import Any

from deepnvme.choices import byte_count, chosen
from deepnvme.errors import NVMeError
from deepnvme.memory.arrays import (
    Returns,
    Scattered,
    Storable,
    default_returns,
    describe,
    described,
    empty,
    kind_of,
    nbytes_at_sight,
    storable,
)
from deepnvme.queue.queue import IOQueue
from deepnvme.store.commits import Commits
from deepnvme.store.lane import Request, StoreFuture, each_alone
from deepnvme.store.manifest import Record, check_name
from deepnvme.store.named_tensors import NamedTensors
from deepnvme.store.read_ahead import ReadAhead, streamed
from deepnvme.store.store_threads import StoreThreads
from deepnvme.store.stored_tensor import StoredTensor
from deepnvme.store.tensor_io import Damage
from deepnvme.store.tree import flatten, leaves, unflatten
from deepnvme.volume.member import Access
from deepnvme.volume.volume import Members, Volume

__all__ = ["Checksum", "Durability", "TensorStore", "UncommittedWarning"]

_AHEAD_BYTES = 1 << 30  # of prefetch(), without `most_bytes`


class UncommittedWarning(RuntimeWarning):
    """A durable store was closed, or never closed, with changes that were not committed."""


class Durability(Enum):
    """What `commit()` makes of what was put (docs/decisions/0004)."""

    NONE = "none"  # swap: everything goes at close
    # survives the process; after a power loss the store is at this commit or the one before
    DATA = "data"
    COMMIT = "commit"  # survives power loss


class Checksum(Enum):
    """Whether a put computes checksums of the bytes, and a get compares them."""

    CRC32C = "crc32c"  # one for every MiB
    NONE = "none"  # a get returns whatever the drive returns


class TensorStore:
    """Named tensors in one or several directories.

    Made by `create`, `open` or `swap`; a context manager.

    Any thread may call. `get` finds what was put at once, the next process what was there at the
    last `commit()`.
    """

    _ended = True  # until __init__ has made something to end: see __del__

    def __init__(
        self,
        volume: Volume,
        *,
        durability: Durability,
        checksum: Checksum,
        returns: Returns,
    ) -> None:
        self.durability = durability
        self.checksum = checksum
        self.returns = returns
        self._volume = volume
        self._commits = Commits(volume, synced=durability is Durability.COMMIT)
        self._committing = threading.Lock()
        self._tensors = NamedTensors(volume, self._commits, summing=checksum is Checksum.CRC32C)
        self._ahead = ReadAhead()
        self._threads = StoreThreads()
        self._ended = False

    # --- making and opening -----------------------------------------------------------------------

    @classmethod
    def create(
        cls,
        directories: Members,
        capacity: int | str | None = None,
        *,
        durability: Durability = Durability.COMMIT,
        checksum: Checksum = Checksum.CRC32C,
        returns: Returns | None = None,
        queue: IOQueue | None = None,
    ) -> TensorStore:
        """Make a store of `capacity` bytes in `directories`, one per drive, and reserve them.

        Replacing a tensor needs room for both until two commits later, so a store that is rewritten
        wholly needs three times what it holds.

        Raises:
            OSError: a directory holds one already, is full, or cannot be written.
        """
        kept = _durable(durability)
        summed, given = chosen(Checksum, checksum, "checksum"), _returns(returns)
        with ExitStack() as undo:
            volume = Volume.create(directories, capacity, queue=queue)
            # Undone after the store's own discard, which waits for its threads first.
            undo.callback(volume.discard)
            store = cls(volume, durability=kept, checksum=summed, returns=given)
            undo.callback(store.discard)
            # An empty store has a commit too: `open` takes one without any for a store whose making
            # was interrupted.
            store.commit()
            undo.pop_all()
        return store

    @classmethod
    def swap(
        cls,
        directories: Members,
        capacity: int | str | None = None,
        *,
        checksum: Checksum = Checksum.NONE,
        returns: Returns | None = None,
        queue: IOQueue | None = None,
    ) -> TensorStore:
        """Make a store that lasts until it is closed: no commits, no checksums unless asked for.

        Its files have no names, so a killed program leaves nothing in the directories.
        """
        summed, given = chosen(Checksum, checksum, "checksum"), _returns(returns)
        volume = Volume.temporary(directories, capacity, queue=queue)
        return cls(volume, durability=Durability.NONE, checksum=summed, returns=given)

    @classmethod
    def open(
        cls,
        directories: Members,
        *,
        access: Access = Access.WRITE,
        generation: int | None = None,
        durability: Durability = Durability.COMMIT,
        checksum: Checksum = Checksum.CRC32C,
        returns: Returns | None = None,
        queue: IOQueue | None = None,
    ) -> TensorStore:
        """Open a store at its last commit, or at the one before if `generation` names that.

        With Access.READ nothing is written, calls that would change the store are refused, and any
        number of processes may open it so at once. Meanwhile no process can open it with
        Access.WRITE.

        Raises:
            StoreError: there never was a commit, or its manifest is damaged: which file, and what
                is wrong with it.
            VolumeError: a directory is missing or foreign.
            VolumeLockedError: another process has it open for writing, or for reading where
                `access` is for writing.
        """
        kept = _durable(durability)
        summed, given = chosen(Checksum, checksum, "checksum"), _returns(returns)
        with ExitStack() as undo:
            volume = Volume.open(directories, access=access, queue=queue)
            undo.callback(volume.close)
            store = cls(volume, durability=kept, checksum=summed, returns=given)
            manifests, meant = store._commits.find(generation)
            # Without the lock: no other thread has this store yet.
            store._tensors.holdings.adopt(manifests, meant, volume.reserve)
            undo.pop_all()
        return store

    # --- tensors ----------------------------------------------------------------------------------

    def put(self, name: str, tensor: Any, *, copy: bool = False) -> None:
        """Write a tensor, an array or bytes under `name`, in place of what had that name.

        Returns when it is on the drive.

        Its bytes are written from where they lie. With `copy`, a tensor on a GPU or in strides is
        copied first; without, it is refused, so that the store takes no memory unasked.

        Raises:
            TypeError, ValueError: it would have to be copied, or has no dtype that can be stored;
                nothing has changed.
            VolumeFullError: there is no room; nothing has changed.
            NVMeError: a drive failed; the name still has what it had.
        """
        self.put_many({name: tensor}, copy=copy)

    def put_many(self, tensors: Mapping[str, Any], *, copy: bool = False) -> None:
        """Write several tensors, small ones together: all of them, or none and raise."""
        description = storable if copy else _as_it_lies
        self._put(tensors, tensors, description, self._tensors.holdings.name)

    def get(self, name: str, out: Any = None) -> Any:
        """Return the tensor of that name, in `out` if given, which must have its dtype and shape.

        Raises:
            KeyError: there is none.
            ValueError: `out` has another dtype or shape.
            ChecksumError: the drive returned other bytes than were put.
        """
        with self._tensors.opened():
            ahead = self._ahead.take(name)
            self._read_on()
        # A prefetch that has not begun is cancelled, not waited for: it may be queued behind this
        # call, for the thread that this call runs on.
        if ahead is not None and not ahead.cancel() and out is None:
            return ahead.result()
        return self.get_many((name,), None if out is None else {name: out})[name]

    def get_many(
        self, names: Iterable[str], out: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return several tensors by name, small ones read together.

        Raises:
            KeyError: there is none of a name.
            ValueError: one of `out` was not asked for, or is of another dtype or shape.
            ChecksumError: the drive returned other bytes than were put.
        """
        wanted = _named(names)
        _check_out(out, wanted)
        with self._tensors.opened() as holdings:
            held = holdings.hold(wanted)
        given = out or {}

        def target(name: str, record: Record) -> Any:
            if name not in given:
                return empty(record.dtype, record.shape, self.returns)
            return _fitting(given[name], repr(name), record.dtype, record.shape)

        return self._tensors.read(held, target, held.keys() - given.keys())

    def get_slice(self, name: str) -> StoredTensor:
        """Return a tensor whose parts can be read and written: `store.get_slice(name)[2:5]`.

        Raises:
            KeyError: there is none.
        """
        self.record(name)
        return StoredTensor(self, name)

    def _get_part(self, name: str, key: Any, out: Any) -> Any:
        def target(code: str, shape: tuple[int, ...]) -> Any:
            if out is None:
                return empty(code, shape, self.returns)
            return _fitting(out, f"the part of {name!r}", code, shape)

        return self._tensors.read_part(name, key, target)

    def _put_part(self, name: str, key: Any, tensor: Any, *, copy: bool) -> None:
        if isinstance(tensor, Number):
            given: Storable | Number = tensor
        else:
            given = described(name, tensor, storable if copy else _as_it_lies)
        has_commits = self.durability is not Durability.NONE
        self._wait_for_queued((name,))
        # One at a time: two writes to one page or checksum block would each undo the other. And a
        # commit that began now would hold bytes that change.
        with self._threads.writing(), self._committing:
            changed = self._tensors.write_part(name, key, given, has_commits=has_commits)
            with self._tensors.lock:
                self._forget_ahead(changed)

    def _get_part_async(self, name: str, key: Any, out: Any) -> StoreFuture[Any]:
        return self._reader().read(partial(self._get_part, name, key, out))

    def _put_part_async(self, name: str, key: Any, tensor: Any, *, copy: bool) -> StoreFuture[None]:
        return self._writer().write(partial(self._put_part, name, key, tensor, copy=copy), (name,))

    def delete(self, name: str) -> None:
        """Forget a tensor. Its space is used again when no commit holds it any more.

        Raises:
            KeyError: there is none.
            ValueError: it belongs to a state dict: `delete_state` deletes that.
        """
        self._wait_for_queued((name,))
        with self._tensors.changing() as holdings:
            self._forget_ahead(holdings.unname(name))

    def prefetch(self, names: Iterable[str], *, most_bytes: int | str = _AHEAD_BYTES) -> None:
        """Begin to read tensors into memory; the next `get` of each, without `out`, returns it.

        At most `most_bytes` of them are held at once, or one tensor that is larger. As they are
        got, the store goes on with the others, in this order; a `get` of one that has not begun
        reads it then. A tensor that is never got is held until it is replaced or deleted,
        `forget_prefetched` is called or the store is closed.
        """
        most = byte_count("most_bytes", most_bytes)
        wanted = _named(names)
        self._reader()
        with self._tensors.opened() as holdings:
            self._threads.check_taking()
            self._ahead.want({name: holdings.record(name).nbytes for name in wanted}, most)
            self._read_on()

    def forget_prefetched(self, names: Iterable[str] | None = None) -> None:
        """Let go of tensors that `prefetch` read and no `get` took: of `names`, or of all.

        Those that have not begun are not read.
        """
        with self._tensors.opened():
            self._forget_ahead(names)

    def stream(
        self, names: Iterable[str] | None = None, *, depth: int = 4
    ) -> Iterator[tuple[str, Any]]:
        """Yield names and tensors in the order of `names`, while `depth` more are being read.

        Without `names` these are all, in their order on the drives. Small tensors in a row are read
        together, and count as one.
        """
        for group, future in self._streamed(names, depth):
            try:
                found = future.result()
            except (NVMeError, KeyError):  # one by one below: those before the bad one are yielded
                found = {}
            for name in group:
                yield name, found[name] if name in found else self.get(name)
            del found, future  # not kept while the next ones are waited for

    # --- without blocking -------------------------------------------------------------------------

    def put_async(self, name: str, tensor: Any, *, copy: bool = False) -> StoreFuture[None]:
        """Begin to `put`; `tensor` must not change until the future has ended."""
        check_name(name)  # here: the writer's thread tells names apart
        request = Request(
            StoreFuture(),
            partial(self.put, name, tensor, copy=copy),
            self._put_together,
            name,
            tensor,
        )
        request.nbytes, request.copy = nbytes_at_sight(tensor), copy
        return self._writer().put(request, (name,))

    def get_async(self, name: str, out: Any = None) -> StoreFuture[Any]:
        """Begin to `get`; the result is the tensor."""
        work = partial(self.get, name, out)
        request = Request(StoreFuture(), work, self._get_together, name, out)
        threads = self._reader()
        with self._tensors.opened() as holdings:
            request.nbytes = holdings.nbytes(name)
            if self._ahead.knows(name):
                # `get` takes what was prefetched; a get of several reads it again.
                request.together = each_alone
        return threads.get(request)

    def put_many_async(
        self, tensors: Mapping[str, Any], *, copy: bool = False
    ) -> StoreFuture[None]:
        """Begin to `put_many`; no tensor must change until the future has ended."""
        given = dict(tensors)  # the mapping may
        return self._writer().write(lambda: self.put_many(given, copy=copy), given)

    def get_many_async(
        self, names: Iterable[str], out: Mapping[str, Any] | None = None
    ) -> StoreFuture[dict[str, Any]]:
        """Begin to `get_many`."""
        wanted = _named(names)
        _check_out(out, wanted)
        return self._reader().read(lambda: self.get_many(wanted, out))

    def put_state_async(self, name: str, state: Any) -> StoreFuture[None]:
        """Begin to `put_state`; nothing in it must change until the future has ended."""
        return self._writer().write(lambda: self.put_state(name, state), (name,))

    def get_state_async(self, name: str) -> StoreFuture[Any]:
        """Begin to `get_state`."""
        return self._reader().read(lambda: self.get_state(name))

    def delete_async(self, name: str) -> StoreFuture[None]:
        """Begin to `delete`, after the puts that were begun before."""
        return self._writer().write(lambda: self.delete(name), (name,))

    def delete_state_async(self, name: str) -> StoreFuture[None]:
        """Begin to `delete_state`, after the puts that were begun before."""
        return self._writer().write(lambda: self.delete_state(name), (name,))

    def verify_async(self) -> StoreFuture[tuple[Damage, ...]]:
        """Begin to `verify`."""
        return self._reader().read(self.verify)

    def commit_async(self) -> StoreFuture[int]:
        """Begin to `commit` what is put by now, puts that have begun included."""
        # The writes are collected now: a put that begins later belongs to the next commit.
        return self._writer().write(partial(self._commit, self._threads.writes()))

    async def stream_async(
        self, names: Iterable[str] | None = None, *, depth: int = 4
    ) -> AsyncIterator[tuple[str, Any]]:
        """As `stream`, on the running event loop."""
        for group, future in self._streamed(names, depth):
            try:
                found = await future
            except (NVMeError, KeyError):
                found = {}
            for name in group:
                yield name, found[name] if name in found else await self.get_async(name)
            del found, future

    # --- state dicts ------------------------------------------------------------------------------

    def put_state(self, name: str, state: Any) -> None:
        """Put a state dict: nested dicts, lists and plain values, with tensors as leaves.

        Replaces one of that name.

        Tensors on a GPU or in strides are copied one by one as they are written.
        """
        # Refuses a structure, keys and dtypes that cannot be kept, before a byte is written.
        structure, found = flatten(state)
        tensors = {f"{check_name(name)}/{leaf}": tensor for leaf, tensor in found.items()}
        self._put(
            tensors, (name,), storable, partial(self._tensors.holdings.name_state, name, structure)
        )

    def get_state(self, name: str) -> Any:
        """Return a state dict as it was put.

        Raises:
            KeyError: there is none of that name.
            ChecksumError: the drive returned other bytes than were put.
        """
        with self._tensors.opened() as holdings:
            structure, kinds, held = holdings.hold_state(name)
        found = self._tensors.read(
            held, lambda leaf, record: empty(record.dtype, record.shape, kinds[leaf]), held
        )
        return unflatten(
            structure, {leaf.removeprefix(f"{name}/"): tensor for leaf, tensor in found.items()}
        )

    def put_tree(self, name: str, structure: Any) -> None:
        """Make a state dict of tensors that the store has already, named `name`/leaf.

        `structure` comes from the `trees` of another store.

        Raises:
            ManifestError: it is not the structure of a state dict.
            KeyError: a tensor of it is missing.
        """
        leaves(structure)  # refuses anything else before it is copied
        self._wait_for_queued((name,))
        with self._tensors.changing() as holdings:
            # A copy: the caller may change its own while a commit encodes this one.
            holdings.name_tree(check_name(name), deepcopy(structure))

    @property
    def trees(self) -> Mapping[str, Any]:
        """The structures of the state dicts, by name, for `put_tree` of another store."""
        with self._tensors.looking() as holdings:
            return holdings.trees

    def delete_state(self, name: str) -> None:
        """Forget a state dict and its tensors.

        Raises:
            KeyError: there is none of that name.
        """
        self._wait_for_queued((name,))
        with self._tensors.changing() as holdings:
            self._forget_ahead(holdings.unname_state(name))

    @property
    def states(self) -> tuple[str, ...]:
        """The names of the state dicts."""
        return tuple(self.trees)

    # --- what is there ----------------------------------------------------------------------------

    def record(self, name: str) -> Record:
        """Return a tensor's dtype, shape and place.

        Raises:
            KeyError: there is none.
        """
        with self._tensors.looking() as holdings:
            return holdings.record(name)

    def __contains__(self, name: object) -> bool:
        """Tell whether a tensor has that name."""
        with self._tensors.looking() as holdings:
            return name in holdings

    def __iter__(self) -> Iterator[str]:
        """Yield the names there are now."""
        with self._tensors.looking() as holdings:
            # Of a tuple: the caller iterates without the lock.
            return iter(holdings.names)

    def __len__(self) -> int:
        """Count the tensors."""
        # Without the lock: the length of a dict is one step under the GIL.
        return len(self._tensors.holdings)

    def __getitem__(self, name: str) -> Any:
        """As `get`."""
        return self.get(name)

    @property
    def generation(self) -> int:
        """The number of the last commit."""
        return self._commits.generation

    @property
    def volume(self) -> Volume:
        """The volume that the bytes are in."""
        return self._volume

    def verify(
        self, progress: Callable[[str, int], None] = lambda _name, _nbytes: None
    ) -> tuple[Damage, ...]:
        """Read every tensor, compare it with its checksums, and return the damage.

        Calls `progress` with name and bytes after each. A tensor that a state dict lacks is damage
        as well.
        """
        with self._tensors.opened() as holdings:
            missing, groups = holdings.missing(), holdings.groups(holdings.names)
        lost = [
            Damage(name, 0, 0, "it belongs to a state dict, and is missing") for name in missing
        ]
        return (
            *lost,
            *(damage for group in groups for damage in self._tensors.damage(group, progress)),
        )

    # --- durability -------------------------------------------------------------------------------

    def commit(self) -> int:
        """Make what is put by now the store's content for later processes; return its generation.

        Waits for puts that have begun; one that fails is not part of the commit. Ctrl-C ends the
        wait, not the commit, which is still made: closing and the next commit wait for it.

        Raises:
            PoisonedError: an fsync failed, now or before, so that nothing is certain to be durable;
                open the store again.
            NVMeError: this commit failed, and the store on the drives is what it was before.
        """
        self._tensors.io.refuse_if_forked()
        if self._threads.is_current:
            return self._commit(self._threads.writes())
        try:
            # On the thread that writes: no handler of a signal raises there.
            future = self.commit_async()
        except RuntimeError:  # the interpreter ends, and its threads have ended
            return self._commit(self._threads.writes())
        return future.result()

    def _commit(self, before: Iterable[Future[Any] | threading.Lock]) -> int:
        if self.durability is Durability.NONE:
            raise ValueError(
                "a swap store is gone when it is closed, so it has no commits: to keep tensors, "
                "make the store with TensorStore.create()"
            )
        # Before the lock below, which a put of a part takes after it has begun its write.
        self._threads.wait_for(before)
        with self._committing:
            # Only now: another commit may have been made while this one waited.
            last = self._commits.generation
            # The content is fixed with the lock held, and written without it: puts go on.
            with self._tensors.changing() as holdings:
                content = holdings.begin_commit()
            try:
                self._commits.make(content.tensors, content.trees)
            finally:
                with self._tensors.lock:
                    if self._commits.generation > last:
                        holdings.committed(last + 1, content)
                    elif not self._commits.poisoned:
                        # Else the commit may be on the drives, and keeps its space.
                        holdings.not_committed(content)
            return last + 1

    # --- the end ----------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether `close()` was called."""
        return self._threads.ending

    def close(self) -> None:
        """Wait for what is under way and let go of the drives. Drops what was not committed.

        Again: does nothing.
        """
        if self._end(self._volume.close):
            self._tell_of_loss("closed")

    async def close_async(self) -> None:
        """As `close`, in a thread, so that the event loop goes on."""
        import asyncio  # a third of this package's import time; a coroutine has imported it

        if await asyncio.to_thread(self._end, self._volume.close):
            self._tell_of_loss("closed")

    def discard(self) -> None:
        """Close, and remove the store's files: what was made is not wanted after all."""
        self._tensors.check_access()
        self._end(self._remove)

    def _remove(self) -> None:
        self._commits.remove()
        self._volume.discard()

    def _end(self, let_go: Callable[[], None]) -> bool:
        """Wait for what is under way, then let go of the drives; False if done before."""
        if self._tensors.io.is_forked:  # threads, locks and files belong to the parent
            self._threads.ending = True
            self._volume.close()
            return False
        if self._threads.is_current:  # a callback closes the store: it would wait for itself
            # Not a daemon, as its parent may be: the program's end waits for it.
            threading.Thread(
                target=self._end, args=(let_go,), name="deepnvme-close", daemon=False
            ).start()
            return False
        # In this order: nothing more begins, what has begun ends, and the drives go last.
        self._threads.take_no_more()
        with self._tensors.lock:
            self._ahead.forget()
        self._threads.join()
        # Else a manifest could be renamed after another process has opened the store.
        with self._committing:
            if self._ended:
                return False
            # Calls that are past the checks above find it closed here.
            with self._tensors.lock:
                self._tensors.holdings.closed = True
            self._tensors.io.close()
            let_go()
            self._ended = True  # last: interrupted before, it is done again
        return True

    def __del__(self) -> None:
        """Warn of changes that are lost, where the store was not closed."""
        if not self._ended and not self.closed and not self._tensors.io.is_forked:
            self._tell_of_loss("forgotten without close()")

    def _tell_of_loss(self, what: str) -> None:
        if (
            self._tensors.holdings.changed
            and self.durability is not Durability.NONE
            and not self._commits.poisoned
        ):
            where = self._volume.directories[0]
            message = (
                f"the store in {where} was {what} with changes that were not committed; they are "
                "gone"
            )
            # At the line that closes the store.
            warnings.warn(message, UncommittedWarning, stacklevel=3)

    def __enter__(self) -> TensorStore:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close."""
        # Not close(): from here, the warning is at the line of the `with`.
        if self._end(self._volume.close):
            self._tell_of_loss("closed")

    async def __aenter__(self) -> TensorStore:
        """Return itself."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close without stopping the event loop."""
        import asyncio  # as in close_async

        # Not close_async(): as in __exit__.
        if await asyncio.to_thread(self._end, self._volume.close):
            self._tell_of_loss("closed")

    def __reduce__(self) -> str:
        """Refuse to be pickled."""
        raise TypeError(
            "a store is not pickled: open it by its directories in the other process, with "
            "access=Access.READ in both"
        )

    def __repr__(self) -> str:
        """Show where it is, and what it holds."""
        state = (
            "closed"
            if self._tensors.holdings.closed
            else f"{len(self)} tensors, generation {self.generation}"
        )
        return f"TensorStore({str(self._volume.directories[0])!r}, {state})"

    def _put_together(self, group: Sequence[Request]) -> Sequence[None]:
        """Carry out several requests of put_async as one."""
        given = {request.name: request.tensor for request in group}
        # Only these are described here, as `copy` is asked for each; the copies themselves are made
        # when they are written.
        copied = {request.name: storable(request.tensor) for request in group if request.copy}
        self._put({**given, **copied}, given, _as_described, self._tensors.holdings.name)
        return (None,) * len(group)

    def _get_together(self, group: Sequence[Request]) -> Sequence[Any]:
        """Carry out several requests of get_async as one."""
        out = {request.name: request.tensor for request in group if request.tensor is not None}
        found = self.get_many([request.name for request in group], out)
        return [found[request.name] for request in group]

    # --- parts ------------------------------------------------------------------------------------

    def _put(
        self,
        tensors: Mapping[str, Any],
        names: Iterable[str],
        description: Callable[[Any], Storable],
        name: Callable[[Mapping[str, Record]], Iterable[str]],
    ) -> None:
        """Write tensors, let `name` name them, and forget what was prefetched under these names.

        Queued writes to `names` come first.
        """
        if not isinstance(tensors, Mapping):
            raise TypeError(f"expected tensors by name, as a mapping; got {type(tensors).__name__}")
        self._wait_for_queued(names)
        with self._threads.writing():
            self._tensors.write(
                tensors, description, lambda records: self._forget_ahead(name(records))
            )

    def _wait_for_queued(self, names: Iterable[str]) -> None:
        self._tensors.io.refuse_if_forked()
        self._threads.wait_for_queued(names)

    def _forget_ahead(self, names: Iterable[str] | None) -> None:
        """Called with the lock held."""
        self._ahead.forget(names)
        self._read_on()

    def _read_on(self) -> None:
        """Prefetch as much as there is room for. Called with the lock held."""
        # get_many() takes that lock: it runs on another thread, when this one has released it.
        self._ahead.begin(lambda name: self._threads.read(lambda: self.get_many((name,))[name]))

    def _streamed(
        self, names: Iterable[str] | None, depth: int
    ) -> Iterator[tuple[Sequence[str], StoreFuture[dict[str, Any]]]]:
        given = None if names is None else _listed(names)
        with self._tensors.opened() as holdings:
            groups = list(holdings.groups(holdings.in_order() if given is None else given))
        return streamed(groups, self.get_many_async, depth)

    def _reader(self) -> StoreThreads:
        """Return the threads, for a read. Imports torch here where they will need it: Ctrl-C could
        not stop an import on their threads.
        """
        self._tensors.io.refuse_if_forked()
        if self.returns is Returns.TORCH:
            with suppress(ImportError):  # the read raises it
                importlib.import_module("torch")
        return self._threads

    def _writer(self) -> StoreThreads:
        self._tensors.check_access()
        self._tensors.io.refuse_if_forked()
        return self._threads


def _as_it_lies(tensor: Any) -> Storable:
    """Return what `describe` does; its errors name `copy`, where that helps."""
    try:
        return describe(tensor)
    except (TypeError, ValueError) as refusal:
        try:
            storable(tensor)
        except (TypeError, ValueError):
            raise refusal from None
        raise type(refusal)(f"{refusal}. Or let the store copy it: copy=True") from None


def _as_described(tensor: Any) -> Storable:
    """Return what is stored of a tensor, as `describe` does, or a Scattered as it is."""
    return tensor if isinstance(tensor, Scattered) else _as_it_lies(tensor)


def _durable(durability: Durability) -> Durability:
    kept = chosen(Durability, durability, "durability")
    if kept is Durability.NONE:
        raise ValueError("Durability.NONE is for swap: make such a store with TensorStore.swap()")
    return kept


def _returns(returns: Returns | None) -> Returns:
    return default_returns() if returns is None else chosen(Returns, returns, "returns")


def _named(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(_listed(names)))


def _listed(names: Iterable[str]) -> list[str]:
    if isinstance(names, str):
        raise TypeError(f"expected names, such as [{names!r}]; got the text {names!r}")
    return list(names)


def _fitting(out: Any, what: str, code: str, shape: tuple[int, ...]) -> Any:
    """Return `out`, which `what` is to be read into, if it has this dtype and shape."""
    out_code, out_shape = kind_of(out)
    if (out_code, out_shape) != (code, shape):
        raise ValueError(
            f"{what} is {code} of shape {shape}; `out` for it is {out_code} of shape {out_shape}. "
            "Give one of that dtype and shape, or none"
        )
    return out


def _check_out(out: Mapping[str, Any] | None, wanted: Iterable[str]) -> None:
    others = (out or {}).keys() - set(wanted)
    if others:
        raise ValueError(
            f"`out` has {min(others)!r}, which is not asked for: name it too, or leave it out of "
            "`out`"
        )
