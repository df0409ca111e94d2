"""Operations that are under way together on one page of a file: no byte that only one of them wrote
is lost.

Whole pages go to the drive directly and partial pages through the page cache, so the drive orders
what shares a page.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deepnvme import Direct, FaultPlan, File, IOQueue, Requests
from support.nvme_io import CHUNK, PAGE, TIMEOUT_S, assert_same, contents, pattern

BODY = 4 << 20  # long enough to be under way when the other write comes
ROUNDS = 4
EXTENTS = st.lists(
    st.tuples(st.integers(0, 4 * CHUNK), st.integers(1, 3 * CHUNK)), min_size=2, max_size=10
)


def test_header_written_beside_its_body_leaves_the_bodys_bytes(
    tmp_path: Path, backend: str
) -> None:
    body, header = np.full(BODY, 7, np.uint8), bytes([9]) * 64
    for _ in range(ROUNDS):
        with IOQueue(backend) as queue, queue.open(tmp_path / "file", "w", size=BODY) as file:
            for future in (file.pwrite(body), file.pwrite(header)):
                future.result(TIMEOUT_S)
            file.sync().result(TIMEOUT_S)
            assert_same(contents(queue, tmp_path / "file")[64:], body[64:])


@pytest.mark.parametrize("first", [0, 1])
def test_overlapping_writes_lose_no_byte_that_one_wrote(
    tmp_path: Path, backend: str, first: int
) -> None:
    end = BODY // 2 + 292
    writes = [(np.full(end, 2, np.uint8), 0), (np.full(BODY - PAGE, 1, np.uint8), PAGE)]
    for _ in range(ROUNDS):
        with IOQueue(backend) as queue, queue.open(tmp_path / "file", "w", size=BODY) as file:
            for future in [file.pwrite(*writes[number]) for number in (first, 1 - first)]:
                future.result(TIMEOUT_S)
            file.sync().result(TIMEOUT_S)
            assert_same(contents(queue, tmp_path / "file")[end:], writes[1][0][end - PAGE :])


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(extents=EXTENTS)
def test_each_byte_is_of_a_write_that_covered_it(
    tmp_path: Path, queue: IOQueue, extents: list[tuple[int, int]]
) -> None:
    with (
        queue.open(tmp_path / "file", "w", size=7 * CHUNK) as file,
        queue.open(tmp_path / "file", "r+") as other,
    ):
        handles: tuple[File, File] = (file, other)
        futures = [
            handles[number % 2].pwrite(np.full(nbytes, number + 1, np.uint8), offset)
            for number, (offset, nbytes) in enumerate(extents)
        ]
        for future in futures:
            future.result(TIMEOUT_S)
        file.sync().result(TIMEOUT_S)
    found = np.frombuffer(contents(queue, tmp_path / "file"), np.uint8)
    allowed = np.zeros((len(extents) + 1, len(found)), bool)
    for number, (offset, nbytes) in enumerate(extents):
        allowed[number + 1, offset : offset + nbytes] = True
    allowed[0] = ~allowed.any(axis=0)
    assert allowed[found, np.arange(len(found))].all()


def test_write_behind_the_end_leaves_the_page_of_the_end_to_a_direct_write(
    tmp_path: Path, disk_backend: str
) -> None:
    """The kernel clears the rest of that page in the page cache, which a direct write still has."""
    written = b"\x07" * (PAGE + 100)
    for _ in range(2 * ROUNDS):
        with (tmp_path / "file").open("wb") as before:
            before.write(bytes(PAGE - 512))
            before.flush()
            os.fsync(before.fileno())
            os.posix_fadvise(before.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        # Half of the page: a direct write that lengthens the file runs alone in the kernel.
        half = FaultPlan().shorten(nth=1, requests=Requests.WRITES)
        with (
            IOQueue(disk_backend, faults=half) as queue,
            queue.open(tmp_path / "file", "r+") as file,
        ):
            file.pwrite(written).result(TIMEOUT_S)
            file.sync().result(TIMEOUT_S)
        assert (tmp_path / "file").read_bytes() == written


def test_truncating_through_another_handle_shortens_readinto(
    tmp_path: Path, queue: IOQueue
) -> None:
    data = pattern(100_000, seed=1)
    with queue.open(tmp_path / "file", "w") as file, queue.open(tmp_path / "file", "r+") as other:
        other.pwrite(data).result(TIMEOUT_S)
        file.truncate(50_000)
        for offset, nbytes in ((0, 60_000), (49_152, 4_096), (45_056, 8_192), (60_000, 100)):
            came = max(0, min(nbytes, 50_000 - offset))
            assert other.readinto(bytearray(nbytes), offset).result(TIMEOUT_S) == came


def test_write_through_one_handle_lengthens_the_file_for_another(
    tmp_path: Path, queue: IOQueue
) -> None:
    with queue.open(tmp_path / "file", "w") as file, queue.open(tmp_path / "file", "r+") as other:
        file.pwrite(bytes(CHUNK)).result(TIMEOUT_S)
        assert other.readinto(bytearray(2 * CHUNK)).result(TIMEOUT_S) == CHUNK


@pytest.mark.parametrize("mode", ["r", "r+"])
@pytest.mark.parametrize("direct", [Direct.NEVER, Direct.AUTO])
def test_a_read_caches_no_page_beside_those_that_it_asks_for(
    tmp_path: Path, disk_backend: str, mode: str, direct: Direct
) -> None:
    """A page that the kernel reads ahead would be stale after a direct write to it.

    The next sync then fails, and a byte written to the page takes all others along.
    """
    path = tmp_path / "file"
    path.write_bytes(bytes(BODY))
    if not uncached(path):
        pytest.skip("this file system keeps its files in the page cache")

    with IOQueue(disk_backend) as queue, queue.open(path, mode, direct=direct) as file:  # type: ignore[arg-type]
        if direct is Direct.AUTO and not file._open().direct:
            pytest.skip("no file of this file system is written directly")
        for page in range(8):  # one after the other, as read-ahead expects
            file.pread(bytearray(PAGE), page * PAGE).result(TIMEOUT_S)
            file.pread(bytearray(100), page * PAGE + 7).result(TIMEOUT_S)

        assert set(cached_pages(path)) <= set(range(8))


def uncached(path: Path) -> bool:
    """Drop the file from the page cache; tell whether that worked."""
    with path.open("rb") as plain:
        os.fsync(plain.fileno())
        os.posix_fadvise(plain.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return not cached_pages(path)


def cached_pages(path: Path) -> list[int]:
    """Return the numbers of the file's pages that the page cache has."""
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("r+b") as plain, mmap.mmap(plain.fileno(), 0) as memory:
        found = (ctypes.c_ubyte * (len(memory) // PAGE))()
        view = ctypes.c_char.from_buffer(memory)
        address, nbytes = ctypes.c_void_p(ctypes.addressof(view)), ctypes.c_size_t(len(memory))
        failed = libc.mincore(address, nbytes, found)
        del view  # else the map cannot be closed
        if failed:
            raise OSError(ctypes.get_errno(), "mincore")
    return [page for page, state in enumerate(found) if state & 1]
