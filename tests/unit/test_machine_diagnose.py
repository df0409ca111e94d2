"""Each finding from the facts that lead to it, and no finding from a machine without a weak point."""

from __future__ import annotations

import errno
from dataclasses import replace
from typing import Any

import pytest

from deepnvme.probing import (
    AioProbe,
    Backend,
    Drive,
    LiburingProbe,
    Memlock,
    ProcessLimits,
    UringProbe,
    uring_refusal,
)
from infinity_engine.machine.cpu import Simd
from infinity_engine.machine.diagnose import Finding, Severity, can_run, diagnose, diagnose_system
from infinity_engine.machine.gpus import Gpus, PcieLink
from infinity_engine.machine.memory import CgroupMemory
from infinity_engine.machine.packages import TorchBuild
from infinity_engine.machine.survey import Machine
from infinity_engine.units import GiB, KiB, MiB
from support.machines import good_directory, good_gpu, good_machine


def machine_with(part: str, **facts: Any) -> Machine:
    """Return the good machine with some facts of one part replaced."""
    machine = good_machine()
    changed: dict[str, Any] = {part: replace(getattr(machine, part), **facts)}
    return replace(machine, **changed)


def machine_on(**facts: Any) -> Machine:
    """Return the good machine with some facts of its directory replaced."""
    return replace(good_machine(), directories=(replace(good_directory(), **facts),))


def the_finding(machine: Machine) -> Finding:
    """Return the one finding about `machine`."""
    [finding] = diagnose(machine)
    assert finding.what
    assert finding.remedy
    return finding


def test_nothing_is_said_about_a_machine_without_a_weak_point() -> None:
    assert diagnose(good_machine()) == ()
    assert can_run(())


@pytest.mark.parametrize(
    "facts",
    [{"name": "Darwin"}, {"pointer_bits": 32}, {"byte_order": "big"}],
)
def test_an_unsupported_platform_blocks(facts: dict[str, Any]) -> None:
    finding = the_finding(machine_with("system", **facts))

    assert (finding.severity, finding.subject) == (Severity.BLOCKER, "platform")
    assert "64-bit little-endian Linux" in finding.remedy


def test_native_modules_that_do_not_load_block_and_the_loaders_words_are_kept() -> None:
    system = replace(good_machine().system, native_problem="_native.so: wrong ELF class")

    [finding] = diagnose_system(system)

    assert (finding.severity, finding.subject) == (Severity.BLOCKER, "native modules")
    assert "wrong ELF class" in finding.what


@pytest.mark.parametrize(("torch", "said"), [(None, "not installed"), ("2.5.1", "2.5.1 is older than 2.6")])
def test_a_missing_or_old_torch_blocks(torch: str | None, said: str) -> None:
    finding = the_finding(machine_with("packages", torch=torch))

    assert (finding.severity, finding.subject) == (Severity.BLOCKER, "torch")
    assert said in finding.what
    assert "infinity-engine[torch]" in finding.remedy


def test_a_machine_without_a_gpu_is_weak_and_says_why_none_was_found() -> None:
    machine = replace(good_machine(), gpus=Gpus(devices=(), driver=None, reason="no NVIDIA driver"))

    finding = the_finding(machine)

    assert (finding.severity, finding.subject) == (Severity.WEAK, "GPU")
    assert finding.what == "no NVIDIA driver; training runs on the CPU"


def test_a_torch_without_cuda_leaves_the_gpu_unused() -> None:
    finding = the_finding(machine_with("packages", torch_build=TorchBuild(cuda=None)))

    assert (finding.severity, finding.subject) == (Severity.WEAK, "torch")


def test_a_torch_without_cuda_is_no_news_where_there_is_no_gpu() -> None:
    machine = machine_with("packages", torch_build=TorchBuild(cuda=None), cupy=None)
    machine = replace(machine, gpus=Gpus(devices=(), driver=None, reason="none"))

    assert the_finding(machine).subject == "GPU"


@pytest.mark.parametrize(("cuda", "extra"), [("12.8", "[cuda12]"), ("13.0", "[cuda]")])
def test_a_missing_cupy_is_weak_and_the_extra_fits_torchs_cuda(cuda: str, extra: str) -> None:
    finding = the_finding(machine_with("packages", cupy=None, torch_build=TorchBuild(cuda=cuda)))

    assert (finding.severity, finding.subject) == (Severity.WEAK, "cupy")
    assert extra in finding.remedy


def test_a_gpu_with_fewer_lanes_than_it_has_is_weak() -> None:
    link = PcieLink(generation=4, max_generation=4, width=8, max_width=16)
    machine = machine_with("gpus", devices=(good_gpu(), replace(good_gpu(), bus_id="00000000:5E:00.0", link=link)))

    finding = the_finding(machine)

    assert (finding.severity, finding.subject) == (Severity.WEAK, "GPU 00000000:5E:00.0")
    assert "8 of 16 lanes" in finding.what


