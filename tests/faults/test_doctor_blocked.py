"""`infinity doctor` where the engine cannot run: exit status 1, and what is in the way is a
finding.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from support.doctor import run_doctor
from support.kernel_files import write_tree


def test_a_missing_directory_is_a_finding(tmp_path: Path) -> None:
    run = run_doctor("--json", tmp_path / "missing")

    [finding] = run.findings(str(tmp_path / "missing"))
    assert (run.status, run.stderr) == (1, "")
    assert (finding["severity"], finding["what"]) == (
        "blocker",
        "there is no such directory (ENOENT)",
    )


def test_a_file_in_place_of_a_directory_is_a_finding(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    run = run_doctor("--json", tmp_path / "file")

    assert run.status == 1
    assert [finding["what"] for finding in run.findings(str(tmp_path / "file"))] == [
        "this is not a directory (ENOTDIR)"
    ]


def test_a_directory_that_nobody_can_write_is_a_finding() -> None:
    run = run_doctor("--json", "/proc")

    assert run.status == 1
    assert [finding["severity"] for finding in run.findings("/proc")] == ["blocker"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_of_others_is_a_finding(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)

    run = run_doctor("--json", tmp_path)

    assert run.status == 1
    assert "EACCES" in run.findings(str(tmp_path))[0]["what"]


def test_a_current_directory_that_nobody_named_and_nobody_can_write_is_no_blocker() -> None:
    in_proc = ["sh", "-c", 'cd /proc && exec "$@"', "elsewhere"]

    [by_default] = run_doctor("--json", launcher=in_proc).findings("/proc")
    [by_name] = run_doctor("--json", ".", launcher=in_proc).findings("/proc")

    assert (by_default["severity"], by_name["severity"]) == ("weak", "blocker")
    assert by_default["id"] == by_name["id"]
    assert "name the directory" in by_default["remedy"]


def test_an_old_torch_is_a_finding(tmp_path: Path) -> None:
    write_tree(tmp_path, {"torch-2.4.1.dist-info/METADATA": "Name: torch\nVersion: 2.4.1\n"})

    run = run_doctor("--json", tmp_path, import_first=tmp_path)

    [finding] = run.findings("torch")
    assert run.status == 1
    assert (finding["severity"], finding["what"]) == ("blocker", "PyTorch 2.4.1 is older than 2.6")


def test_native_modules_that_cannot_be_loaded_are_a_finding(tmp_path: Path) -> None:
    refusal = (
        "import sys\n"
        "class Refuse:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'deepnvme._native':\n"
        "            raise ImportError('wrong ELF class')\n"
        "sys.meta_path.insert(0, Refuse())\n"
    )
    write_tree(tmp_path, {"sitecustomize.py": refusal})

    run = run_doctor("--json", tmp_path, import_first=tmp_path)

    assert (run.status, run.stderr) == (1, "")
    [finding] = run.report["findings"]
    assert (finding["id"], finding["what"]) == (
        "native-modules-not-loaded",
        "they cannot be loaded: wrong ELF class",
    )
    assert set(run.machine) == {"system"}


def test_an_impossible_simd_level_is_a_finding(tmp_path: Path) -> None:
    run = run_doctor("--json", tmp_path, environment={"INFINITY_SIMD": "sse9"})

    assert run.status == 1
    assert 'got "sse9"' in run.findings("SIMD")[0]["what"]


def test_a_failing_write_is_a_finding(tmp_path: Path) -> None:
    no_bytes_in_files = ["sh", "-c", 'ulimit -f 0 && exec "$@"', "limited"]

    run = run_doctor("--json", tmp_path, launcher=no_bytes_in_files)

    assert run.status == 1
    assert [finding["what"] for finding in run.findings(str(tmp_path))] == [
        "no file can be written here (EFBIG)"
    ]


def test_the_tables_say_what_the_json_says(tmp_path: Path) -> None:
    run = run_doctor(tmp_path / "missing", environment={"COLUMNS": "200"})

    assert run.status == 1
    assert f"BLOCKER  {tmp_path / 'missing'}: there is no such directory (ENOENT)" in run.stdout
    assert f"because of: {tmp_path / 'missing'}" in run.stdout.splitlines()[-1]
