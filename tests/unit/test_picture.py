"""The README's picture is that of the newest measurement, and its bars are as long as what they
stand for.
"""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "scripts" / "picture"), run_name="picture")


def test_the_readme_shows_the_picture_of_the_newest_page_and_links_it(
    script: dict[str, Any],
) -> None:
    shown, page = script["PICTURE"], script["newest"]()
    assert shown.read_text() == script["picture"](script["numbers"](page)), (
        f"run scripts/picture: there is a newer page, {page.name}"
    )
    readme = (ROOT / "README.md").read_text()
    for linked in (shown, page.with_suffix(".md")):
        assert str(linked.relative_to(ROOT)) in readme, f"README.md does not link {linked.name}"


def test_bars_are_in_proportion(script: dict[str, Any]) -> None:
    names = [
        f"{who}, {where}: {kind}"
        for who in script["SYSTEMS"]
        for where in script["WHERE"]
        for kind in ("step", "growth")
    ]
    rounds = [{name: float(10 * (number + 1)) for number, name in enumerate(names)}]
    drawn = script["picture"]({"rounds": rounds})

    bars = [float(width) for width in re.findall(r'width="([\d.]+)" height="16"', drawn)]
    steps = sorted(value for name, value in rounds[0].items() if name.endswith("step"))
    assert len(bars) == len(names)
    assert sorted(bars[: len(steps)]) == pytest.approx(
        [script["PANEL"] * value / max(steps) for value in steps], abs=0.1
    )
