"""Waiting with `result()`: who waits completes what has ended, and the queue's own thread calls
back, whoever waited.

A drive is held by its first request, which is slow; the queue's own thread by a callback that does
not return.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import gc
import linecache
import random
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from _pytest import unraisableexception

from deepnvme import FaultPlan, File, IOFuture, IOQueue, NVMeError, ShortReadError
from support.nvme_held import COMPLETER, HANG_S, completer_held, held, until, until_waiting
from support.nvme_io import CHUNK, TIMEOUT_S, contents, pattern

SHORTLY_US = 200_000


@contextlib.contextmanager
def memory_file(faults: FaultPlan | None = None, **limits: int) -> Iterator[tuple[IOQueue, File]]:
    with IOQueue("memory", faults=faults, **limits) as queue, queue.open("file", "w") as file:  # type: ignore[arg-type]
        yield queue, file


def begun_in_thread(
    call: Callable[[], Any],
) -> tuple[threading.Thread, concurrent.futures.Future[Any]]:
    """Run the call in a thread of its own, which does not keep the program alive; return both."""
    end: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def run() -> None:
        try:
            end.set_result(call())
        except BaseException as error:  # raised again where it is asked for
            end.set_exception(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, end


# --- many threads ---------------------------------------------------------------------------------


def test_threads_that_wait_for_the_same_operation_all_get_its_result(tmp_path: Path) -> None:
    with held("memory", tmp_path / "file", hold_us=SHORTLY_US) as (_, file, first):
        behind = file.pread(bytearray(2 * CHUNK), 0)
        waiting = [begun_in_thread(future.result) for future in (first, behind) * 6]
        for thread, _ in waiting:
            until_waiting(thread)
        assert [end.result(TIMEOUT_S) for _, end in waiting] == [CHUNK, 2 * CHUNK] * 6


def test_threads_that_wait_for_the_same_failure_all_get_it(tmp_path: Path) -> None:
    with held("memory", tmp_path / "file", hold_us=SHORTLY_US, faults=FaultPlan().fail(nth=2)) as (
        _,
        file,
        _first,
    ):
        fails = file.pwrite(b"x" * CHUNK)
        waiting = [begun_in_thread(fails.exception) for _ in range(6)]
        for thread, _ in waiting:
            until_waiting(thread)
        ends = [end.result(TIMEOUT_S) for _, end in waiting]
        assert all(isinstance(end, NVMeError) and end is ends[0] for end in ends)


def test_threads_that_wait_for_different_operations_each_get_their_own(
    tmp_path: Path, queue: IOQueue
) -> None:
    def work(number: int) -> None:
        for turn in range(25):
            length = number * 25 + turn + 1
            buffer = bytearray(length)
            future = file.pread(buffer, length)
            while True:
                with contextlib.suppress(concurrent.futures.TimeoutError):
                    assert future.result(None if turn % 2 else 1e-4) == length
                    break
            buffer.append(0)  # let go of by then
            assert buffer[:length] == data[length : 2 * length]

    data = pattern(2 * 16 * 25, seed=1)
    with queue.open(tmp_path / "file", "w") as file, ThreadPoolExecutor(16) as threads:
        file.pwrite(data).result(TIMEOUT_S)
        for future in [threads.submit(work, number) for number in range(16)]:
            future.result(TIMEOUT_S)


def test_whoever_waits_completes_what_others_submitted() -> None:
    with memory_file() as (_, file), completer_held(file):
        others = [file.pwrite(bytes(number), number) for number in range(1, 20)]
        assert file.pwrite(b"last").result(TIMEOUT_S) == 4
        assert all(future.done() for future in others)
        assert [future.result(0) for future in others] == list(range(1, 20))


def test_whoever_waits_lets_the_memory_go_of_what_others_submitted() -> None:
    with memory_file() as (_, file), completer_held(file):
        buffer = bytearray(100)
        other = file.pwrite(buffer)
        file.pwrite(b"last").result(TIMEOUT_S)
        buffer.append(0)
        assert other.done()


def test_a_result_needs_nobody_elses_thread() -> None:
    with memory_file() as (_, file), completer_held(file):
        for number in range(1, 100):
            assert file.pwrite(bytes(number)).result(TIMEOUT_S) == number


def test_a_failure_needs_nobody_elses_thread() -> None:
    with memory_file() as (_, file), completer_held(file):
        assert isinstance(file.pread(bytearray(10)).exception(HANG_S), ShortReadError)


def test_the_queues_own_thread_sleeps_on_while_others_wait_for_their_own(tmp_path: Path) -> None:
    def switches(thread: threading.Thread) -> int:
        status = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
        return int(status.split("\nvoluntary_ctxt_switches:")[1].split()[0])

    others = threading.enumerate()
    with memory_file(FaultPlan().delay(delay_us=20_000, every=1)) as (_, file):
        (completer,) = (thread for thread in threading.enumerate() if thread not in others)
        file.pwrite(b"abc").result(TIMEOUT_S)
        before = switches(completer)
        for _ in range(20):
            assert file.pwrite(b"abc").result(TIMEOUT_S) == 3
        assert switches(completer) - before < 10  # 0 but for what ends before it is waited for


def test_a_callback_added_at_any_line_of_ending_is_called_once() -> None:
    for nth in range(1, 1000):
        calls: list[object] = []
        with memory_file(FaultPlan().delay(delay_us=2000, every=1)) as (queue, file):
            future = file.pwrite(b"abc")
            added = with_call_at(
                nth, partial(future.add_done_callback, calls.append), partial(future.result, HANG_S)
            )
            assert future.result(HANG_S) == 3
        queue.close()
        if not added:
            break
        assert calls == [future], f"added at line {nth}"
    assert 10 < nth < 999


def test_what_waits_on_many_is_told_although_it_comes_at_any_line_of_ending() -> None:
    for nth in range(1, 1000):
        with memory_file(FaultPlan().delay(delay_us=2000, every=1)) as (_, file):
            future = file.pwrite(b"abc")
            waiting: list[concurrent.futures.Future[Any]] = []

            def wait_on_many(future: IOFuture[int] = future, waiting: list[Any] = waiting) -> None:
                thread, end = begun_in_thread(
                    lambda: concurrent.futures.wait([future], HANG_S).done
                )
                waiting.append(end)
                thread.join(0.002)

            came = with_call_at(nth, wait_on_many, partial(future.result, HANG_S))
            if not came:
                break
            assert waiting[0].result(TIMEOUT_S) == {future}, f"came at line {nth}"
    assert 10 < nth < 999


# --- with a timeout -------------------------------------------------------------------------------


@pytest.mark.parametrize("timeout", [0, -1, 1e-9, 0.01, 0.06])
def test_a_wait_that_times_out_leaves_the_operation_running(tmp_path: Path, timeout: float) -> None:
    with held("memory", tmp_path / "file", hold_us=SHORTLY_US) as (queue, _, first):
        for wait in (first.result, first.exception):
            with pytest.raises(concurrent.futures.TimeoutError):
                wait(timeout)
        assert not first.cancelled()
        assert first.result() == CHUNK
        assert contents(queue, tmp_path / "file")[:CHUNK] == pattern(CHUNK, seed=1)


def test_a_wait_that_times_out_takes_nothing_from_one_that_does_not(tmp_path: Path) -> None:
    with held("memory", tmp_path / "file", hold_us=SHORTLY_US) as (_, _file, first):
        patient, end = begun_in_thread(first.result)
        until_waiting(patient)
        with pytest.raises(concurrent.futures.TimeoutError):
            first.result(0.001)
        assert end.result(TIMEOUT_S) == CHUNK


def test_what_has_ended_is_had_without_any_time() -> None:
    with memory_file() as (queue, file), completer_held(file):
        future = file.pwrite(b"abc")
        until(lambda: queue.stats().pending == 0)
        assert future.result(0) == 3
        assert future.exception(0) is None


@pytest.mark.parametrize("timeout", [None, 0.0])
def test_exception_returns_the_error_that_result_raises(timeout: float | None) -> None:
    with memory_file() as (_, file):
        future = file.pread(bytearray(10))
        error = future.exception(TIMEOUT_S)
        assert isinstance(error, ShortReadError)
        assert future.exception(timeout) is error
        with pytest.raises(ShortReadError) as caught:
            future.result(timeout)
        assert caught.value is error


def test_a_wait_for_what_is_cancelled_meanwhile_ends_at_once(tmp_path: Path) -> None:
    """Not when the drive comes to it, which may be stuck: that is why one cancels."""
    with held("memory", tmp_path / "file") as (_, file, first):
        behind = file.pwrite(b"abc")
        thread, end = begun_in_thread(behind.result)
        until_waiting(thread)
        assert behind.cancel()
        with pytest.raises(concurrent.futures.CancelledError):
            end.result(TIMEOUT_S)
        assert not first.done()


# --- callbacks ------------------------------------------------------------------------------------


def test_callbacks_run_on_the_queues_own_thread_whoever_waits(tmp_path: Path) -> None:
    ran_on: list[str] = []
    faults = FaultPlan().fail(nth=3)
    with held("memory", tmp_path / "file", faults=faults) as (_, file, first):
        futures = [first, *(file.pwrite(b"x" * CHUNK) for _ in range(20))]
        for future in futures:
            future.add_done_callback(lambda _: ran_on.append(threading.current_thread().name))
        assert not first.done()
        waiting = [begun_in_thread(future.exception)[1] for future in futures]
        assert sum(isinstance(end.result(TIMEOUT_S), NVMeError) for end in waiting) == 1
    assert ran_on == [COMPLETER] * len(futures)


def test_a_callback_added_while_others_wait_is_called_once(tmp_path: Path, backend: str) -> None:
    calls: list[object] = []
    futures: list[IOFuture[int]] = []
    with IOQueue(backend) as queue, queue.open(tmp_path / "file", "w") as file:
        for _ in range(200):
            future = file.pwrite(b"abc")
            end = begun_in_thread(future.result)[1] if len(futures) % 10 == 0 else None
            future.add_done_callback(calls.append)
            assert future.result(TIMEOUT_S) == 3
            assert end is None or end.result(TIMEOUT_S) == 3
            futures.append(future)
    assert sorted(map(id, calls)) == sorted(map(id, futures))


@contextlib.contextmanager
def waiting_beside_a_callback(
    path: Path, faults: FaultPlan, look: Callable[[IOFuture[int]], object]
) -> Iterator[IOFuture[int]]:
    """Yield a write under way, which was looked at, while a callback wants a lock that the caller
    holds.
    """
    lock = threading.Lock()
    wanted = threading.Event()

    def take(_: object) -> None:
        wanted.set()
        with lock:
            pass

    with held("memory", path, faults=faults) as (_, file, first), lock:
        other = file.pwrite(b"x" * CHUNK)
        look(other)
        first.add_done_callback(take)
        assert wanted.wait(TIMEOUT_S)
        yield other


@pytest.mark.parametrize("ending", ["succeeds", "fails"])
def test_a_callback_may_want_a_lock_whose_holder_waits_for_another_operation(
    tmp_path: Path, ending: str
) -> None:
    faults = FaultPlan().delay(delay_us=100_000, nth=2)
    if ending == "fails":
        faults.fail(nth=2)
    with waiting_beside_a_callback(tmp_path / "file", faults, lambda _: None) as other:
        assert (other.exception(HANG_S) is None) == (ending == "succeeds")


def wait_in_vain(future: IOFuture[int]) -> None:
    with pytest.raises(concurrent.futures.TimeoutError):
        future.result(0.01)


LOOKS: dict[str, Callable[[IOFuture[int]], object]] = {
    "waited for in vain": wait_in_vain,
    "waited for in vain with concurrent.futures": lambda future: concurrent.futures.wait(
        [future], timeout=0.01
    ),
    "asked whether it runs": lambda future: future.running(),
}


@pytest.mark.parametrize("look", LOOKS)
def test_a_callback_may_want_a_lock_whose_holder_waits_for_what_was_looked_at(
    tmp_path: Path, look: str
) -> None:
    faults = FaultPlan().delay(delay_us=100_000, nth=2)
    with waiting_beside_a_callback(tmp_path / "file", faults, LOOKS[look]) as other:
        assert other.result(HANG_S) == CHUNK


def test_what_waits_on_many_is_told_whoever_waits_for_one(tmp_path: Path) -> None:
    with held("memory", tmp_path / "file", hold_us=SHORTLY_US) as (_, file, first):
        futures = [first, *(file.pwrite(b"x" * CHUNK) for _ in range(10))]
        all_of_them = begun_in_thread(lambda: concurrent.futures.wait(futures))[1]
        the_first = begun_in_thread(
            lambda: concurrent.futures.wait(futures, return_when="FIRST_COMPLETED")
        )[1]
        one_by_one = begun_in_thread(
            lambda: [future.result() for future in concurrent.futures.as_completed(futures)]
        )
        singly = [begun_in_thread(future.result)[1] for future in futures]
        assert len(all_of_them.result(TIMEOUT_S).done) == len(futures)
        assert the_first.result(TIMEOUT_S).done
        assert one_by_one[1].result(TIMEOUT_S) == [CHUNK] * len(futures)
        assert [end.result(TIMEOUT_S) for end in singly] == [CHUNK] * len(futures)


def test_an_await_ends_whoever_waits_for_the_same_operation(tmp_path: Path) -> None:
    async def main(futures: list[IOFuture[int]]) -> list[int]:
        async def one(future: IOFuture[int]) -> int:
            return await future

        waiting = asyncio.gather(*map(one, futures))
        await asyncio.sleep(0)
        threads = [begun_in_thread(future.result)[1] for future in futures]
        written = await waiting
        assert [end.result(TIMEOUT_S) for end in threads] == written
        return written

    with held("memory", tmp_path / "file", hold_us=SHORTLY_US) as (_, file, first):
        futures = [first, *(file.pwrite(b"x" * CHUNK) for _ in range(10))]
        assert asyncio.run(asyncio.wait_for(main(futures), TIMEOUT_S)) == [CHUNK] * 11


def test_a_callback_that_wants_to_exit_harms_no_other_operation() -> None:
    """`sys.exit()` ends a thread without a word; the queue's own thread has more to do."""
    with memory_file(FaultPlan().delay(delay_us=50_000, nth=1)) as (_, file):
        file.pwrite(b"abc").add_done_callback(lambda _: sys.exit())
        assert isinstance(file.pread(bytearray(10)).exception(HANG_S), ShortReadError)
        assert asyncio.run(asyncio.wait_for(file.pwrite(b"def"), HANG_S)) == 3


