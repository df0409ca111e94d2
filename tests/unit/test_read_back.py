"""Memory that saved tensors are read back into: huge pages, used again once nothing has them."""

from __future__ import annotations

import pytest
import torch

from deepnvme.sizes import PAGE
from infinity_engine.activation.read_back import ReadBackMemory
from infinity_engine.units import MiB

HUGE = 2 * MiB
ALL = 64 * HUGE
CPU = torch.device("cpu")


def test_it_begins_where_a_huge_page_may_begin() -> None:
    memory = ReadBackMemory(CPU)
    taken = [memory.take(nbytes, keep=ALL) for nbytes in (HUGE, 3 * HUGE + PAGE)]
    assert [tensor.data_ptr() % HUGE for tensor in taken] == [0, 0]
    assert [tensor.numel() for tensor in taken] == [HUGE, 3 * HUGE + PAGE]


def test_what_nothing_uses_any_more_is_used_again() -> None:
    memory = ReadBackMemory(CPU)
    memory.take(HUGE, keep=ALL).fill_(7)
    assert memory.idle_bytes == HUGE
    assert bool((memory.take(HUGE, keep=ALL) == 7).all())
    assert memory.idle_bytes == HUGE


def test_another_size_has_the_pages_of_what_has_gone() -> None:
    memory = ReadBackMemory(CPU)
    small = [memory.take(HUGE, keep=ALL).fill_(7) for _ in range(3)]
    small.clear()
    assert memory.idle_bytes == 3 * HUGE
    assert bool((memory.take(3 * HUGE, keep=ALL) == 7).all())


def test_what_a_view_still_shows_is_not_used_again() -> None:
    memory = ReadBackMemory(CPU)
    first = memory.take(HUGE, keep=ALL)
    view = first[8:24].view(torch.float32).fill_(1.0)
    del first
    memory.take(HUGE, keep=ALL).fill_(7)
    assert view.tolist() == [1.0] * 4
    assert memory.idle_bytes == HUGE
    del view
    assert memory.idle_bytes == 2 * HUGE


def test_it_keeps_no_more_than_it_may() -> None:
    memory = ReadBackMemory(CPU)
    taken = [memory.take(nbytes, keep=ALL) for nbytes in (HUGE, HUGE, 2 * HUGE)]
    taken.clear()
    assert memory.idle_bytes == 4 * HUGE
    held = memory.take(HUGE, keep=HUGE)
    assert memory.idle_bytes == HUGE
    memory.give_back()
    assert memory.idle_bytes == 0
    assert held.numel() == HUGE


@pytest.mark.parametrize("nbytes", [PAGE, MiB, HUGE - PAGE])
def test_what_is_less_than_a_huge_page_is_not_kept_and_leaves_no_more_idle_than_it_may(
    nbytes: int,
) -> None:
    memory = ReadBackMemory(CPU)
    assert memory.take(nbytes, keep=ALL).numel() == nbytes
    assert memory.idle_bytes == 0
    memory.take(HUGE, keep=ALL)
    memory.take(nbytes, keep=0)
    assert memory.idle_bytes == 0


def test_drives_write_to_it_without_a_copy_from_64_kib_on() -> None:
    memory = ReadBackMemory(CPU)
    taken = [memory.take(nbytes, keep=ALL) for nbytes in (16 * PAGE, MiB + 1, HUGE - 1, HUGE)]
    assert [tensor.data_ptr() % PAGE for tensor in taken] == [0] * 4
    assert [tensor.numel() for tensor in taken] == [16 * PAGE, MiB + 1, HUGE - 1, HUGE]


def test_what_ends_after_it_was_closed_is_not_kept() -> None:
    memory = ReadBackMemory(CPU)
    left = memory.take(HUGE, keep=ALL)
    memory.take(HUGE, keep=ALL)
    memory.close()
    assert memory.idle_bytes == 0
    del left
    assert memory.idle_bytes == 0
