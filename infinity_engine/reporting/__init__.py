"""Figures for people: a step's report, drives and their wear, and the error of a full device."""

__all__ = ()
