"""Every request of a workload failing, cut short, late in turn; storms and disorder: nothing lost,
nothing invented.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from deepnvme import FaultPlan, IOQueue, NVMeError, Requests
from support.nvme_io import (
    BACKENDS,
    CHUNK,
    ON_DISK,
    TIMEOUT_S,
    assert_same,
    backend_or_skip,
    pattern,
)
from support.nvme_workload import FILES, Run, Workload, make_workload, run_workload

# Of a few hundred requests each n-th is struck in turn. Calls, sizes and places are drawn at
# random, so that these meet what the others would; the rest is struck in long runs.
STEPS = [
    *(("memory", 6), ("uring", 40), ("liburing", 90), ("aio", 90), ("threads", 90)),
    *(
        pytest.param(backend, step, marks=pytest.mark.slow)
        for backend, step in (("memory", 1), ("uring", 3))
    ),
]


@pytest.fixture(autouse=True)
def untuned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no profile of this machine decide what is tested."""
    monkeypatch.setenv("DEEPNVME_PROFILE", "")


@pytest.fixture(scope="module")
def workload() -> Workload:
    return make_workload(seed=2026)


def run_with(backend: str, folder: Path, workload: Workload, faults: FaultPlan) -> Run:
    with IOQueue(backend, chunk_bytes=CHUNK, inflight_bytes=4 * CHUNK, faults=faults) as queue:
        return run_workload(queue, folder, workload)


def strike_in_turn(
    backend: str, step: int, folder: Path, workload: Workload, plan: Callable[[int], FaultPlan]
) -> list[Run]:
    """Return a run for each step-th request, that request struck by `plan`."""
    undisturbed = run_with(backend, folder, workload, FaultPlan())
    assert not undisturbed.errors
    return [
        run_with(backend, folder, workload, plan(nth))
        for nth in range(1, undisturbed.requests + 1, step)
    ]


def test_the_workload_is_large_and_mixed_enough(tmp_path: Path, workload: Workload) -> None:
    calls = [call for calls in workload.rounds for call in calls]
    assert len(calls) == len(workload) >= 200
    assert {call.file for call in calls} == set(range(FILES))
    assert {call.name for call in calls} == {"pwrite", "pread", "readinto", "sync"}
    assert run_with("memory", tmp_path, workload, FaultPlan()).requests > len(workload)


# --- each request in turn -------------------------------------------------------------------------


@pytest.mark.parametrize(("backend", "step"), STEPS)
def test_whichever_request_fails_its_operation_alone_fails_and_says_what_was_done(
    tmp_path: Path, workload: Workload, backend: str, step: int
) -> None:
    runs = strike_in_turn(
        backend_or_skip(backend), step, tmp_path, workload, lambda nth: FaultPlan().fail(nth=nth)
    )
    for run in runs:
        assert [error.errno for error in run.errors] == [errno.EIO]
    assert {error.op for run in runs for error in run.errors} >= {"read", "write"}


@pytest.mark.parametrize(("backend", "step"), STEPS)
def test_whichever_request_is_cut_short_nothing_changes(
    tmp_path: Path, workload: Workload, backend: str, step: int
) -> None:
    runs = strike_in_turn(
        backend_or_skip(backend), step, tmp_path, workload, lambda nth: FaultPlan().shorten(nth=nth)
    )
    assert not any(run.errors for run in runs)
    cut = [
        run for run in runs if any(one.short_transfers for one in run.queue.stats().drives.values())
    ]
    assert len(cut) > len(runs) / 2  # all but syncs and single bytes


@pytest.mark.parametrize(("backend", "step"), STEPS)
def test_whichever_request_is_late_nothing_changes(
    tmp_path: Path, workload: Workload, backend: str, step: int
) -> None:
    runs = strike_in_turn(
        backend_or_skip(backend),
        step,
        tmp_path,
        workload,
        lambda nth: FaultPlan().delay(delay_us=1000, nth=nth),
    )
    assert runs
    assert not any(run.errors for run in runs)


# --- many at once ---------------------------------------------------------------------------------

