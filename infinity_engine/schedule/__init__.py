"""When things happen: walking plans, and following the order in which modules need parameters."""

from infinity_engine.schedule.executor import Carrier, Executor, Walk
from infinity_engine.schedule.prefetch import Fetches, choose_fetches, farthest_first
from infinity_engine.schedule.trace import NEVER, ModuleTrace, TraceFollower, Use

__all__ = [
    "NEVER",
    "Carrier",
    "Executor",
    "Fetches",
    "ModuleTrace",
    "TraceFollower",
    "Use",
    "Walk",
    "choose_fetches",
    "farthest_first",
]
