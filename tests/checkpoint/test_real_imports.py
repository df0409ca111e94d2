"""Runs of the real libraries go on in the engine: DeepSpeed in its own environment, and DCP."""

from __future__ import annotations

import json
import socket
import subprocess
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import env
import infinity_engine
from infinity_engine.cli.main import main
from infinity_engine.errors import ManifestMismatch

if TYPE_CHECKING:
    import torch
else:
    torch = pytest.importorskip("torch")

from training_place import PACKAGES

from support.rival_checkpoints import SAVED_AT, STEPS, Small, adamw, loss_of


def goes_on(path: Path, precision: str, saved: Path) -> list[float]:
    """Import a checkpoint, load it into an engine of other options, and make the last steps."""
    assert main(["checkpoint", "import", str(path), str(saved)]) == 0
    torch.manual_seed(1)
    model = Small()
    optimizer = adamw(model, lr=1e-5, weight_decay=0.7)
    losses = []
    with infinity_engine.initialize(
        model,
        optimizer,
        strategy="host_only",
        accelerator="cpu",
        precision=precision,
        budget={"host": "64MiB"},
    ) as engine:
        assert engine.load(saved).step == SAVED_AT
        assert [group["lr"] for group in optimizer.param_groups] == [1e-2, 1e-2]
        assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
        for step in range(SAVED_AT, STEPS):
            loss = loss_of(engine, step)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses


def trained_by_deepspeed(folder: Path, stage: int, precision: str, ranks: int) -> list[float]:
    """Train with DeepSpeed, which saves in between; return the losses after that."""
    python = env.rival_venv("deepspeed", PACKAGES)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environ = {**env.rival_environ(python), "OMP_NUM_THREADS": "1"}
    program = Path(__file__).parents[1] / "support" / "rival_checkpoints.py"
    folder.mkdir()
    processes = [
        subprocess.Popen(
            [python, program, *map(str, (rank, ranks, port, folder, stage, precision))],
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        for process in processes:
            said, _ = process.communicate(timeout=600)
            assert process.returncode == 0, said
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    losses: list[float] = json.loads((folder / "losses.json").read_text())
    return losses[SAVED_AT:]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "precision", "tolerance"),
    [(1, "fp32", 1e-5), (2, "bf16", 3e-3), (3, "fp32", 1e-5), (3, "bf16", 3e-3)],
)
def test_a_run_of_deepspeed_goes_on(
    tmp_path: Path, stage: int, precision: str, tolerance: float
) -> None:
    # In fp32 only the order of sums differs. In bf16 DeepSpeed reduces gradients in bf16.
    expected = trained_by_deepspeed(tmp_path / "ds", stage, precision, 2)
    found = goes_on(tmp_path / "ds", precision, tmp_path / "run")
    assert found == pytest.approx(expected, rel=tolerance)
    if (stage, precision) != (3, "bf16"):
        return
    python = env.rival_venv("deepspeed", PACKAGES)
    source = tmp_path / "ds" / f"global_step{SAVED_AT}"
    subprocess.run(
        [
            *(python, "-m", "deepspeed.checkpoint.ds_to_universal", "--num_extract_workers", "1"),
            *("--num_merge_workers", "1", "--inject_missing_state"),
            *("--input_folder", source, "--output_folder", tmp_path / "universal"),
        ],
        env=env.rival_environ(python),
        check=True,
        capture_output=True,
    )
    assert goes_on(tmp_path / "universal", precision, tmp_path / "again") == found


def test_a_run_saved_by_dcp_goes_on(tmp_path: Path) -> None:
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    states = pytest.importorskip("torch.distributed.checkpoint.state_dict")
    torch.manual_seed(0)
    model = Small()
    optimizer = adamw(model, lr=1e-2, weight_decay=0.1)
    losses = []
    for step in range(STEPS):
        if step == SAVED_AT:
            of_model, of_optimizer = states.get_state_dict(model, optimizer)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                state = {"model": of_model, "optim": of_optimizer}
                dcp.save(state, checkpoint_id=str(tmp_path / "dcp"))
        loss = loss_of(model, step)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    found = goes_on(tmp_path / "dcp", "fp32", tmp_path / "run")
    assert found == pytest.approx(losses[SAVED_AT:], rel=1e-6)


def test_a_file_of_weights_is_loaded_with_a_new_optimizer(tmp_path: Path) -> None:
    torch.manual_seed(0)
    expected = {name: value.clone() for name, value in Small().state_dict().items()}
    torch.save(expected, tmp_path / "weights.pt")
    saved = tmp_path / "run"
    assert main(["checkpoint", "import", str(tmp_path / "weights.pt"), str(saved)]) == 0
    torch.manual_seed(1)
    model = Small()
    optimizer = adamw(model, lr=1e-2, weight_decay=0.1)
    with infinity_engine.initialize(
        model, optimizer, strategy="host_only", accelerator="cpu", budget={"host": "64MiB"}
    ) as engine:
        with pytest.raises(ManifestMismatch, match=r"weight|bias"):
            engine.load(saved)
        engine.load(saved, weights_only=True)
        found = engine.state_dict()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
