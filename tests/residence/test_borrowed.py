"""Leases of memory that torch has allocated."""

from __future__ import annotations

import threading
import weakref

import pytest
import torch

from infinity_engine.memory import BorrowedMemory, Ledger
from infinity_engine.plan import ResolvedBudget, Tier


class Later:
    """An event that passes when the test calls `end`."""

    def __init__(self) -> None:
        self._ended = threading.Event()

    def end(self) -> None:
        self._ended.set()

    def done(self) -> bool:
        return self._ended.is_set()

    def wait(self) -> None:
        self._ended.wait()


def memory() -> BorrowedMemory:
    ledger = Ledger(ResolvedBudget(device=0, host=0, nvme={}))
    return BorrowedMemory(Tier.HOST, ledger.reserve(Tier.HOST, 0, holder="saved tensors"))


def flat(nbytes: int = 4096) -> torch.Tensor:
    return torch.arange(nbytes, dtype=torch.int64).to(torch.uint8)


def test_a_lease_has_the_bytes_of_the_tensor() -> None:
    pool, tensor = memory(), flat()
    with pool.borrow(tensor, holder="activation") as lease:
        assert lease.nbytes == 4096
        assert lease.memory().tobytes() == bytes(tensor.tolist())
        assert lease.flat().data_ptr() == tensor.data_ptr()
        assert lease.tensor(torch.float32, (16, 64)).data_ptr() == tensor.data_ptr()
    pool.close()


def test_it_keeps_the_memory_until_its_events_have_passed() -> None:
    pool, tensor, event = memory(), flat(), Later()
    watch = weakref.ref(tensor.untyped_storage())
    lease = pool.borrow(tensor, holder="activation")
    lease.until(event)
    kept = weakref.ref(tensor)
    del tensor
    lease.close()
    pool.release_ended()
    assert kept() is not None
    event.end()
    pool.release_ended()
    assert kept() is None
    assert watch() is None
    pool.close()


def test_memory_of_another_device_is_not_for_drives() -> None:
    pool = memory()
    lease = pool.borrow(torch.empty(64, dtype=torch.uint8, device="meta"), holder="activation")
    with pytest.raises(TypeError, match="which no I/O can reach"):
        lease.memory()
    lease.close()
    pool.close()


def test_a_lease_that_is_open_when_the_memory_closes_is_named() -> None:
    pool = memory()
    lease = pool.borrow(flat(), holder="activation 7")
    with pytest.raises(RuntimeError, match="activation 7"):
        pool.close()
    lease.close()
