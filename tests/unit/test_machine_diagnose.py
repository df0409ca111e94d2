"""Each finding from the facts that lead to it, and no finding from a machine without a weak
point.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from deepnvme.machine.diagnosis import (
    Chosen,
    Finding,
    Severity,
    about_directory,
    about_system,
    can_work,
)
from infinity_engine.machine.cpu import Simd
from infinity_engine.machine.diagnose import diagnose, diagnose_system
from infinity_engine.machine.gpus import PcieLink
from infinity_engine.machine.memory import CgroupMemory
from infinity_engine.machine.packages import TorchBuild
from infinity_engine.machine.survey import Machine
from infinity_engine.units import GiB
from support.machines import good_directory, good_gpu, good_machine, no_gpus


def machine_with(part: str, **facts: Any) -> Machine:
    """Return the good machine with some facts of one part replaced."""
    machine = good_machine()
    changed: dict[str, Any] = {part: replace(getattr(machine, part), **facts)}
    return replace(machine, **changed)


def the_finding(machine: Machine) -> Finding:
    """Return the one finding about `machine`."""
    [finding] = diagnose(machine)
    assert finding.what
    assert finding.remedy
    return finding


def test_nothing_is_said_about_a_machine_without_a_weak_point() -> None:
    assert diagnose(good_machine()) == ()
    assert can_work(())


@pytest.mark.parametrize(
    "facts",
    [{"name": "Darwin"}, {"pointer_bits": 32}, {"byte_order": "big"}],
)
def test_an_unsupported_platform_blocks(facts: dict[str, Any]) -> None:
    finding = the_finding(machine_with("system", **facts))

    assert (finding.id, finding.severity) == ("platform-unsupported", Severity.BLOCKER)
    assert "64-bit little-endian Linux" in finding.remedy


def test_native_modules_that_do_not_load_block_and_the_loaders_words_are_kept() -> None:
    system = replace(good_machine().system, native_problem="_native.so: wrong ELF class")

    [finding] = diagnose_system(system)

    assert (finding.id, finding.severity) == ("native-modules-not-loaded", Severity.BLOCKER)
    assert "wrong ELF class" in finding.what


@pytest.mark.parametrize(
    ("torch", "id", "said"),
    [
        (None, "torch-missing", "not installed"),
        ("2.5.1", "torch-too-old", "2.5.1 is older than 2.6"),
    ],
)
def test_a_missing_or_old_torch_blocks(torch: str | None, id: str, said: str) -> None:
    finding = the_finding(machine_with("packages", torch=torch))

    assert (finding.id, finding.severity, finding.subject) == (id, Severity.BLOCKER, "torch")
    assert said in finding.what
    assert "infinity-engine[torch]" in finding.remedy


def test_a_machine_without_a_gpu_is_weak_and_says_why_none_was_found() -> None:
    machine = replace(good_machine(), gpus=no_gpus("no NVIDIA driver"))

    finding = the_finding(machine)

    assert (finding.id, finding.severity, finding.subject) == ("gpu-missing", Severity.WEAK, "GPU")
    assert finding.what == "no NVIDIA driver; training runs on the CPU"


def test_a_torch_without_cuda_leaves_the_gpu_unused() -> None:
    finding = the_finding(machine_with("packages", torch_build=TorchBuild(cuda=None)))

    assert (finding.id, finding.severity, finding.subject) == (
        "torch-without-cuda",
        Severity.WEAK,
        "torch",
    )


@pytest.mark.parametrize(
    ("built_for", "served", "ids"),
    [
        ("13.0", "12.8", ["torch-cuda-too-new"]),
        ("12.8", "12.4", []),
        ("12.8", "13.0", []),
        ("13.0", None, []),
        ("9.2", "12.8", []),
    ],
)
def test_a_torch_for_a_newer_cuda_than_the_driver_serves_is_weak(
    built_for: str, served: str | None, ids: list[str]
) -> None:
    machine = machine_with("packages", torch_build=TorchBuild(cuda=built_for))
    machine = replace(machine, gpus=replace(machine.gpus, cuda=served))

    assert [finding.id for finding in diagnose(machine)] == ids


def test_a_driver_that_is_too_old_for_torch_is_named_with_both_ways_out() -> None:
    finding = the_finding(machine_with("gpus", cuda="12.8"))

    assert "is for CUDA 13.0, and the NVIDIA driver 570.86.15 goes up to CUDA 12.8" in finding.what
    assert "update the driver, or install a build of PyTorch for CUDA 12" in finding.remedy


@pytest.mark.parametrize("said", ["", "-1"])
def test_gpus_hidden_by_the_environment_are_weak_and_the_variable_is_named(said: str) -> None:
    finding = the_finding(machine_with("gpus", visible_devices=said, visible_count=0))

    assert (finding.id, finding.severity, finding.subject) == ("gpus-hidden", Severity.WEAK, "GPU")
    assert f"CUDA_VISIBLE_DEVICES={said!r} hides" in finding.what


def test_a_choice_among_the_gpus_is_no_finding() -> None:
    machine = machine_with(
        "gpus", devices=(good_gpu(), good_gpu()), visible_devices="0", visible_count=1
    )

    assert diagnose(machine) == ()


def test_a_torch_without_cuda_is_no_news_where_there_is_no_gpu() -> None:
    machine = machine_with("packages", torch_build=TorchBuild(cuda=None), cupy=None)
    machine = replace(machine, gpus=no_gpus("none"))

    assert the_finding(machine).subject == "GPU"


@pytest.mark.parametrize(("cuda", "extra"), [("12.8", "[cuda12]"), ("13.0", "[cuda]")])
def test_a_missing_cupy_is_weak_and_the_extra_fits_torchs_cuda(cuda: str, extra: str) -> None:
    finding = the_finding(machine_with("packages", cupy=None, torch_build=TorchBuild(cuda=cuda)))

    assert (finding.id, finding.severity) == ("cupy-missing", Severity.WEAK)
    assert extra in finding.remedy


def test_a_gpu_with_fewer_lanes_than_it_has_is_weak() -> None:
    link = PcieLink(generation=4, max_generation=4, width=8, max_width=16)
    machine = machine_with(
        "gpus", devices=(good_gpu(), replace(good_gpu(), bus_id="00000000:5E:00.0", link=link))
    )

    finding = the_finding(machine)

    assert (finding.id, finding.severity) == ("gpu-lanes-missing", Severity.WEAK)
    assert finding.subject == "GPU 00000000:5E:00.0"
    assert "8 of 16 lanes" in finding.what


def test_an_idle_gpu_with_a_lowered_link_generation_is_not_weak() -> None:
    link = PcieLink(generation=1, max_generation=5, width=16, max_width=16)

    assert diagnose(machine_with("gpus", devices=(replace(good_gpu(), link=link),))) == ()


def test_an_impossible_simd_level_blocks() -> None:
    simd = Simd(
        features=("avx2",), level=None, problem='INFINITY_SIMD must be one of: scalar; got "x"'
    )

    finding = the_finding(machine_with("cpu", simd=simd))

    assert (finding.id, finding.severity) == ("simd-level-impossible", Severity.BLOCKER)
    assert "INFINITY_SIMD must be one of" in finding.what


@pytest.mark.parametrize(
    ("features", "id", "remedy"),
    [((), "simd-missing", "CPU with AVX2"), (("avx2",), "simd-lowered", "unset INFINITY_SIMD")],
)
def test_scalar_kernels_on_x86_are_weak(features: tuple[str, ...], id: str, remedy: str) -> None:
    finding = the_finding(
        machine_with("cpu", simd=Simd(features=features, level="scalar", problem=None))
    )

    assert (finding.id, finding.severity, finding.subject) == (id, Severity.WEAK, "SIMD")
    assert remedy in finding.remedy


def test_a_cpu_that_multiplies_bf16_slowly_is_weak_where_it_computes() -> None:
    simd = Simd(features=("avx2", "fma", "f16c"), level="avx2", problem=None)
    with_gpu = machine_with("cpu", simd=simd)
    without = replace(with_gpu, gpus=no_gpus("no NVIDIA driver"))
    without_cuda = replace(
        with_gpu, packages=replace(with_gpu.packages, torch_build=TorchBuild(cuda=None))
    )

    assert diagnose(with_gpu) == ()
    assert [each.id for each in diagnose(without)] == ["gpu-missing", "half-precision-slow"]
    assert [each.id for each in diagnose(without_cuda)] == [
        "torch-without-cuda",
        "half-precision-slow",
    ]
    assert "precision='fp32'" in diagnose(without)[1].remedy


def test_scalar_kernels_elsewhere_are_no_news() -> None:
    machine = machine_with("system", architecture="aarch64")
    machine = replace(
        machine,
        cpu=replace(machine.cpu, simd=Simd(features=("neon",), level="scalar", problem=None)),
    )

    assert diagnose(machine) == ()


@pytest.mark.parametrize(("quota", "ids"), [(1.5, ["cpu-quota"]), (16.0, []), (None, [])])
def test_a_quota_below_the_visible_cores_is_weak(quota: float | None, ids: list[str]) -> None:
    findings = diagnose(machine_with("cpu", quota_cores=quota))

    assert [finding.id for finding in findings] == ids


@pytest.mark.parametrize(("limit", "ids"), [(8 * GiB, ["memory-limit"]), (48 * GiB, [])])
def test_a_memory_limit_far_below_the_machine_is_weak(limit: int, ids: list[str]) -> None:
    cgroup = CgroupMemory(limit_bytes=limit, used_bytes=0, directory="/sys/fs/cgroup/job")

    findings = diagnose(machine_with("memory", usable_bytes=limit, cgroup=cgroup))

    assert [finding.id for finding in findings] == ids
    assert all(
        "8 GiB of the machine's 64 GiB (/sys/fs/cgroup/job)" in finding.what for finding in findings
    )


@pytest.mark.parametrize(
    "facts",
    [
        {"huge_pages": "never"},
        {"uring": replace(good_machine().storage.uring, defer_taskrun=False)},
    ],
)
def test_what_is_found_about_storage_is_a_finding_here(facts: dict[str, Any]) -> None:
    machine = machine_with("storage", **facts)

    assert diagnose(machine) == tuple(about_system(machine.storage, "x86_64")) != ()


@pytest.mark.parametrize("chosen", Chosen)
def test_what_is_found_about_a_directory_is_a_finding_here(chosen: Chosen) -> None:
    unwritable = replace(good_directory(), plain_errno="EACCES")

    findings = diagnose(replace(good_machine(), directories=(unwritable,)), chosen)

    assert findings == tuple(about_directory(unwritable, chosen)) != ()
    assert can_work(findings) == (chosen is Chosen.BY_DEFAULT)


def test_findings_come_worst_first_and_one_blocker_is_enough_to_stop() -> None:
    machine = replace(
        machine_with("packages", torch=None),
        directories=(
            replace(good_directory(), discard=True),
            replace(good_directory(), path="/b", in_memory=True),
        ),
    )

    findings = diagnose(machine)

    assert [finding.severity for finding in findings] == [
        Severity.BLOCKER,
        Severity.WEAK,
        Severity.NOTE,
    ]
    assert not can_work(findings)
    assert can_work(findings[1:])
