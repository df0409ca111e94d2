"""The `deepnvme` command: what doctor makes of facts, what bench and tune measure, choose and leave
behind.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import stat
import subprocess
import sys
import time
from concurrent.futures import Future
from dataclasses import replace
from importlib import metadata
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepnvme import UserMemory
from deepnvme.cli import bench, doctor, fio, scratch, tune
from deepnvme.cli.main import main
from deepnvme.cli.tune import Rates, choose_memory, choose_sizes
from deepnvme.machine.probing import DirectoryProbe, Memlock, SystemProbe
from deepnvme.machine.profile import Settings, drive_key, read_profile, write_profile
from deepnvme.measuring.measure import (
    MIB,
    Load,
    Measured,
    Workload,
    cut,
    in_turn,
    keep_pending,
    measure,
    pending_for,
    transfers,
)
from deepnvme.measuring.plain_threads import measure_threads, percentile
from deepnvme.memory.pool import Pool
from deepnvme.sizes import format_bytes, parse_size
from support.machines import good_directory, good_machine

PIECE = scratch.PIECE_BYTES


@pytest.fixture(autouse=True)
def profile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Give every test a place for a profile of its own, and no backend by environment."""
    path = tmp_path / "config" / "deepnvme" / "profile.json"
    monkeypatch.delenv("DEEPNVME_PROFILE", raising=False)
    monkeypatch.delenv("DEEPNVME_BACKEND", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return path


@pytest.fixture
def drive(tmp_path: Path) -> Path:
    """Return an empty directory to measure in."""
    folder = tmp_path / "drive"
    folder.mkdir()
    return folder


# --- doctor ---------------------------------------------------------------------------------------


def good_system() -> SystemProbe:
    return good_machine().storage


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Return a function that runs doctor as if on another machine, and returns its exit status and
    output.
    """

    def run(
        system: SystemProbe, *directories: DirectoryProbe, arguments: Any = (), columns: int = 100
    ) -> Any:
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setattr(doctor, "probe_system", lambda: system)
        found = {Path(directory.path): directory for directory in directories}
        monkeypatch.setattr(doctor, "probe_directory", found.__getitem__)
        monkeypatch.setattr(doctor.platform, "machine", lambda: "x86_64")  # type: ignore[attr-defined]
        status = main(["doctor", *arguments, *map(str, found)])
        return status, capsys.readouterr().out

    return run


def test_where_everything_is_well_doctor_says_so(on: Any) -> None:
    status, output = on(good_system(), good_directory())

    assert status == 0
    assert output.endswith("deepnvme works here, with no weak point.\n")
    assert "Findings" not in output


def test_every_fact_is_shown(on: Any) -> None:
    _, output = on(good_system(), good_directory())

    for fact in (
        "xfs on /dev/nvme0n1p1",
        "400 GiB free of 1 TiB",
        "Imaginary SSD 990, solid-state",
        "to 512 B",
    ):
        assert fact in output
    for fact in (
        "best backend     liburing",
        "available, with deferred completions",
        "unlimited",
        "madvise",
    ):
        assert fact in output


def test_weak_points_are_shown_with_their_remedies_and_counted(on: Any) -> None:
    directory = replace(good_directory(), direct_errno="EINVAL")

    status, output = on(replace(good_system(), huge_pages="never"), directory)

    assert status == 0
    assert "WEAK     huge pages: transparent huge pages are off" in output
    assert "-> use a directory on ext4 or xfs" in output
    assert "deepnvme works here, with 2 weak points." in output


def test_a_directory_in_which_nothing_works_gives_exit_status_1(on: Any) -> None:
    unwritable = replace(good_directory(), path="/mnt/b", plain_errno="EROFS")

    status, output = on(good_system(), good_directory(), unwritable)

    assert status == 1
    assert output.endswith("deepnvme cannot work in /mnt/b\n")


def test_the_settings_of_a_drive_and_where_they_are_from_are_shown(
    on: Any, profile: Path, drive: Path
) -> None:
    directory = replace(good_directory(), path=str(drive))
    _, before = on(good_system(), directory, columns=1000)
    write_profile(profile, drive_key(drive), Settings(MIB // 2, 8 * MIB, UserMemory.BOUNCE), {})

    _, after = on(good_system(), directory, columns=1000)

    assert (
        "chunks of 1 MiB, 16 MiB in flight, ordinary memory by zero copy (the defaults)" in before
    )
    assert (
        f"chunks of 512 KiB, 8 MiB in flight, ordinary memory by bounce (measured, in {profile})"
        in after
    )


def test_a_backend_that_the_environment_asks_for_is_shown(
    on: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEPNVME_BACKEND", "aio")

    _, output = on(good_system(), good_directory())

    assert "liburing; DEEPNVME_BACKEND asks for aio" in output


def test_json_holds_facts_settings_and_findings(on: Any) -> None:
    status, output = on(
        good_system(), replace(good_directory(), discard=True), arguments=["--json"]
    )

    report = json.loads(output)
    assert status == 0
    assert set(report) == {"schema", "version", "works", "findings", "system", "directories"}
    assert report["works"] is True
    assert report["system"]["backend"] == "liburing"
    assert report["directories"][0]["settings"]["user_memory"] == "zero_copy"
    assert (report["schema"], report["version"]) == (2, metadata.version("infinity-engine"))
    [finding] = report["findings"]
    assert set(finding) == {"id", "severity", "subject", "what", "remedy"}
    assert (finding["id"], finding["severity"], finding["subject"]) == (
        "mounted-with-discard",
        "note",
        "/mnt/a",
    )


@pytest.mark.parametrize("columns", [60, 100, 140])
def test_words_stay_whole_at_any_usual_width(columns: int, on: Any) -> None:
    system = replace(
        good_system(), huge_pages="never", memlock=Memlock(soft_bytes=1, hard_bytes=2, exempt=False)
    )
    unwritable = replace(good_directory(), plain_errno="EROFS")

    _, wide = on(system, unwritable, columns=1000)
    _, narrow = on(system, unwritable, columns=columns)

    assert max(map(len, narrow.splitlines())) <= columns
    assert sorted(narrow.split()) == sorted(wide.split())


def test_a_current_directory_that_nobody_named_and_nobody_can_write_is_no_blocker(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir("/proc")

    by_default = main(["doctor"]), capsys.readouterr().out
    by_name = main(["doctor", "."]), capsys.readouterr().out

    assert (by_default[0], by_name[0]) == (0, 1)
    assert "WEAK     /proc: " in by_default[1]
    assert "-> name the directory that is to hold the data" in by_default[1]
    assert "BLOCKER  /proc: " in by_name[1]


@pytest.mark.parametrize("arguments", [(), ("--json",)])
def test_a_directory_without_a_text_name_is_reported(
    arguments: tuple[str, ...], tmp_path: Path
) -> None:
    directory = tmp_path / os.fsdecode(b"n\xffme")
    directory.mkdir()

    output, errors = deepnvme("doctor", *arguments, directory, COLUMNS="500").communicate(
        timeout=120
    )

    assert errors == ""
    assert "n\\udcffme" in output


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])

    assert ended.value.code == 0
    assert capsys.readouterr().out == f"deepnvme {metadata.version('infinity-engine')}\n"


def test_doctor_looks_at_this_machine(drive: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["doctor", "--json", str(drive)])

    report = json.loads(capsys.readouterr().out)
    space = os.statvfs(drive)
    assert status == 0
    assert report["directories"][0]["path"] == str(drive)
    assert report["directories"][0]["total_bytes"] == space.f_blocks * space.f_frsize
    assert list(drive.iterdir()) == []


# --- the command ----------------------------------------------------------------------------------


def deepnvme(*arguments: str | Path, **environment: str) -> subprocess.Popen[str]:
    """Start the command in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "deepnvme.cli", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["surgeon"],
        ["doctor", "--fast"],
        ["bench"],
        ["bench", ".", "--backend", "floppy"],
        ["bench", ".", "--size", "1GB"],
        ["bench", ".", "--size", "100MiB"],
        ["bench", ".", "--size", "0B"],
        ["bench", ".", "--seconds", "soon"],
        ["bench", ".", "--seconds", "0"],
        ["bench", ".", "--seconds", "nan"],
        ["tune"],
        ["tune", ".", "--seconds", "1e9"],
        ["tune", ".", "--seconds", "-1"],
        ["bench", ".", "--size", "-1"],
        ["bench", ".", "--size", "1e400"],
        ["bench", ""],
        ["doctor", ""],
        ["tune", ""],
        ["ls", "store", "--generation", "last"],
    ],
)
def test_wrong_usage_gives_exit_status_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)

    assert ended.value.code == 2
    assert "usage: deepnvme" in capsys.readouterr().err


