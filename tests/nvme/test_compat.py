"""`deepnvme.compat`: the calls of DeepSpeed's documentation do what it says, and raise where
DeepNVMe lies or aborts.

What DeepNVMe 0.19.8 does instead was observed; docs/migrate-from-deepnvme.md lists it.
"""

from __future__ import annotations

import errno
import gc
import inspect
import os
import re
import resource
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import psutil
import pytest

from deepnvme import (
    BatchError,
    ClosedError,
    FaultPlan,
    IOQueue,
    NVMeError,
    Requests,
    ShortReadError,
    compat,
)
from deepnvme.compat import AsyncIOBuilder, PinMemoryBuilder, aio_handle
from deepnvme.machine.backends import BACKEND_VARIABLE
from support.nvme_disks import DiskUnavailableError, tmpfs
from support.nvme_io import assert_same, backend_or_skip, pattern
from support.nvme_programs import output_of, run_program

MIB = 1 << 20
PAGE = (Path(__file__).resolve().parents[2] / "docs/migrate-from-deepnvme.md").read_text()


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


# Handles know queues only, of which test_conformance shows that all backends do the same.
@pytest.fixture(
    params=[
        "uring",
        "threads",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("liburing", "aio")),
    ]
)
def disk_backend(request: pytest.FixtureRequest) -> str:
    return backend_or_skip(request.param)


@pytest.fixture
def handle(disk_backend: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[aio_handle]:
    """Yield a handle made as the documentation makes it."""
    monkeypatch.setenv(BACKEND_VARIABLE, disk_backend)
    with closing(AsyncIOBuilder().load().aio_handle()) as handle:
        yield handle


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Callable[[FaultPlan], aio_handle]:
    """Return what makes a handle whose requests meet these faults."""

    def make(faults: FaultPlan) -> aio_handle:
        monkeypatch.setattr(compat, "IOQueue", partial(IOQueue, faults=faults))
        return aio_handle(block_size=64 << 10)

    return make


def array(nbytes: int, seed: int = 1) -> Any:
    return np.frombuffer(pattern(nbytes, seed), np.uint8).copy()


# --- the calls of DeepSpeed's documentation -------------------------------------------------------


def test_a_handle_has_the_methods_that_completion_shows() -> None:
    moving = {
        "async_pread",
        "async_pwrite",
        "sync_pread",
        "sync_pwrite",
        "pread",
        "pwrite",
        "read",
        "write",
        "wait",
    }
    locking = {"new_cpu_locked_tensor", "free_cpu_locked_tensor", "is_pinned"}
    telling = {f"get_{name}" for name in (*inspect.signature(aio_handle).parameters, "alignment")}

    assert {name for name in dir(aio_handle) if not name.startswith("_")} == {
        *moving,
        *locking,
        *telling,
        "close",
    }


def test_the_module_that_is_loaded_has_the_functions_and_handles() -> None:
    module = AsyncIOBuilder().load(verbose=False)

    assert isinstance(module, ModuleType)
    assert all(
        hasattr(module, name)
        for name in ("aio_handle", "aio_read", "aio_write", "deepspeed_memcpy")
    )
    assert PinMemoryBuilder().load() is module


def test_the_builders_can_be_asked_whether_they_work_here() -> None:
    assert AsyncIOBuilder().is_compatible(verbose=True)
    assert PinMemoryBuilder().is_compatible()


def test_the_parameters_have_the_documented_order_and_defaults() -> None:
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(aio_handle).parameters.items()
    }

    assert list(defaults.items()) == [
        ("block_size", 1048576),
        ("queue_depth", 128),
        ("single_submit", False),
        ("overlap_events", False),
        ("intra_op_parallelism", 1),
    ]


def test_the_settings_are_told_as_they_were_given() -> None:
    with closing(aio_handle(1024, 2, True, True, 3)) as handle:
        assert handle.get_block_size() == 1024
        assert handle.get_queue_depth() == 2
        assert handle.get_single_submit() is True
        assert handle.get_overlap_events() is True
        assert handle.get_intra_op_parallelism() == 3
        assert handle.get_alignment() == 3 * 512


def test_a_blocking_write_makes_the_file(tmp_path: Path, handle: aio_handle, torch: Any) -> None:
    tensor = torch.full((MIB,), 7, dtype=torch.uint8)

    assert handle.sync_pwrite(tensor, str(tmp_path / "file")) == 1

    assert_same((tmp_path / "file").read_bytes(), b"\7" * MIB)


def test_a_blocking_read_fills_the_tensor(tmp_path: Path, handle: aio_handle, torch: Any) -> None:
    (tmp_path / "file").write_bytes(b"\7" * MIB)
    tensor = torch.empty(MIB, dtype=torch.uint8)

    assert handle.sync_pread(tensor, str(tmp_path / "file")) == 1

    assert (tensor == 7).all()


