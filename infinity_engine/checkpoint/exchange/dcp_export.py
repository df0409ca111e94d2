"""Writes a checkpoint as torch.distributed.checkpoint reads it, without torch, in bounded memory.

The state dict is {"model": ..., "optim": {"state": ..., "param_groups": ...}}, as torch's
get_state_dict gives it: dcp.load and set_state_dict continue from it. Each tensor is in parts of a
few MiB, each part a file of torch.save within a larger one.
"""

from __future__ import annotations

import io
import math
import pickle
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

import numpy as np

from deepnvme.memory.arrays import ITEMSIZES
from deepnvme.volume.syncing import sync_directory, sync_file
from infinity_engine.checkpoint.export import Dtype, check_has_all_weights, dtype_in
from infinity_engine.checkpoint.manifest import Kind, SavedTensor
from infinity_engine.checkpoint.objects import objects_file, read_objects
from infinity_engine.checkpoint.reader import CheckpointReader
from infinity_engine.checkpoint.rounding import converted
from infinity_engine.checkpoint.writer import FILE_BYTES
from infinity_engine.errors import ConfigError

__all__ = ["export_dcp"]

# So much of a stream is in memory at once.
_PART_BYTES = 16 << 20
# Modules of torch that the pickles name. Nothing here imports them.
_CLASSES = "torch.distributed.checkpoint.metadata"
_FILES = "torch.distributed.checkpoint.filesystem"
# For each dtype, the class of its storages and the attribute of torch that is the dtype.
_STORAGES = MappingProxyType(
    {
        "F64": ("DoubleStorage", "float64"),
        "F32": ("FloatStorage", "float32"),
        "F16": ("HalfStorage", "float16"),
        "BF16": ("BFloat16Storage", "bfloat16"),
        "I64": ("LongStorage", "int64"),
        "I32": ("IntStorage", "int32"),
        "I16": ("ShortStorage", "int16"),
        "I8": ("CharStorage", "int8"),
        "U8": ("ByteStorage", "uint8"),
        "BOOL": ("BoolStorage", "bool"),
    }
)


def export_dcp(
    reader: CheckpointReader,
    path: Path,
    *,
    dtype: Dtype = Dtype.FP32,
    trainable_only: bool = False,
) -> tuple[Path, ...]:
    """Write an open checkpoint into the directory `path` for torch; return the files.

    Weights are written in `dtype`, moments in fp32. Of the optimizer's groups, the options are
    there if the checkpoint names the parameters of each group.

    Raises:
        ConfigError: `path` has something already, or a tensor is of a dtype that torch lacks; or
            the checkpoint leaves out frozen weights, and `trainable_only` is not set.
    """
    if not trainable_only:
        check_has_all_weights(reader)
    if path.exists() and any(path.iterdir()):
        raise ConfigError(
            field="path", value=str(path), expected="a directory that has nothing yet"
        )
    path.mkdir(parents=True, exist_ok=True)
    writer = _Writer(path)
    try:
        for tensor in reader.manifest.tensors:
            if tensor.kind is Kind.TRANSIENT or (
                trainable_only and tensor.kind is not Kind.TRAINED
            ):
                continue
            _write_tensor(reader, tensor, dtype, writer)
        for number, group in enumerate(_groups(reader)):
            for name, value in group.items():
                writer.add_object(("optim", "param_groups", number, name), value)
        return writer.finish()
    # Ctrl-C ends here too: half an export must not stay behind.
    except BaseException:
        writer.abandon()
        raise


