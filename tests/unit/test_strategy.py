from __future__ import annotations

import copy
import dataclasses
import json
import math
import pickle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity_engine.errors import ConfigError
from infinity_engine.plan import (
    Auto,
    DeviceOnly,
    HostOnly,
    Interleaved,
    NvmeStreamed,
    StaticSplit,
    Strategy,
    parse_strategy,
)
from infinity_engine.plan.strategy import STRATEGIES

PATIENT = settings(deadline=None)
PARTS = st.floats(0, 1)
INTERLEAVED = st.builds(Interleaved, share=st.none() | PARTS, resident=PARTS) | st.builds(
    Interleaved, stride=st.integers(1, 2**62), resident=PARTS
)
ANY = st.one_of(
    st.sampled_from([Auto(), DeviceOnly(), HostOnly()]),
    st.builds(StaticSplit, ratio=PARTS),
    INTERLEAVED,
    st.builds(NvmeStreamed, update=st.just(HostOnly()) | INTERLEAVED),
)
NO_PART = [-0.1, 1.1, math.nan, math.inf, True, "0.5", [1]]


# --- values ---


def test_the_names_are_those_that_users_write() -> None:
    assert [kind.name for kind in STRATEGIES] == [
        "auto",
        "device_only",
        "host_only",
        "static_split",
        "interleaved",
        "nvme_streamed",
    ]


def test_interleaving_leaves_its_share_to_the_rates_unless_told() -> None:
    assert (Interleaved().share, Interleaved().stride, Interleaved().resident) == (None, None, 0.0)


def test_streaming_from_nvme_updates_on_the_host_unless_told() -> None:
    assert NvmeStreamed().update == HostOnly()


@pytest.mark.parametrize("part", [0, 0.3, 1])
def test_a_part_may_be_none_of_it_and_all_of_it(part: float) -> None:
    made = (
        StaticSplit(ratio=part).ratio,
        Interleaved(share=part).share,
        Interleaved(resident=part).resident,
    )

    assert made == (part,) * 3
    assert all(isinstance(value, float) for value in made)


@PATIENT
@given(ANY)
def test_a_strategy_is_a_value(strategy: Strategy) -> None:
    again = pickle.loads(pickle.dumps(strategy))

    assert again == copy.deepcopy(strategy) == strategy
    assert hash(again) == hash(strategy)


def test_strategies_without_settings_are_told_apart() -> None:
    assert len({Auto(), DeviceOnly(), HostOnly()}) == 3


def test_a_strategy_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        StaticSplit(ratio=0.5).ratio = 1.0  # type: ignore[misc]


@pytest.mark.parametrize("value", [*NO_PART, None])
def test_a_ratio_is_a_number_from_0_to_1(value: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"^StaticSplit\.ratio: expected a number from 0 to 1, got "
    ):
        StaticSplit(ratio=value)


@pytest.mark.parametrize("value", NO_PART)
def test_a_share_is_a_number_from_0_to_1(value: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"^Interleaved\.share: expected a number from 0 to 1, got "
    ):
        Interleaved(share=value)


@pytest.mark.parametrize("value", [*NO_PART, None])
def test_the_resident_part_is_a_number_from_0_to_1(value: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"^Interleaved\.resident: expected a number from 0 to 1, got "
    ):
        Interleaved(resident=value)


@pytest.mark.parametrize("value", [0, -1, 2.0, True, "2"])
def test_a_stride_is_a_whole_number_from_1(value: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"^Interleaved\.stride: expected a whole number, 1 or more, got "
    ):
        Interleaved(stride=value)


def test_share_and_stride_exclude_each_other() -> None:
    with pytest.raises(
        ConfigError,
        match=r"^Interleaved\.stride: expected None beside share=0\.5: .* give one, got 2",
    ):
        Interleaved(share=0.5, stride=2)


@pytest.mark.parametrize(
    "update", [Auto(), DeviceOnly(), StaticSplit(ratio=0.5), NvmeStreamed(), "auto"]
)
def test_streaming_takes_no_update_but_on_the_host_or_interleaved(update: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"^NvmeStreamed\.update: expected host_only or interleaved, got "
    ):
        NvmeStreamed(update=update)


# --- from text and mappings ---


