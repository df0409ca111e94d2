"""The public API: what a training script calls.

Imports torch only when something here is used, not when imported.
"""

from infinity_engine.engine.api import initialize
from infinity_engine.engine.init_context import init_context, load_into, load_pretrained
from infinity_engine.errors import (
    CapacityError,
    CheckpointError,
    CollectiveError,
    ConfigError,
    InfinityError,
    MissingDependencyError,
    TransferError,
)
from infinity_engine.outcome import Outcome, StepResult
from infinity_engine.plan import Budget, Tier

__all__ = [
    "Budget",
    "CapacityError",
    "CheckpointError",
    "CollectiveError",
    "ConfigError",
    "InfinityError",
    "MissingDependencyError",
    "Outcome",
    "StepResult",
    "Tier",
    "TransferError",
    "init_context",
    "initialize",
    "load_into",
    "load_pretrained",
]
