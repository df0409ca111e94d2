"""The pages keep to the width of the code: 100 characters, wherever a line can be broken."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WIDTH = 100
# Benchmarks' pages are written by benches, and the reference by a script, from docstrings.
PAGES = sorted(
    page
    for page in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("docs/decisions/*.md"))
    if page.name != "nvme-reference.md"
)
BULLET = r"(?:[-*+]|\d+\.)\s"
CAN_BE_BROKEN = re.compile(rf"\s*(?:{BULLET}+)?(?!{BULLET})\S+\s")


def wide_lines(text: str) -> Iterator[int]:
    """Yield the numbers of lines that are too wide; tables, headings and code may be wider."""
    is_code = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif (
            len(line) > WIDTH
            and not is_code
            and not line.lstrip().startswith(("|", "#"))
            and CAN_BE_BROKEN.match(line[: WIDTH + 1])
        ):
            yield number


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_lines_of_a_page_are_at_most_100_wide(page: Path) -> None:
    assert list(wide_lines(page.read_text())) == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("word " * 21, [1]),
        ("- " + "word " * 20, [1]),
        ("short\n" + "word " * 21, [2]),
        ("a" * 101, []),
        ("- " + "a" * 101, []),
        ("| " + "word " * 21, []),
        ("```\n" + "word " * 21 + "\n```", []),
        ("```\n```\n" + "word " * 21, [3]),
    ],
)
def test_a_line_is_too_wide_where_it_can_be_broken(text: str, found: list[int]) -> None:
    assert list(wide_lines(text)) == found
