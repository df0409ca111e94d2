"""`InfinityAccelerator`: an Accelerator whose `prepare(model, optimizer, ...)` makes an engine.

A subclass that replaces what Accelerate does with models, optimizers and gradients. Data loaders,
schedulers, trackers and the rest are Accelerate's own.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias
from weakref import WeakSet

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import convert_to_fp32
from torch.utils.hooks import RemovableHandle

from deepnvme.choices import chosen
from infinity_engine.checkpoint.directory import CheckpointDirectory
from infinity_engine.config import EngineConfig
from infinity_engine.engine.api import initialize, settings_given
from infinity_engine.engine.checkpoints.saving import FrozenParameters, PendingGradients
from infinity_engine.engine.engine import Engine
from infinity_engine.engine.stepping import EngineOptimizer
from infinity_engine.errors import ConfigError

__all__ = ["ENGINE_FOLDER", "Config", "InfinityAccelerator", "SkippingOptimizer"]

Config: TypeAlias = EngineConfig | Mapping[str, object] | str | os.PathLike[str] | None
"""What `infinity_engine.initialize` takes as `config`."""

ENGINE_FOLDER = "engine"
"""The folder of an engine's checkpoint within another library's."""

_PRECISIONS = MappingProxyType({"bf16": "bf16_autocast", "fp16": "fp16_autocast"})
"""The engine's precision by Accelerate's `mixed_precision`."""


class SkippingOptimizer(AcceleratedOptimizer):  # type: ignore[misc]  # Accelerate is not typed
    """Steps an engine at the end of a step, and says where fp16 made the engine skip it."""

    def __init__(self, optimizer: EngineOptimizer) -> None:
        # The engine places states, and scales losses itself.
        super().__init__(optimizer, device_placement=False, scaler=None)

    @property
    def step_was_skipped(self) -> bool:
        """Whether the newest step updated nothing, so that no scheduler steps."""
        skipped: bool = self.optimizer.was_skipped
        return skipped


class InfinityAccelerator(Accelerator):  # type: ignore[misc]
    """Trains one model in an engine; `engine` is the `config` of `infinity_engine.initialize`.

    `frozen` is that of `Engine.save`, for `save_state`. `prepare` takes the model together with its
    optimizer. What it returns in their place is the engine, which is called like the model, and an
    optimizer that steps it. `backward`, `accumulate`, `clip_grad_norm_`, `save_state` and
    `load_state` are used as with any Accelerator.
    """

    _optimizers: list[Any]  # the base class has it, without a type

    _frozen: FrozenParameters

    def __init__(
        self,
        *args: Any,
        engine: Config = None,
        frozen: FrozenParameters | str = FrozenParameters.SAVE,
        **kwargs: Any,
    ) -> None:
        self._frozen = chosen(FrozenParameters, frozen, "frozen")
        super().__init__(*args, **kwargs)
        self._begin(engine, {})

    @classmethod
    def taking_over(
        cls,
        accelerator: Accelerator,
        engine: Config,
        frozen: FrozenParameters | str = FrozenParameters.SAVE,
        **settings: object,
    ) -> InfinityAccelerator:
        """Return one in place of `accelerator`, which a Trainer has made.

        The two share all attributes. `settings` replace those of `engine`.
        """
        taken = cls.__new__(cls)
        taken._take_over(accelerator, engine, frozen, settings)
        return taken

    def _take_over(
        self,
        accelerator: Accelerator,
        engine: Config,
        frozen: FrozenParameters | str,
        settings: Mapping[str, object],
    ) -> None:
        self.__dict__ = accelerator.__dict__
        self._frozen = chosen(FrozenParameters, frozen, "frozen")
        self._begin(engine, settings)

    def _begin(self, engine: Config, settings: Mapping[str, object]) -> None:
        self.engine: Engine | None = None
        """The engine that `prepare` has made."""
        self.saved_dtype: str | None = None
        """What weights are saved in; None: what they compute in."""
        # With mixed precision, outputs are fp32, as Accelerate has them.
        self._converting: list[RemovableHandle] = []
        self._evaluated: WeakSet[torch.nn.Module] = WeakSet()  # and moved for that, before training
        given = settings_given(engine)
        given.warn_of_missing(4)
        given.warn_of_optimizer(4)
        self._engine_settings = {**given.settings, **settings}
        EngineConfig.from_mapping(self._engine_settings)  # refused here, not when data is prepared
        # The engine multiplies the loss by a scale of its own.
        self.scaler = None

    # --- preparing --------------------------------------------------------------------------------

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Make an engine of the model and the optimizer; prepare the rest as Accelerate does.

        Raises:
            ConfigError: there are several models to train, or the model has no optimizer beside it.
            CapacityError: the budgets do not hold what training needs.
        """
        models = [item for item in args if isinstance(item, torch.nn.Module)]
        optimizers = [
            item
            for item in args
            if isinstance(item, torch.optim.Optimizer) and not isinstance(item, SkippingOptimizer)
        ]
        if not models and not optimizers:
            return super().prepare(*args, device_placement=device_placement)
        earlier = "" if self.engine is None else " beside the engine of an earlier call"
        if len(models) != 1 or len(optimizers) != 1 or earlier:
            raise ConfigError(
                field="prepare",
                value=f"{len(models)} models and {len(optimizers)} optimizers{earlier}",
                expected="one model and its optimizer, together: an engine trains one model. For "
                "a model that is not trained, call prepare_model(model, evaluation_mode=True). "
                "To train another model, call release() first, which closes the engine",
            )
        made = self._make_engine(models[0], optimizers[0])
        places: dict[int, Any] = {id(models[0]): made, id(optimizers[0]): made.as_optimizer()}
        return super().prepare(
            *(places.get(id(item), item) for item in args), device_placement=device_placement
        )

    def _make_engine(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Engine:
        settings = {
            "accumulation_steps": self.gradient_accumulation_steps,
            **self._engine_settings,
        }
        precision = _PRECISIONS.get(self.mixed_precision)
        mixes = precision is not None and settings.setdefault("precision", precision) == precision
        self._undo_evaluation(model)
        dtypes = {value.dtype for value in model.parameters() if value.is_floating_point()}
        made = initialize(model, optimizer, settings)
        if made.device.type != self.device.type:
            made.close()
            raise ConfigError(
                field="accelerator",
                value=f"{made.device.type}, where Accelerate puts batches on {self.device.type}",
                expected="the same device for both: set the engine's setting `accelerator`, or "
                "use_cpu=True of TrainingArguments, cpu=True of Accelerator",
            )
        self.engine = made
        if mixes:
            self._converting = [model.register_forward_hook(_in_fp32)]
            # Saved as it was: the engine has its fp32 masters.
            self.saved_dtype = "float32" if dtypes == {torch.float32} else None
        return made

    def prepare_model(
        self,
        model: torch.nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> torch.nn.Module:
        """Prepare a model as Accelerate does; what it moves to its device is noted."""
        tensors = [*model.parameters(), *model.buffers()]
        if evaluation_mode and all(tensor.device.type == "cpu" for tensor in tensors):
            self._evaluated.add(model)
        prepared: torch.nn.Module = super().prepare_model(model, device_placement, evaluation_mode)
        return prepared

    def _undo_evaluation(self, model: torch.nn.Module) -> None:
        """Take back what an evaluation before training did to a model: its forward may mix
        precisions, and it may be on the device.
        """
        # Not Accelerate's own way back, which takes a model's decorators off with its own.
        before = model.__dict__.pop("_original_forward", None)
        if before is not None:
            model.__dict__.pop("forward", None)
            if model.forward != before:  # it was not the class's
                model.__dict__["forward"] = before
        if model in self._evaluated:
            model.to("cpu")

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> Any:
        """Prepare an optimizer; that of an engine keeps its states where they are."""
        if not isinstance(optimizer, EngineOptimizer):
            return super().prepare_optimizer(optimizer, device_placement=device_placement)
        prepared = SkippingOptimizer(optimizer)
        self._optimizers.append(prepared)
        return prepared

    def unwrap_model(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the model of an engine; of other wrappers, what Accelerate returns."""
        if isinstance(model, Engine):
            model = model.module
        return super().unwrap_model(model, *args, **kwargs)

    # --- training ---------------------------------------------------------------------------------

    def mixing(self) -> AbstractContextManager[None]:
        """Return the autocast of mixed precision, for code that calls the model past the engine."""
        mixed: AbstractContextManager[None] = self.autocast() if self._converting else nullcontext()
        return mixed

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Compute gradients through the engine, averaged over `gradient_accumulation_steps`."""
        if self.engine is None:
            super().backward(loss, **kwargs)
            return
        # Averaged here, as Accelerate does, so that the engine does not.
        self.engine.backward(loss / self.gradient_accumulation_steps, scale=False, **kwargs)

    def clip_grad_norm_(
        self, parameters: Any, max_norm: float, norm_type: float = 2
    ) -> torch.Tensor | None:
        """Clip all gradients in the next step; return their norm.

        Raises:
            ConfigError: the norm is not of type 2; or updates are made before the norm is known.
        """
        if self.engine is None:
            clipped: torch.Tensor | None = super().clip_grad_norm_(parameters, max_norm, norm_type)
            return clipped
        if norm_type != 2:
            raise ConfigError(field="norm_type", value=norm_type, expected="2")
        return torch.tensor(self.engine.clip_grad_norm_(float(max_norm)))

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Refuse where there is an engine, which clips by norm alone.

        Raises:
            ConfigError: there is one.
        """
        if self.engine is not None:
            raise ConfigError(
                field="clip_grad_value_",
                value=clip_value,
                expected="clip_grad_norm_: the engine clips gradients by their norm alone",
            )
        super().clip_grad_value_(parameters, clip_value)

    # --- checkpoints ------------------------------------------------------------------------------

    def get_state_dict(self, model: Any, unwrap: bool = True) -> Any:
        """Return a model's state dict; of an engine, copies on the host. All ranks call this."""
        if isinstance(model, Engine):
            return model.state_dict()
        if self.engine is not None and model is self.engine.module:
            return self.engine.state_dict()
        return super().get_state_dict(model, unwrap)

    def save_state(
        self, output_dir: str | None = None, safe_serialization: bool = True, **kwargs: Any
    ) -> Any:
        """Save schedulers, samplers and generators as Accelerate does, and the engine beside them.

        The engine's checkpoint is in the folder `engine` within.
        """
        with self._without_optimizers():
            folder = super().save_state(output_dir, safe_serialization, **kwargs)
        if self.engine is not None:
            # A plain Accelerator saves between micro-batches, too, and no gradients.
            self.engine.save(
                Path(folder) / ENGINE_FOLDER,
                # The files beside it are replaced, too: they belong to no older step.
                keep=1,
                pending=PendingGradients.LEAVE_OUT,
                frozen=self._frozen,
            )
        return folder

    def load_state(
        self, input_dir: str | None = None, load_kwargs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Go on from what `save_state` has saved; without `input_dir`, from the newest.

        Raises:
            ConfigError: no engine has saved there.
        """
        folder = Path(input_dir).expanduser() if input_dir is not None else self._newest()
        if self.engine is not None:
            if CheckpointDirectory(folder / ENGINE_FOLDER).latest() is None:
                raise ConfigError(
                    field="input_dir",
                    value=str(folder),
                    expected=f"a folder that save_state of an InfinityAccelerator has made, with "
                    f"a checkpoint in its folder {ENGINE_FOLDER!r}. To go on from the weights of "
                    "a plain Accelerator, load them into the model before prepare",
                )
            self.engine.load(folder / ENGINE_FOLDER)
        with self._without_optimizers():
            super().load_state(str(folder), load_kwargs, **kwargs)

    @contextmanager
    def _without_optimizers(self) -> Iterator[None]:
        """Keep states that the engine saves from Accelerate, which would copy them to the host."""
        kept = self._optimizers
        if self.engine is not None:
            self._optimizers = []
        try:
            yield
        finally:
            self._optimizers = kept

    def _newest(self) -> Path:
        """Return the newest folder of automatic checkpoint naming."""
        folders = Path(self.project_dir or ".").glob("checkpoints/*")
        numbered = [(int(found[0]), path) for path in folders if (found := _number(path))]
        if not numbered:
            raise ConfigError(
                field="input_dir", value=None, expected="a folder that save_state has made"
            )
        return max(numbered)[1]

    def release(self) -> None:
        """Close the engine, if there is one, so that `prepare` can make another."""
        if self.engine is not None:
            self.engine.close()
        for handle in self._converting:
            handle.remove()
        self.engine, self.saved_dtype, self._converting = None, None, []

    def end_training(self) -> None:
        """End trackers as Accelerate does, and close the engine."""
        self.release()
        super().end_training()


def _in_fp32(_module: torch.nn.Module, _inputs: object, output: Any) -> Any:
    return convert_to_fp32(output)


def _number(path: Path) -> list[str]:
    """Return the number that a name ends with, if it does."""
    return re.findall(r"\d+$", path.name)
