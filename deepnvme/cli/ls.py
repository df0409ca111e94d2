"""`deepnvme ls`: which tensors a store or a safetensors file holds.

Reads the manifest or the header, and no tensor.

Exit status: 0 listed, 1 not (there is none, it is damaged, or in use).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from deepnvme.cli.places import (
    PLACE_HELP,
    Place,
    add_generation_argument,
    opened_store,
    place_argument,
    printable,
    tensor_count,
)
from deepnvme.formats.safetensors import safetensors_header
from deepnvme.sizes import format_bytes

__all__ = ["HELP", "NAME", "SCHEMA", "add_arguments", "run"]

NAME = "ls"
HELP = "List the tensors of a store or a safetensors file."
SCHEMA = 1  # of the JSON object: raised when a field changes its meaning or goes


@dataclass(frozen=True)
class _Row:
    """One tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `deepnvme ls`."""
    parser.add_argument("place", type=place_argument, metavar="PLACE", help=PLACE_HELP)
    add_generation_argument(parser)
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of a table"
    )


def run(options: argparse.Namespace) -> int:
    """Open, print."""
    options.place.refuse_generation(options.generation)
    about, rows = (
        _of_file(options.place)
        if options.place.is_file
        else _of_store(options.place, options.generation)
    )
    if options.json:
        report = {
            "schema": SCHEMA,
            **about,
            "tensors": list(map(asdict, rows)),
            "nbytes": _total(rows),
        }
        print(json.dumps(report, indent=2))
        return 0
    for line in _lines(rows):
        print(line)
    print(f"{tensor_count(len(rows))}, {format_bytes(_total(rows))}; {_words(about)}")
    return 0


def _of_store(place: Place, generation: int | None) -> tuple[dict[str, Any], list[_Row]]:
    with opened_store(place, generation) as store:
        records = {name: store.record(name) for name in store}
        about = {
            "kind": "store",
            "directories": [str(directory) for directory in store.volume.directories],
            "generation": store.generation if generation is None else generation,
            "states": sorted(store.states),
            "free_bytes": store.volume.free_bytes,
        }
    return about, [
        _Row(name, record.dtype, record.shape, record.nbytes)
        for name, record in sorted(records.items())
    ]


def _of_file(place: Place) -> tuple[dict[str, Any], list[_Row]]:
    header = safetensors_header(place.paths[0])
    about = {"kind": "safetensors", "path": header.path, "metadata": dict(header.metadata)}
    return about, [
        _Row(name, tensor.dtype, tensor.shape, tensor.nbytes)
        for name, tensor in sorted(header.tensors.items())
    ]


def _total(rows: Iterable[_Row]) -> int:
    return sum(row.nbytes for row in rows)


def _lines(rows: Iterable[_Row]) -> Iterator[str]:
    """Yield the table.

    By hand: rich would fold it to the terminal, so that it cannot be searched, and is slow for many
    tensors.
    """
    cells = [
        (
            printable(row.name),
            row.dtype,
            " x ".join(map(str, row.shape)) or "scalar",
            format_bytes(row.nbytes),
        )
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for name, dtype, shape, size in cells:
        left = f"{name:<{widths[0]}}  {dtype:<{widths[1]}}  {shape:<{widths[2]}}"
        yield f"{left}  {size:>{widths[3]}}"


def _words(about: dict[str, Any]) -> str:
    if about["kind"] == "safetensors":
        entries = [
            f"{printable(name)} = {printable(value)}" for name, value in about["metadata"].items()
        ]
        return f"metadata: {', '.join(entries) or 'none'}"
    states = ", ".join(map(printable, about["states"])) or "none"
    return (
        f"generation {about['generation']}; state dicts: {states}; "
        f"{format_bytes(about['free_bytes'])} free"
    )
