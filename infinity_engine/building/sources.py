"""Tensors in a directory of safetensors files: which there are, and where the bytes of each lie.

Reads headers and indices only, and refuses what does not fit together before a value is read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from deepnvme import Returns, SafetensorsError, safetensors_header
from deepnvme.formats.safetensors import SafetensorsEntry
from deepnvme.memory.arrays import empty
from infinity_engine.errors import ConfigError

__all__ = ["FileTensor", "found_in", "found_of_pretrained", "listed", "text_of"]

_INDEX = ".safetensors.index.json"
# What Transformers calls the files of a model; it looks for them in this order.
_WHOLE = "model.safetensors"
_SHARDS = f"model{_INDEX}"
_SHOWN = 8  # names


@dataclass(frozen=True, slots=True)
class FileTensor:
    """Where the values of a tensor are."""

    path: Path
    name: str
    entry: SafetensorsEntry

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its values in the file."""
        found: torch.dtype = empty(self.entry.dtype, (0,), Returns.TORCH).dtype
        return found


def found_in(directory: Path) -> dict[str, FileTensor]:
    """Return the tensors in the files of a directory, by name.

    Raises:
        ConfigError: there are none, a file is missing or not valid, two files have a tensor of the
            same name, or the index does not fit them.
    """
    # One index says which files belong together; others in the directory are not read.
    indices = sorted(directory.glob(f"*{_INDEX}"))
    if len(indices) == 1:
        return _found_by(indices[0])
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ConfigError(
            field="directory of the values",
            value=str(directory),
            expected="one with .safetensors files",
        )
    return _found(files)


def found_of_pretrained(directory: Path) -> dict[str, FileTensor]:
    """Return the tensors of a model that Transformers has saved, by name.

    Raises:
        ConfigError: as `found_in`.
    """
    if (directory / _WHOLE).exists():
        return _found([directory / _WHOLE])
    if (directory / _SHARDS).exists():
        return _found_by(directory / _SHARDS)
    others = listed(sorted(path.name for path in directory.iterdir())) or "nothing"
    raise ConfigError(
        field=f"weights in {directory}",
        value=f"there is {others}",
        expected=f"{_WHOLE}, or {_SHARDS} and the files that it names. Weights of another format "
        "are converted by Transformers: from_pretrained(directory).save_pretrained(another)",
    )


def text_of(path: Path) -> str:
    """Return the text of a regular file.

    Raises:
        OSError: it cannot be read, or is something else.
    """
    # Opening a pipe would wait for a writer.
    if path.exists() and not path.is_file():
        raise OSError(f"{path} is not a regular file")
    return path.read_text()


def listed(names: list[str]) -> str:
    """Return the first of some names, and how many others there are."""
    more = f" and {len(names) - _SHOWN} others" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _found_by(index: Path) -> dict[str, FileTensor]:
    """Return the tensors in the files that an index names."""
    files = _files_by_name(index)
    missing = sorted({name for name in files.values() if not (index.parent / name).is_file()})
    if missing:
        raise ConfigError(
            field=f"files that {index} names",
            value=f"{len(missing)} missing: {listed(missing)}",
            expected="all of them in that directory: copy or download them again",
        )
    found = _found(sorted({index.parent / name for name in files.values()}))
    elsewhere = sorted(
        name for name, file in files.items() if name not in found or found[name].path.name != file
    )
    if elsewhere:
        raise ConfigError(
            field="index",
            value=f"{index}, by which files have tensors that are not there: {listed(elsewhere)}",
            expected="the index that was saved with these files",
        )
    return found


def _files_by_name(index: Path) -> Mapping[str, str]:
    """Return which file has each tensor, as an index says."""
    try:
        files: Mapping[str, str] = dict(json.loads(text_of(index))["weight_map"])
        # Within the directory: an index that leads elsewhere is none of its own.
        if not files or any(Path(name).name != name for name in files.values()):
            raise ValueError("no map to files of this directory")
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        expected = f"an index with a weight_map from names to files ({error!r})"
        raise ConfigError(field="index", value=str(index), expected=expected) from error
    return files


def _found(files: Iterable[Path]) -> dict[str, FileTensor]:
    found: dict[str, FileTensor] = {}
    for path in files:
        try:
            header = safetensors_header(path)
        except (SafetensorsError, OSError) as error:
            raise ConfigError(
                field="file", value=str(path), expected=f"a safetensors file ({error})"
            ) from error
        for name, entry in header.tensors.items():
            if name in found:
                expected = (
                    f"each tensor in one file: both {found[name].path.name} and {path.name} have "
                    "this one, and no index says which counts"
                )
                raise ConfigError(field=f"files in {path.parent}", value=name, expected=expected)
            found[name] = FileTensor(path, name, entry)
    return found
