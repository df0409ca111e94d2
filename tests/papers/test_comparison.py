"""Published beside computed: what matches, and that a status follows from the numbers."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity_engine.errors import ConfigError
from papers.comparison import (
    Cell,
    Comparison,
    Published,
    Status,
    about,
    at_least,
    at_most,
    between,
    exactly,
    printed,
)


def cell(
    published: Published | None, ours: float, upper: float | None = None, contradiction: str = ""
) -> Cell:
    return Cell(what="it", published=published, ours=ours, upper=upper, contradiction=contradiction)


@pytest.mark.parametrize(
    ("published", "ours", "status"),
    [
        (printed("1.83"), 1.834, Status.MATCHES),
        (printed("1.83"), 1.836, Status.DEVIATES),
        (printed("22"), 21.5, Status.MATCHES),
        (about(2.0), 2.3, Status.MATCHES),
        (about(2.0), 1.6, Status.DEVIATES),
        (between(2.0, 2.5), 2.2, Status.MATCHES),
        (between(2.0, 2.5), 3.0, Status.DEVIATES),
        (exactly(8), 8, Status.MATCHES),
        (exactly(8), 16, Status.DEVIATES),
        (at_least(1.7), 9.0, Status.MATCHES),
        (at_least(1.7), 1.69, Status.DEVIATES),
        (at_most(4.0), 0.0, Status.MATCHES),
        (at_most(4.0), 4.1, Status.DEVIATES),
        (None, 1.0, Status.NOT_PRINTED),
    ],
)
def test_a_status_follows_from_the_numbers(
    published: Published | None, ours: float, status: Status
) -> None:
    assert cell(published, ours).status is status


def test_a_contradiction_counts_only_where_the_numbers_differ() -> None:
    assert cell(about(2), 2.1, contradiction="because").status is Status.MATCHES
    assert cell(about(2), 9, contradiction="because").status is Status.INCONSISTENT
    assert cell(about(2), 2.1, contradiction="because").why == ""
    assert cell(about(2), 9, contradiction="because").why == "because"


def test_a_range_of_ours_matches_what_is_in_it() -> None:
    assert cell(about(3), 2, 4).deviation == 0
    assert cell(about(3), 4.5, 6).deviation == pytest.approx(0.5)
    assert cell(about(3), 1, 1.5).deviation == pytest.approx(-0.5)


def test_a_range_that_ends_before_it_begins_is_refused() -> None:
    with pytest.raises(ConfigError, match="2 or more"):
        cell(None, 2, 1)


@given(st.floats(0.01, 1e6), st.floats(0.01, 1e6))
def test_a_deviation_is_zero_only_inside_and_has_the_sign_of_the_difference(
    low: float, ours: float
) -> None:
    deviation = cell(between(low, 2 * low), ours).deviation

    assert deviation is not None
    assert (deviation > 0) == (ours > 2 * low * (1 + 1e-9)) or deviation == pytest.approx(
        0, abs=1e-8
    )
    assert (deviation < 0) == (ours < low * (1 - 1e-9)) or deviation == pytest.approx(0, abs=1e-8)


@given(st.floats(0, 1e4), st.integers(0, 3))
def test_what_is_rounded_to_the_printed_digits_matches(value: float, digits: int) -> None:
    assert cell(printed(f"{value:.{digits}f}"), value).status is Status.MATCHES


def test_texts_have_the_unit_once() -> None:
    timed = Cell(what="it", published=about(2.0, "~2"), ours=1.5, upper=2.5, unit="s", digits=1)

    assert (timed.ours_text, timed.published_text) == ("1.5 - 2.5 s", "~2 s")
    assert (
        Cell(what="it", published=about(1, "almost"), ours=1, unit="s").published_text == "almost"
    )


def test_its_mapping_is_json_and_has_no_infinities() -> None:
    comparison = Comparison(
        names=("figure 1",), title="t", cells=(cell(at_least(2), 3), cell(None, 1))
    )
    text = json.dumps(comparison.to_mapping(), allow_nan=False)

    assert json.loads(text)["cells"][0]["published"] == {"text": ">= 2", "low": 2, "high": None}
    assert comparison.count()[Status.MATCHES] == 1
