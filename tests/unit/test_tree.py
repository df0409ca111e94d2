"""deepnvme.store.tree: a state dict comes back exactly as it was or is refused, with where and what to
do.
"""

from __future__ import annotations

import copy
import enum
import json
import math
import re
import struct
import subprocess
import sys
from collections import Counter, OrderedDict, defaultdict, namedtuple
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from deepnvme.memory.arrays import Returns
from deepnvme.store.manifest import Manifest, ManifestError, encode, parse
from deepnvme.store.tree import MAX_DEPTH, flatten, leaves, unflatten

needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
VOLUME = "5f1c0f6e2f0b4d8ea3a1c2d3e4f50617"


def stored(structure: Any) -> Any:
    """Return the structure as it comes out of a manifest."""
    data = encode(Manifest(VOLUME, 1, {}, {"state": structure}))
    return parse(data, volume=VOLUME, capacities=()).trees["state"]


def there_and_back(state: Any) -> Any:
    structure, found = flatten(state)
    return unflatten(stored(structure), found)


def same(one: Any, other: Any) -> bool:
    """Tell whether they are the same to the bit: types, order, identity of leaves; NaN is
    itself.
    """
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return one is other
    if isinstance(one, dict):
        return same(list(one.items()), list(other.items()))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, np.generic):
        return bool(one.dtype == other.dtype) and one.tobytes() == other.tobytes()
    if isinstance(one, float):
        return struct.pack("d", one) == struct.pack("d", other)
    return bool(one == other)


# --- there and back -------------------------------------------------------------------------------

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
scalars = (
    st.none() | st.booleans() | st.integers() | st.integers(2**52, 2**70) | st.floats() | texts
)
numpy_scalars = st.builds(
    lambda kind, value: kind(value),
    st.sampled_from([np.float32, np.float64, np.int8, np.uint64, np.bool_, np.complex64]),
    st.integers(0, 100),
)
arrays = st.builds(
    np.zeros, st.lists(st.integers(0, 2), max_size=2).map(tuple), st.sampled_from(["f4", "u1", "?"])
)
blobs = st.binary(max_size=5) | st.builds(bytes, st.sampled_from([4096, 4097, 9000]))
keys = scalars | st.sampled_from(["a", "b", "a.b", "a/b", "", ".", "0", "_", "a~2"])
states = st.recursive(
    scalars | blobs | numpy_scalars | arrays,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=3).map(OrderedDict)
    ),
    max_leaves=20,
)


def test_long_bytes_are_a_leaf_and_not_a_part_of_the_structure() -> None:
    long = bytes(range(256)) * 40
    structure, found = flatten({"a": long, "b": [long], "c": long[:4096]})

    assert found == {"a": long}  # one object is one leaf
    assert structure["dict"][:2] == [["a", {"blob": "a"}], ["b", [{"blob": "a"}]]]
    assert leaves(structure) == {"a": Returns.BYTES}
    assert unflatten(structure, {"a": memoryview(bytearray(long))}) == {
        "a": long,
        "b": [long],
        "c": long[:4096],
    }


@settings(max_examples=300)
@given(states)
@example({"a": {"b": np.zeros(1)}, "a.b": np.zeros(2), "a.b~2": np.zeros(3)})
@example({1: np.zeros(1), "1": np.zeros(2), "": {"": np.zeros(3)}})
@example({math.nan: -0.0, -0.0: math.nan, math.inf: -math.inf})
@example({True: 1, 2: True, 0.0: None, None: "None"})
def test_a_state_comes_back_exactly(state: Any) -> None:
    assert same(there_and_back(state), state)


@given(states)
def test_every_leaf_has_a_name_of_its_own_without_a_slash(state: Any) -> None:
    structure, found = flatten(state)

    assert len({id(leaf) for leaf in found.values()}) == len(found)
    assert leaves(stored(structure)) == {
        name: Returns.BYTES if isinstance(leaf, bytes) else Returns.NUMPY
        for name, leaf in found.items()
    }
    assert not any("/" in name or not name for name in found)


