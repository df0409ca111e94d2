"""The mover: bytes arrive whole, moves overlap, and a failed one leaves the shard where it truly
is.
"""

from __future__ import annotations

import errno
from itertools import permutations
from pathlib import Path

import pytest

from deepnvme import FaultPlan
from deepnvme.queue.faults import Requests
from infinity_engine.accel import StreamKind, TimeCost, VirtualAccelerator
from infinity_engine.errors import CapacityError, ConfigError, IllegalTransition, TransferError
from infinity_engine.plan import Tier
from infinity_engine.residence import Mover, Residency, Source
from infinity_engine.storage import Hops
from support.tiers import KiB, Tiers, device_bytes, lease_of, some_bytes, tiers


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

        made.mover.move(record, Tier.NVME).result()
        assert made.host.stats().held == 0
        made.mover.move(record, Tier.DEVICE).result()
        made.host.release_ended()

        assert made.host.stats().held == 0
        assert {tier for tier in Tier if record.where(tier)} == {Tier.NVME, Tier.DEVICE}
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


def test_bytes_that_come_another_way_are_there_when_all_of_their_hops_have_ended(
    tmp_path: Path,
) -> None:
    content = some_bytes(8 * KiB, seed=1)
    with tiers(tmp_path, unified=True) as made:
        record = made.shard("w", content, Tier.NVME)
        made.mover.release(record, Tier.HOST)
        lease = made.device.lease(8 * KiB, holder="w")
        memory = lease.flat().numpy().data
        memory[: 4 * KiB] = content[: 4 * KiB]
        read = made.mover.read_part(record, 4 * KiB, memory[4 * KiB :])

        made.mover.load_with(record, into=lease, hop=Hops([read])).result()

        assert record.residency is Residency.HOST
        assert bytes(memory) == content
        made.mover.move(record, Tier.NVME).result()
        made.mover.release(record, Tier.HOST)
        assert lease.closed
        made.mover.forget(record)


def test_a_part_that_cannot_be_read_leaves_the_shard_on_the_drives(tmp_path: Path) -> None:
    faults = FaultPlan().fail(nth=1, requests=Requests.READS)
    with tiers(tmp_path, unified=True, io_faults=faults) as made:
        record = made.shard("w", some_bytes(8 * KiB, seed=1), Tier.NVME)
        made.mover.release(record, Tier.HOST)
        lease = made.device.lease(8 * KiB, holder="w")
        read = made.mover.read_part(record, 0, lease.flat().numpy().data)

        with pytest.raises(TransferError):
            made.mover.load_with(record, into=lease, hop=Hops([read])).result()

        assert record.residency is Residency.NVME
        assert lease.closed
        made.mover.forget(record)


def test_a_shard_that_the_drives_have_is_not_written_again(tmp_path: Path) -> None:
    with tiers(tmp_path) as made:
        record = made.shard("w", some_bytes(8 * KiB, seed=1), Tier.NVME)
        made.mover.move(record, Tier.HOST).result()
        written = written_bytes(made)

        made.mover.move(record, Tier.NVME).result()

        assert written_bytes(made) == written
        made.mover.forget(record)


def test_a_changed_shard_is_written_over_its_old_version(tmp_path: Path) -> None:
    with tiers(tmp_path) as made:
        record = made.shard("w", some_bytes(8 * KiB, seed=1), Tier.NVME)
        place = record.place
        made.mover.move(record, Tier.HOST).result()
        lease_of(record, Tier.HOST).memory()[:] = some_bytes(8 * KiB, seed=2)
        record.changed()

        made.mover.move(record, Tier.NVME).result()

        assert record.place == place
        assert made.content(record) == some_bytes(8 * KiB, seed=2)
        made.mover.forget(record)


def test_a_shard_is_not_on_the_device_before_its_copy_has_ended(tmp_path: Path) -> None:
    with tiers(tmp_path) as made:
        record = made.shard("w", b"\x07" * 4096)

        transfer = made.mover.upload(record)
        on_its_way = (
            record.residency,
            record.where(Tier.DEVICE),
            transfer.done(),
            made.device.reservation.held,
        )
        transfer.result()

        assert on_its_way == (Residency.UPLOADING, None, False, 4096)
        assert device_bytes(lease_of(record, Tier.DEVICE)) == b"\x07" * 4096
        made.mover.forget(record)


