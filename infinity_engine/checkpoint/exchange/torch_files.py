"""`TorchFile`: a file of torch.save, read without torch: its content as data, its tensors in place.

Executes nothing that the file says (see inert_pickle). Reads no tensor: a `SavedArray` says where
one is, and `read` reads runs of its bytes. Called by the readers of other libraries' checkpoints.
"""

from __future__ import annotations

import math
import os
import struct
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from deepnvme.closing import Closing
from deepnvme.memory.arrays import ITEMSIZES, MAX_DIMENSIONS
from deepnvme.volume.framing import shown
from infinity_engine.checkpoint.directory import open_regular
from infinity_engine.checkpoint.exchange.inert_pickle import Built, Named, plain_pickle
from infinity_engine.errors import DamagedCheckpoint, IncompleteCheckpoint

__all__ = ["DTYPES", "OpenFiles", "SavedArray", "TorchFile", "plain_call"]

_END = struct.Struct("<4s4H2LH")  # the end of a zip's directory, which is the end of the file
# zip64: the end of a zip with fields that are too large for the one above.
_END_64 = struct.Struct("<4sQ2H2L4Q")
# Stands right before _END and says where _END_64 is.
_LOCATOR = struct.Struct("<4sLQL")
# One member in the directory, and the header right before the member's bytes.
_ENTRY = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
# The most that the 16-bit length of a zip's comment can say.
_MOST_COMMENT_BYTES = 65535
_MOST_DIRECTORY_BYTES = 256 << 20
# A field with all bits set stands for: look into zip64's.
_FULL_16, _FULL_32 = 0xFFFF, 0xFFFFFFFF
_CHECKED_BYTES = 8 << 20
# Far below the 1024 descriptors that a process has by default.
_MOST_OPEN = 64
_MOST = (1 << 62) - 1

_TORCH_MODULES = ("torch._utils", "torch._tensor")
_STORAGES = MappingProxyType(
    {
        "DoubleStorage": "F64",
        "FloatStorage": "F32",
        "HalfStorage": "F16",
        "BFloat16Storage": "BF16",
        "LongStorage": "I64",
        "IntStorage": "I32",
        "ShortStorage": "I16",
        "CharStorage": "I8",
        "ByteStorage": "U8",
        "BoolStorage": "BOOL",
        "ComplexFloatStorage": "C64",
        "UntypedStorage": "U8",
    }
)
DTYPES = MappingProxyType(
    {
        "float64": "F64",
        "float32": "F32",
        "float16": "F16",
        "bfloat16": "BF16",
        "int64": "I64",
        "int32": "I32",
        "int16": "I16",
        "int8": "I8",
        "uint8": "U8",
        "uint16": "U16",
        "uint32": "U32",
        "uint64": "U64",
        "bool": "BOOL",
        "float8_e4m3fn": "F8_E4M3",
        "float8_e5m2": "F8_E5M2",
        "complex64": "C64",
    }
)


@dataclass(frozen=True, slots=True)
class _Entry:
    """One member of a zip."""

    nbytes: int
    crc: int
    method: int
    header: int


@dataclass(frozen=True, slots=True)
class _Storage:
    """The bytes that one or several tensors lie in, from `offset` of the file on."""

    key: str
    offset: int
    nbytes: int
    dtype: str


@dataclass(frozen=True, eq=False, slots=True)
class SavedArray:
    """A tensor in a file, its first element at `offset`; strides are in bytes."""

    file: TorchFile
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    @property
    def place(self) -> tuple[str, int]:
        """The file on the drive, and the byte of it where the first element is."""
        # Parts of a DCP file lie at the same offsets of their own zips. `start` tells them apart.
        return str(self.file.path), self.file.start + self.offset

    def values(self) -> bytes:
        """Return the bytes of a small tensor that is one run."""
        return self.file.read(self.offset, self.numel * ITEMSIZES[self.dtype])

    def __repr__(self) -> str:
        return f"<a tensor {self.dtype} of shape {self.shape}>"


class OpenFiles(Closing):
    """The files that are open to be read: those that were opened last. A context manager."""

    def __init__(self) -> None:
        self._opened: dict[Path, tuple[int, ExitStack]] = {}
        self._read: list[TorchFile] = []

    def note(self, file: TorchFile) -> None:
        """Note that a file was read, for `check`."""
        self._read.append(file)

    def check(self) -> None:
        """Check all files that were noted, and forget them.

        Raises:
            DamagedCheckpoint: bytes of one are not as they were written: which file, which member.
        """
        while self._read:
            self._read.pop().check()

    def descriptor(self, path: Path) -> int:
        """Return a descriptor of a regular file, valid until other files are asked for.

        Raises:
            OSError: it cannot be opened, or is something else.
        """
        if path not in self._opened:
            # A dict keeps the order: the file that was opened first is closed.
            if len(self._opened) == _MOST_OPEN:
                _, ends = self._opened.pop(next(iter(self._opened)))
                ends.close()
            ends = ExitStack()
            self._opened[path] = (ends.enter_context(open_regular(path)), ends)
        return self._opened[path][0]

    def close(self) -> None:
        """Close all of them."""
        while self._opened:
            self._opened.popitem()[1][1].close()


