"""The way into the command line, which says in one sentence what it lacks where it cannot run.

Ctrl-C ends it with one line and status 130, also while the command's modules are imported and while
the program ends; not while Python itself starts, before this module is there.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType, MappingProxyType

__all__ = ["main"]

_CANNOT_RUN = 1
_INTERRUPTED = 130
_NEEDED = MappingProxyType({"rich": "tables", "numpy": "tensors"})


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv`, by default this process's, and return the exit status."""
    # A caller within a program, and a shell that has a command ignore Ctrl-C, keep their handlers.
    if argv is not None or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return _run(argv)
    signal.signal(signal.SIGINT, _leave)
    _open_streams()
    try:
        return _run(argv)
    finally:
        # The command has let go of all it had.
        signal.signal(signal.SIGINT, _leave)


def _run(argv: Sequence[str] | None) -> int:
    if sys.platform != "linux":
        print(f"deepnvme: needs Linux; this is {sys.platform}", file=sys.stderr)
        return _CANNOT_RUN
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
        return _CANNOT_RUN
    if signal.getsignal(signal.SIGINT) is _leave:
        # From here on it is an exception, so that a command can remove what is half made.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return run(argv)


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
