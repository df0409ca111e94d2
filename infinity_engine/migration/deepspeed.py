"""`migrate_deepspeed`: the settings of a DeepSpeed JSON file, key by key.

Says for each key which setting of `initialize` does the same, who does it instead, or that nothing
does. Asks nothing of this machine and imports no torch.
"""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import Any

from infinity_engine.errors import ConfigError
from infinity_engine.migration.schedules import Rise, Warmup, WarmupDecay

__all__ = [
    "Fate",
    "MigratedKey",
    "Migration",
    "is_deepspeed",
    "migrate_deepspeed",
    "read_json",
]


class Fate(Enum):
    """What becomes of a key."""

    SETTING = "setting"  # a setting or an argument of initialize has its effect
    YOURS = "yours"  # your own code does it
    NOT_NEEDED = "not needed"  # the engine does it anyway, or it changes nothing here
    CALLER = "auto"  # DeepSpeed's file leaves the value to the program that reads it
    MISSING = "no equivalent"  # the engine cannot do it


@dataclass(frozen=True, kw_only=True, slots=True)
class MigratedKey:
    """One key of the file, by its dotted path, with its value and what there is `here` for it."""

    key: str
    value: object
    fate: Fate
    here: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Migration:
    """The equivalent of a file. `optimizer` and `schedule` are None where it has none."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Mapping[str, Any] | None = None
    schedule: Warmup | None = None
    keys: tuple[MigratedKey, ...] = ()

    @property
    def missing(self) -> tuple[MigratedKey, ...]:
        """The keys that have no equivalent."""
        return tuple(key for key in self.keys if key.fate is Fate.MISSING)

    def warn_of_missing(self, stacklevel: int) -> None:
        """Warn of each key that has no equivalent; `stacklevel` counts from the caller."""
        for key in self.missing:
            warnings.warn(
                f"{key.key}={key.value!r} has no equivalent in the engine: {key.here}",
                UserWarning,
                stacklevel=stacklevel + 1,
            )

    def warn_of_optimizer(self, stacklevel: int) -> None:
        """Warn where the file has an optimizer or a scheduler: the library whose loop trains makes
        its own.
        """
        for name, value in (("optimizer", self.optimizer), ("scheduler", self.schedule)):
            if value is not None:
                warnings.warn(
                    f"The file's {name} is not used: that of the training loop is. Remove it from "
                    "the file, after you have given the loop the same rates and options",
                    UserWarning,
                    stacklevel=stacklevel + 1,
                )

    def warn_of_auto(self, settings: Mapping[str, object], stacklevel: int) -> None:
        """Warn of values that the file leaves to the program, where no setting takes their place.

        `settings` are all that the engine gets.
        """
        left = [
            key.key
            for key in self.keys
            if key.fate is Fate.CALLER
            and (setting := _LEFT_TO_CALLERS.get(key.key)) is not None
            and setting not in settings
        ]
        if left:
            warnings.warn(
                f'The file says "auto" for {", ".join(left)}. initialize() knows no other values, '
                "so these are off, as if the file did not have them. Write values into the file, "
                "or pass the settings that `infinity migrate` names",
                UserWarning,
                stacklevel=stacklevel + 1,
            )


def read_json(path: str | os.PathLike[str], *, is_finite: bool = True) -> Mapping[str, Any]:
    """Return the mapping in a JSON file, in which all numbers are finite unless that is not asked.

    Raises:
        ConfigError: it cannot be read, or holds no such JSON object.
    """
    expected = "a file with a JSON object"
    try:
        text = Path(path).read_text()
        if is_finite:
            found = json.loads(text, parse_constant=_no_number, parse_float=_finite_number)
        else:
            found = json.loads(text)
    except OSError as error:
        raise ConfigError(
            field="config", value=os.fspath(path), expected=f"{expected}: {error.strerror}"
        ) from error
    # RecursionError: JSON may nest deeper than Python reads.
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            field="config", value=os.fspath(path), expected=f"{expected}: {error}"
        ) from error
    if not isinstance(found, dict):
        raise ConfigError(field="config", value=os.fspath(path), expected=expected)
    return found


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no number of JSON")


def _finite_number(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _no_number(text)


def is_deepspeed(config: Mapping[str, object]) -> bool:
    """Tell whether these are DeepSpeed's settings: any key that DeepSpeed alone has."""
    return any(
        pattern.split(".")[0] in config for pattern in (*_HANDLERS, *_WORDS, *_MISSING, *_SECTIONS)
    )


