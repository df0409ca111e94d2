"""Objects of the native modules may be made on one thread while another lets go of others."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys
import threading
from deepnvme import _native as storage
from infinity_engine import _native as kernels

sys.setswitchinterval(1e-5)
made = False

def let_go():
    while not made:
        plans = [storage.FaultPlan(0) for _ in range(100)]

others = [threading.Thread(target=let_go, daemon=True) for _ in range(2)]
for other in others:
    other.start()
for _ in range(500):
    {make}
made = True
for other in others:
    other.join()
"""


@pytest.mark.parametrize("make", ["storage.Pool(4096, None)", "kernels.ThreadPool([0])"])
def test_objects_are_made_while_other_threads_let_go_of_theirs(make: str) -> None:
    program = [sys.executable, "-c", PROGRAM.format(make=make)]
    ended = subprocess.run(program, capture_output=True, text=True, check=False, timeout=100)
    assert (ended.returncode, ended.stderr) == (0, "")
