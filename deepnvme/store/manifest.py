"""The manifest of a store as bytes: what one generation holds, and where.

Encodes and parses; does no I/O. Trusts nothing that it parses: whatever the bytes are, the outcome
is a manifest that is valid as a whole, or a ManifestError that says what is wrong and where. The
module `tree` knows what a tree means. The format is in docs/store-format.md. Called by the store;
names are checked for safetensors files, too.
"""

from __future__ import annotations

import errno
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice, pairwise
from operator import attrgetter
from typing import Any

from deepnvme.errors import StoreError
from deepnvme.memory.arrays import nbytes_of
from deepnvme.memory.checksum import CHECKSUM_BYTES
from deepnvme.sizes import PAGE
from deepnvme.volume.extents import Extent
from deepnvme.volume.framing import as_json, framed_json, shown, strict_json, unframed

__all__ = [
    "FORMAT_VERSION",
    "Manifest",
    "ManifestError",
    "Record",
    "check_name",
    "encode",
    "parse",
]

FORMAT_VERSION = 1

# Levels of the JSON of a tree. `tree` nests at most tree.MAX_DEPTH containers, of three levels.
_MAX_NESTING = 400
_KIND = "deepnvme-store"
_ENCODED_TOGETHER = 128
_PLACE_OF = attrgetter("member", "offset", "nbytes")


class ManifestError(StoreError, ValueError):
    """A manifest or a tree in it is not valid; the message says what is wrong with it and where."""

    def __init__(self, message: str, *, path: str = "") -> None:
        super().__init__(errno.EBADMSG, message, path=path)


@dataclass(frozen=True, slots=True, init=False)
class Record:
    """One tensor: its dtype, its shape and where its bytes are.

    `places` has member, offset and bytes of one extent after the other, as plain numbers: stores
    hold many records, and the garbage collector does not traverse numbers. `checksums` has the
    crc32c of every CHECKSUM_BYTES of the bytes, the last one of fewer; None where there are none.
    """

    dtype: str
    shape: tuple[int, ...]
    places: tuple[int, ...]
    checksums: tuple[int, ...] | None

    def __init__(
        self,
        dtype: str,
        shape: tuple[int, ...],
        extents: Iterable[Extent],
        checksums: tuple[int, ...] | None,
    ) -> None:
        keep = object.__setattr__  # a frozen class has no other way
        keep(self, "dtype", dtype)
        keep(self, "shape", shape)
        keep(self, "places", tuple(chain.from_iterable(map(_PLACE_OF, extents))))
        keep(self, "checksums", checksums)

    def without_checksums(self) -> Record:
        """Return the same tensor in the same place, without checksums."""
        return Record(self.dtype, self.shape, self.extents, None)

    @property
    def extents(self) -> tuple[Extent, ...]:
        """Where the bytes are, in this order."""
        return tuple(Extent(*self.places[at : at + 3]) for at in range(0, len(self.places), 3))

    @property
    def nbytes(self) -> int:
        """How many bytes it has."""
        return sum(self.places[2::3])


@dataclass(frozen=True)
class Manifest:
    """One generation of a store: tensors by name, and trees (see `tree`) that name some of them."""

    volume: str
    generation: int
    tensors: Mapping[str, Record]
    trees: Mapping[str, Any]


def check_name(name: object) -> str:
    """Return `name`, if it can name a tensor or tree: any text.

    Raises:
        TypeError: it is no text.
        ValueError: it is no valid text.
    """
    if not isinstance(name, str):
        raise TypeError(f"expected a name as str, got {type(name).__name__}")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"expected valid text, got {shown(name)}, which has half of a surrogate pair"
        ) from None
    return name


def encode(manifest: Manifest) -> bytes:
    """Return the bytes of a valid manifest."""
    tensors = ",".join(_entries(manifest.tensors.items()))
    text = (
        f'{{"volume":{as_json(manifest.volume)},"generation":{manifest.generation},'
        f'"tensors":{{{tensors}}},"trees":{as_json(dict(manifest.trees))}}}'
    )
    return framed_json(_KIND, FORMAT_VERSION, text)


def _entries(tensors: Iterable[tuple[str, Record]]) -> Iterator[str]:
    """Yield the JSON of tensors' entries, of some at a time.

    Objects for all entries at once would make Python collect garbage in the whole program.
    """
    remaining = iter(tensors)
    while some := list(islice(remaining, _ENCODED_TOGETHER)):
        # Without the braces: the entries of all groups stand in one object.
        yield as_json({name: _entry(record) for name, record in some})[1:-1]


def _entry(record: Record) -> dict[str, Any]:
    sums = record.checksums
    return {
        "dtype": record.dtype,
        "shape": record.shape,
        "extents": [record.places[at : at + 3] for at in range(0, len(record.places), 3)],
        "crc32c": None if sums is None else struct.pack(f">{len(sums)}I", *sums).hex(),
    }


def parse(data: bytes, *, volume: str, capacities: Sequence[int], path: str = "") -> Manifest:
    """Return the manifest in `data`, of the volume of that name, whose members have `capacities`
    bytes behind their headers.

    Checks only that trees are JSON: `tree.leaves` checks the rest. `path` is where `data` comes
    from.

    Raises:
        ManifestError: it is not valid as a whole.
    """
    try:
        return _manifest(_content(data), volume, capacities)
    except RecursionError:
        raise ManifestError("not a valid manifest: it is nested too deeply", path=path) from None
    except ValueError as flaw:
        raise ManifestError(f"not a valid manifest: {flaw}", path=path) from None


