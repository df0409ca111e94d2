"""Transformers' Trainer in an engine: the losses of a plain Trainer, and checkpoints in its
folders.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity_engine
from infinity_engine.config import EngineConfig
from infinity_engine.errors import ConfigError
from support.engine_bits import bits_of, differing
from support.families import FAMILIES, peft, saved, transformers
from support.nvme_programs import output_of
from support.nvme_training import emulated
from support.trainers import arguments_of, language_model, losses_of, rows
from support.warm_programs import WITH_SUPPORT, run_warm

transformers()
pytest.importorskip("accelerate", reason="Trainer needs it")

from infinity_engine.integrations.transformers import (  # noqa: E402
    InfinityMixin,
    InfinityTrainer,
)

pytestmark = [
    pytest.mark.usefixtures("deterministic"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning"),
]

BASE: dict[str, Any] = {"accelerator": "cpu", "calibration": "off"}
MEMORY: dict[str, Any] = {**BASE, "budget": {"host": "64MiB"}}


def on_drives(folder: Path) -> dict[str, Any]:
    """Return settings with which everything rests on drives."""
    folder.mkdir(exist_ok=True)
    return {
        **BASE,
        "budget": {"host": "64MiB", "nvme": {str(folder): "256MiB"}},
        "strategy": "nvme_streamed",
        "parameters": "nvme",
    }


def plain(folder: Path, model: Any = None, **options: Any) -> Any:
    return transformers().Trainer(
        model=language_model() if model is None else model,
        args=arguments_of(folder, **options),
        train_dataset=rows(),
        eval_dataset=rows(4),
    )


def trainer(
    folder: Path, settings: Mapping[str, Any] = MEMORY, model: Any = None, **options: Any
) -> InfinityTrainer:
    return InfinityTrainer(
        model=language_model() if model is None else model,
        args=arguments_of(folder, **options),
        train_dataset=rows(),
        eval_dataset=rows(4),
        engine=settings,
    )


@pytest.mark.parametrize(
    ("place", "options"),
    [
        ("memory", {}),
        ("drives", {}),
        ("memory", {"max_grad_norm": 0.0}),
        ("drives", {"label_smoothing_factor": 0.1, "lr_scheduler_type": "cosine"}),
    ],
    ids=["memory", "drives", "not clipped", "smoothed labels"],
)
def test_losses_and_norms_are_those_of_a_plain_trainer(
    place: str, options: dict[str, Any], tmp_path: Path
) -> None:
    expected = plain(tmp_path / "plain", **options)
    expected.train()
    settings = MEMORY if place == "memory" else on_drives(tmp_path / "drive")
    mine = trainer(tmp_path / "mine", settings, **options)
    mine.train()

    # fp32 by another order of operations: docs/optimizers.md.
    told, logged = losses_of(mine), losses_of(expected)
    assert len(told) == len(logged) == 6
    for ours, theirs in zip(told, logged, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)
    assert mine.state.global_step == expected.state.global_step
    mine.end()


def test_a_mixin_before_another_trainer_keeps_what_that_one_does(tmp_path: Path) -> None:
    calls = []

    class Other(transformers().Trainer):  # type: ignore[misc]
        def compute_loss(self, model: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append(model)
            return super().compute_loss(model, *args, **kwargs)

    class Mine(InfinityMixin, Other):
        pass

    mine = Mine(
        model=language_model(), args=arguments_of(tmp_path), train_dataset=rows(), engine=MEMORY
    )
    mine.train()

    assert calls
    assert all(model is mine.engine for model in calls)
    mine.end()


def test_evaluation_is_that_of_a_plain_trainer(tmp_path: Path) -> None:
    expected = plain(tmp_path / "plain")
    mine = trainer(tmp_path / "mine", on_drives(tmp_path / "drive"))

    before = [it.evaluate()["eval_loss"] for it in (expected, mine)]
    for it in (expected, mine):
        it.train()
    after = [it.evaluate()["eval_loss"] for it in (expected, mine)]
    mine.end()

    assert before[1] == before[0]
    assert after[1] == pytest.approx(after[0], rel=1e-4)


def test_an_evaluation_before_it_changes_nothing_in_a_training(tmp_path: Path) -> None:
    """Trainer lets a model without an engine mix precisions where it evaluates."""

    def losses(name: str, *, evaluates: bool) -> list[float]:
        settings = {**MEMORY, "precision": "fp32"}
        mine = trainer(tmp_path / name, settings, bf16=True)
        if evaluates:
            mine.evaluate()
        mine.train()
        mine.end()
        return [logged["loss"] for logged in losses_of(mine)]

    assert losses("evaluated", evaluates=True) == losses("trained", evaluates=False)


def test_weights_saved_alone_replace_an_engines_checkpoint(tmp_path: Path) -> None:
    first = trainer(tmp_path, max_steps=2, save_strategy="steps", save_steps=2)
    first.train()
    first.end()

    alone = trainer(
        tmp_path, max_steps=2, save_strategy="steps", save_steps=2, save_only_model=True, seed=7
    )
    alone.train()
    assert alone.engine is not None
    weights = {name: tensor.clone() for name, tensor in alone.engine.state_dict().items()}
    alone.end()
    again = trainer(tmp_path, max_steps=2, save_strategy="no")
    again.train(resume_from_checkpoint=True)
    again.end()

    assert not (tmp_path / "checkpoint-2/engine").exists()
    for name, tensor in again.model.state_dict().items():
        assert torch.equal(tensor, weights[name]), name


def test_a_bf16_model_has_the_same_bits_on_every_tier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bits = []
    streamed = {
        "calibration": "off",
        "budget": {"device": "16MiB", "host": "64MiB"},
        "parameters": "host",
        "strategy": "host_only",
    }
    for number, settings in enumerate((MEMORY, on_drives(tmp_path / "drive"), streamed)):
        if settings is streamed:
            on_device = partial(infinity_engine.initialize, device=emulated(1))
            monkeypatch.setattr("infinity_engine.integrations.accelerate.initialize", on_device)
        mine = trainer(tmp_path / str(number), settings, language_model().to(torch.bfloat16))
        mine.train()
        assert mine.engine is not None
        bits.append(bits_of(mine.engine))
        mine.end()

    assert any(name.endswith(": master") for name in bits[0])
    assert differing(bits[0], bits[1]) == differing(bits[0], bits[2]) == []


def test_what_an_engine_config_leaves_open_is_trainers(tmp_path: Path) -> None:
    settings: Any = EngineConfig.from_mapping(MEMORY)
    mine = trainer(tmp_path, settings, bf16=True, max_steps=1)
    mine.train()

    assert {value.dtype for value in mine.model.parameters()} == {torch.bfloat16}
    mine.end()


def test_mixed_precision_trains_16_bits_with_fp32_masters(tmp_path: Path) -> None:
    expected = plain(tmp_path / "plain", bf16=True)
    expected.train()
    mine = trainer(tmp_path / "mine", bf16=True)
    mine.train()

    assert mine.engine is not None
    assert {value.dtype for value in mine.model.parameters()} == {torch.bfloat16}
    for ours, theirs in zip(losses_of(mine), losses_of(expected), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=0.02)  # bf16 has 3 digits
    mine.end()


@pytest.mark.parametrize("adapted", [False, True], ids=["full", "lora"])
def test_mixed_precision_saves_the_fp32_masters(adapted: bool, tmp_path: Path) -> None:
    model = language_model()
    if adapted:
        model = peft().get_peft_model(model, peft().LoraConfig(r=4, target_modules="all-linear"))
    mine = trainer(tmp_path / "run", on_drives(tmp_path / "drive"), model, bf16=True)
    mine.train()
    assert mine.engine is not None
    masters = {
        name: torch.as_tensor(mine.engine.state_of(parameter)["master"])
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    mine.save_model(str(tmp_path / "saved"))
    mine.end()

    if adapted:
        loaded = peft().PeftModel.from_pretrained(language_model(), tmp_path / "saved")
    else:
        loaded = transformers().LlamaForCausalLM.from_pretrained(tmp_path / "saved", dtype="auto")
    found = loaded.state_dict()
    assert masters
    assert [name for name, value in masters.items() if not torch.equal(found[name], value)] == []


def test_losses_outside_of_the_model_are_computed_in_fp32(tmp_path: Path) -> None:
    def loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        logits, wanted = outputs["logits"][:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        summed = torch.nn.functional.cross_entropy(logits, wanted, reduction="sum")
        mean: torch.Tensor = summed / num_items_in_batch
        return mean

    def trained(name: str, kind: Any, **options: Any) -> Any:
        it = kind(
            model=language_model(),
            args=arguments_of(tmp_path / name, bf16=True),
            train_dataset=rows(),
            compute_loss_func=loss,
            **options,
        )
        it.train()
        return it

    expected = trained("plain", transformers().Trainer)
    mine = trained("mine", InfinityTrainer, engine=MEMORY)

    # In bf16, they differ by up to 8e-3.
    for ours, theirs in zip(losses_of(mine), losses_of(expected), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=5e-4)
    mine.end()


def test_mixed_precision_generates_from_inputs_in_fp32(tmp_path: Path) -> None:
    class Generating(InfinityMixin, transformers().Seq2SeqTrainer):  # type: ignore[misc]
        pass

    family = FAMILIES["whisper"]
    model = family.load(saved(family, tmp_path / "given", length=32), torch.float32)
    batch = family.batch(0, 32)
    given = [{name: value[row] for name, value in batch.items()} for row in range(2)]
    mine = Generating(
        model=model,
        args=transformers().Seq2SeqTrainingArguments(
            output_dir=str(tmp_path),
            predict_with_generate=True,
            generation_max_length=6,
            num_train_epochs=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            bf16=True,
        ),
        train_dataset=given,
        engine=on_drives(tmp_path / "drive"),
    )
    mine.train()

    # Its encoder is called by itself, and reads sound in fp32 with weights in bf16.
    assert mine.predict(given).predictions.shape[0] == 2
    mine.end()


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_changes_no_bits(reentrant: bool, tmp_path: Path) -> None:
    bits = []
    for number, options in enumerate(
        (
            {},
            {
                "gradient_checkpointing": True,
                "gradient_checkpointing_kwargs": {"use_reentrant": reentrant},
            },
        )
    ):
        mine = trainer(tmp_path / str(number), on_drives(tmp_path / "drive"), **options)
        mine.train()
        assert mine.engine is not None
        bits.append(bits_of(mine.engine))
        mine.end()

    assert differing(*bits) == []


# --- saving ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied head"])
def test_a_saved_model_is_loaded_by_from_pretrained(tied: bool, tmp_path: Path) -> None:
    mine = trainer(
        tmp_path / "run",
        on_drives(tmp_path / "drive"),
        language_model(tie_word_embeddings=tied),
    )
    mine.train()
    assert mine.engine is not None
    expected = mine.engine.state_dict()
    # Twice: the second replaces the first.
    mine.save_model(str(tmp_path / "saved"))
    mine.save_model(str(tmp_path / "saved"))
    mine.end()

    # The model has its values back, in ordinary memory.
    assert differing(dict(mine.model.state_dict()), expected) == []
    loaded = transformers().LlamaForCausalLM.from_pretrained(tmp_path / "saved")
    assert loaded.config.architectures == ["LlamaForCausalLM"]
    assert differing(dict(loaded.state_dict()), expected) == []


def test_a_checkpoint_has_trainers_folder_and_is_a_model_to_load(tmp_path: Path) -> None:
    mine = trainer(tmp_path, save_strategy="steps", save_steps=3, save_total_limit=1)
    mine.train()
    assert mine.engine is not None
    expected = mine.engine.state_dict()
    mine.end()

    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-6"]
    files = {path.name for path in (tmp_path / "checkpoint-6").iterdir()}
    assert files >= {
        "config.json",
        "engine",
        "model.safetensors",
        "rng_state.pth",
        "scheduler.pt",
        "trainer_state.json",
        "training_args.bin",
    }
    assert "optimizer.pt" not in files
    loaded = transformers().LlamaForCausalLM.from_pretrained(tmp_path / "checkpoint-6")
    assert differing(dict(loaded.state_dict()), expected) == []


def test_adapters_are_saved_alone(tmp_path: Path) -> None:
    base = language_model()
    base.save_pretrained(tmp_path / "base")
    adapted = peft().get_peft_model(base, peft().LoraConfig(r=4, target_modules="all-linear"))
    mine = trainer(
        tmp_path / "run",
        on_drives(tmp_path / "drive"),
        adapted,
        save_strategy="steps",
        save_steps=3,
    )
    mine.train()
    assert mine.engine is not None
    expected = mine.engine.trainable_state_dict()
    mine.end()

    folder = tmp_path / "run/checkpoint-6"
    assert not (folder / "model.safetensors").exists()
    loaded = peft().PeftModel.from_pretrained(
        transformers().LlamaForCausalLM.from_pretrained(tmp_path / "base"), folder
    )
    found = {name: value for name, value in loaded.state_dict().items() if "lora_" in name}
    assert expected
    assert differing(found, expected) == []


# --- going on -------------------------------------------------------------------------------------

PROGRAM = """
import hashlib, os, signal, sys
from pathlib import Path