def _write_tensor(
    reader: CheckpointReader, tensor: SavedTensor, dtype: Dtype, writer: _Writer
) -> None:
    want = dtype_in(dtype, tensor)
    # A trained tensor leaves as its fp32 master, rounded to `want`; any other as its value.
    source = "master" if "master" in tensor.streams else "value"
    for name in (tensor.name, *tensor.aliases):
        writer.add_tensor(reader, tensor, source, want, ("model", name))
    if tensor.kind is not Kind.TRAINED:
        return
    for moment in tensor.streams:
        if moment != "master":
            path = ("optim", "state", tensor.name, moment)
            writer.add_tensor(reader, tensor, moment, tensor.streams[moment], path)
    # torch.optim keeps `step` as an fp32 tensor without dimensions.
    steps = np.array(tensor.steps, "<f4").tobytes()
    writer.add_values(("optim", "state", tensor.name, "step"), "F32", steps)


def _groups(reader: CheckpointReader) -> Sequence[Mapping[str, Any]]:
    """Return the optimizer's groups with the names of their parameters, where they are known."""
    members = reader.manifest.run.get("optimizer_parameters")
    if not isinstance(members, list) or objects_file(0) not in reader.manifest.objects:
        return ()
    groups = read_objects(reader, 0).get("optimizer_groups", ())
    if len(groups) != len(members):
        return ()
    # A tensor as an option, such as `lr`, is no plain data and stays behind.
    plain = [{key: value for key, value in group.items() if _is_plain(value)} for group in groups]
    return [{**group, "params": names} for group, names in zip(plain, members, strict=True)]


def _is_plain(value: object) -> bool:
    parts: Sequence[object] = value if isinstance(value, tuple | list) else (value,)
    return all(part is None or type(part) in (bool, int, float, str) for part in parts)


# --- files ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a tensor, or an object, and where it is."""

    offsets: tuple[int, ...] | None
    sizes: tuple[int, ...]
    file: str
    start: int
    nbytes: int


