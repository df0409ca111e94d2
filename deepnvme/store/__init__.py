"""Tensors by name in a volume: putting, getting and committing them."""

__all__ = ()
