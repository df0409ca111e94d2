"""The manifest of a store as bytes: what one generation holds, and where.

Encodes and parses; does no I/O. Believes nothing that it parses: whatever the bytes are, the outcome is a manifest that
is valid as a whole, or a ManifestError that says what is wrong and where. What a tree means, `deepnvme.tree` knows.
The format is in docs/store-format.md. Called by the store.
"""

from __future__ import annotations

import errno
import json
import math
import re
import struct
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from deepnvme.arrays import nbytes_of
from deepnvme.checksum import CHECKSUM_BYTES, crc32c
from deepnvme.errors import StoreError
from deepnvme.extents import PAGE, Extent

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

_MAX_NESTING = 400  # of the JSON of a tree; deepnvme.tree writes three levels for one of its own, and not this many
_START = re.compile(rb"deepnvme-store ([1-9][0-9]{0,8}) ")
_LINE = re.compile(rb"(0|[1-9][0-9]{0,18}) ([0-9a-f]{8})\n")


class ManifestError(StoreError, ValueError):
    """A manifest or a tree in it is not valid; the message says what is wrong with it and where."""

    def __init__(self, message: str, *, path: str = "") -> None:
        super().__init__(errno.EBADMSG, message, path=path)


@dataclass(frozen=True)
class Record:
    """One tensor: what it is and where its bytes are, in this order.

    `checksums` has the crc32c of every CHECKSUM_BYTES of them, the last one of fewer; None where none were taken.
    """

    dtype: str
    shape: tuple[int, ...]
    extents: tuple[Extent, ...]
    checksums: tuple[int, ...] | None

    @property
    def nbytes(self) -> int:
        """How many bytes it has."""
        return sum(extent.nbytes for extent in self.extents)


@dataclass(frozen=True)
class Manifest:
    """What one generation of a store holds: tensors by name, and the trees (deepnvme.tree) that name some of them."""

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
        raise ValueError(f"expected valid text, got {_shown(name)}, which has half of a surrogate pair") from None
    return name


def encode(manifest: Manifest) -> bytes:
    """Return the bytes of a valid manifest."""
    content = {
        "volume": manifest.volume,
        "generation": manifest.generation,
        "tensors": {
            name: {
                "dtype": record.dtype,
                "shape": record.shape,
                "extents": [(extent.member, extent.offset, extent.nbytes) for extent in record.extents],
                "crc32c": None if record.checksums is None else _checksum_text(record.checksums),
            }
            for name, record in manifest.tensors.items()
        },
        "trees": dict(manifest.trees),
    }
    payload = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    return f"deepnvme-store {FORMAT_VERSION} {len(payload)} {crc32c(payload):08x}\n".encode() + payload


def parse(data: bytes, *, volume: str, capacities: Sequence[int], path: str = "") -> Manifest:
    """Return the manifest in `data`, of the volume of that name, whose members have so many bytes behind their header.

    Trees are checked to be JSON, no more: `deepnvme.tree.leaves` checks one. `path` is where `data` comes from.

    Raises:
        ManifestError: it is not valid as a whole.
    """
    try:
        return _manifest(_content(data), volume, capacities)
    except RecursionError:
        raise ManifestError("not a valid manifest: it is nested too deeply", path=path) from None
    except ValueError as flaw:
        raise ManifestError(f"not a valid manifest: {flaw}", path=path) from None


# --- the frame: one line with version, length and checksum, then JSON --------------------------------------------


def _content(data: bytes) -> Any:
    start = _START.match(data)
    if start is None:
        raise ValueError(f'expected it to begin with "deepnvme-store {FORMAT_VERSION} ", got {data[:32]!r}')
    if int(start[1]) != FORMAT_VERSION:
        raise ValueError(
            f"it has version {int(start[1])} of the format, this deepnvme reads {FORMAT_VERSION}: use a newer one"
        )
    line = _LINE.match(data, start.end())
    if line is None:
        raise ValueError(f"expected a length, a checksum and a new line in its first line, got {data[:64]!r}")
    payload = data[line.end() :]
    if len(payload) != int(line[1]):
        raise ValueError(f"its first line announces {int(line[1])} B, {len(payload)} follow: it was cut or added to")
    crc = crc32c(payload)
    if crc != int(line[2], 16):
        raise ValueError(f"its checksum is {crc:08x}, its first line says {line[2].decode()}: it is damaged")
    return json.loads(
        payload.decode(),
        object_pairs_hook=_object_of_pairs,
        parse_int=_whole_number,
        parse_float=_finite_number,
        parse_constant=_no_constant,
    )


