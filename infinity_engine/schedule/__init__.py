"""Order in time: walking along plans, the order in which modules need parameters, and what is
resident for them under each byte limit.
"""

from infinity_engine.schedule.executor import Executor, Walk
from infinity_engine.schedule.prefetch import Fetches, choose_fetches
from infinity_engine.schedule.resident_set import FetchingStats, ResidentSet
from infinity_engine.schedule.trace import NEVER, ModuleTrace, TraceCursor, Use

__all__ = [
    "NEVER",
    "Executor",
    "Fetches",
    "FetchingStats",
    "ModuleTrace",
    "ResidentSet",
    "TraceCursor",
    "Use",
    "Walk",
    "choose_fetches",
]
