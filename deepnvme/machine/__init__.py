"""What this machine offers for I/O: its kernel, its drives, and what was measured of them."""

__all__ = ()
