"""The commits of a store on its drives: makes the next one, step by step (decision 0004), and finds
the last ones.

Owns the number of the generation, the order in which things become durable, and the poison: after a
step that failed in doubt, no commit is made any more. `Holdings` knows what a commit holds, and in
which space. Called by the store, by one thread at a time.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from functools import partial
from types import MappingProxyType
from typing import Any

from deepnvme.errors import PoisonedError, StoreError
from deepnvme.queue.pipeline import once_there_is_room
from deepnvme.queue.queue import Sync
from deepnvme.store.manifest import Manifest, Record, encode
from deepnvme.store.manifest_files import ManifestFiles
from deepnvme.volume.volume import Volume

__all__ = ["Commits"]


class Commits:
    """The commits of one store. With `synced`, `make` returns when power loss cannot undo it."""

    def __init__(self, volume: Volume, *, synced: bool) -> None:
        self.generation = 0
        self._volume = volume
        self._synced = synced
        self._files = ManifestFiles(volume.directories[0], volume.queues[0])
        self._last_is_durable = False  # the process that made it may have synced less
        self._poison: PoisonedError | None = None

    @property
    def poisoned(self) -> bool:
        """Whether a step failed in doubt: it is not known what is on the drives."""
        return self._poison is not None

    def check(self) -> None:
        """Refuse to go on in a poisoned store.

        Raises:
            PoisonedError: a step failed in doubt.
        """
        if self._poison is not None:
            raise copy(self._poison)  # one object raised twice would grow its traceback

    def make(self, tensors: Mapping[str, Record], trees: Mapping[str, Any]) -> None:
        """Make a commit of this content, whose bytes are written already.

        Where this raises, and neither the generation has changed nor the store is poisoned, nothing
        of the commit is on the drives.

        Raises:
            PoisonedError: a step failed in doubt.
            NVMeError: the manifest cannot be written.
        """
        generation = self.generation + 1
        content = encode(Manifest(self._volume.uuid, generation, tensors, trees))
        # First: a manifest that is on the drives before its tensors would be a commit of garbage.
        with self._in_doubt_where_it_fails("fdatasync of the tensors"):
            self._volume.sync()
        if self.generation and not self._last_is_durable:
            # No power loss may bring back older commits: their space is used again.
            with self._in_doubt_where_it_fails("fsync of the commit before"):
                self._files.sync(self.generation)
        with self._files.draft(content) as draft:
            if self._synced:
                with self._in_doubt_where_it_fails("fsync of the manifest"):
                    once_there_is_room(partial(draft.sync, Sync.ALL)).result()
        with self._in_doubt_where_it_fails("putting the manifest in its place"):
            # It takes the slot of the commit before the last: the last one stays whole beside it.
            self._files.put_in_place(generation)
            if self._synced:
                self._files.sync_names()
            # Together, and last: a failure before leaves the old generation and the poison.
            self.generation, self._last_is_durable = generation, self._synced

    @contextmanager
    def _in_doubt_where_it_fails(self, what: str) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            # After Ctrl-C, too: the interrupted call may have failed, and raises only once.
            self._poison = self._poisoned(what, error)
            if not isinstance(error, OSError):
                raise
            self.check()

    def _poisoned(self, what: str, error: BaseException) -> PoisonedError:
        return PoisonedError(
            getattr(error, "errno", None) or errno.EINTR,
            f"{what} failed ({str(error) or type(error).__name__}): what was put since commit "
            f"{self.generation} may be lost, and no later sync would tell. Tensors can still be "
            "got; open the store again to go on from its last commit",
            path=str(self._files.folder),
        )

    def find(self, generation: int | None) -> tuple[Mapping[int, Manifest], int]:
        """Return the last commits by generation, and the generation to open: the last, unless
        `generation` names one.

        Raises:
            StoreError: there is none, or not that one, or one is damaged and none was named.
        """
        whole, damaged = self._files.read(self._volume.uuid, self._volume.capacities)
        available = (
            f"; generations that can be opened: {', '.join(map(str, sorted(whole)))} (by "
            "open(..., generation=N), or --generation N)"
            if whole
            else "; generations that can be opened: none"
        )
        if generation is None and damaged:
            raise self._refusal(
                errno.EBADMSG, f"a manifest cannot be used: {'; '.join(damaged)}{available}"
            )
        chosen = max(whole, default=None) if generation is None else generation
        if chosen is None:
            raise self._refusal(
                errno.ENOENT,
                "there never was a commit here: making the store was interrupted. Remove what is "
                "in its directories and make it anew",
            )
        if chosen not in whole:
            problems = f" ({'; '.join(damaged)})" if damaged else ""
            raise self._refusal(
                errno.ENOENT, f"there is no generation {chosen} here{problems}{available}"
            )
        # The newest, also where an older one was asked for: the next must be newer than all.
        self.generation = max(whole)
        return MappingProxyType(whole), chosen

    def remove(self) -> None:
        """Remove the manifests."""
        self._files.remove()

    def _refusal(self, number: int, message: str) -> StoreError:
        return StoreError(number, message, path=str(self._files.folder))
