"""`Header`: what each rank sends about a collective before data moves; finds disagreements.

Bytes of one size, whatever the collective; sends nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

__all__ = ["Header", "digest", "disagreement"]

# 256 bytes: number, announced number, digest, length of the name, name.
_LAYOUT = struct.Struct("<QQ16sH222s")


@dataclass(frozen=True, slots=True)
class Header:
    """Which collective it is: number, digest of what must be equal on all ranks, name for messages.

    `nbytes` may differ between ranks: how many bytes this rank shares, or another number that it
    announces.
    """

    SIZE = _LAYOUT.size

    number: int
    op: str
    key: bytes
    nbytes: int = 0

    def pack(self) -> bytes:
        """Return it as `SIZE` bytes."""
        # This may cut a character in two, which `unpack` replaces.
        text = self.op.encode()[:222]
        return _LAYOUT.pack(self.number, self.nbytes, self.key, len(text), text)

    @classmethod
    def unpack(cls, data: bytes) -> Header:
        """Return what was packed."""
        number, nbytes, key, length, text = _LAYOUT.unpack(data)
        return cls(number, text[:length].decode(errors="replace"), key, nbytes)


def digest(*parts: object) -> bytes:
    """Return 16 bytes that differ where the parts, as they print, do."""
    # Separated, so that ("ab", "c") and ("a", "bc") differ.
    return blake2b("\0".join(str(part) for part in parts).encode(), digest_size=16).digest()


def disagreement(headers: Sequence[Header], ranks: Sequence[int]) -> str | None:
    """Return what these ranks are about to do, where that differs; None where it does not."""
    groups: dict[tuple[int, bytes], list[int]] = {}
    for place, header in enumerate(headers):
        groups.setdefault((header.number, header.key), []).append(place)
    if len(groups) == 1:
        return None
    actions = [
        f"rank{'s' if len(places) > 1 else ''} {', '.join(str(ranks[place]) for place in places)}: "
        f"{headers[places[0]].op} (collective {headers[places[0]].number}, digest "
        f"{headers[places[0]].key.hex()[:8]})"
        for places in groups.values()
    ]
    return f"the ranks have started different collectives; {'; '.join(actions)}"
