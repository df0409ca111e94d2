"""The benches of a GPU do their work on a device that torch takes for one; their numbers claim nothing there."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest

pytest.importorskip("torch", reason="trains")

from support.far_programs import far_process, gpu_bench
from support.session import SHARED


@pytest.fixture(scope="module")
def far(request: pytest.FixtureRequest) -> Iterator[ProcessPoolExecutor]:
    with far_process(request.config.stash[SHARED]) as process:
        yield process


@pytest.mark.parametrize(("name", "scale"), [("gpu_update", (64, 12, 4096, 1)), ("gpu_step", (32, 2, 1, 16, 4096, 1))])
def test_every_way_is_measured_and_every_figure_has_a_value(
    name: str, scale: tuple[int, ...], far: ProcessPoolExecutor
) -> None:
    figures = far.submit(gpu_bench, name, scale).result()

    assert len(figures) >= 4
    assert [figure for figure, value in figures.items() if value is None] == []
