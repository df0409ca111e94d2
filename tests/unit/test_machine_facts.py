"""Processor, memory, GPUs and packages: read from this machine, from fake trees and from a fake
driver library.
"""

from __future__ import annotations

import os
import sys
from importlib import metadata
from pathlib import Path

import pytest

from infinity_engine.machine.cpu import probe_cpu, probe_simd
from infinity_engine.machine.gpus import Gpu, PcieLink, count_visible, probe_gpus
from infinity_engine.machine.memory import probe_memory
from infinity_engine.machine.packages import TorchBuild, is_torch_new_enough, probe_packages
from infinity_engine.machine.system import probe_system
from infinity_engine.units import GiB
from support import fake_nvml
from support.kernel_files import fake_roots, mount_line, write_tree

needs_compiler = pytest.mark.skipif(
    fake_nvml.compiler() is None, reason="no C++ compiler to make a fake NVML with"
)


def test_the_processor_is_the_one_that_the_system_reports() -> None:
    cpu = probe_cpu()

    assert cpu.logical_cores == os.cpu_count()
    assert cpu.usable_cores == len(os.sched_getaffinity(0))
    assert cpu.numa_nodes >= 1


def test_an_affinity_mask_lowers_the_usable_cores() -> None:
    everything = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(everything)})
        assert probe_cpu().usable_cores == 1
    finally:
        os.sched_setaffinity(0, everything)


def test_model_and_numa_nodes_are_read_from_the_kernels_files(tmp_path: Path) -> None:
    roots = fake_roots(
        tmp_path,
        proc={"cpuinfo": "processor\t: 0\nmodel name\t: Imaginary 9000 @ 3 GHz\n"},
        sys={f"devices/system/node/node{number}/cpulist": "" for number in (0, 1)},
    )

    cpu = probe_cpu(roots)

    assert (cpu.model, cpu.numa_nodes) == ("Imaginary 9000 @ 3 GHz", 2)


def test_a_processor_without_a_model_name_goes_by_its_architecture(tmp_path: Path) -> None:
    assert probe_cpu(fake_roots(tmp_path)).model == os.uname().machine


def test_the_environment_can_lower_the_simd_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFINITY_SIMD", "scalar")

    assert probe_cpu().simd.level == "scalar"


def test_an_unknown_simd_level_is_a_problem_that_names_the_possible_ones() -> None:
    simd = probe_simd("sse9")

    assert simd.level is None
    assert simd.problem is not None
    assert '"sse9"' in simd.problem
    assert "one of: scalar" in simd.problem


def test_memory_is_what_the_system_reports() -> None:
    memory = probe_memory()

    assert memory.total_bytes == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < memory.available_bytes <= memory.total_bytes


def test_a_control_group_cuts_what_may_be_used(tmp_path: Path) -> None:
    write_tree(tmp_path / "group", {"memory.max": "1000000"})
    proc = {"self/mountinfo": mount_line(tmp_path / "group", "cgroup2"), "self/cgroup": "0::/\n"}

    memory = probe_memory(fake_roots(tmp_path, proc=proc))

    assert memory.usable_bytes == 1_000_000


def test_a_limit_above_the_machines_memory_cuts_nothing(tmp_path: Path) -> None:
    write_tree(tmp_path / "group", {"memory.max": str(1 << 50)})
    proc = {"self/mountinfo": mount_line(tmp_path / "group", "cgroup2"), "self/cgroup": "0::/\n"}

    memory = probe_memory(fake_roots(tmp_path, proc=proc))

    assert memory.usable_bytes == memory.total_bytes


def test_a_machine_without_the_drivers_library_has_no_gpu_and_a_reason(tmp_path: Path) -> None:
    gpus = probe_gpus([str(tmp_path / "libnvidia-ml.so.1")])

    assert gpus.devices == ()
    assert gpus.reason == "no NVIDIA driver: libnvidia-ml.so.1 is not found"


@needs_compiler
def test_gpus_are_read_through_the_drivers_library(tmp_path: Path) -> None:
    library = fake_nvml.compile_nvml(tmp_path)
    roots = fake_roots(tmp_path, sys={"bus/pci/devices/0000:3c:00.0/numa_node": "1\n"})

    gpus = probe_gpus([str(tmp_path / "missing.so"), str(library)], roots)

    assert (gpus.driver, gpus.cuda, gpus.reason, len(gpus.devices)) == (
        "570.86.15",
        "12.8",
        None,
        2,
    )
    assert gpus.devices[1] == Gpu(
        name="Imaginary GPU 1",
        total_bytes=24 * GiB,
        free_bytes=23 * GiB,
        bus_id="00000000:3C:00.0",
        numa_node=1,
        link=PcieLink(generation=1, max_generation=4, width=8, max_width=16),
        uuid="GPU-10000000-aaaa",
    )


