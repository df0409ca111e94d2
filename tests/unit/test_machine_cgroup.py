"""Limits of control groups, version 1 and 2, on trees of files that stand for /proc and for the
mounted groups.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepnvme.machine.probing import SystemRoots
from infinity_engine.machine.cpu import probe_cpu_quota
from infinity_engine.machine.memory import CgroupMemory, probe_cgroup_memory
from infinity_engine.units import GiB
from support.kernel_files import fake_roots, mount_line, write_tree

NO_LIMIT_V1 = str(0x7FFFFFFFFFFFF000)


def version_1(
    top: Path, group: str, files: Mapping[str, str], *, mounted: str = "/"
) -> SystemRoots:
    """Mount version 1's memory and cpu controllers, `mounted` of the hierarchy, for a process in
    `group`.
    """
    for controller in ("memory", "cpu,cpuacct"):
        (top / controller).mkdir(parents=True)
    mounts = "".join(
        mount_line(top / controller, "cgroup", root=mounted, options=f"rw,{controller}")
        for controller in ("memory", "cpu,cpuacct")
    )
    write_tree(top, files)
    groups = f"9:name=systemd:/\n4:memory:{group}\n2:cpu,cpuacct:{group}\n0::/\n"
    return fake_roots(top / "roots", proc={"self/mountinfo": mounts, "self/cgroup": groups})


def version_2(
    top: Path, group: str, files: Mapping[str, str], *, mounted: str = "/"
) -> SystemRoots:
    """Mount version 2's one hierarchy, `mounted` of it, for a process in `group`."""
    (top / "unified").mkdir(parents=True)
    write_tree(top / "unified", files)
    mounts = mount_line(top / "unified", "cgroup2", root=mounted)
    return fake_roots(
        top / "roots", proc={"self/mountinfo": mounts, "self/cgroup": f"0::{group}\n"}
    )


def test_version_1_limits_the_process_by_its_own_group(tmp_path: Path) -> None:
    roots = version_1(
        tmp_path,
        "/job",
        {
            "memory/memory.limit_in_bytes": NO_LIMIT_V1,
            "memory/job/memory.limit_in_bytes": str(2 * GiB),
            "memory/job/memory.usage_in_bytes": "4096",
        },
    )

    assert probe_cgroup_memory(roots) == CgroupMemory(
        limit_bytes=2 * GiB, used_bytes=4096, directory=str(tmp_path / "memory/job")
    )


def test_version_1_writes_no_limit_as_a_huge_number(tmp_path: Path) -> None:
    roots = version_1(tmp_path, "/job", {"memory/job/memory.limit_in_bytes": NO_LIMIT_V1})

    assert probe_cgroup_memory(roots) is None


def test_version_2_limits_the_process_by_its_own_group(tmp_path: Path) -> None:
    roots = version_2(
        tmp_path, "/job", {"job/memory.max": str(3 * GiB), "job/memory.current": "8192"}
    )

    assert probe_cgroup_memory(roots) == CgroupMemory(
        limit_bytes=3 * GiB, used_bytes=8192, directory=str(tmp_path / "unified/job")
    )


@pytest.mark.parametrize("name", ["a\x0bb", "a\x0cb", "a\u2028b"])
def test_a_group_may_have_any_characters_in_its_name(name: str, tmp_path: Path) -> None:
    roots = version_2(tmp_path, f"/{name}", {f"{name}/memory.max": str(3 * GiB)})

    limit = probe_cgroup_memory(roots)

    assert limit is not None
    assert limit.directory == str(tmp_path / "unified" / name)


def test_version_2_writes_no_limit_as_max(tmp_path: Path) -> None:
    roots = version_2(tmp_path, "/job", {"job/memory.max": "max\n", "job/memory.high": "max\n"})

    assert probe_cgroup_memory(roots) is None


def test_version_2s_throttling_limit_counts_as_a_limit(tmp_path: Path) -> None:
    roots = version_2(
        tmp_path, "/job", {"job/memory.max": str(4 * GiB), "job/memory.high": str(3 * GiB)}
    )

    limit = probe_cgroup_memory(roots)

    assert limit is not None
    assert limit.limit_bytes == 3 * GiB


def test_a_group_above_can_be_the_tightest(tmp_path: Path) -> None:
    roots = version_2(
        tmp_path,
        "/pod/container/job",
        {
            "pod/memory.max": str(1 * GiB),
            "pod/memory.current": "77",
            "pod/container/memory.max": str(8 * GiB),
            "pod/container/job/memory.max": "max",
        },
    )

    limit = probe_cgroup_memory(roots)

    assert limit == CgroupMemory(
        limit_bytes=1 * GiB, used_bytes=77, directory=str(tmp_path / "unified/pod")
    )


