"""`infinity doctor` on this machine and on others: facts, tables, JSON, exit statuses."""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from infinity_engine.cli import doctor
from infinity_engine.cli.main import main
from infinity_engine.machine import survey as survey_module
from infinity_engine.machine.memory import CgroupMemory
from infinity_engine.machine.survey import Machine
from infinity_engine.machine.system import System
from infinity_engine.units import GiB
from support.doctor import run_doctor
from support.machines import good_directory, good_gpu, good_gpus, good_machine, no_gpus


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Return a function that runs doctor as if on `machine`, and returns its exit status and
    output.
    """

    def run(machine: Machine, *arguments: str, columns: int = 100) -> tuple[int, str]:
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setattr(doctor, "probe_system", lambda: machine.system)
        monkeypatch.setattr(survey_module, "survey", lambda *_: machine)
        status = main(["doctor", *arguments])
        return status, capsys.readouterr().out

    return run


def test_the_facts_about_this_machine_agree_with_other_readings(tmp_path: Path) -> None:
    run = run_doctor("--json", tmp_path)

    machine = run.machine
    assert run.report["schema"] == 2
    assert machine["system"]["release"] == os.uname().release
    assert machine["cpu"]["usable_cores"] == len(os.sched_getaffinity(0))
    assert machine["memory"]["total_bytes"] == os.sysconf("SC_PHYS_PAGES") * os.sysconf(
        "SC_PAGE_SIZE"
    )
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    shown = machine["storage"]["memlock"]
    assert (shown["soft_bytes"], shown["hard_bytes"]) == tuple(
        None if limit == resource.RLIM_INFINITY else limit for limit in (soft, hard)
    )
    [directory] = machine["directories"]
    space = os.statvfs(tmp_path)
    assert directory["path"] == str(tmp_path)
    assert directory["total_bytes"] == space.f_blocks * space.f_frsize


def test_exit_status_and_json_agree_on_whether_the_engine_can_run(tmp_path: Path) -> None:
    run = run_doctor("--json", tmp_path)

    assert run.status == (0 if run.report["can_run"] else 1)
    blockers = [finding for finding in run.report["findings"] if finding["severity"] == "blocker"]
    assert run.report["can_run"] == (blockers == [])


def test_without_a_directory_the_current_one_is_probed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    assert [found["path"] for found in run_doctor("--json").machine["directories"]] == [
        str(tmp_path)
    ]


def test_several_directories_are_probed_in_the_order_given(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / name).mkdir()

    found = run_doctor("--json", tmp_path / "b", tmp_path / "a").machine["directories"]

    assert [directory["path"] for directory in found] == [str(tmp_path / "b"), str(tmp_path / "a")]


def test_torch_is_not_imported(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise SystemExit('torch was imported')")

    run = run_doctor("--json", tmp_path, import_first=tmp_path)

    assert "torch was imported" not in run.stderr
    assert run.report["schema"] == 2


def test_a_machine_without_findings_can_run(on: Any) -> None:
    status, output = on(good_machine())

    assert status == 0
    assert "The engine can run here, with no weak point." in output
    assert "Findings" not in output


def test_every_group_of_facts_is_shown(on: Any) -> None:
    _, output = on(good_machine())

    titles = [line for line in output.splitlines() if line and not line.startswith(" ")]
    assert titles[:-1] == [
        "System",
        "CPU",
        "Memory",
        "GPUs",
        "GPU 0",
        "Drive under /mnt/a",
        "I/O",
        "Packages",
    ]
    for fact in (
        "Imaginary 9000",
        "64 GiB",
        "Imaginary GPU",
        "xfs",
        "Imaginary SSD 990",
        "madvise",
        "2.13.0+cu130",
    ):
        assert fact in output


def test_weak_points_are_shown_with_their_remedies_and_counted(on: Any) -> None:
    machine = replace(good_machine(), gpus=no_gpus("no NVIDIA driver"))
    machine = replace(machine, storage=replace(machine.storage, huge_pages="never"))

    status, output = on(machine)

    assert status == 0
    assert "WEAK     GPU: no NVIDIA driver; training runs on the CPU" in output
    assert "-> echo madvise | sudo tee" in output
    assert "The engine can run here, with 2 weak points." in output


def test_a_blocker_gives_exit_status_1_and_is_named_in_the_verdict(on: Any) -> None:
    machine = replace(good_machine(), packages=replace(good_machine().packages, torch=None))

    status, output = on(machine)

    assert status == 1
    assert "The engine cannot run here, because of: torch" in output


@pytest.mark.parametrize("columns", [60, 100, 140])
def test_words_stay_whole_at_any_usual_width(columns: int, on: Any) -> None:
    cgroup = CgroupMemory(
        limit_bytes=2 * GiB, used_bytes=GiB, directory="/sys/fs/cgroup/memory/job"
    )
    machine = replace(
        good_machine(),
        memory=replace(good_machine().memory, usable_bytes=2 * GiB, cgroup=cgroup),
        gpus=good_gpus(good_gpu(), good_gpu()),
        directories=(replace(good_directory(), plain_errno="EROFS"),),
    )

    _, wide = on(machine, columns=1000)
    _, narrow = on(machine, columns=columns)

    assert max(map(len, narrow.splitlines())) <= columns
    assert sorted(narrow.split()) == sorted(wide.split())


def test_json_is_one_object_that_holds_facts_and_findings(on: Any) -> None:
    machine = replace(good_machine(), directories=(replace(good_directory(), discard=True),))

    status, output = on(machine, "--json")

    report = json.loads(output)
    assert status == 0
    assert set(report) == {"schema", "version", "can_run", "findings", "machine"}
    assert report["machine"]["gpus"]["devices"][0]["link"]["max_generation"] == 4
    assert report["version"] == metadata.version("infinity-engine")
    [finding] = report["findings"]
    assert set(finding) == {"id", "severity", "subject", "what", "remedy"}
    assert (finding["id"], finding["severity"], finding["subject"]) == (
        "mounted-with-discard",
        "note",
        "/mnt/a",
    )


def test_a_backend_that_the_environment_asks_for_is_shown(
    on: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEPNVME_BACKEND", "aio")

    _, output = on(good_machine())

    assert "liburing; DEEPNVME_BACKEND asks for aio" in output


def test_the_driver_and_what_the_environment_shows_of_the_gpus_are_shown(on: Any) -> None:
    gpus = replace(good_gpus(good_gpu(), good_gpu()), visible_devices="1", visible_count=1)

    _, output = on(replace(good_machine(), gpus=gpus))

    assert "570.86.15, for CUDA up to 13.0" in output
    assert "1 of 2 (CUDA_VISIBLE_DEVICES=1)" in output


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])

    assert ended.value.code == 0
    assert capsys.readouterr().out == f"infinity {metadata.version('infinity-engine')}\n"


@pytest.mark.parametrize("arguments", [(), ("--json",)])
def test_a_directory_without_a_text_name_is_reported(
    arguments: tuple[str, ...], tmp_path: Path
) -> None:
    directory = tmp_path / os.fsdecode(b"n\xffme")
    directory.mkdir()

    run = run_doctor(*arguments, directory, environment={"COLUMNS": "500"})

    assert run.stderr == ""
    assert "n\\udcffme" in run.stdout


def test_a_fact_that_looks_like_markup_is_shown_as_it_is(on: Any) -> None:
    directory = replace(
        good_directory(), path="/mnt/[bold]x", mount_point="/mnt/[bold]", discard=True
    )

    _, output = on(replace(good_machine(), directories=(directory,)))

    assert "Drive under /mnt/[bold]x" in output
    assert "mounted at /mnt/[bold]" in output
    assert "NOTE     /mnt/[bold]x: mounted with" in output


@pytest.mark.parametrize("arguments", [(), ("--json",)])
def test_where_native_modules_do_not_load_that_is_the_finding(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken: System = replace(good_machine().system, native_problem="_native.so: wrong ELF class")
    monkeypatch.setattr(doctor, "probe_system", lambda: broken)

    status = main(["doctor", *arguments])

    assert status == 1
    assert "wrong ELF class" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["surgeon"], ["doctor", "--fast"]])
def test_wrong_usage_gives_exit_status_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)

    assert ended.value.code == 2
    assert "usage: infinity" in capsys.readouterr().err


def test_wrong_usage_gives_exit_status_2_to_the_shell() -> None:
    assert run_doctor("--fast").status == 2


@pytest.mark.parametrize("arguments", [["doctor"], ["doctor", "--json"], ["plan", "--models"]])
def test_a_reader_that_has_seen_enough_is_no_traceback(arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "infinity_engine.cli", *arguments]

    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)

    os.close(writer)
    assert done.stderr == ""
    # what a shell reports of what SIGPIPE ended: 1 would say something else
    assert done.returncode == 141


def test_an_interrupted_command_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "run", interrupted)

    assert main(["doctor"]) == 130
    assert capsys.readouterr().err == "infinity: interrupted\n"


def test_a_closed_pipe_is_no_error_of_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    from infinity_engine.cli import checkpoint, checkpoint_commands

    def closed(_: object) -> int:
        raise BrokenPipeError

    monkeypatch.setattr(checkpoint_commands, "COMMANDS", {"verify": closed})
    with pytest.raises(BrokenPipeError):
        checkpoint.run(argparse.Namespace(command="verify"))


def test_names_that_are_no_text_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "names").write_bytes(b"w\xe9\n")
    asked = ("checkpoint", "import", str(tmp_path), str(tmp_path / "to"))

    assert main([*asked, "--names", str(tmp_path / "names")]) == 2
    assert "a file of names in UTF-8" in capsys.readouterr().err
