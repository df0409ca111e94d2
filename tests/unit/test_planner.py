"""The planner: what it picks is the best there is, fits, and takes the bytes and the time that it
says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from inspect import unwrap
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity_engine.advice.means import with_drives, with_links
from infinity_engine.cli.plan_question import without_collecting
from infinity_engine.errors import CapacityError, ConfigError
from infinity_engine.optim.policies import DEVICE_ONLY, HOST_ONLY, algorithm1, static_split
from infinity_engine.optim.policy import Limits
from infinity_engine.placement.buffers import Resting
from infinity_engine.placement.models import Activations
from infinity_engine.placement.training import Means, Training
from infinity_engine.plan import (
    BlockRates,
    BlockShape,
    ComputeRate,
    DeviceOnly,
    DriveRates,
    HostOnly,
    Interleaved,
    Lane,
    LaneClocks,
    NvmeStreamed,
    OwnWork,
    Rates,
    ResolvedBudget,
    StaticSplit,
    Strategy,
    Tier,
)
from infinity_engine.plan.step import Home
from infinity_engine.sim import simulate, timeline
from infinity_engine.sim.candidate import Candidate, Choice
from infinity_engine.sim.planner import Planner, decide
from infinity_engine.sim.presets import preset
from infinity_engine.sim.remedies import explain_refusal
from infinity_engine.sim.report import report_of
from infinity_engine.sim.timeline import least_step_ns, time_quickest_step, time_step
from infinity_engine.units import GB, TB, GiB
from support.best_of_all import Bounds, best_of_all, everything
from support.plannings import (
    equal_questions_searched_once,
    model_of,
    random_case,
    training_of,
    varied_case,
    wired_case,
)

Case = Callable[[int], tuple[Training, Means]]

DESKTOP = Rates(
    h2d_bytes_per_s=25e9,
    d2h_bytes_per_s=25e9,
    host_update_params_per_s=1.5e9,
    device_update_params_per_s=30e9,
    nvme={"a": DriveRates(read_bytes_per_s=7e9, write_bytes_per_s=5e9)},
)
SMALL = model_of(*([40_000_000] * 8))  # 0.32 billion parameters: 5.1 GB with states and gradients


def means(device: float, host: float, nvme: float = 0, **more: object) -> Means:
    drives = {"a": round(nvme * GB)} if nvme else {}
    rates = DESKTOP if nvme else replace(DESKTOP, nvme={})
    budget = ResolvedBudget(device=round(device * GB), host=round(host * GB), nvme=drives)
    return Means(budget=budget, rates=rates, flops_per_s=80e12, **more)  # type: ignore[arg-type]


PLENTY = means(100, 100)


@pytest.fixture(scope="module", autouse=True)
def equal_questions_are_searched_once() -> Iterator[None]:
    with equal_questions_searched_once():
        yield


# --- what it picks --------------------------------------------------------------------------------


def test_what_fits_on_the_device_stays_there() -> None:
    best = decide(training_of(SMALL), PLENTY).best

    assert (best.choice.strategy, best.choice.parameters) == (DeviceOnly(), Tier.DEVICE)


def test_what_does_not_is_updated_by_both_at_once() -> None:
    best = decide(training_of(SMALL), means(3.0, 20)).best

    steps = best.plan.steps
    assert steps.params_at(Home.VISITING) > 0
    assert steps.params_at(Home.HOST) > 0


def test_what_the_host_cannot_hold_rests_on_drives() -> None:
    best = decide(training_of(SMALL), means(2.0, 2.5, 100)).best

    assert isinstance(best.choice.strategy, NvmeStreamed)
    assert best.plan.resting.states


def test_the_host_takes_its_part_of_the_updates_where_all_fits_and_it_is_fast() -> None:
    there = means(100, 100)
    fast = replace(
        there, rates=replace(there.rates, host_update_params_per_s=3e10, h2d_bytes_per_s=1e12)
    )

    chosen = decide(training_of(SMALL), fast).best.choice.strategy
    assert isinstance(chosen, StaticSplit | Interleaved)
    if isinstance(chosen, Interleaved):
        assert isinstance(chosen.share, float)
        assert chosen.share + float(chosen.resident) < 0.9


def test_one_memory_has_no_visitors() -> None:
    best = decide(training_of(SMALL), means(0, 20, unified=True)).best

    assert (best.choice.strategy, best.choice.parameters) == (HostOnly(), Tier.DEVICE)


def test_one_memory_needs_no_rates_of_links() -> None:
    rates = Rates(host_update_params_per_s=1e9)
    found = decide(training_of(SMALL), replace(means(0, 20, unified=True), rates=rates))

    update = found.best.timeline.update_ns
    assert update == SMALL.numel  # a nanosecond each
    assert found.least_update_ns == update
    assert not {Lane.H2D, Lane.D2H} & found.best.timeline.moved.keys()


def test_measured_blocks_go_before_one_rate_of_computing() -> None:
    blocks = BlockRates({BlockShape(1024, 2048): ComputeRate(1e12, backward=5e11, again=2e12)})
    there = means(100, 100)
    training = replace(training_of(SMALL, checkpointing=False), overlap=False)
    plain = decide(training, there).best.timeline
    slow = decide(training, replace(there, blocks=blocks)).best.timeline

    flops = 2048 * sum(module.flops(2048) for module in SMALL.modules)
    assert [phase.ns for phase in slow.phases[1:]] == pytest.approx(
        [flops / 1e3, 2 * flops / 500], rel=1e-6
    )
    again = decide(replace(training, checkpointing=True), replace(there, blocks=blocks)).best
    flops -= 2048 * SMALL.modules[-1].flops(2048)  # the output, which is in no block
    more = again.timeline.phases[2].ns - slow.phases[2].ns
    assert more == pytest.approx(flops / 2e3, rel=1e-6)
    assert slow.ns > plain.ns


def test_updates_and_moves_disturb_one_another_as_long_as_both_work() -> None:
    disturbed = means(2.0, 2.5, 100)
    alone = replace(
        disturbed.rates,
        host_update_params_per_s=3e9,
        nvme={"a": DriveRates(read_bytes_per_s=14e9, write_bytes_per_s=10e9)},
    )
    training = training_of(SMALL)
    choice = Choice(strategy=NvmeStreamed(), parameters=Tier.DEVICE, subgroup_numel=2**22)

    def update_ns(there: Means) -> int:
        return Planner(training, there).candidate(choice).timeline.update_ns

    always, never = update_ns(disturbed), update_ns(replace(disturbed, rates=alone))
    assert never < update_ns(replace(disturbed, alone=alone)) < always


def test_on_one_memory_computing_beside_an_update_from_drives_is_disturbed_as_well() -> None:
    there = means(0, 3.0, 100, unified=True)
    alone = replace(there.rates, host_update_params_per_s=3e9)
    choice = Choice(strategy=NvmeStreamed(), parameters=Tier.NVME, subgroup_numel=2**22)

    def ns(given: Means) -> int:
        return Planner(training_of(SMALL), given).candidate(choice).timeline.ns

    assert ns(replace(there, rates=alone)) <= ns(replace(there, alone=alone)) <= ns(there)


def test_on_one_memory_modules_keep_a_part_of_their_rate_as_long_as_drives_work() -> None:
    there = means(0, 3.0, 100, unified=True)
    there = replace(there, alone=there.rates, flops_per_s=2e12)
    choice = Choice(strategy=NvmeStreamed(), parameters=Tier.NVME, subgroup_numel=2**22)

    def phases(given: Means, overlap: bool) -> list[int]:
        training = replace(training_of(SMALL, checkpointing=False), overlap=overlap)
        timeline = Planner(training, given).candidate(choice).timeline
        return [phase.ns for phase in timeline.phases]

    for overlap in (False, True):
        before = phases(there, overlap)
        disturbed = phases(replace(there, computing_beside_io=0.5), overlap)
        # Nothing computes beside an update that the forward waits for.
        first = 0 if overlap else 1
        assert disturbed[:first] == before[:first]
        for none, some in zip(before[first:], disturbed[first:], strict=True):
            assert none < some <= 2 * none


def test_on_one_memory_the_engines_own_work_takes_time_from_modules() -> None:
    training = replace(training_of(SMALL, checkpointing=False), overlap=False)
    own = OwnWork(lease_s=1e-3)
    parameters = len(training.ordered())

    def phases(given: Means, strategy: Strategy, parameters: Tier) -> dict[str, int]:
        choice = Choice(strategy=strategy, parameters=parameters, subgroup_numel=2**22)
        timeline = Planner(training, given).candidate(choice).timeline
        return {phase.name: phase.ns for phase in timeline.phases}

    def longer(unified: bool, host: float, strategy: Strategy, there: Tier) -> dict[str, int]:
        given = means(0 if unified else 20, host, 100, unified=unified)
        fast = replace(
            given.rates, nvme={"a": DriveRates(read_bytes_per_s=1e15, write_bytes_per_s=1e15)}
        )  # computing binds
        given = replace(given, rates=fast, flops_per_s=2e12)
        before = phases(given, strategy, there)
        after = phases(replace(given, own=own), strategy, there)
        return {name: after[name] - before[name] for name in before}

    stays = longer(True, 20, HostOnly(), Tier.DEVICE)
    assert stays["update"] == 0  # the rates have it
    assert stays["forward"] == stays["backward"] == own.passing_ns(parameters)
    fetched = longer(True, 3, NvmeStreamed(), Tier.NVME)
    assert fetched["update"] > 0
    # In each pass, what is still there from the last one is not fetched again.
    most = stays["forward"] + own.fetching_ns(parameters)
    assert stays["forward"] < fetched["forward"] <= most
    assert stays["backward"] < fetched["backward"] <= most
    # A device has its work before it is there.
    assert not any(longer(False, 20, HostOnly(), Tier.HOST).values())


def test_drives_that_keep_a_part_beside_modules_are_slower_there_alone() -> None:
    there = means(0, 3.0, 100, unified=True)
    alone = replace(
        there.rates, nvme={"a": DriveRates(read_bytes_per_s=14e9, write_bytes_per_s=10e9)}
    )
    choice = Choice(strategy=NvmeStreamed(), parameters=Tier.NVME, subgroup_numel=2**22)
    training = replace(training_of(SMALL, checkpointing=False), overlap=False)

    def phases(left: float, beside_updates: Rates) -> list[int]:
        given = replace(there, rates=beside_updates, flops_per_s=20e12, alone=alone)
        given = replace(given, io_beside_computing=left)
        return [phase.ns for phase in Planner(training, given).candidate(choice).timeline.phases]

    before, after = phases(1.0, there.rates), phases(0.5, there.rates)
    assert after[0] == before[0]
    assert after[1] > before[1]
    # What updates leave to drives does not matter where there is none.
    undisturbed = replace(there.rates, nvme=alone.nvme)
    assert phases(0.5, undisturbed)[1:] == after[1:]


def test_checksums_take_their_time_from_updates_of_states_on_drives_alone() -> None:
    slow = replace(DESKTOP, host_update_params_per_s=0.1e9)  # so that updates bind
    training = replace(training_of(SMALL), overlap=False)

    def update_ns(host: float, strategy: Strategy, summing: float) -> int:
        given = replace(means(2.0, host, 100), rates=slow, alone=slow, summing=summing)
        choice = Choice(strategy=strategy, parameters=Tier.DEVICE, subgroup_numel=2**22)
        return Planner(training, given).candidate(choice).timeline.update_ns

    assert update_ns(8, HostOnly(), 0.5) == update_ns(8, HostOnly(), 1.0)
    before, after = (update_ns(2.5, NvmeStreamed(), summing) for summing in (1.0, 0.5))
    assert 1.2 * before < after < 2.1 * before


def test_on_a_device_drives_take_nothing_from_modules() -> None:
    there = means(2.0, 2.5, 100)
    there = replace(there, alone=there.rates)
    choice = Choice(strategy=NvmeStreamed(), parameters=Tier.NVME, subgroup_numel=2**22)

    def ns(given: Means) -> int:
        return Planner(training_of(SMALL), given).candidate(choice).timeline.ns

    assert ns(replace(there, computing_beside_io=0.5)) == ns(there)


def test_a_share_that_rates_do_not_settle_on_leaves_what_was_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    candidate, asked = Planner.candidate, []

    def without_a_best_part(planner: Planner, choice: Choice, **limits: float) -> Candidate:
        if isinstance(choice.strategy, Interleaved) and choice.strategy.share is None:
            asked.append(choice)
            raise ConfigError(field="strategy", value=choice.strategy.name, expected="a share")
        return candidate(planner, choice, **limits)

    training, there = random_case(3)
    monkeypatch.setattr(Planner, "candidate", without_a_best_part)

    # A question of its own: equal ones are searched once.
    found = decide(replace(training, small_bytes=training.small_bytes + 1), there).best
    assert isinstance(found.choice.strategy, Interleaved)
    assert asked


def test_what_is_asked_for_is_kept_to() -> None:
    found = decide(
        training_of(SMALL),
        PLENTY,
        strategy=Interleaved(share=0.5),
        parameters=Tier.HOST,
        subgroup_numel=2**22,
    ).best

    assert found.choice == Choice(
        strategy=Interleaved(share=0.5), parameters=Tier.HOST, subgroup_numel=2**22
    )


def test_there_are_enough_subgroups_for_the_bound() -> None:
    for case in (PLENTY, means(3.0, 20), means(2.0, 2.5, 100)):
        assert len(decide(training_of(SMALL), case).best.plan.steps.subgroups) >= 46


def test_a_plan_is_the_same_whenever_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Planner, "decide", unwrap(Planner.decide))
    one, other = (decide(training_of(SMALL), means(2.0, 2.5, 100)).best for _ in range(2))

    assert one.plan == other.plan
    assert one.timeline == other.timeline


def slower_than_the_best(seed: int, case: Case = random_case) -> float:
    """Return how many times as long the planner's pick takes as the best of all strategies, tiers
    and settings.

    1.0 where none of these is faster. What it picks fits, and where it refuses, nothing does.
    """
    training, there = case(seed)
    planner = Planner(training, there)
    try:
        best = decide(training, there).best
    except CapacityError:
        assert best_of_all(planner) is None
        return 1.0
    held = best.sizing.held_on_host(best.plan.demand) + (
        there.io_bytes if best.plan.demand.nvme else 0
    )
    budget = there.of_one_rank()
    assert held + (planner.making(best.sizing) if there.unified else 0) <= budget.host
    assert there.unified or best.plan.demand.device + best.beside <= budget.device
    assert best.plan.demand.nvme <= sum(budget.nvme.values())
    faster = best_of_all(planner, below_ns=best.timeline.ns)
    return 1.0 if faster is None else best.timeline.ns / faster.timeline.ns


@pytest.mark.parametrize("seed", [*range(4), 21, 48, 93, 102, 111, 113, 128, 201, 686, 918])
def test_it_picks_what_is_within_3_percent_of_the_best_of_all_and_keeps_the_budgets(
    seed: int,
) -> None:
    assert slower_than_the_best(seed) <= 1.03


# In 47 and 48 each op costs 4 ms to start: a few subgroups are best there.
@pytest.mark.parametrize(
    "seed", [*(3, 4, 7, 8, 9, 11, 13, 14, 19, 25, 27, 34, 37, 38, 39, 42, 45, 46, 47, 48, 51, 54)]
)
def test_it_does_so_with_drives_as_the_command_line_asks(seed: int) -> None:
    assert varied_case(seed)[1].budget.nvme
    assert slower_than_the_best(seed, varied_case) <= 1.03


def disturbed_case(seed: int) -> tuple[Training, Means]:
    """Return a machine of which everything is faster while nothing disturbs it."""
    training, there = varied_case(seed)
    return training, replace(there, alone=faster(there.rates, 1.6))


@pytest.mark.parametrize("seed", [3, 5, 9, 13, 17, 25, 34, 37])
def test_it_does_so_where_updates_and_copies_disturb_one_another(seed: int) -> None:
    assert slower_than_the_best(seed, disturbed_case) <= 1.03


@pytest.mark.parametrize(
    ("seed", "tier", "strategy"),
    [
        # As many visit as leaves room for two modules at once: one more, and nothing is fetched
        # ahead.
        (250, Tier.HOST, Interleaved(share=0.5, resident=0.25)),
        # Most visit, as the host has no room for more gradients.
        (201, Tier.DEVICE, Interleaved(share=1.0, resident=0.1)),
        # Parameters in fp32 are the masters of residents, so that more of these have room.
        (712, Tier.DEVICE, StaticSplit(ratio=0.9)),
        (775, Tier.DEVICE, Interleaved(share=0.25, resident=0.5)),
        # Some visit, so that the gradients of the others stay in memory.
        (199, Tier.HOST, NvmeStreamed(update=Interleaved(share=0.25, resident=0.1))),
        # One memory holds all states and sums of gradients: with drives it takes 2.5 times as long.
        (191, Tier.DEVICE, HostOnly()),
    ],
)
def test_what_lies_at_an_edge_of_some_memory_is_found(
    seed: int, tier: Tier, strategy: Strategy
) -> None:
    training, there = random_case(seed)
    choice = Choice(strategy=strategy, parameters=tier, subgroup_numel=training.model.numel // 64)

    assert (
        decide(training, there).best.timeline.ns
        <= 1.03 * Planner(training, there).candidate(choice).timeline.ns
    )


def test_residents_leave_room_for_fewer_staging_sets_rather_than_none() -> None:
    choice = Choice(
        strategy=Interleaved(share=0.5, resident=0.25),
        parameters=Tier.DEVICE,
        subgroup_numel=SMALL.numel // 64,
    )
    # Parameters 0.64 GB, residents 0.9, gradients that stay 0.4 and those on their way 0.1; a set
    # is 0.06.
    sets = [
        len(
            Planner(training_of(SMALL), means(device, 20))
            .candidate(choice)
            .plan.steps.staging_bytes
        )
        for device in (2.11, 2.17, 2.23)
    ]

    assert sets == [1, 2, 3]


@pytest.mark.parametrize(
    ("seed", "tier", "strategy"),
    [
        # With large subgroups the host has room for one buffer only, and this looks slow until they
        # are small.
        (369, Tier.HOST, NvmeStreamed(update=Interleaved(share=0.0, resident=0.1))),
        # The device has room for all parameters only beside gradients of the smallest subgroups on
        # their way.
        (751, Tier.DEVICE, HostOnly()),
        # Some stay and some visit, between the corners of what the device holds.
        (462, Tier.DEVICE, NvmeStreamed(update=Interleaved(share=0.6, resident=0.3))),
        # The staging sets of large subgroups leave no room for as many residents.
        (334, Tier.DEVICE, NvmeStreamed(update=Interleaved(share=0.75, resident=0.1))),
        # On one memory, modules are handed what an update beside them makes of parameters on drives.
        (709, Tier.NVME, NvmeStreamed()),
        # Along the edge of what the device holds, where seven that visit take as much room as one
        # that stays.
        (698, Tier.DEVICE, NvmeStreamed(update=Interleaved(share=0.875, resident=0.05))),
    ],
)
def test_what_small_subgroups_make_room_for_is_found(
    seed: int, tier: Tier, strategy: Strategy
) -> None:
    check_is_found(seed, tier, strategy, subgroups=256)


def test_parts_are_found_where_a_step_takes_longer_than_its_estimate() -> None:
    # With fewer residents more visit; the estimate has this as slower, and it is 9% faster.
    strategy = NvmeStreamed(update=Interleaved(share=0.875, resident=0.25))
    check_is_found(51, Tier.DEVICE, strategy, subgroups=1024)


def check_is_found(seed: int, tier: Tier, strategy: Strategy, *, subgroups: int) -> None:
    training, there = random_case(seed)
    choice = Choice(
        strategy=strategy,
        parameters=tier,
        subgroup_numel=training.model.numel // subgroups // 4096 * 4096,
    )

    assert (
        decide(training, there).best.timeline.ns
        <= 1.03 * Planner(training, there).candidate(choice).timeline.ns
    )


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 1000, 50))
def test_it_does_so_on_a_thousand_machines(
    first: int, record_property: Callable[[str, object], None]
) -> None:
    found = {seed: slower_than_the_best(seed) for seed in range(first, first + 50)}

    record_property("times the time of the best, by seed", found)
    # 893 is 3.2% longer (decision 0034).
    assert {seed: times for seed, times in found.items() if times > 1.03}.keys() <= {893}
    assert max(found.values()) < 1.035


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("costly", [False, True])
def test_it_does_so_on_200_machines_as_the_command_line_asks(
    costly: bool, record_property: Callable[[str, object], None]
) -> None:
    seeds = [
        seed
        for seed in range(200)
        if (varied_case(seed)[1].rates.host_start_s is not None) is costly
    ]
    with without_collecting():
        found = {seed: slower_than_the_best(seed, varied_case) for seed in seeds}

    record_property("times the time of the best, by seed", found)
    assert {seed: times for seed, times in found.items() if times > 1.03} == {}


@pytest.mark.parametrize(
    ("seed", "case"), [*((seed, random_case) for seed in (2, 8, 12)), (18, varied_case)]
)
def test_what_the_comparison_skips_is_not_faster(seed: int, case: Case) -> None:
    check_what_is_skipped(seed, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", [random_case, varied_case])
@pytest.mark.parametrize("seed", range(20))
def test_what_the_comparison_skips_is_not_faster_on_any_machine(seed: int, case: Case) -> None:
    check_what_is_skipped(seed, case)


def check_what_is_skipped(seed: int, case: Case) -> None:
    planner = Planner(*case(seed))
    bounds, times = Bounds(planner), []
    for choice in everything(planner):
        with suppress(CapacityError, ConfigError):
            times.append(planner.candidate(choice).timeline.ns)
            assert bounds.least_ns(choice) <= times[-1]
    best = best_of_all(planner)
    assert (best.timeline.ns if best else None) == min(times, default=None)


def test_the_comparison_finds_what_is_faster_than_a_poor_plan() -> None:
    planner = Planner(training_of(SMALL), means(3.0, 20))
    poor = planner.candidate(
        Choice(strategy=HostOnly(), parameters=Tier.HOST, subgroup_numel=SMALL.numel // 64)
    )

    faster = best_of_all(planner, below_ns=poor.timeline.ns)
    assert faster is not None
    assert poor.timeline.ns > 1.03 * faster.timeline.ns


# --- the update phase -----------------------------------------------------------------------------


@pytest.mark.parametrize("h2d", [4e9, 25e9, 55e9])
@pytest.mark.parametrize("cpu", [0.5e9, 2e9])
def test_no_reference_updates_faster_than_the_plan_and_the_bound_is_5_percent_away(
    h2d: float, cpu: float
) -> None:
    rates = replace(
        DESKTOP, h2d_bytes_per_s=h2d, d2h_bytes_per_s=h2d, host_update_params_per_s=cpu, nvme={}
    )
    training = training_of(model_of(*([400_000_000] * 8)))
    there = Means(
        budget=ResolvedBudget(device=16 * 10**9, host=200 * 10**9),
        rates=rates,
        flops_per_s=None,
        for_all=False,
    )
    decision = decide(training, there)

    best = decision.best
    sizing, steps = best.sizing, best.plan.steps
    limits = sizing.limits(best.budget, steps.parameters)
    specs = sizing.specs({})
    references = [HOST_ONLY, *(static_split(part / 10) for part in range(1, 11)), DEVICE_ONLY]
    references += [algorithm1(stride) for stride in (2, 3, 4, 5, 8)]
    for policy in references:
        try:
            plan = policy(specs, rates, limits)
            sizing.demand(plan.outline(), best.budget, Resting(), {})
        except CapacityError:
            continue
        assert best.timeline.update_ns <= simulate(plan, rates).end_ns * 1.0001, policy.name
    assert decision.least_update_ns is not None
    assert decision.least_update_ns <= best.timeline.update_ns <= 1.05 * decision.least_update_ns


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([None, 2.0]))
def test_the_least_update_is_none_that_a_plan_ends_before(seed: int, alone: float | None) -> None:
    """Whatever the machine and the model; `alone`: so much faster is everything while nothing
    disturbs it.
    """
    training, there = random_case(seed)
    there = replace(there, rates=replace(there.rates, dram_bytes_per_s=50e9))
    if alone is not None:
        there = replace(there, alone=faster(there.rates, alone))
    with suppress(CapacityError):
        decision = decide(training, there, subgroup_numel=training.model.numel // 64)

        assert decision.least_update_ns is not None
        assert decision.least_update_ns <= decision.best.timeline.update_ns


def faster(rates: Rates, times: float) -> Rates:
    drives = {
        name: DriveRates(
            read_bytes_per_s=times * (drive.read_bytes_per_s or 0),
            write_bytes_per_s=times * (drive.write_bytes_per_s or 0),
        )
        for name, drive in rates.nvme.items()
    }
    return replace(
        rates,
        h2d_bytes_per_s=times * (rates.h2d_bytes_per_s or 0),
        d2h_bytes_per_s=times * (rates.d2h_bytes_per_s or 0),
        host_update_params_per_s=times * (rates.host_update_params_per_s or 0),
        nvme=drives,
    )


def test_the_least_update_of_parameters_at_home_uploads_nothing() -> None:
    choice = Choice(strategy=HostOnly(), parameters=Tier.HOST, subgroup_numel=2**22)
    slow = replace(DESKTOP, h2d_bytes_per_s=1e9, nvme={})
    there = replace(means(0.55, 100), rates=slow)

    decision = decide(
        training_of(SMALL),
        there,
        strategy=choice.strategy,
        parameters=Tier.HOST,
        subgroup_numel=choice.subgroup_numel,
    )

    assert decision.least_update_ns is not None
    assert decision.least_update_ns <= decision.best.timeline.update_ns


def test_streaming_all_through_the_device_is_never_faster() -> None:
    there = means(3.0, 20)
    planner = Planner(training_of(SMALL), there)
    best = decide(training_of(SMALL), there).best

    streaming = planner.candidate(replace(best.choice, strategy=Interleaved(share=1.0)))

    assert best.timeline.ns <= streaming.timeline.ns


def test_the_update_of_the_timeline_is_the_simulated_plan() -> None:
    training = replace(training_of(SMALL), overlap=False)  # nothing else goes on beside it
    best = decide(training, means(3.0, 20)).best

    assert best.timeline.update_ns == simulate(best.plan.steps, DESKTOP.both_at_once()).end_ns


# --- a step ---------------------------------------------------------------------------------------


def timed(
    there: Means, choice: Choice, training: Training
) -> tuple[dict[str, int], dict[Lane, int]]:
    candidate = Planner(training, there).candidate(choice)
    timeline = time_step(candidate.plan, candidate.sizing, training, there)
    return {phase.name: phase.ns for phase in timeline.phases}, dict(timeline.moved)


def test_computing_takes_the_operations_over_their_rate() -> None:
    training = replace(training_of(SMALL, checkpointing=False), overlap=False)
    choice = Choice(strategy=DeviceOnly(), parameters=Tier.DEVICE, subgroup_numel=2**23)

    phases, moved = timed(PLENTY, choice, training)

    forward_s = 2 * SMALL.numel * 2048 / 80e12
    assert phases["forward"] / 1e9 == pytest.approx(forward_s, rel=1e-4)
    assert phases["backward"] / 1e9 == pytest.approx(2 * forward_s, rel=1e-4)
    assert moved == {}


SEEDS = [3, 11, 37, 40, 48]  # of machines with room


@lru_cache
def found_for(seed: int, case: Case = random_case) -> tuple[Candidate, Training, Means]:
    """Return a plan of a random case, whose training leaves open whether updates overlap."""
    training, there = case(seed)
    training = replace(training, overlap=None)
    found = Planner(training, there).look()
    assert found is not None, "this machine has room"
    return found, training, there


def test_a_step_that_is_timed_as_far_as_needed_is_the_quicker_of_both_ways(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cut_short = []

    class Noted(timeline._LongerStepError):
        def __init__(self) -> None:
            cut_short.append(self)

    monkeypatch.setattr(timeline, "_LongerStepError", Noted)
    for seed in SEEDS:
        found, training, there = found_for(seed)
        both = [
            time_step(found.plan, found.sizing, replace(training, overlap=overlap), there).ns
            for overlap in (True, False)
        ]

        quickest, _ = time_quickest_step(found.plan, found.sizing, training, there)

        assert quickest.ns == min(both), seed
    assert cut_short


def test_a_step_that_beats_a_plan_of_its_kind_is_timed_to_its_end() -> None:
    for seed in SEEDS:
        found, training, there = found_for(seed)
        ns = [
            time_step(found.plan, found.sizing, replace(training, overlap=overlap), there).ns
            for overlap in (True, False)
        ]

        beaten, _ = time_quickest_step(found.plan, found.sizing, training, there, alike_ns=min(ns))
        ahead, _ = time_quickest_step(
            found.plan, found.sizing, training, there, alike_ns=min(ns) - 1
        )

        assert beaten.ns == min(ns), seed
        assert ahead.ns in ns, seed


@pytest.mark.parametrize("case", [random_case, wired_case])
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_the_bound_that_cuts_a_step_short_is_never_longer_than_the_step(
    micro_batches: int, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    bounds: list[int] = []
    bounded = []
    earliest_end_ns = timeline._LeastStep.earliest_end_ns

    def noted(least: timeline._LeastStep) -> int:
        bounds.append(earliest_end_ns(least))
        return bounds[-1]

    monkeypatch.setattr(timeline._LeastStep, "earliest_end_ns", noted)
    for seed in SEEDS:
        found, training, there = found_for(seed, case)
        asked = replace(training, overlap=True, accumulation_steps=micro_batches)
        bounds.clear()

        step = time_step(found.plan, found.sizing, asked, there)

        assert bounds == sorted(bounds), seed
        assert all(ns <= step.ns for ns in bounds[-1:]), seed
        bounded.append(bool(bounds))
    assert any(bounded)


def slower_both_ways(means: Means) -> Means:
    """Return the means where links and drives do less of each way while both are in use."""
    rates, drives = means.rates, {}
    for name, drive in means.rates.nvme.items():
        one_way = drive.read_bytes_per_s, drive.write_bytes_per_s
        mixed = 0.7 * min(rate for rate in one_way if rate is not None)
        drives[name] = replace(drive, mixed_bytes_per_s=mixed)
    slower = replace(
        rates,
        duplex_h2d_bytes_per_s=0.6 * (rates.h2d_bytes_per_s or 1e9),
        duplex_d2h_bytes_per_s=0.7 * (rates.d2h_bytes_per_s or 1e9),
        nvme=drives,
    )
    return replace(means, rates=slower, alone=None)


@pytest.mark.parametrize("case", [random_case, varied_case, disturbed_case, wired_case])
def test_no_step_takes_less_than_lanes_that_never_wait(case: Case) -> None:
    bounded = []
    for seed in range(24):
        training, there = case(seed)
        found = Planner(training, there).look()
        if found is None:
            continue
        for overlap in (True, False):
            asked = replace(training, overlap=overlap)
            for means in (
                there,
                with_drives(there, 2.0),
                with_links(there, 3.0),
                slower_both_ways(there),
            ):
                step = time_step(found.plan, found.sizing, asked, means)
                least_ns = least_step_ns(found.plan, found.sizing, asked, means)
                assert least_ns <= step.ns, seed
                bounded.append(least_ns > 0)
    assert any(bounded)


def test_parameters_at_home_cross_the_link_for_forward_and_backward_and_gradients_come_back() -> (
    None
):
    there = means(0.55, 100)
    choice = Choice(strategy=HostOnly(), parameters=Tier.HOST, subgroup_numel=2**23)

    _, moved = timed(there, choice, training_of(SMALL))

    every = 2 * SMALL.numel
    candidate = Planner(training_of(SMALL), there).candidate(choice)
    stay = candidate.plan.demand.fetched  # of the last of the forward, for the backward
    assert every < moved[Lane.H2D] < 2 * every
    assert moved[Lane.H2D] >= 2 * every - stay
    assert moved[Lane.D2H] == every


def in_tiles(tiles: int, *, checkpointing: bool = False) -> Training:
    """Return a training of pairs of modules that compute so many tiles of the sequence each."""
    modules = tuple(
        replace(module, feed_forward=f"block {number // 2}")
        for number, module in enumerate(SMALL.modules)
    )
    known = Activations(blocks=4, hidden=8, elements=16, fp32=0, logits=0, inner=8)
    training = training_of(
        replace(SMALL, modules=modules, activations=known), checkpointing=checkpointing
    )
    return replace(training, tile_positions=2048 // tiles, overlap=False)


@pytest.mark.parametrize("there", [means(0.55, 100), means(0.55, 4, 100)], ids=["host", "drives"])
@pytest.mark.parametrize("overlap", [True, False])
def test_no_step_in_tiles_takes_less_than_lanes_that_never_wait(
    there: Means, overlap: bool
) -> None:
    training = replace(in_tiles(4), overlap=overlap)
    for means_now in (there, slower_both_ways(there)):
        found = Planner(training, means_now).look()
        assert found is not None

        least_ns = least_step_ns(found.plan, found.sizing, training, means_now)
        assert 0 < least_ns <= time_step(found.plan, found.sizing, training, means_now).ns


@pytest.mark.parametrize(("tiles", "checkpointing", "runs"), [(1, False, 2), (4, False, 3)])
def test_a_backward_runs_tiles_of_the_sequence_once_more(
    tiles: int, checkpointing: bool, runs: int
) -> None:
    choice = Choice(strategy=DeviceOnly(), parameters=Tier.DEVICE, subgroup_numel=2**23)

    phases, _ = timed(PLENTY, choice, in_tiles(tiles, checkpointing=checkpointing))

    assert phases["backward"] == pytest.approx(runs * phases["forward"], rel=1e-4)


def test_tiles_of_a_checkpointed_block_run_three_times() -> None:
    training = in_tiles(4, checkpointing=True)

    assert [training.runs_again(place) for place in range(8)] == [2] * 7 + [1]


@pytest.mark.parametrize(("device", "times"), [(0.55, 1), (0.4, 4)])
def test_each_tile_fetches_what_does_not_stay_for_the_next(device: float, times: int) -> None:
    there = means(device, 100)
    choice = Choice(strategy=HostOnly(), parameters=Tier.HOST, subgroup_numel=2**23)
    candidate = Planner(in_tiles(4), there).candidate(choice)
    pair = 2 * 80_000_000

    _, moved = timed(there, choice, in_tiles(4))

    every = 2 * SMALL.numel
    assert (candidate.plan.demand.fetched >= pair) == (times == 1)
    if times == 1:
        assert moved[Lane.H2D] <= 2 * every
    else:  # in the backward, each tile runs again first
        assert 11 * every <= moved[Lane.H2D] <= 12 * every
    assert moved[Lane.D2H] == every


def test_gradients_of_tiles_are_sums_of_all_weights_of_a_block() -> None:
    one = 40_000_000

    assert in_tiles(1).gradients_in_the_making() == one
    assert in_tiles(4).gradients_in_the_making() == 3 * one


def test_what_stays_on_the_device_crosses_no_link_but_with_new_values() -> None:
    choice = Choice(strategy=HostOnly(), parameters=Tier.DEVICE, subgroup_numel=2**23)

    _, moved = timed(PLENTY, choice, training_of(SMALL))

    assert moved == {Lane.H2D: 2 * SMALL.numel, Lane.D2H: 2 * SMALL.numel}


def test_all_on_drives_moves_the_bytes_that_decision_0010_counts() -> None:
    there = means(0.55, 0.5, 100)
    choice = Choice(strategy=NvmeStreamed(), parameters=Tier.NVME, subgroup_numel=2**20)
    candidate = Planner(training_of(SMALL), there).candidate(choice)
    _, moved = timed(there, choice, training_of(SMALL))

    rests = sum(
        each.numel
        for each in candidate.sizing.subgroups
        if each.index in candidate.plan.resting.states
    )
    assert candidate.plan.resting.gradients == 1
    # 12 B of states, 2 of gradients; parameters twice, less what stays between forward and
    # backward.
    least = 14 * rests + 2 * SMALL.numel
    assert least <= moved[Lane.NVME_READ] <= least + 2 * SMALL.numel
    assert moved[Lane.NVME_WRITE] == pytest.approx(14 * rests + 2 * SMALL.numel, rel=1e-6)


def test_an_update_from_drives_hides_behind_the_next_forward() -> None:
    there = means(0.55, 0.5, 100)
    choice = Choice(strategy=NvmeStreamed(), parameters=Tier.NVME, subgroup_numel=2**22)

    phases, _ = timed(there, choice, training_of(SMALL))

    assert list(phases) == ["update and forward", "backward"]


def test_an_update_in_memory_hides_behind_the_next_forward_on_a_device_of_its_own_memory() -> None:
    choice = Choice(strategy=HostOnly(), parameters=Tier.DEVICE, subgroup_numel=2**23)
    beside, after = (
        Planner(replace(training_of(SMALL), overlap=overlap), PLENTY).candidate(choice).timeline
        for overlap in (True, False)
    )

    assert [each.name for each in beside.phases] == ["update and forward", "backward"]
    assert [each.name for each in after.phases] == ["update", "forward", "backward"]
    update_ns, forward_ns, _ = (each.ns for each in after.phases)
    assert max(update_ns, forward_ns) <= beside.phases[0].ns < 1.05 * max(update_ns, forward_ns)
    assert beside.moved == after.moved


def test_where_an_update_is_better_ended_first_the_plan_says_so_and_not_where_nothing_is_known_of_computing() -> (
    None
):
    choice = Choice(
        strategy=Interleaved(share=0.5, resident=0.2),
        parameters=Tier.HOST,
        subgroup_numel=SMALL.numel // 64,
    )
    there = replace(means(100, 100), flops_per_s=1e16)  # a short forward
    found = {
        overlap: Planner(replace(training_of(SMALL), overlap=overlap), there).candidate(choice)
        for overlap in (True, False, None)
    }

    assert found[False].timeline.ns < found[True].timeline.ns
    assert (found[None].timeline, found[None].overlap) == (found[False].timeline, False)
    unknown = Planner(replace(training_of(SMALL), overlap=None), replace(there, flops_per_s=None))
    assert unknown.candidate(choice).overlap


@pytest.mark.parametrize(
    ("tier", "strategy"),
    [
        (Tier.NVME, NvmeStreamed()),
        (Tier.HOST, NvmeStreamed()),
        (Tier.HOST, HostOnly()),
        (Tier.DEVICE, HostOnly()),
        (Tier.DEVICE, Interleaved(share=0.3)),
    ],
)
@pytest.mark.parametrize("flops", [1e12, 80e12, 1e16])
def test_overlap_left_open_is_as_short_as_the_shorter_of_both(
    tier: Tier, strategy: Strategy, flops: float
) -> None:
    choice = Choice(strategy=strategy, parameters=tier, subgroup_numel=SMALL.numel // 64)
    there = replace(means(1.5 if tier is not Tier.DEVICE else 4, 3.5, 100), flops_per_s=flops)
    there = replace(there, budget=replace(there.budget, host=(8 if tier is Tier.HOST else 6) * GB))
    auto, beside, after = (
        Planner(replace(training_of(SMALL), overlap=overlap), there).candidate(choice).timeline.ns
        for overlap in (None, True, False)
    )

    assert auto == min(beside, after)


@pytest.mark.parametrize(("accumulation", "nbytes"), [(1, 2), (4, 2 + 4)])
def test_the_host_has_room_for_sums_of_gradients_only_where_there_are_sums(
    accumulation: int, nbytes: int
) -> None:
    choice = Choice(strategy=HostOnly(), parameters=Tier.HOST, subgroup_numel=SMALL.numel // 64)
    planner = Planner(training_of(SMALL, accumulation=accumulation), PLENTY)

    host = planner.candidate(choice).plan.demand.host
    assert host == pytest.approx((12 + 2 + nbytes) * SMALL.numel, rel=1e-3)


@pytest.mark.parametrize("unified", [True, False])
def test_it_does_not_where_that_is_one_memory_or_where_ranks_gather_what_stays_on_the_device(
    unified: bool,
) -> None:
    there = means(0 if unified else 100, 100, unified=unified, ranks=1 if unified else 2)
    choice = Choice(strategy=HostOnly(), parameters=Tier.DEVICE, subgroup_numel=2**23)

    phases, _ = timed(there, choice, training_of(SMALL))

    assert list(phases) == ["update", "forward", "backward"]


def test_further_micro_batches_add_forwards_and_backwards_and_no_updates() -> None:
    one, four = (
        Planner(replace(training_of(SMALL, accumulation=count), overlap=False), PLENTY).candidate(
            Choice(strategy=HostOnly(), parameters=Tier.DEVICE, subgroup_numel=2**23)
        )
        for count in (1, 4)
    )

    passes = sum(phase.ns for phase in four.timeline.phases if phase.name != "update")
    assert four.timeline.update_ns == one.timeline.update_ns
    assert four.timeline.repeated_ns == pytest.approx(3 * passes, rel=0.05)


@pytest.mark.parametrize("seed", [7, 11, 30, 37, 38, 41, 46, 50])
def test_a_step_takes_at_least_as_long_as_each_link_moves_its_bytes(seed: int) -> None:
    training, there = random_case(seed)
    training = replace(training, accumulation_steps=16)
    slowly = (there.rates.d2h_bytes_per_s or 0) / 20
    there = replace(there, rates=replace(there.rates, d2h_bytes_per_s=slowly))
    found = Planner(training, there).look()
    assert found is not None, "this machine has room"
    timeline = time_step(found.plan, found.sizing, training, there)
    links = LaneClocks(there.rates)

    assert timeline.moved
    for lane, nbytes in timeline.moved.items():
        assert timeline.ns >= links.duration_ns(lane, nbytes), lane


@pytest.mark.parametrize("overlap", [None, False])
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("host", [0.4, 0.5, 0.7])
def test_each_phase_takes_as_long_as_the_drives_read_and_write_its_bytes(
    host: float, accumulation: int, overlap: bool | None
) -> None:
    """A backward reads parameters and writes gradients, a forward reads beside an update, or when
    it has ended.
    """
    drive = DriveRates(read_bytes_per_s=2e9, write_bytes_per_s=2e9, mixed_bytes_per_s=2e9)
    there = means(0.55, host, 100)
    there = replace(there, rates=replace(there.rates, nvme={"a": drive}))
    training = replace(training_of(SMALL, accumulation=accumulation), overlap=overlap)
    timeline = decide(training, there, parameters=Tier.NVME).best.timeline

    for name, begin_ns, end_ns in timeline.cuts:
        read, written = (
            sum(
                span.nbytes
                for span in timeline.spans
                if span.lane is lane and begin_ns <= span.start_ns < end_ns
            )
            for lane in (Lane.NVME_READ, Lane.NVME_WRITE)
        )
        least_s = drive.seconds(read, written)
        assert least_s
        assert end_ns - begin_ns >= 0.999e9 * least_s, name


def test_a_backward_takes_as_long_as_links_move_its_bytes_both_ways() -> None:
    rates = replace(DESKTOP, duplex_h2d_bytes_per_s=1e9, duplex_d2h_bytes_per_s=1e9, nvme={})
    there = replace(means(0.55, 100), rates=rates)
    best = decide(training_of(SMALL), there, strategy=HostOnly(), parameters=Tier.HOST).best
    timeline = best.timeline

    (begin_ns, end_ns), moved = timeline.cuts[-1][1:], dict.fromkeys(Lane, 0)
    for span in timeline.spans:
        if span.start_ns >= begin_ns:
            moved[span.lane] += span.nbytes
    both = min(moved[Lane.H2D], moved[Lane.D2H])
    rest = moved[Lane.H2D] + moved[Lane.D2H] - 2 * both
    assert both
    assert end_ns - begin_ns >= 0.99e9 * (both / 1e9 + rest / 25e9)


def test_what_a_forward_fetches_disturbs_the_update_beside_it() -> None:
    there = replace(means(0.55, 100), rates=replace(DESKTOP, nvme={}))
    there = replace(there, alone=faster(there.rates, 2.0))
    choice = Choice(strategy=HostOnly(), parameters=Tier.HOST, subgroup_numel=2**22)
    beside, apart = (
        Planner(replace(training_of(SMALL), overlap=overlap), there).candidate(choice).timeline
        for overlap in (True, False)
    )

    assert apart.update_busy_ns[Lane.HOST] == pytest.approx(1e9 * SMALL.numel / 3e9, rel=0.01)
    assert beside.update_busy_ns[Lane.HOST] > 1.1 * apart.update_busy_ns[Lane.HOST]


@pytest.mark.parametrize("case", [random_case, varied_case])
def test_what_may_take_less_is_what_the_best_estimate_is_less_than(case: Case) -> None:
    for seed in range(12):
        planner = Planner(*case(seed))
        numel = max(planner.trained_numel // 256, 1)
        least_ns = planner.least_estimate_ns(numel)

        for ns in (0.0, 0.5 * least_ns, least_ns, 1.001 * least_ns, 2 * least_ns, float("inf")):
            assert planner.may_take_less(numel, ns) == (least_ns < ns), (seed, ns)


def test_an_estimate_knows_that_an_update_reads_masters_of_32_bits_from_drives() -> None:
    decision = decide(training_of(SMALL, bits=32), means(0.85, 8, 100), parameters=Tier.NVME)
    best = decision.best

    estimate_ns = decision.planner.least_estimate_ns(best.choice.subgroup_numel)
    assert estimate_ns == pytest.approx(best.timeline.ns, rel=0.15)


def test_rates_among_the_settings_are_those_that_the_engine_lets_drives_share() -> None:
    """Without a mixed rate, halves of them would be halved once more."""
    there = means(3.0, 4, 100)
    strategy = NvmeStreamed(update=Interleaved(share=0.25))
    found = report_of(decide(training_of(SMALL), there, strategy=strategy)).settings

    rates = Rates.from_mapping(found["rates"])
    assert rates.nvme == there.rates.nvme
    assert rates.both_at_once() == there.rates.both_at_once()


def test_an_update_takes_half_of_a_drives_mixed_rate_each_way() -> None:
    drive = DriveRates(read_bytes_per_s=7e9, write_bytes_per_s=5e9, mixed_bytes_per_s=6e9)
    rates = replace(DESKTOP, duplex_h2d_bytes_per_s=20e9, nvme={"a": drive}).both_at_once()

    found = rates.nvme["a"]
    assert (found.read_bytes_per_s, found.write_bytes_per_s) == (3e9, 3e9)
    assert (rates.h2d_bytes_per_s, rates.d2h_bytes_per_s) == (20e9, 25e9)


def test_without_a_mixed_rate_reads_and_writes_of_a_drive_take_turns() -> None:
    drive = DriveRates(read_bytes_per_s=6e9, write_bytes_per_s=3e9)
    both = drive.both_at_once()

    assert both.read_bytes_per_s == both.write_bytes_per_s == pytest.approx(2e9)
    assert drive.seconds(2 * 10**9, 2 * 10**9) == pytest.approx(1.0)  # as where they are added up


def test_each_op_costs_what_starting_it_costs() -> None:
    choice = Choice(strategy=HostOnly(), parameters=Tier.DEVICE, subgroup_numel=SMALL.numel // 64)
    started = replace(DESKTOP, host_start_s=4e-3)
    training = replace(training_of(SMALL), overlap=False)

    plain, costly = (
        Planner(training, replace(PLENTY, rates=rates)).candidate(choice).timeline
        for rates in (DESKTOP, started)
    )
    count = len(Planner(training, PLENTY).candidate(choice).plan.steps.subgroups)
    assert costly.update_ns - plain.update_ns == pytest.approx(count * 4e6, rel=0.02)


def test_the_search_takes_fewer_subgroups_where_each_costs_much() -> None:
    rates = replace(DESKTOP, nvme={}, host_start_s=4e-3, copy_start_s=4e-3, device_start_s=4e-3)
    there = replace(means(3.0, 20), rates=rates)

    plain = decide(training_of(SMALL), means(3.0, 20)).best
    costly = decide(training_of(SMALL), there).best
    assert len(costly.plan.steps.subgroups) < len(plain.plan.steps.subgroups)


def test_a_rate_that_the_plan_needs_is_asked_for() -> None:
    there = replace(means(2.0, 2.5, 100), rates=replace(DESKTOP, nvme={}))

    with pytest.raises(ConfigError, match=r"Rates\.nvme\.read_bytes_per_s"):
        decide(training_of(SMALL), there)


# --- the report -----------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [16, 32])
@pytest.mark.parametrize("unified", [False, True])
@pytest.mark.parametrize(("host", "nvme"), [(30.0, 0.0), (30.0, 100.0), (4.0, 100.0), (2.6, 100.0)])
def test_every_byte_of_a_tier_is_for_something(
    bits: int, unified: bool, host: float, nvme: float
) -> None:
    training = training_of(SMALL, bits=bits)
    decision = decide(training, means(0 if unified else 3.0, host, nvme, unified=unified))
    report = report_of(decision)

    demand = decision.best.plan.demand
    io_bytes = decision.means.io_bytes if demand.nvme else 0
    computes = demand.device + demand.staying
    assert report.held(Tier.NVME) == demand.nvme
    on_host = demand.host + demand.window + io_bytes
    assert report.held(Tier.HOST, of_pytorch=False) == on_host + (computes if unified else 0)
    assert report.held(Tier.DEVICE, of_pytorch=False) == (0 if unified else computes)
    where = Tier.HOST if unified else Tier.DEVICE
    assert report.held(where, of_pytorch=True) == decision.best.beside - demand.staying
    assert all(each.nbytes > 0 for each in report.holdings)
    ends = [each for each in report.holdings if each.what.startswith("ends of pages")]
    assert sum(each.nbytes for each in ends) <= 0.03 * sum(each.nbytes for each in report.holdings)


def test_the_wear_follows_from_what_is_written() -> None:
    decision = decide(training_of(SMALL), means(2.0, 2.5, 100))
    wear = report_of(decision, rated_bytes=1200 * TB).wear

    assert wear is not None
    assert wear.years is not None
    written = decision.best.timeline.moved[Lane.NVME_WRITE]
    assert wear.written_per_day == pytest.approx(written * 86400 / decision.best.step_s)
    assert wear.years == pytest.approx(1200e12 / wear.written_per_day / 365.25)


def test_nothing_wears_out_where_no_drive_is_used() -> None:
    assert report_of(decide(training_of(SMALL), PLENTY)).wear is None


def test_all_ranks_wear_the_drives() -> None:
    decision = decide(training_of(SMALL), means(2.0, 4.0, 100, ranks=2), strategy=NvmeStreamed())
    wear = report_of(decision).wear

    assert wear is not None
    written = 2 * decision.best.timeline.moved[Lane.NVME_WRITE]  # of one rank each
    assert wear.written_per_day == pytest.approx(written * 86400 / decision.best.step_s)


def test_a_phase_names_what_binds_it() -> None:
    phases = {
        each.name: each
        for each in report_of(decide(training_of(SMALL), means(2.0, 2.5, 100))).phases
    }

    update = next(each for name, each in phases.items() if name.startswith("update"))
    assert update.binding in {"reads of the drives", "writes to the drives"}
    assert update.utilisation[update.binding] > 0.5
    assert phases["backward"].utilisation["compute"] > 0


def test_the_report_says_how_busy_every_lane_is_with_the_update_itself() -> None:
    decision = decide(replace(training_of(SMALL), overlap=False), means(3.0, 20))

    simulated = simulate(decision.best.plan.steps, DESKTOP.both_at_once())
    assert report_of(decision).update_utilisation == simulated.utilisation


def test_a_report_in_json_has_the_plan_and_settings_that_the_engine_takes() -> None:
    decision = decide(training_of(SMALL), means(3.0, 20))
    mapping = report_of(decision).to_mapping()

    assert mapping["plan"] == decision.best.plan.steps.to_mapping()
    settings = mapping["settings"]
    assert isinstance(settings, dict)
    assert settings["parameters"] == decision.best.choice.parameters.value
    assert settings["strategy"] == decision.best.choice.strategy.to_plain()


# --- ranks ----------------------------------------------------------------------------------------


def test_ranks_divide_the_host_the_drives_and_the_model() -> None:
    one = decide(training_of(SMALL), means(2.0, 1.5, 50)).best
    two = decide(training_of(SMALL), means(2.0, 3, 100, ranks=2)).best

    assert sum(each.numel for each in two.plan.steps.subgroups) == SMALL.numel // 2
    assert two.budget.host * 2 == 3 * GB
    assert two.plan.demand.nvme < one.plan.demand.nvme


def test_gradients_of_several_ranks_are_sums_in_fp32() -> None:
    choice = Choice(strategy=HostOnly(), parameters=Tier.DEVICE, subgroup_numel=2**22)
    one, two = (
        decide(
            training_of(SMALL),
            means(5.0, 40, ranks=ranks),
            strategy=choice.strategy,
            parameters=Tier.DEVICE,
        )
        for ranks in (1, 2)
    )

    kept = [{each.what: each.nbytes for each in report_of(found).holdings} for found in (one, two)]
    assert [each["gradients"] for each in kept] == [2 * SMALL.numel, 4 * SMALL.numel // 2]
    assert [found.best.timeline.moved[Lane.D2H] for found in (one, two)] == [
        each["gradients"] for each in kept
    ]


@pytest.mark.parametrize("seed", [0, 2, 17, 24, 29, 38])
def test_it_picks_what_is_near_the_best_where_ranks_wait_for_one_another(seed: int) -> None:
    assert slower_than_the_best(seed, wired_case) <= 1.03


def test_what_tells_that_a_step_takes_longer_knows_what_ranks_exchange() -> None:
    choice = Choice(strategy=HostOnly(), parameters=Tier.HOST, subgroup_numel=2**22)
    there = replace(means(5.0, 40, ranks=4), wire_bytes_per_s=1e9)
    found = Planner(training_of(SMALL), there).candidate(choice)

    step = time_step(found.plan, found.sizing, training_of(SMALL), there)

    assert step.gathering_ns > 0.9 * step.ns
    assert least_step_ns(found.plan, found.sizing, training_of(SMALL), there) > 0.9 * step.ns


def test_a_backward_gathers_the_next_module_while_one_computes() -> None:
    choice = Choice(strategy=DeviceOnly(), parameters=Tier.DEVICE, subgroup_numel=2**22)
    there = replace(means(100, 100, ranks=4), flops_per_s=50e12)

    def backward_ns(wire: float | None) -> int:
        given = replace(there, wire_bytes_per_s=wire)
        timeline = Planner(training_of(SMALL), given).candidate(choice).timeline
        return next(phase.ns for phase in timeline.phases if phase.name == "backward")

    computing, both, exchanging = (backward_ns(wire) for wire in (None, 40e9, 4e9))
    # Gathers and reductions take a tenth of those on the slow wire.
    assert computing < both < computing + 0.1 * exchanging


def test_updates_in_small_subgroups_hide_behind_what_ranks_gather() -> None:
    # As ranks wait for one another in a forward, the host may update meanwhile.
    there = replace(means(0.35, 40, ranks=4), wire_bytes_per_s=1e9)
    there = replace(there, rates=replace(there.rates, host_update_params_per_s=0.2e9))

    best = decide(replace(training_of(SMALL), overlap=None), there).best

    assert best.overlap
    apart = replace(training_of(SMALL), overlap=False)
    assert best.timeline.ns < 0.9 * time_step(best.plan, best.sizing, apart, there).ns


def test_without_a_rate_between_ranks_the_output_says_what_is_not_timed() -> None:
    notes = report_of(decide(training_of(SMALL), means(5.0, 40, ranks=4))).notes

    assert any("gathers between devices are not timed" in note for note in notes)


def test_ranks_wait_for_what_they_gather_as_far_as_computing_hides_none() -> None:
    choice = Choice(strategy=HostOnly(), parameters=Tier.DEVICE, subgroup_numel=2**22)
    there = replace(means(5.0, 40, ranks=4), flops_per_s=1e16)

    untimed, slow, slower = (
        Planner(training_of(SMALL), replace(there, wire_bytes_per_s=wire))
        .candidate(choice)
        .timeline
        for wire in (None, 2e9, 1e9)
    )
    assert untimed.gathering_ns == 0
    assert slower.gathering_ns == 2 * slow.gathering_ns
    assert slower.ns - slow.ns == pytest.approx(slow.gathering_ns, rel=0.05)
    assert untimed.ns < slow.ns


# --- what does not fit ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "host", "nvme"), [(1.2, 1.0, 0.0), (1.2, 1.5, 1.0), (0.05, 50.0, 0.0)]
)
def test_every_remedy_is_enough(device: float, host: float, nvme: float) -> None:
    training, there = training_of(SMALL), means(device, host, nvme)
    with pytest.raises(CapacityError):
        decide(training, there)
    refusal = explain_refusal(training, there)

    larger = [each for each in refusal.remedies if each.change.count("more of")]
    assert larger
    for remedy in larger:
        budget = there.budget
        more = remedy.more
        raised = ResolvedBudget(
            device=budget.device + more.device,
            host=budget.host + more.host,
            nvme={"a": sum(budget.nvme.values()) + more.nvme} if budget.nvme or more.nvme else {},
        )
        # raises where it does not fit
        decide(training, replace(there, budget=raised, rates=DESKTOP))


def test_checkpointing_is_a_remedy_where_activations_are_too_many() -> None:
    training = replace(training_of(preset("llama-3.2-1b"), checkpointing=False), batch=2)
    there = means(14, 60)
    with pytest.raises(CapacityError):
        decide(training, there)

    changes = [each.change for each in explain_refusal(training, there).remedies]

    assert any(change.startswith("checkpoint activations") for change in changes)
    decide(replace(training, checkpointing=True), there)  # raises where it does not fit


def test_a_wrong_question_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="batch: expected a whole number"):
        replace(training_of(SMALL), batch=0)
    with pytest.raises(ConfigError, match="at most 1024 tokens"):
        replace(training_of(preset("gpt2")), sequence=2048)
    with pytest.raises(ConfigError, match="ranks"):
        means(1, 1, ranks=0)
    with pytest.raises(ConfigError, match=r"budget\.nvme"):
        decide(training_of(SMALL), PLENTY, strategy=NvmeStreamed())


def test_a_large_model_on_a_small_machine_is_planned() -> None:
    there = replace(means(22, 56, 1900), io_bytes=16 << 20)
    report = report_of(decide(training_of(preset("llama-3-70b")), there))

    assert report.settings["parameters"] == "nvme"
    assert report.held(Tier.NVME) > 900 * GiB
    assert report.held(Tier.DEVICE) <= 22 * GB
    assert Fraction(report.moved[Lane.NVME_WRITE], report.parameters) > 12
    assert Limits(resident_bytes=0, staging_bytes=0).host_buffers >= report.host_buffers


def test_a_search_with_further_micro_batches_takes_no_more_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    passes = []
    timed = timeline.time_quickest_step

    def counted(*given: Any, **more: Any) -> Any:
        # The simulator runs one further micro-batch, which stands for all.
        passes.append(min(training.accumulation_steps, 2))
        return timed(*given, **more)

    monkeypatch.setattr("infinity_engine.sim.candidate.time_quickest_step", counted)
    worked = {}
    for micro_batches in (1, 4):
        passes.clear()
        training = replace(training_of(preset("llama-3-70b")), accumulation_steps=micro_batches)
        decide(training, means(24, 384, 8000), parameters=Tier.NVME)
        worked[micro_batches] = sum(passes)

    assert worked[4] <= 1.2 * worked[1]
