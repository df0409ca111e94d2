"""Leases: when a buffer goes back, who is told of a leak, and what use after the end gets."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

pytest.importorskip("torch", reason="leases give tensors of torch")

import torch

from infinity_engine.accel import CpuAccelerator
from infinity_engine.errors import CapacityError, ConfigError
from infinity_engine.memory import (
    DeviceMemory,
    Freed,
    Lease,
    Ledger,
    PinnedPool,
    Reservation,
    Views,
)
from infinity_engine.plan import ResolvedBudget, Tier

PAGE = 4096


def reservation(nbytes: int, tier: Tier = Tier.HOST) -> Reservation:
    budget = ResolvedBudget(device=nbytes, host=nbytes)
    return Ledger(budget).reserve(tier, nbytes, holder="the pool")


def reservation_where_device_is_host(nbytes: int) -> Reservation:
    budget = ResolvedBudget(device=nbytes, host=nbytes)
    return Ledger(budget, device_is=Tier.HOST).reserve(Tier.DEVICE, nbytes, holder="the pool")


def pool(pages: int = 4, *, freed: Freed = Freed.KEPT) -> PinnedPool:
    return PinnedPool(reservation(pages * PAGE), freed=freed)


@dataclass
class ManualEvent:
    """An event that passes when the test says so, or when somebody waits."""

    passed: bool = False
    error: Exception | None = None
    waits: int = 0

    def done(self) -> bool:
        return self.passed

    def wait(self) -> None:
        self.waits += 1
        self.passed = True
        if self.error is not None:
            raise self.error


@dataclass
class InterruptedEvent(ManualEvent):
    """The first to wait for it is interrupted by Ctrl-C."""

    def wait(self) -> None:
        if not self.waits:
            self.waits += 1
            raise KeyboardInterrupt
        super().wait()


@dataclass
class StuckEvent(ManualEvent):
    """When it is `stuck`, whoever asks whether it has passed waits, with the pool's lock, until it
    `answers`.
    """

    stuck: bool = False
    asked: threading.Event = field(default_factory=threading.Event)
    answers: threading.Event = field(default_factory=threading.Event)

    def done(self) -> bool:
        if self.stuck:
            self.asked.set()
            self.answers.wait(60)
        return super().done()


def ends(work: Callable[[], object]) -> bool:
    """Do `work` in a thread; tell whether it came to its end."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(20)
    return not thread.is_alive()


@dataclass
class CountingDevice:
    """Device memory that remembers what was given back."""

    freed: list[int] = field(default_factory=list)
    left: list[int] = field(default_factory=list)

    @dataclass
    class Bytes:
        nbytes: int

        def tensor(self, dtype: torch.dtype, shape: Sequence[int], offset: int = 0) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype)

        def shared(self) -> tuple[torch.Tensor, object]:
            array = torch.empty(self.nbytes, dtype=torch.uint8).numpy()
            return torch.from_numpy(array), array

    def allocate(self, nbytes: int, *, idle_bytes: int = 0) -> CountingDevice.Bytes:
        return self.Bytes(nbytes)

    def free(self, buffer: CountingDevice.Bytes) -> None:
        self.freed.append(buffer.nbytes)

    def disown(self, buffer: CountingDevice.Bytes) -> None:
        self.left.append(buffer.nbytes)

    def forget_idle(self) -> None:
        """There is none."""


class FragmentedDevice(CountingDevice):
    """Device memory that is refused with `failure`, so many times."""

    def __init__(self, failure: Exception) -> None:
        super().__init__()
        self.failure = failure
        self.refusals = 1

    def allocate(self, nbytes: int, *, idle_bytes: int = 0) -> CountingDevice.Bytes:
        if self.refusals:
            self.refusals -= 1
            raise self.failure
        return super().allocate(nbytes)


def in_pieces() -> CapacityError:
    return CapacityError(
        tier="DEVICE", asked=60, free=90, limit=100, change="the device is in pieces"
    )


