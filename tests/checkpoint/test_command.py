"""`infinity checkpoint` says what is there, finds what is damaged, and writes nothing that was not
asked for.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from infinity_engine.cli.main import main
from support.saved_streams import parameters_of, save, values_of
from support.warm_programs import WITH_SUPPORT

PARAMETERS = parameters_of({"layer.weight": (300, 100), "layer.bias": (100,)})


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    for step in (1, 2):
        save(
            tmp_path / "run",
            f"s{step}",
            PARAMETERS,
            values_of(PARAMETERS, step),
            step=step,
            ranks=2,
        )
    return tmp_path / "run"


def test_inspect_says_step_bytes_and_tensors(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["checkpoint", "inspect", str(saved), "--tensors"]) == 0
    text = capsys.readouterr().out
    assert "by 2 ranks" in text
    assert "2 tensors, 30,100 elements" in text
    assert "layer.weight" in text
    assert "300 x 100" in text


def test_inspect_as_json_is_one_object(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "inspect", str(saved), "--tag", "s1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["tag"], found["step"], found["ranks"]) == ("s1", 1, 2)
    assert [tensor["name"] for tensor in found["tensors"]] == ["layer.weight", "layer.bias"]


def test_verify_of_a_whole_checkpoint_is_zero(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["checkpoint", "verify", str(saved / "s1")]) == 0
    assert "all as written" in capsys.readouterr().out


def test_verify_names_file_offset_and_tensors(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shard = saved / "s2" / "rank-00001-00000.safetensors"
    data = bytearray(shard.read_bytes())
    data[-10] ^= 1
    shard.write_bytes(data)
    assert main(["checkpoint", "verify", str(saved)]) == 1
    text = capsys.readouterr().out
    assert "rank-00001-00000.safetensors: damaged within the MiB at offset 0" in text
    assert "layer.bias#exp_avg_sq@50" in text


def test_diff_counts_unlike_elements(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    same = [str(saved), "--tag", "s1", str(saved), "--other-tag", "s1"]
    assert main(["checkpoint", "diff", *same]) == 0
    assert "no difference" in capsys.readouterr().out
    assert (
        main(["checkpoint", "diff", str(saved), "--tag", "s1", str(saved), "--other-tag", "s2"])
        == 1
    )
    assert "layer.bias: 100 of 100 elements of master differ" in capsys.readouterr().out


def test_export_writes_weights(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["checkpoint", "export", str(saved), str(tmp_path / "out"), "--dtype", "bf16"]) == 0
    assert (tmp_path / "out" / "model.safetensors").exists()
    assert "1 files" in capsys.readouterr().out


def test_a_path_without_checkpoints_is_one_line_and_two(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["checkpoint", "verify", str(tmp_path / "nowhere")]) == 2
    assert "any checkpoint" in capsys.readouterr().err


def truncated(shard: Path) -> None:
    with shard.open("r+b") as file:
        file.truncate(100)


@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (lambda path: truncated(path / "rank-00000-00000.safetensors"), "it has 100 B"),
        (lambda path: (path / "rank-00000-00000.safetensors").unlink(), "is incomplete"),
        (lambda path: (path / "manifest").write_bytes(b"infinity-checkpoint 1 x"), "manifest"),
    ],
)
def test_verify_reports_what_cannot_be_read_at_all(
    saved: Path, capsys: pytest.CaptureFixture[str], break_it: Callable[[Path], None], said: str
) -> None:
    break_it(saved / "s2")
    data = bytearray((saved / "s2" / "rank-00001-00000.safetensors").read_bytes())
    data[-10] ^= 1
    (saved / "s2" / "rank-00001-00000.safetensors").write_bytes(data)
    assert main(["checkpoint", "verify", str(saved / "s2")]) == 1
    text = capsys.readouterr().out
    assert said in text
    if "it has" in said:  # the other file is read all the same
        assert "rank-00001-00000.safetensors: damaged within the MiB" in text


def test_verify_names_files_that_are_not_of_the_checkpoint(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (saved / "s2" / "notes.txt").write_text("mine")
    assert main(["checkpoint", "verify", str(saved / "s2")]) == 0
    assert "notes.txt: not a file of this checkpoint" in capsys.readouterr().out


MEASURED = """
import sys
from pathlib import Path
sys.modules["torch"] = None
import infinity_engine.memory  # with all that it imports: the baseline is of what lies there
from infinity_engine.cli.main import main
from support.resident_memory import ResidentMemory

path, other, to = sys.argv[1:]
resident = ResidentMemory()
for status, *command in (
    (0, "inspect", path, "--tensors"),
    (0, "verify", path),
    (1, "diff", path, other),
    (0, "export", path, f"{to}/weights", "--dtype", "bf16"),
    (0, "export", path, f"{to}/dcp", "--format", "dcp"),
    (0, "reshard", path, f"{to}/three", "--ranks", "3"),
):
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    assert main(["checkpoint", *command]) == status, command
    # Not ru_maxrss: after a fork and exec, that begins with the peak of the parent.
    print("peak", command[0], resident.peak_bytes() - resident.baseline_bytes)
"""


def test_commands_take_little_memory_and_need_no_torch(tmp_path: Path) -> None:
    large = parameters_of({"weight": (15_000, 1000)})  # 180 MB
    values = values_of(large)
    one = save(tmp_path / "one", "tag", large, values)
    other = save(tmp_path / "other", "tag", large, {name: -it for name, it in values.items()})
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, str(one), str(other), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        # glibc gives freed arrays back, so that a command does not have those of the one before.
        env={**os.environ, **WITH_SUPPORT, "MALLOC_MMAP_THRESHOLD_": "1048576"},
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("peak ")]
    peaks = [(command, int(nbytes)) for _, command, nbytes in lines]
    assert len(peaks) == 6
    for command, peak in peaks:
        assert peak < 152 << 20, command  # of which 42 MiB are modules