class TorchFile:
    """A file of torch.save, or the `nbytes` of a file from `start` on that are one.

    Raises:
        IncompleteCheckpoint: there is no such file.
        DamagedCheckpoint: it is something else, or damaged.
    """

    def __init__(
        self, files: OpenFiles, path: Path, *, start: int = 0, nbytes: int | None = None
    ) -> None:
        self.path = path
        self._files = files
        self.start = start
        try:
            found = os.fstat(files.descriptor(path)).st_size
        except FileNotFoundError:
            raise IncompleteCheckpoint(path=str(path.parent), missing=(path.name,)) from None
        except OSError as problem:
            raise self.flaw(str(problem)) from None
        self._nbytes = found - start if nbytes is None else nbytes
        if start < 0 or self._nbytes < 0 or start + self._nbytes > found:
            raise self.flaw(
                f"bytes {start} to {start + self._nbytes} were asked for, it has {found}"
            )
        try:
            self._entries = self._directory()
        except (ValueError, struct.error) as flaw:
            raise self.flaw(str(flaw)) from None
        self._prefix = self._find_prefix()
        files.note(self)

    def content(self) -> Any:
        """Return what was saved: tensors as SavedArray, what is no plain data as Built or Named."""
        # Older files have no such record. They are taken as little-endian.
        order = self._record("byteorder", b"little")
        if order != b"little":
            raise self.flaw(f"its numbers are {shown(order)}-endian, expected little-endian")
        try:
            return plain_pickle(
                self._record("data.pkl"), reduce=self._reduced, persistent=self._storage
            )
        except ValueError as flaw:
            raise self.flaw(str(flaw)) from None

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return bytes of the file.

        Raises:
            DamagedCheckpoint: it ends before that.
        """
        room = bytearray(nbytes)
        self.read_into(offset, memoryview(room))
        return bytes(room)

    def read_into(self, offset: int, into: memoryview) -> None:
        """Fill `into` with the bytes from `offset` on."""
        # preadv may read less than it was asked for. It returns 0 at the end of the file only.
        done = 0
        while done < len(into):
            try:
                # Asked for each time: another file may have closed it.
                descriptor = self._files.descriptor(self.path)
                count = os.preadv(descriptor, [into[done:]], self.start + offset + done)
            except OSError as problem:
                raise self.flaw(str(problem)) from None
            if not count:
                raise self.flaw(f"it ends at byte {offset + done}, expected {offset + len(into)} B")
            done += count

    def check(self) -> None:
        """Read every member and compare it with its checksum; members without one are not checked.

        Raises:
            DamagedCheckpoint: one is not as it was written: which.
        """
        # A checksum of 0 stands for none.
        for name, entry in self._entries.items():
            if entry.crc and _crc_of(self, self._offset_of(entry), entry.nbytes) != entry.crc:
                raise self.flaw(f"its member {shown(name)} is damaged: its checksum does not match")

    def flaw(self, text: str) -> DamagedCheckpoint:
        """Return the error that says what is wrong with the file."""
        return DamagedCheckpoint(path=str(self.path.parent), entry=self.path.name, flaw=text)

    # --- tensors ----------------------------------------------------------------------------------

    def _storage(self, known_by: object) -> object:
        """Return the storage that a persistent object of the pickle names."""
        if not isinstance(known_by, tuple) or len(known_by) != 5 or known_by[0] != "storage":
            raise ValueError(
                f"it names {shown(type(known_by).__name__)} where a storage was expected"
            )
        # ("storage", class, key, device, number of elements), as torch.save writes it.
        _, kind, key, _, count = known_by
        dtype = _STORAGES.get(kind.name) if isinstance(kind, Named) else None
        if (
            dtype is None
            or not isinstance(key, str)
            or type(count) is not int
            or not 0 <= count <= _MOST
        ):
            raise ValueError(f"it has a storage of a kind that is not known: {kind}")
        entry = self._entries.get(f"{self._prefix}data/{key}")
        if entry is None:
            raise ValueError(f"the storage {shown(key)} is missing")
        if entry.method:
            raise ValueError(f"the storage {shown(key)} is compressed, which torch.save never does")
        if count * ITEMSIZES[dtype] > entry.nbytes:
            raise ValueError(
                f"the storage {shown(key)} has {entry.nbytes} B, not {count} of {dtype}"
            )
        return _Storage(key, self._offset_of(entry), entry.nbytes, dtype)

    def _reduced(self, by: object, arguments: tuple[Any, ...]) -> object:
        """Return what a call of the pickle makes: what tensors need, and all others as data."""
        name = by.name if isinstance(by, Named) and by.module in _TORCH_MODULES else ""
        # The arguments that are left out say nothing of the bytes: requires_grad, hooks, metadata.
        if name in ("_rebuild_tensor_v2", "_rebuild_tensor"):
            storage, offset, shape, strides = arguments[:4]
            return self._array(storage, storage.dtype, offset, shape, strides)
        if name == "_rebuild_tensor_v3":
            storage, offset, shape, strides, _, _, dtype = arguments[:7]
            return self._array(storage, DTYPES[dtype.name], offset, shape, strides)
        if name in ("_rebuild_parameter", "_rebuild_parameter_with_state"):
            return arguments[0]
        if name == "_rebuild_from_type_v2":  # a tensor that has attributes
            return self._reduced(arguments[0], arguments[2])
        return plain_call(by, arguments)

    def _array(self, storage: Any, dtype: str, offset: Any, shape: Any, strides: Any) -> SavedArray:
        if not isinstance(storage, _Storage):
            raise ValueError("a tensor has no storage")
        sizes, steps = tuple(shape), tuple(strides)
        numbers = (offset, *sizes, *steps)
        if len(sizes) != len(steps) or len(sizes) > MAX_DIMENSIONS:
            raise ValueError(f"a tensor has {len(sizes)} dimensions and {len(steps)} strides")
        if (
            not all(type(number) is int and 0 <= number <= _MOST for number in numbers)
            or math.prod(sizes) > _MOST
        ):
            raise ValueError("a tensor has a size, stride or offset that none can have")
        # Overlaps and strides of 0 are fine: only the last element has to lie within the storage.
        last = offset + sum((size - 1) * step for size, step in zip(sizes, steps, strict=True))
        itemsize = ITEMSIZES[dtype]
        if math.prod(sizes) and (last + 1) * itemsize > storage.nbytes:
            raise ValueError(
                f"a tensor of shape {shown(sizes)} goes beyond its storage {shown(storage.key)}"
            )
        return SavedArray(
            self,
            dtype,
            sizes,
            tuple(step * itemsize for step in steps),
            storage.offset + offset * itemsize,
        )

    # --- the zip ----------------------------------------------------------------------------------

    def _record(self, name: str, default: bytes | None = None) -> bytes:
        entry = self._entries.get(self._prefix + name)
        if entry is None and default is not None:
            return default
        if entry is None or entry.method or entry.nbytes > _MOST_DIRECTORY_BYTES:
            raise self.flaw(
                f"its member {name} is missing, compressed or too long: no file of torch.save"
            )
        data = self.read(self._offset_of(entry), entry.nbytes)
        if entry.crc and zlib.crc32(data) != entry.crc:
            raise self.flaw(f"its member {name} is damaged: its checksum does not match")
        return data

    def _find_prefix(self) -> str:
        """Return the folder that all members are in, which torch.save names after the file."""
        for name in self._entries:
            folder, slash, rest = name.partition("/")
            if rest == "data.pkl":
                return folder + slash
        raise self.flaw(
            "it has no data.pkl: expected a file of torch.save (torch.jit and others are not read)"
        )

    def _offset_of(self, entry: _Entry) -> int:
        """Return where the bytes of a member begin."""
        # The directory does not say this. torch pads the local header so that bytes begin at 64.
        try:
            header = _LOCAL.unpack(self.read(entry.header, _LOCAL.size))
        except struct.error as flaw:
            raise self.flaw(str(flaw)) from None
        if header[0] != b"PK\3\4":
            raise self.flaw(f"no member begins at byte {entry.header}: it is damaged")
        offset: int = entry.header + _LOCAL.size + header[9] + header[10]
        if offset + entry.nbytes > self._nbytes:
            raise self.flaw(
                f"a member ends at byte {offset + entry.nbytes} of {self._nbytes}: it was cut off"
            )
        return offset

    def _directory(self) -> Mapping[str, _Entry]:
        start, nbytes, count = self._end()
        if not 0 <= nbytes <= _MOST_DIRECTORY_BYTES or not 0 <= start <= self._nbytes - nbytes:
            raise ValueError(
                f"its directory would have {nbytes} B at byte {start} of {self._nbytes}"
            )
        data = self.read(start, nbytes)
        found = dict(_entries(data))
        # A name that stands twice is once in the dict.
        if len(found) != count:
            raise ValueError(f"its directory has {len(found)} members, its end says {count}")
        return found

    def _end(self) -> tuple[int, int, int]:
        """Return where the directory begins, how many bytes and how many members it has."""
        length = min(self._nbytes, _END.size + _MOST_COMMENT_BYTES)
        tail = self.read(self._nbytes - length, length)
        # From behind: values before it may look like the signature.
        at = tail.rfind(b"PK\5\6")
        if at < 0 or at + _END.size > len(tail):
            legacy = self._nbytes > 1 and self.read(0, 1) == b"\x80"
            old = (
                ": it was saved in the format before torch 1.6; save it again with a newer torch"
                if legacy
                else ""
            )
            raise ValueError(f"it is no zip, or was cut off: expected a file of torch.save{old}")
        _, _, _, _, count, nbytes, start, _ = _END.unpack_from(tail, at)
        # Otherwise the fields stand in zip64's end, which the locator before this end names.
        if count != _FULL_16 and _FULL_32 not in (nbytes, start):
            return start, nbytes, count
        where = self._nbytes - length + at - _LOCATOR.size
        signature, _, end, _ = (
            _LOCATOR.unpack(self.read(where, _LOCATOR.size)) if where >= 0 else (b"", 0, 0, 0)
        )
        if signature != b"PK\6\7" or end > self._nbytes - _END_64.size:
            raise ValueError("the end of its directory is damaged")
        signature, *_, count, nbytes, start = _END_64.unpack(self.read(end, _END_64.size))
        if signature != b"PK\6\6":
            raise ValueError("the end of its directory is damaged")
        return start, nbytes, count


def plain_call(by: object, arguments: tuple[Any, ...]) -> object:
    """Return what a call makes: an ordered dict, a torch.Size, or a description of the call."""
    name = str(by) if isinstance(by, Named) else ""
    if name == "collections.OrderedDict":
        pairs = arguments[0] if arguments else ()
        # With anything but pairs, the items follow by an opcode of their own.
        return dict(pairs) if all(_is_pair(pair) for pair in pairs) else {}
    if name == "torch.Size":
        return tuple(arguments[0])
    return Built(by, arguments)


def _crc_of(file: TorchFile, offset: int, nbytes: int) -> int:
    """Return the checksum of bytes of a file."""
    crc, room = 0, memoryview(bytearray(min(nbytes, _CHECKED_BYTES)))
    for at in range(offset, offset + nbytes, _CHECKED_BYTES):
        part = room[: min(_CHECKED_BYTES, offset + nbytes - at)]
        file.read_into(at, part)
        crc = zlib.crc32(part, crc)
    return crc


def _entries(data: bytes) -> Iterator[tuple[str, _Entry]]:
    """Yield the members that a zip's directory has."""
    at = 0
    while at < len(data):
        fields = _ENTRY.unpack_from(data, at)
        signature, method, crc, packed, nbytes = (
            fields[0],
            fields[4],
            fields[7],
            fields[8],
            fields[9],
        )
        name_bytes, extra_bytes, comment_bytes, header = (
            fields[10],
            fields[11],
            fields[12],
            fields[16],
        )
        if signature != b"PK\1\2":
            raise ValueError("its directory is damaged")
        at += _ENTRY.size
        name = data[at : at + name_bytes].decode("utf-8", "replace")
        extra = data[at + name_bytes : at + name_bytes + extra_bytes]
        at += name_bytes + extra_bytes + comment_bytes
        nbytes, packed, header = _full_sizes(extra, [nbytes, packed, header])
        # Not compressed, so both have to be equal.
        if not method and packed != nbytes:
            raise ValueError(f"its member {shown(name)} has {packed} B and {nbytes} B at once")
        yield name, _Entry(nbytes, crc, method, header)


def _full_sizes(extra: bytes, sizes: list[int]) -> list[int]:
    """Return sizes, those that did not fit into 32 bits from the field that zip64 adds."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            # The field has only those sizes that are full, in this order.
            places = [number for number, size in enumerate(sizes) if size == _FULL_32]
            for number, place in enumerate(places):
                (sizes[place],) = struct.unpack_from("<Q", extra, at + 4 + 8 * number)
        at += 4 + length
    return sizes


def _is_pair(value: object) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and isinstance(value[0], str)
