"""`deepnvme verify`: reads all of a store or a safetensors file, and compares a store's bytes with
their checksums.

Exit status: 0 all are sound, 1 some are damaged, 2 some could not be looked at (not there, in use,
or wrong usage).
"""

from __future__ import annotations

import argparse
import errno

from deepnvme.cli.places import (
    Place,
    add_generation_argument,
    byte_progress,
    opened_store,
    place_argument,
    printable,
    tensor_count,
)
from deepnvme.cli.report import complain, explained
from deepnvme.errors import NVMeError
from deepnvme.formats.safetensors import SafetensorsFile
from deepnvme.sizes import format_bytes

__all__ = ["HELP", "NAME", "add_arguments", "run"]

NAME = "verify"
HELP = "Read all of a store and compare it with its checksums; name what is damaged."

_SOUND, _DAMAGED, _NOT_LOOKED_AT = 0, 1, 2
_PIECE_BYTES = 16 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `deepnvme verify`."""
    parser.add_argument(
        "places",
        nargs="+",
        type=place_argument,
        metavar="PLACE",
        help="a store: its directory, or several joined by commas; or a .safetensors file, which "
        "has no checksums: its header is checked, and that it can be read",
    )
    add_generation_argument(parser)
    parser.set_defaults(failed=_NOT_LOOKED_AT)  # 1 says that there is damage


def run(options: argparse.Namespace) -> int:
    """Look at each, print what is wrong."""
    return max(_status(place, options.generation) for place in options.places)


def _status(place: Place, generation: int | None) -> int:
    try:
        place.refuse_generation(generation)
        status, lines = (
            _verified_file(place) if place.is_file else _verified_store(place, generation)
        )
    except OSError as error:
        # EIO as well: what the drive does not return is as lost as what it returns wrong.
        if not isinstance(error, NVMeError) or error.errno not in (errno.EBADMSG, errno.EIO):
            complain(f"{place}: not verified: {explained(error)}")
            return _NOT_LOOKED_AT
        status, lines = _DAMAGED, [f"{place}: damaged: {explained(error)}"]
    # Not above: an error of standard output says nothing about the place.
    for line in lines:
        print(line)
    return status


def _verified_store(place: Place, generation: int | None) -> tuple[int, list[str]]:
    with opened_store(place, generation) as store:
        records = [store.record(name) for name in store]
        total = sum(record.nbytes for record in records)
        with byte_progress(f"verifying {place}", total) as advance:
            damage = store.verify(lambda _name, nbytes: advance(nbytes))
        generation = store.generation if generation is None else generation
    lines = [
        f"{place}: damaged: {printable(piece.name)}, bytes {piece.offset} to "
        f"{piece.offset + piece.nbytes}: {piece.reason}"
        for piece in damage
    ]
    unsummed = sum(record.checksums is None for record in records)
    only_read = f"; without checksums, so only read: {unsummed}" if unsummed else ""
    outcome = f"damaged: {len({piece.name for piece in damage})}" if damage else "all sound"
    what = f"generation {generation}, {tensor_count(len(records))}, {format_bytes(total)}"
    lines.append(f"{place}: {what}: {outcome}{only_read}")
    return _DAMAGED if damage else _SOUND, lines


def _verified_file(place: Place) -> tuple[int, list[str]]:
    with SafetensorsFile(place.paths[0]) as file:
        header = file.header
        with byte_progress(f"reading {place}", header.nbytes) as advance:
            for nbytes in file.pieces(_PIECE_BYTES):
                advance(nbytes)
    what = f"{tensor_count(len(header.tensors))}, {format_bytes(header.nbytes)}"
    line = (
        f"{place}: {what}: header sound, all could be read; the format has no checksums to compare "
        "with"
    )
    return _SOUND, [line]