def test_several_moves_are_in_flight_at_once_and_links_work_side_by_side(tmp_path: Path) -> None:
    with tiers(tmp_path) as made:
        assert isinstance(made.accelerator, VirtualAccelerator)
        down = [
            made.shard(f"d{index}", some_bytes(10_000, seed=index), Tier.DEVICE)
            for index in range(3)
        ]
        up = [made.shard(f"u{index}", some_bytes(10_000, seed=10 + index)) for index in range(3)]
        begun_ns = made.accelerator.now_ns

        transfers = [made.mover.upload(record) for record in up] + [
            made.mover.move(record, Tier.HOST) for record in down
        ]
        assert not any(transfer.done() for transfer in transfers)
        assert made.mover.drain() == []

        assert all(transfer.done() for transfer in transfers)
        # the slower link's time, not the sum of both
        assert made.accelerator.now_ns - begun_ns == 3 * 20_000
        for record in [*up, *down]:
            made.mover.forget(record)


def test_a_chain_goes_on_by_polling(tmp_path: Path) -> None:
    with tiers(tmp_path) as made:
        assert isinstance(made.accelerator, VirtualAccelerator)
        record = made.shard("w", some_bytes(9000, seed=3), Tier.NVME)
        gate = made.hold_back(Requests.READS)

        transfer = made.mover.move(record, Tier.DEVICE)
        made.mover.poll()
        seen = [record.residency]
        gate.is_open = True
        made.mover.poll()
        seen.append(record.residency)
        made.accelerator.host_work(1_000_000)
        made.mover.poll()
        seen.append(record.residency)

        assert seen == [Residency.LOADING, Residency.UPLOADING, Residency.DEVICE]
        assert transfer.done()
        assert transfer.result() == 18_000
        made.mover.forget(record)


def test_the_device_computes_with_what_arrives_without_the_host_waiting(tmp_path: Path) -> None:
    with tiers(tmp_path) as made:
        record = made.shard("w", b"\x07" * 4096)
        compute = made.accelerator.stream(StreamKind.COMPUTE)
        sums = []

        transfer = made.mover.upload(record)
        lease, event = record.arriving, transfer.event
        assert lease is not None
        assert event is not None
        arriving = lease.flat()
        made.accelerator.wait_for(compute, event)
        made.accelerator.run(
            lambda: sums.append(int(arriving.sum())), stream=compute, cost=TimeCost(ns=1)
        ).wait()

        assert sums == [7 * 4096]
        assert not transfer.done()
        transfer.result()
        assert record.where(Tier.DEVICE) is lease
        made.mover.forget(record)


def test_nothing_arrives_any_more_when_a_move_has_ended(tmp_path: Path) -> None:
    with tiers(tmp_path) as made:
        record = made.shard("w", some_bytes(5000, seed=1))

        transfer = made.mover.upload(record)
        transfer.result()

        assert (record.arriving, transfer.event) == (None, None)
        made.mover.forget(record)


def test_nothing_arrives_any_more_when_a_move_failed(tmp_path: Path) -> None:
    with tiers(tmp_path, fault=lambda _: RuntimeError("the link is down")) as made:
        record = made.shard("w", some_bytes(5000, seed=1))

        made.mover.upload(record).wait()

        assert record.arriving is None
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
        home, to = (
            (Tier.HOST, Tier.DEVICE) if failing is StreamKind.H2D else (Tier.DEVICE, Tier.HOST)
        )

        with pytest.raises(TransferError, match=r"layers\.1\.w"):
            made.mover.move(record, to).result()
        assert record.residency is Residency[home.name]
        broken.clear()

        made.mover.move(record, to).result()
        assert made.content(record) == content
        made.mover.forget(record)
        made.host.release_ended()
        made.device.release_ended()
        assert (made.host.stats().held, made.device.reservation.held) == (0, 0)


@pytest.mark.parametrize("requests", [Requests.READS, Requests.WRITES])
def test_a_failed_io_leaves_the_shard_where_it_was_and_can_be_tried_again(
    requests: Requests, tmp_path: Path
) -> None:
    content = some_bytes(9000, seed=5)
    with tiers(
        tmp_path, io_faults=FaultPlan().fail(nth=1, requests=requests, errno=errno.EIO)
    ) as made:
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

        with pytest.raises(CapacityError, match=r"NVME \(.*\) cannot hold 65536 B"):
            made.mover.move(record, Tier.NVME).result()

        assert record.residency is Residency.HOST
        made.mover.forget(record)


def test_a_shard_on_its_way_cannot_be_moved_elsewhere(tmp_path: Path) -> None:
    with tiers(tmp_path) as made:
        record = made.shard("w", some_bytes(5000, seed=8))
        made.mover.upload(record)

        with pytest.raises(IllegalTransition, match="waiting for the end of UPLOADING"):
            made.mover.move(record, Tier.NVME)

        assert made.mover.drain() == []
        assert record.residency is Residency.DEVICE
        made.mover.forget(record)


