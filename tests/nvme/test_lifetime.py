"""Nothing is freed too early and nothing is waited for in vain: closing, collecting, exiting,
forking, interrupting.
"""

from __future__ import annotations

import _thread
import concurrent.futures
import contextlib
import gc
import signal
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import deepnvme
from deepnvme import (
    Access,
    ClosedError,
    FaultPlan,
    IOFuture,
    IOQueue,
    Pool,
    Requests,
    TensorStore,
    WhenFull,
)
from deepnvme.queue.leftovers import Leftover
from support.nvme_held import held, until
from support.nvme_io import CHUNK, PAGE, TIMEOUT_S, assert_same, contents, pattern
from support.nvme_programs import output_of, run_program

SLOW_US = 100_000
LONG_US = 1_000_000  # what takes milliseconds is over long before

# A held request waits in the fault backend, above all others: what happens meanwhile is the same on
# each.
anyhow_held = pytest.mark.parametrize(
    "backend",
    [
        "uring",
        "memory",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("liburing", "aio", "threads")),
    ],
    indirect=True,
)
# Here it matters whether a drive registers the memory of pools, as both of io_uring do and the
# others do not.
registering_or_not = pytest.mark.parametrize(
    "disk_backend",
    [
        "uring",
        "threads",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("liburing", "aio")),
    ],
    indirect=True,
)


def slow(backend: str, *, delay_us: int = SLOW_US) -> IOQueue:
    """Return a queue whose every request takes a while."""
    return IOQueue(backend, chunk_bytes=CHUNK, faults=FaultPlan().delay(delay_us=delay_us, every=1))


# --- much at once ---------------------------------------------------------------------------------


def test_a_hundred_files_are_in_flight_at_once(tmp_path: Path, queue: IOQueue) -> None:
    paths = [tmp_path / f"file{number}" for number in range(100)]
    sizes = [(number * 3571) % (3 * CHUNK) + 1 for number in range(100)]
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(queue.open(path, "w")) for path in paths]
        writes = [
            file.pwrite(pattern(size, n))
            for n, (file, size) in enumerate(zip(files, sizes, strict=True))
        ]
        syncs = [file.sync() for file in files]
        assert [write.result(TIMEOUT_S) for write in writes] == sizes
        assert [sync.result(TIMEOUT_S) for sync in syncs] == [0] * 100
        buffers = [bytearray(size) for size in sizes]
        reads = [file.pread(buffer) for file, buffer in zip(files, buffers, strict=True)]
        assert [read.result(TIMEOUT_S) for read in reads] == sizes
    for number, (path, buffer) in enumerate(zip(paths, buffers, strict=True)):
        assert_same(buffer, pattern(sizes[number], number))
        assert_same(contents(queue, path), buffer)


def test_sixty_four_threads_submit_at_once(tmp_path: Path, queue: IOQueue) -> None:
    share = 3 * PAGE + 17  # so that neighbours meet within pages
    rounds = 8

    def work(number: int) -> None:
        with queue.open(tmp_path / "file", "r+") as file:
            for turn in range(rounds):
                data = pattern(share, number * rounds + turn)
                assert file.pwrite(data, number * share).result(TIMEOUT_S) == share
                back = bytearray(share)
                assert file.pread(back, number * share).result(TIMEOUT_S) == share
                assert back == data

    queue.open(tmp_path / "file", "w", size=64 * share).close()
    with concurrent.futures.ThreadPoolExecutor(64) as threads:
        for future in [threads.submit(work, number) for number in range(64)]:
            future.result(TIMEOUT_S)
    expected = b"".join(pattern(share, number * rounds + rounds - 1) for number in range(64))
    assert_same(contents(queue, tmp_path / "file"), expected)


# --- closing --------------------------------------------------------------------------------------


def test_closing_the_queue_waits_for_everything_submitted(
    tmp_path: Path, disk_backend: str
) -> None:
    data = pattern(20 * CHUNK, seed=1)
    with slow(disk_backend) as queue, queue.open(tmp_path / "file", "w") as file:
        futures = [file.pwrite(data[n * CHUNK : (n + 1) * CHUNK], n * CHUNK) for n in range(20)]
        queue.close()
        assert all(future.done() for future in futures)
    assert [future.result(0) for future in futures] == [CHUNK] * 20
    assert_same((tmp_path / "file").read_bytes(), data)


def test_closing_a_file_leaves_its_operations_under_way(tmp_path: Path, disk_backend: str) -> None:
    data = pattern(5 * CHUNK + 9, seed=1)
    with slow(disk_backend) as queue:
        file = queue.open(tmp_path / "file", "w")
        future = file.pwrite(data, 3)
        file.close()
        del file
        gc.collect()
        assert future.result(TIMEOUT_S) == len(data)
    assert_same((tmp_path / "file").read_bytes()[3:], data)


