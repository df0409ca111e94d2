"""Drives of a swap file share it by their rates, as far as each has room."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from infinity_engine.storage.shares import shares_by_rate

DRIVES = st.dictionaries(
    st.text("abcdef", min_size=1, max_size=2),
    st.tuples(st.integers(0, 1 << 40), st.floats(1e-3, 1e12)),
    min_size=1,
    max_size=8,
)


@given(st.integers(0, 1 << 42), DRIVES)
def test_shares_are_all_pages_by_rate_up_to_the_limits(
    pages: int, drives: dict[str, tuple[int, float]]
) -> None:
    limits = {name: limit for name, (limit, _) in drives.items()}
    rates = {name: rate for name, (_, rate) in drives.items()}

    shares = shares_by_rate(pages, limits, rates)

    assert list(shares) == list(limits)
    assert sum(shares.values()) == min(pages, sum(limits.values()))
    assert all(0 <= shares[name] <= limits[name] for name in limits)
    # Where a drive has room left, no other one takes longer: but for a page of each.
    open_ = [name for name in limits if shares[name] < limits[name]]
    for name in open_:
        for other in limits:
            took = (shares[other] - len(limits)) / rates[other]
            assert took * (1 - 1e-9) <= (shares[name] + len(limits)) / rates[name]


def test_drives_with_room_share_in_proportion_to_their_rates() -> None:
    limits = {"a": 1000, "b": 1000, "c": 1000}

    assert shares_by_rate(600, limits, {"a": 1, "b": 2, "c": 3}) == {"a": 100, "b": 200, "c": 300}
    assert shares_by_rate(0, limits, {"a": 1, "b": 2, "c": 3}) == dict.fromkeys("abc", 0)


def test_what_a_drive_has_no_room_for_the_others_share() -> None:
    limits = {"a": 1000, "b": 50, "c": 1000}

    assert shares_by_rate(650, limits, {"a": 1, "b": 3, "c": 2}) == {"a": 200, "b": 50, "c": 400}
