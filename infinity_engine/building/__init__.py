"""Models built or loaded although they do not fit into host memory; where first values are put."""

__all__ = ()
