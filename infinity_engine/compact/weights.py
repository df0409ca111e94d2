"""How weights are kept in 8 or 4 bits: pure functions from values to integers and scales, and back.

`INT8`: each row has one scale. `NF4`: each 64 elements have one, and each element is one of 16
values, two in a byte, the first in its upper half, as bitsandbytes packs them.
"""

from __future__ import annotations

from enum import Enum

import torch

__all__ = ["NF4_BLOCK", "NF4_VALUES", "CompactKind", "compacted", "expanded"]

NF4_BLOCK = 64  # elements with one scale
# Quantiles of the normal distribution, scaled to 1 (QLoRA, Dettmers et al., 2023).
NF4_VALUES = (
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
# Elements that are worked on at once: what is beside the result takes some 20 bytes for each.
_PIECE = 4 << 20


class CompactKind(Enum):
    """How a weight is kept."""

    INT8 = "int8"  # A byte for each element, a scale for each row.
    NF4 = "nf4"  # Half a byte for each element, a scale for every 64.


def compacted(values: torch.Tensor, kind: CompactKind) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight's integers and scales: the nearest that there are."""
    if kind is CompactKind.INT8:
        parts = [_int8_of(rows) for rows in values.split(max(1, _PIECE // max(1, values.shape[1])))]
    else:
        parts = [_nf4_of(some) for some in values.reshape(-1).split(_PIECE)]
    weights, scales = zip(*parts, strict=True)
    return torch.cat(weights), torch.cat(scales)


def expanded(
    weight: torch.Tensor, scale: torch.Tensor, values: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return the elements that integers and scales stand for, in one row for four bits.

    `values` are the 16 of four bits. Computed in fp32 and rounded once, whatever the dtype.
    """
    if weight.dtype is torch.int8:
        found = torch.empty(weight.shape, dtype=dtype, device=weight.device)
        count = max(1, _PIECE // max(1, weight.shape[1]))
        for part, rows, factors in zip(
            found.split(count), weight.split(count), scale.split(count), strict=True
        ):
            part.copy_(torch.mul(rows, factors))
        return found
    # Both values of a byte at once: 256 pairs.
    pairs = torch.stack((values.repeat_interleave(len(values)), values.repeat(len(values))), dim=1)
    found = torch.empty(scale.numel(), NF4_BLOCK, dtype=dtype, device=weight.device)
    count = _PIECE // NF4_BLOCK
    for part, packed, factors in zip(
        found.split(count),
        weight.reshape(-1, NF4_BLOCK // 2).split(count),
        scale.split(count),
        strict=True,
    ):
        elements = pairs.index_select(0, packed.reshape(-1).int()).view(-1, NF4_BLOCK)
        part.copy_(elements.mul_(factors[:, None]))
    return found


def _int8_of(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows = values.float()
    scale = rows.abs().amax(dim=1, keepdim=True) / _MOST_INT8
    return torch.round(rows / _not_zero(scale)).to(torch.int8), scale


def _nf4_of(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = values.float().view(-1, NF4_BLOCK)
    scale = blocks.abs().amax(dim=1)
    known = torch.tensor(NF4_VALUES, device=values.device)
    # Between two neighbours, the border is in their middle.
    numbers = torch.bucketize(
        blocks / _not_zero(scale)[:, None], (known[1:] + known[:-1]) / 2, out_int32=True
    ).to(torch.uint8)
    pairs = numbers.view(-1, 2)
    return ((pairs[:, :1] << 4) | pairs[:, 1:]), scale


def _not_zero(scale: torch.Tensor) -> torch.Tensor:
    """Return scales to divide by: where all values are zero, any will do."""
    return torch.where(scale == 0, torch.ones_like(scale), scale)
