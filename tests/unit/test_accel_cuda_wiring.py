"""The accelerator cuda without a GPU: what it asks of torch's streams and events, which are fakes
here, and its errors.

What a GPU makes of it, tests/gpu/test_accel_cuda.py shows where there is one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

pytest.importorskip("torch", reason="accelerators move tensors of torch")

import torch

from infinity_engine.accel import StreamKind, TimeCost
from infinity_engine.accel.cuda import CudaAccelerator
from infinity_engine.errors import CapacityError, TransferError

COST = TimeCost(0)


class FakeGpu:
    """What happened, in order, and what is to go wrong."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.current = "default"
        self.streams = 0
        self.broken = False


class FakeStream:
    def __init__(self, gpu: FakeGpu, name: str) -> None:
        self.gpu, self.name = gpu, name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FakeStream) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)

    def wait_event(self, event: FakeEvent) -> None:
        self.gpu.log.append(f"{self.name} waits for {event.at}")

    def synchronize(self) -> None:
        self.gpu.log.append(f"the host waits for {self.name}")
        if self.gpu.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")


class FakeEvent:
    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu, self.at = gpu, ""

    def record(self, stream: FakeStream) -> None:
        self.at = stream.name
        self.gpu.log.append(f"event in {stream.name}")

    def query(self) -> bool:
        self.synchronize()
        return True

    def synchronize(self) -> None:
        if self.gpu.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    gpu = FakeGpu()

    def new_stream(_device: object) -> FakeStream:
        gpu.streams += 1
        return FakeStream(gpu, f"stream {gpu.streams}")

    @contextlib.contextmanager
    def use(stream: FakeStream) -> Iterator[None]:
        before, gpu.current = gpu.current, stream.name
        yield
        gpu.current = before

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: FakeStream(gpu, gpu.current))
    monkeypatch.setattr(torch.cuda, "Stream", new_stream)
    monkeypatch.setattr(torch.cuda, "stream", use)
    monkeypatch.setattr(torch.cuda, "Event", lambda: FakeEvent(gpu))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (10, 100))
    return gpu


