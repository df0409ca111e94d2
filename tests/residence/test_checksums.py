"""Swapped bytes with checksums: one that has changed on a drive is found when it is read, and said
where it is.
"""

from __future__ import annotations

import errno
import gc
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from deepnvme import Checksum, FaultPlan, IOQueue, Requests
from deepnvme.memory.checksum import crc32c
from infinity_engine.errors import DamageError, TransferError
from infinity_engine.memory import Ledger
from infinity_engine.plan import ResolvedBudget
from infinity_engine.storage import Hops, Place, SwapFile
from support.unnamed_files import unnamed_files

PAGE = 4096
MIB = 1 << 20
BLOCK = 2 * PAGE


@contextmanager
def swap_file(
    *drives: Path, checksum: Checksum = Checksum.CRC32C, queue: IOQueue | None = None
) -> Iterator[SwapFile]:
    for drive in drives:
        drive.mkdir()
    limits = {str(drive): 16 * MIB for drive in drives}
    ledger = Ledger(ResolvedBudget(device=0, host=64 * MIB, nvme=limits))
    rates = dict.fromkeys(limits, 1.0)
    with SwapFile(limits, ledger, rates=rates, checksum=checksum, queue=queue) as swap:
        yield swap


def numbered(nbytes: int, seed: int = 0) -> bytes:
    return bytes((at // 7 + at + seed) % 251 for at in range(nbytes))


def written(swap: SwapFile, nbytes: int, **options: int) -> Place:
    place = swap.allocate(nbytes, holder="weights", **options)
    swap.write(place, memoryview(numbered(nbytes)), what="weights").wait()
    return place


def flip(drive: Path, offset: int) -> None:
    """Change one bit of a byte of the swap file."""
    [path] = unnamed_files(drive)
    file = os.open(path, os.O_RDWR)
    try:
        [byte] = os.pread(file, 1, offset)
        os.pwrite(file, bytes([byte ^ 4]), offset)
    finally:
        os.close(file)


def damage_of(swap: SwapFile, place: Place) -> DamageError:
    with pytest.raises(DamageError) as told:
        swap.read(place, memoryview(bytearray(place.nbytes)), what="weights").wait()
    return told.value


def test_a_flipped_bit_is_told_with_the_block_that_it_is_in_and_both_sums(tmp_path: Path) -> None:
    with swap_file(tmp_path / "a") as swap:
        written(swap, 5 * PAGE)
        place = written(swap, 5 * BLOCK + 100, block_bytes=BLOCK)
        [extent] = place.extents
        flip(tmp_path / "a", extent.offset + 3 * BLOCK + 5)

        told = damage_of(swap, place)

        path = tmp_path / "a" / "(unnamed)"
        good = numbered(5 * BLOCK + 100)[3 * BLOCK : 4 * BLOCK]
        bad = bytearray(good)
        bad[5] ^= 4
        assert (told.what, told.path, told.offset) == (
            "weights",
            str(path),
            extent.offset + 3 * BLOCK,
        )
        assert (told.asked, told.errno, told.others) == (BLOCK, errno.EBADMSG, ())
        assert (told.expected, told.found) == (crc32c(good), crc32c(bad))
        sums = [f"{each:#010x}" for each in (told.expected, told.found)]
        assert [
            said
            for said in ("weights: ", str(path), f"offset {told.offset}", *sums)
            if said not in str(told)
        ] == []


def test_the_last_block_may_be_short(tmp_path: Path) -> None:
    with swap_file(tmp_path / "a") as swap:
        place = written(swap, 5 * BLOCK + 100, block_bytes=BLOCK)
        [extent] = place.extents
        flip(tmp_path / "a", extent.offset + 5 * BLOCK + 99)

        told = damage_of(swap, place)
        assert (told.offset, told.asked) == (extent.offset + 5 * BLOCK, 100)


@pytest.mark.parametrize("block", [PAGE, BLOCK, MIB])
def test_what_is_whole_comes_back_and_what_is_repaired_too(block: int, tmp_path: Path) -> None:
    with swap_file(tmp_path / "a") as swap:
        place = written(swap, 3 * MIB + 77, block_bytes=block)
        into = bytearray(3 * MIB + 77)
        assert swap.read(place, memoryview(into)).wait() == 3 * MIB + 77
        assert into == numbered(3 * MIB + 77)

        flip(tmp_path / "a", place.extents[0].offset)
        damage_of(swap, place)
        flip(tmp_path / "a", place.extents[0].offset)
        assert swap.read(place, memoryview(into)).wait() == 3 * MIB + 77


def test_what_was_written_as_a_whole_is_checked_in_parts_and_the_other_way_round(
    tmp_path: Path,
) -> None:
    with swap_file(tmp_path / "a") as swap:
        place = written(swap, 4 * BLOCK + 10, block_bytes=BLOCK)
        second = place.part(BLOCK, 2 * BLOCK)
        swap.write(second, memoryview(numbered(2 * BLOCK, seed=9))).wait()
        swap.read(place, memoryview(bytearray(place.nbytes))).wait()
        flip(tmp_path / "a", place.extents[0].offset + 2 * BLOCK)

        damage_of(swap, place)
        assert damage_of(swap, second).offset == place.extents[0].offset + 2 * BLOCK
        assert (
            damage_of(swap, second.part(BLOCK, BLOCK)).offset == place.extents[0].offset + 2 * BLOCK
        )
        for whole in (
            place.part(0, BLOCK),
            place.part(3 * BLOCK, BLOCK + 10),
            second.part(0, BLOCK),
        ):
            swap.read(whole, memoryview(bytearray(whole.nbytes))).wait()


@pytest.mark.parametrize(("start", "nbytes"), [(PAGE, BLOCK), (0, PAGE), (BLOCK, BLOCK + PAGE)])
def test_a_part_that_cuts_a_block_is_refused(start: int, nbytes: int, tmp_path: Path) -> None:
    with swap_file(tmp_path / "a") as swap:
        place = written(swap, 4 * BLOCK, block_bytes=BLOCK)
        with pytest.raises(ValueError, match=f"whole blocks of {BLOCK} B"):
            place.part(start, nbytes)


def test_a_block_that_lies_on_two_drives_is_told_with_both(tmp_path: Path) -> None:
    drives = [tmp_path / "a", tmp_path / "b"]
    with swap_file(*drives) as swap:
        place = written(swap, 3 * MIB)
        first, second = place.extents
        assert first.nbytes == second.nbytes == 3 * MIB // 2
        flip(drives[second.member], second.offset)

        told = damage_of(swap, place)
        files = [str(drives[each.member] / "(unnamed)") for each in place.extents]
        assert (told.path, told.offset, told.asked) == (files[0], first.offset + MIB, MIB)
        assert told.others == ((files[1], second.offset),)
        assert f"continued in {files[1]} at offset {second.offset}" in str(told)


def test_what_was_read_is_checked_once_and_is_then_its_readers(tmp_path: Path) -> None:
    with swap_file(tmp_path / "a") as swap:
        place = written(swap, BLOCK)
        into = bytearray(BLOCK)
        hop = swap.read(place, memoryview(into))
        assert hop.wait() == BLOCK
        into[0] ^= 1
        assert hop.wait() == BLOCK


def test_damage_is_told_to_everybody_who_waits(tmp_path: Path) -> None:
    with swap_file(tmp_path / "a") as swap:
        place = written(swap, BLOCK)
        flip(tmp_path / "a", place.extents[0].offset)
        event = Hops([swap.read(place, memoryview(bytearray(BLOCK)), what="weights")])
        for _ in range(2):
            with pytest.raises(DamageError, match=r"^weights: "):
                event.wait()


class Buffer(bytearray):
    """One that can be seen to go."""


@pytest.mark.parametrize("fails", [True, False])
def test_a_read_that_has_failed_and_its_error_do_not_hold_the_memory_that_was_read_into(
    fails: bool, tmp_path: Path
) -> None:
    plan = FaultPlan().fail(nth=1, requests=Requests.READS) if fails else None
    with IOQueue(faults=plan) as queue, swap_file(tmp_path / "a", queue=queue) as swap:
        place = written(swap, BLOCK)
        if not fails:
            flip(tmp_path / "a", place.extents[0].offset)
        buffer = Buffer(BLOCK)
        alive = weakref.ref(buffer)
        hop = swap.read(place, memoryview(buffer))
        del buffer
        with pytest.raises(TransferError) as told:
            hop.wait()
        gc.collect()

        assert alive() is None
        assert isinstance(told.value, DamageError) is not fails


def test_without_checksums_nothing_is_compared(tmp_path: Path) -> None:
    with swap_file(tmp_path / "a", checksum=Checksum.NONE) as swap:
        place = written(swap, BLOCK)
        flip(tmp_path / "a", place.extents[0].offset)
        assert swap.read(place, memoryview(bytearray(BLOCK))).wait() == BLOCK
