"""What a plan says of the buffers of a pool: when each is live, and where it lies.

PinnedPool gives leases at the places.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from infinity_engine.errors import ConfigError
from infinity_engine.plan import Extent

__all__ = ["Layout", "Request"]


@dataclass(frozen=True, slots=True)
class Request:
    """A buffer of `nbytes` that is live from step `first` to step `last`, both included."""

    name: str
    nbytes: int
    first: int
    last: int

    def __post_init__(self) -> None:
        for what, value in (("nbytes", self.nbytes), ("first", self.first)):
            if value < 0:
                raise ConfigError(
                    field=f"Request({self.name!r}).{what}", value=value, expected="0 or more"
                )
        if self.last < self.first:
            expected = f"a step that is not before the first one, {self.first}"
            raise ConfigError(
                field=f"Request({self.name!r}).last", value=self.last, expected=expected
            )


@dataclass(frozen=True, slots=True)
class Layout:
    """The places of all requests, by name, in `nbytes` bytes."""

    places: Mapping[str, Extent]
    nbytes: int
