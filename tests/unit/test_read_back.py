"""Memory that saved tensors are read back into: used again by its size once nothing has it."""

from __future__ import annotations

import torch

from deepnvme.sizes import PAGE
from infinity_engine.activation.read_back import ReadBackMemory

LARGE = 32 * PAGE
CPU = torch.device("cpu")


def test_what_nothing_uses_any_more_is_used_again() -> None:
    memory = ReadBackMemory(CPU)
    first = memory.take(LARGE)
    address = first.data_ptr()
    assert address % PAGE == 0
    assert first.numel() == LARGE
    del first
    assert memory.idle_bytes == LARGE
    again = memory.take(LARGE)
    assert again.data_ptr() == address
    assert memory.idle_bytes == 0


def test_what_a_view_still_shows_is_not_used_again() -> None:
    memory = ReadBackMemory(CPU)
    first = memory.take(LARGE)
    view = first[8:24].view(torch.float32).fill_(1.0)
    del first
    other = memory.take(LARGE).fill_(7)
    assert memory.idle_bytes == 0
    assert view.tolist() == [1.0] * 4
    del view
    assert memory.idle_bytes == LARGE
    assert other.data_ptr() != memory.take(LARGE).data_ptr()


def test_another_size_has_memory_of_its_own() -> None:
    memory = ReadBackMemory(CPU)
    memory.take(LARGE)
    assert memory.take(2 * LARGE).numel() == 2 * LARGE
    assert memory.idle_bytes == 3 * LARGE


def test_it_keeps_no_more_than_it_may() -> None:
    memory = ReadBackMemory(CPU)
    taken = [memory.take(nbytes) for nbytes in (LARGE, LARGE, 2 * LARGE)]
    taken.clear()
    memory.keep_at_most(4 * LARGE)
    assert memory.idle_bytes == 4 * LARGE
    memory.keep_at_most(3 * LARGE - 1)
    assert memory.idle_bytes == 2 * LARGE
    memory.keep_at_most(0)
    assert memory.idle_bytes == 0


def test_small_memory_is_not_kept() -> None:
    memory = ReadBackMemory(CPU)
    memory.take(PAGE)
    assert memory.idle_bytes == 0


def test_what_ends_after_it_was_closed_is_not_kept() -> None:
    memory = ReadBackMemory(CPU)
    left = memory.take(LARGE)
    memory.take(LARGE)
    memory.close()
    assert memory.idle_bytes == 0
    del left
    assert memory.idle_bytes == 0
