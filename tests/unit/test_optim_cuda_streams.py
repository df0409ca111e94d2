"""cupy's streams for those of other libraries, with the cupy of today and the one before, which are
not there.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from infinity_engine.optim.cuda import foreign_stream

HANDLE, DEVICE = 0x7F00, 1


def test_cupy_is_told_the_stream_by_the_protocol_where_it_knows_that() -> None:
    def from_external(stream: Any) -> object:
        return "adopted", stream.__cuda_stream__()

    cupy = SimpleNamespace(
        cuda=SimpleNamespace(Stream=SimpleNamespace(from_external=from_external))
    )

    assert foreign_stream(cupy, HANDLE, DEVICE) == ("adopted", (0, HANDLE))


def test_an_older_cupy_is_told_its_address() -> None:
    cupy = SimpleNamespace(
        cuda=SimpleNamespace(
            Stream=object, ExternalStream=lambda handle, device: ("external", handle, device)
        )
    )

    assert foreign_stream(cupy, HANDLE, DEVICE) == ("external", HANDLE, DEVICE)
