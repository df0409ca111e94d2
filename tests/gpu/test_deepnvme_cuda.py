"""CUDA arrays as buffers of file operations, through torch's and cupy's own streams: their bytes
and their order.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import deepnvme
from deepnvme.queue.staging import DEVICE_STAGING_BYTES

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA GPU here"),
]

TIMEOUT_S = 120
PIECE = DEVICE_STAGING_BYTES // 2
SPIN_CYCLES = 1_000_000_000  # half a second and more on the GPUs of today


@pytest.fixture
def queue() -> Iterator[deepnvme.IOQueue]:
    with deepnvme.IOQueue() as queue:
        yield queue


@pytest.fixture
def cupy() -> Any:
    return pytest.importorskip("cupy", reason="cupy is not installed")


def random_bytes(nbytes: int, seed: int = 1) -> Any:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device="cuda", generator=generator)


def in_file(path: Path, offset: int, nbytes: int) -> Any:
    """Return that part of the file as a tensor on the host."""
    with path.open("rb") as file:
        file.seek(offset)
        return torch.frombuffer(bytearray(file.read(nbytes)), dtype=torch.uint8)


# --- torch ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("offset", [0, 1, 4096, 123_457])
@pytest.mark.parametrize("nbytes", [1, 4095, 4096, PIECE - 1, PIECE, PIECE + 1, 5 * PIECE + 17])
def test_a_tensor_goes_to_a_file_and_comes_back(
    tmp_path: Path, queue: deepnvme.IOQueue, nbytes: int, offset: int
) -> None:
    tensor = random_bytes(nbytes)
    with queue.open(tmp_path / "file", "w") as file:
        assert file.pwrite(tensor, offset).result(TIMEOUT_S) == nbytes
        assert torch.equal(in_file(tmp_path / "file", offset, nbytes), tensor.cpu())
        around = torch.full((nbytes + 64,), 7, dtype=torch.uint8, device="cuda")
        assert file.pread(around[32:-32], offset).result(TIMEOUT_S) == nbytes
        assert torch.equal(around[32:-32], tensor)
        assert (around[:32] == 7).all()
        assert (around[-32:] == 7).all()


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float16", "int64", "bool", "complex64", "float8_e4m3fn"]
)
def test_every_dtype_keeps_its_bits(tmp_path: Path, queue: deepnvme.IOQueue, dtype: str) -> None:
    raw = random_bytes(8 * 10_001) if dtype != "bool" else random_bytes(8 * 10_001) & 1
    tensor = raw.view(getattr(torch, dtype))
    with queue.open(tmp_path / "file", "w") as file:
        file.pwrite(tensor).result(TIMEOUT_S)
        back = torch.empty_like(tensor)
        assert file.pread(back).result(TIMEOUT_S) == raw.numel()
        assert torch.equal(back.view(torch.uint8), raw)


# torch, in a backward's own thread
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning")
def test_a_parameter_and_its_gradient_can_be_moved(tmp_path: Path, queue: deepnvme.IOQueue) -> None:
    layer = torch.nn.Linear(512, 512, device="cuda", dtype=torch.bfloat16)
    layer(torch.ones(4, 512, device="cuda", dtype=torch.bfloat16)).sum().backward()
    expected = [layer.weight.detach().clone(), layer.weight.grad.clone()]
    with queue.open(tmp_path / "file", "w") as file, queue.batch() as batch:
        batch.pwrite(file, layer.weight)
        batch.pwrite(file, layer.weight.grad, layer.weight.nbytes)
        assert batch.wait() == 2 * layer.weight.nbytes
        with torch.no_grad():
            layer.weight.zero_()
            layer.weight.grad.zero_()
        batch.pread(file, layer.weight)
        batch.pread(file, layer.weight.grad, layer.weight.nbytes)
        batch.wait()
    assert torch.equal(layer.weight, expected[0])
    assert torch.equal(layer.weight.grad, expected[1])


def test_an_inference_tensor_can_be_read_into(tmp_path: Path, queue: deepnvme.IOQueue) -> None:
    (tmp_path / "file").write_bytes(b"\x05" * 100)
    with torch.inference_mode():
        tensor = torch.zeros(100, dtype=torch.uint8, device="cuda")
        with queue.open(tmp_path / "file") as file:
            file.pread(tensor).result(TIMEOUT_S)
        assert (tensor == 5).all()


def test_an_empty_tensor_moves_nothing(tmp_path: Path, queue: deepnvme.IOQueue) -> None:
    with queue.open(tmp_path / "file", "w") as file:
        assert file.pwrite(torch.empty(0, device="cuda")).result(TIMEOUT_S) == 0
        assert file.pread(torch.empty(0, device="cuda")).result(TIMEOUT_S) == 0


def test_a_write_sees_what_the_current_stream_had_still_to_compute(
    tmp_path: Path, queue: deepnvme.IOQueue
) -> None:
    tensor = torch.zeros(2 * PIECE, dtype=torch.uint8, device="cuda")
    stream = torch.cuda.Stream()
    with queue.open(tmp_path / "file", "w") as file:
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(SPIN_CYCLES)
            tensor.fill_(9)
            future = file.pwrite(tensor)
        future.result(TIMEOUT_S)
    assert (in_file(tmp_path / "file", 0, 2 * PIECE) == 9).all()


def test_a_read_does_not_overwrite_what_the_current_stream_still_looks_at(
    tmp_path: Path, queue: deepnvme.IOQueue
) -> None:
    (tmp_path / "file").write_bytes(b"\x02" * (2 * PIECE))
    tensor = torch.ones(2 * PIECE, dtype=torch.uint8, device="cuda")
    seen = torch.zeros_like(tensor)
    stream = torch.cuda.Stream()
    with queue.open(tmp_path / "file") as file:
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(SPIN_CYCLES)
            seen.copy_(tensor)
            future = file.pread(tensor)
        future.result(TIMEOUT_S)
    torch.cuda.synchronize()
    assert (seen == 1).all()
    assert (tensor == 2).all()


def test_what_was_read_is_seen_by_every_stream_once_the_future_has_ended(
    tmp_path: Path, queue: deepnvme.IOQueue
) -> None:
    (tmp_path / "file").write_bytes(b"\x03" * PIECE)
    with queue.open(tmp_path / "file") as file:
        for _ in range(20):
            tensor = torch.zeros(PIECE, dtype=torch.uint8, device="cuda")
            file.pread(tensor).result(TIMEOUT_S)
            with torch.cuda.stream(torch.cuda.Stream()):
                assert int(tensor.sum(dtype=torch.int64)) == 3 * PIECE


def test_a_read_on_an_idle_stream_does_not_wait_for_a_write_of_what_is_being_computed(
    tmp_path: Path, queue: deepnvme.IOQueue
) -> None:
    (tmp_path / "file").write_bytes(b"\x04" * PIECE)
    computed = torch.zeros(PIECE, dtype=torch.uint8, device="cuda")
    wanted = torch.zeros(PIECE, dtype=torch.uint8, device="cuda")
    busy, idle = torch.cuda.Stream(), torch.cuda.Stream()
    with queue.open(tmp_path / "file") as source, queue.open(tmp_path / "other", "w") as target:
        source.pread(wanted).result(TIMEOUT_S)  # what is made on first use is made now
        torch.cuda.synchronize()
        with torch.cuda.stream(busy):
            torch.cuda._sleep(5 * SPIN_CYCLES)
            write = target.pwrite(computed)
        with torch.cuda.stream(idle):
            read = source.pread(wanted)
        assert read.result(TIMEOUT_S) == PIECE
        assert not write.done()
        assert write.result(TIMEOUT_S) == PIECE


def test_memory_that_the_program_lets_go_of_is_not_reused_before_the_end(
    tmp_path: Path, queue: deepnvme.IOQueue
) -> None:
    expected = [random_bytes(PIECE, seed).cpu() for seed in range(16)]
    with queue.open(tmp_path / "file", "w") as file:
        futures = []
        for seed in range(16):
            futures.append(file.pwrite(random_bytes(PIECE, seed), seed * PIECE))
            torch.full((PIECE,), 255, dtype=torch.uint8, device="cuda")  # would take a freed block
        assert [future.result(TIMEOUT_S) for future in futures] == [PIECE] * 16
    for seed in range(16):
        assert torch.equal(in_file(tmp_path / "file", seed * PIECE, PIECE), expected[seed])


def test_staging_memory_is_pinned(tmp_path: Path, queue: deepnvme.IOQueue) -> None:
    with queue.open(tmp_path / "file", "w") as file:
        file.pwrite(random_bytes(1000)).result(TIMEOUT_S)
    pool = queue._staging._memory.pool  # type: ignore[attr-defined, unused-ignore]
    assert pool is not None
    assert pool.pinned
    assert pool.capacity == DEVICE_STAGING_BYTES


def test_a_file_that_is_too_short_fills_the_tensor_as_far_as_it_goes(
    tmp_path: Path, queue: deepnvme.IOQueue
) -> None:
    (tmp_path / "file").write_bytes(b"\x06" * (PIECE + 10))
    tensor = torch.zeros(3 * PIECE, dtype=torch.uint8, device="cuda")
    with queue.open(tmp_path / "file") as file:
        with pytest.raises(deepnvme.ShortReadError) as caught:
            file.pread(tensor).result(TIMEOUT_S)
        assert (caught.value.asked, caught.value.done) == (3 * PIECE, PIECE + 10)
        assert file.readinto(tensor, 10).result(TIMEOUT_S) == PIECE
    assert int(tensor.sum(dtype=torch.int64)) == 6 * (PIECE + 10)


def test_an_error_of_the_drive_is_the_operations(tmp_path: Path) -> None:
    broken = deepnvme.FaultPlan().fail(nth=20, errno=errno.ENOSPC)
    with deepnvme.IOQueue(faults=broken) as queue, queue.open(tmp_path / "file", "w") as file:
        with pytest.raises(deepnvme.NVMeError) as caught:
            file.pwrite(random_bytes(4 * PIECE)).result(TIMEOUT_S)
        assert (caught.value.errno, caught.value.asked) == (errno.ENOSPC, 4 * PIECE)
        assert file.pwrite(random_bytes(4 * PIECE)).result(TIMEOUT_S) == 4 * PIECE


def test_a_sync_waits_for_the_writes_before_it(tmp_path: Path, queue: deepnvme.IOQueue) -> None:
    with queue.open(tmp_path / "file", "w") as file:
        write = file.pwrite(random_bytes(4 * PIECE))
        assert file.sync().result(TIMEOUT_S) == 0
        assert write.done()


def test_closing_the_queue_finishes_what_is_staged(tmp_path: Path) -> None:
    tensors = [random_bytes(PIECE + seed, seed) for seed in range(6)]
    queue = deepnvme.IOQueue()
    file = queue.open(tmp_path / "file", "w")
    futures = [file.pwrite(tensor, 2 * PIECE * seed) for seed, tensor in enumerate(tensors)]
    queue.close()
    assert all(future.done() for future in futures)
    for seed, tensor in enumerate(tensors):
        assert torch.equal(
            in_file(tmp_path / "file", 2 * PIECE * seed, tensor.numel()), tensor.cpu()
        )


def test_a_tensor_that_is_not_contiguous_is_refused(
    tmp_path: Path, queue: deepnvme.IOQueue
) -> None:
    with queue.open(tmp_path / "file", "w") as file:
        with pytest.raises(ValueError, match="not contiguous"):
            file.pwrite(torch.zeros(4, 4, device="cuda").t())
        with pytest.raises(ValueError, match="lazy conjugate"):
            file.pwrite(torch.zeros(4, dtype=torch.complex64, device="cuda").conj())
    assert (tmp_path / "file").stat().st_size == 0


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU only")
def test_tensors_of_two_gpus_share_a_queue(tmp_path: Path, queue: deepnvme.IOQueue) -> None:
    first = random_bytes(PIECE + 3)
    second = torch.empty_like(first, device="cuda:1")
    with queue.open(tmp_path / "file", "w") as file:
        file.pwrite(first).result(TIMEOUT_S)
        file.pread(second).result(TIMEOUT_S)
    assert torch.equal(first.cpu(), second.cpu())


# --- cupy -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [0, 1, 4096, PIECE + 1, 3 * PIECE + 17])
def test_a_cupy_array_goes_to_a_file_and_comes_back(
    tmp_path: Path, queue: deepnvme.IOQueue, cupy: Any, nbytes: int
) -> None:
    array = (cupy.arange(nbytes) * 31 % 251).astype(cupy.uint8)
    with queue.open(tmp_path / "file", "w") as file:
        assert file.pwrite(array, 77).result(TIMEOUT_S) == nbytes
        back = cupy.zeros_like(array)
        assert file.pread(back, 77).result(TIMEOUT_S) == nbytes
    assert bool((back == array).all())


def test_cupys_current_stream_is_waited_for(
    tmp_path: Path, queue: deepnvme.IOQueue, cupy: Any
) -> None:
    array = cupy.zeros(2 * PIECE, cupy.uint8)
    spin = cupy.RawKernel(
        'extern "C" __global__ void spin(long long cycles) { for (long long t = clock64(); '
        "clock64() - t < cycles;); }",
        "spin",
    )
    spin((1,), (1,), (cupy.int64(1),))
    cupy.cuda.Device().synchronize()
    with queue.open(tmp_path / "file", "w") as file:
        with cupy.cuda.Stream(non_blocking=True):
            spin((1,), (1,), (cupy.int64(SPIN_CYCLES),))
            array.fill(8)
            future = file.pwrite(array)
        future.result(TIMEOUT_S)
    assert (in_file(tmp_path / "file", 0, 2 * PIECE) == 8).all()


def test_a_cupy_array_that_is_not_contiguous_is_refused(
    tmp_path: Path, queue: deepnvme.IOQueue, cupy: Any
) -> None:
    with (
        queue.open(tmp_path / "file", "w") as file,
        pytest.raises(ValueError, match="not contiguous"),
    ):
        file.pwrite(cupy.zeros((4, 4)).T[1:])


def test_another_librarys_array_goes_through_cupy(
    tmp_path: Path, queue: deepnvme.IOQueue, cupy: Any
) -> None:
    class Foreign:
        """What only has the protocol."""

        def __init__(self, array: Any, *, read_only: bool = False) -> None:
            interface = dict(array.__cuda_array_interface__)
            interface["data"] = (interface["data"][0], read_only)
            self.__cuda_array_interface__ = interface
            self.array = array

    with queue.open(tmp_path / "file", "w") as file:
        assert file.pwrite(Foreign(cupy.full(1000, 5, cupy.uint16))).result(TIMEOUT_S) == 2000
        back = cupy.zeros(1000, cupy.uint16)
        assert file.pread(Foreign(back)).result(TIMEOUT_S) == 2000
        assert bool((back == 5).all())
        with pytest.raises(BufferError, match="read-only"):
            file.pread(Foreign(back, read_only=True))
