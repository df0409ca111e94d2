"""docs/papers.md keeps its word: its tables are what the experiments give."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from papers import deep_optimizer_states, zero_infinity
from papers.comparison import Comparison, Status
from papers.offloading import TABLE_1, Job, Method
from papers.transformer import Shape

PAGE = (Path(__file__).resolve().parents[2] / "docs/papers.md").read_text()
PAPERS = {
    "ZeRO-Infinity": cache(zero_infinity.experiments),
    "Deep Optimizer States": cache(deep_optimizer_states.experiments),
}
EACH_PAPER = pytest.mark.parametrize("paper", PAPERS)


def rows(paper: str, *, cells: int) -> list[str]:
    """Return the rows of the tables of so many cells in the part about a paper, without their
    heads.
    """
    part = PAGE.split(f"\n## {paper}\n")[1].split("\n## ")[0]
    lines = [
        line for line in part.splitlines() if line.startswith("|") and line.count("|") == cells + 1
    ]
    return [line for line in lines if not line.startswith(("| | ", "| reading ", "|---"))]


def unmatched(comparisons: tuple[Comparison, ...]) -> Iterator[str]:
    for one in comparisons:
        for cell in one.cells if one.names != ("readings",) else ():
            if cell.status in {Status.DEVIATES, Status.INCONSISTENT}:
                ours = f"{cell.published_text} | {cell.ours_text} | {cell.deviation:+.0%}"
                yield f"| {one.names[0].capitalize()} | {cell.what} | {ours} |"


@EACH_PAPER
def test_every_experiment_is_there_with_its_counts(paper: str) -> None:
    assert rows(paper, cells=6) == [
        f"| {', '.join(one.names).capitalize()}: {one.title} | {len(one.cells)} | "
        + " | ".join(str(one.count()[status]) for status in Status)
        + " |"
        for one in PAPERS[paper]()
    ]


@EACH_PAPER
def test_everything_that_does_not_match_is_there(paper: str) -> None:
    assert rows(paper, cells=5) == list(unmatched(PAPERS[paper]()))


def test_the_main_result_is_there_in_every_reading() -> None:
    readings = PAPERS["Deep Optimizer States"]()[-1]

    assert readings.names == ("readings",)
    assert rows("Deep Optimizer States", cells=3) == [
        f"| {cell.what} | {cell.ours_text} | {cell.deviation:+.0%} |" for cell in readings.cells
    ]


def test_what_the_log_of_one_gpu_says_of_both_readings_is_there() -> None:
    rejected = replace(TABLE_1, flush_bytes_per_s=2.5e9, upload_bytes_per_s=6e9)
    shape = Shape(29, 4096)
    used, other = (
        Job(shape=shape, ranks=1, reading=reading).iteration(Method.BLOCKING).seconds
        for reading in (TABLE_1, rejected)
    )
    text = " ".join(
        PAGE.split("\n### What a log says of the reading\n")[1].split("\n### ")[0].split()
    )

    assert (
        f"which are {shape.params / 1e9:.2f} B, the reading that we chose gives {used:.2f} s"
        in text
    )
    assert f'"Both, as the text", which we rejected, gives {other:.2f} s' in text
    assert abs(other - 9.48) < abs(used - 9.48)