def test_closing_while_others_submit_ends_every_operation_or_refuses_it(
    tmp_path: Path, backend: str
) -> None:
    queue = IOQueue(backend, max_pending=4)
    file = queue.open(tmp_path / "file", "w")
    begun = threading.Barrier(9)

    def work(number: int) -> int:
        written = 0
        begun.wait(TIMEOUT_S)
        with contextlib.suppress(ClosedError):
            while True:
                written += file.pwrite(bytes(PAGE), number * PAGE).result(TIMEOUT_S)
        return written

    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        workers = [threads.submit(work, number) for number in range(8)]
        begun.wait(TIMEOUT_S)
        while sum(drive.operations for drive in queue.stats().drives.values()) < 20:
            time.sleep(0.001)
        queue.close()
        written = sum(worker.result(TIMEOUT_S) for worker in workers)
    (drive,) = queue.stats().drives.values()
    assert drive.written_bytes == written


def test_a_submitter_that_waits_for_room_is_told_when_the_queue_closes(tmp_path: Path) -> None:
    queue = IOQueue("memory", max_pending=1, faults=FaultPlan().delay(delay_us=500_000, every=1))
    file = queue.open(tmp_path / "file", "w")
    first = file.pwrite(b"first")

    def submit() -> int:
        with contextlib.suppress(ClosedError):
            return file.pwrite(b"second").result(TIMEOUT_S)
        return 0

    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(submit)
        queue.close()
        assert waiting.result(TIMEOUT_S) in (0, 6)
    assert first.result(0) == 5


PF_EXITING = 0x4  # of a task's flags: set before whoever joins the thread is woken


def io_threads() -> list[str]:
    """Return the names of this process's threads that belong to deepnvme.

    A thread that was joined may still be listed, as one that is ending.
    """
    names = []
    for task in Path("/proc/self/task").iterdir():
        try:
            name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
        except (FileNotFoundError, ProcessLookupError):
            continue
        flags = int(rest.split()[6])
        if name.startswith("deepnvme") and not flags & PF_EXITING:
            names.append(name)
    return names


def test_a_closed_queue_leaves_no_thread_and_no_descriptor(
    tmp_path: Path, disk_backend: str
) -> None:
    def use() -> None:
        with IOQueue(disk_backend) as queue, queue.open(tmp_path / "file", "w") as file:
            file.pwrite(pattern(3 * CHUNK + 1, 1)).result(TIMEOUT_S)
            assert io_threads()

    use()  # what is made once and kept, such as an imported library
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(5):
        use()
    assert not io_threads()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("deepnvme")]
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_queue_that_never_opened_a_file_leaves_nothing_open_either(disk_backend: str) -> None:
    IOQueue(disk_backend).close()  # what is made once and kept
    before = len(list(Path("/proc/self/fd").iterdir()))
    queue = IOQueue(disk_backend)
    queue.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_queue_that_nobody_holds_any_more_finishes_and_goes(
    tmp_path: Path, disk_backend: str
) -> None:
    data = pattern(5 * CHUNK, seed=1)

    def submit() -> IOFuture[int]:
        queue = slow(disk_backend)
        return queue.open(tmp_path / "file", "w").pwrite(data)

    future = submit()
    gc.collect()
    assert future.result(TIMEOUT_S) == len(data)
    assert_same((tmp_path / "file").read_bytes(), data)
    assert not io_threads()


# --- interrupting ---------------------------------------------------------------------------------


def interrupt_main_thread_after(seconds: float) -> threading.Timer:
    timer = threading.Timer(
        seconds, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)
    )
    timer.start()
    return timer


@anyhow_held
def test_an_interrupt_during_result_leaves_the_operation_running(
    tmp_path: Path, backend: str
) -> None:
    with slow(backend, delay_us=400_000) as queue, queue.open(tmp_path / "file", "w") as file:
        future = file.pwrite(b"abc")
        timer = interrupt_main_thread_after(0.05)
        with pytest.raises(KeyboardInterrupt):
            future.result(TIMEOUT_S)
        timer.join()
        assert future.result(TIMEOUT_S) == 3
        assert contents(queue, tmp_path / "file") == b"abc"


class InterruptedSubmission(Exception):  # noqa: N818 - not an error: what a signal handler of the program raises
    pass


class InterruptedQueue:
    """A native queue during whose submission a signal comes.

    Python runs the handler before or after the call.
    """

    def __init__(self, native: Any, moment: str) -> None:
        self._native = native
        self._moment = moment

    def submit(self, *arguments: Any) -> IOFuture[int]:
        if self._moment == "before":
            raise InterruptedSubmission
        assert self._native.submit(*arguments)
        raise InterruptedSubmission


@pytest.mark.parametrize("moment", ["before", "after"])
def test_an_interrupt_while_submitting_frees_the_memory_of_what_was_not_taken_and_no_other(
    tmp_path: Path, moment: str
) -> None:
    with held("memory", tmp_path / "file") as (queue, file, first):
        buffer = bytearray(b"second")
        native = queue._native
        queue._pending._native = InterruptedQueue(native, moment)  # type: ignore[assignment]
        try:
            with pytest.raises(InterruptedSubmission):
                file.pwrite(buffer, CHUNK)
        finally:
            queue._pending._native = native
        if moment == "after":
            with pytest.raises(BufferError):
                buffer.clear()
        else:
            buffer.clear()
        assert first.result(TIMEOUT_S) == CHUNK
        assert file.pwrite(b"third", CHUNK + 6).result(TIMEOUT_S) == 5
        written = contents(queue, tmp_path / "file")[CHUNK : CHUNK + 11]
        assert written == (bytes(6) if moment == "before" else b"second") + b"third"
        until(lambda: queue.stats().pending == 0)
        buffer.clear()


