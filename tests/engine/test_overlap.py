"""The end of an update beside the next forward: whoever needs something of it waits, and bits are
those without.

On the emulated accelerator, which does everything as late as it may, with parameters that stay on
the device and with such as are fetched.
"""

from __future__ import annotations

import copy
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import infinity_engine
from infinity_engine import Outcome
from infinity_engine.accel import Emulation, StreamKind, VirtualAccelerator
from infinity_engine.engine.engine import Engine
from infinity_engine.errors import TraceMismatch
from infinity_engine.optim import Update, host
from infinity_engine.parameters.fetching import ParameterFetcher
from infinity_engine.plan import Rates
from support.engine_bits import Bits, bits_of, differing
from support.interrupts import interrupted, interrupted_at, walks

RATES = Rates(
    h2d_bytes_per_s=5e9,
    d2h_bytes_per_s=4e9,
    host_update_params_per_s=2e8,
    device_update_params_per_s=2e9,
)
WIDTH, LAYERS = 64, 4  # one subgroup for each layer
STRATEGIES: dict[str, Any] = {
    "host": "host_only",
    "device": "device_only",
    "all": {"name": "interleaved", "share": 0.5, "resident": 0.25},
}
Use = Callable[[Engine], object]
pytestmark = pytest.mark.usefixtures("deterministic")


