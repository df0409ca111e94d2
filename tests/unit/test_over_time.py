"""Activations over time: how much blocks held, and when, from the parts that were recorded."""

from __future__ import annotations

from infinity_engine.reporting.over_time import HeldOverTime, HeldPart


def part(block: str, held: str, nbytes: int, start: int, end: int) -> HeldPart:
    return HeldPart(block=block, held=held, nbytes=nbytes, start_ns=start, end_ns=end)


TWO = HeldOverTime(
    [
        part("0", "kept", 10, 100, 900),
        part("1", "on drives", 30, 200, 700),
        part("1", "made again", 5, 500, 700),
        part("2", "kept", 20, 300, 500),
    ]
)


def test_points_are_where_held_bytes_change() -> None:
    assert TWO.points("kept") == [(100, 10), (300, 30), (500, 10), (900, 0)]
    assert TWO.points("made again") == [(100, 0), (500, 5), (700, 0), (900, 0)]


def test_the_most_in_each_part_of_the_time_is_found() -> None:
    # Parts of 200 from 100 on: what ends at an edge does not count behind it.
    assert TWO.most("kept", 4) == [10, 30, 10, 10]
    assert TWO.most("made again", 4) == [0, 0, 5, 0]
    assert TWO.most("on drives", 8) == [0, 30, 30, 30, 30, 30, 0, 0]


def test_ways_come_in_the_order_in_which_they_began() -> None:
    assert TWO.ways() == ("kept", "on drives", "made again")


def test_parts_without_any_time_are_no_error() -> None:
    assert HeldOverTime().ways() == ()
    assert HeldOverTime([part("0", "kept", 7, 5, 5)]).most("kept", 2) == [0, 0]
