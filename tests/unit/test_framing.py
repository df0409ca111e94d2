"""The frame around headers and manifests: what was framed comes back, and nothing else is
believed.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepnvme.volume.framing import framed, shown, strict_json, unframed

JSON: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)


def _is_text(value: Any) -> bool:
    try:
        repr(value).encode()
        framed("thing", 1, value)
    except UnicodeEncodeError:
        return False
    return True


@given(JSON.filter(_is_text), st.binary(max_size=40))
def test_what_was_framed_comes_back_with_what_is_behind_it(content: Any, rest: bytes) -> None:
    payload, behind = unframed("thing", 3, framed("thing", 3, content) + rest)
    assert (strict_json(payload), behind) == (content, rest)


@given(st.data())
def test_any_bit_that_is_flipped_is_noticed(data: st.DataObject) -> None:
    whole = bytearray(framed("thing", 1, {"a": [1, 2.5, "b"]}))
    bit = data.draw(st.integers(0, 8 * len(whole) - 1))
    whole[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ValueError, match=r"damaged|begin with|version|announces|a length"):
        unframed("thing", 1, bytes(whole))


@pytest.mark.parametrize("kind", ["thin", "things", "th.ng"])
def test_a_frame_of_another_kind_is_refused(kind: str) -> None:
    with pytest.raises(ValueError, match=f'begin with "{kind} 1 "'):
        unframed(kind, 1, framed("thing", 1, 0))


def test_a_value_in_a_message_is_short() -> None:
    assert shown("x") == "'x'"
    assert shown("x" * 1000) == "'" + "x" * 149 + "... (1002 characters)"
    assert len(shown("x" * 1000, 100)) < 120
