"""How weights are kept in 8 or 4 bits: pure functions from values to integers and scales, and back.

`INT8`: each row has one scale. `NF4`: each 64 elements have one, and each element is one of 16
values, two in a byte, the first in its upper half, as bitsandbytes packs them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from enum import Enum
from functools import cache

import torch

from infinity_engine import _native
from infinity_engine.errors import ConfigError
from infinity_engine.optim import Values
from infinity_engine.optim.threads import UpdateThreads

__all__ = ["NF4_BLOCK", "CompactKind", "compacted", "expanded", "nf4_values", "working_bytes"]

NF4_BLOCK = _native.NF4_BLOCK  # elements with one scale
# Quantiles of the normal distribution, scaled to 1 (QLoRA, Dettmers et al., 2023).
_NF4_VALUES = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
_MOST_INT8 = 127
_PIECE = 4 << 20  # elements that are expanded at once; the work on each takes 6 bytes
# Elements that are rounded at once, and the bytes that the work on each takes.
_ROUNDED = 1 << 20
_WORKING_BYTES = 8


class CompactKind(Enum):
    """How a weight is kept."""

    INT8 = "int8"  # A byte for each element, a scale for each row.
    NF4 = "nf4"  # Half a byte for each element, a scale for every 64.

    @classmethod
    def of(cls, name: CompactKind | str, field: str = "kind") -> CompactKind:
        """Return a kind by its name, which the caller has given as the argument `field`.

        Raises:
            ConfigError: there is none of this name.
        """
        try:
            return cls(name)
        except ValueError:
            known = [known.value for known in cls]
            raise ConfigError.unknown_name(field=field, name=str(name), known=known) from None

    def fits(self, numel: int) -> bool:
        """Tell whether a weight of this many elements can be kept so."""
        return numel > 0 and (self is not CompactKind.NF4 or numel % NF4_BLOCK == 0)


def nf4_values() -> torch.Tensor:
    """Return the 16 values of four bits."""
    return torch.tensor(_NF4_VALUES)


def working_bytes(values: torch.Tensor) -> int:
    """Return the bytes that `compacted` takes for a weight at most, its result included."""
    return values.numel() + min(values.numel(), _ROUNDED) * _WORKING_BYTES


def compacted(values: torch.Tensor, kind: CompactKind) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight's integers and scales: the nearest that there are."""
    if kind is CompactKind.INT8:
        return _int8_of(values)
    return _nf4_of(values.reshape(-1, NF4_BLOCK))


