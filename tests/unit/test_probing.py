"""What a refusal of io_uring means, which backend is best, what /proc and /sys say about limits and
drives.
"""

from __future__ import annotations

import errno
import json
import os
import resource
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepnvme import BackendUnavailableError, _native
from deepnvme.machine.backends import choose_backend, refuse_where_threads_must
from deepnvme.machine.probing import (
    Backend,
    Drive,
    Mount,
    ProcessLimits,
    RefusalKind,
    best_backend,
    drive_directory,
    find_liburing,
    find_mount,
    judge_liburing,
    kernel_version,
    probe,
    probe_directory,
    probe_system,
    read_mounts,
    read_process_limits,
    uring_refusal,
)
from support.kernel_files import fake_roots, mount_line

FREE = ProcessLimits(
    kernel_release="6.8.0-generic",
    seccomp_mode=0,
    uring_disabled=0,
    uring_exempt=False,
    can_lock_memory=False,
)
FILTERED = replace(FREE, seccomp_mode=2)
AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl")


@pytest.mark.parametrize(
    ("error", "limits", "kind"),
    [
        (errno.ENOSYS, replace(FREE, kernel_release="5.0.21"), RefusalKind.OLD_KERNEL),
        (errno.ENOSYS, replace(FREE, kernel_release="5.12.19"), RefusalKind.OLD_KERNEL),
        (errno.ENOSYS, replace(FILTERED, kernel_release="4.4.0"), RefusalKind.OLD_KERNEL),
        (errno.ENOSYS, replace(FREE, kernel_release="5.13.0"), RefusalKind.SANDBOX),
        (errno.ENOSYS, FREE, RefusalKind.SANDBOX),
        (errno.ENOSYS, FILTERED, RefusalKind.SECCOMP),
        (errno.EPERM, FILTERED, RefusalKind.SECCOMP),
        (errno.EACCES, FILTERED, RefusalKind.SECCOMP),
        (errno.EPERM, replace(FREE, uring_disabled=1), RefusalKind.SYSCTL),
        (errno.EPERM, replace(FREE, uring_disabled=2), RefusalKind.SYSCTL),
        (errno.EPERM, replace(FILTERED, uring_disabled=2, uring_exempt=True), RefusalKind.SYSCTL),
        (errno.EPERM, replace(FILTERED, uring_disabled=1), RefusalKind.SYSCTL),
        (errno.EPERM, replace(FILTERED, uring_disabled=1, uring_exempt=True), RefusalKind.SECCOMP),
        (errno.EPERM, replace(FREE, uring_disabled=1, uring_exempt=True), RefusalKind.SYSCTL),
        (errno.EPERM, FREE, RefusalKind.SECURITY_MODULE),
        (errno.EACCES, FREE, RefusalKind.SECURITY_MODULE),
        (errno.ENOMEM, FREE, RefusalKind.MEMLOCK),
        (errno.EMFILE, FREE, RefusalKind.OTHER),
    ],
)
def test_a_refusal_is_explained_by_the_error_and_the_limits(
    error: int, limits: ProcessLimits, kind: RefusalKind
) -> None:
    assert uring_refusal(error, limits).kind is kind


def test_an_explanation_names_the_setting_that_refuses() -> None:
    refusal = uring_refusal(errno.EPERM, replace(FREE, uring_disabled=2))

    assert "kernel.io_uring_disabled=2" in refusal.cause
    assert refusal.advice.startswith("sudo sysctl kernel.io_uring_disabled=0")


def test_an_error_without_a_known_cause_is_given_in_the_kernels_words() -> None:
    assert os.strerror(errno.EMFILE) in uring_refusal(errno.EMFILE, FREE).cause


@given(
    error=st.sampled_from(sorted(errno.errorcode)),
    disabled=st.integers(0, 2),
    filtered=st.booleans(),
)
def test_every_refusal_has_a_cause_and_advice_without_gaps(
    error: int, disabled: int, filtered: bool
) -> None:
    refusal = uring_refusal(error, replace(FILTERED if filtered else FREE, uring_disabled=disabled))

    assert refusal.cause
    assert refusal.advice
    assert "{" not in refusal.cause + refusal.advice