# --- closing --------------------------------------------------------------------------------------


def closed_while_one_completes() -> tuple[list[IOFuture[int]], Callable[[], bool]]:
    """Close a queue while a thread that waits has taken two operations and is at the first; return
    both.

    What is returned besides says, after the end, whether both had ended when closing returned.
    """
    within, go_on = threading.Event(), threading.Event()
    others = threading.enumerate()
    queue = IOQueue("memory")
    (completer,) = (thread for thread in threading.enumerate() if thread not in others)
    file = queue.open("file", "w")

    def dawdle() -> None:
        within.set()
        go_on.wait(TIMEOUT_S)

    def close() -> bool:
        queue.close()
        return all(future.done() for future in futures)

    with completer_held(file):
        array = np.zeros(100, np.uint8)
        weakref.finalize(array, dawdle)  # runs where the operation lets its memory go
        futures = [file.pwrite(array), file.pread(bytearray(10), 1000)]
        del array
        until(lambda: queue.stats().pending == 0)
        begun_in_thread(futures[1].exception)
        assert within.wait(TIMEOUT_S)
    closing = begun_in_thread(close)[1]
    completer.join(0.5)  # time for a mistake
    go_on.set()
    return futures, lambda: bool(closing.result(HANG_S))


def test_what_a_waiting_thread_took_ends_although_the_queue_closes_meanwhile() -> None:
    futures, _ = closed_while_one_completes()
    assert isinstance(futures[1].exception(HANG_S), ShortReadError)
    assert futures[0].result(TIMEOUT_S) == 100


