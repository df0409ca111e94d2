"""What tests on a GPU share: it, and torch computing the same bits each time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from infinity_engine.accel import Accelerator


@pytest.fixture
def device() -> Iterator[Accelerator]:
    # imports torch, which not every test's environment has
    from infinity_engine.accel import open_accelerator

    with open_accelerator("cuda") as accelerator:
        yield accelerator


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let torch compute the same bits each time."""
    import torch

    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
