"""Memory for I/O in buffers of any size; their pages are used again for buffers of other sizes.

New pages cost as much time as filling them, as the kernel clears them first; pages that were given
back only change their addresses. For programs that take and give back many MiB all the time within
one limit, and would lose room to gaps in a `Pool`. No ring registers this memory: the kernel looks
its pages up in each transfer.
"""

from __future__ import annotations

from deepnvme import _native
from deepnvme.choices import byte_count

__all__ = ["PageStock"]


class PageStock:
    """Page-aligned memory for I/O, in huge pages where there are any, which comes back when its
    last view goes.
    """

    def __init__(self) -> None:
        self._native = _native.PageStock()

    def take(self, nbytes: int | str, *, keep: int | str = 0) -> memoryview:
        """Return `nbytes` of memory as a writable memoryview, with arbitrary content.

        Before it asks for new pages, it gives idle ones back to the system until at most `keep`
        bytes are idle. What comes back later stays idle until the next call.

        Raises:
            MemoryError: the system has no memory for it.
        """
        asked = byte_count("the bytes of a buffer", nbytes, 1)
        kept = byte_count("the bytes to keep", keep)
        try:
            return memoryview(self._native.take(asked, kept))
        except MemoryError:
            raise MemoryError(
                f"the system has no memory for a buffer of {asked} B: take a smaller one, or free "
                "memory"
            ) from None

    def keep_at_most(self, nbytes: int | str) -> None:
        """Give idle memory back to the system, longest idle first, until so much is left."""
        self._native.keep_at_most(byte_count("the bytes to keep", nbytes))

    def close(self) -> None:
        """Give all idle memory back; what is in use goes to the system when its last view goes."""
        self._native.close()

    @property
    def idle_bytes(self) -> int:
        """Bytes in no buffer, kept for buffers to come."""
        return self._native.idle_bytes

    def __reduce__(self) -> str:
        """Refuse to be pickled or copied."""
        raise TypeError(
            "a stock of pages is neither pickled nor copied: its memory is this process's. Make "
            "one where it is used"
        )

    def __repr__(self) -> str:
        """Show what is idle."""
        return f"PageStock({self.idle_bytes} B idle)"
