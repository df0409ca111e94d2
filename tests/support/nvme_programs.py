"""Runs small programs in processes of their own, where a test needs one that dies, forks or has
fewer rights.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

TIMEOUT_S = 120.0


def run_program(
    text: str,
    *arguments: object,
    folder: Path,
    python: Sequence[str] = (),
    launcher: Sequence[str] = (),
    environment: dict[str, str] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> subprocess.CompletedProcess[str]:
    """Run `text` as a script with `arguments`; `python` are options of the interpreter, `launcher`
    what starts it.
    """
    script = folder / "program.py"
    script.write_text(text)
    script.chmod(0o644)
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith("DEEPNVME_")
    }
    return subprocess.run(
        [*launcher, sys.executable, *python, str(script), *map(str, arguments)],
        cwd=folder,
        env={**inherited, "DEEPNVME_PROFILE": "", **(environment or {})},
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )


def output_of(done: subprocess.CompletedProcess[str]) -> str:
    """Return what a program printed; fail with its errors if it failed."""
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout
