"""Queues, files, pools and fault plans in the hands of somebody who mistypes, copies and forks:
told in words.
"""

from __future__ import annotations

import copy
import os
import pickle
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from deepnvme import (
    Direct,
    FaultPlan,
    IOQueue,
    NVMeError,
    Pool,
    Sync,
    UserMemory,
    WhenFull,
    _native,
)
from support.nvme_programs import output_of, run_program

BACKEND = "threads"
PAGE = 4096


@pytest.fixture
def queue() -> Iterator[IOQueue]:
    with IOQueue(BACKEND) as queue:
        yield queue


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "x"
    path.write_bytes(b"kept")
    return path


# --- choices --------------------------------------------------------------------------------------


def test_a_choice_may_be_given_as_text(path: Path) -> None:
    settings: Any = {"when_full": "raise", "user_memory": "bounce"}
    how: Any = {"direct": "never"}
    what: Any = "all"
    reads: Any = "reads"
    never: Any = "never"
    required: Any = "required"
    plan = FaultPlan().fail(nth=1000, requests=reads)
    with IOQueue(BACKEND, faults=plan, **settings) as queue, queue.open(path, "r+", **how) as file:
        assert queue.when_full is WhenFull.RAISE
        assert queue.settings_for(path).user_memory is UserMemory.BOUNCE
        assert not file.direct
        file.sync(what).result()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(_native, "Pool", _PinsOnly)
        Pool(PAGE, cuda=never)
        with pytest.raises(NVMeError, match="asked to page-lock: True"):
            Pool(PAGE, cuda=required)


class _PinsOnly:
    """A pool's memory that refuses to be page-locked, and says whether it had to be."""

    def __init__(self, *_: object) -> None:
        pass

    def pin_with_cuda(self, *, demanded: bool) -> None:
        raise RuntimeError(f"asked to page-lock: {demanded}")


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"when_full": "blok"}, "when_full: expected one of WhenFull.BLOCK ('block')"),
        ({"when_full": None}, "when_full: expected one of"),
        ({"when_full": True}, "when_full: expected one of"),
        (
            {"user_memory": "copy"},
            "user_memory: expected one of UserMemory.ZERO_COPY ('zero_copy')",
        ),
        ({"user_memory": WhenFull.BLOCK}, "user_memory: expected one of"),
        ({"faults": {}}, "faults: expected a FaultPlan, got dict"),
        ({"pool": 5}, "pool: expected a Pool, got int"),
        ({"max_pending": 0}, "max_pending must be 1 or more, got 0"),
        ({"max_pending": "5"}, "max_pending must be a whole number, got '5'"),
        ({"chunk_bytes": "1 MB"}, "chunk_bytes: expected a whole number and one of TiB"),
        ({"inflight_bytes": 1.5}, "inflight_bytes must be a whole number, got 1.5"),
    ],
)
def test_a_queue_is_not_made_of_what_there_is_not(wrong: Any, told: str) -> None:
    with pytest.raises((ValueError, TypeError), match=re.escape(told)):
        IOQueue(BACKEND, **wrong)


@pytest.mark.parametrize("wrong", ["no", None, False, WhenFull.RAISE])
def test_a_pool_is_not_page_locked_by_a_choice_that_there_is_not(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"cuda: expected one of Cuda\.IN_USE \('in use'\)"):
        Pool(PAGE, cuda=wrong)


@pytest.mark.parametrize("wrong", ["automatic", Sync.DATA])
def test_a_file_is_not_opened_by_a_choice_that_there_is_not(
    queue: IOQueue, path: Path, wrong: Any
) -> None:
    with pytest.raises(ValueError, match=r"direct: expected one of Direct\.AUTO \('auto'\)"):
        queue.open(path, "w", direct=wrong)

    assert path.read_bytes() == b"kept"


@pytest.mark.parametrize("call", ["preallocate", "truncate"])
def test_a_wrong_length_is_refused_by_the_name_of_its_argument(
    queue: IOQueue, path: Path, call: str
) -> None:
    with (
        queue.open(path, "r+") as file,
        pytest.raises(ValueError, match="nbytes must not be negative, got -1"),
    ):
        getattr(file, call)(-1)


def test_a_file_is_not_synced_by_a_choice_that_there_is_not(queue: IOQueue, path: Path) -> None:
    wrong: Any = Direct.AUTO
    with (
        queue.open(path, "r+") as file,
        pytest.raises(ValueError, match=r"sync: expected one of Sync\.DATA"),
    ):
        file.sync(wrong)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ((3,), "expected str, bytes or os.PathLike object, not int"),
        (("a\0b",), "a path cannot have null bytes"),
        ((b"caf\xe9",), "a path must be text in UTF-8, got b'caf"),
        ((os.fsdecode(b"caf\xe9"),), "rename the file, or reach it by a link"),
        (("a", None), "mode must be one of"),
    ],
)
def test_a_path_or_mode_that_is_none_is_refused_in_words(
    queue: IOQueue, wrong: Any, told: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(told)):
        queue.open(*wrong)


def test_a_path_may_be_bytes(queue: IOQueue, path: Path) -> None:
    with queue.open(os.fsencode(path)) as file:
        assert bytes(file.read(4)) == b"kept"


# --- numbers --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong", [{"size": 1.5}, {"size": -1}, {"size": "1 apple"}, {"permissions": -1}]
)
def test_a_wrong_number_empties_no_file(queue: IOQueue, path: Path, wrong: Any) -> None:
    with pytest.raises(
        (ValueError, TypeError),
        match=r"must be a whole number, got|must not be negative, got|expected a whole number and one of .*; got",
    ):
        queue.open(path, "w", **wrong)

    assert path.read_bytes() == b"kept"


