"""Reads what torch.distributed.checkpoint saved, without torch: tensors in parts, and objects.

The metadata is a pickle, and so is each part of a tensor: both are read as data, and nothing of
them is executed. What is found is nested as the state dict was, and read on by torch_states.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from deepnvme.volume.framing import shown
from infinity_engine.checkpoint.directory import open_regular
from infinity_engine.checkpoint.exchange.found import Block, ForeignCheckpoint
from infinity_engine.checkpoint.exchange.inert_pickle import MOST_BYTES, Built, Named, plain_pickle
from infinity_engine.checkpoint.exchange.torch_files import (
    DTYPES,
    OpenFiles,
    SavedArray,
    TorchFile,
    plain_call,
)
from infinity_engine.checkpoint.exchange.torch_states import WholeTensor, checkpoint_of
from infinity_engine.errors import DamagedCheckpoint, IncompleteCheckpoint, UnsupportedCheckpoint

__all__ = ["METADATA", "is_dcp", "open_dcp"]

METADATA = ".metadata"
"""The name of the file that describes the others."""

_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")
# What `get_state_dict` makes of states and options where it flattens the optimizer's dict.
_FLAT_STATE = re.compile(r"(state|param_groups)\.(.+)\.([A-Za-z0-9_]+)")
_ROOTS = ("state", "param_groups")


def is_dcp(path: Path) -> bool:
    """Tell whether a directory looks like what torch.distributed.checkpoint saves."""
    return (path / METADATA).is_file()


def open_dcp(
    path: Path, files: OpenFiles, *, names: Sequence[str] | None = None
) -> ForeignCheckpoint:
    """Return what the directory `path` holds; `names` are as open_torch takes them.

    Raises:
        IncompleteCheckpoint: files of it are missing.
        UnsupportedCheckpoint: it has no state dict of a model, or parts are compressed.
        DamagedCheckpoint: a file is not what torch.distributed.checkpoint writes.
    """
    try:
        nested = _DcpReading(path, files).nested()
        return checkpoint_of(path, "torch.distributed.checkpoint", nested, names=names)
    # A pickle may hold any structure: each of these errors means that a field is missing or
    # strange.
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as flaw:
        raise DamagedCheckpoint(
            path=str(path),
            entry=METADATA,
            flaw=f"a field that torch writes is missing or strange: {flaw!r:.200}",
        ) from None


class _DcpReading:
    """One directory that is being read."""

    def __init__(self, path: Path, files: OpenFiles) -> None:
        self._path = path
        self._files = files
        metadata = _fields(self._metadata())
        self._described: Mapping[str, Any] = metadata["state_dict_metadata"]
        # The path in the nested state dict of each flat name. Where it is missing, the name is the
        # path.
        self._paths: Mapping[str, Sequence[object]] = metadata.get("planner_data") or {}
        self._places: dict[tuple[str, object], Mapping[str, Any]] = {}
        for index, place in (metadata.get("storage_data") or {}).items():
            known_by = _fields(index)
            # Parts of one tensor share their name; their offsets tell them apart.
            self._places[known_by["fqn"], known_by.get("offset")] = _fields(place)

    def nested(self) -> dict[str, Any]:
        """Return the state dict, as deep as it was saved."""
        root: dict[Any, Any] = {}
        for name, described in self._described.items():
            path = tuple(self._paths.get(name) or (name,))
            value = self._value(name, described)
            _put(root, _split_flat(path) or path, value)
        return root

    def _value(self, name: str, described: Any) -> Any:
        fields = _fields(described)
        if "chunks" not in fields:  # an object
            return self._file_of(name, None).content()
        properties = fields["properties"]
        # torch writes the properties as a tuple, the dtype first, or as fields.
        dtype = properties.state[0] if isinstance(properties.state, tuple) else None
        dtype = dtype or _fields(properties).get("dtype")
        code = DTYPES.get(dtype.name) if isinstance(dtype, Named) else None
        if code is None:
            raise self._unsupported(name, f"it is of the dtype {dtype}")
        shape = tuple(fields["size"])
        blocks = tuple(self._blocks(name, fields["chunks"]))
        # A tensor in one part is returned as that part: step counts are read from such arrays only.
        if len(blocks) == 1 and blocks[0].array.shape == shape:
            return blocks[0].array
        return WholeTensor(code, shape, blocks)

    def _blocks(self, name: str, chunks: Sequence[Any]) -> Iterator[Block]:
        for chunk in chunks:
            fields = _fields(chunk)
            offsets, sizes = tuple(fields["offsets"]), tuple(fields["sizes"])
            # Each part is a whole file of torch.save within a larger file.
            file = self._file_of(name, offsets)
            array = file.content()
            if not isinstance(array, SavedArray) or array.shape != sizes:
                raise file.flaw(f"the part of {shown(name)} at {offsets} has another shape")
            yield Block(array, offsets)

    def _file_of(self, name: str, offsets: tuple[int, ...] | None) -> TorchFile:
        """Return the part of a file that has an object, or the part of a tensor at `offsets`."""
        place = self._places.get((name, offsets))
        if place is None:
            raise IncompleteCheckpoint(path=str(self._path), missing=(f"{name} at {offsets}",))
        file, start, nbytes = place["relative_path"], place["offset"], place["length"]
        if not isinstance(file, str) or not _FILE.fullmatch(file):
            raise DamagedCheckpoint(
                path=str(self._path),
                entry=METADATA,
                flaw=f"{shown(name)} is in {shown(file)}: expected a plain file name",
            )
        if place.get("transform_descriptors"):
            raise self._unsupported(name, f"it is stored as {place['transform_descriptors']!r:.80}")
        if file.endswith(".safetensors"):
            raise self._unsupported(name, "it is in safetensors, which load_into reads")
        return TorchFile(self._files, self._path / file, start=start, nbytes=nbytes)

    def _metadata(self) -> Any:
        path = self._path / METADATA
        try:
            # closefd=False: `open_regular` closes the descriptor.
            with open_regular(path) as descriptor, open(descriptor, "rb", closefd=False) as file:
                data = file.read(MOST_BYTES + 1)
        except FileNotFoundError:
            raise IncompleteCheckpoint(path=str(self._path), missing=(METADATA,)) from None
        except OSError as problem:
            raise self._flaw(str(problem)) from None
        try:
            return plain_pickle(data, reduce=plain_call)
        except ValueError as flaw:
            raise self._flaw(str(flaw)) from None

    def _flaw(self, text: str) -> DamagedCheckpoint:
        return DamagedCheckpoint(path=str(self._path), entry=METADATA, flaw=text)

    def _unsupported(self, name: str, flaw: str) -> UnsupportedCheckpoint:
        return UnsupportedCheckpoint(
            path=str(self._path), entry=name, flaw=flaw, change="Save it as plain tensors."
        )


def _fields(saved: Any) -> Mapping[str, Any]:
    """Return the fields of an object of a plain class."""
    if isinstance(saved, Built) and isinstance(saved.state, dict):
        return saved.state
    if isinstance(saved, Built) and saved.state is None:
        return {}  # a class without fields, such as that of objects
    raise ValueError(f"expected an object with fields, got {type(saved).__name__}")


def _split_flat(path: tuple[object, ...]) -> tuple[object, ...] | None:
    """Return the path of an optimizer's state that was saved under one flat name."""
    last = path[-1]
    found = _FLAT_STATE.fullmatch(last) if isinstance(last, str) else None
    # Below `state` or `param_groups` the dict was nested when it was saved: nothing is flat there.
    if found is None or any(part in _ROOTS for part in path[:-1]):
        return None
    return (*path[:-1], found[1], found[2], found[3])


def _put(root: dict[Any, Any], path: Sequence[object], value: Any) -> None:
    at = root
    for part in path[:-1]:
        at = at.setdefault(part, {})
        if not isinstance(at, dict):
            raise ValueError(f"{shown(path)} leads through something that is no dict")
    at[path[-1]] = value