@given(states)
def test_a_structure_is_strict_json(state: Any) -> None:
    structure, _ = flatten(state)

    assert json.loads(json.dumps(structure, allow_nan=False)) == structure


def test_names_are_the_way_to_the_leaf() -> None:
    state = {
        "model": {"layers.0.weight": np.zeros(2)},
        "optimizer": {"state": [{0: np.ones(2)}]},
        5: (np.ones(1),),
    }

    _, found = flatten(state)

    assert list(found) == ["model.layers.0.weight", "optimizer.state.0.0", "5.0"]


def test_names_that_would_be_the_same_are_told_apart() -> None:
    state = {
        "a": {"b": np.zeros(1)},
        "a.b": np.zeros(2),
        "a/b": np.zeros(3),
        "a%2Fb": np.zeros(4),
        "a.b~2": np.zeros(5),
    }

    _, found = flatten(state)

    assert {name: len(leaf) for name, leaf in found.items()} == {
        "a.b": 1, "a.b~2": 2, "a%2Fb": 3, "a%2Fb~2": 4, "a.b~2~2": 5,
    }  # fmt: skip


def test_a_state_can_be_one_leaf_or_one_value() -> None:
    leaf = np.zeros(3)

    assert flatten(leaf) == ({"array": "_"}, {"_": leaf})
    assert there_and_back(leaf) is leaf
    assert there_and_back(3) == 3


def test_an_array_in_several_places_is_one_leaf_and_one_array_again() -> None:
    shared = np.zeros(3)

    _, found = flatten({"embedding": shared, "head": [shared]})
    back = there_and_back({"embedding": shared, "head": [shared]})

    assert list(found) == ["embedding"]
    assert back["embedding"] is back["head"][0]


def test_the_structure_is_what_the_format_says() -> None:
    state = OrderedDict(
        a=[1, (2.5, None)],
        b={7: np.zeros(1), None: b"\x00\xff"},
        c=2**60,
        d=math.inf,
        e=np.float32(1),
    )

    structure, _ = flatten(state)

    assert structure == {
        "ordered": [
            ["a", [1, {"tuple": [2.5, None]}]],
            ["b", {"dict": [[7, {"array": "b.7"}], [None, {"bytes": "AP8="}]]}],
            ["c", {"int": "0x1000000000000000"}],
            ["d", {"float": "7ff0000000000000"}],
            ["e", {"numpy": ["F32", "0000803f"]}],
        ]
    }


def test_the_deepest_state_comes_back() -> None:
    state: Any = {"leaf": np.zeros(1)}
    for _ in range(MAX_DEPTH - 1):
        state = OrderedDict(x=state)

    assert same(there_and_back(state), state)


# --- torch ----------------------------------------------------------------------------------------


@needs_torch
def test_the_state_of_a_model_and_its_optimizer_comes_back() -> None:
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    state: dict[str, Any] = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "rng": torch.get_rng_state(),
        "step": 1,
    }

    back = there_and_back(state)

    assert list(back["model"]) == list(state["model"])
    assert type(back["model"]) is OrderedDict
    assert type(back["optimizer"]["param_groups"][0]["betas"]) is tuple
    assert list(back["optimizer"]["state"]) == [0, 1, 2, 3]
    model.load_state_dict(back["model"])
    optimizer.load_state_dict(back["optimizer"])


@needs_torch
def test_a_structure_remembers_which_leaves_were_tensors() -> None:
    import torch

    structure, _ = flatten(
        {"t": torch.zeros(2), "p": torch.nn.Parameter(torch.zeros(2)), "a": np.zeros(2)}
    )

    assert leaves(structure) == {"t": Returns.TORCH, "p": Returns.TORCH, "a": Returns.NUMPY}


