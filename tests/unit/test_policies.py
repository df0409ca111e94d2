"""The policies: sound plans within their limits for any sizes, rates and budgets, and ends that
come early.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from importlib import import_module

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from simulated_step import step_ns

from infinity_engine.errors import CapacityError, ConfigError
from infinity_engine.optim.policies import (
    BUILT_IN,
    algorithm1,
    eq1,
    eq1_ratio,
    interleaved,
    policy_for,
    static_split,
    two_ended,
)
from infinity_engine.optim.policies.interleaved import Assignment, UpdateLayout, end_of, spread
from infinity_engine.optim.policies.times import LaneWork, UpdateCosts
from infinity_engine.optim.policy import (
    Limits,
    OffloadPolicy,
    PlanDraft,
    PolicyRegistry,
    offload_policy,
)
from infinity_engine.plan import (
    Auto,
    BytesPerParameter,
    DeviceOnly,
    DownloadParameters,
    DownloadStates,
    DriveRates,
    Home,
    HostOnly,
    Interleaved,
    NvmeStreamed,
    Rates,
    StaticSplit,
    StepPlan,
    Strategy,
    SubgroupSpec,
    Tier,
    UpdateOnDevice,
    UpdateOnHost,
    UploadParameters,
    UploadStates,
)
from infinity_engine.sim import Simulation, simulate, update_bound

H100 = Rates(
    h2d_bytes_per_s=55e9,
    d2h_bytes_per_s=55e9,
    host_update_params_per_s=2e9,
    device_update_params_per_s=25e9,
)
V100 = Rates(
    h2d_bytes_per_s=12e9,
    d2h_bytes_per_s=12e9,
    host_update_params_per_s=2e9,
    device_update_params_per_s=35e9,
)
PLENTY = Limits(resident_bytes=1 << 50, staging_bytes=1 << 50)


def specs(sizes: Sequence[int]) -> tuple[SubgroupSpec, ...]:
    return tuple(
        SubgroupSpec(index=at, numel=numel, first_use=at) for at, numel in enumerate(sizes)
    )


EQUAL = specs([100_000_000] * 46)


def where(plan: StepPlan, home: Home) -> list[int]:
    return sorted(index for index, its in plan.homes().items() if its is home)


# --- any policy, any sizes, rates and limits ------------------------------------------------------

SIZES = st.lists(st.integers(1, 10**9), min_size=0, max_size=20)
RATE = st.floats(1e6, 1e12)
RATES = st.builds(
    Rates,
    host_update_params_per_s=RATE,
    device_update_params_per_s=RATE,
    h2d_bytes_per_s=RATE,
    d2h_bytes_per_s=RATE,
)
LIMITS = st.builds(
    Limits,
    resident_bytes=st.integers(0, 10**11),
    staging_bytes=st.integers(0, 10**11),
    staging_sets=st.integers(0, 5),
    per_parameter=st.builds(
        BytesPerParameter, states=st.integers(1, 20), parameter=st.integers(1, 4)
    ),
    parameters=st.sampled_from([Tier.DEVICE, Tier.HOST]),
    update_bytes=st.integers(0, 4),
)
PART = st.floats(0, 1)
SHARE = st.fractions(0, 1, max_denominator=50)
POLICIES = st.one_of(
    st.sampled_from(list(BUILT_IN.values())),
    st.builds(static_split, PART),
    st.builds(interleaved, st.none() | SHARE, resident=PART),
    st.builds(two_ended, resident=PART),
    st.builds(eq1, downscale_params_per_s=st.none() | RATE, resident=PART),
    st.builds(algorithm1, st.integers(2, 5), resident=PART),
)


def plan_or_none(
    policy: OffloadPolicy, subgroups: Sequence[SubgroupSpec], rates: Rates, limits: Limits
) -> StepPlan | None:
    """Return the plan, None where the policy says that what it was asked for cannot be."""
    try:
        return policy(subgroups, rates, limits)
    except CapacityError:
        return None
    except ConfigError as refused:
        if "Eq. 1 has no solution" in str(refused) or refused.field == "Limits.staging_sets":
            return None
        raise


def positions(plan: StepPlan) -> dict[tuple[type, int], int]:
    """Return the number of the op of each kind on each subgroup; there must be no two."""
    found = {(type(op), op.subgroup): number for number, op in enumerate(plan.ops)}
    assert len(found) == len(plan.ops)
    return found


@settings(max_examples=200)
@given(POLICIES, SIZES, RATES, LIMITS, st.randoms())
def test_every_policy_updates_each_subgroup_once_and_after_its_inputs(
    policy: OffloadPolicy, sizes: list[int], rates: Rates, limits: Limits, chance: object
) -> None:
    subgroups = list(specs(sizes))
    chance.shuffle(subgroups)  # type: ignore[attr-defined]
    plan = plan_or_none(policy, subgroups, rates, limits)
    assume(plan is not None and subgroups)
    assert plan is not None

    number = positions(plan)
    times = simulate(plan, rates).times
    for subgroup in subgroups:
        at = subgroup.index
        assert ((UpdateOnHost, at) in number) + ((UpdateOnDevice, at) in number) == 1
        for first, then in (
            (UpdateOnHost, UploadParameters),
            (UploadStates, UpdateOnDevice),
            (UpdateOnDevice, DownloadParameters),
            (UpdateOnDevice, DownloadStates),
            (DownloadParameters, DownloadStates),  # which says that the set is empty
        ):
            if (first, at) in number and (then, at) in number:
                assert times[number[first, at]].end_ns <= times[number[then, at]].start_ns
        at_home = limits.parameters is Tier.HOST
        assert ((UploadParameters, at) in number) == ((UpdateOnHost, at) in number and not at_home)
        assert ((DownloadParameters, at) in number) == ((UpdateOnDevice, at) in number and at_home)
        assert ((UploadStates, at) in number) == ((DownloadStates, at) in number)


@settings(max_examples=200)
@given(POLICIES, SIZES, RATES, LIMITS)
def test_every_policy_keeps_its_limits_at_every_point_of_the_plan(
    policy: OffloadPolicy, sizes: list[int], rates: Rates, limits: Limits
) -> None:
    subgroups = specs(sizes)
    plan = plan_or_none(policy, subgroups, rates, limits)
    assume(plan is not None and subgroups)
    assert plan is not None

    states = limits.per_parameter.states
    on_device = states + limits.update_bytes
    resident = sum(subgroups[index].numel * on_device for index in where(plan, Home.RESIDENT))
    assert resident <= limits.resident_bytes
    assert sum(plan.staging_bytes) <= limits.staging_bytes
    assert len(plan.staging_bytes) <= limits.staging_sets

    times = simulate(plan, rates).times
    stays: dict[int, list[list[int]]] = {}
    for op, time in zip(plan.ops, times, strict=True):
        if isinstance(op, UploadStates):
            assert op.nbytes == subgroups[op.subgroup].numel * states
            assert subgroups[op.subgroup].numel * on_device <= plan.staging_bytes[op.staging]
            stays.setdefault(op.staging, []).append([time.start_ns, -1])
        elif isinstance(op, DownloadStates):
            stays[op.staging][-1][1] = time.end_ns
    for spans in stays.values():
        ordered = sorted(spans)
        assert all(start < end for start, end in ordered)
        assert all(first[1] <= then[0] for first, then in itertools.pairwise(ordered))


@given(POLICIES, SIZES, RATES)
def test_a_policy_makes_the_same_plan_whatever_the_order_of_the_subgroups(
    policy: OffloadPolicy, sizes: list[int], rates: Rates
) -> None:
    subgroups = specs(sizes)

    plan = plan_or_none(policy, subgroups, rates, PLENTY)

    assert plan == plan_or_none(policy, subgroups[::-1], rates, PLENTY)


@given(
    st.one_of(
        st.sampled_from([policy for policy in BUILT_IN.values() if policy.homes is not None]),
        st.builds(static_split, PART),
        st.builds(interleaved, SHARE, resident=PART),
    ),
    SIZES,
    RATES,
    st.randoms(),
)
def test_where_a_policy_says_beforehand_that_updates_will_be_its_plans_have_them(
    policy: OffloadPolicy, sizes: list[int], rates: Rates, chance: random.Random
) -> None:
    subgroups = list(specs(sizes))
    chance.shuffle(subgroups)

    assert policy.homes_of(subgroups) == policy(subgroups, rates, PLENTY).homes()


@given(
    st.one_of(
        st.sampled_from([policy for policy in BUILT_IN.values() if policy.homes is not None]),
        st.builds(static_split, PART),
        st.builds(interleaved, st.none() | SHARE, resident=PART),
    ),
    SIZES,
    RATES,
    LIMITS,
    st.sampled_from(list(Tier)),
    st.integers(0, 3),
)
def test_the_outline_of_a_plan_is_that_of_its_ops(
    policy: OffloadPolicy,
    sizes: list[int],
    rates: Rates,
    limits: Limits,
    parameters: Tier,
    buffers: int,
) -> None:
    limits = replace(limits, parameters=parameters, host_buffers=buffers)
    drive = DriveRates(read_bytes_per_s=1e9, write_bytes_per_s=1e9)
    rates = replace(rates, nvme={"a": drive})
    subgroups = [
        replace(spec, buffer_bytes=64, load_bytes=32, store_bytes=32) if spec.index % 2 else spec
        for spec in specs(sizes)
    ]

    def refused_or(make: Callable[[], object]) -> object:
        try:
            return make()
        except CapacityError as error:
            return str(error)
        except ConfigError as error:
            return type(error)

    outline = refused_or(lambda: policy.outline(subgroups, rates, limits)[0])
    made = refused_or(lambda: policy(subgroups, rates, limits).outline())
    # What cannot be at all, as without host buffers, may be refused for the device's memory first.
    refused = made is ConfigError and isinstance(outline, str)
    assert refused or outline == made


@pytest.mark.parametrize(
    "policy", [static_split(0.5), interleaved(Fraction(1, 3), resident=0.5), interleaved()]
)
def test_an_outline_alone_makes_no_ops(policy: OffloadPolicy) -> None:
    def refuse(*_: object) -> StepPlan:
        raise AssertionError("an outline made a plan")

    outline, _ = replace(policy, decide=refuse).outline(EQUAL, H100, PLENTY)

    assert outline == policy(EQUAL, H100, PLENTY).outline()


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        (static_split(0.5), True),
        (interleaved(Fraction(1, 3), resident=0.5), True),
        (interleaved(), False),
        (two_ended(), False),
        (algorithm1(2), False),
    ],
)
def test_a_policy_says_beforehand_where_updates_will_be_if_only_sizes_decide(
    policy: OffloadPolicy, says: bool
) -> None:
    assert (policy.homes_of(EQUAL) is not None) == says


@given(SIZES, RATES, SHARE, PART)
def test_no_plan_ends_before_the_bound(
    sizes: list[int], rates: Rates, share: Fraction, part: float
) -> None:
    subgroups = specs(sizes)
    assume(subgroups)
    plan = interleaved(share, resident=part)(subgroups, rates, PLENTY)
    total = sum(sizes)
    resident = Fraction(plan.params_at(Home.RESIDENT), total)

    assert simulate(plan, rates).end_ns >= update_bound(rates, resident=resident).least_ns(total)


START = st.none() | st.floats(1e-6, 1e-2)


@given(
    st.lists(
        st.tuples(
            st.integers(1, 10**9),
            st.sampled_from(Home),
            st.integers(1, 4),
            st.sampled_from([None, 2, 4]),
            st.sampled_from(["", "stored", "loaded and stored"]),
        ),
        max_size=30,
    ),
    RATES,
    st.tuples(START, START, START, START),
    st.tuples(st.sampled_from(list(Tier)), st.integers(1, 3), st.integers(1, 4)),
)
def test_an_update_laid_out_without_ops_ends_when_its_plan_does(
    kinds: list[tuple[int, Home, int, int | None, str]],
    rates: Rates,
    starts: tuple[float | None, float | None, float | None, float | None],
    given_limits: tuple[Tier, int, int],
) -> None:
    drive = DriveRates(read_bytes_per_s=3e9, write_bytes_per_s=2e9)
    host, device, copies, drives = starts
    rates = replace(
        rates,
        nvme={"a": drive},
        host_start_s=host,
        device_start_s=device,
        copy_start_s=copies,
        io_start_s=drives,
    )
    tier, sets, buffers = given_limits
    limits = replace(PLENTY, parameters=tier, staging_sets=sets, host_buffers=buffers)
    homes: dict[Home, list[SubgroupSpec]] = {home: [] for home in Home}
    for index, (numel, home, pieces, width, offloaded) in enumerate(kinds):
        nbytes = 12 * numel if offloaded else 0
        subgroup = SubgroupSpec(
            index=index,
            numel=numel,
            first_use=index,
            pieces=pieces,
            parameter_bytes=width,
            buffer_bytes=nbytes,
            load_bytes=nbytes if "loaded" in offloaded else 0,
            store_bytes=nbytes,
        )
        homes[home].append(subgroup)
    subgroups = list(itertools.chain.from_iterable(homes.values()))
    assignment = Assignment(
        host=tuple(homes[Home.HOST]),
        visiting=tuple(homes[Home.VISITING]),
        residents=tuple(homes[Home.RESIDENT]),
    )

    end_ns = end_of(assignment, UpdateCosts(subgroups, rates, limits))

    assert end_ns == simulate(UpdateLayout(assignment, rates, limits).plan(), rates).end_ns


@pytest.mark.parametrize("policy", [interleaved(), two_ended()])
def test_the_search_for_a_share_lays_out_only_what_may_end_first(
    policy: OffloadPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    laid_out: list[Assignment] = []

    def counted(assignment: Assignment, costs: UpdateCosts) -> int:
        laid_out.append(assignment)
        return end_of(assignment, costs)

    # The package has a function of the module's name.
    module = import_module("infinity_engine.optim.policies.interleaved")
    monkeypatch.setattr(module, "end_of", counted)
    subgroups = specs([7_654_321] * 613)
    plan = policy(subgroups, H100, PLENTY)

    # 31 without a bound: a grid of nine, and neighbours in ever smaller steps.
    assert 0 < len(laid_out) <= 8
    # Of those that are laid out, the one that ends first is planned.
    least_ns = simulate(plan, H100).end_ns
    assert all(
        end_of(other, UpdateCosts(subgroups, H100, PLENTY)) >= least_ns for other in laid_out
    )


def test_no_update_ends_before_its_busiest_lane_has_worked() -> None:
    others, residents = specs([5_000_000] * 40), specs([5_000_000] * 50)[40:]
    costs = UpdateCosts((*others, *residents), H100, PLENTY)
    work = LaneWork(others, residents, costs)
    for count in range(len(others) + 1):
        visits = spread(others, Fraction(count, len(others)))
        assignment = Assignment(
            host=tuple(itertools.compress(others, [not visit for visit in visits])),
            visiting=tuple(itertools.compress(others, visits)),
            residents=tuple(residents),
        )

        busiest_ns = work.busiest_ns(visits)

        assert busiest_ns <= end_of(assignment, costs) <= 1.3 * busiest_ns


@pytest.mark.parametrize("policy", [interleaved(), two_ended()])
def test_the_search_for_a_share_makes_the_ops_of_one_plan_alone(
    policy: OffloadPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[SubgroupSpec] = []
    visit = PlanDraft.visit

    def counted(draft: PlanDraft, subgroup: SubgroupSpec) -> None:
        made.append(subgroup)
        visit(draft, subgroup)

    monkeypatch.setattr(PlanDraft, "visit", counted)
    # Sizes of its own: what was asked before is not sought again.
    plan = policy(specs([123_456_789] * 47), H100, PLENTY)

    assert len(made) == len(where(plan, Home.VISITING)) > 0


# --- where subgroups are updated ------------------------------------------------------------------


def test_device_only_keeps_everything_on_the_device() -> None:
    plan = BUILT_IN["device_only"](EQUAL, Rates(), PLENTY)
    assert plan.params_at(Home.RESIDENT) == 46 * 10**8
    assert plan.staging_bytes == ()


def test_host_only_updates_everything_on_the_host_in_the_order_of_use() -> None:
    subgroups = [replace(subgroup, first_use=-subgroup.index) for subgroup in EQUAL[:3]]
    plan = BUILT_IN["host_only"](
        subgroups, Rates(), replace(PLENTY, resident_bytes=0, staging_bytes=0)
    )

    assert [(type(op), op.subgroup) for op in plan.ops] == [
        (kind, index) for index in (2, 1, 0) for kind in (UpdateOnHost, UploadParameters)
    ]


@pytest.mark.parametrize(
    ("ratio", "resident"), [(0.0, []), (0.5, [2, 3]), (0.74, [2, 3]), (0.75, [1, 2, 3])]
)
def test_static_split_keeps_whole_subgroups_that_are_needed_last(
    ratio: float, resident: list[int]
) -> None:
    plan = static_split(ratio)(specs([5, 5, 5, 5]), Rates(), PLENTY)
    assert where(plan, Home.RESIDENT) == resident


def test_what_is_to_be_resident_and_does_not_fit_is_refused_with_the_bytes_that_are_missing() -> (
    None
):
    with pytest.raises(CapacityError) as refused:
        static_split(0.5)(specs([5, 5]), Rates(), replace(PLENTY, resident_bytes=59))

    assert (refused.value.asked, refused.value.limit) == (60, 59)
    assert "keep fewer subgroups resident" in str(refused.value)


def test_what_is_to_visit_and_finds_no_staging_set_is_refused_with_the_bytes_that_are_missing() -> (
    None
):
    with pytest.raises(CapacityError) as refused:
        interleaved(Fraction(1))(specs([5, 5]), H100, replace(PLENTY, staging_bytes=59))

    assert (refused.value.asked, refused.value.limit) == (60, 59)


def test_visits_without_any_staging_set_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"Limits\.staging_sets: expected 1 or more"):
        interleaved(Fraction(1))(specs([5, 5]), H100, replace(PLENTY, staging_sets=0))


@pytest.mark.parametrize("policy", [interleaved(), two_ended()])
def test_where_nothing_can_visit_and_none_was_asked_for_all_stays_on_the_host(
    policy: OffloadPolicy,
) -> None:
    plan = policy(specs([5, 5]), H100, replace(PLENTY, staging_bytes=59))
    assert where(plan, Home.HOST) == [0, 1]


@pytest.mark.parametrize(
    ("share", "visiting"),
    [
        (Fraction(0), []),
        (Fraction(1, 3), [1, 4]),
        (Fraction(1, 2), [0, 2, 4]),
        (Fraction(1), [0, 1, 2, 3, 4, 5]),
    ],
)
def test_a_share_is_spread_evenly(share: Fraction, visiting: list[int]) -> None:
    plan = interleaved(share)(specs([7] * 6), H100, PLENTY)
    assert where(plan, Home.VISITING) == visiting


@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=50), SHARE)
def test_up_to_each_subgroup_the_share_is_kept_within_half_of_the_largest(
    sizes: list[int], share: Fraction
) -> None:
    chosen = spread(specs(sizes), share)
    seen = visiting = 0
    for size, visits in zip(sizes, chosen, strict=True):
        seen += size
        visiting += size * visits
        assert abs(share * seen - visiting) <= Fraction(max(sizes), 2)


def test_two_ended_lets_the_device_take_from_the_back() -> None:
    plan = two_ended()(EQUAL, H100, PLENTY)
    uploads = [op.subgroup for op in plan.ops if isinstance(op, UploadStates)]

    assert uploads == list(range(45, 45 - len(uploads), -1))
    assert where(plan, Home.HOST) == list(range(46 - len(uploads)))


def test_interleaved_uses_three_staging_sets_in_turn() -> None:
    plan = interleaved()(EQUAL, H100, PLENTY)
    assert len(plan.staging_bytes) == 3
    assert [op.staging for op in plan.ops if isinstance(op, UploadStates)][:7] == [
        0,
        1,
        2,
        0,
        1,
        2,
        0,
    ]


def test_residents_come_last_where_the_last_downloads_leave_room_for_them() -> None:
    plan = interleaved(resident=0.1)(EQUAL, H100, PLENTY)
    on_device = [op.staging is None for op in plan.ops if isinstance(op, UpdateOnDevice)]

    assert on_device == sorted(on_device)


def test_residents_that_are_too_many_for_the_end_fill_the_gaps_before() -> None:
    plan = interleaved(resident=0.5)(EQUAL, H100, PLENTY)
    bound = update_bound(H100, resident=Fraction(1, 2))

    # Were all 23 to come last, they would take 92 ms behind the last visitor: 0.87 of the bound.
    assert bound.least_ns(46 * 10**8) / simulate(plan, H100).end_ns > Fraction(92, 100)


def test_residents_take_their_turn_where_no_gap_is_long_enough_for_one() -> None:
    rates = Rates(
        h2d_bytes_per_s=48e9,
        d2h_bytes_per_s=66e9,
        host_update_params_per_s=0.4e9,
        device_update_params_per_s=7.6e9,
    )
    plan = interleaved(resident=0.5)(specs([10**8] * 100), rates, PLENTY)

    # Were they to wait for gaps as long as their updates, these 50 would come last: 37% behind the
    # bound.
    assert simulate(plan, rates).end_ns <= 1.05 * update_bound(
        rates, resident=Fraction(1, 2)
    ).least_ns(100 * 10**8)


def test_no_visitor_waits_for_a_resident_where_gaps_are_long() -> None:
    plan = interleaved(resident=0.5)(EQUAL, H100, PLENTY)
    times = simulate(plan, H100).times

    for number, op in enumerate(plan.ops):
        if isinstance(op, UpdateOnDevice) and op.staging is not None:
            assert times[number].start_ns == times[op.after[0]].end_ns


# --- how early they end ---------------------------------------------------------------------------


@pytest.mark.parametrize("rates", [H100, V100])
@pytest.mark.parametrize("policy", [interleaved(), two_ended()])
def test_the_race_comes_near_the_bound(policy: OffloadPolicy, rates: Rates) -> None:
    end_ns = simulate(policy(EQUAL, rates, PLENTY), rates).end_ns
    assert update_bound(rates).least_ns(46 * 10**8) / end_ns >= 0.97


def distance_from_bound(seed: int) -> float:
    """Return by which part it ends after the bound on a random machine, with 46 or more that are
    not resident.
    """
    chance = random.Random(seed)

    def around(value: float, times: float) -> float:
        return value * float(times ** chance.uniform(-1, 1))

    link = around(25e9, 4)
    rates = Rates(
        h2d_bytes_per_s=link,
        d2h_bytes_per_s=around(link, 1.5),
        host_update_params_per_s=around(1.5e9, 4),
        device_update_params_per_s=around(30e9, 4),
    )
    others, part = (
        chance.choice([46, 64, 100, 128]),
        chance.choice([0, 0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95]),
    )
    subgroups = specs([10**8] * round(others / (1 - part)))
    plan = interleaved(resident=part)(subgroups, rates, PLENTY)
    resident = Fraction(plan.params_at(Home.RESIDENT), len(subgroups) * 10**8)
    least_ns = update_bound(rates, resident=resident).least_ns(len(subgroups) * 10**8)
    return simulate(plan, rates).end_ns / float(least_ns) - 1


@pytest.mark.parametrize(
    "first", [0, *(pytest.param(at, marks=pytest.mark.slow) for at in range(20, 500, 40))]
)
def test_with_46_that_are_not_resident_the_race_ends_5_percent_from_the_bound(first: int) -> None:
    distances = sorted(
        distance_from_bound(seed) for seed in range(first, first + (40 if first else 20))
    )

    assert distances[-2] <= 0.05
    assert distances[-1] <= 0.06  # where 46 visitors' own way up and down is more than that


@pytest.mark.parametrize("rates", [H100, V100])
def test_the_race_is_ahead_of_algorithm1_with_stride_2(rates: Rates) -> None:
    ours, theirs = (
        simulate(policy(EQUAL, rates, PLENTY), rates).end_ns
        for policy in (interleaved(), algorithm1(2))
    )
    assert theirs / ours >= 1.5


@pytest.mark.parametrize("rates", [H100, V100])
def test_parameters_come_in_the_order_of_use_so_that_a_forward_can_begin_early(
    rates: Rates,
) -> None:
    ours, two_ends = (
        simulate(policy(EQUAL, rates, PLENTY), rates) for policy in (interleaved(), two_ended())
    )
    forward_ns = ours.end_ns // 2

    assert two_ends.end_ns == ours.end_ns
    assert step_ns(ours, forward_ns) < 1.1 * ours.end_ns < step_ns(two_ends, forward_ns)


@settings(max_examples=30)
@given(RATES, st.sampled_from([46, 50, 61]))
def test_no_given_share_ends_much_before_the_one_that_is_found(rates: Rates, count: int) -> None:
    subgroups = specs([10**8] * count)
    found = simulate(interleaved()(subgroups, rates, PLENTY), rates).end_ns

    for percent in range(0, 101, 10):
        given_share = simulate(interleaved(Fraction(percent, 100))(subgroups, rates, PLENTY), rates)
        assert found <= given_share.end_ns * 1.01


def any_plan(
    host: Sequence[SubgroupSpec], visiting: Sequence[SubgroupSpec], states_first: bool
) -> StepPlan:
    """Return a plan as plain as can be: either all states go up first, or one after each of the
    host's parameters.
    """
    draft = PlanDraft((*host, *visiting), PLENTY)
    left = list(visiting)
    for subgroup in host:
        if states_first:
            draft.update_on_host(subgroup)
        else:
            draft.host(subgroup)
            for visitor in left[:1]:
                draft.visit(visitor)
            left = left[1:]
    for subgroup in left:
        draft.visit(subgroup)
    for subgroup in host if states_first else ():
        draft.upload_parameters(subgroup)
    return draft.plan()


def best_by_brute_force(subgroups: Sequence[SubgroupSpec], rates: Rates) -> int:
    """Return the earliest end of every choice of visitors, each in the order of use."""
    ends = []
    for visits in itertools.product((False, True), repeat=len(subgroups)):
        visiting = [subgroup for subgroup, visit in zip(subgroups, visits, strict=True) if visit]
        host = [subgroup for subgroup, visit in zip(subgroups, visits, strict=True) if not visit]
        ends += [simulate(any_plan(host, visiting, first), rates).end_ns for first in (True, False)]
    return min(ends)


@settings(max_examples=25)
@given(st.lists(st.integers(10**6, 10**9), min_size=1, max_size=6), RATES)
def test_the_race_ends_within_a_twentieth_of_the_best_that_brute_force_finds(
    sizes: list[int], rates: Rates
) -> None:
    subgroups = specs(sizes)
    found = simulate(interleaved()(subgroups, rates, PLENTY), rates).end_ns

    assert found <= 1.05 * best_by_brute_force(subgroups, rates)


@settings(max_examples=5)
@given(RATES, st.integers(9, 10))
def test_beyond_a_few_subgroups_the_race_is_as_near_where_they_are_equal(
    rates: Rates, count: int
) -> None:
    subgroups = specs([10**8] * count)
    found = simulate(interleaved()(subgroups, rates, PLENTY), rates).end_ns

    assert found <= 1.05 * best_by_brute_force(subgroups, rates)


# --- the published references ---------------------------------------------------------------------


def test_algorithm1_lets_one_in_so_many_visit() -> None:
    plan = algorithm1(3)(EQUAL, H100, PLENTY)
    assert where(plan, Home.VISITING) == list(range(2, 46, 3))


def test_algorithm1_has_one_staging_set() -> None:
    assert algorithm1(2)(EQUAL, H100, PLENTY).staging_bytes == (1_200_000_000,)


def test_algorithm1_launches_what_the_listing_launches_and_repairs_its_end() -> None:
    plan = algorithm1(2)(specs([1, 1, 1, 1, 1]), H100, PLENTY)

    assert [(op.name, op.subgroup, op.after) for op in plan.ops] == [
        ("UploadStates", 1, ()),
        ("UpdateOnHost", 0, ()),
        ("UpdateOnDevice", 1, (0, 1)),
        ("UploadParameters", 0, (1,)),
        ("DownloadStates", 1, (2, 1)),
        ("UploadStates", 3, (4, 1)),
        ("UpdateOnHost", 2, ()),
        ("UpdateOnDevice", 3, (5, 6)),
        ("UploadParameters", 2, (6,)),
        ("DownloadStates", 3, (7, 6)),
        ("UpdateOnHost", 4, ()),
        ("UploadParameters", 4, (10,)),  # The listing forgets these two kinds where the loop ends.
    ]


def test_algorithm1_brings_its_last_visitor_home() -> None:
    plan = algorithm1(2)(specs([1, 1]), H100, PLENTY)
    assert [op.name for op in plan.ops][-1] == "DownloadStates"


def test_algorithm1_cannot_let_every_subgroup_visit() -> None:
    with pytest.raises(ConfigError, match="2 or more"):
        algorithm1(1)


def test_eq1_lets_its_share_visit() -> None:
    plan = eq1(downscale_params_per_s=15.5e9)(EQUAL, H100, PLENTY)
    share = 1 / (1 + eq1_ratio(H100, downscale_params_per_s=15.5e9))

    assert len(where(plan, Home.VISITING)) == round(46 * share) == 31


# --- names, strategies, and policies of one's own -------------------------------------------------


def plan_of(policy: OffloadPolicy) -> Simulation:
    return simulate(policy(EQUAL, H100, PLENTY), H100)


@pytest.mark.parametrize(
    ("strategy", "policy"),
    [
        (DeviceOnly(), BUILT_IN["device_only"]),
        (HostOnly(), BUILT_IN["host_only"]),
        (StaticSplit(ratio=0.3), static_split(0.3)),
        (Interleaved(), interleaved()),
        (Interleaved(share=0.4, resident=0.2), interleaved(Fraction(0.4), resident=0.2)),
        (Interleaved(stride=3), interleaved(Fraction(1, 3))),
    ],
)
def test_a_strategy_has_its_policy(strategy: Strategy, policy: OffloadPolicy) -> None:
    assert policy_for(strategy).name == strategy.name
    assert plan_of(policy_for(strategy)) == plan_of(policy)


def test_a_strategy_that_says_not_where_updates_run_has_none() -> None:
    with pytest.raises(ConfigError, match="got 'auto'"):
        policy_for(Auto())


@pytest.mark.parametrize("update", [HostOnly(), Interleaved(share=0.5)])
def test_states_that_rest_on_drives_are_updated_as_the_strategy_says(
    update: HostOnly | Interleaved,
) -> None:
    assert plan_of(policy_for(NvmeStreamed(update=update))) == plan_of(policy_for(update))


def test_the_policies_that_are_there() -> None:
    assert list(BUILT_IN) == [
        "device_only",
        "host_only",
        "interleaved",
        "two_ended",
        "eq1",
        "algorithm1",
    ]


def test_an_unknown_name_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match=r"nearest: two_ended"):
        BUILT_IN["two_end"]


@offload_policy("all_visit")
def all_visit(subgroups: Sequence[SubgroupSpec], rates: Rates, limits: Limits) -> StepPlan:
    draft = PlanDraft(subgroups, limits)
    for subgroup in subgroups:
        draft.visit(subgroup)
    return draft.plan()


def test_a_policy_of_ones_own_makes_plans() -> None:
    assert where(all_visit(specs([3, 4]), Rates(), PLENTY), Home.VISITING) == [0, 1]


def test_a_policy_can_be_added_to_a_registry_and_the_built_in_ones_stay_as_they_are() -> None:
    mine = BUILT_IN.with_policy(all_visit)

    assert mine["all_visit"] is all_visit
    assert "all_visit" not in BUILT_IN
    assert len(mine) == len(BUILT_IN) + 1


def test_a_name_is_given_once() -> None:
    with pytest.raises(ConfigError, match="each name once"):
        PolicyRegistry([all_visit, all_visit])


def test_a_policy_gets_the_subgroups_in_the_order_of_their_first_use() -> None:
    late_first = [replace(subgroup, first_use=-subgroup.index) for subgroup in specs([3, 4])]
    plan = all_visit(late_first, Rates(), PLENTY)

    assert [op.subgroup for op in plan.ops if isinstance(op, UploadStates)] == [1, 0]


def test_a_policy_that_forgets_a_subgroup_is_told() -> None:
    @offload_policy("first_only")
    def first_only(subgroups: Sequence[SubgroupSpec], rates: Rates, limits: Limits) -> StepPlan:
        draft = PlanDraft(subgroups, limits)
        draft.host(subgroups[0])
        return draft.plan()

    with pytest.raises(ConfigError, match="subgroup 1 has none"):
        first_only(specs([3, 4]), Rates(), PLENTY)


def test_a_policy_that_plans_for_other_subgroups_is_told() -> None:
    other = offload_policy("other")(lambda subgroups, rates, limits: StepPlan(subgroups=(), ops=()))

    with pytest.raises(
        ConfigError, match="policy 'other': expected a plan for the subgroups that it was given"
    ):
        other(specs([3]), Rates(), PLENTY)


def test_a_policy_that_returns_no_plan_is_told() -> None:
    nothing = offload_policy("nothing")(lambda subgroups, rates, limits: None)  # type: ignore[arg-type, return-value]

    with pytest.raises(ConfigError, match="a function that returns a StepPlan"):
        nothing(specs([3]), Rates(), PLENTY)


def test_a_policy_that_updates_elsewhere_than_it_has_said_is_told() -> None:
    said = OffloadPolicy(
        "other", all_visit.decide, lambda subgroups: {each.index: Home.HOST for each in subgroups}
    )

    with pytest.raises(
        ConfigError, match="policy 'other': expected a plan that updates each subgroup where"
    ):
        said(specs([3, 4]), Rates(), PLENTY)


def test_a_policy_that_uses_more_staging_sets_than_there_may_be_is_told() -> None:
    def decide(subgroups: Sequence[SubgroupSpec], rates: Rates, limits: Limits) -> StepPlan:
        return replace(all_visit.decide(subgroups, rates, limits), staging_bytes=(48, 48, 48))

    with pytest.raises(ConfigError, match=r"Limits\.staging_sets: expected 3 or more"):
        offload_policy("greedy")(decide)(specs([3, 4]), Rates(), replace(PLENTY, staging_sets=2))


@pytest.mark.parametrize("name", ["resident_bytes", "staging_bytes", "staging_sets"])
def test_limits_are_not_negative(name: str) -> None:
    with pytest.raises(ConfigError, match=f"Limits.{name}"):
        replace(PLENTY, **{name: -1})  # type: ignore[arg-type]
