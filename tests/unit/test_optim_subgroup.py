"""Subgroups: how parameters are cut, what the kernels are told of a step, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity_engine import _native
from infinity_engine.errors import ConfigError
from infinity_engine.optim import (
    NORM_BLOCK,
    SGD,
    Adam,
    AdamW,
    FloatFormat,
    Formats,
    HostKernels,
    Master,
    Segment,
    Subgroup,
    SubgroupState,
    Values,
    cut_into_subgroups,
    update_records,
)
from infinity_engine.optim.records import rounding_key
from support.optim import threads

sizes = st.lists(st.integers(0, 5 * NORM_BLOCK), max_size=12)
limits = st.integers(NORM_BLOCK, 4 * NORM_BLOCK)


@given(numels=sizes, limit=limits)
def test_every_element_is_in_one_segment(numels: list[int], limit: int) -> None:
    segments = [
        segment for group in cut_into_subgroups(numels, limit) for segment in group.segments
    ]

    for parameter, numel in enumerate(numels):
        mine = [segment for segment in segments if segment.parameter == parameter]
        ends = [segment.first_element + segment.numel for segment in mine]
        assert [0, *ends][:-1] == [segment.first_element for segment in mine] or not mine
        assert sum(segment.numel for segment in mine) == numel
    assert [segment.parameter for segment in segments] == sorted(
        segment.parameter for segment in segments
    )


@given(numels=sizes, limit=limits)
def test_a_subgroup_is_contiguous_and_at_most_as_long_as_asked(
    numels: list[int], limit: int
) -> None:
    for index, group in enumerate(cut_into_subgroups(numels, limit)):
        ends = [segment.offset + segment.numel for segment in group.segments]
        assert [segment.offset for segment in group.segments] == [0, *ends][:-1]
        assert 0 < group.numel <= limit
        assert group.index == index


@given(numels=sizes, limit=limits)
def test_a_parameter_is_cut_at_blocks_of_the_norm_alone(numels: list[int], limit: int) -> None:
    for group in cut_into_subgroups(numels, limit):
        assert all(segment.first_element % NORM_BLOCK == 0 for segment in group.segments)


@given(numels=sizes, limit=limits)
def test_a_subgroup_ends_only_where_the_next_block_has_no_room(
    numels: list[int], limit: int
) -> None:
    for group, after in pairwise(cut_into_subgroups(numels, limit)):
        assert group.numel + min(NORM_BLOCK, after.segments[0].numel) > limit


def test_subgroups_smaller_than_a_block_are_refused() -> None:
    with pytest.raises(ConfigError, match="subgroup_numel"):
        cut_into_subgroups([10], NORM_BLOCK - 1)


def subgroup_of_two(formats: Formats | None) -> Subgroup:
    return Subgroup(0, (Segment(0, 0, 5, 0), Segment(1, 0, 3, 5)), formats or Formats())


def two_segments(formats: Formats | None = None) -> SubgroupState:
    """Return a subgroup of two parameters, 5 and 3 elements, in fp32."""
    return SubgroupState(
        subgroup=subgroup_of_two(formats),
        master=Values.of(np.zeros(8, np.float32)),
        states=tuple(Values.of(np.zeros(8, np.float32)) for _ in range(2)),
    )


def ones(numel: int) -> Values:
    return Values.of(np.ones(numel, np.float32))


def test_a_segment_without_a_gradient_is_skipped_and_keeps_its_step_count() -> None:
    state = two_segments()
    kernels = HostKernels(threads(1))

    for gradients in ([ones(5), None], [ones(5), ones(3)]):
        update = update_records(
            state, rules=[SGD(lr=1.0)] * 2, gradients=gradients, parameters=[None] * 2
        )  # fmt: skip
        kernels.update(update)
        state.steps = update.steps

    assert state.steps == [2, 1]
    assert isinstance(state.master, Values)
    assert np.asarray(state.master.owner).tolist() == [-2.0] * 5 + [-1.0] * 3


def test_each_segment_has_the_rule_of_its_group_and_its_own_bias_correction() -> None:
    state = two_segments()
    state.steps = [9, 0]

    records = update_records(
        state,
        rules=[Adam(lr=0.1), AdamW(lr=0.2)],
        gradients=[ones(5), ones(3)],
        parameters=[None] * 2,
    ).records

    assert records["step"].tolist() == [
        np.float32(Adam(lr=0.1).constants(10).step),
        np.float32(AdamW(lr=0.2).constants(1).step),
    ]


def test_records_point_at_the_segments_places_in_the_subgroup() -> None:
    state = two_segments()

    records = update_records(
        state, rules=[Adam()] * 2, gradients=[None, ones(3)], parameters=[None] * 2
    ).records

    assert isinstance(state.master, Values)
    assert records["numel"].tolist() == [3]
    assert records["master"].tolist() == [state.master.address + 5 * 4]
    assert records["states"][0, :2].tolist() == [stream.address + 5 * 4 for stream in state.states]
    assert records.tobytes() != b""
    assert records.itemsize == _native.SEGMENT_NBYTES


FORMATS_OF_MASTERS = (Formats(), Formats(master=Master.SPLIT, parameter=FloatFormat.BF16))


def masters_of(formats: Formats, *numels: int) -> list[npt.NDArray[Any]]:
    """Return arrays for masters, of ones, or for what a split one leaves of it, of zeros."""
    if formats.master is Master.SPLIT:
        return [np.zeros(numel, np.uint16) for numel in numels]
    return [np.ones(numel, np.float32) for numel in numels]


def stream_of(values: npt.NDArray[Any]) -> Values:
    return Values.of(values, format=FloatFormat.BF16 if values.itemsize == 2 else None)


def apart(masters: Sequence[npt.NDArray[Any]], formats: Formats | None = None) -> SubgroupState:
    """Return the subgroup of two parameters with masters that lie apart."""
    return SubgroupState(
        subgroup=subgroup_of_two(formats),
        master=tuple(stream_of(each) for each in masters),
        states=tuple(Values.of(np.zeros(8, np.float32)) for _ in range(2)),
    )


@pytest.mark.parametrize("formats", FORMATS_OF_MASTERS, ids=["whole", "split"])
def test_masters_that_lie_apart_get_the_bits_of_masters_in_one_piece(formats: Formats) -> None:
    def updated(state: SubgroupState) -> bytes:
        parameters = [np.full(numel, 0x3F80, np.uint16) for numel in (5, 3)]
        for step in range(3):
            update = update_records(
                state,
                rules=[AdamW(lr=0.1), SGD(lr=0.3)],
                gradients=[Values.of(np.full(numel, 1.7 + step, np.float32)) for numel in (5, 3)],
                parameters=[
                    None if formats.parameter is None else stream_of(each) for each in parameters
                ],
            )
            HostKernels(threads(1)).update(update)
            state.steps = update.steps
        return b"".join(each.tobytes() for each in parameters)

    first, second = masters_of(formats, 5, 3)
    (one,) = masters_of(formats, 8)
    together = replace(apart([first, second], formats), master=stream_of(one))

    assert updated(apart([first, second], formats)) == updated(together)
    assert first.tobytes() + second.tobytes() == one.tobytes()
    assert one.tobytes() != masters_of(formats, 8)[0].tobytes()


def test_a_segment_without_a_gradient_leaves_its_master_that_lies_apart() -> None:
    first, second = masters_of(Formats(), 5, 3)

    update = update_records(
        apart([first, second]),
        rules=[SGD(lr=1.0)] * 2,
        gradients=[None, ones(3)],
        parameters=[None] * 2,
    )
    HostKernels(threads(1)).update(update)

    assert update.records["master"].tolist() == [second.ctypes.data]
    assert (first.tolist(), second.tolist()) == ([1.0] * 5, [0.0] * 3)


def test_an_update_keeps_masters_that_lie_apart_alive() -> None:
    masters = masters_of(Formats(), 5, 3)

    update = update_records(
        apart(masters), rules=[Adam()] * 2, gradients=[ones(5), None], parameters=[None] * 2
    )

    kept = [id(stream.owner) for stream in update.keeps]
    assert all(id(master) in kept for master in masters)


@pytest.mark.parametrize("numels", [(), (5,), (5, 3, 1)])
def test_another_number_of_masters_than_segments_is_refused(numels: tuple[int, ...]) -> None:
    with pytest.raises(
        ConfigError, match=f"master: .*one for each of its segments, got '{len(numels)} streams'"
    ):
        apart(masters_of(Formats(), *numels))


def test_a_master_of_another_size_or_format_than_its_segment_is_refused_and_named() -> None:
    with pytest.raises(
        ConfigError, match=r"master\[1\]: expected 3 values of 4 bytes.*got '4 values of 4 bytes'"
    ):
        apart(masters_of(Formats(), 5, 4))
    with pytest.raises(
        ConfigError, match=r"master\[0\]: expected 5 values of 4 bytes.*got '5 values of 2 bytes'"
    ):
        apart([np.zeros(5, np.float16), np.zeros(3, np.float32)])


def test_an_update_without_any_gradient_does_nothing() -> None:
    state = two_segments()
    update = update_records(state, rules=[Adam()] * 2, gradients=[None] * 2, parameters=[None] * 2)

    HostKernels(threads(1)).update(update)

    assert (len(update.records), update.steps) == (0, [0, 0])


def test_what_does_not_fit_is_refused_with_its_parameter_named() -> None:
    state = two_segments()
    copy = Values.of(np.zeros(5, np.uint16), format=FloatFormat.BF16)

    with pytest.raises(ConfigError, match="gradient of parameter 0"):
        update_records(state, rules=[Adam()] * 2, gradients=[ones(4), None], parameters=[None] * 2)
    with pytest.raises(ConfigError, match="states exp_avg, exp_avg_sq, max_exp_avg_sq"):
        update_records(
            state, rules=[Adam(amsgrad=True)] * 2, gradients=[ones(5), None], parameters=[None] * 2
        )
    with pytest.raises(ConfigError, match="values of parameter 0"):
        update_records(
            state, rules=[Adam()] * 2, gradients=[ones(5), None], parameters=[copy, None]
        )
    with pytest.raises(ConfigError, match="values of parameter 1"):
        update_records(
            two_segments(Formats(parameter=FloatFormat.BF16)),
            rules=[Adam()] * 2,
            gradients=[ones(5), ones(3)],
            parameters=[copy, None],
        )


def test_streams_of_another_size_than_the_subgroup_are_refused() -> None:
    with pytest.raises(ConfigError, match="master"):
        SubgroupState(subgroup=Subgroup(0, (Segment(0, 0, 5, 0),)), master=ones(4), states=())


def test_a_split_master_without_a_bf16_parameter_is_refused() -> None:
    with pytest.raises(ConfigError, match="BF16"):
        Formats(master=Master.SPLIT, parameter=FloatFormat.FP16)


def test_a_stream_knows_arrays_by_dtype_and_refuses_others() -> None:
    assert Values.of(np.zeros((2, 3), np.float16)).numel == 6
    with pytest.raises(ConfigError, match="float64"):
        Values.of(np.zeros(3))
    with pytest.raises(ConfigError, match="contiguous"):
        Values.of(np.zeros((4, 4), np.float32)[:, 1])
    with pytest.raises(ConfigError, match="within the 3 values"):
        ones(3).part(2, 2)


@given(st.integers(0, 2**64 - 1), st.integers(0, 1000), st.integers(1, 1000))
def test_the_key_of_stochastic_rounding_differs_with_each_of_its_parts(
    seed: int, parameter: int, step: int
) -> None:
    key = rounding_key(seed, parameter, step)

    assert 0 <= key < 2**64
    assert key not in {
        rounding_key(seed ^ 1, parameter, step),
        rounding_key(seed, parameter + 1, step),
    }
    assert key != rounding_key(seed, parameter, step + 1)