def test_a_write_that_does_not_block_has_ended_after_wait(
    tmp_path: Path, handle: aio_handle, torch: Any
) -> None:
    tensor = torch.arange(100_000, dtype=torch.float32)

    assert handle.async_pwrite(tensor, str(tmp_path / "file")) == 0
    assert handle.wait() == 1

    assert_same((tmp_path / "file").read_bytes(), tensor.numpy().tobytes())


def test_one_wait_is_for_all_that_was_submitted_back_to_back(
    tmp_path: Path, handle: aio_handle
) -> None:
    arrays = [array(100_000 + number, number) for number in range(5)]

    assert [handle.async_pwrite(one, str(tmp_path / f"{n}")) for n, one in enumerate(arrays)] == [
        0
    ] * 5
    assert handle.wait() == 5

    assert [(tmp_path / f"{n}").read_bytes() for n in range(5)] == [one.tobytes() for one in arrays]


def test_parallelism_of_one_operation_is_accepted(tmp_path: Path, torch: Any) -> None:
    tensor = torch.full((MIB,), 7, dtype=torch.uint8)
    with closing(AsyncIOBuilder().load().aio_handle(intra_op_parallelism=4)) as handle:
        handle.async_pwrite(tensor, str(tmp_path / "file"))
        assert handle.wait() == 1

    assert (tmp_path / "file").stat().st_size == MIB


@pytest.mark.parametrize(
    "settings",
    [
        {"block_size": 1048576, "queue_depth": 32, "single_submit": False, "overlap_events": True,
         "intra_op_parallelism": 8},
        {"block_size": 8 * MIB, "queue_depth": 8},
        {"block_size": 1024, "queue_depth": 2, "single_submit": True},
        {"block_size": 100_000, "queue_depth": 1},
        {"block_size": 1 << 40, "queue_depth": 1 << 20},
    ],
)  # fmt: skip
def test_handles_of_any_settings_move_bytes(tmp_path: Path, settings: dict[str, Any]) -> None:
    data, back = array(300_000), np.zeros(300_000, np.uint8)
    with closing(aio_handle(**settings)) as handle:
        handle.sync_pwrite(data, str(tmp_path / "file"))
        handle.sync_pread(back, str(tmp_path / "file"))

    assert_same(back, data)


def test_pinning_without_a_handle(torch: Any) -> None:
    pin = PinMemoryBuilder().load().pin_handle()

    tensor = pin.new_cpu_locked_tensor(1024, torch.empty(0, dtype=torch.uint8))

    assert (tuple(tensor.shape), tensor.dtype) == ((1024,), torch.uint8)
    assert pin.is_pinned(tensor)
    assert pin.free_cpu_locked_tensor(tensor) is True


def test_a_locked_tensor_has_the_elements_and_the_type_asked_for(
    handle: aio_handle, torch: Any
) -> None:
    tensor = handle.new_cpu_locked_tensor(1024, torch.Tensor())

    assert (tuple(tensor.shape), tensor.dtype) == ((1024,), torch.float32)


@pytest.mark.parametrize("by_descriptor", [False, True])
@pytest.mark.parametrize("parts", [[1024, 1024, 2048], [1, 4096, 513]])
def test_a_file_is_written_in_parts(
    tmp_path: Path, handle: aio_handle, parts: list[int], by_descriptor: bool
) -> None:
    path, data, start = tmp_path / "file", array(sum(parts)), 0
    for part in parts:
        buffer = data[start : start + part]
        if by_descriptor:
            fd = os.open(path, os.O_CREAT | os.O_WRONLY, 0o600)
            assert handle.async_pwrite(buffer=buffer, fd=fd, file_offset=start) == 0
            os.close(fd)
        else:
            assert handle.async_pwrite(buffer=buffer, filename=str(path), file_offset=start) == 0
        assert handle.wait() == 1
        start += part
        assert_same(path.read_bytes(), data[:start])


def test_a_descriptor_is_taken_by_position(tmp_path: Path, handle: aio_handle) -> None:
    with open(tmp_path / "file", "wb") as file:
        handle.async_pwrite(array(5000), file.fileno(), 100)
        assert handle.wait() == 1

    assert (tmp_path / "file").stat().st_size == 5100


def test_a_file_is_read_in_parts(tmp_path: Path, handle: aio_handle) -> None:
    data = pattern(10_000, seed=1)
    (tmp_path / "file").write_bytes(data)
    for start, nbytes in ((0, 1024), (1024, 2048), (9000, 1000), (17, 1)):
        part = np.empty(nbytes, np.uint8)
        assert handle.sync_pread(part, str(tmp_path / "file"), start) == 1
        assert_same(part, data[start : start + nbytes])


def test_pread_and_pwrite_block_or_not_as_told(tmp_path: Path, handle: aio_handle) -> None:
    path, data, back = str(tmp_path / "file"), array(10_000), np.zeros(10_000, np.uint8)

    assert handle.pwrite(data, path, False, True) == 0
    assert handle.wait() == 1
    assert handle.pread(back, path, False, False) == 1
    assert handle.pread(back[:10], path, False, True, 10) == 0
    assert handle.wait() == 1

    assert_same(back, np.concatenate([data[10:20], data[10:]]))


