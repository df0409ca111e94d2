"""The files that a store's manifests are in: one for even generations, one for odd ones, and the
draft of the next.

Owns their names and how one takes the place of another. `Commits`, the only caller, decides what is
durable when. `manifest` knows what is in them.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from deepnvme.queue.pipeline import once_there_is_room
from deepnvme.queue.queue import File, IOQueue
from deepnvme.store.manifest import Manifest, ManifestError, parse
from deepnvme.volume.syncing import sync_directory, sync_file

__all__ = ["MANIFEST_FILES", "ManifestFiles"]

_SLOTS = ("manifest.0", "manifest.1")
_DRAFT = "manifest.new"
MANIFEST_FILES = (*_SLOTS, _DRAFT)
# Errors of the drive, or of the file system's own checksums.
_DAMAGED = (errno.EIO, errno.EBADMSG, errno.EUCLEAN)
_NO_FILE = (errno.ELOOP, errno.ENXIO, errno.EISDIR)


class ManifestFiles:
    """The manifests in one directory, written through a queue, so that tests can inject faults."""

    def __init__(self, folder: Path, queue: IOQueue) -> None:
        self.folder = folder
        self._queue = queue

    @contextmanager
    def draft(self, content: bytes) -> Iterator[File]:
        """Write the draft, and yield its open file. Where the block fails, no draft is left."""
        draft = self.folder / _DRAFT
        try:
            # "w" empties a draft that a killed commit may have left.
            with self._queue.open(draft, "w", permissions=0o600) as file:
                once_there_is_room(partial(file.pwrite, content)).result()
                yield file
        except BaseException:
            draft.unlink(missing_ok=True)
            raise

    def put_in_place(self, generation: int) -> None:
        """Make the draft the manifest of that generation, in place of that two commits older."""
        # One rename: after a crash the slot has the older manifest or the new one, never a part.
        (self.folder / _DRAFT).replace(self._slot(generation))

    def sync(self, generation: int) -> None:
        """Make the manifest of that generation durable, with its name."""
        sync_file(self._slot(generation))
        self.sync_names()

    def sync_names(self) -> None:
        """Make the names of the manifests durable."""
        sync_directory(self.folder)

    def read(self, volume: str, capacities: Sequence[int]) -> tuple[dict[int, Manifest], list[str]]:
        """Return the sound manifests by generation, and what is wrong with each of the others."""
        whole: dict[int, Manifest] = {}
        damaged: list[str] = []
        missing: list[Path] = []
        for slot in _SLOTS:
            place = self.folder / slot
            try:
                manifest = parse(
                    _content_of(place), volume=volume, capacities=capacities, path=str(place)
                )
            except FileNotFoundError:
                missing.append(place)
            except ManifestError as problem:
                damaged.append(f"{place}: {problem.strerror}")
            except OSError as problem:
                if problem.errno in _NO_FILE:
                    damaged.append(
                        f"{place}: it is a link, a pipe or a directory, not a file that deepnvme "
                        "made"
                    )
                    continue
                if problem.errno not in _DAMAGED:
                    raise
                damaged.append(f"{place}: it cannot be read: {problem.strerror}")
            else:
                whole[manifest.generation] = manifest
        if max(whole, default=1) > 1:  # from the second commit on there are always two
            damaged += [
                f"{place}: it is missing, and may have been the newer one" for place in missing
            ]
        return whole, damaged

    def remove(self) -> None:
        """Remove all of them."""
        for name in (*_SLOTS, _DRAFT):
            # The draft is there where a commit was killed.
            (self.folder / name).unlink(missing_ok=True)

    def _slot(self, generation: int) -> Path:
        return self.folder / _SLOTS[generation % 2]


def _content_of(place: Path) -> bytes:
    """Return what is in a file.

    Raises:
        OSError: it cannot be read; with an errno of `_NO_FILE`, it is no regular file.
    """
    # O_NONBLOCK: opening a pipe without a writer would wait for ever.
    descriptor = os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:  # noqa: PTH123 - a descriptor has no Path
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.ENXIO, os.strerror(errno.ENXIO), str(place))
        return file.read()
