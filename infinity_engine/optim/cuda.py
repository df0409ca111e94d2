"""The update rules on a GPU: the CPU's records, with addresses on the device, on a cupy stream.

Gives the CPU's bits. Starts work on the stream that is current in cupy and waits for nothing; the
memory that the records name must stay until the stream has passed. tests/gpu compares it with the
CPU on a machine with a GPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from infinity_engine.errors import ConfigError
from infinity_engine.optim.formats import FloatFormat, Values
from infinity_engine.optim.nvrtc import KERNELS, compile_kernels, cupy_nvrtc
from infinity_engine.optim.records import Update
from infinity_engine.optim.subgroup import NORM_BLOCK

__all__ = ["CudaKernels", "foreign_stream"]

# Of a block of CUDA; a warp adds one block of a gradient's squares.
_THREADS = 256
_MOST_RECORDS = 65_535  # of one launch: a grid has no more rows
_WARP = 32
# For each multiprocessor. The kernels loop over what one grid does not cover.
_BLOCKS_PER_PROCESSOR = 8


class CudaKernels:
    """The kernels of cupy's current device."""

    def __init__(self) -> None:
        """Compile and load them.

        Raises:
            MissingDependencyError: cupy is not installed.
            RuntimeError: they do not compile.
        """
        # Before `import cupy`: without cupy this raises an error that names the extra to install.
        nvrtc = cupy_nvrtc()
        import cupy

        self._cupy = cupy
        device = cupy.cuda.Device()
        self.compiled = compile_kernels(nvrtc, f"sm_{device.compute_capability}")
        module = cupy.cuda.function.Module()
        module.load(self.compiled.cubin)
        self._module = module
        self._functions = {name: module.get_function(name) for name in KERNELS}
        self._most_blocks: int = device.attributes["MultiProcessorCount"] * _BLOCKS_PER_PROCESSOR

    def update(self, update: Update) -> None:
        """Start an update; the caller sets the state's steps when the stream has passed.

        The records are copied to the device first, in the stream's order.
        """
        if len(update.records) == 0:
            return
        # As bytes: cupy has no arrays of records.
        records = self._cupy.asarray(np.frombuffer(update.records.tobytes(), np.uint8))
        # The second dimension of the grid is the record: a shorter one leaves threads idle.
        widest = int(update.records["numel"].max())
        blocks, nbytes = self._grid(widest), update.records.itemsize
        for first in range(0, len(update.records), _MOST_RECORDS):
            grid = (blocks, min(len(update.records) - first, _MOST_RECORDS))
            self._functions["update"](grid, (_THREADS,), (records[first * nbytes :],))

    def block_sums(self, gradient: Values) -> Any:
        """Return a gradient's block sums, a cupy array, valid once the stream has passed."""
        format_ = np.uint32(gradient.format.number)
        return self._sums("block_sums", gradient, (gradient.address, format_, gradient.numel))

    def begin_sum(self, gradient: Values, into: Values) -> Any:
        """Write a gradient to the fp32 values `into`; return the result's block sums, as above."""
        return self._accumulate(gradient, into, begins=1)

    def add_to_sum(self, gradient: Values, into: Values) -> Any:
        """Add a gradient to the fp32 values `into`; return the result's block sums, as above."""
        return self._accumulate(gradient, into, begins=0)

    def _accumulate(self, gradient: Values, into: Values, *, begins: int) -> Any:
        if into.format is not FloatFormat.FP32 or into.numel != gradient.numel:
            expected = f"{gradient.numel} values of FP32, as many as the gradient has"
            raise ConfigError(
                field="into", value=f"{into.numel} of {into.format.name}", expected=expected
            )
        format_ = np.uint32(gradient.format.number)
        arguments = (into.address, gradient.address, format_, np.uint32(begins), gradient.numel)
        return self._sums("accumulate", gradient, arguments)

    def _sums(self, kernel: str, gradient: Values, arguments: tuple[Any, ...]) -> Any:
        sums = self._cupy.empty(-(-gradient.numel // NORM_BLOCK), np.float64)
        if gradient.numel > 0:
            grid = (self._grid(len(sums) * _WARP),)
            # Addresses and counts, as unsigned 64 bits: so the kernels declare them.
            wide = tuple(
                np.uint64(argument) if isinstance(argument, int) else argument
                for argument in arguments
            )
            self._functions[kernel](grid, (_THREADS,), (*wide, sums))
        return sums

    def _grid(self, threads: int) -> int:
        # The kernels loop over what one grid does not cover.
        return max(1, min(-(-threads // _THREADS), self._most_blocks))


def foreign_stream(cupy: Any, handle: int, device: int) -> Any:
    """Return cupy's stream for one that another library made and owns, on the device `device`."""
    # since cupy 14, which deprecates ExternalStream
    adopt = getattr(cupy.cuda.Stream, "from_external", None)
    return (
        cupy.cuda.ExternalStream(handle, device) if adopt is None else adopt(_ForeignStream(handle))
    )


class _ForeignStream:
    """A stream that another library owns, as the CUDA stream protocol wants it."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    # The protocol's version, and the handle.
    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle
