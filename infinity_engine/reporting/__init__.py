"""Figures for people: the report of a step, its drives and their wear, and the error of a device
that is full.
"""

__all__ = ()