def migrate_deepspeed(config: Mapping[str, Any], *, ranks: int = 1) -> Migration:
    """Return the equivalent of a DeepSpeed file's content.

    `ranks` is how many processes train, which DeepSpeed divides `train_batch_size` by.

    Raises:
        ConfigError: a value that the engine would have to use cannot be right.
    """
    if ranks < 1:
        raise ConfigError(field="ranks", value=ranks, expected="how many processes train")
    for path in _SECTIONS:
        _check_section(config, path)
    draft = _Translation(config, ranks)
    keys = tuple(
        MigratedKey(key=key, value=value, fate=fate, here=here)
        for key, value in _leaves(config, "")
        for fate, here in [draft.read(key, value)]
    )
    return Migration(
        settings=draft.settings, optimizer=draft.optimizer(), schedule=draft.schedule(), keys=keys
    )


def _check_section(config: Mapping[str, Any], path: str) -> None:
    """Refuse another value where DeepSpeed has a section, if the file has it."""
    found: Any = config
    for name in path.split("."):
        found = found.get(name, {})
        if not isinstance(found, Mapping):
            raise ConfigError(field=path, value=found, expected="a section, as DeepSpeed has it")


def _leaves(section: Mapping[str, Any], within: str) -> Iterator[tuple[str, Any]]:
    """Yield all values that are no sections, by their dotted paths."""
    for name, value in section.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{within}{name}.")
        else:
            yield f"{within}{name}", value


_Answer = tuple[Fate, str]

_OFF: tuple[object, ...] = (False, None, 0, "none", "off")
_OPTIMIZERS = MappingProxyType(
    {"adamw": "adamw", "lion": "lion", "adagrad": "adagrad", "sgd": "sgd"}
)
_OPTIONS = MappingProxyType(
    {
        "adam": ("lr", "betas", "eps", "weight_decay", "amsgrad"),
        "adamw": ("lr", "betas", "eps", "weight_decay", "amsgrad"),
        "lion": ("lr", "betas", "weight_decay"),
        "adagrad": ("lr", "eps", "weight_decay"),
        "sgd": ("lr", "momentum", "dampening", "weight_decay", "nesterov"),
    }
)
_SCHEDULES = MappingProxyType(
    {
        "WarmupLR": WarmupDecay.CONSTANT,
        "WarmupDecayLR": WarmupDecay.LINEAR,
        "WarmupCosineLR": WarmupDecay.COSINE,
    }
)
_SCHEDULE_OPTIONS = MappingProxyType(
    {
        "warmup_min_lr": "least",
        "warmup_min_ratio": "least",
        "warmup_max_lr": "most",
        "warmup_num_steps": "warmup_steps",
        "warmup_type": "rise",
        "total_num_steps": "total_steps",
        "cos_min_ratio": "cosine_floor",
    }
)


