"""A pool of more than 1 GiB: one run of memory, registered in pieces, of which a buffer may need
two.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from deepnvme import IOQueue, Pool, PoolExhaustedError

GiB = 1 << 30
MiB = 1 << 20


@pytest.fixture(scope="module")
def large_pool() -> Pool:
    return Pool(GiB + 4 * MiB)


def test_a_buffer_may_lie_across_two_registered_pieces(
    large_pool: Pool, disk_backend: str, tmp_path: Path
) -> None:
    start = GiB - 2 * MiB - 4096
    with (
        IOQueue(disk_backend, require=disk_backend, pool=large_pool) as queue,
        queue.open(tmp_path / "f", "w") as file,
    ):
        written = large_pool.buffer_at(start, 4 * MiB)
        written[:] = bytes(range(256)) * (4 * MiB // 256)
        assert file.pwrite(written, 0).result(60) == 4 * MiB
        found = bytearray(4 * MiB)
        assert file.pread(found, 0).result(60) == 4 * MiB
        assert found == written
        written[:] = bytes(4 * MiB)
        assert file.pread(written, 0).result(60) == 4 * MiB

    assert written == found


def test_a_buffer_of_more_than_1_gib_is_one_piece(large_pool: Pool) -> None:
    buffer = large_pool.buffer(GiB + MiB)
    buffer[-1:] = b"x"

    assert len(buffer) == GiB + MiB
    assert large_pool.largest_free == 3 * MiB


def test_a_planned_buffer_has_its_place_to_itself() -> None:
    pool = Pool(MiB)
    held = pool.buffer_at(8192, 100)

    with pytest.raises(
        PoolExhaustedError, match="bytes 4096 to 12288 of the pool are not all free"
    ):
        pool.buffer_at(4096, 8192)

    del held
    assert len(pool.buffer_at(4096, 8192)) == 8192
