"""`TensorStore`: named tensors on one or several drives, checksummed, and durable when asked.

Owns names and generations, and when space may be used again: never while a reader or one of the last two commits needs
it (decision 0004). Where bytes lie is the Volume's business, what a manifest looks like `manifest`'s.
"""

from __future__ import annotations

import errno
import os
import threading
import warnings
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, TypeVar

from deepnvme.arrays import Returns, Storable, default_returns, describe, empty, kind_of, storable
from deepnvme.buffers import Memory, memory_of
from deepnvme.errors import ClosedError, NVMeError, PoisonedError, StoreError
from deepnvme.future import awaited
from deepnvme.manifest import Manifest, ManifestError, Record, check_name, encode, parse
from deepnvme.member import Access
from deepnvme.pipeline import once_there_is_room
from deepnvme.queue import IOQueue, Sync
from deepnvme.tensor_io import Damage, TensorIO
from deepnvme.tree import flatten, leaves, unflatten
from deepnvme.volume import Member, Volume

__all__ = ["Checksum", "Durability", "StoreFuture", "TensorStore", "UncommittedWarning", "sync_directory"]

_T = TypeVar("_T")
_Directories = Sequence["str | os.PathLike[str] | Member"]
_READERS = 4
_THREADS = "deepnvme-store"
_SLOTS = ("manifest.0", "manifest.1")
_DRAFT = "manifest.new"
_AHEAD_BYTES = 1 << 30


class UncommittedWarning(RuntimeWarning):
    """A durable store was closed, or forgotten without being closed, with changes that were not committed."""


class Durability(Enum):
    """What `commit()` makes of what was put (docs/decisions/0004)."""

    NONE = "none"  # swap: everything goes at close
    DATA = "data"  # survives the process; after a power loss the store is at this commit or the one before
    COMMIT = "commit"  # survives power loss


class Checksum(Enum):
    """Whether bytes are summed when they are put, and compared when they are got."""

    CRC32C = "crc32c"
    NONE = "none"


class StoreFuture(Future[_T]):
    """The result of an operation of a store; can be awaited."""

    def __await__(self) -> Generator[Any, None, _T]:
        """Wait on the running event loop."""
        return awaited(self)


@dataclass(eq=False)
class _Stored:
    """A tensor's place on the drives, and who needs it."""

    record: Record
    named: bool = False
    readers: int = 0
    commits: int = 0  # of the last two, those that hold it

    @property
    def needed(self) -> bool:
        return self.named or self.readers > 0 or self.commits > 0


