"""How fast modules compute: transformer blocks forward and backward, with all between the products.

A matrix product alone promises more than a model reaches: normalization, activation functions,
attention, sums, the cost of starting each of them, and new memory for gradients take their part,
and it depends on the shape how much.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from infinity_engine.calibration.device import DTYPES
from infinity_engine.calibration.effort import MeasuringTime
from infinity_engine.plan import BlockFigures, BlockShape, ComputeRate, Figure, Unit, block_flops

__all__ = ["host_computing", "measure_blocks"]

_WIDTHS = MappingProxyType({"cpu": (512, 1024, 1536, 2048), "cuda": (1024, 2048, 4096)})
_TOKENS = MappingProxyType({"cpu": (256, 1024), "cuda": (512, 2048)})
_HEAD = 64
# weights for each squared element of the width, and for each of its elements
_LAYERS, _VECTORS = 12, 13
# of the memory: parameters in each of two dtypes, gradients, and two for what lies between
_PARTS = 5
_LONGEST = 0.1  # of a dtype's time, for a forward, one that runs again, and a backward
_SLOW = 10  # times: products that much slower than the fastest are too slow to train with
_LITTLE = 0.1  # of the time of a dtype that is trained in
_PASSES = 4  # forwards that these compute as much as, at most


def measure_blocks(
    device: torch.device, products: Mapping[str, Figure], part: MeasuringTime, nbytes: int
) -> dict[str, dict[BlockShape, BlockFigures]]:
    """Measure blocks of several shapes, as far as these products' rates and memory allow."""
    parts = {name: part.share(share) for name, share in _shares(products).items()}
    points = [
        (name, shape)
        for name, dtype in DTYPES.items()
        for shape in _shapes(
            device, dtype, products[name].median or 0.0, parts[name].seconds, nbytes // _PARTS
        )
    ]
    weights = {name: _weights(device, dtype, nbytes // _PARTS) for name, dtype in DTYPES.items()}
    blocks = {point: _Block(point[1], weights[point[0]]) for point in points}
    # Once before any sample: the first run of a shape pays for torch's own preparations.
    for block in blocks.values():
        block.rate(0.0)
    figures: dict[str, dict[BlockShape, BlockFigures]] = {name: {} for name in DTYPES}
    found: dict[tuple[str, BlockShape], list[ComputeRate]] = {}
    for dtype, own_part in parts.items():
        # Apart: without AVX-512, one round in bf16 may take longer than its time.
        own = [point for point in points if point[0] == dtype]
        found |= own_part.in_turn(own, lambda point, sample_s: blocks[point].rate(sample_s))
    for (name, shape), samples in found.items():
        figures[name][shape] = BlockFigures(
            **{
                way: Figure.of([getattr(sample, way) for sample in samples], Unit.FLOPS)
                for way in ComputeRate._fields
            }
        )
    return figures


def _shares(products: Mapping[str, Figure]) -> dict[str, float]:
    """Return the part of the time for each dtype: little for one that is too slow to train in."""
    rates = {name: products[name].median or 0.0 for name in DTYPES}
    weights = {
        name: 1.0 if _SLOW * rate >= max(rates.values()) else _LITTLE
        for name, rate in rates.items()
    }
    return {name: weight / sum(weights.values()) for name, weight in weights.items()}


def host_computing(nbytes: int) -> Callable[[float], float]:
    """Return what computes on the CPU for so many seconds, and gives the rate: the smallest block,
    forward and backward, in about so much memory.
    """
    cpu = torch.device("cpu")
    shape = BlockShape(_WIDTHS["cpu"][0], _TOKENS["cpu"][0])
    # In fp32: without AVX-512, CPUs multiply bf16 a hundred times slower than models compute.
    block = _Block(shape, _weights(cpu, torch.float32, nbytes // _PARTS))
    block.rate(0.0)  # pays for torch's own preparations

    def rate(seconds: float) -> float:
        found = block.rate(seconds)
        return 3 / (1 / found.forward + 2 / found.backward)  # a backward is two forwards

    return rate


def _shapes(
    device: torch.device, dtype: torch.dtype, flops_per_s: float, seconds: float, nbytes: int
) -> list[BlockShape]:
    """Return the shapes that fit in the memory and the time; at least the smallest."""
    shapes = [
        BlockShape(width, tokens)
        for width in _WIDTHS[device.type]
        for tokens in _TOKENS[device.type]
    ]
    return [
        shape
        for number, shape in enumerate(shapes)
        if number == 0
        or (
            _numel(shape) * dtype.itemsize <= nbytes
            and _PASSES * block_flops(shape) <= _LONGEST * seconds * flops_per_s
        )
    ]


def _numel(shape: BlockShape) -> int:
    return _LAYERS * shape.width**2 + _VECTORS * shape.width


def _weights(device: torch.device, dtype: torch.dtype, nbytes: int) -> torch.Tensor:
    """Return values for parameters to be parts of: more than caches hold, where memory allows."""
    least = _numel(BlockShape(_WIDTHS[device.type][0], 1))
    values = torch.full((max(nbytes // dtype.itemsize, least),), 0.02, device=device, dtype=dtype)
    values[::3] = -0.03  # so that sums do not grow with the width
    return values


class _AllSaved(Exception):  # noqa: N818  # no error: it ends a forward early
    """All that a backward needs is there."""


class _Block:
    """A block with parameters, its input, and gradients that are made and forgotten."""

    def __init__(self, shape: BlockShape, weights: torch.Tensor) -> None:
        device, dtype = weights.device, weights.dtype
        width = shape.width

        self._shape = shape
        self._flops = block_flops(shape)
        # Two norms, each with weight and bias.
        self._device = device
        norms = ((width,), (width,)) * 2
        # Queries, keys and values in one; out; up; down: rows and columns in widths.
        layers = [
            shape
            for rows, columns in ((3, 1), (1, 1), (4, 1), (1, 4))
            for shape in ((rows * width, columns * width), (rows * width,))
        ]
        self._sizes = (*norms, *layers)
        self._numel = _numel(shape)
        self._weights = weights
        # where the next block's begin: not in any cache, as those of a model of many blocks
        self._at = 0
        self._input = torch.randn(1, shape.tokens, width, device=device).to(dtype).requires_grad_()
        # A given gradient of the output: no loss, so that only the block is measured.
        self._gradient = torch.full_like(self._input, 0.01)
        self._saved, _ = self._save(math.inf)
        """How many tensors a forward saves for the backward."""

    def rate(self, seconds: float) -> ComputeRate:
        """Compute a forward that runs again, a forward and a backward for so long, at least
        once.
        """
        forward_s = again_s = backward_s = 0.0
        times = 0
        while not times or forward_s + again_s + backward_s < seconds:
            again_s += self._save(self._saved)[1]
            parameters = self._next_parameters()
            start = time.perf_counter()
            made = self._forward(parameters)
            # On a GPU the forward has only been started by now.
            self._wait()
            middle = time.perf_counter()
            # grad(), not backward(): gradients in new memory each time, and none is kept.
            torch.autograd.grad(made, [self._input, *parameters], self._gradient)
            self._wait()
            backward_s += time.perf_counter() - middle
            forward_s, times = forward_s + middle - start, times + 1
        work = times * self._flops
        # A backward has two products for each of the forward.
        return ComputeRate(work / forward_s, 2 * work / backward_s, work / again_s)

    def _save(self, most: float) -> tuple[int, float]:
        """Run a forward until it has saved so many tensors, as engines run blocks again; return
        how many it has saved, and how long that took.
        """
        saved = 0

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal saved
            saved += 1
            if saved == most:
                raise _AllSaved
            return tensor.detach()

        parameters = self._next_parameters()
        start = time.perf_counter()
        with suppress(_AllSaved), saved_tensors_hooks(pack, lambda tensor: tensor):
            self._forward(parameters)
        self._wait()
        return saved, time.perf_counter() - start

    def _next_parameters(self) -> list[torch.Tensor]:
        """Return the parameters of another block."""
        # The memory is used up: the first block's are out of the caches by now.
        if self._at + self._numel > self._weights.numel():
            self._at = 0
        flat = self._weights[self._at : self._at + self._numel]
        self._at += self._numel
        found, start = [], 0
        for size in self._sizes:
            part = flat[start : start + math.prod(size)]
            start += part.numel()
            found.append(part.view(size).requires_grad_())
        return found

    def _forward(self, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
        pairs = [(parameters[at], parameters[at + 1]) for at in range(0, len(parameters), 2)]
        norms, (qkv, out, up, down) = pairs[:2], pairs[2:]
        size = (self._shape.width,)
        # The caller may be in no_grad.
        with torch.enable_grad():
            x = self._input
            wide = functional.linear(functional.layer_norm(x, size, *norms[0]), *qkv)
            query, key, value = wide.view(1, self._shape.tokens, 3, -1, _HEAD).permute(
                2, 0, 3, 1, 4
            )
            mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            x = x + functional.linear(mixed.transpose(1, 2).flatten(2), *out)
            wide = functional.linear(functional.layer_norm(x, size, *norms[1]), *up)
            return x + functional.linear(functional.gelu(wide), *down)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
