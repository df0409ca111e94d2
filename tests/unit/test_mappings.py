from __future__ import annotations

import copy
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity_engine.errors import ConfigError
from infinity_engine.plan.mappings import Directories, known_mapping

PATIENT = settings(deadline=None)


# --- directories ---


def test_directories_keep_the_order_they_were_given_in() -> None:
    assert list(Directories({"/z": 1, "/a": 2, "/m": 3}, field="nvme")) == ["/z", "/a", "/m"]


@pytest.mark.parametrize("spelling", ["/mnt/a", "/mnt/a/", "//mnt//a", "/mnt/./a/."])
def test_a_directory_is_found_under_any_spelling(spelling: str) -> None:
    assert Directories({"/mnt/a": 1}, field="nvme")[spelling] == 1
    assert Directories({spelling: 1}, field="nvme") == {"/mnt/a": 1}


@pytest.mark.parametrize(
    ("given", "kept"), [("/", "/"), ("//", "/"), ("./swap/", "swap"), (".", ".")]
)
def test_a_directory_is_kept_under_its_plainest_spelling(given: str, kept: str) -> None:
    assert list(Directories({given: 1}, field="nvme")) == [kept]


@pytest.mark.parametrize("again", ["/mnt/a/", "/mnt//a", "//mnt/a", "/mnt/./a"])
def test_a_directory_given_twice_under_two_spellings_is_refused(again: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"^nvme: expected each directory once; '/mnt/a' is given, got '{again}'"
    ):
        Directories({"/mnt/a": 1, again: 2}, field="nvme")


@pytest.mark.parametrize("directory", ["/mnt/b/../a", "..", "../swap"])
def test_a_directory_that_only_the_disk_could_identify_is_refused(directory: str) -> None:
    with pytest.raises(ConfigError, match=r"a path without '\.\.'"):
        Directories({directory: 1}, field="nvme")


@pytest.mark.parametrize("directory", ["", 5, None, b"/mnt/a"])
def test_a_directory_that_is_no_text_is_refused(directory: object) -> None:
    with pytest.raises(ConfigError, match="directories as text"):
        Directories({directory: 1}, field="nvme")  # type: ignore[dict-item]


def test_directories_are_a_value() -> None:
    one = Directories({"/a": 1, "/b": 2}, field="nvme")

    assert hash(one) == hash(Directories({"/b/": 2, "/a": 1}, field="nvme"))
    assert pickle.loads(pickle.dumps(one)) == copy.deepcopy(one) == one
    assert one != {"/a": 1}


def test_directories_do_not_change_with_the_mapping_they_were_made_from() -> None:
    given = {"/a": 1}
    made = Directories(given, field="nvme")
    given["/b"] = 2

    assert dict(made) == {"/a": 1}


# --- known mappings ---


@PATIENT
@given(st.dictionaries(st.sampled_from("abcd"), st.integers()))
def test_a_mapping_passes_if_all_its_keys_are_known(mapping: dict[str, int]) -> None:
    assert known_mapping(mapping, field="x", known="abcd") is mapping


def test_an_unknown_key_of_the_outermost_mapping_is_named_alone() -> None:
    with pytest.raises(ConfigError, match=r"^\.odd: "):
        known_mapping({".odd": 1}, field="", known=("even",))


def test_the_outermost_value_has_a_name_when_it_is_no_mapping() -> None:
    with pytest.raises(
        ConfigError, match=r"^settings: expected a mapping with keys out of even, got 5"
    ):
        known_mapping(5, field="", known=("even",))