class TensorStore:
    """Named tensors in one or several directories. Made by `create`, `open` or `swap`; a context manager.

    Any thread may call. What was put is there for `get` at once, and for the next process after `commit()`.
    """

    _closing = True  # until there is something to close

    def __init__(
        self,
        volume: Volume,
        *,
        durability: Durability,
        checksum: Checksum,
        returns: Returns | None = None,
    ) -> None:
        self.durability = durability
        self.checksum = checksum
        self.returns = default_returns() if returns is None else returns
        self._volume = volume
        self._io = TensorIO(volume, summing=checksum is Checksum.CRC32C)
        self._lock = threading.Lock()
        self._committing = threading.Lock()
        self._tensors: dict[str, _Stored] = {}
        self._trees: dict[str, Any] = {}
        self._generation = 0
        self._in_doubt = False  # a commit is on the drives that is not yet in this object
        self._last_is_durable = False  # whoever made it may have synced less
        self._held: dict[int, tuple[_Stored, ...]] = {}
        self._changed = False
        self._poison: NVMeError | None = None
        self._closed = False
        self._ended = False
        self._readers: ThreadPoolExecutor | None = None
        self._writer: ThreadPoolExecutor | None = None  # one thread: of two puts of a name the later one wins
        self._writing: set[Future[Any]] = set()  # puts that have begun
        self._prefetched: dict[str, tuple[_Stored, StoreFuture[Any]]] = {}
        self._to_prefetch: dict[str, None] = {}  # in this order, when there is room
        self._ahead_bytes = 0  # of what is read ahead, and being read
        self._most_ahead = 0
        self._owner = os.getpid()
        self._closing = False

    # --- making and opening --------------------------------------------------------------------------------------

    @classmethod
    def create(
        cls,
        directories: _Directories,
        capacity: int | None = None,
        *,
        durability: Durability = Durability.COMMIT,
        checksum: Checksum = Checksum.CRC32C,
        returns: Returns | None = None,
        queue: IOQueue | None = None,
    ) -> TensorStore:
        """Make a store of `capacity` bytes in `directories`, one per drive, and reserve them.

        Replacing a tensor needs room for both until two commits later, so a store that is rewritten wholly needs
        three times what it holds.

        Raises:
            OSError: a directory holds one already, is full, or cannot be written.
        """
        if durability is Durability.NONE:
            raise ValueError("a store without durability is made by TensorStore.swap()")
        volume = Volume.create(directories, capacity, queue=queue)
        try:
            store = cls(volume, durability=durability, checksum=checksum, returns=returns)
        except BaseException:
            volume.discard()
            raise
        try:
            store.commit()
        except BaseException:
            store.discard()
            raise
        return store

    @classmethod
    def swap(
        cls,
        directories: _Directories,
        capacity: int | None = None,
        *,
        checksum: Checksum = Checksum.NONE,
        returns: Returns | None = None,
        queue: IOQueue | None = None,
    ) -> TensorStore:
        """Make a store that lasts until it is closed: no commits, and no checksums unless asked for."""
        volume = Volume.temporary(directories, capacity, queue=queue)
        return cls(volume, durability=Durability.NONE, checksum=checksum, returns=returns)

    @classmethod
    def open(
        cls,
        directories: _Directories,
        *,
        access: Access = Access.WRITE,
        generation: int | None = None,
        durability: Durability = Durability.COMMIT,
        checksum: Checksum = Checksum.CRC32C,
        returns: Returns | None = None,
        queue: IOQueue | None = None,
    ) -> TensorStore:
        """Open a store at its last commit, or at the commit before it where `generation` names that.

        With Access.READ nothing is written, and any number of processes may have it open so at once; whatever would
        change the store is refused, and meanwhile so is whoever opens it with Access.WRITE.

        Raises:
            StoreError: there never was a commit, or its manifest is damaged: which file, and what is wrong with it.
            VolumeError: a directory is missing or foreign.
            VolumeLockedError: another process has it open for writing, or for reading, and this is to write.
        """
        if durability is Durability.NONE:
            raise ValueError("a store without durability is made by TensorStore.swap()")
        volume = Volume.open(directories, access=access, queue=queue)
        try:
            store = cls(volume, durability=durability, checksum=checksum, returns=returns)
            store._restore(generation)
        except BaseException:
            volume.close()
            raise
        return store

    # --- tensors -------------------------------------------------------------------------------------------------

    def put(self, name: str, tensor: Any) -> None:
        """Write a tensor, an array or bytes under `name`, in place of what had it. Returns when it is on the drive.

        Its bytes are written from where they lie. A tensor that would have to be copied first (it is on a GPU, or not
        contiguous) is refused, so that no memory is taken unseen; `put_state` makes such copies.

        Raises:
            TypeError, ValueError: it would have to be copied, or has no dtype that can be stored; nothing has changed.
            VolumeFullError: there is no room; nothing has changed.
            NVMeError: a drive failed; the name still has what it had.
        """
        self.put_many({name: tensor})

    def put_many(self, tensors: Mapping[str, Any]) -> None:
        """Write several tensors, small ones together; all of them or, where that fails, none."""
        with self._putting(tensors):
            pass

    def get(self, name: str, out: Any = None) -> Any:
        """Return the tensor of that name, read into `out` where given, which must have its type and shape.

        Raises:
            KeyError: there is none.
            ChecksumError: the drive returned other bytes than were put.
        """
        if out is None:
            ahead = self._take_prefetched(name)
            # What has not begun is not waited for: it may be queued behind us, for the thread that this runs in.
            if ahead is not None and not ahead.cancel():
                return ahead.result()
        return self.get_many((name,), None if out is None else {name: out})[name]

    def get_many(self, names: Iterable[str], out: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return several tensors by name, small ones read together."""
        wanted = list(dict.fromkeys(names))
        with self._reading(wanted) as stored:
            results = dict.fromkeys(wanted)

            def target(name: str) -> Memory:
                results[name] = self._target(name, stored[name].record, out)
                return memory_of(results[name], writable=True)

            self._io.read({name: each.record for name, each in stored.items()}, target)
        return results

    def delete(self, name: str) -> None:
        """Forget a tensor. Its space is used again when no commit holds it any more.

        Raises:
            KeyError: there is none.
        """
        self._check_writable()
        with self._lock:
            self._unname(name)
            self._changed = True

    def prefetch(self, names: Iterable[str], *, most_bytes: int = _AHEAD_BYTES) -> None:
        """Begin to read tensors; the next `get` of each, without `out`, finds it read or being read.

        At most `most_bytes` (1 GiB) of them are held at once, or one that is larger: the rest is begun in this order as
        those are got. A `get` of what was not begun reads it then.
        """
        if most_bytes < 0:
            raise ValueError(f"most_bytes must not be negative, got {most_bytes}")
        wanted = list(names)
        with self._lock:
            self._check_taking()
            for name in wanted:
                self._stored(name)
            self._most_ahead = most_bytes
            self._to_prefetch.update(dict.fromkeys(name for name in wanted if name not in self._prefetched))
            self._prefetch_more()

    def _prefetch_more(self) -> None:
        """Begin what there is room for. Called with the lock held."""
        while self._to_prefetch and not self._closing:
            name = next(iter(self._to_prefetch))
            stored = self._tensors.get(name)
            nbytes = 0 if stored is None else stored.record.nbytes
            if self._prefetched and self._ahead_bytes + nbytes > self._most_ahead:
                return
            del self._to_prefetch[name]
            if stored is not None:
                self._prefetched[name] = (stored, self._begin_reading(partial(self._read_one, name)))
                self._ahead_bytes += nbytes

    def _forget_prefetched(self, name: str) -> tuple[_Stored, StoreFuture[Any]] | None:
        """Let what was read ahead be somebody else's, and begin with more. Called with the lock held."""
        if not self._prefetched and not self._to_prefetch:
            return None
        self._to_prefetch.pop(name, None)
        found = self._prefetched.pop(name, None)
        if found is not None:
            self._ahead_bytes -= found[0].record.nbytes
        self._prefetch_more()
        return found

    def stream(self, names: Iterable[str] | None = None, *, depth: int = 4) -> Iterator[tuple[str, Any]]:
        """Yield names and tensors in the order of `names` (all, as they lie, without it), `depth` of them ahead."""
        waiting: deque[tuple[str, StoreFuture[Any]]] = deque()
        for name in self._order(names, depth):
            waiting.append((name, self.get_async(name)))
            if len(waiting) > depth:
                ready, future = waiting.popleft()
                yield ready, future.result()
        for ready, future in waiting:
            yield ready, future.result()

    # --- without blocking ----------------------------------------------------------------------------------------

    def put_async(self, name: str, tensor: Any) -> StoreFuture[None]:
        """Begin to put; `tensor` must not change until the future has ended."""
        return self._start_writing(lambda: self.put(name, tensor))

    def get_async(self, name: str, out: Any = None) -> StoreFuture[Any]:
        """Begin to get."""
        return self._start_reading(lambda: self.get(name, out))

    def put_many_async(self, tensors: Mapping[str, Any]) -> StoreFuture[None]:
        """Begin to put several."""
        return self._start_writing(lambda: self.put_many(tensors))

    def get_many_async(self, names: Iterable[str], out: Mapping[str, Any] | None = None) -> StoreFuture[dict[str, Any]]:
        """Begin to get several."""
        wanted = list(names)
        return self._start_reading(lambda: self.get_many(wanted, out))

    def put_state_async(self, name: str, state: Any) -> StoreFuture[None]:
        """Begin to put a state dict; nothing in it must change until the future has ended."""
        return self._start_writing(lambda: self.put_state(name, state))

    def get_state_async(self, name: str) -> StoreFuture[Any]:
        """Begin to get a state dict."""
        return self._start_reading(lambda: self.get_state(name))

    def commit_async(self) -> StoreFuture[int]:
        """Begin to commit what is put by now, puts that have begun included."""
        with self._lock:
            before = set(self._writing)
        return self._start_writing(partial(self._commit, before))

    async def stream_async(
        self, names: Iterable[str] | None = None, *, depth: int = 4
    ) -> AsyncIterator[tuple[str, Any]]:
        """As `stream`, on the running event loop."""
        waiting: deque[tuple[str, StoreFuture[Any]]] = deque()
        for name in self._order(names, depth):
            waiting.append((name, self.get_async(name)))
            if len(waiting) > depth:
                ready, future = waiting.popleft()
                yield ready, await future
        for ready, future in waiting:
            yield ready, await future

    # --- state dicts ---------------------------------------------------------------------------------------------

    def put_state(self, name: str, state: Any) -> None:
        """Put a state dict: nested dicts, lists and plain values, with tensors as leaves. Replaces one of that name.

        Tensors on a GPU, or whose bytes are not one piece of memory, are copied one by one as they are written.
        """
        structure, found = flatten(state)
        tensors = {f"{check_name(name)}/{leaf}": tensor for leaf, tensor in found.items()}
        with self._putting(tensors, storable):
            for old in self._leaves(name) if name in self._trees else ():
                if old in self._tensors and old not in tensors:
                    self._unname(old)
            self._trees[name] = structure

    def get_state(self, name: str) -> Any:
        """Return a state dict as it was put.

        Raises:
            KeyError: there is none of that name.
        """
        with self._lock:
            if name not in self._trees:
                raise KeyError(f"no state dict {name!r}; there are: {', '.join(map(repr, self._trees)) or 'none'}")
            structure = self._trees[name]
            kinds = self._leaves(name)
            stored = self._hold(kinds)
        with self._until_read(stored):
            tensors = {}

            def target(leaf: str) -> Memory:
                record = stored[leaf].record
                tensors[leaf] = empty(record.dtype, record.shape, kinds[leaf])
                return memory_of(tensors[leaf], writable=True)

            self._io.read({leaf: each.record for leaf, each in stored.items()}, target)
        return unflatten(structure, {leaf.removeprefix(f"{name}/"): tensor for leaf, tensor in tensors.items()})

    def put_tree(self, name: str, structure: Any) -> None:
        """Make a state dict of tensors that are there already, under `name`, a slash and the name of the leaf.

        `structure` is one of the `trees` of another store.

        Raises:
            ManifestError: it is not the structure of a state dict.
            KeyError: a tensor of it is missing.
        """
        self._check_writable()
        wanted = [f"{check_name(name)}/{leaf}" for leaf in leaves(structure)]
        with self._lock:
            for leaf in wanted:
                self._stored(leaf)
            self._trees[name] = structure
            self._changed = True

    @property
    def trees(self) -> Mapping[str, Any]:
        """The structures of the state dicts (deepnvme.tree), by name."""
        with self._lock:
            return MappingProxyType(dict(self._trees))

    def delete_state(self, name: str) -> None:
        """Forget a state dict and its tensors.

        Raises:
            KeyError: there is none of that name.
        """
        self._check_writable()
        with self._lock:
            if name not in self._trees:
                raise KeyError(f"no state dict {name!r}; there are: {', '.join(map(repr, self._trees)) or 'none'}")
            for leaf in self._leaves(name).keys() & self._tensors.keys():
                self._unname(leaf)
            del self._trees[name]
            self._changed = True

    @property
    def states(self) -> tuple[str, ...]:
        """The names of the state dicts."""
        with self._lock:
            return tuple(self._trees)

    # --- what is there -------------------------------------------------------------------------------------------

    def record(self, name: str) -> Record:
        """Return a tensor's type, shape and place."""
        with self._lock:
            return self._stored(name).record

    def __contains__(self, name: object) -> bool:
        """Tell whether a tensor has that name."""
        with self._lock:
            return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        """Yield the names there are now."""
        with self._lock:
            return iter(tuple(self._tensors))

    def __len__(self) -> int:
        """Count the tensors."""
        return len(self._tensors)

    def __getitem__(self, name: str) -> Any:
        """As `get`."""
        return self.get(name)

    @property
    def generation(self) -> int:
        """The number of the last commit."""
        return self._generation

    @property
    def volume(self) -> Volume:
        """Where the bytes are."""
        return self._volume

    def verify(self, progress: Callable[[str, int], None] = lambda _name, _nbytes: None) -> tuple[Damage, ...]:
        """Read every tensor and compare it with its checksums; return what is wrong. Tells `progress` of each."""
        found: list[Damage] = []
        for name in self:
            with self._lock:
                held = self._hold({name} & self._tensors.keys())  # it may be deleted by now
            with self._until_read(held):
                for stored in held.values():
                    found += self._io.damage(name, stored.record)
                    progress(name, stored.record.nbytes)
        return tuple(found)

    # --- durability ----------------------------------------------------------------------------------------------

    def commit(self) -> int:
        """Make what is put by now the store's content, whole, for every later process; return its generation.

        Puts that have begun are waited for; one that fails is not part of the commit, as nothing of it is there.

        Raises:
            PoisonedError: an earlier fsync failed, so that nothing can be promised any more; open the store again.
            NVMeError: this one failed; the store on the drives is still what it was, or the store is now poisoned.
        """
        with self._lock:
            before = set(self._writing)
        return self._commit(before)

    def _commit(self, before: Iterable[Future[Any]]) -> int:
        wait(before)
        if self.durability is Durability.NONE:
            raise ValueError("a swap store has no commits: use TensorStore.create()")
        self._check_access()
        with self._committing:
            self._check_writable()
            with self._lock:
                stored = dict(self._tensors)
                trees = dict(self._trees)
                self._changed = False
                for each in stored.values():
                    each.commits += 1
            generation = self._generation + 1
            try:
                self._poisoning("fdatasync of the tensors", self._volume.sync)
                if self._generation and not self._last_is_durable:
                    self._poisoning("fsync of the commit before", self._sync_last_commit)
                records = {name: each.record for name, each in stored.items()}
                self._write_manifest(
                    generation, encode(Manifest(self._volume.uuid, generation, MappingProxyType(records), trees))
                )
            except BaseException:
                with self._lock:
                    self._changed = True
                    if self._in_doubt and self._poison is None:
                        self._poison = self._poisoned("replacing the manifest", InterruptedError("interrupted"))
                    if self._poison is None:  # else it may be on the drives, and keeps its space
                        self._let_go(stored.values())
                raise
            with self._lock:
                self._last_is_durable = self.durability is Durability.COMMIT
                self._in_doubt = False
                self._generation = generation
                self._held[generation] = tuple(stored.values())
                self._let_go(self._held.pop(generation - 2, ()))
            return generation

    def _write_manifest(self, generation: int, content: bytes) -> None:
        folder, queue = self._volume.directories[0], self._volume.queues[0]
        draft, place = folder / _DRAFT, folder / _SLOTS[generation % 2]
        synced = self.durability is Durability.COMMIT
        try:
            with queue.open(draft, "w", permissions=0o600) as file:
                once_there_is_room(lambda: file.pwrite(content)).result()
                if synced:
                    self._poisoning(
                        "fsync of the manifest", lambda: once_there_is_room(lambda: file.sync(Sync.ALL)).result()
                    )
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
        self._in_doubt = True
        self._poisoning("renaming the manifest", lambda: draft.replace(place))
        if synced:
            self._poisoning("fsync of the directory", lambda: sync_directory(folder))

    def _sync_last_commit(self) -> None:
        """Make durable what was only renamed: no power loss may bring back older commits, whose space is used again."""
        folder = self._volume.directories[0]
        _sync(folder / _SLOTS[self._generation % 2])
        sync_directory(folder)

    def _poisoning(self, what: str, step: Callable[[], object]) -> None:
        """Do what leaves the drives in doubt when it fails."""
        try:
            step()
        except BaseException as error:  # after Ctrl-C, too: what was interrupted may have failed, and is told once
            self._poison = self._poisoned(what, error)
            if not isinstance(error, OSError):
                raise
            self._check_writable()

    def _poisoned(self, what: str, error: BaseException) -> PoisonedError:
        return PoisonedError(
            getattr(error, "errno", None) or errno.EINTR,
            f"{what} failed ({str(error) or type(error).__name__}): what was put since commit {self._generation} "
            "may be lost, and no later sync would tell. Tensors can still be got; open the store again to go on "
            "from its last commit",
            path=str(self._volume.directories[0]),
        )

    def _restore(self, generation: int | None) -> None:
        folder = self._volume.directories[0]
        whole: dict[int, Manifest] = {}
        broken: list[str] = []
        for slot in _SLOTS:
            place = folder / slot
            try:
                content = place.read_bytes()
            except FileNotFoundError:
                continue
            try:
                manifest = parse(content, volume=self._volume.uuid, capacities=self._volume.capacities)
            except ManifestError as problem:
                broken.append(f"{place}: {problem.strerror}")
            else:
                whole[manifest.generation] = manifest
        chosen = max(whole, default=None) if generation is None else generation
        available = f"; generations that can be opened: {', '.join(map(str, sorted(whole))) or 'none'}"
        if generation is None and broken:
            raise StoreError(errno.EBADMSG, f"a manifest is damaged: {'; '.join(broken)}{available}", path=str(folder))
        if chosen is None:
            raise StoreError(errno.ENOENT, "there never was a commit here", path=str(folder))
        if chosen not in whole:
            problems = f" ({'; '.join(broken)})" if broken else ""
            message = f"there is no generation {chosen} here{problems}{available}"
            raise StoreError(errno.ENOENT, message, path=str(folder))
        self._adopt(whole, chosen)

    def _adopt(self, manifests: Mapping[int, Manifest], chosen: int) -> None:
        """Take over what the manifests say, the space of both, the names of one."""
        known: dict[Record, _Stored] = {}
        for generation, manifest in manifests.items():
            held = []
            for record in manifest.tensors.values():
                if record not in known:
                    known[record] = _Stored(record)
                    try:
                        self._volume.reserve(record.extents)
                    except ValueError as problem:
                        message = f"generations {sorted(manifests)} claim the same space: {problem}"
                        raise StoreError(errno.EBADMSG, message, path=str(self._volume.directories[0])) from None
                known[record].commits += 1
                held.append(known[record])
            self._held[generation] = tuple(held)
        self._generation = max(manifests)
        self._trees = dict(manifests[chosen].trees)
        for name, record in manifests[chosen].tensors.items():
            known[record].named = True
            self._tensors[name] = known[record]

    # --- the end -------------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether `close()` was called."""
        return self._closing

    def close(self) -> None:
        """Wait for what is under way and let go of the drives. What was not committed is gone. Again: does nothing."""
        if self._end(self._volume.close) and self._loses_changes:
            warnings.warn(self._loss("closed"), UncommittedWarning, stacklevel=2)

    @property
    def _loses_changes(self) -> bool:
        return self._changed and self.durability is not Durability.NONE and self._poison is None

    def _loss(self, what: str) -> str:
        return (
            f"the store in {self._volume.directories[0]} was {what} with changes that were not committed; they are gone"
        )

    def __del__(self) -> None:
        """Tell of changes that nobody will find, where nobody closed the store."""
        if not self._closing and self._loses_changes and os.getpid() == self._owner:
            warnings.warn(self._loss("forgotten without close()"), UncommittedWarning, stacklevel=2)

    def discard(self) -> None:
        """Close, and remove the store's files: what was made is not wanted after all."""
        self._check_access()
        self._end(self._remove)

    def _end(self, let_go: Callable[[], None]) -> bool:
        """Wait for what is under way, then let go of the drives; return False where that was done before."""
        if threading.current_thread().name.startswith(_THREADS):  # a callback closes: it would wait for itself
            threading.Thread(target=self._end, args=(let_go,), name="deepnvme-close").start()
            return False
        with self._lock:
            self._closing = True
        for workers in (self._writer, self._readers):
            if workers is not None:
                workers.shutdown(wait=True)
        with self._committing:  # or a manifest would be renamed after somebody else has opened the store
            if self._ended:
                return False
            self._closed = True
            self._io.close()
            let_go()
            self._ended = True  # last: interrupted before, it is done again
        return True

    def _remove(self) -> None:
        for name in (*_SLOTS, _DRAFT):
            (self._volume.directories[0] / name).unlink(missing_ok=True)
        self._volume.discard()

    def __enter__(self) -> TensorStore:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    def __repr__(self) -> str:
        """Show where it is, and what it holds."""
        state = "closed" if self._closed else f"{len(self)} tensors, generation {self._generation}"
        return f"TensorStore({str(self._volume.directories[0])!r}, {state})"

    # --- names ---------------------------------------------------------------------------------------------------

    def _stored(self, name: str) -> _Stored:
        stored = self._tensors.get(name)
        if stored is None:
            raise KeyError(f"no tensor {name!r} among the {len(self._tensors)} of {self!r}")
        return stored

    def _name(self, name: str, stored: _Stored) -> None:
        if name in self._tensors:
            self._unname(name)
        stored.named = True
        self._tensors[name] = stored

    def _unname(self, name: str) -> None:
        stored = self._stored(name)
        stored.named = False
        del self._tensors[name]
        self._forget_prefetched(name)
        self._free_unless_needed(stored)

    def _let_go(self, stored: Iterable[_Stored]) -> None:
        for each in stored:
            each.commits -= 1
            self._free_unless_needed(each)

    def _free_unless_needed(self, stored: _Stored) -> None:
        if not stored.needed and not self._closed:
            self._io.release((stored.record,))

    def _leaves(self, state: str) -> dict[str, Returns]:
        """Return the tensors of a state dict, each with what it was."""
        return {f"{state}/{leaf}": kind for leaf, kind in leaves(self._trees[state]).items()}

    @contextmanager
    def _putting(self, tensors: Mapping[str, Any], description: Callable[[Any], Storable] = describe) -> Iterator[None]:
        """Write tensors and name them; what the body does to other names happens in the same step."""
        self._check_writable()
        described = {check_name(name): _described(name, tensor, description) for name, tensor in tensors.items()}
        begun: Future[None] = Future()
        with self._lock:
            self._writing.add(begun)
        try:
            with self._named(described):
                yield
        finally:
            with self._lock:
                self._writing.discard(begun)
            begun.set_result(None)

    @contextmanager
    def _named(self, described: Mapping[str, Storable]) -> Iterator[None]:
        records = self._io.write(list(described.values()))
        with self._lock:
            if self._poison is not None:  # a commit failed meanwhile
                self._io.release(records)
                self._check_writable()
            for name, record in zip(described, records, strict=True):
                self._name(name, _Stored(record))
            yield
            self._changed = True

    @contextmanager
    def _reading(self, names: Iterable[str]) -> Iterator[dict[str, _Stored]]:
        """Keep the space of these tensors from being used again meanwhile."""
        with self._lock:
            stored = self._hold(names)
        with self._until_read(stored):
            yield stored

    def _hold(self, names: Iterable[str]) -> dict[str, _Stored]:
        self._check_open()
        stored = {name: self._stored(name) for name in names}
        for each in stored.values():
            each.readers += 1
        return stored

    @contextmanager
    def _until_read(self, stored: Mapping[str, _Stored]) -> Iterator[None]:
        try:
            yield
        finally:
            with self._lock:
                for each in stored.values():
                    each.readers -= 1
                    self._free_unless_needed(each)

    def _target(self, name: str, record: Record, out: Mapping[str, Any] | None) -> Any:
        if out is None or name not in out:
            return empty(record.dtype, record.shape, self.returns)
        kind = kind_of(out[name])
        if kind != (record.dtype, record.shape):
            raise ValueError(
                f"{name!r} is {record.dtype} of shape {record.shape}; `out` for it is {kind[0]} of shape {kind[1]}"
            )
        return out[name]

    def _read_one(self, name: str) -> Any:
        return self.get_many((name,))[name]

    def _take_prefetched(self, name: str) -> StoreFuture[Any] | None:
        with self._lock:
            found = self._forget_prefetched(name)
            return found[1] if found is not None and found[0] is self._tensors.get(name) else None

    def _order(self, names: Iterable[str] | None, depth: int) -> list[str]:
        if depth < 1:
            raise ValueError(f"depth must be at least 1, got {depth}")
        if names is not None:
            return list(names)
        with self._lock:
            places = {name: stored.record.extents for name, stored in self._tensors.items()}
        return sorted(places, key=lambda name: [(extent.member, extent.offset) for extent in places[name]])

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the store is closed")

    def _check_access(self) -> None:
        if self._volume.access is Access.READ:
            raise StoreError(
                errno.EBADF,
                "the store was opened for reading: open it with access=Access.WRITE to change it",
                path=str(self._volume.directories[0]),
            )

    def _check_writable(self) -> None:
        self._check_open()
        self._check_access()
        if self._poison is not None:
            raise copy(self._poison)  # each with a traceback of its own

    def _start_reading(self, work: Callable[[], _T]) -> StoreFuture[_T]:
        with self._lock:
            self._check_taking()
            return self._begin_reading(work)

    def _begin_reading(self, work: Callable[[], _T]) -> StoreFuture[_T]:
        """Do so with the lock held."""
        future: StoreFuture[_T] = StoreFuture()
        if self._readers is None:
            self._readers = ThreadPoolExecutor(_READERS, f"{_THREADS}-reader")
        self._readers.submit(_run, work, future)
        return future

    def _start_writing(self, work: Callable[[], _T]) -> StoreFuture[_T]:
        future: StoreFuture[_T] = StoreFuture()
        self._check_access()
        with self._lock:
            self._check_taking()
            if self._writer is None:
                self._writer = ThreadPoolExecutor(1, f"{_THREADS}-writer")
            self._writing.add(future)
            self._writer.submit(_run, work, future)
        future.add_done_callback(self._writing.discard)
        return future

    def _check_taking(self) -> None:
        if self._closing:
            raise ClosedError("the store is closed")


def _run(work: Callable[[], _T], future: StoreFuture[_T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = work()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)


def _described(name: str, tensor: Any, description: Callable[[Any], Storable]) -> Storable:
    try:
        return description(tensor)
    except (TypeError, ValueError) as refusal:
        raise type(refusal)(f"tensor {name!r}: {refusal}") from None


def sync_directory(folder: Path) -> None:
    """Make the names in a directory durable."""
    _sync(folder, os.O_DIRECTORY)


def _sync(path: Path, flags: int = 0) -> None:
    descriptor = os.open(path, os.O_RDONLY | flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
