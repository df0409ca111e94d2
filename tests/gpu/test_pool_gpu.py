"""Pool memory page-locked for CUDA: what it is for, seen with torch."""

from __future__ import annotations

from pathlib import Path

import pytest

import deepnvme

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]


def test_a_pool_made_while_torch_uses_cuda_is_pinned_and_torch_sees_it() -> None:
    torch.zeros(1, device="cuda")
    pool = deepnvme.Pool(64 << 20)
    assert pool.pinned
    assert pool.empty_tensor((1024, 1024), torch.float32).is_pinned()


def test_bytes_go_from_a_file_to_the_gpu_and_back_through_one_pinned_buffer(tmp_path: Path) -> None:
    torch.zeros(1, device="cuda")
    pool = deepnvme.Pool(64 << 20, cuda=deepnvme.Cuda.REQUIRED)
    source = pool.empty_tensor((4 << 20,), torch.float32)
    source.copy_(torch.randn(4 << 20))
    with deepnvme.IOQueue(pool=pool) as queue, queue.open(tmp_path / "x", "w") as file:
        file.pwrite(source).result(60)
        back = pool.empty_tensor((4 << 20,), torch.float32)
        file.pread(back).result(60)
        on_device = back.to("cuda", non_blocking=True)
        torch.cuda.synchronize()
        assert torch.equal(on_device.cpu(), source)