def test_a_lease_has_exactly_the_bytes_asked_for() -> None:
    lease = pool().lease(100, holder="w")

    assert lease.nbytes == lease.memory().nbytes == lease.flat().numel() == 100
    lease.close()


def test_views_share_the_leases_bytes() -> None:
    with pool().lease(64, holder="w") as lease:
        lease.tensor(torch.float32, (2, 3), offset=8).fill_(1.5)

        assert lease.tensor(torch.float32)[1:9].tolist() == [0, *([1.5] * 6), 0]
        assert bytes(lease.memory()[8:12]) == b"\x00\x00\xc0\x3f"


def test_a_view_that_does_not_fit_is_refused() -> None:
    with pool().lease(64, holder="w") as lease, pytest.raises(ValueError, match="68 B at offset 0"):
        lease.tensor(torch.float32, (17,))


@pytest.mark.parametrize("shape", [(-1,), (2, -3), (-2, -3)])
def test_a_view_of_a_negative_length_is_refused(shape: tuple[int, ...]) -> None:
    with (
        pool().lease(64, holder="w") as lease,
        pytest.raises(ValueError, match="the lease of w has 64 B"),
    ):
        lease.tensor(torch.float32, shape)


def test_a_view_that_begins_behind_the_end_is_refused() -> None:
    with (
        pool().lease(64, holder="w") as lease,
        pytest.raises(ValueError, match="at offset 68 is not in it"),
    ):
        lease.tensor(torch.float32, offset=68)


def test_a_view_at_an_offset_within_an_element_is_refused() -> None:
    with (
        pool().lease(64, holder="w") as lease,
        pytest.raises(ValueError, match=r"multiple of 4 B .* got 6"),
    ):
        lease.tensor(torch.float32, (2,), offset=6)


def test_a_lease_of_no_bytes_is_a_lease() -> None:
    with pool().lease(0, holder="empty") as lease:
        assert lease.tensor(torch.float32, (0, 3)).shape == (0, 3)
        assert lease.memory().nbytes == 0


def test_a_negative_lease_is_refused() -> None:
    with pytest.raises(ConfigError, match="0 or more"):
        pool().lease(-1, holder="w")


def use_flat(lease: Lease) -> None:
    lease.flat()


def use_memory(lease: Lease) -> None:
    lease.memory()


def use_until(lease: Lease) -> None:
    lease.until(ManualEvent())


@pytest.mark.parametrize("use", [use_flat, use_memory, use_until])
def test_use_after_close_raises_and_names_the_holder(use: Callable[[Lease], None]) -> None:
    lease = pool().lease(100, holder="layers.3.w1")
    lease.close()

    with pytest.raises(RuntimeError, match=r"layers\.3\.w1"):
        use(lease)


def test_closing_again_does_nothing() -> None:
    memory = pool()
    lease = memory.lease(100, holder="w")

    lease.close()
    lease.close()

    assert memory.stats().held == 0


def test_a_lease_returns_to_the_pool_only_after_its_event() -> None:
    memory = pool(pages=1)
    event = ManualEvent()
    lease = memory.lease(100, holder="w")
    lease.until(event)

    lease.close()
    assert (memory.stats().held, memory.stats().closing_leases, event.waits) == (100, 1, 0)
    event.passed = True
    memory.release_ended()

    assert (memory.stats().held, memory.stats().closing_leases) == (0, 0)


def test_a_lease_goes_back_only_after_all_of_its_events() -> None:
    memory = pool(pages=1)
    events = [ManualEvent(passed=True), ManualEvent()]
    with memory.lease(100, holder="w") as lease:
        for event in events:
            lease.until(event)

    memory.release_ended()

    assert (memory.stats().held, memory.stats().closing_leases) == (100, 1)


def test_settling_gives_back_what_has_passed_also_behind_what_has_not() -> None:
    memory = pool(pages=3)
    events = [ManualEvent() for _ in range(3)]
    for event in events:
        with memory.lease(PAGE, holder="w") as lease:
            lease.until(event)
    events[1].passed = events[2].passed = True

    memory.release_ended()

    assert (memory.stats().held, memory.stats().closing_leases) == (PAGE, 1)


