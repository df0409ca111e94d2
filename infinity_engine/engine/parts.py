"""`EngineParts`: what `assemble` makes and an `Engine` is put together of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from infinity_engine.accel import Accelerator
from infinity_engine.activation import SavedTensors
from infinity_engine.engine.checkpoints.checkpointing import Run
from infinity_engine.gradients.keeper import GradientKeeper
from infinity_engine.lanes.meter import Meter
from infinity_engine.optim import Rule, check_rules
from infinity_engine.parameters.hooks import Hooks
from infinity_engine.parameters.modules import ModuleParameters, UnwatchedModules
from infinity_engine.plan.step import StepPlan
from infinity_engine.reporting.drives import DriveMeter
from infinity_engine.update.early import EarlyUpdates, NoEarlyUpdates
from infinity_engine.update.replanning import KeptPlan, Replanner
from infinity_engine.update.updating import Deferral

__all__ = ["EngineParts"]


@dataclass(frozen=True, kw_only=True)
class EngineParts(Run):
    """What an engine is put together of; what a setting leaves out is a class that does nothing."""

    accelerator: Accelerator
    plan: StepPlan
    replanner: Replanner | KeptPlan
    gradients: GradientKeeper
    modules: ModuleParameters | UnwatchedModules
    activations: SavedTensors
    deferral: Deferral
    early: EarlyUpdates | NoEarlyUpdates
    autocast: torch.dtype | None
    """What torch.autocast chooses beside fp32; None: it is not used."""
    accumulation_steps: int
    max_grad_norm: float | None
    meter: Meter
    drives: DriveMeter
    hooks: Hooks

    def check_rules(self, rules: Sequence[Rule]) -> None:
        """Refuse rules of the optimizer's groups that the engine has no states for.

        Raises:
            ConfigError: a group is gone, or its options need other states.
        """
        check_rules(rules, states=self.states.state_names, groups=self.states.groups)
