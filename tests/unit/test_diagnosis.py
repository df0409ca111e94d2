"""Each finding about storage from the facts that lead to it, and none from storage without a weak
point.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from deepnvme.machine.diagnosis import (
    Chosen,
    Finding,
    Severity,
    about_directory,
    about_system,
    blocker,
    can_work,
    note,
    weak,
    worst_first,
)
from deepnvme.machine.probing import (
    AioProbe,
    Backend,
    Drive,
    LiburingProbe,
    Memlock,
    ProcessLimits,
    UringProbe,
    uring_refusal,
)
from support.machines import good_directory, good_machine

GOOD = good_machine().storage
NO_LIBURING = LiburingProbe(version=None, usable=False, reason="not installed", fits_cpu=True)
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def the_finding(found: Iterator[Finding]) -> Finding:
    """Return the one finding."""
    [finding] = found
    assert finding.what
    assert finding.remedy
    return finding


def about_good_system_with(**facts: Any) -> Iterator[Finding]:
    """Return the findings about an x86 machine's good storage with some facts replaced."""
    return about_system(replace(GOOD, **facts), "x86_64")


def about_good_directory_with(**facts: Any) -> Iterator[Finding]:
    """Return the findings about a good directory, named by the user, with some facts replaced."""
    return about_directory(replace(good_directory(), **facts), Chosen.BY_NAME)


# --- the system -----------------------------------------------------------------------------------


def test_nothing_is_said_about_a_good_system() -> None:
    assert list(about_good_system_with()) == []


def test_a_refused_io_uring_is_weak_with_its_cause_its_stand_in_and_the_advice() -> None:
    limits = ProcessLimits(
        kernel_release="6.8.0",
        seccomp_mode=0,
        uring_disabled=2,
        uring_exempt=False,
        can_lock_memory=False,
    )
    refusal = uring_refusal(errno.EPERM, limits)
    uring = UringProbe(
        available=False,
        errno_name="EPERM",
        refusal=refusal,
        features=0,
        defer_taskrun=False,
        opcodes=(),
    )

    finding = the_finding(about_good_system_with(uring=uring, backend=Backend.AIO))

    assert (finding.id, finding.severity, finding.subject) == (
        "io-uring-unavailable",
        Severity.WEAK,
        "io_uring",
    )
    assert finding.what == f"not available (EPERM): {refusal.cause}; aio is used instead"
    assert finding.remedy == refusal.advice


def test_linux_aio_is_not_missed_while_there_is_io_uring() -> None:
    assert list(about_good_system_with(aio=AioProbe(available=False, errno_name="ENOSYS"))) == []


def test_a_ring_that_cannot_defer_completions_means_an_old_kernel() -> None:
    uring = replace(GOOD.uring, defer_taskrun=False)

    finding = the_finding(about_good_system_with(uring=uring, kernel_release="5.15.0"))

    assert (finding.id, finding.severity, finding.subject) == (
        "io-uring-without-deferral",
        Severity.WEAK,
        "kernel",
    )
    assert "5.15.0" in finding.what


def test_a_missing_python_liburing_is_weak_on_x86() -> None:
    finding = the_finding(about_good_system_with(liburing=NO_LIBURING, backend=Backend.URING))

    assert (finding.id, finding.severity) == ("python-liburing-unusable", Severity.WEAK)
    assert finding.what.startswith("not installed")


def test_a_missing_python_liburing_is_no_news_where_it_has_no_builds() -> None:
    assert list(about_system(replace(GOOD, liburing=NO_LIBURING), "aarch64")) == []


@pytest.mark.parametrize(
    ("memlock", "ids"),
    [
        (Memlock(soft_bytes=64 * KIB, hard_bytes=64 * KIB, exempt=False), ["memlock-limit-low"]),
        (Memlock(soft_bytes=8 * MIB, hard_bytes=None, exempt=False), ["memlock-limit-low"]),
        (Memlock(soft_bytes=8 * MIB, hard_bytes=8 * MIB, exempt=True), []),
        (Memlock(soft_bytes=1 * GIB, hard_bytes=1 * GIB, exempt=False), []),
    ],
)
def test_a_small_memlock_limit_is_weak_for_those_whom_it_binds(
    memlock: Memlock, ids: list[str]
) -> None:
    assert [finding.id for finding in about_good_system_with(memlock=memlock)] == ids


@pytest.mark.parametrize(
    ("mode", "ids"), [("never", ["huge-pages-off"]), ("madvise", []), ("always", []), (None, [])]
)
def test_huge_pages_switched_off_are_weak(mode: str | None, ids: list[str]) -> None:
    assert [finding.id for finding in about_good_system_with(huge_pages=mode)] == ids


# --- a directory ----------------------------------------------------------------------------------