def test_who_needs_memory_takes_what_has_passed_before_waiting_for_the_oldest() -> None:
    memory = pool(pages=2)
    events = [ManualEvent(), ManualEvent()]
    for event in events:
        with memory.lease(PAGE, holder="w") as lease:
            lease.until(event)
    events[1].passed = True

    memory.lease(PAGE, holder="next").close()

    assert (events[0].waits, memory.stats().waits) == (0, 0)


def test_a_lease_asks_one_event_only_while_there_is_room() -> None:
    asked = []

    class AskedEvent(ManualEvent):
        def done(self) -> bool:
            asked.append(self)
            return super().done()

    memory = pool(pages=100)
    for _ in range(90):
        with memory.lease(1, holder="w") as lease:
            lease.until(AskedEvent())
    asked.clear()

    memory.lease(1, holder="next").close()

    assert len(asked) == 1


def test_ctrl_c_while_waiting_for_memory_loses_nothing_and_frees_nothing_early() -> None:
    memory = pool(pages=1)
    event = InterruptedEvent()
    with memory.lease(PAGE, holder="w") as lease:
        lease.until(event)

    with pytest.raises(KeyboardInterrupt):
        memory.lease(PAGE, holder="next")

    assert (memory.stats().held, memory.stats().closing_leases) == (PAGE, 1)
    memory.lease(PAGE, holder="next").close()
    assert (event.waits, memory.stats().held) == (2, 0)


def test_who_needs_memory_waits_for_the_oldest_event_rather_than_fail() -> None:
    memory = pool(pages=2)
    first, second = ManualEvent(), ManualEvent()
    for event in (first, second):
        lease = memory.lease(PAGE, holder="w")
        lease.until(event)
        lease.close()

    with memory.lease(PAGE, holder="next"):
        assert (first.waits, second.waits, memory.stats().waits) == (1, 0, 1)


def test_a_buffer_whose_copy_failed_goes_back_all_the_same() -> None:
    memory = pool(pages=1)
    lease = memory.lease(PAGE, holder="w")
    lease.until(ManualEvent(error=OSError("copy failed")))
    lease.close()

    memory.lease(PAGE, holder="next").close()

    assert memory.stats().held == 0


def test_memory_stays_while_a_view_of_it_is_left() -> None:
    memory = pool(pages=1)
    lease = memory.lease(PAGE, holder="w")
    view = lease.tensor(torch.uint8)[10:20]
    lease.close()

    with pytest.raises(CapacityError):
        memory.lease(1, holder="next")
    assert memory.stats().held == PAGE

    del view
    memory.lease(1, holder="next").close()


def test_a_full_pool_says_who_holds_what() -> None:
    memory = pool(pages=4)
    with (
        memory.lease(2 * PAGE, holder="a"),
        memory.lease(PAGE, holder="b"),
        memory.lease(1, holder="b"),
    ):
        with pytest.raises(CapacityError) as refused:
            memory.lease(1, holder="c")

        assert (refused.value.asked, refused.value.free, refused.value.limit) == (1, 0, 4 * PAGE)
        assert refused.value.holders == (("a", 2 * PAGE), ("b", PAGE + 1))
        assert "c asked for 1 B" in refused.value.change


def test_free_bytes_in_pieces_are_told_as_such() -> None:
    memory = pool(pages=3)
    leases = [memory.lease(PAGE, holder=str(index)) for index in range(3)]
    leases[0].close()
    leases[2].close()

    with pytest.raises(CapacityError, match=r"in pieces, the largest of 4096 B.*, 4096 B.* short"):
        memory.lease(2 * PAGE, holder="large")

    assert memory.stats().fragmentation == 0.5
    leases[1].close()


def test_closing_a_pool_names_the_holders_of_open_leases() -> None:
    memory = pool()
    lease = memory.lease(100, holder="layers.7.gradient")

    with pytest.raises(RuntimeError, match=r"1 leases open: layers\.7\.gradient \(100 B\)"):
        memory.close()

    lease.close()


