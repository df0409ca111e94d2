"""What a machine has to give: on fake files of the kernel, on this machine, and in a real
memory-limited group.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepnvme.machine.probing import SystemRoots
from infinity_engine.errors import ConfigError
from infinity_engine.machine.capacity import directories_beside, probe_capacity
from infinity_engine.units import GiB, MiB
from memory_group import GroupUnavailableError, memory_limited_group
from support.kernel_files import fake_roots, mount_line, write_tree


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with 64 GiB of memory, 40 GiB of them available, and 1000 bytes free in every
    directory.
    """
    memory = SimpleNamespace(total=64 * GiB, available=40 * GiB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))


def in_group(top: Path, files: Mapping[str, str]) -> SystemRoots:
    """Return the roots of a process in a control group of version 2 that has these files."""
    write_tree(top / "group", files)
    proc = {"self/mountinfo": mount_line(top / "group", "cgroup2"), "self/cgroup": "0::/\n"}
    return fake_roots(top / "roots", proc=proc)


def on_drives(top: Path, devices: Mapping[str, str]) -> tuple[list[str], SystemRoots]:
    """Make directories, each a mount of the device given, and return them with the roots that say
    so.
    """
    for name in devices:
        (top / name).mkdir()
    mounts = "".join(
        mount_line((top / name).resolve(), "xfs", device=device) for name, device in devices.items()
    )
    return [str(top / name) for name in devices], fake_roots(
        top / "roots", proc={"self/mountinfo": mounts}
    )


# --- host ---


@pytest.mark.usefixtures("machine")
def test_a_tenth_of_the_available_memory_is_left_for_the_rest_of_the_process(
    tmp_path: Path,
) -> None:
    assert probe_capacity([], roots=fake_roots(tmp_path)).host == 36 * GiB


def test_at_least_1_gib_of_memory_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SimpleNamespace(total=8 * GiB, available=3 * GiB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)

    assert probe_capacity([], roots=fake_roots(tmp_path)).host == 2 * GiB


@pytest.mark.usefixtures("machine")
def test_a_control_group_gives_its_limit_less_what_it_uses(tmp_path: Path) -> None:
    roots = in_group(tmp_path, {"memory.max": str(24 * GiB), "memory.current": str(4 * GiB)})

    assert probe_capacity([], roots=roots).host == 18 * GiB


@pytest.mark.usefixtures("machine")
def test_a_control_group_with_more_than_the_machine_has_available_changes_nothing(
    tmp_path: Path,
) -> None:
    roots = in_group(tmp_path, {"memory.max": str(60 * GiB), "memory.current": str(1 * GiB)})

    assert probe_capacity([], roots=roots).host == 36 * GiB


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    "stat",
    [
        f"anon 1\ninactive_file {16 * GiB}\nactive_file {GiB}\n",
        f"inactive_file 5\ntotal_cache 9\ntotal_inactive_file {16 * GiB}\n",
    ],
)
def test_file_cache_that_the_kernel_can_drop_does_not_count_as_used(
    stat: str, tmp_path: Path
) -> None:
    files = {"memory.max": str(24 * GiB), "memory.current": str(20 * GiB), "memory.stat": stat}

    assert probe_capacity([], roots=in_group(tmp_path, files)).host == 18 * GiB


@pytest.mark.usefixtures("machine")
def test_a_larger_limit_above_that_others_have_used_up_counts(tmp_path: Path) -> None:
    limits = {"memory.max": str(30 * GiB), "memory.current": str(28 * GiB)}
    own = {"job/memory.max": str(8 * GiB), "job/memory.current": "0"}
    write_tree(tmp_path / "group", {**limits, **own})
    proc = {"self/mountinfo": mount_line(tmp_path / "group", "cgroup2"), "self/cgroup": "0::/job\n"}

    assert probe_capacity([], roots=fake_roots(tmp_path / "roots", proc=proc)).host == 1 * GiB


@pytest.mark.usefixtures("machine")
def test_a_group_whose_usage_cannot_be_read_counts_as_unused(tmp_path: Path) -> None:
    assert (
        probe_capacity([], roots=in_group(tmp_path, {"memory.max": str(20 * GiB)})).host == 18 * GiB
    )


@pytest.mark.usefixtures("machine")
def test_a_group_that_uses_more_than_its_limit_gives_nothing_and_no_less(tmp_path: Path) -> None:
    roots = in_group(tmp_path, {"memory.high": str(2 * GiB), "memory.current": str(3 * GiB)})

    assert probe_capacity([], roots=roots).host == 0


def test_a_real_control_group_limits_the_capacity() -> None:
    limit = 3 * GiB
    program = (
        "from infinity_engine.machine.capacity import probe_capacity; "
        "print(probe_capacity([]).host)"
    )
    try:
        with memory_limited_group(limit) as group:
            done = subprocess.run(
                [*group.launcher, sys.executable, "-c", program],
                capture_output=True,
                text=True,
                check=True,
            )
    except GroupUnavailableError as reason:
        pytest.skip(str(reason))

    if psutil.virtual_memory().available < limit:
        pytest.skip("this machine has less than that available")
    assert 0 < int(done.stdout) < limit - GiB


