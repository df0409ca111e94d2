"""Control groups that scripts limit memory with. Needs root and the memory controller."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from memory_group import Group, GroupUnavailableError, memory_group, memory_limited_group

MIB = 1 << 20
LIMIT = 64 * MIB


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def entered(stack: ExitStack, limit: int | None) -> Group:
    try:
        return stack.enter_context(memory_group(limit))
    except GroupUnavailableError as reason:
        pytest.skip(str(reason))


def takes(group: Group, nbytes: int) -> int:
    """Let a process in the group take memory; return its exit status."""
    work = f"block = bytearray({nbytes}); block[::4096] = bytes(len(block[::4096]))"
    return subprocess.run([*group.launcher, sys.executable, "-c", work], check=False).returncode


def test_a_process_within_the_limit_lives_and_its_peak_is_known(stack: ExitStack) -> None:
    group = entered(stack, LIMIT)

    assert takes(group, 16 * MIB) == 0
    assert group.kills == 0
    assert group.peak_bytes is None or 16 * MIB <= group.peak_bytes <= LIMIT


def test_a_process_beyond_the_limit_is_killed_and_that_is_counted(stack: ExitStack) -> None:
    group = entered(stack, LIMIT)

    assert takes(group, 2 * LIMIT) == -9
    assert group.kills == 1


def test_without_a_limit_only_the_peak_is_told(stack: ExitStack) -> None:
    group = entered(stack, None)

    assert takes(group, 2 * LIMIT) == 0
    assert group.kills == 0
    assert group.peak_bytes is None or group.peak_bytes >= 2 * LIMIT


def test_what_still_runs_at_the_end_is_killed_and_the_group_is_gone(stack: ExitStack) -> None:
    group = entered(stack, LIMIT)
    process = subprocess.Popen([*group.launcher, "sleep", "600"], stdout=subprocess.PIPE)
    while not (group.directory / "cgroup.procs").read_text():
        pass

    stack.close()

    assert process.wait() == -9
    assert not group.directory.exists()
    assert process.stdout is not None
    process.stdout.close()


def test_two_groups_can_be_had_at_once(stack: ExitStack) -> None:
    one = entered(stack, LIMIT)

    with memory_limited_group(LIMIT) as other:
        assert other.directory != one.directory
