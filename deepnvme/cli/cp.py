"""`deepnvme cp`: copies tensors between stores and safetensors files, with a bounded part of them
in memory.

The copy appears when it is whole: until then nothing that was there is touched, and where anything
fails, what was begun is removed. Exit status: 0 copied, 1 not.
"""

from __future__ import annotations

import argparse
import errno
import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepnvme.checkpoint import capacity_for, new_store
from deepnvme.cli.places import (
    FILE_SUFFIX,
    PLACE_HELP,
    Place,
    add_generation_argument,
    byte_progress,
    opened_store,
    place_argument,
    tensor_count,
)
from deepnvme.cli.scratch import signals_are_exceptions
from deepnvme.formats.safetensors import METADATA, SafetensorsFile, SafetensorsWriter
from deepnvme.memory.arrays import Description, Returns, empty, nbytes_of
from deepnvme.memory.buffers import memory_of
from deepnvme.sizes import format_bytes
from deepnvme.store.manifest_files import MANIFEST_FILES
from deepnvme.store.store import TensorStore
from deepnvme.store.tree import leaves
from deepnvme.volume.member import DATA
from deepnvme.volume.syncing import sync_directory
from deepnvme.volume.volume import Volume

__all__ = ["HELP", "NAME", "add_arguments", "run"]

NAME = "cp"
HELP = "Copy the tensors of a store or a safetensors file into a new store or safetensors file."

# Tensors are read in groups of this size, one group while another is written. A larger tensor is a
# group of its own.
_GROUP_BYTES = 64 << 20
_STORE_FILES = frozenset({DATA, *MANIFEST_FILES})

_Kinds = Mapping[str, tuple[str, tuple[int, ...]]]
_Tensors = dict[str, Description]


