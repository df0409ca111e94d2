"""What a process really has in RAM, in a process of its own: no more than its baseline and the
host's limit.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from infinity_engine.memory import FreedMemory, freed
from support.nvme_programs import output_of, run_program
from support.warm_programs import WITH_SUPPORT

MiB = 1 << 20

# HOST's limit is that of DEVICE as well. The rest of it is for what Python and torch take for
# themselves. Leases on the device are larger than 32 MiB: malloc keeps smaller pieces for later,
# and no account can know that.
PROGRAM = """
import torch

from infinity_engine.accel import CpuAccelerator
from infinity_engine.errors import CapacityError
from infinity_engine.memory import DeviceMemory, Ledger, PinnedPool
from infinity_engine.plan import ResolvedBudget, Tier
from support.resident_memory import ResidentMemory

MiB = 1 << 20
torch.ones(40 << 20, dtype=torch.uint8).fill_(1)
ledger = Ledger(ResolvedBudget(device=256 * MiB, host=256 * MiB), device_is=Tier.HOST)
resident = ResidentMemory()
seen = []
pool = PinnedPool(ledger.reserve(Tier.HOST, 96 * MiB, holder="pinned pool"))
device = DeviceMemory(CpuAccelerator(), ledger.reserve(Tier.DEVICE, 96 * MiB, holder="device memory"))
seen.append(resident.above_baseline())
kept = []


def use(lessor, mib, count):
    for number in range(count):
        try:
            lease = lessor.lease(mib * MiB, holder="w")
        except CapacityError:
            kept.clear()
            lease = lessor.lease(mib * MiB, holder="w")
        with lease:
            kept.append(lease.flat().fill_(number))
        seen.append(resident.above_baseline())


use(pool, 20, 20)
use(device, 40, 20)
print(*seen)
kept.clear()
pool.close()
device.close()
print(resident.above_baseline())
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """Return the MiB above the baseline: those seen after every lease, and what is left when all is
    closed.
    """
    pytest.importorskip("torch", reason="leases give tensors of torch")
    folder = tmp_path_factory.mktemp("resident")
    lines = output_of(run_program(PROGRAM, folder=folder, environment=WITH_SUPPORT)).splitlines()
    return [[int(nbytes) // MiB for nbytes in line.split()] for line in lines]


def test_the_process_stays_under_its_baseline_and_the_hosts_limit_whoever_keeps_views(
    printed: list[list[int]],
) -> None:
    seen, _ = printed

    assert len(seen) == 41
    assert 96 <= seen[0] < 128  # the pool, touched as it is made
    assert 96 + 80 < max(seen) <= 256


def test_what_is_closed_is_no_longer_resident(printed: list[list[int]]) -> None:
    _, [left] = printed

    assert left < 64


FREED = """
import torch

from infinity_engine.memory import return_freed_memory
from support.resident_memory import ResidentMemory

resident = ResidentMemory()
kept = [torch.ones(100_000, dtype=torch.uint8) for _ in range(1000)]
kept = kept[-1:]  # above the hole that the others leave
before = resident.above_baseline()
return_freed_memory()
print((before - resident.above_baseline()) >> 20)
"""


@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library has no malloc_trim"
)
def test_memory_that_was_freed_goes_back_to_the_system(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="it is tensors that are freed")

    assert int(output_of(run_program(FREED, folder=tmp_path, environment=WITH_SUPPORT))) > 80


def test_what_is_freed_piece_by_piece_goes_back_whenever_it_is_as_much_as_was_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[None] = []
    monkeypatch.setattr(freed, "return_freed_memory", lambda: given.append(None))
    memory = FreedMemory(10)
    seen = []
    for _ in range(7):
        memory.freed(4)
        seen.append(len(given))

    assert seen == [0, 0, 1, 1, 1, 2, 2]
