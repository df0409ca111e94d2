"""What a store holds: tensors and state dicts by name, the last two commits, and how many users the
space of each tensor has.

Owns the rule that space is given back as soon as no name, no reader and no commit needs it
(decision 0004). Moves no bytes and takes no lock: the store calls it with its own lock held.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from deepnvme.errors import StoreError
from deepnvme.memory.arrays import Returns
from deepnvme.queue.pipeline import RUN_BYTES
from deepnvme.sizes import SMALL_BYTES, whole_pages
from deepnvme.store.manifest import Manifest, ManifestError, Record
from deepnvme.store.tree import leaves
from deepnvme.volume.extents import Extent

__all__ = ["Content", "Holdings"]


@dataclass(frozen=True)
class Content:
    """What a commit holds."""

    tensors: Mapping[str, Record]
    trees: Mapping[str, Any]


class Holdings:
    """The content of the store in `where`; `release` gives the space of a record back."""

    def __init__(self, where: Path, release: Callable[[Record], None]) -> None:
        self.changed = False
        """Whether something was put or deleted that is in no commit."""
        self.closed = False
        """Whether the volume is closed or about to be: no space is given back from here on."""
        self._where = where
        self._release = release
        self._tensors: dict[str, Record] = {}
        self._trees: dict[str, Any] = {}
        self._commits: dict[int, tuple[Record, ...]] = {}
        # How many users a record has, by its places: its name, its readers, and the commits that
        # hold it, of the last two and one under way. Numbers, not an object for each: see Record.
        self._needs: dict[tuple[int, ...], int] = {}

    # --- looking ----------------------------------------------------------------------------------

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the tensors."""
        return tuple(self._tensors)

    @property
    def trees(self) -> Mapping[str, Any]:
        """The structures of the state dicts, by name, as they are now."""
        return MappingProxyType(dict(self._trees))

    def __len__(self) -> int:
        """Count the tensors."""
        return len(self._tensors)

    def __contains__(self, name: object) -> bool:
        """Tell whether a tensor has that name."""
        return name in self._tensors

    def in_order(self) -> list[str]:
        """Return the names of the tensors as these lie on the drives."""
        return sorted(self._tensors, key=lambda name: self._tensors[name].places)

    def groups(self, names: Iterable[str]) -> Iterator[Sequence[str]]:
        """Yield the names in groups that are read at once: small tensors in a row, others alone."""
        group: list[str] = []
        room = RUN_BYTES
        for name in names:
            record = self._tensors.get(name)
            alone = record is None or record.nbytes > SMALL_BYTES
            pages = 0 if record is None else whole_pages(max(1, record.nbytes))
            if group and (alone or pages > room):
                yield group
                group, room = [], RUN_BYTES
            group.append(name)
            room = 0 if alone else room - pages
        if group:
            yield group

    def missing(self) -> list[str]:
        """Return the names of tensors that state dicts lack, and of damaged state dicts."""
        found: list[str] = []
        for state, structure in self._trees.items():
            try:
                found += [
                    name for name in _leaves_of(state, structure) if name not in self._tensors
                ]
            except ManifestError:
                found.append(state)
        return found

    def nbytes(self, name: str) -> int:
        """Return the bytes of a tensor, 0 where there is none."""
        record = self._tensors.get(name)
        return 0 if record is None else record.nbytes

    def record(self, name: str) -> Record:
        """Return what is known of a tensor.

        Raises:
            KeyError: there is none.
        """
        record = self._tensors.get(name)
        if record is None:
            raise KeyError(
                f"no tensor {name!r} among the {len(self)} in {self._where}: list(store) has their "
                "names"
            )
        return record

    def _tree(self, state: str) -> Any:
        if state not in self._trees:
            raise KeyError(
                f"no state dict {state!r}; there are: {', '.join(map(repr, self._trees)) or 'none'}"
            )
        return self._trees[state]

    # --- names: these return the names that have other content now --------------------------------

    def name(self, records: Mapping[str, Record]) -> Iterable[str]:
        """Give these tensors these names, in place of those that have them."""
        # First: wherever Ctrl-C interrupts this, no name has space that is given to others.
        self._need(records.values())
        gone = [self._tensors[name] for name in records if name in self._tensors]
        self.changed = True
        self._tensors.update(records)  # one step: after Ctrl-C, all have their names, or none has
        self._need_no_more(gone)
        return records

    def name_state(
        self, state: str, structure: Any, records: Mapping[str, Record]
    ) -> Iterable[str]:
        """Make these tensors a state dict, in place of the one of that name.

        Raises:
            ManifestError: the one of that name is damaged; nothing has changed.
        """
        before = _leaves_of(state, self._trees[state]) if state in self._trees else {}
        gone = (before.keys() & self._tensors.keys()) - records.keys()
        self.name(records)
        self._trees[state] = structure
        for name in gone:  # last: after Ctrl-C, no state dict lacks a tensor
            self._unname(name)
        return {*gone, *records}

    def name_tree(self, state: str, structure: Any) -> None:
        """Make tensors that are there a state dict.

        Raises:
            ManifestError: it is not the structure of a state dict.
            KeyError: a tensor of it is missing.
        """
        for name in _leaves_of(state, structure):
            self.record(name)
        self._trees[state] = structure
        self.changed = True

    def unname(self, name: str) -> Iterable[str]:
        """Forget a tensor.

        Raises:
            KeyError: there is none.
            ValueError: it is a part of a state dict.
        """
        for state, structure in self._trees.items():
            if name.startswith(f"{state}/") and name in _leaves_of(state, structure):
                raise ValueError(
                    f"{name!r} is a part of the state dict {state!r}, and cannot be deleted alone: "
                    "delete the whole by delete_state(), or put one without this tensor"
                )
        self._unname(name)
        self.changed = True
        return (name,)

    def unname_state(self, state: str) -> Iterable[str]:
        """Forget a state dict and its tensors.

        Raises:
            KeyError: there is none of that name.
            ManifestError: it is damaged.
        """
        gone = _leaves_of(state, self._tree(state)).keys() & self._tensors.keys()
        for name in gone:
            self._unname(name)
        del self._trees[state]
        self.changed = True
        return gone

    def _unname(self, name: str) -> None:
        record = self.record(name)
        del self._tensors[name]
        self._need_no_more((record,))

    # --- writing a part of a tensor ---------------------------------------------------------------

    def is_only_named(self, record: Record) -> bool:
        """Return whether only its name needs the space of a record: no reader, no commit."""
        return self._needs[record.places] == 1

    def revise(self, name: str, before: Record, after: Record) -> None:
        """Give a tensor other checksums, if it still is in the places of `before`."""
        current = self._tensors.get(name)
        if current is not None and current.places == before.places:
            self._tensors[name] = after
            self.changed = True

    # --- readers ----------------------------------------------------------------------------------

    def hold(self, names: Iterable[str]) -> dict[str, Record]:
        """Keep the space of these tensors from being used again until they are let go.

        Raises:
            KeyError: there is none of a name.
        """
        held = {name: self.record(name) for name in names}
        self._need(held.values())
        return held

    def hold_state(self, state: str) -> tuple[Any, dict[str, Returns], dict[str, Record]]:
        """Return the structure of a state dict, what each leaf of it was, and its tensors, held.

        Raises:
            KeyError: there is none of that name, or a tensor of it is missing.
            ManifestError: it is damaged.
        """
        structure = self._tree(state)
        kinds = _leaves_of(state, structure)
        held = self.hold(kinds)
        for leaf, record in held.items():
            if kinds[leaf] is Returns.BYTES and (record.dtype, len(record.shape)) != ("U8", 1):
                self.let_go(held)
                raise ManifestError(
                    f"the leaf {leaf!r} is bytes, of dtype U8 and one dimension; its tensor is "
                    f"{record.dtype} {list(record.shape)}"
                )
        return structure, kinds, held

    def let_go(self, held: Mapping[str, Record]) -> None:
        """Note that a reader of these has ended."""
        self._need_no_more(held.values())

    # --- commits ----------------------------------------------------------------------------------

    def begin_commit(self) -> Content:
        """Return what a commit that begins now holds, and keep that space until it has ended."""
        content = Content(MappingProxyType(dict(self._tensors)), self.trees)
        self._need(content.tensors.values())
        # Now, before the commit is made: what is put from here on belongs to the next one.
        self.changed = False
        return content

    def committed(self, generation: int, content: Content) -> None:
        """Note that this commit is on the drives, in place of the one two generations before."""
        self._commits[generation] = tuple(content.tensors.values())
        # Its manifest was overwritten by this one: there are two places for manifests.
        self._need_no_more(self._commits.pop(generation - 2, ()))

    def not_committed(self, content: Content) -> None:
        """Note that nothing of this commit is on the drives."""
        self._need_no_more(content.tensors.values())
        self.changed = True

    def adopt(
        self,
        manifests: Mapping[int, Manifest],
        chosen: int,
        reserve: Callable[[Iterable[Extent]], None],
    ) -> None:
        """Take over the manifests: the space of all of them, the names of the chosen one.

        Raises:
            StoreError: they claim the same space.
        """
        known: set[Record] = set()
        for generation, manifest in manifests.items():
            records = tuple(manifest.tensors.values())
            for record in records:
                # Both commits may hold a record: its space is reserved once, and needed twice.
                if record not in known:
                    known.add(record)
                    try:
                        reserve(record.extents)
                    except ValueError as problem:
                        message = f"generations {sorted(manifests)} claim the same space: {problem}"
                        raise StoreError(errno.EBADMSG, message, path=str(self._where)) from None
            self._commits[generation] = records
            self._need(records)
        self._trees = dict(manifests[chosen].trees)
        self._tensors = dict(manifests[chosen].tensors)
        # The names need the space too, until they are replaced.
        self._need(self._tensors.values())

    # --- space ------------------------------------------------------------------------------------

    def give_back(self, records: Iterable[Record]) -> None:
        """Give back space that never had a name."""
        for record in records:
            if not self.closed:
                self._release(record)

    def _need(self, records: Iterable[Record]) -> None:
        """Count one more user of the space of each."""
        for record in records:
            self._needs[record.places] = self._needs.get(record.places, 0) + 1

    def _need_no_more(self, records: Iterable[Record]) -> None:
        """Count one user less of the space of each; free space that has none left."""
        for record in records:
            left = self._needs[record.places] - 1
            if left:
                self._needs[record.places] = left
            else:
                del self._needs[record.places]
                self.give_back((record,))


def _leaves_of(state: str, structure: Any) -> dict[str, Returns]:
    """Return the names of the tensors of a state dict, each with what it was."""
    return {f"{state}/{leaf}": kind for leaf, kind in leaves(structure).items()}
