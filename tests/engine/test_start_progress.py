"""Long work before training tells how far it is: of all bytes, in order, and in parts of a large
parameter.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import infinity_engine
from deepnvme import write_safetensors
from infinity_engine import progress as module
from infinity_engine.progress import Progress
from support.unnamed_files import unnamed_files

WIDTH = 1024
LAYERS = 3
PARAMS = LAYERS * WIDTH * WIDTH
MIB = 1 << 20


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let everything be told that otherwise is told once a second."""
    monkeypatch.setattr(module, "_PERIOD_S", 0.0)


def layers() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def done_of(told: list[Progress], what: str) -> list[int]:
    """Return the bytes that were told to be done, which never become fewer."""
    done = [each.done_bytes for each in told if each.what == what]
    assert done == sorted(done)
    return done


@pytest.mark.parametrize("parameters", ["device", "nvme"])
def test_initialize_tells_of_every_byte_of_parameters_and_states(
    parameters: str, tmp_path: Path
) -> None:
    model = layers()
    told: list[Progress] = []
    with infinity_engine.initialize(
        model,
        torch.optim.AdamW(model.parameters()),
        accelerator="cpu",
        strategy="nvme_streamed",
        parameters=parameters,
        precision="bf16",
        subgroup_numel=WIDTH * WIDTH,
        budget={"host": "80MiB", "nvme": {str(tmp_path): "256MiB"}},
        progress=told.append,
    ):
        placed, made = done_of(told, "placing parameters"), done_of(told, "making optimizer states")

    assert placed[-1] == 2 * PARAMS
    assert len(placed) > LAYERS
    assert made[-1] == 12 * PARAMS
    assert len(made) > LAYERS
    assert {each.total_bytes for each in told} == {2 * PARAMS, 12 * PARAMS}


def test_a_large_parameter_is_told_of_in_parts(tmp_path: Path) -> None:
    model = nn.Linear(4096, 2048, bias=False)  # 32 MiB, of which 8 MiB pass the host at once
    told: list[Progress] = []
    with infinity_engine.initialize(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        accelerator="cpu",
        strategy="nvme_streamed",
        parameters="nvme",
        subgroup_numel=MIB,
        budget={"host": "128MiB", "nvme": {str(tmp_path): "256MiB"}},
        progress=told.append,
    ):
        pass

    assert done_of(told, "placing parameters")[:4] == [8 * MIB, 16 * MIB, 24 * MIB, 32 * MIB]


def test_load_into_tells_of_every_byte_that_goes_to_the_drives(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", layers().state_dict())
    with torch.device("meta"):
        model = layers()
    told: list[Progress] = []
    drive = tmp_path / "drive"
    drive.mkdir()

    infinity_engine.load_into(
        model, tmp_path, {"host": "128MiB", "nvme": {str(drive): "64MiB"}}, progress=told.append
    ).close()

    done = done_of(told, "loading values")
    assert done[-1] == 4 * PARAMS
    assert len(set(done)) > LAYERS
    assert {each.total_bytes for each in told} == {4 * PARAMS}


def test_init_context_tells_what_it_has_written(tmp_path: Path) -> None:
    told: list[Progress] = []
    budget = {"host": "64MiB", "nvme": {str(tmp_path): "64MiB"}}
    with infinity_engine.init_context(budget=budget, cache="4MiB", progress=told.append) as built:
        model = layers()
        assert told

    done = done_of(told, "building on the drives")
    assert done[-1] >= 4 * PARAMS
    assert {each.total_bytes for each in told} == {None}
    built.close()
    assert model


def test_what_is_told_can_stop_the_work_and_the_model_is_as_it_was(tmp_path: Path) -> None:
    class Stopped(Exception):  # noqa: N818
        pass

    def stop(progress: Progress) -> None:
        if progress.what == "making optimizer states":
            raise Stopped

    model = layers()
    before = [each.detach().clone() for each in model.parameters()]
    with pytest.raises(Stopped):
        infinity_engine.initialize(
            model,
            torch.optim.AdamW(model.parameters()),
            accelerator="cpu",
            strategy="nvme_streamed",
            parameters="nvme",
            precision="bf16",
            budget={"host": "80MiB", "nvme": {str(tmp_path): "256MiB"}},
            subgroup_numel=WIDTH * WIDTH,
            progress=stop,
        )

    assert all(torch.equal(each, old) for each, old in zip(model.parameters(), before, strict=True))
    assert unnamed_files(tmp_path) == []


def test_what_cannot_be_called_is_refused_before_anything_happens(tmp_path: Path) -> None:
    model = layers()
    for call in (
        lambda: infinity_engine.initialize(model, "adamw", progress=True),  # type: ignore[arg-type]
        lambda: infinity_engine.load_into(
            model,
            tmp_path,
            {"nvme": {str(tmp_path): "1MiB"}},
            progress=1,  # type: ignore[arg-type]
        ),
    ):
        with pytest.raises(infinity_engine.ConfigError, match=r"^progress: expected a function"):
            call()
