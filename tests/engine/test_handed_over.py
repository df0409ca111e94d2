"""What an update beside a forward hands over to modules, on one memory with all else on drives."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

import infinity_engine
from infinity_engine.parameters.fetching import ParameterFetcher
from infinity_engine.schedule import Use

WIDTH, LAYERS, STEPS = 64, 12, 5


@pytest.mark.parametrize("host", [17_100_000, 17_400_000, 17_600_000, 18_000_000])
def test_nothing_that_was_handed_over_or_read_leaves_before_its_module_has_used_it(
    host: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The update is ahead of the modules: what it makes must not take what these need sooner."""
    events: list[tuple[str, Sequence[int]]] = []
    evict, need = ParameterFetcher._evict, ParameterFetcher.need

    def evicted(fetcher: ParameterFetcher, number: int) -> None:
        if number not in fetcher._pieces:
            events.append(("left", (number,)))
        evict(fetcher, number)

    def needed(fetcher: ParameterFetcher, use: Use) -> None:
        events.append(("used", use.parameters))
        need(fetcher, use)

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    with infinity_engine.initialize(
        model,
        torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9),
        accelerator="cpu",
        strategy="nvme_streamed",
        parameters="nvme",
        precision="fp32",
        subgroup_numel=5 * WIDTH * WIDTH // 2,  # so that it is two layers ahead after one
        storage={"small_bytes": 256},
        budget={"host": host, "nvme": {str(tmp_path): "64MiB"}},
    ) as engine:
        for step in range(STEPS):
            if step == STEPS - 1:  # the uses of a step are known by now
                monkeypatch.setattr(ParameterFetcher, "_evict", evicted)
                monkeypatch.setattr(ParameterFetcher, "need", needed)
            engine.backward(engine(torch.randn(4, WIDTH)).pow(2).mean())
            engine.step()
        monkeypatch.undo()

    used: set[int] = set()
    for what, numbers in events:
        if what == "used":
            used.update(numbers)
        else:
            assert used.issuperset(numbers), f"parameter {numbers} left before it was used"
            used.difference_update(numbers)
    assert any(what == "left" for what, _ in events)