def test_reads_and_writes_without_the_queue_of_the_handle_return_zero(
    tmp_path: Path, handle: aio_handle
) -> None:
    path, data, back = str(tmp_path / "file"), array(10_000), np.zeros(10_000, np.uint8)
    handle.async_pwrite(data, str(tmp_path / "other"))

    assert handle.write(data, path, False) == 0
    assert handle.read(back, path, False) == 0

    assert_same(back, data)
    assert handle.wait() == 1


def test_the_functions_of_the_module_move_whole_files(tmp_path: Path) -> None:
    path, data, back = str(tmp_path / "file"), array(100_001), np.zeros(100_001, np.uint8)

    assert compat.aio_write(data, path, MIB, 8, False, True, True) == 0
    assert compat.aio_read(back, path, MIB, 8, False, True, True) == 0

    assert_same(back, data)


def test_memory_is_copied(torch: Any) -> None:
    tensor, target = torch.arange(10, dtype=torch.float32), torch.zeros(10)

    assert compat.deepspeed_memcpy(target, tensor) == 0

    assert torch.equal(target, tensor)


@pytest.mark.parametrize("make", [str, os.fsencode, Path], ids=["str", "bytes", "path"])
def test_a_file_name_may_be_text_bytes_or_a_path(
    tmp_path: Path, handle: aio_handle, make: Callable[[Any], Any]
) -> None:
    assert handle.sync_pwrite(array(10), make(str(tmp_path / "file"))) == 1
    assert (tmp_path / "file").stat().st_size == 10


def test_nothing_is_printed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with closing(aio_handle()) as handle:
        handle.write(array(10), tmp_path / "file", True)
        handle.pread(array(10), tmp_path / "file", True, False)
        with pytest.raises(FileNotFoundError):
            handle.sync_pread(array(10), tmp_path / "missing")

    assert capfd.readouterr() == ("", "")


# --- what is waited for ---------------------------------------------------------------------------


def test_a_blocking_call_waits_for_all_that_is_pending_and_counts_it(
    tmp_path: Path, handle: aio_handle
) -> None:
    back = np.zeros(100_000, np.uint8)
    (tmp_path / "file").write_bytes(array(100_000).tobytes())
    handle.async_pread(back, str(tmp_path / "file"))
    handle.async_pwrite(array(10), str(tmp_path / "1"))

    assert handle.sync_pwrite(array(10), str(tmp_path / "2")) == 3

    assert_same(back, array(100_000))
    assert handle.wait() == 0


def test_wait_with_nothing_pending_returns_zero(handle: aio_handle) -> None:
    """There: the program aborts."""
    assert [handle.wait(), handle.wait()] == [0, 0]


def test_wait_raises_the_one_error_after_all_have_ended(
    tmp_path: Path, faulty: Callable[[FaultPlan], aio_handle]
) -> None:
    """There: success."""
    data = array(1000)
    with closing(faulty(FaultPlan().fail(nth=2).delay(nth=4, delay_us=100_000))) as handle:
        for number in range(4):
            handle.async_pwrite(data, str(tmp_path / f"{number}"))
        with pytest.raises(NVMeError) as caught:
            handle.wait()
        assert_same((tmp_path / "3").read_bytes(), data)
        assert (caught.value.errno, caught.value.path) == (errno.EIO, str(tmp_path / "1"))
        assert handle.wait() == 0
        assert handle.sync_pwrite(data, str(tmp_path / "1")) == 1


def test_wait_has_every_error_where_several_fail(
    tmp_path: Path, faulty: Callable[[FaultPlan], aio_handle]
) -> None:
    with closing(faulty(FaultPlan().fail(every=2))) as handle:
        for number in range(4):
            handle.async_pwrite(array(1000), str(tmp_path / f"{number}"))
        with pytest.raises(BatchError) as caught:
            handle.wait()

    assert [Path(error.path).name for error in caught.value.errors] == ["1", "3"]


def test_threads_share_a_handle(tmp_path: Path, handle: aio_handle) -> None:
    waited: list[int] = []

    def work(number: int) -> None:
        for turn in range(10):
            handle.async_pwrite(array(1000), str(tmp_path / f"{number}-{turn}"))
            waited.append(handle.wait())

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sum(waited) + handle.wait() == 40
    assert len(list(tmp_path.iterdir())) == 40


def test_many_handles_work_at_once(tmp_path: Path) -> None:
    """There: with fs.aio-max-nr used up, a handle is made all the same and its first operation
    aborts.
    """
    handles = [aio_handle(block_size=64 << 10, queue_depth=100) for _ in range(24)]
    for number, handle in enumerate(handles):
        handle.async_pwrite(array(50_000, number), str(tmp_path / f"{number}"))

    assert [handle.wait() for handle in handles] == [1] * 24

    for number, handle in enumerate(handles):
        assert_same((tmp_path / f"{number}").read_bytes(), array(50_000, number))
        handle.close()