@pytest.mark.parametrize(
    ("uring", "liburing", "aio", "best"),
    [
        (True, True, True, Backend.LIBURING),
        (True, False, True, Backend.URING),
        (False, True, True, Backend.AIO),
        (False, True, False, Backend.THREADS),
    ],
)
def test_the_best_backend_is_the_first_of_the_chain_that_works(
    uring: bool, liburing: bool, aio: bool, best: Backend
) -> None:
    assert best_backend(uring=uring, liburing=liburing, aio=aio) is best


@pytest.mark.parametrize(
    ("release", "features", "available"),
    [("5.10.0", 0x3FF, False), ("5.12.19", 0x3FF, False), ("5.13.0", 0x7FF, True)],
)
def test_a_ring_that_no_queue_can_use_is_not_the_best_backend_and_the_kernel_is_called_too_old(
    release: str, features: int, available: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring = SimpleNamespace(error=0, features=features, defer_taskrun=False, opcodes=[])
    monkeypatch.setattr(_native, "probe_uring", lambda: ring)

    found = probe_system(fake_roots(tmp_path, proc={"sys/kernel/osrelease": f"{release}\n"}))

    assert found.uring.available is available
    assert (found.backend is Backend.URING) is available
    if not available:
        assert found.uring.errno_name == "ENOSYS"
        assert found.uring.refusal is not None
        assert found.uring.refusal.kind is RefusalKind.OLD_KERNEL
        assert f"Linux {release} is older than 5.13" in found.uring.refusal.cause


@pytest.mark.filterwarnings("ignore::deepnvme.BackendFallbackWarning")
def test_the_best_backend_is_the_one_that_a_queue_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DEEPNVME_BACKEND", raising=False)

    assert choose_backend("auto", None) == probe_system().backend.value


@pytest.mark.parametrize("version", ["2026.3.25", "2026.3.30", "2026.10.1", "2027.1.1"])
def test_a_new_python_liburing_with_its_library_is_usable(version: str) -> None:
    found = judge_liburing(version, library_present=True, cpu_flags=AVX512)

    assert (found.usable, found.reason, found.fits_cpu) == (True, None, True)


def test_a_python_liburing_on_a_cpu_without_avx_512_is_used_only_when_named() -> None:
    found = judge_liburing("2026.3.30", library_present=True, cpu_flags=["avx2", "avx512f"])

    assert (found.usable, found.fits_cpu) == (True, False)


def test_the_cpu_is_read_from_the_kernel(tmp_path: Path) -> None:
    wide = fake_roots(
        tmp_path / "wide", proc={"cpuinfo": f"processor : 0\nflags\t\t: sse2 {' '.join(AVX512)}\n"}
    )
    narrow = fake_roots(
        tmp_path / "narrow", proc={"cpuinfo": "processor : 0\nflags\t\t: sse2 avx2\n"}
    )
    installed = find_liburing(wide).version is not None

    assert find_liburing(wide).fits_cpu == installed
    assert not find_liburing(narrow).fits_cpu


def test_python_liburing_has_the_version_that_pip_installed() -> None:
    installed = [
        distribution.version
        for distribution in metadata.distributions()
        if distribution.metadata["Name"] == "liburing"
    ]

    assert find_liburing().version == (installed[0] if installed else None)


@pytest.mark.parametrize(
    ("version", "present", "reason"),
    [
        (None, False, "not installed"),
        ("2024.5.3", True, "2024.5.3 is older than 2026.3.25"),
        ("2026.3.24", True, "older"),
        ("2026.3.30", False, "2026.3.30 carries no shared library"),
    ],
)
def test_a_python_liburing_that_is_not_usable_says_why(
    version: str | None, present: bool, reason: str
) -> None:
    found = judge_liburing(version, library_present=present, cpu_flags=AVX512)

    assert not found.usable
    assert found.reason is not None
    assert reason in found.reason


@pytest.mark.parametrize(
    ("release", "version"),
    [
        ("6.1.0-28-amd64", (6, 1)),
        ("5.15.167.4-microsoft-standard-WSL2", (5, 15)),
        ("unheard of", (0, 0)),
    ],
)
def test_a_kernel_release_starts_with_its_version(release: str, version: tuple[int, int]) -> None:
    assert kernel_version(release) == version


def status_file(*, capabilities: int = 0, seccomp: int = 0, groups: str = "") -> str:
    return (
        f"Name:\tpython: x\nGid:\t1000\t1000\t1000\t1000\nGroups:\t{groups} \n"
        f"CapEff:\t{capabilities:016x}\nSeccomp:\t{seccomp}\n"
    )


def test_limits_of_the_process_are_read_from_proc(tmp_path: Path) -> None:
    files = {
        "sys/kernel/osrelease": "6.6.1\n",
        "sys/kernel/io_uring_disabled": "1\n",
        "sys/kernel/io_uring_group": "-1\n",
        "self/status": status_file(capabilities=1 << 14, seccomp=2),
    }

    limits = read_process_limits(fake_roots(tmp_path, proc=files))

    assert limits == ProcessLimits(
        kernel_release="6.6.1",
        seccomp_mode=2,
        uring_disabled=1,
        uring_exempt=False,
        can_lock_memory=True,
    )


@pytest.mark.parametrize(
    ("status", "exempt"),
    [
        (status_file(capabilities=1 << 21), True),
        (status_file(groups="4 27 977"), True),
        (status_file(groups="4 27 9"), False),
    ],
)
def test_administrators_and_one_group_are_exempt_from_the_sysctl(
    status: str, exempt: bool, tmp_path: Path
) -> None:
    files = {"sys/kernel/io_uring_group": "977\n", "self/status": status}

    assert read_process_limits(fake_roots(tmp_path, proc=files)).uring_exempt is exempt


def test_a_kernel_without_these_files_imposes_nothing(tmp_path: Path) -> None:
    limits = read_process_limits(fake_roots(tmp_path))

    assert limits.kernel_release == os.uname().release
    assert (limits.seccomp_mode, limits.uring_disabled, limits.can_lock_memory) == (0, 0, False)


def test_a_mount_is_read_with_its_escapes_undone_and_both_kinds_of_options(tmp_path: Path) -> None:
    line = mount_line(
        r"/mnt/my\040drive", "xfs", device="259:2", source="/dev/nvme0n1p2", options="rw,discard"
    )

    [mount] = read_mounts(fake_roots(tmp_path, proc={"self/mountinfo": line}))

    assert mount == Mount(
        device="259:2",
        root="/",
        mount_point="/mnt/my drive",
        file_system="xfs",
        source="/dev/nvme0n1p2",
        options=frozenset(["rw", "relatime", "discard"]),
    )


@pytest.mark.parametrize("name", [b"n\xffme", b"a\x0bb", b"a\x0cb", "a\u2028b\x85c".encode()])
def test_a_mount_point_may_have_any_bytes_in_its_name(name: bytes, tmp_path: Path) -> None:
    point = f"/mnt/{os.fsdecode(name)}"
    roots = fake_roots(tmp_path)
    (roots.proc / "self").mkdir(parents=True)
    lines = mount_line("/", "ext4") + mount_line(point, "xfs")
    (roots.proc / "self/mountinfo").write_bytes(os.fsencode(lines))

    mount = find_mount(read_mounts(roots), f"{point}/folder")

    assert mount is not None
    assert (mount.mount_point, mount.file_system) == (point, "xfs")


def mounts_at(*mount_points: str) -> tuple[Mount, ...]:
    return tuple(
        Mount(
            device="0:1",
            root="/",
            mount_point=point,
            file_system="ext4",
            source=str(n),
            options=frozenset(),
        )
        for n, point in enumerate(mount_points)
    )


@pytest.mark.parametrize(
    ("path", "mount_point"),
    [("/", "/"), ("/mnt", "/mnt"), ("/mnt/a/b", "/mnt/a"), ("/mnt/ab", "/mnt"), ("/home", "/")],
)
def test_the_deepest_mount_above_a_path_holds_it(path: str, mount_point: str) -> None:
    mount = find_mount(mounts_at("/", "/mnt", "/mnt/a"), path)

    assert mount is not None
    assert mount.mount_point == mount_point


def test_of_two_mounts_in_one_place_the_last_one_holds_it() -> None:
    mount = find_mount(mounts_at("/", "/mnt", "/mnt"), "/mnt/file")

    assert mount is not None
    assert mount.source == "2"


def test_a_partition_leads_to_the_drive_that_it_is_on(tmp_path: Path) -> None:
    drive = "devices/pci0000:00/nvme/nvme0/nvme0n1"
    roots = fake_roots(
        tmp_path,
        proc={"self/mountinfo": mount_line("/", "ext4", device="259:2")},
        sys={
            f"{drive}/queue/rotational": "0\n",
            f"{drive}/device/model": "Imaginary SSD 990   \n",
            f"{drive}/nvme0n1p2/partition": "2\n",
        },
    )
    (roots.sys / "dev/block").mkdir(parents=True)
    (roots.sys / "dev/block/259:2").symlink_to(roots.sys / drive / "nvme0n1p2")

    found = probe_directory(tmp_path, roots)

    assert found.drive == Drive(name="nvme0n1", model="Imaginary SSD 990", rotational=False)


def test_a_file_system_that_numbers_itself_leads_to_its_source(tmp_path: Path) -> None:
    source = next((path for path in Path("/dev").iterdir() if path.is_block_device()), None)
    if source is None:
        pytest.skip("no block device is visible here")
    number = source.stat().st_rdev
    roots = fake_roots(
        tmp_path,
        proc={"self/mountinfo": mount_line("/", "btrfs", device="0:55", source=str(source))},
        sys={f"dev/block/{os.major(number)}:{os.minor(number)}/queue/rotational": "1\n"},
    )

    drive = probe_directory(tmp_path, roots).drive

    assert drive is not None
    assert drive.rotational


def test_a_source_that_is_no_block_device_leads_to_no_drive(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.touch()
    roots = fake_roots(tmp_path, sys={"dev/block/0:0/queue/rotational": "1\n"})
    mount = replace(mounts_at("/")[0], device="0:55", source=str(source))

    assert drive_directory(mount, roots) is None


def test_a_network_file_system_is_on_no_drive(tmp_path: Path) -> None:
    roots = fake_roots(
        tmp_path, proc={"self/mountinfo": mount_line("/", "nfs4", source="server:/export")}
    )

    assert probe_directory(tmp_path, roots).drive is None


def test_memory_file_systems_and_discard_are_recognised(tmp_path: Path) -> None:
    in_memory = fake_roots(tmp_path / "1", proc={"self/mountinfo": mount_line("/", "tmpfs")})
    trimmed = fake_roots(
        tmp_path / "2", proc={"self/mountinfo": mount_line("/", "ext4", options="rw,discard")}
    )

    assert probe_directory(tmp_path, in_memory).in_memory
    assert not probe_directory(tmp_path, in_memory).discard
    assert probe_directory(tmp_path, trimmed).discard
    assert not probe_directory(tmp_path, trimmed).in_memory


def test_the_huge_page_mode_is_the_one_in_brackets(tmp_path: Path) -> None:
    files = {"kernel/mm/transparent_hugepage/enabled": "always madvise [never]\n"}

    assert probe_system(fake_roots(tmp_path, sys=files)).huge_pages == "never"
    assert probe_system(fake_roots(tmp_path / "without")).huge_pages is None


def test_a_writable_directory_reports_its_space_and_keeps_no_file(tmp_path: Path) -> None:
    found = probe_directory(tmp_path)

    space = os.statvfs(tmp_path)
    assert found.plain_errno is None
    assert found.total_bytes == space.f_blocks * space.f_frsize
    assert list(tmp_path.iterdir()) == []


def test_a_reported_alignment_is_a_power_of_two(tmp_path: Path) -> None:
    found = probe_directory(tmp_path)
    if found.offset_align is None or found.memory_align is None or found.direct_errno is not None:
        pytest.skip("direct I/O or its alignment is not reported here")

    assert found.offset_align.bit_count() == 1
    assert found.memory_align.bit_count() == 1


def test_a_missing_directory_is_an_answer(tmp_path: Path) -> None:
    found = probe_directory(tmp_path / "missing")

    assert (found.plain_errno, found.direct_errno) == ("ENOENT", "ENOENT")
    assert (found.mount_point, found.total_bytes) == (None, None)


def test_a_circle_of_links_is_an_answer(tmp_path: Path) -> None:
    (tmp_path / "circle").symlink_to(tmp_path / "circle")

    assert probe_directory(tmp_path / "circle").plain_errno == "ELOOP"


def test_a_directory_without_a_text_name_can_be_probed(tmp_path: Path) -> None:
    directory = tmp_path / os.fsdecode(b"n\xffme")
    directory.mkdir()

    assert probe_directory(directory).plain_errno is None


@pytest.mark.parametrize(
    ("limits", "shown"),
    [
        ((64 << 10, 128 << 10), (64 << 10, 128 << 10)),
        ((64 << 10, resource.RLIM_INFINITY), (64 << 10, None)),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), (None, None)),
    ],
)
def test_the_memlock_limit_is_the_processs_own_and_can_be_none(
    limits: tuple[int, int], shown: tuple[int | None, int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)

    memlock = probe_system().memlock

    assert (memlock.soft_bytes, memlock.hard_bytes) == shown


@pytest.mark.parametrize("require", ["io_uring", "uring", ("uring", "aio")])
def test_a_required_ring_is_refused_where_threads_do_its_work_and_the_refusal_says_what_to_do(
    require: str | tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_native, "on_fuse", lambda _: True)
    kind = find_mount(read_mounts(), os.path.realpath(tmp_path))
    assert kind is not None

    with pytest.raises(
        BackendUnavailableError, match=f"FUSE file system \\({kind.file_system}\\)"
    ) as caught:
        refuse_where_threads_must("uring", require, str(tmp_path / "file"))

    assert (caught.value.errno, caught.value.path) == (errno.ENOTSUP, str(tmp_path / "file"))
    assert "'threads')" in str(caught.value)


@pytest.mark.parametrize(
    ("backend", "require"),
    [
        ("uring", None),
        ("uring", ("uring", "threads")),
        ("aio", ("io_uring", "aio")),
        ("threads", "threads"),
    ],
)
def test_what_no_ring_is_required_for_is_not_refused_where_threads_do_a_rings_work(
    backend: str,
    require: str | tuple[str, ...] | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_native, "on_fuse", lambda _: True)

    refuse_where_threads_must(backend, require, str(tmp_path / "file"))


def test_a_required_ring_takes_a_file_that_lies_on_no_fuse_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_native, "on_fuse", lambda _: False)

    refuse_where_threads_must("uring", "io_uring", str(tmp_path / "file"))


def test_a_probe_is_of_the_system_and_of_the_directory_that_was_named(tmp_path: Path) -> None:
    found = probe(tmp_path)

    assert found.system == probe_system()
    assert found.directory is not None
    assert found.directory.path == os.path.realpath(tmp_path)
    assert found.directory.plain_errno is None


def test_a_probe_without_a_directory_is_of_the_system_alone() -> None:
    assert probe().directory is None


@pytest.mark.parametrize("name", [b"plain", b"n\xffme", "n\u00e4me".encode()])
def test_all_answers_turn_into_json(name: bytes, tmp_path: Path) -> None:
    directory = tmp_path / os.fsdecode(name)
    directory.mkdir()

    text = json.dumps(asdict(probe(directory)))

    assert json.loads(text.encode())["directory"]["path"] == str(directory)


def test_an_available_ring_has_no_refusal_and_an_unavailable_one_has() -> None:
    uring = probe_system().uring

    assert uring.available == (uring.refusal is None) == (uring.errno_name is None)
