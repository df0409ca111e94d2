"""When things happen: walking plans, and, with parameters that are fetched around modules, following their order."""

from infinity_engine.schedule.executor import Carrier, Executor

__all__ = ["Carrier", "Executor"]