import torch
from support.trainers import arguments_of, language_model, rows
from support.engine_bits import bits_of
from infinity_engine.integrations.transformers import InfinityTrainer

folder, place, step = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
torch.set_num_threads(1)

def die(trainer):
    if trainer.state.global_step == step:
        os.kill(os.getpid(), signal.SIGKILL)

class Killed(InfinityTrainer):
    def training_step(self, *args, **kwargs):
        if place == "training":
            die(self)
        return super().training_step(*args, **kwargs)

    def _save_rng_state(self, output_dir):
        if place == "saving":
            die(self)
        super()._save_rng_state(output_dir)

drive = folder / "drive"
drive.mkdir(parents=True, exist_ok=True)
budget = {"host": "64MiB", "nvme": {str(drive): "256MiB"}}
trainer = Killed(
    model=language_model(dropout=0.1),
    args=arguments_of(folder / "run", save_strategy="steps", save_steps=2),
    train_dataset=rows(),
    engine={
        "accelerator": "cpu", "calibration": "off", "budget": budget,
        "strategy": "nvme_streamed", "parameters": "nvme",
    },
)
trainer.train(resume_from_checkpoint=place == "resumed")
digest = hashlib.sha256()
for name, value in sorted(bits_of(trainer.engine).items()):
    digest.update(name.encode() + value.contiguous().view(-1).numpy().tobytes())
