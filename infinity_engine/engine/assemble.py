"""Turns a model, an optimizer and settings into an Engine. Checks what it needs before it touches the model."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from infinity_engine.config import EngineConfig
from infinity_engine.engine.requirements import require_torch

if TYPE_CHECKING:
    import torch

__all__ = ["initialize"]


def initialize(model: torch.nn.Module, optimizer: torch.optim.Optimizer, **settings: object) -> NoReturn:
    """Wrap `model` and `optimizer` so that their states live where the budget allows.

    This development version holds the storage library, the planning vocabulary and `infinity doctor`; the training
    engine itself is not in it yet, and this function says so instead of pretending.

    Raises:
        MissingDependencyError: torch is missing or older than the engine supports.
        ConfigError: a setting that there is not, or a value that it cannot have.
        NotImplementedError: always, until the engine lands (CHANGELOG.md, Unreleased).
    """
    require_torch("infinity_engine.initialize")
    EngineConfig.from_keywords(**settings)
    raise NotImplementedError(
        "infinity_engine.initialize: the training engine is not in this development version; nothing was changed. "
        "What works today: deepnvme, infinity_engine.plan and `infinity doctor` (see CHANGELOG.md, Unreleased)."
    )
