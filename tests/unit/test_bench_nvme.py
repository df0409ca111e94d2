"""The benches of deepnvme against fio and DeepNVMe: what they ask for and what they make of the answers."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import asdict, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import bench
import fio
import rival_deepnvme
from fio import CPU, P99, RATE, Workload
from rival_deepnvme import Order, Rival

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
JOB = fio.Job(Path("/drive/data"), 64 * MIB, Workload.READ, MIB, 16 * MIB, seconds=2)
ORDER = Order("read", "pinned", "/drive/tensor", MIB, 0.0, queue_depth=8, threads=1, waiting="sync")


def script(name: str) -> Any:
    """Load a script of scripts/bench, which has no .py ending, as a module."""
    loader = importlib.machinery.SourceFileLoader(name, str(ROOT / "scripts" / "bench" / name))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "dont_write_bytecode", True)
        sys.modules[name] = module  # dataclasses look their module up
        loader.exec_module(module)
    return module


VS_FIO, VS_DEEPSPEED = script("nvme_vs_fio"), script("nvme_vs_deepspeed")


# --- fio ---------------------------------------------------------------------------------------------------------


def direction(nbytes: int = 0, p99_ns: int | None = None) -> dict[str, Any]:
    """One direction of a job in fio's JSON; where nothing was done, it has no percentiles."""
    return {"io_bytes": nbytes, "clat_ns": {} if p99_ns is None else {"percentile": {"99.000000": p99_ns}}}


def report(read: dict[str, Any], write: dict[str, Any]) -> str:
    """What fio prints after running for two seconds at 2% user and 3% system time."""
    job = {"job_runtime": 2000, "usr_cpu": 2.0, "sys_cpu": 3.0, "read": read, "write": write}
    return json.dumps({"fio version": "fio-3.33", "jobs": [job]})


def test_a_read_job_is_read_from_fios_json() -> None:
    numbers = fio.parse(report(direction(8 * fio.GIB, p99_ns=2_500_000), direction()))

    assert numbers == {RATE: 4.0, CPU: pytest.approx(0.1 / 8), P99: 2.5}


def test_a_mixed_job_counts_both_directions_and_the_slower_ones_latency() -> None:
    numbers = fio.parse(report(direction(2 * fio.GIB, 1_000_000), direction(2 * fio.GIB, 3_000_000)))

    assert numbers[RATE] == 2.0
    assert numbers[P99] == 3.0


def test_warnings_before_fios_json_are_passed_over() -> None:
    warned = "fio: this platform does not support everything\n" + report(direction(fio.GIB, 1), direction())

    assert fio.parse(warned)[RATE] == 0.5


@pytest.mark.parametrize("block", VS_FIO.BLOCKS)
def test_fio_keeps_the_same_bytes_in_flight_at_every_block_size(block: int) -> None:
    arguments = replace(JOB, block_bytes=block).command()

    depth = next(int(each.split("=")[1]) for each in arguments if each.startswith("--iodepth="))
    assert f"--bs={block}" in arguments
    assert depth * block == JOB.inflight_bytes


def test_fio_fills_no_buffers_while_it_is_measured() -> None:
    assert {"--refill_buffers=0", "--scramble_buffers=0"} <= set(JOB.command())


def test_the_fastest_setting_is_the_one_with_the_best_median_not_the_luckiest_run() -> None:
    lucky, steady = JOB, replace(JOB, block_bytes=2 * MIB)
    sweep = {lucky: [{RATE: 1.0}, {RATE: 9.0}, {RATE: 1.1}], steady: [{RATE: 2.0}, {RATE: 2.1}, {RATE: 1.9}]}

    assert fio.fastest(sweep) == steady


def test_a_missing_fio_is_unavailable_and_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    name, measure = VS_FIO.best_of_fio([JOB], 1)

    assert name == "fio"
    with pytest.raises(bench.UnavailableError, match="apt install fio"):
        measure()


def test_a_failing_fio_is_unavailable_in_its_own_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program(tmp_path / "fio", "import sys; sys.exit('io_uring_queue_init failed')")
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(bench.UnavailableError, match="io_uring_queue_init failed"):
        fio.run(JOB)


def test_fio_is_told_to_use_huge_pages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    answer = report(direction(fio.GIB, 1), direction())
    program(tmp_path / "fio", f"import os\nif 'hugetlb=1' in os.environ['GLIBC_TUNABLES']: print({answer!r})")
    monkeypatch.setenv("PATH", str(tmp_path))

    assert fio.run(JOB)[RATE] == 0.5


def program(path: Path, source: str) -> None:
    body = path.with_suffix(".py")
    body.write_text(source + "\n")
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{body}" "$@"\n')
    path.chmod(0o755)


# --- deepnvme beside fio -----------------------------------------------------------------------------------------


def test_mixed_operations_alternate_and_each_direction_goes_through_the_file_on_its_own() -> None:
    course = VS_FIO.transfers(Workload.MIXED, file_bytes=4, operation_bytes=2)

    assert list(islice(course, 6)) == [(False, 0), (True, 0), (False, 2), (True, 2), (False, 0), (True, 0)]


@pytest.mark.parametrize(("workload", "writes"), [(Workload.READ, False), (Workload.OVERWRITE, True)])
def test_unmixed_workloads_only_read_or_only_write(workload: Workload, writes: bool) -> None:
    assert {each for each, _ in islice(VS_FIO.transfers(workload, 4, 1), 9)} == {writes}


