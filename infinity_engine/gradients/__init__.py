"""Gradients from the moment autograd makes them until an update has used them: accumulated,
counted, scaled, offloaded.
"""

__all__ = ()
