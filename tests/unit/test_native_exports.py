"""What a native module shows to the other libraries of its process."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from deepnvme import _native as storage
from infinity_engine import _native as kernels


@pytest.mark.parametrize("module", [storage, kernels])
def test_a_native_module_shows_only_how_python_begins_it(module: object) -> None:
    # whatever else it showed could take the place of a name of the C++ runtime that torch uses
    if shutil.which("nm") is None:
        pytest.skip("no nm, with which symbols are listed, is on PATH")
    listed = subprocess.run(
        ["nm", "--dynamic", "--defined-only", "--format=posix", module.__file__],  # type: ignore[attr-defined]
        capture_output=True,
        text=True,
        check=True,
    )
    assert [line.split()[0] for line in listed.stdout.splitlines()] == ["PyInit__native"]
