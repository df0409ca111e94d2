"""With fp16, no update is ever made from gradients that are not finite, whatever the loss scale has
come to.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import infinity_engine
from infinity_engine.engine.engine import Engine


@contextmanager
def fp16_engine_at_scale_one(precision: str = "fp16") -> Iterator[Engine]:
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    budget = {"host": "64MiB"}
    with infinity_engine.initialize(
        model, optimizer, accelerator="cpu", precision=precision, budget=budget
    ) as made:
        scale = 2.0
        while scale > 1:
            backward(made, infinite=True)
            result = made.step()
            assert result.outcome is infinity_engine.Outcome.SKIPPED
            scale = result.loss_scale
        yield made


def loss_of(made: Engine, *, infinite: bool) -> torch.Tensor:
    output = made(torch.ones(4, 8, dtype=torch.float16)).float()
    loss = output.pow(2).mean()
    # The loss is finite and its gradient is not: the derivative of a square root at zero.
    return torch.as_tensor(loss + (output * 0).sum().pow(2).sqrt() if infinite else loss)


def backward(made: Engine, *, infinite: bool) -> None:
    made.backward(loss_of(made, infinite=infinite))


@pytest.mark.parametrize("precision", ["fp16", "fp16_autocast"])
def test_gradients_that_are_not_finite_at_scale_one_raise(precision: str) -> None:
    with fp16_engine_at_scale_one(precision) as made:
        before = [parameter.detach().clone() for parameter in made.model.parameters()]
        backward(made, infinite=True)

        for _ in range(2):
            with pytest.raises(FloatingPointError, match="the loss scale is 1 already"):
                made.step()

        assert all(torch.equal(*pair) for pair in zip(made.model.parameters(), before, strict=True))
        assert made.steps == 0


def test_training_continues_after_gradients_that_are_not_finite() -> None:
    with fp16_engine_at_scale_one() as made:
        backward(made, infinite=True)
        with pytest.raises(FloatingPointError):
            made.step()

        made.zero_grad()
        backward(made, infinite=False)

        assert made.step().outcome is infinity_engine.Outcome.UPDATED
        assert all(parameter.isfinite().all() for parameter in made.model.parameters())


def test_backward_past_the_engine_is_refused_at_every_loss_scale() -> None:
    with (
        fp16_engine_at_scale_one() as made,
        pytest.raises(RuntimeError, match=r"Call engine\.backward\(loss\)"),
    ):
        loss_of(made, infinite=False).backward()  # type: ignore[no-untyped-call]  # torch is
