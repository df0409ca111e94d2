"""What lies where: sizes, buffers and demands of each tier, as arithmetic; used by engine and
planner alike.
"""

__all__ = ()
