"""The benches of deepnvme against fio and DeepNVMe: what they ask for and what they make of the
answers.
"""

from __future__ import annotations

import io
import json
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import nvme_streams
import pytest

import bench
import fio
import rival_deepnvme
from deepnvme.cli.fio import Job
from deepnvme.measuring.measure import Workload
from fio import CPU, P99, RATE, THREAD_CPU
from rival_deepnvme import Order, Rival
from support.nvme_held import until
from support.scripts import load_script

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
JOB = Job(
    path=Path("/drive/data"),
    file_bytes=64 * MIB,
    workload=Workload.READ,
    block_bytes=MIB,
    inflight_bytes=16 * MIB,
    seconds=2,
)
ORDER = Order("read", "pinned", "/drive/tensor", MIB, 0.0, queue_depth=8, threads=1, waiting="sync")


VS_FIO, VS_DEEPSPEED = load_script("bench/nvme_vs_fio"), load_script("bench/nvme_vs_deepspeed")


# --- fio ------------------------------------------------------------------------------------------


def answering(
    folder: Path, read: dict[str, Any], write: dict[str, Any], condition: str = "True"
) -> str:
    """Make a fio that ran for two seconds at 2% user and 3% system time; return the PATH on which
    it is found.
    """
    job = {"job_runtime": 2000, "usr_cpu": 2.0, "sys_cpu": 3.0, "read": read, "write": write}
    program(folder / "fio", f"import os\nif {condition}: print({json.dumps({'jobs': [job]})!r})")
    return str(folder)


def direction(nbytes: int = 0, p99_ns: int | None = None) -> dict[str, Any]:
    """One direction of a job in fio's JSON; where nothing was done, it has no percentiles."""
    return {
        "io_bytes": nbytes,
        "clat_ns": {} if p99_ns is None else {"percentile": {"99.000000": p99_ns}},
    }


