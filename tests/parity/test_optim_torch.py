"""The update rules against torch.optim on the same gradients, step for step.

The rules are written in the order of operations of torch's CPU kernels. What differs is the square
root: that of torch's builds with MKL is wrong by one in the last place for one value in six, ours
is IEEE's. So there are two tests for each optimizer and option:

- torch as it is, within the tolerance: 1,000 steps of one rounding (2**-24 of a tensor's largest
  value).
- torch with its square root replaced by numpy's, which is IEEE's: the same bits. Asserted for the
  torch and the CPU that the order of operations was found on (2.13, AVX2); another build may
  contract other operations.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from infinity_engine.optim import (
    AdamW,
    FloatFormat,
    Formats,
    HostKernels,
    Lion,
    Moments,
    Rule,
    rules_of,
)
from support.optim import Model, bits_of, threads

torch = pytest.importorskip("torch")

STEPS = 1000
NUMEL = 640
ROUNDING = 2.0**-24
OPTIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("Adam", {}),
    ("Adam", {"weight_decay": 0.1}),
    ("Adam", {"amsgrad": True, "betas": (0.8, 0.95), "eps": 1e-6}),
    ("Adam", {"maximize": True, "weight_decay": 0.01}),
    ("Adam", {"betas": (0.4, 0.999)}),
    ("Adam", {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    ("AdamW", {}),
    ("AdamW", {"weight_decay": 0.5, "amsgrad": True, "maximize": True}),
    ("AdamW", {"lr": 0.1, "betas": (0.0, 0.5), "weight_decay": 0.0}),
    ("Adagrad", {}),
    (
        "Adagrad",
        {"lr_decay": 0.01, "weight_decay": 0.1, "initial_accumulator_value": 0.5, "eps": 1e-6},
    ),
    ("Adagrad", {"maximize": True}),
    ("SGD", {"lr": 1e-3}),
    ("SGD", {"lr": 1e-3, "weight_decay": 0.1, "maximize": True}),
    ("SGD", {"lr": 1e-3, "momentum": 0.9}),
    ("SGD", {"lr": 1e-3, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.01}),
    ("SGD", {"lr": 1e-3, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
)


def torchs_bits_are_ours() -> bool:
    """Whether this is the torch and the kind of CPU that the order of operations was found on."""
    capability = torch.backends.cpu.get_cpu_capability()
    return bool(torch.__version__.startswith("2.13.") and capability == "AVX2")


@cache
def gradients() -> Any:
    """Return STEPS gradients whose sizes span six orders of magnitude."""
    random = torch.Generator().manual_seed(0)
    return torch.randn(STEPS, NUMEL, generator=random) * 10.0 ** torch.linspace(-4, 2, NUMEL)


def start() -> Any:
    """Return the values of the parameter before the first step."""
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(7))


@cache
def trained(rule: Rule) -> Model:
    """Return what our rule made of the parameter, which is the same whichever torch it is compared
    with.
    """
    ours = Model(rule, start().numpy())
    kernels = HostKernels(threads(1))
    for gradient in gradients().numpy():
        ours.step(kernels, gradient, FloatFormat.FP32)
    return ours


def train(name: str, options: dict[str, Any], foreach: bool) -> list[tuple[Any, Any]]:
    """Return what torch and our rule made of the same parameter: pairs of theirs and ours, states
    first.
    """
    parameter = torch.nn.Parameter(start())
    optimizer = getattr(torch.optim, name)([parameter], foreach=foreach, **options)
    [rule] = rules_of(optimizer)
    for gradient in gradients():
        parameter.grad = gradient.clone()
        optimizer.step()
    theirs = [optimizer.state[parameter][state].numpy() for state in rule.states] + [
        parameter.detach().numpy()
    ]
    ours = trained(rule)
    return list(zip(theirs, [*ours.states, ours.master], strict=True))


def assert_close(expected: Any, found: Any) -> None:
    np.testing.assert_allclose(
        found, expected, rtol=0, atol=STEPS * ROUNDING * float(np.abs(expected).max())
    )


def ieee_sqrt(tensor: Any) -> Any:
    """Return the correctly rounded square root."""
    return torch.from_numpy(np.sqrt(tensor.detach().numpy()))


both_ways = pytest.mark.parametrize("foreach", [False, True], ids=["single", "foreach"])
every_option = pytest.mark.parametrize(("name", "options"), OPTIONS, ids=str)


@both_ways
@every_option
def test_a_thousand_steps_are_close_to_those_of_torch(
    name: str, options: dict[str, Any], foreach: bool
) -> None:
    for theirs, ours in train(name, options, foreach):
        assert_close(theirs, ours)


@pytest.mark.skipif(
    not torchs_bits_are_ours(), reason="another torch or CPU: only the tolerance is promised"
)
@both_ways
@every_option
def test_with_an_ieee_square_root_a_thousand_steps_have_torchs_bits(
    name: str, options: dict[str, Any], foreach: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.Tensor, "sqrt", ieee_sqrt)
    monkeypatch.setattr(torch, "_foreach_sqrt", lambda tensors: list(map(ieee_sqrt, tensors)))

    for theirs, ours in train(name, options, foreach):
        assert (bits_of(ours) == bits_of(theirs)).all()


def lion(parameter: Any, momentum: Any, gradient: Any, rule: Any) -> None:
    """Take a step of Lion in torch's operations, as its authors publish it."""
    beta1, beta2 = rule.betas
    parameter.mul_(1 - rule.lr * rule.weight_decay)
    update = momentum.clone().mul_(beta1).add(gradient, alpha=1 - beta1).sign_()
    parameter.add_(update, alpha=-rule.lr)
    momentum.mul_(beta2).add_(gradient, alpha=1 - beta2)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_a_thousand_steps_of_lion_are_those_of_its_definition(decay: float) -> None:
    rule = Lion(weight_decay=decay)
    parameter, momentum = (
        torch.randn(NUMEL, generator=torch.Generator().manual_seed(7)),
        torch.zeros(NUMEL),
    )
    ours = Model(rule, parameter.numpy().copy())
    kernels = HostKernels(threads(1))

    for gradient in gradients():
        lion(parameter, momentum, gradient, rule)
        ours.step(kernels, gradient.numpy(), FloatFormat.FP32)

    for found, expected in ((ours.states[0], momentum.numpy()), (ours.master, parameter.numpy())):
        if torchs_bits_are_ours():
            assert (bits_of(found) == bits_of(expected)).all()
        assert_close(expected, found)


