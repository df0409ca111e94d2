"""Long work tells how far it is: once a second at most, and when a part of it has ended."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from infinity_engine.errors import ConfigError
from infinity_engine.progress import Progress, ProgressReporter
from infinity_engine.units import GiB, MiB


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def test_work_is_told_of_once_a_second_at_most_and_at_the_end_of_each_part() -> None:
    clock, told = Clock(), []
    reporter = ProgressReporter(
        lambda progress: told.append((clock.now, progress.what, progress.done_bytes)), clock
    )

    for what in ("first", "second"):
        with reporter.part(what, 100) as more:
            for _ in range(10):
                clock.now += 0.25
                more(10)

    assert told == [
        (1.0, "first", 40),
        (2.0, "first", 80),
        (2.5, "first", 100),
        (3.5, "second", 40),
        (4.5, "second", 80),
        (5.0, "second", 100),
    ]


def test_a_part_that_fails_tells_nothing_more() -> None:
    told: list[Progress] = []

    def work() -> None:
        with ProgressReporter(told.append, Clock()).part("first", 1) as more:
            more(1)
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        work()

    assert told == []


def test_what_is_told_of_raises_through_the_work() -> None:
    def stop(_: Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), ProgressReporter(stop, Clock()).part("first", None):
        pass


def test_without_anybody_to_tell_nothing_happens() -> None:
    with ProgressReporter(None, Clock()).part("first", None) as more:
        more(1)


def test_only_a_function_can_be_told() -> None:
    with pytest.raises(
        ConfigError, match=r"^progress: expected a function that takes one argument, such as print"
    ):
        ProgressReporter(True)


def test_as_text_progress_is_one_line() -> None:
    assert (
        str(Progress(what="loading values", done_bytes=GiB, total_bytes=4 * GiB))
        == "loading values: 1 GiB of 4 GiB"
    )
    assert str(Progress(what="building", done_bytes=3 * MiB, total_bytes=None)) == "building: 3 MiB"
