"""What follows from a plan: what to buy next, what a run costs, and how sure its seconds are.

Asks the planner again with other means; never imports torch. Called by the command line.
"""

from infinity_engine.advice.advising import Advice, advise
from infinity_engine.advice.course import Prices, TrainingRun
from infinity_engine.advice.doubt import RateSource

__all__ = ["Advice", "Prices", "RateSource", "TrainingRun", "advise"]
