"""The end of an engine: what the model, its views and its graphs have afterwards, and what is given back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from infinity_engine.engine.engine import Engine
from support.nvme_training import STREAMED, Case, emulated, opened
from support.small_models import Task

IN_MEMORY = Case(precision="bf16")
PLACES = ["host", "device", "drives", "drives of a device"]


@contextmanager
def opened_at(place: str, drive: Path, precision: str = "bf16") -> Iterator[tuple[Engine, Task]]:
    """Open an engine that has made a step, with the model's parameters at `place`."""
    case = replace(STREAMED if "drives" in place else IN_MEMORY, precision=precision)
    on = emulated(0) if "device" in place else None
    with opened(case, on, drive if "drives" in place else None) as (engine, task):
        engine.backward(engine(task.batch(0).to(engine.device)))
        engine.step()
        yield engine, task
    if on is not None:
        on.close()


def weight_of(task: Task) -> nn.Parameter:
    return max(task.parameters(), key=nn.Parameter.numel)


VIEWS: dict[str, Callable[[nn.Parameter], torch.Tensor]] = {
    "detached": nn.Parameter.detach,
    "a row": lambda weight: weight[0],
    "data": lambda weight: weight.data,
}


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", sorted(VIEWS))
def test_views_of_a_parameter_keep_their_values_after_close(
    kind: str, place: str, precision: str, tmp_path: Path
) -> None:
    with opened_at(place, tmp_path, precision) as (engine, task):
        weight = weight_of(task)
        with engine.gathered(weight):
            view = VIEWS[kind](weight)
            values = view.detach().clone()
        engine.close()

        assert torch.equal(view, values)
        del view
        assert all(not usage.held for usage in engine.usage())


@pytest.mark.parametrize("place", PLACES)
def test_an_engine_closes_while_a_graph_is_alive(place: str, tmp_path: Path) -> None:
    with opened_at(place, tmp_path) as (engine, task):
        kept = engine(task.batch(1).to(engine.device))
        engine.close()

        assert all(parameter.isfinite().all() for parameter in task.parameters())
        del kept
        assert all(not usage.held for usage in engine.usage())


def test_a_graph_whose_parameters_were_fetched_says_that_its_engine_is_closed(tmp_path: Path) -> None:
    with opened_at("drives", tmp_path) as (engine, task):
        kept = engine(task.batch(1))
        engine.close()

        with pytest.raises(RuntimeError, match="engine was closed before this backward"):
            kept.backward()
