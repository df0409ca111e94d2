"""`frozen_checksums`: what a checkpoint knows of the frozen parameters that it leaves out.

Reads them where they lie, once for a run unless something changes them (decision 0060).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext

from deepnvme.memory.checksum import crc32c
from infinity_engine.engine.checkpoints.checkpointing import Run
from infinity_engine.engine.checkpoints.sources import flat
from infinity_engine.update.captured import bytes_of

__all__ = ["frozen_checksums"]


def frozen_checksums(run: Run, room: memoryview) -> Mapping[str, int]:
    """Return the crc32c of the values of each frozen tensor, by name. All ranks call this.

    Values on a device are copied through `room`.

    Raises:
        TransferError: the drive failed.
        CollectiveError: another rank failed.
    """
    known = run.checksums.are_current(run.frozen)
    # All ranks gather, or none.
    if not all(run.ranks.tell("whether checksums of frozen parameters are known", known)):
        read = run.ranks.on_all("reading frozen parameters", lambda: _read(run, room))
        # Rank 0's: the others help to gather, and sum nothing.
        run.checksums.keep(read[0], run.frozen)
    return run.checksums.by_name


def _read(run: Run, room: memoryview) -> dict[str, int]:
    places, found = run.places, dict[str, int]()
    failures: list[Exception] = []
    # The tiles of a weight one after another: a checksum is of the whole.
    for known in sorted(run.frozen, key=lambda known: places[known.number].first_element):
        name = places[known.number].names[0]
        found.setdefault(name, 0)
        if not known.parameter.numel():
            continue
        is_here = run.has_in_memory(known)
        # All ranks gather each of them, so this rank does too after its first failure.
        with nullcontext() if is_here else run.shown(known):
            if run.ranks.rank or failures:
                continue
            try:
                values = known.values if is_here else flat(known.parameter.data)
                for piece in bytes_of(values, room):
                    found[name] = crc32c(piece, found[name])
            except Exception as error:
                failures.append(error)
    if failures:
        raise failures[0]
    return found