def test_a_learning_rate_may_be_a_tensor_and_groups_have_their_own_options() -> None:
    parameters = [torch.nn.Parameter(torch.ones(4)) for _ in range(2)]
    groups = [
        {"params": parameters[:1]},
        {"params": parameters[1:], "lr": 0.5, "betas": (0.5, 0.6)},
    ]
    optimizer = torch.optim.AdamW(groups, lr=torch.tensor(0.25), foreach=False)

    first, second = rules_of(optimizer)

    assert (first.lr, second.lr) == (0.25, 0.5)
    assert isinstance(first, AdamW)
    assert isinstance(second, AdamW)
    assert (first.betas, second.betas) == ((0.9, 0.999), (0.5, 0.6))


def test_unscaling_and_clipping_are_those_of_torch() -> None:
    gradient = torch.randn(NUMEL, generator=torch.Generator().manual_seed(1))
    parameter = torch.nn.Parameter(torch.zeros(NUMEL))
    parameter.grad = gradient / 1024
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    clip = torch.nn.utils.clip_grad_norm_([parameter], 1.0)
    optimizer.step()
    ours = Model(rules_of(optimizer)[0], np.zeros(NUMEL, np.float32))

    ours.step(
        HostKernels(threads(1)),
        gradient.numpy(),
        FloatFormat.FP32,
        factor=1.0 / 1024 * min(1.0, 1 / (clip + 1e-6)),
    )

    np.testing.assert_allclose(ours.master, parameter.detach().numpy(), rtol=4 * ROUNDING)


def test_torch_flushing_subnormals_changes_nothing() -> None:
    start = np.full(64, 1e-39, np.float32)
    models = [
        Model(rules_of(torch.optim.SGD([torch.zeros(1)], lr=1.0))[0], start.copy())
        for _ in range(2)
    ]
    gradient = np.full(64, 3e-40, np.float32)
    models[0].step(HostKernels(threads(1)), gradient, FloatFormat.FP32)

    was_possible = torch.set_flush_denormal(True)
    try:
        models[1].step(HostKernels(threads(1)), gradient, FloatFormat.FP32)
    finally:
        torch.set_flush_denormal(False)

    assert was_possible
    assert (bits_of(models[1].master) == bits_of(models[0].master)).all()
    assert bits_of(models[0].master)[0] not in (0, bits_of(start)[0])


@pytest.mark.parametrize("moments", [Moments.BF16, Moments.BF16_STOCHASTIC])
def test_with_bf16_moments_a_quadratic_is_still_minimised(moments: Moments) -> None:
    target = np.linspace(-1, 1, NUMEL, dtype=np.float32)
    rule = rules_of(torch.optim.Adam([torch.zeros(1)], lr=0.01))[0]
    model = Model(rule, np.zeros(NUMEL, np.float32), Formats(moments=moments))
    kernels = HostKernels(threads(1))

    for _ in range(STEPS):
        model.step(kernels, model.master - target, FloatFormat.FP32)

    assert float(np.abs(model.master - target).max()) < 0.02


def test_a_subclass_of_a_torch_optimizer_is_refused() -> None:
    mine = type("Mine", (torch.optim.AdamW,), {})
    with pytest.raises(ValueError, match="no subclasses"):
        rules_of(mine([torch.zeros(1)]))
    with pytest.raises(ValueError, match="differentiable"):
        rules_of(torch.optim.Adam([torch.zeros(1)], differentiable=True))
