"""A number as the bytes of one element, and memory that repeats it: what fills a part of a tensor.

Needs neither torch nor numpy. Called by the store.
"""

from __future__ import annotations

import math
import struct
from types import MappingProxyType
from typing import Any

from deepnvme.memory.buffers import Memory, memory_of

__all__ = ["Repeated", "element_of"]

# What the struct module calls them. BF16 is made of F32; the dtypes of 8-bit floats are not there.
_FORMATS = MappingProxyType(
    {"BOOL": "?", "U8": "B", "I8": "b", "U16": "H", "I16": "h", "U32": "I", "I32": "i"}
    | {"U64": "Q", "I64": "q", "F16": "e", "F32": "f", "F64": "d", "C64": "ff", "C128": "dd"}
)

_BF16_INFINITY = 0x7F80


def element_of(code: str, number: Any) -> bytes:
    """Return the bytes of `number` as one element of that dtype, rounded to nearest.

    To BF16 it is rounded by way of F32.

    Raises:
        TypeError: numbers of that dtype are not made here.
        ValueError: the dtype has no such number.
    """
    if code != "BF16" and code not in _FORMATS:
        raise TypeError(
            f"a part of dtype {code} cannot be filled with a number: put a tensor of that dtype "
            f"and of the part's shape. Dtypes that can: {', '.join(_FORMATS)}, BF16"
        )
    try:
        if code == "BOOL" and number not in (False, True):  # struct takes anything for one of them
            raise ValueError
        if code == "BF16":
            return _bf16_of(number)
        parts = (number.real, number.imag) if code in ("C64", "C128") else (number,)
        return struct.pack(f"<{_FORMATS[code]}", *parts)
    except (struct.error, ValueError, TypeError, OverflowError):
        raise ValueError(
            f"{number!r} is no number of dtype {code}: give one of that kind and range"
        ) from None


def _bf16_of(number: Any) -> bytes:
    if math.isnan(number):
        return b"\xc0\x7f"
    (bits,) = struct.unpack("<I", struct.pack("<f", number))
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16  # ties to even
    if rounded & 0x7FFF == _BF16_INFINITY and not math.isinf(number):
        raise OverflowError
    return struct.pack("<H", rounded)


class Repeated:
    """Memory that has one element over and over, of which it holds `nbytes`."""

    def __init__(self, element: bytes, nbytes: int) -> None:
        self._memory = memory_of(element * (nbytes // len(element)), writable=False)

    def part(self, nbytes: int) -> Memory:
        """Return `nbytes` of whole elements, no more than it holds."""
        return self._memory.part(0, nbytes)
