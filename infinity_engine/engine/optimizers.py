"""Optimizers that are asked for by a specification: a rule, its name, or a mapping of its options.

Makes the torch optimizer that schedulers and the engine read. Lion is the one that torch does not
have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any

import torch

from infinity_engine.errors import ConfigError
from infinity_engine.optim import SGD, Adagrad, Adam, AdamW, Lion, Rule
from infinity_engine.plan.mappings import known_mapping

__all__ = ["OPTIMIZERS_BY_NAME", "LionOptimizer", "optimizer_of"]

_LION = Lion()  # its defaults are those of the rule


class LionOptimizer(torch.optim.Optimizer):
    """Steps by the sign of an interpolated momentum (Chen et al., 2023), with weight decay."""

    def __init__(
        self,
        params: Any,
        *,
        lr: float = _LION.lr,
        betas: tuple[float, float] = _LION.betas,
        weight_decay: float = 0.0,
        maximize: bool = False,
    ) -> None:
        Lion(lr=lr, betas=betas, weight_decay=weight_decay, maximize=maximize)  # checks them
        super().__init__(
            params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        )

    @torch.no_grad()
    # torch's is overloaded
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the parameters that have gradients.

        In an engine none has: its own kernels update.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                gradient = -parameter.grad if group["maximize"] else parameter.grad
                momentum = self.state[parameter].setdefault("exp_avg", torch.zeros_like(parameter))
                # Decoupled: decay shrinks the parameter and is no part of the gradient.
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(
                    torch.sign(momentum.mul(beta1).add_(gradient, alpha=1 - beta1)),
                    alpha=-group["lr"],
                )
                # After the step, which uses the momentum of before.
                momentum.mul_(beta2).add_(gradient, alpha=1 - beta2)
        return loss


_MADE_BY: Mapping[type[Rule], Callable[..., torch.optim.Optimizer]] = MappingProxyType(
    {
        Adam: torch.optim.Adam,
        AdamW: torch.optim.AdamW,
        Adagrad: torch.optim.Adagrad,
        SGD: torch.optim.SGD,
        Lion: LionOptimizer,
    }
)
_BY_NAME: Mapping[str, type[Rule]] = MappingProxyType(
    {rule.__name__.lower(): rule for rule in _MADE_BY}
)
OPTIMIZERS_BY_NAME = MappingProxyType({name: _MADE_BY[rule] for name, rule in _BY_NAME.items()})


def optimizer_of(model: torch.nn.Module, given: object) -> torch.optim.Optimizer:
    """Return the optimizer itself where one is given, else one made of what is asked for.

    A specification is a Rule, a name such as "adamw", or a mapping of a name and options: {"name":
    "lion", "lr": 1e-4}. It is for all parameters of the model that require a gradient. A frozen
    model needs none: None gives an optimizer of nothing.

    Raises:
        ConfigError: it is none of these, or an option is unknown or cannot be.
    """
    if isinstance(given, torch.optim.Optimizer):
        return given
    if given is None and not any(parameter.requires_grad for parameter in model.parameters()):
        # It updates nothing; torch makes none without a group.
        return torch.optim.SGD([{"params": []}])
    rule = _rule(given)
    # The fields of a rule are the options of torch's optimizer of that name.
    options = {item.name: getattr(rule, item.name) for item in fields(rule)}
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise ConfigError(
            field="optimizer",
            value="no parameter that requires a gradient",
            expected="at least one",
        )
    return _MADE_BY[type(rule)](parameters, **options)


def _rule(given: object) -> Rule:
    if isinstance(given, Rule):
        return given
    if not isinstance(given, str | Mapping):
        expected = (
            "a torch optimizer, a rule of infinity_engine.optim such as AdamW(lr=1e-3), its name, "
            f"or a mapping of its name and options; the rules are {', '.join(_BY_NAME)}. A model "
            "that only runs needs none: freeze it with model.requires_grad_(False)"
        )
        raise ConfigError(field="optimizer", value=given, expected=expected)
    name = given if isinstance(given, str) else given.get("name")
    kind = _BY_NAME.get(str(name))
    if kind is None:
        raise ConfigError.unknown_name(field="optimizer", name=name, known=_BY_NAME)
    names = ["name", *(item.name for item in fields(kind))]
    known = known_mapping({} if isinstance(given, str) else given, field="optimizer", known=names)
    options: dict[str, Any] = {key: value for key, value in known.items() if key != "name"}
    return kind(**options)