@needs_torch
@pytest.mark.parametrize("value", ["torch.Size([2])", "torch.float32", "torch.device('cpu')"])
def test_what_torch_has_beside_tensors_is_refused(value: str) -> None:
    import torch

    with pytest.raises(
        TypeError,
        match=r"state\['x'\]\[0\] is a torch\.\w+, .*: (make it a plain tuple|give its str)",
    ):
        flatten({"x": [eval(value, {"torch": torch})]})


@needs_torch
def test_a_tensor_whose_dtype_has_no_code_is_refused_with_its_place() -> None:
    import torch

    with pytest.raises(TypeError, match=r"state\['x'\]: torch\.float8_e4m3fnuz has no code"):
        flatten({"x": torch.zeros(2, dtype=torch.float8_e4m3fnuz)})


def test_plain_states_need_no_torch() -> None:
    program = (
        "import sys\nfrom deepnvme.store.tree import *\nimport numpy\n"
        "unflatten(*flatten({'a': [numpy.zeros(2), 1]}))\nprint('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )

    assert done.stdout.strip() == "False"


# --- what is refused ------------------------------------------------------------------------------


class Colour(enum.IntEnum):
    RED = 1


class Text(str):
    __slots__ = ()


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Point(1, 2), r"is a .*Point, which .*: make it a plain tuple first"),
        (defaultdict(list), r"is a collections\.defaultdict, .*: make it a plain dict first"),
        (Counter("a"), "make it a plain dict first"),
        ({1, 2}, "is a set, .*: make it a list first"),
        (Colour.RED, "is a .*Colour, .*: make it a plain value first"),
        (Text("a"), "make it a plain value first"),
        (bytearray(b"a"), "is a bytearray, .*: make it bytes, or an array"),
        (1j, "is a complex, .*: give its state as"),
        (object(), "is a object, .*: give its state as"),
        (len, "give its state as"),
        (np.zeros(2, "O"), "dtype object holds Python objects"),
        (np.zeros(2, ">f4"), "dtype >f4 is big-endian"),
        (np.ma.masked_array([1]), "may mean more than its bytes say"),
        (np.datetime64("2020"), "has no code"),
        (np.str_("a"), r"make it a plain value first: .* str\("),
    ],
)
def test_what_cannot_be_kept_exactly_is_refused_with_where_and_what_to_do(
    value: Any, message: str
) -> None:
    with pytest.raises(TypeError, match=rf"^state\['a'\]\[1\].*{message}"):
        flatten({"a": [0, value]})


@pytest.mark.parametrize("key", [(1, 2), b"a", Colour.RED, np.int64(1), frozenset()])
def test_a_key_that_cannot_be_kept_is_refused(key: Any) -> None:
    with pytest.raises(
        TypeError, match=r"^state\['a'\] has the key .*: expected str, int, bool, float or None"
    ):
        flatten({"a": {key: 1}})


@pytest.mark.parametrize("state", [{"a": "\ud800"}, {"a": {"\ud800": 1}}])
def test_text_that_is_none_is_refused(state: Any) -> None:
    with pytest.raises(ValueError, match=r"state\['a'\].*half of a surrogate pair"):
        flatten(state)


def test_a_state_in_itself_is_refused() -> None:
    state: dict[str, Any] = {}
    state["self"] = state

    with pytest.raises(ValueError, match="64 containers, the most there may be; is one in itself"):
        flatten(state)


