"""State dicts beside the model: random generators, schedulers, samplers, optimizer groups.

Nothing is pickled.

Each rank has a file of the tensors in them; their structures are JSON in the manifest
(`deepnvme.store.tree`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepnvme import IOQueue
from deepnvme.errors import NVMeError
from deepnvme.formats.safetensors import SafetensorsWriter
from deepnvme.memory.arrays import (
    Description,
    Storable,
    described,
    empty,
    nbytes_of,
    storable,
)
from deepnvme.memory.buffers import memory_of
from deepnvme.memory.checksum import BlockChecksums
from deepnvme.store.manifest import ManifestError
from deepnvme.store.tree import flatten, leaves, unflatten
from infinity_engine.checkpoint.manifest import BLOCK_BYTES, SavedFile
from infinity_engine.checkpoint.reader import CheckpointReader
from infinity_engine.errors import DamagedCheckpoint
from infinity_engine.storage import transfer_error

__all__ = [
    "COPIED_BYTES",
    "RankObjects",
    "nbytes_of_objects",
    "objects_file",
    "read_objects",
    "savable",
]

COPIED_BYTES = 1 << 20
"""Up to here the tensors of objects are copied, and no budget counts the copies."""


def savable(thing: Any) -> Storable:
    """Return what `storable` does, of a tensor or array that a checkpoint can hold.

    Raises:
        TypeError: it has no bytes, or a dtype that safetensors does not have.
    """
    found = storable(thing)
    if found.code == "C128":
        raise TypeError("safetensors has no complex128: keep the real and imaginary parts as two")
    return found


def objects_file(rank: int) -> str:
    """Return the name of the file with the tensors of one rank's objects."""
    return f"objects-{rank:05d}.safetensors"


class RankObjects:
    """The objects of one rank as they are now: their structure, for the manifest, and tensors.

    Small tensors are copied at once, so that they can be written while training changes the
    originals. `must_be_written` tells whether there are larger ones, which are not.

    Raises:
        TypeError: something in `state` cannot be kept: where it is, what it is, what to do.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        self.structure, found = flatten(dict(state))
        kept: dict[str, Storable] = {
            name: described(name, leaf, savable) for name, leaf in found.items()
        }
        self.must_be_written = sum(leaf.nbytes for leaf in kept.values()) > COPIED_BYTES
        if not self.must_be_written:
            kept = {name: _copied(leaf.gathered()) for name, leaf in kept.items()}
        self._kept = kept

    def write(self, directory: Path, rank: int, *, queue: IOQueue, staging_bytes: int) -> SavedFile:
        """Write the tensors into a file of the checkpoint.

        Raises:
            TransferError: the drive is full or failed.
        """
        layout = {name: (leaf.code, leaf.shape) for name, leaf in self._kept.items()}
        sums, path = BlockChecksums(BLOCK_BYTES), directory / objects_file(rank)
        try:
            with SafetensorsWriter(
                path, layout, sums=sums, staging_bytes=staging_bytes, queue=queue
            ) as writer:
                for name in writer.names:  # one copy at a time of those on a device or in strides
                    writer.write({name: self._kept[name].gathered()})
                nbytes = writer.nbytes
        except NVMeError as error:
            raise transfer_error(error, f"checkpoint {directory}") from None
        return SavedFile(name=path.name, nbytes=nbytes, checksums=sums.checksums())


def _copied(leaf: Description) -> Description:
    values = bytearray(ctypes.string_at(leaf.memory.address, leaf.nbytes))
    return leaf._replace(memory=memory_of(values, writable=False))


def nbytes_of_objects(reader: CheckpointReader, rank: int) -> int:
    """Return how many bytes the tensors have that `read_objects` returns, without reading them.

    Raises:
        DamagedCheckpoint: the file's header is not what the format demands.
    """
    name = _file_for(reader, rank)
    if name not in reader.manifest.objects:
        return 0
    entries = reader.tensors_of(name).tensors.values()
    return sum(nbytes_of(entry.dtype, entry.shape) for entry in entries)


def _file_for(reader: CheckpointReader, rank: int) -> str:
    """Return the file that has a rank's objects: that of rank 0 where the run had fewer ranks."""
    name = objects_file(rank)
    return name if name in reader.manifest.objects else objects_file(0)


def read_objects(reader: CheckpointReader, rank: int) -> Any:
    """Return the objects that a rank saved; those of rank 0 where the run had fewer ranks.

    Raises:
        DamagedCheckpoint: the structure or its tensors are not what the format demands.
    """
    name = _file_for(reader, rank)
    try:
        structure = reader.manifest.objects[name]
        kinds = leaves(structure)
        header = reader.tensors_of(name)
        tensors = {}
        for leaf, kind in kinds.items():
            entry = header.tensors[leaf]
            tensors[leaf] = empty(entry.dtype, entry.shape, kind)
            if nbytes_of(entry.dtype, entry.shape):
                reader.read_file(name, entry.offset, memory_of(tensors[leaf], writable=True))
        return unflatten(structure, tensors)
    except (KeyError, ManifestError) as flaw:
        raise DamagedCheckpoint(path=str(reader.path), entry=name, flaw=str(flaw)) from None
