"""`infinity migrate`: the equivalent of a DeepSpeed file, key by key.

Reads the file and nothing else. Exit status: 0 each key has an equivalent or needs none, 1 some
have none, 2 the file cannot be read or has a value that cannot be right.
"""

from __future__ import annotations

import argparse
import json
import sys

from rich.table import Table
from rich.text import Text

from deepnvme.cli.report import Output
from infinity_engine.errors import ConfigError
from infinity_engine.migration import Migration, migrate_deepspeed, read_json

__all__ = ["HELP", "NAME", "SCHEMA", "add_arguments", "run"]

NAME = "migrate"
HELP = "Show the settings that are equivalent to a DeepSpeed JSON file, key by key."
SCHEMA = 1  # of the JSON object: raised when a field changes its meaning or goes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `infinity migrate`."""
    parser.add_argument("file", help="DeepSpeed's JSON file")
    parser.add_argument(
        "--ranks",
        type=int,
        default=1,
        metavar="N",
        help="processes that train, which divide train_batch_size (default: 1)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of a table"
    )


def run(options: argparse.Namespace) -> int:
    """Migrate and print."""
    try:
        migration = migrate_deepspeed(read_json(options.file), ranks=options.ranks)
    except ConfigError as error:
        print(f"infinity migrate: error: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(_as_json(migration), indent=2))
    else:
        _show(migration)
    return 1 if migration.missing else 0


def _as_json(migration: Migration) -> dict[str, object]:
    keys = [
        {"key": key.key, "value": key.value, "fate": key.fate.value, "here": key.here}
        for key in migration.keys
    ]
    return {
        "schema": SCHEMA,
        "settings": migration.settings,
        "optimizer": migration.optimizer,
        "has_schedule": migration.schedule is not None,
        "keys": keys,
    }


def _show(migration: Migration) -> None:
    console = Output()
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for heading in ("DeepSpeed", "value", "here"):
        table.add_column(heading, overflow="fold")
    for key in migration.keys:
        table.add_row(
            Text(key.key), Text(json.dumps(key.value)), Text(f"{key.fate.value}: {key.here}")
        )
    console.print(table)
    console.print(Text(f"\n{_call(migration)}"), soft_wrap=True)


def _call(migration: Migration) -> str:
    """Return the call of `initialize` with these settings."""
    optimizer = "optimizer" if migration.optimizer is None else repr(dict(migration.optimizer))
    lines = [f"    {name}={value!r}," for name, value in migration.settings.items()]
    call = "\n".join(["eng = engine.initialize(", "    model,", f"    {optimizer},", *lines, ")"])
    if migration.schedule is None:
        return call
    return f'{call}\n# The file\'s scheduler comes with config="FILE" alone.'
