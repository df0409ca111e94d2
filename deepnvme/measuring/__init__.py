"""How fast drives are, measured through the queues that programs use."""

__all__ = ()