@needs_compiler
@pytest.mark.parametrize("said", [None, "", "1", "0,1"])
def test_gpus_that_the_environment_hides_are_listed_and_counted_as_hidden(
    said: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if said is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", said)

    gpus = probe_gpus([str(fake_nvml.compile_nvml(tmp_path))])

    assert len(gpus.devices) == 2
    assert (gpus.visible_devices, gpus.visible_count) == (said, count_visible(said, 2))


@pytest.mark.parametrize(
    ("said", "count"),
    [
        (None, 4),
        ("", 0),
        ("-1", 0),
        ("NoDevFiles", 0),
        ("2", 1),
        ("3,0", 2),
        (" 0, 1 ", 2),
        ("0,4,1", 1),
        ("0,-1,1", 1),
        ("GPU-8932f937,GPU-1", 2),
        ("MIG-1f2e", 1),
        ("0,1,2,3,0", 4),
    ],
)
def test_cuda_offers_what_the_list_names_up_to_the_first_entry_that_is_no_gpu(
    said: str | None, count: int
) -> None:
    assert count_visible(said, 4) == count


@needs_compiler
@pytest.mark.parametrize(
    ("said", "numbers"),
    [
        (None, [0, 1]),
        ("", []),
        ("1", [1]),
        ("1, 0", [1, 0]),
        ("GPU-1", [1]),
        ("GPU-10000000-aaaa,0", [1, 0]),
        ("MIG-1f2e", [0]),
        ("0,7,1", [0]),
    ],
)
def test_the_visible_gpus_are_those_that_the_list_names_in_its_order(
    said: str | None, numbers: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if said is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", said)

    gpus = probe_gpus([str(fake_nvml.compile_nvml(tmp_path))])

    assert gpus.visible == tuple(gpus.devices[number] for number in numbers)


@needs_compiler
def test_a_driver_that_does_not_tell_its_cuda_still_has_gpus(tmp_path: Path) -> None:
    gpus = probe_gpus([str(fake_nvml.compile_nvml(tmp_path, "CUDA_STATUS=3"))])

    assert (gpus.cuda, len(gpus.devices)) == (None, 2)


@needs_compiler
def test_a_driver_that_does_not_answer_is_a_reason(tmp_path: Path) -> None:
    gpus = probe_gpus([str(fake_nvml.compile_nvml(tmp_path, "INIT_STATUS=9"))])

    assert gpus.devices == ()
    assert gpus.reason == "the NVIDIA driver does not answer: nvmlInit_v2: Driver Not Loaded"


@needs_compiler
def test_a_driver_without_gpus_is_a_reason(tmp_path: Path) -> None:
    gpus = probe_gpus([str(fake_nvml.compile_nvml(tmp_path, "GPU_COUNT=0"))])

    assert (gpus.devices, gpus.reason) == ((), "the NVIDIA driver sees no GPU")


@needs_compiler
def test_a_gpu_that_does_not_tell_its_link_is_still_a_gpu(tmp_path: Path) -> None:
    gpus = probe_gpus([str(fake_nvml.compile_nvml(tmp_path, "LINK_STATUS=3"))])

    assert [gpu.link for gpu in gpus.devices] == [None, None]


@needs_compiler
def test_a_library_that_lacks_a_function_is_a_reason(tmp_path: Path) -> None:
    library = fake_nvml.compile_nvml(tmp_path, "nvmlDeviceGetCount_v2=renamed")

    gpus = probe_gpus([str(library)])

    assert gpus.reason == "the NVIDIA driver does not answer: it has no nvmlDeviceGetCount_v2"


def installed(top: Path, name: str, version: str, files: dict[str, str] | None = None) -> str:
    """Make `top` look like a place where a package is installed, and return it."""
    record = {
        f"{name.replace('-', '_')}-{version}.dist-info/METADATA": f"Name: {name}\nVersion: "
        f"{version}\n"
    }
    return str(write_tree(top, {**record, **(files or {})}))


def test_installed_versions_are_those_of_the_metadata() -> None:
    packages = probe_packages()

    assert packages.numpy == metadata.version("numpy")


def test_packages_that_are_not_installed_are_none(tmp_path: Path) -> None:
    packages = probe_packages([str(tmp_path)])

    assert (packages.torch, packages.torch_build, packages.cupy, packages.safetensors) == (
        None,
        None,
        None,
        None,
    )


@pytest.mark.parametrize(
    ("text", "build"),
    [
        ("from typing import Optional\ncuda: Optional[str] = '12.8'\n", TorchBuild(cuda="12.8")),
        ("cuda = '13.0'\nhip = None\n", TorchBuild(cuda="13.0")),
        ("cuda: Optional[str] = None\n", TorchBuild(cuda=None)),
        ("__version__ = '2.6.0'\n", None),
        ("cuda = (", None),
    ],
)
def test_torchs_cuda_version_is_read_from_its_text(
    text: str, build: TorchBuild | None, tmp_path: Path
) -> None:
    path = installed(tmp_path, "torch", "2.6.0", {"torch/version.py": text})

    packages = probe_packages([path])

    assert (packages.torch, packages.torch_build) == ("2.6.0", build)


def test_cupy_is_found_under_the_name_of_its_cuda_build(tmp_path: Path) -> None:
    assert probe_packages([installed(tmp_path, "cupy-cuda12x", "13.3.0")]).cupy == "13.3.0"


def test_looking_for_packages_imports_none_of_them(tmp_path: Path) -> None:
    raises = {
        "torch/version.py": "cuda = None\n",
        "torch/__init__.py": "raise SystemExit('imported')\n",
    }
    before = set(sys.modules)

    probe_packages([installed(tmp_path, "torch", "2.6.0", raises)])

    assert {
        name
        for name in set(sys.modules) - before
        if name.split(".")[0] in ("torch", "cupy", "liburing")
    } == set()


@pytest.mark.parametrize(
    ("version", "enough"),
    [
        ("2.6.0", True),
        ("2.13.0a0+git1234", True),
        ("3.0", True),
        ("2.5.1+cu124", False),
        ("nonsense", False),
    ],
)
def test_a_torch_is_new_enough_from_2_6_on(version: str, enough: bool) -> None:
    assert is_torch_new_enough(version) is enough


def test_the_native_modules_load_where_the_tests_run() -> None:
    system = probe_system()

    assert system.native_problem is None
    assert system.name == os.uname().sysname
    assert system.architecture == os.uname().machine
