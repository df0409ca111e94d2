"""What an installed wheel must do under the Python that runs this program; scripts/test --matrix
runs it.

Every module can be imported from where it was installed, and both commands start and print their
reports as JSON.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import subprocess
import sys
import tempfile
from pathlib import Path

__all__ = ["check_commands", "import_everything"]

PACKAGES = ("deepnvme", "infinity_engine")
COMMANDS = ("deepnvme", "infinity")


def import_everything() -> int:
    """Import every module of both packages; return how many there are."""
    names = []
    for package in PACKAGES:
        root = importlib.import_module(package)
        if not str(root.__file__).startswith(sys.prefix):
            raise SystemExit(f"{package} comes from {root.__file__}, expected it in {sys.prefix}")
        names += [
            package,
            *(one.name for one in pkgutil.walk_packages(root.__path__, f"{package}.")),
        ]
    for name in names:
        if not name.endswith("__main__"):
            importlib.import_module(name)
    return len(names)


def check_commands() -> None:
    """Let each command report on an empty directory; an engine that cannot run here for want of
    torch is no fault.
    """
    for name in COMMANDS:
        with tempfile.TemporaryDirectory() as folder:
            line = [str(Path(sys.executable).parent / name), "doctor", "--json", folder]
            done = subprocess.run(line, capture_output=True, text=True, check=False)
        try:
            report = json.loads(done.stdout)
        except ValueError:
            report = None
        if done.returncode not in {0, 1} or done.stderr or not isinstance(report, dict):
            raise SystemExit(
                f"{' '.join(line)} ended with status {done.returncode}:\n{done.stdout}{done.stderr}"
            )


if __name__ == "__main__":
    print(f"{import_everything()} modules")
    check_commands()
