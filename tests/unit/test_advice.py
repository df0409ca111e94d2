"""What follows from a plan: the next purchase, what a little more is worth, error bars, a whole
run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from infinity_engine.advice.advising import advise
from infinity_engine.advice.course import Prices, TrainingRun, forecast
from infinity_engine.advice.doubt import (
    RateSource,
    _changed,
    least_retimed_ns,
    retimed,
    step_range,
)
from infinity_engine.advice.means import (
    with_compute,
    with_drives,
    with_faster_writes,
    with_links,
    with_updates,
)
from infinity_engine.advice.purchases import Purchase, _more, purchases, worths
from infinity_engine.placement.training import Means, beside_inputs
from infinity_engine.plan import (
    BlockRates,
    BlockShape,
    ComputeRate,
    DriveRates,
    HostOnly,
    Lane,
    Rates,
    ResolvedBudget,
    Tier,
)
from infinity_engine.sim.planner import Decision, Planner, decide
from infinity_engine.sim.presets import preset
from infinity_engine.sim.report import report_of
from infinity_engine.sim.timeline import StepTimeline
from infinity_engine.units import DAY_S, GB, GiB
from support.plannings import (
    equal_questions_searched_once,
    model_of,
    random_case,
    training_of,
    varied_case,
)

SMALL = model_of(*([40_000_000] * 8))
RATES = Rates(
    h2d_bytes_per_s=25e9,
    d2h_bytes_per_s=25e9,
    host_update_params_per_s=2e9,
    device_update_params_per_s=3e10,
    nvme={"a": DriveRates(read_bytes_per_s=7e9, write_bytes_per_s=2e9)},
)


def decided(device: float, host: float, nvme: float = 0) -> Decision:
    drives = {"a": round(nvme * GB)} if nvme else {}
    budget = ResolvedBudget(device=round(device * GB), host=round(host * GB), nvme=drives)
    means = Means(budget=budget, rates=RATES, flops_per_s=80e12)
    return decide(training_of(SMALL), means)


@pytest.fixture(scope="module", autouse=True)
def equal_questions_are_searched_once() -> Iterator[None]:
    with equal_questions_searched_once():
        yield


@pytest.fixture(scope="module")
def on_drives() -> Decision:
    """Return a plan whose states rest on drives for want of RAM."""
    return decided(2.0, 2.5, 100)


def named(found: tuple[Purchase, ...], what: str) -> Purchase:
    [purchase] = [purchase for purchase in found if what in purchase.what]
    return purchase


# --- purchases ------------------------------------------------------------------------------------


def test_more_ram_ends_the_writes_where_states_then_fit(on_drives: Decision) -> None:
    bought = named(purchases(on_drives), "more RAM")

    assert on_drives.best.timeline.moved[Lane.NVME_WRITE] > 0
    assert bought.written_per_day == 0
    assert bought.step_s < 0.5 * on_drives.best.step_s


def test_a_purchase_is_what_a_whole_search_finds(on_drives: Decision) -> None:
    bought = named(purchases(on_drives), "drives again")
    budget = replace(on_drives.means.budget, nvme={"a": 200 * GB})
    means = replace(with_drives(on_drives.means, 2.0), budget=budget)

    assert bought.step_s == pytest.approx(decide(on_drives.training, means).best.step_s, rel=0.05)


@pytest.mark.parametrize(
    ("seed", "what", "change"),
    [
        (3, "link", lambda means: with_links(means, 2.0)),
        (11, "GPU memory", lambda means: with_device(means, 2)),
        (22, "GPU memory", lambda means: with_device(means, 2)),
    ],
)
def test_a_purchase_for_which_small_subgroups_are_best_is_what_a_whole_search_finds(
    seed: int, what: str, change: Callable[[Means], Means]
) -> None:
    training, means = random_case(seed)

    bought = named(purchases(decide(training, means)), what)
    assert bought.step_s == pytest.approx(decide(training, change(means)).best.step_s, rel=0.03)


def with_device(means: Means, times: int) -> Means:
    return replace(means, budget=replace(means.budget, device=times * means.budget.device))


@pytest.mark.parametrize("seed", range(1, 5))
def test_no_purchase_is_a_loss(seed: int) -> None:
    decision = decide(*random_case(seed))

    for purchase in purchases(decision):
        assert purchase.step_s <= decision.best.step_s
        assert 0 <= purchase.saved <= 1


def test_purchases_come_best_first_and_those_without_gain_say_so() -> None:
    found = purchases(decided(100, 100))

    assert [it.saved for it in found] == sorted((it.saved for it in found), reverse=True)
    assert named(found, "more RAM").saved == 0
    assert named(found, "computes twice as fast").saved > 0.1


def test_a_purchase_keeps_to_what_was_asked_for() -> None:
    budget = ResolvedBudget(device=3 * GB, host=20 * GB)
    means = Means(budget=budget, rates=replace(RATES, nvme={}), flops_per_s=80e12)
    asked = decide(training_of(SMALL), means, strategy=HostOnly(), parameters=Tier.DEVICE)
    run = forecast(asked, TrainingRun(steps=80))

    # Nothing of this plan has use for more memory; without the strategy another plan would.
    assert named(purchases(asked), "GPU memory").saved == 0
    assert named(purchases(asked), "RAM").saved == 0
    more = replace(training_of(SMALL), accumulation_steps=8)
    alike = decide(more, means, strategy=HostOnly(), parameters=Tier.DEVICE).best
    assert run.accumulated is not None
    assert run.accumulated.seconds >= 0.999 * run.accumulated.steps * alike.step_s


def test_without_drives_and_without_a_gpu_neither_is_offered() -> None:
    means = Means(budget=ResolvedBudget(device=0, host=20 * GB, nvme={}), rates=RATES, unified=True)

    found = purchases(decide(training_of(SMALL), means))
    assert [purchase.what for purchase in found] == ["16 GiB more RAM"]


def test_what_a_gb_per_s_is_worth_is_what_it_saves(on_drives: Decision) -> None:
    """The drives write 2 GB/s, so one GB/s more is half. Ten times the saving of 5% more would be
    half too much.
    """
    [writes] = [it for it in worths(on_drives) if "writes" in it.unit]
    faster = decide(on_drives.training, with_faster_writes(on_drives.means, 1.5)).best

    assert writes.seconds == pytest.approx(on_drives.best.step_s - faster.step_s, rel=0.1)


def test_no_worth_is_asked_of_a_host_budget_of_nothing() -> None:
    means = Means(budget=ResolvedBudget(device=100 * GB, host=0, nvme={}), rates=RATES)

    assert dict(_more(means, 0.05)).keys() == {"GiB of GPU memory", "GB/s of the link"}


def test_what_saves_nothing_is_worth_nothing() -> None:
    assert worths(decided(100, 100)) == ()


# --- error bars -----------------------------------------------------------------------------------


def test_a_step_lies_within_its_range_which_is_narrow_for_measured_rates(
    on_drives: Decision,
) -> None:
    best, training, means = on_drives.best, on_drives.training, on_drives.means
    width = {}
    for source in RateSource:
        found = step_range(best, training, means, source)
        assert found.least_s <= best.step_s <= found.most_s
        width[source] = found.most_s / found.least_s

    assert width[RateSource.MEASURED] < width[RateSource.GIVEN] < width[RateSource.PUBLISHED]


def test_a_range_is_about_what_the_same_plan_takes_at_the_slow_and_the_fast_rates() -> None:
    hardly_waits, waits = decide(*random_case(12)), decide(*varied_case(21))
    for decision in (hardly_waits, waits):
        best, training, means = decision.best, decision.training, decision.means
        part = least_retimed_ns(best, training, means) / best.timeline.ns
        assert (part > 0.95) is (decision is hardly_waits)
        found = step_range(best, training, means, RateSource.PUBLISHED)
        for at, expected_s in enumerate((found.most_s, found.least_s)):
            there = retimed(best, training, _changed(means, at))
            assert expected_s == pytest.approx(there.ns / 1e9, rel=0.1)


def test_todays_plan_is_timed_again_only_where_it_may_be_the_shorter_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timed: list[StepTimeline] = []

    def noted(*given: Any) -> StepTimeline:
        timed.append(retimed(*given))
        return timed[-1]

    monkeypatch.setattr("infinity_engine.advice.purchases.retimed", noted)
    decisions = [decide(*random_case(seed)) for seed in (2, 3, 22)]
    found = [purchases(decision) for decision in decisions]
    needed = len(timed)

    monkeypatch.setattr("infinity_engine.advice.purchases.least_retimed_ns", lambda *_: 0)
    assert [purchases(decision) for decision in decisions] == found
    assert 0 < needed < len(timed) - needed


@pytest.mark.parametrize("parameters", [Tier.DEVICE, Tier.NVME])
def test_a_purchase_for_one_memory_needs_no_rates_of_links(parameters: Tier) -> None:
    rates = Rates(host_update_params_per_s=1e9, nvme=RATES.nvme)
    budget = ResolvedBudget(device=0, host=round(3 * GB), nvme={"a": round(100 * GB)})
    means = Means(budget=budget, rates=rates, flops_per_s=80e12, unified=True)
    decision = decide(training_of(SMALL), means, parameters=parameters)

    found = advise(decision, RateSource.PUBLISHED)
    assert named(found.purchases, "drives again").step_s <= decision.best.step_s
    assert found.step_range is not None


def test_ranges_know_of_what_ranks_exchange() -> None:
    """It binds the step, so that faster computing alone does not make it shorter."""
    means = replace(decided(100, 100).means, ranks=2, wire_bytes_per_s=1e9)
    decision = decide(training_of(SMALL), means)

    least_ns = least_retimed_ns(decision.best, decision.training, means)
    assert 0.95 * decision.best.timeline.ns < least_ns <= decision.best.timeline.ns
    found = step_range(decision.best, decision.training, means, RateSource.PUBLISHED)
    assert found.least_s > 0.95 * decision.best.step_s  # no wire was seen to be faster
    assert found.most_s > 1.8 * decision.best.step_s  # and it may be half as fast


def test_a_slow_host_widens_the_range_of_a_plan_that_it_binds() -> None:
    decision = decided(3.0, 20)
    slow = decide(decision.training, with_updates(decision.means, 0.1))

    ranges = [
        step_range(it.best, it.training, it.means, RateSource.PUBLISHED) for it in (decision, slow)
    ]
    assert ranges[1].most_s / slow.best.step_s > ranges[0].most_s / decision.best.step_s


def test_without_a_rate_of_computing_published_rates_give_the_updates_range() -> None:
    means = replace(with_updates(decided(3.0, 20).means, 0.01), flops_per_s=None)
    slow = decide(training_of(SMALL), means, strategy=HostOnly())
    planned_s = slow.best.timeline.update_ns / 1e9

    found = advise(slow, RateSource.PUBLISHED).update_range
    assert found is not None
    # the host's update binds it, and may take 1 to 2.5 times as long as published
    assert found == pytest.approx((planned_s, 2.5 * planned_s), rel=0.1)


# --- a whole run ----------------------------------------------------------------------------------


def test_a_run_of_tokens_is_whole_steps_with_their_writes(on_drives: Decision) -> None:
    tokens_of_step = on_drives.training.tokens
    run = forecast(on_drives, TrainingRun(tokens=10 * tokens_of_step + 1))

    assert run.steps == 11
    assert run.tokens == 11 * tokens_of_step
    assert run.seconds == pytest.approx(11 * on_drives.best.step_s)
    assert run.written == 11 * on_drives.best.timeline.moved[Lane.NVME_WRITE]
    assert (run.kwh, run.cost) == (None, None)


def test_energy_and_cost_follow_from_prices(on_drives: Decision) -> None:
    hours = 100 * on_drives.best.step_s / 3600
    prices = Prices(watts=500, per_kwh=0.4, per_hour=2.0)
    run = forecast(on_drives, TrainingRun(steps=100, prices=prices))

    assert run.kwh == pytest.approx(0.5 * hours)
    assert run.cost == pytest.approx(0.4 * 0.5 * hours + 2.0 * hours)


@pytest.mark.parametrize("ranks", [1, 2])
def test_moved_inputs_wear_the_drives_that_hold_them(ranks: int) -> None:
    training = replace(
        training_of(preset("qwen2.5-1.5b"), accumulation=3), sequence=512, inputs_moved=True
    )
    means = replace(decided(100, 100, 500).means, ranks=ranks)
    decision = decide(training, beside_inputs(training, means))
    inputs = 3 * ranks * training.input_bytes()
    per_day = inputs * DAY_S / decision.best.step_s

    run = forecast(decision, TrainingRun(steps=40))
    wear = report_of(decision).wear
    without_drives = replace(means, budget=replace(means.budget, nvme={}))

    assert not decision.best.timeline.moved.get(Lane.NVME_WRITE)
    assert wear is not None
    assert wear.written_per_day == pytest.approx(per_day)
    assert run.written == 40 * inputs
    assert run.accumulated is not None
    assert run.accumulated.written == 40 * inputs
    assert {
        round(purchase.written_per_day * purchase.step_s / DAY_S)
        for purchase in purchases(decision)
        if purchase.written_per_day is not None
    } == {inputs}
    assert report_of(decide(training, beside_inputs(training, without_drives))).wear is None


def test_accumulation_writes_less_for_the_same_tokens(on_drives: Decision) -> None:
    run = forecast(on_drives, TrainingRun(steps=800))

    assert run.accumulated is not None
    assert (run.accumulated.accumulation, run.accumulated.steps) == (8, 100)
    assert run.accumulated.tokens == run.tokens
    assert run.accumulated.written < 0.3 * run.written
    assert run.accumulated.seconds < run.seconds


def test_advice_is_plain_data(on_drives: Decision) -> None:
    told = advise(on_drives, RateSource.GIVEN, TrainingRun(steps=10)).to_mapping()

    assert told["rates_are"] == "given"
    assert {"step_range_s", "purchases", "worth", "run"} < told.keys()


def test_purchases_of_ram_are_sold_in_powers_of_two() -> None:
    for gib, more in ((7, "8 GiB"), (57.6, "64 GiB"), (460, "512 GiB")):
        found = purchases(decided(100, gib * GiB / GB))
        assert named(found, "more RAM").what == f"{more} more RAM"


def test_gpus_that_can_be_bought_take_the_place_of_a_gpu_twice_as_large() -> None:
    decision = decided(2.0, 2.5, 100)
    larger = replace(decision.means, flops_per_s=160e12)
    larger = replace(larger, budget=replace(larger.budget, device=8 * GB))

    offers = {purchase.what for purchase in purchases(decision, {"RTX 9000": larger})}

    assert "RTX 9000" in offers
    assert not {"twice the GPU memory", "a GPU that computes twice as fast"} & offers
    assert named(purchases(decision, {"RTX 9000": larger}), "RTX 9000").saved > 0.1


def test_without_a_rate_of_computing_no_writes_of_a_day_and_no_range_are_promised() -> None:
    decision = decided(2.0, 2.5, 100)
    means = replace(decision.means, flops_per_s=None)
    unknown = advise(decide(decision.training, means), RateSource.GIVEN)

    assert unknown.step_range is None
    assert {purchase.written_per_day for purchase in unknown.purchases} == {None}
    told = unknown.to_mapping()
    assert (told["step_range_s"], told["update_range_s"]) == (None, None)


def test_purchases_are_tried_where_the_estimates_say_that_todays_plan_does_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decision = decided(100, 100)
    monkeypatch.setattr(Planner, "least_estimate_ns", lambda *_: float("inf"))

    assert named(purchases(decision), "computes twice as fast").saved > 0.1


def test_faster_writes_leave_reads_as_they_are() -> None:
    drive = DriveRates(read_bytes_per_s=7e9, write_bytes_per_s=2e9, mixed_bytes_per_s=4e9)
    means = Means(
        budget=ResolvedBudget(device=GB, host=GB, nvme={"a": GB}),
        rates=replace(RATES, nvme={"a": drive}),
    )

    faster = with_faster_writes(means, 1.5).rates.nvme["a"]
    assert faster == DriveRates(read_bytes_per_s=7e9, write_bytes_per_s=3e9, mixed_bytes_per_s=5e9)


def test_what_ranks_exchange_is_as_unsure_as_its_rate() -> None:
    budget = ResolvedBudget(device=20 * GB, host=40 * GB)
    means = Means(budget=budget, rates=replace(RATES, nvme={}), flops_per_s=80e12, ranks=2)
    slow = decide(training_of(SMALL), replace(means, wire_bytes_per_s=1e9))

    ranges = step_range(slow.best, slow.training, slow.means, RateSource.PUBLISHED)
    assert ranges.most_s > 1.5 * slow.best.step_s


def test_faster_computing_is_faster_in_every_way_that_blocks_were_measured() -> None:
    shape = BlockShape(1024, 256)
    blocks = BlockRates({shape: ComputeRate(1e12, backward=2e12, again=3e12)})
    faster = with_compute(replace(decided(8, 64).means, blocks=blocks), 2.0).blocks

    assert faster is not None
    assert faster.measured[shape] == ComputeRate(2e12, backward=4e12, again=6e12)
