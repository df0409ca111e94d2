"""What a step did, in figures for people: its report, its drives, their wear, and a device that is
full.
"""

__all__ = ()
