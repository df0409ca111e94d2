"""Which cores each rank of a machine has: on made-up machines, and read from fake files of the
kernel.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from infinity_engine.machine.cores import CoreShare, divide_cores, read_nodes
from support.kernel_files import fake_roots

CORES = st.frozensets(st.integers(0, 15), min_size=1)
TWO_NODES = (tuple(range(8)), tuple(range(8, 16)))


@given(st.lists(CORES, min_size=1, max_size=6), st.sampled_from([(), TWO_NODES]))
def test_a_core_that_a_rank_has_alone_is_used_by_no_other(
    allowed: list[frozenset[int]], nodes: tuple[tuple[int, ...], ...]
) -> None:
    shares = divide_cores(allowed, nodes)

    for rank, share in enumerate(shares):
        assert share.cores
        assert allowed[rank].issuperset(share.cores)
        of_others = {
            core for other, each in enumerate(shares) if other != rank for core in each.cores
        }
        assert share.is_shared == bool(of_others.intersection(share.cores))


@given(st.lists(CORES, min_size=1, max_size=6))
def test_all_cores_that_a_rank_may_use_are_somebody_s(allowed: list[frozenset[int]]) -> None:
    shares = divide_cores(allowed, TWO_NODES)

    assert {core for share in shares for core in share.cores} == set().union(*allowed)


@given(st.integers(1, 40), st.integers(1, 12))
def test_ranks_that_may_use_the_same_cores_have_as_many_but_for_one(cores: int, ranks: int) -> None:
    shares = divide_cores([range(cores)] * ranks, [range(cores)])

    counts = [len(share.cores) for share in shares]
    if cores >= ranks:
        assert max(counts) - min(counts) <= 1
        assert not any(share.is_shared for share in shares)
    else:
        assert shares == (CoreShare(tuple(range(cores)), is_shared=True),) * ranks
        assert shares[0].threads == 1


@given(st.integers(1, 4), st.integers(1, 8), st.integers(1, 4), st.booleans())
def test_no_rank_has_cores_of_two_nodes_where_nodes_can_be_divided_evenly(
    nodes: int, cores: int, ranks_of_each: int, interleaved: bool
) -> None:
    count = nodes * cores
    lie = [
        range(each, count, nodes) if interleaved else range(each * cores, each * cores + cores)
        for each in range(nodes)
    ]

    shares = divide_cores([range(count)] * (nodes * ranks_of_each), lie)

    if cores >= ranks_of_each and cores % ranks_of_each == 0:
        assert all(any(set(node).issuperset(share.cores) for node in lie) for share in shares)


@given(
    st.permutations(range(16)), st.lists(st.integers(1, 15), min_size=1, max_size=4, unique=True)
)
def test_ranks_that_the_launcher_has_bound_apart_keep_their_cores(
    cores: list[int], cuts: list[int]
) -> None:
    ends = [0, *sorted(cuts), 16]
    bound = [cores[start:end] for start, end in pairwise(ends)]

    shares = divide_cores(bound, TWO_NODES)

    assert [(set(share.cores), share.is_shared) for share in shares] == [
        (set(each), False) for each in bound
    ]


def test_cores_that_only_some_may_use_go_to_those_who_would_have_fewest() -> None:
    assert [share.cores for share in divide_cores([range(8), range(4)], [range(8)])] == [
        (4, 5, 6, 7),
        (0, 1, 2, 3),
    ]


def test_a_rank_without_a_core_shares_only_with_those_that_it_meets() -> None:
    crowd, meets, apart = divide_cores([{0}, {0}, {0, 1}, {2}], [range(3)])[1:]

    assert crowd == CoreShare((0,), is_shared=True)
    assert meets == CoreShare((1,), is_shared=False)
    assert apart == CoreShare((2,), is_shared=False)


def test_nodes_are_read_with_the_threads_of_a_core_next_to_each_other(tmp_path: Path) -> None:
    siblings = {core: f"{core % 4},{core % 4 + 4}\n" for core in range(8)}
    of_cores = {
        f"devices/system/cpu/cpu{core}/topology/thread_siblings_list": text
        for core, text in siblings.items()
    }
    of_nodes = {
        "devices/system/node/node0/cpulist": "0-1,4-5\n",
        "devices/system/node/node1/cpulist": "\n",  # memory only
        "devices/system/node/node10/cpulist": "2-3,6-7\n",
    }

    assert read_nodes(fake_roots(tmp_path, sys={**of_cores, **of_nodes})) == (
        (0, 4, 1, 5),
        (2, 6, 3, 7),
    )


def test_a_machine_that_says_nothing_of_its_nodes_has_none_and_cores_go_by_their_numbers(
    tmp_path: Path,
) -> None:
    assert read_nodes(fake_roots(tmp_path)) == ()
    assert [share.cores for share in divide_cores([{3, 1, 2, 0}] * 2, ())] == [(0, 1), (2, 3)]
