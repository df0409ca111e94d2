"""Small pieces of memory go to their places in staging memory and back, with their checksums, and
nowhere else.
"""

from __future__ import annotations

import random

import pytest

from deepnvme.memory.buffers import Memory, memory_of
from deepnvme.memory.checksum import crc32c
from deepnvme.memory.copying import Runs, gather, gather_runs, scatter, scatter_runs

SIZES = (1, 100, 4096, 65_536, 200_001)  # some of them go past the caches


def pieces_of(contents: list[bytes]) -> list[Memory]:
    return [memory_of(bytearray(content), writable=True) for content in contents]


def places_of(sizes: tuple[int, ...]) -> list[int]:
    """Return the offset of each with 7 bytes before it and between them."""
    return [7 * (number + 1) + sum(sizes[:number]) for number in range(len(sizes))]


@pytest.fixture
def contents() -> list[bytes]:
    some = random.Random(4)
    return [some.randbytes(nbytes) for nbytes in SIZES]


@pytest.mark.parametrize("summing", [True, False])
def test_pieces_go_to_their_places_and_touch_nothing_between_them(
    contents: list[bytes], summing: bool
) -> None:
    room = bytearray(b"-" * (sum(SIZES) + 7 * len(SIZES)))
    places = places_of(SIZES)
    gather(memory_of(room, writable=True), places, SIZES, pieces_of(contents), summing=summing)
    assert room == b"".join(b"-" * 7 + content for content in contents)


@pytest.mark.parametrize("summing", [True, False])
def test_pieces_come_back_from_their_places(contents: list[bytes], summing: bool) -> None:
    room = b"".join(b"-" * 7 + content for content in contents)
    found = [bytearray(nbytes) for nbytes in SIZES]
    memories = [memory_of(each, writable=True) for each in found]
    scatter(memory_of(room, writable=False), places_of(SIZES), SIZES, memories, summing=summing)
    assert found == contents


def test_each_piece_has_a_checksum_of_its_own_where_they_are_wanted(contents: list[bytes]) -> None:
    room = memory_of(bytearray(sum(SIZES) + 7 * len(SIZES)), writable=True)
    pieces, places = pieces_of(contents), places_of(SIZES)
    sums = [crc32c(content) for content in contents]
    assert gather(room, places, SIZES, pieces, summing=True) == sums
    assert scatter(room, places, SIZES, pieces, summing=True) == sums
    assert not gather(room, places, SIZES, pieces, summing=False)
    assert not scatter(room, places, SIZES, pieces, summing=False)


@pytest.mark.parametrize("place", [-1, 91, 1 << 40])
def test_what_would_not_lie_within_the_staging_memory_is_refused(place: int) -> None:
    room, pieces = memory_of(bytearray(100), writable=True), pieces_of([b"0123456789"])
    for copy in (gather, scatter):
        with pytest.raises(ValueError, match="not within 100 bytes"):
            copy(room, [place], [10], pieces, summing=False)


def test_pieces_without_a_place_each_are_refused() -> None:
    room, pieces = memory_of(bytearray(100), writable=True), pieces_of([b"a", b"b"])
    for copy in (gather, scatter):
        with pytest.raises(ValueError, match="zip"):
            copy(room, [0], [1], pieces, summing=True)


@pytest.mark.parametrize("nbytes", [9, 11])
def test_pieces_that_are_not_of_the_size_of_their_places_are_refused(nbytes: int) -> None:
    room, pieces = memory_of(bytearray(100), writable=True), pieces_of([b"a", b"0123456789"])
    for copy in (gather, scatter):
        with pytest.raises(
            ValueError, match=f"10 bytes of memory cannot be copied to or from {nbytes}"
        ):
            copy(room, [0, 50], [1, nbytes], pieces, summing=True)


def test_no_pieces_are_no_work() -> None:
    assert not gather(memory_of(bytearray(1), writable=True), [], [], [], summing=True)


def test_runs_go_to_staging_memory_and_back_with_their_distances() -> None:
    room = bytearray(b"-" * 30)
    staging = memory_of(room, writable=True)
    runs = [Runs(1, 2, 5, 3), Runs(20, 4, 4, 1)]
    pieces = pieces_of([b"aabbcc", b"dddd"])
    gather_runs(staging, runs, pieces)
    assert room == b"-aa---bb---cc-------dddd------"

    found = [bytearray(6), bytearray(4)]
    scatter_runs(staging, runs, [memory_of(each, writable=True) for each in found])
    assert found == [b"aabbcc", b"dddd"]

    gather_runs(staging, [Runs(0, 2, 5, 6)], pieces_of([b"xy"]))  # one piece for all runs
    assert [room[start : start + 2] for start in range(0, 30, 5)] == [b"xy"] * 6
    assert room[2:5] == b"a--"


def test_runs_beyond_staging_memory_or_of_another_size_are_refused() -> None:
    staging = memory_of(bytearray(10), writable=True)
    with pytest.raises(ValueError, match="bytes 0 to 11"):
        gather_runs(staging, [Runs(0, 2, 3, 4)], pieces_of([b"aabbccdd"]))
    with pytest.raises(ValueError, match="cannot be copied"):
        scatter_runs(staging, [Runs(0, 2, 3, 3)], pieces_of([b"aa"]))
