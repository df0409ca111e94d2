"""How modules get their parameters: hooks see what they need, providers bring it and evict it."""

__all__ = ()
