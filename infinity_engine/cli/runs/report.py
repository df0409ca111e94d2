"""`infinity report`: the page of a run, also of one that was killed or goes on.

Reads the run's directory and writes one HTML file. Needs no torch. Exit status: 0 it is written, 2
the directory is no run's, or nothing can be written.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from infinity_engine.errors import ConfigError
from infinity_engine.training.records import RecordedRun, RunDirectory
from infinity_engine.training.report_page import report_page

__all__ = ["HELP", "NAME", "add_arguments", "run"]

NAME = "report"
HELP = "Write a page about a run of `infinity train`: memory, time, bandwidth, wear and loss."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `infinity report`."""
    parser.add_argument("run_directory", type=Path, metavar="RUN", help="the run's directory")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="the page (default: report.html in RUN)"
    )


def run(options: argparse.Namespace) -> int:
    """Write the page and print where it is."""
    directory = RunDirectory(options.run_directory)
    path = options.output or directory.report
    try:
        if not (directory.records.is_file() or directory.description.is_file()):
            expected = "the directory of a run, which `infinity train --run` has made"
            raise ConfigError(field="run", value=str(directory.path), expected=expected)
        page = report_page(RecordedRun.read(options.run_directory))
        path.write_text(page, encoding="utf-8", errors="backslashreplace")
    except ConfigError as error:
        print(f"infinity report: error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"infinity report: error: cannot write {path}: {error.strerror}", file=sys.stderr)
        return 2
    print(path)
    return 0
