"""What a Trainer in an engine saves is loaded by from_pretrained, for every family, and writes the
same.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from support.engine_bits import differing
from support.families import FAMILIES, Batch, saved, transformers
from support.trainers import arguments_of

transformers()
pytest.importorskip("accelerate", reason="Trainer needs it")

from infinity_engine.integrations.transformers import InfinityTrainer  # noqa: E402


@pytest.mark.parametrize("name", FAMILIES)
def test_a_saved_model_is_loaded_with_its_values(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    model = family.load(saved(family, tmp_path / "given", length=32), torch.bfloat16)
    drive = tmp_path / "drive"
    drive.mkdir()
    trainer = InfinityTrainer(
        model=model,
        args=arguments_of(tmp_path / "run"),
        engine={
            "accelerator": "cpu",
            "calibration": "off",
            "budget": {"host": "64MiB", "nvme": {str(drive): "256MiB"}},
            "strategy": "nvme_streamed",
            "parameters": "nvme",
        },
    )
    trainer.accelerator.prepare(model, trainer.create_optimizer())
    assert trainer.engine is not None
    # Other values than those in the folder that the model came from.
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with torch.no_grad(), trainer.engine.gathered(parameters, modify=True):
        for parameter in parameters:
            parameter.mul_(0.5)
    expected = trainer.engine.state_dict()
    prompt = prompt_of(family.batch(0, 32), model)
    trainer.engine.eval()
    written = None if prompt is None else generated(trainer.engine, prompt)
    trainer.save_model(str(tmp_path / "saved"))
    trainer.end()

    loaded = family.load(tmp_path / "saved", torch.bfloat16).eval()
    assert differing(dict(loaded.state_dict()), expected) == []
    if prompt is not None:
        assert written is not None
        assert torch.equal(generated(loaded, prompt), written)


def prompt_of(batch: Batch, model: Any) -> Batch | None:
    """Return what the model continues, None where it does not generate."""
    if not model.can_generate():
        return None
    if "input_features" in batch:
        return {"input_features": batch["input_features"].to(torch.bfloat16)}
    return {"input_ids": batch["input_ids"][:, :6]}


def generated(model: Any, prompt: Batch) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.generate(**prompt, max_new_tokens=4, do_sample=False)
    return found
