"""JSON in a frame: a line with its kind, version, length and crc32c, then the JSON; and how to read
JSON that is not trusted.

The one place that knows the frame of docs/store-format.md, which headers and manifests share, and
what is refused in any JSON before its content is looked at. Does no I/O. Called by member,
manifest, tree, safetensors.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from typing import Any

from deepnvme.memory.checksum import crc32c

__all__ = [
    "NewerVersionError",
    "as_json",
    "framed",
    "framed_json",
    "shown",
    "strict_json",
    "unframed",
]

# A number has one form: no leading zeros. So few digits that int() is fast.
_LINE = re.compile(rb"(0|[1-9][0-9]{0,18}) ([0-9a-f]{8})\n")


class NewerVersionError(ValueError):
    """The version of the format is that of a newer deepnvme: nothing is wrong with the file."""


def framed(kind: str, version: int, content: Any) -> bytes:
    """Return the line and the JSON of `content`."""
    return framed_json(kind, version, as_json(content))


def as_json(content: Any) -> str:
    """Return the JSON of `content` as it stands in a frame, alone or as a part."""
    return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def framed_json(kind: str, version: int, text: str) -> bytes:
    """Return the line and the JSON."""
    payload = text.encode()
    return f"{kind} {version} {len(payload)} {crc32c(payload):08x}\n".encode() + payload


def unframed(kind: str, version: int, data: bytes) -> tuple[bytes, bytes]:
    """Return the JSON, which `strict_json` reads, and the bytes behind it.

    Raises:
        NewerVersionError: it is of a newer version.
        ValueError: it is of another kind, or damaged; the text says which.
    """
    start = re.match(rb"%s ([1-9][0-9]{0,8}) " % re.escape(kind.encode()), data)
    if start is None:
        raise ValueError(f'expected it to begin with "{kind} {version} ", got {data[:32]!r}')
    # First: in another version, anything else may mean something else.
    if int(start[1]) > version:
        raise NewerVersionError(
            f"it has version {int(start[1])} of the format, this deepnvme reads {version}: use a "
            "newer one"
        )
    if int(start[1]) < version:
        raise ValueError(
            f"it has version {int(start[1])} of the format, which this deepnvme does not read"
        )
    line = _LINE.match(data, start.end())
    if line is None:
        raise ValueError(
            f"expected a length, a checksum and a new line in its first line, got {data[:64]!r}"
        )
    end = line.end() + int(line[1])
    payload = data[line.end() : end]
    if len(payload) != int(line[1]):
        raise ValueError(
            f"its first line announces {int(line[1])} B, {len(payload)} follow: it was cut or "
            "added to"
        )
    crc = crc32c(payload)
    if crc != int(line[2], 16):
        raise ValueError(
            f"its checksum is {crc:08x}, its first line says {line[2].decode()}: it is damaged"
        )
    return payload, data[end:]


def strict_json(payload: bytes) -> Any:
    """Return the content of JSON in UTF-8.

    Raises:
        ValueError: it is no JSON, a key stands twice in one object, or a number is not in the form
            that deepnvme writes.
        RecursionError: it is nested too deeply.
    """
    return json.loads(
        payload.decode(),
        object_pairs_hook=_object_of_pairs,
        parse_int=_whole_number,
        parse_float=_finite_number,
        parse_constant=_no_constant,
    )


def shown(value: object, most: int = 160) -> str:
    """Return `value` for a message, cut where it is longer than `most` characters."""
    text = repr(value)
    return text if len(text) <= most else f"{text[: most - 10]}... ({len(text)} characters)"


def _object_of_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # Of equal keys Python keeps the last, other readers the first: they would see other tensors.
    found = dict(pairs)
    if len(found) < len(pairs):
        [(twice, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{shown(twice)} stands twice in one object")
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
