"""A run of bytes in something longer: a file, an arena, a flat shard.

Pure arithmetic on offset and length; what the bytes are in, the owner of the extent knows.
"""

from __future__ import annotations

from dataclasses import dataclass

from infinity_engine.errors import ConfigError

__all__ = ["Extent"]


@dataclass(frozen=True, order=True, slots=True)
class Extent:
    """The `nbytes` bytes from `offset` on; none at all where `nbytes` is 0.

    Ordered by offset, then by length.
    """

    offset: int
    nbytes: int

    def __post_init__(self) -> None:
        for name, value in (("offset", self.offset), ("nbytes", self.nbytes)):
            if value < 0:
                raise ConfigError(field=f"Extent.{name}", value=value, expected="0 or more bytes")

    @property
    def end(self) -> int:
        """The offset of the first byte behind it."""
        return self.offset + self.nbytes
