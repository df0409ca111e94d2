"""The public API: what a training script calls. Imports torch only when something here is used, not when imported."""

from infinity_engine.engine.assemble import initialize
from infinity_engine.plan import Budget

__all__ = ["Budget", "initialize"]
