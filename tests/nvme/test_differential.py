"""The same operations through deepnvme and through a plain implementation on python-liburing leave
the same file.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import deepnvme

pytest.importorskip("liburing", reason="python-liburing has no build for this platform")

from support.reference_uring import ReferenceFile

TIMEOUT_S = 60
Step = tuple[Literal["write", "read", "truncate"], int, int, int]

PLACES = st.one_of(
    st.sampled_from([0, 1, 511, 4095, 4096, 4097, 65536, 1 << 20]), st.integers(0, 1_200_000)
)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["write", "write", "read", "truncate"]), PLACES, PLACES, st.integers(0, 255)
    ),
    min_size=1,
    max_size=8,
)


def pattern(nbytes: int, seed: int) -> bytes:
    return (
        bytes((seed + i * 7) & 0xFF for i in range(min(nbytes, 509))) * (nbytes // 509 + 1)
        if nbytes
        else b""
    )


@pytest.fixture(scope="module", params=["liburing", "uring"])
def queue(request: pytest.FixtureRequest) -> Iterator[deepnvme.IOQueue]:
    try:
        queue = deepnvme.IOQueue(request.param, chunk_bytes=65536, inflight_bytes=8 * 65536)
    except deepnvme.BackendUnavailableError as refusal:
        pytest.skip(str(refusal))
    with queue:
        yield queue


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(steps=STEPS)
def test_both_leave_the_same_file_and_read_the_same_bytes(
    queue: deepnvme.IOQueue, steps: list[Step]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        ours_path, theirs_path = Path(folder, "ours"), Path(folder, "theirs")
        with queue.open(ours_path, "w") as ours, ReferenceFile(theirs_path) as theirs:
            for kind, offset, nbytes, seed in steps:
                if kind == "truncate":
                    ours.truncate(nbytes)
                    theirs.truncate(nbytes)
                elif kind == "write":
                    data = pattern(nbytes, seed)[:nbytes]
                    assert (
                        ours.pwrite(data, offset).result(TIMEOUT_S)
                        == theirs.pwrite(data, offset)
                        == nbytes
                    )
                else:
                    mine, other = bytearray(nbytes), bytearray(nbytes)
                    assert ours.readinto(mine, offset).result(TIMEOUT_S) == theirs.readinto(
                        other, offset
                    )
                    assert mine == other
            assert ours.size == theirs_path.stat().st_size
        assert ours_path.read_bytes() == theirs_path.read_bytes()
