"""Wrong use gets told: what was expected, what came, what to do. And nothing is left half-done."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity_engine
from infinity_engine.accel import Emulation, StreamKind, emulated_accelerator
from infinity_engine.config import EngineConfig
from infinity_engine.engine import assemble
from infinity_engine.engine.engine import Engine
from infinity_engine.errors import CapacityError, ConfigError
from infinity_engine.plan import Rates, Tier
from support.unnamed_files import unnamed_files

RATES = Rates(
    h2d_bytes_per_s=1e9,
    d2h_bytes_per_s=1e9,
    host_update_params_per_s=1e8,
    device_update_params_per_s=1e9,
)
BUDGET = {"host": "64MiB"}


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 300), nn.ReLU(), nn.Linear(300, 2))


@contextmanager
def engine(**settings: object) -> Iterator[Engine]:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    settings = {"accelerator": "cpu", "budget": BUDGET, **settings}
    with infinity_engine.initialize(net, optimizer, **settings) as made:  # type: ignore[arg-type]
        yield made


def train(made: Engine, seed: int = 0) -> None:
    made.backward(
        made(torch.randn(4, 20, generator=torch.Generator().manual_seed(seed))).pow(2).mean()
    )
    made.step()


def weights(made: Engine) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in made.model.parameters()])


@pytest.mark.parametrize("parameters", ["device", "nvme"])
def test_what_fails_when_all_is_put_together_leaves_the_model_as_it_was(
    parameters: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    net = nn.Sequential(model(), nn.BatchNorm1d(2))
    before = {name: each.clone() for name, each in net.state_dict().items()}
    monkeypatch.setattr(assemble, "Engine", lambda _: 1 / 0)
    streamed = {"strategy": "nvme_streamed", "budget": {**BUDGET, "nvme": {str(tmp_path): "64MiB"}}}

    with pytest.raises(ZeroDivisionError):
        infinity_engine.initialize(
            net, "adamw", {**streamed, "parameters": parameters}, precision="bf16"
        )

    assert {name: each.dtype for name, each in net.state_dict().items()} == {
        name: each.dtype for name, each in before.items()
    }
    assert all(torch.equal(each, before[name]) for name, each in net.state_dict().items())
    assert unnamed_files(tmp_path) == []


def test_a_step_without_a_backward_says_so() -> None:
    with (
        engine() as made,
        pytest.raises(RuntimeError, match=r"no gradient to update with.*Call backward\(\) first"),
    ):
        made.step()


def test_a_step_within_a_backward_is_refused_and_the_batch_can_come_again() -> None:
    with engine() as made:
        output = made(torch.ones(4, 20))
        hidden = made.model[0].weight  # type: ignore[index]
        hook = hidden.register_post_accumulate_grad_hook(lambda _: made.step())
        with pytest.raises(RuntimeError, match="after backward\\(\\) has returned"):
            made.backward(output.pow(2).mean())
        hook.remove()
        made.zero_grad()
        train(made)

        with engine() as other:
            train(other)
            assert torch.equal(weights(made), weights(other))


def test_two_steps_for_one_backward_are_told() -> None:
    with engine() as made:
        train(made)

        with pytest.raises(RuntimeError, match="no gradient to update with"):
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


@pytest.mark.parametrize("loss", [None, 1.0, {"loss": torch.ones(())}])
def test_what_is_no_tensor_is_refused_as_a_loss(loss: Any) -> None:
    with (
        engine() as made,
        pytest.raises(ConfigError, match=r"^loss: expected a tensor.*the loss, got"),
    ):
        made.backward(loss)


def test_what_is_no_model_is_refused() -> None:
    with (
        engine() as made,
        pytest.raises(ConfigError, match=r"^model: expected a torch\.nn\.Module, got 'Engine'"),
    ):
        infinity_engine.initialize(made, "adamw", accelerator="cpu")  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_gradients_that_are_not_finite_are_told_where_their_norm_is_known(value: float) -> None:
    with engine(max_grad_norm=1.0) as made:
        train(made)
        loss = made(torch.full((4, 20), value)).sum()
        loss.backward()  # past the engine, which does not see the loss

        with pytest.warns(RuntimeWarning, match="The norm of the gradients is nan in step 1"):
            made.step()


def test_a_loss_that_is_not_a_number_is_told_with_the_step() -> None:
    with engine() as made, pytest.warns(RuntimeWarning, match="The loss is nan in step 0"):
        made.backward(made(torch.full((4, 20), torch.nan)).sum())


def test_stepping_the_optimizer_itself_is_refused() -> None:
    with engine() as made:
        made.backward(made(torch.randn(4, 20)).sum())

        with pytest.raises(RuntimeError, match=r"Call engine\.step\(\)"):
            made.optimizer.step()


def test_a_parameter_that_somebody_changed_is_named_where_the_change_would_be_lost() -> None:
    with engine(precision="bf16") as made:
        made.backward(made(torch.randn(4, 20, dtype=torch.bfloat16)).float().sum())
        with torch.no_grad():
            next(made.model.parameters()).add_(1)

        with pytest.raises(RuntimeError, match=r"0\.weight was changed outside.*gathered"):
            made.step()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_somebody_changed_past_gathered_can_be_taken_over_under_it(precision: str) -> None:
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    with engine(precision=precision) as made:
        weight = next(made.model.parameters())
        with torch.no_grad():
            weight.fill_(0.5)
        made.backward(made(torch.randn(4, 20, dtype=dtype)).float().pow(2).mean())
        with pytest.raises(RuntimeError, match="changed outside"):
            made.step()
        with made.gathered(weight, modify=True):
            pass
        assert (torch.as_tensor(made.state_of(weight)["master"]) == 0.5).all()
        made.step()

        assert (weight.float() - 0.5).abs().max() <= 0.012


@pytest.mark.parametrize("cast", [nn.Module.half, nn.Module.double, nn.Module.bfloat16])
@pytest.mark.parametrize("unified", [False, True])
def test_a_model_that_is_cast_is_told(
    cast: Callable[[nn.Module], nn.Module], unified: bool
) -> None:
    with emulated_accelerator(Emulation(rates=RATES, capacity_bytes=16 << 20)) as emulated:
        device = None if unified else emulated
        with engine(
            device=device, budget={"host": "64MiB", "device": "8MiB"}, strategy="host_only"
        ) as made:
            train(made)
            cast(made.model)
            dtype = next(made.model.parameters()).dtype
            loss = made(torch.randn(4, 20, dtype=dtype)).pow(2).mean()

            def step() -> None:
                made.backward(loss)
                made.step()

            with pytest.raises(
                (RuntimeError, ConfigError),
                match=r"was changed outside|Do not cast the model.*precision",
            ):
                step()


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


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"strateg": "host_only"}, r"^strateg: .*\(nearest: strategy\)"),
        ({"strategy": "host_onl"}, r"^strategy: .*\(nearest: host_only\)"),
        (
            {"strategy": {"name": "interleaved", "shar": 0.5}},
            r"^strategy\.shar: .*\(nearest: share\)",
        ),
        (
            {
                "strategy": {
                    "name": "nvme_streamed",
                    "update": {"name": "interleaved", "residnt": 0.5},
                }
            },
            r"^strategy\.update\.residnt: .*\(nearest: resident\)",
        ),
        ({"budget": {"hosts": "64MiB"}}, r"^budget\.hosts: .*\(nearest: host\)"),
        ({"storage": {"checksums": "crc32c"}}, r"^storage\.checksums: .*\(nearest: checksum\)"),
        ({"storage": {"endurance": {"/mnt/a": "600TB"}}}, r"storage\.endurance: .*got '/mnt/a'"),
        ({"ranks": {"stages": "alone"}}, r"^ranks\.stages: .*\(nearest: stage\)"),
        ({"telemetry": {"keep_step": 1}}, r"^telemetry\.keep_step: .*\(nearest: keep_steps\)"),
        (
            {"rates": {"version": 1, "h2d_bytes": 1e9}},
            r"^rates\.h2d_bytes: .*\(nearest: h2d_bytes_per_s\)",
        ),
        (
            {"rates": {"version": 1, "nvme": {"/": {"read_bytes": 1e9}}}},
            r"^rates\.nvme\['/'\]\.read_bytes: .*\(nearest: read_bytes_per_s\)",
        ),
        ({"policy": "algoritm1"}, r"^policy: .*\(nearest: algorithm1\)"),
    ],
    ids=str,
)
def test_an_unknown_name_at_any_level_offers_the_nearest(
    wrong: dict[str, object], said: str
) -> None:
    with pytest.raises(ConfigError, match=said), engine(**wrong):
        pass


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("adanw", r"^optimizer: .*\(nearest: adamw\)"),
        ({"name": "adamw", "beta": (0.9, 0.99)}, r"^optimizer\.beta: .*\(nearest: betas\)"),
    ],
    ids=str,
)
def test_an_unknown_name_in_an_optimizer_that_is_asked_for_offers_the_nearest(
    wrong: object, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        infinity_engine.initialize(model(), wrong, accelerator="cpu", budget=BUDGET)  # type: ignore[arg-type]


def test_settings_come_as_an_object_as_a_mapping_and_as_keywords() -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    config = EngineConfig(accumulation_steps=3)

    with infinity_engine.initialize(
        net, optimizer, config, accelerator="cpu", budget=BUDGET
    ) as made:
        made.backward(made(torch.randn(4, 20)).sum())
        assert made.step().outcome is infinity_engine.Outcome.ACCUMULATED


MEBIBYTE = 1 << 20
PLENTY = {"host": 64 * MEBIBYTE, "device": 64 * MEBIBYTE}


def large() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(700, 700, bias=False), nn.ReLU(), nn.Linear(700, 700, bias=False)
    )


@pytest.mark.parametrize(
    ("tier", "settings"),
    [
        (Tier.DEVICE, {"strategy": "device_only", "parameters": "device"}),
        (Tier.HOST, {"strategy": "host_only", "parameters": "device"}),
        (Tier.NVME, {"strategy": "nvme_streamed", "parameters": "nvme"}),
    ],
    ids=["device", "host", "drives"],
)
def test_a_budget_too_small_by_a_mebibyte_is_refused_before_anything_moves(
    tier: Tier, settings: dict[str, Any], tmp_path: Path
) -> None:
    net = large()
    before = [parameter.data_ptr() for parameter in net.parameters()]
    on_drives = tier is Tier.NVME

    def opened(size: int) -> Engine:
        budget: dict[str, object] = (
            {**PLENTY, "nvme": {str(tmp_path): size}} if on_drives else dict(PLENTY)
        )
        if on_drives:
            budget["host"] = 24 * MEBIBYTE  # too little for all of it
        else:
            budget[tier.value] = size
        optimizer = torch.optim.AdamW(net.parameters())
        return infinity_engine.initialize(
            net,
            optimizer,
            device=device,
            budget=budget,
            subgroup_numel=1 << 16,
            overlap="off",
            **settings,
        )

    with emulated_accelerator(Emulation(rates=RATES, capacity_bytes=64 * MEBIBYTE)) as device:
        with opened(64 * MEBIBYTE) as made:
            [least] = [usage.reserved for usage in made.usage() if usage.tier is tier]
            for parameter, address in zip(net.parameters(), before, strict=True):
                assert parameter.data_ptr() != address
        before = [parameter.data_ptr() for parameter in net.parameters()]

        said = rf"^{tier.name}.* cannot hold .* short.*To make it fit: .*(larger budget|raise the budget)"
        with pytest.raises(CapacityError, match=said):
            opened(least - MEBIBYTE)

        assert device.memory().free == 64 * MEBIBYTE
        assert unnamed_files(tmp_path) == []
        assert [parameter.data_ptr() for parameter in net.parameters()] == before
        with opened(least) as made:
            made.backward(made(torch.ones(2, 700)).sum())
            made.step()


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


@pytest.mark.parametrize(
    ("failing", "nth"), [(StreamKind.H2D, 1), (StreamKind.H2D, 2), (StreamKind.D2H, 1)]
)
def test_a_step_that_failed_on_a_link_is_finished_by_the_next_call(
    failing: StreamKind, nth: int
) -> None:
    broken = [False]
    seen = [0]

    def fault(kind: StreamKind) -> Exception | None:
        seen[0] += broken[0] and kind is failing
        if broken[0] and kind is failing and seen[0] == nth:
            broken[0] = False
            return RuntimeError("the link is down")
        return None

    rates, capacity = RATES, 16 << 20
    with emulated_accelerator(
        Emulation(rates=rates, capacity_bytes=capacity, fault=fault)
    ) as device:
        interleaved = {"name": "interleaved", "share": 0.5}
        settings = {
            "strategy": interleaved,
            "rates": rates,
            "subgroup_numel": 4096,
            "overlap": "off",
        }
        budget = {"host": "64MiB", "device": "8MiB"}
        with (
            engine(device=device, budget=budget, **settings) as made,
            engine(**settings) as untroubled,
        ):
            train(made, seed=1)
            train(untroubled, seed=1)
            made.backward(
                made(torch.randn(4, 20, generator=torch.Generator().manual_seed(2))).pow(2).mean()
            )
            made._parts.gradients.finish_transfers()  # their downloads are not what is to fail
            broken[0] = True
            with pytest.raises(
                RuntimeError, match=r"op \d+ of the plan, (Upload|Download)\w+ of subgroup"
            ):
                made.step()
            for refused in (
                made.zero_grad,
                lambda: made(torch.randn(4, 20)),
                lambda: made.clip_grad_norm_(1.0),
            ):
                with pytest.raises(RuntimeError, match=r"interrupted.*Call step\(\) again"):
                    refused()
            made.optimizer.param_groups[0]["lr"] = 99.0  # too late for the step that has begun

            made.step()
            train(untroubled, seed=2)

            assert torch.equal(weights(made), weights(untroubled))


def test_a_plain_backward_is_refused_where_the_loss_has_to_be_scaled() -> None:
    with engine(precision="fp16") as made:
        loss = made(torch.randn(4, 20, dtype=torch.float16)).float().pow(2).mean()

        with pytest.raises(RuntimeError, match=r"Call engine\.backward\(loss\)"):
            loss.backward()


def test_a_gradient_that_was_left_before_it_was_taken_is_dropped_with_the_others() -> None:
    with engine() as made, engine() as untroubled:
        made.backward(made(torch.randn(4, 20)).sum())
        # as Ctrl-C leaves it that comes just before the hook that takes it
        for each in made.model.parameters():
            each.grad = torch.ones_like(each)
        made.zero_grad()
        train(made)
        train(untroubled)

        assert torch.equal(weights(made), weights(untroubled))


def test_a_parameter_that_is_unfrozen_later_is_told() -> None:
    net = model()
    net[0].weight.requires_grad_(False)
    optimizer = torch.optim.AdamW(net.parameters())
    with infinity_engine.initialize(net, optimizer, accelerator="cpu", budget=BUDGET) as made:
        train(made)
        net[0].weight.requires_grad_(True)
        made.backward(made(torch.randn(4, 20)).sum())

        with pytest.raises(
            RuntimeError, match="frozen or not in the optimizer when the engine was initialized"
        ):
            made.step()


def test_a_refused_step_that_ended_nowhere_leaves_nothing_mixed() -> None:
    broken = [True]

    def fault(kind: StreamKind) -> Exception | None:
        failing = broken[0] and kind is StreamKind.D2H
        return RuntimeError("the link is down") if failing else None

    with emulated_accelerator(
        Emulation(rates=RATES, capacity_bytes=16 << 20, fault=fault)
    ) as device:
        interleaved = {"name": "interleaved", "share": 1.0}
        settings: dict[str, object] = {"strategy": interleaved, "rates": RATES, "overlap": "off"}
        budget = {"host": "64MiB", "device": "8MiB"}
        with (
            engine(device=device, budget=budget, **settings) as made,
            engine(**settings) as untroubled,
        ):
            made.backward(
                made(torch.randn(4, 20, generator=torch.Generator().manual_seed(0))).pow(2).mean()
            )
            with pytest.raises(RuntimeError, match="Download"):
                made.step()
            # modules have new values, the states are old
            with pytest.raises(RuntimeError, match="interrupted"):
                made.zero_grad()
            broken[0] = False

            made.step()
            train(untroubled)

            assert torch.equal(weights(made), weights(untroubled))


@pytest.mark.parametrize("name", ["Adagrad", "SGD"])
def test_an_optimizer_that_begins_with_states_is_as_good(name: str) -> None:
    net = model()
    optimizer = getattr(torch.optim, name)(
        net.parameters(), lr=1e-2, **({"momentum": 0.9} if name == "SGD" else {})
    )

    with infinity_engine.initialize(net, optimizer, accelerator="cpu", budget=BUDGET) as made:
        train(made)


def test_states_that_an_engine_would_not_see_are_not_loaded_and_groups_are() -> None:
    net = model()
    trained = torch.optim.AdamW(net.parameters(), lr=0.5)
    net(torch.randn(4, 20)).sum().backward()
    trained.step()
    saved = trained.state_dict()
    with engine() as made:
        with pytest.raises(
            RuntimeError, match=r"engine has the optimizer's states.*\"state\": \{\}"
        ):
            made.optimizer.load_state_dict(saved)
        made.optimizer.load_state_dict({**saved, "state": {}})
        assert made.optimizer.param_groups[0]["lr"] == 0.5

        with pytest.warns(
            RuntimeWarning, match=r"no states: the engine has those. engine\.state_of"
        ):
            groups = made.optimizer.state_dict()
        assert groups["param_groups"][0]["lr"] == 0.5
    made.optimizer.load_state_dict(saved)


# --- gradients that the engine has taken ----------------------------------------------------------


@pytest.mark.parametrize(
    "use",
    [
        lambda made: torch.nn.utils.clip_grad_norm_(made.model.parameters(), 1.0),
        lambda made: torch.nn.utils.clip_grad_norm_(made.model.parameters(), 1.0, foreach=True),
        lambda made: torch.nn.utils.clip_grad_value_(made.model.parameters(), 1.0),
        lambda made: [
            each.grad.norm() for each in made.model.parameters() if each.grad is not None
        ],
        lambda made: made.optimizer.zero_grad(set_to_none=False),
    ],
)
@pytest.mark.parametrize("through", [True, False])
def test_who_computes_with_gradients_that_the_engine_has_taken_is_told_what_to_call(
    use: Callable[[Engine], object], through: bool
) -> None:
    with engine() as made, engine() as untroubled:
        loss = made(torch.randn(4, 20, generator=torch.Generator().manual_seed(0))).pow(2).mean()
        made.backward(loss) if through else loss.backward()

        with pytest.raises(
            RuntimeError,
            match=r"engine\.clip_grad_norm_\(max_norm\).*state_of.*engine\.zero_grad\(\)",
        ):
            use(made)
        made.step()
        train(untroubled)

        assert torch.equal(weights(made), weights(untroubled))
        assert [each.grad for each in made.model.parameters() if each.grad is not None] == []


def test_every_group_of_the_optimizer_tells() -> None:
    net = model()
    optimizer = torch.optim.AdamW(
        [{"params": net[0].parameters()}, {"params": net[2].parameters()}]
    )
    with infinity_engine.initialize(net, optimizer, accelerator="cpu", budget=BUDGET) as made:
        made.backward(made(torch.randn(4, 20)).sum())

        for group in optimizer.param_groups:
            with pytest.raises(RuntimeError, match="the engine moved the real one"):
                torch.nn.utils.clip_grad_norm_(group["params"], 1.0)


def test_gradients_of_backwards_past_the_engine_are_added_up() -> None:
    with engine() as made, engine() as untroubled:
        losses = [made(torch.full((4, 20), float(number))).pow(2).mean() for number in range(3)]
        for loss in losses:
            loss.backward()
        made.step()
        losses = [
            untroubled(torch.full((4, 20), float(number))).pow(2).mean() for number in range(3)
        ]
        for loss in losses:
            untroubled.backward(loss)
        untroubled.step()

        assert torch.equal(weights(made), weights(untroubled))


@pytest.mark.parametrize(
    "drop", [lambda made: made.optimizer.zero_grad(), lambda made: made.model.zero_grad()]
)
def test_what_the_optimizer_or_the_model_drops_is_dropped(drop: Callable[[Engine], object]) -> None:
    with engine() as made, engine() as untroubled:
        made.backward(made(torch.full((4, 20), 3.0)).sum())
        drop(made)
        train(made)
        train(untroubled)
        drop(made)  # after a step there is nothing
        train(made, 1)
        train(untroubled, 1)
        assert torch.equal(weights(made), weights(untroubled))

        made.backward(made(torch.full((4, 20), 3.0)).sum())
        drop(made)
        with pytest.raises(RuntimeError, match="no gradient to update with"):
            made.step()


def test_dropping_past_the_engine_between_micro_batches_is_told_and_nothing_is_dropped() -> None:
    with engine(accumulation_steps=2) as made, engine(accumulation_steps=2) as untroubled:
        train(made)
        made.backward(made(torch.full((4, 20), 3.0)).sum())
        made.optimizer.zero_grad()
        with pytest.raises(
            RuntimeError, match=r"those of 2 of 2 micro-batches.*only after the last"
        ):
            made.step()
        made.step()
        train(untroubled)
        untroubled.backward(untroubled(torch.full((4, 20), 3.0)).sum())
        untroubled.step()

        assert torch.equal(weights(made), weights(untroubled))


def test_dropping_past_the_engine_before_a_backward_past_it_is_told() -> None:
    with engine() as made:
        losses = [made(torch.randn(4, 20)).sum() for _ in range(2)]
        losses[0].backward()
        made.optimizer.zero_grad()

        with pytest.raises(RuntimeError, match=r"To drop them, call engine\.zero_grad\(\)"):
            losses[1].backward()
        made.zero_grad()
        train(made)


def test_dropping_gradients_after_every_micro_batch_is_warned_of() -> None:
    with engine(accumulation_steps=2) as made:
        train(made)
        made.zero_grad()  # as for a batch that came to nothing
        train(made)
        with pytest.warns(RuntimeWarning, match=r"1 of 2 micro-batches.*no step ever updates"):
            made.zero_grad()
        for _ in range(2):
            train(made)
        train(made)
        made.zero_grad()


def test_two_engines_in_one_process_do_not_disturb_each_other() -> None:
    with engine() as alone:
        train(alone)
        expected = weights(alone).clone()

    with engine() as first, engine() as second:
        for made in (first, second):
            train(made)

        assert torch.equal(weights(first), expected)
        assert torch.equal(weights(second), expected)


def test_a_second_engine_for_one_model_is_refused_and_the_first_goes_on() -> None:
    with engine() as made, engine() as untroubled:
        with pytest.raises(
            ConfigError,
            match=r"^model: expected a model that no other engine trains.*0\.weight that another",
        ):
            infinity_engine.initialize(
                made.model, torch.optim.SGD(made.model.parameters()), accelerator="cpu"
            )
        train(made)
        train(untroubled)

        assert torch.equal(weights(made), weights(untroubled))
    with infinity_engine.initialize(made.model, "adamw", accelerator="cpu", budget=BUDGET) as after:
        train(after)


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
        with engine(
            device=device, budget={"host": "64MiB", "device": "8MiB"}, strategy="host_only"
        ) as made:
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
        infinity_engine.initialize(
            net, torch.optim.SGD(net.parameters(), lr=0.1), accelerator="cpu"
        )


def test_a_backward_in_another_thread_is_as_good() -> None:
    with engine() as made, engine() as untroubled:
        thread = threading.Thread(target=train, args=(made,))
        thread.start()
        thread.join()
        train(untroubled)

        assert torch.equal(weights(made), weights(untroubled))


def test_a_backward_of_a_graph_made_before_a_step_is_refused_on_the_cpu() -> None:
    with engine() as made:
        older = made(torch.randn(4, 20)).pow(2).mean()
        train(made)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            made.backward(older)
        made.zero_grad()
        train(made)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_backward_of_a_graph_made_before_a_body_of_gathered_is_refused_on_the_cpu(
    precision: str,
) -> None:
    with engine(precision=precision) as made:
        parameter = list(made.parameters())[2]
        older = made(torch.randn(4, 20, dtype=parameter.dtype)).float().pow(2).mean()
        with made.gathered(parameter, modify=True):
            parameter.data.mul_(2)  # past autograd, as initial values are written
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            made.backward(older)
        made.zero_grad()
        # What the body wrote counts as the engine's own.
        made.backward(made(torch.randn(4, 20, dtype=parameter.dtype)).float().pow(2).mean())
        made.step()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_backward_of_a_graph_made_before_a_load_is_refused_on_the_cpu(
    precision: str, tmp_path: Path
) -> None:
    def loss_of(made: Engine) -> torch.Tensor:
        batch = torch.ones(4, 20, dtype=next(made.parameters()).dtype)
        return torch.as_tensor(made(batch).float().pow(2).mean())

    with engine(precision=precision) as made:
        made.backward(loss_of(made))
        made.step()
        made.save(tmp_path)
        before = loss_of(made)
        made.load(tmp_path)

        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            made.backward(before)
        made.zero_grad()
        made.backward(loss_of(made))
        made.step()
