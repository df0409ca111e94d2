"""`IOFuture`: one I/O under way. A concurrent.futures.Future that can also be awaited."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, TypeVar

from deepnvme import _native

if TYPE_CHECKING:
    import asyncio

__all__ = ["IOFuture"]

_T = TypeVar("_T")


class IOFuture(concurrent.futures.Future[_T]):
    """The result of one operation: a byte count, or the error that ended it.

    `cancel()` succeeds only while the drive has not begun; what has begun runs to its end, because its memory belongs
    to the device until then. Cancelling an `await` leaves the operation running and its memory held.
    """

    def __init__(self, cancellable: _native.Cancellable) -> None:
        super().__init__()
        self._cancellable = cancellable

    def cancel(self) -> bool:
        """Take the operation back if it has not begun; return whether that was so."""
        return self.cancelled() or (not self.done() and self._cancellable.cancel() and super().cancel())

    def __await__(self) -> Generator[Any, None, _T]:
        """Wait on the running event loop."""
        import asyncio  # costs a third of importing this package, and whoever awaits has it

        waiting = asyncio.wrap_future(self)
        waiting.add_done_callback(_look_at)
        return asyncio.shield(waiting).__await__()


def _look_at(ended: asyncio.Future[Any]) -> None:
    """Keep asyncio from reporting the error of an operation whose await was cancelled: `self` still has it."""
    if not ended.cancelled():
        ended.exception()
