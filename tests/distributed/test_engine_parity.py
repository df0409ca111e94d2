"""P1 and P4 of several ranks: they train as one does on the same batch, and to the same bits
whatever the strategy.

Within tolerance of one rank: a rank's gradient is of its rows of the batch, so sums over rows are
in another order. The engine's own sums are in the ranks' order whatever the strategy, so those of
one number of ranks agree to the bit. Gloo.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from infinity_engine.machine.cores import divide_cores, read_nodes
from infinity_engine.outcome import Outcome
from support import rank_training as programs
from support.rank_training import RATES, Run
from support.ranks import launched

pytestmark = pytest.mark.usefixtures("deterministic")

ONE_BY_ONE = {"storage": {"small_bytes": 0}}
# Room for little more than two modules, in rounds of two blocks.
TIGHT = {**ONE_BY_ONE, "budget": {"host": "1MiB"}, "ranks": {"bucket_bytes": 8192}}
ROOMY = {"host": "64MiB", "device": "1MiB"}
AT_HOME = {
    **ONE_BY_ONE,
    "parameters": "host",
    "strategy": "interleaved",
    "rates": RATES,
    "budget": ROOMY,
}
CLIPPED = {"max_grad_norm": 0.05}
FEW = {
    "small": Run(),
    "one by one": Run(settings=TIGHT),
    "emulated": Run(emulated=True, settings={"strategy": "interleaved", "rates": RATES}),
    "at home on the host": Run(emulated=True, settings=AT_HOME),
    "stage gradients": Run(settings={"ranks": {"stage": "gradients", "bucket_bytes": 8192}}),
    "stage optimizer": Run(emulated=True, settings={"ranks": {"stage": "optimizer"}}),
    "bf16": Run(accumulation=2, settings={"precision": "bf16", "max_grad_norm": 0.05}),
    "bf16, one by one": Run(
        accumulation=2, settings={**TIGHT, "precision": "bf16", "max_grad_norm": 0.05}
    ),
    "bf16, stage gradients": Run(
        accumulation=2,
        settings={"precision": "bf16", "max_grad_norm": 0.05, "ranks": {"stage": "gradients"}},
    ),
    "bf16, stage optimizer": Run(
        accumulation=2,
        settings={"precision": "bf16", "max_grad_norm": 0.05, "ranks": {"stage": "optimizer"}},
    ),
    "mixed": Run(model="mixed", accumulation=2, settings=CLIPPED),
    "mixed, one by one": Run(model="mixed", accumulation=2, settings={**TIGHT, **CLIPPED}),
    "mixed, at home on the host": Run(
        model="mixed", accumulation=2, emulated=True, settings={**AT_HOME, **CLIPPED}
    ),
    "mixed, stage gradients": Run(
        model="mixed",
        accumulation=2,
        settings={**CLIPPED, "ranks": {"stage": "gradients", "bucket_bytes": 8192}},
    ),
    "mixed, stage optimizer": Run(
        model="mixed", accumulation=2, settings={**CLIPPED, "ranks": {"stage": "optimizer"}}
    ),
    "encoder-decoder": Run(model="encoder-decoder", settings=ONE_BY_ONE),
    "llama": Run(model="llama", settings=ONE_BY_ONE),
    "odd": Run(model="odd", settings=ONE_BY_ONE),
    "routed": Run(model="routed", settings={**ONE_BY_ONE, "ranks": {"leaf_modules": ["Experts"]}}),
    "routed, stage gradients": Run(model="routed", settings={"ranks": {"stage": "gradients"}}),
    # Room for a few gradients: what one rank waits for is of experts that the other does not use.
    "routed, little room": Run(
        model="routed",
        settings={**ONE_BY_ONE, "ranks": {"leaf_modules": ["Experts"], "bucket_bytes": 4096}},
    ),
    "routed, little room, stage gradients": Run(
        model="routed", settings={"ranks": {"stage": "gradients", "bucket_bytes": 4096}}
    ),
}
AGAIN = {"activations": {"recompute": "blocks"}}
RECOMPUTED = {
    "kept": Run(model="llama", settings=ONE_BY_ONE),
    "one by one": Run(model="llama", settings={**ONE_BY_ONE, **AGAIN}),
    "stage gradients": Run(
        model="llama", settings={**AGAIN, "ranks": {"stage": "gradients", "bucket_bytes": 8192}}
    ),
}
AS_SMALL = (
    "one by one",
    "emulated",
    "at home on the host",
    "stage gradients",
    "stage optimizer",
)


@cache
def ran(size: int) -> list[dict[str, dict[str, Any]]]:
    """Return what each of so many ranks got, of one launch for all tests."""
    return launched(
        size,
        programs.train_all,
        FEW if size == 2 else {name: FEW[name] for name in ("small", "routed")},
    )


@cache
def alone(name: str) -> dict[str, Any]:
    """Return what one rank gets of the whole batches, with no settings that change no bits."""
    run = FEW[name]
    settings = {
        key: value for key, value in run.settings.items() if key in {"precision", "max_grad_norm"}
    }
    return programs.train(replace(run, emulated=False, settings=settings))


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


def far(
    one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], *, rtol: float, atol: float
) -> list[str]:
    assert one.keys() == other.keys()
    return [
        name
        for name in one
        if not torch.allclose(one[name].float(), other[name].float(), rtol=rtol, atol=atol)
    ]


@pytest.mark.parametrize(
    ("size", "name"),
    [(2, name) for name in FEW] + [(size, name) for size in (3, 4) for name in ("small", "routed")],
)
def test_several_ranks_train_as_one_does_on_the_same_batch(size: int, name: str) -> None:
    one = alone(name)
    rtol, atol = (2e-2, 4e-3) if "bf16" in name or "mixed" in name else (2e-4, 2e-5)

    for rank in ran(size):
        found = rank[name]
        assert far(found["states"], one["states"], rtol=rtol, atol=atol) == []
        assert found["within"]
        if one["norms"][0] is not None:
            assert found["norms"] == pytest.approx(one["norms"], rel=1e-2)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_ranks_have_the_same_bits_and_the_same_norm(size: int) -> None:
    first, *others = ran(size)

    for rank in others:
        for name, found in rank.items():
            assert differing(found["states"], first[name]["states"]) == []
            assert found["norms"] == first[name]["norms"]


@pytest.mark.parametrize("name", AS_SMALL)
def test_strategies_and_stages_have_the_same_bits(name: str) -> None:
    [found, *_] = ran(2)

    assert differing(found[name]["states"], found["small"]["states"]) == []
    assert found[name]["losses"] == found["small"]["losses"]


@pytest.mark.parametrize("name", ["one by one", "stage gradients"])
@pytest.mark.parametrize("model", ["bf16", "mixed"])
def test_buckets_rounds_and_stages_change_no_bit_of_accumulated_and_clipped_gradients(
    model: str, name: str
) -> None:
    [found, *_] = ran(2)

    assert differing(found[f"{model}, {name}"]["states"], found[model]["states"]) == []
    assert found[f"{model}, {name}"]["norms"] == found[model]["norms"]


def test_ranks_that_run_blocks_again_have_the_same_bits() -> None:
    for found in launched(2, programs.train_all, RECOMPUTED):
        for name in ("one by one", "stage gradients"):
            assert differing(found[name]["states"], found["kept"]["states"]) == []
            assert found[name]["losses"] == found["kept"]["losses"]


def test_mixed_shards_at_home_on_the_host_have_the_same_bits() -> None:
    [found, *_] = ran(2)

    assert differing(found["mixed, at home on the host"]["states"], found["mixed"]["states"]) == []


def test_parameters_stay_nan_on_all_ranks_where_one_machine_has_no_room_for_those_of_its_ranks() -> (
    None
):
    for warned in launched(2, programs.close_crowded, 1):
        assert len(warned) == 1
        assert "has 0 B (0 B) left for copies" in warned[0]


def test_closing_leaves_whole_parameters_on_every_rank() -> None:
    for rank in ran(2):
        for found in rank.values():
            assert (
                differing(found["after"], {name: found["states"][name] for name in found["after"]})
                == []
            )


@pytest.mark.parametrize("name", ["routed, little room", "routed, little room, stage gradients"])
def test_ranks_that_use_other_experts_and_have_room_for_few_gradients_have_the_same_bits(
    name: str,
) -> None:
    [found, *_] = ran(2)

    assert differing(found[name]["states"], found["routed"]["states"]) == []


@pytest.mark.parametrize("stage", ["parameters", "gradients"])
def test_a_backward_never_holds_more_whole_gradients_than_there_is_room_for(stage: str) -> None:
    for found in launched(2, programs.holds, stage, 1):
        one = 64 * 64 * 4
        assert found["most"] <= one + 2 * 32768 + one  # one that autograd has just made
        # as much again is for what malloc has of those that went
        assert found["room"] < 2 * 10 * one
        assert found["left"] == 0


def test_sums_of_several_micro_batches_that_are_kept_whole_count() -> None:
    for found in launched(2, programs.holds, "optimizer", 1, 2):
        every = 40 * 64 * 64 * 4
        assert found["room"] >= every
        assert [each >= every for each in found["held"]] == [True, False, True, False]


@pytest.mark.parametrize("name", ["routed", "routed, little room"])
def test_an_expert_that_no_rank_uses_makes_no_step(name: str) -> None:
    for size in (2, 3, 4) if name == "routed" else (2,):
        for rank in ran(size):
            states = rank[name]["states"]
            made = [int(states[f"blocks.0.experts.{number}.weight: step"]) for number in range(4)]
            assert made == [3, 3, 3, 0]


def test_one_process_of_torchrun_trains_as_one_without_it() -> None:
    [found] = launched(1, programs.train, FEW["small"])

    assert differing(found["states"], alone("small")["states"]) == []


def test_one_rank_of_a_machine_measures_it_and_all_divide_its_cores() -> None:
    first, second = launched(2, programs.begin_alike)

    shares = divide_cores([first["everywhere"], second["everywhere"]], read_nodes())
    assert (first["asked"], second["asked"]) == ([shares[0].threads], [])
    for rank, share in zip((first, second), shares, strict=True):
        assert rank["bound"] == ([] if share.is_shared else [set(share.cores)] * share.threads)


LITTLE = 200 << 10  # of a device: parameters are at home on the host


def test_ranks_whose_parameters_are_at_home_elsewhere_gather_in_the_same_parts() -> None:
    first, second = launched(2, programs.have_other_devices, (64 << 20, LITTLE))

    assert (first["parameters"], second["parameters"]) == ("DEVICE", "HOST")
    assert first["alike"] == second["alike"] == [True, True]


def test_parameters_of_modules_that_need_no_buffers_can_be_gathered_together() -> None:
    assert launched(2, programs.gather_in_one_run) == [[True, True]] * 2


def test_what_there_was_no_room_to_gather_keeps_no_buffers() -> None:
    for found in launched(2, programs.run_short, (LITTLE, LITTLE)):
        assert found == ["CapacityError"] * 4 + ["UPDATED"]


@cache
def looked() -> list[dict[str, Any]]:
    return launched(2, programs.looks)


def test_parameters_are_whole_only_while_somebody_needs_them() -> None:
    for found in looked():
        assert found["is nan"]
        assert found["gathered"]
        assert "engine.state_dict()" in found["state_dict"]


def test_evaluation_needs_no_gradients_and_no_engine_call() -> None:
    for found in looked():
        assert found["evaluated"] == found["outside"]


def test_a_change_under_gathered_is_kept_on_all_ranks() -> None:
    for found in looked():
        assert found["doubled"]
        assert found["master"]


def test_ranks_that_write_different_values_are_told() -> None:
    for found in looked():
        assert (
            "agreement on what gathered(modify=True) wrote: the ranks differ in embed.weight"
            in found["other values"]
        )


def test_zero_grad_drops_the_gradients_of_all_ranks() -> None:
    first, second = looked()

    assert "There is no gradient to update with" in first["nothing"]
    assert first["norm"] == second["norm"] > 0


def test_a_backward_outside_of_the_engine_is_reduced_by_the_step() -> None:
    first, second = looked()

    assert first["stepped"] is Outcome.UPDATED
    assert first["steps"] == second["steps"] == 1
    assert differing(first["bits"], second["bits"]) == []
    assert differing(first["after"], {name: first["bits"][name] for name in first["after"]}) == []


def test_a_parameter_that_some_ranks_use_is_updated_on_all_and_one_that_none_does_on_none() -> None:
    size = 3
    ranks = launched(size, programs.sometimes)
    expected = used_by_some(size)

    for found in ranks:
        for step, (ours, plain) in enumerate(zip(found, expected, strict=True)):
            assert ours["norm"] == pytest.approx(plain["norm"], rel=1e-5), step
            # what each gradient is shown to be
            assert ours["shown"] == pytest.approx(ours["norm"], rel=1e-5), step
            assert (
                far(
                    {name: ours["states"][name] for name in plain["states"]},
                    plain["states"],
                    rtol=1e-5,
                    atol=1e-6,
                )
                == []
            )
        assert [int(each["states"]["sometimes: step"]) for each in found] == [0, 1, 2, 3, 3]
        assert int(found[-1]["states"]["unused: step"]) == 0


def used_by_some(size: int) -> list[dict[str, Any]]:
    """Train as `sometimes` does, with PyTorch alone: the loss is the mean of the ranks' losses."""
    task, optimizer = programs.made(Run(model="odd", optimizer="sgd"))
    assert isinstance(task, programs.Odd)
    found = []
    for step in range(5):
        rows = torch.cat([task.batch(100 * step + part) for part in range(12)]).chunk(size)
        optimizer.zero_grad()
        for rank in range(size):
            task.uses = (False, rank == size - 1, True, rank == 0, False)[step]
            (task(rows[rank]) / size).backward()
        norm = torch.nn.utils.clip_grad_norm_(task.parameters(), 1e9)
        optimizer.step()
        states = {name: tensor.detach().clone() for name, tensor in task.state_dict().items()}
        found.append({"norm": norm.item(), "states": states})
    return found


