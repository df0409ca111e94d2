"""docs/concepts.md keeps its word: its layers are the enforced ones, its words and strategies are
where it says.
"""

from __future__ import annotations

import ast
import re
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest
from architecture.test_source_rules import PACKAGES, ROWS, modules

from infinity_engine.plan import parse_strategy
from infinity_engine.plan.strategy import STRATEGIES

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/concepts.md").read_text()
TO_COME = "to come"


def table(heading: str) -> list[list[str]]:
    """Return the cells of the rows of the table under `heading`, without its head."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = [line[1:-1].split("|") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


@cache
def classes() -> dict[str, set[str]]:
    """Return the files that define a class, by the name of the class."""
    found: dict[str, set[str]] = {}
    for module in modules(ROOT):
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, set()).add(module.file)
    return found


PARTS = [re.findall(rf"`(\w+)`( \({TO_COME}\))?", row[0]) for row in table("Layers")]
WORDS = [
    (row[0].strip("`"), row[-1].strip("`")) for row in table("Words") if row[0].startswith("`")
]


def test_the_layers_on_the_page_are_those_that_are_enforced() -> None:
    assert [{part for part, _ in row} for row in PARTS] == [row - {"_native"} for row in ROWS]


@pytest.mark.parametrize(("part", "note"), [pair for row in PARTS for pair in row])
def test_a_part_is_to_come_exactly_until_it_is_there(part: str, note: str) -> None:
    folder = ROOT / "infinity_engine"
    is_there = part in PACKAGES or (folder / part).is_dir() or (folder / f"{part}.py").is_file()

    assert is_there != bool(note)


@pytest.mark.parametrize(("word", "where"), WORDS)
def test_a_word_is_to_come_exactly_until_it_is_where_the_page_says(word: str, where: str) -> None:
    assert where in classes().get(word, {TO_COME})


def test_the_strategies_on_the_page_are_those_that_are_read() -> None:
    assert [row[0].strip("`") for row in table("Strategies")] == [kind.name for kind in STRATEGIES]


def test_the_settings_of_a_strategy_on_the_page_are_those_that_it_has() -> None:
    for kind, row in zip(STRATEGIES, table("Strategies"), strict=True):
        described = re.findall(r"`(\w+)`(?= or|:)", row[-1])
        assert described == [item.name for item in fields(kind)], kind.name


def test_the_strategies_of_the_example_can_be_read() -> None:
    [example] = re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
    examples = [ast.literal_eval(line) for line in example.splitlines()]

    assert [parse_strategy(given["strategy"]).name for given in examples] == [
        "host_only",
        "static_split",
        "nvme_streamed",
    ]
