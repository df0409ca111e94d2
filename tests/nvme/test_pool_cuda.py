"""Page-locking a pool for CUDA, as far as a machine without a GPU can show it (tests/gpu has the
rest).
"""

from __future__ import annotations

import errno

import pytest

import deepnvme


def has_driver() -> bool:
    try:
        deepnvme.Pool(4096, cuda=deepnvme.Cuda.REQUIRED)
    except deepnvme.NVMeError:
        return False
    return True


def test_a_pool_is_not_pinned_where_cuda_is_not_in_use() -> None:
    assert not deepnvme.Pool(1 << 20, cuda=deepnvme.Cuda.NEVER).pinned


@pytest.mark.skipif(has_driver(), reason="this machine has a CUDA device: tests/gpu covers it")
def test_pinning_that_is_required_and_impossible_is_an_error_that_says_why() -> None:
    with pytest.raises(deepnvme.NVMeError, match="CUDA") as caught:
        deepnvme.Pool(1 << 20, cuda=deepnvme.Cuda.REQUIRED)
    assert caught.value.errno == errno.ENODEV
    assert not deepnvme.Pool(1 << 20).pinned