class _Writer:
    """Writes the files of one export, and in the end what describes them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._names: list[str] = []
        self._file: BinaryIO = io.BytesIO()  # until there is one
        self._described: dict[tuple[object, ...], tuple[str, tuple[int, ...], list[_Part]]] = {}

    def add_tensor(
        self,
        reader: CheckpointReader,
        tensor: SavedTensor,
        stream_name: str,
        want: str,
        path: tuple[object, ...],
    ) -> None:
        """Write one stream as a tensor, part by part."""
        if want not in _STORAGES:
            expected = f"a dtype of {', '.join(_STORAGES)}, as DCP has no other"
            raise ConfigError(field=tensor.name, value=want, expected=expected)
        stream = tensor.stream(stream_name)
        # The wider dtype counts: a part is in memory once in each of the two.
        wide = max(ITEMSIZES[stream.dtype], ITEMSIZES[want])
        found: list[_Part] = []
        for offsets, sizes, first in _parts(tensor.shape, max(1, _PART_BYTES // wide)):
            raw = np.empty(math.prod(sizes) * ITEMSIZES[stream.dtype], np.uint8)
            reader.read(stream, first, raw)
            values = converted(raw, stream.dtype, want)
            data = _saved(_tensor_pickle(want, sizes), values.data)
            found.append(self._place(offsets, sizes, data))
        self._described[path] = (want, tensor.shape, found)

    def add_values(self, path: tuple[object, ...], dtype: str, values: bytes) -> None:
        """Write a tensor of one value."""
        part = self._place((), (), _saved(_tensor_pickle(dtype, ()), values))
        self._described[path] = (dtype, (), [part])

    def add_object(self, path: tuple[object, ...], value: object) -> None:
        """Write plain data."""
        part = self._place(None, (), _saved(pickle.dumps(value, protocol=2), None))
        self._described[path] = ("", (), [part])

    def finish(self) -> tuple[Path, ...]:
        """Write what describes the files, so that they are a checkpoint; return all files."""
        self._end_file()
        # Last, and by a rename: DCP opens a directory by this file.
        draft = self._path / ".metadata.tmp"
        draft.write_bytes(_metadata(self._described))
        sync_file(draft)
        draft.replace(self._path / ".metadata")
        sync_directory(self._path)
        return tuple(self._path / name for name in (*self._names, ".metadata"))

    def abandon(self) -> None:
        """Remove what was written."""
        self._file.close()
        for name in (*self._names, ".metadata.tmp"):
            (self._path / name).unlink(missing_ok=True)

    def _place(self, offsets: tuple[int, ...] | None, sizes: tuple[int, ...], data: bytes) -> _Part:
        if not self._names or self._file.tell() >= FILE_BYTES:
            self._end_file()
            # The names that rank 0 of DCP gives its files.
            self._names.append(f"__0_{len(self._names)}.distcp")
            self._file = (self._path / self._names[-1]).open("xb")
        start = self._file.tell()
        self._file.write(data)
        return _Part(offsets, sizes, self._names[-1], start, len(data))

    def _end_file(self) -> None:
        self._file.close()
        if self._names:
            sync_file(self._path / self._names[-1])


def _parts(
    shape: tuple[int, ...], most: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """Yield offsets, sizes and first element of boxes of at most so many elements in a row."""
    if math.prod(shape) <= most:
        if math.prod(shape):
            yield (0,) * len(shape), shape, 0
        return
    cut = 0  # the dimension that is cut; those before it are gone through one by one
    while math.prod(shape[cut + 1 :]) > most:
        cut += 1
    # Boxes are cut so that their elements follow one another in the stream: one read for each.
    inner = math.prod(shape[cut + 1 :])
    step = max(1, most // inner)
    for number, outer in enumerate(np.ndindex(*shape[:cut])):
        for at in range(0, shape[cut], step):
            size = min(step, shape[cut] - at)
            offsets = (*map(int, outer), at, *(0,) * (len(shape) - cut - 1))
            sizes = (*(1,) * cut, size, *shape[cut + 1 :])
            yield offsets, sizes, (number * shape[cut] + at) * inner


def _saved(pickled: bytes, values: Any) -> bytes:
    """Return a file of torch.save: a zip of a pickle and the bytes of one storage."""
    room = io.BytesIO()
    # Stored, not compressed: torch and `torch_files` read tensors in place.
    with zipfile.ZipFile(room, "w", zipfile.ZIP_STORED) as file:
        file.writestr("archive/data.pkl", pickled)
        file.writestr("archive/byteorder", "little")
        if values is not None:
            file.writestr("archive/data/0", values)
        file.writestr("archive/version", "3\n")
    return room.getvalue()


# --- pickles --------------------------------------------------------------------------------------


class _Pickle:
    """Writes a pickle by opcodes: it names classes of torch, which need not be here."""

    def __init__(self) -> None:
        # PROTO 2.
        self.data = bytearray(b"\x80\x02")

    def ended(self) -> bytes:
        """Return the pickle."""
        return bytes(self.data + b".")

    def name(self, module: str, name: str) -> None:
        """Push a class or function."""
        self.data += f"c{module}\n{name}\n".encode()

    def plain(self, value: object) -> None:
        """Push None, truth values, numbers, texts and tuples of them."""
        if isinstance(value, tuple):
            # MARK, the parts, TUPLE: of any length.
            self.data += b"("
            for part in value:
                self.plain(part)
            self.data += b"t"
            return
        # Without PROTO and STOP.
        pushed = pickle.dumps(value, protocol=2)[2:-1]
        # A text also ends with its memo's entry, which nothing here reads again. A number may end
        # with the same two bytes: 7405573 does.
        self.data += pushed.removesuffix(b"q\x00") if isinstance(value, str) else pushed

    def size(self, value: tuple[int, ...]) -> None:
        """Push a torch.Size."""
        self.name("torch", "Size")
        self.plain((value,))
        self.data += b"R"

    def begin(self, module: str, name: str) -> None:
        """Begin an object of a plain class: its fields follow."""
        self.name(module, name)
        # EMPTY_TUPLE NEWOBJ make the object; EMPTY_DICT MARK begin its fields.
        self.data += b")\x81}("

    def end(self) -> None:
        """End it."""
        # SETITEMS BUILD.
        self.data += b"ub"


def _tensor_pickle(dtype: str, shape: tuple[int, ...]) -> bytes:
    """Return the pickle of a tensor that is all of storage 0."""
    strides = tuple(math.prod(shape[number + 1 :]) for number in range(len(shape)))
    written = _Pickle()
    written.name("torch._utils", "_rebuild_tensor_v2")
    # Two MARKs: the arguments of the call and, as the first of them, the storage's persistent id.
    written.data += b"(("
    written.plain("storage")
    written.name("torch", _STORAGES[dtype][0])
    for part in ("0", "cpu", math.prod(shape)):
        written.plain(part)
    # TUPLE BINPERSID: the storage. The other arguments follow.
    written.data += b"tQ"
    for value in (0, shape, strides, False):
        written.plain(value)
    # The last argument, an OrderedDict, would hold hooks of backward: it is empty.
    written.name("collections", "OrderedDict")
    written.data += b")RtR"
    return written.ended()


def _metadata(
    described: Mapping[tuple[object, ...], tuple[str, tuple[int, ...], list[_Part]]],
) -> bytes:
    """Return the pickle of torch's Metadata."""
    # In the opcodes below, "}(" opens a dict and "u" ends it; "](" opens a list and "e" ends it.
    written = _Pickle()
    written.begin(_CLASSES, "Metadata")
    written.plain("state_dict_metadata")
    written.data += b"}("
    for path, (dtype, shape, parts) in described.items():
        written.plain(_key(path))
        if not dtype:
            # An object has no fields: neither shape nor parts.
            written.name(_CLASSES, "BytesStorageMetadata")
            written.data += b")\x81"
            continue
        written.begin(_CLASSES, "TensorStorageMetadata")
        written.plain("properties")
        _write_properties(written, dtype)
        written.plain("size")
        written.size(shape)
        written.plain("chunks")
        written.data += b"]("
        for part in parts:
            written.begin(_CLASSES, "ChunkStorageMetadata")
            written.plain("offsets")
            written.size(part.offsets or (0,) * len(shape))
            written.plain("sizes")
            written.size(part.sizes)
            written.end()
        written.data += b"e"
        written.end()
    written.data += b"u"
    written.plain("planner_data")
    written.data += b"}("
    for path in described:
        written.plain(_key(path))
        written.plain(path)
    written.data += b"u"
    written.plain("storage_data")
    written.data += b"}("
    for path, (_, _, parts) in described.items():
        for part in parts:
            _write_place(written, path, part)
    written.data += b"u"
    written.plain("storage_meta")
    written.plain(None)
    written.plain("version")
    written.plain("1.0.0")
    written.end()
    return written.ended()


