"""How fast the device updates parameters and multiplies matrices.

What cannot be measured here has the reason in its figure.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import MappingProxyType
from typing import TypeVar

import torch

from infinity_engine.accel import (
    Accelerator,
    Buffer,
    EmulatedAccelerator,
    StreamKind,
    UpdateCost,
    VirtualAccelerator,
)
from infinity_engine.calibration.effort import MeasuringTime, repeated
from infinity_engine.calibration.host import RULES, STATE_BYTES, steps_of, updates_state
from infinity_engine.calibration.identity import gpu_device
from infinity_engine.errors import CapacityError, MissingDependencyError
from infinity_engine.optim import NORM_BLOCK, Values
from infinity_engine.plan import Figure, Unit
from infinity_engine.units import GiB, align_down

__all__ = [
    "DTYPES",
    "device_identity",
    "measure_device_start",
    "measure_device_updates",
    "measure_matmul",
]

DTYPES = MappingProxyType({"fp32": torch.float32, "bf16": torch.bfloat16})
_FEWEST_COLUMNS, _COLUMNS = 256, MappingProxyType({"cpu": 2048, "cuda": 4096})
_LONG_ENOUGH_S = 0.01  # of one product
# products or updates that a GPU is given at once, so that it seldom waits for the host
_AT_ONCE = 8
_GPU_BYTES = GiB  # of its memory: an update through them takes a millisecond


def device_identity(accelerator: Accelerator) -> str:
    """Return what tells a device from others, as machine_identity has it."""
    if isinstance(accelerator, EmulatedAccelerator):
        # The rates are the device: others are another one.
        return f"emulated, {accelerator.clock} clock: {accelerator.emulation.rates!r}"
    return gpu_device() if accelerator.name == "cuda" else accelerator.name


def measure_matmul(device: torch.device, part: MeasuringTime) -> dict[str, Figure]:
    """Measure products of square matrices, as large as take some time and little memory."""
    # Made once: sizes are found out, and the memory is used again.
    products = {name: _product(device, dtype) for name, dtype in DTYPES.items()}

    def flops(name: str, sample_s: float) -> float:
        product, flop = products[name]
        return repeated(product, flop, sample_s)

    found = part.in_turn(list(DTYPES), flops)
    return {name: Figure.of(samples, Unit.FLOPS) for name, samples in found.items()}


def measure_device_updates(
    accelerator: Accelerator, nbytes: int, part: MeasuringTime
) -> dict[str, Figure]:
    """Measure the updates of each optimizer on the device, in up to so many bytes of its memory.

    A GPU takes more for it: what starting an update costs is not to count.
    """
    most = nbytes if accelerator.name == "emulated" else max(nbytes, _GPU_BYTES)
    numel = align_down(min(most, accelerator.memory().free // 2) // STATE_BYTES, NORM_BLOCK)
    return _measured(accelerator, numel, lambda rate: _figures(rate, part), _missing)


def measure_device_start(accelerator: Accelerator, part: MeasuringTime) -> Figure:
    """Measure what an update on the device costs, however small it is: one of one block."""

    def start(rate: _Update) -> Figure:
        [samples] = part.in_turn(["adamw"], rate).values()
        return Figure.of([NORM_BLOCK / sample for sample in samples], Unit.SECONDS)

    return _measured(
        accelerator, NORM_BLOCK, start, lambda reason: Figure.missing(reason, Unit.SECONDS)
    )


_Update = Callable[[str, float], float]
_Found = TypeVar("_Found")


def _measured(
    accelerator: Accelerator,
    numel: int,
    measure: Callable[[_Update], _Found],
    missing: Callable[[str], _Found],
) -> _Found:
    """Return what is measured with updates of so many parameters, or why nothing is."""
    if accelerator.unified:
        return missing("device and host are one memory, so the host updates")
    # Takes no memory: an emulated update takes time by its number of parameters.
    if accelerator.name == "emulated":
        return measure(_emulated(accelerator, max(numel, NORM_BLOCK)))
    try:
        buffer = accelerator.allocate(numel * STATE_BYTES)
    except (CapacityError, ValueError) as problem:
        return missing(f"there is no room on the device: {problem}")
    try:
        return measure(_on_gpu(accelerator, buffer, numel))
    except MissingDependencyError as problem:
        return missing(str(problem))
    finally:
        accelerator.free(buffer)


def _figures(rate: _Update, part: MeasuringTime) -> dict[str, Figure]:
    found = part.in_turn(list(RULES), rate)
    return {name: Figure.of(samples, Unit.PARAMETERS) for name, samples in found.items()}


def _missing(reason: str) -> dict[str, Figure]:
    return {name: Figure.missing(reason, Unit.PARAMETERS) for name in RULES}


def _emulated(accelerator: Accelerator, params: int) -> _Update:
    """Return what takes the time of an update on an emulated device, which is that of all rules."""
    stream = accelerator.stream(StreamKind.COMPUTE)

    def clock() -> float:
        return (
            accelerator.now_ns / 1e9
            if isinstance(accelerator, VirtualAccelerator)
            else time.perf_counter()
        )

    def update() -> None:
        accelerator.run(lambda: None, stream=stream, cost=UpdateCost(params)).wait()

    return lambda _, seconds: repeated(update, params, seconds, clock)


def _on_gpu(accelerator: Accelerator, buffer: Buffer, numel: int) -> _Update:
    """Return what updates states that lie in the buffer, by the kernels of a GPU."""
    from infinity_engine.optim.cuda import CudaKernels, foreign_stream

    kernels = CudaKernels()  # says so where there is no cupy
    import cupy

    stream = accelerator.stream(StreamKind.COMPUTE)
    # Wide ones first, so that every offset is aligned.
    widths = (torch.float32, torch.float32, torch.float32, torch.bfloat16, torch.bfloat16)
    tensors, offset = [], 0
    for dtype, value in zip(widths, (0.5, 0.01, 1e-4, 0.01, 0.5), strict=True):
        tensors.append(buffer.tensor(dtype, numel, offset).fill_(value))
        offset += numel * dtype.itemsize
    master, first, second, gradient, parameter = map(Values.of, tensors)
    steps = {
        name: steps_of(
            rule,
            updates_state(numel, master, (first, second)[: len(rule.states)]),
            gradient,
            parameter,
        )
        for name, rule in RULES.items()
    }

    def launched(name: str) -> None:
        current = torch.cuda.current_stream()
        # accelerator.run makes the stream torch's current one; cupy has one of its own.
        with foreign_stream(cupy, current.cuda_stream, current.device.index):
            steps[name](kernels)

    def rate(name: str, seconds: float) -> float:
        def some() -> None:
            cost = UpdateCost(numel)
            events = [
                # Only the last is waited for, so that the GPU has no pause in between.
                accelerator.run(lambda: launched(name), stream=stream, cost=cost)
                for _ in range(_AT_ONCE)
            ]
            events[-1].wait()

        return repeated(some, numel * _AT_ONCE, seconds)

    return rate


def _product(device: torch.device, dtype: torch.dtype) -> tuple[Callable[[], None], int]:
    """Return products that take long enough to be measured, and their floating-point operations."""
    most = _COLUMNS[device.type]
    times = _AT_ONCE if device.type == "cuda" else 1
    columns = _FEWEST_COLUMNS
    while True:
        product, flop = _product_of(device, dtype, columns, times), 2 * columns**3 * times
        # Once without a clock: it pays for torch's preparations of this size.
        product()
        # Larger ones until one takes long enough; a slow device stops at small ones.
        if columns >= most or flop / repeated(product, flop, 0.0) >= _LONG_ENOUGH_S:
            return product, flop
        columns *= 2


def _product_of(
    device: torch.device, dtype: torch.dtype, columns: int, times: int
) -> Callable[[], None]:
    left, right = (
        torch.full((columns, columns), 0.5, dtype=dtype, device=device) for _ in range(2)
    )
    # `out=`: no memory is allocated while the time is taken.
    into = torch.empty_like(left)

    def product() -> None:
        with torch.no_grad():
            for _ in range(times):
                torch.mm(left, right, out=into)
        if device.type == "cuda":
            # Else only the start of the products would be measured.
            torch.cuda.synchronize(device)

    return product
