"""What is fetched ahead and what makes room: in the order of need, within the room, nothing that is
needed sooner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from hypothesis import example, given
from hypothesis import strategies as st

from infinity_engine.schedule import Fetches, ModuleTrace, Use, choose_fetches
from infinity_engine.schedule.trace import NEVER


def using(*parameters: int) -> Use:
    return Use(f"needs {parameters}", parameters)


@dataclass
class Situation:
    """A moment of a step: what its trace is, what is on the device then, and how much more has
    room.
    """

    trace: Sequence[Use]
    cached: Mapping[int, None]
    held: frozenset[int]
    free: int
    nbytes: Mapping[int, int]
    at: int = 0

    @property
    def next_use(self) -> Callable[[int], int]:
        made = ModuleTrace(self.trace)
        return lambda number: made.next_use(number, self.at)

    def chosen(self, count: int = 99, *, unmade: Sequence[int] = ()) -> Fetches:
        upcoming = list(enumerate(self.trace))[self.at : self.at + count]
        return choose_fetches(
            upcoming,
            nbytes=self.nbytes,
            cached=self.cached,
            idle=sorted(set(self.cached) - self.held, key=self.next_use, reverse=True),
            free=self.free,
            next_use=self.next_use,
            is_unmade=lambda number: number in unmade,
        )


def situation(
    *trace: Use, cached: Sequence[int] = (), held: Sequence[int] = (), free: int = 0
) -> Situation:
    """Parameters of 10 B each."""
    numbers = {number for use in trace for number in use.parameters} | set(cached)
    return Situation(
        trace, dict.fromkeys(cached), frozenset(held), free, dict.fromkeys(numbers, 10)
    )


def test_what_comes_next_is_fetched_as_far_as_there_is_room() -> None:
    found = situation(using(0), using(1), using(2), free=25).chosen()

    assert found == Fetches(evicted=(), fetched=(0, 1), provided=2)


def test_what_is_there_is_not_fetched_again_and_takes_no_room() -> None:
    found = situation(using(0), using(1), using(0), using(2), cached=[0], free=20).chosen()

    assert found == Fetches(evicted=(), fetched=(1, 2), provided=4)


def test_what_is_not_made_yet_is_fetched_in_its_turn_and_provides_nobody() -> None:
    uses = [using(0), using(1), using(2), using(1), using(3)]

    found = situation(*uses, free=35).chosen(unmade=[1])

    assert found == Fetches(evicted=(), fetched=(0, 1, 2), provided=1)


def test_what_is_needed_last_makes_room_first() -> None:
    found = situation(using(9), using(0), using(1), using(2), cached=[0, 1, 2]).chosen()

    assert found == Fetches(evicted=(2,), fetched=(9,), provided=3)  # and 2 was given up


def test_what_is_not_needed_any_more_goes_before_what_is() -> None:
    found = situation(using(9), using(1), cached=[1, 5]).chosen()

    assert found == Fetches(evicted=(5,), fetched=(9,), provided=2)


def test_what_is_held_stays() -> None:
    found = situation(using(9), using(1), cached=[1, 5], held=[5]).chosen()

    assert found == Fetches(evicted=(1,), fetched=(9,), provided=1)


def test_nothing_goes_for_what_is_needed_later_than_it() -> None:
    found = situation(using(0), using(1), using(9), cached=[0, 1]).chosen()

    assert found == Fetches(evicted=(), fetched=(), provided=2)


def test_what_there_is_no_room_for_is_not_overtaken_by_smaller_ones() -> None:
    made = situation(using(0), using(1), free=15)
    made.nbytes = {0: 20, 1: 10}

    assert made.chosen() == Fetches(evicted=(), fetched=(), provided=0)


def test_nothing_is_given_up_where_all_of_it_would_not_be_enough() -> None:
    made = situation(using(9), cached=[1, 2])
    made.nbytes = {1: 10, 2: 10, 9: 21}

    assert made.chosen() == Fetches(evicted=(), fetched=(), provided=0)


def test_a_use_of_which_only_a_part_has_room_is_begun_and_not_provided_for() -> None:
    found = situation(using(0, 1), free=15).chosen()

    assert found == Fetches(evicted=(), fetched=(0,), provided=0)


# --- whatever there is ----------------------------------------------------------------------------


@st.composite
def situations(draw: st.DrawFn) -> Situation:
    numbers = range(draw(st.integers(1, 8)))
    some = st.lists(st.sampled_from(numbers), max_size=3, unique=True)
    trace = [using(*parameters) for parameters in draw(st.lists(some, max_size=15))]
    cached = draw(st.lists(st.sampled_from(numbers), unique=True))
    held = draw(st.sets(st.sampled_from(cached))) if cached else set()
    nbytes = {number: draw(st.integers(1, 30)) for number in numbers}
    at = draw(st.integers(0, len(trace)))
    return Situation(
        trace, dict.fromkeys(cached), frozenset(held), draw(st.integers(-20, 60)), nbytes, at
    )


looks_ahead = st.integers(0, 15)


def uses_of(made: Situation, count: int) -> Iterator[tuple[int, int]]:
    """Yield what is coming, with its position."""
    for position, use in list(enumerate(made.trace))[made.at : made.at + count]:
        for number in use.parameters:
            yield position, number


@given(made=situations(), count=looks_ahead)
def test_what_comes_never_takes_more_than_what_is_free_and_what_goes(
    made: Situation, count: int
) -> None:
    found = made.chosen(count)

    room = made.free + sum(made.nbytes[number] for number in found.evicted)
    assert sum(made.nbytes[number] for number in found.fetched) <= max(room, 0)


@given(made=situations(), count=looks_ahead)
def test_only_what_is_there_and_not_held_goes_and_only_what_is_not_there_comes(
    made: Situation, count: int
) -> None:
    found = made.chosen(count)

    assert set(found.evicted) <= set(made.cached) - made.held
    assert not set(found.fetched) & set(made.cached)
    assert len(set(found.fetched)) == len(found.fetched)
    assert len(set(found.evicted)) == len(found.evicted)


@given(made=situations(), count=looks_ahead)
def test_nothing_goes_that_is_needed_sooner_than_what_comes_for_it(
    made: Situation, count: int
) -> None:
    found = made.chosen(count)

    latest = max((made.next_use(number) for number in found.fetched), default=-1)
    assert all(made.next_use(number) > made.next_use(found.fetched[0]) for number in found.evicted)
    needed = (
        {number for _, number in uses_of(made, latest - made.at)} if latest >= made.at else set()
    )
    assert not set(found.evicted) & needed


@example(  # 3 makes room for 1, which leaves room for 3
    made=Situation(
        [using(0, 1), using(0, 3, 2)],
        dict.fromkeys([3, 0, 2]),
        frozenset(),
        0,
        {0: 1, 1: 2, 2: 2, 3: 1},
    ),
    count=2,
)
@given(made=situations(), count=looks_ahead)
def test_what_comes_comes_in_the_order_of_need(made: Situation, count: int) -> None:
    found = made.chosen(count)

    there = set(made.cached) - set(found.evicted)
    missing = list(
        dict.fromkeys(number for _, number in uses_of(made, count) if number not in there)
    )
    assert list(found.fetched) == missing[: len(found.fetched)]


@given(made=situations(), count=looks_ahead)
def test_the_farthest_that_may_go_do(made: Situation, count: int) -> None:
    found = made.chosen(count)

    stayed = [
        number for number in made.cached if number not in made.held and number not in found.evicted
    ]
    nearest = min((made.next_use(number) for number in found.evicted), default=NEVER)
    assert all(made.next_use(number) <= nearest for number in stayed) or not found.evicted


@given(made=situations(), count=looks_ahead)
def test_provided_counts_the_uses_that_have_all_they_need(made: Situation, count: int) -> None:
    found = made.chosen(count)

    there = (set(made.cached) - set(found.evicted)) | set(found.fetched)
    coming = made.trace[made.at : made.at + count]
    assert all(set(use.parameters) <= there for use in coming[: found.provided])
    if found.provided < len(coming):
        assert not set(coming[found.provided].parameters) <= there
    else:
        assert found.provided == len(coming)


@given(made=situations(), count=looks_ahead)
def test_who_goes_on_from_what_is_provided_for_has_nothing_more_to_do(
    made: Situation, count: int
) -> None:
    found = made.chosen(count)
    freed = sum(made.nbytes[number] for number in found.evicted)
    taken = sum(made.nbytes[number] for number in found.fetched)
    after = Situation(
        trace=made.trace,
        cached={
            **{number: None for number in made.cached if number not in found.evicted},
            **dict.fromkeys(found.fetched),
        },
        held=made.held,
        free=made.free + freed - taken,
        nbytes=made.nbytes,
        at=made.at,
    )

    again = after.chosen(count)

    assert again == Fetches(evicted=(), fetched=(), provided=found.provided)
