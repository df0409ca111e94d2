"""Models that are built or loaded beyond memory, and how first values get to where they stay."""

__all__ = ()
