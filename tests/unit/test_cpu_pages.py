"""Memory of the cpu accelerator: kept for buffers to come, as far as allowed, and never while
viewed.
"""

from __future__ import annotations

import gc
from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from infinity_engine.accel import CpuAccelerator
from infinity_engine.accel.base import Buffer

SIZE = 1 << 20
NBYTES = st.sampled_from([65536, 100_000, 131072, 5 << 20])
ASKED = st.tuples(NBYTES, st.booleans(), st.sampled_from([0, 300_000, 9 << 20]))


def address(buffer: Buffer) -> int:
    return buffer.tensor(torch.uint8, buffer.nbytes).data_ptr()


def test_memory_that_was_given_back_is_had_again_where_so_much_may_be_idle() -> None:
    with CpuAccelerator() as accelerator:
        first = accelerator.allocate(SIZE)
        before = address(first)
        accelerator.free(first)
        second = accelerator.allocate(SIZE, idle_bytes=0)
        assert address(second) == before


def test_a_buffer_of_another_size_gets_pages_that_were_given_back() -> None:
    with CpuAccelerator() as accelerator:
        first = accelerator.allocate(6 * SIZE)
        first.tensor(torch.uint8, 6 * SIZE).fill_(7)
        accelerator.free(first)
        del first
        other = accelerator.allocate(4 * SIZE, idle_bytes=2 * SIZE)
        assert other.tensor(torch.uint8, 4 * SIZE).eq(7).all()
        assert accelerator._pages.idle_bytes == 2 * SIZE


def test_memory_of_another_size_is_given_back_to_the_system_where_nothing_may_be_idle() -> None:
    with CpuAccelerator() as accelerator:
        accelerator.free(accelerator.allocate(SIZE))
        other = accelerator.allocate(2 * SIZE, idle_bytes=SIZE - 1)
        third = accelerator.allocate(SIZE, idle_bytes=0)
        assert accelerator._pages.idle_bytes == 0
        assert {other.nbytes, third.nbytes} == {SIZE, 2 * SIZE}


def test_small_buffers_count_beside_what_is_idle_as_well() -> None:
    with CpuAccelerator() as accelerator:
        accelerator.free(accelerator.allocate(SIZE))
        accelerator.allocate(60_000, idle_bytes=SIZE - 1)
        assert accelerator._pages.idle_bytes == 0


def test_memory_that_somebody_has_views_of_is_not_given_to_another() -> None:
    with CpuAccelerator() as accelerator:
        buffer = accelerator.allocate(SIZE)
        view = buffer.tensor(torch.uint8, SIZE)[10:20]
        view.fill_(7)
        accelerator.free(buffer)
        other = accelerator.allocate(SIZE, idle_bytes=SIZE)
        other.tensor(torch.uint8, SIZE).fill_(1)
        assert view.tolist() == [7] * 10


@given(st.lists(ASKED, max_size=30))
def test_no_two_buffers_share_memory_and_idle_memory_stays_within_what_is_allowed(
    asked: list[tuple[int, bool, int]],
) -> None:
    with CpuAccelerator() as accelerator:
        held: list[Buffer] = []
        for nbytes, gives_back, idle_bytes in asked:
            if gives_back and held:
                accelerator.free(held.pop(0))
            held.append(accelerator.allocate(nbytes, idle_bytes=idle_bytes))
            assert accelerator._pages.idle_bytes <= idle_bytes
            spans = sorted((address(each), address(each) + each.nbytes) for each in held)
            assert all(end <= start for (_, end), (start, _) in pairwise(spans))


def test_forgetting_idle_memory_leaves_none() -> None:
    with CpuAccelerator() as accelerator:
        accelerator.free(accelerator.allocate(SIZE))
        gc.collect()
        accelerator.forget_idle()
        assert accelerator._pages.idle_bytes == 0
