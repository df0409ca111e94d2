"""Writes the weights of a checkpoint as a folder that `from_pretrained` and `load_into` read.

Streams: a few MiB of memory, whatever the size of the model. Tied weights are written once, by
    their first name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from deepnvme import IOQueue
from deepnvme.formats.safetensors import SafetensorsWriter
from deepnvme.memory.arrays import ITEMSIZES
from deepnvme.memory.buffers import Memory, memory_of
from infinity_engine.checkpoint.manifest import Kind, SavedTensor
from infinity_engine.checkpoint.reader import CheckpointReader
from infinity_engine.errors import ConfigError

__all__ = ["SHARD_BYTES", "Dtype", "export"]

SHARD_BYTES = 5_000_000_000
"""The most bytes of tensors in one file; a larger tensor has a file of its own."""

_INDEX = "model.safetensors.index.json"

_METADATA = MappingProxyType({"format": "pt"})  # without which transformers does not open a file
_PART_BYTES = 16 << 20
_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})


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
) -> tuple[Path, ...]:
    """Write the weights of an open checkpoint into the directory `path`; return the files.

    Raises:
        ConfigError: `path` has weights already, which are left alone.
    """
    _check_free(path)
    path.mkdir(parents=True, exist_ok=True)
    shards = _shards(_weights(reader, dtype, trainable_only=trainable_only), shard_bytes)
    names = [_file_name(number, len(shards)) for number in range(len(shards))]
    for name, weights in zip(names, shards, strict=True):
        layout = {weight.tensor.name: (weight.dtype, weight.tensor.shape) for weight in weights}
        by_name = {weight.tensor.name: weight for weight in weights}
        with SafetensorsWriter(path / name, layout, _METADATA, queue=queue) as writer:
            for tensor in writer.names:
                writer.write_in_parts(tensor, _parts(reader, by_name[tensor]))
    if len(shards) > 1:
        weight_map = {
            weight.tensor.name: name
            for name, weights in zip(names, shards, strict=True)
            for weight in weights
        }
        total = sum(weight.nbytes for weights in shards for weight in weights)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (path / _INDEX).write_text(json.dumps(index, indent=2) + "\n")
        names.append(_INDEX)
    return tuple(path / name for name in names)


def _check_free(path: Path) -> None:
    found = sorted(path.glob("*.safetensors")) if path.is_dir() else []
    if found or (path / _INDEX).exists():
        raise ConfigError(
            field="path",
            value=str(path),
            expected="a directory without weights, not one with "
            f"{(found or [path / _INDEX])[0].name}: choose another",
        )


def _file_name(number: int, count: int) -> str:
    return (
        "model.safetensors" if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"
    )


def _weights(reader: CheckpointReader, dtype: Dtype, *, trainable_only: bool) -> list[_Weight]:
    wanted = {Kind.TRAINED} if trainable_only else {Kind.TRAINED, Kind.FROZEN, Kind.BUFFER}
    return [
        _Weight(tensor, _CODES.get(dtype, tensor.dtype) if _is_converted(tensor) else tensor.dtype)
        for tensor in reader.manifest.tensors
        if tensor.kind in wanted
    ]


def _is_converted(tensor: SavedTensor) -> bool:
    """Tell whether a dtype that is asked for is for this tensor: buffers keep theirs."""
    return tensor.kind is not Kind.BUFFER and tensor.dtype in _FLOATS


def _shards(weights: Sequence[_Weight], shard_bytes: int) -> list[list[_Weight]]:
    """Return the tensors of each file, in the model's order."""
    shards: list[list[_Weight]] = [[]]
    room = shard_bytes
    for weight in weights:
        if shards[-1] and weight.nbytes > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(weight)
        room -= weight.nbytes
    return shards


def _parts(reader: CheckpointReader, weight: _Weight) -> Iterator[Memory]:
    """Yield the bytes of a tensor in the dtype that it is written in."""
    tensor = weight.tensor
    stream = tensor.stream("master" if "master" in tensor.streams else "value")
    step = _PART_BYTES // ITEMSIZES[stream.dtype]
    for first in range(0, tensor.numel, step):
        numel = min(step, tensor.numel - first)
        raw = np.empty(numel * ITEMSIZES[stream.dtype], np.uint8)
        reader.read(stream, first, raw)
        yield memory_of(_converted(raw, stream.dtype, weight.dtype), writable=False)


def _converted(raw: npt.NDArray[np.uint8], have: str, want: str) -> npt.NDArray[np.uint8]:
    """Return the bytes of values in another dtype, rounded to nearest even as the engine's kernels
    round.
    """
    if have == want:
        return raw
    values = _as_fp32(raw, have)
    if want == "F32":
        return values.view(np.uint8)
    if want == "F16":
        with np.errstate(over="ignore"):  # which is infinity, as the kernels have it
            return values.astype(np.float16).view(np.uint8)
    if want == "BF16":
        return _bf16_of(values).view(np.uint8)
    return values.astype(np.float64).view(np.uint8)


def _as_fp32(raw: npt.NDArray[np.uint8], have: str) -> npt.NDArray[np.float32]:
    if have == "BF16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    kinds = {"F16": np.float16, "F32": np.float32, "F64": np.float64}
    return raw.view(kinds[have]).astype(np.float32)


def _bf16_of(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    bits = values.view(np.uint32)
    rounded: npt.NDArray[np.uint32] = (
        bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    ) >> np.uint32(16)
    rounded[np.isnan(values)] = 0x7FC0
    return rounded.astype(np.uint16)
