"""What follows from a plan: what to buy next, what a run costs, and how sure its seconds are.

Asks the planner again with other means; never imports torch. Called by the command line.
"""

__all__: list[str] = []
