"""`save` and `load`: a state dict to and from a store of its own, in one call, as torch.save and
torch.load.

Makes the store just large enough. `TensorStore` says what is durable when. `deepnvme cp` makes its
stores here, too.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from deepnvme.choices import as_bytes, byte_count
from deepnvme.formats.safetensors import METADATA
from deepnvme.memory.arrays import storable
from deepnvme.queue.queue import IOQueue
from deepnvme.sizes import whole_pages
from deepnvme.store.store import Checksum, Durability, TensorStore
from deepnvme.store.tree import flatten
from deepnvme.volume.member import DATA, Access
from deepnvme.volume.volume import Member, Members, Volume, members_of

__all__ = ["STATE", "capacity_for", "load", "new_store", "save"]

STATE = "state"
"""The name of a state dict, unless the caller gives another."""


def save(
    state: Any,
    directories: Members,
    *,
    name: str = STATE,
    capacity: int | str | None = None,
    durability: Durability = Durability.COMMIT,
    checksum: Checksum = Checksum.CRC32C,
    queue: IOQueue | None = None,
) -> int:
    """Save a state dict, whole or not at all, in one directory or several, one per drive.

    Return its generation.

    Where there is no store yet, one is made, just large enough, or of `capacity` bytes where that
    is more. Where there is one, the state of that name is replaced in it, and the store grows as
    far as that needs. The new state lies beside the last two commits, so a place that is saved to
    again and again takes three times the state; a `capacity` of that reserves it at once.

    Tensors on a GPU, and tensors that are not one piece of memory, are copied one by one while they
    are written.

    Raises:
        VolumeError: a drive has no such room; what was saved before is still there.
        VolumeLockedError: another process reads or writes what is there.
        TypeError: something in the state cannot be kept: where, and what to do.
        OSError: a directory holds something else, or cannot be written.
    """
    members = members_of(directories)
    reserved = None if capacity is None else byte_count("capacity", capacity)
    # Before a store is made or grown: what cannot be kept is refused with nothing changed.
    _, leaves = flatten(state)
    needed = capacity_for(storable(leaf).nbytes for leaf in leaves.values())
    # A link that leads nowhere counts: opening it then says what is wrong.
    if any(os.path.lexists(Path(member.path) / DATA) for member in members):
        # A store keeps the capacities and rates that it was made with.
        as_made = [replace(member, rate=None, capacity=None) for member in members]
        least = reserved or sum(map(_capacity_of, members))
        with TensorStore.open(
            as_made, durability=durability, checksum=checksum, queue=queue
        ) as store:
            _make_room(store.volume, needed, least)
            store.put_state(name, state)
            return store.commit()
    if reserved is None and not any(map(_capacity_of, members)):
        reserved = needed
    with new_store(
        members, reserved, durability=durability, checksum=checksum, queue=queue
    ) as store:
        # The members' own capacities may be less than the state needs.
        _make_room(store.volume, needed, 0)
        store.put_state(name, state)
    # new_store made the commit at the end of the block.
    return store.generation


def load(
    directories: Members,
    *,
    name: str = STATE,
    generation: int | None = None,
    queue: IOQueue | None = None,
) -> Any:
    """Return the state dict of that name as it was saved: tensors on the CPU, arrays as arrays.

    Several processes may load at once. `generation` names another commit than the last one: the
    one before it is kept. A store that holds tensors and no state dict, as `deepnvme cp` makes it
    of a safetensors file, gives all of them by name.

    Raises:
        KeyError: the store has no state dict of that name.
        ChecksumError: the drive returned other bytes than were saved.
        StoreError: there is no commit, not that one, or a damaged one.
        VolumeError: a directory is missing, foreign, or open for writing in another process.
    """
    members = members_of(directories)
    with TensorStore.open(members, access=Access.READ, generation=generation, queue=queue) as store:
        # `deepnvme cp` keeps the metadata of a file as a state dict, and the tensors beside it.
        if name == STATE and len(store) and set(store.states) <= {METADATA}:
            return store.get_many(store)
        return store.get_state(name)


def capacity_for(sizes: Iterable[int]) -> int:
    """Return the bytes that a new store needs for tensors of these sizes."""
    return max(1, sum(map(whole_pages, sizes)))


@contextmanager
def new_store(
    directories: Members,
    capacity: int | None,
    *,
    durability: Durability = Durability.COMMIT,
    checksum: Checksum = Checksum.CRC32C,
    queue: IOQueue | None = None,
) -> Iterator[TensorStore]:
    """Make a store for a `with`: committed and closed at its end, removed if the block raises."""
    store = TensorStore.create(
        directories, capacity, durability=durability, checksum=checksum, queue=queue
    )
    try:
        yield store
        store.commit()
    # Ctrl-C too: what is left would be taken for a store without a commit.
    except BaseException:
        store.discard()
        raise
    store.close()


def _make_room(volume: Volume, needed: int, capacity: int) -> None:
    """Grow the volume until `needed` bytes are free and it has `capacity` bytes in all."""
    missing = max(needed - volume.free_bytes, capacity - sum(volume.capacities))
    if missing > 0:
        volume.grow(missing)


def _capacity_of(member: Member) -> int:
    """Return the capacity that it asks for; 0 where it asks for none."""
    return as_bytes(member.capacity or 0)