def test_no_command_shows_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([])

    told = capsys.readouterr().err
    for command in ("doctor", "bench", "tune", "ls", "cp", "verify"):
        assert f"    {command} " in told


@pytest.mark.parametrize("command", ["doctor", "bench", "tune"])
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])

    assert ended.value.code == 0
    assert f"usage: deepnvme {command}" in capsys.readouterr().out


def test_torch_is_not_imported(drive: Path, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")

    output, errors = deepnvme("doctor", drive, PYTHONPATH=str(tmp_path)).communicate(timeout=120)

    assert "torch was imported" not in errors
    assert "deepnvme works here" in output


def test_a_reader_that_has_seen_enough_is_no_traceback(drive: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "deepnvme.cli", "doctor", str(drive)]

    # Without it, Python keeps what is printed for one write.
    late = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}

    done = subprocess.run(
        command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False, timeout=120,
        env=late,
    )  # fmt: skip

    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("1GiB", 1 << 30),
        ("64 MiB", 64 << 20),
        ("4096B", 4096),
        ("2TiB", 2 << 40),
        ("7KiB", 7 << 10),
    ],
)
def test_a_size_is_read(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1 << 20, "1 MiB"),
        (3 << 29, "1.5 GiB"),
        (1 << 50, "1 PiB"),
        (1 << 60, "1024 PiB"),
    ],
)
def test_a_size_is_shown(nbytes: int, text: str) -> None:
    assert format_bytes(nbytes) == text


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        ((1 << 20) - 1, "1 MiB"),
        ((1 << 30) - 1, "1 GiB"),
        (1 << 55, "32 PiB"),
        (1 << 65, "32768 PiB"),
    ],
)
def test_a_size_that_rounds_up_to_the_next_unit_is_shown_in_it(nbytes: int, text: str) -> None:
    assert format_bytes(nbytes) == text


