"""The mover: bytes arrive whole, moves overlap, and a failed one leaves the shard where it truly is."""

from __future__ import annotations

import errno
from itertools import permutations
from pathlib import Path

import pytest
import torch

from deepnvme import FaultPlan
from deepnvme.faults import Requests
from infinity_engine.accel import StreamKind, VirtualAccelerator
from infinity_engine.errors import CapacityError, ConfigError, IllegalTransition, TransferError
from infinity_engine.plan import Tier
from infinity_engine.tiering import Mover, Residency, Source
from support.tiers import KiB, Tiers, device_bytes, some_bytes, tiers


@pytest.mark.parametrize(("start", "end"), list(permutations(Tier, 2)))
@pytest.mark.parametrize("unified", [False, True], ids=["two memories", "one memory"])
@pytest.mark.parametrize("nbytes", [0, 1, 5000, 64 * KiB])
def test_bytes_arrive_whole_from_anywhere_to_anywhere(
    start: Tier, end: Tier, unified: bool, nbytes: int, tmp_path: Path
) -> None:
    content = some_bytes(nbytes, seed=1)
    with tiers(tmp_path, unified=unified) as made:
        record = made.shard("w", content, start)
        assert record.residency is Residency[start.name]

        made.mover.move(record, end).result()

        assert record.residency is Residency[end.name]
        assert made.content(record) == content
        made.mover.forget(record)


def test_a_released_source_goes_back(tmp_path: Path) -> None:
    with tiers(tmp_path) as made:
        record = made.shard("w", some_bytes(5000, seed=1))

        made.mover.store(record).result()
        assert made.host.stats().held == 0
        made.mover.move(record, Tier.DEVICE).result()
        made.host.settle()

        assert made.host.stats().held == 0
        assert record.tiers == (Tier.NVME, Tier.DEVICE)
        made.mover.forget(record)


def test_a_kept_source_saves_the_way_back(tmp_path: Path) -> None:
    with tiers(tmp_path) as made:
        record = made.shard("w", some_bytes(5000, seed=1))
        made.mover.move(record, Tier.DEVICE, source=Source.KEPT).result()
        copies = len(made.accelerator.timeline())  # type: ignore[attr-defined]

        made.mover.move(record, Tier.HOST).result()

        assert len(made.accelerator.timeline()) == copies == 1  # type: ignore[attr-defined]
        assert made.content(record) == some_bytes(5000, seed=1)
        assert made.device.reservation.held == 0
        made.mover.forget(record)


def test_a_shard_that_the_drives_have_is_not_written_again(tmp_path: Path) -> None:
    with tiers(tmp_path) as made:
        record = made.shard("w", some_bytes(8 * KiB, seed=1), Tier.NVME)
        made.mover.load(record).result()
        written = written_bytes(made)

        made.mover.store(record).result()

        assert written_bytes(made) == written
        made.mover.forget(record)


def test_a_changed_shard_is_written_over_its_old_version(tmp_path: Path) -> None:
    with tiers(tmp_path) as made:
        record = made.shard("w", some_bytes(8 * KiB, seed=1), Tier.NVME)
        place = record.place
        made.mover.load(record).result()
        assert record.host is not None
        record.host.memory()[:] = some_bytes(8 * KiB, seed=2)
        record.changed()

        made.mover.store(record).result()

        assert record.place == place
        assert made.content(record) == some_bytes(8 * KiB, seed=2)
        made.mover.forget(record)


def test_a_shard_is_not_on_the_device_before_its_copy_has_ended(tmp_path: Path) -> None:
    with tiers(tmp_path) as made:
        record = made.shard("w", b"\x07" * 4096)

        transfer = made.mover.upload(record)
        on_its_way = (record.residency, record.device, transfer.done(), made.device.reservation.held)
        transfer.result()

        assert on_its_way == (Residency.UPLOADING, None, False, 4096)
        assert record.device is not None
        assert device_bytes(record.device) == b"\x07" * 4096
        made.mover.forget(record)


def test_several_moves_are_in_flight_at_once_and_links_work_side_by_side(tmp_path: Path) -> None:
    with tiers(tmp_path) as made:
        assert isinstance(made.accelerator, VirtualAccelerator)
        down = [made.shard(f"d{index}", some_bytes(10_000, seed=index), Tier.DEVICE) for index in range(3)]
        up = [made.shard(f"u{index}", some_bytes(10_000, seed=10 + index)) for index in range(3)]
        begun_ns = made.accelerator.now_ns

        transfers = [made.mover.upload(record) for record in up] + [made.mover.download(record) for record in down]
        assert made.mover.under_way == 6
        assert made.mover.drain() == []

        assert all(transfer.done() for transfer in transfers)
        assert made.accelerator.now_ns - begun_ns == 3 * 20_000  # the slower link's time, not the sum of both
        for record in [*up, *down]:
            made.mover.forget(record)


def test_a_chain_goes_on_by_polling(tmp_path: Path) -> None:
    with tiers(tmp_path) as made:
        assert isinstance(made.accelerator, VirtualAccelerator)
        record = made.shard("w", some_bytes(9000, seed=3), Tier.NVME)

        transfer = made.mover.move(record, Tier.DEVICE)
        seen = [record.residency]
        while not transfer.done():
            made.mover.poll()
            if record.residency is not seen[-1]:
                seen.append(record.residency)
            if record.residency is Residency.UPLOADING:
                made.accelerator.host_work(1_000_000)

        assert seen == [Residency.LOADING, Residency.UPLOADING, Residency.DEVICE]
        assert (record.residency, made.mover.under_way) == (Residency.DEVICE, 0)
        assert transfer.result() == 18_000
        made.mover.forget(record)


