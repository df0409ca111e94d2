"""Which accelerator is opened, and the small things of the interface: buffers, costs, names."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("torch", reason="accelerators move tensors of torch")

import torch

from infinity_engine.accel import (
    Buffer,
    CpuAccelerator,
    Emulation,
    StreamKind,
    TimeCost,
    UpdateCost,
    VirtualAccelerator,
    open_accelerator,
)
from infinity_engine.errors import CapacityError, ConfigError
from infinity_engine.plan import Rates

RATES = Rates(h2d_bytes_per_s=1e9, d2h_bytes_per_s=1e9, device_update_params_per_s=1e9)


def test_auto_is_the_cpu_where_torch_sees_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert isinstance(open_accelerator("auto"), CpuAccelerator)


def test_cuda_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="infinity doctor"):
        open_accelerator("cuda")


def test_the_emulated_device_has_a_virtual_clock() -> None:
    emulation = Emulation(rates=RATES, capacity_bytes=1)
    with open_accelerator("emulated", emulation=emulation) as device:
        assert isinstance(device, VirtualAccelerator)
        assert (device.name, device.unified, device.torch_device.type) == ("emulated", False, "cpu")


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="nearest: cuda"):
        open_accelerator("cudda")


def test_the_emulated_device_needs_an_emulation() -> None:
    with pytest.raises(ConfigError, match="an Emulation with the accelerator emulated"):
        open_accelerator("emulated")


def test_another_device_takes_no_emulation() -> None:
    with pytest.raises(ConfigError, match="none with the others"):
        open_accelerator("cpu", emulation=Emulation(rates=RATES, capacity_bytes=1))


def test_importing_the_package_initialises_no_cuda() -> None:
    look = (
        "import infinity_engine.accel, infinity_engine.accel.cuda, torch; "
        "print(torch.cuda.is_initialized())"
    )
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_the_cpu_refuses_more_than_the_machine_can_give() -> None:
    with CpuAccelerator() as device, pytest.raises(CapacityError) as refused:
        device.allocate(1 << 60)
    assert refused.value.asked == 1 << 60


# --- buffers and costs ----------------------------------------------------------------------------


def test_tensors_of_a_buffer_share_its_bytes() -> None:
    buffer = Buffer(torch.zeros(16, dtype=torch.uint8))
    buffer.tensor(torch.float32, (2, 2)).fill_(1.0)
    assert buffer.tensor(torch.float32, 1, offset=12).item() == 1.0
    assert buffer.tensor(torch.uint8, ()).item() == 0


@pytest.mark.parametrize(
    ("dtype", "shape", "offset", "said"),
    [
        (torch.float32, 5, 0, "within the buffer's 16 B, got 20 B at offset 0"),
        (torch.float32, 2, 12, "got 8 B at offset 12"),
        (torch.uint8, 1, -1, "at offset -1"),
        (torch.uint8, (-1, -1), 0, "got 1 B"),
        (torch.float32, 1, 2, "multiple of 4 B"),
    ],
)
def test_a_tensor_that_does_not_lie_in_the_buffer_is_refused(
    dtype: torch.dtype, shape: int | tuple[int, ...], offset: int, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        Buffer(torch.zeros(16, dtype=torch.uint8)).tensor(dtype, shape, offset)


def test_a_buffer_says_whether_it_was_freed() -> None:
    buffer = Buffer(torch.zeros(16, dtype=torch.uint8))
    assert repr(buffer) == "Buffer(16 B)"
    buffer.release()
    assert repr(buffer) == "Buffer(16 B, freed)"


@pytest.mark.parametrize("cost", [UpdateCost, TimeCost])
def test_a_cost_below_zero_is_refused(cost: type[UpdateCost] | type[TimeCost]) -> None:
    with pytest.raises(ValueError, match=r"0 .* or more, got -1"):
        cost(-1)


def test_streams_have_names_that_tell_them_apart() -> None:
    with CpuAccelerator() as device:
        names = [
            device.stream(kind).name for kind in (StreamKind.H2D, StreamKind.D2H, StreamKind.H2D)
        ]
    assert names == ["h2d 0", "d2h 0", "h2d 1"]
