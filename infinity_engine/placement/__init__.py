"""What lies where: each tier's sizes, buffers and demands, as arithmetic for engine and planner."""

__all__ = ()
