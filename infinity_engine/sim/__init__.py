"""Planner and simulator over the same StepPlan that the Executor runs.

Imports policies and plan/, never torch.
"""

from infinity_engine.sim.bound import Resource, UpdateBound, update_bound
from infinity_engine.sim.simulate import Simulation, simulate

__all__ = ["Resource", "Simulation", "UpdateBound", "simulate", "update_bound"]
