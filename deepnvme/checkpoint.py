"""`save` and `load`: a state dict to and from a store of its own, in one call, as torch.save and torch.load.

Makes the store just large enough; what is durable when, `TensorStore` knows. `deepnvme cp` makes its stores here, too.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from deepnvme.arrays import describe
from deepnvme.errors import StoreError, VolumeFullError
from deepnvme.extents import whole_pages
from deepnvme.member import DATA
from deepnvme.queue import IOQueue
from deepnvme.store import Checksum, Durability, TensorStore
from deepnvme.tree import flatten
from deepnvme.volume import Member

__all__ = ["STATE", "capacity_for", "load", "new_store", "save"]

STATE = "state"
"""The name of a state dict that was given none."""

_Directory: TypeAlias = "str | os.PathLike[str] | Member"


def save(
    state: Any,
    directories: _Directory | Sequence[_Directory],
    *,
    name: str = STATE,
    capacity: int | None = None,
    durability: Durability = Durability.COMMIT,
    checksum: Checksum = Checksum.CRC32C,
    queue: IOQueue | None = None,
) -> int:
    """Save a state dict, whole or not at all, in one directory or several, one per drive. Return its generation.

    Where there is no store yet, one is made of `capacity` bytes, by default just enough for this state, which leaves no
    room to save again. Where there is one, the state of that name is replaced in it: that needs room for the new one
    beside the last two commits, so three times the state in all.

    Raises:
        StoreError: the store has no such room; the message says what to do.
        TypeError: something in the state cannot be kept: where, and what to do.
        OSError: a directory holds something else, is full, or cannot be written.
    """
    members = _members(directories)
    if any((_path(member) / DATA).exists() for member in members):
        if capacity is not None:
            raise ValueError("there is a store already, whose capacity was settled when it was made; give none")
        with TensorStore.open(members, durability=durability, checksum=checksum, queue=queue) as store:
            _replace_state(store, name, state)
            return store.commit()
    _, leaves = flatten(state)
    if capacity is None and not any(isinstance(member, Member) and member.capacity for member in members):
        capacity = capacity_for(describe(leaf).memory.nbytes for leaf in leaves.values())
    with new_store(members, capacity, durability=durability, checksum=checksum, queue=queue) as store:
        store.put_state(name, state)
    return store.generation


def load(directories: _Directory | Sequence[_Directory], *, name: str = STATE, queue: IOQueue | None = None) -> Any:
    """Return the state dict of that name, as it was saved: tensors as tensors on the CPU, arrays as arrays.

    Raises:
        KeyError: the store has none of that name.
        ChecksumError: the drive returned other bytes than were saved.
        StoreError: there is no commit, or a damaged one.
        VolumeError: a directory is missing, foreign, or in use by another process.
    """
    with TensorStore.open(_members(directories), queue=queue) as store:
        return store.get_state(name)


def capacity_for(sizes: Iterable[int]) -> int:
    """Return the bytes that a new store needs for tensors of these sizes."""
    return max(1, sum(map(whole_pages, sizes)))


@contextmanager
def new_store(
    directories: Sequence[_Directory],
    capacity: int | None,
    *,
    durability: Durability = Durability.COMMIT,
    checksum: Checksum = Checksum.CRC32C,
    queue: IOQueue | None = None,
) -> Iterator[TensorStore]:
    """Make a store for the length of a `with`: committed and closed at its end, removed where the block raises."""
    store = TensorStore.create(directories, capacity, durability=durability, checksum=checksum, queue=queue)
    try:
        yield store
        store.commit()
    except BaseException:
        store.discard()
        raise
    store.close()


def _replace_state(store: TensorStore, name: str, state: Any) -> None:
    try:
        store.put_state(name, state)
    except VolumeFullError as full:
        raise StoreError(
            errno.ENOSPC,
            f"no room for another state {name!r} beside those of the last two commits ({full.asked} B were asked for, "
            f"{full.free} B are free). Save into new directories, with a capacity of three times the state to save "
            "there again and again; or remove this store first",
            path=str(store.volume.directories[0]),
        ) from full


def _members(directories: _Directory | Sequence[_Directory]) -> list[_Directory]:
    return [directories] if isinstance(directories, (str, os.PathLike, Member)) else list(directories)


def _path(member: _Directory) -> Path:
    return Path(member.path if isinstance(member, Member) else member)
