"""Sizes and rates as text and numbers: "12 GiB" is 12884901888 bytes, "3.2 GB/s" 3.2e9 a second.

Reads or refuses with ConfigError: never guesses what "12G" means. Drops only the fraction of a byte
that "7.3 GiB" has. Called wherever a size is read, shown or aligned.
"""

from __future__ import annotations

import re
import sys
from fractions import Fraction

from infinity_engine.errors import ConfigError

__all__ = [
    "DAY_S",
    "GB",
    "KB",
    "MB",
    "NS_PER_S",
    "PB",
    "TB",
    "GiB",
    "KiB",
    "MiB",
    "PiB",
    "TiB",
    "align_down",
    "align_up",
    "format_bytes",
    "format_decimal_bytes",
    "format_known",
    "format_rate",
    "parse_bytes",
    "parse_rate",
    "positive",
]

KiB, MiB, GiB, TiB, PiB = 2**10, 2**20, 2**30, 2**40, 2**50
KB, MB, GB, TB, PB = 10**3, 10**6, 10**9, 10**12, 10**15
NS_PER_S = 10**9
DAY_S = 24 * 60 * 60

_BINARY = (("PiB", PiB), ("TiB", TiB), ("GiB", GiB), ("MiB", MiB), ("KiB", KiB), ("B", 1))
_DECIMAL = (("PB", PB), ("TB", TB), ("GB", GB), ("MB", MB), ("KB", KB), ("B", 1))
_NAMES = tuple(name for name, _ in _BINARY[:-1] + _DECIMAL)
_AMOUNT = re.compile(
    # Bounded: Python refuses to read numbers of thousands of digits, with another error.
    r"\s*(?P<number>[0-9]{1,30}(\.[0-9]{1,30})?)\s*(?P<unit>[A-Za-z]*)(?P<per>/s)?\s*"
)


def parse_bytes(size: int | str, *, field: str = "size") -> int:
    """Return `size` in bytes: a whole number of them, or text such as "12 GiB", "7.3GB" or "4096".

    The fraction of a byte in "7.3 GiB" is dropped.

    Raises:
        ConfigError: it is neither, or a part of a byte; names `field` and the nearest right form.
    """
    # True is an int in Python, and no size.
    if isinstance(size, int) and not isinstance(size, bool) and size >= 0:
        return size
    parts = _AMOUNT.fullmatch(size) if isinstance(size, str) else None
    # A rate is no size.
    if parts is None or parts["per"]:
        expected = "a whole number of bytes, 0 or more, or text such as '12 GiB' or '1.5 GB'"
        raise ConfigError(field=field, value=size, expected=expected)
    # Fractions are exact: 0.1 GB is 100000000 B and not one byte less.
    nbytes = Fraction(parts["number"]) * _scale(
        parts["unit"], number=parts["number"], per="", field=field, given=size
    )
    if nbytes.denominator != 1 and parts["unit"] in ("", "B"):
        raise ConfigError(
            field=field,
            value=size,
            expected=f"a whole number of bytes; nearest: '{round(nbytes)} B'",
        )
    return int(nbytes)


def format_bytes(nbytes: int) -> str:
    """Return `nbytes` as short text in binary units, such as "1.5 GiB".

    Rounded to three decimals: parse_bytes gives the same number back whenever those are exact.
    """
    return _format(Fraction(nbytes), _BINARY)


def format_decimal_bytes(nbytes: int) -> str:
    """Return `nbytes` as short text in decimal units, as drives are sold: "1.5 TB"."""
    return _format(Fraction(nbytes), _DECIMAL)


def parse_rate(rate: object, *, field: str = "rate") -> float:
    """Return `rate` in bytes per second: a positive number of them, or text such as "3.2 GB/s".

    Raises:
        ConfigError: it is neither; names `field` and the nearest right form.
    """
    parts = _AMOUNT.fullmatch(rate) if isinstance(rate, str) else None
    if parts is not None:
        number, unit = parts["number"], parts["unit"]
        scale = _scale(unit, number=number, per="/s", field=field, given=rate)
        if not parts["per"]:
            raise ConfigError(
                field=field, value=rate, expected=f"a rate: write '{number} {unit or 'B'}/s'"
            )
        # Through a Fraction, so that the only rounding is that of the result.
        rate = float(Fraction(number) * scale)
    return positive(
        rate,
        field=field,
        expected="a positive number of bytes per second, or text such as '3.2 GB/s'",
    )


def format_rate(bytes_per_s: float) -> str:
    """Return a rate as short text in decimal units, rounded to three decimals: "3.2 GB/s"."""
    return f"{_format(Fraction(bytes_per_s), _DECIMAL)}/s"


def format_known(value: object, words: str, unknown: str = "") -> str:
    """Return `words` with the value in place of their braces; `unknown` where there is none."""
    return unknown if value is None else words.format(value)


def positive(value: object, *, field: str, expected: str = "a positive number") -> float:
    """Return `value` as a float: a number above zero that is finite and no bool.

    Raises:
        ConfigError: it is not; names `field` and what was `expected`.
    """
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        # NaN fails every comparison, so this refuses it as well.
        or not 0 < value <= sys.float_info.max
    ):
        raise ConfigError(field=field, value=value, expected=expected)
    return float(value)


def align_up(nbytes: int, alignment: int) -> int:
    """Return the smallest multiple of `alignment` that is not below `nbytes`."""
    # Rounding down the negated number rounds the number up.
    return -align_down(-nbytes, alignment)


def align_down(nbytes: int, alignment: int) -> int:
    """Return the largest multiple of `alignment` that is not above `nbytes`."""
    if alignment <= 0:
        raise ConfigError(field="alignment", value=alignment, expected="a positive number of bytes")
    return nbytes - nbytes % alignment


def _scale(unit: str, *, number: str, per: str, field: str, given: object) -> int:
    """Return the bytes in `unit`, or refuse it with the forms that `given` may mean."""
    for known, scale in _BINARY + _DECIMAL:
        if known == (unit or "B"):
            return scale
    low = unit.lower()
    # "12G" may mean GB or GiB: both are offered, and neither is guessed.
    near = [known for known in _NAMES if known.lower() in (low, f"{low}b", f"{low}ib")]
    if not near:
        raise ConfigError(
            field=field, value=given, expected=(f"one of the units {', '.join(_NAMES)}")
        )
    forms = " or ".join(f"'{number} {known}{per}'" for known in near)
    raise ConfigError(
        field=field, value=given, expected=(f"a unit with one meaning: write {forms}")
    )


def _format(amount: Fraction, units: tuple[tuple[str, int], ...]) -> str:
    """Return `amount`, rounded to three decimals, in the largest unit that it then fills."""
    _, scale = _largest(amount, units)
    rounded = Fraction(round(amount * 1000 / scale) * scale, 1000)
    # Rounding may fill the next unit: one byte less than a GiB is 1 GiB and not 1024 MiB.
    name, scale = _largest(rounded, units)
    # In integers, so that no float shows digits of its own.
    whole, thousandths = divmod(int(rounded * 1000 / scale), 1000)
    return f"{whole}.{thousandths:03}".rstrip("0").rstrip(".") + f" {name}"


def _largest(amount: Fraction, units: tuple[tuple[str, int], ...]) -> tuple[str, int]:
    # Less than the smallest unit is shown in it: 0 B.
    return next((unit for unit in units if amount >= unit[1]), units[-1])