@given(operation=st.integers(1, 50), more=st.integers(0, 200), workload=st.sampled_from(Workload))
def test_no_operation_reaches_over_the_end_of_the_file(operation: int, more: int, workload: Workload) -> None:
    course = VS_FIO.transfers(workload, operation + more, operation)

    assert all(0 <= offset <= more for _, offset in islice(course, 100))


class Drive:
    """Stands for a drive: an operation takes as long as somebody waits for it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.under_way: list[memoryview] = []
        self.most = 0

    def start(self, buffer: memoryview) -> Future[int]:
        assert buffer not in self.under_way, "the buffer is still in use"
        self.under_way.append(buffer)
        self.most = max(self.most, len(self.under_way))
        drive = self

        class Operation(Future[int]):
            def result(self, timeout: float | None = None) -> int:
                drive.under_way.remove(buffer)
                drive.now += 1.0
                return buffer.nbytes

        return Operation()

    def starts(self) -> Iterator[Callable[[memoryview], Future[int]]]:
        while True:
            yield self.start


def test_every_buffer_has_an_operation_pending_until_the_time_is_up_and_all_are_waited_for() -> None:
    drive = Drive()
    buffers = [memoryview(bytes([number]) * 10) for number in range(3)]

    moved = VS_FIO.keep_pending(drive.starts(), buffers, seconds=5.0, clock=lambda: drive.now)

    assert drive.most == 3
    assert drive.under_way == []
    assert moved == (4 + 3) * 10  # four ended within the time and were followed by another, three were left


@pytest.mark.parametrize("memory", VS_FIO.Memory)
def test_a_stream_measures_deepnvme_with_every_kind_of_memory(tmp_path: Path, memory: Any) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(4 * MIB))

    numbers = VS_FIO.stream(
        VS_FIO.Stream(path, 4 * MIB, Workload.MIXED, 0.01, "threads", memory, operation_bytes=MIB, pending=2)
    )

    assert set(numbers) == {RATE, CPU, P99}
    assert all(number > 0 for number in numbers.values())


# --- DeepNVMe ----------------------------------------------------------------------------------------------------


def test_a_transfer_is_measured_at_least_once_however_long_it_takes() -> None:
    calls: list[None] = []

    numbers = rival_deepnvme.moved(lambda: calls.append(None), fio.GIB, seconds=0.0)

    assert len(calls) == 1
    assert set(numbers) == {RATE, CPU}


def test_each_order_gets_one_line_of_answer() -> None:
    orders = io.StringIO("".join(json.dumps(asdict(replace(ORDER, threads=count))) + "\n" for count in (1, 2)))
    answers = io.StringIO()

    rival_deepnvme.serve(lambda order: {RATE: float(order.threads)}, orders, answers)

    assert [json.loads(line) for line in answers.getvalue().splitlines()] == [{RATE: 1.0}, {RATE: 2.0}]


def test_a_rival_that_cannot_be_measured_answers_why_and_goes_on() -> None:
    def refuses(order: Order) -> dict[str, float]:
        raise bench.UnavailableError("no libaio")

    answers = io.StringIO()
    rival_deepnvme.serve(refuses, io.StringIO(2 * (json.dumps(asdict(ORDER)) + "\n")), answers)

    assert [json.loads(line) for line in answers.getvalue().splitlines()] == 2 * [{"unavailable": "no libaio"}]


def rival(tmp_path: Path, source: str, limit_s: float = 60.0) -> Rival:
    """A rival whose program is `source`."""
    return Rival([sys.executable, "-c", source], os.environ, tmp_path, limit_s)


def test_the_rivals_answer_is_the_measurement(tmp_path: Path) -> None:
    source = (
        "import json, sys\nfor line in sys.stdin: print(json.dumps({'GiB/s': json.loads(line)['threads']}), flush=True)"
    )
    with rival(tmp_path, source) as answering:
        assert answering.measure(replace(ORDER, threads=2)) == {RATE: 2.0}


def test_a_rival_without_its_libraries_is_unavailable(tmp_path: Path) -> None:
    source = """for line in open(0): print('{"unavailable": "no libaio"}', flush=True)"""
    with rival(tmp_path, source) as lacking, pytest.raises(bench.UnavailableError, match="no libaio"):
        lacking.measure(ORDER)


def test_a_rival_that_dies_is_an_error_with_its_last_words(tmp_path: Path) -> None:
    source = "import os, sys; input(); print('assertion failed', file=sys.stderr, flush=True); os.abort()"
    with rival(tmp_path, source) as dying, pytest.raises(RuntimeError, match=r"status -6 .* assertion failed"):
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
    fastest = FakeRival(lambda order: order.queue_depth * order.threads + (order.waiting == "async"))

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
def test_deepnvme_moves_whole_tensors_of_both_kinds(tmp_path: Path, verb: str, tensors: str, memory: str) -> None:
    pytest.importorskip("torch", reason="the bench compares torch tensors")
    path = tmp_path / "tensor"
    path.write_bytes(bytes(MIB))
    measure = partial(VS_DEEPSPEED.deepnvme, verb=verb, tensors=tensors, memory=memory, path=path, nbytes=MIB)

    assert measure(seconds=0.0)[RATE] > 0
    assert path.read_bytes() == (bytes(MIB) if verb == "read" else b"\1" * MIB)
