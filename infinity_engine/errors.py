"""The exceptions about settings, memory, moves, ranks and checkpoints: all are InfinityErrors.

Mistakes of the calling code that none of them covers, such as calls in a wrong order, raise
Python's own errors. Each class takes its facts as keyword fields, keeps them as attributes, and
composes its message from them. All of them survive pickling where their fields do, so that one
process can send an error to another. Imports nothing of the package and is imported by all of it.

    InfinityError
      ConfigError(ValueError)               a setting or argument that cannot be right
      MissingDependencyError(ImportError)   an optional package is needed and not installed
      CapacityError                         a tier has no room for what was asked of it
      IllegalTransition                     a shard cannot go from this residency to that one
      TraceMismatch                         another module ran than the trace says
      TransferError(OSError)                an I/O or a copy failed
        DamageError                         bytes read back from the drives are not those written
      CollectiveError                       a collective of several ranks failed
      CheckpointError                       a checkpoint cannot be used
        ManifestMismatch                    it describes another model or configuration
        IncompleteCheckpoint                parts of it are missing
        ChecksumError                       bytes on disk are not the bytes that were written
        DamagedCheckpoint                   one of its files does not follow the format
        UnsupportedCheckpoint               another library wrote it in a way that is not read here
"""

from __future__ import annotations

import difflib
import errno
import functools
import os
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

__all__ = [
    "CapacityError",
    "CheckpointError",
    "ChecksumError",
    "CollectiveError",
    "ConfigError",
    "DamageError",
    "DamagedCheckpoint",
    "IllegalTransition",
    "IncompleteCheckpoint",
    "InfinityError",
    "ManifestMismatch",
    "MissingDependencyError",
    "TraceMismatch",
    "TransferError",
    "UnsupportedCheckpoint",
]

_SHOWN_CHARACTERS = 200  # of a value in a message: its type and beginning show what was wrong
_SHOWN_ITEMS = 5


@dataclass(kw_only=True, eq=False)
class InfinityError(Exception):
    """The root of the tree, raised only through its subclasses: dataclasses, equal by identity."""

    def __post_init__(self) -> None:
        # Exception takes args from positional arguments, and there are none.
        self.args = (self._message(),)

    def __str__(self) -> str:
        return self._message()

    def __reduce__(self) -> tuple[Any, ...]:
        # By default an exception is rebuilt from its positional args; these are made of keywords.
        known = {field.name: getattr(self, field.name) for field in fields(self)}
        return functools.partial(type(self), **known), (), self.__dict__

    def _message(self) -> str:
        return ""


@dataclass(kw_only=True, eq=False)
class ConfigError(InfinityError, ValueError):
    """A setting or argument that cannot be right: the field, its value, and what would be right."""

    field: str
    value: object
    expected: str

    @classmethod
    def unknown_name(cls, *, field: str, name: object, known: Iterable[str]) -> ConfigError:
        """Return the error for a name that is not known; it suggests the nearest known one."""
        names = list(known)
        near = difflib.get_close_matches(str(name), names, n=1)
        nearest = f" (nearest: {near[0]})" if near else ""
        return cls(
            field=field, value=name, expected=f"one of {', '.join(names) or '(none)'}{nearest}"
        )

    def _message(self) -> str:
        # An option of a command line that was not given has no value.
        is_given = self.value is not None or not self.field.startswith("--")
        got = f"got {_shown(self.value)}" if is_given else "and it was not given"
        return f"{self.field}: expected {self.expected}, {got}"


@dataclass(kw_only=True, eq=False)
class MissingDependencyError(InfinityError, ImportError):
    """An optional package is missing or too old: what needs it, and the extra that installs it.

    `found` is the installed version, None where there is none.
    """

    needed_by: str
    package: str
    extra: str
    found: str | None = None

    def __post_init__(self) -> None:
        ImportError.__init__(self, self._message())

    def _message(self) -> str:
        state = "which is not installed" if self.found is None else f"and {self.found} is installed"
        return (
            f"{self.needed_by} needs {self.package}, {state}. "
            f"Install your own build of it, or: pip install 'infinity-engine[{self.extra}]'"
        )


