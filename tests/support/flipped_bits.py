"""Single bits that differ in a file of a checkpoint, in each of its regions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

__all__ = ["flip", "regions"]


def flip(path: Path, offset: int) -> None:
    """Change one bit; the second time, as it was."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


def regions(path: Path) -> Iterator[tuple[str, int]]:
    """Yield offsets in each region of a file: of a shard, its length, header and each tensor."""
    data = path.read_bytes()
    if path.name == "manifest":
        end = data.index(b"\n") + 1
        yield from (("first line", at) for at in range(0, end, 7))
        yield from (("JSON", at) for at in range(end, len(data), max(1, len(data) // 40)))
        return
    header = int.from_bytes(data[:8], "little")
    yield from (("length", at) for at in range(8))
    yield from (("header", at) for at in range(8, 8 + header, max(1, header // 20)))
    for name, entry in json.loads(data[8 : 8 + header]).items():
        start, end = (8 + header + at for at in entry["data_offsets"])
        if start < end:
            yield from ((name, at) for at in (start, (start + end) // 2, end - 1))
