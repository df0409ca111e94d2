"""What leaves a resident set, in which order: whatever comes, is used, held and predicted before."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from infinity_engine.schedule import NEVER, Fetches, ResidentSet, Use
from infinity_engine.schedule.passes import kept_between_passes

NUMBERS = range(8)

numbers = st.sampled_from(NUMBERS)
uses = st.lists(numbers, max_size=3, unique=True).map(lambda them: Use(f"{them}", tuple(them)))


class ResidentSetMachine(RuleBasedStateMachine):
    """Whatever happens to a set, it decides what one does that looks at all members each time."""

    @initialize(
        sizes=st.lists(st.integers(0, 9), min_size=len(NUMBERS), max_size=len(NUMBERS)),
        limit=st.integers(0, 40),
        pinned=st.sets(numbers, max_size=2),
    )
    def begin(self, sizes: list[int], limit: int, pinned: set[int]) -> None:
        self.nbytes = dict(enumerate(sizes))
        self.beside = 0
        self.set = ResidentSet[str](self.nbytes, limit, pinned=pinned, beside=lambda: self.beside)
        self.pinned = pinned
        self.members: list[int] = []  # in the order in which they came, or were used last
        self.reserved: list[int] = []
        self.held: list[int] = []
        self.staying: set[int] = set()
        self.seen: list[Use] = []

    # --- what happens to it -----------------------------------------------------------------------

    @rule(use=uses)
    def record(self, use: Use) -> None:
        self.set.record_use(use)
        self.seen.append(use)
        for number in use.parameters:
            if number in self.members:
                self.members.remove(number)
                self.members.append(number)

    @rule(use=uses)
    def use_as_predicted(self, use: Use) -> None:
        trace = self.set._trace
        predicted = [next_use for _, next_use in trace.upcoming(trace.at, trace.at + 1)]
        self.record(*predicted or [use])

    @rule()
    def end_step(self) -> None:
        self.set.end_step()
        self.staying, self.seen = set(), []

    @rule(predicted=st.lists(uses, max_size=12))
    def expect(self, predicted: list[Use]) -> None:
        self.set.expect(predicted)

    @rule(run=st.lists(uses, min_size=1, max_size=6))
    def run_without_graph(self, run: list[Use]) -> None:
        before = self.set._trace.trace
        self.set.begin_pass()
        for use in run:
            self.record(use)
        self.set.end_pass()
        if self.set._trace.trace is not before:
            self.staying = kept_between_passes(run, self.nbytes, self.set.limit)

    @rule(number=numbers)
    def come(self, number: int) -> None:
        if number not in self.members and number not in self.reserved:
            self.set.admit(number, "")
            self.members.append(number)

    @rule(number=numbers)
    def reserve(self, number: int) -> None:
        if number not in self.members and number not in self.reserved:
            self.set.reserve(number)
            self.reserved.append(number)

    @rule(completes=st.booleans())
    @precondition(lambda self: self.reserved)
    def end_reservation(self, completes: bool) -> None:
        number = self.reserved.pop(0)
        if completes:
            self.set.complete(number, "")
            self.members.append(number)
        else:
            self.set.cancel(number)

    @rule(number=numbers)
    def leave(self, number: int) -> None:
        if number in self.members:
            self.set.remove(number)
            self.members.remove(number)

    @rule(number=numbers)
    def hold(self, number: int) -> None:
        self.set.hold((number,))
        self.held.append(number)

    @rule()
    @precondition(lambda self: self.held)
    def let_go(self) -> None:
        self.set.let_go((self.held.pop(),))

    @rule(nbytes=st.integers(0, 20))
    def take_beside(self, nbytes: int) -> None:
        self.beside = nbytes

    # --- what it decides --------------------------------------------------------------------------

    def idle(self) -> list[int]:
        """Return what may be evicted, from all members."""
        movable = [n for n in self.members if n not in self.held and n not in self.pinned]
        farthest_first = sorted(movable, key=self.set.next_use, reverse=True)
        return sorted(farthest_first, key=lambda number: number in self.staying)

    @invariant()
    def idle_members_come_the_farthest_next_use_first(self) -> None:
        assert list(self.set.idle()) == self.idle()

    @rule(look_ahead=st.integers(0, 8), unmade=st.sets(numbers, max_size=2))
    def choose(self, look_ahead: int, unmade: set[int]) -> None:
        upcoming = self.set.upcoming(look_ahead)
        expected = self.chosen(upcoming, unmade)

        assert self.set.choose(upcoming, is_unmade=unmade.__contains__) == expected

    @rule(nbytes=st.integers(0, 50))
    def evict(self, nbytes: int) -> None:
        order = [*self.idle(), *reversed(self.reserved)]
        gone: list[int] = []
        for number in self.set.evictions(nbytes):
            assert nbytes > self.set.free
            gone.append(number)
            if number in self.members:
                self.leave(number)
            else:
                self.set.cancel(number)
                self.reserved.remove(number)

        assert gone == order[: len(gone)]
        assert nbytes <= self.set.free or len(gone) == len(order)

    @rule(number=numbers)
    def make_room_before(self, number: int) -> None:
        at = self.set.next_use(number)
        for idle in self.set.room_before(number):
            assert self.nbytes[number] > self.set.free
            assert idle == self.idle()[0]
            assert self.set.next_use(idle) > at
            self.leave(idle)

    @invariant()
    def a_member_may_reserve_room_that_none_before_it_lacks(self) -> None:
        trace, present = self.set._trace, {*self.members, *self.reserved}
        for number in NUMBERS:
            before = trace.upcoming(trace.at, self.set.next_use(number))
            missing = [n for _, use in before for n in use.parameters if n not in present]
            lacking = sum(self.nbytes[n] for n in missing)
            free = not lacking or lacking + self.nbytes[number] <= self.set.free
            first = number in self.held or (free and present.issuperset(self.held))
            assert self.set.may_reserve(number) == first

    def chosen(self, upcoming: Sequence[tuple[int, Use]], unmade: set[int]) -> Fetches:
        """Return what is fetched and evicted, from all members."""
        left = [number for number in self.idle() if number not in self.staying]
        present = {*self.members, *self.reserved}
        free = self.set.free
        evicted: list[int] = []
        fetched: list[int] = []
        provided = 0
        for position, use in upcoming:
            for number in use.parameters:
                if number in present:
                    continue
                leaving: list[int] = []
                while free + sum(self.nbytes[n] for n in leaving) < self.nbytes[number]:
                    if not left or self.set.next_use(left[0]) <= position:
                        return Fetches(tuple(evicted), tuple(fetched), provided)
                    leaving.append(left.pop(0))
                free += sum(self.nbytes[n] for n in leaving) - self.nbytes[number]
                evicted += leaving
                fetched.append(number)
                present = {*present, number} - set(leaving)
            provided += not unmade & set(fetched)
        return Fetches(tuple(evicted), tuple(fetched), provided)


ResidentSetMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40)
TestWhatLeavesIsWhatAllMembersSay = ResidentSetMachine.TestCase


def test_members_that_are_never_needed_again_leave_in_the_order_of_their_last_uses() -> None:
    members = ResidentSet[str](dict.fromkeys(range(3), 1), 3)
    for number in (2, 0, 1):
        members.admit(number, "")
    assert list(members.idle()) == [2, 0, 1]

    members.record_use(Use("layer 2", (2,)))

    assert list(members.idle()) == [0, 1, 2]
    assert members.next_use(2) == NEVER
