"""`HeldSignals`: Ctrl-C, and what handlers of signals raise, waits for a consistent state.

Python runs handlers between any two instructions, also of the engine, where half of a move would be
noted. In the body of a hold each signal is noted once, and its handler runs when the outermost hold
has ended. At a safe point within a hold only Ctrl-C acts, and only with Python's own handler:
another may call the engine. Handlers are replaced only during holds, or while a watch lasts, and in
the main thread, which alone runs them.
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
        # Counts of the main thread only, which alone runs Python's handlers.
        self._holds = 0
        self._users = 0  # holds and watches
        self._handlers: dict[int, _Handler] = {}  # the replaced handlers, by signal
        # Handlers of the signals that came, to be run later.
        self._came: dict[int, _Handler] = {}

    def __enter__(self) -> None:
        """Hold signals back."""
        if threading.get_ident() == self._main:
            # Before the handlers are replaced: a signal that comes in between is noted.
            self._holds += 1
            try:
                if not self._users:
                    self._replace()
            # A handler raised before all were replaced: the hold has not begun.
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
        """End this hold; run what was held, if it is the outermost; put handlers back after all."""
        if threading.get_ident() == self._main:
            try:
                # Before the last handler is put back: what comes in between is run by _act() below.
                self._users -= 1
                if not self._users:
                    self._restore(list(self._handlers.items()))
            finally:
                self._holds -= 1
                if self._came and not self._holds:
                    self._act()

    def holding(self, call: Callable[_P, _R]) -> Callable[_P, _R]:
        """Return a function that does the same as `call` with signals held back.

        It also leaves the caller's inference mode: tensors made there stay, and could not be
        trained later.
        """

        @wraps(call)
        def held(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            if torch.compiler.is_dynamo_compiling():
                # Traced by torch.compile: signal handling has no place in a graph.
                return call(*args, **kwargs)
            if torch.is_inference_mode_enabled():
                with self, torch.inference_mode(False):
                    return call(*args, **kwargs)
            # Within a hold another one changes nothing, nor does one of another thread. A handler
            # may come where the outermost one begins or ends, with its own in place: it holds, too.
            if (self._holds and self._users) or threading.get_ident() != self._main:
                return call(*args, **kwargs)
            with self:
                return call(*args, **kwargs)

        return held

    def watch(self, until: ExitStack) -> None:
        """Keep the handlers replaced until the stack closes; holds within need not replace them.

        Signals act as usual outside of holds.

        This is called, and the stack closed, within holds.
        """
        if threading.get_ident() == self._main:
            self._users += 1
            until.callback(self._unwatch)

    def safe_point(self) -> None:
        """Let Ctrl-C act here, where the engine's state is consistent.

        Raises:
            KeyboardInterrupt: it came, and its handler is Python's own.
        """
        if not self._came or threading.get_ident() != self._main:
            return
        if self._came.get(signal.SIGINT) is signal.default_int_handler:
            del self._came[signal.SIGINT]
            raise KeyboardInterrupt

    def _unwatch(self) -> None:
        # The handlers themselves are put back by the hold in which the stack closes.
        self._users -= 1

    def _replace(self) -> None:
        """Replace the handlers, or none of them where a handler raises meanwhile."""
        try:
            for number in _SIGNALS:
                handler = signal.getsignal(number)
                # SIG_DFL and SIG_IGN are no functions: the kernel acts on them by itself.
                if callable(handler) and handler != self._note:
                    self._handlers[number] = handler
                    signal.signal(number, self._note)
        except BaseException:
            self._restore(list(self._handlers.items()))
            raise

    def _restore(self, handlers: list[tuple[int, _Handler]]) -> None:
        if handlers:
            try:
                number, handler = handlers[0]
                if signal.getsignal(number) == self._note:  # else a newer one is installed
                    signal.signal(number, handler)
            finally:  # a handler may raise as soon as it is back
                # Recursive, so that a handler that raises leaves none of the others replaced.
                self._restore(handlers[1:])

    def _act(self) -> None:
        """Run the handlers of all signals that came, also of those behind one that raises."""
        if self._came:
            try:
                number, frame = next(iter(self._came)), sys._getframe(1)
                handler = self._came[number]
                del self._came[
                    number
                ]  # only now: a signal that interrupts before this line must not lose the handler
                handler(number, frame)
            finally:
                # Recursive for the same reason: handlers behind one that raises run as well.
                self._act()

    def _note(self, number: int, frame: FrameType | None) -> None:
        handler = self._handlers[number]
        # a child forked by another thread has no hold
        if self._holds and threading.get_ident() == self._main:
            # Noted once, like a signal that is pending in the kernel.
            self._came.setdefault(number, handler)
        else:
            handler(number, frame)


class HeldEnd:
    """A context that closes its `stack` at its end, with signals held back.

    Enter it twice: where a signal comes as the inner one begins to end, the outer one closes the
    stack.
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
        # Held: a signal in the midst of the closing would leave some of it undone.
        with self._signals:
            self.stack.close()
