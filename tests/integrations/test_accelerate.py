"""An Accelerator whose `prepare` makes an engine: Accelerate's loop, with the losses of a plain
one.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity_engine
from infinity_engine.engine.checkpoints.saving import FrozenParameters
from infinity_engine.errors import ConfigError
from support.families import transformers
from support.trainers import language_model, rows

transformers()
accelerate = pytest.importorskip("accelerate")

from infinity_engine.checkpoint.directory import CheckpointDirectory, read_manifest  # noqa: E402
from infinity_engine.integrations.accelerate import InfinityAccelerator  # noqa: E402

pytestmark = pytest.mark.usefixtures("deterministic")

SETTINGS: dict[str, Any] = {
    "accelerator": "cpu",
    "calibration": "off",
    "budget": {"host": "64MiB"},
}


class Run:
    """A training by Accelerate's loop, with what it has prepared."""

    def __init__(self, accelerator: Any, model: Any = None) -> None:
        self.accelerator = accelerator
        plain = language_model() if model is None else model
        optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.1)
        loader: Any = torch.utils.data.DataLoader(rows(), batch_size=2)  # type: ignore[arg-type]
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)
        self.model, self.optimizer, self.loader, self.scheduler = accelerator.prepare(
            plain, optimizer, loader, scheduler
        )

    def train(self, epochs: int = 1) -> list[float]:
        """Train as Accelerate's documentation does; return the losses and the last rate."""
        losses = []
        for _ in range(epochs):
            for batch in self.loader:
                with self.accelerator.accumulate(self.model):
                    loss = self.model(**batch).loss
                    self.accelerator.backward(loss)
                    if self.accelerator.sync_gradients:
                        self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
                    self.optimizer.step()
                    self.scheduler.step()
                    self.optimizer.zero_grad()
                losses.append(loss.item())
        return [*losses, self.scheduler.get_last_lr()[0]]


def plain() -> Any:
    return accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)


def with_engine(settings: dict[str, Any] | None = None, **options: Any) -> InfinityAccelerator:
    given = {"cpu": True, "gradient_accumulation_steps": 2, **options}
    return InfinityAccelerator(engine=settings or SETTINGS, **given)


def test_accelerates_loop_has_the_losses_of_a_plain_accelerator(tmp_path: Path) -> None:
    expected = Run(plain()).train(epochs=2)
    drives = {
        **SETTINGS,
        "budget": {"host": "64MiB", "nvme": {str(tmp_path): "256MiB"}},
        "strategy": "nvme_streamed",
        "parameters": "nvme",
    }
    for settings in (SETTINGS, drives):
        run = Run(with_engine(settings))
        assert run.train(epochs=2) == pytest.approx(expected, rel=1e-5)
        run.accelerator.end_training()


def test_a_saved_state_is_gone_on_from(tmp_path: Path) -> None:
    run = Run(with_engine())
    run.train()
    run.accelerator.save_state(str(tmp_path / "state"))
    expected = run.train()
    run.accelerator.end_training()

    again = Run(with_engine(), language_model(seed=5))
    again.accelerator.load_state(str(tmp_path / "state"))
    assert again.train() == expected
    again.accelerator.end_training()
    assert not list((tmp_path / "state").glob("optimizer*"))


def test_a_state_without_the_frozen_embedding_is_gone_on_from(tmp_path: Path) -> None:
    def model() -> Any:
        made = language_model()
        made.get_input_embeddings().requires_grad_(False)
        return made

    run = Run(with_engine(frozen="leave_out"), model())
    run.train()
    run.accelerator.save_state(str(tmp_path / "state"))
    expected = run.train()
    run.accelerator.end_training()

    again = Run(with_engine(frozen="leave_out"), model())
    again.accelerator.load_state(str(tmp_path / "state"))
    assert again.train() == expected
    again.accelerator.end_training()
    manifest = read_manifest(CheckpointDirectory(tmp_path / "state/engine").resolve())
    assert [tensor.name for tensor in manifest.left_out] == ["model.embed_tokens.weight"]


@pytest.mark.parametrize("frozen", ["leave_out", FrozenParameters.LEAVE_OUT])
def test_an_accelerator_that_was_taken_over_leaves_out_frozen_parameters(
    frozen: Any, tmp_path: Path
) -> None:
    model = language_model()
    model.get_input_embeddings().requires_grad_(False)
    run = Run(InfinityAccelerator.taking_over(plain(), SETTINGS, frozen), model)
    run.train()
    run.accelerator.save_state(str(tmp_path))
    run.accelerator.end_training()

    manifest = read_manifest(CheckpointDirectory(tmp_path / "engine").resolve())
    assert [tensor.name for tensor in manifest.left_out] == ["model.embed_tokens.weight"]


def test_taking_over_refuses_what_is_no_choice_for_frozen_parameters() -> None:
    with pytest.raises(ValueError, match="frozen: expected one of"):
        InfinityAccelerator.taking_over(plain(), SETTINGS, "leave")


def test_a_state_that_is_saved_again_replaces_the_one_before(tmp_path: Path) -> None:
    run = Run(with_engine())
    for _ in range(2):
        run.train()
        run.accelerator.save_state(str(tmp_path))
    run.accelerator.end_training()

    assert {path.name for path in (tmp_path / "engine").iterdir()} == {"latest", "step-00000006"}


