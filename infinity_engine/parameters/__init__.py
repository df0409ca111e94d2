"""How modules get their parameters: hooks see what they need, providers bring it and take it away
again.
"""

__all__ = ()
