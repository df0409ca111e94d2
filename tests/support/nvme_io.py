"""What the tests of deepnvme share: backends and why one is skipped, memory of each alignment,
bytes to compare.
"""

from __future__ import annotations

import random
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from deepnvme import BackendUnavailableError, IOQueue, Pool

BACKENDS = ("liburing", "uring", "aio", "threads", "memory")
ON_DISK = BACKENDS[:-1]
PAGE = 4096
CHUNK = 65536  # the smallest chunk there is: operations of many chunks stay cheap
TIMEOUT_S = 60.0  # for whatever should take milliseconds: a hang becomes a failure

Bytes = NDArray[np.uint8]


class Home(Enum):
    """Where the memory of an operation is."""

    POOL = "pool"
    PAGES = "pages of the user"
    ODD = "odd address of the user"


def backend_or_skip(name: str) -> str:
    """Return the backend's name; skip the test where this machine refuses the backend."""
    refusal = _refusal(name)
    if refusal is not None:
        pytest.skip(f"this machine refuses {name}: {refusal}")
    return name


@cache  # the kernel takes tens of milliseconds to close a queue of aio
def _refusal(name: str) -> str | None:
    try:
        IOQueue(name).close()
    except BackendUnavailableError as refusal:
        return str(refusal.strerror)
    return None


def pattern(nbytes: int, seed: int) -> bytes:
    """Return bytes without a period, the same for the same seed."""
    return random.Random(seed).randbytes(nbytes)


def memory(home: Home, nbytes: int, pool: Pool) -> Bytes:
    """Return uninitialised memory of that alignment."""
    if home is Home.POOL:
        return pool.empty(nbytes)
    room = np.empty(nbytes + 2 * PAGE, np.uint8)
    start = -room.ctypes.data % PAGE + (1 if home is Home.ODD else 0)
    return room[start : start + nbytes]


def filled(home: Home, data: bytes, pool: Pool) -> Bytes:
    """Return memory of that alignment that holds `data`."""
    array = memory(home, len(data), pool)
    array[:] = np.frombuffer(data, np.uint8)
    return array


def assert_same(seen: Any, expected: Any) -> None:
    """Fail with the first byte that differs, not with megabytes of text."""
    left, right = np.frombuffer(seen, np.uint8), np.frombuffer(expected, np.uint8)
    assert len(left) == len(right), f"{len(left)} bytes seen, {len(right)} expected"
    differs = np.flatnonzero(left != right)
    assert not len(differs), (
        f"{len(differs)} of {len(right)} bytes differ, the first at {differs[0]}: "
        f"{left[differs[0]]:#04x} seen, {right[differs[0]]:#04x} expected"
    )


def contents(queue: IOQueue, path: str | Path) -> bytes:
    """Return what the file holds: as the kernel tells everybody, or by the queue for a file in
    memory.
    """
    if queue.backend != "memory":
        return Path(path).read_bytes()
    with queue.open(path, "r") as file:
        buffer = bytearray(file.size)
        assert file.readinto(buffer).result(TIMEOUT_S) == len(buffer)
        return bytes(buffer)
