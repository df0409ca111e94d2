"""The update rules on the CPU: carries out a subgroup's records, and sums gradients.

Gives the same bits on every CPU, with every number of threads. Blocks the calling thread, without
the GIL. The memory that the records name must stay where it is until the call returns.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from infinity_engine import _native
from infinity_engine.errors import ConfigError
from infinity_engine.optim.formats import FloatFormat, Values
from infinity_engine.optim.records import Update
from infinity_engine.optim.threads import UpdateThreads

__all__ = ["HostKernels", "SummedMemory", "Sums"]


class SummedMemory(NamedTuple):
    """Memory that an update sums while the caches have it: a crc32c for each `block_bytes`."""

    address: int
    nbytes: int
    block_bytes: int
    with_before: bool
    """Whether the update reads it, and sums also what it found."""


class Sums(NamedTuple):
    """The checksums of one memory, by block."""

    before: array[int]
    """Of what the update found; empty unless asked for."""
    after: array[int]


class HostKernels:
    """The kernels of one SIMD level on a pool of threads."""

    def __init__(self, threads: UpdateThreads, *, home: str | None = None) -> None:
        """Use the kernels of the SIMD level `home`, or the best ones that INFINITY_SIMD allows.

        Raises:
            ConfigError: this CPU has no such kernels.
        """
        self.threads = threads
        self.home = _native.chosen_simd(os.environ.get("INFINITY_SIMD")) if home is None else home
        if self.home not in _native.homes():
            raise ConfigError.unknown_name(
                field="SIMD level", name=self.home, known=_native.homes()
            )

    def update(self, update: Update) -> None:
        """Carry out an update; the caller then sets the state's steps."""
        _native.update(update.records, self.threads.native, self.home)

    def update_and_sum(self, update: Update, memories: Sequence[SummedMemory]) -> list[Sums]:
        """Carry out an update, and return the checksums of each of these memories.

        They do not overlap. Each stream of the update lies in one of them whole, or in none.
        """
        if not memories:
            self.update(update)
            return []
        made = _native.update_and_sum(
            update.records, self.threads.native, self.home, sorted(memories)
        )
        sums = dict(zip(sorted(memories), made, strict=True))
        return [Sums(*[array("I", part) for part in sums[memory]]) for memory in memories]

    def block_sums(self, gradient: Values) -> npt.NDArray[np.float64]:
        """Return the sum of squares of each block of a gradient."""
        format_ = gradient.format.number
        sums = _native.block_sums(
            gradient.address, format_, gradient.numel, self.threads.native, self.home
        )
        # The array shares the bytes that the kernel returned; numpy keeps them alive.
        return np.frombuffer(sums)

    def begin_sum(self, gradient: Values, into: Values) -> npt.NDArray[np.float64]:
        """Write a gradient to the fp32 values `into`, and return the block sums of the result."""
        return self._accumulate(gradient, into, begins=True)

    def add_to_sum(self, gradient: Values, into: Values) -> npt.NDArray[np.float64]:
        """Add a gradient to the fp32 values `into`, and return the block sums of the result."""
        return self._accumulate(gradient, into, begins=False)

    def _accumulate(
        self, gradient: Values, into: Values, *, begins: bool
    ) -> npt.NDArray[np.float64]:
        if into.format is not FloatFormat.FP32 or into.numel != gradient.numel:
            expected = f"{gradient.numel} values of FP32, as many as the gradient has"
            raise ConfigError(
                field="into", value=f"{into.numel} of {into.format.name}", expected=expected
            )
        sums = _native.accumulate(
            into.address,
            gradient.address,
            gradient.format.number,
            gradient.numel,
            begins,
            self.threads.native,
            self.home,
        )
        return np.frombuffer(sums)
