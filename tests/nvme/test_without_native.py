"""What of deepnvme works where its native module cannot be loaded: enough to say so."""

from __future__ import annotations

import subprocess
import sys

import pytest

REFUSE_NATIVE = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name == "deepnvme._native":
            raise ImportError("wrong ELF class")
sys.meta_path.insert(0, Refuse())
"""


def python(source: str) -> subprocess.CompletedProcess[str]:
    """Run `source` in a fresh interpreter in which the native module cannot be loaded."""
    return subprocess.run(
        [sys.executable, "-c", f"{REFUSE_NATIVE}\n{source}"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.mark.parametrize(
    "module", ["deepnvme", "deepnvme.machine.diagnosis", "deepnvme.sizes", "deepnvme.cli.report"]
)
def test_a_module_that_needs_no_native_code_is_imported(module: str) -> None:
    assert python(f"import {module}").stderr == ""


@pytest.mark.parametrize(
    "use", ["from deepnvme import IOQueue", "import deepnvme; deepnvme.IOQueue"]
)
def test_what_needs_native_code_says_why_it_cannot_be_had(use: str) -> None:
    assert python(use).stderr.rstrip().endswith("ImportError: wrong ELF class")


def test_every_public_name_is_listed_and_found() -> None:
    import deepnvme

    assert set(deepnvme.__all__) <= set(dir(deepnvme))
    assert all(getattr(deepnvme, name).__name__ == name for name in deepnvme.__all__)


def test_a_name_that_is_not_public_is_an_ordinary_attribute_error() -> None:
    import deepnvme

    with pytest.raises(AttributeError, match="module 'deepnvme' has no attribute 'nonsense'"):
        deepnvme.nonsense  # type: ignore[attr-defined]  # noqa: B018