def test_a_lease_that_is_dropped_warns_with_its_holder_and_goes_back() -> None:
    memory = pool()
    lease = memory.lease(100, holder="layers.7.gradient")

    with pytest.warns(ResourceWarning, match=r"layers\.7\.gradient"):
        del lease

    assert memory.stats().held == 0


def test_closing_a_pool_waits_for_events_and_gives_the_reservation_back() -> None:
    promised = reservation(PAGE)
    memory = PinnedPool(promised)
    event = ManualEvent()
    lease = memory.lease(100, holder="w")
    lease.until(event)
    lease.close()

    memory.close()
    memory.close()

    assert (event.waits, promised.held, promised.peak) == (1, 0, PAGE)
    with pytest.raises(RuntimeError, match="is closed"):
        memory.lease(1, holder="late")


def test_a_close_that_was_interrupted_goes_on_when_called_again() -> None:
    promised = reservation(PAGE)
    memory = PinnedPool(promised)
    event = InterruptedEvent()
    with memory.lease(100, holder="w") as lease:
        lease.until(event)

    with pytest.raises(KeyboardInterrupt):
        memory.close()
    assert promised.held == PAGE
    with pytest.raises(RuntimeError, match="is closed"):
        memory.lease(1, holder="late")
    memory.close()

    assert (event.waits, promised.held) == (2, 0)


def test_closing_a_pool_keeps_nobody_from_closing_the_leases_that_its_events_wait_for() -> None:
    memory = pool(pages=2)
    other = memory.lease(PAGE, holder="other")
    closed = []

    class Dependent(ManualEvent):
        def wait(self) -> None:
            closed.append(ends(other.close))
            super().wait()

    with memory.lease(100, holder="w") as lease:
        lease.until(Dependent())

    memory.close()

    assert closed == [True]


@pytest.mark.filterwarnings("ignore:the lease of:ResourceWarning")
def test_a_collection_in_the_middle_of_the_ledgers_work_may_find_leases_that_nobody_closed() -> (
    None
):
    ledger = Ledger(ResolvedBudget(device=100, host=100))
    memory = DeviceMemory(CountingDevice(), ledger.reserve(Tier.DEVICE, 100, holder="the pool"))

    class Collecting(int):
        """Bytes that are added with a garbage collection."""

        def __radd__(self, other: int) -> int:
            gc.collect()
            return other + int(self)

    cycle: list[object] = [memory.lease(60, holder="w")]
    cycle.append(cycle)
    del cycle

    assert ends(lambda: ledger.reserve(Tier.HOST, Collecting(10), holder="other"))
    memory.lease(100, holder="next").close()
    assert memory.reservation.held == 0


@pytest.mark.filterwarnings("ignore:the lease of:ResourceWarning")
@pytest.mark.parametrize("kind", ["lease", "view"])
def test_neither_a_dropped_lease_nor_a_last_view_waits_for_the_pools_lock(kind: str) -> None:
    memory = pool(pages=3)
    event = StuckEvent()
    with memory.lease(100, holder="stuck") as stuck:
        stuck.until(event)
    lease = memory.lease(100, holder="w")
    dropped: list[object] = [lease if kind == "lease" else lease.flat()]
    if kind == "view":
        lease.close()
    del lease, stuck
    event.stuck = True
    settling = threading.Thread(target=memory.release_ended, daemon=True)
    settling.start()
    event.asked.wait(60)

    ended = ends(dropped.clear)

    event.stuck = False
    event.answers.set()
    settling.join()
    assert ended
    assert (memory.stats().held, memory.stats().open_leases) == (100, 0)


def test_a_pool_takes_its_whole_reservation_when_it_is_made() -> None:
    promised = reservation(10 * PAGE + 100)
    memory = PinnedPool(promised)

    assert memory.capacity == promised.held == 10 * PAGE
    memory.close()


def test_a_reservation_below_one_page_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 4096 B"):
        PinnedPool(reservation(100))