class _Translation:
    """A migration in the making: reads key after key, and collects settings."""

    def __init__(self, config: Mapping[str, Any], ranks: int) -> None:
        self._config = config
        self._ranks = ranks
        self.settings: dict[str, Any] = {}

    def read(self, key: str, value: Any) -> _Answer:
        """Note what a key asks for; return what becomes of it."""
        if value == "auto":
            return Fate.CALLER, "left to the caller; InfinityTrainer takes it from its arguments"
        if self._is_off(key):
            return Fate.NOT_NEEDED, "off"
        if key in _HANDLERS:
            return _HANDLERS[key](self, value)
        for pattern, words in _WORDS.items():
            if fnmatchcase(key, pattern):
                return words
        for pattern, words_ in _MISSING.items():
            if fnmatchcase(key, pattern):
                return (
                    (Fate.NOT_NEEDED, "off, as here") if value in _OFF else (Fate.MISSING, words_)
                )
        return Fate.MISSING, "not known to the engine"

    def _is_off(self, key: str) -> bool:
        """Tell whether a section around the key is switched off."""
        section: Any = self._config
        for name in key.split(".")[:-1]:
            section = section[name]
            if section.get("enabled") is False and not key.endswith(".enabled"):
                return True
        return False

    def _at(self, path: str) -> Any:
        """Return the value at a dotted path; None where there is none, or it is "auto"."""
        found: Any = self._config
        for name in path.split("."):
            found = found.get(name) if isinstance(found, Mapping) else None
        return None if found == "auto" else found

    # --- batches and precision --------------------------------------------------------------------

    def accumulation(self, value: Any) -> _Answer:
        return self._set("accumulation_steps", _whole("gradient_accumulation_steps", value))

    def train_batch_size(self, value: Any) -> _Answer:
        micro = self._at("train_micro_batch_size_per_gpu")
        if self._config.get("gradient_accumulation_steps") is not None or not micro:
            return _YOUR_BATCHES
        steps, rest = divmod(
            _whole("train_batch_size", value),
            _whole("train_micro_batch_size_per_gpu", micro) * self._ranks,
        )
        if rest or not steps:
            expected = f"a multiple of {micro} samples on each of {self._ranks} ranks"
            raise ConfigError(field="train_batch_size", value=value, expected=expected)
        return self._set("accumulation_steps", steps)

    def clipping(self, value: Any) -> _Answer:
        norm = _number("gradient_clipping", value)
        return self._set("max_grad_norm", norm) if norm else (Fate.NOT_NEEDED, "off")

    def bf16(self, value: Any) -> _Answer:
        return self._set("precision", "bf16") if value else (Fate.NOT_NEEDED, "off")

    def fp16(self, value: Any) -> _Answer:
        return self._set("precision", "fp16") if value else (Fate.NOT_NEEDED, "off")

    def autocast(self, value: Any) -> _Answer:
        if not value:
            return Fate.NOT_NEEDED, "off"
        dtype = str(self._at("torch_autocast.dtype") or "bfloat16")
        return self._set(
            "precision", "fp16_autocast" if "16" in dtype and "b" not in dtype else "bf16_autocast"
        )

    def loss_scale(self, value: Any) -> _Answer:
        if not value:
            return Fate.NOT_NEEDED, "the loss scale is dynamic here too"
        return Fate.MISSING, "a fixed loss scale: the engine's is dynamic, from 65536 on"

    # --- ZeRO -------------------------------------------------------------------------------------

    def stage(self, value: Any) -> _Answer:
        stages = ("optimizer", "optimizer", "gradients", "parameters")
        if value not in range(len(stages)):
            raise ConfigError(field="zero_optimization.stage", value=value, expected="0, 1, 2 or 3")
        self._ranks_setting("stage", stages[value])
        return Fate.SETTING, f'ranks={{"stage": "{stages[value]}"}}'

    def states_at(self, value: Any) -> _Answer:
        if value in _OFF:
            return Fate.NOT_NEEDED, "strategy auto keeps states on the device where they fit"
        if value == "cpu":
            ratio = self._at("zero_optimization.offload_optimizer.ratio")
            if ratio is not None and 0 <= ratio < 1:
                return self._set("strategy", {"name": "static_split", "ratio": 1 - ratio})
            return self._set("strategy", "host_only")
        if value != "nvme":
            field_ = "zero_optimization.offload_optimizer.device"
            raise ConfigError(field=field_, value=value, expected="none, cpu or nvme")
        return self._set("strategy", "nvme_streamed")

    def ratio(self, value: Any) -> _Answer:
        if self._at("zero_optimization.offload_optimizer.device") == "cpu":
            return Fate.SETTING, "the device's part in strategy static_split is 1 - ratio"
        return Fate.NOT_NEEDED, "only with device cpu"

    def legacy_states(self, value: Any) -> _Answer:
        return self.states_at("cpu") if value else (Fate.NOT_NEEDED, "off")

    def parameters_at(self, value: Any) -> _Answer:
        if value in _OFF:
            return Fate.NOT_NEEDED, "parameters stay on the device where they fit"
        if value not in ("cpu", "nvme"):
            field_ = "zero_optimization.offload_param.device"
            raise ConfigError(field=field_, value=value, expected="none, cpu or nvme")
        return self._set("parameters", "host" if value == "cpu" else "nvme")

    def legacy_parameters(self, value: Any) -> _Answer:
        return self.parameters_at("cpu") if value else (Fate.NOT_NEEDED, "off")

    def nvme_of_states(self, value: Any) -> _Answer:
        return self._nvme("offload_optimizer", value)

    def nvme_of_parameters(self, value: Any) -> _Answer:
        return self._nvme("offload_param", value)

    def _nvme(self, section: str, value: Any) -> _Answer:
        if self._at(f"zero_optimization.{section}.device") != "nvme" or value is None:
            return Fate.NOT_NEEDED, "only with device nvme"
        drives = self.settings.setdefault("budget", {}).setdefault("nvme", {})
        # DeepSpeed has no limit. Something is left for other programs.
        drives[value] = _PART_OF_DRIVE
        return Fate.SETTING, f'budget={{"nvme": {{"{value}": "{_PART_OF_DRIVE}"}}}}, or a size'

    def shard_ranks(self, value: Any) -> _Answer:
        if not isinstance(value, int) or value < 1:
            return Fate.NOT_NEEDED, "off"
        self._ranks_setting("shard_ranks", value)
        return Fate.SETTING, f'ranks={{"shard_ranks": {value}}}'

    def leaf_names(self, value: Any) -> _Answer:
        if not value:
            return Fate.NOT_NEEDED, "off"
        have = self.settings.get("ranks", {}).get("leaf_modules", ())
        self._ranks_setting("leaf_modules", [*have, *value])
        return Fate.SETTING, f'ranks={{"leaf_modules": {json.dumps(value)}}}'

    def leaf_classes(self, value: Any) -> _Answer:
        # The engine knows classes by their names alone.
        return self.leaf_names([str(name).rpartition(".")[2] for name in value or ()])

    def hpz(self, value: Any) -> _Answer:
        if value in (0, 1):
            return Fate.NOT_NEEDED, "off"
        return Fate.MISSING, (
            'parameters copied within a machine: ranks={"shard_ranks": ...} copies states too'
        )

    # --- optimizer and scheduler ------------------------------------------------------------------

    def optimizer_type(self, value: Any) -> _Answer:
        name = self._optimizer_name()
        if name is None:
            return Fate.MISSING, f"{value}: pass an optimizer that the engine has (optimizers.md)"
        return Fate.SETTING, f'optimizer={{"name": "{name}"}}'

    def optimizer_option(self, name: str, value: Any) -> _Answer:
        rule = self._optimizer_name()
        if name == "max_grad_norm":
            return self._set("max_grad_norm", value) if value else (Fate.NOT_NEEDED, "off")
        if rule is None:
            return Fate.YOURS, "the optimizer that you pass"
        if name in _OPTIONS[rule]:
            return Fate.SETTING, f"optimizer={{{json.dumps(name)}: {json.dumps(value)}}}"
        if name == "adam_w_mode" and rule in ("adam", "adamw"):
            return Fate.SETTING, f'chooses between Adam and AdamW: optimizer={{"name": "{rule}"}}'
        return _unset_option(name, value)

    def schedule_type(self, value: Any) -> _Answer:
        if value in _SCHEDULES:
            return Fate.SETTING, "Engine.schedulers: the engine steps it after each update"
        return Fate.MISSING, f"{value}: make one of torch.optim.lr_scheduler and step it"

    def schedule_option(self, name: str, value: Any) -> _Answer:
        if name == "last_batch_iteration":
            return Fate.NOT_NEEDED, "checkpoints keep where the schedule is"
        if self._at("scheduler.type") not in _SCHEDULES:
            return Fate.YOURS, "the scheduler that you make"
        if name in _SCHEDULE_OPTIONS:
            return Fate.SETTING, f"{json.dumps(value)} in Engine.schedulers"
        return Fate.MISSING, "no option of this scheduler"

    def optimizer(self) -> Mapping[str, Any] | None:
        """Return the specification of the optimizer, None where the file does not have it all."""
        params = self._config.get("optimizer", {}).get("params", {})
        name = self._optimizer_name()
        if name is None or "auto" in params.values():
            return None
        options = {key: params[key] for key in _OPTIONS[name] if key in params}
        # DeepSpeed's own default, where torch's AdamW has another one.
        return {"name": name, "weight_decay": 0.0, **options}

    def schedule(self) -> Warmup | None:
        """Return the schedule, None where the file does not have it all."""
        decay = _SCHEDULES.get(str(self._at("scheduler.type")))
        params = self._config.get("scheduler", {}).get("params", {})
        if decay is None or "auto" in params.values():
            return None
        options = {
            _SCHEDULE_OPTIONS[name]: value
            for name, value in params.items()
            if name in _SCHEDULE_OPTIONS
        }
        if "rise" in options:
            # As DeepSpeed: what is neither is logarithmic.
            options["rise"] = Rise.LINEAR if options["rise"] == "linear" else Rise.LOG
        if decay is WarmupDecay.LINEAR:
            options.setdefault("most", 0.001)  # DeepSpeed's default
        return Warmup(decay=decay, **options)

    def _optimizer_name(self) -> str | None:
        name = str(self._at("optimizer.type")).lower()
        if name == "adam":
            # DeepSpeed's Adam is AdamW unless `adam_w_mode` is false.
            return "adam" if self._at("optimizer.params.adam_w_mode") is False else "adamw"
        return _OPTIMIZERS.get(name)

    # --- the settings -----------------------------------------------------------------------------

    def _set(self, name: str, value: Any) -> _Answer:
        self.settings[name] = value
        return Fate.SETTING, f"{name}={json.dumps(value)}"

    def _ranks_setting(self, name: str, value: Any) -> None:
        self.settings.setdefault("ranks", {})[name] = value


