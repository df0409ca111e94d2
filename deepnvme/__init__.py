"""Asynchronous direct I/O for tensors, arrays and bytes. Needs no torch and knows nothing of training."""

__all__: list[str] = []