def test_without_a_swap_file_nothing_goes_to_the_drives(tmp_path: Path) -> None:
    with tiers(tmp_path) as made:
        mover = Mover(made.accelerator, made.host, made.device)
        record = made.shard("w", some_bytes(5000, seed=9))

        with pytest.raises(ConfigError, match=r"Budget\.nvme"):
            mover.move(record, Tier.NVME).result()

        made.mover.forget(record)


def test_where_device_and_host_are_one_memory_the_lease_changes_tiers(tmp_path: Path) -> None:
    with tiers(tmp_path, unified=True) as made:
        record = made.shard("w", some_bytes(5000, seed=1))
        lease = record.where(Tier.HOST)

        assert made.mover.upload(record).result() == 0

        assert (record.where(Tier.DEVICE), record.where(Tier.HOST)) == (lease, None)
        made.mover.forget(record)


def test_a_source_that_is_closed_once_its_copy_has_begun_is_copied_whole(tmp_path: Path) -> None:
    content = some_bytes(4096, seed=2)
    with tiers(tmp_path, host=4096) as made:
        record = made.shard("w", content)

        transfer = made.mover.upload(record, source=Source.KEPT)
        lease_of(record, Tier.HOST).close()
        # has to wait for the copy's event
        next_one = made.host.lease(4096, holder="whoever comes next")
        next_one.memory()[:] = b"\x00" * 4096
        transfer.result()

        assert device_bytes(lease_of(record, Tier.DEVICE)) == content
        next_one.close()
        made.mover.forget(record)


def test_a_target_that_is_closed_once_its_copy_has_begun_goes_back_when_that_has_ended(
    tmp_path: Path,
) -> None:
    with tiers(tmp_path, device=4096) as made:
        record = made.shard("w", some_bytes(4096, seed=2))

        transfer = made.mover.upload(record)
        assert record.arriving is not None
        record.arriving.close()
        held = made.device.reservation.held
        transfer.result()
        made.device.release_ended()

        assert (held, made.device.reservation.held) == (4096, 0)
        made.mover.forget(record)


# --- into -----------------------------------------------------------------------------------------


def test_a_move_into_a_lease_ends_with_the_shard_in_it(tmp_path: Path) -> None:
    with tiers(tmp_path) as made:
        record = made.shard("w", some_bytes(5000, seed=1), Tier.NVME)
        lease = made.host.lease(5000, holder="planned")

        made.mover.move(record, Tier.HOST, into=lease).result()

        assert record.where(Tier.HOST) is lease
        assert made.content(record) == some_bytes(5000, seed=1)
        made.mover.forget(record)
        assert lease.closed


@pytest.mark.parametrize(
    ("tier", "nbytes", "told"),
    [
        (Tier.DEVICE, 5000, "an open lease of 5000 B of HOST"),
        (Tier.HOST, 4999, "an open lease of 5000 B of HOST"),
    ],
)
def test_a_lease_that_does_not_fit_is_refused_at_once_and_stays_the_callers(
    tier: Tier, nbytes: int, told: str, tmp_path: Path
) -> None:
    with tiers(tmp_path) as made:
        record = made.shard("layers.1.w", some_bytes(5000, seed=1), Tier.NVME)
        pool = made.host if tier is Tier.HOST else made.device
        with pool.lease(nbytes, holder="planned") as lease:
            with pytest.raises(ConfigError, match=rf"layers\.1\.w.*{told}"):
                made.mover.move(record, Tier.HOST, into=lease)

            assert not lease.closed
        assert record.residency is Residency.NVME
        made.mover.forget(record)


def test_a_closed_lease_is_refused(tmp_path: Path) -> None:
    with tiers(tmp_path) as made:
        record = made.shard("w", some_bytes(5000, seed=1), Tier.NVME)
        lease = made.host.lease(5000, holder="planned")
        lease.close()

        with pytest.raises(ConfigError, match="an open lease"):
            made.mover.move(record, Tier.HOST, into=lease)

        made.mover.forget(record)