def test_an_idle_gpu_with_a_lowered_link_generation_is_not_weak() -> None:
    link = PcieLink(generation=1, max_generation=5, width=16, max_width=16)

    assert diagnose(machine_with("gpus", devices=(replace(good_gpu(), link=link),))) == ()


def test_an_impossible_simd_level_blocks() -> None:
    simd = Simd(features=("avx2",), level=None, problem='INFINITY_SIMD must be one of: scalar; got "x"')

    finding = the_finding(machine_with("cpu", simd=simd))

    assert (finding.severity, finding.subject) == (Severity.BLOCKER, "SIMD")
    assert "INFINITY_SIMD must be one of" in finding.what


@pytest.mark.parametrize(("features", "remedy"), [((), "CPU with AVX2"), (("avx2",), "unset INFINITY_SIMD")])
def test_scalar_kernels_on_x86_are_weak(features: tuple[str, ...], remedy: str) -> None:
    finding = the_finding(machine_with("cpu", simd=Simd(features=features, level="scalar", problem=None)))

    assert (finding.severity, finding.subject) == (Severity.WEAK, "SIMD")
    assert remedy in finding.remedy


def test_scalar_kernels_elsewhere_are_no_news() -> None:
    machine = machine_with("system", architecture="aarch64")
    machine = replace(machine, cpu=replace(machine.cpu, simd=Simd(features=("neon",), level="scalar", problem=None)))

    assert diagnose(machine) == ()


@pytest.mark.parametrize(("quota", "subjects"), [(1.5, ["CPU quota"]), (16.0, []), (None, [])])
def test_a_quota_below_the_visible_cores_is_weak(quota: float | None, subjects: list[str]) -> None:
    findings = diagnose(machine_with("cpu", quota_cores=quota))

    assert [finding.subject for finding in findings] == subjects


@pytest.mark.parametrize(("limit", "subjects"), [(8 * GiB, ["memory limit"]), (48 * GiB, [])])
def test_a_memory_limit_far_below_the_machine_is_weak(limit: int, subjects: list[str]) -> None:
    cgroup = CgroupMemory(limit_bytes=limit, used_bytes=0, directory="/sys/fs/cgroup/job")

    findings = diagnose(machine_with("memory", usable_bytes=limit, cgroup=cgroup))

    assert [finding.subject for finding in findings] == subjects
    assert all("8 GiB of the machine's 64 GiB (/sys/fs/cgroup/job)" in finding.what for finding in findings)


def test_a_refused_io_uring_is_weak_with_its_cause_its_stand_in_and_the_advice() -> None:
    limits = ProcessLimits(
        kernel_release="6.8.0", seccomp_mode=0, uring_disabled=2, uring_exempt=False, can_lock_memory=False
    )
    refusal = uring_refusal(errno.EPERM, limits)
    uring = UringProbe(
        available=False, errno_name="EPERM", refusal=refusal, features=0, defer_taskrun=False, opcodes=()
    )

    finding = the_finding(machine_with("storage", uring=uring, backend=Backend.AIO))

    assert (finding.severity, finding.subject) == (Severity.WEAK, "io_uring")
    assert finding.what == f"not available (EPERM): {refusal.cause}; aio is used instead"
    assert finding.remedy == refusal.advice


def test_linux_aio_is_not_missed_while_there_is_io_uring() -> None:
    assert diagnose(machine_with("storage", aio=AioProbe(available=False, errno_name="ENOSYS"))) == ()


def test_a_ring_that_cannot_defer_completions_means_an_old_kernel() -> None:
    uring = replace(good_machine().storage.uring, defer_taskrun=False)

    finding = the_finding(machine_with("storage", uring=uring, kernel_release="5.15.0"))

    assert (finding.severity, finding.subject) == (Severity.WEAK, "kernel")
    assert "5.15.0" in finding.what


def test_a_missing_python_liburing_is_weak_on_x86_and_no_news_elsewhere() -> None:
    liburing = LiburingProbe(version=None, usable=False, reason="not installed", fits_cpu=True)
    machine = machine_with("storage", liburing=liburing, backend=Backend.URING)

    finding = the_finding(machine)

    assert (finding.severity, finding.subject) == (Severity.WEAK, "python-liburing")
    assert finding.what.startswith("not installed")
    assert diagnose(replace(machine, system=replace(machine.system, architecture="aarch64"))) == ()


