"""The reader that docs/checkpoint-format.md prints reads what is written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deepnvme.memory.arrays import ITEMSIZES
from infinity_engine.checkpoint import Kind, SavedTensor
from support.saved_streams import parameters_of, save, values_of

CODES = [code for code in ITEMSIZES if code != "C128"]  # which safetensors does not have
PAGE = Path(__file__).parents[2] / "docs" / "checkpoint-format.md"


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    """What the code on the page defines."""
    [code] = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    found: dict[str, Any] = {}
    exec(compile(code, str(PAGE), "exec"), found)
    return found


def test_the_reader_on_the_page_reads_every_stream(tmp_path: Path, names: dict[str, Any]) -> None:
    parameters = parameters_of({"layer#0@7.weight": (30, 11), "scale": ()})
    values = values_of(parameters)
    path = save(tmp_path, "tag", parameters, values, ranks=3, piece_numel=50, file_bytes=1000)
    for parameter in parameters:
        for stream in parameter.streams:
            found = names["read_stream"](path, parameter.name, stream)
            assert found.shape == parameter.shape
            assert np.array_equal(found.reshape(-1), values[parameter.name, stream])


def test_the_reader_on_the_page_reads_a_buffer_of_every_dtype(
    tmp_path: Path, names: dict[str, Any]
) -> None:
    buffers = [
        SavedTensor(name=code, kind=Kind.BUFFER, shape=(3, 5), dtype=code, streams={"value": code})
        for code in CODES
    ]
    values = {
        (code, "value"): np.arange(15 * ITEMSIZES[code], dtype=np.uint8).view(names["NUMPY"][code])
        for code in CODES
    }
    path = save(tmp_path, "tag", buffers, values)
    assert set(names["NUMPY"]) == set(CODES)
    for code in CODES:
        found = names["read_stream"](path, code, "value")
        assert found.shape == (3, 5)
        assert found.tobytes() == values[code, "value"].tobytes(), code
