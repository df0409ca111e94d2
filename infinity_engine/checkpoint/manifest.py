"""`Manifest`: what one checkpoint is, as data, and its bytes. Believes nothing that it parses.

The format is in docs/checkpoint-format.md. Does no I/O. Called by the writer's caller, the reader
and the commands.
"""

from __future__ import annotations

import math
import re
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from deepnvme.memory.arrays import ITEMSIZES, MAX_DIMENSIONS
from deepnvme.volume.framing import as_json, framed_json, shown, strict_json, unframed
from infinity_engine.checkpoint.streams import SavedStream
from infinity_engine.errors import ConfigError

__all__ = [
    "BLOCK_BYTES",
    "MANIFEST",
    "MOST_BYTES",
    "Kind",
    "Manifest",
    "SavedFile",
    "SavedTensor",
    "encode",
    "parse",
]

MANIFEST = "manifest"
"""The name of the manifest's file."""

BLOCK_BYTES = 1 << 20
"""How many bytes of a file one checksum covers; the last one covers fewer."""

_KIND = "infinity-checkpoint"
# Readers of version 1 would look for the values of every tensor, so only a checkpoint that leaves
# some out has version 2.
_ALL_THERE, _SOME_LEFT_OUT = 1, 2
_BEGINS = re.compile(rb"%s ([0-9]{1,9}) " % re.escape(_KIND.encode()))
_MOST = (1 << 63) - 1
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")
_STREAM = re.compile(r"[a-z0-9_]{1,64}")
_CHECKSUM, _CHECKSUM_DIGITS = "I", 8  # the code of `array` for 4 bytes
_CRC = re.compile(r"[0-9a-f]{8}")
_MOST_PARTS = 10_000_000
MOST_BYTES = 256 << 20
"""Of a manifest: checksums of 32 TiB."""


