"""`DeviceKernels`: the kernels for work on the device: a GPU's, or the host's for an emulated one.

Starts work in torch's current stream and waits for nothing. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt
import torch

from infinity_engine.accel import Accelerator
from infinity_engine.optim import HostKernels, Update, Values
from infinity_engine.optim.cuda import foreign_stream

__all__ = ["DeviceKernels", "device_kernels"]

_Sums = npt.NDArray[np.float64]


class DeviceKernels(Protocol):
    """The engine's computations on the device, on values that its work can reach."""

    def update(self, update: Update) -> None:
        """Carry out an update."""

    def block_sums(self, gradient: Values) -> object:
        """Return the sum of squares of each block of a gradient, for `on_host`."""

    def begin_sum(self, gradient: Values, into: Values) -> object:
        """Write a gradient to the fp32 values `into`."""

    def add_to_sum(self, gradient: Values, into: Values) -> object:
        """Add a gradient to the fp32 values `into`."""

    def on_host(self, sums: object) -> _Sums:
        """Return block sums, once the event of the work that made them has passed."""


def device_kernels(accelerator: Accelerator, host: HostKernels) -> DeviceKernels:
    """Return the kernels for work on `accelerator`.

    Raises:
        MissingDependencyError: it is a GPU, and cupy is not installed.
    """
    return (
        _OnGpu(accelerator.torch_device)
        if accelerator.torch_device.type == "cuda"
        else _OnHost(host)
    )


class _OnHost:
    """The host's kernels, which reach the memory of an emulated device."""

    # The methods themselves: a call of the device's kernels costs no second one.
    def __init__(self, kernels: HostKernels) -> None:
        self.update = kernels.update
        self.block_sums = kernels.block_sums
        self.begin_sum = kernels.begin_sum
        self.add_to_sum = kernels.add_to_sum

    def on_host(self, sums: object) -> _Sums:
        return cast(_Sums, sums)


class _OnGpu:
    """A GPU's kernels, in the stream that is torch's current one there."""

    def __init__(self, device: torch.device) -> None:
        from infinity_engine.optim.cuda import CudaKernels
        from infinity_engine.optim.nvrtc import cupy_nvrtc

        cupy_nvrtc()  # raises MissingDependencyError where there is no cupy
        import cupy

        self._device = device
        self._cupy = cupy
        # Compiled for, and loaded into, cupy's current device.
        with cupy.cuda.Device(device.index):
            self._kernels = CudaKernels()

    def update(self, update: Update) -> None:
        with self._in_stream():
            self._kernels.update(update)

    def block_sums(self, gradient: Values) -> object:
        with self._in_stream():
            return self._kernels.block_sums(gradient)

    def begin_sum(self, gradient: Values, into: Values) -> object:
        with self._in_stream():
            return self._kernels.begin_sum(gradient, into)

    def add_to_sum(self, gradient: Values, into: Values) -> object:
        with self._in_stream():
            return self._kernels.add_to_sum(gradient, into)

    def on_host(self, sums: Any) -> _Sums:
        # In the stream that made them; asnumpy returns when the copy has ended.
        with self._in_stream():
            return cast(_Sums, self._cupy.asnumpy(sums))

    @contextmanager
    def _in_stream(self) -> Iterator[None]:
        # cupy has a current device and stream of its own, whatever torch's are.
        handle, index = torch.cuda.current_stream(self._device).cuda_stream, self._device.index
        with self._cupy.cuda.Device(index), foreign_stream(self._cupy, handle, index):
            yield
