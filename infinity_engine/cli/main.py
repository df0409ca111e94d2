"""Entry point of the `infinity` command: hands the command line to its subcommand's module.

Exit status: that of the subcommand, which says what it means; 2 for wrong usage, as argparse has
it.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from types import MappingProxyType
from typing import Protocol, cast

from deepnvme.version import __version__

__all__ = ["main"]


class _Command(Protocol):
    """What the module of a subcommand has."""

    NAME: str
    HELP: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, options: argparse.Namespace) -> int: ...


_PIPE_CLOSED = 141  # what a shell reports for a command that SIGPIPE ended
_INTERRUPTED = 130  # likewise, SIGINT
# Each by its name, with its module.
_COMMANDS: Mapping[str, str] = MappingProxyType(
    {
        "doctor": "doctor",
        "calibrate": "calibrate",
        "plan": "plan",
        "compare": "compare",
        "simulate": "simulate",
        "train": "runs.train",
        "report": "runs.report",
        "checkpoint": "checkpoint",
        "migrate": "migrate",
    }
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (by default this process's) and return the exit status: 130 for
    Ctrl-C.
    """
    parser = argparse.ArgumentParser(prog="infinity", description="Train models that do not fit.")
    parser.add_argument("--version", action="version", version=f"infinity {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in _commands(sys.argv[1:] if argv is None else argv):
        subparser = commands.add_parser(command.NAME, help=command.HELP, description=command.HELP)
        command.add_arguments(subparser)
        # Found again in the parsed options: the subcommand that was named.
        subparser.set_defaults(run=command.run)
    options = parser.parse_args(argv)
    # A program that calls this may have put another object there.
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A path need not be text in this terminal's encoding.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        status: int = options.run(options)
        # Within the try: a closed pipe may show only as the last lines are written.
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        # Python flushes stdout once more at its end, which would fail and say so.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _PIPE_CLOSED
    except KeyboardInterrupt:
        print("infinity: interrupted", file=sys.stderr)
        return _INTERRUPTED
    return status


def _commands(argv: Sequence[str]) -> list[_Command]:
    """Return the module of the subcommand that is named, or those of all, for help and errors.

    Importing all takes longer than some answers.
    """
    named = [name for name in _COMMANDS if name in argv[:1]] or _COMMANDS
    modules = [import_module(f"infinity_engine.cli.{_COMMANDS[name]}") for name in named]
    return [cast("_Command", module) for module in modules]