def test_freed_memory_is_nan_where_asked() -> None:
    memory = pool(freed=Freed.NAN)
    lease = memory.lease(16, holder="w")
    view = lease.tensor(torch.float32).fill_(1)

    lease.close()

    assert view.isnan().all()


def test_freed_memory_is_nan_no_earlier_than_its_event() -> None:
    memory = pool(freed=Freed.NAN)
    lease = memory.lease(16, holder="w")
    view = lease.tensor(torch.float32).fill_(1)
    event = ManualEvent()
    lease.until(event)

    lease.close()
    assert view.tolist() == [1, 1, 1, 1]
    event.passed = True
    memory.release_ended()

    assert view.isnan().all()


def test_device_memory_stays_within_its_reservation() -> None:
    device = CountingDevice()
    memory = DeviceMemory(device, reservation(100, Tier.DEVICE))
    lease = memory.lease(60, holder="a")

    with pytest.raises(CapacityError) as refused:
        memory.lease(41, holder="b")
    assert (refused.value.tier, refused.value.free, refused.value.holders) == (
        "DEVICE",
        40,
        (("a", 60),),
    )

    lease.close()
    assert device.freed == [60]
    memory.lease(100, holder="b").close()


def test_device_memory_is_freed_only_after_its_event() -> None:
    device = CountingDevice()
    memory = DeviceMemory(device, reservation(100, Tier.DEVICE))
    event = ManualEvent()
    lease = memory.lease(60, holder="a")
    lease.until(event)
    lease.close()
    assert device.freed == []

    memory.lease(60, holder="b").close()

    assert (event.waits, device.freed) == (1, [60, 60])


def test_io_on_device_memory_is_refused() -> None:
    memory = DeviceMemory(CountingDevice(), reservation(100, Tier.DEVICE))

    with memory.lease(60, holder="a") as lease, pytest.raises(TypeError, match="is DEVICE memory"):
        lease.memory()


def test_closing_device_memory_waits_for_events_and_gives_its_buffers_back() -> None:
    device = CountingDevice()
    memory = DeviceMemory(device, reservation(100, Tier.DEVICE))
    event = ManualEvent()
    with memory.lease(60, holder="a") as lease:
        lease.until(event)

    memory.close()

    assert (event.waits, device.freed, memory.reservation.held) == (1, [60], 0)


def test_device_memory_that_cannot_be_had_gives_its_bytes_of_the_reservation_back() -> None:
    memory = DeviceMemory(
        FragmentedDevice(RuntimeError("the device is lost")), reservation(100, Tier.DEVICE)
    )

    with pytest.raises(RuntimeError, match="is lost"):
        memory.lease(60, holder="a")

    assert memory.reservation.held == 0


def test_device_memory_in_pieces_is_waited_for_as_where_there_is_none() -> None:
    device = FragmentedDevice(in_pieces())
    memory = DeviceMemory(device, reservation(100, Tier.DEVICE))
    device.refusals = 0
    event = ManualEvent()
    with memory.lease(10, holder="a") as lease:
        lease.until(event)
    device.refusals = 1

    with memory.lease(60, holder="b"):
        assert (event.waits, memory.reservation.held, device.freed) == (1, 60, [10])


def test_device_memory_in_pieces_is_refused_by_the_device_where_nothing_is_closing() -> None:
    memory = DeviceMemory(FragmentedDevice(in_pieces()), reservation(100, Tier.DEVICE))

    with pytest.raises(CapacityError, match="the device is in pieces"):
        memory.lease(60, holder="b")

    assert memory.reservation.held == 0


def test_device_memory_counts_as_held_until_the_last_view_of_it_is_gone() -> None:
    memory = DeviceMemory(CpuAccelerator(), reservation_where_device_is_host(100))
    with memory.lease(60, holder="layers.3.w1") as lease:
        views = [lease.tensor(torch.float32, (3, 5)), lease.flat().numpy()[7:9]]

    assert memory.reservation.held == 60
    with pytest.raises(CapacityError, match=r"a view of layers\.3\.w1 holds 60 B"):
        memory.lease(60, holder="next")
    views.pop()
    assert memory.reservation.held == 60
    views.pop()

    assert memory.reservation.held == 0
    memory.lease(100, holder="next").close()


