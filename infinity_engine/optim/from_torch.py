"""Reads the options of a torch optimizer: one Rule for each of its parameter groups.

Looks at names and numbers only, changes nothing and imports no torch. Refuses options that no rule
computes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from infinity_engine.errors import ConfigError
from infinity_engine.optim.rules import SGD, Adagrad, Adam, AdamW, Lion, Rule

__all__ = ["check_rules", "missing_states", "rules_of"]

_KNOWN = "torch's Adam, AdamW, Adagrad and SGD themselves, no subclasses of them, or a Lion"
_OPTIONS = (
    (Adam, ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize")),
    (AdamW, ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize")),
    (Adagrad, ("lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps", "maximize")),
    (SGD, ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize")),
    (Lion, ("lr", "betas", "weight_decay", "maximize")),
)


def rules_of(optimizer: Any, groups: Iterable[Mapping[str, Any]] | None = None) -> tuple[Rule, ...]:
    """Return the rule of each parameter group of a torch optimizer, with the group's values now.

    With `groups`, those that it would have with the options of these.

    Raises:
        ConfigError: no rule computes the optimizer, or one of its options.
    """
    groups = optimizer.param_groups if groups is None else groups
    cls = type(optimizer)
    # The engine's LionOptimizer cannot be called Lion, as its rule is; an outside Lion may be.
    name = cls.__name__.removesuffix("Optimizer")
    for rule, options in _OPTIONS:
        if name == rule.__name__ and (rule is Lion or cls.__module__.startswith("torch.optim.")):
            return tuple(_rule(rule, options, group) for group in groups)
    raise ConfigError(
        field="optimizer", value=f"{cls.__module__}.{cls.__qualname__}", expected=_KNOWN
    )


def check_rules(rules: Sequence[Rule], *, states: Collection[str], groups: int) -> None:
    """Refuse rules of fewer groups than these, or that need other states.

    Raises:
        ConfigError: that is so.
    """
    if len(rules) < groups:
        raise ConfigError(
            field="groups of the optimizer",
            value=len(rules),
            expected=f"{groups}, as when the engine was initialized. Nothing has changed: put the "
            "others back, or close the engine and initialize another one",
        )
    for number, rule in enumerate(rules):
        missing = missing_states(rule, states)
        if missing:
            raise ConfigError(
                field=f"options of group {number} of the optimizer",
                value=f"ones that need the states {', '.join(missing)}",
                expected=f"ones for the states that the engine has ({', '.join(states) or 'none'})"
                ". Nothing has changed: set the options back, or close the engine and initialize "
                "another one",
            )


def missing_states(rule: Rule, states: Collection[str]) -> tuple[str, ...]:
    """Return which states a rule needs beside these."""
    return tuple(name for name in rule.states if name not in states)


def _rule(rule: type[Rule], options: tuple[str, ...], group: Mapping[str, Any]) -> Rule:
    # Options that are not read (foreach, fused, capturable) change no result. This one does.
    if group.get("differentiable"):
        raise ConfigError(
            field="differentiable",
            value=True,
            expected="False: the engine's updates are not part of an autograd graph",
        )
    # Newer versions of torch make AdamW of Adam with this option.
    if rule is Adam and group.get("decoupled_weight_decay"):
        rule = AdamW
    return rule(**{name: _plain(group[name]) for name in options if name in group})


def _plain(value: Any) -> Any:
    """Turn tensors into the numbers they hold."""
    if isinstance(value, (tuple, list)):
        return tuple(_plain(item) for item in value)
    # bool before float: a flag stays a flag. float() of a tensor reads its one element.
    return value if isinstance(value, bool) else float(value)
