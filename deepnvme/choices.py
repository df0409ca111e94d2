"""What a caller chose of an enumeration: a member of it, or the text of its value. A leaf: knows none of them."""

from __future__ import annotations

from enum import Enum
from typing import TypeVar

__all__ = ["chosen"]

_Choice = TypeVar("_Choice", bound=Enum)


def chosen(kind: type[_Choice], value: _Choice | str, what: str) -> _Choice:
    """Return the member of `kind` that `value` is, or whose value it is; `what` names the argument in the refusal.

    Raises:
        ValueError: there is none; nothing else is taken for one of them.
    """
    if isinstance(value, kind):
        return value
    for each in kind:
        if isinstance(value, str) and value == each.value:
            return each
    choices = ", ".join(f"{kind.__name__}.{each.name} ({each.value!r})" for each in kind)
    raise ValueError(f"{what}: expected one of {choices}; got {value!r}")
