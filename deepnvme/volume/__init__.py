"""Space on one or several drives: which bytes are free, and the files that hold them."""

__all__ = ()
