"""The optimizers: options as in torch.optim, and the constants of an update kernel in one step.

Every constant is computed here, once per step, in double precision by formulas that give the same
bits on every machine (docs/decisions/0006-optimizer-kernels.md); the kernels round them to fp32 and
do the rest. Pure; imports no torch.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from typing import ClassVar

from infinity_engine.errors import ConfigError

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Constants",
    "Lion",
    "Rule",
    "RuleFlag",
    "RuleNumber",
    "power",
]


class RuleNumber(IntEnum):
    """The kernels' numbers of the rules."""

    ADAM = 0
    ADAM_AMSGRAD = 1
    LION = 2
    ADAGRAD = 3
    SGD = 4
    SGD_MOMENTUM = 5


class RuleFlag(IntFlag):
    """The kernels' flags: variations of a rule."""

    COUPLED_DECAY = 1
    DECOUPLED_DECAY = 2
    NESTEROV = 4
    FIRST_STEP = 8
    SPLIT_MASTER = 16
    STOCHASTIC_MOMENTS = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Constants:
    """The constants of a rule in one step for a kernel, named as in the native Segment."""

    rule: RuleNumber
    flags: RuleFlag
    gradient_factor: float = 1.0
    weight_decay: float = 0.0
    decay: float = 1.0
    step: float = 0.0
    keep1: float = 0.0
    take1: float = 0.0
    keep2: float = 0.0
    take2: float = 0.0
    root: float = 1.0
    eps: float = 0.0


