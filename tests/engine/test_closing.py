"""The end of an engine: what the model, its views and its graphs have afterwards, and what is given
back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import infinity_engine.engine.engine as engine_module
from infinity_engine.engine.engine import Engine
from infinity_engine.errors import CapacityError
from infinity_engine.machine import memory
from infinity_engine.machine.capacity import free_for_copies
from infinity_engine.parameters import fetching
from infinity_engine.storage import SwapFile
from infinity_engine.units import GiB
from infinity_engine.update.updating import Updates
from support.kernel_files import fake_roots, mount_line, write_tree
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


@pytest.mark.parametrize("place", PLACES)
def test_where_one_part_fails_to_close_all_others_are_closed(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Updates) -> None:
        raise OSError("no end to updates")

    monkeypatch.setattr(Updates, "drop", fail)
    with opened_at(place, tmp_path) as (engine, task):
        values = []
        for parameter in task.parameters():
            with engine.gathered(parameter):
                values.append(parameter.detach().clone())

        with pytest.raises(OSError, match="no end to updates"):
            engine.close()

        assert all(map(torch.equal, task.parameters(), values))
        assert all(not usage.held for usage in engine.usage())


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


def test_a_graph_whose_parameters_were_fetched_says_that_its_engine_is_closed(
    tmp_path: Path,
) -> None:
    with opened_at("drives", tmp_path) as (engine, task):
        kept = engine(task.batch(1))
        engine.close()

        with pytest.raises(RuntimeError, match="engine was closed before this backward"):
            kept.backward()


# --- what there is room for -----------------------------------------------------------------------


@pytest.mark.parametrize("place", ["drives", "drives of a device"])
def test_parameters_that_do_not_fit_the_memory_group_stay_absent(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened_at(place, tmp_path) as (engine, task):
        monkeypatch.setattr(fetching, "free_for_copies", lambda: 1000)
        with pytest.warns(RuntimeWarning, match=r"show NaN.*has 1000 B.*engine\.state_dict\(\)"):
            engine.close()

        assert weight_of(task).isnan().all()


@pytest.mark.parametrize("place", ["drives", "drives of a device"])
def test_a_close_without_restore_reads_nothing_and_warns_of_nothing(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened_at(place, tmp_path) as (engine, task):
        with engine.gathered(weight_of(task)):
            pass
        monkeypatch.setattr(SwapFile, "read", None)
        engine.close(restore=False)

        assert weight_of(task).isnan().all()
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("place", PLACES)
def test_a_state_dict_that_does_not_fit_the_memory_group_is_refused(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened_at(place, tmp_path) as (engine, _):
        monkeypatch.setattr(engine_module, "free_for_copies", lambda: 1000)
        with pytest.raises(CapacityError, match=r"1000 B free.*engine\.gathered\(parameter\)"):
            engine.state_dict()


def test_copies_may_take_what_the_tightest_group_has_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        memory, "probe_memory", lambda _roots: SimpleNamespace(available_bytes=64 * GiB)
    )
    files = {
        "memory.max": str(2 * GiB),
        "memory.current": str(GiB),
        "memory.stat": f"inactive_file {GiB // 2}\n",
    }
    write_tree(tmp_path / "group", files)
    proc = {"self/mountinfo": mount_line(tmp_path / "group", "cgroup2"), "self/cgroup": "0::/\n"}

    assert free_for_copies(fake_roots(tmp_path / "roots", proc=proc)) == 3 * GiB // 2 - -(
        -3 * GiB // 40
    )
