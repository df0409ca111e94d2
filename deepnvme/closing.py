"""What a `with` block closes at its end.

A leaf.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TypeVar

__all__ = ["Closing"]

_Own = TypeVar("_Own", bound="Closing")


class Closing(ABC):
    """Something to close: a `with` block gets the object itself, and closes it however it ends."""

    __slots__ = ()

    @abstractmethod
    def close(self) -> None:
        """Give back what it holds."""

    def __enter__(self: _Own) -> _Own:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()
