"""Order in time: walking along plans, and the order in which modules need parameters."""

from infinity_engine.schedule.executor import Executor, Walk
from infinity_engine.schedule.prefetch import Fetches, choose_fetches
from infinity_engine.schedule.trace import NEVER, ModuleTrace, TraceCursor, Use

__all__ = [
    "NEVER",
    "Executor",
    "Fetches",
    "ModuleTrace",
    "TraceCursor",
    "Use",
    "Walk",
    "choose_fetches",
]
