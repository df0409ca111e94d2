"""The ways into the command line, which say in one sentence what it lacks where it cannot run.

`main` is for programs. `command` is the installed command: Ctrl-C ends it with one line and status
130, also while the command's modules are imported and while the program ends; not while Python
itself starts, before this module is there.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType, MappingProxyType

__all__ = ["command", "main"]

_CANNOT_RUN = 1
_INTERRUPTED = 130
_NEEDED = MappingProxyType({"rich": "tables", "numpy": "tensors"})


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv`, by default this process's, and return the exit status.

    On any thread of a program: sets no handler of signals.
    """
    run = _loaded()
    return _CANNOT_RUN if run is None else run(argv)


def command() -> int:
    """Run this process's command line, as all that the process does, and return the exit status."""
    _open_streams()
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return main()  # the shell has the command ignore Ctrl-C
    signal.signal(signal.SIGINT, _leave)
    try:
        run = _loaded()
        if run is None:
            return _CANNOT_RUN
        # From here on it is an exception, so that a command can remove what is half made.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return run(None)
    finally:
        # The command has let go of all it had.
        signal.signal(signal.SIGINT, _leave)


def _loaded() -> Callable[[Sequence[str] | None], int] | None:
    """Return what runs a command line, or say why there is none here."""
    if sys.platform != "linux":
        print(f"deepnvme: needs Linux; this is {sys.platform}", file=sys.stderr)
        return None
    try:
        from deepnvme.cli.main import main as run
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name not in _NEEDED:
            raise
        print(
            f"deepnvme: the command line needs {missing.name}, for {_NEEDED[missing.name]}. "
            "Install it with: pip install 'deepnvme[cli]'",
            file=sys.stderr,
        )
        return None
    return run


def _open_streams() -> None:
    """Let standard streams that the shell has closed lead nowhere: else the files that are opened
    next have their numbers, and messages to these numbers would be written into them.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # it has the lowest free number: this one


def _leave(_number: int, _frame: FrameType | None) -> None:
    """End the process where nothing is under way; an exception might come out of any import."""
    with suppress(OSError):
        os.write(2, b"deepnvme: interrupted\n")
    os._exit(_INTERRUPTED)
