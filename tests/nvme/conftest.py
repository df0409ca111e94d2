"""A queue on each backend that this machine has, and a pool."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from deepnvme import IOQueue, Pool
from support.nvme_io import BACKENDS, CHUNK, ON_DISK, backend_or_skip


@pytest.fixture(autouse=True)
def untuned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no profile of this machine decide what is tested."""
    monkeypatch.setenv("DEEPNVME_PROFILE", "")


@pytest.fixture(scope="session")
def pool() -> Pool:
    return Pool(16 << 20)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return backend_or_skip(request.param)


@pytest.fixture(params=ON_DISK)
def disk_backend(request: pytest.FixtureRequest) -> str:
    return backend_or_skip(request.param)


@pytest.fixture
def queue(backend: str) -> Iterator[IOQueue]:
    """Yield a queue of small chunks and a small budget, so that modest operations are cut up and
    wait.
    """
    with IOQueue(backend, chunk_bytes=CHUNK, inflight_bytes=4 * CHUNK) as queue:
        yield queue


@pytest.fixture
def disk_queue(disk_backend: str) -> Iterator[IOQueue]:
    with IOQueue(disk_backend, chunk_bytes=CHUNK, inflight_bytes=4 * CHUNK) as queue:
        yield queue