@dataclass(frozen=True)
class _Source:
    """What is copied: codes and shapes by name, in the order of their bytes; reads some of them."""

    kinds: _Kinds
    read: Callable[[Sequence[str]], _Tensors]
    metadata: Mapping[str, str]
    trees: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Target:
    """Where the tensors go: writes them in the order of `names`."""

    names: Sequence[str]
    write: Callable[[_Tensors], None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `deepnvme cp`."""
    parser.add_argument("source", type=place_argument, metavar="SRC", help=PLACE_HELP)
    parser.add_argument(
        "target", type=place_argument, metavar="DST", help=f"{PLACE_HELP}, one on each drive"
    )
    add_generation_argument(parser)
    parser.add_argument(
        "--force", action="store_true", help="replace what is there, once the copy is whole"
    )


def run(options: argparse.Namespace) -> int:
    """Copy, print."""
    began = time.perf_counter()
    _refuse_same_store(options.source, options.target)
    open_target = _target_file if options.target.is_file else _target_store
    with (
        signals_are_exceptions(),
        _source(options.source, options.generation, to_file=options.target.is_file) as source,
        open_target(options.target, source, force=options.force) as target,
    ):
        total = sum(nbytes_of(*kind) for kind in source.kinds.values())
        with byte_progress(f"copying to {options.target}", total) as advance:
            _copy(source, target, advance)
    seconds = time.perf_counter() - began
    print(
        f"{options.target}: {tensor_count(len(source.kinds))}, {format_bytes(total)} in "
        f"{seconds:.1f} s ({total / 1e9 / seconds:.2f} GB/s)"
    )
    return 0


def _refuse_same_store(source: Place, target: Place) -> None:
    """Refuse a store that would take its own place.

    Raises:
        OSError: a directory of both is the same.
    """
    if source.is_file or target.is_file:
        return
    of_both = {os.path.realpath(path) for path in source.paths} & {
        os.path.realpath(path) for path in target.paths
    }
    if of_both:
        raise OSError(
            errno.EINVAL,
            "this is the store that is copied: name another directory for the copy",
            min(of_both),
        )


def _copy(source: _Source, target: _Target, advance: Callable[[int], None]) -> None:
    """Read each group while the one before is being written."""
    # Leaving the block waits for the writer, also after an error: what it writes from is in memory
    # here.
    with ThreadPoolExecutor(1) as writer:
        writing: Future[None] | None = None
        for names in _groups(target.names, source.kinds):
            tensors = source.read(names)
            # One group is written and one is read: no third is begun before the first has gone.
            if writing is not None:
                writing.result()
            writing = writer.submit(target.write, tensors)
            advance(sum(tensor.memory.nbytes for tensor in tensors.values()))
        if writing is not None:
            writing.result()


def _groups(names: Iterable[str], kinds: _Kinds) -> Iterator[list[str]]:
    group: list[str] = []
    held = 0
    for name in names:
        nbytes = nbytes_of(*kinds[name])
        if group and held + nbytes > _GROUP_BYTES:
            yield group
            group, held = [], 0
        group.append(name)
        held += nbytes
    if group:
        yield group


# --- where from -----------------------------------------------------------------------------------


@contextmanager
def _source(place: Place, generation: int | None, *, to_file: bool) -> Iterator[_Source]:
    place.refuse_generation(generation)
    if place.is_file:
        with SafetensorsFile(place.paths[0]) as file:
            kinds = {
                name: (entry.dtype, entry.shape) for name, entry in file.header.tensors.items()
            }
            yield _Source(kinds, file.read, file.header.metadata)
    else:
        with opened_store(place, generation) as store:
            yield _of_store(store, to_file=to_file)


def _of_store(store: TensorStore, *, to_file: bool) -> _Source:
    trees = dict(store.trees)
    records = {name: store.record(name) for name in store}
    metadata: Mapping[str, str] = {}
    prefix = ""
    if to_file:
        # A file's metadata becomes a state dict of the store, and that becomes metadata again.
        metadata = store.get_state(METADATA) if trees.pop(METADATA, None) is not None else {}
        prefix = _common_prefix(records, trees)
        for name, tree in trees.items():
            if not _is_flat(tree):
                warnings.warn(
                    f"of the state dict {name!r} only the tensors are copied: a {FILE_SUFFIX} file "
                    "has no place for its structure and plain values",
                    stacklevel=2,
                )

    def read(names: Sequence[str]) -> _Tensors:
        out = {prefix + name: _new(*kinds[name]) for name in names}
        return {
            name.removeprefix(prefix): tensor for name, tensor in store.get_many(out, out).items()
        }

    # In the order of their bytes, so that a copy reads the drives from front to back.
    in_order = sorted(
        records,
        key=lambda name: [(extent.member, extent.offset) for extent in records[name].extents],
    )
    kinds = {
        name.removeprefix(prefix): (records[name].dtype, records[name].shape) for name in in_order
    }
    return _Source(kinds, read, metadata, trees)


def _common_prefix(names: Iterable[str], states: Iterable[str]) -> str:
    """Return the prefix that a file omits: a state dict's, where the store holds only that one."""
    prefixes = [f"{state}/" for state in states]
    return (
        prefixes[0]
        if len(prefixes) == 1 and all(name.startswith(prefixes[0]) for name in names)
        else ""
    )


def _is_flat(tree: Any) -> bool:
    """Tell whether a state dict is nothing but tensors by name.

    Raises:
        ManifestError: it is no state dict.
    """
    leaves(tree)
    [(tag, pairs)] = tree.items() if isinstance(tree, dict) else [("", [])]
    return tag in ("dict", "ordered") and all(
        node in ({"tensor": key}, {"array": key}) for key, node in pairs
    )


def _new(code: str, shape: tuple[int, ...]) -> Description:
    room = empty("U8", (nbytes_of(code, shape),), Returns.NUMPY)
    return Description(code, shape, memory_of(room, writable=True))


# --- where to -------------------------------------------------------------------------------------


@contextmanager
def _target_file(place: Place, source: _Source, *, force: bool) -> Iterator[_Target]:
    [path] = place.paths
    if path.exists() and not force:
        raise FileExistsError(
            errno.EEXIST,
            "there is one already: name another file, or replace it with --force",
            path,
        )
    with SafetensorsWriter(path, source.kinds, source.metadata) as writer:
        yield _Target(writer.names, writer.write)


@contextmanager
def _target_store(place: Place, source: _Source, *, force: bool) -> Iterator[_Target]:
    capacity = capacity_for(nbytes_of(*kind) for kind in source.kinds.values())
    with (
        _room_for_store(place, force=force) as directories,
        new_store(directories, capacity) as store,
    ):
        yield _Target(tuple(source.kinds), store.put_many)
        for name, tree in source.trees.items():
            store.put_tree(name, tree)
        if source.metadata:
            store.put_state(METADATA, dict(source.metadata))


@contextmanager
def _room_for_store(place: Place, *, force: bool) -> Iterator[Sequence[Path]]:
    """Yield where to make the new store; afterwards it is at its place."""
    taken = [
        path
        for path in place.paths
        # An empty directory may have been made for the store.
        if path.exists() and not (path.is_dir() and not any(path.iterdir()))
    ]
    if not taken:
        yield place.paths
        return
    if not force:
        what = (
            "there is something already: name another directory, or replace the store there with "
            "--force"
        )
        raise FileExistsError(errno.EEXIST, what, str(taken[0]))
    with Volume.open(place.paths) as old:  # no process uses it, and it is whole
        directories = [Path(os.path.realpath(directory)) for directory in old.directories]
        for directory in directories:
            _check_replaceable(directory)
        beside = [
            directory.with_name(f".{directory.name}.deepnvme-new") for directory in directories
        ]
        aside = [
            directory.with_name(f".{directory.name}.deepnvme-old") for directory in directories
        ]
        # Left by a copy that was killed: a running copy has the old store locked.
        _remove_all([*beside, *aside])
        with ExitStack() as undo:
            undo.callback(_remove_all, beside)
            yield beside
            _replace(directories, beside, aside)
            undo.pop_all()


def _remove_all(directories: Iterable[Path]) -> None:
    for directory in directories:
        if directory.is_dir():
            _check_only_a_store(directory)
            shutil.rmtree(directory)


def _check_replaceable(directory: Path) -> None:
    """Refuse a directory that holds more than a store, or that no copy can be renamed to."""
    _check_only_a_store(directory)
    if directory.is_mount():
        raise OSError(
            errno.EBUSY,
            "a drive is mounted here, so that no copy can take its place: name a directory in it, "
            "or remove the store first",
            str(directory),
        )


def _check_only_a_store(directory: Path) -> None:
    others = {path.name for path in directory.iterdir()} - _STORE_FILES
    if others:
        raise FileExistsError(
            errno.EEXIST,
            f"it also holds {min(others)!r}, which is not of a store: remove that first",
            str(directory),
        )


def _replace(directories: Sequence[Path], beside: Sequence[Path], aside: Sequence[Path]) -> None:
    """Rename the new directories to the places of the old ones, and remove the old ones."""
    with ExitStack() as undo:
        for directory, new, old in zip(directories, beside, aside, strict=True):
            # For a moment there is no store of that name. Two renames are the least: a directory
            # that is not empty cannot be replaced by one.
            directory.rename(old)
            undo.callback(old.rename, directory)
            new.rename(directory)
            undo.callback(directory.rename, new)
        undo.pop_all()
    # Before the old ones go: a power failure finds the one or the other.
    for parent in {directory.parent for directory in directories}:
        sync_directory(parent)
    for old in aside:
        shutil.rmtree(old)