def test_a_lease_for_a_shard_that_has_memory_there_is_refused(tmp_path: Path) -> None:
    with tiers(tmp_path) as made:
        record = made.shard("w", some_bytes(5000, seed=1), Tier.DEVICE)
        made.mover.move(record, Tier.HOST).result()
        made.mover.upload(record, source=Source.KEPT).result()
        made.mover.move(record, Tier.HOST, source=Source.KEPT).result()
        with made.device.lease(5000, holder="planned") as lease:
            with pytest.raises(ConfigError, match="None, as w has memory in DEVICE already"):
                made.mover.upload(record, into=lease)

            assert not lease.closed
        made.mover.forget(record)


def test_where_device_and_host_are_one_memory_a_lease_to_copy_into_is_refused(
    tmp_path: Path,
) -> None:
    with tiers(tmp_path, unified=True) as made:
        record = made.shard("w", some_bytes(5000, seed=1))
        with (
            made.device.lease(5000, holder="planned") as lease,
            pytest.raises(ConfigError, match="None, as DEVICE and HOST are one memory"),
        ):
            made.mover.upload(record, into=lease)

        made.mover.forget(record)


def test_the_lease_of_a_move_that_failed_is_closed(tmp_path: Path) -> None:
    with tiers(tmp_path, io_faults=FaultPlan().fail(nth=1, requests=Requests.READS)) as made:
        record = made.shard("w", some_bytes(5000, seed=1), Tier.NVME)
        lease = made.host.lease(5000, holder="planned")

        made.mover.move(record, Tier.HOST, into=lease).wait()

        assert lease.closed
        made.mover.forget(record)


def test_the_lease_of_a_hop_that_never_began_is_closed(tmp_path: Path) -> None:
    with tiers(tmp_path, io_faults=FaultPlan().fail(nth=1, requests=Requests.READS)) as made:
        record = made.shard("w", some_bytes(5000, seed=1), Tier.NVME)
        lease = made.device.lease(5000, holder="planned")

        made.mover.move(record, Tier.DEVICE, into=lease).wait()

        assert lease.closed
        assert record.residency is Residency.NVME
        made.mover.forget(record)


# --- what went wrong ------------------------------------------------------------------------------


def test_a_move_that_is_refused_leaves_the_one_under_way_alone(tmp_path: Path) -> None:
    with tiers(tmp_path) as made:
        record = made.shard("w", some_bytes(5000, seed=1), Tier.NVME)
        made.hold_back(Requests.READS)
        first = made.mover.move(record, Tier.HOST)

        with pytest.raises(IllegalTransition):
            made.mover.move(record, Tier.HOST).result()

        assert record.residency is Residency.LOADING
        assert first.result() == 5000
        assert made.content(record) == some_bytes(5000, seed=1)
        made.mover.forget(record)


def test_an_error_that_nobody_asked_for_is_told_by_drain(tmp_path: Path) -> None:
    with tiers(
        tmp_path, nvme=8 * KiB, io_faults=FaultPlan().fail(nth=1, requests=Requests.WRITES)
    ) as made:
        small, large = (
            made.shard("small", some_bytes(4000, seed=1)),
            made.shard("large", some_bytes(64 * KiB, seed=2)),
        )
        gate = made.hold_back(Requests.WRITES)

        made.mover.move(small, Tier.NVME)
        made.mover.move(large, Tier.NVME)  # fails at once
        gate.is_open = True
        made.mover.poll()
        made.mover.poll()

        errors = made.mover.drain()
        assert sorted(type(error).__name__ for error in errors) == [
            "CapacityError",
            "TransferError",
        ]
        assert made.mover.drain() == []
        for record in (small, large):
            made.mover.forget(record)


def test_an_error_that_was_raised_is_not_told_again(tmp_path: Path) -> None:
    with tiers(tmp_path, nvme=8 * KiB) as made:
        record = made.shard("w", some_bytes(64 * KiB, seed=2))

        with pytest.raises(CapacityError):
            made.mover.move(record, Tier.NVME).result()

        assert made.mover.drain() == []
        made.mover.forget(record)


def test_where_there_is_one_memory_a_copy_that_was_kept_there_goes_back(tmp_path: Path) -> None:
    with tiers(tmp_path, unified=True) as made:
        record = made.shard("w", some_bytes(5000, seed=1), Tier.NVME)
        made.mover.move(record, Tier.DEVICE).result()
        made.mover.move(record, Tier.NVME, source=Source.KEPT).result()
        kept = lease_of(record, Tier.DEVICE)

        made.mover.move(record, Tier.DEVICE).result()

        assert kept.closed
        assert made.content(record) == some_bytes(5000, seed=1)
        made.mover.forget(record)


def written_bytes(made: Tiers) -> int:
    return sum(drive.written_bytes for drive in made.swap.queue.stats().drives.values())