def test_an_interrupt_ends_the_wait_for_room_and_leaves_nothing_behind(tmp_path: Path) -> None:
    with held("memory", tmp_path / "file", max_pending=1, hold_us=LONG_US) as (queue, file, first):
        buffer = bytearray(b"never written")
        timer = interrupt_main_thread_after(0.05)
        with pytest.raises(KeyboardInterrupt):
            file.pwrite(buffer)
        timer.join()
        assert not first.done()
        assert queue.stats().pending == 1
        buffer.clear()  # not possible while an operation holds it
        assert first.result(TIMEOUT_S) == CHUNK
        assert file.pwrite(b"third", CHUNK).result(TIMEOUT_S) == 5
        assert_same(
            contents(queue, tmp_path / "file")[: CHUNK + 5], pattern(CHUNK, seed=1) + b"third"
        )


@anyhow_held
def test_an_interrupt_ends_a_close_which_can_be_taken_up_again(
    tmp_path: Path, backend: str
) -> None:
    before = io_threads()
    with held(backend, tmp_path / "file", hold_us=LONG_US) as (queue, file, first):
        behind = file.pwrite(pattern(CHUNK, seed=2), CHUNK)
        timer = interrupt_main_thread_after(0.05)
        with pytest.raises(KeyboardInterrupt):
            queue.close()
        timer.join()
        assert queue.closed
        assert not first.done()
        with pytest.raises(ClosedError):
            file.pwrite(b"late")
        queue.close()
        assert [first.result(0), behind.result(0)] == [CHUNK, CHUNK]
    assert io_threads() == before