def test_a_state_without_an_engine_is_refused_with_what_to_do(tmp_path: Path) -> None:
    Run(plain()).accelerator.save_state(str(tmp_path))
    run = Run(with_engine())

    with pytest.raises(ConfigError, match="load them into the model before prepare"):
        run.accelerator.load_state(str(tmp_path))
    run.accelerator.end_training()


def test_automatically_named_states_are_gone_on_from_the_newest(tmp_path: Path) -> None:
    naming = accelerate.utils.ProjectConfiguration(
        project_dir=str(tmp_path), automatic_checkpoint_naming=True
    )
    run = Run(with_engine(project_config=naming))
    run.train()
    run.accelerator.save_state()
    run.train()
    run.accelerator.save_state()
    expected = run.train()
    run.accelerator.load_state()
    assert run.train() == expected
    run.accelerator.end_training()


def test_a_state_is_saved_between_micro_batches(tmp_path: Path) -> None:
    losses = []
    for saves in (False, True):
        run = Run(with_engine())
        first, second = list(run.loader)[:2]
        run.accelerator.backward(run.model(**first).loss)
        if saves:
            run.accelerator.save_state(str(tmp_path / "state"))
        run.accelerator.backward(run.model(**second).loss)
        run.optimizer.step()
        losses.append(run.model(**first).loss.item())
        run.accelerator.end_training()

    assert losses[1] == losses[0]
    assert (tmp_path / "state/engine/latest").exists()


def test_another_model_is_prepared_after_a_release() -> None:
    accelerator = with_engine()
    Run(accelerator)
    with pytest.raises(ConfigError, match=r"call release\(\) first"):
        Run(accelerator)
    accelerator.release()
    Run(accelerator).train()
    accelerator.end_training()


def test_the_model_is_unwrapped_and_its_weights_returned() -> None:
    model = language_model()
    run = Run(with_engine(), model)

    assert run.accelerator.unwrap_model(run.model) is model
    assert run.accelerator.get_state_dict(run.model).keys() == model.state_dict().keys()
    run.accelerator.end_training()


def test_the_weights_of_an_engine_made_by_hand_are_its_own() -> None:
    model = torch.nn.Linear(2, 2)
    run = Run(with_engine())
    optimizer = torch.optim.AdamW(model.parameters())
    with infinity_engine.initialize(model, optimizer, accelerator="cpu") as own:
        for accelerator in (with_engine(), run.accelerator):
            found = accelerator.get_state_dict(own)

            assert found.keys() == {"weight", "bias"}
            assert torch.equal(found["weight"], own.state_dict()["weight"])
    run.accelerator.end_training()


def test_a_model_that_is_not_trained_is_prepared_as_by_accelerate() -> None:
    accelerator = with_engine()
    model = language_model()

    assert accelerator.prepare_model(model, evaluation_mode=True) is model
    assert accelerator.engine is None


@pytest.mark.parametrize("number", [0, 2], ids=["no model", "two models"])
def test_one_model_is_prepared_together_with_its_optimizer(number: int) -> None:
    models = [language_model() for _ in range(number)]
    optimizer = torch.optim.AdamW(language_model().parameters())

    with pytest.raises(ConfigError, match="one model and its optimizer, together"):
        with_engine().prepare(*models, optimizer)


def test_no_scheduler_steps_where_fp16_skips_a_step() -> None:
    run = Run(
        with_engine({**SETTINGS, "precision": "fp16_autocast"}, gradient_accumulation_steps=1)
    )
    batch = next(iter(run.loader))
    rates = []
    for factor in (1e30, 1.0):
        run.accelerator.backward(run.model(**batch).loss * factor)
        run.optimizer.step()
        run.scheduler.step()
        rates.append((run.scheduler.get_last_lr()[0], run.accelerator.optimizer_step_was_skipped))

    assert rates == [(1e-2, True), (pytest.approx(9e-3), False)]
    run.accelerator.end_training()


@pytest.fixture
def another_precision() -> Iterator[None]:
    """Let Accelerate, which has one precision in a process, begin anew."""
    accelerate.state.AcceleratorState._reset_state()
    yield
    accelerate.state.AcceleratorState._reset_state()


@pytest.mark.usefixtures("another_precision")
def test_mixed_precision_returns_fp32_as_accelerate_does() -> None:
    class Reads(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)

        def forward(self, values: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"out": self.layer(values)}

    accelerator = with_engine(mixed_precision="bf16")
    model = Reads()
    prepared, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    assert model.layer.weight.dtype == torch.bfloat16

    assert prepared(torch.ones(2, 4))["out"].dtype == torch.float32
    accelerator.end_training()
    assert model(torch.ones(2, 4, dtype=torch.bfloat16))["out"].dtype == torch.bfloat16


def test_a_files_optimizer_and_scheduler_are_not_used_with_a_warning() -> None:
    file = {
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4}},
    }
    with pytest.warns(UserWarning, match="is not used") as caught:
        with_engine(file)

    assert [str(warning.message).split()[2] for warning in caught] == ["optimizer", "scheduler"]


def test_a_wrong_setting_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="budgets: expected one of budget"):
        with_engine({"budgets": 1})


def test_clipping_by_value_is_refused() -> None:
    run = Run(with_engine())
    with pytest.raises(ConfigError, match="by their norm alone"):
        run.accelerator.clip_grad_value_(run.model.parameters(), 1.0)
    run.accelerator.end_training()
