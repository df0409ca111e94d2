"""Models that were built on drives, taken over by an engine: the same bits as built in memory,
within the budget.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import infinity_engine
from infinity_engine.errors import CapacityError
from support.engine_bits import bits_of
from support.nvme_training import RATES, Case, emulated, made, train, trained
from support.small_models import MODELS
from support.unnamed_files import unnamed_files

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
    assert unnamed_files(tmp_path) == []


@pytest.mark.parametrize("model", MODELS)
def test_every_model_can_be_built_on_drives_and_trained(model: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    case = Case(model=model, steps=2)
    budget = {"host": BUDGET_HOST, "nvme": {str(tmp_path): "1GiB"}}
    with infinity_engine.init_context(budget=budget, cache="64KiB"):
        task, optimizer = made(model)
    with infinity_engine.initialize(
        task,
        optimizer,
        accelerator="cpu",
        parameters="nvme",
        strategy="host_only",
        subgroup_numel=4096,
        budget=budget,
    ) as engine:
        losses = train(engine, task, case)

    assert losses == trained(case, None, None).losses


def test_where_the_engine_refuses_the_model_is_still_on_the_drives(tmp_path: Path) -> None:
    budget = {"host": BUDGET_HOST, "nvme": {str(tmp_path): "1GiB"}}
    with infinity_engine.init_context(budget=budget, cache="64KiB") as built:
        task, optimizer = made("gpt")
    with pytest.raises(infinity_engine.CapacityError):
        infinity_engine.initialize(
            task, optimizer, accelerator="cpu", budget={**budget, "host": "64KiB"}
        )
    built.whole()

    expected, _ = made("gpt")
    assert [
        name
        for name, each in task.state_dict().items()
        if not torch.equal(each, expected.state_dict()[name])
    ] == []


# --- what a built model takes of the budget -------------------------------------------------------


def built_and_initialized(
    drive: Path, *, building: str, host: int | str, nvme: int | str
) -> list[int]:
    """Build a model of 2 MiB on the drive and let an engine take it over; return what the model
    took of the drive.
    """
    torch.manual_seed(0)
    with infinity_engine.init_context(
        budget={"host": "64MiB", "nvme": {str(drive): building}}, cache="1MiB"
    ):
        model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(8)])
    taken = [file.stat().st_size for file in unnamed_files(drive)]
    with infinity_engine.initialize(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        accelerator="cpu",
        calibration="off",
        strategy="nvme_streamed",
        parameters="nvme",
        subgroup_numel=2**16,
        budget={"host": host, "nvme": {str(drive): nvme}},
    ) as engine:
        engine.backward(engine(torch.ones(2, 256)).pow(2).mean())
        engine.step()
    return taken


@pytest.mark.parametrize("nvme", ["32MiB", "256MiB"])
def test_one_budget_is_enough_for_building_and_training(tmp_path: Path, nvme: str) -> None:
    [taken] = built_and_initialized(tmp_path, building=nvme, host="64MiB", nvme=nvme)
    assert 2 << 20 <= taken < 3 << 20


def least_advised(refused: CapacityError, tier: str) -> int:
    advice = re.search(rf"raise the budget's {tier} to at least (\d+) B", str(refused))
    assert advice is not None, str(refused)
    return int(advice[1])


def test_advised_host_budget_is_enough_for_a_built_model(tmp_path: Path) -> None:
    with pytest.raises(CapacityError) as refused:
        built_and_initialized(tmp_path, building="64MiB", host=17 << 20, nvme="64MiB")
    least = least_advised(refused.value, "host")
    with pytest.raises(CapacityError):
        built_and_initialized(tmp_path, building="64MiB", host=least - 4096, nvme="64MiB")
    built_and_initialized(tmp_path, building="64MiB", host=least, nvme="64MiB")


def test_advised_nvme_budget_is_enough_for_a_built_model(tmp_path: Path) -> None:
    with pytest.raises(CapacityError) as refused:
        built_and_initialized(tmp_path, building="64MiB", host="34MiB", nvme="4MiB")
    least = least_advised(refused.value, "nvme")
    built_and_initialized(tmp_path, building="64MiB", host="34MiB", nvme=least)