print(trainer.state.global_step, trainer.state.log_history[-2]["loss"], digest.hexdigest())
"""


def ran(folder: Path, place: str, step: int) -> Any:
    folder.mkdir(exist_ok=True)
    return run_warm(
        PROGRAM,
        folder,
        place,
        step,
        folder=folder,
        environment={**WITH_SUPPORT, "HF_HUB_OFFLINE": "1"},
        imported=("infinity_engine.integrations.transformers",),
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return what a run says at its end that was not killed."""
    return output_of(ran(tmp_path_factory.mktemp("whole"), "nowhere", -1)).splitlines()[-1]


@pytest.mark.parametrize(
    ("place", "step"),
    # Killed after the first checkpoint is as killed after the second.
    [pytest.param("training", 3, marks=pytest.mark.slow), ("training", 5), ("saving", 4)],
)
def test_a_killed_run_goes_on_with_the_bits_of_one_that_was_not(
    place: str, step: int, whole: str, tmp_path: Path
) -> None:
    assert ran(tmp_path / "killed", place, step).returncode == -9
    found = output_of(ran(tmp_path / "killed", "resumed", -1)).splitlines()[-1]

    assert found == whole


def test_an_unfinished_checkpoint_is_not_resumed_from(tmp_path: Path) -> None:
    mine = trainer(tmp_path, save_strategy="steps", save_steps=2)
    mine.train()
    mine.end()
    state = tmp_path / "checkpoint-6" / "trainer_state.json"
    state.write_text(state.read_text()[:100])
    shutil.rmtree(tmp_path / "checkpoint-4")

    again = trainer(tmp_path, save_strategy="no")
    steps: list[int] = []
    again.add_callback(noting(steps))
    again.train(resume_from_checkpoint=True)
    again.end()

    assert steps == [3, 4, 5, 6]


