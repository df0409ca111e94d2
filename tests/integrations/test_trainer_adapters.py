"""A Trainer in an engine saves of adapters what a plain Trainer saves, whatever peft trains."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity_engine
from infinity_engine.checkpoint import CheckpointDirectory, CheckpointReader, Kind
from support.engine_bits import differing
from support.families import peft, transformers
from support.trainers import arguments_of, language_model, losses_of, rows

peft()
pytest.importorskip("accelerate", reason="Trainer needs it")
safetensors = pytest.importorskip("safetensors.torch")

from infinity_engine.integrations.transformers import InfinityTrainer  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("deterministic"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning"),
]

LAYERS = ["q_proj", "o_proj"]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("LoraConfig", {"r": 4}),
    "layers trained beside adapters": (
        "LoraConfig",
        {"r": 4, "modules_to_save": ["lm_head", "embed_tokens"]},
    ),
    "adapters of embeddings": (
        "LoraConfig",
        {"r": 4, "target_modules": [*LAYERS, "embed_tokens", "lm_head"]},
    ),
    "a resized vocabulary": ("LoraConfig", {"r": 4}),
    "a few tokens": ("LoraConfig", {"r": 4, "trainable_token_indices": [1, 2]}),
    "projections in buffers": ("VeraConfig", {"r": 4}),
    "a prompt": ("PromptTuningConfig", {"num_virtual_tokens": 3}),
}


def adapted(folder: Path, case: str) -> Any:
    if not folder.exists():
        language_model().save_pretrained(folder)
    base = transformers().LlamaForCausalLM.from_pretrained(folder)
    if case == "a resized vocabulary":
        torch.manual_seed(2)
        base.resize_token_embeddings(70)
    kind, options = CASES[case]
    layers = {} if kind == "PromptTuningConfig" else {"target_modules": LAYERS}
    torch.manual_seed(1)
    config = getattr(peft(), kind)(task_type="CAUSAL_LM", **{**layers, **options})
    return peft().get_peft_model(base, config)


def on_drives(folder: Path) -> dict[str, Any]:
    folder.mkdir()
    return {
        "accelerator": "cpu",
        "calibration": "off",
        "budget": {"host": "64MiB", "nvme": {str(folder): "256MiB"}},
        "strategy": "nvme_streamed",
        "parameters": "nvme",
        "storage": {"small_bytes": 0},
    }


@pytest.mark.parametrize("case", CASES)
def test_what_is_saved_is_what_a_plain_trainer_saves(case: str, tmp_path: Path) -> None:
    def trained(name: str, kind: Any, **options: Any) -> Any:
        trainer = kind(
            model=adapted(tmp_path / "base", case),
            args=arguments_of(tmp_path / name),
            train_dataset=rows(),
            **options,
        )
        trainer.train()
        trainer.save_model(str(tmp_path / name))
        return trainer

    plain = trained("plain", transformers().Trainer)
    mine = trained("mine", InfinityTrainer, engine=on_drives(tmp_path / "drive"))
    mine.end()

    for ours, theirs in zip(losses_of(mine), losses_of(plain), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)
    expected, found = (
        safetensors.load_file(tmp_path / name / "adapter_model.safetensors")
        for name in ("plain", "mine")
    )
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-2, atol=1e-4)


def test_a_loop_saves_layers_that_are_trained_beside_adapters(tmp_path: Path) -> None:
    model = adapted(tmp_path / "base", "layers trained beside adapters")
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with infinity_engine.initialize(
        model, torch.optim.AdamW(trained), on_drives(tmp_path / "drive")
    ) as engine:
        expected = engine.trainable_state_dict()
        with engine.listing():
            model.save_pretrained(tmp_path / "saved", state_dict=engine.state_dict())

    found = safetensors.load_file(tmp_path / "saved/adapter_model.safetensors")
    head = "base_model.model.lm_head"
    assert torch.equal(found[f"{head}.weight"], expected[f"{head}.modules_to_save.default.weight"])


def test_a_trainer_goes_on_from_checkpoints_without_the_base(tmp_path: Path) -> None:
    def trained(resume: bool | None = None) -> dict[str, torch.Tensor]:
        trainer = InfinityTrainer(
            model=adapted(tmp_path / "base", "lora"),
            args=arguments_of(tmp_path / "run", save_strategy="epoch"),
            train_dataset=rows(),
            engine=on_drives(tmp_path / ("drive again" if resume else "drive")),
            frozen="leave_out",
        )
        trainer.train(resume_from_checkpoint=resume)
        assert trainer.engine is not None
        found: dict[str, torch.Tensor] = trainer.engine.trainable_state_dict()
        trainer.end()
        return found

    expected = trained()
    newest, *older = sorted((tmp_path / "run").glob("checkpoint-*"), reverse=True)
    shutil.rmtree(newest)
    with CheckpointReader(CheckpointDirectory(older[0] / "engine").resolve()) as reader:
        written = {tensor.kind for tensor in reader.manifest.tensors if tensor.streams}
    assert Kind.FROZEN not in written
    found = trained(resume=True)
    assert differing(expected, found) == []
