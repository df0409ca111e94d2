"""CTest knows every native test: CMake finds them by reading the sources, and would not miss what
it overlooks.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import env

BUILT = env.BUILD / env.Needs.CHECK.value
# As loose as the compiler is about blanks and line breaks.
DEFINED = re.compile(r"^[ \t]*TEST\s*\(\s*(\w+)\s*\)", re.MULTILINE)


def test_every_test_in_the_sources_is_registered() -> None:
    if not (BUILT / "CTestTestfile.cmake").exists():
        pytest.skip(f"the native tests are not built in {BUILT}; scripts/test builds them")
    sources = sorted((env.ROOT / "native" / "tests").glob("*.cpp"))
    written = [
        f"{path.stem}.{name}" for path in sources for name in DEFINED.findall(path.read_text())
    ]

    line = [
        str(Path(sys.executable).parent / "ctest"),
        "--test-dir",
        str(BUILT),
        "--show-only=json-v1",
    ]
    shown = json.loads(subprocess.run(line, capture_output=True, text=True, check=True).stdout)
    registered = [test["name"] for test in shown["tests"]]

    assert sorted(written) == sorted(registered)
    assert written
