"""`TrainingSettings`: what to train on what, and how long; checked when made.

What concerns the engine (budgets, strategy, precision) are the engine's own settings, which are
given beside these. Never imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from enum import Enum
from pathlib import Path
from typing import Any

from infinity_engine.config import EngineConfig, Recording
from infinity_engine.errors import ConfigError

__all__ = [
    "EXPORT_DTYPES",
    "FROZEN",
    "OPTIMIZERS",
    "SGD_MOMENTUM",
    "Decay",
    "Framing",
    "TrainingSettings",
    "check_engine",
]

OPTIMIZERS = ("adamw", "adam", "lion", "adagrad", "sgd")
SGD_MOMENTUM = 0.9
EXPORT_DTYPES = ("float32", "bfloat16", "float16")
FROZEN = ("save", "leave_out")  # as `Engine.save` has them
_MOST = 10**12
# They decide no bit of the weights, so a run that is resumed may have others. Of the data, the
# content decides, and not where it lies.
_FREE = frozenset(
    {"model", "data", "run", "save_every", "keep", "frozen", "resume", "export_dtype"}
)


class Framing(Enum):
    """How documents become sequences."""

    AUTO = "auto"  # Packed where all tokens are trained on, padded where there are prompts.
    PACK = "pack"  # One after another without a gap, cut at the length of a sequence.
    PAD = "pad"  # Each begins a sequence; shorter ones are padded to the longest of a micro-batch.


class Decay(Enum):
    """How the learning rate goes on after the warm-up."""

    COSINE = "cosine"  # Half a cosine, down to nothing at the last step.
    LINEAR = "linear"  # A straight line to nothing.
    CONSTANT = "constant"  # As it is.


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingSettings:
    """One training: `model` is a directory, `data` are files, `run` the directory of its results.

    `steps` goes before `epochs`. `warmup` is a number of steps or, below 1, a part of all steps.
    `lora` is the rank of adapters; None: all is trained. `save_every` and `frozen` are those of
    `autosave`.
    """

    model: Path
    data: tuple[Path, ...]
    run: Path
    sequence: int
    batch: int = 1
    accumulation_steps: int = 1
    epochs: float = 1.0
    steps: int | None = None
    framing: Framing = Framing.AUTO
    optimizer: str = "adamw"
    lr: float = 2e-5
    weight_decay: float = 0.0
    warmup: float = 0.03
    decay: Decay = Decay.COSINE
    seed: int = 0
    lora: int | None = None
    checkpointing: bool = True
    chunk_loss: bool = False
    save_every: int | str = "30min"
    keep: int = 2
    frozen: str = "save"
    resume: bool = False
    export_dtype: str | None = None

    def __post_init__(self) -> None:
        # One token has none before it that would predict it.
        self._check("sequence", "2 tokens or more", lambda value: _is_count(value) and value > 1)
        for name in ("batch", "accumulation_steps", "keep"):
            self._check(name, "a whole number, 1 or more", _is_count)
        for name in ("steps", "lora"):
            self._check(
                name, "a whole number, 1 or more", lambda value: value is None or _is_count(value)
            )
        for name in ("epochs", "lr"):
            self._check(name, "a number above 0", lambda value: _is_number(value) and value > 0)
        self._check("weight_decay", "a number, 0 or more", _is_number)
        self._check(
            "warmup",
            "a number of steps, or a part of all steps below 1",
            lambda value: _is_number(value) and (value < 1 or value == int(value)),
        )
        self._check("seed", "a whole number, 0 or more", lambda value: 0 <= value <= _MOST)
        self._check("data", "one file of text or JSON lines at least", bool)
        self._check_name("optimizer", OPTIMIZERS)
        self._check_name("frozen", FROZEN)
        if self.export_dtype is not None:
            self._check_name("export_dtype", EXPORT_DTYPES)
        for name, kind in (("framing", Framing), ("decay", Decay)):
            value = getattr(self, name)
            if not isinstance(value, kind):
                known = [str(member.value) for member in kind]
                raise ConfigError.unknown_name(field=name, name=value, known=known)

    def warmup_steps(self, steps: int) -> int:
        """Return in how many of all steps the learning rate rises."""
        return math.ceil(self.warmup * steps) if self.warmup < 1 else int(self.warmup)

    def deciding(self) -> dict[str, object]:
        """Return the settings that decide the bits of a run, ready for JSON."""
        return {
            item.name: _plain(getattr(self, item.name))
            for item in fields(self)
            if item.name not in _FREE
        }

    def _check(self, name: str, expected: str, is_right: Callable[[Any], bool]) -> None:
        value = getattr(self, name)
        if not is_right(value):
            raise ConfigError(field=name, value=value, expected=expected)

    def _check_name(self, field: str, known: tuple[str, ...]) -> None:
        if getattr(self, field) not in known:
            raise ConfigError.unknown_name(field=field, name=getattr(self, field), known=known)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= _MOST


def _is_number(value: float) -> bool:
    return math.isfinite(value) and value >= 0


def _plain(value: object) -> object:
    return value.value if isinstance(value, Enum) else value


def check_engine(settings: Mapping[str, Any], accumulation_steps: int) -> EngineConfig:
    """Return the engine's settings of a run with so many micro-batches in a step.

    Raises:
        ConfigError: a setting is wrong, differs from the run's, or lets no step be reported.
    """
    config = EngineConfig.from_mapping({"accumulation_steps": accumulation_steps, **settings})
    if config.accumulation_steps != accumulation_steps:
        raise ConfigError(
            field="accumulation_steps",
            value=config.accumulation_steps,
            expected=f"{accumulation_steps}, or nothing: that is what the training's settings say",
        )
    if config.telemetry.recording is Recording.OFF:
        expected = f'"{Recording.TIMELINE.value}", as each step of a run is reported'
        raise ConfigError(field="telemetry.recording", value=Recording.OFF.value, expected=expected)
    return config
