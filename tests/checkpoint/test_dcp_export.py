"""A run of the engine moves to plain PyTorch: torch.distributed.checkpoint loads it, moments too."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import infinity_engine
from infinity_engine.checkpoint import CheckpointDirectory, CheckpointReader
from infinity_engine.checkpoint.exchange import dcp_export
from infinity_engine.checkpoint.exchange.dcp_export import export_dcp
from infinity_engine.checkpoint.exchange.origins import open_foreign
from infinity_engine.checkpoint.exchange.torch_files import OpenFiles
from infinity_engine.checkpoint.rewriting import import_foreign
from infinity_engine.cli.main import main
from infinity_engine.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    import torch
    import torch.distributed.checkpoint as dcp
    import torch.distributed.checkpoint.state_dict as states
else:
    torch = pytest.importorskip("torch")
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    states = pytest.importorskip("torch.distributed.checkpoint.state_dict")

from support.rival_checkpoints import SAVED_AT, STEPS, Small, adamw, loss_of
from support.saved_streams import parameters_of, save, values_of


def loaded(path: Path, state: dict[str, Any]) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=str(path))  # type: ignore[attr-defined]
    return state


def saved_run(folder: Path) -> list[float]:
    """Train in the engine, and save in between; return the losses after that."""
    torch.manual_seed(0)
    model = Small()
    losses = []
    with infinity_engine.initialize(
        model,
        adamw(model, lr=1e-2, weight_decay=0.1),
        strategy="host_only",
        accelerator="cpu",
        budget={"host": "64MiB"},
    ) as engine:
        for step in range(STEPS):
            if step == SAVED_AT:
                engine.save(folder)
            loss = loss_of(engine, step)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses[SAVED_AT:]


def test_plain_pytorch_goes_on_from_the_export(tmp_path: Path) -> None:
    expected = saved_run(tmp_path / "run")
    command = ["checkpoint", "export", str(tmp_path / "run"), str(tmp_path / "dcp")]
    assert main([*command, "--format", "dcp"]) == 0
    torch.manual_seed(1)
    model = Small()
    optimizer = adamw(model, lr=1e-5, weight_decay=0.7)
    of_model, of_optimizer = states.get_state_dict(model, optimizer)
    state = loaded(tmp_path / "dcp", {"model": of_model, "optim": of_optimizer})
    states.set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optim"],
    )
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    losses = []
    for step in range(SAVED_AT, STEPS):
        loss = loss_of(model, step)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses == pytest.approx(expected, rel=1e-6)


def test_what_was_exported_is_imported_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dcp_export, "_PART_BYTES", 600)  # parts in every dimension
    monkeypatch.setattr(dcp_export, "FILE_BYTES", 30_000)
    shapes = {"a": (13, 70), "b": (3, 2, 200), "c": (), "d": (1, 1, 900), "q" * 113: (5,)}
    parameters = parameters_of(shapes)
    values = values_of(parameters)
    path = save(tmp_path / "run", "tag", parameters, values)
    with CheckpointReader(path) as reader:
        export_dcp(reader, tmp_path / "dcp")
    assert len(list((tmp_path / "dcp").glob("*.distcp"))) > 1
    with OpenFiles() as files:
        foreign = open_foreign(tmp_path / "dcp", files)
        back = import_foreign(foreign, CheckpointDirectory(tmp_path / "back"))
    with CheckpointReader(back) as reader:
        for parameter in parameters:
            assert reader.manifest.tensor(parameter.name).steps == parameter.steps
            for stream in parameter.streams:
                found = np.empty(parameter.numel, np.float32)
                reader.read(parameter.stream(stream), 0, found)
                assert found.tobytes() == values[parameter.name, stream].tobytes()
    target = {"model": {name: torch.zeros(shape) for name, shape in shapes.items()}}
    for name, tensor in loaded(tmp_path / "dcp", target)["model"].items():
        assert np.array_equal(tensor.numpy().reshape(-1), values[name, "master"])


@given(st.one_of(st.integers(0, 1 << 40), st.integers(0x710000, 0x71FFFF), st.text(max_size=8)))
@example(7405573)
def test_numbers_and_texts_of_the_metadata_are_read_as_they_are(value: int | str) -> None:
    writer = dcp_export._Pickle()
    writer.plain((value, 3, None, "q"))
    assert pickle.loads(writer.ended()) == (value, 3, None, "q")


def test_weights_are_rounded_and_a_failure_leaves_nothing(tmp_path: Path) -> None:
    parameters = parameters_of({"weight": (40, 50)})
    values = values_of(parameters)
    path = save(tmp_path / "run", "tag", parameters, values)
    command = ["checkpoint", "export", str(tmp_path / "run"), str(tmp_path / "dcp")]
    assert main([*command, "--format", "dcp", "--dtype", "bf16"]) == 0
    target = {"model": {"weight": torch.zeros(40, 50, dtype=torch.bfloat16)}}
    expected = torch.from_numpy(values["weight", "master"]).to(torch.bfloat16).reshape(40, 50)
    assert torch.equal(loaded(tmp_path / "dcp", target)["model"]["weight"], expected)
    with CheckpointReader(path) as reader, pytest.raises(ConfigError, match="nothing yet"):
        export_dcp(reader, tmp_path / "dcp")
    shard = path / "rank-00000-00000.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with CheckpointReader(path) as reader, pytest.raises(CheckpointError):
        export_dcp(reader, tmp_path / "other")
    assert list((tmp_path / "other").iterdir()) == []
