"""`map_safetensors`: the tensors of a file as views of the page cache, without reading it first.

For files in the page cache: another program read them a moment ago, or several processes use them.
The kernel reads what is touched. `read_safetensors` is faster for a file that is read once from a
drive.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from deepnvme.choices import chosen
from deepnvme.formats.safetensors import SafetensorsEntry, entries_of, header_of
from deepnvme.memory.arrays import ITEMSIZES, Returns, default_returns, empty, view_of

__all__ = ["map_safetensors"]


def map_safetensors(
    path: str | os.PathLike[str],
    names: Iterable[str] | None = None,
    *,
    returns: Returns | None = None,
) -> dict[str, Any]:
    """Return the tensors of those names as views of the file's pages; all of them without `names`.

    What is written to a tensor stays in this process. The file must not be cut while they live.

    Raises:
        SafetensorsError: the file is not valid.
        KeyError: it has no tensor of that name.
    """
    kind = default_returns() if returns is None else chosen(Returns, returns, "returns")
    with Path(path).open("rb") as file:
        descriptor = file.fileno()
        length = os.fstat(descriptor).st_size

        def read(nbytes: int, offset: int) -> bytes:
            return os.pread(descriptor, nbytes, offset)

        header = header_of(read, length, os.fspath(path))
        # Copy on write: torch and numpy want memory that can be written.
        # It outlives the descriptor: the mapping itself keeps the file.
        pages = memoryview(mmap.mmap(descriptor, length, access=mmap.ACCESS_COPY))
    entries = entries_of(header, names)
    return {name: _view(pages, entry, kind) for name, entry in entries.items()}


def _view(pages: memoryview, entry: SafetensorsEntry, returns: Returns) -> Any:
    room = pages[entry.offset : entry.offset + entry.nbytes]
    if entry.nbytes == 0:
        return empty(entry.dtype, entry.shape, returns)
    if entry.offset % ITEMSIZES[entry.dtype]:
        # The format allows any place; torch refuses elements that are not aligned.
        copy = empty("U8", (entry.nbytes,), Returns.BYTES)
        copy[:] = room
        room = copy
    return view_of(room, entry.dtype, entry.shape, returns)
