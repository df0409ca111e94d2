"""Models that are built or loaded although they do not fit into host memory, and where their first
values are put.
"""

__all__ = ()
