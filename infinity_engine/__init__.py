"""Train PyTorch models that do not fit: GPU, CPU and NVMe as one memory.

`import infinity_engine as engine` and `from infinity_engine import engine` give the same public
names. Importing costs little and never imports torch; `initialize` does, and says what to install
where it is missing.
"""

from infinity_engine.engine import (
    Outcome,
    StepResult,
    init_context,
    initialize,
    load_into,
    load_pretrained,
)
from infinity_engine.errors import (
    CapacityError,
    CheckpointError,
    CollectiveError,
    ConfigError,
    InfinityError,
    MissingDependencyError,
    TransferError,
)
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
