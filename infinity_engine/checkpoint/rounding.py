"""Floating-point values in another dtype, rounded to nearest even as the engine's kernels round.

Bytes in, bytes out. Called by the exports and by the readers of foreign checkpoints. Imports no
torch.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["FLOATS", "converted"]

FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
"""The dtypes that can be converted into one another."""

_NUMPY = MappingProxyType({"F64": np.float64, "F32": np.float32, "F16": np.float16})


def converted(raw: npt.NDArray[np.uint8], have: str, want: str) -> npt.NDArray[np.uint8]:
    """Return the bytes of values of the dtype `have` in the dtype `want`.

    Values beyond the range of `want` become infinity.

    Raises:
        ValueError: one of the two is no floating-point dtype, and they differ.
    """
    if have == want:
        return raw
    if not {have, want} <= FLOATS:
        raise ValueError(f"values of {have} cannot be converted to {want}")
    if want == "BF16":
        return _bf16_of(
            _odd_fp32(raw) if have == "F64" else _as_numpy(raw, have).astype(np.float32)
        ).view(np.uint8)
    with np.errstate(over="ignore"):  # which is infinity, as the kernels have it
        values: npt.NDArray[Any] = _as_numpy(raw, have).astype(_NUMPY[want])
    return values.view(np.uint8)


def _as_numpy(raw: npt.NDArray[np.uint8], have: str) -> npt.NDArray[Any]:
    if have == "BF16":
        # bf16 is the upper half of an fp32.
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return raw.view(_NUMPY[have])


def _odd_fp32(raw: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """Return fp64 values in fp32, truncated, the last bit set where they are inexact.

    Rounding these to fewer bits gives what one rounding of the fp64 values gives.
    """
    values = raw.view(np.float64)
    with np.errstate(over="ignore"):
        near = values.astype(np.float32)
    inexact = (near.astype(np.float64) != values) & ~np.isnan(values)
    # astype rounded to nearest. Where that went away from zero, the value before it is taken.
    beyond = inexact & (np.abs(near.astype(np.float64)) > np.abs(values))
    bits: npt.NDArray[np.uint32] = near.view(np.uint32) - beyond.astype(np.uint32)  # towards zero
    odd: npt.NDArray[np.float32] = (bits | inexact.astype(np.uint32)).view(np.float32)
    return odd


def _bf16_of(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    bits = values.view(np.uint32)
    # To nearest even, in integers: just under half of the last place, and one more if it is odd.
    rounded: npt.NDArray[np.uint32] = (
        bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    ) >> np.uint32(16)
    # A NaN with its payload in the dropped half would become infinity.
    rounded[np.isnan(values)] = 0x7FC0
    return rounded.astype(np.uint16)
