"""`InfinityTrainer`: a Trainer that trains in an engine, and `InfinityMixin` for other trainers.

The loop stays Trainer's. The engine gets the gradients, steps, saves and loads; checkpoints have
Trainer's folders, each with the engine's own checkpoint in place of `optimizer.pt`.
"""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from transformers import Trainer
from transformers.trainer import SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import CONFIG_NAME, is_peft_available

from deepnvme.choices import chosen
from infinity_engine.checkpoint.directory import CheckpointDirectory
from infinity_engine.config import EngineConfig
from infinity_engine.engine.api import settings_given
from infinity_engine.engine.checkpoints.saving import FrozenParameters, PendingGradients
from infinity_engine.engine.engine import Engine
from infinity_engine.errors import ConfigError
from infinity_engine.integrations.accelerate import (
    ENGINE_FOLDER,
    Config,
    InfinityAccelerator,
    SkippingOptimizer,
)
from infinity_engine.integrations.language_models import state_dtype

__all__ = ["InfinityMixin", "InfinityTrainer"]


_UNSUPPORTED = (
    *("deepspeed", "fsdp", "torch_compile", "auto_find_batch_size"),
    # After training, Trainer would cast parameters that the engine manages.
    *("fp16_full_eval", "bf16_full_eval"),
)
_TRAINERS_OWN = MappingProxyType(
    {
        "max_grad_norm": ("max_grad_norm", None),
        "accumulation_steps": ("gradient_accumulation_steps", 1),
    }
)
"""Settings of the engine that Trainer has arguments for, and their defaults."""