def noting(steps: list[int]) -> Any:
    class Noting(transformers().TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
            steps.append(state.global_step)

    return Noting()


def test_resuming_where_there_is_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="There is no finished checkpoint"):
        trainer(tmp_path).train(resume_from_checkpoint=True)


@pytest.mark.parametrize("missing", ["trainer_state.json", "engine/*"])
def test_a_named_checkpoint_that_is_not_finished_is_refused(missing: str, tmp_path: Path) -> None:
    mine = trainer(tmp_path, save_strategy="steps", save_steps=2, max_steps=2)
    mine.train()
    mine.end()
    checkpoint = tmp_path / "checkpoint-2"
    for file in checkpoint.glob(missing):
        shutil.rmtree(file) if file.is_dir() else file.unlink()

    with pytest.raises(ValueError, match="was not written to its end"):
        trainer(tmp_path).train(resume_from_checkpoint=str(checkpoint))


def test_training_after_the_end_is_refused_with_what_to_do(tmp_path: Path) -> None:
    mine = trainer(tmp_path, max_steps=1)
    mine.train()
    mine.end()

    with pytest.raises(RuntimeError, match="Make another trainer for this model"):
        mine.train()


def test_a_run_goes_on_from_a_plain_trainers_checkpoint(tmp_path: Path) -> None:
    whole = plain(tmp_path / "whole")
    whole.train()
    first = plain(tmp_path / "run", save_strategy="steps", save_steps=2)
    first.train()
    shutil.rmtree(tmp_path / "run/checkpoint-6")

    mine = trainer(tmp_path / "run")
    mine.train(resume_from_checkpoint=True)
    mine.end()

    told, logged = losses_of(mine), losses_of(whole)
    for ours, theirs in zip(told[-2:], logged[-2:], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)