class Kind(Enum):
    """What a tensor is to its model."""

    TRAINED = "trained"  # A parameter with a master and moments.
    FROZEN = "frozen"  # A parameter that nothing updates.
    BUFFER = "buffer"  # Of the model's state dict.
    TRANSIENT = "transient"  # A buffer that the model's state dict leaves out.


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedTensor:
    """A parameter or buffer. Modules see `dtype`; `streams` gives the dtype of each stream."""

    name: str
    kind: Kind
    shape: tuple[int, ...]
    dtype: str
    streams: Mapping[str, str]
    steps: int = 0
    """How many updates it has had."""
    aliases: tuple[str, ...] = ()
    """Its other names, where it is tied."""
    left_out: int | None = None
    """The crc32c of its values, where the checkpoint has none of them: it has no streams then."""

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    def without_values(self, checksum: int) -> SavedTensor:
        """Return the entry of a tensor whose values are left out; `checksum` is their crc32c."""
        return replace(self, streams={}, left_out=checksum)

    def stream(self, name: str) -> SavedStream:
        """Return one of its streams.

        Raises:
            KeyError: it has none of that name.
        """
        return SavedStream(self.name, name, self.streams[name], self.numel)


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedFile:
    """One file of a checkpoint, with the crc32c of each block of BLOCK_BYTES."""

    name: str
    nbytes: int
    checksums: Sequence[int]

    def __post_init__(self) -> None:
        # 4 bytes each instead of 40: a file of some TiB has millions.
        object.__setattr__(self, "checksums", array(_CHECKSUM, self.checksums))


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What one checkpoint is."""

    tag: str
    step: int
    """How many updates the run had made."""
    created: str
    """When it was written, UTC, as ISO 8601 has it."""
    ranks: int
    tensors: tuple[SavedTensor, ...]
    files: tuple[SavedFile, ...]
    run: Mapping[str, Any] = field(default_factory=dict)
    """What else the run is: loss scale, optimizer groups, configuration, versions. JSON."""
    objects: Mapping[str, Any] = field(default_factory=dict)
    """Structures of further state dicts, by the name of the file that has their tensors."""

    def tensor(self, name: str) -> SavedTensor:
        """Return a tensor by its name.

        Raises:
            KeyError: there is none of that name.
        """
        for tensor in self.tensors:
            if tensor.name == name:
                return tensor
        raise KeyError(name)

    @property
    def left_out(self) -> tuple[SavedTensor, ...]:
        """The tensors whose values it does not have."""
        return tuple(tensor for tensor in self.tensors if tensor.left_out is not None)


def encode(manifest: Manifest) -> bytes:
    """Return the bytes of a manifest.

    Raises:
        ConfigError: it has more parts, or bytes, than are read.
    """
    version = _SOME_LEFT_OUT if manifest.left_out else _ALL_THERE
    content = {
        "tag": manifest.tag,
        "step": manifest.step,
        "created": manifest.created,
        "ranks": manifest.ranks,
        "tensors": [_as_json(tensor, version) for tensor in manifest.tensors],
        "files": [
            {
                "name": file.name,
                "bytes": file.nbytes,
                "checksums": "".join(f"{crc:08x}" for crc in file.checksums),
            }
            for file in manifest.files
        ],
        "run": dict(manifest.run),
        "objects": dict(manifest.objects),
    }
    data = framed_json(_KIND, version, as_json(content))
    for found, most, what in ((_parts(data), _MOST_PARTS, "parts"), (len(data), MOST_BYTES, "B")):
        if found > most:
            raise ConfigError(
                field="state dicts that are saved",
                value=f"{found:,} {what} of JSON",
                expected=f"at most {most:,}, as no more are read: keep long lists of numbers in "
                "tensors or arrays",
            )
    return data


def _parts(data: bytes) -> int:
    """Return how many parts a JSON text has at least: its texts may hold these characters too."""
    return sum(map(data.count, (b",", b"[", b"{")))


def _as_json(tensor: SavedTensor, version: int) -> Mapping[str, object]:
    content = {
        "name": tensor.name,
        "kind": tensor.kind.value,
        "shape": list(tensor.shape),
        "dtype": tensor.dtype,
        "streams": dict(tensor.streams),
        "steps": tensor.steps,
        "aliases": list(tensor.aliases),
    }
    if version == _ALL_THERE:
        return content
    return {
        **content,
        "left_out": None if tensor.left_out is None else f"{tensor.left_out:08x}",
    }


def parse(data: bytes) -> Manifest:
    """Return the manifest that these bytes are.

    Raises:
        NewerVersionError: a newer version of the format wrote them; nothing is wrong with them.
        ValueError: they are no manifest, or a damaged or contradictory one; the text says where and
            why.
    """
    version = _ALL_THERE
    # The error for an unknown version names the newest version that is read here.
    if (begins := _BEGINS.match(data)) is not None and int(begins[1]) != _ALL_THERE:
        version = _SOME_LEFT_OUT
    payload, rest = unframed(_KIND, version, data)
    if rest:
        raise ValueError(f"{len(rest)} B follow the manifest, expected none")
    parts = _parts(payload)
    if parts > _MOST_PARTS:  # each becomes an object: a few bytes here, some hundred in memory
        raise ValueError(f"its JSON has {parts} parts, of which at most {_MOST_PARTS} are read")
    try:
        content = strict_json(payload)
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None
    top = _fields(
        content,
        "the manifest",
        "tag",
        "step",
        "created",
        "ranks",
        "tensors",
        "files",
        "run",
        "objects",
    )
    manifest = Manifest(
        tag=_text(top["tag"], "tag"),
        step=_integer(top["step"], "step"),
        created=_text(top["created"], "created"),
        ranks=_integer(top["ranks"], "ranks", least=1),
        tensors=tuple(
            _tensor(entry, f"tensors[{number}]", version)
            for number, entry in enumerate(_list(top["tensors"], "tensors"))
        ),
        files=tuple(
            _file(entry, f"files[{number}]")
            for number, entry in enumerate(_list(top["files"], "files"))
        ),
        run=_object(top["run"], "run"),
        objects=_object(top["objects"], "objects"),
    )
    _check_unique((file.name for file in manifest.files), "files")
    _check_unique(
        (name for tensor in manifest.tensors for name in (tensor.name, *tensor.aliases)), "tensors"
    )
    missing = manifest.objects.keys() - {file.name for file in manifest.files}
    if missing:
        raise ValueError(f"objects has {shown(min(missing))}, which is none of its files")
    return manifest


def _tensor(entry: Any, where: str, version: int) -> SavedTensor:
    names = ["name", "kind", "shape", "dtype", "streams", "steps", "aliases"]
    if version == _SOME_LEFT_OUT:
        names.append("left_out")
    found = _fields(entry, where, *names)
    shape = tuple(
        _integer(size, f"{where}.shape") for size in _list(found["shape"], f"{where}.shape")
    )
    # So that bytes, at up to 16 for each element, still fit into 63 bits.
    if len(shape) > MAX_DIMENSIONS or math.prod(shape) > _MOST // 16:
        raise ValueError(
            f"{where}.shape is {shown(list(shape))}: no tensor has so many dimensions or elements"
        )
    streams = _object(found["streams"], f"{where}.streams")
    for name, dtype in streams.items():
        if not _STREAM.fullmatch(name):
            raise ValueError(
                f"{where}.streams has {shown(name)}: expected a name of a-z, 0-9 and _"
            )
        _dtype(dtype, f"{where}.streams.{name}")
    kind = _kind(found["kind"], f"{where}.kind")
    return SavedTensor(
        name=_text(found["name"], f"{where}.name"),
        kind=kind,
        shape=shape,
        dtype=_dtype(found["dtype"], f"{where}.dtype"),
        streams=streams,
        steps=_integer(found["steps"], f"{where}.steps"),
        aliases=tuple(
            _text(alias, f"{where}.aliases")
            for alias in _list(found["aliases"], f"{where}.aliases")
        ),
        left_out=_left_out(found.get("left_out"), where, kind, has_streams=bool(streams)),
    )


def _left_out(value: Any, where: str, kind: Kind, *, has_streams: bool) -> int | None:
    if value is None:
        if not has_streams:
            raise ValueError(f"{where} has no streams, and is not left out")
        return None
    digits = _text(value, f"{where}.left_out")
    if not _CRC.fullmatch(digits):
        raise ValueError(f"{where}.left_out is {shown(digits)}, expected 8 hexadecimal digits")
    if kind is not Kind.FROZEN or has_streams:
        raise ValueError(f"{where} is left out: expected a frozen tensor without streams")
    return int(digits, 16)


def _file(entry: Any, where: str) -> SavedFile:
    found = _fields(entry, where, "name", "bytes", "checksums")
    name, nbytes = _text(found["name"], f"{where}.name"), _integer(found["bytes"], f"{where}.bytes")
    # A manifest that names itself would have to hold its own checksum.
    if not _FILE.fullmatch(name) or name == MANIFEST:
        raise ValueError(
            f"{where}.name is {shown(name)}: expected a plain file name of the checkpoint's own "
            "directory"
        )
    digits = _text(found["checksums"], f"{where}.checksums")
    blocks = -(-nbytes // BLOCK_BYTES)
    if len(digits) != _CHECKSUM_DIGITS * blocks or not re.fullmatch(r"[0-9a-f]*", digits):
        raise ValueError(
            f"{where}.checksums has {len(digits)} characters, expected {8 * blocks} hexadecimal "
            "digits"
        )
    checksums = array(_CHECKSUM, bytes.fromhex(digits))
    if sys.byteorder == "little":
        checksums.byteswap()
    return SavedFile(name=name, nbytes=nbytes, checksums=checksums)


def _fields(value: Any, where: str, *names: str) -> Mapping[str, Any]:
    found = _object(value, where)
    # Unknown fields are refused too: a newer format says so by its version.
    if sorted(found) != sorted(names):
        raise ValueError(
            f"{where} has the fields {shown(sorted(found))}, expected {', '.join(sorted(names))}"
        )
    return found


def _object(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where} is {shown(value)}, expected an object")
    return value


def _list(value: Any, where: str) -> Sequence[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{where} is {shown(value)}, expected a list")
    return value


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{where} is {shown(value)}, expected a text")
    return value


def _kind(value: Any, where: str) -> Kind:
    try:
        return Kind(value)
    except ValueError:
        expected = ", ".join(kind.value for kind in Kind)
        raise ValueError(f"{where} is {shown(value)}, expected one of {expected}") from None


def _dtype(value: Any, where: str) -> str:
    if not isinstance(value, str) or value not in ITEMSIZES:
        raise ValueError(f"{where} is {shown(value)}, expected one of {', '.join(ITEMSIZES)}")
    return value


def _integer(value: Any, where: str, *, least: int = 0) -> int:
    # Not isinstance: true is a bool in JSON, and Python's bool is an int.
    if type(value) is not int or not least <= value <= _MOST:
        raise ValueError(
            f"{where} is {shown(value)}, expected a whole number from {least} to 2**63 - 1"
        )
    return value


def _check_unique(names: Iterable[str], where: str) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ValueError(f"{where} has {shown(name)} twice")
        seen.add(name)