UNUSABLE: list[tuple[dict[str, Any], str, str, str]] = [
    (
        {"plain_errno": "ENOENT", "total_bytes": None, "free_bytes": None},
        "directory-missing",
        "there is no such directory (ENOENT)",
        "mkdir -p /mnt/a",
    ),
    (
        {"plain_errno": "ENOENT"},
        "directory-unusable",
        "no file can be written here (ENOENT)",
        "another",
    ),
    ({"plain_errno": "ENOTDIR"}, "directory-is-a-file", "not a directory (ENOTDIR)", "directory"),
    (
        {"plain_errno": "EACCES"},
        "directory-not-writable",
        "may not write here (EACCES)",
        "sudo install -d -o $USER",
    ),
    (
        {"plain_errno": "EROFS"},
        "directory-read-only",
        "mounted read-only (EROFS)",
        "remount,rw /mnt/a",
    ),
    (
        {"plain_errno": "ENOSPC", "free_bytes": 0},
        "drive-full",
        "no space is left (ENOSPC)",
        "free space",
    ),
    ({"free_bytes": 0}, "drive-full", "no space is left (ENOSPC)", "free space"),
    ({"plain_errno": "EDQUOT"}, "quota-used-up", "quota is used up (EDQUOT)", "free space"),
    ({"plain_errno": "EIO"}, "directory-unusable", "no file can be written here (EIO)", "another"),
]


def test_nothing_is_said_about_a_good_directory() -> None:
    assert list(about_good_directory_with()) == []


@pytest.mark.parametrize(("facts", "id", "said", "remedy"), UNUSABLE)
def test_a_named_directory_in_which_nothing_can_be_written_blocks(
    facts: dict[str, Any], id: str, said: str, remedy: str
) -> None:
    finding = the_finding(about_good_directory_with(**facts))

    assert (finding.id, finding.severity, finding.subject) == (id, Severity.BLOCKER, "/mnt/a")
    assert said in finding.what
    assert remedy in finding.remedy


@pytest.mark.parametrize("facts", [facts for facts, *_ in UNUSABLE])
def test_a_directory_that_nobody_named_blocks_nothing_and_another_can_be_named(
    facts: dict[str, Any],
) -> None:
    directory = replace(good_directory(), **facts)

    finding = the_finding(about_directory(directory, Chosen.BY_DEFAULT))

    blocking = the_finding(about_directory(directory, Chosen.BY_NAME))
    assert finding == replace(blocking, severity=Severity.WEAK, remedy=finding.remedy)
    assert "name the directory that is to hold the data" in finding.remedy


def test_a_path_in_a_command_is_quoted_for_the_shell() -> None:
    finding = the_finding(
        about_good_directory_with(path="/mnt/my drive", plain_errno="ENOENT", total_bytes=None)
    )

    assert finding.remedy == "mkdir -p '/mnt/my drive'"


@pytest.mark.parametrize("chosen", Chosen)
@pytest.mark.parametrize("file_system", ["tmpfs", "ramfs"])
def test_a_directory_in_memory_is_weak(file_system: str, chosen: Chosen) -> None:
    in_memory = replace(
        good_directory(), file_system=file_system, in_memory=True, direct_errno="EINVAL", drive=None
    )

    finding = the_finding(about_directory(in_memory, chosen))

    assert (finding.id, finding.severity, finding.subject) == (
        "directory-in-memory",
        Severity.WEAK,
        "/mnt/a",
    )
    assert f"{file_system} is host memory" in finding.what


def test_a_file_system_that_refuses_direct_io_is_weak() -> None:
    finding = the_finding(about_good_directory_with(file_system="zfs", direct_errno="EINVAL"))

    assert (finding.id, finding.severity, finding.subject) == (
        "direct-io-refused",
        Severity.WEAK,
        "/mnt/a",
    )
    assert "zfs refuses O_DIRECT (EINVAL)" in finding.what


@pytest.mark.parametrize(
    ("name", "id", "severity"),
    [
        ("sda", "drive-rotating", Severity.WEAK),
        ("vda", "drive-virtual-rotating", Severity.NOTE),
        ("xvdb", "drive-virtual-rotating", Severity.NOTE),
    ],
)
def test_a_rotating_drive_is_weak_unless_it_is_virtual(
    name: str, id: str, severity: Severity
) -> None:
    finding = the_finding(
        about_good_directory_with(drive=Drive(name=name, model=None, rotational=True))
    )

    assert (finding.id, finding.severity, finding.subject) == (id, severity, "/mnt/a")
    assert name in finding.what


def test_a_drive_that_does_not_say_whether_it_rotates_is_no_news() -> None:
    assert (
        list(about_good_directory_with(drive=Drive(name="sda", model=None, rotational=None))) == []
    )


def test_a_mount_with_discard_is_worth_a_note() -> None:
    finding = the_finding(about_good_directory_with(discard=True))

    assert (finding.id, finding.severity) == ("mounted-with-discard", Severity.NOTE)


# --- all of them ----------------------------------------------------------------------------------


def test_findings_come_worst_first_and_in_order_among_equals() -> None:
    made = [
        make(name, "", "", "")
        for name, make in (("a", note), ("b", weak), ("c", blocker), ("d", weak))
    ]

    assert [finding.id for finding in worst_first(made)] == ["c", "b", "d", "a"]


def test_one_blocker_is_enough_to_stop() -> None:
    harmless = [weak("a", "", "", ""), note("b", "", "", "")]

    assert can_work([])
    assert can_work(harmless)
    assert not can_work([*harmless, blocker("c", "", "", "")])