class InfinityMixin(Trainer):  # type: ignore[misc]  # Transformers is typed in part
    """Lets a subclass of Trainer train in an engine: `class Mine(InfinityMixin, SFTTrainer)`.

    The keyword `engine` is the `config` of `infinity_engine.initialize`: settings, or the path of a
    file. The engine is made when training begins, and stays until `end()`, so that evaluating and
    saving work after `train()`. `frozen` is that of `Engine.save`, for all checkpoints.
    """

    accelerator: Any  # the base class has it

    def __init__(
        self,
        *args: Any,
        engine: Config = None,
        frozen: FrozenParameters | str = FrozenParameters.SAVE,
        **kwargs: Any,
    ) -> None:
        # Refused here, and not after a trainer has prepared all of its data.
        settings = settings_given(engine).settings
        EngineConfig.from_mapping(settings)
        # First: Trainer's constructor makes the accelerator.
        self._engine_settings = engine
        self._frozen = chosen(FrozenParameters, frozen, "frozen")
        super().__init__(*args, **kwargs)
        for field, value, expected in _conflicts(self.args, settings):
            raise ConfigError(field=field, value=value, expected=expected)

    @property
    def engine(self) -> Engine | None:
        """The engine, None until training begins."""
        made: Engine | None = self.accelerator.engine
        return made

    # --- making the engine ------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        """Let the accelerator make an engine when Trainer prepares model and optimizer."""
        super().create_accelerator_and_postprocess()
        self.accelerator = InfinityAccelerator.taking_over(
            self.accelerator,
            self._engine_settings,
            self._frozen,
            # Trainer averages: the engine only plans for so many micro-batches.
            accumulation_steps=self.args.gradient_accumulation_steps,
        )

    def call_model_init(self, trial: Any = None) -> Any:
        """Make a model; an engine of the one before is closed."""
        self.accelerator.release()
        return super().call_model_init(trial)

    def _move_model_to_device(self, model: Any, device: torch.device) -> None:
        """Leave the model where it is: the engine places it."""

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
        """Return what is called in place of a model: its engine, if it has one."""
        return self.engine if self.engine is not None and model is self.engine.module else model

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """Predict; `generate` calls parts of some models past the engine, as Whisper's encoder."""
        with self.accelerator.mixing():
            return super().prediction_step(*args, **kwargs)

    # --- saving -----------------------------------------------------------------------------------

    def _save(
        self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None
    ) -> None:
        """Save weights and configuration; weights are streamed from where they are."""
        if self.engine is None or state_dict is not None:
            super()._save(output_dir, state_dict)
            return
        if _has_adapters(self.model):
            adapters = self._adapters(self.engine)
            with self.engine.listing():
                super()._save(output_dir, adapters)
            return
        folder = Path(output_dir if output_dir is not None else self.args.output_dir)
        # All but the weights.
        super()._save(str(folder), {})
        if self.args.should_save:
            for file in _weights_in(folder):
                file.unlink()
        files = self.engine.export(folder, dtype=self.accelerator.saved_dtype)
        states_dtype = self.args.should_save and (folder / CONFIG_NAME).exists()
        if states_dtype and self.accelerator.saved_dtype is not None:
            state_dtype(folder, files)

    def _adapters(self, engine: Engine) -> dict[str, Any]:
        """Return the state dict that peft picks the adapters from: what is trained, and the rest
        that peft saves, such as embeddings that were resized.
        """
        found: dict[str, Any] = engine.trainable_state_dict()
        if self.accelerator.saved_dtype is not None:
            names = self.model.named_parameters(remove_duplicate=False)
            found |= {
                name: engine.state_of(parameter)["master"]
                for name, parameter in names
                if name in found
            }
        with engine.listing():
            saved = _saved_by_peft(self.model)
        for name, tensor in saved.items():
            if name not in found:
                with engine.gathered(tensor):
                    found[name] = tensor.detach().cpu().clone()
        return found

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save a checkpoint. It is finished when it has its `trainer_state.json`, the last file."""
        name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        if self.args.should_save:
            # An earlier run may have written this checkpoint.
            folder = Path(self._get_output_dir(trial)) / name
            (folder / TRAINER_STATE_NAME).unlink(missing_ok=True)
            if self.args.save_only_model:
                shutil.rmtree(folder / ENGINE_FOLDER, ignore_errors=True)
        super()._save_checkpoint(model, trial)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Save the engine and the scheduler."""
        if self.engine is None:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        # An epoch of unknown length may end in the midst of an accumulation.
        self.engine.save(
            Path(output_dir) / ENGINE_FOLDER,
            keep=1,
            pending=PendingGradients.LEAVE_OUT,
            frozen=self._frozen,
        )
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    # --- going on ---------------------------------------------------------------------------------

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Train. With `resume_from_checkpoint=True`, go on from the newest finished checkpoint.

        Raises:
            ValueError: there is none, or the one that is named was not written to its end.
            RuntimeError: `end` has closed the engine.
        """
        # Trainer's own optimizer goes with the engine; model_init makes both anew.
        has_ended = self.engine is None and isinstance(self.optimizer, SkippingOptimizer)
        if has_ended and self.model_init is None:
            raise RuntimeError(
                "end() has closed the engine, and the states of the optimizer went with it. Make "
                "another trainer for this model, which has its values back; or call end() after "
                "the last train()"
            )
        if resume_from_checkpoint is True:
            newest = max(_finished(Path(self.args.output_dir)), default=None)
            if newest is None:
                raise ValueError(
                    f"There is no finished checkpoint in {self.args.output_dir} to resume from. "
                    "Train without resume_from_checkpoint, or name the directory of a checkpoint"
                )
            resume_from_checkpoint = str(newest[1])
        elif resume_from_checkpoint and _is_unfinished(Path(resume_from_checkpoint)):
            raise ValueError(
                f"The checkpoint {resume_from_checkpoint} was not written to its end. Training "
                "from it would begin at step 0, or without states of the optimizer. Pass "
                "resume_from_checkpoint=True, which takes the newest that is finished"
            )
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load weights into the model, unless the engine loads them later."""
        if _has_engine(resume_from_checkpoint):
            return
        if self.engine is not None:
            raise ConfigError(
                field="resume_from_checkpoint",
                value=resume_from_checkpoint,
                expected=f"one with a folder {ENGINE_FOLDER!r}, which an engine has saved: this "
                "trainer has an engine already, which loads no other checkpoint",
            )
        super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load the engine and the scheduler; or the states that a plain Trainer has saved."""
        if checkpoint is None or self.engine is None or not _has_engine(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        self.engine.load(Path(checkpoint) / ENGINE_FOLDER)
        self.lr_scheduler.load_state_dict(
            torch.load(Path(checkpoint) / SCHEDULER_NAME, weights_only=True)
        )

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Do nothing: the engine finds its loss scale, whatever a plain Trainer's was."""

    def _load_best_model(self) -> None:
        """Load the weights of the best checkpoint into the engine."""
        if self.engine is None:
            super()._load_best_model()
            return
        # A callback may have ended the training in the midst of a step.
        self.engine.zero_grad()
        if not _has_engine(self.state.best_model_checkpoint):
            # It is a plain Trainer's, from before this run went on from there.
            with self.engine.gathered(self.model.parameters(), modify=True):
                super()._load_best_model()
            return
        self.engine.load(Path(self.state.best_model_checkpoint) / ENGINE_FOLDER, weights_only=True)