def _object_of_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        [(twice, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{_shown(twice)} stands twice in one object")
    return found


def _whole_number(text: str) -> int:
    if len(text) > 20:  # 2**63 with its sign
        raise ValueError(f"the number {text[:20]}... is too long")
    return int(text)


def _finite_number(text: str) -> float:
    if len(text) > 64 or not math.isfinite(float(text)):
        raise ValueError(f"the number {text[:64]} is too long or too large")
    return float(text)


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


# --- what the JSON says ------------------------------------------------------------------------------------------


def _manifest(content: Any, volume: str, capacities: Sequence[int]) -> Manifest:
    fields = _fields(content, "volume", "generation", "tensors", "trees")
    if fields["volume"] != volume:
        raise ValueError(f"it is of the volume {_shown(fields['volume'])}, the files here are of {volume!r}")
    generation = _integer(fields["generation"], "generation", least=1)
    tensors = {
        name: _within(f"tensor {_shown(name)}", _record, value, capacities)
        for name, value in _object(fields["tensors"], "tensors")
    }
    _check_disjoint(tensors)
    trees = dict(_object(fields["trees"], "trees"))
    for name, tree in trees.items():
        _within(f"tree {_shown(name)}", _check_json, tree)
    return Manifest(volume, generation, tensors, trees)


def _record(value: Any, capacities: Sequence[int]) -> Record:
    fields = _fields(value, "dtype", "shape", "extents", "crc32c")
    dtype, shape = fields["dtype"], fields["shape"]
    if not isinstance(dtype, str):
        raise ValueError(f"expected its dtype as text, got {_shown(dtype)}")
    if not isinstance(shape, list) or any(type(size) is not int for size in shape):
        raise ValueError(f"expected its shape as a list of whole numbers, got {_shown(shape)}")
    nbytes = nbytes_of(dtype, tuple(shape))
    if not isinstance(fields["extents"], list):
        raise ValueError(f"expected its extents as a list, got {_shown(fields['extents'])}")
    extents = tuple(_extent(extent, capacities) for extent in fields["extents"])
    if any(extent.nbytes % PAGE for extent in extents[:-1]):
        raise ValueError(f"all its extents but the last must be whole pages of {PAGE} B")
    if sum(extent.nbytes for extent in extents) != nbytes:
        held = sum(extent.nbytes for extent in extents)
        raise ValueError(f"its extents hold {held} B, {dtype} of shape {_shown(shape)} takes {nbytes}")
    return Record(dtype, tuple(shape), extents, _checksums(fields["crc32c"], nbytes))


def _extent(value: Any, capacities: Sequence[int]) -> Extent:
    if not isinstance(value, list) or len(value) != 3:
        raise ValueError(f"expected an extent as [member, offset, bytes], got {_shown(value)}")
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
    if not isinstance(text, str) or len(text) != 8 * count or not re.fullmatch("[0-9a-f]*", text):
        raise ValueError(f"expected {count} checksums of 8 hexadecimal digits each for {nbytes} B, got {_shown(text)}")
    return struct.unpack(f">{count}I", bytes.fromhex(text))


def _checksum_text(checksums: Sequence[int]) -> str:
    return struct.pack(f">{len(checksums)}I", *checksums).hex()


def _check_disjoint(tensors: Mapping[str, Record]) -> None:
    """Refuse two extents that share a page."""
    taken = sorted(
        (extent.member, extent.offset, extent.end, name)
        for name, record in tensors.items()
        for extent in record.extents
    )
    for (member, _, end, name), (next_member, begin, _, next_name) in pairwise(taken):
        if member == next_member and end > begin:
            raise ValueError(
                f"tensors {_shown(name)} and {_shown(next_name)} overlap: in member {member} the space of the first "
                f"ends at {end}, that of the other begins at {begin}"
            )


def _fields(value: Any, *names: str) -> dict[str, Any]:
    if not isinstance(value, dict) or set(value) != set(names):
        got = sorted(value) if isinstance(value, dict) else value
        raise ValueError(f"expected an object with {', '.join(names)}; got {_shown(got)}")
    return value


def _object(value: Any, what: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict):
        raise ValueError(f"expected {what} as an object, got {_shown(value)}")
    for name in value:
        yield check_name(name), value[name]


def _integer(value: Any, what: str, *, least: int = 0, most: int = (1 << 63) - 1) -> int:
    if type(value) is not int or not least <= value <= most:  # True is an int, but no number
        raise ValueError(f"expected {what} as a whole number from {least} to {most}, got {_shown(value)}")
    return value


def _check_json(tree: Any) -> None:
    """Refuse text that cannot be written again, and nesting that would exhaust the stack of who walks it."""
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


def _shown(value: object) -> str:
    """Return `value` for a message, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 160 else f"{text[:150]}... ({len(text)} characters)"