@pytest.fixture(params=[False, True], ids=["", "on a thread"])
def host_updates(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Let the host make its updates where they are begun, or on a thread, as beside a GPU."""
    monkeypatch.setattr(VirtualAccelerator, "works_beside_host", request.param)
    return bool(request.param)


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(each for _ in range(LAYERS) for each in (nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()))
    )


@contextmanager
def opened(
    model: nn.Module | None = None,
    *,
    fault: Callable[[StreamKind], Exception | None] | None = None,
    seed: int = 0,
    device_bytes: int = 4 << 20,
    optimizer: torch.optim.Optimizer | None = None,
    **settings: Any,
) -> Iterator[Engine]:
    """An engine on an emulated device."""
    model = layers() if model is None else model
    chosen = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)
    settings = {
        "strategy": STRATEGIES["all"],
        "rates": RATES,
        "subgroup_numel": 4096,
        "update_threads": 1,
        **settings,
    }
    emulation = Emulation(rates=RATES, capacity_bytes=4 << 20, seed=seed, fault=fault)
    with VirtualAccelerator(emulation) as device:
        budget = {"host": "16MiB", "device": device_bytes}
        with infinity_engine.initialize(
            model, chosen, device=device, budget=budget, **settings
        ) as made:
            yield made
        assert device.memory().free == 4 << 20


def noise(made: Engine, seed: int) -> torch.Tensor:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))
    return x.to(next(iter(made._parts.trained)).dtype)


def loss_of(made: Engine, seed: int) -> torch.Tensor:
    return torch.as_tensor(made(noise(made, seed))).float().pow(2).mean()


def train(made: Engine, *, steps: int = 1, first: int = 0) -> list[float]:
    losses = []
    for seed in range(first, first + steps):
        loss = loss_of(made, seed)
        made.backward(loss)
        made.step()
        losses.append(loss.item())
    return losses


def on_one_memory(
    steps: int, *, precision: str = "fp32", model: Callable[[], nn.Module] = layers
) -> Bits:
    net = model()
    settings: dict[str, Any] = {"precision": precision, "subgroup_numel": 4096, "update_threads": 1}
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    with infinity_engine.initialize(
        net, optimizer, accelerator="cpu", budget={"host": "16MiB"}, **settings
    ) as made:
        train(made, steps=steps)
        return bits_of(made)


def is_left(made: Engine) -> bool:
    """Tell whether some of an update is left."""
    return made._updates.under_way


WHERE = ["device", "host"]  # parameters stay, or are fetched


@pytest.mark.usefixtures("host_updates")
@pytest.mark.parametrize("parameters", WHERE)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_bits_are_those_without(parameters: str, strategy: str, precision: str) -> None:
    expected = on_one_memory(4, precision=precision)

    for seed in range(2):
        settings = {
            "strategy": STRATEGIES[strategy],
            "parameters": parameters,
            "precision": precision,
            "seed": seed,
        }
        with opened(**settings) as made:
            train(made, steps=4)
            assert differing(expected, bits_of(made)) == []


@pytest.mark.parametrize("parameters", WHERE)
def test_a_step_returns_before_its_update_has_ended_and_both_take_less_than_one_after_the_other(
    parameters: str,
) -> None:
    ended: dict[str, list[int]] = {}
    for overlap in ("off", "auto"):
        with opened(overlap=overlap, parameters=parameters) as made:
            device = made._parts.gradients._lanes.accelerator
            assert isinstance(device, VirtualAccelerator)
            train(made)
            made.backward(loss_of(made, 1))
            began = device.now_ns
            made.step()
            assert is_left(made) == (overlap == "auto")
            ended[overlap] = [device.now_ns - began]

    assert ended["auto"] < ended["off"]


def test_on_one_memory_a_step_ends_its_update() -> None:
    net = layers()
    with infinity_engine.initialize(
        net, "adamw", accelerator="cpu", budget={"host": "16MiB"}
    ) as made:
        train(made)
        assert not is_left(made)


def test_a_module_waits_for_its_own_parameters_only() -> None:
    seen: list[list[bool]] = []
    with opened(strategy="host_only") as made:
        weights = list(made.model.parameters())
        train(made)
        made.model[0].register_forward_hook(  # type: ignore[index]
            lambda *_: seen.append([bool(each.isnan().any()) for each in weights])
        )
        made(noise(made, 1))

    assert seen == [[False, True, True, True]]


def asks_a_module(made: Engine) -> torch.Tensor:
    return torch.as_tensor(made.model[4].weight.detach()).clone()  # type: ignore[index]


def lists_parameters(made: Engine) -> torch.Tensor:
    return list(made.model.parameters())[2].detach().clone()


def names_parameters(made: Engine) -> torch.Tensor:
    return dict(made.model.named_parameters())["4.weight"].detach().clone()


def takes_the_state_dict(made: Engine) -> torch.Tensor:
    return torch.as_tensor(made.model.state_dict()["4.weight"]).clone()


def copies_the_model(made: Engine) -> torch.Tensor:
    return torch.as_tensor(copy.deepcopy(made.model)[4].weight.detach())  # type: ignore[index]


def pickles_the_model(made: Engine) -> torch.Tensor:
    return torch.as_tensor(pickle.loads(pickle.dumps(made.model))[4].weight.detach())


@pytest.mark.parametrize(
    "look",
    [
        asks_a_module,
        lists_parameters,
        names_parameters,
        takes_the_state_dict,
        copies_the_model,
        pickles_the_model,
        lambda made: made.state_dict()["4.weight"],
    ],
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_whoever_looks_after_a_step_sees_the_new_values(
    look: Callable[[Engine], torch.Tensor], precision: str
) -> None:
    with opened(precision=precision, overlap="off") as made:
        train(made)
        expected = look(made)
    with opened(precision=precision) as made:
        train(made)
        assert is_left(made)
        assert torch.equal(look(made), expected)
        train(made, first=1)


def test_a_reference_in_a_variable_shows_nan_until_somebody_asked_for_it_and_refuses_writes() -> (
    None
):
    with opened(strategy="host_only") as made:
        last = list(made.model.parameters())[-1]
        train(made)

        assert last.isnan().all()
        with torch.no_grad(), pytest.raises(RuntimeError, match="single memory location"):
            last.add_(1)
        made.state_dict()
        assert not last.isnan().any()


class HoldsReferences(nn.Module):
    """Computes with parameters that it has in a list of its own, which no hook sees."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.owners = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
        self.held = [each.weight for each in self.owners]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.held:
            x = torch.tanh(x @ torch.as_tensor(weight))
        return x


def test_a_model_that_computes_with_references_is_trained_with_the_same_bits() -> None:
    expected = on_one_memory(3, model=HoldsReferences)

    with opened(HoldsReferences()) as made:
        train(made, steps=3)
        assert differing(expected, bits_of(made)) == []


class Chooses(nn.Module):
    """Another layer for each batch: in each step others have no gradient, or their first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
        self.turn = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.turn += 1
        return torch.as_tensor(self.layers[self.turn % LAYERS](self.layers[0](x)))


@pytest.mark.parametrize("parameters", WHERE)
def test_parameters_that_had_no_gradient_are_as_they_were(parameters: str) -> None:
    expected = on_one_memory(6, model=Chooses)

    with opened(Chooses(), parameters=parameters) as made:
        train(made, steps=6)
        assert differing(expected, bits_of(made)) == []


@pytest.mark.parametrize("whole", [True, False])
def test_a_compiled_model_is_trained_with_the_same_bits(whole: bool) -> None:
    torch._dynamo.reset()
    expected = on_one_memory(3)
    net = layers()
    if not whole:
        net[2].compile(backend="aot_eager")
    with opened(torch.compile(net, backend="aot_eager") if whole else net) as made:  # type: ignore[arg-type]
        train(made, steps=3)
        assert (
            differing(
                expected,
                {name.removeprefix("_orig_mod."): each for name, each in bits_of(made).items()},
            )
            == []
        )
    torch._dynamo.reset()


def zero_grad(made: Engine) -> None:
    made.zero_grad()
    assert is_left(made)


def evaluates(made: Engine) -> None:
    made.eval()
    with torch.no_grad():
        assert torch.as_tensor(made(noise(made, 9))).isfinite().all()
    made.train()


def changes_hyperparameters(made: Engine) -> None:
    before = made.optimizer.param_groups[0]["lr"]
    made.optimizer.param_groups[0]["lr"] = 99.0  # too late for the step that was made
    loss_of(made, 9)
    made.state_dict()
    made.optimizer.param_groups[0]["lr"] = before


def gathers(made: Engine) -> None:
    weights = list(made._parts.trained)
    with made.gathered([each.parameter for each in weights]):
        assert all(each.parameter.isfinite().all() for each in weights)


def fails_in_forward(made: Engine) -> None:
    with pytest.raises(RuntimeError, match="shapes"):
        made(torch.randn(4, WIDTH + 1))


def steps_without_gradients(made: Engine) -> None:
    with pytest.raises(RuntimeError, match="no gradient to update with"):
        made.step()


def clips(made: Engine) -> None:
    assert made.clip_grad_norm_(1e9) == 0.0
    made._window.clip_to = None


def goes_on_without_backward(made: Engine) -> None:
    for seed in range(3):
        loss_of(made, seed)


USES: list[Use] = [
    zero_grad,
    evaluates,
    changes_hyperparameters,
    gathers,
    fails_in_forward,
    steps_without_gradients,
    clips,
    goes_on_without_backward,
]


@pytest.mark.parametrize("parameters", WHERE)
@pytest.mark.parametrize("use", USES)
def test_whatever_is_done_while_some_is_left_bits_are_the_same(parameters: str, use: Use) -> None:
    expected = on_one_memory(3)

    with opened(parameters=parameters) as made:
        for step in range(3):
            train(made, first=step)
            assert is_left(made)
            use(made)
        assert differing(expected, bits_of(made)) == []


@pytest.mark.usefixtures("host_updates")
@pytest.mark.parametrize("parameters", WHERE)
def test_closing_while_some_is_left_ends_it_and_leaves_an_ordinary_model(parameters: str) -> None:
    net = layers()
    mappings = [module._parameters for module in net.modules()]
    expected = on_one_memory(2)
    with opened(net, parameters=parameters) as made:
        train(made, steps=2)
        assert is_left(made)

    assert all(torch.equal(net.state_dict()[name], expected[name]) for name in net.state_dict())
    assert [id(module._parameters) for module in net.modules()] == list(map(id, mappings))
    assert not any(module._forward_pre_hooks for module in net.modules())
    net(torch.randn(4, WIDTH)).sum().backward()


def test_where_an_engine_cannot_be_made_after_all_the_model_has_no_hooks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net = layers()

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("infinity_engine.engine.engine.Executor", fail)
    with pytest.raises(ZeroDivisionError), opened(net):
        pass

    assert not any(
        module._forward_pre_hooks or type(module._parameters) is not dict
        for module in net.modules()
    )


def test_in_groups_of_an_optimizer_what_the_first_module_needs_still_comes_first() -> None:
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    biases = [each.bias for each in net]
    groups = [{"params": [each.weight for each in net]}, {"params": biases, "weight_decay": 0.0}]
    with opened(net, optimizer=torch.optim.AdamW(groups, lr=1e-2)) as made:  # type: ignore[arg-type]
        assert [each.name for each in made._parts.trained][:4] == [
            "0.weight",
            "0.bias",
            "1.weight",
            "1.bias",
        ]
        assert [each.group for each in made._parts.trained][:4] == [0, 1, 0, 1]


def test_where_there_is_no_room_beside_the_staging_sets_the_update_ends_first() -> None:
    expected = on_one_memory(3)
    numel = sum(each.numel() for each in layers().parameters())
    # of gradients on their way, a staging set, and gradients that stay
    least = 2 * 4 * 4096 + 12 * 4096 + 4 * numel
    with opened(
        parameters="host", strategy={"name": "interleaved", "share": 1.0}, device_bytes=least
    ) as made:
        train(made, steps=3)
        assert differing(expected, bits_of(made)) == []


# --- failures -------------------------------------------------------------------------------------


class Breaks:
    """Breaks the n-th copy or work, once."""

    def __init__(self) -> None:
        self.countdown: int | None = None
        self.seen = 0

    def __call__(self, _kind: StreamKind) -> Exception | None:
        self.seen += 1
        if self.countdown is None:
            return None
        self.countdown -= 1
        if self.countdown:
            return None
        self.countdown = None
        return RuntimeError("the device is broken")


def in_a_step(made: Engine) -> bool:
    """Tell whether a call of step() has to be made again."""
    states = made._parts.states
    return states.begun and not states.step.is_counted


def finish(made: Engine, seed: int) -> list[str]:
    """Make one step, whatever fails; return what was told."""
    told: list[str] = []
    while len(told) < 5:
        try:
            if not in_a_step(made):
                made.zero_grad()
                made.backward(loss_of(made, seed))
            made.step()
        except (OSError, RuntimeError) as error:
            told.append(str(error))
        else:
            return told
    raise AssertionError(told)


@pytest.mark.usefixtures("host_updates")
@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("parameters", WHERE)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("overlap", ["auto", "off"])
def test_whatever_fails_is_told_and_gone_on_with(
    parameters: str, precision: str, overlap: str, every: int
) -> None:
    first = (len(overlap) + len(precision) + len(parameters)) % every  # another one in each case
    settings: dict[str, Any] = {
        "parameters": parameters,
        "precision": precision,
        "overlap": overlap,
    }
    expected = on_one_memory(2, precision=precision)
    breaks = Breaks()
    with opened(fault=breaks, **settings) as made:
        before = breaks.seen
        for seed in range(2):
            finish(made, seed)
        made.state_dict()
        last = breaks.seen

    told = []
    for nth in range(before + 1 + first, last + 1, every):
        breaks = Breaks()
        with opened(fault=breaks, **settings) as made:
            breaks.countdown = nth - before
            told += finish(made, 0) + finish(made, 1)
            try:
                made.state_dict()
            except RuntimeError as error:
                told.append(str(error))
            assert differing(expected, bits_of(made)) == [], nth
    assert any("op " in each and "of the plan" in each for each in told)


@pytest.mark.parametrize("parameters", WHERE)
@pytest.mark.parametrize("overlap", ["auto", "off"])
def test_a_kernel_of_the_host_that_fails_is_told_and_gone_on_with(
    parameters: str, overlap: str, host_updates: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = on_one_memory(2)
    kernel, count, threads = host.HostKernels.update, [0], set()

    def broken(self: host.HostKernels, update: Update) -> None:
        count[0] += 1
        threads.add(threading.current_thread() is threading.main_thread())
        if count[0] == 3:
            raise RuntimeError("the kernel is broken")
        kernel(self, update)

    with opened(parameters=parameters, overlap=overlap, strategy="host_only") as made:
        monkeypatch.setattr(host.HostKernels, "update", broken)
        told = finish(made, 0) + finish(made, 1)
        made.state_dict()
        assert differing(expected, bits_of(made)) == []

    assert len(told) == 1
    assert "the kernel is broken" in told[0]
    assert threads == {not host_updates}


@pytest.mark.parametrize("host_updates", [True], indirect=True, ids=["on a thread"])
def test_a_failure_that_a_prefetch_met_is_told_by_the_next_call(
    host_updates: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = on_one_memory(2)
    kernel, end_step = host.HostKernels.update, ParameterFetcher.end_step
    count, broke = [0], threading.Event()

    def broken(self: host.HostKernels, update: Update) -> None:
        count[0] += 1
        if count[0] == 3:
            broke.set()
            raise RuntimeError("the kernel is broken")
        kernel(self, update)

    def late(self: ParameterFetcher) -> TraceMismatch | None:
        if broke.wait(5):
            time.sleep(0.05)  # the thread notes the failure
        return end_step(self)

    with opened(parameters="host", overlap="auto", strategy="host_only") as made:
        monkeypatch.setattr(host.HostKernels, "update", broken)
        monkeypatch.setattr(ParameterFetcher, "end_step", late)
        told = finish(made, 0) + finish(made, 1)
        made.state_dict()
        assert differing(expected, bits_of(made)) == []

    assert len(told) == 1
    assert "the kernel is broken" in told[0]


def test_a_failure_is_told_by_whoever_meets_it_and_modules_are_not_shown_a_mixture() -> None:
    broken = [False]

    def fault(kind: StreamKind) -> Exception | None:
        return RuntimeError("the link is down") if broken[0] and kind is StreamKind.H2D else None

    expected = on_one_memory(2)
    with opened(fault=fault, strategy="host_only") as made:
        last = list(made.model.parameters())[-1]
        train(made)
        broken[0] = True
        told = r"op \d+ of the plan, UploadParameters of subgroup \d+, failed"
        with pytest.raises(RuntimeError, match=told):
            made(noise(made, 1))
        with pytest.raises(RuntimeError, match=told):
            made.model(noise(made, 1))  # without the engine, which would go on
        assert last.isnan().all()
        with pytest.raises(RuntimeError, match=told):
            made.state_dict()
        broken[0] = False

        train(made, first=1)
        assert differing(expected, bits_of(made)) == []


FILES = (
    "parameters/pending.py",
    "parameters/deferred.py",
    "parameters/hooks.py",
    "schedule/executor.py",
    "engine/engine.py",
)


@pytest.mark.parametrize("first", walks(1, 12, 23, 34, 45, 56))
@pytest.mark.parametrize("parameters", WHERE)
def test_a_forward_that_is_interrupted_anywhere_can_be_made_again(
    first: int, parameters: str
) -> None:
    expected = on_one_memory(2)
    for line in range(first, 20_000, 67):
        with opened(parameters=parameters, telemetry={"recording": "off"}) as made:
            train(made)
            with interrupted_at(line, FILES) as told:
                loss_of(made, 1)
            train(made, first=1)
            assert differing(expected, bits_of(made)) == [], line
        if not told[0]:
            return


@pytest.mark.parametrize("first", walks(1, 18, 35, 52, 69, 86))
@pytest.mark.parametrize("parameters", WHERE)
def test_a_step_that_is_interrupted_anywhere_goes_on(first: int, parameters: str) -> None:
    expected = on_one_memory(2)
    for line in range(first, 20_000, 101):
        with opened(parameters=parameters, telemetry={"recording": "off"}) as made:
            made.backward(loss_of(made, 0))
            with interrupted_at(line, FILES) as told:
                made.step()
            if told[0] and made.steps == 0:
                made.step()
            train(made, first=1)
            assert differing(expected, bits_of(made)) == [], line
        if not told[0]:
            return


@pytest.mark.parametrize("overlap", ["auto", "off"])
@pytest.mark.parametrize("parameters", WHERE)
def test_a_parameter_whose_data_somebody_replaces_after_a_step_is_refused(
    parameters: str, overlap: str
) -> None:
    with opened(parameters=parameters, overlap=overlap) as made:
        last = list(made.model.parameters())[-1]
        train(made)
        last.data = torch.ones(WIDTH, WIDTH)
        with pytest.raises(RuntimeError, match=r"6\.weight was changed outside of the engine"):
            train(made, first=1)


@pytest.mark.usefixtures("host_updates")
@pytest.mark.parametrize("overlap", ["auto", "off"])
@pytest.mark.parametrize("parameters", WHERE)
def test_ctrl_c_when_the_kernel_has_returned_updates_nothing_twice(
    parameters: str, overlap: str
) -> None:
    expected = on_one_memory(2)
    settings: dict[str, Any] = {"parameters": parameters, "overlap": overlap}

    def stepped(nth: int) -> bool:
        with opened(**settings) as made:
            made.backward(loss_of(made, 0))
            was = interrupted(made.step, nth, [host])
            if was and not made.steps:
                made.step()
            was = interrupted(lambda: loss_of(made, 1), nth, [host]) or was
            train(made, first=1)
            assert differing(expected, bits_of(made)) == [], nth
            return was

    assert stepped(0)
    assert all(stepped(nth) or nth > 2 for nth in range(1, 12))


@pytest.mark.parametrize("parameters", WHERE)
@pytest.mark.parametrize("overlap", ["auto", "off"])
def test_a_backward_of_a_graph_made_before_a_step_is_refused(parameters: str, overlap: str) -> None:
    with opened(parameters=parameters, overlap=overlap) as made:
        older = loss_of(made, 1)
        train(made)
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation|before"):
            made.backward(older)
        made.zero_grad()
        train(made)


def test_a_graph_stays_usable_where_a_step_is_skipped() -> None:
    with opened(parameters="device", precision="fp16") as made:
        older = loss_of(made, 1)
        made.backward(loss_of(made, 0) * 1e30)
        assert made.step().outcome is Outcome.SKIPPED
        made.backward(older)
