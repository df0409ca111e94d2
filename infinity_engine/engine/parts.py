"""`EngineParts`: what `assemble` makes and an `Engine` is put together of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from deepnvme import IOQueue
from infinity_engine.accel import Accelerator
from infinity_engine.activation import SavedTensors
from infinity_engine.gradients.keeper import GradientKeeper
from infinity_engine.gradients.scaling import LossScale
from infinity_engine.lanes.meter import Meter
from infinity_engine.memory import Ledger
from infinity_engine.parameters.hooks import Hooks
from infinity_engine.parameters.modules import ModuleParameters, UnwatchedModules
from infinity_engine.parameters.parameters import ModelParameter, TrainedParameter
from infinity_engine.parameters.providing import Provider
from infinity_engine.plan.step import StepPlan
from infinity_engine.ranks.together import ManyRanks, OneRank
from infinity_engine.reporting.drives import DriveMeter
from infinity_engine.telemetry import Telemetry
from infinity_engine.update.early import EarlyUpdates, NoEarlyUpdates
from infinity_engine.update.replanning import KeptPlan, Replanner
from infinity_engine.update.states import StateKeeper
from infinity_engine.update.updating import Deferral

__all__ = ["EngineParts"]


@dataclass(frozen=True, kw_only=True)
class EngineParts:
    """What an engine is put together of; what a setting leaves out is a class that does nothing."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    accelerator: Accelerator
    trained: Sequence[TrainedParameter]
    frozen: Sequence[ModelParameter]
    plan: StepPlan
    replanner: Replanner | KeptPlan
    gradients: GradientKeeper
    states: StateKeeper
    fetcher: Provider
    modules: ModuleParameters | UnwatchedModules
    activations: SavedTensors
    ranks: OneRank | ManyRanks
    deferral: Deferral
    early: EarlyUpdates | NoEarlyUpdates
    scale: LossScale
    autocast: torch.dtype | None
    """What torch.autocast chooses beside fp32; None: it is not used."""
    accumulation_steps: int
    max_grad_norm: float | None
    telemetry: Telemetry
    meter: Meter
    drives: DriveMeter
    ledger: Ledger
    hooks: Hooks
    queue: IOQueue | None  # None where there are no drives
    io_bytes: int
    """The host memory that the queue has reserved for copies."""
    settings: Mapping[str, Any]
    """All settings of the engine, as JSON has them: checkpoints say what the run was."""