def _write_properties(written: _Pickle, dtype: str) -> None:
    # The state of this class is a tuple: dtype, layout, requires_grad, memory format, pin_memory.
    written.name(_CLASSES, "TensorProperties")
    written.data += b")\x81("
    written.name("torch", _STORAGES[dtype][1])
    written.name("torch", "strided")
    written.plain(False)
    # An enumeration is pickled as a call of its class with the member's value.
    written.name(_CLASSES, "_MEM_FORMAT_ENCODING")
    written.plain((0,))
    written.data += b"R"
    written.plain(False)
    written.data += b"tb"


def _write_place(written: _Pickle, path: tuple[object, ...], part: _Part) -> None:
    written.begin(_CLASSES, "MetadataIndex")
    written.plain("fqn")
    written.plain(_key(path))
    written.plain("offset")
    if part.offsets is None:
        written.plain(None)
    else:
        written.size(part.offsets)
    written.plain("index")
    written.plain(None)
    written.end()
    written.begin(_FILES, "_StorageInfo")
    for name, value in (
        ("relative_path", part.file),
        ("offset", part.start),
        ("length", part.nbytes),
    ):
        written.plain(name)
        written.plain(value)
    written.end()


def _key(path: tuple[object, ...]) -> str:
    return ".".join(map(str, path))