def _content(data: bytes) -> Any:
    payload, rest = unframed(_KIND, FORMAT_VERSION, data)
    if rest:
        raise ValueError(f"{len(rest)} B follow what its first line announces: it was added to")
    return strict_json(payload)


# --- what the JSON says ---------------------------------------------------------------------------


def _manifest(content: Any, volume: str, capacities: Sequence[int]) -> Manifest:
    fields = _fields(content, "volume", "generation", "tensors", "trees")
    if fields["volume"] != volume:
        raise ValueError(
            f"it is of the volume {shown(fields['volume'])}, the files here are of {volume!r}"
        )
    generation = _integer(fields["generation"], "generation", least=1)
    tensors = {
        name: _within(f"tensor {shown(name)}", _record, value, capacities)
        for name, value in _object(fields["tensors"], "tensors")
    }
    _check_disjoint(tensors)
    trees = dict(_object(fields["trees"], "trees"))
    for name, tree in trees.items():
        _within(f"tree {shown(name)}", _check_json, tree)
    return Manifest(volume, generation, tensors, trees)


def _record(value: Any, capacities: Sequence[int]) -> Record:
    fields = _fields(value, "dtype", "shape", "extents", "crc32c")
    dtype, shape = fields["dtype"], fields["shape"]
    if not isinstance(dtype, str):
        raise ValueError(f"expected its dtype as text, got {shown(dtype)}")
    # Not isinstance(): JSON's true is read as True, which is an int.
    if not isinstance(shape, list) or any(type(size) is not int for size in shape):
        raise ValueError(f"expected its shape as a list of whole numbers, got {shown(shape)}")
    nbytes = nbytes_of(dtype, tuple(shape))
    if not isinstance(fields["extents"], list):
        raise ValueError(f"expected its extents as a list, got {shown(fields['extents'])}")
    extents = tuple(_extent(extent, capacities) for extent in fields["extents"])
    if any(extent.nbytes % PAGE for extent in extents[:-1]):
        raise ValueError(f"all its extents but the last must be whole pages of {PAGE} B")
    if sum(extent.nbytes for extent in extents) != nbytes:
        held = sum(extent.nbytes for extent in extents)
        raise ValueError(
            f"its extents hold {held} B, {dtype} of shape {shown(shape)} takes {nbytes}"
        )
    return Record(dtype, tuple(shape), extents, _checksums(fields["crc32c"], nbytes))


def _extent(value: Any, capacities: Sequence[int]) -> Extent:
    if not isinstance(value, list) or len(value) != 3:
        raise ValueError(f"expected an extent as [member, offset, bytes], got {shown(value)}")
    extent = Extent(
        _integer(value[0], "an extent's member", most=len(capacities) - 1),
        _integer(value[1], "an extent's offset", least=PAGE),  # behind the header
        _integer(value[2], "an extent's bytes", least=1),
    )
    end = PAGE + capacities[extent.member]
    if extent.end > end:
        raise ValueError(f"{extent} reaches beyond the end of that member, {end}")
    return extent


def _checksums(text: Any, nbytes: int) -> tuple[int, ...] | None:
    if text is None:
        return None
    count = -(-nbytes // CHECKSUM_BYTES)
    # fromhex() would also take spaces and capitals, which no writer makes.
    if not isinstance(text, str) or len(text) != 8 * count or not re.fullmatch("[0-9a-f]*", text):
        raise ValueError(
            f"expected {count} checksums of 8 hexadecimal digits each for {nbytes} B, got "
            f"{shown(text)}"
        )
    return struct.unpack(f">{count}I", bytes.fromhex(text))


def _check_disjoint(tensors: Mapping[str, Record]) -> None:
    """Refuse two extents that share a page."""
    taken = sorted(
        (extent.member, extent.offset, extent.end, name)
        for name, record in tensors.items()
        for extent in record.extents
    )
    # In the order of their starts, two neighbours overlap if any two do.
    for (member, _, end, name), (next_member, begin, _, next_name) in pairwise(taken):
        if member == next_member and end > begin:
            raise ValueError(
                f"tensors {shown(name)} and {shown(next_name)} overlap: in member {member} the "
                f"space of the first ends at {end}, that of the other begins at {begin}"
            )


def _fields(value: Any, *names: str) -> dict[str, Any]:
    if not isinstance(value, dict) or set(value) != set(names):
        got = sorted(value) if isinstance(value, dict) else value
        raise ValueError(f"expected an object with {', '.join(names)}; got {shown(got)}")
    return value


def _object(value: Any, what: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict):
        raise ValueError(f"expected {what} as an object, got {shown(value)}")
    for name in value:
        yield check_name(name), value[name]


def _integer(value: Any, what: str, *, least: int = 0, most: int = (1 << 63) - 1) -> int:
    if type(value) is not int or not least <= value <= most:  # True is an int, but no number
        raise ValueError(
            f"expected {what} as a whole number from {least} to {most}, got {shown(value)}"
        )
    return value


def _check_json(tree: Any) -> None:
    """Refuse text that cannot be written again, and nesting that would exhaust the stack."""
    # Level by level: recursion would exhaust the stack here.
    level = [tree]
    for _ in range(_MAX_NESTING):
        following: list[Any] = []
        for node in level:
            if isinstance(node, str):
                check_name(node)
            elif isinstance(node, dict):
                following += [*node, *node.values()]
            elif isinstance(node, list):
                following += node
        level = following
    if level:
        raise ValueError(f"it is nested more than {_MAX_NESTING} levels deep")


def _within(place: str, check: Any, *arguments: Any) -> Any:
    """Call `check`; its refusal names the place."""
    try:
        return check(*arguments)
    except ValueError as flaw:
        raise ValueError(f"{place}: {flaw}") from None
