"""`initialize`: the door.

Imports torch, native code and the rest of the engine when it is used, and not before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from infinity_engine.config import EngineConfig
from infinity_engine.errors import ConfigError
from infinity_engine.machine.packages import require_torch

if TYPE_CHECKING:
    import torch

    from deepnvme import IOQueue
    from infinity_engine.accel import Accelerator
    from infinity_engine.engine.engine import Engine
    from infinity_engine.optim import Rule
    from infinity_engine.optim.policy import OffloadPolicy
    from infinity_engine.progress import Progress

__all__ = ["initialize"]


def initialize(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Rule | Mapping[str, object] | str,
    config: EngineConfig | Mapping[str, object] | None = None,
    *,
    device: Accelerator | None = None,
    policy: OffloadPolicy | str | None = None,
    queue: IOQueue | None = None,
    progress: Callable[[Progress], object] | None = None,
    **settings: object,
) -> Engine:
    """Return an engine that trains `model` with its states where the budget allows.

    `optimizer` is torch's Adam, AdamW, Adagrad or SGD over parameters of the model; or asks for one
    over all of them: a rule such as `infinity_engine.optim.Lion(lr=1e-4)`, its name, or {"name":
    "lion", "lr": 1e-4}. Settings come as `config`, as keywords, or both; keywords go first.
    `device` is an accelerator that is open already, such as an emulated one; it stays open, and the
    setting `accelerator` is not used. `policy` takes the place of the setting `strategy`: a policy
    of your own, or the name of a built-in one, such as "eq1". It is asked once, with the subgroups,
    the `rates` and what the budget leaves of the device; its plan is that of every update. `queue`
    is a deepnvme.IOQueue to use for the budget's drives, which stays open; else the engine has one
    of its own. `progress`, such as print, is called now and then with how far parameters and states
    are on their way to where they stay.

    Raises:
        MissingDependencyError: torch is missing or older than the engine supports.
        ConfigError: a setting, an optimizer, a parameter or a plan that cannot be; the model is as
            it was.
        CapacityError: a tier cannot hold what it would have to; the model is as it was.
        TransferError: what is to rest on drives could not be written there; the model is as it was.
    """
    # Before torch is imported, so that the error names the extra to install.
    require_torch("infinity_engine.initialize")
    chosen = _settings(config, settings)
    import torch

    if not isinstance(model, torch.nn.Module):
        raise ConfigError(field="model", value=type(model).__name__, expected="a torch.nn.Module")
    from infinity_engine.engine.assemble import assemble
    from infinity_engine.engine.optimizers import optimizer_of

    return assemble(
        model,
        optimizer_of(model, optimizer),
        chosen,
        device=device,
        policy=_policy(policy, chosen),
        queue=queue,
        progress=progress,
    )


def _settings(
    config: EngineConfig | Mapping[str, object] | None, keywords: Mapping[str, object]
) -> EngineConfig:
    if isinstance(config, EngineConfig):
        # As a mapping, so that keywords can replace single settings.
        given: Mapping[str, object] = config.to_mapping()
    elif config is None or isinstance(config, Mapping):
        given = config or {}
    else:
        raise ConfigError(
            field="config", value=config, expected="an EngineConfig, a mapping of settings, or None"
        )
    return EngineConfig.from_mapping({**given, **keywords})


def _policy(given: object, config: EngineConfig) -> OffloadPolicy | None:
    """Return the policy that is meant, None where it is the strategy's."""
    if given is None:
        return None
    from infinity_engine.optim.policies import BUILT_IN
    from infinity_engine.optim.policy import OffloadPolicy

    policy = BUILT_IN[given] if isinstance(given, str) else given
    if not isinstance(policy, OffloadPolicy):
        expected = (
            "an OffloadPolicy, which @offload_policy(name) makes of a function, or the name of a "
            "built-in one"
        )
        raise ConfigError(field="policy", value=given, expected=expected)
    # A strategy that was given, and is not the default.
    if config.strategy != EngineConfig().strategy:
        strategy = config.strategy.to_plain()
        expected = (
            f"none beside strategy={strategy!r}: both say where updates run, so give one of the two"
        )
        raise ConfigError(field="policy", value=policy.name, expected=expected)
    return policy
