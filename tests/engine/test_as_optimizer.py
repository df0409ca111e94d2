"""An engine as a torch optimizer: loops and libraries that call `optimizer.step()` step it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import infinity_engine
from infinity_engine.engine.engine import Engine
from infinity_engine.errors import ConfigError
from support.engine_bits import Bits, bits_of, differing

pytestmark = pytest.mark.usefixtures("deterministic")

STEPS = 3


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


@contextmanager
def engine_of(model: nn.Module, **settings: Any) -> Iterator[Engine]:
    given: dict[str, Any] = {"accelerator": "cpu", "calibration": "off", **settings}
    with infinity_engine.initialize(
        model, adamw(model), budget={"host": "64MiB"}, **given
    ) as engine:
        yield engine


def loss_of(model: Any, step: int) -> torch.Tensor:
    batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
    loss: torch.Tensor = model(batch).pow(2).mean()
    return loss


def test_a_stock_loop_gives_the_bits_of_the_engines_own_loop() -> None:
    with engine_of(model_of()) as engine:
        for step in range(STEPS):
            engine.backward(loss_of(engine, step))
            engine.step()
        expected = bits_of(engine)

    with engine_of(model_of()) as engine:
        optimizer = engine.as_optimizer()
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(engine, step).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        assert differing(bits_of(engine), expected) == []


def test_a_closure_is_run_with_gradients_and_its_loss_returned() -> None:
    with engine_of(model_of()) as engine, torch.no_grad():
        optimizer = engine.as_optimizer()

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(engine, 0)
            engine.backward(loss)
            return loss

        loss = optimizer.step(closure)

        assert loss.item() == loss_of(model_of(), 0).item()
        assert engine.steps == 1


@pytest.mark.parametrize("planned", [1, 4], ids=["one planned", "four planned"])
def test_the_caller_decides_when_a_step_is_complete(planned: int) -> None:
    plain = model_of()
    torchs = adamw(plain)
    with engine_of(model_of(), accumulation_steps=planned) as engine:
        optimizer = engine.as_optimizer()
        # The second step is a remainder.
        for batches in ((0, 1, 2), (3,)):
            for number in batches:
                engine.backward(loss_of(engine, number) / len(batches), scale=False)
                (loss_of(plain, number) / len(batches)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            torchs.step()
            torchs.zero_grad()

        for name, value in engine.state_dict().items():
            torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-6, atol=1e-7)


def test_zero_grad_changes_nothing_after_a_step() -> None:
    bits: list[Bits] = []
    for drops in (False, True):
        with engine_of(model_of()) as engine:
            optimizer = engine.as_optimizer()
            for step in range(STEPS):
                engine.backward(loss_of(engine, step))
                optimizer.step()
                if drops:
                    optimizer.zero_grad()
            bits.append(bits_of(engine))

    assert differing(*bits) == []


def test_zero_grad_drops_gradients_that_no_step_has_used() -> None:
    with engine_of(model_of()) as engine:
        optimizer = engine.as_optimizer()
        engine.backward(loss_of(engine, 0))
        optimizer.zero_grad()

        with pytest.raises(RuntimeError, match="no gradient to update with"):
            optimizer.step()


def test_clipping_through_the_optimizer_is_that_of_torch() -> None:
    plain = model_of()
    loss_of(plain, 0).backward()  # type: ignore[no-untyped-call]
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
    adamw(plain).step()

    with engine_of(model_of()) as engine:
        optimizer = engine.as_optimizer()
        engine.backward(loss_of(engine, 0))
        assert optimizer.clip_grad_norm_(math.inf) == pytest.approx(expected.item(), rel=1e-6)
        norm = optimizer.clip_grad_norm_(0.01)
        optimizer.step()

        assert norm == pytest.approx(expected.item(), rel=1e-6)
        for name, value in engine.state_dict().items():
            torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-6, atol=1e-7)


def test_torchs_schedulers_drive_the_rates_of_the_engine() -> None:
    with engine_of(model_of()) as engine:
        optimizer = engine.as_optimizer()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        rates = []
        for step in range(STEPS):
            engine.backward(loss_of(engine, step))
            optimizer.step()
            rates.append(engine.optimizer.param_groups[0]["lr"])
            scheduler.step()

    assert rates == [1e-2, 5e-3, 2.5e-3]


def test_a_followed_scheduler_steps_after_each_update() -> None:
    with engine_of(model_of(), accumulation_steps=2) as engine:
        scheduler = torch.optim.lr_scheduler.StepLR(engine.optimizer, step_size=1, gamma=0.5)
        engine.follow_schedule(scheduler)
        rates = []
        for number in range(4):
            engine.backward(loss_of(engine, number))
            engine.step()
            rates.append(engine.optimizer.param_groups[0]["lr"])

    assert rates == [1e-2, 5e-3, 5e-3, 2.5e-3]


def test_a_scheduler_that_cannot_be_followed_is_refused() -> None:
    schedulers = torch.optim.lr_scheduler
    with engine_of(model_of()) as engine:
        another = torch.optim.SGD(model_of().parameters(), lr=0.1)
        with pytest.raises(ConfigError, match="needs no metric"):
            engine.follow_schedule(schedulers.ReduceLROnPlateau(engine.optimizer))
        with pytest.raises(ConfigError, match="of the engine's optimizer"):
            engine.follow_schedule(schedulers.StepLR(another, 2))
        followed = schedulers.StepLR(engine.as_optimizer(), 2)
        engine.follow_schedule(followed)
        with pytest.raises(ConfigError, match="stepped already"):
            engine.follow_schedule(followed)
    with pytest.raises(RuntimeError, match="closed"):
        engine.follow_schedule(schedulers.StepLR(another, 2))


def test_its_states_are_those_of_a_plain_optimizer_and_go_back() -> None:
    with engine_of(model_of()) as engine:
        optimizer = engine.as_optimizer()
        for step in range(STEPS):
            engine.backward(loss_of(engine, step))
            optimizer.step()
        states, weights = optimizer.state_dict(), engine.state_dict()
        engine.backward(loss_of(engine, STEPS))
        optimizer.step()
        expected = bits_of(engine)

    plain = model_of()
    assert states.keys() == adamw(plain).state_dict().keys()
    plain.load_state_dict(weights)
    with engine_of(plain) as engine:
        optimizer = engine.as_optimizer()
        optimizer.load_state_dict(states)
        engine.backward(loss_of(engine, STEPS))
        optimizer.step()
        assert differing(bits_of(engine), expected) == []


def test_hooks_of_the_optimizer_are_called_at_each_step() -> None:
    seen = []
    with engine_of(model_of()) as engine:
        optimizer = engine.as_optimizer()
        optimizer.register_step_post_hook(lambda *_: seen.append(engine.steps))
        engine.backward(loss_of(engine, 0))
        optimizer.step()

    assert seen == [1]


def test_a_step_that_fp16_skipped_is_told() -> None:
    with engine_of(model_of(), precision="fp16") as engine:
        optimizer = engine.as_optimizer()
        assert not optimizer.was_skipped
        batch = torch.ones(4, 8, dtype=torch.float16)
        engine.backward((engine(batch).float() * 1e30).sum())
        optimizer.step()
        assert optimizer.was_skipped


def test_a_group_more_is_refused() -> None:
    with engine_of(model_of()) as engine, pytest.raises(ConfigError, match="before initialize"):
        engine.as_optimizer().add_param_group({"params": [nn.Parameter(torch.ones(1))]})


def test_no_sync_changes_no_bits() -> None:
    with engine_of(model_of()) as engine:
        with engine.no_sync():
            engine.backward(loss_of(engine, 0))
        engine.step()
        inside = bits_of(engine)
    with engine_of(model_of()) as engine:
        engine.backward(loss_of(engine, 0))
        engine.step()
        assert differing(bits_of(engine), inside) == []