# --- success that was none ------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [1, 513, 1000, 3 * 1000])
@pytest.mark.parametrize("offset", [None, 0, 100])
def test_any_length_at_any_offset_is_written_whole(
    tmp_path: Path, handle: aio_handle, nbytes: int, offset: int | None
) -> None:
    """There: success, with nothing or a part in the file."""
    assert handle.sync_pwrite(array(nbytes), str(tmp_path / "file"), offset) == 1
    assert (tmp_path / "file").read_bytes() == bytes(offset or 0) + array(nbytes).tobytes()


def test_a_length_need_not_divide_among_the_threads(tmp_path: Path) -> None:
    """There: -1 and a line on standard output, or a share that is lost."""
    with closing(aio_handle(intra_op_parallelism=3)) as handle:
        assert handle.sync_pwrite(array(1000), str(tmp_path / "file")) == 1

    assert_same((tmp_path / "file").read_bytes(), array(1000))


def test_an_empty_buffer_makes_an_empty_file(tmp_path: Path, handle: aio_handle) -> None:
    assert handle.sync_pwrite(np.empty(0, np.uint8), str(tmp_path / "file")) == 1
    assert (tmp_path / "file").read_bytes() == b""


def test_a_full_disk_is_told(tmp_path: Path, handle: aio_handle) -> None:
    """There: success, with a part in the file."""
    try:
        with tmpfs(tmp_path, MIB) as folder, pytest.raises(NVMeError) as caught:
            handle.sync_pwrite(np.ones(2 * MIB, np.uint8), str(folder / "file"))
    except DiskUnavailableError as refusal:
        pytest.skip(str(refusal))
    assert caught.value.errno == errno.ENOSPC


TOO_LARGE = """
import resource, sys
from deepnvme.compat import aio_handle

resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
handle = aio_handle()
handle.async_pwrite(bytes(2 << 20), sys.argv[1])
try:
    handle.wait()
except OSError as error:
    print(error.errno)
"""


def test_a_limit_on_file_sizes_is_told(tmp_path: Path) -> None:
    """There: success, with the file cut at the limit."""
    told = output_of(run_program(TOO_LARGE, tmp_path / "file", folder=tmp_path))
    assert int(told) == errno.EFBIG


def test_a_read_that_the_drive_fails_is_told(
    tmp_path: Path, faulty: Callable[[FaultPlan], aio_handle]
) -> None:
    """There: success, with old bytes among those read."""
    (tmp_path / "file").write_bytes(bytes(200_000))
    with (
        closing(faulty(FaultPlan().fail(nth=2, requests=Requests.READS))) as handle,
        pytest.raises(NVMeError),
    ):
        handle.sync_pread(np.ones(200_000, np.uint8), str(tmp_path / "file"))


def test_what_the_kernel_cuts_short_is_completed(
    tmp_path: Path, faulty: Callable[[FaultPlan], aio_handle]
) -> None:
    """There: what is missing stays missing."""
    data, back = array(300_001), np.zeros(300_001, np.uint8)
    with closing(faulty(FaultPlan().shorten(every=2))) as handle:
        assert handle.sync_pwrite(data, str(tmp_path / "file")) == 1
        assert handle.sync_pread(back, str(tmp_path / "file")) == 1
    assert_same(back, data)


def test_reading_into_a_tensor_that_is_not_contiguous_is_refused(
    tmp_path: Path, handle: aio_handle, torch: Any
) -> None:
    """There: success, the tensor unchanged."""
    (tmp_path / "file").write_bytes(b"\1" * 4096)
    tensor = torch.zeros(64, 64, dtype=torch.uint8)

    with pytest.raises(ValueError, match="not contiguous"):
        handle.sync_pread(tensor.t(), str(tmp_path / "file"))

    assert not tensor.any()
    assert handle.wait() == 0


def test_a_refused_write_leaves_the_file_as_it_was(tmp_path: Path, handle: aio_handle) -> None:
    (tmp_path / "file").write_bytes(pattern(10_000, seed=1))

    with pytest.raises(ValueError, match="not contiguous"):
        handle.sync_pwrite(np.zeros((8, 16), np.uint8)[:, :8], str(tmp_path / "file"))

    assert (tmp_path / "file").read_bytes() == pattern(10_000, seed=1)
    assert handle.wait() == 0


def test_a_tensor_of_two_dimensions_that_is_not_locked_is_moved(
    tmp_path: Path, handle: aio_handle, torch: Any
) -> None:
    """There: RuntimeError about shapes."""
    tensor, back = (
        torch.arange(600, dtype=torch.bfloat16).reshape(20, 30),
        torch.zeros(20, 30, dtype=torch.bfloat16),
    )
    handle.sync_pwrite(tensor, str(tmp_path / "file"))
    handle.sync_pread(back, str(tmp_path / "file"))

    assert torch.equal(back, tensor)


