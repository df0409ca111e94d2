"""What drives are worn: shares of what they are rated for, days that are left, and one warning at
each share.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import pytest

from infinity_engine.reporting.wear import Wear
from infinity_engine.units import TB

DAY = 86400.0


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_days_that_are_left_are_those_of_the_rate_since_the_beginning() -> None:
    clock = Clock()
    wear = Wear({"/a": 600 * TB}, {"/a": 40 * TB}, clock)
    clock.now = 2 * DAY

    stands = wear.endurance("/a", 60 * TB)

    assert stands is not None
    assert stands.share == 0.1
    assert stands.days_left == pytest.approx(54)
    assert (
        str(stands)
        == "10.00% of the 600 TB that its drive is rated for; at this rate the rest lasts 54 days"
    )


def test_without_a_rate_no_days_are_said() -> None:
    stands = Wear({"/a": TB}, {"/a": 100}, Clock()).endurance("/a", 100)

    assert stands is not None
    assert stands.days_left is None
    assert str(stands) == "0.00% of the 1 TB that its drive is rated for"


def test_a_drive_that_is_past_its_rating_has_no_days_left() -> None:
    clock = Clock()
    wear = Wear({"/a": TB}, {}, clock)
    clock.now = DAY

    stands = wear.endurance("/a", 2 * TB)

    assert stands is not None
    assert (stands.share, stands.days_left) == (2.0, 0)


def test_a_drive_whose_rating_is_not_stated_is_not_compared() -> None:
    assert Wear({"/a": TB}, {}, Clock()).endurance("/b", TB) is None


def test_each_share_is_warned_of_once_and_of_each_drive() -> None:
    wear = Wear({"/a": 1000, "/b": 1000}, {}, Clock())
    told = []
    for written in (0, 9, 10, 11, 99, 100, 499, 700, 1000, 5000):
        with warnings.catch_warnings(record=True) as given:
            warnings.simplefilter("always")
            wear.warn({"/a": written, "/b": written // 10, "/c": written})
        told += [(written, str(each.message).split(", ")[0]) for each in given]

    assert told == [
        (10, "This engine has written 10 B to /a"),
        (100, "This engine has written 100 B to /a"),
        (100, "This engine has written 10 B to /b"),
        (700, "This engine has written 700 B to /a"),
        (1000, "This engine has written 1 KB to /a"),
        (1000, "This engine has written 100 B to /b"),
        (5000, "This engine has written 500 B to /b"),
    ]
