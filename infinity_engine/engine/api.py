"""`initialize`: the door. Imports torch, native code and the rest of the engine when it is used, and not before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from infinity_engine.config import EngineConfig
from infinity_engine.engine.requirements import require_torch
from infinity_engine.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from infinity_engine.accel import Accelerator
    from infinity_engine.engine.engine import Engine

__all__ = ["initialize"]


def initialize(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    config: EngineConfig | Mapping[str, object] | None = None,
    *,
    device: Accelerator | None = None,
    **settings: object,
) -> Engine:
    """Wrap `model` and `optimizer` so that their states live where the budget allows; return the engine to train with.

    Settings come as `config`, as keywords, or both; keywords go first. `device` is an accelerator that is open already,
    such as an emulated one; it stays open, and the setting `accelerator` is not used.

    Raises:
        MissingDependencyError: torch is missing or older than the engine supports.
        ConfigError: a setting, an optimizer or a parameter that cannot be; the model is as it was.
        CapacityError: a tier cannot hold what it would have to; the model is as it was.
    """
    require_torch("infinity_engine.initialize")
    chosen = _settings(config, settings)
    from infinity_engine.engine.assemble import assemble

    return assemble(model, optimizer, chosen, device)


def _settings(config: EngineConfig | Mapping[str, object] | None, keywords: Mapping[str, object]) -> EngineConfig:
    if isinstance(config, EngineConfig):
        given: Mapping[str, object] = config.to_mapping()
    elif config is None or isinstance(config, Mapping):
        given = config or {}
    else:
        raise ConfigError(field="config", value=config, expected="an EngineConfig, a mapping of settings, or None")
    return EngineConfig.from_mapping({**given, **keywords})
