"""Wrong use gets told: what was expected, what came, what to do. And nothing is left half-done."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import infinity_engine
from infinity_engine.accel import Emulation, StreamKind, emulated_accelerator
from infinity_engine.config import EngineConfig
from infinity_engine.engine.engine import Engine
from infinity_engine.errors import CapacityError, ConfigError
from infinity_engine.plan import Rates

RATES = Rates(h2d_bytes_per_s=1e9, d2h_bytes_per_s=1e9, host_update_params_per_s=1e8, device_update_params_per_s=1e9)
BUDGET = {"host": "64MiB"}


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 300), nn.ReLU(), nn.Linear(300, 2))


@contextmanager
def engine(**settings: object) -> Iterator[Engine]:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    with infinity_engine.initialize(net, optimizer, **{"accelerator": "cpu", "budget": BUDGET, **settings}) as made:  # type: ignore[arg-type]
        yield made


def train(made: Engine, seed: int = 0) -> None:
    made.backward(made(torch.randn(4, 20, generator=torch.Generator().manual_seed(seed))).pow(2).mean())
    made.step()


def weights(made: Engine) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in made.model.parameters()])


def test_a_step_without_a_backward_says_so() -> None:
    with engine() as made, pytest.raises(RuntimeError, match=r"nothing to step with.*Call backward\(\) first"):
        made.step()


def test_two_steps_for_one_backward_are_told() -> None:
    with engine() as made:
        train(made)

        with pytest.raises(RuntimeError, match="nothing to step with"):
            made.step()


def test_a_second_backward_through_one_graph_is_torchs_error_and_the_engine_goes_on() -> None:
    with engine() as made:
        loss = made(torch.randn(4, 20)).pow(2).mean()
        made.backward(loss)

        with pytest.raises(RuntimeError, match="second time"):
            made.backward(loss)

        made.zero_grad()
        train(made)


def test_a_loss_of_many_elements_is_refused() -> None:
    with engine() as made, pytest.raises(ConfigError, match=r"loss.*one element"):
        made.backward(made(torch.randn(4, 20)))


def test_a_loss_that_is_not_a_number_is_told_with_the_step() -> None:
    with engine() as made, pytest.warns(RuntimeWarning, match="the loss is nan in step 0"):
        made.backward(made(torch.full((4, 20), torch.nan)).sum())


def test_stepping_the_optimizer_itself_is_refused() -> None:
    with engine() as made:
        made.backward(made(torch.randn(4, 20)).sum())

        with pytest.raises(RuntimeError, match=r"call engine\.step\(\)"):
            made.optimizer.step()


def test_a_parameter_that_somebody_changed_is_named_where_the_change_would_be_lost() -> None:
    with engine(precision="bf16") as made:
        made.backward(made(torch.randn(4, 20, dtype=torch.bfloat16)).float().sum())
        with torch.no_grad():
            next(made.model.parameters()).add_(1)

        with pytest.raises(RuntimeError, match=r"0\.weight was changed outside.*gathered"):
            made.step()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_change_under_gathered_is_kept(precision: str) -> None:
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    with engine(precision=precision) as made:
        weight = next(made.model.parameters())
        with made.gathered(weight, modify=True), torch.no_grad():
            weight.fill_(0.5)
        made.backward(made(torch.randn(4, 20, dtype=dtype)).float().pow(2).mean())
        made.step()

        assert torch.allclose(made.state_of(weight)["master"], torch.tensor(0.5), atol=0.011)  # type: ignore[arg-type]
        assert (weight.float() - 0.5).abs().max() <= 0.012  # the step, and bf16's rounding


def test_an_optimizer_over_other_parameters_is_refused() -> None:
    net = model()

    with pytest.raises(ConfigError, match=r"only parameters of the model"):
        infinity_engine.initialize(net, torch.optim.AdamW(model().parameters()), accelerator="cpu")


def test_an_optimizer_that_there_are_no_rules_for_is_refused_with_those_there_are() -> None:
    net = model()

    with pytest.raises(ConfigError, match="AdamW"):
        infinity_engine.initialize(net, torch.optim.RMSprop(net.parameters()), accelerator="cpu")


def test_an_unknown_setting_offers_the_nearest() -> None:
    with pytest.raises(ConfigError, match="nearest: strategy"), engine(strateg="host_only"):
        pass


def test_settings_come_as_an_object_as_a_mapping_and_as_keywords() -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    config = EngineConfig(accumulation_steps=3)

    with infinity_engine.initialize(net, optimizer, config, accelerator="cpu", budget=BUDGET) as made:
        made.backward(made(torch.randn(4, 20)).sum())
        assert made.step().outcome is infinity_engine.Outcome.ACCUMULATED


def test_a_budget_too_small_by_a_mebibyte_is_refused_before_anything_moves() -> None:
    net = model()
    before = [parameter.data_ptr() for parameter in net.parameters()]
    rates = RATES
    emulation = Emulation(rates=rates, capacity_bytes=16 << 20)
    with emulated_accelerator(emulation) as device:
        optimizer = torch.optim.AdamW(net.parameters())
        enough = 4 * sum(parameter.numel() for parameter in net.parameters()) * 4
        budget = {"host": "64MiB", "device": enough - (1 << 16)}

        with pytest.raises(CapacityError, match="DEVICE cannot hold"):
            infinity_engine.initialize(net, optimizer, device=device, strategy="device_only", budget=budget)

        assert device.memory().free == 16 << 20
    assert [parameter.data_ptr() for parameter in net.parameters()] == before


def test_an_exception_in_forward_leaves_the_engine_usable() -> None:
    with engine() as made:
        with pytest.raises(RuntimeError, match="shapes"):
            made(torch.randn(4, 21))

        train(made)


def test_an_exception_in_backward_leaves_the_engine_usable_once_its_gradients_are_dropped() -> None:
    def fail(_gradient: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError

    with engine() as made, engine() as untroubled:
        out = made.model[0](torch.randn(4, 20))  # type: ignore[index]
        out.register_hook(fail)
        with pytest.raises(ZeroDivisionError):
            made.backward(made.model[2](out).sum())  # type: ignore[index]

        made.zero_grad()
        train(made)
        train(untroubled)

        assert torch.equal(weights(made), weights(untroubled))


@pytest.mark.parametrize(("failing", "nth"), [(StreamKind.H2D, 1), (StreamKind.H2D, 2), (StreamKind.D2H, 1)])
def test_a_step_that_failed_on_a_link_is_finished_by_the_next_call(failing: StreamKind, nth: int) -> None:
    broken = [False]
    seen = [0]

    def fault(kind: StreamKind) -> Exception | None:
        seen[0] += broken[0] and kind is failing
        if broken[0] and kind is failing and seen[0] == nth:
            broken[0] = False
            return RuntimeError("the link is down")
        return None

    rates, capacity = RATES, 16 << 20
    with emulated_accelerator(Emulation(rates=rates, capacity_bytes=capacity, fault=fault)) as device:
        interleaved = {"name": "interleaved", "share": 0.5}
        settings = {"strategy": interleaved, "rates": rates, "subgroup_numel": 4096, "overlap": "off"}
        budget = {"host": "64MiB", "device": "8MiB"}
        with engine(device=device, budget=budget, **settings) as made, engine(**settings) as untroubled:
            train(made, seed=1)
            train(untroubled, seed=1)
            made.backward(made(torch.randn(4, 20, generator=torch.Generator().manual_seed(2))).pow(2).mean())
            made._parts.gradients.settle()  # their downloads are not what is to fail
            broken[0] = True
            with pytest.raises(RuntimeError, match=r"op \d+ of the plan, (Upload|Download)\w+ of subgroup"):
                made.step()
            for refused in (made.zero_grad, lambda: made(torch.randn(4, 20)), lambda: made.clip_grad_norm_(1.0)):
                with pytest.raises(RuntimeError, match=r"interrupted: call step\(\) again"):
                    refused()
            made.optimizer.param_groups[0]["lr"] = 99.0  # too late for the step that has begun

            made.step()
            train(untroubled, seed=2)

            assert torch.equal(weights(made), weights(untroubled))


def test_a_plain_backward_is_refused_where_the_loss_has_to_be_scaled() -> None:
    with engine(precision="fp16") as made:
        loss = made(torch.randn(4, 20, dtype=torch.float16)).float().pow(2).mean()

        with pytest.raises(RuntimeError, match=r"call engine\.backward\(loss\)"):
            loss.backward()


def test_a_parameter_that_is_unfrozen_later_is_told() -> None:
    net = model()
    net[0].weight.requires_grad_(False)
    optimizer = torch.optim.AdamW(net.parameters())
    with infinity_engine.initialize(net, optimizer, accelerator="cpu", budget=BUDGET) as made:
        train(made)
        net[0].weight.requires_grad_(True)
        made.backward(made(torch.randn(4, 20)).sum())

        with pytest.raises(RuntimeError, match="frozen when the engine was initialized"):
            made.step()


def test_a_refused_step_that_ended_nowhere_leaves_nothing_mixed() -> None:
    broken = [True]

    def fault(kind: StreamKind) -> Exception | None:
        failing = broken[0] and kind is StreamKind.D2H
        return RuntimeError("the link is down") if failing else None

    with emulated_accelerator(Emulation(rates=RATES, capacity_bytes=16 << 20, fault=fault)) as device:
        interleaved = {"name": "interleaved", "share": 1.0}
        settings: dict[str, object] = {"strategy": interleaved, "rates": RATES, "overlap": "off"}
        budget = {"host": "64MiB", "device": "8MiB"}
        with engine(device=device, budget=budget, **settings) as made, engine(**settings) as untroubled:
            made.backward(made(torch.randn(4, 20, generator=torch.Generator().manual_seed(0))).pow(2).mean())
            with pytest.raises(RuntimeError, match="Download"):
                made.step()
            with pytest.raises(RuntimeError, match="interrupted"):  # modules have new values, the states are old
                made.zero_grad()
            broken[0] = False

            made.step()
            train(untroubled)

            assert torch.equal(weights(made), weights(untroubled))


def test_two_engines_in_one_process_do_not_disturb_each_other() -> None:
    with engine() as alone:
        train(alone)
        expected = weights(alone).clone()

    with engine() as first, engine() as second:
        for made in (first, second):
            train(made)

        assert torch.equal(weights(first), expected)
        assert torch.equal(weights(second), expected)


@pytest.mark.parametrize("copying", [copy.deepcopy, pickle.dumps])
def test_an_engine_is_neither_copied_nor_pickled(copying: Callable[[Engine], object]) -> None:
    with engine() as made, pytest.raises(TypeError, match=r"cannot be (copied|pickled)"):
        copying(made)


def test_a_closed_engine_says_so_and_leaves_the_model_as_plain_pytorch() -> None:
    with engine() as made:
        train(made)
        net = made.model

    with pytest.raises(RuntimeError, match="closed"):
        made(torch.randn(4, 20))
    made.close()
    net(torch.randn(4, 20)).sum().backward()

    assert all(parameter.grad is not None for parameter in net.parameters())


def fail_with_a_view(made: Engine) -> None:
    lease = made._parts.states._held[0].lease
    assert lease is not None
    view = lease.flat()  # kept by the frames of the error
    view.fill_(view.numel() // 0)


def test_the_bodys_own_error_is_the_one_to_see() -> None:
    with pytest.raises(ZeroDivisionError), engine(precision="bf16") as made:
        fail_with_a_view(made)


def test_closing_gives_all_memory_back() -> None:
    rates = RATES
    with emulated_accelerator(Emulation(rates=rates, capacity_bytes=16 << 20)) as device:
        with engine(device=device, budget={"host": "64MiB", "device": "8MiB"}, strategy="host_only") as made:
            train(made)
            assert device.memory().free < 16 << 20
            assert all(usage.held <= usage.limit for usage in made.usage())
            ledger = made.usage
        assert device.memory().free == 16 << 20
        assert all(usage.held == usage.reserved == 0 for usage in ledger())
        made.model(torch.randn(4, 20))
    gc.collect()


def test_a_sparse_gradient_is_refused() -> None:
    net = nn.Sequential(nn.Embedding(10, 4, sparse=True))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with infinity_engine.initialize(net, optimizer, accelerator="cpu", budget=BUDGET) as made:
        loss = made(torch.tensor([1, 2])).sum()

        with pytest.raises(ConfigError, match=r"gradient of 0\.weight.*sparse=False"):
            made.backward(loss)


def test_a_meta_parameter_is_refused() -> None:
    net = nn.Linear(3, 3, device="meta")

    with pytest.raises(ConfigError, match="meta device"):
        infinity_engine.initialize(net, torch.optim.SGD(net.parameters(), lr=0.1), accelerator="cpu")


def test_a_backward_in_another_thread_is_as_good() -> None:
    with engine() as made, engine() as untroubled:
        thread = threading.Thread(target=train, args=(made,))
        thread.start()
        thread.join()
        train(untroubled)

        assert torch.equal(weights(made), weights(untroubled))
