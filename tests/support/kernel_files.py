"""Trees of files that stand for /proc and /sys, so that what a machine would say is tested on every
machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from deepnvme.machine.probing import SystemRoots


def write_tree(top: Path, files: Mapping[str, str]) -> Path:
    """Write `files` (relative path to text) under `top` and return it."""
    for name, text in files.items():
        path = top / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return top


def fake_roots(
    top: Path, *, proc: Mapping[str, str] | None = None, sys: Mapping[str, str] | None = None
) -> SystemRoots:
    """Return roots under `top` that hold the given files and nothing else."""
    return SystemRoots(
        proc=write_tree(top / "proc", proc or {}), sys=write_tree(top / "sys", sys or {})
    )


def mount_line(
    mount_point: str | Path,
    file_system: str,
    *,
    root: str = "/",
    options: str = "rw",
    **fields: str,
) -> str:
    """Return one line of mountinfo; `device` and `source` can be given as further fields."""
    device, source = fields.get("device", "0:30"), fields.get("source", file_system)
    return (
        f"31 23 {device} {root} {mount_point} rw,relatime shared:9 - {file_system} {source} "
        f"{options}\n"
    )
