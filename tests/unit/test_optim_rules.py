"""The optimizers' options: what is refused, and the constants that the kernels get."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity_engine.errors import ConfigError
from infinity_engine.optim import SGD, Adagrad, Adam, AdamW, Lion, Rule, rules_of
from infinity_engine.optim.rules import RuleFlag, RuleNumber, power


@given(base=st.floats(0, 1, exclude_max=True), exponent=st.integers(0, 5000))
def test_power_is_the_power_within_a_few_roundings(base: float, exponent: int) -> None:
    assert power(base, exponent) == pytest.approx(base**exponent, rel=1e-12, abs=1e-300)


def test_power_multiplies_in_the_pinned_order() -> None:
    square = 0.999 * 0.999

    assert power(0.999, 1) == 0.999
    assert power(0.999, 7) == (0.999 * square) * (square * square)


def test_adam_gets_its_bias_corrections_in_double() -> None:
    constants = Adam(lr=0.1, betas=(0.9, 0.999)).constants(2, 0.5)

    assert constants.step == -(0.1 / (1 - 0.9 * 0.9))
    assert constants.root == math.sqrt(1 - 0.999 * 0.999)
    assert (constants.rule, constants.flags, constants.gradient_factor) == (
        RuleNumber.ADAM,
        RuleFlag(0),
        0.5,
    )


@pytest.mark.parametrize(
    ("rule", "flag"),
    [
        (Adam(weight_decay=0.1), RuleFlag.COUPLED_DECAY),
        (AdamW(weight_decay=0.1), RuleFlag.DECOUPLED_DECAY),
        (AdamW(weight_decay=0.0), RuleFlag(0)),
        (Lion(weight_decay=0.1), RuleFlag.DECOUPLED_DECAY),
        (Adagrad(weight_decay=0.1), RuleFlag.COUPLED_DECAY),
        (SGD(weight_decay=0.1), RuleFlag.COUPLED_DECAY),
        (SGD(momentum=0.9, nesterov=True), RuleFlag.NESTEROV),
    ],
)
def test_a_rule_sets_the_flags_of_its_options(rule: Rule, flag: RuleFlag) -> None:
    assert rule.constants(2).flags == flag


def test_the_momentum_of_sgd_begins_with_the_first_step() -> None:
    rule = SGD(momentum=0.9)

    assert rule.constants(1).flags == RuleFlag.FIRST_STEP
    assert rule.constants(2).flags == RuleFlag(0)


def test_maximising_negates_the_factor() -> None:
    assert Adam(maximize=True).constants(1, 0.25).gradient_factor == -0.25


def test_the_rate_of_adagrad_decays_with_the_steps() -> None:
    assert Adagrad(lr=0.1, lr_decay=0.5).constants(3).step == -(0.1 / 2.0)


@pytest.mark.parametrize(
    ("rule", "states"),
    [
        (Adam(), ("exp_avg", "exp_avg_sq")),
        (AdamW(amsgrad=True), ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")),
        (Lion(), ("exp_avg",)),
        (Adagrad(), ("sum",)),
        (SGD(), ()),
        (SGD(momentum=0.1), ("momentum_buffer",)),
    ],
)
def test_a_rule_names_the_states_it_needs(rule: Rule, states: tuple[str, ...]) -> None:
    assert rule.states == states


def test_a_step_before_the_first_is_refused() -> None:
    with pytest.raises(ConfigError, match="1 for the first step"):
        Adam().constants(0)


@pytest.mark.parametrize(
    ("rule", "options"),
    [
        (Adam, {"lr": -1.0}),
        (Adam, {"lr": math.nan}),
        (Adam, {"betas": (1.0, 0.9)}),
        (AdamW, {"betas": (0.9, -0.1)}),
        (Adam, {"eps": -1e-8}),
        (Lion, {"betas": (0.9, 1.0)}),
        (Lion, {"weight_decay": -0.1}),
        (Adagrad, {"lr_decay": -0.1}),
        (Adagrad, {"initial_accumulator_value": -1.0}),
        (SGD, {"momentum": -0.9}),
        (SGD, {"nesterov": True}),
        (SGD, {"nesterov": True, "momentum": 0.9, "dampening": 0.1}),
    ],
)
def test_an_option_that_cannot_be_right_is_refused(
    rule: type[Rule], options: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=rule.__name__):
        rule(**options)


def test_an_optimizer_that_is_no_rule_is_refused() -> None:
    with pytest.raises(ConfigError, match="SimpleNamespace"):
        rules_of(SimpleNamespace(param_groups=[]))


def test_a_lion_of_any_origin_is_read() -> None:
    group = {"lr": 0.1, "betas": (0.8, 0.9), "weight_decay": 0.5}
    optimizer = type("Lion", (), {"param_groups": [group, group | {"lr": 0.2}]})()

    first = Lion(lr=0.1, betas=(0.8, 0.9), weight_decay=0.5)
    assert rules_of(optimizer) == (first, replace(first, lr=0.2))
