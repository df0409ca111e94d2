"""`deepnvme.open`: a file object that libraries use as one of Python's own."""

from __future__ import annotations

import _thread
import gc
import io
import sys
import tarfile
import threading
import time
import traceback
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

import deepnvme
from deepnvme import (
    BatchError,
    ClosedError,
    FaultPlan,
    File,
    IOFuture,
    IOQueue,
    NVMeError,
    Requests,
    WhenFull,
)
from support.nvme_held import until
from support.nvme_programs import output_of, run_program

BLOCK, PAGE = 64 << 10, 4096


def opened(path: Path, mode: Any, **options: Any) -> Any:
    return deepnvme.open(path, mode, block_bytes=BLOCK, **options)


def pattern(nbytes: int) -> bytes:
    return Random(nbytes).randbytes(nbytes)


# --- libraries ---------------------------------------------------------------------------------


def test_torch_saves_and_loads(tmp_path: Path) -> None:
    state: dict[str, Any] = {"weight": torch.randn(300, 400), "bias": torch.randn(7), "step": 3}
    with opened(tmp_path / "state.pt", "wb") as file:
        torch.save(state, file)
    with opened(tmp_path / "state.pt", "rb") as file:
        again = torch.load(file)

    assert torch.equal(again["weight"], state["weight"])
    assert torch.load(tmp_path / "state.pt")["step"] == 3


def test_numpy_saves_and_loads(tmp_path: Path) -> None:
    array = np.random.default_rng(1).random((300, 400))
    with opened(tmp_path / "array.npz", "wb") as file:
        np.savez(file, array=array)
    with opened(tmp_path / "array.npz", "rb") as file, np.load(file) as found:
        assert (found["array"] == array).all()


def test_zip_files_are_written_and_read(tmp_path: Path) -> None:
    with opened(tmp_path / "x.zip", "wb") as file, zipfile.ZipFile(file, "w") as archive:
        for number in range(5):
            archive.writestr(f"{number}", pattern(50_000 + number))
    with opened(tmp_path / "x.zip", "rb") as file, zipfile.ZipFile(file) as archive:
        assert archive.read("3") == pattern(50_003)
        assert archive.testzip() is None


def test_pyarrow_writes_and_reads_parquet(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow", reason="a library that takes file objects")
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow was built without parquet")
    table = arrow.table({"number": range(100_000), "text": [str(n) for n in range(100_000)]})
    with opened(tmp_path / "x.parquet", "wb") as file:
        parquet.write_table(table, file)
    with opened(tmp_path / "x.parquet", "rb") as file:
        assert parquet.read_table(file).equals(table)


def test_tar_files_are_written_and_read(tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(pattern(300_000))
    with opened(tmp_path / "x.tar", "wb") as file, tarfile.open(fileobj=file, mode="w") as archive:
        archive.add(tmp_path / "one", "one")
    with opened(tmp_path / "x.tar", "rb") as file, tarfile.open(fileobj=file) as archive:
        member = archive.extractfile("one")
        assert member is not None
        assert member.read() == pattern(300_000)


# --- as Python's own ---------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_random_use_does_what_a_file_of_python_does(seed: int, tmp_path: Path) -> None:
    random = Random(seed)
    start = random.randbytes(5 * BLOCK + 123)
    for name in ("ours", "python"):
        (tmp_path / name).write_bytes(start)
    with opened(tmp_path / "ours", "r+b") as ours, (tmp_path / "python").open("r+b") as python:
        for _ in range(120):
            nbytes = random.choice((0, 1, 10, 4096, 5000, BLOCK - 1, BLOCK, 3 * BLOCK))
            match random.randrange(6):
                case 0 | 1:
                    assert ours.read(nbytes) == python.read(nbytes)
                case 2:
                    assert ours.readline(nbytes) == python.readline(nbytes)
                case 3:
                    data = random.randbytes(nbytes)
                    assert ours.write(data) == python.write(data)
                case 4:
                    at = random.randrange(6 * BLOCK)
                    assert ours.seek(at) == python.seek(at)
                case 5:
                    assert ours.seek(0, io.SEEK_END) == python.seek(0, io.SEEK_END)
                    assert ours.seek(-min(nbytes, ours.tell()), io.SEEK_CUR) == python.seek(
                        -min(nbytes, python.tell()), io.SEEK_CUR
                    )
            assert ours.tell() == python.tell()
        assert ours.truncate(BLOCK + 5) == python.truncate(BLOCK + 5)
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "python").read_bytes()


def test_many_small_writes_become_whole_blocks(tmp_path: Path) -> None:
    data = pattern(3 * BLOCK + 77)
    with IOQueue("threads") as queue:
        with opened(tmp_path / "f", "wb", queue=queue) as file:
            for start in range(0, len(data), 1000):
                file.write(data[start : start + 1000])
        (drive,) = queue.stats().drives.values()
        assert drive.operations == 4

    assert (tmp_path / "f").read_bytes() == data


@pytest.mark.parametrize("seed", range(6))
def test_random_appending_does_what_a_file_of_python_does(seed: int, tmp_path: Path) -> None:
    random = Random(seed)
    for name in ("ours", "python"):
        (tmp_path / name).write_bytes(pattern((0, 5000, 3 * BLOCK)[seed % 3]))
    # Unbuffered: a buffered file of Python reports a wrong position after a jump.
    python = (tmp_path / "python").open("ab", buffering=0)
    with opened(tmp_path / "ours", "ab") as ours, python:
        for _ in range(60):
            assert ours.tell() == python.tell()
            match random.randrange(8):
                case 0 | 1:
                    place = random.randrange(4 * BLOCK)
                    assert ours.seek(place) == python.seek(place)
                case 2:
                    size = random.randrange(3 * BLOCK)
                    assert ours.truncate(size) == python.truncate(size)
                case 3:
                    assert ours.seek(0, io.SEEK_END) == python.seek(0, io.SEEK_END)
                case _:
                    data = pattern(random.choice((1, 700, 5000, BLOCK, 2 * BLOCK + 33)))
                    assert ours.write(data) == python.write(data)
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "python").read_bytes()