def test_a_run_goes_on_from_a_plain_trainers_fp16(tmp_path: Path) -> None:
    first = plain(tmp_path / "run", save_strategy="steps", save_steps=4, max_steps=4)
    first.train()
    # What a plain Trainer's loss scale is saved as.
    torch.save({"scale": 1024.0, "_growth_tracker": 3}, tmp_path / "run/checkpoint-4/scaler.pt")

    mine = trainer(tmp_path / "run")
    mine.train(resume_from_checkpoint=True)

    assert mine.state.global_step == 6
    mine.end()


def test_the_best_model_of_a_plain_trainer_is_loaded_into_the_engine(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "save_strategy": "steps",
        "save_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
        "greater_is_better": True,
    }
    plain(tmp_path / "run", max_steps=4, **options).train()

    mine = trainer(tmp_path / "run", on_drives(tmp_path / "drive"), **options)
    mine.train(resume_from_checkpoint=True)
    assert mine.engine is not None
    found = mine.engine.state_dict()
    mine.end()

    assert Path(mine.state.best_model_checkpoint).name == "checkpoint-2"
    best = transformers().LlamaForCausalLM.from_pretrained(mine.state.best_model_checkpoint)
    assert differing(found, dict(best.state_dict())) == []


def test_an_epoch_that_ends_within_an_accumulation_is_saved(tmp_path: Path) -> None:
    class Endless(torch.utils.data.IterableDataset[dict[str, torch.Tensor]]):
        def __iter__(self) -> Any:
            # Five micro-batches, two of which make a step.
            return iter(rows())

    losses = []
    for name, strategy in (("quiet", "no"), ("saving", "epoch")):
        arguments = arguments_of(tmp_path / name, max_steps=5, save_strategy=strategy)
        mine = InfinityTrainer(
            model=language_model(), args=arguments, train_dataset=Endless(), engine=MEMORY
        )
        mine.train()
        losses.append(losses_of(mine))
        mine.end()

    assert list((tmp_path / "saving").glob("checkpoint-2/engine/step-*"))
    assert losses[1] == losses[0]