# --- measuring ------------------------------------------------------------------------------------


@given(workload=st.sampled_from(Workload), pieces=st.integers(1, 20), over=st.integers(0, 99))
def test_transfers_stay_in_the_file_and_pass_over_it_in_order(
    workload: Workload, pieces: int, over: int
) -> None:
    directions = 2 if workload is Workload.MIXED else 1

    course = list(islice(transfers(workload, pieces * 100 + over, 100), directions * pieces * 2))

    for writes in {writes for writes, _ in course}:
        once = [place * 100 for place in range(pieces)]
        assert [offset for direction, offset in course if direction == writes] == once * 2
    assert len({writes for writes, _ in course}) == directions


@given(seconds=st.integers(0, 20), buffers=st.integers(1, 5))
def test_as_many_operations_are_pending_as_there_are_buffers_until_the_time_is_up(
    seconds: int, buffers: int
) -> None:
    clock = iter(range(1000))
    pending: list[int] = []
    most = 0

    class Started(Future[int]):
        def result(self, timeout: float | None = None) -> int:
            pending.pop(0)
            return 10

    def start(_: memoryview) -> Future[int]:
        nonlocal most
        pending.append(1)
        most = max(most, len(pending))
        return Started()

    moved = keep_pending(
        iter(lambda: start, None),
        [memoryview(b"")] * buffers,
        float(seconds),
        clock=lambda: float(next(clock)),
    )

    assert pending == []
    assert most == buffers
    assert moved == 10 * (buffers + max(0, seconds - 1))


