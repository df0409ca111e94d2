from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity_engine.errors import ConfigError
from infinity_engine.units import (
    GB,
    KB,
    MB,
    PB,
    TB,
    GiB,
    KiB,
    MiB,
    PiB,
    TiB,
    align_down,
    align_up,
    format_bytes,
    format_decimal_bytes,
    format_rate,
    parse_bytes,
    parse_rate,
    positive,
)

PATIENT = settings(deadline=None)
NEAR = st.integers(1, 2**19)
UNITS = {
    "B": 1,
    "KiB": KiB,
    "MiB": MiB,
    "GiB": GiB,
    "TiB": TiB,
    "KB": KB,
    "MB": MB,
    "GB": GB,
    "TB": TB,
    "PiB": PiB,
    "PB": PB,
}


def test_binary_units_grow_by_1024_and_decimal_ones_by_1000() -> None:
    assert (KiB, MiB, GiB, TiB, PiB) == tuple(1024**power for power in range(1, 6))
    assert tuple(1000**power for power in range(1, 6)) == (KB, MB, GB, TB, PB)


# --- sizes ---


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("12GiB", 12 * GiB),
        ("1.5 GB", 1_500_000_000),
        (" 0.5\tKiB ", 512),
        ("4096", 4096),
        ("7 B", 7),
        ("0", 0),
        ("001.500 KB", 1500),
        ("1.000000000001 TB", TB + 1),
        ("7.3 GiB", 7838315315),
        ("0.0001 KiB", 0),
    ],
)
def test_a_size_is_read_to_the_byte(text: str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("nbytes", [0, 123, 2**80])
def test_a_whole_number_is_a_size_in_bytes(nbytes: int) -> None:
    assert parse_bytes(nbytes) == nbytes


@PATIENT
@given(st.integers(0, 10**15), st.integers(0, 12), st.sampled_from(sorted(UNITS)))
def test_a_decimal_size_is_read_to_the_byte_and_a_part_of_one_is_refused(
    digits: int, decimals: int, unit: str
) -> None:
    exact = Fraction(digits, 10**decimals) * UNITS[unit]
    text = (
        f"{digits // 10**decimals}.{digits % 10**decimals:0{decimals}d} {unit}"
        if decimals
        else f"{digits} {unit}"
    )

    if exact.denominator == 1 or unit != "B":
        assert parse_bytes(text) == exact.numerator // exact.denominator
    else:
        with pytest.raises(ConfigError, match=r"a whole number of bytes; nearest: '[0-9]+ B'"):
            parse_bytes(text)


@PATIENT
@given(st.text(st.sampled_from("0123456789.-+eEkKmMgGtTiIbB/s% _,∞٣"), max_size=12) | st.text())
def test_any_text_is_a_size_or_a_config_error(text: str) -> None:
    try:
        nbytes = parse_bytes(text)
    except ConfigError:
        return
    assert nbytes >= 0


@pytest.mark.parametrize(
    "size",
    [
        -1,
        "-1",
        "-0.5 GiB",
        "NaN",
        "nan GiB",
        "inf",
        "1e9",
        "",
        " ",
        "GiB",
        "1,5 GB",
        "1 2 GB",
        "1_000",
        "3 GB/s",
    ],
)
def test_what_is_no_size_is_refused(size: int | str) -> None:
    with pytest.raises(
        ConfigError, match="expected a whole number of bytes, 0 or more, or text such as '12 GiB'"
    ):
        parse_bytes(size)


@pytest.mark.parametrize("size", [True, 1.0, math.nan, None, [1], b"1 GiB"])
def test_a_size_of_another_type_is_refused(size: object) -> None:
    with pytest.raises(ConfigError, match="expected a whole number of bytes"):
        parse_bytes(size)  # type: ignore[arg-type]


def test_more_digits_than_python_reads_are_refused_too() -> None:
    with pytest.raises(ConfigError):
        parse_bytes("9" * 10_000)


@pytest.mark.parametrize("text", ["12G", "12g", "12 G"])
def test_an_ambiguous_unit_is_refused_with_both_meanings(text: str) -> None:
    with pytest.raises(ConfigError, match="write '12 GiB' or '12 GB', got '12"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "right"),
    [("12gib", "12 GiB"), ("1.5Gb", "1.5 GB"), ("2 kB", "2 KB"), ("3 b", "3 B"), ("4Gi", "4 GiB")],
)
def test_a_unit_that_is_nearly_right_is_refused_with_the_right_form(text: str, right: str) -> None:
    with pytest.raises(ConfigError, match=f"write '{right}'"):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["1 XB", "1 EB", "1 GBit", "1 E"])