def test_an_offset_may_be_text_and_a_deadline_may_not(queue: IOQueue, path: Path) -> None:
    path.write_bytes(bytes(4096) + b"here")
    seconds: Any = "1"
    with queue.open(path) as file:
        assert bytes(file.read(4, "4KiB")) == b"here"
        with pytest.raises(TypeError, match="deadline_s must be a number of seconds, got '1'"):
            file.pread(bytearray(4), deadline_s=seconds)
        for wrong in (1.5, None):
            with pytest.raises(TypeError, match="offset must be a whole number, got"):
                file.pread(bytearray(4), wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [-1, 0, "8 apples", 1.5])
def test_a_pool_has_a_whole_number_of_bytes(wrong: Any) -> None:
    with pytest.raises(
        (ValueError, TypeError),
        match=r"the bytes of a pool( must be a whole number| must be 1 or more|: expected a whole number)",
    ):
        Pool(wrong)


def test_a_pool_that_no_machine_has_memory_for_says_how_large_it_was_to_be() -> None:
    with pytest.raises((MemoryError, ValueError), match=str(1 << 62)):
        Pool(1 << 62)


def test_a_shape_may_be_a_list() -> None:
    pool = Pool(64 * PAGE)
    sizes: Any = [2, 3]
    assert pool.empty(sizes, "f4").shape == (2, 3)
    assert pool.empty_tensor(sizes, torch.float32).shape == (2, 3)


@pytest.mark.parametrize("wrong", ["f4", torch.qint8, None])
def test_a_tensor_has_a_dtype_whose_values_are_its_bytes(wrong: Any) -> None:
    with pytest.raises(
        TypeError, match="expected a dtype of torch with values that are plain bytes"
    ):
        Pool(64 * PAGE).empty_tensor((2,), wrong)


@pytest.mark.parametrize(
    "add",
    [
        lambda plan: plan.fail(probability=2),
        lambda plan: plan.fail(nth=1, errno=0),
        lambda plan: plan.fail(nth=1, errno="EIO"),
        lambda plan: plan.fail(nth=1, requests="writing"),
        lambda plan: plan.shorten(nth=1, length=-1),
        lambda plan: plan.delay(nth=1, delay_us=-1),
        lambda plan: plan.reorder(nth=1, hold=0),
        lambda plan: plan.throttle(bytes_per_s=float("nan")),
        lambda plan: plan.throttle(bytes_per_s=0),
    ],
)
def test_a_fault_that_cannot_be_is_refused_where_it_is_planned(
    add: Callable[[FaultPlan], object],
) -> None:
    with pytest.raises(
        (ValueError, TypeError), match=r"whole number|must|at most 1|expected one of|positive rate"
    ):
        add(FaultPlan())


@pytest.mark.parametrize(
    ("name", "value", "most"),
    [
        ("max_pending", 1 << 32, (1 << 32) - 1),
        ("max_requests", 4097, 4096),
        ("chunk_bytes", "4GiB", 1 << 30),
        ("inflight_bytes", 1 << 64, (1 << 63) - 1),
    ],
)
def test_a_limit_of_a_queue_that_is_too_large_is_refused(name: str, value: Any, most: int) -> None:
    with pytest.raises(ValueError, match=rf"{name}.* must be at most {most}, got \d+$"):
        IOQueue(**{name: value})


# --- files, copies, forks -------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["r", "r+", "w"])
def test_a_pipe_is_refused_and_not_waited_for(queue: IOQueue, tmp_path: Path, mode: Any) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a file"):
        queue.open(tmp_path / "pipe", mode)


def test_what_belongs_to_this_process_is_neither_pickled_nor_copied(
    queue: IOQueue, path: Path
) -> None:
    with queue.open(path) as file:
        future = file.pread(bytearray(4))
        for each in (queue, file, future, Pool(PAGE)):
            for make in (pickle.dumps, copy.copy, copy.deepcopy):
                with pytest.raises(TypeError, match="neither pickled nor copied"):
                    make(each)
        assert future.result() == 4


IN_A_CHILD = """
import os, signal, sys, threading
import numpy as np
from deepnvme import ForkedError, IOQueue, Pool

pool = Pool(1 << 22)
queue = IOQueue("threads", pool=pool)
kept = [pool.empty(4096) for _ in range(64)]
file = queue.open(sys.argv[1], "w")
ending = threading.Event()


def write():
    while not ending.is_set():
        file.pwrite(pool.empty(4096)).result()
        queue.stats()


threads = [threading.Thread(target=write) for _ in range(6)]
for thread in threads:
    thread.start()
codes = set()
for _ in range(100):
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        repr(queue), queue.stats(), repr(pool), kept.clear()
        try:
            pool.buffer(1)
        except ForkedError:
            os._exit(0)
        os._exit(1)
    codes.add(os.waitpid(pid, 0)[1])
ending.set()
for thread in threads:
    thread.join()
print(codes, len(kept), flush=True)
"""


def test_a_child_of_a_busy_parent_can_show_and_drop_what_it_has(tmp_path: Path) -> None:
    ignoring = ["-W", "ignore::DeprecationWarning"]
    done = run_program(IN_A_CHILD, tmp_path / "x", folder=tmp_path, python=ignoring)
    assert output_of(done) == "{0} 64\n"