def test_views_keep_their_bytes_when_device_memory_is_closed() -> None:
    memory = DeviceMemory(CpuAccelerator(), reservation_where_device_is_host(100))
    with memory.lease(60, holder="layers.3.w1") as lease:
        view = lease.flat().fill_(7)

    memory.close()

    held = memory.reservation.held
    assert set(view.tolist()) == {7}
    del view
    assert (held, memory.reservation.held) == (60, 0)


def test_a_closed_lease_keeps_no_memory_alive_through_its_events() -> None:
    memory = DeviceMemory(CpuAccelerator(), reservation_where_device_is_host(100))
    lease = memory.lease(60, holder="w")

    @dataclass
    class Copying(ManualEvent):
        of: torch.Tensor | None = None

    lease.until(Copying(passed=True, of=lease.flat()))
    lease.close()

    assert memory.reservation.held == 0


# --- device memory that its views keep ------------------------------------------------------------


@contextmanager
def keeping(nbytes: int) -> Iterator[tuple[DeviceMemory[CountingDevice.Bytes], CountingDevice]]:
    device = CountingDevice()
    ledger = Ledger(ResolvedBudget(device=nbytes, host=0))
    with ledger.reserve(Tier.DEVICE, nbytes, holder="device memory") as reservation:
        memory = DeviceMemory(device, reservation)
        yield memory, device
        memory.close()


def test_device_memory_that_views_keep_goes_back_with_the_last_of_them() -> None:
    with keeping(100) as (memory, device):
        lease = memory.lease(100, holder="a parameter", views=Views.KEEP)
        view = lease.tensor(torch.float32)[3:].view(2, 11)
        lease.close()
        assert memory.reservation.held == 100
        with pytest.raises(CapacityError, match="a view of a parameter"):
            memory.lease(100, holder="another")
        assert device.freed == []

        del view
        memory.release_ended()

        assert memory.reservation.held == 0
        memory.lease(100, holder="another").close()
        assert device.freed == [100, 100]


def test_device_memory_that_views_could_keep_goes_back_at_once_where_there_are_none() -> None:
    with keeping(100) as (memory, device):
        for _ in range(3):
            memory.lease(100, holder="a parameter", views=Views.KEEP).close()
        memory.release_ended()

    assert device.freed == [100, 100, 100]


def test_a_detached_alias_keeps_the_memory_as_any_view_does() -> None:
    with keeping(100) as (memory, _):
        lease = memory.lease(100, holder="a parameter", views=Views.KEEP)
        alias = torch.nn.Parameter(lease.tensor(torch.float32)).detach()
        lease.close()
        assert memory.reservation.held == 100

        del alias
        memory.release_ended()

        assert memory.reservation.held == 0


def test_closed_device_memory_is_left_to_the_views_that_keep_it() -> None:
    with keeping(100) as (memory, device):
        lease = memory.lease(60, holder="a parameter", views=Views.KEEP)
        view = lease.flat()
        lease.close()

    held = memory.reservation.held
    del view
    assert (device.freed, device.left) == ([], [60])
    assert (held, memory.reservation.held) == (60, 0)


def test_memory_that_is_adopted_counts_until_its_lease_ends_and_stays_its_users() -> None:
    reserved = reservation(4096, Tier.HOST)
    memory = DeviceMemory(CountingDevice(), reserved)
    values = torch.ones(4096, dtype=torch.uint8)

    kept = memory.adopt(values, holder="parameters")
    assert kept.flat().data_ptr() == values.data_ptr()
    assert reserved.held == 4096
    with pytest.raises(CapacityError, match="parameters"):
        memory.lease(1, holder="one more")
    with pytest.raises(CapacityError):
        memory.adopt(values, holder="again")

    kept.close()
    assert reserved.held == 0  # though the user has it still
    assert bool(values.all())
    memory.close()
