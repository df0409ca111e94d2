"""The optimizer step: masters and moments where they rest, and the ops of a plan carried out on
them.
"""

__all__ = ()