def test_what_fio_measured_is_given_in_the_units_of_the_benches(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(
        "PATH", answering(tmp_path, direction(8 * fio.GIB, p99_ns=2_500_000), direction())
    )

    assert fio.run(JOB) == {RATE: 4.0, THREAD_CPU: pytest.approx(0.1 / 8), P99: 2.5}


def test_a_mixed_job_counts_both_directions_and_the_slower_ones_latency(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    both = direction(2 * fio.GIB, 1_000_000), direction(2 * fio.GIB, 3_000_000)
    monkeypatch.setenv("PATH", answering(tmp_path, *both))

    numbers = fio.run(JOB)

    assert (numbers[RATE], numbers[P99]) == (2.0, 3.0)


@pytest.mark.parametrize("block", VS_FIO.BLOCKS)
def test_fio_keeps_the_same_bytes_in_flight_at_every_block_size(block: int) -> None:
    arguments = replace(JOB, block_bytes=block).command()

    depth = next(int(each.split("=")[1]) for each in arguments if each.startswith("--iodepth="))
    assert f"--bs={block}" in arguments
    assert depth * block == JOB.inflight_bytes


def test_the_best_settings_are_those_with_the_best_median_not_the_luckiest_run() -> None:
    lucky, steady = JOB, replace(JOB, block_bytes=2 * MIB)
    cheap = {THREAD_CPU: 0.1}
    sweep = {
        lucky: [{RATE: 1.0, **cheap}, {RATE: 9.0, **cheap}, {RATE: 1.1, **cheap}],
        steady: [
            {RATE: 2.0, THREAD_CPU: 1.0},
            {RATE: 2.1, THREAD_CPU: 1.0},
            {RATE: 1.9, THREAD_CPU: 1.0},
        ],
    }

    assert fio.best(sweep) == steady


def test_of_settings_that_are_as_fast_the_one_that_costs_less_is_best() -> None:
    fastest, cheapest = JOB, replace(JOB, block_bytes=2 * MIB)

    assert (
        fio.best(
            {fastest: [{RATE: 2.00, THREAD_CPU: 0.02}], cheapest: [{RATE: 1.97, THREAD_CPU: 0.01}]}
        )
        == cheapest
    )
    assert (
        fio.best(
            {fastest: [{RATE: 2.00, THREAD_CPU: 0.02}], cheapest: [{RATE: 1.95, THREAD_CPU: 0.01}]}
        )
        == fastest
    )


def test_a_missing_fio_is_unavailable_and_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    name, block, measure = VS_FIO.best_of_fio([JOB], 1)

    assert (name, block) == ("fio", MIB)
    with pytest.raises(bench.UnavailableError, match="apt install fio"):
        measure()
    with pytest.raises(bench.UnavailableError, match="apt install fio"):
        fio.run(JOB)


def test_a_failing_fio_is_unavailable_in_its_own_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program(tmp_path / "fio", "import sys; sys.exit('io_uring_queue_init failed')")
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(bench.UnavailableError, match="io_uring_queue_init failed"):
        fio.run(JOB)


def test_the_whole_of_fio_is_watched_once_it_moves_blocks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    watched = tmp_path / "watched"
    waits = f"[None for _ in iter(lambda: os.path.exists({str(watched)!r}), True)] is not None"
    monkeypatch.setenv(
        "PATH", answering(tmp_path, direction(8 * fio.GIB, 1), direction(), condition=waits)
    )
    begun = JOB.inflight_bytes + 2 * MIB
    looks = [(1.0, 0), (2.0, JOB.inflight_bytes), (5.0, begun), (5.5, begun + 8 * fio.GIB)]

    def look(_: int) -> fio._Look:
        seen = fio._Look(*looks.pop(0))
        if not looks:
            watched.touch()
        return seen

    monkeypatch.setattr(fio, "_look", look)

    assert fio.watched(replace(JOB, seconds=0.02))[CPU] == pytest.approx(0.5 / 8)


def test_a_look_at_a_process_sees_what_it_has_used() -> None:
    first = fio._look(os.getpid())
    sum(range(10**5))

    assert fio._look(os.getpid()).cpu_s > first.cpu_s > 0


@pytest.mark.parametrize("ends", [False, True])
def test_a_look_counts_what_any_thread_but_the_first_has_moved(tmp_path: Path, ends: bool) -> None:
    if not Path("/proc/self/io").exists() or is_memory(tmp_path):
        pytest.skip("this kernel counts no bytes of processes, or they go to no drive")
    written, looked = threading.Event(), threading.Event()

    def write() -> None:
        with (tmp_path / "data").open("wb") as file:
            file.write(bytes(MIB))
            file.flush()
            os.fsync(file.fileno())
        written.set()
        if not ends:
            looked.wait()

    first = fio._look(os.getpid())
    thread = threading.Thread(target=write)
    thread.start()
    try:
        written.wait()
        if ends:
            thread.join()
            until(lambda: not Path(f"/proc/self/task/{thread.native_id}").exists())
        moved_bytes = fio._look(os.getpid()).moved_bytes - first.moved_bytes
    finally:
        looked.set()
        thread.join()

    assert moved_bytes >= MIB


def is_memory(folder: Path) -> bool:
    number = folder.stat().st_dev
    device = f" {os.major(number)}:{os.minor(number)} "
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    return any(device in mount and " - tmpfs " in mount for mount in mounts)


def test_a_fio_that_ends_early_cannot_be_watched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", answering(tmp_path, direction(fio.GIB, 1), direction()))

    with pytest.raises(bench.UnavailableError, match="ended before its 2 s were over"):
        fio.watched(JOB)


def test_fio_is_told_to_use_huge_pages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told = "'hugetlb=1' in os.environ['GLIBC_TUNABLES']"
    monkeypatch.setenv(
        "PATH", answering(tmp_path, direction(fio.GIB, 1), direction(), condition=told)
    )

    assert fio.run(JOB)[RATE] == 0.5


def program(path: Path, source: str) -> None:
    body = path.with_suffix(".py")
    body.write_text(source + "\n")
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{body}" "$@"\n')
    path.chmod(0o755)


# --- deepnvme beside fio --------------------------------------------------------------------------


@pytest.mark.parametrize("memory", nvme_streams.Memory)
def test_a_stream_measures_deepnvme_with_every_kind_of_memory(tmp_path: Path, memory: Any) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(4 * MIB))

    numbers = nvme_streams.stream(
        nvme_streams.Stream(
            path, 4 * MIB, Workload.MIXED, 0.01, "threads", memory, operation_bytes=MIB, pending=2
        )
    )

    assert set(numbers) == {RATE, CPU, THREAD_CPU, P99}
    # `threads` has others
    assert all(number > 0 for name, number in numbers.items() if name != THREAD_CPU)


# --- DeepNVMe -------------------------------------------------------------------------------------


def test_a_transfer_is_measured_at_least_once_however_long_it_takes() -> None:
    calls: list[None] = []

    numbers = rival_deepnvme.moved(lambda: calls.append(None), fio.GIB, seconds=0.0)

    assert len(calls) == 1
    assert set(numbers) == {RATE, CPU}


def test_each_order_gets_one_line_of_answer() -> None:
    orders = io.StringIO(
        "".join(json.dumps(asdict(replace(ORDER, threads=count))) + "\n" for count in (1, 2))
    )
    answers = io.StringIO()

    rival_deepnvme.serve(lambda order: {RATE: float(order.threads)}, orders, answers)

    assert [json.loads(line) for line in answers.getvalue().splitlines()] == [
        {RATE: 1.0},
        {RATE: 2.0},
    ]


def test_a_rival_that_cannot_be_measured_answers_why_and_goes_on() -> None:
    def refuses(order: Order) -> dict[str, float]:
        raise bench.UnavailableError("no libaio")

    answers = io.StringIO()
    rival_deepnvme.serve(refuses, io.StringIO(2 * (json.dumps(asdict(ORDER)) + "\n")), answers)

    assert [json.loads(line) for line in answers.getvalue().splitlines()] == 2 * [
        {"unavailable": "no libaio"}
    ]


def rival(tmp_path: Path, source: str, limit_s: float = 60.0) -> Rival:
    """A rival whose program is `source`."""
    return Rival([sys.executable, "-c", source], os.environ, tmp_path, limit_s)


def test_the_rivals_answer_is_the_measurement(tmp_path: Path) -> None:
    source = (
        "import json, sys\nfor line in sys.stdin: print(json.dumps({'GiB/s': "
        "json.loads(line)['threads']}), flush=True)"
    )
    with rival(tmp_path, source) as answering:
        assert answering.measure(replace(ORDER, threads=2)) == {RATE: 2.0}


def test_a_rival_without_its_libraries_is_unavailable(tmp_path: Path) -> None:
    source = """for line in open(0): print('{"unavailable": "no libaio"}', flush=True)"""
    with (
        rival(tmp_path, source) as lacking,
        pytest.raises(bench.UnavailableError, match="no libaio"),
    ):
        lacking.measure(ORDER)


def test_a_rival_that_dies_is_an_error_with_its_last_words(tmp_path: Path) -> None:
    source = (
        "import os, sys; input(); print('assertion failed', file=sys.stderr, flush=True); "
        "os.abort()"
    )
    with (
        rival(tmp_path, source) as dying,
        pytest.raises(RuntimeError, match=r"status -6 .* assertion failed"),
    ):
        dying.measure(ORDER)


def test_a_rival_that_is_dead_stays_an_error(tmp_path: Path) -> None:
    with rival(tmp_path, "pass") as dead:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="status 0"):
                dead.measure(ORDER)


