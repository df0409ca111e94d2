"""Sizing: subgroups alike are counted, and a plan's bytes are those of asking one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from functools import cached_property

from hypothesis import given
from hypothesis import strategies as st

from deepnvme.sizes import PAGE
from infinity_engine.optim import FloatFormat, Formats
from infinity_engine.optim.policies import HOST_ONLY
from infinity_engine.placement.buffers import Resting
from infinity_engine.placement.placing import Wish, place
from infinity_engine.placement.sizing import PASSING, Sizing, _Values, cut
from infinity_engine.plan import HostOnly, Rates, ResolvedBudget, Tier
from infinity_engine.plan.step import Home, PlanOutline, SubgroupSpec

PLENTY = ResolvedBudget(device=1 << 50, host=1 << 50, nvme={})
BF16 = Formats(parameter=FloatFormat.BF16)


class OneByOne(Sizing):
    """A sizing of which no subgroup is like another, and that adds up parameters one by one."""

    @cached_property
    def alike(self) -> tuple[int, ...]:
        return tuple(range(len(self.subgroups)))

    def _of_parameters(self, resting: frozenset[int]) -> _Values:
        passing = staying = on_drives = staying_on_host = 0
        largest: list[int] = [0] * PASSING
        for number, nbytes in enumerate(self.parameters):
            in_pages = -(-nbytes // PAGE) * PAGE
            if number in resting:
                passing += nbytes
                on_drives += in_pages + 8 * PAGE  # in up to eight pieces
                largest = sorted([*largest, in_pages])[1:]
            else:
                staying += nbytes
                staying_on_host += in_pages
        most = max([self.parameters[number] for number in resting], default=0)
        return _Values(passing, on_drives, most, sum(largest), staying, staying_on_host)


@st.composite
def sizings(draw: st.DrawFn) -> Sizing:
    """Models of a few kinds of parameters, so that many subgroups are alike."""
    sizes = draw(st.lists(st.sampled_from([3000, 65_536, 100_000, 200_000, 300_000]), min_size=1))
    mixed = draw(st.booleans())
    parameters = [
        (numel, Formats() if mixed and number % 3 == 0 else BF16)
        for number, numel in enumerate(sizes)
    ]
    small_bytes = draw(st.sampled_from([None, 10_000, 200_000]))
    return Sizing(
        subgroups=cut(
            parameters, draw(st.sampled_from([40_960, 131_072])), small_bytes=small_bytes
        ),
        state_names=draw(st.sampled_from([(), ("exp_avg", "exp_avg_sq")])),
        parameters=tuple(formats.width * numel for numel, formats in parameters),
        deepest=1 << 20,
        unified=draw(st.booleans()),
        sums=draw(st.booleans()),
        gradient_width=draw(st.sampled_from([None, 4])),
        activations=draw(st.sampled_from([0, 1 << 20])),
    )


@given(sizing=sizings(), data=st.data())
def test_plans_take_as_many_bytes_whether_subgroups_are_counted_or_asked_one_by_one(
    sizing: Sizing, data: st.DataObject
) -> None:
    one_by_one = OneByOne(
        **{field.name: getattr(sizing, field.name) for field in fields(sizing)},
    )
    tier = data.draw(st.sampled_from([Tier.DEVICE, Tier.HOST, Tier.NVME]))
    homes = {
        subgroup.index: data.draw(
            st.just(Home.HOST) if sizing.unified else st.sampled_from(list(Home))
        )
        for subgroup in sizing.subgroups
    }
    small = data.draw(st.sampled_from([1, 10_000, 200_000]))
    drives = data.draw(st.booleans())
    wished = Resting(
        states=frozenset(index for index in homes if drives and data.draw(st.booleans())),
        values=sizing.of_at_least(small) if drives and tier is Tier.NVME else frozenset(),
        gradients=data.draw(st.sampled_from([0, 1, 3])),
        small_bytes=small,
        early=data.draw(st.sampled_from([0, 2])),
    )
    answers = []
    for its_sizing in (sizing, one_by_one):
        states = its_sizing.with_states(wished.states, homes, tier)
        rests = replace(wished, states=states)
        layouts = {
            index: layout
            for index, layout in its_sizing.layouts(rests, homes, tier).items()
            if layout.nbytes
        }
        largest = max((layout.nbytes for layout in layouts.values()), default=0)
        outline = PlanOutline(
            homes=homes,
            parameters=tier,
            staging_bytes=(),
            buffer_bytes=(largest,) * 2 if largest else (),
        )
        found = rests.of(layouts.values())
        answers.append(
            (
                states,
                layouts,
                its_sizing.all_beside_drives(homes, tier, found),
                its_sizing.demand(outline, PLENTY, found, layouts),
                its_sizing.beside_gradients(
                    its_sizing.limits(PLENTY, tier), outline, drives=drives, visit=True
                ),
                its_sizing.formats,
            )
        )
    assert answers[0] == answers[1]


def test_a_search_asks_a_policy_once_where_it_updates() -> None:
    asked: list[int] = []

    def homes(subgroups: Sequence[SubgroupSpec]) -> dict[int, Home]:
        asked.append(len(subgroups))
        return {subgroup.index: Home.HOST for subgroup in subgroups}

    sizing = Sizing(
        subgroups=cut([(300_000, BF16)] * 3, 65_536),
        state_names=("exp_avg", "exp_avg_sq"),
        parameters=(600_000,) * 3,
        deepest=600_000,
        unified=False,
    )
    wish = Wish(
        strategy=HostOnly(),
        tiers=(Tier.HOST,),
        accumulation_steps=1,
        small_bytes=1,
        rates=Rates(),
        policy=replace(HOST_ONLY, homes=homes),
    )
    for _ in range(3):
        place(sizing, wish, PLENTY, io_bytes=0)

    assert asked == [len(sizing.subgroups)]