def test_a_shorter_rewrite_leaves_no_tail(tmp_path: Path, handle: aio_handle) -> None:
    """There: the end of the longer file stays."""
    for data in (array(100_000, 1), array(10, 2)):
        handle.sync_pwrite(data, str(tmp_path / "file"))
    assert (tmp_path / "file").read_bytes() == array(10, 2).tobytes()


@pytest.mark.parametrize("offset", [0, 50])
def test_a_write_at_an_offset_keeps_what_lies_around(
    tmp_path: Path, handle: aio_handle, offset: int
) -> None:
    (tmp_path / "file").write_bytes(bytes(1000))
    handle.sync_pwrite(array(10), str(tmp_path / "file"), offset)

    expected = bytearray(1000)
    expected[offset : offset + 10] = array(10).tobytes()
    assert (tmp_path / "file").read_bytes() == expected


def test_the_file_is_cut_before_what_is_submitted_next(tmp_path: Path, handle: aio_handle) -> None:
    (tmp_path / "file").write_bytes(bytes(100_000))
    handle.async_pwrite(array(4096, 1), str(tmp_path / "file"))
    handle.async_pwrite(array(5000, 2), str(tmp_path / "file"), 4096)
    handle.wait()

    assert_same((tmp_path / "file").read_bytes(), np.concatenate([array(4096, 1), array(5000, 2)]))


def test_a_new_file_is_private(tmp_path: Path, handle: aio_handle) -> None:
    handle.sync_pwrite(array(10), str(tmp_path / "file"))
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600


def test_a_dangling_link_is_told(tmp_path: Path, handle: aio_handle) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "missing")
    with pytest.raises(FileNotFoundError):
        handle.sync_pwrite(array(10), str(tmp_path / "link"))


# --- aborts of the whole program, and -1 ----------------------------------------------------------


def test_a_missing_file_is_told(tmp_path: Path, handle: aio_handle) -> None:
    """There: -1."""
    for call in (handle.sync_pread, handle.async_pread):
        with pytest.raises(FileNotFoundError, match="missing"):
            call(array(10), str(tmp_path / "missing"))
    with pytest.raises(FileNotFoundError):
        handle.async_pwrite(array(10), str(tmp_path / "missing" / "file"))
    assert handle.wait() == 0


def test_a_file_that_is_too_short_is_told(tmp_path: Path, handle: aio_handle) -> None:
    """There: the program aborts."""
    (tmp_path / "file").write_bytes(bytes(1000))
    with pytest.raises(ShortReadError, match="after 1000 B"):
        handle.sync_pread(array(2000), str(tmp_path / "file"))
    with pytest.raises(ShortReadError):
        handle.sync_pread(array(1), str(tmp_path / "file"), 1 << 30)
    assert handle.async_pread(array(2000), str(tmp_path / "file")) == 0
    with pytest.raises(ShortReadError):
        handle.wait()


def test_reading_a_whole_file_into_less_is_refused_unless_a_part_is_asked_for(
    tmp_path: Path, handle: aio_handle
) -> None:
    """There: the program aborts for any other size, with an offset too."""
    (tmp_path / "file").write_bytes(pattern(1000, seed=1))
    part = np.zeros(10, np.uint8)

    with pytest.raises(ValueError, match="1000 B, more than the 10 B"):
        handle.read(part, str(tmp_path / "file"), False)
    with pytest.raises(ShortReadError):
        handle.read(array(2000), str(tmp_path / "file"), False)
    assert handle.read(part, str(tmp_path / "file"), False, 20) == 0

    assert_same(part, pattern(1000, seed=1)[20:30])


@pytest.mark.parametrize("name", ["block_size", "queue_depth", "intra_op_parallelism"])
def test_settings_below_one_are_refused(name: str) -> None:
    settings: Any = {name: 0}
    with pytest.raises(ValueError, match=f"{name} must be 1 or more, got 0"):
        aio_handle(**settings)


@pytest.mark.parametrize("thing", [None, 7, "text"])
def test_what_has_no_memory_is_refused(tmp_path: Path, handle: aio_handle, thing: Any) -> None:
    (tmp_path / "file").write_bytes(b"some")
    with pytest.raises(TypeError):
        handle.sync_pwrite(thing, str(tmp_path / "file"))
    with pytest.raises(TypeError):
        handle.sync_pread(thing, str(tmp_path / "file"))
    assert (tmp_path / "file").read_bytes() == b"some"


def test_a_write_to_no_file_is_refused(handle: aio_handle) -> None:
    untyped: Any = handle
    with pytest.raises(TypeError, match="a filename or an fd"):
        untyped.async_pwrite(array(10))
    with pytest.raises(OSError, match="/proc/self/fd/1000000"):
        handle.async_pwrite(array(10), 1_000_000)


def test_copies_between_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="10 B to copy to and 11 B to copy"):
        compat.deepspeed_memcpy(array(10), array(11))