def test_files_read_in_a_real_group_leave_the_cpu_as_a_device_its_memory(tmp_path: Path) -> None:
    """A calibration sizes what it moves by that; files in the cache must not shrink it to nothing."""
    pytest.importorskip("torch", reason="the CPU as a device needs it")
    limit = 1 * GiB
    program = (
        "import sys; from pathlib import Path; from infinity_engine.accel.cpu import CpuAccelerator; "
        "file = Path(sys.argv[1]); file.write_bytes(bytes(600 << 20)); accelerator = CpuAccelerator(); "
        "import os; os.sync(); print(accelerator.memory().free, accelerator.memory().total)"
    )
    try:
        with memory_limited_group(limit) as group:
            command = [*group.launcher, sys.executable, "-c", program, str(tmp_path / "file")]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
    except GroupUnavailableError as reason:
        pytest.skip(str(reason))

    free, total = map(int, done.stdout.split())
    if psutil.virtual_memory().available < limit:
        pytest.skip("this machine has less than that available")
    assert free > 500 * MiB
    assert total == limit


# --- device ---


@pytest.mark.parametrize(
    ("free", "capacity"),
    [(0, 0), (400 * MiB, 0), (512 * MiB, 0), (8 * GiB, 8 * GiB - 512 * MiB), (80 * GiB, 76 * GiB)],
)
def test_a_twentieth_of_the_device_and_at_least_512_mib_is_left(
    free: int, capacity: int, tmp_path: Path
) -> None:
    assert probe_capacity([], device_free_bytes=free, roots=fake_roots(tmp_path)).device == capacity


@given(st.integers(0, 2**50), st.integers(0, 2**50))
def test_more_free_memory_gives_no_less_and_never_all_of_it(free: int, more: int) -> None:
    one, other = (
        probe_capacity([], device_free_bytes=nbytes).device for nbytes in (free, free + more)
    )

    assert 0 <= one <= other
    assert other < max(free + more, 1)


# --- NVMe ---


@pytest.mark.usefixtures("machine")
def test_a_twentieth_of_a_drives_free_space_is_left(tmp_path: Path) -> None:
    directories, roots = on_drives(tmp_path, {"a": "259:1", "b": "259:2"})

    assert probe_capacity(directories, roots=roots).nvme == {
        directories[0]: 950,
        directories[1]: 950,
    }


@pytest.mark.usefixtures("machine")
def test_directories_on_one_file_system_have_equal_parts_of_its_space(tmp_path: Path) -> None:
    directories, roots = on_drives(tmp_path, {"a": "259:1", "b": "259:2", "bound": "259:1"})

    assert list(probe_capacity(directories, roots=roots).nvme.values()) == [475, 950, 475]


def test_directories_are_counted_on_the_file_system_that_they_share(tmp_path: Path) -> None:
    directories, roots = on_drives(tmp_path, {"a": "259:1", "b": "259:2", "bound": "259:1"})

    assert list(directories_beside(directories, roots).values()) == [2, 1, 2]


@pytest.mark.usefixtures("machine")
def test_a_link_to_a_directory_is_on_the_file_system_that_it_leads_to(tmp_path: Path) -> None:
    directories, roots = on_drives(tmp_path, {"a": "259:1", "b": "259:2"})
    link = tmp_path / "b" / "link"
    link.symlink_to(tmp_path / "a")

    assert probe_capacity([directories[0], str(link)], roots=roots).nvme == {
        directories[0]: 475,
        str(link): 475,
    }


@pytest.mark.usefixtures("machine")
def test_directories_on_no_known_mount_count_as_on_one_file_system(tmp_path: Path) -> None:
    directories, _ = on_drives(tmp_path, {"a": "259:1", "b": "259:2"})

    assert list(probe_capacity(directories, roots=fake_roots(tmp_path / "none")).nvme.values()) == [
        475,
        475,
    ]


def test_two_directories_here_do_not_give_more_than_is_free(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()

    capacity = probe_capacity([str(tmp_path / "a"), str(tmp_path / "b")])

    assert 0 < sum(capacity.nvme.values()) <= shutil.disk_usage(tmp_path).total


def test_a_directory_that_is_not_there_is_refused_with_what_to_do(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")

    with pytest.raises(
        ConfigError,
        match=r"Budget\.nvme: expected a directory that can be used \(No such file.*make it, or mou",
    ):
        probe_capacity([missing])


def test_a_file_is_no_directory_to_use(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(ConfigError, match=r"a directory that can be used \(Not a directory\)"):
        probe_capacity([str(tmp_path / "file")])
