"""The benches of a GPU do their work on a device that torch takes for one; their numbers claim
nothing there.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="trains")

from support.far_programs import MIB, far_process, gpu_bench
from support.session import SHARED


@pytest.fixture(scope="module")
def far(request: pytest.FixtureRequest) -> Iterator[ProcessPoolExecutor]:
    with far_process(request.config.stash[SHARED]) as process:
        yield process


@pytest.mark.parametrize(
    ("name", "scale"),
    [
        ("gpu_update", (64, 12, 4096, 1)),
        ("gpu_step", (32, 2, 1, 16, 4096, 1)),
        ("gpu_activations", (32, 3, 1, 16, 1 << 16, 1 << 17, MIB, 1)),
    ],
)
def test_every_way_is_measured_and_every_figure_has_a_value(
    name: str, scale: tuple[Any, ...], far: ProcessPoolExecutor
) -> None:
    figures = far.submit(gpu_bench, name, scale, None).result()

    assert len(figures) >= 4
    assert [figure for figure, value in figures.items() if value is None] == []


@pytest.mark.parametrize(
    ("name", "scale"),
    [
        ("gpu_copies", (MIB, MIB // 4, (MIB // 8, 4096), 32 * MIB, 4 * MIB, 0.01)),
        (
            "gpu_nvme",
            (64, 12, 1, 16, 1 << 14, 38 * MIB, 16 * MIB, MIB, 2, 0.01, 16 * MIB, MIB, 0.01),
        ),
    ],
)
def test_what_uses_a_drive_has_its_files_in_the_benchs_folder_and_leaves_none(
    name: str, scale: tuple[Any, ...], far: ProcessPoolExecutor, tmp_path: Path
) -> None:
    figures = far.submit(gpu_bench, name, scale, tmp_path).result()

    assert len(figures) >= 4
    assert [figure for figure, value in figures.items() if value is None] == []
    assert list(tmp_path.iterdir()) == []
