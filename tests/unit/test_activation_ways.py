"""The way of each block: within 5% of the best assignment that brute force finds, and never above
the room.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from infinity_engine.errors import CapacityError, ConfigError
from infinity_engine.placement.activations import (
    ActivationRates,
    ActivationRoom,
    BlockCost,
    BlockWay,
    StepPrediction,
    choose_ways,
    gains_of_more,
    predict_step,
    safest_ways,
)
from infinity_engine.plan import Tier

MIB = 1 << 20
KEEP, AGAIN, HOST, DRIVE = (
    BlockWay.KEEP,
    BlockWay.RECOMPUTE,
    BlockWay.HOST,
    BlockWay.DRIVE,
)
NO_MOVES = ActivationRates()
FAST = ActivationRates(to_host=1e10, from_host=1e10, to_drives=1e9, from_drives=1e9)


def block(
    saved: int = 100 * MIB,
    inputs: int = 10 * MIB,
    seconds: float = 0.1,
    *,
    recomputes: bool = True,
) -> BlockCost:
    return BlockCost(
        saved=saved,
        inputs=inputs,
        forward_s=seconds,
        backward_s=2 * seconds,
        recompute_s=seconds if recomputes else None,
    )


def test_everything_is_kept_where_it_fits() -> None:
    choice = choose_ways([block()] * 4, ActivationRoom(device=400 * MIB), NO_MOVES)
    assert choice.ways == (KEEP,) * 4
    assert choice.predicted.seconds == pytest.approx(4 * 0.3)


def test_blocks_that_are_kept_come_last() -> None:
    # Kept ones are gone before the first ones run again, so their room is used twice.
    choice = choose_ways([block()] * 4, ActivationRoom(device=230 * MIB), NO_MOVES)
    assert choice.ways == (AGAIN, AGAIN, KEEP, KEEP)
    assert choice.predicted.device == 220 * MIB


def test_a_fast_link_is_used_before_blocks_are_recomputed() -> None:
    room = ActivationRoom(device=150 * MIB, host=1 << 30, staging=20 * MIB)
    choice = choose_ways([block()] * 4, room, FAST)
    assert choice.predicted.recompute_s == 0
    assert HOST in choice.ways
    assert choice.predicted.seconds == pytest.approx(4 * 0.3)


def test_a_slow_drive_is_left_alone() -> None:
    slow = ActivationRates(to_drives=1e6, from_drives=1e6)
    room = ActivationRoom(device=150 * MIB, drives=1 << 40)
    assert set(choose_ways([block()] * 4, room, slow).ways) == {AGAIN, KEEP}


def test_inputs_go_to_drives_where_not_even_they_fit() -> None:
    room = ActivationRoom(device=120 * MIB, drives=1 << 40)
    slow = ActivationRates(to_drives=50e6, from_drives=50e6)
    choice = choose_ways([block()] * 30, room, slow)
    assert BlockWay.RECOMPUTE_DRIVE in choice.ways
    assert choice.predicted.fits(room)


def test_a_block_that_cannot_run_twice_is_kept_or_moved() -> None:
    costs = [block(recomputes=False), block(), block()]
    choice = choose_ways(costs, ActivationRoom(device=250 * MIB), NO_MOVES)
    assert choice.ways[0] is KEEP
    assert AGAIN in choice.ways


def test_what_cannot_fit_is_refused_with_what_it_would_take() -> None:
    with pytest.raises(CapacityError, match="110 MiB where modules compute") as refused:
        choose_ways([block()], ActivationRoom(device=50 * MIB), NO_MOVES)
    assert refused.value.asked > refused.value.free


def test_drives_wear_only_where_that_saves_time() -> None:
    # Keeping and offloading are equally fast here.
    room = ActivationRoom(device=1 << 40, drives=1 << 40)
    assert choose_ways([block()] * 4, room, FAST).predicted.drives == 0


def test_what_goes_to_drives_takes_time_on_the_link_as_well() -> None:
    rates = ActivationRates(
        to_host=1e8, from_host=1e8, to_drives=1e9, from_drives=1e9, over_link=True
    )
    predicted = predict_step([block(seconds=0.0)], [DRIVE], rates)
    assert predicted.forward_s == pytest.approx(100 * MIB / 1e8)


def test_the_safest_ways_keep_least() -> None:
    costs = [block(), block(recomputes=False)]
    assert safest_ways(costs, ActivationRoom(device=0), NO_MOVES) == (AGAIN, KEEP)
    assert safest_ways(costs, ActivationRoom(device=0, drives=1), FAST)[1] is DRIVE


def test_more_room_is_worth_what_it_saves() -> None:
    costs = [block()] * 4
    tight, roomy = ActivationRoom(device=150 * MIB), ActivationRoom(device=1 << 40)
    gains = gains_of_more(choose_ways(costs, tight, NO_MOVES), costs, tight, NO_MOVES, more=1 << 30)
    assert list(gains) == [Tier.DEVICE]
    assert gains[Tier.DEVICE] == pytest.approx(0.3)
    assert gains_of_more(choose_ways(costs, roomy, FAST), costs, roomy, FAST)[Tier.HOST] == 0.0


def test_choices_say_how_many_blocks_go_which_way() -> None:
    choice = choose_ways([block()] * 4, ActivationRoom(device=230 * MIB), NO_MOVES)
    assert str(choice) == "2 kept, 2 recomputed"


def test_no_blocks_need_no_ways() -> None:
    assert choose_ways([], ActivationRoom(device=0), NO_MOVES).ways == ()


def test_negative_bytes_are_refused() -> None:
    with pytest.raises(ConfigError, match="saved"):
        block(saved=-1)


# --- against all assignments ----------------------------------------------------------------------

numbers = st.integers(0, 200)
rate = st.one_of(st.none(), st.sampled_from([1e6, 1e8, 4e8, 1e9, 1e10]))


@st.composite
def blocks(draw: st.DrawFn) -> BlockCost:
    saved = draw(numbers) * MIB
    return BlockCost(
        saved=saved,
        inputs=min(draw(numbers) * MIB, saved),
        forward_s=draw(numbers) / 1000,
        backward_s=draw(numbers) / 500,
        recompute_s=draw(st.one_of(st.none(), numbers.map(lambda ms: ms / 1000))),
    )


@st.composite
def rates(draw: st.DrawFn) -> ActivationRates:
    host, drives = draw(rate), draw(rate)
    return ActivationRates(
        to_host=host,
        from_host=host,
        to_drives=drives,
        from_drives=drives and drives * 2,
        over_link=draw(st.booleans()) and host is not None,
    )


rooms = st.builds(
    ActivationRoom,
    device=st.integers(0, 800).map(lambda mib: mib * MIB),
    host=st.integers(0, 400).map(lambda mib: mib * MIB),
    drives=st.integers(0, 400).map(lambda mib: mib * MIB),
    staging=st.integers(0, 100).map(lambda mib: mib * MIB),
)


def assignments(
    costs: Sequence[BlockCost], room: ActivationRoom, given_rates: ActivationRates
) -> Iterator[StepPrediction]:
    """Yield every assignment that fits."""
    ways = [
        way
        for way in BlockWay
        if not (way.home is Tier.HOST and given_rates.to_host is None)
        and not (way.home is Tier.NVME and given_rates.to_drives is None)
    ]
    for chosen in product(ways, repeat=len(costs)):
        if any(
            way.recomputes and cost.recompute_s is None
            for way, cost in zip(chosen, costs, strict=True)
        ):
            continue
        predicted = predict_step(costs, chosen, given_rates, staging=room.staging)
        if predicted.fits(room):
            yield predicted


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(blocks(), min_size=1, max_size=4), rooms, rates())
def test_the_choice_is_about_the_best_of_all_assignments(
    costs: list[BlockCost], room: ActivationRoom, given_rates: ActivationRates
) -> None:
    every = [predicted.seconds for predicted in assignments(costs, room, given_rates)]
    if not every:
        with pytest.raises(CapacityError):
            choose_ways(costs, room, given_rates)
        return
    choice = choose_ways(costs, room, given_rates)
    assert choice.predicted.fits(room)
    assert choice.predicted == predict_step(costs, choice.ways, given_rates, staging=room.staging)
    assert choice.predicted.seconds <= 1.05 * min(every) + 1e-12


@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(blocks(), min_size=6, max_size=6), rooms, rates())
def test_merged_states_cost_little(
    costs: list[BlockCost], room: ActivationRoom, given_rates: ActivationRates
) -> None:
    every = [predicted.seconds for predicted in assignments(costs, room, given_rates)]
    if every:
        choice = choose_ways(costs, room, given_rates)
        assert choice.predicted.fits(room)
        assert choice.predicted.seconds <= 1.05 * min(every) + 1e-12


@settings(deadline=None, max_examples=25)
@given(blocks(), st.integers(7, 90), st.floats(0, 1), rates())
def test_many_equal_blocks_are_as_good_as_the_best_counts(
    cost: BlockCost, count: int, part: float, given_rates: ActivationRates
) -> None:
    room = ActivationRoom(
        device=int(part * count * cost.saved) + cost.saved + cost.inputs,
        host=count * cost.saved // 3,
        drives=count * cost.saved // 3,
    )
    costs = [cost] * count
    try:
        choice = choose_ways(costs, room, given_rates)
    except CapacityError:
        return
    assert choice.predicted.fits(room)
    ways = [AGAIN, HOST, DRIVE, KEEP]
    if cost.recompute_s is None:
        ways.remove(AGAIN)
    if given_rates.to_host is None:
        ways.remove(HOST)
    if given_rates.to_drives is None:
        ways.remove(DRIVE)
    steps = [0, count // 4, count // 2, 3 * count // 4, count]
    for counts in product(steps, repeat=len(ways)):
        if sum(counts) == count:
            row = [way for way, many in zip(ways, counts, strict=True) for _ in range(many)]
            predicted = predict_step(costs, row, given_rates)
            if predicted.fits(room):
                assert choice.predicted.seconds <= 1.05 * predicted.seconds + 1e-12


@pytest.mark.parametrize("way", BlockWay)
def test_several_calls_of_a_block_are_as_so_many_blocks(way: BlockWay) -> None:
    once = BlockCost(saved=10 * MIB, inputs=MIB, forward_s=1.0, backward_s=2.0, recompute_s=1.0)
    rates = ActivationRates(to_host=1e6, from_host=1e6, to_drives=1e5, from_drives=1e5)
    together = predict_step([replace(once, calls=3)], [way], rates)
    assert together == predict_step([once] * 3, [way] * 3, rates)
