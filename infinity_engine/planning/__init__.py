"""Checks and plans an engine before anything is touched: rates, the planner's choice, refusals."""

__all__ = ()
