"""A Trainer in an engine on two ranks: the losses of a plain Trainer's, saving and resuming."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from support.families import transformers
from support.ranks import launched
from support.trainers import train_both_on_a_rank, train_on_a_rank

transformers()
pytest.importorskip("accelerate", reason="Trainer needs it")

SETTINGS: dict[str, Any] = {
    "accelerator": "cpu",
    "calibration": "off",
    "budget": {"host": "64MiB"},
    "parameters": "host",
}


def test_two_ranks_have_the_losses_of_a_plain_trainer_and_resume(tmp_path: Path) -> None:
    (plain, first), (_, second) = launched(2, train_both_on_a_rank, tmp_path, SETTINGS)

    assert len(first["losses"]) == 6
    assert first["weights"] == second["weights"]
    for ours, theirs in zip(first["losses"], plain["losses"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)
    loaded = transformers().LlamaForCausalLM.from_pretrained(tmp_path / "mine/saved")
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, torch.tensor(first["weights"][name]))

    shutil.rmtree(tmp_path / "mine/checkpoint-6")
    again, _ = launched(2, train_on_a_rank, tmp_path / "mine", True, SETTINGS)
    assert again["weights"] == first["weights"]
    assert again["evaluated"] == first["evaluated"]