def test_closing_waits_for_what_a_waiting_thread_took() -> None:
    _, all_had_ended = closed_while_one_completes()
    assert all_had_ended()


# --- interrupting ---------------------------------------------------------------------------------


class Interrupted(Exception):  # noqa: N818 - not an error: what a signal handler of the program raises
    pass


@contextlib.contextmanager
def interrupting_result(every_s: float) -> Iterator[None]:
    """Raise wherever a signal finds the main thread inside `result()`."""

    def handler(_: int, frame: FrameType | None) -> None:
        if frame is not None and frame.f_code.co_filename == threading.__file__:
            return  # `with` may leave its lock locked there (python/cpython#74174)
        while frame is not None and frame.f_code is not IOFuture.result.__code__:
            if frame.f_code.co_filename == unraisableexception.__file__:
                return  # it lists what was raised where Python ignores that, as in a finalizer
            frame = frame.f_back
        if frame is not None:
            raise Interrupted

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, every_s, every_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def ends_despite_interrupts(future: IOFuture[int]) -> tuple[int, int]:
    """Return the result, and how often waiting for it was interrupted."""
    interrupts = 0
    while True:
        try:
            return future.result(TIMEOUT_S), interrupts
        except Interrupted:
            interrupts += 1


def test_a_signal_is_handled_at_once_while_the_main_thread_waits(tmp_path: Path) -> None:
    def handler(_: int, __: FrameType | None) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGALRM, handler)
    try:
        with held("memory", tmp_path / "file") as (_, _file, first):
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            with pytest.raises(Interrupted):
                first.result()
            assert not first.done()  # the drive holds it for much longer
            assert first.result(TIMEOUT_S) == CHUNK
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# of finalizers that are interrupted
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_any_number_of_interrupts_loses_no_operation_and_no_memory(
    backend: str, tmp_path: Path
) -> None:
    data = pattern(4000, seed=1)
    called: list[object] = []
    interrupts = 0
    slow = FaultPlan(seed=1).delay(delay_us=2000, every=3)
    with IOQueue(backend, faults=slow) as queue, queue.open(tmp_path / "file", "w") as file:
        file.pwrite(data).result(TIMEOUT_S)
        for turn in range(25):
            buffers = [bytearray(random.Random(turn + n).randrange(1, 4000)) for n in range(8)]
            futures = [file.pread(buffer) for buffer in buffers]
            for future in futures[::3]:
                future.add_done_callback(called.append)
            with interrupting_result(0.0005):
                ends = [ends_despite_interrupts(future) for future in reversed(futures)]
            interrupts += sum(count for _, count in ends)
            assert [nbytes for nbytes, _ in reversed(ends)] == list(map(len, buffers))
            for buffer in buffers:
                assert buffer == data[: len(buffer)]
                buffer.append(0)
    assert interrupts
    assert len(called) == 25 * 3


