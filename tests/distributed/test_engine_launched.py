"""The program of docs/ranks.md meets the other ranks by itself, whoever has started them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support import rank_programs
from support.ranks import launched

ROOT = Path(__file__).resolve().parents[2]


def program_of_page() -> str:
    page = (ROOT / "docs/ranks.md").read_text()
    [program] = re.findall(r"^```python\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    return str(program)


def test_the_program_of_the_page_trains_on_two_ranks() -> None:
    assert launched(2, rank_programs.run_program, program_of_page()) == ["20 True\n", ""]


@pytest.mark.slow  # by default, torchrun starts the demo: tests/scripts/test_demo.py
def test_torchrun_starts_the_program_of_the_page(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(program_of_page())
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH")) if part)

    ended = subprocess.run(
        [*launcher, "train.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )

    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == ["20 True"]
