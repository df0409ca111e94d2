"""`deepnvme verify`: reads all of a store or a safetensors file, and compares a store's bytes with their checksums.

Exit status: 0 all are sound, 1 some are damaged, 2 some could not be looked at (not there, in use, or wrong usage).
"""

from __future__ import annotations

import argparse
import errno
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from deepnvme.cli.places import Place, byte_progress, place_argument, printable, tensor_count
from deepnvme.errors import NVMeError
from deepnvme.future import IOFuture
from deepnvme.pool import Pool
from deepnvme.queue import IOQueue
from deepnvme.safetensors import safetensors_header
from deepnvme.sizes import format_bytes
from deepnvme.store import TensorStore

__all__ = ["HELP", "NAME", "add_arguments", "run"]

NAME = "verify"
HELP = "Read all of a store and compare it with its checksums; name what is damaged."

_SOUND, _DAMAGED, _NOT_LOOKED_AT = 0, 1, 2
_PIECE_BYTES = 16 << 20
_PIECES = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `deepnvme verify`."""
    parser.add_argument(
        "places",
        nargs="+",
        type=place_argument,
        metavar="PLACE",
        help="a store: its directory, or several joined by commas; or a .safetensors file, which has no checksums: its "
        "header is checked, and that it can be read",
    )


def run(options: argparse.Namespace) -> int:
    """Look at each, print what is wrong."""
    return max(map(_status, options.places))


def _status(place: Place) -> int:
    try:
        return _verified_file(place) if place.is_file else _verified_store(place)
    except OSError as error:
        damaged = isinstance(error, NVMeError) and error.errno in (errno.EBADMSG, errno.EIO)
        what = f"{'damaged' if damaged else 'not verified'}: {error.strerror or error}"
        print(f"{place}: {what}", file=sys.stdout if damaged else sys.stderr)
        return _DAMAGED if damaged else _NOT_LOOKED_AT


def _verified_store(place: Place) -> int:
    with TensorStore.open(place.paths) as store:
        records = [store.record(name) for name in store]
        total = sum(record.nbytes for record in records)
        with byte_progress(f"verifying {place}", total) as advance:
            damage = store.verify(lambda _name, nbytes: advance(nbytes))
        generation = store.generation
    for each in damage:
        where = f"bytes {each.offset} to {each.offset + each.nbytes}"
        print(f"{place}: damaged: {printable(each.name)}, {where}: {each.reason}")
    unsummed = sum(record.checksums is None for record in records)
    only_read = f"; without checksums, so only read: {unsummed}" if unsummed else ""
    outcome = f"damaged: {len({each.name for each in damage})}" if damage else "all sound"
    what = f"generation {generation}, {tensor_count(len(records))}, {format_bytes(total)}"
    print(f"{place}: {what}: {outcome}{only_read}")
    return _DAMAGED if damage else _SOUND


def _verified_file(place: Place) -> int:
    [path] = place.paths
    header = safetensors_header(path)
    with byte_progress(f"reading {place}", header.nbytes) as advance:
        for nbytes in _read(path, header.nbytes):
            advance(nbytes)
    what = f"{tensor_count(len(header.tensors))}, {format_bytes(header.nbytes)}"
    print(f"{place}: {what}: header sound, all could be read; the format has no checksums to compare with")
    return _SOUND


def _read(path: Path, nbytes: int) -> Iterator[int]:
    """Read a file, keeping the drive busy; yield the length of each piece that was read."""
    pool = Pool(_PIECES * _PIECE_BYTES)
    free = deque(pool.buffer(_PIECE_BYTES) for _ in range(_PIECES))
    pending: deque[tuple[memoryview, IOFuture[int]]] = deque()
    with IOQueue(pool=pool) as queue, queue.open(path) as file:
        for offset in range(0, nbytes, _PIECE_BYTES):
            if not free:
                memory, reading = pending.popleft()
                yield reading.result()
                free.append(memory)
            memory = free.popleft()
            pending.append((memory, file.pread(memory[: nbytes - offset], offset)))
        for _, reading in pending:
            yield reading.result()
