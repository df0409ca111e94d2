"""`EngineParts`: what `assemble` makes and an `Engine` is put together of."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from infinity_engine.accel import Accelerator
from infinity_engine.activation import SavedTensors
from infinity_engine.engine.checkpoints.checkpointing import Run
from infinity_engine.gradients.keeper import GradientKeeper
from infinity_engine.lanes.meter import Meter
from infinity_engine.optim import Rule, rules_with
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

    def rules_now(self) -> tuple[Rule, ...]:
        """Return the rules of the optimizer's groups, with the options that these have now.

        Raises:
            ConfigError: a group is gone, or its options need states that the engine does not have.
        """
        states = self.states
        return rules_with(self.optimizer, states=states.state_names, groups=states.groups)
