"""What callers give: a member of an enumeration or its name as text, and whole numbers.

A leaf: knows none of them.
"""

from __future__ import annotations

import operator
from enum import Enum
from typing import Any, TypeVar

__all__ = ["chosen", "whole_number"]

_Choice = TypeVar("_Choice", bound=Enum)


def chosen(kind: type[_Choice], value: _Choice | str, what: str) -> _Choice:
    """Return the member of `kind` that `value` is or names; `what` names the argument in the
    refusal.

    The name of a member is its value where that is text, else its own name in small letters.

    Raises:
        ValueError: there is none; nothing else is taken for one of them.
    """
    if isinstance(value, kind):
        return value
    for each in kind:
        if isinstance(value, str) and value == _text_of(each):
            return each
    choices = ", ".join(f"{kind.__name__}.{each.name} ({_text_of(each)!r})" for each in kind)
    raise ValueError(f"{what}: expected one of {choices}; got {value!r}")


def whole_number(what: str, value: Any, least: int = 0) -> int:
    """Return a whole number that is large enough; `what` names the argument in the refusal.

    Raises:
        TypeError: it is no whole number.
        ValueError: it is less than `least`.
    """
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{what} is a whole number, got {value!r}") from None
    if number < least:
        raise ValueError(
            f"{what} must {f'be {least} or more' if least else 'not be negative'}, got {number}"
        )
    return number


def _text_of(member: Enum) -> str:
    return member.value if isinstance(member.value, str) else member.name.lower()
