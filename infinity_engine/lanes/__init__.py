"""What one engine works with: its streams, copies, kernels and pools; and the meter that counts
what they do.
"""

__all__ = ()