# --- the whole matrix -----------------------------------------------------------------------------

# Batch norm computes with what its rank has seen, and whole batches that go to one expert make
# ranks go other ways.
EVERY_MODEL = [name for name in programs.KINDS if name not in {"conv net", "mixture of experts"}]


def every_run(model: str, size: int) -> dict[str, Run]:
    runs = {}
    for precision, accumulation, clip in (("fp32", 1, None), ("bf16", 3, 0.05), ("fp16", 1, None)):
        for name, run in FEW.items():
            # Several micro-batches that are added up whole are so in another order.
            if name in {"small", *AS_SMALL} and not (
                name == "stage optimizer" and accumulation > 1
            ):
                ranks = run.settings.get("ranks", {})
                if model == "routed" and "stage" not in ranks:
                    ranks = {**ranks, "leaf_modules": ["Experts"]}
                settings = {
                    **run.settings,
                    "precision": precision,
                    "max_grad_norm": clip,
                    "ranks": ranks,
                }
                if name == "one by one":  # the ranks of a machine share its budget
                    settings["budget"] = {"host": f"{2 * size}MiB"}
                elif "budget" in settings:
                    settings["budget"] = {"host": "64MiB", "device": f"{size}MiB"}
                runs[f"{precision} {name}"] = replace(
                    run, model=model, accumulation=accumulation, settings=settings
                )
    return runs


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("model", EVERY_MODEL)
def test_every_model_and_strategy_has_the_same_bits_on_so_many_ranks(model: str, size: int) -> None:
    [found, *others] = launched(size, programs.train_all, every_run(model, size))

    for precision in ("fp32", "bf16", "fp16"):
        for name in AS_SMALL:
            if f"{precision} {name}" in found:
                differ = differing(
                    found[f"{precision} {name}"]["states"], found[f"{precision} small"]["states"]
                )
                assert differ == [], f"{precision} {name}"
    for rank in others:
        for name, each in rank.items():
            assert differing(each["states"], found[name]["states"]) == []


def test_where_all_ranks_use_all_parameters_each_bucket_is_reduced_once() -> None:
    for extra in launched(2, programs.reduces):
        assert extra == [0] * 6