def test_the_best_model_is_loaded_into_the_engine(tmp_path: Path) -> None:
    mine = trainer(
        tmp_path,
        save_strategy="steps",
        save_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        load_best_model_at_end=True,
        # The lowest rate is not the best: the first is.
        metric_for_best_model="loss",
        greater_is_better=True,
    )
    mine.train()
    assert mine.engine is not None
    found = mine.engine.state_dict()
    mine.end()

    best = transformers().LlamaForCausalLM.from_pretrained(mine.state.best_model_checkpoint)
    assert Path(mine.state.best_model_checkpoint).name == "checkpoint-2"
    assert differing(found, dict(best.state_dict())) == []


def test_training_again_goes_on_in_the_same_engine(tmp_path: Path) -> None:
    mine = trainer(tmp_path)
    mine.train()
    engine = mine.engine
    mine.train()

    assert mine.engine is engine
    assert engine is not None
    assert engine.steps == 12
    mine.end()


def test_a_model_that_the_trainer_makes_is_trained(tmp_path: Path) -> None:
    def made() -> Any:
        return language_model()

    mine = InfinityTrainer(
        model_init=made,
        args=arguments_of(tmp_path),
        train_dataset=rows(),
        engine=MEMORY,
    )
    mine.train()
    first = losses_of(mine)
    # Anew, as the search for hyperparameters trains, also after the end.
    mine.end()
    mine.train()

    assert losses_of(mine) == first
    assert mine.engine is not None
    assert mine.engine.module is mine.model
    mine.end()


def test_predictions_are_those_of_the_saved_model(tmp_path: Path) -> None:
    mine = trainer(tmp_path / "run", on_drives(tmp_path / "drive"))
    mine.train()
    found = mine.predict(rows(4)).predictions
    mine.save_model(str(tmp_path / "saved"))
    mine.end()

    loaded = transformers().LlamaForCausalLM.from_pretrained(tmp_path / "saved").eval()
    tokens = torch.stack([row["input_ids"] for row in rows(4)])
    with torch.no_grad():
        assert torch.equal(torch.tensor(found), loaded(tokens).logits)


# --- what cannot be -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
        ({"torch_compile": True}, "torch_compile"),
        ({"bf16_full_eval": True}, "bf16_full_eval"),
        (
            {
                "save_only_model": True,
                "load_best_model_at_end": True,
                "eval_strategy": "steps",
                "save_strategy": "steps",
                "eval_steps": 2,
                "save_steps": 2,
            },
            "save_only_model",
        ),
    ],
)
def test_arguments_that_an_engine_cannot_have_are_named(
    options: dict[str, Any], name: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=f"TrainingArguments.{name}"):
        trainer(tmp_path, **options)


@pytest.mark.parametrize(
    ("setting", "own"), [({"max_grad_norm": 1.0}, "0.5"), ({"accumulation_steps": 4}, "2")]
)
def test_a_setting_that_trainer_would_replace_is_refused(
    setting: dict[str, Any], own: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=f"expected nothing, or {own} as in TrainingArguments"):
        trainer(tmp_path, {**MEMORY, **setting})
    trainer(tmp_path, {**MEMORY, "max_grad_norm": 0.5, "accumulation_steps": 2})


def test_a_wrong_setting_is_refused_before_the_data_is_prepared(tmp_path: Path) -> None:
    class Prepares(transformers().Trainer):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            pytest.fail("it has prepared the data")

    class Mine(InfinityMixin, Prepares):
        pass

    with pytest.raises(ConfigError, match="budgets: expected one of budget"):
        Mine(language_model(), arguments_of(tmp_path), engine={"budgets": 1})


def test_an_optimizer_that_the_engine_has_not_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="optimizer"):
        trainer(tmp_path, optim="adafactor").train()


def test_a_file_of_deepspeed_can_be_the_settings(tmp_path: Path) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text(
        json.dumps(
            {
                "train_batch_size": "auto",
                "gradient_accumulation_steps": "auto",
                "gradient_clipping": "auto",
                "bf16": {"enabled": True},
                "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
            }
        )
    )
    mine = InfinityTrainer(
        model=language_model(),
        args=arguments_of(tmp_path),
        train_dataset=rows(),
        engine=str(file),
    )
    mine.train()

    assert mine.engine is not None
    assert {value.dtype for value in mine.model.parameters()} == {torch.bfloat16}
    mine.end()
