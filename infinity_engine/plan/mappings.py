"""Mappings of plans and settings: frozen, with known keys, or of directories in one spelling.

Pure data; looks at no path on disk. Called by code that reads or holds a mapping from a user or a
file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import PurePosixPath
from typing import TypeVar

from infinity_engine.errors import ConfigError

__all__ = ["Directories", "FrozenMapping", "known_mapping"]

_Key = TypeVar("_Key")
_Value_co = TypeVar("_Value_co", covariant=True)


class FrozenMapping(Mapping[_Key, _Value_co]):
    """A mapping in the order given that cannot be changed; hashable where its values are."""

    __slots__ = ("_values",)

    def __init__(self, given: Mapping[_Key, _Value_co]) -> None:
        # A copy: what the caller does to the given mapping changes nothing here.
        self._values = dict(given)

    def __getitem__(self, key: _Key) -> _Value_co:
        return self._values[key]

    def __iter__(self) -> Iterator[_Key]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        # The order does not count, as it does not for equality.
        return hash(frozenset(self._values.items()))

    def __repr__(self) -> str:
        return repr(self._values)


class Directories(FrozenMapping[str, _Value_co]):
    """One value for each of some directories.

    Spellings of a directory that differ only in slashes and dots name the same one, which may be
    given only once.
    """

    __slots__ = ()

    def __init__(self, given: Mapping[str, _Value_co], *, field: str) -> None:
        values: dict[str, _Value_co] = {}
        for directory, value in given.items():
            spelling = _one_spelling(directory, field=field)
            if spelling in values:
                raise ConfigError(
                    field=field,
                    value=directory,
                    expected=f"each directory once; {spelling!r} is given",
                )
            values[spelling] = value
        super().__init__(values)

    def __getitem__(self, directory: str) -> _Value_co:
        return super().__getitem__(_spelling(directory))


def known_mapping(mapping: object, *, field: str, known: Iterable[str]) -> Mapping[str, object]:
    """Return `mapping` if it is one with known keys; `field` is its path, "" for the outermost."""
    names = tuple(known)
    if not isinstance(mapping, Mapping):
        expected = f"a mapping with keys out of {', '.join(names)}"
        raise ConfigError(field=field or "settings", value=mapping, expected=expected)
    for key in mapping:
        if key not in names:
            raise ConfigError.unknown_name(
                field=f"{field}.{key}" if field else str(key), name=key, known=names
            )
    return mapping


def _spelling(directory: str) -> str:
    """Return the one spelling of `directory`: no doubled or closing slashes, no single dots."""
    path = PurePosixPath(directory)
    # POSIX lets a path begin with two slashes for a meaning of its own; Linux gives it none.
    return "/" + "/".join(path.parts[1:]) if path.is_absolute() else str(path)


def _one_spelling(directory: object, *, field: str) -> str:
    """Return the one spelling of what may be no directory at all."""
    if not isinstance(directory, str) or not directory:
        raise ConfigError(
            field=field, value=directory, expected="directories as text, such as '/mnt/a'"
        )
    # Not resolved: that would look at the drive, and a link may lead elsewhere.
    if ".." in PurePosixPath(directory).parts:
        raise ConfigError(field=field, value=directory, expected="a path without '..'")
    return _spelling(directory)
