"""What every accelerator promises, on each that runs without a GPU: order, errors, memory,
closing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

pytest.importorskip("torch", reason="accelerators move tensors of torch")

import torch

from infinity_engine.accel import (
    Accelerator,
    Emulation,
    StreamKind,
    TimeCost,
    UpdateCost,
    emulated_accelerator,
    open_accelerator,
)
from infinity_engine.plan import Rates
from paced_device import PacedAccelerator

FAST = Rates(h2d_bytes_per_s=1e11, d2h_bytes_per_s=1e11, device_update_params_per_s=1e12)
NO_TIME = TimeCost(0)
COPYING = ("virtual", "real")


def make(
    kind: str, *, seed: int = 0, fault: Callable[[StreamKind], Exception | None] | None = None
) -> Accelerator:
    """Return the accelerator that a test is run on."""
    if kind == "cpu":
        return open_accelerator("cpu")
    emulation = Emulation(rates=FAST, capacity_bytes=1 << 20, seed=seed, fault=fault)
    return PacedAccelerator(emulation) if kind == "real" else emulated_accelerator(emulation)


@pytest.fixture(params=["cpu", *COPYING])
def device(request: pytest.FixtureRequest) -> Iterator[Accelerator]:
    accelerator = make(request.param)
    yield accelerator
    accelerator.stop()


@pytest.fixture(params=COPYING)
def copying(request: pytest.FixtureRequest) -> Iterator[Accelerator]:
    accelerator = make(request.param)
    yield accelerator
    accelerator.stop()


def noisy(nbytes: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(
        0, 250, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )


def slowly(work: Callable[[], object]) -> Callable[[], object]:
    """Return work that others would overtake if they did not wait for it."""

    def slow() -> None:
        time.sleep(0.02)
        work()

    return slow


class WrongError(Exception):
    """What a work of a test fails with."""


def fail() -> None:
    raise WrongError("planted")


# --- copies ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [1, 7, 4096, 100_003])
def test_bytes_go_to_the_device_and_come_back(copying: Accelerator, nbytes: int) -> None:
    up, down = copying.stream(StreamKind.H2D), copying.stream(StreamKind.D2H)
    source, target = noisy(nbytes), torch.zeros(nbytes, dtype=torch.uint8)
    there = copying.allocate(nbytes).tensor(torch.uint8, nbytes)

    uploaded = copying.copy(there, source, stream=up)
    copying.copy(target, there, stream=down, after=[uploaded]).wait()

    assert torch.equal(target, source)


def test_a_part_of_a_buffer_can_be_copied(copying: Accelerator) -> None:
    buffer = copying.allocate(64)
    part = buffer.tensor(torch.uint8, 16, offset=32)

    copying.copy(part, noisy(16), stream=copying.stream(StreamKind.H2D)).wait()

    assert torch.equal(buffer.tensor(torch.uint8, 64)[32:48], noisy(16))
    assert buffer.tensor(torch.uint8, 64)[:32].eq(0xFF).all()


def test_fresh_device_memory_is_nan_in_every_float_type(copying: Accelerator) -> None:
    buffer = copying.allocate(64)

    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        assert buffer.tensor(dtype, 64 // dtype.itemsize).isnan().all()


def test_freed_device_memory_is_nan(copying: Accelerator) -> None:
    buffer = copying.allocate(64)
    view = buffer.tensor(torch.float32, 16)
    view.fill_(1.0)

    copying.free(buffer)

    assert view.isnan().all()


def test_the_cpu_copies_nothing_and_says_what_to_ask_instead() -> None:
    with make("cpu") as device:
        buffer = device.allocate(8).tensor(torch.uint8, 8)
        assert device.unified
        with pytest.raises(RuntimeError, match="Check `unified`"):
            device.copy(buffer, noisy(8), stream=device.stream(StreamKind.H2D))


@pytest.mark.parametrize(
    ("target", "source", "said"),
    [
        (
            torch.zeros(8),
            torch.zeros(8, dtype=torch.uint8),
            "target of a copy to be a flat contiguous uint8 tensor",
        ),
        (
            torch.zeros(8, dtype=torch.uint8),
            torch.zeros(2, 4, dtype=torch.uint8),
            "source of a copy .* shape .2, 4.",
        ),
        (torch.zeros(8, dtype=torch.uint8), torch.zeros(16, dtype=torch.uint8)[::2], "contiguous"),
        (torch.zeros(8, dtype=torch.uint8), torch.zeros(7, dtype=torch.uint8), "got 8 B and 7 B"),
        (
            torch.zeros(0, dtype=torch.uint8),
            torch.zeros(0, dtype=torch.uint8),
            "1 B or more, got 0 B and 0 B",
        ),
        (
            torch.zeros(8, dtype=torch.uint8),
            torch.zeros(8, dtype=torch.uint8),
            "both in host memory",
        ),
        (
            torch.zeros(8, dtype=torch.uint8, device="meta"),
            torch.zeros(8, dtype=torch.uint8),
            "got meta",
        ),
    ],
)
def test_a_copy_of_the_wrong_tensors_is_refused(
    copying: Accelerator, target: torch.Tensor, source: torch.Tensor, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        copying.copy(target, source, stream=copying.stream(StreamKind.H2D))


def test_a_copy_within_the_device_is_refused(copying: Accelerator) -> None:
    buffer = copying.allocate(16)
    with pytest.raises(ValueError, match="both in device memory"):
        copying.copy(
            buffer.tensor(torch.uint8, 8),
            buffer.tensor(torch.uint8, 8, offset=8),
            stream=copying.stream(StreamKind.D2H),
        )


def test_a_copy_with_a_freed_buffer_is_refused(copying: Accelerator) -> None:
    buffer = copying.allocate(8)
    view = buffer.tensor(torch.uint8, 8)
    copying.free(buffer)
    with pytest.raises(ValueError, match="freed buffer"):
        copying.copy(view, noisy(8), stream=copying.stream(StreamKind.H2D))


@pytest.mark.parametrize("kind", [StreamKind.D2H, StreamKind.COMPUTE, StreamKind.COLLECTIVE])
def test_a_copy_in_a_stream_of_another_kind_is_refused(
    copying: Accelerator, kind: StreamKind
) -> None:
    there = copying.allocate(8).tensor(torch.uint8, 8)
    with pytest.raises(ValueError, match=f"kind h2d for this copy, got {kind.value} 0"):
        copying.copy(there, noisy(8), stream=copying.stream(kind))


@pytest.mark.parametrize("kind", [StreamKind.H2D, StreamKind.D2H])
def test_work_in_a_stream_of_copies_is_refused(device: Accelerator, kind: StreamKind) -> None:
    with pytest.raises(ValueError, match="compute or collective"):
        device.run(fail, stream=device.stream(kind), cost=NO_TIME)


# --- order ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [StreamKind.COMPUTE, StreamKind.COLLECTIVE])
def test_operations_of_a_stream_happen_in_their_order(
    device: Accelerator, kind: StreamKind
) -> None:
    stream, seen = device.stream(kind), list[int]()

    for number in range(50):
        event = device.run(lambda number=number: seen.append(number), stream=stream, cost=NO_TIME)  # type: ignore[misc]
    event.wait()

    assert seen == list(range(50))


@pytest.mark.parametrize("by", ["after", "wait_for", "record"])
def test_an_operation_waits_for_one_of_another_stream(device: Accelerator, by: str) -> None:
    first, second, seen = (
        device.stream(StreamKind.COMPUTE),
        device.stream(StreamKind.COLLECTIVE),
        list[str](),
    )
    event = device.run(slowly(lambda: seen.append("first")), stream=first, cost=NO_TIME)

    if by == "wait_for":
        device.wait_for(second, event)
    after = {"after": [event], "wait_for": [], "record": [device.record(first)]}[by]
    device.run(lambda: seen.append("second"), stream=second, cost=NO_TIME, after=after).wait()

    assert seen == ["first", "second"]


def test_whatever_is_submitted_after_wait_for_waits(device: Accelerator) -> None:
    first, second, seen = (
        device.stream(StreamKind.COMPUTE),
        device.stream(StreamKind.COLLECTIVE),
        list[str](),
    )
    device.wait_for(
        second, device.run(slowly(lambda: seen.append("first")), stream=first, cost=NO_TIME)
    )

    device.run(lambda: seen.append("second"), stream=second, cost=NO_TIME)
    device.run(lambda: seen.append("third"), stream=second, cost=NO_TIME).wait()

    assert seen == ["first", "second", "third"]


def test_what_an_empty_stream_records_is_done_at_once(device: Accelerator) -> None:
    event = device.record(device.stream(StreamKind.COMPUTE))
    event.wait()
    assert event.done()


def test_an_event_that_was_waited_for_is_done(device: Accelerator) -> None:
    event = device.run(
        lambda: None, stream=device.stream(StreamKind.COMPUTE), cost=UpdateCost(1_000)
    )
    event.wait()
    assert event.done()


def test_synchronize_waits_for_every_stream(device: Accelerator) -> None:
    seen: list[int] = []
    for _ in range(3):
        device.run(
            lambda: seen.append(1),
            stream=device.stream(StreamKind.COMPUTE),
            cost=TimeCost(1_000_000),
        )

    device.synchronize()

    assert len(seen) == 3


def test_a_stream_of_another_accelerator_is_refused(device: Accelerator) -> None:
    with (
        make("cpu") as other,
        pytest.raises(ValueError, match="expected a stream of this accelerator"),
    ):
        device.run(fail, stream=other.stream(StreamKind.COMPUTE), cost=NO_TIME)


def test_an_event_of_another_accelerator_is_refused(device: Accelerator) -> None:
    with make("virtual") as other:
        event = other.record(other.stream(StreamKind.COMPUTE))
        with pytest.raises(ValueError, match="expected an event of this accelerator"):
            device.wait_for(device.stream(StreamKind.COMPUTE), event)


# --- errors ---------------------------------------------------------------------------------------


def test_an_error_is_raised_by_its_event_each_time(device: Accelerator) -> None:
    event = device.run(fail, stream=device.stream(StreamKind.COMPUTE), cost=NO_TIME)

    for _ in range(2):
        with pytest.raises(WrongError, match="planted"):
            event.wait()
    assert event.done()


def test_what_depends_on_a_failure_does_not_run_and_carries_its_error(device: Accelerator) -> None:
    first, second = device.stream(StreamKind.COMPUTE), device.stream(StreamKind.COLLECTIVE)
    seen: list[str] = []
    failed = device.run(fail, stream=first, cost=NO_TIME)
    named = device.run(lambda: seen.append("named"), stream=second, cost=NO_TIME, after=[failed])
    behind = device.run(lambda: seen.append("behind"), stream=second, cost=NO_TIME)

    with pytest.raises(WrongError):
        behind.wait()
    with pytest.raises(WrongError):
        named.wait()
    assert seen == []


def test_what_follows_a_failure_unknown_to_the_host_does_not_run(device: Accelerator) -> None:
    stream, seen = device.stream(StreamKind.COMPUTE), list[str]()
    device.run(fail, stream=stream, cost=NO_TIME)
    with pytest.raises(WrongError):
        device.run(lambda: seen.append("next"), stream=stream, cost=NO_TIME).wait()
    assert seen == []


def test_a_stream_can_be_used_again_once_the_host_knows_of_the_failure(device: Accelerator) -> None:
    stream, seen = device.stream(StreamKind.COMPUTE), list[str]()
    failed = device.run(fail, stream=stream, cost=NO_TIME)
    with pytest.raises(WrongError):
        failed.wait()

    device.run(lambda: seen.append("again"), stream=stream, cost=NO_TIME).wait()

    assert seen == ["again"]


def test_to_wait_for_a_known_failure_fails_again_and_so_does_what_follows(
    device: Accelerator,
) -> None:
    first, second = device.stream(StreamKind.COMPUTE), device.stream(StreamKind.COLLECTIVE)
    failed = device.run(fail, stream=first, cost=NO_TIME)
    with pytest.raises(WrongError):
        failed.wait()
    device.wait_for(second, failed)
    device.run(lambda: None, stream=second, cost=NO_TIME)

    follower = device.run(lambda: None, stream=second, cost=NO_TIME)

    with pytest.raises(WrongError):
        follower.wait()


def test_a_failure_elsewhere_does_not_matter(device: Accelerator) -> None:
    failed = device.run(fail, stream=device.stream(StreamKind.COMPUTE), cost=NO_TIME)
    device.run(lambda: None, stream=device.stream(StreamKind.COMPUTE), cost=NO_TIME).wait()
    with pytest.raises(WrongError):
        failed.wait()


@pytest.mark.parametrize("end", ["synchronize", "close"])
def test_an_error_that_nobody_waited_for_is_raised_at_the_end_once(
    device: Accelerator, end: str
) -> None:
    device.run(fail, stream=device.stream(StreamKind.COMPUTE), cost=NO_TIME)
    device.run(lambda: 1 // 0, stream=device.stream(StreamKind.COMPUTE), cost=NO_TIME)

    with pytest.raises(WrongError):  # the first
        getattr(device, end)()
    device.synchronize()
    device.close()


def test_an_error_that_was_raised_is_not_raised_at_the_end(device: Accelerator) -> None:
    stream = device.stream(StreamKind.COMPUTE)
    with pytest.raises(WrongError):
        device.run(fail, stream=stream, cost=NO_TIME).wait()
    device.synchronize()
    device.close()


@pytest.mark.parametrize("kind", COPYING)
def test_a_copy_can_be_made_to_fail(kind: str) -> None:
    faults = [OSError("link down"), None, None]
    with make(
        kind, fault=lambda where: faults.pop(0) if where is StreamKind.H2D else None
    ) as device:
        stream, there = device.stream(StreamKind.H2D), device.allocate(8).tensor(torch.uint8, 8)
        with pytest.raises(OSError, match="link down"):
            device.copy(there, noisy(8), stream=stream).wait()
        assert there.eq(0xFF).all()

        device.copy(there, noisy(8), stream=stream).wait()

        assert torch.equal(there, noisy(8))


def test_the_error_of_the_body_is_the_one_that_leaves_a_with_statement(device: Accelerator) -> None:
    device.run(fail, stream=device.stream(StreamKind.COMPUTE), cost=NO_TIME)
    with pytest.raises(KeyError), device:
        raise KeyError("the body's own")


# --- memory and closing ---------------------------------------------------------------------------


def test_a_buffer_can_be_freed_once(device: Accelerator) -> None:
    buffer = device.allocate(8)
    device.free(buffer)
    with pytest.raises(ValueError, match="was freed"):
        device.free(buffer)


def test_a_freed_buffer_gives_no_tensor(device: Accelerator) -> None:
    buffer = device.allocate(8)
    device.free(buffer)
    with pytest.raises(ValueError, match="was freed"):
        buffer.tensor(torch.uint8, 8)


def test_a_buffer_of_no_bytes_is_refused(device: Accelerator) -> None:
    with pytest.raises(ValueError, match="1 B or more, got 0 B"):
        device.allocate(0)


def test_the_device_tells_how_much_memory_it_has(device: Accelerator) -> None:
    free, total = device.memory()
    assert 0 < free <= total


def test_a_closed_accelerator_takes_nothing_more(device: Accelerator) -> None:
    stream = device.stream(StreamKind.COMPUTE)
    device.close()
    device.close()
    with pytest.raises(RuntimeError, match="closed"):
        device.run(lambda: None, stream=stream, cost=NO_TIME)


def test_closing_carries_out_what_is_left(device: Accelerator) -> None:
    seen: list[int] = []
    stream = device.stream(StreamKind.COMPUTE)
    for number in range(20):
        device.run(lambda number=number: seen.append(number), stream=stream, cost=TimeCost(100_000))  # type: ignore[misc]

    device.close()

    assert seen == list(range(20))


def test_no_thread_outlives_a_closed_accelerator(device: Accelerator) -> None:
    before = {thread for thread in threading.enumerate() if not thread.name.startswith("emulated")}
    for kind in (StreamKind.COMPUTE, StreamKind.COLLECTIVE):
        device.run(lambda: None, stream=device.stream(kind), cost=NO_TIME)

    device.close()

    assert set(threading.enumerate()) <= before


def test_what_an_operation_used_is_let_go_when_it_has_ended(device: Accelerator) -> None:
    class Held:
        pass

    import weakref

    held = Held()
    alive = weakref.ref(held)
    compute = device.stream(StreamKind.COMPUTE)
    event = device.run(lambda held=held: None, stream=compute, cost=NO_TIME)  # type: ignore[misc]
    del held

    event.wait()

    assert alive() is None