def test_appending_makes_a_file_that_is_missing(tmp_path: Path) -> None:
    for data in (b"one", b"two"):
        with opened(tmp_path / "f", "ab") as file:
            file.write(data)

    assert (tmp_path / "f").read_bytes() == b"onetwo"


def test_appending_by_a_link_to_nowhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "gone" / "f")

    with pytest.raises(FileNotFoundError):
        opened(tmp_path / "link", "ab")


def test_lines_are_iterated_over(tmp_path: Path) -> None:
    lines = [b"%d\n" % number for number in range(30_000)]
    (tmp_path / "f").write_bytes(b"".join(lines))
    with opened(tmp_path / "f", "rb") as file:
        assert list(file) == lines


@pytest.mark.parametrize("number", [np.uint8, np.uint16, np.int64])
def test_sizes_and_places_may_be_numbers_of_numpy(number: Any, tmp_path: Path) -> None:
    kept = Random(0).randbytes(4 * PAGE)
    (tmp_path / "f").write_bytes(kept)
    with deepnvme.open(tmp_path / "f", block_bytes=PAGE) as file:
        found = b"".join(file.read(number(200)) for _ in range(40))
        assert (found, file.tell()) == (kept[:8000], 8000)
        file.seek(3 * PAGE)
        file.read(1)
        assert file.seek(number(100)) == 100
        assert file.read(300) == kept[100:400]