def test_an_unknown_unit_is_refused_with_the_known_ones(text: str) -> None:
    with pytest.raises(
        ConfigError, match="one of the units PiB, TiB, GiB, MiB, KiB, PB, TB, GB, MB, KB, B"
    ):
        parse_bytes(text)


def test_a_fraction_of_a_byte_is_refused_with_the_nearest_size() -> None:
    with pytest.raises(ConfigError, match="nearest: '307 B'"):
        parse_bytes("307.2 B")


def test_a_refused_size_names_the_field_it_was_given_for() -> None:
    with pytest.raises(ConfigError, match=r"^budget\.host: "):
        parse_bytes("12G", field="budget.host")


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (12 * GiB, "12 GiB"),
        (GiB + 1, "1 GiB"),
        (10 * MiB, "10 MiB"),
        (1234 * PiB, "1234 PiB"),
        (TiB + TiB // 8, "1.125 TiB"),
        (GiB // 3, "341.333 MiB"),
        (MiB - 1, "1023.999 KiB"),
        (GiB - 1, "1 GiB"),
        (GiB - MiB // 2, "1023.5 MiB"),
        (1024 * TiB - 1, "1 PiB"),
    ],
)
def test_a_size_is_shown_short(nbytes: int, text: str) -> None:
    assert format_bytes(nbytes) == text


@PATIENT
@given(st.integers(0, 2**20), st.sampled_from([KiB, MiB, GiB, TiB, PiB]))
def test_a_size_that_is_shown_exactly_is_read_back_the_same(eighths: int, unit: int) -> None:
    nbytes = eighths * unit // 8
    text = format_bytes(nbytes)
    shown = Fraction(text.split()[0]) * UNITS[text.split()[1]]

    if shown == nbytes:
        assert parse_bytes(text) == nbytes
    if eighths < 8 * 1024:
        assert shown == nbytes


@PATIENT
@given(st.integers(0, 2**60))
def test_a_shown_size_is_off_by_less_than_a_thousandth(nbytes: int) -> None:
    number, unit = format_bytes(nbytes).split()

    assert abs(Fraction(number) * UNITS[unit] - nbytes) * 1000 <= nbytes


@PATIENT
@given(
    st.integers(1, 2**60)
    | st.builds(lambda unit, less: unit - less, st.sampled_from([MiB, GiB, TiB, PiB]), NEAR)
)
def test_a_shown_size_never_fills_a_larger_unit_than_its_own(nbytes: int) -> None:
    number, unit = format_bytes(nbytes).split()

    assert Fraction(number) >= 1
    assert Fraction(number) < 1024 or unit == "PiB"


def test_what_a_drive_is_rated_for_is_shown_in_decimal_units() -> None:
    assert [format_decimal_bytes(nbytes) for nbytes in (0, 999, 1500, 600 * TB)] == [
        "0 B",
        "999 B",
        "1.5 KB",
        "600 TB",
    ]


# --- rates ---


@pytest.mark.parametrize(
    ("rate", "bytes_per_s"),
    [
        ("3.2GB/s", 3.2e9),
        ("1 GiB/s", 2.0**30),
        ("5/s", 5.0),
        ("0.5 B/s", 0.5),
        (7, 7.0),
        (2.5e9, 2.5e9),
    ],
)
def test_a_rate_is_read_in_bytes_per_second(rate: float | str, bytes_per_s: float) -> None:
    assert parse_rate(rate) == bytes_per_s


@pytest.mark.parametrize(
    "rate", [0, -1, 0.0, math.nan, math.inf, 10**400, "0 GB/s", "-1 GB/s", "fast", "", True, None]
)
def test_what_is_no_positive_finite_rate_is_refused(rate: object) -> None:
    with pytest.raises(
        ConfigError, match=r"a positive number of bytes per second, or text such as '3\.2 GB/s'"
    ):
        parse_rate(rate)


@pytest.mark.parametrize(("rate", "right"), [("3 GB", "3 GB/s"), ("3", "3 B/s")])
def test_a_rate_without_per_second_is_refused_with_the_right_form(rate: str, right: str) -> None:
    with pytest.raises(ConfigError, match=f"write '{right}'"):
        parse_rate(rate)


def test_a_rate_of_an_ambiguous_unit_is_refused_with_both_meanings() -> None:
    with pytest.raises(ConfigError, match="write '3 GiB/s' or '3 GB/s'"):
        parse_rate("3 G/s")


def test_a_refused_rate_names_the_field_it_was_given_for() -> None:
    with pytest.raises(ConfigError, match=r"^h2d: "):
        parse_rate("x", field="h2d")


@pytest.mark.parametrize(
    ("bytes_per_s", "text"),
    [
        (3.2e9, "3.2 GB/s"),
        (999.0, "999 B/s"),
        (0.25, "0.25 B/s"),
        (1e12 / 3, "333.333 GB/s"),
        (1e9 - 1, "1 GB/s"),
    ],
)
def test_a_rate_is_shown_short(bytes_per_s: float, text: str) -> None:
    assert format_rate(bytes_per_s) == text


@PATIENT
@given(st.integers(1, 10**7))
def test_a_rate_of_whole_kilobytes_is_read_back_the_same(kb_per_s: int) -> None:
    shown = parse_rate(format_rate(kb_per_s * 1e3))

    assert abs(shown - kb_per_s * 1e3) <= shown / 1000
    if kb_per_s < 10**6:
        assert shown == kb_per_s * 1e3


@PATIENT
@given(
    st.floats(1, 1e18)
    | st.builds(lambda unit, less: float(unit - less), st.sampled_from([MB, GB, TB]), NEAR)
)
def test_a_shown_rate_never_fills_a_larger_unit_than_its_own(bytes_per_s: float) -> None:
    number, unit = format_rate(max(bytes_per_s, 1.0)).split()

    assert Fraction(number) >= 1
    assert Fraction(number) < 1000 or unit == "PB/s"


# --- positive numbers ---


@PATIENT
@given(st.floats(0, exclude_min=True, allow_infinity=False) | st.integers(1, 2**1023))
def test_a_positive_number_is_returned_as_a_float(value: float) -> None:
    returned = positive(value, field="x")

    assert isinstance(returned, float)
    assert returned == float(value)


@pytest.mark.parametrize(
    "value", [0, -1, -0.0, math.nan, math.inf, 10**400, True, "1", None, [1], 1j]
)
def test_what_is_no_positive_finite_number_is_refused_in_the_words_given(value: object) -> None:
    with pytest.raises(ConfigError, match=r"^norm: expected more than nothing, got ") as caught:
        positive(value, field="norm", expected="more than nothing")
    assert caught.value.value is value


# --- alignment ---


@PATIENT
@given(st.integers(-(2**70), 2**70), st.integers(1, 2**30))
def test_aligning_gives_the_nearest_multiples_on_both_sides(nbytes: int, alignment: int) -> None:
    low, high = align_down(nbytes, alignment), align_up(nbytes, alignment)

    assert low <= nbytes <= high
    assert low % alignment == high % alignment == 0
    assert high - low == (0 if nbytes % alignment == 0 else alignment)


@pytest.mark.parametrize("alignment", [0, -4096])
def test_an_alignment_that_is_not_positive_is_refused(alignment: int) -> None:
    for align in (align_up, align_down):
        with pytest.raises(ConfigError, match="alignment: expected a positive number of bytes"):
            align(10, alignment)
