"""`infinity doctor` under a real seccomp filter that refuses io_uring, as in a container.

Needs no root.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from deepnvme.machine.probing import kernel_version, probe_system
from support import seccomp
from support.doctor import run_doctor

pytestmark = pytest.mark.skipif(
    not seccomp.is_supported(), reason="the filter knows x86-64 and aarch64 only"
)


@pytest.fixture(autouse=True)
def _needs_a_kernel_with_io_uring() -> None:
    if kernel_version(probe_system().kernel_release) < (5, 13):
        pytest.skip("this kernel has no io_uring that could be used")


@pytest.mark.parametrize("error", ["EPERM", "ENOSYS"])
def test_a_filter_that_refuses_io_uring_is_reported_with_its_cause(
    error: str, tmp_path: Path
) -> None:
    if probe_system().uring.errno_name == "EPERM":
        pytest.skip("io_uring is refused here already")

    run = run_doctor("--json", tmp_path, launcher=seccomp.refusing(error))

    uring = run.machine["storage"]["uring"]
    assert (uring["available"], uring["errno_name"]) == (False, error)
    assert uring["refusal"]["kind"] == "seccomp"
    assert "seccomp filter" in uring["refusal"]["cause"]


def test_a_refused_io_uring_is_a_weak_point_with_advice_and_not_a_blocker(tmp_path: Path) -> None:
    run = run_doctor("--json", tmp_path, launcher=seccomp.refusing("EPERM"))

    [finding] = run.findings("io_uring")
    assert finding["severity"] == "weak"
    assert "not available (EPERM)" in finding["what"]
    assert finding["remedy"]
    assert run.status == (0 if run.report["can_run"] else 1)


def test_without_io_uring_the_next_backend_of_the_chain_is_reported(tmp_path: Path) -> None:
    run = run_doctor("--json", tmp_path, launcher=seccomp.refusing("EPERM"))

    storage = run.machine["storage"]
    assert storage["backend"] == ("aio" if storage["aio"]["available"] else "threads")


def test_the_filter_refuses_nothing_else(tmp_path: Path) -> None:
    run = run_doctor("--json", tmp_path, launcher=seccomp.refusing("EPERM"))

    assert run.machine["directories"][0]["plain_errno"] is None
