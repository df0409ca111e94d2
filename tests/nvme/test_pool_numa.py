"""Pools on a NUMA node of choice."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepnvme import IOQueue, Pool
from support.nvme_io import CHUNK, TIMEOUT_S


def on_node_0(nbytes: int) -> Pool:
    try:
        return Pool(nbytes, numa_node=0)
    except ValueError as refusal:
        pytest.skip(f"this kernel places no memory: {refusal}")


def test_a_pool_on_a_node_is_a_pool_as_any_other(tmp_path: Path, disk_backend: str) -> None:
    pool = on_node_0(4 * CHUNK)
    with IOQueue(disk_backend, pool=pool) as queue, queue.open(tmp_path / "file", "w") as file:
        array = pool.empty(2 * CHUNK)
        array[:] = 5
        file.pwrite(array).result(TIMEOUT_S)
        array[:] = 0
        assert file.pread(array).result(TIMEOUT_S) == 2 * CHUNK
    assert (array == 5).all()
    assert pool.capacity == 4 * CHUNK


def test_the_memory_of_a_pool_is_told_to_be_of_that_node() -> None:
    pool = on_node_0(2 << 20)
    address = pool.empty(1).ctypes.data
    lines = Path("/proc/self/numa_maps")
    if not lines.exists():
        pytest.skip("this kernel has no /proc/self/numa_maps")
    (policy,) = [
        line.split()[1]
        for line in lines.read_text().splitlines()
        if int(line.split()[0], 16) == address
    ]
    assert policy == "prefer:0"


@pytest.mark.parametrize("node", [1023, 1024, 4096, (1 << 32) - 1])
def test_a_node_that_there_is_not_is_refused_by_its_number(node: int) -> None:
    with pytest.raises(ValueError, match=f"NUMA node {node}: "):
        Pool(CHUNK, numa_node=node)


@pytest.mark.parametrize("node", [-1, -4096])
def test_a_negative_node_is_refused(node: int) -> None:
    with pytest.raises(ValueError, match=f"numa_node must be 0 or more, got {node}"):
        Pool(CHUNK, numa_node=node)
