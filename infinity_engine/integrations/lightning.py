"""`InfinityStrategy`: Lightning's Trainer trains a module in an engine.

A strategy for one process. The engine is made when fitting begins and closed when it ends; a
checkpoint is a folder with the engine's and a file with the rest.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden

from deepnvme.choices import chosen
from infinity_engine.config import EngineConfig
from infinity_engine.engine.api import initialize, settings_given
from infinity_engine.engine.checkpoints.saving import FrozenParameters, PendingGradients
from infinity_engine.engine.engine import Engine
from infinity_engine.errors import ConfigError

__all__ = ["EnginePrecision", "InfinityStrategy"]

_AUTOCAST: Mapping[object, torch.dtype] = MappingProxyType(
    {"bf16_autocast": torch.bfloat16, "fp16_autocast": torch.float16}
)
_ENGINE, _REST = "engine", "lightning.ckpt"


class EnginePrecision(Precision):  # type: ignore[misc]  # Lightning is typed in part
    """Clips through the engine, whose setting `precision` says what parameters compute in.

    `autocast` is what the steps of the module compute in: also those of a test after fitting, when
    the engine is closed and its parameters have that dtype.
    """

    def __init__(self, autocast: torch.dtype | None, device: str) -> None:
        self._autocast, self._device = autocast, device
        self.has_gradients = False
        """Whether a backward has come since the last step, where Lightning steps by itself."""

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return what each step of the module runs in."""
        if self._autocast is None:
            return nullcontext()
        # As in the engine: a cache would keep cast copies of parameters.
        return torch.autocast(self._device, dtype=self._autocast, cache_enabled=False)

    def optimizer_step(
        self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Run the batch and step; not where its `training_step` returned None and nothing else
        came: that skips the batch.
        """
        result = closure()
        if result is None and model.automatic_optimization and not self.has_gradients:
            return None
        self._after_closure(model, optimizer)
        optimizer.step(**kwargs)
        self.has_gradients = False
        return result

    def note_gradients(self) -> None:
        """Note that a backward has come."""
        self.has_gradients = True

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        """Clip all gradients in the next step."""
        optimizer.clip_grad_norm_(clip_val)

    def clip_grad_by_value(self, optimizer: Any, clip_val: float) -> None:
        """Refuse: the engine clips by norm alone.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            field="gradient_clip_algorithm", value="value", expected='"norm" in an engine'
        )