class InfinityTrainer(InfinityMixin):
    """Transformers' Trainer in an engine: `InfinityTrainer(..., engine={"budget": ...})`."""


def _conflicts(arguments: Any, settings: Mapping[str, object]) -> Iterator[tuple[str, object, str]]:
    """Yield what a Trainer in an engine cannot do: the argument, its value, what would be right."""
    of = "TrainingArguments."
    for name in _UNSUPPORTED:
        if getattr(arguments, name, None):
            expected = "to be left out: an engine does not support it"
            yield of + name, getattr(arguments, name), expected
    if arguments.save_only_model and arguments.load_best_model_at_end:
        expected = "False with load_best_model_at_end: the engine loads the best model"
        yield of + "save_only_model", True, expected
    if arguments.n_gpu > 1:
        expected = "one GPU for each process: set CUDA_VISIBLE_DEVICES, or start it with torchrun"
        yield of + "n_gpu", arguments.n_gpu, expected
    for name, (argument, default) in _TRAINERS_OWN.items():
        value, own = settings.get(name, default), getattr(arguments, argument)
        if value not in (default, own):
            expected = f"nothing, or {own!r} as in {of}{argument}: Trainer decides it"
            yield f"engine[{name!r}]", value, expected


def _has_adapters(model: torch.nn.Module) -> bool:
    """Tell whether peft saves the model."""
    if not is_peft_available():
        return False
    from peft import PeftModel

    return isinstance(model, PeftModel) or bool(getattr(model, "_hf_peft_config_loaded", False))


def _saved_by_peft(model: Any) -> dict[str, torch.Tensor]:
    """Return the model's own tensors that peft saves of its adapters, by their names."""
    from peft import get_peft_model_state_dict

    named = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    # peft picks from any state dict: from one without values, it says what it would pick.
    names = {name: torch.empty_like(tensor, device="meta") for name, tensor in named.items()}
    picked: set[int] = set()
    for adapter in model.peft_config:
        with warnings.catch_warnings():
            # It warns when it saves, too.
            warnings.simplefilter("ignore")
            chosen = get_peft_model_state_dict(model, state_dict=names, adapter_name=adapter)
        picked |= {id(tensor) for tensor in chosen.values()}
    return {name: named[name] for name, tensor in names.items() if id(tensor) in picked}


def _weights_in(folder: Path) -> list[Path]:
    """Return the files of an earlier save of the whole model."""
    return [
        file
        for file in folder.glob("model*")
        if re.fullmatch(
            r"model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json", file.name
        )
    ]


def _has_engine(checkpoint: str) -> bool:
    """Tell whether an engine has saved a whole checkpoint in this one."""
    return CheckpointDirectory(Path(checkpoint) / ENGINE_FOLDER).latest() is not None


def _finished(folder: Path) -> Iterator[tuple[int, Path]]:
    """Yield the steps and folders of a run's checkpoints that were written to their end."""
    for path in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        step = path.name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-")
        if step.isdecimal() and _has_state(path):
            yield int(step), path


def _has_state(checkpoint: Path) -> bool:
    """Tell whether a checkpoint has Trainer's state, which is written last."""
    # Killed while it was written, the file may be cut short.
    try:
        json.loads((checkpoint / TRAINER_STATE_NAME).read_text())
    except (OSError, ValueError):
        return False
    return True


def _is_unfinished(checkpoint: Path) -> bool:
    """Tell whether an engine's trainer began to write a checkpoint, and did not come to its end."""
    begun = (checkpoint / ENGINE_FOLDER).is_dir()
    return begun and not (_has_engine(str(checkpoint)) and _has_state(checkpoint))
