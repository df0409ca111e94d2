"""The ledger: limits, promises and what is held within them."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity_engine.errors import CapacityError, ConfigError
from infinity_engine.memory import Ledger, Reservation
from infinity_engine.plan import ResolvedBudget, Tier


def ledger(*, device_is: Tier = Tier.DEVICE) -> Ledger:
    budget = ResolvedBudget(device=100, host=200, nvme={"/mnt/a": 1000, "/mnt/b": 500})
    return Ledger(budget, device_is=device_is)


def test_what_is_reserved_is_no_longer_free() -> None:
    books = ledger()

    books.reserve(Tier.HOST, 150, holder="pool")

    assert books.free(Tier.HOST) == 50
    assert books.free(Tier.DEVICE) == 100


def test_one_byte_too_many_is_refused_with_the_largest_holders_and_what_would_make_it_fit() -> None:
    books = ledger()
    books.reserve(Tier.HOST, 120, holder="pinned pool")
    books.reserve(Tier.HOST, 30, holder="bounce buffers")

    with pytest.raises(CapacityError) as refused:
        books.reserve(Tier.HOST, 51, holder="gradients")

    error = refused.value
    assert (error.tier, error.asked, error.free, error.limit) == ("HOST", 51, 50, 200)
    assert error.holders == (("pinned pool", 120), ("bounce buffers", 30))
    assert "host to at least 201 B" in error.change
    assert "gradients" in error.change


def test_a_refusal_changes_nothing() -> None:
    books = ledger()
    before = books.usage()

    with pytest.raises(CapacityError):
        books.reserve(Tier.DEVICE, 101, holder="states")

    assert books.usage() == before


def test_each_drive_has_its_own_limit() -> None:
    books = ledger()
    books.reserve(Tier.NVME, 500, holder="swap", directory="/mnt/b")

    with pytest.raises(CapacityError, match="/mnt/b"):
        books.reserve(Tier.NVME, 1, holder="swap", directory="/mnt/b")

    assert books.free(Tier.NVME, directory="/mnt/a") == 1000


def test_a_directory_that_the_budget_does_not_name_is_refused_with_those_it_names() -> None:
    with pytest.raises(ConfigError, match="/mnt/a"):
        ledger().reserve(Tier.NVME, 1, holder="swap", directory="/mnt/c")


def test_memory_is_in_no_directory() -> None:
    with pytest.raises(ConfigError, match="None for HOST"):
        ledger().reserve(Tier.HOST, 1, holder="pool", directory="/mnt/a")


def test_where_device_is_host_memory_both_share_one_limit() -> None:
    books = ledger(device_is=Tier.HOST)
    books.reserve(Tier.DEVICE, 150, holder="parameters")

    with pytest.raises(CapacityError) as refused:
        books.reserve(Tier.HOST, 51, holder="pool")

    assert refused.value.holders == (("parameters", 150),)
    assert [usage.tier for usage in books.usage()] == [Tier.HOST, Tier.NVME, Tier.NVME]


def test_the_device_cannot_be_a_drive() -> None:
    with pytest.raises(ConfigError, match="DEVICE or"):
        ledger(device_is=Tier.NVME)


def test_a_closed_reservation_is_free_again_and_closing_twice_does_nothing() -> None:
    books = ledger()
    reservation = books.reserve(Tier.HOST, 200, holder="pool")

    reservation.close()
    reservation.close()

    assert books.free(Tier.HOST) == 200


def test_a_closed_reservation_keeps_promising_what_is_still_held() -> None:
    books = ledger()
    reservation = books.reserve(Tier.HOST, 200, holder="pool")
    reservation.hold(3)

    reservation.close()

    assert books.free(Tier.HOST) == 197
    assert books.usage()[1].holders == (("pool", 3),)
    reservation.release_soon(3)
    assert books.free(Tier.HOST) == 200
    assert books.usage()[1].holders == ()


def test_nothing_can_be_held_within_a_closed_reservation() -> None:
    reservation = ledger().reserve(Tier.HOST, 200, holder="pool")
    reservation.close()

    with pytest.raises(RuntimeError, match="closed"):
        reservation.hold(1)


def test_holding_more_than_was_promised_is_refused() -> None:
    reservation = ledger().reserve(Tier.HOST, 10, holder="pool")
    reservation.hold(8)

    with pytest.raises(CapacityError) as refused:
        reservation.hold(3)

    assert (refused.value.free, refused.value.limit) == (2, 10)
    assert reservation.held == 8


def test_giving_back_more_than_is_held_is_refused() -> None:
    reservation = ledger().reserve(Tier.HOST, 10, holder="pool")
    reservation.hold(2)

    with pytest.raises(ValueError, match="holds 2 B"):
        reservation.release(3)


@pytest.mark.parametrize("count", [Reservation.hold, Reservation.release])
def test_negative_bytes_are_refused(count: Callable[[Reservation, int], None]) -> None:
    reservation = ledger().reserve(Tier.HOST, 10, holder="pool")
    reservation.hold(6)

    with pytest.raises(ConfigError, match="by pool: expected 0 or more bytes, got -5"):
        count(reservation, -5)

    assert reservation.held == 6


def test_what_is_released_soon_is_gone_when_somebody_looks() -> None:
    books = ledger()
    reservation = books.reserve(Tier.HOST, 10, holder="pool")
    reservation.hold(10)

    reservation.release_soon(4)

    assert reservation.held == 6
    reservation.release_soon(6)
    assert next(usage for usage in books.usage() if usage.tier is Tier.HOST).held == 0
    reservation.close()


def test_bytes_can_be_released_soon_by_what_runs_in_the_middle_of_the_ledgers_work() -> None:
    books = ledger()
    reservation = books.reserve(Tier.HOST, 10, holder="pool")
    reservation.hold(10)

    class Interrupting(int):
        """Bytes that, as a garbage collection may, do something else while they are added."""

        def __radd__(self, other: int) -> int:
            reservation.release_soon(1)
            return other + int(self)

    books.reserve(Tier.HOST, Interrupting(1), holder="other")

    assert reservation.held < 10
    assert (
        next(usage for usage in books.usage() if usage.tier is Tier.HOST).held == reservation.held
    )


def test_peaks_are_those_of_each_tier_and_of_each_holder() -> None:
    books = ledger()
    first = books.reserve(Tier.HOST, 60, holder="first")
    second = books.reserve(Tier.HOST, 60, holder="second")
    first.hold(50)
    first.release(50)
    second.hold(40)
    first.close()

    host = next(usage for usage in books.usage() if usage.tier is Tier.HOST)
    assert (host.reserved, host.peak_reserved, host.held, host.peak_held) == (60, 120, 40, 50)
    assert first.peak == 50
    assert host.holders == (("second", 60),)


def test_a_promise_can_become_larger_within_the_limit_and_smaller_by_what_is_not_held() -> None:
    books = ledger()
    promised = books.reserve(Tier.HOST, 60, holder="first")
    promised.grow(books.free(Tier.HOST))
    with pytest.raises(CapacityError, match="raise the budget's host to at least"):
        promised.grow(1)
    promised.hold(50)
    with pytest.raises(
        ValueError, match="first holds 50 of its 200 B: the promise cannot shrink by 151 B"
    ):
        promised.shrink(151)

    promised.shrink(150)

    assert (promised.nbytes, books.free(Tier.HOST)) == (50, 150)
    promised.release(50)
    promised.close()
    promised.shrink(50)  # there is no promise any more
    assert books.free(Tier.HOST) == 200


@given(st.lists(st.tuples(st.integers(0, 120), st.booleans()), max_size=30))
def test_what_is_reserved_never_exceeds_the_limit(asked: list[tuple[int, bool]]) -> None:
    books = ledger()
    open_ones = []
    for nbytes, closes in asked:
        try:
            open_ones.append(books.reserve(Tier.HOST, nbytes, holder="some"))
        except CapacityError:
            assert nbytes > books.free(Tier.HOST)
        if closes and open_ones:
            open_ones.pop(0).close()
        host = next(usage for usage in books.usage() if usage.tier is Tier.HOST)
        assert host.reserved == sum(each.nbytes for each in open_ones) <= host.limit
        assert host.peak_reserved <= host.limit


def test_threads_that_reserve_at_once_do_not_pass_the_limit() -> None:
    books = ledger()
    taken = []

    def take() -> None:
        for _ in range(50):
            try:
                taken.append(books.reserve(Tier.NVME, 7, holder="thread", directory="/mnt/a"))
            except CapacityError:
                return

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(taken) == 1000 // 7


def test_nobody_reserves_between_another_ones_look_at_the_limit_and_its_promise() -> None:
    books = ledger()
    refused = []

    def take() -> None:
        try:
            books.reserve(Tier.HOST, 150, holder="second")
        except CapacityError:
            refused.append("second")

    class Slow(int):
        """Bytes that take their time to be added: long enough for somebody else, where nothing
        keeps that one out.
        """

        def __radd__(self, other: int) -> int:
            if not thread.ident:
                thread.start()
                thread.join(0.2)
            return other + int(self)

    thread = threading.Thread(target=take)
    books.reserve(Tier.HOST, Slow(150), holder="first")
    thread.join()

    assert refused == ["second"]
    assert books.free(Tier.HOST) == 50
