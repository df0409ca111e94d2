"""What training a transformer takes in memory and work, by the formulas of ZeRO-Infinity's section
3.

Pure arithmetic in whole bytes and FLOP: mixed precision, Adam, activation checkpoints. Knows no
machine.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["STATE_BYTES", "Shape"]

STATE_BYTES = 20
"""Bytes of model states for a parameter, as ZeRO-Infinity counts: 2 parameter, 2 gradient, 16
optimizer states.
"""


@dataclass(frozen=True, slots=True)
class Shape:
    """A transformer of so many `layers` of width `hidden`, with so many attention `heads`."""

    layers: int
    hidden: int
    heads: int = 1

    @property
    def params(self) -> int:
        """Parameters of all layers; embeddings are not counted."""
        return 12 * self.layers * self.hidden**2

    @property
    def state_bytes(self) -> int:
        """Parameters, gradients and optimizer states."""
        return STATE_BYTES * self.params

    @property
    def operator_bytes(self) -> int:
        """Working memory of the largest operator: parameters and gradients of the linear layer hd
        -> 4 hd.
        """
        return 4 * self.hidden * 4 * self.hidden

    def checkpoint_bytes(self, batch: float, sequence: int, blocks: int = 1) -> float:
        """Return the bytes of activation checkpoints, one for so many `blocks`."""
        return 2 * batch * sequence * self.hidden * self.layers / blocks

    def working_bytes(self, batch: float, sequence: int, blocks: int = 1) -> float:
        """Return the bytes of activations between two checkpoints."""
        return batch * sequence * blocks * (16 * self.hidden + 2 * self.heads * sequence)

    def flops(self, batch: float, sequence: int) -> float:
        """Return the work of one iteration: forward, backward, and forward again from
        checkpoints.
        """
        return 2 * 4 * batch * sequence * self.params
