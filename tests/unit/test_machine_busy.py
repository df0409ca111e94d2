"""What others use of the processors: processor time beside wall time."""

from __future__ import annotations

import pytest

from infinity_engine.machine.busy import OthersWork, machine_busy_s


def others(before: float | None, after: float | None, *, own: float, passed: float) -> float | None:
    busy, spent, clock = iter((before, after)), iter((0.0, own)), iter((0.0, passed))
    work = OthersWork(
        busy_s=lambda: next(busy), own_s=lambda: next(spent), clock_s=lambda: next(clock), cores=4
    )
    return work.share()


def test_the_time_of_this_process_is_not_that_of_others() -> None:
    assert others(100.0, 130.0, own=30.0, passed=10.0) == 0.0


def test_others_share_is_of_all_cores() -> None:
    assert others(100.0, 130.0, own=20.0, passed=10.0) == pytest.approx(0.25)


@pytest.mark.parametrize(("before", "after"), [(None, 3.0), (3.0, None)])
def test_where_the_kernel_says_nothing_nothing_is_known_of_others(
    before: float | None, after: float | None
) -> None:
    assert others(before, after, own=1.0, passed=1.0) == 0.0


def test_counters_that_are_rounded_make_no_negative_share() -> None:
    assert others(100.0, 100.5, own=0.51, passed=1.0) == 0.0


def test_the_kernel_counts_on() -> None:
    first, second = machine_busy_s(), machine_busy_s()

    assert first is None or (second is not None and second >= first > 0)