class InterruptAt:
    """Raises before the nth line of deepnvme's modules that the thread begins.

    Not where a `with` begins or ends: Python itself may leave the lock locked there
    (python/cpython#74174).
    """

    def __init__(self, nth: int) -> None:
        self.left = nth
        self.struck = False

    def __call__(self, frame: FrameType, event: str, _: object) -> InterruptAt | None:
        if "deepnvme" not in frame.f_code.co_filename.split("/"):
            return None
        if event == "line" and not line_of(frame).startswith("with "):
            self.left -= 1
            if self.left == 0:
                self.struck = True
                raise Interrupted
        return self


class CallAt(InterruptAt):
    """Makes a call before the nth line, instead of raising."""

    def __init__(self, nth: int, call: Callable[[], object]) -> None:
        super().__init__(nth)
        self.call = call

    def __call__(self, frame: FrameType, event: str, argument: object) -> InterruptAt | None:
        try:
            return super().__call__(frame, event, argument)
        except Interrupted:
            self.call()
            return self


def with_call_at(nth: int, call: Callable[[], object], work: Callable[[], object]) -> bool:
    """Do the work, and make the call before its nth line of deepnvme's.

    False: it has ended before.
    """
    caller = CallAt(nth, call)
    before = sys.gettrace()
    sys.settrace(caller)
    try:
        work()
    finally:
        sys.settrace(before)
    return caller.struck


