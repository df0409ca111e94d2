"""The accelerator cuda on a GPU: bytes, order over streams, events, memory, errors."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA GPU here"),
]

import deepnvme  # noqa: E402 - after the skip
from infinity_engine.accel import StreamKind, TimeCost, open_accelerator  # noqa: E402
from infinity_engine.errors import CapacityError  # noqa: E402

if TYPE_CHECKING:
    from torch import Tensor

    from infinity_engine.accel.cuda import CudaAccelerator

NBYTES = 64 << 20
SPIN_CYCLES = 500_000_000  # a good part of a second on the GPUs of today
COST = TimeCost(0)  # a GPU takes its own time


@pytest.fixture
def device() -> Iterator[CudaAccelerator]:
    from infinity_engine.accel.cuda import CudaAccelerator

    accelerator = open_accelerator("cuda")
    assert isinstance(accelerator, CudaAccelerator)
    yield accelerator
    accelerator.stop()


@pytest.fixture(scope="module")
def pool() -> deepnvme.Pool:
    """Return host memory that is page-locked."""
    torch.zeros(1, device="cuda")
    return deepnvme.Pool(4 * NBYTES, cuda=deepnvme.Cuda.REQUIRED)


def noisy(pool: deepnvme.Pool, seed: int = 1, nbytes: int = NBYTES) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return pool.empty_tensor((nbytes,), torch.uint8).copy_(
        torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)
    )


def spin() -> None:
    torch.cuda._sleep(SPIN_CYCLES)


def test_auto_is_cuda_here() -> None:
    with open_accelerator("auto") as device:
        assert (device.name, device.unified, device.torch_device.type) == ("cuda", False, "cuda")


def test_bytes_go_to_the_gpu_and_come_back(device: CudaAccelerator, pool: deepnvme.Pool) -> None:
    source, target = noisy(pool), pool.empty_tensor((NBYTES,), torch.uint8).zero_()
    there = device.allocate(NBYTES).tensor(torch.uint8, NBYTES)

    uploaded = device.copy(there, source, stream=device.stream(StreamKind.H2D))
    device.copy(target, there, stream=device.stream(StreamKind.D2H), after=[uploaded]).wait()

    assert torch.equal(target, source)
    assert device.pinned


def test_the_host_does_not_wait_for_a_copy_of_pinned_memory(
    device: CudaAccelerator, pool: deepnvme.Pool
) -> None:
    compute, up = device.stream(StreamKind.COMPUTE), device.stream(StreamKind.H2D)
    source = noisy(pool)  # takes longer than the spinning
    there = device.allocate(NBYTES).tensor(torch.uint8, NBYTES)
    spinning = device.run(spin, stream=compute, cost=COST)

    copied = device.copy(there, source, stream=up, after=[spinning])

    assert not copied.done()
    copied.wait()
    assert copied.done()
    assert spinning.done()


def test_work_waits_for_the_upload_in_another_stream(
    device: CudaAccelerator, pool: deepnvme.Pool
) -> None:
    up, compute, down = (
        device.stream(kind) for kind in (StreamKind.H2D, StreamKind.COLLECTIVE, StreamKind.D2H)
    )
    source, target = noisy(pool), pool.empty_tensor((NBYTES,), torch.uint8)
    there = device.allocate(NBYTES).tensor(torch.uint8, NBYTES).zero_()
    device.wait_for(up, device.run(spin, stream=compute, cost=COST))

    uploaded = device.copy(there, source, stream=up)
    added = device.run(lambda: there.add_(1), stream=compute, cost=COST, after=[uploaded])
    device.copy(target, there, stream=down, after=[added]).wait()

    assert torch.equal(target, source + 1)


def test_what_modules_launch_waits_too(device: CudaAccelerator, pool: deepnvme.Pool) -> None:
    compute, up = device.stream(StreamKind.COMPUTE), device.stream(StreamKind.H2D)
    source = noisy(pool)
    there = device.allocate(NBYTES).tensor(torch.uint8, NBYTES).zero_()
    device.wait_for(up, device.run(spin, stream=device.stream(StreamKind.COLLECTIVE), cost=COST))

    device.wait_for(compute, device.copy(there, source, stream=up))
    seen = there.clone()  # with no operation of ours in between

    assert torch.equal(seen.cpu(), source)


def test_no_kernel_fills_a_buffer_where_torch_is_to_be_deterministic(
    device: CudaAccelerator,
) -> None:
    first = device.allocate(NBYTES)
    first.tensor(torch.uint8, NBYTES).fill_(7)
    torch.cuda.synchronize()
    device.free(first)
    torch.use_deterministic_algorithms(True)
    try:
        again = device.allocate(NBYTES)  # the same block
        torch.cuda.synchronize()
    finally:
        torch.use_deterministic_algorithms(False)

    assert (again.tensor(torch.uint8, NBYTES) == 7).all()


def test_a_recorded_event_covers_what_modules_launched(device: CudaAccelerator) -> None:
    compute = device.stream(StreamKind.COMPUTE)
    spin()  # as a module would, in torch's current stream
    event = device.record(compute)
    assert not event.done()
    event.wait()
    assert event.done()


def test_waiting_for_all_waits_for_what_modules_launched(device: CudaAccelerator) -> None:
    device.stream(StreamKind.COMPUTE)
    spin()
    launched = torch.cuda.current_stream().record_event()
    assert not launched.query()
    device.synchronize()
    assert launched.query()


def test_another_current_stream_is_refused(device: CudaAccelerator) -> None:
    device.stream(StreamKind.COMPUTE)
    device.check_current()
    with torch.cuda.stream(torch.cuda.Stream()), pytest.raises(RuntimeError, match="one stream"):
        device.check_current()


def test_what_others_allocated_is_not_given_away_before_its_copy_has_ended(
    device: CudaAccelerator, pool: deepnvme.Pool
) -> None:
    compute, down = device.stream(StreamKind.COMPUTE), device.stream(StreamKind.D2H)
    expected, target = noisy(pool), pool.empty_tensor((NBYTES,), torch.uint8).zero_()
    gradient = expected.cuda()  # in torch's own stream, as autograd's are
    device.wait_for(down, device.run(spin, stream=device.stream(StreamKind.COLLECTIVE), cost=COST))

    copied = device.copy(target, gradient, stream=down, after=[device.record(compute)])
    device.outlives(gradient, down)
    del gradient
    # one would have that memory
    others = [torch.zeros(NBYTES, dtype=torch.uint8, device="cuda") for _ in range(4)]
    copied.wait()

    assert torch.equal(target, expected)
    assert not any(other.any() for other in others)


def test_many_buffers_through_three_slots_keep_their_bytes(
    device: CudaAccelerator, pool: deepnvme.Pool
) -> None:
    nbytes = 4 << 20
    up, compute, down = (
        device.stream(kind) for kind in (StreamKind.H2D, StreamKind.COMPUTE, StreamKind.D2H)
    )
    slots = [device.allocate(nbytes).tensor(torch.uint8, nbytes) for _ in range(3)]
    sources = [noisy(pool, seed, nbytes) for seed in range(8)]
    targets = [pool.empty_tensor((nbytes,), torch.uint8).zero_() for _ in sources]
    free: list[list[object]] = [[], [], []]
    for number, (source, target) in enumerate(zip(sources, targets, strict=True)):
        slot = slots[number % 3]
        uploaded = device.copy(slot, source, stream=up, after=free[number % 3])  # type: ignore[arg-type]
        added = device.run(
            lambda slot=slot: slot.add_(1),  # type: ignore[misc]
            stream=compute,
            cost=COST,
            after=[uploaded],
        )
        free[number % 3] = [device.copy(target, slot, stream=down, after=[added])]

    device.synchronize()

    assert all(
        torch.equal(target, source + 1) for source, target in zip(sources, targets, strict=True)
    )


def test_a_buffer_is_not_given_memory_that_modules_still_use(
    device: CudaAccelerator, pool: deepnvme.Pool
) -> None:
    source = noisy(pool)  # takes longer than the spinning
    torch.cuda.empty_cache()
    activation = torch.ones(NBYTES, dtype=torch.uint8, device="cuda")
    total = torch.zeros((), dtype=torch.int64, device="cuda")
    spin()
    total += activation.sum()  # launched, still to run
    del activation

    there = device.allocate(NBYTES).tensor(torch.uint8, NBYTES)
    device.copy(there, source, stream=device.stream(StreamKind.H2D)).wait()

    assert total.item() == NBYTES


def test_a_copy_of_memory_that_is_not_pinned_warns_once(device: CudaAccelerator) -> None:
    there, up = device.allocate(8).tensor(torch.uint8, 8), device.stream(StreamKind.H2D)
    source = torch.arange(8, dtype=torch.uint8)
    with pytest.warns(RuntimeWarning, match="not page-locked"):
        device.copy(there, source, stream=up).wait()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        device.copy(there, source, stream=up).wait()
    assert not device.pinned
    assert torch.equal(there.cpu(), source)


def test_buffers_count_as_taken_until_torch_gives_them_back(device: CudaAccelerator) -> None:
    gc.collect()
    torch.cuda.empty_cache()
    before = device.memory()
    buffer = device.allocate(NBYTES)
    assert device.memory().free <= before.free - NBYTES
    device.free(buffer)
    torch.cuda.empty_cache()
    assert device.memory() == before


def test_more_than_the_gpu_has_is_a_capacity_error(device: CudaAccelerator) -> None:
    total = device.memory().total
    with pytest.raises(CapacityError) as refused:
        device.allocate(2 * total)
    assert (refused.value.asked, refused.value.limit) == (2 * total, total)


def test_a_copy_in_a_stream_of_the_other_direction_is_refused(device: CudaAccelerator) -> None:
    there = device.allocate(8).tensor(torch.uint8, 8)
    with pytest.raises(ValueError, match="kind h2d"):
        device.copy(there, torch.zeros(8, dtype=torch.uint8), stream=device.stream(StreamKind.D2H))


def test_work_that_fails_to_launch_keeps_what_depends_on_it_from_running(
    device: CudaAccelerator,
) -> None:
    compute, other = device.stream(StreamKind.COMPUTE), device.stream(StreamKind.COLLECTIVE)
    seen: list[str] = []
    failed = device.run(lambda: 1 // 0, stream=compute, cost=COST)
    dependent = device.run(lambda: seen.append("ran"), stream=other, cost=COST, after=[failed])
    with pytest.raises(ZeroDivisionError):
        dependent.wait()
    assert seen == []

    device.run(lambda: seen.append("again"), stream=compute, cost=COST).wait()

    assert seen == ["again"]
