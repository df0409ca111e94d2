"""`initialize(..., policy=)`: one's own policy or a named one is trained with, and changes no bit
of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache

import pytest
import torch

import infinity_engine
from infinity_engine.accel import Accelerator, Emulation, VirtualAccelerator
from infinity_engine.config import EngineConfig
from infinity_engine.engine.engine import Engine
from infinity_engine.errors import CapacityError, ConfigError
from infinity_engine.optim.policies import BUILT_IN, HOST_ONLY, algorithm1, eq1
from infinity_engine.optim.policy import Decide, Limits, OffloadPolicy, PlanDraft, offload_policy
from infinity_engine.plan import (
    CopyOp,
    Home,
    HostOnly,
    Rates,
    StepPlan,
    SubgroupSpec,
    UpdateOnDevice,
)
from support.small_models import MODELS, Task

RATES = Rates(
    h2d_bytes_per_s=5e9,
    d2h_bytes_per_s=4e9,
    host_update_params_per_s=2e8,
    device_update_params_per_s=2e9,
)
CAPACITY = 4 << 20
STEPS = 4
Asked = tuple[Sequence[SubgroupSpec], Rates, Limits]
Bits = dict[str, torch.Tensor]


@offload_policy("thirds")
def thirds(subgroups: Sequence[SubgroupSpec], rates: Rates, limits: Limits) -> StepPlan:
    """Go from the last subgroup to the first; one in three visits, one stays on the host, one on
    the device.
    """
    draft = PlanDraft(subgroups, limits)
    homes: tuple[Callable[[SubgroupSpec], object], ...] = (draft.visit, draft.host, draft.resident)
    for number, subgroup in enumerate(reversed(subgroups)):
        homes[number % 3](subgroup)
    return draft.plan()


POLICIES = (*BUILT_IN, thirds, algorithm1(3))
pytestmark = pytest.mark.usefixtures("deterministic")


def model() -> Task:
    torch.manual_seed(0)
    return MODELS["gpt"]()


def emulated(seed: int = 0) -> VirtualAccelerator:
    return VirtualAccelerator(Emulation(rates=RATES, capacity_bytes=CAPACITY, seed=seed))


def initialized(
    task: Task, device: Accelerator | None, policy: OffloadPolicy | str | None, **settings: object
) -> Engine:
    """Wrap the task, of which there are 9 subgroups, with AdamW."""
    given: dict[str, object] = {
        "accelerator": "cpu",
        "rates": RATES,
        "subgroup_numel": 4096,
        "update_threads": 2,
        "budget": {"host": "64MiB", "device": CAPACITY},
        **settings,
    }
    optimizer = torch.optim.AdamW(task.parameters(), lr=3e-3, weight_decay=0.1)
    return infinity_engine.initialize(task, optimizer, device=device, policy=policy, **given)  # type: ignore[arg-type]


@contextmanager
def engine(policy: OffloadPolicy | str | None, **settings: object) -> Iterator[Engine]:
    with emulated() as device, initialized(model(), device, policy, **settings) as made:
        yield made


def train(made: Engine, seed: int = 0) -> None:
    made.backward(made(made.model.batch(seed)))  # type: ignore[operator]
    made.step()


def recording(policy: OffloadPolicy) -> tuple[OffloadPolicy, list[Asked]]:
    """Return the policy, and the list in which it notes what it is asked with."""
    asked: list[Asked] = []

    def decide(subgroups: Sequence[SubgroupSpec], rates: Rates, limits: Limits) -> StepPlan:
        asked.append((subgroups, rates, limits))
        return policy.decide(subgroups, rates, limits)

    return OffloadPolicy("recording", decide), asked


def name_of(policy: OffloadPolicy | str) -> str:
    return policy if isinstance(policy, str) else policy.name


# --- what it changes ------------------------------------------------------------------------------


def bits_after_training(
    policy: OffloadPolicy | str | None, device: Accelerator | None, **settings: object
) -> Bits:
    task = model()
    with initialized(task, device, policy, **settings) as made:
        for seed in range(STEPS):
            train(made, seed)
        bits = {name: tensor.detach().clone() for name, tensor in task.state_dict().items()}
        for name, parameter in task.named_parameters():
            bits.update(
                {
                    f"{name}: {key}": torch.as_tensor(it)
                    for key, it in made.state_of(parameter).items()
                }
            )
    return bits


@cache
def bits_of_host_only(precision: str) -> Bits:
    with emulated() as device:
        return bits_after_training(
            None, device, strategy="host_only", precision=precision, max_grad_norm=0.5
        )


@pytest.mark.parametrize("accelerator", ["cpu", "emulated"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("policy", POLICIES, ids=name_of)
def test_every_policy_gives_the_bits_of_host_only(
    policy: OffloadPolicy | str, precision: str, accelerator: str
) -> None:
    expected = bits_of_host_only(precision)

    with emulated(seed=1) as device:
        chosen = device if accelerator == "emulated" else None
        bits = bits_after_training(policy, chosen, precision=precision, max_grad_norm=0.5)

    assert expected.keys() == bits.keys()
    assert [name for name in expected if not torch.equal(expected[name], bits[name])] == []


def test_the_engines_plan_is_that_of_the_policy() -> None:
    policy, asked = recording(thirds)
    with engine(policy) as made:
        before = made.plan
        train(made)

        assert made.plan == before == thirds(*asked[0])
        assert list(made.plan.homes().values()) == [Home.VISITING, Home.HOST, Home.RESIDENT] * 3


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_name_stands_for_the_built_in_policy(name: str) -> None:
    policy, asked = recording(BUILT_IN[name])
    with engine(policy), engine(name) as made:
        assert made.plan == BUILT_IN[name](*asked[0])


def test_a_policy_is_asked_once_with_the_rates_and_with_what_the_budget_leaves_of_the_device() -> (
    None
):
    policy, asked = recording(HOST_ONLY)
    with engine(policy, precision="bf16") as made:
        numel = sum(parameter.numel() for parameter in made.model.parameters())
        for seed in range(2):
            train(made, seed)

    [(subgroups, rates, limits)] = asked
    assert sum(subgroup.numel for subgroup in subgroups) == numel
    assert rates == RATES
    # two of them on their way to the host
    gradients = 2 * 2 * max(subgroup.numel for subgroup in subgroups)
    assert limits.resident_bytes == limits.staging_bytes == CAPACITY - 2 * numel - gradients
    assert (limits.per_parameter.states, limits.per_parameter.parameter) == (12, 2)


def test_the_device_does_what_the_policys_plan_says() -> None:
    with emulated() as device, initialized(model(), device, thirds) as made:
        train(made)
        made.state_dict()  # the update ends before that

        numels = {subgroup.index: subgroup.numel for subgroup in made.plan.subgroups}
        planned = [numels[op.subgroup] for op in made.plan.ops if isinstance(op, UpdateOnDevice)]
        works = [it for it in device.timeline() if it.stream.startswith("compute")]
        ns_per_parameter = 1e9 / RATES.device_update_params_per_s  # type: ignore[operator]
        assert [it.end_ns - it.start_ns for it in works] == [
            -(-numel * ns_per_parameter // 1) for numel in planned
        ]


# --- what is refused ------------------------------------------------------------------------------


def test_an_unknown_name_offers_the_nearest() -> None:
    with pytest.raises(
        ConfigError, match=r"policy: expected one of .*eq1.*nearest: algorithm1.*got 'algoritm1'"
    ):
        initialized(model(), None, "algoritm1")


@pytest.mark.parametrize(
    "given", [eq1, thirds.decide, HostOnly(), 3], ids=["maker", "function", "strategy", "number"]
)
def test_what_is_no_policy_is_refused_with_how_to_make_one(given: object) -> None:
    with pytest.raises(
        ConfigError, match=r"policy: expected an OffloadPolicy, which @offload_policy\(name\) makes"
    ):
        initialized(model(), None, given)  # type: ignore[arg-type]


@pytest.mark.parametrize("strategy", ["host_only", {"name": "interleaved", "share": 0.5}])
def test_a_policy_beside_a_strategy_is_refused(strategy: object) -> None:
    with pytest.raises(
        ConfigError, match=r"policy: .*strategy=.*give one of the two, got 'thirds'"
    ):
        initialized(model(), None, thirds, strategy=strategy)


def test_a_policy_beside_the_strategy_of_a_config_is_refused() -> None:
    task = model()
    optimizer = torch.optim.AdamW(task.parameters())

    with pytest.raises(ConfigError, match="give one of the two"):
        infinity_engine.initialize(task, optimizer, EngineConfig(strategy=HostOnly()), policy="eq1")


def test_a_policy_beside_the_strategy_that_is_the_default_is_taken() -> None:
    with engine(thirds, strategy="auto") as made:
        assert Home.VISITING in made.plan.homes().values()


def test_a_policy_is_no_setting() -> None:
    task = model()

    with pytest.raises(ConfigError, match="policy"):
        infinity_engine.initialize(task, torch.optim.AdamW(task.parameters()), {"policy": "eq1"})


@contextmanager
def refused(error: type[Exception], said: str) -> Iterator[tuple[Task, Accelerator]]:
    """Expect the body to be refused; what it was given is as it was, and can be trained by PyTorch
    alone.
    """
    task = model()
    before = [(parameter.data_ptr(), parameter.dtype) for parameter in task.parameters()]
    with emulated() as device:
        with pytest.raises(error, match=said):
            yield task, device
        assert device.memory().free == CAPACITY
    assert [(parameter.data_ptr(), parameter.dtype) for parameter in task.parameters()] == before
    task(task.batch(0)).backward()
    assert all(parameter.grad is not None for parameter in task.parameters() if parameter.numel())


def forgetting_one(subgroups: Sequence[SubgroupSpec], rates: Rates, limits: Limits) -> StepPlan:
    draft = PlanDraft(subgroups, limits)
    for subgroup in subgroups[1:]:
        draft.host(subgroup)
    return draft.plan()


def for_other_subgroups(
    subgroups: Sequence[SubgroupSpec], rates: Rates, limits: Limits
) -> StepPlan:
    return HOST_ONLY.decide(subgroups[1:], rates, limits)


def copying_too_little(subgroups: Sequence[SubgroupSpec], rates: Rates, limits: Limits) -> StepPlan:
    plan = BUILT_IN["algorithm1"].decide(subgroups, rates, limits)
    ops = tuple(replace(op, nbytes=1) if isinstance(op, CopyOp) else op for op in plan.ops)
    return replace(plan, ops=ops, staging_bytes=(1,))


def saying_nothing(subgroups: Sequence[SubgroupSpec], rates: Rates, limits: Limits) -> StepPlan:
    return None  # type: ignore[return-value]


def failing(subgroups: Sequence[SubgroupSpec], rates: Rates, limits: Limits) -> StepPlan:
    raise ZeroDivisionError("a policy's own mistake")


WRONG = [
    pytest.param(forgetting_one, ConfigError, "subgroup 0 has none", id="a subgroup is forgotten"),
    pytest.param(
        for_other_subgroups, ConfigError, "all of them and no others", id="other subgroups"
    ),
    pytest.param(
        copying_too_little,
        ConfigError,
        r"StepPlan\.ops\[0\].*12 for each",
        id="too few bytes are copied",
    ),
    pytest.param(
        saying_nothing,
        ConfigError,
        "policy 'wrong': expected a function that returns",
        id="no plan",
    ),
    pytest.param(failing, ZeroDivisionError, "own mistake", id="the policy fails"),
]


@pytest.mark.parametrize(("decide", "error", "said"), WRONG)
def test_what_is_wrong_with_a_plan_is_told_and_the_model_is_as_it_was(
    decide: Decide, error: type[Exception], said: str
) -> None:
    with refused(error, said) as (task, device):
        initialized(task, device, OffloadPolicy("wrong", decide), precision="bf16")


@pytest.mark.parametrize(
    ("name", "said"), [("device_only", "resident states"), ("algorithm1", "staging sets")]
)
def test_a_policy_that_takes_a_byte_more_of_the_device_than_is_free_is_refused_and_the_model_is_as_it_was(
    name: str, said: str
) -> None:
    with engine(name, precision="bf16") as made:
        states = 12 * made.plan.params_at(Home.RESIDENT) + sum(made.plan.staging_bytes)
        largest = max(subgroup.numel for subgroup in made.plan.subgroups)
    with refused(CapacityError, f"DEVICE cannot hold .*{said}") as (task, device):
        taken = 2 * sum(parameter.numel() for parameter in task.parameters()) + 2 * 2 * largest
        budget = {"host": "64MiB", "device": taken + states - 1}
        initialized(task, device, name, precision="bf16", budget=budget, parameters="device")


def test_a_policy_that_lacks_a_rate_is_refused_and_the_model_is_as_it_was() -> None:
    with refused(ConfigError, r"Rates\.host_update_params_per_s: expected a rate") as (
        task,
        device,
    ):
        initialized(task, device, "eq1", precision="bf16", rates=None)
