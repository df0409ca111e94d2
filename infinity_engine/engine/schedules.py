"""`WarmupScheduler`: a learning-rate scheduler of torch with the rates of a migrated file."""

from __future__ import annotations

from typing import Any

import torch

from infinity_engine.migration import Warmup

__all__ = ["WarmupScheduler"]


class WarmupScheduler(torch.optim.lr_scheduler.LRScheduler):
    """Sets the rates that `warmup` has for each update."""

    def __init__(self, optimizer: torch.optim.Optimizer, warmup: Warmup) -> None:
        # First: torch's constructor asks for the first rates.
        self._warmup = warmup
        super().__init__(optimizer)

    def get_lr(self) -> list[float | torch.Tensor]:
        """Return the rate of each group in the next update."""
        return [self._warmup.rate(self.last_epoch, float(base)) for base in self.base_lrs]

    def state_dict(self) -> dict[str, Any]:
        """Return where it is; the rates themselves come from the file again."""
        return {name: value for name, value in super().state_dict().items() if name != "_warmup"}
