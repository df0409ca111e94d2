"""`infinity doctor` in a real memory-limited control group. Needs root and a writable hierarchy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from infinity_engine.units import MiB
from memory_group import Group, GroupUnavailableError, memory_limited_group
from support.doctor import run_doctor

LIMIT = 512 * MiB


@pytest.fixture
def group() -> Iterator[Group]:
    try:
        with memory_limited_group(LIMIT) as made:
            yield made
    except GroupUnavailableError as reason:
        pytest.skip(str(reason))


def test_the_limit_of_the_group_is_reported(group: Group, tmp_path: Path) -> None:
    run = run_doctor("--json", tmp_path, launcher=group.launcher)

    memory = run.machine["memory"]
    assert memory["usable_bytes"] == LIMIT
    assert memory["cgroup"]["limit_bytes"] == LIMIT
    assert memory["cgroup"]["directory"] == str(group.directory)
    assert 0 < memory["cgroup"]["used_bytes"] <= LIMIT


def test_a_limit_far_below_the_machine_is_a_weak_point(group: Group, tmp_path: Path) -> None:
    run = run_doctor("--json", tmp_path, launcher=group.launcher)

    if run.machine["memory"]["total_bytes"] <= 2 * LIMIT:
        pytest.skip("this machine is itself that small")
    [finding] = run.findings("memory limit")
    assert finding["severity"] == "weak"
    assert "512 MiB" in finding["what"]


def test_the_group_is_gone_afterwards() -> None:
    try:
        with memory_limited_group(LIMIT) as made:
            directory = made.directory
            assert directory.is_dir()
    except GroupUnavailableError as reason:
        pytest.skip(str(reason))

    assert not directory.exists()