@pytest.mark.parametrize(
    ("memlock", "subjects"),
    [
        (Memlock(soft_bytes=64 * KiB, hard_bytes=64 * KiB, exempt=False), ["memlock"]),
        (Memlock(soft_bytes=8 * MiB, hard_bytes=None, exempt=False), ["memlock"]),
        (Memlock(soft_bytes=8 * MiB, hard_bytes=8 * MiB, exempt=True), []),
        (Memlock(soft_bytes=1 * GiB, hard_bytes=1 * GiB, exempt=False), []),
    ],
)
def test_a_small_memlock_limit_is_weak_for_those_whom_it_binds(memlock: Memlock, subjects: list[str]) -> None:
    findings = diagnose(machine_with("storage", memlock=memlock))

    assert [finding.subject for finding in findings] == subjects


@pytest.mark.parametrize(("mode", "subjects"), [("never", ["huge pages"]), ("madvise", []), ("always", []), (None, [])])
def test_huge_pages_switched_off_are_weak(mode: str | None, subjects: list[str]) -> None:
    findings = diagnose(machine_with("storage", huge_pages=mode))

    assert [finding.subject for finding in findings] == subjects


@pytest.mark.parametrize(
    ("facts", "said", "remedy"),
    [
        ({"plain_errno": "ENOENT", "total_bytes": None, "free_bytes": None}, "no such directory", "mkdir -p /mnt/a"),
        ({"plain_errno": "ENOENT"}, "no file can be written here", "another"),
        ({"plain_errno": "ENOTDIR"}, "not a directory", "directory"),
        ({"plain_errno": "EACCES"}, "may not write", "sudo install -d -o $USER /mnt/a/infinity"),
        ({"plain_errno": "EROFS"}, "read-only", "remount,rw /mnt/a"),
        ({"plain_errno": "ENOSPC", "free_bytes": 0}, "no space", "free space"),
        ({"free_bytes": 0}, "no space", "free space"),
        ({"plain_errno": "EDQUOT"}, "quota", "free space"),
        ({"plain_errno": "EIO"}, "no file can be written here (EIO)", "another"),
    ],
)
def test_a_directory_in_which_nothing_can_be_written_blocks(facts: dict[str, Any], said: str, remedy: str) -> None:
    finding = the_finding(machine_on(**facts))

    assert (finding.severity, finding.subject) == (Severity.BLOCKER, "/mnt/a")
    assert said in finding.what
    assert remedy in finding.remedy


def test_a_path_in_a_command_is_quoted_for_the_shell() -> None:
    finding = the_finding(machine_on(path="/mnt/my drive", plain_errno="ENOENT", total_bytes=None))

    assert finding.remedy == "mkdir -p '/mnt/my drive'"


@pytest.mark.parametrize("file_system", ["tmpfs", "ramfs"])
def test_a_directory_in_memory_is_weak(file_system: str) -> None:
    finding = the_finding(machine_on(file_system=file_system, in_memory=True, direct_errno="EINVAL", drive=None))

    assert (finding.severity, finding.subject) == (Severity.WEAK, "/mnt/a")
    assert f"{file_system} is host memory" in finding.what


def test_a_file_system_that_refuses_direct_io_is_weak() -> None:
    finding = the_finding(machine_on(file_system="zfs", direct_errno="EINVAL"))

    assert (finding.severity, finding.subject) == (Severity.WEAK, "/mnt/a")
    assert "zfs refuses O_DIRECT (EINVAL)" in finding.what


@pytest.mark.parametrize(
    ("name", "severity"), [("sda", Severity.WEAK), ("vda", Severity.NOTE), ("xvdb", Severity.NOTE)]
)
def test_a_rotating_drive_is_weak_unless_it_is_virtual(name: str, severity: Severity) -> None:
    finding = the_finding(machine_on(drive=Drive(name=name, model=None, rotational=True)))

    assert (finding.severity, finding.subject) == (severity, "/mnt/a")
    assert name in finding.what


def test_a_drive_that_does_not_say_whether_it_rotates_is_no_news() -> None:
    assert diagnose(machine_on(drive=Drive(name="sda", model=None, rotational=None))) == ()


def test_a_mount_with_discard_is_worth_a_note() -> None:
    finding = the_finding(machine_on(discard=True))

    assert finding.severity is Severity.NOTE
    assert "discard" in finding.what


def test_findings_come_worst_first_and_one_blocker_is_enough_to_stop() -> None:
    machine = replace(
        machine_with("packages", torch=None),
        directories=(replace(good_directory(), discard=True), replace(good_directory(), path="/b", in_memory=True)),
    )

    findings = diagnose(machine)

    assert [finding.severity for finding in findings] == [Severity.BLOCKER, Severity.WEAK, Severity.NOTE]
    assert not can_run(findings)
    assert can_run(findings[1:])
