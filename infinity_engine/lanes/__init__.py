"""What one engine works with: streams, copies, kernels, pools, and the meter that counts them."""

__all__ = ()
