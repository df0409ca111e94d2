"""Updates on a GPU are launched in parts that a grid has room for. No GPU: launches are noted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from infinity_engine.optim.cuda import CudaKernels


def test_an_update_of_more_records_than_a_grid_has_rows_is_launched_in_parts() -> None:
    launched: list[tuple[tuple[int, int], bytes]] = []
    kernels: Any = object.__new__(CudaKernels)
    kernels._cupy = SimpleNamespace(asarray=lambda values: values)
    kernels._most_blocks = 8
    kernels._functions = {
        "update": lambda grid, _, arguments: launched.append((grid, arguments[0].tobytes()))
    }
    records = np.zeros(140_000, np.dtype([("numel", np.uint64), ("number", np.uint64)]))
    records["numel"], records["number"] = 1, np.arange(len(records))

    kernels.update(SimpleNamespace(records=records))

    assert [grid for grid, _ in launched] == [(1, 65_535), (1, 65_535), (1, 8_930)]
    seen = np.concatenate(
        [np.frombuffer(rest, records.dtype)[:rows] for (_, rows), rest in launched]
    )
    assert (seen == records).all()
