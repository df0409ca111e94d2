"""Extents and free space: nothing overlaps, nothing leaks, what touches becomes one piece again."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from deepnvme.sizes import PAGE, whole_pages
from deepnvme.volume import extents
from deepnvme.volume.extents import Extent, SpaceMap, slices
from support.interrupts import interrupted, interruptions

PAGES = 48
FIRST = 3  # the page at which the space begins


class SpaceMapAgainstPages(RuleBasedStateMachine):
    """A SpaceMap, and the pages in use as a plain set."""

    def __init__(self) -> None:
        super().__init__()
        self.space = SpaceMap(FIRST * PAGE, (FIRST + PAGES) * PAGE)
        self.used: set[int] = set()

    def free_runs(self) -> list[range]:
        """Return the longest runs of free pages."""
        runs: list[range] = []
        for page in range(FIRST, FIRST + PAGES):
            if page in self.used:
                continue
            if runs and runs[-1].stop == page:
                runs[-1] = range(runs[-1].start, page + 1)
            else:
                runs.append(range(page, page + 1))
        return runs

    @rule(nbytes=st.integers(1, (PAGES + 1) * PAGE))
    def take(self, nbytes: int) -> None:
        count = whole_pages(nbytes) // PAGE
        fitting = [len(run) for run in self.free_runs() if len(run) >= count]
        offset = self.space.take(nbytes)
        if not fitting:
            assert offset is None
            return
        assert offset is not None
        [home] = [run for run in self.free_runs() if offset // PAGE in run]
        assert (home.start, len(home)) == (offset // PAGE, min(fitting)), (
            "the smallest piece that fits, from its start"
        )
        self.used |= set(range(home.start, home.start + count))

    @rule(nbytes=st.integers(1, (PAGES + 1) * PAGE))
    def take_most(self, nbytes: int) -> None:
        longest = max(map(len, self.free_runs()), default=0)
        taken = self.space.take_most(nbytes)
        if not longest:
            assert taken is None
            return
        assert taken is not None
        offset, got = taken
        assert got == min(nbytes, longest * PAGE)
        pages = set(range(offset // PAGE, (offset + whole_pages(got)) // PAGE))
        assert not pages & self.used
        self.used |= pages

    @rule(page=st.integers(0, FIRST + PAGES + 2), nbytes=st.integers(1, 8 * PAGE))
    def give(self, page: int, nbytes: int) -> None:
        pages = set(range(page, page + whole_pages(nbytes) // PAGE))
        if pages <= self.used:
            self.space.give(page * PAGE, nbytes)
            self.used -= pages
        else:
            with pytest.raises(ValueError, match=r"not all in use|not pages between"):
                self.space.give(page * PAGE, nbytes)

    @rule(page=st.integers(0, FIRST + PAGES + 2), nbytes=st.integers(1, 8 * PAGE))
    def reserve(self, page: int, nbytes: int) -> None:
        pages = set(range(page, page + whole_pages(nbytes) // PAGE))
        if pages <= set(range(FIRST, FIRST + PAGES)) - self.used:
            self.space.reserve(page * PAGE, nbytes)
            self.used |= pages
        else:
            with pytest.raises(ValueError, match=r"not all free|not pages between"):
                self.space.reserve(page * PAGE, nbytes)

    @rule(most=st.none() | st.integers(0, PAGES))
    def trim_and_extend(self, most: int | None) -> None:
        last = max([*self.used, FIRST, FIRST + PAGES - 1 - (PAGES if most is None else most)])
        trimmed = self.space.trim(None if most is None else most * PAGE)
        assert trimmed == (FIRST + PAGES - last - 1) * PAGE
        assert self.space.end == (last + 1) * PAGE
        if self.space.end < (FIRST + PAGES) * PAGE:
            self.space.extend((FIRST + PAGES) * PAGE)

    @rule()
    def give_everything(self) -> None:
        for page in sorted(self.used, key=lambda page: page * 29 % PAGES):
            self.space.give(page * PAGE, 1)
        self.used.clear()
        assert self.space.largest == PAGES * PAGE

    @invariant()
    def nothing_leaks(self) -> None:
        assert self.space.free_bytes == (PAGES - len(self.used)) * PAGE

    @invariant()
    def what_touches_is_one_piece(self) -> None:
        assert self.space.largest == max(map(len, self.free_runs()), default=0) * PAGE


TestSpaceMapAgainstPages = SpaceMapAgainstPages.TestCase


def test_a_space_of_nothing_has_no_room() -> None:
    space = SpaceMap(PAGE, PAGE)
    assert (space.take(1), space.take_most(1), space.free_bytes, space.largest) == (
        None,
        None,
        0,
        0,
    )


@pytest.mark.parametrize(("start", "end"), [(-PAGE, 0), (PAGE, 0), (1, PAGE), (0, PAGE + 1)])
def test_space_is_whole_pages(start: int, end: int) -> None:
    with pytest.raises(ValueError, match="multiples of 4096"):
        SpaceMap(start, end)


@pytest.mark.parametrize("nbytes", [0, -1])
def test_room_for_nothing_is_neither_taken_nor_given(nbytes: int) -> None:
    space = SpaceMap(0, PAGE)
    for call in (
        space.take,
        space.take_most,
        lambda n: space.give(0, n),
        lambda n: space.reserve(0, n),
    ):
        with pytest.raises(ValueError, match="at least one byte"):
            call(nbytes)


def test_room_within_a_page_is_refused() -> None:
    space = SpaceMap(0, 4 * PAGE)
    space.take(4 * PAGE)
    with pytest.raises(ValueError, match="not pages"):
        space.give(100, PAGE)


def test_a_hundred_thousand_pieces_are_given_back_in_any_order_as_one() -> None:
    count = 100_000
    space = SpaceMap(0, count * PAGE)
    for _ in range(count):
        space.take(1)
    for index in range(0, count, 2):
        space.give(index * PAGE, 1)
    assert (space.largest, space.free_bytes) == (PAGE, count // 2 * PAGE)
    for index in range(count - 1, 0, -2):
        space.give(index * PAGE, 1)
    assert space.largest == count * PAGE


# --- Ctrl-C ---------------------------------------------------------------------------------------


def space_in_pieces() -> SpaceMap:
    """Return 12 pages, of which 0, 1, 4, 5, 6 and 11 are free."""
    space = SpaceMap(0, 12 * PAGE)
    space.take(12 * PAGE)
    for page, pages in ((0, 2), (4, 3), (11, 1)):
        space.give(page * PAGE, pages * PAGE)
    return space


def free_pieces(space: SpaceMap) -> list[tuple[int, int]]:
    """Take all there is; return first page and number of pages of each piece."""
    total, found = space.free_bytes, []
    while piece := space.take_most(12 * PAGE):
        found.append((piece[0] // PAGE, piece[1] // PAGE))
    assert (sum(pages for _, pages in found) * PAGE, space.free_bytes) == (total, 0)
    return sorted(found)


@pytest.mark.parametrize(
    "act",
    [
        pytest.param(lambda space: space.take(2 * PAGE), id="takes a whole piece"),
        pytest.param(
            lambda space: space.take(3 * PAGE - 4000), id="takes the whole of the largest"
        ),
        pytest.param(lambda space: space.take_most(12 * PAGE), id="takes most"),
        pytest.param(lambda space: space.take(1), id="takes the smallest"),
        pytest.param(lambda space: space.reserve(5 * PAGE, PAGE), id="takes out of the middle"),
        pytest.param(lambda space: space.give(9 * PAGE, PAGE), id="gives beside nothing"),
        pytest.param(lambda space: space.give(2 * PAGE, PAGE), id="gives after a piece"),
        pytest.param(lambda space: space.give(3 * PAGE, PAGE), id="gives before a piece"),
        pytest.param(lambda space: space.give(2 * PAGE, 2 * PAGE), id="gives between two"),
    ],
)
def test_what_is_interrupted_anywhere_has_not_happened_or_happens_wholly(
    act: Callable[[SpaceMap], object],
) -> None:
    done = space_in_pieces()
    act(done)
    either = (free_pieces(space_in_pieces()), free_pieces(done))
    space = space_in_pieces()

    def prepared() -> Callable[[], object]:
        nonlocal space
        space = space_in_pieces()
        return lambda: act(space)

    for nth in interruptions(prepared, extents):
        for again in count():  # so may be what mends it
            if not interrupted(lambda: space.largest, again, [extents]):
                break
            assert interrupted(prepared(), nth, [extents])
        assert free_pieces(space) in either


# --- extents --------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [(-1, 0, 1), (0, -PAGE, 1), (0, 1, 1), (0, PAGE, 0)])
def test_an_extent_that_cannot_be_is_refused(fields: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="an extent has"):
        Extent(*fields)


def test_an_extent_ends_with_its_last_page() -> None:
    assert Extent(0, PAGE, 1).end == 2 * PAGE
    assert Extent(0, PAGE, PAGE).end == 2 * PAGE


@given(st.data())
def test_a_slice_is_where_its_bytes_lie(data: st.DataObject) -> None:
    sizes = [
        PAGE * count for count in data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=5))
    ]
    sizes[-1] -= data.draw(st.integers(0, PAGE - 1))
    extents = [Extent(index, (1 + 10 * index) * PAGE, nbytes) for index, nbytes in enumerate(sizes)]
    start = PAGE * data.draw(st.integers(0, (sum(sizes) - 1) // PAGE))
    nbytes = data.draw(st.integers(0, sum(sizes) - start))

    found = slices(extents, start, nbytes)

    assert sum(extent.nbytes for extent in found) == nbytes
    at = start
    for extent in found:
        for byte in (0, extent.nbytes - 1):
            assert (extent.member, extent.offset + byte) == place_of(extents, at + byte)
        at += extent.nbytes


def place_of(extents: list[Extent], at: int) -> tuple[int, int]:
    """Return the member and the offset there of byte `at` of what the extents hold."""
    for extent in extents:
        if at < extent.nbytes:
            return extent.member, extent.offset + at
        at -= extent.nbytes
    raise AssertionError("no such byte")


@pytest.mark.parametrize(("start", "nbytes"), [(-PAGE, PAGE), (0, PAGE + 1), (PAGE, 1), (0, -1)])
def test_a_slice_beyond_the_extents_is_refused(start: int, nbytes: int) -> None:
    with pytest.raises(ValueError, match="not within the 4096 bytes"):
        slices([Extent(0, 0, PAGE)], start, nbytes)


def test_a_slice_that_begins_within_a_page_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 4096"):
        slices([Extent(0, 0, 2 * PAGE)], 100, PAGE)


def test_space_that_is_extended_joins_what_was_free_at_its_end() -> None:
    space = SpaceMap(PAGE, 3 * PAGE)
    assert space.take(PAGE) == PAGE
    space.extend(6 * PAGE)
    assert (space.end, space.free_bytes, space.largest) == (6 * PAGE, 4 * PAGE, 4 * PAGE)
    assert space.take(4 * PAGE) == 2 * PAGE


@pytest.mark.parametrize("end", [2 * PAGE, 3 * PAGE, 3 * PAGE + 1])
def test_space_is_extended_only_by_whole_pages(end: int) -> None:
    space = SpaceMap(PAGE, 3 * PAGE)
    with pytest.raises(ValueError, match="extended to a later page"):
        space.extend(end)
    assert space.end == 3 * PAGE
