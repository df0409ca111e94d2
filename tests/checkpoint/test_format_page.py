"""The reader that docs/checkpoint-format.md prints reads what is written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from support.saved_streams import parameters_of, save, values_of

PAGE = Path(__file__).parents[2] / "docs" / "checkpoint-format.md"


def test_the_reader_on_the_page_reads_every_stream(tmp_path: Path) -> None:
    [code] = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, str(PAGE), "exec"), names)
    parameters = parameters_of({"layer#0@7.weight": (30, 11), "scale": ()})
    values = values_of(parameters)
    path = save(tmp_path, "tag", parameters, values, ranks=3, piece_numel=50, file_bytes=1000)
    for parameter in parameters:
        for stream in parameter.streams:
            found = names["read_stream"](path, parameter.name, stream)
            assert found.shape == parameter.shape
            assert np.array_equal(found.reshape(-1), values[parameter.name, stream])