DROPPED = """
import sys
from deepnvme.compat import aio_handle

handle = aio_handle()
data = bytes(range(256)) * 4096
for number in range(16):
    handle.async_pwrite(data, f"{sys.argv[1]}{number}")
if sys.argv[2] == "dropped":
    del handle
"""


@pytest.mark.parametrize("end", ["dropped", "left to the end of the program"])
def test_a_handle_without_wait_ends_its_writes(tmp_path: Path, end: str) -> None:
    """There: the program aborts."""
    done = run_program(DROPPED, tmp_path / "file", end, folder=tmp_path)

    output_of(done)
    assert done.stderr == ""
    assert [(tmp_path / f"file{number}").stat().st_size for number in range(16)] == [MIB] * 16


def test_a_dropped_handle_warns_of_what_failed(
    tmp_path: Path, faulty: Callable[[FaultPlan], aio_handle]
) -> None:
    held = [faulty(FaultPlan().fail(nth=2))]
    for number in range(3):
        held[0].async_pwrite(array(10), str(tmp_path / f"{number}"))

    with pytest.warns(
        RuntimeWarning, match=r"dropped without wait\(\) and 1 of its operations failed"
    ):
        held.clear()


def test_a_handle_that_was_waited_for_is_dropped_in_silence(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        aio_handle().sync_pwrite(array(10), str(tmp_path / "file"))
        gc.collect()


def test_closing_raises_what_failed_and_frees_all_the_same(
    tmp_path: Path, faulty: Callable[[FaultPlan], aio_handle]
) -> None:
    handle = faulty(FaultPlan().fail(every=1))
    handle.async_pwrite(array(10), str(tmp_path / "file"))

    with pytest.raises(NVMeError):
        handle.close()

    assert handle.queue.closed
    handle.close()
    with pytest.raises(ClosedError):
        handle.sync_pwrite(array(10), str(tmp_path / "file"))


def test_a_buffer_may_be_forgotten_while_it_is_written(tmp_path: Path, handle: aio_handle) -> None:
    for number in range(8):
        handle.async_pwrite(array(MIB, number), str(tmp_path / f"{number}"))
    gc.collect()

    assert handle.wait() == 8
    assert_same((tmp_path / "7").read_bytes(), array(MIB, 7))


FORKED = """
import os, sys
from deepnvme.compat import aio_handle

handle = aio_handle()
handle.async_pwrite(b"x" * 1000, sys.argv[1])
child = os.fork()
if child == 0:
    try:
        handle.sync_pwrite(b"y", sys.argv[1])
    except RuntimeError as error:
        print(type(error).__name__, flush=True)
    del handle
else:
    print(os.waitpid(child, 0)[1], handle.wait())
"""


def test_a_forked_child_is_told_that_the_handle_is_its_parents(tmp_path: Path) -> None:
    done = run_program(FORKED, tmp_path / "file", folder=tmp_path)

    assert output_of(done).split() == ["ForkedError", "0", "1"]
    assert done.stderr == ""


WORKING = """
import sys
from deepnvme.compat import AsyncIOBuilder

handle = AsyncIOBuilder().load().aio_handle()
for number in range(10):
    handle.async_pwrite(bytes([number]) * 1000, sys.argv[1], number * 1000)
assert handle.wait() == 10
"""


def test_a_program_run_without_asserts_still_writes(tmp_path: Path) -> None:
    """There: DeepSpeed's own calls stand in assert statements.

    Here, what is dropped unwaited is ended.
    """
    output_of(run_program(WORKING, tmp_path / "file", folder=tmp_path, python=["-O"]))
    assert (tmp_path / "file").read_bytes() == b"".join(
        bytes([number]) * 1000 for number in range(10)
    )


# --- validation -----------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [0, 1, 10_000, 9 * MIB])
def test_what_is_on_the_drive_passes_validation(
    tmp_path: Path, handle: aio_handle, nbytes: int
) -> None:
    path, data = str(tmp_path / "file"), array(nbytes)

    assert handle.pwrite(data, path, True, False) == 1
    assert handle.pread(np.empty_like(data), path, True, False) == 1
    assert handle.write(data, path, True) == 0
    assert handle.read(np.empty_like(data), path, True) == 0


@pytest.mark.parametrize("dtype", ["bfloat16", "bool", "complex64"])
def test_tensors_of_any_type_and_shape_pass_validation(
    tmp_path: Path, handle: aio_handle, torch: Any, dtype: str
) -> None:
    for shape in ((), (0, 3), (5, 7)):
        tensor = torch.ones(shape, dtype=getattr(torch, dtype))
        assert handle.pwrite(tensor, str(tmp_path / "file"), True, False) == 1


def test_a_part_of_a_file_is_validated_as_a_part(tmp_path: Path, handle: aio_handle) -> None:
    """There: said to have failed, and success all the same."""
    (tmp_path / "file").write_bytes(pattern(10_000, seed=1))

    assert handle.pread(np.empty(100, np.uint8), str(tmp_path / "file"), True, False, 9000) == 1
    assert handle.pwrite(array(100), str(tmp_path / "file"), True, False, 9950) == 1


def test_a_difference_found_by_validation_is_an_error_at_its_byte(
    tmp_path: Path, handle: aio_handle
) -> None:
    """There: a line on standard output, and success."""
    (tmp_path / "file").write_bytes(bytes(10_000))
    data = np.zeros(9 * MIB, np.uint8)
    handle.pwrite(data, str(tmp_path / "file"), True, True, 100)
    handle._pending[0].future.result()
    data[MIB * 8 + 5] = 1

    with pytest.raises(NVMeError, match=f"at offset {MIB * 8 + 105}") as caught:
        handle.wait()

    assert (caught.value.op, caught.value.offset, caught.value.done) == (
        "validate",
        100,
        MIB * 8 + 5,
    )
    assert handle.wait() == 0


def test_a_file_cut_behind_our_back_fails_validation(tmp_path: Path, handle: aio_handle) -> None:
    handle.pwrite(array(10_000), str(tmp_path / "file"), True, True)
    handle._pending[0].future.result()
    os.truncate(tmp_path / "file", 4000)

    # The second, if the write was over before its file was opened to be read: the queue knows its
    # length then.
    with pytest.raises(
        NVMeError, match=r"(differs from the buffer|found the end of the file after) 4000 B"
    ):
        handle.wait()


# --- locked tensors -------------------------------------------------------------------------------


def resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


def test_a_locked_tensor_is_moved_without_a_copy(
    tmp_path: Path, handle: aio_handle, torch: Any
) -> None:
    tensor = handle.new_cpu_locked_tensor(MIB, torch.empty(0, dtype=torch.uint8))
    tensor.fill_(7)
    handle.sync_pwrite(tensor, str(tmp_path / "file"))
    handle.sync_pread(tensor, str(tmp_path / "file"))

    [drive] = handle.queue.stats().drives.values()
    assert drive.bounced_bytes == 0
    assert_same((tmp_path / "file").read_bytes(), b"\7" * MIB)


def test_any_handle_knows_a_locked_tensor_and_its_parts(handle: aio_handle, torch: Any) -> None:
    tensor = handle.new_cpu_locked_tensor(1000, torch.empty(0))
    with closing(aio_handle()) as other:
        assert other.is_pinned(tensor)
        assert other.is_pinned(tensor[10:20].view(2, 5))
        assert other.is_pinned(tensor.numpy())
        assert not other.is_pinned(torch.empty(1000))
        assert not other.is_pinned(None)
        assert other.free_cpu_locked_tensor(tensor)
    assert not handle.is_pinned(tensor)


def test_freeing_a_locked_tensor_gives_its_memory_back_and_leaves_it_empty(
    handle: aio_handle, torch: Any
) -> None:
    """There: the tensor still points to memory that is another's."""
    tensor = handle.new_cpu_locked_tensor(64 * MIB, torch.empty(0, dtype=torch.uint8))
    before = resident_bytes()

    assert handle.free_cpu_locked_tensor(tensor) is True

    assert resident_bytes() < before - 48 * MIB
    assert tensor.numel() == 0


def test_memory_that_a_view_uses_is_kept_for_it(handle: aio_handle, torch: Any) -> None:
    tensor = handle.new_cpu_locked_tensor(1000, torch.empty(0))
    tensor.fill_(3)
    view = tensor[100:200]

    assert handle.free_cpu_locked_tensor(tensor) is True

    assert (view == 3).all()
    assert handle.is_pinned(view)


def test_memory_that_is_being_written_is_kept_for_that(
    tmp_path: Path, handle: aio_handle, torch: Any
) -> None:
    tensor = handle.new_cpu_locked_tensor(4 * MIB, torch.empty(0, dtype=torch.uint8))
    tensor.fill_(9)
    handle.async_pwrite(tensor, str(tmp_path / "file"))

    assert handle.free_cpu_locked_tensor(tensor) is True
    assert handle.wait() == 1

    assert_same((tmp_path / "file").read_bytes(), b"\x09" * (4 * MIB))


def test_a_locked_tensor_that_is_forgotten_is_freed_by_the_next(
    handle: aio_handle, torch: Any
) -> None:
    """There: its memory is never freed."""
    before = resident_bytes()
    for _ in range(5):
        handle.new_cpu_locked_tensor(64 * MIB, torch.empty(0, dtype=torch.uint8))

    assert resident_bytes() < before + 192 * MIB


def test_a_locked_tensor_outlives_its_handle(torch: Any) -> None:
    handle = aio_handle()
    tensor = handle.new_cpu_locked_tensor(1000, torch.empty(0))
    tensor.fill_(3)
    handle.close()
    del handle
    gc.collect()

    assert (tensor == 3).all()
    assert compat.pin_handle().free_cpu_locked_tensor(tensor) is True


def test_only_locked_tensors_are_freed(handle: aio_handle, torch: Any) -> None:
    tensor, stranger = handle.new_cpu_locked_tensor(10, torch.empty(0)), torch.ones(10)

    assert handle.free_cpu_locked_tensor(stranger) is False
    assert handle.free_cpu_locked_tensor(tensor[1:]) is False
    assert [handle.free_cpu_locked_tensor(tensor), handle.free_cpu_locked_tensor(tensor)] == [
        True,
        False,
    ]
    assert stranger.sum() == 10


def test_locked_tensors_of_impossible_sizes_are_refused(handle: aio_handle, torch: Any) -> None:
    assert handle.new_cpu_locked_tensor(0, torch.empty(0)).numel() == 0
    with pytest.raises(ValueError, match="num_elem must be 1 or more, got -1"):
        handle.new_cpu_locked_tensor(-1, torch.empty(0))
    with pytest.raises(ValueError, match="at most 1073741824 B"):
        handle.new_cpu_locked_tensor((1 << 28) + 1, torch.empty(0))
    untyped: Any = handle
    with pytest.raises(TypeError, match="expected an example tensor"):
        untyped.new_cpu_locked_tensor(10, np.empty(0))


@pytest.fixture
def little_may_be_locked() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(
        resource.RLIMIT_MEMLOCK,
        (65536 if hard == resource.RLIM_INFINITY else min(65536, hard), hard),
    )
    yield
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, hard))


