"""The memory that operations move: what callers give, pools of it, copies and checksums."""

__all__ = ()
