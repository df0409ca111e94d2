"""Gradients from autograd until an update used them: accumulated, counted, scaled, offloaded."""

__all__ = ()