@pytest.mark.usefixtures("little_may_be_locked")
@pytest.mark.filterwarnings("ignore")
def test_a_limit_on_locked_memory_is_no_error(tmp_path: Path, torch: Any) -> None:
    """There: the program aborts. The limit does not hold for root, for whom this shows nothing."""
    with closing(aio_handle()) as handle:
        tensor = handle.new_cpu_locked_tensor(8 << 20, torch.empty(0))
        tensor.fill_(1)

        assert handle.sync_pwrite(tensor, tmp_path / "file") == 1


# --- settings become the queue's ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("block_size", "queue_depth", "chunks", "most_in_flight"),
    [
        (64 << 10, 2, 16, 128 << 10),
        (1000, 1, 16, 64 << 10),
        (100_000, 4, 8, 512 << 10),
        (MIB, 1 << 20, 1, 64 * MIB),
    ],
)
def test_block_size_and_depth_decide_chunks_and_bytes_in_flight(
    tmp_path: Path, block_size: int, queue_depth: int, chunks: int, most_in_flight: int
) -> None:
    with closing(aio_handle(block_size, queue_depth)) as handle:
        handle.sync_pwrite(np.zeros(MIB, np.uint8), str(tmp_path / "file"))
        [drive] = handle.queue.stats().drives.values()

    assert drive.chunks == chunks
    assert drive.peak_inflight_bytes <= most_in_flight