@given(limits=st.lists(st.one_of(st.none(), st.integers(1, 1 << 50)), min_size=1, max_size=5))
def test_the_tightest_limit_of_all_groups_above_holds(limits: list[int | None]) -> None:
    names = [str(depth) for depth in range(len(limits))]
    files = {
        f"{'/'.join(names[: depth + 1])}/memory.max": "max" if limit is None else str(limit)
        for depth, limit in enumerate(limits)
    }
    with tempfile.TemporaryDirectory() as top:
        found = probe_cgroup_memory(version_2(Path(top), f"/{'/'.join(names)}", files))

    tightest = min((limit for limit in limits if limit is not None), default=None)
    assert (found.limit_bytes if found else None) == tightest


def test_in_a_container_the_mount_is_the_containers_group(tmp_path: Path) -> None:
    roots = version_1(
        tmp_path,
        "/docker/1f2e",
        {"memory/memory.limit_in_bytes": str(2 * GiB)},
        mounted="/docker/1f2e",
    )

    limit = probe_cgroup_memory(roots)

    assert limit is not None
    assert limit.directory == str(tmp_path / "memory")


def test_a_group_below_the_containers_is_found_in_the_mount(tmp_path: Path) -> None:
    roots = version_1(
        tmp_path,
        "/docker/1f2e/job",
        {
            "memory/memory.limit_in_bytes": str(2 * GiB),
            "memory/job/memory.limit_in_bytes": str(1 * GiB),
        },
        mounted="/docker/1f2e",
    )

    limit = probe_cgroup_memory(roots)

    assert limit is not None
    assert limit.limit_bytes == 1 * GiB


def test_a_mount_of_another_group_holds_by_itself(tmp_path: Path) -> None:
    roots = version_1(
        tmp_path, "/", {"memory/memory.limit_in_bytes": str(2 * GiB)}, mounted="/docker/1f2e"
    )

    limit = probe_cgroup_memory(roots)

    assert limit is not None
    assert limit.directory == str(tmp_path / "memory")


@pytest.mark.parametrize("group", ["/kubepods/pod1/1f2e", "/../../elsewhere"])
def test_a_group_that_is_not_visible_leaves_the_mount_itself(group: str, tmp_path: Path) -> None:
    roots = version_2(tmp_path, group, {"memory.max": str(2 * GiB)})
    write_tree(tmp_path, {"memory.max": "1"})  # outside of the mount: no business of ours

    limit = probe_cgroup_memory(roots)

    assert limit is not None
    assert limit.directory == str(tmp_path / "unified")


def test_a_limit_whose_usage_cannot_be_read_still_holds(tmp_path: Path) -> None:
    roots = version_2(tmp_path, "/", {"memory.max": str(2 * GiB)})

    limit = probe_cgroup_memory(roots)

    assert limit is not None
    assert limit.used_bytes is None


def test_a_system_without_control_groups_has_no_limit(tmp_path: Path) -> None:
    roots = fake_roots(tmp_path)

    assert probe_cgroup_memory(roots) is None
    assert probe_cpu_quota(roots) is None


def test_version_2_grants_a_share_of_time(tmp_path: Path) -> None:
    roots = version_2(tmp_path, "/job", {"job/cpu.max": "150000 100000\n"})

    assert probe_cpu_quota(roots) == 1.5


def test_version_1_grants_a_share_of_time(tmp_path: Path) -> None:
    roots = version_1(
        tmp_path,
        "/job",
        {
            "cpu,cpuacct/job/cpu.cfs_quota_us": "50000\n",
            "cpu,cpuacct/job/cpu.cfs_period_us": "100000\n",
        },
    )

    assert probe_cpu_quota(roots) == 0.5


@pytest.mark.parametrize("quota", ["max 100000\n", ""])
def test_version_2_without_a_quota_grants_all_time(quota: str, tmp_path: Path) -> None:
    assert probe_cpu_quota(version_2(tmp_path, "/job", {"job/cpu.max": quota})) is None


def test_version_1_without_a_quota_grants_all_time(tmp_path: Path) -> None:
    files = {
        "cpu,cpuacct/job/cpu.cfs_quota_us": "-1\n",
        "cpu,cpuacct/job/cpu.cfs_period_us": "100000\n",
    }

    assert probe_cpu_quota(version_1(tmp_path, "/job", files)) is None


def test_the_smallest_quota_of_the_groups_above_holds(tmp_path: Path) -> None:
    roots = version_2(
        tmp_path, "/pod/job", {"pod/cpu.max": "200000 100000", "pod/job/cpu.max": "400000 100000"}
    )

    assert probe_cpu_quota(roots) == 2.0