def line_of(frame: FrameType) -> str:
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()


def result_interrupted_at(future: IOFuture[int], nth: int) -> bool:
    """Wait for the future; interrupt it at that line. False: it has ended before."""
    interrupt = InterruptAt(nth)
    before = sys.gettrace()
    gc.disable()  # deepnvme's lines that the collector calls are not result()'s
    sys.settrace(interrupt)
    try:
        with contextlib.suppress(Interrupted):
            future.result(TIMEOUT_S)
    finally:
        sys.settrace(before)
        gc.enable()
    return interrupt.struck


def test_an_interrupt_at_any_line_of_result_loses_nothing() -> None:
    for nth in range(1, 1000):
        with memory_file(FaultPlan().delay(delay_us=2000, every=1)) as (_, file):
            buffer, later = bytearray(3), bytearray(10)
            with completer_held(file):
                future = file.pwrite(buffer)
                struck = result_interrupted_at(future, nth)
            assert begun_in_thread(future.result)[1].result(HANG_S) == 3, (
                f"interrupted at line {nth}"
            )
            buffer.append(0)
            assert isinstance(file.pread(later, 100).exception(HANG_S), ShortReadError)
            later.append(0)
        if not struck:
            break
    assert 10 < nth < 999


async def waiting_for_room(queue: IOQueue, registered: threading.Event) -> None:
    room = asyncio.ensure_future(queue.room())
    await asyncio.sleep(0)
    registered.set()
    await asyncio.wait_for(room, HANG_S)


def test_an_interrupt_at_any_line_of_result_leaves_nobody_waiting_for_room() -> None:
    for nth in range(1, 1000):
        with memory_file(FaultPlan().delay(delay_us=20_000, every=1), max_pending=1) as (
            queue,
            file,
        ):
            registered = threading.Event()

            with completer_held(file):
                future = file.pwrite(b"abc")
                waiting = begun_in_thread(
                    partial(asyncio.run, waiting_for_room(queue, registered))
                )[1]
                assert registered.wait(TIMEOUT_S)
                struck = result_interrupted_at(future, nth)
            try:
                waiting.result(TIMEOUT_S)
            except asyncio.TimeoutError:
                pytest.fail(f"interrupted at line {nth}")
        if not struck:
            break
    assert 10 < nth < 999