def test_what_is_looked_at_is_more_than_a_byte_also_after_a_read(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(bytes(range(256)))
    with opened(tmp_path / "f", "rb") as file:
        file.read(1)
        assert file.peek()[:4] == bytes((1, 2, 3, 4))
        assert file.peek(2)[:2] == bytes((1, 2))


@pytest.mark.parametrize("read", [lambda file: file.read(0), lambda file: file.read(1)])
def test_a_closed_file_and_one_for_writing_are_not_read(
    read: Callable[[Any], bytes], tmp_path: Path
) -> None:
    (tmp_path / "f").write_bytes(b"abc")
    file = opened(tmp_path / "f", "rb")
    file.read(1)
    file.close()
    with pytest.raises(ValueError, match="is closed"):
        read(file)
    with opened(tmp_path / "f", "wb") as file, pytest.raises(io.UnsupportedOperation):
        read(file)


@pytest.mark.parametrize("limit", [-1, None, 0, 1, 100, 5000])
def test_a_line_is_read_as_from_memory_up_to_its_limit(limit: int | None, tmp_path: Path) -> None:
    """Also over the ends of blocks, where a limit counts as well."""
    kept = b"".join(b"x" * length + b"\n" for length in (0, 1, 127, 128, 129, 3700, 90, 9000, 5))
    (tmp_path / "f").write_bytes(kept + b"no end")
    expected = io.BytesIO(kept + b"no end")
    with deepnvme.open(tmp_path / "f", block_bytes=PAGE) as file:
        for _ in range(200):
            assert file.readline(limit) == expected.readline(limit)
            assert file.tell() == expected.tell()


@pytest.mark.parametrize(
    ("mode", "may_read", "may_write"), [("rb", 1, 0), ("wb", 0, 1), ("ab", 0, 1), ("r+b", 1, 1)]
)
def test_a_mode_allows_what_it_says(
    mode: str, may_read: int, may_write: int, tmp_path: Path
) -> None:
    (tmp_path / "f").write_bytes(b"x")
    with opened(tmp_path / "f", mode) as file:
        assert (file.readable(), file.writable()) == (bool(may_read), bool(may_write))
        if not may_read:
            with pytest.raises(io.UnsupportedOperation):
                file.read(1)
        if not may_write:
            with pytest.raises(io.UnsupportedOperation):
                file.write(b"y")


def test_a_closed_file_object_says_so(tmp_path: Path) -> None:
    file = opened(tmp_path / "f", "wb")
    file.close()
    file.close()

    with pytest.raises(ValueError, match="is closed"):
        file.tell()
    assert "closed" in repr(file)


def test_there_is_no_descriptor_to_write_past_the_object(tmp_path: Path) -> None:
    with opened(tmp_path / "f", "wb") as file, pytest.raises(io.UnsupportedOperation):
        file.fileno()


@pytest.mark.parametrize("given", [{"mode": "r"}, {"mode": "a+b"}, {"block_bytes": 5000}])
def test_what_it_cannot_be_opened_with_is_refused(given: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=next(iter(given))):
        deepnvme.open(tmp_path / "f", **{"mode": "wb", **given})


def test_a_drive_that_fails_to_write_is_told_at_the_latest_when_it_is_closed(
    tmp_path: Path,
) -> None:
    plan = FaultPlan()
    plan.fail(every=1, errno=28, requests=Requests.WRITES)
    with IOQueue("threads", faults=plan) as queue:
        file = opened(tmp_path / "f", "wb", queue=queue)
        file.write(b"small")
        with pytest.raises(NVMeError):
            file.close()
        assert file.closed


@pytest.mark.parametrize("nbytes", [0, 100, PAGE, BLOCK, 3 * BLOCK])
def test_bytes_that_another_handle_appends_are_read(nbytes: int, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(pattern(nbytes))
    with opened(tmp_path / "f", "rb") as file, (tmp_path / "f").open("ab", buffering=0) as other:
        assert file.read() == pattern(nbytes)
        assert file.peek() == b""
        for size in (100, PAGE, 2 * BLOCK + 7):
            other.write(pattern(size))
            assert file.read(size // 2) + file.read() == pattern(size)
            assert file.peek() == b""


def test_a_failed_read_is_tried_again_by_the_next_call(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(pattern(3 * BLOCK))
    plan = FaultPlan().fail(nth=1, requests=Requests.READS)
    with (
        IOQueue("threads", faults=plan) as queue,
        opened(tmp_path / "f", "rb", queue=queue) as file,
    ):
        with pytest.raises(NVMeError):
            file.read(100)
        assert file.read(100) == pattern(3 * BLOCK)[:100]


def test_a_read_that_fails_halfway_leaves_the_position(tmp_path: Path) -> None:
    data = pattern(4 * BLOCK)
    (tmp_path / "f").write_bytes(data)
    plan = FaultPlan().fail(nth=2, requests=Requests.READS)
    with (
        IOQueue("threads", faults=plan) as queue,
        opened(tmp_path / "f", "rb", queue=queue) as file,
    ):
        found, failed = b"", 0
        while file.tell() < len(data):
            try:
                found += file.read(BLOCK // 2 + 7)
            except NVMeError:
                failed += 1
    assert found == data
    assert failed == 1


def test_a_full_queue_that_refuses_loses_no_collected_bytes(tmp_path: Path) -> None:
    data = pattern(6 * BLOCK + 77)
    slow = FaultPlan().delay(delay_us=5000, every=1)
    with IOQueue("threads", max_pending=1, when_full=WhenFull.RAISE, faults=slow) as queue:
        with opened(tmp_path / "f", "wb", queue=queue) as file:
            for start in range(0, len(data), 10_000):
                file.write(data[start : start + 10_000])
            file.sync()
        with opened(tmp_path / "f", "rb", queue=queue) as file:
            assert [file.read(10_000) for _ in range(0, len(data), 10_000)] == [
                data[start : start + 10_000] for start in range(0, len(data), 10_000)
            ]


@contextmanager
def interrupted(moment: str, call: str) -> Iterator[None]:
    """Let Ctrl-C come before or after a call of `File` submits, or while its future is awaited."""
    submit: Callable[..., Any] = getattr(File, call)

    def interrupt(*arguments: Any) -> None:
        if moment == "after":
            submit(*arguments)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        if moment == "waiting":
            patch.setattr(IOFuture, "result", interrupt)
            patch.setattr(IOFuture, "exception", interrupt)
        else:
            patch.setattr(File, call, interrupt)
        with pytest.raises(KeyboardInterrupt):
            yield


MOMENTS = pytest.mark.parametrize("moment", ["before", "after", "waiting"])


@MOMENTS
def test_interrupted_writes_lose_no_bytes(moment: str, tmp_path: Path) -> None:
    data = pattern(5 * BLOCK + 77)
    with opened(tmp_path / "f", "wb") as file:
        for start in range(0, len(data), 1000):
            file.write(data[start : start + 1000])
            if start % 30_000 == 0:
                with interrupted(moment, "pwrite"):
                    file.flush()
    assert (tmp_path / "f").read_bytes() == data


@MOMENTS
def test_interrupted_reads_can_be_repeated(moment: str, tmp_path: Path) -> None:
    data = pattern(9 * BLOCK)
    (tmp_path / "f").write_bytes(data)
    with opened(tmp_path / "f", "rb") as file:
        for start in reversed(range(0, len(data), BLOCK)):  # what was not read ahead
            file.seek(start)
            with interrupted(moment, "readinto"):
                file.read(1000)
            file.seek(start)
            assert file.read(1000) == data[start : start + 1000]


# --- closing -----------------------------------------------------------------------------------


def failing(**rule: Any) -> IOQueue:
    """Return a queue of whose writes some fail as on a full drive."""
    return IOQueue("threads", faults=FaultPlan().fail(errno=28, requests=Requests.WRITES, **rule))


@pytest.mark.parametrize("nbytes", [3, BLOCK + 3])
def test_close_raises_once_what_a_write_met_that_no_call_has_asked_for(
    nbytes: int, tmp_path: Path
) -> None:
    path = tmp_path / "f"
    with failing(nth=1) as queue:
        file = opened(path, "wb", queue=queue)
        file.seek(PAGE)
        for start in range(0, nbytes, 1000):
            file.write(pattern(nbytes)[start : start + 1000])
        with pytest.raises(NVMeError) as failed:
            file.close()
        file.close()
        assert file.closed

    error = failed.value
    asked = min(nbytes, BLOCK - PAGE)
    assert (error.errno, error.op, error.path) == (28, "write", str(path))
    assert (error.offset, error.asked) == (PAGE, asked)
    assert error.__context__ is None


def test_close_raises_all_that_has_failed_when_all_has_ended(tmp_path: Path) -> None:
    with failing(every=1) as queue:
        file = opened(tmp_path / "f", "wb", queue=queue)
        for _ in range(5):
            file.write(pattern(BLOCK // 2))
        with pytest.raises(BatchError) as failed:
            file.close()
        assert queue.stats().pending == 0
        file.close()

    assert [error.offset for error in failed.value.errors] == [0, BLOCK, 2 * BLOCK]
    assert failed.value.__context__ is None


def test_a_flush_that_raises_leaves_nothing_for_close_to_raise(tmp_path: Path) -> None:
    with failing(every=1) as queue, opened(tmp_path / "f", "wb", queue=queue) as file:
        for _ in range(5):
            file.write(pattern(BLOCK // 2))
        with pytest.raises(BatchError):
            file.flush()


def test_an_error_of_the_block_is_raised_and_that_of_close_is_noted(tmp_path: Path) -> None:
    error = KeyError("of the block")
    with failing(every=1) as queue:
        file = opened(tmp_path / "f", "wb", queue=queue)

        def use() -> None:
            with file:
                file.write(b"abc")
                raise error

        with pytest.raises(KeyError) as raised:
            use()

    assert raised.value is error
    shown = "".join(traceback.format_exception(error))
    assert f"closing {tmp_path / 'f'} failed as well" in shown or sys.version_info < (3, 11)
    assert "write of 3 B at offset 0" in shown
    assert file.closed


def test_a_file_whose_queue_was_closed_first_says_so_once(tmp_path: Path) -> None:
    with IOQueue("threads") as queue:
        file = opened(tmp_path / "f", "wb", queue=queue)
        read = opened(tmp_path / "f", "rb", queue=queue)
        file.write(b"abc")
    read.close()
    with pytest.raises(ClosedError):
        file.close()
    file.close()
    assert file.closed


INTERRUPTED = """
import os, signal, sys, threading
import deepnvme

call, path = sys.argv[1:]
slow = deepnvme.FaultPlan().delay(delay_us=1_500_000, every=1, requests=deepnvme.Requests.WRITES)
queue = deepnvme.IOQueue("threads", faults=slow)
file = deepnvme.open(path, "wb", block_bytes=65536, queue=queue)
file.write(b"x" * 1000)

def write():
    file.write(b"y" * 100_000)  # it flushes, and waits for the drive

def interrupt():
    # Once the write is under way; its answer is late. The main thread waits for it then.
    while not file._writer._under_way:
        pass
    os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=interrupt).start()
try:
    {"write": write, "flush": file.flush, "close": file.close}[call]()
    print("not interrupted")
except KeyboardInterrupt:
    print("pending:", queue.stats().pending)
block = file._writer._under_way[0][0]
print("block held:", bytes(block[:1000]) == b"x" * 1000)
file.close()
print("closed:", file.closed, os.path.getsize(path))
"""


@pytest.mark.parametrize("call", ["write", "flush", "close"])
def test_ctrl_c_ends_the_wait_and_close_can_go_on(call: str, tmp_path: Path) -> None:
    done = run_program(INTERRUPTED, call, tmp_path / "f", folder=tmp_path)

    assert (output_of(done).splitlines(), done.stderr) == (
        ["pending: 1", "block held: True", "closed: True 1000"],
        "",
    )
    assert (tmp_path / "f").read_bytes() == b"x" * 1000


INTERRUPTED_OFTEN = """
import random, signal, sys, threading, time
import deepnvme

choose, armed, done = random.Random(int(sys.argv[2])), False, threading.Event()
slow = deepnvme.FaultPlan().delay(delay_us=500, every=3)
queue = deepnvme.IOQueue("threads", faults=slow)
file = deepnvme.open(sys.argv[1], "wb", block_bytes=8192, queue=queue)

def handle(*_):
    if armed:
        raise KeyboardInterrupt

def interrupt():
    while not done.wait(random.random() / 500):
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

def insist(call):
    global armed
    while True:
        try:
            try:
                armed = True
                return call()
            finally:
                armed = False
        except KeyboardInterrupt:
            pass

def put(place, data):
    file.seek(place)
    file.write(data)

signal.signal(signal.SIGINT, handle)
threading.Thread(target=interrupt).start()
written = bytearray()
for _ in range(400):
    data = choose.randbytes(choose.choice((10, 3000, 5000, 8192, 20_000)))
    insist(lambda: put(len(written), data))
    written += data
    if choose.random() < 0.1:
        insist(file.flush)
        with open(sys.argv[1], "rb") as plain:
            assert plain.read() == written
insist(file.close)
done.set()
assert file.closed and not queue.stats().pending
print(open(sys.argv[1], "rb").read() == written)
"""


@pytest.mark.parametrize("seed", range(2))
def test_ctrl_c_anywhere_loses_nothing_that_was_written(seed: int, tmp_path: Path) -> None:
    done = run_program(INTERRUPTED_OFTEN, tmp_path / "f", seed, folder=tmp_path)

    assert (output_of(done), done.stderr) == ("True\n", "")


# --- the garbage collector ---------------------------------------------------------------------

COLLECTED_WITH_A_LOCK = """
import faulthandler, gc, sys, threading, time
import deepnvme

faulthandler.dump_traceback_later(60, exit=True)

class Holder:
    pass

def leave_in_a_cycle():
    holder = Holder()
    holder.itself, holder.file = holder, deepnvme.open(sys.argv[1], "wb")
    holder.file.write(b"abc")

gc.disable()
leave_in_a_cycle()
# As where threading.enumerate() or Thread.start() allocates: they hold this lock then, which the
# end of the queue's thread takes.
with threading._active_limbo_lock:
    gc.collect()
while not (written := open(sys.argv[1], "rb").read()):
    time.sleep(0.001)
print(written)
"""


def test_a_file_that_is_collected_where_a_thread_holds_a_lock_is_written_later(
    tmp_path: Path,
) -> None:
    done = run_program(COLLECTED_WITH_A_LOCK, tmp_path / "f", folder=tmp_path)

    assert (output_of(done), done.stderr) == ("b'abc'\n", "")


COLLECTED_ANYWHERE = """
import faulthandler, gc, sys, threading
from pathlib import Path
import deepnvme

faulthandler.dump_traceback_later(100, exit=True)
folder = Path(sys.argv[1])
queue = deepnvme.IOQueue(max_pending=4)
pool = deepnvme.Pool(1 << 20)

class Holder:
    pass

def leave_in_a_cycle(path, queue):
    holder = Holder()
    holder.itself, holder.file = holder, deepnvme.open(path, "wb", block_bytes=4096, queue=queue)
    holder.file.write(b"x" * 10_000)

def work(number):
    with deepnvme.Volume.temporary([folder], 1 << 20, queue=queue) as volume:
        for turn in range(10):
            leave_in_a_cycle(folder / f"{number}-{turn}", queue if turn % 2 else None)
            extents = volume.allocate(8192)
            writes = volume.pwrite(extents, pool.buffer(8192))
            writes[0].add_done_callback(lambda _: [[] for _ in range(10)])
            threading.enumerate()
            assert [write.result() for write in writes] == [8192]
            volume.sync()
            volume.release(extents)

gc.set_threshold(1)
threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_files_that_are_collected_amid_the_work_of_many_threads_are_written(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    done = run_program(COLLECTED_ANYWHERE, tmp_path / "files", folder=tmp_path)

    assert (output_of(done), done.stderr) == ("", "")
    sizes = [path.stat().st_size for path in (tmp_path / "files").iterdir()]
    assert sizes == [10_000] * 60


def leave_in_a_cycle(file: Any) -> None:
    holder = [file]
    holder.append(holder)


def test_collecting_a_file_leaves_its_writes_to_another_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []
    pwrite: Callable[..., Any] = File.pwrite

    def write(*arguments: Any) -> Any:
        threads.append(threading.get_ident())
        return pwrite(*arguments)

    monkeypatch.setattr(File, "pwrite", write)
    file = opened(tmp_path / "f", "wb")
    file.write(b"abc")
    leave_in_a_cycle(file)
    del file
    gc.collect()
    until(lambda: (tmp_path / "f").read_bytes() == b"abc")

    assert len(threads) == 1
    assert threads != [threading.get_ident()]


class WritesAtItsEnd:
    """Wraps a file object, and takes its time to write to it when it is collected."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._itself = self

    def __del__(self) -> None:
        time.sleep(0.2)  # a thread that ended the file meanwhile would have done so
        self._file.write(b"tail")
        self._file.close()


@pytest.mark.parametrize("own_queue", [False, True])
@pytest.mark.parametrize("is_at_work", [False, True])
def test_a_wrapper_that_is_collected_with_its_file_writes_to_it(
    is_at_work: bool, own_queue: bool, tmp_path: Path
) -> None:
    slow = FaultPlan().delay(delay_us=100_000, every=1)
    with IOQueue("threads", faults=slow) as queue:
        if is_at_work:  # the thread that ends what is collected
            other = opened(tmp_path / "other", "wb", queue=queue)
            other.write(b"abc")
            leave_in_a_cycle(other)
            del other
            gc.collect()
        file = opened(tmp_path / "f", "wb", queue=None if own_queue else queue)
        file.write(b"head")
        WritesAtItsEnd(file)
        del file
        gc.collect()

        until(lambda: (tmp_path / "f").read_bytes() == b"headtail")


@pytest.mark.parametrize("kind", ["text", "zip"])
def test_many_wrappers_that_are_collected_lose_nothing(kind: str, tmp_path: Path) -> None:
    shown: list[Any] = []

    def leave(number: int) -> None:
        file = opened(tmp_path / f"{number}", "wb", queue=queue)
        wrapper: Any
        if kind == "text":
            wrapper = io.TextIOWrapper(file)
            wrapper.write("abc")
        else:
            wrapper = zipfile.ZipFile(file, "w")
            wrapper.writestr("name", b"abc")
        leave_in_a_cycle(wrapper)

    with pytest.MonkeyPatch.context() as patch, IOQueue() as queue:
        patch.setattr(sys, "unraisablehook", shown.append)
        patch.setattr(threading, "excepthook", shown.append)
        for number in range(30):
            leave(number)
        gc.collect()

    assert shown == []
    for path in tmp_path.iterdir():
        data = path.read_bytes() if kind == "text" else zipfile.ZipFile(path).read("name")
        assert data == b"abc"


@pytest.mark.parametrize("count", [1, 4])
def test_a_queue_that_closes_lets_collected_files_write_first(count: int, tmp_path: Path) -> None:
    slow = FaultPlan().delay(delay_us=20_000, every=1)
    with IOQueue("threads", faults=slow) as queue:
        for number in range(count):
            file = opened(tmp_path / f"{number}", "wb", queue=queue)
            file.write(b"abc")
            leave_in_a_cycle(file)
            del file
            gc.collect()
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"abc"] * count


def open_files_of(folder: Path) -> int:
    return len({link.resolve() for link in Path("/proc/self/fd").iterdir()} & {*folder.iterdir()})


def test_collected_files_do_not_pile_up_behind_the_thread_that_ends_them(tmp_path: Path) -> None:
    def refuse(*_: Any) -> int:
        raise RuntimeError("no thread is left")

    most = 0
    with IOQueue() as queue, pytest.MonkeyPatch.context() as patch:
        patch.setattr(_thread, "start_new_thread", refuse)  # as slow as a thread can be
        for number in range(60):
            file = opened(tmp_path / f"{number}", "wb", queue=queue)
            file.write(b"abc")
            leave_in_a_cycle(file)
            del file
            gc.collect()
            most = max(most, open_files_of(tmp_path))
    assert 10 < most < 20
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"abc"] * 60


def test_a_callback_opens_a_file_while_collected_ones_wait_for_its_thread(tmp_path: Path) -> None:
    def refuse(*_: Any) -> int:
        raise RuntimeError("no thread is left")

    opened_there: list[Any] = []
    slow = FaultPlan().delay(delay_us=20_000, every=1)
    with IOQueue("threads", faults=slow) as queue, pytest.MonkeyPatch.context() as patch:
        patch.setattr(_thread, "start_new_thread", refuse)
        files = [opened(tmp_path / f"{number}", "wb", queue=queue) for number in range(17)]
        for file in files:
            file.write(b"abc")
            leave_in_a_cycle(file)
        del file, files
        gc.collect()
        patch.undo()

        def open_another(_: object) -> None:
            assert threading.current_thread() is not threading.main_thread()
            opened_there.append(opened(tmp_path / "another", "wb", queue=queue))

        written = queue.open(tmp_path / "last", "w").pwrite(b"abc")
        written.add_done_callback(open_another)
        until(lambda: bool(opened_there))
        opened_there[0].close()


def test_a_collected_file_whose_write_fails_says_so(tmp_path: Path) -> None:
    escaped: list[Any] = []
    plan = FaultPlan().fail(every=1, errno=28, requests=Requests.WRITES)
    with IOQueue("threads", faults=plan) as queue, pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading, "excepthook", escaped.append)
        file = opened(tmp_path / "f", "wb", queue=queue)
        file.write(b"abc")
        leave_in_a_cycle(file)
        del file
        gc.collect()
        until(lambda: bool(escaped))
    assert (escaped[0].exc_value.errno, escaped[0].exc_value.path) == (28, str(tmp_path / "f"))


FAILS_WITH_A_HOOK_THAT_RAISES = """
import faulthandler, gc, sys, threading, time
import deepnvme

faulthandler.dump_traceback_later(30, exit=True)
kind, folder = sys.argv[1:]
shown = []

def hook(arguments):
    shown.append(arguments.exc_type.__name__)
    raise {"error": ValueError, "exit": SystemExit, "interrupt": KeyboardInterrupt}[kind]

threading.excepthook = hook
plan = deepnvme.FaultPlan().fail(nth=1, errno=28, requests=deepnvme.Requests.WRITES)
queue = deepnvme.IOQueue("threads", faults=plan)

def leave_in_a_cycle(name):
    holder = [deepnvme.open(f"{folder}/{name}", "wb", queue=queue)]
    holder[0].write(b"abc")
    holder.append(holder)

leave_in_a_cycle("a")
gc.collect()
while not shown or any(thread.name == "deepnvme-leftovers" for thread in threading.enumerate()):
    time.sleep(0.001)
leave_in_a_cycle("b")
gc.collect()
while not (written := open(f"{folder}/b", "rb").read()):
    time.sleep(0.001)
print(shown[0], written)
"""


@pytest.mark.parametrize("kind", ["error", "exit", "interrupt"])
def test_collected_files_are_written_where_the_hook_for_an_earlier_one_raises(
    kind: str, tmp_path: Path
) -> None:
    done = run_program(FAILS_WITH_A_HOOK_THAT_RAISES, kind, tmp_path, folder=tmp_path)

    assert output_of(done) == "NVMeError b'abc'\n"


CLOSED_BY_A_SIGNAL = """
import _thread, faulthandler, gc, os, signal, sys, threading
import deepnvme

faulthandler.dump_traceback_later(20, exit=True)
slow = deepnvme.FaultPlan().delay(delay_us=300_000, every=1)
queue = deepnvme.IOQueue("threads", faults=slow)

def leave_in_a_cycle():
    holder = [deepnvme.open(sys.argv[1], "wb", queue=queue)]
    holder[0].write(b"abc")
    holder.append(holder)

def refuse(*_):
    raise RuntimeError("no thread is left")

def close(*_):
    print("signal")
    queue.close()
    sys.exit(9)

signal.signal(signal.SIGTERM, close)
leave_in_a_cycle()
# The thread cannot start: the queue's close() ends the file.
start, _thread.start_new_thread = _thread.start_new_thread, refuse
gc.collect()
_thread.start_new_thread = start
exception = deepnvme.IOFuture.exception

def wait(*arguments):
    deepnvme.IOFuture.exception = exception
    signal.raise_signal(signal.SIGTERM)
    return exception(*arguments)

deepnvme.IOFuture.exception = wait
queue.close()
"""


def test_a_signal_handler_closes_the_queue_while_a_collected_file_is_written(
    tmp_path: Path,
) -> None:
    done = run_program(CLOSED_BY_A_SIGNAL, tmp_path / "f", folder=tmp_path)

    assert (done.returncode, done.stdout, done.stderr) == (9, "signal\n", "")
    assert (tmp_path / "f").read_bytes() == b"abc"


def test_a_file_is_written_where_no_thread_could_be_started_for_an_earlier_one(
    tmp_path: Path,
) -> None:
    def leave(name: str) -> None:
        file = opened(tmp_path / name, "wb")
        file.write(b"abc")
        leave_in_a_cycle(file)

    def refuse(*_: Any) -> int:
        raise MemoryError

    leave("a")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "unraisablehook", lambda _: None)
        patch.setattr(_thread, "start_new_thread", refuse)
        gc.collect()
    leave("b")
    gc.collect()

    until(lambda: [(tmp_path / name).read_bytes() for name in "ab"] == [b"abc"] * 2)


def test_a_file_that_is_dropped_is_written_at_once_as_a_file_of_python_is(tmp_path: Path) -> None:
    opened(tmp_path / "f", "wb").write(b"abc")

    assert (tmp_path / "f").read_bytes() == b"abc"


def test_a_dropped_file_whose_write_fails_says_so(tmp_path: Path) -> None:
    escaped: list[Any] = []
    plan = FaultPlan().fail(every=1, errno=28, requests=Requests.WRITES)
    with pytest.MonkeyPatch.context() as patch, IOQueue("threads", faults=plan) as queue:
        patch.setattr(sys, "unraisablehook", escaped.append)
        opened(tmp_path / "f", "wb", queue=queue).write(b"abc")
    assert [shown.exc_value.errno for shown in escaped] == [28]


COLLECTED_AT_THE_END = """
import gc, os, sys
import deepnvme

slow = deepnvme.FaultPlan().delay(delay_us=300_000, every=1)
queue = deepnvme.IOQueue("threads", faults=slow)
for name in "abc":
    holder = [deepnvme.open(name, "wb", queue=queue)]
    holder[0].write(b"abc")
    holder.append(holder)
del holder
gc.collect()
if os.fork() == 0:
    sys.exit()
print(os.wait()[1])
"""


def test_collected_files_are_written_before_the_program_ends(tmp_path: Path) -> None:
    ignoring = ["-W", "ignore::DeprecationWarning"]  # newer Pythons warn of any fork with threads
    done = run_program(COLLECTED_AT_THE_END, folder=tmp_path, python=ignoring)

    assert (output_of(done), done.stderr) == ("0\n", "")
    assert [(tmp_path / name).read_bytes() for name in "abc"] == [b"abc"] * 3


# --- the end of the program --------------------------------------------------------------------

NEVER_CLOSED = """
import os, sys
import deepnvme

whose, path = sys.argv[1:]
queue = deepnvme.IOQueue() if whose == "given" else None
file = deepnvme.open(path, "wb", queue=queue)
file.write(b"abc")
if whose == "forked" and os.fork() == 0:
    sys.exit()
if whose == "forked":
    os.wait()
file.write(b"def")
"""


@pytest.mark.parametrize("whose", ["its own", "given", "forked"])
def test_a_file_that_is_open_when_the_program_ends_is_written(whose: str, tmp_path: Path) -> None:
    # The development mode also shows errors of `__del__` methods.
    done = run_program(NEVER_CLOSED, whose, tmp_path / "f", folder=tmp_path, python=("-X", "dev"))

    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "f").read_bytes() == b"abcdef"


FAILS_AT_THE_END = """
import sys
import deepnvme

plan = deepnvme.FaultPlan().fail(every=1, requests=deepnvme.Requests.WRITES)
file = deepnvme.open(sys.argv[1], "wb", queue=deepnvme.IOQueue("threads", faults=plan))
file.write(b"abc")
"""


def test_a_write_that_fails_when_the_program_ends_is_shown(tmp_path: Path) -> None:
    done = run_program(FAILS_AT_THE_END, tmp_path / "f", folder=tmp_path)

    assert "write of 3 B at offset 0" in done.stderr


FORKED = """
import os, sys
import deepnvme

file = deepnvme.open(sys.argv[1], "r+b")
read = deepnvme.open(sys.argv[1])
read.read(1)
file.write(b"abc")
if os.fork() == 0:
    for use in (lambda: read.read(1), read.readline, file.read, lambda: file.write(b"x"), file.tell, lambda: file.seek(0), file.sync):
        try:
            use()
        except deepnvme.ForkedError:
            print("refused")
    file.flush()
    file.close()
    sys.exit()
print(os.wait()[1])
file.close()
"""


def test_a_forked_child_is_refused_its_parents_file_object(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"-" * 5)
    printed = output_of(run_program(FORKED, tmp_path / "f", folder=tmp_path))

    assert printed.split() == ["refused"] * 7 + ["0"]
    assert (tmp_path / "f").read_bytes() == b"abc--"


def test_empty_arrays_of_any_shape_are_written_and_read(tmp_path: Path) -> None:
    with opened(tmp_path / "f", "wb") as file:
        assert file.write(np.empty((0, 3))) == 0
        file.write(b"content")
    with opened(tmp_path / "f", "rb") as file:
        assert file.readinto(np.empty((2, 0))) == 0
        assert file.read() == b"content"


def test_a_size_that_is_no_number_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path / "f", "ab") as file:
        file.write(b"content")
        with pytest.raises(TypeError):
            file.truncate("1MiB")
        file.write(b" and more")
    assert (tmp_path / "f").read_bytes() == b"content and more"
