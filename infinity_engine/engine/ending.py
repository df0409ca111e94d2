"""`Ending`: how an engine ends, once: by `close()`, at the end of a `with` block, or dropped.

Refers to what an engine holds, but neither to the engine nor to its model: it keeps neither alive.
An engine that the caller drops is closed at once, without Python's collector. An engine in a cycle
of the caller's objects is closed when the collector frees that cycle.
"""

from __future__ import annotations

import logging
import os
import threading
import warnings
import weakref
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import torch

from infinity_engine.engine.checkpoints.saving import Saves
from infinity_engine.kept_errors import kept, raise_any
from infinity_engine.parameters.providing import Provider
from infinity_engine.ranks.together import ManyRanks, OneRank
from infinity_engine.signals import HeldSignals
from infinity_engine.update.updating import Updates

__all__ = ["Ending", "SafePoint", "while_alive"]

_LOG = logging.getLogger(__name__)
_LONGEST_WAIT_S = 60.0
"""How long a thread that drops an engine waits for its closing. The collector may run while that
thread holds a lock that the closing needs; the closing then goes on when the lock is free."""


def while_alive(method: Any) -> Callable[..., None]:
    """Return a function that calls a bound method while its object lives, without keeping it."""
    # A weakref.WeakMethod does the same, but makes a method for each call: of each gradient here.
    found, function = weakref.ref(method.__self__), method.__func__

    def call(*args: object) -> None:
        living = found()
        if living is not None:
            function(living, *args)

    return call


class SafePoint:
    """Lets Ctrl-C act where it is called, until it is disabled: no engine is left half closed."""

    def __init__(self, signals: HeldSignals) -> None:
        self._signals = signals
        self._enabled = True

    def disable(self) -> None:
        """Let nothing act from here on: the engine is being closed."""
        self._enabled = False

    def __call__(self) -> None:
        """Let it act.

        Raises:
            KeyboardInterrupt: it came.
        """
        if self._enabled:
            self._signals.safe_point()


class _WhenDropped(weakref.finalize):  # type: ignore[type-arg]  # it has none when it runs
    """Calls a function when an object goes, unless Python ends: the process gives all back."""

    def __init__(self, dropped: object, call: Callable[[], object]) -> None:
        super().__init__(dropped, call)
        self.atexit = False


class Ending:
    """The end of one engine, which closes `resources` before those that are attached."""

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        updates: Updates,
        fetcher: Provider,
        ranks: OneRank | ManyRanks,
        saves: Saves,
        safe_point: SafePoint,
        resources: ExitStack,
    ) -> None:
        self.closed = False
        self._model = weakref.ref(model)
        self._kind = type(model).__name__
        self._updates = updates
        self._fetcher = fetcher
        self._ranks = ranks
        # Saves have the model, which may go before the engine is closed. A save in flight has not.
        self._saves = weakref.ref(saves)
        self._save_in_flight = saves.in_flight  # which is waited for when the rest is gone
        self._safe_point = safe_point
        self._process = os.getpid()
        self._resources = resources

    def attach(self, engine: object, resources: ExitStack) -> None:
        """Close `resources` too. The engine is complete: this ends it when the caller drops it."""
        # Pushed last, so closed first: hooks keep the model until they are removed.
        resources.callback(self._leave_absent_without_model)
        resources.push(self._resources.pop_all())
        self._resources = resources.pop_all()
        # Once it is closed, nothing is left for the finalizer to do.
        self._resources.callback(_WhenDropped(engine, self._drop).detach)

    def check_open(self) -> None:
        """Refuse to use an engine that is closed.

        Raises:
            RuntimeError: it is.
        """
        if self.closed:
            raise RuntimeError("The engine is closed. Initialize another one")

    def check_process(self) -> None:
        """Refuse to use an engine in a process that was forked from its own.

        Raises:
            RuntimeError: this is one.
        """
        if os.getpid() != self._process:
            raise RuntimeError(
                f"This engine belongs to process {self._process}. This process, {os.getpid()}, was "
                "forked from it, as workers of data loaders are, and has neither the engine's "
                f"memory nor its threads. Call the engine and its model only in {self._process}"
            )

    def close(self, reason: BaseException | None, *, restore: bool) -> None:
        """Give everything back, once. With several ranks, tell the others the `reason`, if any.

        Raises:
            RuntimeError: the update that was under way failed. All else is done.
        """
        # A forked process has neither the memory nor the threads that are closed here.
        if self.closed or os.getpid() != self._process:
            return
        # From here on Ctrl-C waits: half of a closing could not be repeated.
        self._safe_point.disable()
        failed: Exception | None = None
        # First: other ranks may wait for this one in a collective.
        if reason is not None:
            self._ranks.close(reason)
        try:
            # A deferred update ends: parameters are restored with their new values.
            self._updates.resume()
            self._updates.end()
        except RuntimeError as error:  # raised at the end
            failed = kept(error)
        # A save in flight reads states, so it ends before their memory goes.
        failed = self._end_save(alone=(failed or reason) is not None) or failed
        self.closed = True
        if not restore:
            self._fetcher.leave_absent()
        try:
            self._resources.close()
        # Last: several ranks restore parameters together.
        finally:
            self._ranks.close(failed)
        raise_any(failed)

    def _leave_absent_without_model(self) -> None:
        """Read nothing for parameters that no code will see, and that cannot be given values."""
        if self._model() is None:
            self._fetcher.leave_absent()

    def _end_save(self, *, alone: bool) -> Exception | None:
        """Finish the save that is in flight; return its error. `alone`: other ranks may not."""
        saves = self._saves()
        if alone or saves is None:
            self._save_in_flight.finish_alone()
            return None
        try:
            saves.finish()
        except Exception as error:
            return kept(error)
        return None

    def _drop(self) -> None:
        """Close an engine that the caller dropped, in a thread of its own.

        Python runs this where the last reference goes, or where its collector runs: that may be
        a thread that the closing waits for, or code that holds a lock.
        """
        if self.closed or os.getpid() != self._process:
            return
        closing = threading.Thread(target=self._close_dropped, name="closing an engine")
        # With -W error the warning raises, and the engine is closed all the same.
        try:
            warnings.warn(
                f"An engine for a {self._kind} was dropped without close(), after "
                f"{self._updates.made} updates. It is closed now. Call close(), or use the engine "
                "in a `with` block",
                ResourceWarning,
                stacklevel=3,  # behind weakref's own function
            )
        finally:
            closing.start()
            closing.join(_LONGEST_WAIT_S)
        if closing.is_alive():
            _LOG.warning(
                "Closing an engine that was dropped takes longer than %g s, and goes on. Do not "
                "use its model until then",
                _LONGEST_WAIT_S,
            )

    def _close_dropped(self) -> None:
        reason = None
        if not self._ranks.is_alone:
            reason = RuntimeError("this rank dropped its engine without close()")
        try:
            # Several ranks can only restore parameters together, and the others may go on.
            self.close(reason, restore=reason is None)
        except Exception:
            _LOG.exception("An engine that was dropped failed to close")
        # What close() did not come to.
        finally:
            with suppress(Exception):
                self._resources.close()
