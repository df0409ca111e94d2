"""What callers give: a member of an enumeration or its name as text, whole numbers, sizes."""

from __future__ import annotations

import operator
from enum import Enum
from typing import Any, TypeVar

from deepnvme.sizes import parse_size

__all__ = ["as_bytes", "byte_count", "chosen", "whole_number"]

_Choice = TypeVar("_Choice", bound=Enum)


def chosen(kind: type[_Choice], value: _Choice | str, what: str) -> _Choice:
    """Return the member of `kind` that `value` is or names; `what` names the argument in errors.

    The name of a member is its value where that is text, else its own name in small letters.

    Raises:
        ValueError: `value` is no member and names none.
    """
    if isinstance(value, kind):
        return value
    for member in kind:
        if isinstance(value, str) and value == _text_of(member):
            return member
    choices = ", ".join(f"{kind.__name__}.{member.name} ({_text_of(member)!r})" for member in kind)
    raise ValueError(f"{what}: expected one of {choices}; got {value!r}")


def whole_number(what: str, value: Any, least: int = 0, most: int | None = None) -> int:
    """Return `value` as a whole number from `least` to `most`; `what` names the argument in errors.

    Raises:
        TypeError: it is no whole number.
        ValueError: it is less than `least` or more than `most`.
    """
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{what} must be a whole number, got {value!r}") from None
    if number < least:
        raise ValueError(
            f"{what} must {f'be {least} or more' if least else 'not be negative'}, got {number}"
        )
    if most is not None and number > most:
        raise ValueError(f"{what} must be at most {most}, got {number}")
    return number


def as_bytes(value: int | str) -> int:
    """Return a number of bytes that was given as a number or as text, such as "64MiB".

    Raises:
        ValueError: the text is not a whole number and a unit.
    """
    return parse_size(value) if isinstance(value, str) else value


def byte_count(what: str, value: int | str, least: int = 0, most: int | None = None) -> int:
    """Return a number of bytes from `least` to `most`, given as a number or as text ("64MiB").

    Raises:
        TypeError: it is no whole number.
        ValueError: it is less than `least` or more than `most`, or a text that names no size.
    """
    # The usual case: a buffer takes less time than the calls below.
    if type(value) is int and value >= least and most is None:
        return value
    if not isinstance(value, str):
        return whole_number(what, value, least, most)
    try:
        return whole_number(what, parse_size(value), least, most)
    except ValueError as problem:
        raise ValueError(f"{what}: {problem}") from None


def _text_of(member: Enum) -> str:
    return member.value if isinstance(member.value, str) else member.name.lower()