def test_every_round_measures_every_point_and_every_other_one_backwards() -> None:
    numbers = iter(range(1, 10))

    found = in_turn("abc", lambda _: next(numbers), rounds=3)

    assert found == {"a": [1, 6, 7], "b": [2, 5, 8], "c": [3, 4, 9]}


def test_the_first_round_is_whole_and_the_others_end_with_the_time() -> None:
    clock = iter(range(100))

    found = in_turn("abc", str.upper, rounds=50, seconds=2.5, clock=lambda: float(next(clock)))

    assert found == {"a": ["A"], "b": ["B", "B"], "c": ["C", "C"]}


@pytest.mark.parametrize(
    ("operation", "inflight", "pending"),
    [(MIB // 16, 16 * MIB, 64), (MIB, 16 * MIB, 32), (16 * MIB, 4 * MIB, 2)],
)
def test_twice_what_is_in_flight_is_kept_pending(
    operation: int, inflight: int, pending: int
) -> None:
    assert pending_for(operation, inflight) == pending


def test_memory_is_cut_into_pieces_that_do_not_overlap() -> None:
    memory = bytearray(100)

    for number, piece in enumerate(cut(memoryview(memory), 30, 3)):
        piece[:] = bytes([number + 1]) * 30

    assert memory == b"\1" * 30 + b"\2" * 30 + b"\3" * 30 + bytes(10)


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_is_shown_where_somebody_sees_it(
    terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")

    with scratch.progress_bar(4) as advance:
        advance("measuring reads")

    output = capsys.readouterr()
    assert output.out == ""
    assert ("measuring reads" in output.err and "25%" in output.err) == terminal
    assert terminal or output.err == ""


# --- bench ----------------------------------------------------------------------------------------


def fake_fio(folder: Path, script: str) -> str:
    """Put a program called fio into a folder, and return a PATH on which it is the only one."""
    folder.mkdir()
    program = folder / "fio"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return str(folder)


FIO_REPORT = {
    "jobs": [
        {
            "job_runtime": 2000,
            "usr_cpu": 10.0,
            "sys_cpu": 15.0,
            "read": {
                "io_bytes": 3 << 30,
                "clat_ns": {"percentile": {"50.000000": 2e6, "99.000000": 4e6}},
            },
            "write": {
                "io_bytes": 1 << 30,
                "clat_ns": {"percentile": {"50.000000": 1e6, "99.000000": 5e6}},
            },
        }
    ]
}
WORKING_FIO = (
    f"case $1 in --version) echo fio-9.9;; *) echo 'note: loud'; echo '{json.dumps(FIO_REPORT)}';; "
    "esac"
)
JOB = fio.Job(
    path=Path("/drive/a:b"),
    file_bytes=64 * MIB,
    workload=Workload.MIXED,
    block_bytes=MIB,
    inflight_bytes=16 * MIB,
    seconds=0.5,
)


def test_fio_is_asked_for_what_deepnvme_does() -> None:
    command = JOB.command()

    assert {"--bs=1048576", "--iodepth=16", "--rw=rw", "--ioengine=io_uring", "--direct=1"} <= set(
        command
    )
    assert {"--fixedbufs=1", "--registerfiles=1", "--runtime=500ms", "--refill_buffers=0"} <= set(
        command
    )
    assert r"--filename=/drive/a\:b" in command


@pytest.mark.parametrize(
    ("operation", "block"), [(MIB // 16, MIB // 16), (MIB, MIB), (16 * MIB, MIB)]
)
def test_fio_makes_requests_of_the_size_that_deepnvme_makes(operation: int, block: int) -> None:
    load = Load(
        path=Path("/x"),
        file_bytes=MIB,
        workload=Workload.READ,
        operation_bytes=operation,
        seconds=1.0,
    )

    job = fio.job_beside(load, Settings(MIB, 16 * MIB))

    assert (job.block_bytes, job.inflight_bytes) == (block, 16 * MIB)


def test_fios_report_is_read() -> None:
    measured = fio.parse("fio: some warning\n" + json.dumps(FIO_REPORT))

    assert measured == Measured(
        nbytes=4 << 30, seconds=2.0, cpu_s=0.5, p50_us=2000.0, p99_us=5000.0
    )
    assert (measured.bytes_per_s, measured.cpu_s_per_gib) == (2 << 30, 0.125)


def test_a_report_that_repeats_a_name_which_is_no_text_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = json.dumps({**FIO_REPORT, "filename": "n?me"}).replace("?", "\\377")
    monkeypatch.setenv("PATH", fake_fio(tmp_path / "bin", f"printf '{report}'"))

    assert fio.run(JOB).nbytes == 4 << 30


def run_bench(drive: Path, monkeypatch: pytest.MonkeyPatch, path: str, *arguments: str) -> int:
    """Measure as little as possible, with only what is in `path` to be found."""

    def measure_briefly(load: Load, *others: Any, **named: Any) -> Measured:
        return measure(replace(load, seconds=0.001), *others, **named)

    def threads_briefly(load: Load, buffers: Any) -> Measured:
        return measure_threads(replace(load, seconds=0.001), buffers)

    monkeypatch.setattr(bench, "measure", measure_briefly)
    monkeypatch.setattr(bench, "measure_threads", threads_briefly)
    monkeypatch.setenv("PATH", path)
    return main(
        ["bench", str(drive), "--size", format_bytes(PIECE), "--seconds", "0.1", *arguments]
    )


def test_bench_measures_every_load_and_removes_its_file(
    drive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status = run_bench(drive, monkeypatch, fake_fio(tmp_path / "bin", WORKING_FIO), "--json")

    report = json.loads(capsys.readouterr().out)
    assert status == 0
    assert report["fio"].startswith("fio-9.9 with io_uring")
    assert [(row["workload"], row["operation_bytes"]) for row in report["figures"]] == [
        (workload, size)
        for workload in ("read", "overwrite", "mixed")
        for size in (4096, 16384, 65536, MIB, 16 * MIB)
    ]
    for row in report["figures"]:
        assert row["deepnvme"]["gb_per_s"] > 0
        assert 0 < row["deepnvme"]["p50_ms"] <= row["deepnvme"]["p99_ms"]
        assert row["fio"]["gb_per_s"] == pytest.approx((4 << 30) / 2e9)
        assert row["threads"]["gb_per_s"] > 0
        assert 0 < row["threads"]["p50_ms"] <= row["threads"]["p99_ms"]
    assert list(drive.iterdir()) == []


def bench_row(ours: float, fio_s: float | None, threads: float) -> bench.Row:
    def figures(rate: float) -> bench.Figures:
        return bench.Figures(gb_per_s=rate, cpu_s_per_gib=1, p50_ms=1, p99_ms=1)

    return bench.Row(
        workload=Workload.READ,
        operation_bytes=4096,
        deepnvme=figures(ours),
        fio=None if fio_s is None else figures(fio_s),
        threads=figures(threads),
    )


def test_bench_names_what_a_rival_does_faster_with_the_ratio() -> None:
    rows = [bench_row(1.0, 2.0, 1.04), bench_row(1.0, None, 4.0)]

    assert bench.slower_than(rows, "fio") == ["read of 4 KiB (0.50)"]
    assert bench.slower_than(rows, "threads") == ["read of 4 KiB (0.25)"]


def test_bench_says_where_no_rival_is_faster(
    drive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "slower_than", lambda rows, rival: [])
    run_bench(drive, monkeypatch, str(tmp_path / "empty"))

    output = " ".join(capsys.readouterr().out.split())
    assert "Slower than fio, with the ratio: nothing." in output
    assert "Slower than threads, with the ratio: nothing." in output


@pytest.mark.parametrize("workload", Workload)
def test_threads_move_whole_operations_and_leave_nothing_open(
    workload: Workload, tmp_path: Path
) -> None:
    (tmp_path / "f").write_bytes(bytes(MIB))
    load = Load(
        path=tmp_path / "f",
        file_bytes=MIB,
        workload=workload,
        operation_bytes=4096,
        seconds=0.01,
    )
    before = len(list(Path("/proc/self/fd").iterdir()))
    measured = measure_threads(load, [Pool(4096).buffer(4096) for _ in range(3)])

    assert measured.nbytes >= 3 * 4096
    assert measured.nbytes % 4096 == 0
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_drive_that_refuses_the_threads_is_told(tmp_path: Path) -> None:
    load = Load(
        path=tmp_path / "none",
        file_bytes=MIB,
        workload=Workload.READ,
        operation_bytes=4096,
        seconds=0.01,
    )
    with pytest.raises(FileNotFoundError):
        measure_threads(load, [memoryview(bytearray(4096))])


@pytest.mark.parametrize(("share", "value"), [(0.0, 1), (0.5, 3), (0.99, 4), (1.0, 4)])
def test_a_percentile_is_one_of_the_values(share: float, value: int) -> None:
    assert percentile([1, 2, 3, 4], share) == value


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (None, "fio: fio is not installed (Debian"),
        (
            "case $1 in --version) echo fio-9.9;; *) echo refused >&2; exit 3;; esac",
            "fio: fio ended with status 3: re",
        ),
        ("echo fio-9.9", "fio: fio's report is not understood (ValueError"),
    ],
)
def test_where_fio_cannot_measure_bench_says_why_and_goes_on(
    script: str | None,
    said: str,
    drive: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    path = str(tmp_path / "empty") if script is None else fake_fio(tmp_path / "bin", script)

    status = run_bench(drive, monkeypatch, path)

    output = capsys.readouterr().out
    assert status == 0
    assert said in " ".join(output.split())
    assert max(map(len, output.splitlines())) <= 60
    assert list(drive.iterdir()) == []


def test_bench_uses_the_backend_it_is_told(
    drive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_bench(drive, monkeypatch, str(tmp_path / "empty"), "--json", "--backend", "threads")

    assert json.loads(capsys.readouterr().out)["backend"] == "threads"


@pytest.mark.parametrize(
    ("arguments", "environment", "said"),
    [
        (["bench", "{drive}", "--size", "1000TiB"], {}, "needs 1000 TiB, and "),
        (["bench", "{drive}/none"], {}, "there is no such directory (ENOENT); mkdir -p "),
        (
            ["bench", "{drive}"],
            {"DEEPNVME_BACKEND": "floppy"},
            "unknown backend 'floppy', from the environment",
        ),
        (["bench", "{drive}"], {"DEEPNVME_BACKEND": "memory"}, "memory has no drive to measure"),
        (["tune", "{drive}/none"], {}, "there is no such directory (ENOENT); mkdir -p "),
        (["tune", "{drive}"], {"DEEPNVME_PROFILE": ""}, "no place for a profile"),
    ],
)
def test_what_cannot_be_measured_is_one_line_and_exit_status_1(
    arguments: list[str],
    environment: dict[str, str],
    said: str,
    drive: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    status = main([argument.format(drive=drive) for argument in arguments])

    [line] = capsys.readouterr().err.splitlines()
    assert status == 1
    assert line.startswith("deepnvme: ")
    assert said in line
    assert list(drive.iterdir()) == []


def test_an_error_while_measuring_is_one_line_and_leaves_no_file(
    drive: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: Any, **__: Any) -> Measured:
        raise OSError(5, "read of 1 B at offset 0 stopped after 0 B", str(drive / "data"))

    monkeypatch.setattr(bench, "measure", fails)

    status = main(["bench", str(drive), "--size", format_bytes(PIECE)])

    assert status == 1
    assert (
        capsys.readouterr().err
        == f"deepnvme: {drive}/data: read of 1 B at offset 0 stopped after 0 B\n"
    )
    assert list(drive.iterdir()) == []


def test_a_file_that_may_not_grow_is_one_line_and_leaves_no_file(drive: Path) -> None:
    def forbid_large_files() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (PIECE // 2, PIECE // 2))

    command = [
        sys.executable,
        "-m",
        "deepnvme.cli",
        "bench",
        str(drive),
        "--size",
        format_bytes(PIECE),
    ]

    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        preexec_fn=forbid_large_files,
    )

    assert done.returncode == 1
    assert "the file may not grow that large" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert list(drive.iterdir()) == []


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 128 + 15), (signal.SIGHUP, 128 + 1)],
)
@pytest.mark.parametrize("command", ["bench", "tune"])
def test_a_signal_ends_it_and_leaves_no_file(
    command: str, number: int, status: int, drive: Path
) -> None:
    running = deepnvme(command, drive, "--seconds", "60")
    wait_for_a_file(drive)

    running.send_signal(number)
    output, errors = running.communicate(timeout=120)

    assert running.returncode == status
    assert output == ""
    assert "Traceback" not in errors
    assert list(drive.iterdir()) == []


INTERRUPTED_WITHIN = """
import builtins, os, signal, sys
from deepnvme.cli.start import command

name, place = sys.argv[1:]
load = builtins.__import__

def interrupt_first(wanted, *rest):
    if wanted == name:
        builtins.__import__ = load
        os.kill(os.getpid(), signal.SIGINT)
    return load(wanted, *rest)

builtins.__import__ = interrupt_first
sys.argv[1:] = ["doctor", place]
sys.exit(command())
"""


@pytest.mark.parametrize("name", ["deepnvme.cli.main", "argparse", "rich.table", "deepnvme"])
def test_ctrl_c_while_modules_are_imported_is_one_line(name: str, drive: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_WITHIN, name, drive],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )

    assert (done.returncode, done.stdout, done.stderr) == (130, "", "deepnvme: interrupted\n")


INTERRUPTED_AT_ITS_END = """
import atexit, os, signal, sys
from deepnvme.cli.start import command

atexit.register(os.kill, os.getpid(), signal.SIGINT)
sys.argv[1:] = ["--version"]
sys.exit(command())
"""


def test_ctrl_c_while_the_program_ends_is_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_AT_ITS_END],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )

    assert (done.returncode, done.stderr) == (130, "deepnvme: interrupted\n")


def test_ctrl_c_that_the_shell_has_the_command_ignore_is_ignored() -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_AT_ITS_END],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )

    assert (done.returncode, done.stderr) == (0, "")