def _unset_option(name: str, value: Any) -> _Answer:
    """Return the answer for an optimizer's option that no setting has."""
    if name in ("torch_adam", "fused", "foreach"):
        return Fate.NOT_NEEDED, "chooses an implementation; the engine has its own"
    if name == "fp32_optimizer_states" and value is not True:
        return (
            Fate.MISSING,
            "states are fp32 here, 4 bytes each for every parameter",
        )
    if name in ("fp32_optimizer_states", "bias_correction") and value is True:
        return Fate.NOT_NEEDED, "on, as here"
    return Fate.MISSING, "no option of this optimizer"


def _whole(name: str, value: Any) -> int:
    """Return a number that may be written as 8.0 or 8e0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
        raise ConfigError(field=name, value=value, expected="a whole number")
    return int(value)


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(field=name, value=value, expected="a number")
    return float(value)


def _option_of(
    kind: Callable[[_Translation, str, Any], _Answer], name: str
) -> Callable[[_Translation, Any], _Answer]:
    return lambda draft, value: kind(draft, name, value)


_PART_OF_DRIVE = "90%"
_YOUR_BATCHES = (Fate.YOURS, "the batch size of your data loader")
_ZERO = "zero_optimization"
_OPTIMIZER_KEYS = (
    "lr",
    "betas",
    "eps",
    "weight_decay",
    "amsgrad",
    "momentum",
    "dampening",
    "nesterov",
    "max_grad_norm",
    "adam_w_mode",
    "torch_adam",
    "fused",
    "foreach",
    "fp32_optimizer_states",
    "bias_correction",
)

_HANDLERS: Mapping[str, Callable[[_Translation, Any], _Answer]] = MappingProxyType(
    {
        "gradient_accumulation_steps": _Translation.accumulation,
        "train_batch_size": _Translation.train_batch_size,
        "gradient_clipping": _Translation.clipping,
        "bf16.enabled": _Translation.bf16,
        "bfloat16.enabled": _Translation.bf16,
        "fp16.enabled": _Translation.fp16,
        "fp16.loss_scale": _Translation.loss_scale,
        "torch_autocast.enabled": _Translation.autocast,
        f"{_ZERO}.stage": _Translation.stage,
        f"{_ZERO}.offload_optimizer.device": _Translation.states_at,
        f"{_ZERO}.offload_optimizer.nvme_path": _Translation.nvme_of_states,
        f"{_ZERO}.offload_optimizer.ratio": _Translation.ratio,
        f"{_ZERO}.offload_param.device": _Translation.parameters_at,
        f"{_ZERO}.offload_param.nvme_path": _Translation.nvme_of_parameters,
        f"{_ZERO}.cpu_offload": _Translation.legacy_states,
        f"{_ZERO}.cpu_offload_params": _Translation.legacy_parameters,
        f"{_ZERO}.cpu_offload_param": _Translation.legacy_parameters,
        f"{_ZERO}.mics_shard_size": _Translation.shard_ranks,
        f"{_ZERO}.zero_hpz_partition_size": _Translation.hpz,
        f"{_ZERO}.leaf_module.classes": _Translation.leaf_classes,
        f"{_ZERO}.leaf_module.names": _Translation.leaf_names,
        "optimizer.type": _Translation.optimizer_type,
        **{
            f"optimizer.params.{name}": _option_of(_Translation.optimizer_option, name)
            for name in _OPTIMIZER_KEYS
        },
        "scheduler.type": _Translation.schedule_type,
        **{
            f"scheduler.params.{name}": _option_of(_Translation.schedule_option, name)
            for name in (*_SCHEDULE_OPTIONS, "last_batch_iteration")
        },
    }
)
"""The keys whose values decide something, by their dotted paths."""

_LEFT_TO_CALLERS = MappingProxyType(
    {
        "gradient_accumulation_steps": "accumulation_steps",
        "gradient_clipping": "max_grad_norm",
        "bf16.enabled": "precision",
        "bfloat16.enabled": "precision",
        "fp16.enabled": "precision",
        "torch_autocast.enabled": "precision",
    }
)
"""Keys that programs fill in where the file says "auto", and the settings that they decide."""

_PLANNED = (Fate.NOT_NEEDED, "the planner sizes buffers within the budget")
_FETCHED = (Fate.NOT_NEEDED, "fetched ahead by the last step's trace, within budget.device")
_RANKS = (Fate.NOT_NEEDED, "how ranks reduce and gather; the bits are the same")
_FIGURES = (Fate.YOURS, "eng.report() and eng.timeline() have the figures: print or log them")
_OWN_SCALE = (
    Fate.NOT_NEEDED,
    "the loss scale begins at 65536, doubles after 2,000 steps, is 1 or more",
)
_RECOMPUTED = (
    Fate.YOURS,
    'activations={"recompute": "blocks"} or "auto"; or torch.utils.checkpoint, or the model\'s '
    "gradient_checkpointing_enable()",
)

_WORDS: Mapping[str, _Answer] = MappingProxyType(
    {
        "train_micro_batch_size_per_gpu": _YOUR_BATCHES,
        "dataloader_drop_last": (Fate.YOURS, "an argument of your data loader"),
        "steps_per_print": _FIGURES,
        "wall_clock_breakdown": _FIGURES,
        "memory_breakdown": _FIGURES,
        "dump_state": _FIGURES,
        "flops_profiler.*": _FIGURES,
        "comms_logger.*": _FIGURES,
        "tensorboard.*": _FIGURES,
        "wandb.*": _FIGURES,
        "csv_monitor.*": _FIGURES,
        "comet.*": _FIGURES,
        "fp16.initial_scale_power": _OWN_SCALE,
        "fp16.loss_scale_window": _OWN_SCALE,
        "fp16.hysteresis": _OWN_SCALE,
        "fp16.consecutive_hysteresis": _OWN_SCALE,
        "fp16.min_loss_scale": _OWN_SCALE,
        "torch_autocast.dtype": (Fate.SETTING, "which autocast precision is chosen"),
        "zero_allow_untested_optimizer": (Fate.NOT_NEEDED, "optimizers.md lists those that work"),
        "zero_force_ds_cpu_optimizer": (Fate.NOT_NEEDED, "the engine updates with its own kernels"),
        "aio.use_gds": (Fate.NOT_NEEDED, "bytes pass host memory, which the budget counts"),
        "aio.*": (Fate.NOT_NEEDED, "deepnvme asks the kernel; `deepnvme tune` measures the best"),
        "activation_checkpointing.cpu_checkpointing": (
            Fate.YOURS,
            'activations={"at": "host", "recompute": "blocks"} moves inputs of blocks, on a GPU',
        ),
        "activation_checkpointing.*": _RECOMPUTED,
        "checkpoint.*": (Fate.NOT_NEEDED, "a checkpoint loads on any number of ranks"),
        f"{_ZERO}.offload_optimizer.pin_memory": (Fate.NOT_NEEDED, "pinned within budget.host"),
        f"{_ZERO}.offload_param.pin_memory": (Fate.NOT_NEEDED, "pinned within budget.host"),
        f"{_ZERO}.offload_optimizer.*": _PLANNED,
        f"{_ZERO}.offload_param.*": _PLANNED,
        f"{_ZERO}.cpu_offload_use_pin_memory": (Fate.NOT_NEEDED, "pinned within budget.host"),
        f"{_ZERO}.sub_group_size": (
            Fate.NOT_NEEDED,
            "subgroup_numel has a default that fits small budgets; the bits are the same",
        ),
        f"{_ZERO}.stage3_gather_16bit_weights_on_model_save": (
            Fate.YOURS,
            "eng.export(path) writes weights for from_pretrained, in bounded memory",
        ),
        f"{_ZERO}.stage3_gather_fp16_weights_on_model_save": (
            Fate.YOURS,
            "eng.export(path) writes weights for from_pretrained, in bounded memory",
        ),
        f"{_ZERO}.stage3_*": _FETCHED,
        f"{_ZERO}.overlap_comm": _RANKS,
        f"{_ZERO}.contiguous_gradients": _RANKS,
        f"{_ZERO}.reduce_scatter": _RANKS,
        f"{_ZERO}.reduce_bucket_size": _RANKS,
        f"{_ZERO}.allgather_partitions": _RANKS,
        f"{_ZERO}.allgather_bucket_size": _RANKS,
        f"{_ZERO}.round_robin_gradients": _RANKS,
        f"{_ZERO}.use_multi_rank_bucket_allreduce": _RANKS,
        f"{_ZERO}.elastic_checkpoint": (
            Fate.NOT_NEEDED,
            "a checkpoint loads on any number of ranks",
        ),
        f"{_ZERO}.load_from_fp32_weights": (Fate.NOT_NEEDED, "checkpoints have the masters"),
        f"{_ZERO}.ignore_unused_parameters": (
            Fate.NOT_NEEDED,
            "a parameter without a gradient is not updated",
        ),
        f"{_ZERO}.memory_efficient_linear": (
            Fate.NOT_NEEDED,
            "modules save no copy of a parameter",
        ),
        "prescale_gradients": (Fate.NOT_NEEDED, "gradients are summed in fp32, then divided"),
        "gradient_predivide_factor": (
            Fate.NOT_NEEDED,
            "gradients are summed in fp32, then divided",
        ),
        "communication_data_type": (
            Fate.NOT_NEEDED,
            "gradients cross links in their own dtype and are summed in fp32",
        ),
        "data_types.grad_accum_dtype": (Fate.NOT_NEEDED, "micro-batches are summed in fp32"),
    }
)
"""The keys whose values decide nothing, by patterns; the first that fits counts."""

_MISSING: Mapping[str, str] = MappingProxyType(
    {
        "amp.*": "NVIDIA's apex: set fp16 or bf16",
        "sparse_gradients": "sparse gradients: use sparse=False in embeddings",
        "fp16.auto_cast": "inputs that are cast: give the model the dtype that it expects",
        "fp16.*": "16-bit masters: masters are fp32 here",
        "bf16.*": "16-bit masters or states: both are fp32 here",
        "torch_autocast.*": "operations chosen by name: torch.autocast's own lists are used",
        f"{_ZERO}.zero_quantized*": "quantized collectives",
        f"{_ZERO}.zeropp*": "quantized collectives",
        f"{_ZERO}.mics_hierarchical_params_gather": "gathers in two levels",
        f"{_ZERO}.*": "not known to the engine",
        "optimizer.params.*": "no option of this optimizer",
        "optimizer.*": "not known to the engine",
        "scheduler.params.*": "no option of this scheduler",
        "scheduler.*": "not known to the engine",
        "tensor_parallel.*": "tensor parallelism",
        "pipeline.*": "pipeline parallelism",
        "sequence_parallel_size": "sequence parallelism",
        "curriculum_learning.*": "curricula: let your data loader choose",
        "data_efficiency.*": "data sampling and routing: let your data loader choose",
        "elasticity.*": "elastic batch sizes; a checkpoint loads on any number of ranks",
        "autotuning.*": "tuning by trials: `infinity plan` predicts from measured rates",
        "compression_training.*": "pruning and quantization-aware training",
        "quantize_training.*": "quantization-aware training",
        "progressive_layer_drop.*": "layer drop",
        "eigenvalue.*": "eigenvalues",
        "sparse_attention.*": "sparse attention: the model's own attention runs",
        "hybrid_engine.*": "a separate engine for generation: eng.generate() runs in this one",
        "compile.*": "compiled modules, where parameters are fetched",
    }
)
"""The keys that have no equivalent where they are on, by patterns, and what they would do."""

_SECTIONS = (
    "optimizer.params",
    "scheduler.params",
    f"{_ZERO}.offload_optimizer",
    f"{_ZERO}.offload_param",
    f"{_ZERO}.leaf_module",
    "torch_autocast",
    "fp16",
    "bf16",
)