def test_a_rival_that_hangs_is_killed_at_its_limit(tmp_path: Path) -> None:
    hanging = rival(tmp_path, "import time; time.sleep(600)", limit_s=0.1)

    with hanging, pytest.raises(RuntimeError, match="status -9"):
        hanging.measure(ORDER)


class FakeRival:
    """Answers every order by `rate`."""

    def __init__(self, rate: Callable[[Order], float]) -> None:
        self.rate = rate

    def measure(self, order: Order) -> dict[str, float]:
        return {RATE: self.rate(order), CPU: order.seconds}


def test_the_rival_runs_at_its_fastest_settings_for_the_time_of_a_measurement() -> None:
    fastest = FakeRival(
        lambda order: order.queue_depth * order.threads + (order.waiting == "async")
    )

    name, measure = VS_DEEPSPEED.best_of_rival(fastest, ORDER, 2.0)

    assert name == " queue depth 32, threads 2, async"
    assert measure() == {RATE: 65.0, CPU: 2.0}


def test_the_sweep_tries_every_combination_of_settings_once() -> None:
    tried = VS_DEEPSPEED.settings_of(ORDER)

    assert len({order.settings for order in tried}) == len(tried) == 8


@pytest.mark.parametrize("answer", ["at the start", "at the first order"])
def test_a_rival_that_is_not_there_leaves_a_system_that_refuses(answer: str) -> None:
    missing = bench.UnavailableError("no network")

    def refuses(order: Order) -> float:
        raise missing

    name, measure = VS_DEEPSPEED.best_of_rival(
        missing if answer == "at the start" else FakeRival(refuses), ORDER, seconds=2.0
    )

    assert name == ""
    with pytest.raises(bench.UnavailableError, match="no network"):
        measure()


@pytest.mark.parametrize(
    ("tensors", "memory"), [("ordinary", "ZERO_COPY"), ("ordinary", "BOUNCE"), ("pinned", "BOUNCE")]
)
@pytest.mark.parametrize("verb", ["read", "write"])
def test_deepnvme_moves_whole_tensors_of_both_kinds(
    tmp_path: Path, verb: str, tensors: str, memory: str
) -> None:
    pytest.importorskip("torch", reason="the bench compares torch tensors")
    path = tmp_path / "tensor"
    path.write_bytes(bytes(MIB))
    measure = partial(
        VS_DEEPSPEED.deepnvme, verb=verb, tensors=tensors, memory=memory, path=path, nbytes=MIB
    )

    assert measure(seconds=0.0)[RATE] > 0
    assert path.read_bytes() == (bytes(MIB) if verb == "read" else b"\1" * MIB)
