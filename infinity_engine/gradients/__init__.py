"""Gradients from the moment autograd makes them until an update uses them up: taken, counted,
scaled, kept.
"""

__all__ = ()