# --- a structure is not believed ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("structure", "message"),
    [
        ({}, "state: expected an object with one tag"),
        ({"dict": [], "list": []}, "one tag"),
        ({"set": []}, "a tag of this format"),
        ({"dict": {}}, "a list, got {}"),
        ({"dict": [["a"]]}, r"a key and a value, got \['a'\]"),
        ({"dict": [["a", 1, 2]]}, "a key and a value"),
        ({"dict": ["ab"]}, "a key and a value, got 'ab'"),
        ({"dict": [["a", 1], ["a", 2]]}, "state has the key 'a' twice"),
        ({"dict": [[1, 1], [True, 2]]}, "the key True twice"),
        ({"dict": [[[], 1]]}, "a plain value as a key"),
        ({"dict": [[{"tuple": []}, 1]]}, "a plain value as a key"),
        ({"dict": [[{"bytes": ""}, 1]]}, "a plain value as a key"),
        ({"tuple": 3}, "a list, got 3"),
        ([{"tensor": 3}], r"state\[0\]: expected the name of a leaf, got 3"),
        ({"array": None}, "the name of a leaf"),
        ({"int": 3}, "a tag of this format with its content"),
        ({"int": "12"}, "a tag of this format with its content"),
        ({"int": "0x"}, "a tag of this format with its content"),
        ({"float": "nan"}, "a tag of this format with its content"),
        ({"float": "7ff000000000000"}, "a tag of this format with its content"),
        ({"bytes": "!!!!"}, "state: "),
        ({"bytes": "A"}, "state: "),
        ({"bytes": "é"}, "state: "),
        ({"bytes": 3}, "a tag of this format with its content"),
        ({"numpy": ["F32"]}, "a tag of this format with its content"),
        ({"numpy": ["F32", "00"]}, "no scalar of numpy"),
        ({"numpy": ["F32", ""]}, "no scalar of numpy"),
        ({"numpy": ["F32", "00" * 8]}, "no scalar of numpy"),
        ({"numpy": ["F32", " 0000803f"]}, "no scalar of numpy"),
        ({"numpy": ["F33", "00000000"]}, "no scalar of numpy"),
        ({"numpy": [["F32"], "00000000"]}, "no scalar of numpy"),
        ({"numpy": ["F32", 0]}, "no scalar of numpy"),
        ({"numpy": ["BOOL", "02"]}, "no scalar of numpy"),
        ([{"tensor": "a"}, {"array": "a"}], "'a' is of two kinds"),
        ([{"array": "a"}, {"blob": "a"}], "'a' is of two kinds"),
        ({"blob": 3}, "the name of a leaf"),
    ],
)
def test_a_structure_that_flatten_does_not_make_is_refused(structure: Any, message: str) -> None:
    with pytest.raises(ManifestError, match=f"^.*not the structure of a state dict: .*{message}"):
        leaves(structure)


def test_a_structure_that_is_nested_too_deeply_is_refused() -> None:
    structure: Any = []
    for _ in range(MAX_DEPTH):
        structure = [structure]

    with pytest.raises(ManifestError, match="lies in more than 64 containers"):
        leaves(structure)


def test_a_missing_leaf_is_named() -> None:
    with pytest.raises(ManifestError, match=re.escape("the torch leaf 'weight' is missing")):
        unflatten({"dict": [["w", {"tensor": "weight"}]]}, {"other": 1})


def places(value: Any) -> list[tuple[Any, Any]]:
    inner: Any = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    return [found for key, each in inner for found in ((value, key), *places(each))]


strange: st.SearchStrategy[Any] = st.sampled_from(
    [None, True, -1, 2**70, 1e308, "", "a", "0x1", "AA==", [], [[]], [["a", 1]], {}, {"dict": []}, {"tensor": "a"},
     {"bytes": "A"}, {"numpy": ["U8", "01"]}, {"float": "7ff8000000000001"}, {"a": 1, "b": 2}]
)  # fmt: skip


@settings(max_examples=400)
@given(states, st.lists(st.tuples(st.integers(0, 1000), strange), min_size=1, max_size=3))
def test_a_forged_structure_is_refused_or_makes_a_state_that_can_be_kept(
    state: Any, changes: list[tuple[int, Any]]
) -> None:
    forged = copy.deepcopy([flatten(state)[0]])
    for number, value in changes:
        choices = places(forged)
        place, key = choices[number % len(choices)]
        place[key] = copy.deepcopy(value)

    try:
        names = leaves(forged)
    except ManifestError:
        return
    assert flatten(unflatten(forged, {name: np.zeros(1) for name in names}))
