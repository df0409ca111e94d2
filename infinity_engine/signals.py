"""`HeldSignals`: Ctrl-C, and what else a signal's handler raises, waits while the engine is in the
midst of something.

Python runs handlers between any two instructions, also of ours, and half of a move would be noted.
In the body of a hold they are noted themselves, each once, and act when the outermost has ended. At
a safe point within it only Ctrl-C does, where its handler is Python's own: another may call the
engine. Handlers are replaced for that time only, or while somebody watches, and in the main thread,
which alone runs them.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from types import FrameType, TracebackType
from typing import ParamSpec, TypeVar

import torch

__all__ = ["HeldEnd", "HeldSignals"]

# What stops the process for good is not among them, nor what only tells of windows and terminals.
_SIGNALS = (
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGALRM,
    signal.SIGVTALRM,
    signal.SIGPROF,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGCHLD,
    signal.SIGPIPE,
    signal.SIGIO,
    signal.SIGXCPU,
    signal.SIGXFSZ,
    signal.SIGINT,
)

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
        self._came: dict[int, _Handler] = {}

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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        """Let them act, where this is the outermost hold; where no user is left, let them go where
        they went before.
        """
        if threading.get_ident() == self._main:
            try:
                self._users -= 1
                if not self._users:
                    self._give_back(list(self._handlers.items()))
            finally:
                self._holds -= 1
                if not self._holds:
                    self._act()

    def holding(self, call: Callable[_P, _R]) -> Callable[_P, _R]:
        """Return what does the same with signals held back.

        And outside of an inference mode of who calls: what is made there stays, and could not be
        trained with later.
        """

        @wraps(call)
        def held(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            if torch.compiler.is_compiling():
                return call(*args, **kwargs)
            with self:
                if torch.is_inference_mode_enabled():
                    with torch.inference_mode(False):
                        return call(*args, **kwargs)
                return call(*args, **kwargs)

        return held

    def watch(self, until: ExitStack) -> None:
        """Spare holds the replacing of handlers `until` then; signals act as ever outside of holds.

        This is called, and the stack closed, within holds.
        """
        if threading.get_ident() == self._main:
            self._users += 1
            until.callback(self._unwatch)

    def safe_point(self) -> None:
        """Let Ctrl-C act here, where everything is noted.

        Raises:
            KeyboardInterrupt: it came, and its handler is Python's own.
        """
        if not self._came or threading.get_ident() != self._main:
            return
        if self._came.get(signal.SIGINT) is signal.default_int_handler:
            del self._came[signal.SIGINT]
            raise KeyboardInterrupt

    def _unwatch(self) -> None:
        self._users -= 1

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

    def _give_back(self, handlers: list[tuple[int, _Handler]]) -> None:
        if handlers:
            try:
                number, handler = handlers[0]
                if signal.getsignal(number) == self._note:  # else it is somebody's newer one
                    signal.signal(number, handler)
            finally:  # a handler that is back may raise at once
                self._give_back(handlers[1:])

    def _act(self) -> None:
        """Call the handlers of all that came, also of those behind one that raises."""
        if self._came:
            try:
                number, frame = next(iter(self._came)), sys._getframe(1)
                handler = self._came[number]
                del self._came[number]  # last, so that none is lost to another that comes meanwhile
                handler(number, frame)
            finally:
                self._act()

    def _note(self, number: int, frame: FrameType | None) -> None:
        handler = self._handlers[number]
        # a child that another thread forked has no hold
        if self._holds and threading.get_ident() == self._main:
            self._came.setdefault(number, handler)
        else:
            handler(number, frame)


class HeldEnd:
    """A context whose `stack` is closed at its end, with signals held back.

    To be entered twice: a signal may come when the inner one begins to end, and the outer one does
    it then.
    """

    def __init__(self, signals: HeldSignals) -> None:
        self.stack = ExitStack()
        self._signals = signals

    def __enter__(self) -> ExitStack:
        """Return the stack."""
        return self.stack

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        """Close it. Again: does nothing."""
        with self._signals:
            self.stack.close()
