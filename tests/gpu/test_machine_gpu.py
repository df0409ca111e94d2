"""What infinity_engine.machine reads about the GPUs through NVML, against what CUDA says through
torch.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys

import pytest

from infinity_engine.machine.gpus import Gpu, probe_gpus

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA GPU here"),
]


@pytest.fixture
def gpu() -> Gpu:
    """The GPU that torch calls cuda:0, as NVML knows it: found by its bus id, as the two count in
    different orders.
    """
    torch.cuda.init()
    torch.cuda.empty_cache()  # else a test's block may come out of what earlier tests left
    found = probe_gpus()
    [first] = [device for device in found.devices if device.bus_id and is_cuda_0(device.bus_id)]
    return first


def is_cuda_0(bus_id: str) -> bool:
    """Ask the CUDA driver whether its first device is the one on this bus."""
    driver = ctypes.CDLL("libcuda.so.1")
    first, named = ctypes.c_int(-1), ctypes.c_int(-2)
    assert driver.cuDeviceGet(ctypes.byref(first), 0) == 0
    short = bus_id[-len("0000:00:00.0") :]  # NVML writes the domain with eight digits, CUDA four
    status = driver.cuDeviceGetByPCIBusId(ctypes.byref(named), short.encode())
    return status == 0 and first.value == named.value


def test_a_gpu_has_the_name_that_torch_gives_it(gpu: Gpu) -> None:
    assert gpu.name == torch.cuda.get_device_name(0)


def test_the_driver_tells_its_version() -> None:
    found = probe_gpus()

    assert found.driver
    assert found.reason is None


def test_the_newest_cuda_that_the_driver_serves_is_what_cuda_itself_says() -> None:
    driver, version = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    assert driver.cuDriverGetVersion(ctypes.byref(version)) == 0

    assert probe_gpus().cuda == f"{version.value // 1000}.{version.value % 1000 // 10}"


def test_as_many_gpus_are_visible_as_torch_sees() -> None:
    assert probe_gpus().visible_count == torch.cuda.device_count()


def test_total_memory_is_what_cuda_offers_and_the_little_that_the_driver_keeps(gpu: Gpu) -> None:
    offered = torch.cuda.get_device_properties(0).total_memory

    assert gpu.total_bytes is not None
    assert 0.95 * gpu.total_bytes <= offered <= gpu.total_bytes


def test_free_memory_goes_down_by_what_is_allocated(gpu: Gpu) -> None:
    nbytes = 1 << 30
    block = torch.empty(nbytes, dtype=torch.uint8, device="cuda:0")
    torch.cuda.synchronize()

    [free_bytes] = [
        device.free_bytes for device in probe_gpus().devices if device.bus_id == gpu.bus_id
    ]

    assert block.nbytes == nbytes
    assert free_bytes is not None
    assert gpu.free_bytes is not None
    assert free_bytes <= gpu.free_bytes - nbytes


def test_a_link_that_is_known_has_a_generation_and_a_width_within_its_maximum(gpu: Gpu) -> None:
    if gpu.link is None:
        pytest.skip("the driver does not tell the PCIe link of this GPU")

    assert 1 <= gpu.link.generation <= gpu.link.max_generation
    assert 1 <= gpu.link.width <= gpu.link.max_width


def test_doctor_lists_the_gpu_and_lets_the_engine_run(gpu: Gpu) -> None:
    command = [sys.executable, "-m", "infinity_engine.cli", "doctor", "--json"]

    done = subprocess.run(command, capture_output=True, text=True, check=False)

    report = json.loads(done.stdout)
    assert gpu.name in [device["name"] for device in report["machine"]["gpus"]["devices"]]
    assert (done.returncode, report["can_run"]) == (0, True)
