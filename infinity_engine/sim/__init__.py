"""Planner and simulator over the same StepPlan that the Executor runs. Imports policies and plan/, never torch."""

__all__: list[str] = []
