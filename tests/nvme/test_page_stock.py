"""Memory whose pages are used again: what comes back, what stays idle, and how wrong use is
told.
"""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from deepnvme import IOQueue, PageStock

HUGE = 2 << 20


def test_pages_that_were_given_back_serve_a_buffer_of_another_size() -> None:
    stock = PageStock()
    first, second = stock.take(3 * HUGE), stock.take(HUGE)
    first[:], second[:] = b"\x01" * len(first), b"\x02" * len(second)
    del first, second
    assert stock.idle_bytes == 4 * HUGE
    whole = np.frombuffer(stock.take(4 * HUGE), dtype=np.uint8)
    assert stock.idle_bytes == 0
    assert np.count_nonzero(whole == 1) == 3 * HUGE
    assert np.count_nonzero(whole == 2) == HUGE


def test_a_view_of_torch_keeps_the_memory_until_it_is_gone() -> None:
    stock = PageStock()
    view = torch.frombuffer(stock.take(HUGE), dtype=torch.uint8)[5:9]
    other = stock.take(HUGE)
    view.fill_(7)
    assert bytes(other) == bytes(HUGE)
    assert stock.idle_bytes == 0
    del view
    assert stock.idle_bytes == HUGE


def test_no_more_than_what_was_allowed_stays_idle() -> None:
    stock = PageStock()
    held = [stock.take(HUGE) for _ in range(5)]
    del held
    again = stock.take(HUGE, keep=2 * HUGE)
    assert len(again) == HUGE
    assert stock.idle_bytes == 2 * HUGE
    stock.keep_at_most(HUGE)
    assert stock.idle_bytes == HUGE
    assert repr(stock) == f"PageStock({HUGE} B idle)"
    stock.keep_at_most(0)
    assert stock.idle_bytes == 0


def test_what_ends_after_it_was_closed_goes_back_to_the_system() -> None:
    stock = PageStock()
    left = stock.take(HUGE)
    stock.take(HUGE)
    stock.close()
    assert stock.idle_bytes == 0
    del left
    assert stock.idle_bytes == 0
    stock.take(HUGE)
    assert stock.idle_bytes == 0


def test_drives_read_into_it_directly(tmp_path: Path) -> None:
    stock = PageStock()
    given = np.random.default_rng(3).integers(0, 256, HUGE, dtype=np.uint8)
    (tmp_path / "file").write_bytes(given.tobytes())
    old = stock.take(2 * HUGE)
    del old
    memory = stock.take(HUGE)
    with IOQueue() as queue, queue.open(tmp_path / "file") as file:
        assert file.readinto(memory).result() == HUGE
        assert all(drive.bounced_bytes == 0 for drive in queue.stats().drives.values())
    assert np.array_equal(np.frombuffer(memory, dtype=np.uint8), given)


@pytest.mark.parametrize(("nbytes", "error"), [(0, ValueError), (-1, ValueError), (1.5, TypeError)])
def test_wrong_sizes_are_told_in_words(nbytes: int, error: type[Exception]) -> None:
    with pytest.raises(error, match="the bytes of a buffer"):
        PageStock().take(nbytes)


def test_a_negative_number_of_bytes_to_keep_is_refused() -> None:
    with pytest.raises(ValueError, match="the bytes to keep must not be negative"):
        PageStock().keep_at_most(-1)


@pytest.mark.parametrize("nbytes", [1 << 60, "1048576TiB"])
def test_more_than_there_is_is_a_memory_error_that_says_how_much(nbytes: int | str) -> None:
    with pytest.raises(MemoryError, match=f"no memory for a buffer of {1 << 60} B"):
        PageStock().take(nbytes)


def test_it_is_neither_pickled_nor_copied() -> None:
    stock = PageStock()
    for action in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="neither pickled nor copied"):
            action(stock)