def test_a_queue_whose_close_was_interrupted_drains_when_nobody_holds_it_any_more(
    tmp_path: Path,
) -> None:
    path = tmp_path / "file"
    queue = slow("threads", delay_us=LONG_US // 2)
    file = queue.open(path, "w")
    future = file.pwrite(pattern(CHUNK, seed=1))
    timer = interrupt_main_thread_after(0.05)
    with pytest.raises(KeyboardInterrupt):
        queue.close()
    timer.join()
    del queue, file
    gc.collect()
    assert future.done()
    assert_same(path.read_bytes(), pattern(CHUNK, seed=1))


def test_an_interrupt_ends_the_wait_for_a_pools_registration_which_comes_nevertheless(
    tmp_path: Path,
) -> None:
    pool = Pool(1 << 20)
    with held("threads", tmp_path / "file", hold_us=LONG_US) as (queue, file, first):
        for call in (queue.use_pool, queue.forget_pool):
            timer = interrupt_main_thread_after(0.05)
            with pytest.raises(KeyboardInterrupt):
                call(pool)
            timer.join()
        assert not first.done()
        queue.use_pool(pool)
        assert first.result(TIMEOUT_S) == CHUNK
        data = pool.buffer(CHUNK)
        assert file.pwrite(data).result(TIMEOUT_S) == CHUNK


# --- the end of the process -----------------------------------------------------------------------

EXITING = """
import sys
from deepnvme import FaultPlan, IOQueue

backend, ending, path = sys.argv[1:]
queue = IOQueue(backend, chunk_bytes=65536, faults=FaultPlan().delay(delay_us=100_000, every=3))
file = queue.open(path, "w")
futures = [file.pwrite(bytes([number]) * 100_000, number * 100_000) for number in range(20)]
if ending == "exit":
    sys.exit(0)
if ending == "cycle":
    queue.itself = queue
    del queue, file, futures
"""


@pytest.mark.parametrize("ending", ["end", "exit", "cycle"])
def test_a_program_that_ends_with_work_in_flight_finishes_it_in_silence(
    tmp_path: Path, disk_backend: str, ending: str
) -> None:
    done = run_program(EXITING, disk_backend, ending, tmp_path / "file", folder=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert_same((tmp_path / "file").read_bytes(), b"".join(bytes([n]) * 100_000 for n in range(20)))


COMMITTING_LAST = """
import atexit, sys, threading
from deepnvme import Returns, TensorStore

how, folder = sys.argv[1:]
store = TensorStore.create([folder], 1 << 20, returns=Returns.NUMPY)
store.put_async("begun", b"1")

def last():
    if how == "thread":
        threading.main_thread().join()
    store.put("last", b"2")
    print(store.commit())
    store.close()

threading.Thread(target=last).start() if how == "thread" else atexit.register(last)
"""


@pytest.mark.parametrize("how", ["thread", "atexit"])
def test_a_store_can_be_committed_when_the_program_ends(tmp_path: Path, how: str) -> None:
    folder = tmp_path / "store"
    folder.mkdir()

    done = run_program(COMMITTING_LAST, how, folder, folder=tmp_path)

    assert (done.returncode, done.stdout, done.stderr) == (0, "2\n", "")
    with TensorStore.open([folder]) as store:
        assert set(store) == {"begun", "last"}


ENDING_WITH_AN_ERROR = """
import sys
from deepnvme import IOQueue, FaultPlan

queue = IOQueue("threads", faults=FaultPlan().delay(delay_us=100_000, every=1).fail(every=1))
future = queue.open(sys.argv[1], "w").pwrite(b"x" * 100)
raise RuntimeError("the program's own")
"""


def test_a_program_that_dies_of_its_own_error_shows_that_error_alone(tmp_path: Path) -> None:
    done = run_program(ENDING_WITH_AN_ERROR, tmp_path / "file", folder=tmp_path)
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    assert done.stderr.endswith("RuntimeError: the program's own\n")


# --- forking --------------------------------------------------------------------------------------

FORKING = """
import os, sys, time
from deepnvme import FaultPlan, ForkedError, IOQueue, Pool

backend, ending, path = sys.argv[1:]
pool = Pool(1 << 20)
slow = FaultPlan().delay(delay_us=300_000, nth=1)
queue = IOQueue(backend, pool=pool, chunk_bytes=65536, inflight_bytes=65536, faults=slow)
file = queue.open(path, "w")
future = file.pwrite(b"parent".ljust(65536))  # as much as may be in flight
behind = [file.pwrite(b"never", 65536) for _ in range(3)]
if not all([one.cancel() for one in behind]):
    print("not cancelled")

def refused(call):
    try:
        call()
    except ForkedError:
        return True
    return False

def child():
    checks = {
        "submitting": refused(lambda: file.pwrite(b"child")),
        "reading": refused(lambda: file.pread(bytearray(1))),
        "syncing": refused(file.sync),
        "opening": refused(lambda: queue.open(path)),
        "using a pool": refused(lambda: queue.use_pool(pool)),
        "forgetting a pool": refused(lambda: queue.forget_pool(pool)),
        "what the parent submitted": refused(lambda: future.result(10)),
    }
    queue.close()
    with IOQueue(backend) as own, own.open(path + ".child", "w") as other:
        checks["a queue of its own"] = other.pwrite(b"child").result(60) == 5
    wrong = [name for name, holds in checks.items() if not holds]
    if wrong:
        print("in the child:", wrong, flush=True)
    return 1 if wrong else 0

pid = os.fork()
if pid == 0:
    if ending == "_exit":
        os._exit(child())
    sys.exit(child())

deadline = time.monotonic() + 60
status = None
while status is None and time.monotonic() < deadline:
    ended, code = os.waitpid(pid, os.WNOHANG)
    status = code if ended else time.sleep(0.01)
if status is None:
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    print("the child hangs")
elif status != 0:
    print("the child's status:", status)
print(future.result(60), file.pwrite(b"after", 6).result(60))
queue.close()
print("parent done")
"""


@pytest.mark.parametrize("ending", ["_exit", "sys.exit"])
def test_a_forked_child_is_refused_and_ends_cleanly_and_its_parent_never_notices(
    tmp_path: Path, disk_backend: str, ending: str
) -> None:
    done = run_program(
        FORKING,
        disk_backend,
        ending,
        tmp_path / "file",
        folder=tmp_path,
        python=["-W", "ignore::DeprecationWarning"],  # newer Pythons warn of any fork with threads
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "65536 5\nparent done\n", "")
    assert (tmp_path / "file").read_bytes() == b"parentafter".ljust(65536)
    assert (tmp_path / "file.child").read_bytes() == b"child"


FORKING_WHILE_WAITED_FOR = """
import asyncio, concurrent.futures, gc, os, signal, sys, threading, time
from deepnvme import FaultPlan, ForkedError, IOFuture, IOQueue

backend, scene, path = sys.argv[1:]
both_slow = FaultPlan().delay(delay_us=600_000, nth=1).delay(delay_us=600_000, nth=2)
queue = IOQueue(backend, max_pending=2, faults=both_slow)
file = queue.open(path, "w")
futures = [file.pwrite(b"abc"), file.pwrite(b"defg", 3)]
lock, locked, let_go = threading.Lock(), threading.Event(), threading.Event()

def hold(what):
    with what:
        locked.set()
        let_go.wait(60)

async def wait_for_room():
    await asyncio.wait_for(queue.room(), 5)

def waits(thread):
    frame = sys._current_frames().get(thread.ident)
    while frame and frame.f_code is not IOFuture._wait.__code__:
        frame = frame.f_back
    return frame

results, others = [], []
if scene == "another thread waits":
    others.append(threading.Thread(target=lambda: results.extend(future.result() for future in futures)))
    others[0].start()
    while not waits(others[0]):
        pass
elif scene == "another thread holds a future":
    others.append(threading.Thread(target=hold, args=(futures[1]._condition,)))
elif scene == "another thread holds what a callback wants":
    futures[0].add_done_callback(lambda _: hold(lock))
    others.append(threading.Thread(target=hold, args=(lock,)))
elif scene == "another thread waits with concurrent.futures":
    others.append(threading.Thread(target=lambda: results.append(len(concurrent.futures.wait(futures).done))))
    others[0].start()
    while not futures[1]._waiters:
        pass
elif scene == "the queue is collected":
    def forget():
        global queue, file
        queue = file = None
        gc.collect()
        locked.set()
    others.append(threading.Thread(target=forget))
    others[0].start()
    while queue:
        pass
if others and not others[0].ident:
    others[0].start()
    locked.wait(60)

pid = os.fork()
if pid == 0:
    let_go.set()
    kinds = {type(future.exception(2)) for future in futures}
    if scene == "the queue was full":
        try:
            asyncio.run(wait_for_room())
        except ForkedError:
            kinds.add(ForkedError)
    sys.exit(0 if kinds == {ForkedError} else 1)
deadline = time.monotonic() + 10
while time.monotonic() < deadline and not (ended := os.waitpid(pid, os.WNOHANG))[0]:
    time.sleep(0.005)
if not ended[0]:
    os.kill(pid, signal.SIGKILL)
    ended = os.waitpid(pid, 0)
let_go.set()
print(ended[1], [future.result(60) for future in futures])
for other in others:
    other.join(60)
print(results)
if queue:
    print(file.pwrite(b"after", 7).result(60))
"""


@pytest.mark.parametrize(
    ("scene", "results"),
    [
        ("another thread waits", [3, 4]),
        ("another thread waits with concurrent.futures", [2]),
        ("another thread holds a future", []),
        ("another thread holds what a callback wants", []),
        ("the queue is collected", []),
        ("the queue was full", []),
    ],
)
def test_a_fork_at_a_bad_moment_disturbs_neither_the_child_nor_the_parent(
    tmp_path: Path, scene: str, results: list[int]
) -> None:
    ignoring = ["-W", "ignore::DeprecationWarning"]  # newer Pythons warn of any fork with threads
    told = run_program(
        FORKING_WHILE_WAITED_FOR,
        "threads",
        scene,
        tmp_path / "file",
        folder=tmp_path,
        python=ignoring,
    )
    lines = ["0 [3, 4]", str(results)] + ["5"] * (scene != "the queue is collected")
    assert (output_of(told).splitlines(), told.stderr) == (lines, "")
    assert (tmp_path / "file").read_bytes() == b"abcdefg" + b"after" * (
        scene != "the queue is collected"
    )


FORKING_WITH_A_POOL = """
import os, sys
import numpy as np
from deepnvme import Pool

pool = Pool(16 << 20)
pid = os.fork()
if pid == 0:
    # A child has a hole where the pool was, and the kernel gives that to whoever maps memory next.
    own = [np.full(2 << 20, number, np.uint8) for number in range(40)]
    del pool
    sys.exit(0 if all(int(array[-1]) == number == int(array[0]) for number, array in enumerate(own)) else 1)
_, status = os.waitpid(pid, 0)
assert status == 0, status
array = pool.empty(8)
array[:] = 7
assert int(array.sum()) == 56
"""


def test_a_forked_child_that_drops_the_pool_does_not_unmap_its_own_memory(tmp_path: Path) -> None:
    output_of(run_program(FORKING_WITH_A_POOL, folder=tmp_path))


# --- the garbage collector ------------------------------------------------------------------------

COLLECTED_WITH_A_LOCK = """
import faulthandler, gc, sys, threading, time
from pathlib import Path
import deepnvme
from deepnvme.compat import aio_handle
from deepnvme.formats.safetensors import SafetensorsFile

faulthandler.dump_traceback_later(60, exit=True)
what, folder = sys.argv[1], Path(sys.argv[2])

def make():
    if what == "queue":
        queue = deepnvme.IOQueue()
        queue.open(folder / "f", "w").pwrite(b"abc")
        return queue
    if what == "volume":
        return deepnvme.Volume.create([folder / "v"], 1 << 20)
    if what == "store":
        store = deepnvme.TensorStore.swap([folder], 1 << 20)
        store.put("a", bytes(5000))
        return store
    if what == "file":
        deepnvme.write_safetensors(folder / "f.safetensors", {"a": bytearray(5000)})
        return SafetensorsFile(folder / "f.safetensors")
    return aio_handle()

def threads_of_queues():
    return [thread.name for thread in threading.enumerate() if thread.name == "deepnvme-futures"]

gc.disable()
cycle = [make()]
cycle.append(cycle)
assert threads_of_queues()
del cycle
# As where threading.enumerate() or Thread.start() allocates: they hold this lock then, which the
# end of a queue's thread takes.
with threading._active_limbo_lock:
    gc.collect()
while threads_of_queues():
    time.sleep(0.001)
if what == "volume":
    deepnvme.Volume.open([folder / "v"]).close()
"""


@pytest.mark.parametrize("what", ["queue", "volume", "store", "file", "handle"])
def test_what_is_collected_where_a_thread_holds_a_lock_ends_later(
    tmp_path: Path, what: str
) -> None:
    done = run_program(COLLECTED_WITH_A_LOCK, what, tmp_path, folder=tmp_path)

    assert (output_of(done), done.stderr) == ("", "")
    assert what != "queue" or (tmp_path / "f").read_bytes() == b"abc"


@pytest.mark.parametrize("what", ["queue", "volume"])
def test_what_is_collected_does_not_pile_up_behind_the_thread_that_ends_it(
    what: str, tmp_path: Path
) -> None:
    def refuse(*_: object) -> int:
        raise RuntimeError("no thread is left")

    def make() -> object:
        if what == "queue":
            return IOQueue("threads")
        return deepnvme.Volume.open([tmp_path / "v"], access=Access.READ, queue=queue)

    def count() -> int:
        if what == "queue":
            return sum(thread.name == "deepnvme-futures" for thread in threading.enumerate())
        data = tmp_path / "v" / "data"
        return sum(link.resolve() == data for link in Path("/proc/self/fd").iterdir())

    counts: list[int] = []
    with IOQueue("threads") as queue, pytest.MonkeyPatch.context() as patch:
        deepnvme.Volume.create([tmp_path / "v"], PAGE, queue=queue).close()
        patch.setattr(_thread, "start_new_thread", refuse)  # as slow as a thread can be
        for _ in range(60):
            cycle = [make()]
            cycle.append(cycle)
            del cycle
            gc.collect()
            counts.append(count())
        Leftover.end_waiting()  # before the queue closes, and for the tests after this one
    assert max(counts) <= {"queue": 20, "volume": 60}[what]  # a volume has three descriptors


def finalizers_of(owner: object) -> list[weakref.finalize[..., Any]]:
    return [
        finalizer
        for finalizer in weakref.finalize._registry  # type: ignore[attr-defined]
        if (found := finalizer.peek()) is not None and found[0] is owner
    ]


@pytest.mark.parametrize("what", ["queue", "file", "volume"])
def test_a_finalizer_sees_that_its_owner_is_collected(what: str, tmp_path: Path) -> None:
    make: dict[str, Callable[[], Any]] = {
        "queue": IOQueue,
        "file": lambda: deepnvme.open(tmp_path / "f", "wb"),
        "volume": lambda: deepnvme.Volume.temporary([tmp_path], PAGE),
    }
    with make[what]() as owner:
        (finalizer,) = finalizers_of(owner)
        found = finalizer.peek()
        assert found is not None
        (seen,) = [given for given in found[2] if isinstance(given, weakref.ref)]

        assert seen() is owner
        # Python 3.15 clears those without a callback only after the finalizers.
        assert seen.__callback__ is not None


def test_collecting_a_queue_waits_for_no_drive(tmp_path: Path) -> None:
    queue = slow("threads", delay_us=LONG_US)
    future = queue.open(tmp_path / "file", "w").pwrite(b"abc")
    cycle: list[object] = [queue]
    cycle.append(cycle)
    del queue, cycle
    gc.collect()

    assert not future.done()
    assert future.result(TIMEOUT_S) == 3
    until(lambda: not io_threads())


# --- without asserts ------------------------------------------------------------------------------

SAME_UNDER_O = """
import sys, zlib
from deepnvme import FaultPlan, IOQueue, NVMeError, ShortReadError

with IOQueue(chunk_bytes=65536) as queue, queue.open(sys.argv[1], "w") as file:
    data = bytes(range(256)) * 1000
    written = file.pwrite(data, 3).result(60)
    buffer = bytearray(len(data))
    read = file.pread(buffer, 3).result(60)
    file.sync().result(60)
    print(written, read, zlib.crc32(buffer), file.size)
    try:
        file.pread(bytearray(10), file.size - 4).result(60)
    except ShortReadError as error:
        print("short", error.done)
    with queue.batch() as batch:
        batch.pwrite(file, b"end", file.size)
    print(file.size)
with IOQueue("memory", faults=FaultPlan().fail(nth=1)) as queue, queue.open("file", "w") as file:
    try:
        file.pwrite(b"x").result(60)
    except NVMeError as error:
        print("failed", error.errno)
"""


def test_a_program_gives_the_same_with_and_without_asserts(tmp_path: Path) -> None:
    plain = output_of(run_program(SAME_UNDER_O, tmp_path / "plain", folder=tmp_path))
    optimised = output_of(
        run_program(SAME_UNDER_O, tmp_path / "optimised", folder=tmp_path, python=["-O"])
    )
    assert plain == optimised
    assert plain.splitlines()[1:] == ["short 4", "256006", "failed 5"]
    assert (tmp_path / "plain").read_bytes() == (tmp_path / "optimised").read_bytes()


# --- the pool -------------------------------------------------------------------------------------


def test_a_block_returns_to_the_pool_when_its_last_view_dies() -> None:
    pool = Pool(8 * PAGE)
    array = pool.empty((3, PAGE), "uint8")
    assert pool.free_bytes == 5 * PAGE
    row, pieces = array[1], [array[2, 5:9], array.reshape(-1)]
    del array
    assert pool.free_bytes == 5 * PAGE
    row[:] = 1
    pieces.clear()
    assert pool.free_bytes == 5 * PAGE
    del row
    assert (pool.free_bytes, pool.largest_free, pool.peak_bytes) == (8 * PAGE, 8 * PAGE, 3 * PAGE)


def test_blocks_are_of_exact_size_and_do_not_overlap() -> None:
    pool = Pool(64 * PAGE)
    arrays = [pool.empty(size) for size in (1, PAGE - 1, PAGE, PAGE + 1, 5000)]
    for number, array in enumerate(arrays):
        array[:] = number
    assert [len(array) for array in arrays] == [1, PAGE - 1, PAGE, PAGE + 1, 5000]
    assert all((array == number).all() for number, array in enumerate(arrays))
    assert all(array.ctypes.data % PAGE == 0 for array in arrays)


def test_pool_memory_lives_on_without_its_pool_and_without_its_queue(
    tmp_path: Path, disk_backend: str
) -> None:
    pool = Pool(4 * CHUNK)
    with IOQueue(disk_backend, pool=pool) as queue, queue.open(tmp_path / "file", "w") as file:
        array = pool.empty(2 * CHUNK)
        array[:] = 5
        file.pwrite(array).result(TIMEOUT_S)
        array[:] = 0
        file.pread(array).result(TIMEOUT_S)
    del pool, queue, file
    gc.collect()
    assert (array == 5).all()
    array[:] = 6


def test_a_pool_serves_two_queues_and_can_be_forgotten_by_either(
    tmp_path: Path, disk_backend: str
) -> None:
    pool = Pool(4 * CHUNK)
    array = pool.empty(2 * CHUNK)
    with IOQueue(disk_backend, pool=pool) as left, IOQueue(disk_backend) as right:
        right.use_pool(pool)
        with left.open(tmp_path / "left", "w") as one, right.open(tmp_path / "right", "w") as other:
            for value in (1, 2):
                array[:] = value
                for future in (one.pwrite(array), other.pwrite(array)):
                    assert future.result(TIMEOUT_S) == 2 * CHUNK
                left.forget_pool(pool)
    assert (
        (tmp_path / "left").read_bytes() == (tmp_path / "right").read_bytes() == b"\2" * (2 * CHUNK)
    )


def test_pools_come_and_go_while_work_is_in_flight(tmp_path: Path, disk_queue: IOQueue) -> None:
    with disk_queue.open(tmp_path / "file", "w") as file:
        futures = []
        for number in range(12):
            pool = Pool(2 * CHUNK)
            disk_queue.use_pool(pool)
            array = pool.empty(CHUNK + 5)
            array[:] = number
            futures.append(file.pwrite(array, number * (CHUNK + 5)))
            if number % 3 == 0:
                disk_queue.forget_pool(pool)
        assert [future.result(TIMEOUT_S) for future in futures] == [CHUNK + 5] * 12
    expected = b"".join(bytes([number]) * (CHUNK + 5) for number in range(12))
    assert_same((tmp_path / "file").read_bytes(), expected)


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Path]:
    """Yield a folder on another drive than `tmp_path`."""
    memory = Path("/dev/shm")
    if not memory.is_dir() or memory.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is no second file system at /dev/shm")
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield Path(folder)


@contextlib.contextmanager
def one_drive_held(
    backend: str, path: Path, pool: Pool | None = None
) -> Iterator[tuple[IOQueue, IOFuture[int]]]:
    """Yield a queue and a sync that keeps the drive of `path`, and no other, busy for long."""
    long = FaultPlan().delay(nth=1, delay_us=LONG_US, requests=Requests.SYNCS)
    with IOQueue(backend, pool=pool, faults=long) as queue, queue.open(path, "w") as file:
        sync = file.sync()
        until(lambda: any(drive.chunks for drive in queue.stats().drives.values()))
        yield queue, sync


@registering_or_not
def test_a_pool_that_waits_for_a_busy_drive_keeps_no_other_drive_waiting(
    tmp_path: Path, elsewhere: Path, disk_backend: str, pool: Pool
) -> None:
    with (
        one_drive_held(disk_backend, tmp_path / "file") as (queue, sync),
        queue.open(elsewhere / "file", "w") as file,
    ):
        using = threading.Thread(target=queue.use_pool, args=(pool,))
        using.start()
        for number in range(20):
            assert file.pwrite(b"x" * 100, number * 100).result(TIMEOUT_S) == 100
        assert using.is_alive()
        assert not sync.done()
        using.join(TIMEOUT_S)
        assert not using.is_alive()


@registering_or_not
def test_a_drive_that_is_new_to_a_queue_learns_its_pools_while_another_drive_is_busy(
    tmp_path: Path, elsewhere: Path, disk_backend: str, pool: Pool
) -> None:
    with IOQueue(disk_backend, pool=pool) as queue, queue.open(elsewhere / "file", "w"):
        (alone,) = queue.stats().drives.values()
    with one_drive_held(disk_backend, tmp_path / "file", pool) as (queue, sync):
        with queue.open(elsewhere / "file", "w"):
            assert (
                queue.stats().drives[elsewhere.stat().st_dev].registered_bytes
                == alone.registered_bytes
            )
        assert not sync.done()


def is_pool_memory(address: int) -> bool:
    """Tell whether there is memory that a forked child would not have."""
    within = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if first == "VmFlags:" and within:
            return "dc" in rest
        if not first.endswith(":"):
            start, _, end = first.partition("-")
            within = int(start, 16) <= address < int(end, 16)
    return False


def test_a_closed_queue_holds_no_pool(tmp_path: Path, disk_backend: str) -> None:
    pool = Pool(1 << 20)
    address = pool.empty(1).ctypes.data
    assert is_pool_memory(address)
    queue = IOQueue(disk_backend, pool=pool)
    queue.open(tmp_path / "file", "w").close()
    del pool
    gc.collect()
    assert is_pool_memory(address)
    queue.close()
    assert not is_pool_memory(address)


def pool_bytes() -> int:
    """Return the bytes of memory that a forked child would not have."""
    total = size = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if first == "Size:":
            size = int(rest[0]) << 10
        elif first == "VmFlags:" and "dc" in rest:
            total += size
    return total


def test_a_store_that_is_dropped_leaves_no_memory_in_a_shared_queue(
    tmp_path: Path, disk_backend: str
) -> None:
    with TensorStore.create([tmp_path], 32 << 20) as store:
        store.put("small", b"x")
        store.put("large", bytes(5 << 20))
        store.commit()
    with IOQueue(disk_backend) as queue:
        before = pool_bytes()
        for _ in range(3):
            store = TensorStore.open([tmp_path], queue=queue)
            assert len(store.get("small")) + len(store.get("large")) == 1 + (5 << 20)
            assert pool_bytes() > before
            del store
            gc.collect()
            until(lambda: pool_bytes() <= before)


@pytest.mark.parametrize("nbytes", [0, -1])
def test_a_pool_of_no_bytes_is_refused(nbytes: int) -> None:
    with pytest.raises((ValueError, TypeError)):
        Pool(nbytes)


def test_elements_of_no_bytes_need_no_pool_memory() -> None:
    pool = Pool(PAGE)
    assert pool.empty((3, 0)).shape == (3, 0)
    assert pool.free_bytes == PAGE


def test_a_full_queue_that_refuses_stays_usable(tmp_path: Path, backend: str) -> None:
    with (
        IOQueue(backend, max_pending=1, when_full=WhenFull.RAISE) as queue,
        queue.open(tmp_path / "file", "w") as file,
    ):
        for number in range(50):
            assert file.pwrite(bytes([number]), number).result(TIMEOUT_S) == 1
        assert contents(queue, tmp_path / "file") == bytes(range(50))


# Python 3.14 runs handlers between taking a lock and the body of its `with`.
in_one_step = pytest.mark.skipif(
    sys.version_info >= (3, 14), reason="with takes a lock in two steps from Python 3.14 on"
)


SIGNALS = """
import faulthandler, signal, sys, time

faulthandler.dump_traceback_later(100, exit=True)

class Came(Exception):
    pass

armed = False

def handler(*_):
    if armed:
        raise Came

signal.signal(signal.SIGALRM, handler)
"""

STORM = (
    SIGNALS
    + """
import deepnvme

signal.setitimer(signal.ITIMER_REAL, 0.0003, 0.00037)
interrupted = number = 0
with deepnvme.IOQueue(sys.argv[1], max_pending=4) as queue, queue.open("file", "w") as file:
    file.truncate(1 << 20)
    buffers = [bytearray(4096) for _ in range(8)]
    pieces = [memoryview(buffer) for buffer in buffers]
    futures = []
    begun = time.monotonic()
    while time.monotonic() < begun + 3 or interrupted < 100:  # few come where the machine is busy
        try:
            armed = True
            futures.append(file.pread(buffers[number % 8], 4096 * (number % 8)))
            number += 1
            if number % 3 == 0:
                futures.append(file.pread_many(pieces, [0] * 8))
            if number % 5 == 0:
                file.pread(buffers[0]).add_done_callback(lambda ended: None)
            armed = False
        except Came:
            armed = False
            interrupted += 1
        if len(futures) > 40:
            armed = False
            for future in futures:
                assert future.result(20) in (4096, 8 * 4096)
            futures.clear()
    armed = False
    for future in futures:
        assert future.result(20) in (4096, 8 * 4096)
    del pieces
    while queue.stats().pending or queue._pending._futures:
        time.sleep(0.001)
    for buffer in buffers:
        buffer.clear()
signal.setitimer(signal.ITIMER_REAL, 0)
"""
)


@in_one_step
def test_signals_at_any_moment_lose_no_operation_and_leave_no_future_locked(
    tmp_path: Path, disk_backend: str
) -> None:
    output_of(run_program(STORM, disk_backend, folder=tmp_path))


STORM_ON_A_STORE = (
    SIGNALS
    + """
import numpy
from deepnvme import TensorStore

interrupted = 0
store = TensorStore.create("store", "16MiB")
tensor = numpy.zeros(1024, numpy.uint8)
store.put("name", tensor)
signal.setitimer(signal.ITIMER_REAL, 0.0003, 0.00037)
begun = time.monotonic()
while time.monotonic() < begun + 2 or interrupted < 100:
    future = store.put_async("name", tensor)
    for _ in range(50):
        try:
            armed = True
            future.add_done_callback(lambda ended: None)
            armed = False
        except Came:
            armed = False
            interrupted += 1
    future.result(20)
signal.setitimer(signal.ITIMER_REAL, 0)
store.commit()
store.close()
"""
)


@in_one_step
def test_signals_at_any_moment_leave_no_future_of_a_store_locked(tmp_path: Path) -> None:
    output_of(run_program(STORM_ON_A_STORE, folder=tmp_path))
