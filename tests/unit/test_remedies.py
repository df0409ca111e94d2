"""What a refusal offers: each remedy is enough, and a few hundredths less is not."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from infinity_engine.errors import CapacityError, ConfigError
from infinity_engine.placement.placing import Outlined
from infinity_engine.placement.sizing import Sizing
from infinity_engine.placement.tiles import tiled_by_room
from infinity_engine.placement.training import Means, Training, beside_inputs
from infinity_engine.plan import (
    DeviceOnly,
    DriveRates,
    HostOnly,
    Interleaved,
    NvmeStreamed,
    Rates,
    ResolvedBudget,
    StaticSplit,
    Strategy,
    Tier,
)
from infinity_engine.sim.candidate import Choice, Evaluator
from infinity_engine.sim.planner import Planner
from infinity_engine.sim.presets import preset
from infinity_engine.sim.remedies import Needs, Remedy, _smaller_batches, explain_refusal
from infinity_engine.units import GB, GiB, MiB
from support.plannings import random_case, training_of

_DRIVE = DriveRates(read_bytes_per_s=7e9, write_bytes_per_s=5e9)


def random_refusal(seed: int) -> tuple[Training, Means]:
    """Return a training on a machine with about half of the memory that it would need."""
    training, means = random_case(seed)
    budget = means.budget
    for shrink in (1.0, 0.6, 0.35, 0.2, 0.1, 0.05):
        drives = {name: int(limit * shrink) for name, limit in budget.nvme.items()}
        less = ResolvedBudget(
            device=int(budget.device * shrink**0.5), host=int(budget.host * shrink), nvme=drives
        )
        there = replace(means, budget=less, rates=replace(means.rates, nvme={"a": _DRIVE}))
        if not Planner(training, there).fits():
            return training, there
    raise AssertionError("a twentieth of it is too little for any training")


def larger(means: Means, more: Needs, *, times: float = 1.0, of: str = "") -> Means:
    """Return means with so much more memory, and of one tier only a part of all that makes."""
    budget = means.budget
    sizes = {
        "device": budget.device + more.device,
        "host": budget.host + more.host,
        "nvme": sum(budget.nvme.values()) + more.nvme,
    }
    if of:
        sizes[of] = int(sizes[of] * times)
    nvme = {"a": sizes["nvme"]} if sizes["nvme"] else {}
    return replace(
        means, budget=ResolvedBudget(device=sizes["device"], host=sizes["host"], nvme=nvme)
    )


def wrong_remedies(seed: int) -> list[str]:
    """Return the remedies of a random refusal that are too little, or more than it takes."""
    training, means = random_refusal(seed)
    found = explain_refusal(training, means).remedies
    wrong = [] if any(is_memory(remedy) for remedy in found) else ["no memory is enough"]
    wrong += wrong_amounts(training, means, filter(is_memory, found))
    return [f"{seed}: {words}" for words in wrong]


def wrong_amounts(
    training: Training,
    means: Means,
    remedies: Iterable[Remedy],
    *,
    strategy: Strategy | None = None,
) -> list[str]:
    """Return the remedies with memory that is too little, or more than it takes."""
    wrong = []
    for remedy in remedies:
        given = changed(training, remedy)
        if not is_planned(given, larger(means, remedy.more), strategy):
            wrong.append(f"too little: {remedy.change}")
        for tier in ("device", "host", "nvme"):
            less = larger(means, remedy.more, times=0.97, of=tier)
            if getattr(remedy.more, tier) and is_planned(given, less, strategy):
                wrong.append(f"3% less of {tier} is enough: {remedy.change}")
    return wrong


def changed(training: Training, remedy: Remedy) -> Training:
    """Return the training with the settings that a remedy names beside memory."""
    words = remedy.change.replace(")", " ").replace("(", " ").split()
    after = dict(pairwise(words))
    names = {"--batch": "batch", "--accumulation": "accumulation_steps"}
    names |= {"--tile-sequence": "tile_positions"}
    found: dict[str, Any] = {
        names[option]: int(after[option]) for option in names if option in after
    }
    if "--checkpointing" in after:
        found["checkpointing"] = True
    if "--loss" in after:
        found["chunked_loss"] = True
    if "--offload-inputs" in words:
        found["inputs_moved"] = True
    return replace(training, **found)


def is_memory(remedy: Remedy) -> bool:
    return "more of" in remedy.change


def is_planned(training: Training, means: Means, strategy: Strategy | None = None) -> bool:
    planner = Planner(training, means, strategy=strategy)
    if planner.fits():  # a plan was placed: no need to find the best one
        return True
    try:
        planner.decide()
    except (CapacityError, ConfigError):  # too little, or no drives for a strategy that needs them
        return False
    return True


@pytest.mark.parametrize(
    "seed",
    [
        0,
        1,
        2,
        4,
        23,
        31,
        48,
        64,
        *(pytest.param(seed, marks=pytest.mark.slow) for seed in (3, 5, 17, 40)),
    ],
)
def test_each_remedy_is_enough_and_a_little_less_is_not(seed: int) -> None:
    assert wrong_remedies(seed) == []


@pytest.mark.parametrize("drives", [0, 20 * GB])
@pytest.mark.parametrize(
    "strategy",
    [
        HostOnly(),
        DeviceOnly(),
        StaticSplit(ratio=0.3),
        Interleaved(share=0.4),
        NvmeStreamed(),
        NvmeStreamed(update=Interleaved(share=0.3)),
    ],
    ids=str,
)
def test_each_remedy_with_a_strategy_is_enough_and_a_little_less_is_not(
    strategy: Strategy, drives: int
) -> None:
    training, means = refused_llama(drives)

    found = list(filter(is_memory, explain_refusal(training, means, strategy=strategy).remedies))

    assert found
    assert wrong_amounts(training, means, found, strategy=strategy) == []


def refused_llama(drives: int = 0) -> tuple[Training, Means]:
    rates = replace(random_case(0)[1].rates, nvme={"a": _DRIVE})
    nvme = {"a": drives} if drives else {}
    budget = ResolvedBudget(device=6 * GiB, host=20 * GiB, nvme=nvme)
    return training_of(preset("llama-3-8b")), Means(budget=budget, rates=rates)


@pytest.mark.parametrize(
    "strategy", [HostOnly(), StaticSplit(ratio=0.3), Interleaved(share=0.4)], ids=str
)
def test_a_refusal_with_a_strategy_places_few_plans(
    monkeypatch: pytest.MonkeyPatch, strategy: Strategy
) -> None:
    training, means = refused_llama()
    placed: list[Choice] = []
    outlined = Evaluator.outlined

    def counted(planner: Evaluator, choice: Choice) -> tuple[Sizing, Outlined, ResolvedBudget]:
        placed.append(choice)
        return outlined(planner, choice)

    monkeypatch.setattr(Evaluator, "outlined", counted)
    explain_refusal(training, means, strategy=strategy)

    assert len(placed) <= 70  # about 120 where halves alone lead to the least amount


def test_where_the_host_lacks_a_few_megabytes_each_remedy_has_an_amount() -> None:
    training, means = refused_llama()
    planner = Planner(training, means)
    low, high = 20.0 * GiB, 200.0 * GiB

    def with_host(nbytes: float) -> Means:
        return replace(means, budget=replace(means.budget, device=24 * GiB, host=int(nbytes)))

    while high - low > MiB:
        middle = (low + high) / 2
        fits = planner.with_budget(with_host(middle).budget).fits()
        low, high = (low, middle) if fits else (middle, high)
    there = with_host(low)

    found = list(filter(is_memory, explain_refusal(training, there).remedies))

    assert any(remedy.more.nvme for remedy in found)
    for remedy in found:
        assert remedy.more != Needs(device=0, host=0, nvme=0)
        assert Planner(training, larger(there, remedy.more)).fits(), remedy


def test_as_much_more_as_is_missing_is_enough_and_a_little_less_is_not() -> None:
    training, means = refused_llama()
    planner = Planner(training, means, strategy=HostOnly(), parameters=Tier.HOST)
    budget = replace(means.budget, device=40 * GiB)

    missing = planner.with_budget(budget).missing(Tier.HOST)

    def with_host(nbytes: float) -> Planner:
        return planner.with_budget(replace(budget, host=int(nbytes)))

    for _ in range(2):  # at first, masters and states alone are counted
        missing += with_host(budget.host + missing).missing(Tier.HOST)
    assert with_host(budget.host + missing).fits()
    assert with_host(budget.host + missing).missing(Tier.HOST) == 0
    assert not with_host(0.97 * (budget.host + missing)).fits()


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 200, 20))
def test_each_of_two_hundred_refusals_is_answered_with_the_least(first: int) -> None:
    assert [wrong for seed in range(first, first + 20) for wrong in wrong_remedies(seed)] == []


def test_a_change_that_saves_activations_is_offered_with_what_is_missing_then() -> None:
    training = replace(training_of(preset("llama-3-8b")), batch=16)
    means = Means(
        budget=ResolvedBudget(device=12 * GiB, host=30 * GiB), rates=random_case(0)[1].rates
    )

    remedies = list(filter(is_memory, explain_refusal(training, means).remedies))

    combined = [remedy for remedy in remedies if changed(training, remedy) != training]
    alone = [remedy for remedy in remedies if remedy not in combined]
    assert ["--loss" in remedy.change for remedy in combined] == [True, False]
    assert "--batch" in combined[1].change
    assert wrong_amounts(training, means, combined) == []
    most = max(remedy.more.device for remedy in combined)
    assert all(remedy.more.device > 2 * most for remedy in alone)


def test_tiles_of_the_sequence_are_offered_with_what_is_missing_then() -> None:
    training = replace(
        training_of(preset("qwen2.5-7b")), sequence=32768, chunked_loss=True, inputs_moved=True
    )
    means = Means(
        budget=ResolvedBudget(device=11 * GiB, host=80 * GiB), rates=random_case(0)[1].rates
    )

    remedies = explain_refusal(training, beside_inputs(training, means)).remedies

    [combined] = [remedy for remedy in remedies if "--tile-sequence" in remedy.change]
    assert "of NVMe" in combined.change
    assert combined.more.device == 0
    tiled = changed(training, combined)
    assert is_planned(tiled, beside_inputs(tiled, larger(means, combined.more)))
    larger_tiles = replace(tiled, tile_positions=2 * (tiled.tile_positions or 0))
    assert not is_planned(larger_tiles, beside_inputs(larger_tiles, larger(means, combined.more)))


@pytest.mark.parametrize(
    ("model", "device", "sequence", "changes"),
    [
        ("qwen3-8b", 22.8, 40960, {("--loss", "--offload-inputs"), ("--loss", "--tile-sequence")}),
        ("llama-3.2-3b", 15.2, 65536, {("--loss", "--offload-inputs")}),
        ("qwen2.5-7b", 22.8, 131072, {("--loss", "--offload-inputs", "--tile-sequence")}),
    ],
)
def test_the_fewest_changes_that_cost_nothing_come_before_all_that_does(
    model: str, device: float, sequence: int, changes: set[tuple[str, ...]]
) -> None:
    training = replace(training_of(preset(model)), sequence=sequence, checkpointing=True)
    means = Means(
        budget=ResolvedBudget(device=int(device * GiB), host=172 * GiB),
        rates=random_case(0)[1].rates,
    )

    first = explain_refusal(training, means).remedies[: len(changes)]

    assert {tuple(re.findall(r"\((--[\w-]+)", remedy.change)) for remedy in first} == changes
    for remedy in first:
        after = changed(training, remedy)
        assert is_planned(after, beside_inputs(after, means))


def test_no_change_is_offered_with_memory_that_would_do_alone() -> None:
    training = replace(training_of(preset("llama-3-8b")), batch=4)
    means = Means(
        budget=ResolvedBudget(device=40 * GiB, host=30 * GiB), rates=random_case(0)[1].rates
    )

    remedies = list(filter(is_memory, explain_refusal(training, means).remedies))

    assert remedies
    assert all(changed(training, remedy) == training for remedy in remedies)


def test_a_mix_of_host_and_device_is_less_than_either_alone_would_take() -> None:
    """Llama-3-8B on 24 GiB and 64 GiB: parameters and gradients in one, states in both."""
    budget = ResolvedBudget(device=int(22.8 * GiB), host=int(57.6 * GiB))
    means = Means(budget=budget, rates=random_case(0)[1].rates, flops_per_s=66e12)

    refusal = explain_refusal(training_of(preset("llama-3-8b")), means)

    more = {
        name: max(getattr(it.more, name) for it in refusal.remedies) for name in Needs.__slots__
    }
    assert more["host"] < 44 * GiB
    assert more["device"] < 44 * GiB
    assert more["nvme"] < 45 * GiB


def test_the_longest_sequence_that_fits_is_offered_with_what_its_logits_take() -> None:
    training = replace(training_of(preset("qwen2.5-1.5b")), sequence=32768)
    means = Means(
        budget=ResolvedBudget(device=22 * GB, host=200 * GB), rates=random_case(0)[1].rates
    )

    [change] = [
        remedy.change
        for remedy in explain_refusal(training, means).remedies
        if "--sequence" in remedy.change
    ]

    length = int(change.split("--sequence ")[1].split(")")[0])
    assert "are logits" in change
    assert 256 < length < 32768
    assert is_planned(replace(training, sequence=length), means)
    assert not is_planned(replace(training, sequence=length + 128), means)


def test_inputs_of_blocks_are_offered_to_drives_or_the_host_where_that_is_enough() -> None:
    training = replace(training_of(preset("opt-13b")), batch=12, sequence=2048, checkpointing=True)
    budget = ResolvedBudget(device=int(22.8 * GiB), host=230 * GiB, nvme={"a": 1800 * GB})
    drives = {"a": DriveRates(read_bytes_per_s=7e9, write_bytes_per_s=2e9)}
    rates = replace(random_case(0)[1].rates, nvme=drives)
    means = Means(budget=budget, rates=rates, flops_per_s=66e12)

    [change] = [
        remedy.change
        for remedy in explain_refusal(training, means).remedies
        if "--offload-inputs" in remedy.change
    ]

    moved = replace(training, inputs_moved=True)
    assert "9.375 GiB there" in change
    assert is_planned(moved, beside_inputs(moved, means))
    assert not is_planned(training, means)


def test_tiles_are_offered_where_one_layer_is_too_large() -> None:
    training = replace(training_of(preset("llama-3-8b")), batch=1, sequence=128)
    means = Means(
        budget=ResolvedBudget(device=2 * GiB, host=230 * GiB), rates=random_case(0)[1].rates
    )

    [change] = [
        remedy.change
        for remedy in explain_refusal(training, means).remedies
        if "--tiling" in remedy.change
    ]

    room = means.room_for_layers(training)
    tiled = tiled_by_room(training.model, width=training.width, room=room)
    assert tiled is not None
    assert change.startswith("model.embed_tokens and lm_head in ")
    assert is_planned(replace(training, model=tiled.model), means)
    assert not is_planned(training, means)


def in_tiles(training: Training, means: Means) -> Training:
    room = means.room_for_layers(training)
    tiled = tiled_by_room(training.model, width=training.width, room=room)
    return training if tiled is None else replace(training, model=tiled.model)


@pytest.mark.parametrize(
    ("device", "host", "unified"), [(GiB // 2, 57, False), (GiB // 2, 200, False), (0, 4, True)]
)
def test_with_tiles_each_amount_is_enough_and_a_little_less_is_not(
    device: int, host: int, unified: bool
) -> None:
    training = replace(training_of(preset("llama-3-8b")), sequence=256)
    budget = ResolvedBudget(device=device, host=host * GiB)
    rates = replace(random_case(0)[1].rates, nvme={"a": _DRIVE})
    means = Means(budget=budget, rates=rates, unified=unified)

    remedies = list(filter(is_memory, explain_refusal(training, means, tiling=True).remedies))

    assert remedies
    for remedy in remedies:
        given, enough = changed(training, remedy), larger(means, remedy.more)
        assert is_planned(in_tiles(given, enough), enough)
        for tier in ("device", "host", "nvme"):
            less = larger(means, remedy.more, times=0.97, of=tier)
            if getattr(remedy.more, tier):
                assert not is_planned(in_tiles(given, less), less), (tier, remedy.change)


def test_batches_just_below_the_one_that_is_asked_are_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    training = replace(training_of(preset("opt-1.3b")), batch=10, accumulation_steps=8)
    monkeypatch.setattr(Planner, "fits", lambda planner: planner.training.batch <= 9)

    [(words, found)] = _smaller_batches(Planner(training, random_case(0)[1]))

    # Of 9 or less, 8 divide the 80 sequences of a step evenly.
    assert words.startswith("10 micro-batches of 8 in a step")
    assert (found.batch, found.accumulation_steps) == (8, 10)


def test_a_smaller_batch_is_found_where_drives_refuse_a_batch_of_one() -> None:
    training = replace(training_of(preset("opt-13b")), batch=64, chunked_loss=True)
    means = Means(
        budget=ResolvedBudget(device=20 * GiB, host=40 * GiB, nvme={"a": 280 * GB}),
        rates=replace(random_case(0)[1].rates, nvme={"a": _DRIVE}),
    )

    [change] = [
        remedy.change
        for remedy in explain_refusal(training, means).remedies
        if "--batch" in remedy.change
    ]

    assert "6 micro-batches of 11 in a step (--batch 11 --accumulation 6)" in change
    assert is_planned(replace(training, batch=11, accumulation_steps=6), means)
    assert not is_planned(replace(training, batch=1, accumulation_steps=64), means)


def offered_tiles(training: Training, means: Means) -> list[str]:
    return [
        remedy.change
        for remedy in explain_refusal(training, means).remedies
        if "--tile-sequence" in remedy.change
    ]


def test_the_fewest_tiles_of_the_sequence_that_fit_are_offered() -> None:
    training = replace(
        training_of(preset("qwen2.5-1.5b")), sequence=32768, chunked_loss=True, inputs_moved=True
    )
    means = Means(
        budget=ResolvedBudget(device=4 * GiB, host=230 * GiB), rates=random_case(0)[1].rates
    )

    [change] = offered_tiles(training, means)

    positions = int(change.split("--tile-sequence ")[1].split(")")[0])
    assert f"in {32768 // positions} tiles of the sequence" in change
    assert "of activations" in change
    assert is_planned(replace(training, tile_positions=positions), means)
    assert not is_planned(replace(training, tile_positions=2 * positions), means)


def test_tiles_of_the_sequence_are_not_offered_where_logits_are_the_cause() -> None:
    training = replace(training_of(preset("llama-3-8b")), batch=1, sequence=2048)
    means = Means(
        budget=ResolvedBudget(device=int(3.5 * GiB), host=230 * GiB),
        rates=random_case(0)[1].rates,
    )

    assert offered_tiles(training, means) == []


def test_a_loss_without_whole_logits_is_offered_where_that_is_enough() -> None:
    training = replace(training_of(preset("llama-3-8b")), batch=1, sequence=2048)
    means = Means(
        budget=ResolvedBudget(device=int(3.5 * GiB), host=230 * GiB),
        rates=random_case(0)[1].rates,
    )
    changes = [remedy.change for remedy in explain_refusal(training, means).remedies]
    assert any("--loss chunked" in change for change in changes), changes


def test_moved_inputs_take_their_part_of_the_drives_or_the_host() -> None:
    training = replace(training_of(preset("opt-13b")), batch=12, inputs_moved=True)
    budget = ResolvedBudget(device=GiB, host=100 * GiB, nvme={"a": 300 * GiB, "b": 100 * GiB})
    means = Means(budget=budget, rates=Rates())
    inputs = training.input_bytes()

    drives = beside_inputs(training, means).budget.nvme
    without = replace(means, budget=replace(budget, nvme={}))

    assert inputs > GiB
    assert drives["a"] - 300 * GiB == pytest.approx(-0.75 * inputs, abs=1)
    assert beside_inputs(training, without).budget.host == 100 * GiB - inputs
    assert beside_inputs(replace(training, inputs_moved=False), means) == means


@pytest.mark.parametrize("changes", [{"batch": 3}, {"batch": 24}, {"inputs_moved": False}])
@pytest.mark.parametrize("nvme", [{"a": 300 * GiB, "b": 100 * GiB}, {"a": 10 * GiB}, {}])
def test_inputs_of_another_training_give_back_what_they_took(
    nvme: dict[str, int], changes: dict[str, Any]
) -> None:
    training = replace(training_of(preset("opt-13b")), batch=12, inputs_moved=True)
    means = Means(budget=ResolvedBudget(device=GiB, host=100 * GiB, nvme=nvme), rates=Rates())
    planner = Planner(training, beside_inputs(training, means))
    other = replace(training, **changes)

    assert planner.with_training(other).means == beside_inputs(other, means)
    assert planner.with_training(other).with_training(training).means == planner.means


def test_a_shorter_sequence_leaves_the_host_what_longer_inputs_took() -> None:
    training = replace(
        training_of(preset("opt-1.3b")), batch=64, chunked_loss=True, inputs_moved=True
    )
    means = Means(
        budget=ResolvedBudget(device=8 * GiB, host=20 * GiB), rates=random_case(0)[1].rates
    )

    changes = [
        remedy.change
        for remedy in explain_refusal(training, beside_inputs(training, means)).remedies
    ]

    [length] = [
        int(change.split("--sequence ")[1].split(")")[0])
        for change in changes
        if "--sequence" in change
    ]
    enough, longer = (replace(training, sequence=tokens) for tokens in (length, length + 128))
    assert longer.sequence < training.sequence
    assert is_planned(enough, beside_inputs(enough, means))
    assert not is_planned(longer, beside_inputs(longer, means))
