"""Three small tiers to move shards between: an emulated device, pinned memory and a swap file, all
under one ledger.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from deepnvme import FaultPlan, IOQueue
from deepnvme.queue.faults import Requests
from infinity_engine.accel import (
    Accelerator,
    Buffer,
    CpuAccelerator,
    Emulation,
    StreamKind,
    emulated_accelerator,
)
from infinity_engine.errors import TransferError
from infinity_engine.memory import DeviceMemory, Freed, Lease, Ledger, PinnedPool
from infinity_engine.plan import Rates, ResolvedBudget, Tier
from infinity_engine.residence import Mover, ShardRecord
from infinity_engine.storage import Hop, IOHop, SwapFile

KiB = 1024
QUEUE = 1024 * KiB  # what the queue may take for itself
RATES = Rates(h2d_bytes_per_s=1e9, d2h_bytes_per_s=5e8, device_update_params_per_s=1e9)
Fault = Callable[[StreamKind], Exception | None]


class Gate:
    """What I/O has to pass before a poll sees its end; whoever waits for it opens it."""

    def __init__(self) -> None:
        self.is_open = False


class _Gated:
    """An I/O behind a gate."""

    def __init__(self, hop: Hop, gate: Gate) -> None:
        self._hop, self._gate = hop, gate

    def done(self) -> bool:
        if self._gate.is_open:
            with suppress(TransferError):  # `wait` tells it
                # so that one poll is enough: a test is not to depend on a drive's speed
                self._hop.wait()
        return self._gate.is_open

    def wait(self) -> int:
        self._gate.is_open = True
        return self._hop.wait()


@dataclass
class Tiers:
    """What a mover moves between."""

    ledger: Ledger
    accelerator: Accelerator
    host: PinnedPool
    device: DeviceMemory[Buffer]
    swap: SwapFile
    mover: Mover

    def shard(self, name: str, content: bytes, tier: Tier = Tier.HOST) -> ShardRecord:
        """Return a new shard with that content, brought to `tier`."""
        lease = self.host.lease(len(content), holder=name)
        if content:
            lease.memory()[:] = content
        record = ShardRecord(name, lease)
        self.mover.move(record, tier).result()
        return record

    def hold_back(self, requests: Requests) -> Gate:
        """Return a gate that the swap file's reads, or its writes, end behind from now on."""
        gate = Gate()
        name = "read" if requests is Requests.READS else "write"
        begin: Callable[..., IOHop] = getattr(self.swap, name)
        setattr(
            self.swap,
            name,
            lambda place, memory, *, what="": _Gated(begin(place, memory, what=what), gate),
        )
        return gate

    def content(self, record: ShardRecord) -> bytes:
        """Return the shard's bytes, from wherever they are; brings it to the host."""
        self.mover.move(record, Tier.HOST).result()
        return bytes(lease_of(record, Tier.HOST).memory())


def lease_of(record: ShardRecord, tier: Tier) -> Lease:
    """Return the shard's memory in a tier, which it has."""
    lease = record.where(tier)
    assert isinstance(lease, Lease), f"{record!r} has no memory in {tier.name}"
    return lease


@contextmanager
def tiers(
    directory: Path,
    *,
    device: int = 256 * KiB,
    host: int = 512 * KiB,
    nvme: int = 4096 * KiB,
    fault: Fault | None = None,
    io_faults: FaultPlan | None = None,
    unified: bool = False,
    seed: int = 0,
) -> Iterator[Tiers]:
    """Make tiers of those sizes; freed memory is NaN, and the device's copies happen as late as
    they may.
    """
    on_host = host + QUEUE + (device if unified else 0)
    budget = ResolvedBudget(device=device, host=on_host, nvme={str(directory): nvme})
    ledger = Ledger(budget, device_is=Tier.HOST if unified else Tier.DEVICE)
    emulation = Emulation(rates=RATES, capacity_bytes=device, seed=seed, fault=fault)
    accelerator: Accelerator = CpuAccelerator() if unified else emulated_accelerator(emulation)
    pool = PinnedPool(ledger.reserve(Tier.HOST, host, holder="pinned pool"), freed=Freed.NAN)
    device_memory = DeviceMemory(
        accelerator, ledger.reserve(Tier.DEVICE, device, holder="device memory")
    )
    with IOQueue(chunk_bytes=QUEUE // 4, inflight_bytes=QUEUE, faults=io_faults) as queue:
        pool.register_with(queue)
        swap = SwapFile({str(directory): nvme}, ledger, rates={str(directory): 1.0}, queue=queue)
        mover = Mover(accelerator, pool, device_memory, swap)
        made = Tiers(ledger, accelerator, pool, device_memory, swap, mover)
        try:
            yield made
        finally:
            mover.drain()
            swap.close()
            accelerator.stop()


def some_bytes(nbytes: int, seed: int) -> bytes:
    """Return bytes that belong to `seed`."""
    return random.Random(seed).randbytes(nbytes)


def device_bytes(lease: Lease) -> bytes:
    """Return what is in device memory now, whether it may be read or not."""
    return lease.tensor(torch.uint8).numpy().tobytes()