@PATIENT
@given(ANY)
def test_a_strategy_survives_the_way_through_json(strategy: Strategy) -> None:
    assert parse_strategy(json.loads(json.dumps(strategy.to_plain()))) == strategy


@pytest.mark.parametrize("kind", [kind for kind in STRATEGIES if kind is not StaticSplit])
def test_a_name_alone_means_the_strategy_with_its_defaults(kind: type[Strategy]) -> None:
    assert parse_strategy(kind.name) == parse_strategy({"name": kind.name}) == kind()


@pytest.mark.parametrize(
    ("mapping", "strategy"),
    [
        ({"name": "static_split", "ratio": 0.3}, StaticSplit(ratio=0.3)),
        (
            {"name": "interleaved", "stride": 3, "resident": 0.2},
            Interleaved(stride=3, resident=0.2),
        ),
        ({"name": "nvme_streamed", "update": "interleaved"}, NvmeStreamed(update=Interleaved())),
        (
            {"name": "nvme_streamed", "update": {"name": "interleaved", "share": 0.5}},
            NvmeStreamed(update=Interleaved(share=0.5)),
        ),
    ],
)
def test_a_mapping_says_the_name_and_the_settings(
    mapping: dict[str, object], strategy: Strategy
) -> None:
    assert parse_strategy(mapping) == strategy


def test_a_strategy_of_ones_own_is_taken_as_it_is() -> None:
    @dataclasses.dataclass(frozen=True)
    class Mine(Strategy):
        name = "mine"
        depth: int = 3

    mine = Mine()

    assert parse_strategy(mine) is mine
    assert mine.to_plain() == {"name": "mine", "depth": 3}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            "interleave",
            r"strategy: expected one of auto, device_only, .*\(nearest: interleaved\), got 'interleave'",
        ),
        ("", r"strategy: expected one of auto, "),
        ("Auto", r"strategy: expected one of auto, .*\(nearest: auto\)"),
        (
            {"name": "static"},
            r"strategy\.name: expected one of auto, .*\(nearest: static_split\), got 'static'",
        ),
        ({"name": ["auto"]}, r"strategy\.name: expected one of auto, "),
        ({"ratio": 0.3}, r"strategy\.name: expected one of auto, .*, got None"),
        (
            "static_split",
            r"strategy: expected a mapping that gives its ratio too: {'name': 'static_split', 'ratio': ",
        ),
        ({"name": "static_split"}, r"strategy: expected a mapping that gives its ratio too"),
        (
            {"name": "static_split", "ratoi": 1},
            r"strategy\.ratoi: expected one of name, ratio \(nearest: ratio\)",
        ),
        (
            {"name": "static_split", "ratio": "x"},
            r"strategy\.ratio: expected a number from 0 to 1, got 'x'",
        ),
        ({"name": "host_only", "ratio": 1}, r"strategy\.ratio: expected one of name"),
        (
            {"name": "interleaved", "share": 0.5, "stride": 2},
            r"strategy\.stride: expected None beside share=0\.5",
        ),
        (
            {"name": "nvme_streamed", "update": "auto"},
            r"strategy\.update: expected host_only or interleaved",
        ),
        (
            {"name": "nvme_streamed", "update": {"name": "interleaved", "shar": 1}},
            r"strategy\.update\.shar: ",
        ),
        ({"name": "nvme_streamed", "update": {"nam": "auto"}}, r"strategy\.update\.name: "),
        (
            5,
            r"strategy: expected a name such as 'auto', a mapping such as .*, or a Strategy, got 5",
        ),
        (None, r"strategy: expected a name"),
        (StaticSplit, r"strategy: expected a name"),
    ],
)
def test_what_is_no_strategy_is_refused_by_its_dotted_path(given: object, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        parse_strategy(given)


def test_a_refused_strategy_names_the_field_it_was_given_for() -> None:
    with pytest.raises(ConfigError, match=r"^a\.b\.ratio: "):
        parse_strategy({"name": "static_split", "ratio": 7}, field="a.b")


@PATIENT
@given(
    st.recursive(
        st.none() | st.text() | st.floats(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
    )
)
def test_anything_is_a_strategy_or_a_config_error(given: object) -> None:
    try:
        strategy = parse_strategy(given)
    except ConfigError:
        return
    assert isinstance(strategy, Strategy)
