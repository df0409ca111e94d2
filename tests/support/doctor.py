"""Runs `infinity doctor` in a process of its own, as a user does, and reads its JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class DoctorRun:
    """How a run ended and what it wrote."""

    status: int
    stdout: str
    stderr: str

    @property
    def report(self) -> dict[str, Any]:
        """Return the JSON object that was printed."""
        report: dict[str, Any] = json.loads(self.stdout)
        return report

    @property
    def machine(self) -> dict[str, Any]:
        """Return the facts of the JSON report."""
        machine: dict[str, Any] = self.report["machine"]
        return machine

    def findings(self, subject: str) -> list[dict[str, str]]:
        """Return the findings about `subject` in the JSON report."""
        return [finding for finding in self.report["findings"] if finding["subject"] == subject]


def run_doctor(
    *arguments: str | Path,
    launcher: Sequence[str | Path] = (),
    environment: Mapping[str, str] | None = None,
    import_first: Path | None = None,
) -> DoctorRun:
    """Run `infinity doctor` started by `launcher`, with the packages in `import_first` ahead of all
    others.
    """
    path = filter(None, (str(import_first or ""), os.environ.get("PYTHONPATH", "")))
    done = subprocess.run(
        [*launcher, sys.executable, "-m", "infinity_engine.cli", "doctor", *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path), **(environment or {})},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    return DoctorRun(done.returncode, done.stdout, done.stderr)