@pytest.fixture
def device(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> CudaAccelerator:
    monkeypatch.setattr(
        CudaAccelerator, "_in_device", lambda _self, tensor: tensor.numel() and tensor[0] == 0
    )
    return CudaAccelerator()


def on_host() -> torch.Tensor:
    return torch.full((8,), 9, dtype=torch.uint8)


def on_device() -> torch.Tensor:
    return torch.zeros(8, dtype=torch.uint8)


def test_work_is_launched_in_its_stream_and_an_event_recorded_behind_it(
    device: CudaAccelerator, gpu: FakeGpu
) -> None:
    compute, other = device.stream(StreamKind.COMPUTE), device.stream(StreamKind.COLLECTIVE)
    for stream in (compute, other):
        device.run(lambda: gpu.log.append(f"work in {gpu.current}"), stream=stream, cost=COST)
    assert gpu.log == [
        "work in default",
        "event in default",
        "work in stream 2",
        "event in stream 2",
    ]


@pytest.mark.filterwarnings("ignore:The host memory of a copy:RuntimeWarning")
def test_a_stream_waits_for_the_events_of_others_and_not_for_its_own(
    device: CudaAccelerator, gpu: FakeGpu
) -> None:
    compute, up = device.stream(StreamKind.COMPUTE), device.stream(StreamKind.H2D)
    ready = device.record(compute)
    first = device.copy(on_device(), on_host(), stream=up, after=[ready])
    gpu.log.clear()

    device.copy(on_device(), on_host(), stream=up, after=[first])
    device.wait_for(compute, first)
    gpu.log.append("what a module launches")
    device.run(lambda: gpu.log.append("work"), stream=compute, cost=COST)

    assert gpu.log == [
        "event in stream 2",
        "default waits for stream 2",
        "what a module launches",
        "default waits for stream 2",
        "work",
        "event in default",
    ]


@pytest.mark.parametrize("broken", [False, True])
def test_waiting_for_all_waits_for_what_modules_launched(
    device: CudaAccelerator, gpu: FakeGpu, broken: bool
) -> None:
    device.stream(StreamKind.COMPUTE)
    device.stream(StreamKind.H2D)
    gpu.broken = broken

    device.synchronize()

    assert gpu.log == ["the host waits for default"]


def test_another_current_stream_than_that_of_the_engine_is_refused(
    device: CudaAccelerator, gpu: FakeGpu
) -> None:
    device.check_current()  # there is none that modules have to be in
    device.stream(StreamKind.COMPUTE)
    device.check_current()

    gpu.current = "stream 7"

    with pytest.raises(RuntimeError, match=r"another CUDA stream .* Call both in one stream"):
        device.check_current()


def test_memory_that_is_not_pinned_is_warned_of_once(device: CudaAccelerator) -> None:
    up = device.stream(StreamKind.H2D)
    with pytest.warns(RuntimeWarning, match="not page-locked"):
        device.copy(on_device(), on_host(), stream=up)
    device.copy(on_device(), on_host(), stream=up)  # a warning would be an error here
    assert not device.pinned


@pytest.mark.filterwarnings("ignore:The host memory of a copy:RuntimeWarning")
@pytest.mark.parametrize("how", ["wait", "synchronize", "done"])
def test_a_copy_that_fails_on_the_gpu_is_a_transfer_error(
    device: CudaAccelerator, gpu: FakeGpu, how: str
) -> None:
    event = device.copy(on_device(), on_host(), stream=device.stream(StreamKind.H2D))
    gpu.broken = True

    if how == "done":
        assert event.done()
    with pytest.raises(TransferError, match="copy 0 on h2d 0") as failed:
        device.synchronize() if how == "synchronize" else event.wait()

    assert (failed.value.asked, failed.value.done) == (8, 0)
    assert "illegal memory access" in str(failed.value.__cause__)


def test_work_that_fails_on_the_gpu_raises_what_torch_says(
    device: CudaAccelerator, gpu: FakeGpu
) -> None:
    event = device.run(lambda: None, stream=device.stream(StreamKind.COMPUTE), cost=COST)
    gpu.broken = True
    with pytest.raises(RuntimeError, match="illegal memory access"):
        event.wait()


def test_what_depends_on_a_failed_launch_is_not_launched(
    device: CudaAccelerator, gpu: FakeGpu
) -> None:
    compute, other = device.stream(StreamKind.COMPUTE), device.stream(StreamKind.COLLECTIVE)
    failed = device.run(lambda: 1 // 0, stream=compute, cost=COST)
    dependent = device.run(lambda: gpu.log.append("ran"), stream=other, cost=COST, after=[failed])

    with pytest.raises(ZeroDivisionError):
        dependent.wait()

    assert gpu.log == []


def test_a_full_gpu_is_a_capacity_error(
    device: CudaAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_args: object, **_options: object) -> None:
        raise torch.cuda.OutOfMemoryError("full")

    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(CapacityError) as refused:
        device.allocate(50)
    assert (refused.value.asked, refused.value.free, refused.value.limit) == (50, 10, 100)


def test_buffers_are_allocated_on_a_stream_of_their_own(
    device: CudaAccelerator, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def allocated(nbytes: int, *, device: object) -> torch.UntypedStorage:
        seen.append(gpu.current)
        return memory

    memory, empty = on_device().untyped_storage(), torch.empty(0, dtype=torch.uint8)
    monkeypatch.setattr(torch, "empty", lambda *_args, **_options: empty)
    monkeypatch.setattr(torch, "UntypedStorage", allocated)

    device.allocate(8)

    assert seen == ["stream 1"]


def test_a_cap_leaves_room_for_what_others_had_and_counts_only_what_came_after_it(
    device: CudaAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 100 bytes, 30 are in tensors of others and 8 more in blocks that torch keeps of these."""
    fractions, in_tensors = [1.0], 30
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _device: 38)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _device: in_tensors)
    monkeypatch.setattr(
        torch.cuda, "get_per_process_memory_fraction", lambda _device: fractions[-1], raising=False
    )
    monkeypatch.setattr(
        torch.cuda,
        "set_per_process_memory_fraction",
        lambda share, _device: fractions.append(share),
    )
    assert device.taken_by_torch() is None

    device.cap(20)
    in_tensors = 45

    assert fractions == [1.0, 0.58]
    assert device.taken_by_torch() == 15
    device.cap(None)
    assert fractions == [1.0, 0.58, 1.0]
    assert device.taken_by_torch() is None
