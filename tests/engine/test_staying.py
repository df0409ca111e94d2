"""Gradients that stay where modules compute: what a plan has for them, what is held, what is
refused, when they go.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import infinity_engine
from infinity_engine.accel import Emulation, VirtualAccelerator
from infinity_engine.engine.engine import Engine
from infinity_engine.errors import CapacityError
from infinity_engine.memory import Reservation, Usage
from infinity_engine.optim import FloatFormat, Formats
from infinity_engine.optim.policies import DEVICE_ONLY
from infinity_engine.placement.placing import Wish, place
from infinity_engine.placement.sizing import Sizing, cut
from infinity_engine.plan import Rates, ResolvedBudget, Tier

RATES = Rates(
    h2d_bytes_per_s=5e9,
    d2h_bytes_per_s=4e9,
    host_update_params_per_s=2e8,
    device_update_params_per_s=2e9,
)
WIDTH, LAYERS = 64, 4
NUMEL = LAYERS * WIDTH * WIDTH
PLENTY = 8 << 20
BF16 = Formats(parameter=FloatFormat.BF16)
WIRE = {"fp32": 4, "bf16": 2}
STRATEGIES: list[Any] = [
    "device_only",
    "host_only",
    {"name": "static_split", "ratio": 0.5},
    {"name": "interleaved", "share": 0.5},
    {"name": "interleaved", "share": 0.4, "resident": 0.25},
]
pytestmark = pytest.mark.usefixtures("deterministic")


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


@contextmanager
def opened(
    model: nn.Module | None = None,
    *,
    unified: bool = False,
    budget: dict[str, int] | None = None,
    **settings: Any,
) -> Iterator[Engine]:
    model = layers() if model is None else model
    optimizer = torch.optim.AdamW(
        [each for each in model.parameters() if each.requires_grad], lr=1e-2
    )
    budget = {"host": PLENTY, "device": PLENTY} if budget is None else budget
    given = {"subgroup_numel": 4096, "update_threads": 1, "accelerator": "cpu", **settings}
    with (
        nullcontext()
        if unified
        else VirtualAccelerator(Emulation(rates=RATES, capacity_bytes=PLENTY)) as device
    ):
        if not unified and settings.get("strategy") != "auto":
            given["rates"] = RATES
        with infinity_engine.initialize(
            model, optimizer, device=device, budget=budget, **given
        ) as made:
            yield made


def loss_of(made: Engine, seed: int = 0) -> torch.Tensor:
    dtype = next(made.model.parameters()).dtype
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed)).to(dtype)
    loss: torch.Tensor = made(x).float().pow(2).mean()
    return loss


def staying(made: Engine) -> Reservation:
    return made._parts.gradients._staying


def used(made: Engine, tier: Tier) -> Usage:
    [found] = [each for each in made.usage() if each.tier is tier]
    return found


def train(made: Engine, *, micro_batches: int, steps: int = 1) -> None:
    for seed in range(steps * micro_batches):
        made.backward(loss_of(made, seed))
        made.step()
    made._updates.end()


# --- what is held ---------------------------------------------------------------------------------


@settings(max_examples=25)
@given(
    strategy=st.sampled_from(STRATEGIES),
    precision=st.sampled_from(["fp32", "bf16"]),
    parameters=st.sampled_from(["device", "host"]),
    micro_batches=st.integers(1, 3),
    subgroup=st.sampled_from([4096, 3 * 4096, 16 * 4096]),
    overlap=st.sampled_from(["off", "auto"]),
)
def test_a_step_holds_no_more_than_its_plan_has(
    strategy: Any, precision: str, parameters: str, micro_batches: int, subgroup: int, overlap: str
) -> None:
    with opened(
        strategy=strategy,
        precision=precision,
        parameters=parameters,
        accumulation_steps=micro_batches,
        subgroup_numel=subgroup,
        overlap=overlap,
    ) as made:
        promised = staying(made).nbytes
        train(made, micro_batches=micro_batches, steps=2)

        assert staying(made).nbytes == promised  # nothing was taken beside the plan
        assert staying(made).peak <= promised
        assert staying(made).held == 0
        device = used(made, Tier.DEVICE)
        assert device.peak_held <= device.reserved <= device.limit


@pytest.mark.parametrize("unified", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("micro_batches", [1, 2, 3])
def test_what_is_held_is_what_the_plan_has_where_all_stay(
    unified: bool, precision: str, micro_batches: int
) -> None:
    strategy = "host_only" if unified else "device_only"
    with opened(
        unified=unified, strategy=strategy, precision=precision, accumulation_steps=micro_batches
    ) as made:
        before = used(made, Tier.HOST if unified else Tier.DEVICE).held
        train(made, micro_batches=micro_batches)

        wire = WIRE[precision]
        # the first beside its sum
        expected = wire * NUMEL if micro_batches == 1 else 4 * NUMEL + wire * WIDTH * WIDTH
        assert staying(made).nbytes == expected
        assert staying(made).peak == expected
        usage = used(made, Tier.HOST if unified else Tier.DEVICE)
        assert usage.peak_held == before + expected


def test_of_a_parameter_that_is_updated_in_two_places_only_the_pieces_that_are_updated_there_stay() -> (
    None
):
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, 4 * WIDTH, bias=False)  # four subgroups
    with opened(model, strategy={"name": "static_split", "ratio": 0.5}) as made:
        made.backward(loss_of(made))

        assert staying(made).held == staying(made).nbytes == 4 * model.weight.numel() // 2
        made.step()


class Odd(nn.Module):
    """Has a parameter that is frozen, one that nothing uses, one that is used twice and one without
    elements.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.tied = nn.Linear(WIDTH, WIDTH, bias=False)
        self.tied.weight = self.first.weight
        self.frozen = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.unused = nn.Linear(WIDTH, WIDTH, bias=False)
        self.empty = nn.Parameter(torch.zeros(0, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.frozen(self.tied(self.first(x))) + self.empty.sum()
        return made


@pytest.mark.parametrize("unified", [False, True])
def test_frozen_unused_tied_and_empty_parameters_count_as_what_they_are(unified: bool) -> None:
    with opened(Odd(), unified=unified, strategy="host_only" if unified else "device_only") as made:
        made.backward(loss_of(made))

        # of the tied one once, and of the one that may be used
        assert staying(made).nbytes == 4 * 2 * WIDTH * WIDTH
        assert staying(made).held == 4 * WIDTH * WIDTH
        made.step()


# --- when they go ---------------------------------------------------------------------------------


def test_gradients_go_as_their_updates_are_made_beside_the_next_forward() -> None:
    held: list[int] = []
    with opened(strategy="device_only", overlap="auto") as made:
        train(made, micro_batches=1)  # which modules ask for what
        made.backward(loss_of(made))
        whole = staying(made).held
        made.step()
        for layer in made.model.children():
            layer.register_forward_hook(lambda *_: held.append(staying(made).held))
        made(torch.zeros(1, WIDTH))

        assert whole == 4 * NUMEL
        assert [
            each <= whole - 4 * WIDTH * WIDTH * (number + 1) for number, each in enumerate(held)
        ] == [True] * LAYERS


@pytest.mark.parametrize("unified", [False, True])
def test_gradients_that_are_dropped_are_held_no_more(unified: bool) -> None:
    with opened(unified=unified, strategy="host_only" if unified else "device_only") as made:
        made.backward(loss_of(made))
        made.zero_grad()

        assert staying(made).held == 0


# --- what does not fit ----------------------------------------------------------------------------


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("unified", "strategy"),
    [
        (True, "auto"),
        (False, "device_only"),
        (False, {"name": "static_split", "ratio": 0.5}),
        (False, {"name": "interleaved", "share": 0.5, "resident": 0.25}),
    ],
)
def test_one_byte_less_than_all_takes_is_refused_and_all_of_it_works(
    unified: bool, strategy: Any, precision: str, micro_batches: int
) -> None:
    given = {
        "unified": unified,
        "strategy": strategy,
        "precision": precision,
        "accumulation_steps": micro_batches,
    }
    given["parameters"] = "device"
    tier = "host" if unified else "device"
    room = {"host": PLENTY, "device": PLENTY}
    if unified:
        room.pop("device")
    with opened(**given, budget=room) as made:
        # one set will do
        least = used(made, Tier[tier.upper()]).reserved - sum(made.plan.staging_bytes[1:])
    with pytest.raises(CapacityError) as refused, opened(**given, budget={**room, tier: least - 1}):
        pass
    assert refused.value.asked - refused.value.free == 1
    # else the policy refuses before: states that are in place are not less for it
    if unified or precision == "bf16":
        assert f"raise the budget's {tier} to at least {least} B" in str(refused.value)
        assert "gradients that stay holds" in str(refused.value)

    with opened(**given, budget={**room, tier: least}) as made:
        train(made, micro_batches=micro_batches, steps=2)
        assert used(made, Tier[tier.upper()]).peak_held <= least


def test_auto_keeps_states_on_the_host_where_gradients_leave_no_room_for_them() -> None:
    with opened(strategy="device_only", parameters="device") as made:
        least = used(made, Tier.DEVICE).reserved
    with opened(
        strategy="auto", parameters="device", budget={"host": PLENTY, "device": least - 1}
    ) as made:
        assert staying(made).nbytes == 0
        train(made, micro_batches=1)


@pytest.mark.parametrize("unified", [False, True])
def test_a_sum_that_no_plan_has_takes_what_the_budget_has_left_or_is_refused(unified: bool) -> None:
    strategy = "host_only" if unified else "device_only"
    tier = "host" if unified else "device"
    with opened(unified=unified, strategy=strategy, precision="bf16") as made:
        planned = used(made, Tier[tier.upper()]).reserved
        for seed in range(2):
            made.backward(loss_of(made, seed))  # more than accumulation_steps says
        assert staying(made).held == 4 * NUMEL
        made.step()
        made._updates.end()
        # what the sum took beside the plan is free again
        assert used(made, Tier[tier.upper()]).reserved == planned

    room = {"host": PLENTY, "device": PLENTY, tier: planned}
    if unified:
        room.pop("device")
    with opened(unified=unified, strategy=strategy, precision="bf16", budget=room) as made:
        made.backward(loss_of(made))
        with pytest.raises(
            CapacityError,
            match="no parameter more gradients in a step than accumulation_steps says",
        ):
            made.backward(loss_of(made))
        with pytest.raises(RuntimeError, match=r"A gradient of \d\.weight was refused.*zero_grad"):
            made.step()
        made.zero_grad()
        assert staying(made).held == 0
        train(made, micro_batches=1)


class _OfMore(torch.autograd.Function):
    """The gradient that it gives is a part of something larger, as those of what was concatenated
    are.
    """

    @staticmethod
    def forward(_context: Any, values: torch.Tensor) -> torch.Tensor:
        return values.clone()

    @staticmethod
    def backward(_context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return torch.stack([gradient] * 10)[3]


class OfMore(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight: torch.Tensor = torch.as_tensor(_OfMore.apply(self.weight))  # type: ignore[no-untyped-call]
        return nn.functional.linear(x, weight)


@pytest.mark.parametrize("unified", [False, True])
def test_a_gradient_that_is_a_part_of_something_larger_does_not_keep_the_rest(
    unified: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = OfMore(WIDTH, WIDTH, bias=False)
    with opened(model, unified=unified, strategy="host_only" if unified else "device_only") as made:
        wholes: list[Any] = []
        take = made._parts.gradients.accumulate

        def see(number: int, gradient: torch.Tensor) -> None:
            wholes.append(weakref.ref(gradient.untyped_storage()))
            take(number, gradient)

        monkeypatch.setattr(made._parts.gradients, "accumulate", see)
        made.backward(loss_of(made))

        assert [whole() for whole in wholes] == [None]
        assert staying(made).held == 4 * WIDTH * WIDTH
        made.step()


def test_a_first_gradient_that_is_wider_than_planned_is_told_as_that() -> None:
    with opened(unified=True, strategy="host_only", precision="bf16") as made:
        planned = used(made, Tier.HOST).reserved
    with opened(
        unified=True, strategy="host_only", precision="bf16", budget={"host": planned}
    ) as made:
        made.model.float()

        with pytest.raises(
            CapacityError, match=r"of torch\.float32, and the plan has room for.*set its precision"
        ):
            made.backward(loss_of(made))


# --- plans ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sums", "of_backward"), [(False, max), (True, lambda one, other: one + other)]
)
@pytest.mark.parametrize("activations", [0, 1000, 10**6])
def test_gradients_take_the_place_of_activations_that_are_known_but_sums_do_not(
    sums: bool, of_backward: Any, activations: int
) -> None:
    sizing = Sizing(
        subgroups=cut([(10_000, BF16), (20_000, BF16)], 8192),
        state_names=("exp_avg", "exp_avg_sq"),
        parameters=(20_000, 40_000),
        deepest=40_000,
        unified=False,
        sums=sums,
        activations=activations,
    )
    wish = Wish(
        strategy="device_only",  # type: ignore[arg-type]  # the policy takes its place
        tiers=(Tier.DEVICE,),
        accumulation_steps=2 if sums else 1,
        small_bytes=1,
        rates=Rates(),
        policy=DEVICE_ONLY,
    )
    gradients = 4 * 30_000 + 2 * 20_000 if sums else 2 * 30_000
    least = 12 * 30_000 + 2 * 30_000 + sizing.on_their_way + of_backward(activations, gradients)

    plan = place(sizing, wish, ResolvedBudget(device=least, host=PLENTY), io_bytes=0)

    assert plan.demand.staying == gradients
    with pytest.raises(CapacityError):
        place(sizing, wish, ResolvedBudget(device=least - 1, host=PLENTY), io_bytes=0)