HARMLESS = {
    "every request cut to one sector or half": lambda: FaultPlan().shorten(every=1),
    "every third request cut to one byte": lambda: FaultPlan().shorten(every=3, length=1),
    "every second request interrupted": lambda: FaultPlan().fail(every=2, errno=errno.EINTR),
    "every third request told to try again": lambda: FaultPlan().fail(every=3, errno=errno.EAGAIN),
    "every second end held back for three others": lambda: FaultPlan().reorder(every=2, hold=3),
    "every end held back for ten others": lambda: FaultPlan().reorder(every=1, hold=10),
    "all of it at random": lambda: (
        FaultPlan(seed=9)
        .shorten(probability=0.3)
        .delay(probability=0.1, delay_us=200)
        .reorder(probability=0.3, hold=4)
        .fail(probability=0.2, errno=errno.EINTR)
        .fail(probability=0.2, errno=errno.EAGAIN)
    ),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("plan", HARMLESS.values(), ids=HARMLESS)
def test_what_a_drive_may_do_changes_nothing(
    tmp_path: Path, workload: Workload, backend: str, plan: Callable[[], FaultPlan]
) -> None:
    assert not run_with(backend_or_skip(backend), tmp_path, workload, plan()).errors


# a file in memory could not be looked at without more failures
@pytest.mark.parametrize("backend", ON_DISK)
@pytest.mark.parametrize("seed", range(3))
def test_many_failures_at_random_leave_only_what_failed_writes_may_leave(
    tmp_path: Path, workload: Workload, backend: str, seed: int
) -> None:
    plan = (
        FaultPlan(seed)
        .fail(probability=0.1)
        .shorten(probability=0.2)
        .reorder(probability=0.2, hold=3)
    )
    run = run_with(backend_or_skip(backend), tmp_path, workload, plan)
    assert len(run.errors) > 5
    assert {error.errno for error in run.errors} == {errno.EIO}


# --- storms ---------------------------------------------------------------------------------------


def storm(number: int, code: int) -> FaultPlan:
    """Return a plan that interrupts the first `number` requests."""
    plan = FaultPlan()
    for nth in range(1, number + 1):
        plan.fail(nth=nth, errno=code)
    return plan


@pytest.mark.parametrize("code", [errno.EINTR, errno.EAGAIN], ids=["EINTR", "EAGAIN"])
@pytest.mark.parametrize("backend", ["memory", "uring", "threads"])
def test_a_hundred_interruptions_in_a_row_are_retried(
    tmp_path: Path, backend: str, code: int
) -> None:
    data = pattern(5000, seed=1)
    with (
        IOQueue(backend_or_skip(backend), faults=storm(100, code)) as queue,
        queue.open(tmp_path / "file", "w") as file,
    ):
        assert file.pwrite(data).result(TIMEOUT_S) == 5000
        back = bytearray(5000)
        file.pread(back).result(TIMEOUT_S)
        (drive,) = queue.stats().drives.values()
    assert_same(back, data)
    assert drive.retries == 100


@pytest.mark.parametrize("code", [errno.EINTR, errno.EAGAIN], ids=["EINTR", "EAGAIN"])
@pytest.mark.parametrize("backend", ["memory", "uring", "threads"])
def test_a_hundred_and_one_interruptions_in_a_row_are_an_error(
    tmp_path: Path, backend: str, code: int
) -> None:
    with (
        IOQueue(backend_or_skip(backend), faults=storm(101, code)) as queue,
        queue.open(tmp_path / "file", "w") as file,
    ):
        error = file.pwrite(b"x" * 100).exception(TIMEOUT_S)
        assert isinstance(error, OSError)
        assert error.errno == code
        assert file.pwrite(b"y" * 100).result(TIMEOUT_S) == 100


def test_interruptions_count_anew_after_progress(tmp_path: Path) -> None:
    """Sixty, one byte, sixty more: never a hundred in a row."""
    plan = storm(60, errno.EINTR).shorten(nth=61, length=1)
    for nth in range(62, 122):
        plan.fail(nth=nth, errno=errno.EINTR)
    with IOQueue("memory", faults=plan) as queue, queue.open(tmp_path / "file", "w") as file:
        assert file.pwrite(b"x" * 100).result(TIMEOUT_S) == 100


@pytest.mark.parametrize("backend", ["uring", "aio", "threads"])
def test_a_file_system_that_refuses_direct_io_after_all_is_served_through_the_page_cache(
    tmp_path: Path, backend: str
) -> None:
    data = pattern(4 * CHUNK, seed=1)
    with (
        IOQueue(
            backend_or_skip(backend),
            chunk_bytes=CHUNK,
            faults=FaultPlan().fail(nth=2, errno=errno.EINVAL, requests=Requests.WRITES),
        ) as queue,
        queue.open(tmp_path / "file", "w") as file,
    ):
        if not file.direct:
            pytest.skip("this file system takes no direct I/O")
        assert file.pwrite(data).result(TIMEOUT_S) == len(data)
        (drive,) = queue.stats().drives.values()
    assert_same((tmp_path / "file").read_bytes(), data)
    assert (drive.direct_refused, drive.buffered_bytes) == (1, CHUNK)


@pytest.mark.parametrize(
    "plan",
    [
        lambda: FaultPlan().fail(),
        lambda: FaultPlan().fail(nth=1, every=2),
        lambda: FaultPlan().shorten(nth=1, probability=0.5),
        lambda: IOQueue("memory", faults=FaultPlan().fail(probability=1.5)),
        lambda: IOQueue("memory", faults=FaultPlan().fail(nth=1, errno=0)),
        lambda: IOQueue("memory", faults=FaultPlan().delay(nth=1, delay_us=0)),
        lambda: IOQueue("memory", faults=FaultPlan().throttle(bytes_per_s=0)),
    ],
)
def test_a_plan_that_means_nothing_is_refused(plan: Callable[[], object]) -> None:
    with pytest.raises(
        ValueError,
        match=r"expected exactly one|fault rule|at most 1|must be 1 or more|positive rate",
    ):
        plan()


def test_the_same_seed_strikes_the_same_requests(tmp_path: Path) -> None:
    def struck(seed: int) -> list[int]:
        # One after another: the order of requests in flight together is nowhere promised.
        plan = FaultPlan(seed).fail(probability=0.1, requests=Requests.WRITES)
        found = []
        with IOQueue("memory", faults=plan) as queue, queue.open(tmp_path / "file", "w") as file:
            for number in range(100):
                try:
                    file.pwrite(b"x", number).result()
                except NVMeError:
                    found.append(number)
        return found

    assert struck(1) == struck(1)
    assert struck(1) != struck(2)
