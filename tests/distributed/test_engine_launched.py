"""What docs/ranks.md says to type: torchrun starts its program, which meets the others by
itself.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_torchrun_starts_the_program_of_the_page(tmp_path: Path) -> None:
    page = (ROOT / "docs/ranks.md").read_text()
    [program] = re.findall(r"^```python\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    (tmp_path / "train.py").write_text(program)
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
