"""Small requests as nvme_small runs them: through deepnvme, and as plain Python would without it.

Each function measures for some seconds in the calling process and returns operations per second,
CPU time and time for each. Imports deepnvme only when called.
"""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import os
import platform
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import count, cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import bench

if TYPE_CHECKING:
    from deepnvme import IOQueue

__all__ = ["CPU_US", "OPS", "P99_US", "US", "Requests", "awaited", "bare_loop", "beside"]
__all__ += ["in_turn", "many"]
__all__ += ["files_of_aiofiles", "threads", "to_thread"]

OPS, CPU_US, US, P99_US = "operations/s", "CPU us/operation", "us/operation", "p99 us"
# Of one pread_many: enough that its beginning and its end do not count.
_PER_CALL = 1024  # pieces
_CALL_BYTES = 256 << 20
_DRAWN = 1 << 16  # offsets: 256 MiB of the smallest requests
_STREAM = 16 << 20


@dataclass(frozen=True)
class Requests:
    """Random requests of one size, so many at a time. `writes` is the share of writes."""

    path: Path
    file_bytes: int
    nbytes: int
    depth: int
    writes: float
    seconds: float

    def offsets(self, start: int = 0) -> Iterator[int]:
        """Return random offsets without end, from the one with that number on.

        Drawn beforehand: what Python's random numbers cost is not what is compared.
        """
        drawn = _drawn(self.file_bytes // self.nbytes, self.nbytes)
        return cycle(drawn[start:] + drawn[:start])


@cache
def _drawn(places: int, nbytes: int) -> list[int]:
    draw = random.Random(7).randrange
    return [draw(places) * nbytes for _ in range(_DRAWN)]


def many(requests: Requests) -> dict[str, float]:
    """Measure deepnvme with many pieces as one operation, `depth` of them in the drive.

    One operation is submitted before the last is waited for, so that the drive never rests. The
    pieces of all use the same memory for `depth` of them in turn, as the rivals do: what is read
    into memory that was not used just before takes longer for every system.
    """
    import deepnvme

    offsets = requests.offsets()
    pieces = max(4 * requests.depth, min(_PER_CALL, _CALL_BYTES // requests.nbytes))
    in_write = round(pieces * requests.writes)
    pool = deepnvme.Pool(max(2 << 20, requests.depth * requests.nbytes))
    memory = [pool.buffer(requests.nbytes) for _ in range(requests.depth)]
    buffers = list(islice(cycle(memory), pieces))
    with _queue(requests, pool) as queue, queue.open(requests.path, "r+") as file:

        def submit() -> list[Any]:
            places = list(islice(offsets, pieces))
            futures = []
            if in_write:
                futures.append(file.pwrite_many(buffers[:in_write], places[:in_write]))
            if in_write < pieces:
                futures.append(file.pread_many(buffers[in_write:], places[in_write:]))
            return futures

        under_way = deque([submit()])

        def turn() -> int:
            under_way.append(submit())
            moved: int = sum(future.result() for future in under_way.popleft())
            return moved // requests.nbytes

        return _timed(requests, turn)


def in_turn(requests: Requests) -> dict[str, float]:
    """Measure deepnvme with one operation after the other."""
    import deepnvme

    offsets = requests.offsets()
    pool = deepnvme.Pool(2 << 20)
    buffer = pool.buffer(requests.nbytes)
    with _queue(requests, pool) as queue, queue.open(requests.path, "r+") as file:
        move = file.pwrite if requests.writes else file.pread

        def turn() -> int:
            for _ in range(16):
                move(buffer, next(offsets)).result()
            return 16

        return _timed(requests, turn)


def awaited(requests: Requests) -> dict[str, float]:
    """Measure deepnvme under asyncio: `depth` tasks that await one read after the other."""
    import deepnvme

    pool = deepnvme.Pool(max(2 << 20, requests.depth * requests.nbytes))
    with _queue(requests, pool) as queue, queue.open(requests.path) as file:
        buffers = [pool.buffer(requests.nbytes) for _ in range(requests.depth)]

        async def move(number: int, offset: int) -> None:
            await file.pread(buffers[number], offset)

        return asyncio.run(_under_asyncio(requests, move))


class _ReadRequest(ctypes.Structure):
    """`struct iocb` of Linux AIO, with the names that a read needs."""

    _fields_ = (
        ("number", ctypes.c_uint64),
        ("zero", ctypes.c_uint64),
        ("opcode", ctypes.c_uint16),  # 0: a read
        ("priority", ctypes.c_int16),
        ("descriptor", ctypes.c_uint32),
        ("address", ctypes.c_uint64),
        ("nbytes", ctypes.c_uint64),
        ("offset", ctypes.c_int64),
        ("reserved", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("eventfd", ctypes.c_uint32),
    )


class _Ended(ctypes.Structure):
    """`struct io_event`."""

    _fields_ = (
        ("number", ctypes.c_uint64),
        ("request", ctypes.c_uint64),
        ("result", ctypes.c_int64),
        ("unused", ctypes.c_int64),
    )


_SIGNAL_EVENTFD = 1
_AIO_CALLS = {"x86_64": (206, 207, 209, 208), "aarch64": (0, 1, 2, 4)}


def bare_loop(requests: Requests) -> dict[str, float]:
    """Measure the least that an event loop needs for a direct read: Linux AIO by system calls, an
    eventfd that the loop watches, one future of asyncio for each read, and no check of anything.
    """
    if platform.machine() not in _AIO_CALLS:
        raise bench.UnavailableError(f"unknown system calls of {platform.machine()}")
    io_setup, io_destroy, io_submit, io_getevents = _AIO_CALLS[platform.machine()]
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.argtypes = [ctypes.c_long] + [ctypes.c_void_p] * 5
    call.restype = ctypes.c_long
    context = ctypes.c_void_p(0)
    if call(io_setup, requests.depth, ctypes.addressof(context), None, None, None) != 0:
        raise bench.UnavailableError(f"Linux AIO: {os.strerror(ctypes.get_errno())}")
    file = os.open(requests.path, os.O_RDONLY | os.O_DIRECT)
    signal = os.eventfd(0, os.EFD_NONBLOCK)
    views = _views(requests)
    blocks = [
        _ReadRequest(
            number=number,
            descriptor=file,
            address=ctypes.addressof(ctypes.c_char.from_buffer(view)),
            nbytes=requests.nbytes,
            flags=_SIGNAL_EVENTFD,
            eventfd=signal,
        )
        for number, view in enumerate(views)
    ]
    pointers = [(ctypes.c_void_p * 1)(ctypes.addressof(block)) for block in blocks]
    addresses = [ctypes.addressof(pointer) for pointer in pointers]
    ended = (_Ended * requests.depth)()
    ended_address = ctypes.addressof(ended)

    async def main() -> dict[str, float]:
        loop = asyncio.get_running_loop()
        waiting = [loop.create_future() for _ in blocks]

        def reap() -> None:
            os.eventfd_read(signal)
            for event in ended[
                : call(io_getevents, context, 0, requests.depth, ended_address, None)
            ]:
                waiting[event.number].set_result(event.result)

        async def move(number: int, offset: int) -> None:
            waiting[number] = loop.create_future()
            blocks[number].offset = offset
            call(io_submit, context, 1, addresses[number], None, None)
            if await waiting[number] != requests.nbytes:
                raise OSError("a read of the bare loop failed")

        loop.add_reader(signal, reap)
        try:
            return await _under_asyncio(requests, move)
        finally:
            loop.remove_reader(signal)

    try:
        return asyncio.run(main())
    finally:
        call(io_destroy, context, None, None, None, None)
        os.close(signal)
        os.close(file)


def to_thread(requests: Requests) -> dict[str, float]:
    """Measure asyncio.to_thread(os.preadv)."""
    descriptor = os.open(requests.path, os.O_RDONLY | os.O_DIRECT)
    views = _views(requests)

    async def move(number: int, offset: int) -> None:
        await asyncio.to_thread(os.preadv, descriptor, [views[number]], offset)

    try:
        return asyncio.run(_under_asyncio(requests, move))
    finally:
        os.close(descriptor)


def files_of_aiofiles(requests: Requests) -> dict[str, float]:
    """Measure aiofiles, which reads through the page cache in threads."""
    try:
        import aiofiles  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError:
        raise bench.UnavailableError("aiofiles is not installed") from None

    async def main() -> dict[str, float]:
        files = [await aiofiles.open(requests.path, "rb") for _ in range(requests.depth)]

        async def move(number: int, offset: int) -> None:
            await files[number].seek(offset)
            await files[number].read(requests.nbytes)

        try:
            return await _under_asyncio(requests, move)
        finally:
            for file in files:
                await file.close()

    return asyncio.run(main())


def threads(requests: Requests) -> dict[str, float]:
    """Measure `depth` threads that call preadv and pwritev, past the page cache."""
    descriptor = os.open(requests.path, os.O_RDWR | os.O_DIRECT)
    views = _views(requests)
    counts = [0] * requests.depth
    starts = range(0, _DRAWN, _DRAWN // requests.depth)
    offsets = [requests.offsets(start) for start in starts]
    draw = random.Random(7).random
    turn = [os.pwritev if draw() < requests.writes else os.preadv for _ in range(1000)]
    begin = threading.Barrier(requests.depth + 1)
    until = 0.0

    def work(number: int) -> None:
        view, done = [views[number]], 0
        begin.wait()
        for offset, call in zip(offsets[number], cycle(turn), strict=False):
            if time.perf_counter() >= until:
                break
            call(descriptor, view, offset)
            done += 1
        counts[number] = done

    workers = [threading.Thread(target=work, args=(number,)) for number in range(requests.depth)]
    for worker in workers:
        worker.start()

    def run() -> None:
        nonlocal until
        until = time.perf_counter() + requests.seconds
        begin.wait()
        for worker in workers:
            worker.join()

    cost = bench.cost_of(run)
    os.close(descriptor)
    return _numbers(sum(counts), cost)


def beside(requests: Requests, *, same_queue: bool) -> dict[str, float]:
    """Measure single reads while another thread reads 16 MiB pieces, on this queue or another."""
    import deepnvme

    pool = deepnvme.Pool(3 * _STREAM)
    with (
        deepnvme.IOQueue(pool=pool) as queue,
        deepnvme.IOQueue(pool=pool) as other,
        queue.open(requests.path) as file,
        (queue if same_queue else other).open(requests.path) as large,
    ):
        small = pool.buffer(requests.nbytes)
        buffers = [pool.buffer(_STREAM) for _ in range(2)]
        over = threading.Event()

        def keep_streaming() -> None:
            places = requests.file_bytes // _STREAM
            pending = [large.pread(buffers[n], n * _STREAM) for n in range(2)]
            for number in count(2):
                pending[number % 2].result()
                if over.is_set():
                    pending[1 - number % 2].result()
                    return
                pending[number % 2] = large.pread(buffers[number % 2], number % places * _STREAM)

        streaming = threading.Thread(target=keep_streaming)
        streaming.start()
        offsets, latencies = requests.offsets(), []
        until = time.perf_counter() + requests.seconds
        while time.perf_counter() < until:
            begin = time.perf_counter()
            file.pread(small, next(offsets)).result()
            latencies.append(time.perf_counter() - begin)
        over.set()
        streaming.join()
    latencies.sort()
    return {P99_US: latencies[len(latencies) * 99 // 100] * 1e6}


def _queue(requests: Requests, pool: Any) -> IOQueue:
    import deepnvme

    inflight_bytes = max(16 << 20, requests.depth * requests.nbytes)  # the default, or all of them
    return deepnvme.IOQueue(pool=pool, max_requests=requests.depth, inflight_bytes=inflight_bytes)


def _views(requests: Requests) -> list[memoryview]:
    room = mmap.mmap(-1, max(2 << 20, requests.depth * requests.nbytes))
    room.madvise(mmap.MADV_HUGEPAGE)
    room[:] = bytes(len(room))
    whole = memoryview(room)
    size = requests.nbytes
    return [whole[number * size : (number + 1) * size] for number in range(requests.depth)]


def _timed(requests: Requests, turn: Callable[[], int]) -> dict[str, float]:
    """Repeat `turn`, which returns how many operations it did, until the time is over.

    The first turn does not count, as the start of fio does not.
    """
    turn()
    done = 0

    def run() -> None:
        nonlocal done
        until = time.perf_counter() + requests.seconds
        while time.perf_counter() < until:
            done += turn()

    cost = bench.cost_of(run)
    return _numbers(done, cost)


def _numbers(done: int, cost: bench.Cost) -> dict[str, float]:
    return {
        OPS: done / cost.wall_s,
        CPU_US: cost.cpu_s / done * 1e6,
        US: cost.wall_s / done * 1e6,
    }


async def _under_asyncio(requests: Requests, move: Callable[[int, int], Any]) -> dict[str, float]:
    offsets = requests.offsets()
    counts = [0] * requests.depth
    until = time.perf_counter() + requests.seconds

    async def work(number: int) -> None:
        while time.perf_counter() < until:
            await move(number, next(offsets))
            counts[number] += 1

    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    await asyncio.gather(*(work(number) for number in range(requests.depth)))
    wall_s, cpu_s = time.perf_counter() - begin_s, time.process_time() - begin_cpu_s
    done = sum(counts)
    return {OPS: done / wall_s, CPU_US: cpu_s / done * 1e6, US: wall_s / done * 1e6}
