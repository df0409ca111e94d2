"""What a step costs in calls of Python functions, of which thousands delay the modules.

Calls are counted on the thread that trains, in the engine's and deepnvme's own functions; ceilings
leave a tenth of room, as it depends on the drive which of them poll once more.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import deepnvme
import infinity_engine
from infinity_engine.engine.engine import Engine
from infinity_engine.errors import CapacityError

BLOCKS = 6
WIDTH = 128
ROOM = 256 << 10  # for parameters, beyond the least
MOST_CALLS = 22_000  # of one step: 23,000 before they were made fewer, 19,000 since
WARM_UP = 4  # until prefetching and eviction follow the trace
OURS = tuple(path for package in (infinity_engine, deepnvme) for path in package.__path__)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(x + self.down(nn.functional.gelu(self.up(self.norm(x)))))


def initialized(**settings: Any) -> Engine:
    torch.manual_seed(0)
    model = nn.Sequential(*[Block() for _ in range(BLOCKS)])
    return infinity_engine.initialize(
        model,
        torch.optim.AdamW(model.parameters()),
        accelerator="cpu",
        precision="bf16",
        activations={"recompute": "blocks"},
        update_threads=1,
        **settings,
    )


def step(engine: Engine) -> None:
    engine.backward(engine(torch.ones(4, WIDTH, dtype=torch.bfloat16)).float().square().mean())
    engine.step()


def calls_of_a_step(engine: Engine) -> Counter[str]:
    """Count the calls of a step by function."""
    for _ in range(WARM_UP):
        step(engine)
    found: Counter[str] = Counter()

    def note(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(OURS):
            found[f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}"] += 1

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        step(engine)
    finally:
        sys.setprofile(before)
    return found


def fetching(folder: Path) -> Engine:
    """Return an engine with everything on a drive, and room for a part of the parameters."""
    settings = {"strategy": "nvme_streamed", "parameters": "nvme", "subgroup_numel": 1 << 17}
    nvme = {str(folder): "64MiB"}
    with pytest.raises(CapacityError) as refused:
        initialized(**settings, budget={"host": 1 << 20, "nvme": nvme})
    return initialized(**settings, budget={"host": refused.value.asked + ROOM, "nvme": nvme})


def test_a_call_of_a_block_does_not_list_its_modules_by_generators(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with initialized(strategy="host_only", budget={"host": "16MiB"}) as engine:
        step(engine)
        listed: list[nn.Module] = []
        list_modules = nn.Module.named_modules

        def named_modules(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            listed.append(module)
            return list_modules(module, *args, **kwargs)

        monkeypatch.setattr(nn.Module, "named_modules", named_modules)
        step(engine)
    assert listed == []


def test_a_step_with_everything_on_a_drive_keeps_below_so_many_calls(tmp_path: Path) -> None:
    with fetching(tmp_path) as engine:
        found = calls_of_a_step(engine)
    assert found["fetching._evict"] > BLOCKS  # the room is as small as it should
    assert sum(found.values()) < MOST_CALLS, found.most_common(20)
