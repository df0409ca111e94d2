"""`Lifecycle`: whether an engine can be used: in its own process, not closed, not half loaded."""

from __future__ import annotations

import os

__all__ = ["Lifecycle"]


class Lifecycle:
    """The state of one engine from `initialize` to `close`."""

    def __init__(self) -> None:
        self.closing = False
        """From here on no signal may interrupt: the engine would be half closed."""
        self.closed = False
        self.half_loaded = False
        """Whether a load failed after it had begun to overwrite the model."""
        self._process = os.getpid()

    @property
    def is_forked(self) -> bool:
        """Whether this process was forked from the one that made the engine."""
        return os.getpid() != self._process

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
        if self.is_forked:
            raise RuntimeError(
                f"This engine belongs to process {self._process}. This process, {os.getpid()}, was "
                "forked from it, as workers of data loaders are, and has neither the engine's "
                "memory nor its threads. Call the engine and its model only in process "
                f"{self._process}"
            )

    def check_loaded(self) -> None:
        """Refuse to go on after a load that failed half-way.

        Raises:
            RuntimeError: the model is neither what it was nor what the checkpoint has.
        """
        if self.half_loaded:
            raise RuntimeError(
                "A load failed half-way, so some values are the checkpoint's and the rest are "
                "older. Call load() again until it succeeds"
            )
