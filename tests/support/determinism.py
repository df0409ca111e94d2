"""Compute that gives the same bits each time, which tests need that compare bits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["deterministic_compute"]


@contextmanager
def deterministic_compute() -> Iterator[None]:
    """Let torch compute in one thread and with deterministic algorithms within the body."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(threads)