WITHIN_A_PROGRAM = """
import os, signal, sys, threading
from deepnvme.cli import start

def run():
    try:
        start.main()
    except SystemExit as end:
        print(end.code, signal.getsignal(signal.SIGINT) is signal.default_int_handler)

sys.argv[1:] = ["--version"]
run()
thread = threading.Thread(target=run)
thread.start()
thread.join()
"""


def test_a_program_that_runs_a_command_line_keeps_its_handlers() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHIN_A_PROGRAM],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )

    version = f"deepnvme {metadata.version('infinity-engine')}"
    assert done.stdout.splitlines() == [version, "0 True"] * 2
    assert done.stderr == ""


FILES_OPENED_NEXT = """
import os, sys
from deepnvme.cli import main, start

def run(_):
    os.write(4, b"%d" % os.open(os.devnull, os.O_RDONLY))
    return 0

main.main = run
sys.exit(start.command())
"""


def test_no_file_has_the_number_of_a_stream_that_is_closed() -> None:
    def close_streams() -> None:
        os.dup2(1, 4)
        for stream in range(3):
            os.close(stream)

    done = subprocess.run(
        [sys.executable, "-c", FILES_OPENED_NEXT],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        timeout=120,
        close_fds=False,
        preexec_fn=close_streams,
    )

    assert done.returncode == 0
    assert int(done.stdout) > 2