@pytest.mark.parametrize("failing", [StreamKind.H2D, StreamKind.D2H])
def test_a_failed_copy_leaves_the_shard_where_it_was_and_can_be_tried_again(
    failing: StreamKind, tmp_path: Path
) -> None:
    broken = [RuntimeError("the link is down")]

    def fault(kind: StreamKind) -> Exception | None:
        return broken[0] if broken and kind is failing else None

    content = some_bytes(9000, seed=4)
    with tiers(tmp_path, fault=fault) as made:
        record = made.shard("layers.1.w", content, Tier.HOST)
        if failing is StreamKind.D2H:
            made.mover.upload(record).result()
        home, to = (Tier.HOST, Tier.DEVICE) if failing is StreamKind.H2D else (Tier.DEVICE, Tier.HOST)

        with pytest.raises(TransferError, match=r"layers\.1\.w"):
            made.mover.move(record, to).result()
        assert record.residency is Residency[home.name]
        broken.clear()

        made.mover.move(record, to).result()
        assert made.content(record) == content
        made.mover.forget(record)
        made.host.settle()
        made.device.settle()
        assert (made.host.stats().held, made.device.reservation.held) == (0, 0)


@pytest.mark.parametrize("requests", [Requests.READS, Requests.WRITES])
def test_a_failed_io_leaves_the_shard_where_it_was_and_can_be_tried_again(requests: Requests, tmp_path: Path) -> None:
    content = some_bytes(9000, seed=5)
    with tiers(tmp_path, io_faults=FaultPlan().fail(nth=1, requests=requests, errno=errno.EIO)) as made:
        record = made.shard("w", content)
        failed = 0
        for to in (Tier.NVME, Tier.HOST):
            home = record.residency
            transfer = made.mover.move(record, to)
            transfer.wait()
            if transfer.error is not None:
                assert isinstance(transfer.error, TransferError)
                assert (transfer.error.errno, transfer.error.asked) == (errno.EIO, 9000)
                assert record.residency is home
                failed += 1
                made.mover.move(record, to).result()

        assert failed == 1
        assert made.content(record) == content
        made.mover.forget(record)
        assert (made.host.stats().held, made.swap.free_bytes) == (0, made.swap.capacity)


def test_a_device_without_room_leaves_a_loaded_shard_on_the_host(tmp_path: Path) -> None:
    content = some_bytes(300 * KiB, seed=6)
    with tiers(tmp_path, device=64 * KiB) as made:
        record = made.shard("w", content, Tier.NVME)

        with pytest.raises(CapacityError, match="DEVICE cannot hold"):
            made.mover.move(record, Tier.DEVICE).result()

        assert record.residency is Residency.HOST
        assert made.content(record) == content
        made.mover.forget(record)


def test_a_full_swap_file_says_what_to_change_and_leaves_the_shard(tmp_path: Path) -> None:
    with tiers(tmp_path, nvme=16 * KiB) as made:
        record = made.shard("w", some_bytes(64 * KiB, seed=7))

        with pytest.raises(CapacityError, match="NVME cannot hold 65536 B"):
            made.mover.store(record).result()

        assert record.residency is Residency.HOST
        made.mover.forget(record)


def test_a_shard_on_its_way_cannot_be_moved_elsewhere(tmp_path: Path) -> None:
    with tiers(tmp_path) as made:
        record = made.shard("w", some_bytes(5000, seed=8))
        made.mover.upload(record)

        with pytest.raises(IllegalTransition, match="waiting for the end of UPLOADING"):
            made.mover.move(record, Tier.NVME)
        with pytest.raises(IllegalTransition):
            made.mover.store(record).result()

        assert made.mover.drain() == []
        assert record.residency is Residency.DEVICE
        made.mover.forget(record)


def test_without_a_swap_file_nothing_goes_to_the_drives(tmp_path: Path) -> None:
    with tiers(tmp_path) as made:
        mover = Mover(made.accelerator, made.host, made.device)
        record = made.shard("w", some_bytes(5000, seed=9))

        with pytest.raises(ConfigError, match=r"Budget\.nvme"):
            mover.store(record).result()

        made.mover.forget(record)


def test_where_device_and_host_are_one_memory_the_lease_changes_tiers(tmp_path: Path) -> None:
    with tiers(tmp_path, unified=True) as made:
        record = made.shard("w", some_bytes(5000, seed=1))
        lease = record.host

        assert made.mover.upload(record).result() == 0

        assert (record.device, record.host) == (lease, None)
        made.mover.forget(record)


def test_freeing_the_source_before_the_copys_event_is_seen(tmp_path: Path) -> None:
    """A planted bug: the mover attaches the event to both leases; without that the bytes would be NaN."""
    with tiers(tmp_path) as made:
        assert isinstance(made.accelerator, VirtualAccelerator)
        source = made.host.lease(4096, holder="source")
        source.memory()[:] = b"\x01" * 4096
        target = made.device.lease(4096, holder="target")
        stream = made.accelerator.stream(StreamKind.H2D)
        event = made.accelerator.copy(target.flat(), source.flat(), stream=stream)

        source.close()  # without source.until(event)
        event.wait()

        assert target.tensor(torch.float32).isnan().all()
        target.close()


def written_bytes(made: Tiers) -> int:
    return sum(drive.written_bytes for drive in made.swap.queue.stats().drives.values())
