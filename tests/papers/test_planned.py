"""Published trainings, planned: the models have their printed sizes, and docs/papers.md lists them."""

from __future__ import annotations

from argparse import ArgumentParser
from dataclasses import replace
from math import ceil
from pathlib import Path

import pytest

from infinity_engine.cli.plan_machine import add_arguments, machine_of
from papers.planned import RUNS, PublishedRun, means_of, planned, rows, training_of

PAGE = (Path(__file__).resolve().parents[2] / "docs/papers.md").read_text()


def of(name: str) -> PublishedRun:
    """Return the published run of this name."""
    [found] = [run for run in RUNS if run.what == name]
    return found


def lines() -> list[list[str]]:
    """Return the cells of the page's table of published runs."""
    part = PAGE.split("\n## Published trainings, planned\n")[1].split("\n## ")[0]
    table = [line for line in part.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def test_there_are_thirty_runs_each_with_its_source() -> None:
    assert len(RUNS) >= 30
    assert all(run.source for run in RUNS)
    assert len({run.what for run in RUNS}) == len(RUNS)


@pytest.mark.parametrize(
    ("size", "billions"), [("40B", 48.16), ("52B", 44.28), ("70B", 68.61), ("100B", 105.89)]
)
def test_a_model_has_as_many_parameters_as_its_log_prints(size: str, billions: float) -> None:
    run = of(f"{size}, ZeRO-3 on NVMe, 4 H100")

    assert run.model().numel / 1e9 == pytest.approx(billions, abs=0.005)


def test_the_log_of_one_h100_is_planned_in_its_595_subgroups() -> None:
    for what in ("ZeRO-3 offload", "Deep Optimizer States"):
        run, numel = (
            of(f"7B, {what} in 595 subgroups, 1 H100"),
            of(f"7B, {what}, 1 H100").model().numel,
        )
        assert run.model().numel == numel == pytest.approx(5.95e9, abs=5e6)
        assert run.setting.subgroup_numel is not None
        assert ceil(numel / run.setting.subgroup_numel) == 595


def test_each_subgroup_of_the_log_costs_what_the_log_says() -> None:
    run = of("7B, ZeRO-3 offload in 595 subgroups, 1 H100")
    costly, free = (planned(asked).near_s for asked in (run, replace(run, start_s=None)))

    assert costly is not None
    assert free is not None
    assert costly - free == pytest.approx(595 * 4.3e-3, rel=0.02)


def test_a_run_has_the_rates_that_the_command_has_for_its_machine() -> None:
    run = of("Llama-3.1-8B, DeepSpeed ZeRO-3 offload, batch 8, 1 RTX 4090")
    parser = ArgumentParser()
    add_arguments(parser)
    options = parser.parse_args(["--machine", "desktop_4090", "--ram", "256GiB", "--nvme", "0"])
    asked = machine_of(options, "bf16", training_of(run)).means
    assert asked.alone is not None

    # The command keeps the rates of drives that it does not use.
    assert means_of(run) == replace(
        asked, rates=replace(asked.rates, nvme={}), alone=replace(asked.alone, nvme={})
    )


def test_activations_that_were_on_the_host_or_on_drives_are_moved() -> None:
    moved = {run.what for run in RUNS if training_of(run).inputs_moved}

    assert moved == {
        *(f"{size}, 16 V100" for size in ("50B", "100B", "0.5T", "1T")),
        "175B, LoHan, 1 RTX 4090, 256 GB",
    }


def test_a_fused_loss_lets_large_batches_fit() -> None:
    run = of("Llama-3.1-8B, DeepSpeed ZeRO-3 offload, batch 32, 1 RTX 4090")

    assert planned(run).near_s is not None
    assert planned(replace(run, chunked_loss=False)).near_s is None


def test_the_page_lists_every_run_with_what_was_published() -> None:
    def published(run: PublishedRun) -> str:
        seconds = run.step_s()
        return "it ran" if seconds is None else f"{seconds:.3g} s"

    assert [line[:2] for line in lines()] == [[run.what, published(run)] for run in RUNS]


def test_the_planners_choice_takes_no_longer_than_what_was_run() -> None:
    """Updates on the host beside the next forward, of which estimates say too little."""
    name = "Llama-3.1-8B, DeepSpeed ZeRO-3 offload, batch 8, 1 RTX 4090"
    found = planned(of(name))

    assert found.near_s is not None
    assert found.best_s is not None
    assert found.best_s <= 1.001 * found.near_s


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_page_has_what_the_planner_says_of_every_run() -> None:
    found = list(rows(planned(run) for run in RUNS))[1:]

    assert lines() == [list(row[:5]) for row in found]
