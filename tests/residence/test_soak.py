"""Random moves over all tiers for a long time, under budgets of an eighth of the data: nothing
lost, nothing leaked.
"""

from __future__ import annotations

import random
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from deepnvme.memory.checksum import crc32c
from infinity_engine.errors import CapacityError
from infinity_engine.plan import Tier
from infinity_engine.residence import Residency, ShardRecord, Source
from infinity_engine.storage import Transfer
from support.resident_memory import ResidentMemory
from support.tiers import Tiers, lease_of, tiers

MiB = 1 << 20
SHARDS = 208
SIZES = (4096, 65_536, 300_000, 700_001, 1 << 20)
BUDGET = 10 * MiB
IN_FLIGHT = 6
SAMPLE_S = 0.1
# What is resident beside the host's budget: the emulated device, which lives in host memory; the
# noise that contents are cut from; and what torch and the allocator take when they are first used,
# and keep between blocks of odd sizes.
ALLOWANCE = BUDGET + 24 * MiB


@dataclass
class Soaked:
    """What a soak did."""

    moved_bytes: int
    data_bytes: int
    resident: list[tuple[float, int]]  # seconds and bytes, after the warm-up
    peak_above_baseline: int = 0

    @property
    def slope_mib_per_minute(self) -> float:
        """The growth of the process's memory, as a line through all samples."""
        seconds, nbytes = np.array(self.resident).T
        return float(np.polyfit(seconds / 60, nbytes / MiB, 1)[0])


def soak(
    made: Tiers, memory: ResidentMemory, seconds: float, *, least_moved: int, seed: int
) -> Soaked:
    """Move shards at random for so long, and until so much was moved; compare a checksum when one
    is touched.
    """
    chance = random.Random(seed)
    noise = np.random.default_rng(seed).integers(0, 256, 2 * max(SIZES), dtype=np.uint8)
    sums: dict[str, int] = {}
    records = []
    for index in range(SHARDS):
        start = chance.randrange(max(SIZES))
        content = noise[start : start + SIZES[index % len(SIZES)]].tobytes()
        records.append(made.shard(f"shard {index}", content, Tier.NVME))
        sums[f"shard {index}"] = crc32c(content)
    result = Soaked(0, sum(record.nbytes for record in records), [])
    under_way: list[tuple[ShardRecord, Transfer]] = []
    samples = 0
    begun = time.monotonic()
    while time.monotonic() - begun < seconds or result.moved_bytes < least_moved:
        record = chance.choice(records)
        if all(record is not moving for moving, _ in under_way):
            touch(record, sums, noise, chance)
            to = chance.choice([Tier.NVME, Tier.NVME, Tier.HOST, Tier.DEVICE, Tier.DEVICE])
            under_way.append(
                (record, made.mover.move(record, to, source=chance.choice(list(Source))))
            )
        while len(under_way) >= IN_FLIGHT or (under_way and chance.random() < 0.3):
            _, transfer = under_way.pop(chance.randrange(len(under_way)))
            try:
                result.moved_bytes += transfer.result()
            except CapacityError:
                make_room(made, records, under_way, chance)
        elapsed = time.monotonic() - begun
        if elapsed > SAMPLE_S * samples:  # few enough to weigh nothing themselves
            samples += 1
            result.peak_above_baseline = max(result.peak_above_baseline, memory.above_baseline())
            if elapsed > seconds / 3:
                result.resident.append((elapsed, memory.now_bytes()))
    assert all(isinstance(error, CapacityError) for error in made.mover.drain())
    make_room(made, records, [], chance)
    for record in records:
        made.mover.move(record, Tier.NVME).result()
        made.mover.move(record, Tier.HOST).result()
        touch(record, sums, noise, chance)
        made.mover.forget(record)
    return result


def touch(
    record: ShardRecord, sums: dict[str, int], noise: np.ndarray, chance: random.Random
) -> None:
    """Compare a shard on the host with what it must be; often change it."""
    if record.residency is not Residency.HOST:
        return
    bytes_of = lease_of(record, Tier.HOST).memory()
    assert crc32c(bytes_of) == sums[record.name], f"{record!r} has other bytes than were put there"
    if chance.random() < 0.7:
        start = chance.randrange(max(SIZES))
        bytes_of[:] = noise[start : start + record.nbytes].data
        record.changed()
        sums[record.name] = crc32c(bytes_of)


def make_room(
    made: Tiers,
    records: list[ShardRecord],
    under_way: list[tuple[ShardRecord, Transfer]],
    chance: random.Random,
) -> None:
    """Send what rests in memory to the drives, the host first, so that what comes from the device
    has room there.
    """
    moving = [record for record, _ in under_way]
    for residency in (Residency.NVME, Residency.HOST, Residency.DEVICE):
        for record in chance.sample(records, len(records)):
            if record.residency is residency and all(record is not other for other in moving):
                with suppress(CapacityError):
                    made.mover.move(record, Tier.NVME).result()
                for tier in (Tier.HOST, Tier.DEVICE):
                    if record.residency is Residency.NVME:
                        made.mover.release(record, tier)


def run(directory: Path, seconds: float, seed: int) -> Soaked:
    memory = ResidentMemory()
    with tiers(directory, device=BUDGET, host=BUDGET, nvme=96 * MiB, seed=seed) as made:
        soaked = soak(made, memory, seconds, least_moved=100 * BUDGET, seed=seed)
        made.host.release_ended()
        made.device.release_ended()

        assert soaked.data_bytes >= 8 * BUDGET
        assert soaked.moved_bytes >= 100 * BUDGET
        assert (made.host.stats().held, made.device.reservation.held) == (0, 0)
        assert made.swap.free_bytes == made.swap.capacity
        own_bytes = sum(drive.own_bytes for drive in made.swap.queue.stats().drives.values())
        assert own_bytes <= made.swap.io_bytes  # for reads that end within a page
        for usage in made.ledger.usage():
            assert 0 < usage.peak_held <= usage.limit
        host = next(usage for usage in made.ledger.usage() if usage.tier is Tier.HOST)
        assert 0 < soaked.peak_above_baseline <= host.limit + ALLOWANCE
        return soaked


def test_some_seconds_of_random_moves_lose_and_leak_nothing(tmp_path: Path) -> None:
    soaked = run(tmp_path, 8, seed=1)

    grown = [nbytes for _, nbytes in soaked.resident]
    # Too short for a slope: the end of the run may not be higher than its middle by more than what
    # an allocator keeps.
    assert np.median(grown[-len(grown) // 4 :]) - np.median(grown[: len(grown) // 4]) < 4 * MiB


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_ten_minutes_of_random_moves_lose_and_leak_nothing(tmp_path: Path) -> None:
    soaked = run(tmp_path, 600, seed=int(time.time()))

    assert soaked.slope_mib_per_minute < 1
