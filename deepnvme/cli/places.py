"""What `deepnvme ls`, `verify` and `cp` work on: a store or a safetensors file, as one argument.

Progress in bytes.

Stores are opened for reading alone, so that these commands work beside other readers and on
read-only drives.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Column

from deepnvme.store.store import TensorStore
from deepnvme.volume.member import Access

__all__ = [
    "FILE_SUFFIX",
    "PLACE_HELP",
    "Place",
    "add_generation_argument",
    "byte_progress",
    "opened_store",
    "place_argument",
    "printable",
    "tensor_count",
]

FILE_SUFFIX = ".safetensors"
PLACE_HELP = "a .safetensors file, or a store: its directory, or several joined by commas"


@dataclass(frozen=True)
class Place:
    """The directories of a store, or one safetensors file."""

    paths: tuple[Path, ...]
    is_file: bool

    def refuse_generation(self, generation: int | None) -> None:
        """Refuse a generation of a file, which has none.

        Raises:
            OSError: this is a file, and `generation` is given.
        """
        if self.is_file and generation is not None:
            raise OSError(
                errno.EINVAL,
                "a safetensors file has no generations: leave out --generation",
                str(self),
            )

    def __str__(self) -> str:
        """Return the argument."""
        return ",".join(map(str, self.paths))


def place_argument(text: str) -> Place:
    """Return what an argument names: a file, if it is one or has the suffix; else a store."""
    whole = Path(text)
    try:
        is_file, exists = whole.suffix == FILE_SUFFIX or whole.is_file(), whole.exists()
    except OSError as error:
        # Where this user may not look, the command says so when it opens the place.
        is_file, exists = whole.suffix == FILE_SUFFIX, error.errno != errno.ENAMETOOLONG
    if is_file:
        return Place((whole,), is_file=True)
    parts = [text] if exists else text.split(",")
    if not all(parts):
        raise argparse.ArgumentTypeError(
            f"expected a {FILE_SUFFIX} file or directories joined by commas, got {text!r}"
        )
    _refuse_repeated(parts)
    return Place(tuple(map(Path, parts)), is_file=False)


def _refuse_repeated(parts: list[str]) -> None:
    known: dict[str, str] = {}
    for part in parts:
        place = os.path.realpath(part)
        if place in known:
            what = (
                f"{part} is named twice"
                if known[place] == part
                else f"{known[place]} and {part} are one directory"
            )
            raise argparse.ArgumentTypeError(f"{what}: name each directory of the store once")
        known[place] = part


def add_generation_argument(parser: argparse.ArgumentParser) -> None:
    """Declare which commit of a store is meant."""
    parser.add_argument(
        "--generation",
        type=int,
        metavar="N",
        help="of a store, that commit: the last one, or the one before it",
    )


def opened_store(place: Place, generation: int | None) -> TensorStore:
    """Open a store for reading, at that generation or at its last commit."""
    return TensorStore.open(place.paths, access=Access.READ, generation=generation)


@contextlib.contextmanager
def byte_progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show on standard error how many of `total` bytes are done; yield the call that adds more."""
    console = Console(stderr=True)
    columns = (
        # A long path is cut: the figures stay in sight.
        TextColumn(
            "{task.description}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")
        ),
        BarColumn(bar_width=16),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=console, expand=True, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task(what, total=total)
        yield lambda nbytes: progress.advance(task, nbytes)


def printable(name: str) -> str:
    """Return a name as a terminal may show it: the name comes from a file, and may be hostile."""
    return name if name.isprintable() else ascii(name)[1:-1]


def tensor_count(count: int) -> str:
    """Return how many tensors, in words."""
    return f"{count} tensor{'' if count == 1 else 's'}"
