"""Charts: SVG that parses, with every point inside its axes."""

from __future__ import annotations

import math
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity_engine.errors import ConfigError
from papers.charts import Chart, Series, svg

NUMBER = st.floats(0, 1e15) | st.floats(1e-9, 1)
POINTS = st.lists(st.tuples(NUMBER, NUMBER), min_size=1, max_size=8).map(tuple)
ABOVE_0 = st.lists(
    st.tuples(st.floats(1e-9, 1e15), st.floats(1e-9, 1e15)), min_size=1, max_size=8
).map(tuple)
TAG = "{http://www.w3.org/2000/svg}"


def chart(points: tuple[tuple[float, float], ...], *, is_log: bool = False) -> Chart:
    return Chart(
        title="a < b", x="x", y="y", series=(Series("s & t", points),), log_x=is_log, log_y=is_log
    )


def circles(text: str) -> list[tuple[float, float]]:
    found = ElementTree.fromstring(text).iter(f"{TAG}circle")
    return [(float(one.attrib["cx"]), float(one.attrib["cy"])) for one in found]


@given(POINTS)
def test_every_point_is_drawn_inside_the_picture(points: tuple[tuple[float, float], ...]) -> None:
    drawn = circles(svg(chart(points)))

    assert len(drawn) == len(points)
    assert all(0 <= x <= 700 and 0 <= y <= 360 for x, y in drawn)


@given(ABOVE_0)
def test_a_logarithmic_axis_does_the_same(points: tuple[tuple[float, float], ...]) -> None:
    drawn = circles(svg(chart(points, is_log=True)))

    assert all(math.isfinite(x) and 0 <= x <= 700 and 0 <= y <= 360 for x, y in drawn)


def test_larger_numbers_are_further_right_and_up() -> None:
    (x1, y1), (x2, y2) = circles(svg(chart(((1, 1), (2, 3)))))

    assert x1 < x2
    assert y1 > y2


def test_words_are_escaped() -> None:
    texts = [one.text for one in ElementTree.fromstring(svg(chart(((1, 1),)))).iter(f"{TAG}text")]

    assert "a < b" in texts
    assert "s & t" in texts


def test_nothing_to_draw_is_refused() -> None:
    with pytest.raises(ConfigError, match="a series with a point"):
        chart(())


def test_zero_on_a_logarithmic_axis_is_refused() -> None:
    with pytest.raises(ConfigError, match="above 0"):
        chart(((0, 1),), is_log=True)
