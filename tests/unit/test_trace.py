"""The trace of a step: what it says comes next, and how it is followed, left, found again and
replaced.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity_engine.errors import TraceMismatch
from infinity_engine.schedule import ModuleTrace, TraceCursor, Use, trace

A, B, C, D = (Use(name, (number,)) for number, name in enumerate("abcd"))
PAIR = Use("pair", (0, 1))

uses = st.builds(
    Use,
    st.sampled_from(["x", "y", "z"]),
    st.lists(st.integers(0, 5), max_size=3, unique=True).map(tuple),
)
steps = st.lists(uses, max_size=20)


def followed(*order: Use) -> TraceCursor:
    """Return a follower at the beginning of the step after one of that order."""
    follower = TraceCursor()
    for use in order:
        follower.record_use(use)
    follower.end_step()
    return follower


# --- the trace ------------------------------------------------------------------------------------


def test_a_use_is_found_from_the_start_on_or_else_from_the_beginning() -> None:
    made = ModuleTrace([A, B, A])

    assert [made.find(A, start) for start in range(4)] == [0, 2, 2, 0]
    assert made.find(B, 2) == 1
    assert made.find(C, 0) is None


def test_uses_of_one_name_are_others_where_their_parameters_are() -> None:
    assert ModuleTrace([Use("a", (0,))]).find(Use("a", (1,)), 0) is None


def test_the_next_use_of_a_parameter_is_any_that_needs_it() -> None:
    made = ModuleTrace([A, PAIR, B])

    assert [made.next_use(0, start) for start in range(4)] == [0, 1, trace.NEVER, trace.NEVER]
    assert [made.next_use(1, start) for start in range(4)] == [1, 1, 2, trace.NEVER]
    assert made.next_use(7, 0) == trace.NEVER


@given(order=steps, parameter=st.integers(0, 6), start=st.integers(0, 21))
def test_next_use_is_what_looking_through_all_uses_finds(
    order: list[Use], parameter: int, start: int
) -> None:
    positions = [at for at, use in enumerate(order) if at >= start and parameter in use.parameters]

    assert ModuleTrace(order).next_use(parameter, start) == min(positions, default=trace.NEVER)


# --- following it ---------------------------------------------------------------------------------


def test_the_first_step_has_no_trace_and_no_mismatch() -> None:
    follower = TraceCursor()

    assert follower.record_use(A) is False
    assert list(follower.upcoming(0, 9)) == []
    assert follower.next_use(0) == trace.NEVER
    assert follower.mismatch is None


def test_what_one_step_asked_for_is_what_the_next_is_expected_to() -> None:
    follower = followed(A, B, C)

    assert list(follower.upcoming(0, 2)) == [(0, A), (1, B)]
    assert follower.record_use(A)
    assert follower.at == 1
    assert list(follower.upcoming(1, 99)) == [(1, B), (2, C)]


def test_equal_uses_that_are_other_objects_are_expected_too() -> None:
    assert followed(A).record_use(Use("a", (0,)))


def test_the_next_use_goes_on_with_the_step() -> None:
    follower = followed(A, B, A)
    seen = [follower.next_use(0)]
    for use in (A, B, A):
        follower.record_use(use)
        seen.append(follower.next_use(0))

    assert seen == [0, 2, 2, trace.NEVER]


def test_a_use_that_comes_later_is_where_the_step_goes_on() -> None:
    follower = followed(A, B, C, D)

    assert follower.record_use(C) is False
    assert follower.at == 3
    assert follower.next_use(1) == trace.NEVER
    assert follower.record_use(D)


def test_a_use_that_was_before_is_where_the_step_goes_on_where_it_does_not_come_again() -> None:
    follower = followed(A, B, C)
    for use in (A, B, C):
        follower.record_use(use)

    assert follower.record_use(B) is False
    assert follower.at == 2
    assert follower.next_use(2) == 2


def test_a_use_that_is_new_changes_no_place() -> None:
    follower = followed(A, B)
    follower.record_use(A)

    assert follower.record_use(D) is False
    assert follower.at == 1
    assert follower.record_use(B)


def test_the_first_mismatch_is_kept_and_returned_at_the_steps_end() -> None:
    follower = followed(A, B, C)
    for use in (A, C, D):
        follower.record_use(use)

    mismatch = follower.end_step()

    assert isinstance(mismatch, TraceMismatch)
    assert (mismatch.expected, mismatch.seen) == ("b", "c")
    assert follower.mismatch is None
    assert follower.end_step() is None


def test_more_than_the_trace_has_is_a_mismatch_with_its_end() -> None:
    follower = followed(A)
    for use in (A, B):
        follower.record_use(use)

    assert follower.mismatch is not None
    assert follower.mismatch.expected == "the end of the step"


def test_another_order_replaces_the_trace_when_the_step_ends() -> None:
    follower = followed(A, B, C)
    for use in (C, B, D):
        follower.record_use(use)

    follower.end_step()

    assert follower.trace.uses == (C, B, D)
    assert follower.at == 0
    assert follower.next_use(3) == 2


def test_a_step_that_ends_early_replaces_it_too() -> None:
    follower = followed(A, B, C)
    follower.record_use(A)

    assert follower.end_step() is None
    assert follower.trace.uses == (A,)


def test_the_same_order_keeps_the_trace() -> None:
    follower = followed(A, B)
    before = follower.trace
    for use in (A, B):
        follower.record_use(use)

    follower.end_step()

    assert follower.trace is before
    assert follower.at == 0


def test_what_never_ends_a_step_is_not_recorded_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "_MOST_USES", 10)
    follower = followed(A, B)
    for _ in range(1000):
        follower.record_use(A)

    assert len(follower._seen) <= 11
    follower.end_step()

    assert follower.trace.uses == (A, B)
    assert follower.record_use(A)


@given(orders=st.lists(steps, min_size=1, max_size=4))
def test_whatever_order_comes_the_follower_is_within_its_trace_and_says_what_the_trace_does(
    orders: list[list[Use]],
) -> None:
    follower = TraceCursor()
    for order in orders:
        for use in order:
            before = follower.at
            expected = follower.trace.uses[before : before + 1] == (use,)

            assert follower.record_use(use) is expected

            assert 0 <= follower.at <= len(follower.trace.uses)
            if use in follower.trace.uses:
                assert follower.trace.uses[follower.at - 1] == use
            else:
                assert follower.at == before
            for parameter in range(7):
                assert follower.next_use(parameter) == follower.trace.next_use(
                    parameter, follower.at
                )
        follower.end_step()

        assert follower.trace.uses == tuple(order)