@dataclass(kw_only=True, eq=False)
class CapacityError(InfinityError):
    """A tier has no room for what was asked of it.

    `limit` is the most that the tier may hold and `free` how much of it is not taken; `holders`
    took the rest, as (name, nbytes); `change` says what would make it fit; `directory` names the
    drive where there are several. `largest` is the largest free piece, where free bytes are in
    pieces. Where raising one of the budget's limits is enough, `budget` is its name, and the
    message says to how much. Where all ranks raise the error, `rank` is the one that has no room.
    """

    tier: str
    asked: int
    free: int
    limit: int
    change: str
    holders: tuple[tuple[str, int], ...] = ()
    directory: str | None = None
    largest: int | None = None
    budget: str | None = None
    rank: int | None = None

    def beside(self, holder: str, nbytes: int) -> CapacityError:
        """Return the error for the whole limit, where `limit` was what `holder` leaves of it."""
        return replace(self, limit=self.limit + nbytes, holders=(*self.holders, (holder, nbytes)))

    def __post_init__(self) -> None:
        # Largest first, so that the message names those that matter, whatever the caller's order.
        self.holders = tuple(sorted(self.holders, key=lambda holder: holder[1], reverse=True))
        InfinityError.__post_init__(self)

    def _message(self) -> str:
        where = self.tier if self.directory is None else f"{self.tier} ({self.directory})"
        if self.rank is not None:
            where += f" of rank {self.rank}"
        held = "".join(
            f"; {name} holds {_size(nbytes)}" for name, nbytes in self.holders[:_SHOWN_ITEMS]
        )
        others = self.holders[_SHOWN_ITEMS:]
        if others:
            held += f"; {len(others)} others hold {_size(sum(nbytes for _, nbytes in others))}"
        usable = self.free if self.largest is None else self.largest
        pieces = "" if self.largest is None else f" in pieces, the largest of {_size(self.largest)}"
        # Against the largest piece where bytes are in pieces: free bytes elsewhere are no help.
        short = max(self.asked - usable, 0)
        enough = (
            f"raise the budget's {self.budget} to at least {_size(self.limit + short)}, or "
            if self.budget
            else ""
        )
        return (
            f"{where} cannot hold {_size(self.asked)}: {_size(self.free)} free of "
            f"{_size(self.limit)}{pieces}, "
            f"{_size(short)} short{held}. To make it fit: {enough}{self.change}"
        )


@dataclass(kw_only=True, eq=False)
class IllegalTransition(InfinityError):  # noqa: N818 - the name says it without 'Error'
    """A shard was sent to a residency that its present one does not lead to."""

    shard: str
    source: str
    target: str
    allowed: tuple[str, ...]

    def _message(self) -> str:
        allowed = ", ".join(self.allowed) or "nothing"
        return (
            f"{self.shard}: {self.target} is not reachable from {self.source}; allowed: {allowed}"
        )


@dataclass(kw_only=True, eq=False)
class TraceMismatch(InfinityError):  # noqa: N818 - the name says it without 'Error'
    """Another module ran than the trace of an earlier step says."""

    expected: str
    seen: str

    def _message(self) -> str:
        return (
            f"the trace expects module {self.expected} to run next, but {self.seen} ran: the "
            "model's control flow has changed since the trace was recorded, so record it again"
        )


@dataclass(kw_only=True, eq=False)
class TransferError(InfinityError, OSError):
    """An I/O or a copy failed: `done` of the `asked` bytes at `offset` of `path` were moved.

    `what` names the data, where that is known. An OSError: `errno`, `strerror` and `filename` are
    set as usual.
    """

    errno: int
    path: str
    offset: int
    asked: int
    done: int
    what: str = ""

    def __post_init__(self) -> None:
        told = (
            # ENODATA stands for a read past the end, which the kernel does not call an error.
            "the file ends before that" if self.errno == errno.ENODATA else os.strerror(self.errno)
        )
        # OSError sets errno, strerror and filename from its positional arguments only.
        OSError.__init__(self, self.errno, told, self.path)

    def _message(self) -> str:
        what = f"{self.what}: " if self.what else ""
        return (
            f"{what}{self.path}: {self.strerror} (errno {self.errno}) at offset {self.offset}: "
            f"asked for {_size(self.asked)}, {_size(self.done)} done"
        )


@dataclass(kw_only=True, eq=False)
class DamageError(TransferError):
    """Bytes read back from the drives are not those that were written: their checksums differ.

    They begin at `offset` of `path`; those that lie elsewhere are in `others`, as (path, offset).
    """

    expected: int
    found: int
    others: tuple[tuple[str, int], ...] = ()

    def _message(self) -> str:
        what = f"{self.what}: " if self.what else ""
        others = "".join(
            f", continued in {path} at offset {offset}" for path, offset in self.others
        )
        return (
            f"{what}{self.path}: {_size(self.asked)} at offset {self.offset}{others} are damaged: "
            f"their crc32c is {self.found:#010x}, but the bytes that were written had "
            f"{self.expected:#010x}. Try again; if that fails, check the drive and the memory, "
            "and resume from the last checkpoint"
        )


