from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch", reason="the package gathers tensors of torch")

from infinity_engine.errors import ConfigError
from infinity_engine.partition import Partitioner, Shard, ShardSpec

BLOCK = 4096

numels = st.one_of(
    st.integers(0, 3 * BLOCK),
    st.integers(0, 200 * BLOCK),
    st.integers(0, 50).map(lambda blocks: blocks * BLOCK),
)
models = st.lists(numels, max_size=30)
ranks = st.integers(1, 9)


def cut(model: list[int], count: int) -> list[ShardSpec]:
    partitioner = Partitioner(count)
    return [partitioner.cut(numel) for numel in model]


def owners(spec: ShardSpec) -> list[int]:
    return [rank for rank, shard in enumerate(spec.shards) if shard.numel]


@given(models, ranks)
def test_every_element_is_owned_exactly_once(model: list[int], count: int) -> None:
    for numel, spec in zip(model, cut(model, count), strict=True):
        owned = sorted((shard.first_element, shard.end) for shard in spec.shards if shard.numel)

        assert len(spec.shards) == count
        assert [end for _, end in owned] == [start for start, _ in owned][1:] + (
            [numel] if numel else []
        )
        assert not owned or owned[0][0] == 0


@given(models, ranks)
def test_cuts_are_at_multiples_of_the_norms_block(model: list[int], count: int) -> None:
    for spec in cut(model, count):
        assert all(shard.first_element % BLOCK == 0 for shard in spec.shards)


@given(models, ranks)
def test_at_no_time_does_a_rank_own_more_than_a_block_more_than_another(
    model: list[int], count: int
) -> None:
    partitioner = Partitioner(count)
    owned = [0] * count
    for numel in model:
        spec = partitioner.cut(numel)
        owned = [had + shard.numel for had, shard in zip(owned, spec.shards, strict=True)]

        blocks = [-(-shard.numel // BLOCK) for shard in spec.shards]
        assert max(blocks) - min(blocks) <= 1
        assert max(owned) - min(owned) <= BLOCK


@given(models, ranks, st.integers(0, 30))
def test_a_cut_depends_on_the_parameters_before_it_only(
    model: list[int], count: int, first: int
) -> None:
    assert cut(model, count)[:first] == cut(model[:first], count)


def test_whole_blocks_for_each_rank_are_cut_in_the_ranks_order() -> None:
    [spec] = cut([8 * BLOCK], 4)

    assert spec.shards == tuple(Shard(rank * 2 * BLOCK, 2 * BLOCK) for rank in range(4))


def test_what_is_less_than_a_block_for_each_rank_goes_to_the_poorest() -> None:
    specs = cut([5, BLOCK, 7, 3 * BLOCK + 1], 3)

    assert [owners(spec) for spec in specs[:3]] == [[0], [1], [2]]
    assert [shard.numel for shard in specs[3].shards] == [BLOCK + 1, BLOCK, BLOCK]


def test_one_rank_owns_all() -> None:
    [spec, empty] = cut([BLOCK + 1, 0], 1)

    assert spec.in_order() == [Shard(0, BLOCK + 1)]
    assert empty.in_order() == []


@pytest.mark.parametrize(
    "shards",
    [
        (),
        (Shard(0, BLOCK),),
        (Shard(0, BLOCK), Shard(BLOCK, BLOCK)),
        (Shard(0, BLOCK), Shard(0, BLOCK + 1)),
        (Shard(0, 1), Shard(1, BLOCK)),
        (Shard(0, 2 * BLOCK), Shard(2 * BLOCK, 1 - BLOCK)),
    ],
)
def test_shards_that_are_not_the_parameter_are_refused(shards: tuple[Shard, ...]) -> None:
    with pytest.raises(ConfigError, match="each of the 4097 elements once"):
        ShardSpec(BLOCK + 1, shards)


def test_what_cannot_be_cut_is_refused() -> None:
    with pytest.raises(ConfigError, match="ranks"):
        Partitioner(0)
    with pytest.raises(ConfigError, match="numel"):
        Partitioner(2).cut(-1)
