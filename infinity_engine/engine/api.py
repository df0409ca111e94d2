"""`initialize`: the door.

Imports torch, native code and the rest of the engine when it is used, and not before.
"""

from __future__ import annotations

import os
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
    from infinity_engine.migration import Migration
    from infinity_engine.optim import Rule
    from infinity_engine.optim.policy import OffloadPolicy
    from infinity_engine.progress import Progress

__all__ = ["initialize", "settings_given"]


def initialize(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Rule | Mapping[str, object] | str | None = None,
    config: EngineConfig | Mapping[str, object] | str | os.PathLike[str] | None = None,
    *,
    device: Accelerator | None = None,
    policy: OffloadPolicy | str | None = None,
    queue: IOQueue | None = None,
    progress: Callable[[Progress], object] | None = None,
    **settings: object,
) -> Engine:
    """Return an engine that trains `model` with its states where the budget allows.

    A frozen model, as after model.requires_grad_(False), only runs and needs no optimizer.
    `optimizer` is torch's Adam, AdamW, Adagrad or SGD over parameters of the model; or asks for one
    over all of them: a rule such as `infinity_engine.optim.Lion(lr=1e-4)`, its name, or {"name":
    "lion", "lr": 1e-4}. Settings come as `config`, as keywords, or both; keywords go first.
    `config` may be the path of a JSON file, of settings or of DeepSpeed's; the latter may have the
    optimizer, and a scheduler that the engine steps (migrate-from-deepspeed.md).
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
    given = settings_given(config)
    given.warn_of_missing(2)
    together = {**given.settings, **settings}
    chosen = EngineConfig.from_mapping(together)
    import torch

    if not isinstance(model, torch.nn.Module):
        raise ConfigError(field="model", value=type(model).__name__, expected="a torch.nn.Module")
    from infinity_engine.engine.assemble import assemble
    from infinity_engine.engine.optimizers import optimizer_of
    from infinity_engine.engine.schedules import WarmupScheduler

    stepped = optimizer_of(model, given.optimizer if optimizer is None else optimizer)
    given.warn_of_auto(together, 2)
    engine = assemble(
        model,
        stepped,
        chosen,
        device=device,
        policy=_policy(policy, chosen),
        queue=queue,
        progress=progress,
    )
    if given.schedule is not None:
        engine.follow_schedule(WarmupScheduler(stepped, given.schedule))
    return engine


def settings_given(config: object) -> Migration:
    """Return what a `config` of `initialize` says, as a mapping that keywords can replace parts of.

    Raises:
        ConfigError: it is no configuration, or a file that cannot be read.
    """
    # Here, as each command of the command line imports this module and few need that one.
    from infinity_engine.migration import Migration, is_deepspeed, migrate_deepspeed, read_json

    if isinstance(config, EngineConfig):
        defaults = EngineConfig().to_mapping()
        # Only what was chosen: in another library's loop, its arguments say the rest.
        chosen = {name: it for name, it in config.to_mapping().items() if it != defaults[name]}
        return Migration(settings=chosen)
    if isinstance(config, str | os.PathLike):
        config = read_json(config)
    if config is not None and not isinstance(config, Mapping):
        expected = "an EngineConfig, a mapping of settings, the path of a JSON file, or None"
        raise ConfigError(field="config", value=config, expected=expected)
    settings = config or {}
    if is_deepspeed(settings):
        return migrate_deepspeed(settings, ranks=int(os.environ.get("WORLD_SIZE", "1")))
    return Migration(settings=settings)


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
