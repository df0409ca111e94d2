"""Models that were built on drives, taken over by an engine: the same bits as built in memory, within the budget."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import infinity_engine
from support.engine_bits import bits_of
from support.nvme_training import RATES, Case, emulated, made, train, trained
from support.small_models import MODELS

BUDGET_HOST = "64MiB"


@pytest.mark.parametrize("accelerator", ["cpu", "emulated"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("parameters", ["device", "host", "nvme"])
def test_a_model_that_was_built_on_drives_trains_like_one_that_was_built_in_memory(
    accelerator: str, precision: str, parameters: str, tmp_path: Path
) -> None:
    if (accelerator, parameters) == ("cpu", "host"):
        pytest.skip("device and host are one memory")
    torch.set_num_threads(1)
    case = Case(precision=precision, accumulation=2, clip=0.05)
    on = emulated(1) if accelerator == "emulated" else None
    budget = {"host": BUDGET_HOST, "nvme": {str(tmp_path): "1GiB"}}
    with infinity_engine.init_context(budget=budget, cache="64KiB"):
        task, optimizer = made(case.model)
    with infinity_engine.initialize(
        task,
        optimizer,
        accelerator="cpu",
        device=on,
        strategy="nvme_streamed",
        rates=RATES,
        parameters=parameters,
        precision=precision,
        accumulation_steps=2,
        max_grad_norm=0.05,
        subgroup_numel=4096,
        update_threads=2,
        storage={"small_bytes": 256},
        budget={**budget, "device": "32MiB"},
    ) as engine:
        losses = train(engine, task, case)
        bits = bits_of(engine)
        assert [usage for usage in engine.usage() if usage.peak_held > usage.limit] == []
    if on is not None:
        on.close()

    expected = trained(case, None, None)
    assert losses == expected.losses
    assert [name for name, each in expected.bits.items() if not torch.equal(bits[name], each)] == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("model", MODELS)
def test_every_model_can_be_built_on_drives_and_trained(model: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    case = Case(model=model, steps=2)
    budget = {"host": BUDGET_HOST, "nvme": {str(tmp_path): "1GiB"}}
    with infinity_engine.init_context(budget=budget, cache="64KiB"):
        task, optimizer = made(model)
    with infinity_engine.initialize(
        task, optimizer, accelerator="cpu", parameters="nvme", strategy="host_only", subgroup_numel=4096, budget=budget
    ) as engine:
        losses = train(engine, task, case)

    assert losses == trained(case, None, None).losses


def test_where_the_engine_refuses_the_model_is_still_on_the_drives(tmp_path: Path) -> None:
    budget = {"host": BUDGET_HOST, "nvme": {str(tmp_path): "1GiB"}}
    with infinity_engine.init_context(budget=budget, cache="64KiB") as built:
        task, optimizer = made("gpt")
    with pytest.raises(infinity_engine.CapacityError):
        infinity_engine.initialize(task, optimizer, accelerator="cpu", budget={**budget, "host": "64KiB"})
    built.whole()

    expected, _ = made("gpt")
    assert [
        name for name, each in task.state_dict().items() if not torch.equal(each, expected.state_dict()[name])
    ] == []
