"""Writes the weights of a checkpoint as a folder that `from_pretrained` and `load_into` read.

Streams: a few MiB of memory, whatever the size of the model. Tied weights are written once, by
their first name. Files are written into a draft and moved when all of them are whole, the index
last. A failed export removes its files; those of a killed one, the next export removes.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import MappingProxyType

import numpy as np

from deepnvme import IOQueue
from deepnvme.errors import NVMeError
from deepnvme.formats.safetensors import SafetensorsError, SafetensorsWriter
from deepnvme.memory.arrays import ITEMSIZES
from deepnvme.memory.buffers import Memory, memory_of
from deepnvme.volume.syncing import sync_directory, sync_file
from infinity_engine.checkpoint.manifest import Kind, SavedTensor
from infinity_engine.checkpoint.reader import CheckpointReader
from infinity_engine.checkpoint.rounding import FLOATS, converted
from infinity_engine.errors import ConfigError
from infinity_engine.storage import transfer_error

__all__ = [
    "MEMORY_BYTES",
    "SHARD_BYTES",
    "Dtype",
    "check_free",
    "check_has_all_weights",
    "dtype_in",
    "export",
    "remove_killed",
]

SHARD_BYTES = 5_000_000_000
"""The most bytes of tensors in one file; a larger tensor has a file of its own."""

MEMORY_BYTES = 48 << 20
"""The memory that an export takes where the caller asks for no other."""

_INDEX = "model.safetensors.index.json"

_DRAFT = ".export.writing"
_SHARD_NAME = re.compile(r"model-[0-9]{5,}-of-[0-9]{5,}\.safetensors")

_METADATA = MappingProxyType({"format": "pt"})  # without which transformers does not open a file


class Dtype(Enum):
    """What floating-point weights are written in."""

    # What modules compute with, which differs between tensors where the model mixes dtypes.
    AS_COMPUTED = "model"
    FP32 = "fp32"  # The masters.
    BF16 = "bf16"  # The masters, rounded to nearest even.
    FP16 = "fp16"  # Likewise.


_CODES = MappingProxyType({Dtype.FP32: "F32", Dtype.BF16: "BF16", Dtype.FP16: "F16"})


@dataclass(frozen=True, slots=True)
class _Weight:
    """A tensor to write, and the dtype that it is written in."""

    tensor: SavedTensor
    dtype: str

    @property
    def nbytes(self) -> int:
        return self.tensor.numel * ITEMSIZES[self.dtype]


def export(
    reader: CheckpointReader,
    path: Path,
    *,
    dtype: Dtype = Dtype.AS_COMPUTED,
    trainable_only: bool = False,
    shard_bytes: int = SHARD_BYTES,
    queue: IOQueue | None = None,
    memory_bytes: int = MEMORY_BYTES,
) -> tuple[Path, ...]:
    """Write the weights of an open checkpoint into the directory `path`; return the files.

    Takes `memory_bytes` beside what the reader has.

    Raises:
        ConfigError: `path` has weights already, which are left alone; or the checkpoint leaves out
            frozen weights, and `trainable_only` is not set.
        TransferError: the drive is full or failed. No file is left.
    """
    if not trainable_only:
        check_has_all_weights(reader)
    remove_killed(path)
    check_free(path)
    draft = path / _DRAFT
    draft.mkdir(parents=True)
    shards = _shards(_weights(reader, dtype, trainable_only=trainable_only), shard_bytes)
    names = [_file_name(number, len(shards)) for number in range(len(shards))]
    try:
        for name, weights in zip(names, shards, strict=True):
            _write_shard(reader, draft / name, weights, queue, memory_bytes)
        if len(shards) > 1:
            # Before the first move: after a kill, it says which files were moved.
            _write_index(draft, dict(zip(names, shards, strict=True)))
            names.append(_INDEX)
        _move(draft, path, names)
    # Ctrl-C ends here too. Whole shards go as well: without the index they are no model.
    except BaseException:
        for name in names:
            (path / name).unlink(missing_ok=True)
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return tuple(path / name for name in names)


def _move(draft: Path, path: Path, names: Sequence[str]) -> None:
    """Move all files to their places, the last one when the others would survive a power loss."""
    *others, last = names
    for name in others:
        (draft / name).replace(path / name)
    sync_directory(path)
    (draft / last).replace(path / last)
    shutil.rmtree(draft, ignore_errors=True)
    sync_directory(path)


def remove_killed(path: Path) -> None:
    """Remove what a killed export has left in a directory. Weights that are whole stay."""
    draft = path / _DRAFT
    if not draft.is_dir():
        return
    # Where the index is still in the draft, shards that it names may have their places already.
    for name in _named_in(draft / _INDEX):
        (path / name).unlink(missing_ok=True)
    shutil.rmtree(draft)


def _named_in(index: Path) -> set[str]:
    """Return the shards that an index names; none where it is not whole."""
    try:
        found = json.loads(index.read_text())["weight_map"].values()
        return {name for name in found if _SHARD_NAME.fullmatch(name)}
    except (FileNotFoundError, ValueError, TypeError, LookupError, AttributeError):
        return set()


def _write_shard(
    reader: CheckpointReader,
    path: Path,
    weights: Sequence[_Weight],
    queue: IOQueue | None,
    memory_bytes: int,
) -> None:
    layout = {weight.tensor.name: (weight.dtype, weight.tensor.shape) for weight in weights}
    by_name = {weight.tensor.name: weight for weight in weights}
    third = max(1, memory_bytes // 3)  # for staging, for a part, and for the part converted
    try:
        with SafetensorsWriter(path, layout, _METADATA, staging_bytes=third, queue=queue) as writer:
            for tensor in writer.names:
                writer.write_in_parts(tensor, _parts(reader, by_name[tensor], third))
    except SafetensorsError:
        # It says what the format refuses.
        raise
    except NVMeError as error:
        raise transfer_error(error, f"weights for {path.parent.parent}") from None


def _write_index(path: Path, shards: Mapping[str, Sequence[_Weight]]) -> None:
    """Write the index of several files, which are whole."""
    weight_map = {
        weight.tensor.name: name for name, weights in shards.items() for weight in weights
    }
    total = sum(weight.nbytes for weights in shards.values() for weight in weights)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (path / _INDEX).write_text(json.dumps(index, indent=2) + "\n")
    sync_file(path / _INDEX)
    sync_directory(path)


def check_free(path: Path) -> None:
    """Check that a directory has no weights yet.

    Raises:
        ConfigError: it has some, which are left alone, or it is a file.
    """
    if path.exists() and not path.is_dir():
        raise ConfigError(field="path", value=str(path), expected="a directory: a file is there")
    found = sorted(path.glob("*.safetensors")) if path.is_dir() else []
    if found or (path / _INDEX).exists():
        raise ConfigError(
            field="path",
            value=str(path),
            expected="a directory without weights, not one with "
            f"{(found or [path / _INDEX])[0].name}: choose another",
        )


def check_has_all_weights(reader: CheckpointReader) -> None:
    """Check that a checkpoint has the values of all weights.

    Raises:
        ConfigError: it leaves out frozen ones.
    """
    left_out = reader.manifest.left_out
    if left_out:
        raise ConfigError(
            field="trainable_only",
            value=False,
            expected=f"True (--trainable-only), as {reader.path} leaves out {len(left_out)} frozen "
            f"tensors, such as {left_out[0].name}: it has what was trained, and no whole model. To "
            "write all weights, load it into an engine of the same base and call its export()",
        )


def _file_name(number: int, count: int) -> str:
    return (
        "model.safetensors" if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"
    )


def _weights(reader: CheckpointReader, dtype: Dtype, *, trainable_only: bool) -> list[_Weight]:
    wanted = {Kind.TRAINED} if trainable_only else {Kind.TRAINED, Kind.FROZEN, Kind.BUFFER}
    return [
        _Weight(tensor, dtype_in(dtype, tensor))
        for tensor in reader.manifest.tensors
        if tensor.kind in wanted
    ]


def dtype_in(dtype: Dtype, tensor: SavedTensor) -> str:
    """Return what a tensor is written in where `dtype` is asked for: buffers keep theirs."""
    is_weight = tensor.kind is not Kind.BUFFER and tensor.dtype in FLOATS
    return _CODES.get(dtype, tensor.dtype) if is_weight else tensor.dtype


def _shards(weights: Sequence[_Weight], shard_bytes: int) -> list[list[_Weight]]:
    """Return the tensors of each file, in the model's order."""
    shards: list[list[_Weight]] = [[]]
    room = shard_bytes
    for weight in weights:
        # A tensor that is larger than a file may be gets one of its own.
        if shards[-1] and weight.nbytes > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(weight)
        room -= weight.nbytes
    return shards


def _parts(reader: CheckpointReader, weight: _Weight, part_bytes: int) -> Iterator[Memory]:
    """Yield the bytes of a tensor in the dtype that it is written in."""
    tensor = weight.tensor
    stream = tensor.stream("master" if "master" in tensor.streams else "value")
    # A conversion has several arrays of the part's size at once.
    room = part_bytes if weight.dtype == stream.dtype else part_bytes // 4
    step = max(1, room // ITEMSIZES[stream.dtype])
    for first in range(0, tensor.numel, step):
        numel = min(step, tensor.numel - first)
        raw = np.empty(numel * ITEMSIZES[stream.dtype], np.uint8)
        reader.read(stream, first, raw)
        yield memory_of(converted(raw, stream.dtype, weight.dtype), writable=False)
