"""Operations on files: submitting them, how each ends, and how many are under way at once."""

__all__ = ()