# --- without torch --------------------------------------------------------------------------------

TORCHLESS = """
import sys


class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ImportError("torch is refused here")


sys.meta_path.insert(0, Refuse())
import numpy as np
from deepnvme.compat import aio_handle

handle = aio_handle()
print(handle.pwrite(np.arange(1000), sys.argv[1], True, False), handle.is_pinned(np.zeros(3)))
try:
    handle.new_cpu_locked_tensor(10, None)
except ImportError as error:
    print(error)
"""


def test_arrays_need_no_torch_and_locked_tensors_say_that_they_do(tmp_path: Path) -> None:
    told = output_of(run_program(TORCHLESS, tmp_path / "file", folder=tmp_path))

    assert told.splitlines()[0] == "1 False"
    assert "need torch, which is not installed" in told.splitlines()[1]


# --- the page on migrating ------------------------------------------------------------------------


def programs() -> dict[str, str]:
    """Return the page's Python blocks by the heading they stand under."""
    parts = re.split(r"^## (.+)$", PAGE, flags=re.MULTILINE)
    blocks = {
        title: "\n".join(
            re.findall(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
        )
        for title, text in zip(parts[1::2], parts[2::2], strict=True)
    }
    return {title: block for title, block in blocks.items() if block}


@pytest.mark.parametrize("title", programs())
def test_a_program_of_the_page_runs(title: str, tmp_path: Path) -> None:
    program = programs()[title]
    if "import torch" in program and find_spec("torch") is None:
        pytest.skip("torch is not installed")

    output_of(run_program(program, folder=tmp_path))


def test_every_call_is_on_the_page() -> None:
    methods = {name for name in dir(aio_handle) if not name.startswith("_")}

    assert {name for name in {*methods, *compat.__all__} if name not in PAGE} == set()


def test_the_links_of_the_page_lead_somewhere() -> None:
    folder = Path(__file__).resolve().parents[2] / "docs"
    for target in re.findall(r"\]\(([^)]+)\)", PAGE):
        place, _, anchor = target.partition("#")
        text = (folder / place).read_text() if place else PAGE
        anchors = {
            re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-")
            for heading in re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
        }
        assert not anchor or anchor in anchors, target
