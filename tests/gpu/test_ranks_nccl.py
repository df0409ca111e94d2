"""Ranks on GPUs of their own, over NCCL: the bits are those of a loop over the ranks."""

from __future__ import annotations

import pytest
import torch

from support import rank_programs as programs
from support.ranks import launched

pytest.importorskip("cupy")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.device_count() < 2,
        reason="NCCL wants a GPU for each rank, and there are not two",
    ),
]


@pytest.mark.parametrize("size", [2, 4])
def test_gathers_and_reduces_over_nccl_give_the_bits_of_a_loop_over_the_ranks(size: int) -> None:
    if torch.cuda.device_count() < size:
        pytest.skip(f"{size} ranks want as many GPUs, and there are {torch.cuda.device_count()}")

    programs.check_on_a_device(launched(size, programs.on_a_device, "cuda"))
