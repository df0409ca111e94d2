"""`deepnvme doctor`: what storage this process can use and how, and what to do where it could do
better.

Prints what `probing` and `diagnosis` of `deepnvme.machine` return, as tables or as one JSON object;
finds out nothing by itself. Exit status: 0 every directory that was named can be used, 1 one of
them cannot.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from deepnvme.cli.arguments import directory_argument
from deepnvme.cli.report import drive_rows, installed_version, show, system_rows
from deepnvme.machine.diagnosis import Chosen, about_directory, about_system, can_work, worst_first
from deepnvme.machine.probing import DirectoryProbe, probe_directory, probe_system
from deepnvme.machine.profile import (
    Profile,
    Settings,
    effective_settings,
    load_profile,
    profile_path,
)
from deepnvme.sizes import format_bytes

__all__ = ["HELP", "NAME", "SCHEMA", "add_arguments", "run", "settings_record", "settings_text"]

NAME = "doctor"
HELP = "Tell what storage can be used here and how, and what to do about its weak points."
SCHEMA = 2  # of the JSON object: raised when a field changes its meaning or goes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `deepnvme doctor`."""
    parser.add_argument(
        "directories",
        nargs="*",
        type=directory_argument,
        metavar="DIR",
        help="directories to look at (default: the current one)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of tables"
    )


def run(options: argparse.Namespace) -> int:
    """Probe, judge, print; return 0 when deepnvme works in each directory, 1 when not."""
    chosen = Chosen.BY_NAME if options.directories else Chosen.BY_DEFAULT
    system = probe_system()
    directories = [probe_directory(directory) for directory in options.directories or [Path()]]
    profile = load_profile()
    found = list(about_system(system, platform.machine()))
    for directory in directories:
        found += about_directory(directory, chosen)
    findings = worst_first(found)
    if options.json:
        report = {
            "schema": SCHEMA,
            "version": installed_version(),
            "works": can_work(findings),
            "findings": list(map(asdict, findings)),
            "system": asdict(system),
            "directories": [
                {**asdict(directory), "settings": settings_record(profile.for_path(directory.path))}
                for directory in directories
            ],
        }
        print(json.dumps(report, indent=2))
    else:
        sections = [
            (f"Drive under {directory.path}", _drive_rows(directory, profile))
            for directory in directories
        ]
        show(
            [*sections, ("I/O", system_rows(system))],
            findings,
            cannot="deepnvme cannot work in",
            can="deepnvme works here",
        )
    return 0 if can_work(findings) else 1


def settings_text(measured: Settings | None) -> str:
    """Return in words how a queue without settings of its own uses a drive."""
    settings = effective_settings(measured)
    return (
        f"chunks of {format_bytes(settings.chunk_bytes)}, {format_bytes(settings.inflight_bytes)} "
        f"in flight, ordinary memory by {settings.user_memory.name.lower().replace('_', ' ')} "
        f"({'the defaults' if measured is None else f'measured, in {profile_path()}'})"
    )


def settings_record(measured: Settings | None) -> dict[str, object]:
    """Return the same for JSON."""
    settings = effective_settings(measured)
    return {
        "chunk_bytes": settings.chunk_bytes,
        "inflight_bytes": settings.inflight_bytes,
        "user_memory": settings.user_memory.name.lower(),
        "measured": measured is not None,
    }


def _drive_rows(directory: DirectoryProbe, profile: Profile) -> Iterator[tuple[str, str]]:
    yield from drive_rows(directory)
    if directory.plain_errno is None:
        yield "settings", settings_text(profile.for_path(directory.path))
