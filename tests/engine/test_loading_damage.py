"""A load finds each flipped bit: before anything has changed, or the engine refuses to go on."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity_engine
from infinity_engine.checkpoint.manifest import BLOCK_BYTES
from infinity_engine.errors import CheckpointError
from support.engine_bits import bits_of, differing
from support.flipped_bits import flip, regions

PLACES: dict[str, dict[str, Any]] = {
    "host": {"strategy": "host_only"},
    "drives": {"strategy": "nvme_streamed", "parameters": "nvme", "storage": {"small_bytes": 0}},
}


def one_of_each(found: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """Return the last offset of each region."""
    return list(dict(found).items())


@pytest.mark.parametrize(
    "every_offset",
    [pytest.param(False, id="one of each"), pytest.param(True, id="all", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("place", PLACES)
def test_a_flipped_bit_in_any_region_is_refused_at_once_or_half_way(
    tmp_path: Path, place: str, every_offset: bool
) -> None:
    (tmp_path / "drive").mkdir()
    budget = {"host": "64MiB", "nvme": {str(tmp_path / "drive"): "64MiB"}}
    torch.manual_seed(0)
    model = torch.nn.Linear(600, 600)  # a shard of 4.3 MB: most of it is in no block of its header
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    settings = {"accelerator": "cpu", "budget": budget, **PLACES[place]}
    with infinity_engine.initialize(model, optimizer, settings) as engine:

        def one_step() -> None:
            engine.backward(engine(torch.randn(2, 600)).pow(2).mean())
            engine.step()

        one_step()
        tag = engine.save(tmp_path / "saved")
        saved, early, half_way = bits_of(engine), 0, 0
        for path in sorted((tmp_path / "saved" / tag).iterdir()):
            found = list(regions(path))
            for region, offset in found if every_offset else one_of_each(found):
                one_step()
                before = bits_of(engine)
                flip(path, offset)
                with pytest.raises(CheckpointError, match=re.escape(path.name)):
                    engine.load(tmp_path / "saved")
                flip(path, offset)
                # The block of its header is read, and checked, before any value.
                if path.name.startswith("rank-") and offset >= BLOCK_BYTES:
                    half_way += 1
                    with pytest.raises(RuntimeError, match=r"Call load\(\) again"):
                        one_step()
                else:
                    early += 1
                    assert differing(before, bits_of(engine)) == [], region
                engine.load(tmp_path / "saved")
                assert differing(saved, bits_of(engine)) == [], region
        assert early > 5
        assert half_way > 2
