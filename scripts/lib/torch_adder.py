"""Sums of gradients for tests and benches that have no kernels of an engine."""

from __future__ import annotations

import torch

__all__ = ["TorchAdder"]


class TorchAdder:
    """torch's own additions. The engine passes its kernels, which no setting of torch changes."""

    def begin(self, values: torch.Tensor, into: torch.Tensor) -> None:
        """Write values to `into`."""
        into.copy_(values)

    def add(self, values: torch.Tensor, into: torch.Tensor) -> None:
        """Add values to `into`."""
        into.add_(values)
