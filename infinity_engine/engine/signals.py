"""`HeldSignals`: Ctrl-C, and what else a signal's handler raises, waits while the engine is in the midst of something.

Python runs handlers between any two instructions, also of ours, and half of a move would be noted. In the body of a
hold they are noted themselves, and act at its end, or at a safe point within it. Handlers are replaced for that time
only, or while somebody watches, and in the main thread, which alone runs them.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import wraps
from types import FrameType, TracebackType
from typing import ParamSpec, TypeVar

__all__ = ["HeldSignals"]

_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)

_Handler = Callable[[int, FrameType | None], object]
_P = ParamSpec("_P")
_R = TypeVar("_R")


class HeldSignals:
    """A context manager that can be entered again within itself, and by several engines."""

    def __init__(self) -> None:
        self._main = threading.main_thread().ident
        self._holds = 0
        self._users = 0  # holds and watches
        self._handlers: dict[int, _Handler] = {}  # of those whose signals come to this one instead
        self._came: list[tuple[int, _Handler]] = []

    def __enter__(self) -> None:
        """Hold signals back."""
        if threading.get_ident() == self._main:
            self._holds += 1
            try:
                if not self._users:
                    self._replace()
            except BaseException:
                self._holds -= 1
                raise
            self._users += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Let them act, where this is the outermost hold."""
        if threading.get_ident() == self._main:
            self._leave()

    def holding(self, call: Callable[_P, _R]) -> Callable[_P, _R]:
        """Return what does the same with signals held back."""

        @wraps(call)
        def held(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            with self:
                return call(*args, **kwargs)

        return held

    def watching(self) -> AbstractContextManager[None]:
        """Return what spares holds in its body the replacing of handlers; signals act in it as ever."""
        return _Watch(self._watch, self._unwatch)

    def let_through(self) -> None:
        """Let what came act here, where everything is noted: a safe point."""
        if threading.get_ident() == self._main:
            while self._came:
                number, handler = self._came.pop(0)
                handler(number, sys._getframe())

    def _watch(self) -> None:
        if threading.get_ident() == self._main:
            self._holds += 1
            try:
                if not self._users:
                    self._replace()
            finally:
                self._holds -= 1
            self._users += 1  # what came acts at the end of the next hold

    def _unwatch(self) -> None:
        if threading.get_ident() == self._main:
            self._holds += 1
            self._leave()

    def _replace(self) -> None:
        """Have signals come here, or none of them where a handler raises meanwhile."""
        try:
            for number in _SIGNALS:
                handler = signal.getsignal(number)
                if callable(handler) and handler != self._note:
                    self._handlers[number] = handler
                    signal.signal(number, self._note)
        except BaseException:
            self._give_back(list(self._handlers.items()))
            raise

    def _leave(self) -> None:
        """End a hold; where no user is left, let signals go where they went before."""
        try:
            self._users -= 1
            if not self._users:
                self._give_back(list(self._handlers.items()))
        finally:
            self._holds -= 1
        if self._came and not self._holds:
            self.let_through()

    def _give_back(self, handlers: Sequence[tuple[int, _Handler]]) -> None:
        if handlers:
            try:
                number, handler = handlers[0]
                if signal.getsignal(number) == self._note:  # else it is somebody's newer one
                    signal.signal(number, handler)
            finally:  # a handler that is back may raise at once
                self._give_back(handlers[1:])

    def _note(self, number: int, frame: FrameType | None) -> None:
        handler = self._handlers[number]
        if self._holds:
            self._came.append((number, handler))
        else:
            handler(number, frame)


class _Watch:
    """Enters and leaves as it is told to."""

    def __init__(self, enter: Callable[[], None], leave: Callable[[], None]) -> None:
        self._enter = enter
        self._leave = leave

    def __enter__(self) -> None:
        self._enter()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._leave()
