"""Checkpoints of other libraries: read as data, without torch, and written for torch.

`origins` finds the reader of a format, `found` describes what it found (decision 0031).
"""

__all__: list[str] = []
