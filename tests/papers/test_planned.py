"""Published trainings, planned: the models have their printed sizes, and docs/papers.md lists them."""

from __future__ import annotations

from pathlib import Path

import pytest

from papers.planned import RUNS, PublishedRun, planned, rows

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
