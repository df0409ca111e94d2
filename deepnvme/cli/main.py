"""Entry point of the `deepnvme` command: parses the command line and hands it to the subcommand's
module.

Exit status: that of the subcommand, which says what it means; 1 when it could not do its work (2 of
`verify`), 2 for wrong usage, 130 when interrupted, 141 when the reader of its output has gone. What
went wrong is one line on standard error.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import Protocol

from deepnvme.cli import bench, cp, doctor, ls, tune, verify
from deepnvme.cli.report import complain, explained, installed_version
from deepnvme.machine.profile import ProfileError

__all__ = ["main"]


class _Command(Protocol):
    """The module of a subcommand."""

    NAME: str
    HELP: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, options: argparse.Namespace) -> int: ...


_FAILED = 1
_WRONG_USAGE = 2
_INTERRUPTED = 130
_PIPE_CLOSED = 141  # what a shell reports for a command that SIGPIPE ended
_COMMANDS: tuple[_Command, ...] = (doctor, bench, tune, ls, cp, verify)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (by default this process's) and return the exit status."""
    failed = _FAILED
    try:
        parser = _parser()
        arguments = sys.argv[1:] if argv is None else list(argv)
        if not arguments:  # the whole help, not only that a command is missing
            parser.print_help(sys.stderr)
            parser.exit(_WRONG_USAGE)
        try:
            options = parser.parse_args(arguments)
        except SystemExit:  # help or version are printed
            _flush()
            raise
        failed = options.failed
        # a path need not be text in this terminal's encoding
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            status: int = options.run(options)
        _flush()
    except SystemExit:  # also of a signal, whose status is to stay
        _show_or_drop()
        raise
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        _show_or_drop()
        return _PIPE_CLOSED
    except (OSError, ProfileError) as error:
        _show_or_drop()
        complain(f"deepnvme: {_what_happened(error)}")
        return failed
    except KeyboardInterrupt:
        _show_or_drop()
        complain("deepnvme: interrupted")
        return _INTERRUPTED
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="deepnvme",
        description="Asynchronous direct I/O: what a drive can do, how to use it best, and stores "
        "of tensors.",
    )
    parser.add_argument("--version", action="version", version=f"deepnvme {installed_version()}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in _COMMANDS:
        subparser = commands.add_parser(command.NAME, help=command.HELP, description=command.HELP)
        subparser.set_defaults(run=command.run, failed=_FAILED)
        command.add_arguments(subparser)
    return parser


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    complain(f"deepnvme: warning: {message}")


def _flush() -> None:
    if sys.stdout is not None:  # it is where the shell has closed it, as by >&-
        sys.stdout.flush()


def _show_or_drop() -> None:
    """Show what was printed, or let it go where that fails: the interpreter flushes standard output
    at its end, would fail again there, and end with a status of its own.
    """
    try:
        _flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _what_happened(error: Exception) -> str:
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    if error.filename:
        return f"{error.filename}: {explained(error)}"
    # Those of the library name a file, or say what failed. Only commands and tables print.
    *_, (frame, _line) = traceback.walk_tb(error.__traceback__)
    prints = frame.f_globals["__name__"].startswith(("deepnvme.cli.", "rich."))
    return f"standard output: {explained(error)}" if prints else explained(error)
