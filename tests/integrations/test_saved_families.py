"""A Trainer in an engine, for every family: what it saves is loaded by from_pretrained and writes
the same, and a run is resumed with the same bits.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from support.engine_bits import bits_of, differing
from support.families import FAMILIES, Batch, saved, transformers
from support.trainers import arguments_of

transformers()
pytest.importorskip("accelerate", reason="Trainer needs it")

from infinity_engine.integrations.transformers import InfinityTrainer  # noqa: E402

pytestmark = pytest.mark.usefixtures("deterministic")

# The families of which the default run resumes a run: one of each kind of model.
RESUMED = ("clip", "gemma3", "gpt2", "llama", "mamba", "mixtral", "t5", "vit", "whisper")


def trainer_of(name: str, folder: Path, **options: Any) -> InfinityTrainer:
    """Return a trainer of the family's saved model; each sample is a batch."""
    family, drive = FAMILIES[name], folder / "drive"
    drive.mkdir(exist_ok=True)
    given = folder / "given"
    return InfinityTrainer(
        model=family.load(
            given if given.exists() else saved(family, given, length=32), torch.bfloat16
        ),
        args=arguments_of(folder / "run", per_device_train_batch_size=1, **options),
        data_collator=lambda batches: batches[0],
        train_dataset=[in_bf16(family.batch(seed, 32)) for seed in range(8)],
        engine={
            "accelerator": "cpu",
            "calibration": "off",
            "budget": {"host": "64MiB", "nvme": {str(drive): "256MiB"}},
            "strategy": "nvme_streamed",
            "parameters": "nvme",
        },
    )


def in_bf16(batch: Batch) -> Batch:
    return {
        name: value.to(torch.bfloat16) if value.is_floating_point() else value
        for name, value in batch.items()
    }


@pytest.mark.parametrize("name", FAMILIES)
def test_a_saved_model_is_loaded_with_its_values(name: str, tmp_path: Path) -> None:
    family, trainer = FAMILIES[name], trainer_of(name, tmp_path)
    model = trainer.model
    trainer.accelerator.prepare(model, trainer.create_optimizer())
    assert trainer.engine is not None
    # Other values than those in the folder that the model came from.
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with torch.no_grad(), trainer.engine.gathered(parameters, modify=True):
        for parameter in parameters:
            parameter.mul_(0.5)
    expected = trainer.engine.state_dict()
    prompt = prompt_of(in_bf16(family.batch(0, 32)), model)
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
        return {"input_features": batch["input_features"]}
    return {"input_ids": batch["input_ids"][:, :6]}


def generated(model: Any, prompt: Batch) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.generate(**prompt, max_new_tokens=4, do_sample=False)
    return found


@pytest.mark.parametrize(
    "name",
    [name if name in RESUMED else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES],
)
def test_a_run_of_a_family_is_resumed_with_the_same_bits(name: str, tmp_path: Path) -> None:
    whole = trainer_of(name, tmp_path, max_steps=4, save_strategy="steps", save_steps=2)
    whole.train()
    assert whole.engine is not None
    expected = bits_of(whole.engine)
    whole.end()
    shutil.rmtree(tmp_path / "run/checkpoint-4")

    resumed = trainer_of(name, tmp_path, max_steps=4)
    resumed.train(resume_from_checkpoint=True)

    assert resumed.engine is not None
    assert differing(bits_of(resumed.engine), expected) == []
    assert any(name.endswith(": exp_avg") for name in expected)
    resumed.end()
