"""What ranks do together, over Gloo with 2, 3 and 4 processes: the bits are those of a loop over
the ranks.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from infinity_engine.optim import GradientSums, HostKernels, UpdateThreads, Values
from support import rank_programs as programs
from support.rank_programs import (
    DTYPES,
    NUMELS,
    bits,
    check_on_a_device,
    cut,
    gradients,
    serial_sum,
    values,
)
from support.ranks import launch, launched

SIZES = (2, 3, 4)


@cache
def ran(size: int) -> list[dict[str, Any]]:
    """Return what each of so many ranks got, of one launch for all tests."""
    ranks = launch(size, programs.everything)
    for rank in ranks:
        assert rank.error is None, rank.trace
        assert rank.exitcode == 0
    return [rank.value for rank in ranks]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("how", ["together", "alone"])
def test_a_gather_gives_every_rank_the_whole_parameters(size: int, how: str) -> None:
    wanted = [
        values(numel, dtype, seed)
        for seed, (dtype, numel) in enumerate((d, n) for d in DTYPES for n in NUMELS)
    ]

    for rank in ran(size):
        found = rank["gathers"][how]
        assert [bits(each) for each in found] == [bits(each) for each in wanted]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_reduce_is_the_fp32_sum_in_the_ranks_order_whatever_goes_together(
    size: int, dtype: torch.dtype
) -> None:
    specs = cut(NUMELS, size)
    whole = [serial_sum(gradients(numel, dtype, size)) for numel in NUMELS]

    for number, rank in enumerate(ran(size)):
        wanted = [
            total[spec.shards[number].first_element :][: spec.shards[number].numel]
            for total, spec in zip(whole, specs, strict=True)
        ]
        ways = [name for name in rank["reduces"] if name.startswith(f"{dtype} ")]
        assert len(ways) == 4
        for way in ways:
            assert [bits(each) for each in rank["reduces"][way]] == [
                bits(each) for each in wanted
            ], way


def test_the_sums_of_these_tests_depend_on_their_order() -> None:
    given = gradients(NUMELS[2], torch.bfloat16, 3)

    assert bits(serial_sum(given)) != bits(serial_sum(given[::-1]))


@pytest.mark.parametrize("size", SIZES)
def test_a_rank_without_a_gradient_counts_as_zeros(size: int) -> None:
    numel = 4 * programs.BLOCK * size
    given = gradients(numel, torch.bfloat16, size)
    wanted = serial_sum([*given[:-1], torch.zeros_like(given[-1])]).chunk(size)

    for number, rank in enumerate(ran(size)):
        assert [torch.equal(each, wanted[number]) for each in rank["without"]] == [True] * 3


def test_the_norm_is_the_same_bits_on_any_number_of_ranks() -> None:
    kernels, sums = HostKernels(UpdateThreads.anywhere(1)), GradientSums(NUMELS)
    for number, numel in enumerate(NUMELS):
        gradient = values(numel, torch.float32, 7)
        sums.put(number, 0, kernels.block_sums(Values.of(gradient)) if numel else np.zeros(0))

    found = {rank["norm"] for size in SIZES for rank in ran(size)}

    assert found == {sums.total().sum_of_squares}


@pytest.mark.parametrize("size", SIZES)
def test_several_under_way_end_right_in_whatever_order_a_rank_waits(size: int) -> None:
    numel = 3 * programs.BLOCK * size + 5
    wanted = [bits(values(numel, torch.float32, number)) for number in range(6)]

    assert [[bits(each) for each in rank["several"]] for rank in ran(size)] == [wanted] * size


@pytest.mark.parametrize("size", SIZES)
def test_every_rank_hears_what_each_says_however_long_it_is(size: int) -> None:
    wanted = tuple(f"rank {rank}".encode() * rank for rank in range(size))

    assert [rank["shared"] for rank in ran(size)] == [wanted] * size
    assert [rank["shared nothing"] for rank in ran(size)] == [(b"",) * size] * size


@pytest.mark.parametrize("size", SIZES)
def test_collectives_of_the_user_may_come_between_ours(size: int) -> None:
    assert {rank["of the user"] for rank in ran(size)} == {sum(range(size)) + programs.BLOCK * size}


@pytest.mark.parametrize("size", SIZES)
def test_in_a_stream_of_a_device_the_bits_are_the_same(size: int) -> None:
    check_on_a_device([rank["on a device"] for rank in ran(size)])


def test_a_mesh_has_neighbours_and_those_who_own_the_same() -> None:
    ranks = launch(4, programs.mesh, 2)

    assert [rank.error for rank in ranks] == [None] * 4
    assert [rank.value for rank in ranks] == [
        ((0, 2), (0, 2), [b"0", b"1"], [b"0", b"2"]),
        ((1, 2), (0, 2), [b"0", b"1"], [b"1", b"3"]),
        ((0, 2), (1, 2), [b"2", b"3"], [b"0", b"2"]),
        ((1, 2), (1, 2), [b"2", b"3"], [b"1", b"3"]),
    ]


def test_ranks_that_have_left_can_join_again() -> None:
    wanted = [
        tuple(f"{turn} {what} {rank}".encode() for rank in range(2))
        for turn in range(4)
        for what in ("of", "beside")
    ]

    for rank in launch(2, programs.again_and_again):
        assert rank.error is None, rank.trace
        assert rank.value == wanted


def test_no_rank_goes_on_before_all_have_met(tmp_path: Path) -> None:
    assert launched(3, programs.met_by_all, str(tmp_path)) == [[True, True]] * 3


def test_a_group_that_ends_leaves_those_that_came_after_it() -> None:
    for rank in launch(2, programs.two_at_once):
        assert rank.error is None, rank.trace
        assert rank.value == ((b"0", b"1"), True)


def test_two_sequences_do_not_wait_for_each_others_order() -> None:
    wanted = [bits(values(programs.BLOCK * 3, torch.float32, number)) for number in (0, 1)]

    for rank in launch(3, programs.crossing):
        assert rank.error is None, rank.trace
        assert rank.value == wanted


def test_what_makes_one_sequence_fail_makes_the_other() -> None:
    for rank in launch(2, programs.fails_beside):
        assert rank.error is None, rank.trace
        first, second = rank.value
        assert "rank 0: agreement on who: 0" in first.reason
        assert second.reason == first.reason