def wait_for_a_file(folder: Path) -> None:
    end = time.monotonic() + 60
    while not any(path.stat().st_size for path in folder.iterdir()):
        assert time.monotonic() < end, "no file was made"
        time.sleep(0.01)


# --- tune -----------------------------------------------------------------------------------------

GRID = [Settings(chunk, inflight) for chunk in tune.CHUNKS for inflight in tune.INFLIGHT]
RATES = st.builds(Rates, st.floats(1e6, 1e11), st.floats(1e6, 1e11))


def test_the_default_is_one_of_the_choices() -> None:
    assert Settings() in GRID


@given(rates=st.lists(RATES, min_size=len(GRID), max_size=len(GRID)))
def test_what_is_chosen_is_within_noise_of_the_fastest(rates: list[Rates]) -> None:
    measured = dict(zip(GRID, rates, strict=True))

    chosen = choose_sizes(measured)

    assert measured[chosen].both * 1.1001 >= max(rates.both for rates in measured.values())


def test_noise_changes_no_default() -> None:
    measured = {settings: Rates(2e9, 3e9) for settings in GRID}
    measured[GRID[0]] = Rates(2.1e9, 3.1e9)

    assert choose_sizes(measured) == Settings()


def test_of_equals_the_one_with_the_least_in_flight_and_the_largest_chunk_is_chosen() -> None:
    measured = {settings: Rates(2e9, 3e9) for settings in GRID}
    measured[Settings()] = Rates(1e9, 1e9)

    assert choose_sizes(measured) == Settings(max(tune.CHUNKS), min(tune.INFLIGHT))


