"""Calibrating a machine with a GPU: links, updates and products of the device have figures."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
cupy = pytest.importorskip("cupy", reason="cupy is not installed")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA GPU here"),
    # torch, in a backward's own thread
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning"),
]

from infinity_engine.accel import open_accelerator  # noqa: E402 - after the skip
from infinity_engine.calibration import QUICK, CalibrationCache, calibrated  # noqa: E402
from infinity_engine.calibration.host import RULES  # noqa: E402
from infinity_engine.calibration.identity import default_device  # noqa: E402


def test_everything_but_ranks_is_measured() -> None:
    with open_accelerator("cuda") as device:
        measured = calibrated(accelerator=device, effort=QUICK, cache=CalibrationCache(None))

    rates = measured.rates(beside_copies=True)
    links = (
        rates.h2d_bytes_per_s,
        rates.d2h_bytes_per_s,
        rates.duplex_h2d_bytes_per_s,
        rates.duplex_d2h_bytes_per_s,
    )
    assert all(links)
    assert [name for name, figure in measured.device_updates.items() if figure.median] == list(
        RULES
    )
    assert all(figure.median for figure in measured.matmul.values())
    assert all(
        each.beside_copies.median for row in measured.host_updates.values() for each in row.values()
    )


def test_a_gpu_updates_faster_than_its_host() -> None:
    with open_accelerator("cuda") as device:
        measured = calibrated(accelerator=device, effort=QUICK, cache=CalibrationCache(None))

    rates = measured.rates()
    assert rates.device_update_params_per_s is not None
    assert rates.host_update_params_per_s is not None
    assert rates.device_update_params_per_s > rates.host_update_params_per_s


def test_the_device_has_the_same_name_with_torch_and_without() -> None:
    with open_accelerator("cuda") as device:
        from infinity_engine.calibration.device import device_identity

        assert device_identity(device) == default_device()