class InfinityStrategy(SingleDeviceStrategy):  # type: ignore[misc]
    """Trains a module in an engine; `engine` is the `config` of `infinity_engine.initialize`.

    `frozen` is that of `Engine.save`, for all checkpoints.
    """

    strategy_name = "infinity"
    optimizers: list[Any]  # the base class has it, without a type

    def __init__(
        self,
        engine: Any = None,
        device: str | torch.device | None = None,
        *,
        frozen: FrozenParameters | str = FrozenParameters.SAVE,
    ) -> None:
        """Take settings, and the device of batches: None for a GPU where there is one.

        Raises:
            ConfigError: a setting cannot be, or this is one of several processes.
        """
        if os.environ.get("WORLD_SIZE", "1") not in {"", "1"}:
            # The engine would train as one of several ranks, and Lightning as the only process.
            expected = "1: this strategy trains in one process. docs/ranks.md says how to use more"
            raise ConfigError(field="WORLD_SIZE", value=os.environ["WORLD_SIZE"], expected=expected)
        where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        given = settings_given(engine)
        EngineConfig.from_mapping(given.settings)  # refused here, not when fitting begins
        given.warn_of_missing(2)
        given.warn_of_optimizer(2)
        autocast = _AUTOCAST.get(given.settings.get("precision"))
        precision = EnginePrecision(autocast, where.type)
        super().__init__(device=where, precision_plugin=precision)
        self._engine_settings = dict(given.settings)
        self._frozen = chosen(FrozenParameters, frozen, "frozen")
        self.engine: Engine | None = None
        """The engine, while fitting."""
        self._checkpoint: Path | None = None  # the engine's, in what is loaded

    # --- making and ending the engine -------------------------------------------------------------

    def model_to_device(self) -> None:
        """Leave a model that is trained where it is: the engine places it."""
        if self.lightning_module.trainer.state.fn != TrainerFn.FITTING:
            super().model_to_device()

    def setup_optimizers(self, trainer: Any) -> None:
        """Make the module's optimizer, and the engine of both.

        Raises:
            ConfigError: the module has several optimizers, or the Trainer has a precision.
        """
        # Lightning drops it where a strategy has a precision of its own.
        precision = trainer._accelerator_connector._precision_flag
        if precision != "32-true":
            raise ConfigError(
                field="precision",
                value=precision,
                expected="Trainer's default: the engine has a setting `precision`, such as "
                '"bf16_autocast" for bf16-mixed, or "bf16" for bf16-true',
            )
        if is_overridden("backward", self.lightning_module):
            raise ConfigError(
                field="backward",
                value=f"that of {type(self.lightning_module).__name__}",
                expected="LightningModule's own: the engine computes gradients. Return what is to "
                "be minimized from training_step",
            )
        super().setup_optimizers(trainer)
        if len(self.optimizers) != 1:
            raise ConfigError(
                field="configure_optimizers",
                value=f"{len(self.optimizers)} optimizers",
                expected="one: an engine steps one",
            )
        settings = {
            "accumulation_steps": trainer.accumulate_grad_batches,
            **self._engine_settings,
        }
        self.engine = initialize(self.lightning_module, self.optimizers[0], settings)
        self.optimizers = [self.engine.as_optimizer()]

    def teardown(self) -> None:
        """Close the engine, which gives the module its values back."""
        if self.engine is not None:
            self.engine.close()
            self.engine = self._checkpoint = None
            self.optimizers = []
        super().teardown()

    def _fitting(self) -> Engine:
        assert self.engine is not None, "only fitting trains, and restores optimizers"
        return self.engine

    # --- steps ------------------------------------------------------------------------------------

    def backward(
        self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Compute gradients through the engine. Lightning has averaged the loss."""
        loss = self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        self._fitting().backward(loss, *args, scale=False, **kwargs)
        self.precision_plugin.note_gradients()
        ended: torch.Tensor = self.precision_plugin.post_backward(loss, self.lightning_module)
        return ended

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's training_step in the engine."""
        return self._fitting().run(super().training_step, *args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's validation_step, in the engine while fitting."""
        if self.engine is None:
            return super().validation_step(*args, **kwargs)
        return self.engine.run(super().validation_step, *args, **kwargs)

    # --- checkpoints ------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return nothing while fitting: the engine saves the values."""
        if self.engine is not None:
            return {}
        found: dict[str, Any] = super().lightning_module_state_dict()
        return found

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return nothing while fitting, likewise."""
        if self.engine is not None:
            return {}
        found: dict[str, Any] = super().optimizer_state(optimizer)
        return found

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Write a folder: the engine's checkpoint, and what Lightning saves beside values."""
        if self.engine is None:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        folder = Path(filepath)
        # Under its own name, a checkpoint is whole: a process may be killed at any instant.
        making = folder.with_name(f".{folder.name}.making")
        shutil.rmtree(making, ignore_errors=True)
        # Lightning also saves after a validation in the midst of an accumulation.
        self.engine.save(making / _ENGINE, pending=PendingGradients.LEAVE_OUT, frozen=self._frozen)
        super().save_checkpoint(checkpoint, making / _REST, storage_options)
        _rename(making, folder)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return what Lightning saved, and note the engine's checkpoint beside it.

        Lightning calls this before the engine is made, so that a plain checkpoint's weights are
        loaded into the module.
        """
        folder = Path(checkpoint_path)
        is_engines = (folder / _ENGINE).is_dir()
        if is_engines and self.lightning_module.trainer.state.fn != TrainerFn.FITTING:
            raise ConfigError(
                field="ckpt_path",
                value=str(folder),
                expected="a checkpoint that has weights itself: an engine's can be loaded only "
                f"while fitting. Export it with `infinity checkpoint export {folder / _ENGINE} "
                "WEIGHTS`, and load the weights into the module",
            )
        self._checkpoint = folder / _ENGINE if is_engines else None
        found: dict[str, Any] = super().load_checkpoint(
            folder / _REST if is_engines else folder, *args, **kwargs
        )
        return found

    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        """Load a plain checkpoint's values; those of an engine are loaded with its states."""
        if self._checkpoint is None:
            super().load_model_state_dict(checkpoint, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Load values and states of an engine's checkpoint, or the states of a plain one.

        Raises:
            ConfigError: the checkpoint has no states.
        """
        if self._checkpoint is not None:
            self._fitting().load(self._checkpoint)
            return
        states = checkpoint["optimizer_states"]
        if len(states) != 1:
            raise ConfigError(
                field="ckpt_path",
                value=f"one with the states of {len(states)} optimizers",
                expected="a checkpoint with those of one optimizer. After fit, the engine is "
                "closed, and Trainer.save_checkpoint saves no states: let ModelCheckpoint save "
                "while fitting. To begin with the weights alone, load them into the module",
            )
        self._fitting().load_optimizer_state_dict(states[0])


def _rename(made: Path, path: Path) -> None:
    """Let `made` have the name `path`. What had it before goes."""
    older = path.with_name(f".{path.name}.older")
    if os.path.lexists(path):  # also a link to nothing
        _remove(older)  # of a save that was killed after its checkpoint had its name
        path.rename(older)
    made.rename(path)
    _remove(older)


def _remove(path: Path) -> None:
    """Remove a file, link or directory, if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