@dataclass(kw_only=True, eq=False)
class CollectiveError(InfinityError):
    """A collective failed on this rank; `reason` says what is known of the other ranks."""

    group: str
    rank: int
    op: str
    reason: str = ""

    def _message(self) -> str:
        known = f": {self.reason}" if self.reason else ""
        return (
            f"{self.op} failed on rank {self.rank} of group {self.group}{known}. Look for the "
            "first error in the logs of all ranks: a rank that fails makes the others fail or hang"
        )


@dataclass(kw_only=True, eq=False)
class CheckpointError(InfinityError):
    """The checkpoint at `path` cannot be used. The subclasses say why."""

    path: str

    def _message(self) -> str:
        return f"checkpoint {self.path} cannot be used"


@dataclass(kw_only=True, eq=False)
class ManifestMismatch(CheckpointError):  # noqa: N818 - the name says it without 'Error'
    """The manifest describes another model or configuration than the one that is loaded."""

    entry: str
    expected: object
    found: object
    change: str = "Load the checkpoint that belongs to this model and configuration"

    def _message(self) -> str:
        return (
            f"checkpoint {self.path} does not match: {self.entry} should be "
            f"{_shown(self.expected)}, "
            f"its manifest says {_shown(self.found)}. {self.change}"
        )


@dataclass(kw_only=True, eq=False)
class IncompleteCheckpoint(CheckpointError):  # noqa: N818 - the name says it without 'Error'
    """Parts of the checkpoint are missing."""

    missing: tuple[str, ...]

    def _message(self) -> str:
        named = ", ".join(self.missing[:_SHOWN_ITEMS])
        others = len(self.missing) - _SHOWN_ITEMS
        more = f" and {others} others" if others > 0 else ""
        return (
            f"checkpoint {self.path} is incomplete: {named}{more} not found. "
            "Copy all of its files here, or load an earlier committed checkpoint"
        )


@dataclass(kw_only=True, eq=False)
class ChecksumError(CheckpointError):
    """The bytes on disk are not the bytes that were written.

    A bad byte is in `entry`, at or after `offset`. `tensor` says what lies there, if known.
    """

    entry: str
    offset: int
    expected: int
    found: int
    tensor: str = ""

    def _message(self) -> str:
        return (
            f"checkpoint {self.path}: {self.entry} is damaged at or after offset {self.offset}"
            f"{f', where {self.tensor} lies' if self.tensor else ''}: "
            f"its checksum is {self.found:#010x}, but the bytes that were written had "
            f"{self.expected:#010x}. Load an earlier committed checkpoint and check the drive"
        )


@dataclass(kw_only=True, eq=False)
class DamagedCheckpoint(CheckpointError):  # noqa: N818 - the name says it without 'Error'
    """The file `entry` of the checkpoint does not follow the format: `flaw` says why."""

    entry: str
    flaw: str

    def _message(self) -> str:
        return (
            f"checkpoint {self.path}: {self.entry} cannot be used: {self.flaw}. Load an earlier "
            "committed checkpoint, or copy this one again from an intact copy"
        )


@dataclass(kw_only=True, eq=False)
class UnsupportedCheckpoint(CheckpointError):  # noqa: N818 - the name says it without 'Error'
    """Another library wrote the checkpoint in a way that is not read here: `flaw` says which.

    `change` says what to do instead.
    """

    entry: str
    flaw: str
    change: str

    def _message(self) -> str:
        return (
            f"checkpoint {self.path}: {self.entry} cannot be imported: {self.flaw}. {self.change}"
        )


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except Exception:  # A value that cannot even be shown must not hide that it is wrong.
        return f"a {type(value).__name__} that cannot be shown"
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def _size(nbytes: int) -> str:
    # units.format_bytes rounds and units imports this module; an error needs the exact number, with
    # one to read beside.
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        # else it would print 1024.00 MiB for 1 GiB
        if nbytes >= scale or round(1024 * nbytes / scale, 2) >= 1024:
            hundredths = (100 * nbytes + scale // 2) // scale  # no float, as these end at 1e308
            return f"{nbytes} B ({hundredths // 100}.{hundredths % 100:02} {unit})"
    return f"{nbytes} B"