def expanded(
    weight: torch.Tensor, scale: torch.Tensor, values: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return the elements that integers and scales stand for, in one row for four bits.

    `values` are the 16 of four bits. Computed in fp32 and rounded once, whatever the dtype.
    """
    scale, values = scale.float(), values.float()  # the host's kernels read these as fp32
    in_8_bits = weight.dtype is torch.int8
    shape = weight.shape if in_8_bits else (scale.numel(), NF4_BLOCK)
    found = torch.empty(shape, dtype=dtype, device=weight.device)
    if weight.device.type == "cpu" and dtype.itemsize <= scale.itemsize:
        _expand_on_host(weight, scale, values, found)
    elif in_8_bits:
        _expand_rows(weight, scale, found)
    else:
        _expand_blocks(weight, scale, values, found)
    return found


def _expand_rows(weight: torch.Tensor, scale: torch.Tensor, into: torch.Tensor) -> None:
    count = max(1, _PIECE // max(1, weight.shape[1]))
    pieces = (torch.split(tensor, count) for tensor in (into, weight, scale))
    for part, rows, factors in zip(*pieces, strict=True):
        part.copy_(torch.mul(rows, factors))


def _expand_blocks(
    weight: torch.Tensor, scale: torch.Tensor, values: torch.Tensor, into: torch.Tensor
) -> None:
    # Both values of a byte at once: 256 pairs.
    pairs = torch.stack((values.repeat_interleave(len(values)), values.repeat(len(values))), dim=1)
    count = _PIECE // NF4_BLOCK
    packed_blocks = weight.reshape(-1, NF4_BLOCK // 2)
    pieces = (torch.split(tensor, count) for tensor in (into, packed_blocks, scale))
    for part, packed, factors in zip(*pieces, strict=True):
        elements = pairs.index_select(0, packed.reshape(-1).int()).view(-1, NF4_BLOCK)
        part.copy_(elements.mul_(factors[:, None]))


def _expand_on_host(
    weight: torch.Tensor, scale: torch.Tensor, values: torch.Tensor, into: torch.Tensor
) -> None:
    """Expand with threads of the host, which is faster there than torch's operators."""
    integers, scales, named = (tensor.detach().contiguous() for tensor in (weight, scale, values))
    format_ = Values.of(into).format.number
    threads = _threads(os.getpid(), torch.get_num_threads()).native
    if weight.dtype is torch.int8:
        rows, columns = weight.shape
        _native.expand_int8(
            integers.data_ptr(),
            scales.data_ptr(),
            rows,
            columns,
            into.data_ptr(),
            format_,
            threads,
        )
    else:
        _native.expand_nf4(
            integers.data_ptr(),
            scales.data_ptr(),
            named.data_ptr(),
            scales.numel(),
            into.data_ptr(),
            format_,
            threads,
        )


@cache
def _threads(_process: int, count: int) -> UpdateThreads:
    # For each process: those of the parent do not run in a forked child.
    return UpdateThreads.anywhere(count)


# Both work on some rows at a time, in the same memory: what is freed and taken again and again
# piles up in the allocator of the host.


def _int8_of(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    weight = torch.empty(rows.shape, dtype=torch.int8, device=rows.device)
    scale = torch.empty(len(rows), 1, device=rows.device)
    room = torch.empty(_rows_of(rows), rows.shape[1], device=rows.device)
    for given, integers, factors in _pieces(len(room), rows, weight, scale):
        found = _largest(given, factors[:, 0], room)
        factors.div_(_MOST_INT8)
        integers.copy_(found.div_(_not_zero(factors)).round_())
    return weight, scale


def _nf4_of(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    weight = torch.empty(len(blocks), NF4_BLOCK // 2, dtype=torch.uint8, device=blocks.device)
    scale = torch.empty(len(blocks), device=blocks.device)
    room = torch.empty(_rows_of(blocks), NF4_BLOCK, device=blocks.device)
    numbers = torch.empty(room.shape, dtype=torch.int32, device=blocks.device)
    known = torch.tensor(_NF4_VALUES, device=blocks.device)
    # Between two neighbours, the border is in their middle.
    borders = (known[1:] + known[:-1]) / 2
    for given, packed, factors in _pieces(len(room), blocks, weight, scale):
        parts = _largest(given, factors, room)
        parts.div_(_not_zero(factors)[:, None])
        found = torch.bucketize(parts, borders, out_int32=True, out=numbers[: len(given)])
        packed.copy_(found[:, ::2].mul_(len(known)).add_(found[:, 1::2]))
    return weight.view(-1, 1), scale


def _rows_of(rows: torch.Tensor) -> int:
    """Return how many rows are rounded at once."""
    return min(len(rows), max(1, _ROUNDED // max(1, rows.shape[1])))


def _pieces(count: int, *tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    return zip(*(torch.split(tensor, max(1, count)) for tensor in tensors), strict=True)


def _largest(rows: torch.Tensor, scale: torch.Tensor, room: torch.Tensor) -> torch.Tensor:
    """Copy rows to `room`, and the largest magnitude of each to `scale`; return the copy."""
    found = room[: len(rows)].copy_(rows)
    torch.linalg.vector_norm(found, torch.inf, dim=1, out=scale)
    return found


def _not_zero(scale: torch.Tensor) -> torch.Tensor:
    """Return scales to divide by: where all values are zero, any will do."""
    return torch.where(scale == 0, torch.ones_like(scale), scale)