def power(base: float, exponent: int) -> float:
    """Return `base` to the power of a whole number, with the same bits on every machine."""
    # By squaring and multiplying, from the lowest bit of the exponent on.
    # math.pow may differ between C libraries; multiplications do not.
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule(ABC):
    """An optimizer with its options, one for each parameter group. `float(lr)` must work."""

    state_names: ClassVar[tuple[str, ...]] = ()
    couples_decay: ClassVar[bool] = True
    lr: float = 1e-3
    weight_decay: float = 0.0
    maximize: bool = False

    def __post_init__(self) -> None:
        # The class is frozen; learning rates may come as tensors.
        object.__setattr__(self, "lr", float(self.lr))
        self._check("lr", self.lr, 0.0, math.inf)
        self._check("weight_decay", self.weight_decay, 0.0, math.inf)

    @property
    def states(self) -> tuple[str, ...]:
        """The states that these options need, under torch's names where torch has the rule."""
        return self.state_names

    @property
    def initial_state(self) -> float:
        """The value of every state before the first step."""
        return 0.0

    def constants(self, step: int, gradient_factor: float = 1.0) -> Constants:
        """Return the constants for the kernels; the first step is 1. The factor scales gradients.

        Raises:
            ConfigError: `step` is less than 1.
        """
        if step < 1:
            raise ConfigError(field="step", value=step, expected="1 for the first step, or more")
        # Multiplying by -f negates exactly, so kernels need no code of their own to maximise.
        return self._constants(step, -gradient_factor if self.maximize else gradient_factor)

    @abstractmethod
    def _constants(self, step: int, factor: float) -> Constants:
        """Return them; the factor is negative to maximise."""

    def _decay_flag(self) -> RuleFlag:
        if self.weight_decay == 0:
            return RuleFlag(0)
        return RuleFlag.COUPLED_DECAY if self.couples_decay else RuleFlag.DECOUPLED_DECAY

    def _check(self, name: str, value: float, low: float, end: float) -> None:
        """Refuse what is not a number from `low` on and below `end`."""
        # A NaN fails both comparisons.
        if not low <= value < end:
            bound = "a finite number" if end == math.inf else f"less than {end:g}"
            raise ConfigError(
                field=f"{type(self).__name__}.{name}",
                value=value,
                expected=f"at least {low:g}, {bound}",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Adam(Rule):
    """torch.optim.Adam: weight decay is added to the gradient."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    amsgrad: bool = False

    def __post_init__(self) -> None:
        Rule.__post_init__(self)
        object.__setattr__(self, "betas", (float(self.betas[0]), float(self.betas[1])))
        self._check("betas[0]", self.betas[0], 0.0, 1.0)
        self._check("betas[1]", self.betas[1], 0.0, 1.0)
        self._check("eps", self.eps, 0.0, math.inf)

    @property
    def states(self) -> tuple[str, ...]:
        """The moments, and their maximum with amsgrad."""
        return ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if self.amsgrad else ()))

    def _constants(self, step: int, factor: float) -> Constants:
        beta1, beta2 = self.betas
        # In double; a kernel gets it rounded to fp32 once.
        root = math.sqrt(1.0 - power(beta2, step))
        return Constants(
            rule=RuleNumber.ADAM_AMSGRAD if self.amsgrad else RuleNumber.ADAM,
            flags=self._decay_flag(),
            gradient_factor=factor,
            weight_decay=self.weight_decay,
            decay=1.0 - self.lr * self.weight_decay,
            # Negative: kernels only add.
            step=-(self.lr / (1.0 - power(beta1, step))),
            # In double: taken from an fp32 beta2, it would have lost digits.
            take1=1.0 - beta1,
            keep2=beta2,
            take2=1.0 - beta2,
            root=root,
            eps=self.eps,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamW(Adam):
    """torch.optim.AdamW: weight decay shrinks the parameter."""

    couples_decay: ClassVar[bool] = False
    weight_decay: float = 1e-2


@dataclass(frozen=True, kw_only=True, slots=True)
class Lion(Rule):
    """Lion: the sign of an interpolated momentum; weight decay shrinks the parameter."""

    state_names: ClassVar[tuple[str, ...]] = ("exp_avg",)
    couples_decay: ClassVar[bool] = False
    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.99)

    def __post_init__(self) -> None:
        Rule.__post_init__(self)
        object.__setattr__(self, "betas", (float(self.betas[0]), float(self.betas[1])))
        self._check("betas[0]", self.betas[0], 0.0, 1.0)
        self._check("betas[1]", self.betas[1], 0.0, 1.0)

    def _constants(self, step: int, factor: float) -> Constants:
        beta1, beta2 = self.betas
        return Constants(
            rule=RuleNumber.LION,
            flags=self._decay_flag(),
            gradient_factor=factor,
            decay=1.0 - self.lr * self.weight_decay,
            step=-self.lr,
            keep1=beta1,
            take1=1.0 - beta1,
            keep2=beta2,
            take2=1.0 - beta2,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Adagrad(Rule):
    """torch.optim.Adagrad."""

    state_names: ClassVar[tuple[str, ...]] = ("sum",)
    lr: float = 1e-2
    lr_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10

    def __post_init__(self) -> None:
        Rule.__post_init__(self)
        for name in ("lr_decay", "initial_accumulator_value", "eps"):
            self._check(name, getattr(self, name), 0.0, math.inf)

    @property
    def initial_state(self) -> float:
        """Where the sum of squares begins."""
        return self.initial_accumulator_value

    def _constants(self, step: int, factor: float) -> Constants:
        return Constants(
            rule=RuleNumber.ADAGRAD,
            flags=self._decay_flag(),
            gradient_factor=factor,
            weight_decay=self.weight_decay,
            step=-(self.lr / (1.0 + (step - 1) * self.lr_decay)),
            eps=self.eps,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SGD(Rule):
    """torch.optim.SGD."""

    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        Rule.__post_init__(self)
        self._check("momentum", self.momentum, 0.0, math.inf)
        # As torch refuses it.
        if self.nesterov and (self.momentum == 0 or self.dampening != 0):
            expected = "False, or a momentum above 0 and no dampening"
            raise ConfigError(field="SGD.nesterov", value=self.nesterov, expected=expected)

    @property
    def states(self) -> tuple[str, ...]:
        """The momentum, where there is one."""
        return ("momentum_buffer",) if self.momentum != 0 else ()

    def _constants(self, step: int, factor: float) -> Constants:
        # At the first step the momentum is the gradient itself, without dampening.
        first = RuleFlag.FIRST_STEP if step == 1 else RuleFlag(0)
        nesterov = RuleFlag.NESTEROV if self.nesterov else RuleFlag(0)
        return Constants(
            rule=RuleNumber.SGD_MOMENTUM if self.momentum != 0 else RuleNumber.SGD,
            flags=self._decay_flag() | first | nesterov,
            gradient_factor=factor,
            weight_decay=self.weight_decay,
            step=-self.lr,
            keep1=self.momentum,
            take1=1.0 - self.dampening,
        )