def test_reads_and_overwrites_count_the_same() -> None:
    good_at_one, good_at_both = GRID[0], GRID[1]

    assert (
        choose_sizes({good_at_one: Rates(1e9, 4e9), good_at_both: Rates(3e9, 3e9)}) == good_at_both
    )


@pytest.mark.parametrize(
    ("copied", "chosen"),
    [(1.05, UserMemory.ZERO_COPY), (1.15, UserMemory.BOUNCE), (0.5, UserMemory.ZERO_COPY)],
)
def test_copying_every_byte_must_be_worth_it(copied: float, chosen: UserMemory) -> None:
    direct = Rates(1e9, 2e9)
    measured = {
        UserMemory.ZERO_COPY: direct,
        UserMemory.BOUNCE: Rates(direct.read * copied, direct.overwrite * copied),
    }

    assert choose_memory(measured) is chosen


@pytest.fixture
def small_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "_FILE_BYTES", PIECE)


@pytest.mark.usefixtures("small_file")
def test_tune_keeps_what_it_chose_where_queues_find_it(
    drive: Path, profile: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")

    status = main(["tune", str(drive), "--seconds", "0.5"])

    output = capsys.readouterr().out
    chosen = read_profile(profile).for_path(drive / "any file")
    kept = json.loads(profile.read_text())["drives"][drive_key(drive)]
    assert status == 0
    assert chosen is not None
    assert replace(chosen, user_memory=UserMemory.ZERO_COPY) in GRID
    assert kept["measured"]["directory"] == str(drive)
    assert kept["measured"]["read_gb_per_s"] > 0
    assert f"Chosen: chunks of {format_bytes(chosen.chunk_bytes)}, " in output
    assert output.count("*") == 2  # in the table and in its legend
    assert max(map(len, output.splitlines())) <= 60 or str(profile) in output
    assert list(drive.iterdir()) == []


@pytest.mark.usefixtures("small_file")
def test_tune_measures_what_it_says_it_measures(
    drive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[tuple[Settings, Workload, bool]] = []

    def pretend(
        load: Load, buffers: list[memoryview], settings: Settings, *, backend: str, pool: Any
    ) -> Measured:
        measured.append((settings, load.workload, pool is not None))
        fast = settings == Settings(2 * MIB, 8 * MIB) or settings.user_memory is UserMemory.BOUNCE
        return Measured(
            nbytes=10**9 * (2 if fast else 1), seconds=1.0, cpu_s=0.1, p50_us=1.0, p99_us=1.0
        )

    monkeypatch.setattr(tune, "measure", pretend)

    main(["tune", str(drive), "--seconds", "100"])

    best = Settings(2 * MIB, 8 * MIB)
    loads = [Workload.READ, Workload.OVERWRITE]
    assert {point for point in measured if point[2]} == {
        (sizes, load, True) for sizes in GRID for load in loads
    }
    assert {point for point in measured if not point[2]} == {
        (replace(best, user_memory=way), load, False) for way in UserMemory for load in loads
    }


def test_tune_does_not_touch_a_newer_profile(
    drive: Path, profile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile.parent.mkdir(parents=True)
    profile.write_text('{"version": 99, "drives": {}}')

    status = main(["tune", str(drive)])

    assert status == 1
    assert "it is of version 99" in capsys.readouterr().err
    assert profile.read_text() == '{"version": 99, "drives": {}}'
