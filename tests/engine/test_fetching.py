"""Parameters fetched around modules: whatever a model does with them, bits are those without
fetching, or it is told.

On the emulated accelerator, whose memory is NaN where nothing was written and after it was freed,
with the least device budget that is accepted, so that parameters make room for one another all the
time.
"""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import infinity_engine
from infinity_engine.accel import Emulation, StreamKind, VirtualAccelerator
from infinity_engine.engine.engine import Engine
from infinity_engine.errors import CapacityError, TransferError
from infinity_engine.parameters.fetching import ParameterFetcher
from infinity_engine.plan import Rates, Tier
from support.engine_bits import bits_of, differing

RATES = Rates(
    h2d_bytes_per_s=5e9,
    d2h_bytes_per_s=4e9,
    host_update_params_per_s=2e8,
    device_update_params_per_s=2e9,
)
CAPACITY = 4 << 20
HOST = "16MiB"
STEPS = 3
WIDTH = 8
Loss = Callable[[Engine, torch.Tensor], torch.Tensor]
Fault = Callable[[StreamKind], Exception | None]
pytestmark = pytest.mark.usefixtures("deterministic")


def emulated(seed: int = 0, fault: Fault | None = None) -> VirtualAccelerator:
    return VirtualAccelerator(
        Emulation(rates=RATES, capacity_bytes=CAPACITY, seed=seed, fault=fault)
    )


def made_of(make: Callable[[], nn.Module]) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = make()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return model, torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def initialized(
    make: Callable[[], nn.Module], device: VirtualAccelerator, device_bytes: int, **settings: Any
) -> Engine:
    """Wrap a model whose parameters are fetched."""
    budget = {"host": HOST, "device": device_bytes}
    settings = {"strategy": "host_only", "update_threads": 1, "rates": RATES, **settings}
    return infinity_engine.initialize(
        *made_of(make), device=device, parameters="host", budget=budget, **settings
    )


def least(make: Callable[[], nn.Module], **settings: Any) -> int:
    """Return the smallest device budget that is accepted."""
    device_bytes = 1
    with emulated() as device:
        while True:
            try:
                initialized(make, device, device_bytes, **settings).close()
            except CapacityError as refused:
                missing = refused.asked - refused.free
                if refused.tier != "DEVICE" or missing <= 0:
                    raise
                device_bytes += missing
            else:
                return device_bytes


@contextmanager
def fetching(
    make: Callable[[], nn.Module],
    *,
    more: int | None = 0,
    seed: int = 0,
    fault: Fault | None = None,
    **settings: Any,
) -> Iterator[Engine]:
    """An engine with the least budget and some bytes more; None: all that there is."""
    device_bytes = CAPACITY if more is None else least(make, **settings) + more
    with emulated(seed, fault) as device:
        with initialized(make, device, device_bytes, **settings) as made:
            yield made
        assert device.memory().free == CAPACITY


@contextmanager
def unfetched(make: Callable[[], nn.Module], **settings: Any) -> Iterator[Engine]:
    """The same, on one memory."""
    settings = {"update_threads": 1, **settings}
    with infinity_engine.initialize(
        *made_of(make), accelerator="cpu", budget={"host": HOST}, **settings
    ) as made:
        yield made


def noise(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape or (4, WIDTH), generator=torch.Generator().manual_seed(seed))


def squares(made: Engine, batch: torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(made(batch)).pow(2).mean()


def train(made: Engine, loss: Loss = squares, *, steps: int = STEPS, first: int = 0) -> list[float]:
    losses = []
    for step in range(first, first + steps):
        value = loss(made, noise(step))
        made.backward(value)
        made.step()
        losses.append(value.item())
    return losses


def assert_the_same(
    make: Callable[[], nn.Module],
    run: Callable[[Engine], object],
    *,
    more: int | None = 0,
    **settings: Any,
) -> None:
    """Assert that what `run` returns, and what it leaves, is the same with and without fetching."""
    with unfetched(make) as made:
        expected = run(made), bits_of(made)
    for seed in range(3):
        with fetching(make, more=more, seed=seed, **settings) as made:
            result = run(made), bits_of(made)
            assert made.fetching().fetched > 0
        assert differing(expected[1], result[1]) == []
        assert result[0] == expected[0]


def mlp() -> nn.Sequential:
    layers = (
        nn.Linear(WIDTH, WIDTH),
        nn.Tanh(),
        nn.Linear(WIDTH, WIDTH),
        nn.LayerNorm(WIDTH),
        nn.Linear(WIDTH, WIDTH),
    )
    return nn.Sequential(*layers)


# --- what models do with their parameters ---------------------------------------------------------


class OfParts(nn.Module):
    """Some modules, and a function that uses them."""

    def __init__(self, use: Callable[[Any, torch.Tensor], torch.Tensor], **parts: Any) -> None:
        super().__init__()
        self.use = use
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.use(self, x)


class GivesItsWeight(nn.Linear):
    def forward(self, _x: torch.Tensor) -> torch.Tensor:
        return self.weight


@dataclass
class Given:
    weight: torch.Tensor


class GivesARecord(nn.Linear):
    def forward(self, _x: torch.Tensor) -> Any:
        return Given(self.weight)


class SavesItsWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return gradients[0] * weight, gradients[0] * x


def attention() -> nn.Module:
    return OfParts(
        lambda own, x: own.b(own.a(x, x, x)[0], x, x, need_weights=False)[0],
        a=nn.MultiheadAttention(WIDTH, 2),
        b=nn.MultiheadAttention(WIDTH, 4, kdim=WIDTH, vdim=WIDTH, add_bias_kv=True),
    )


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
    return OfParts(lambda own, x: own.layers(x[None]), layers=nn.TransformerEncoder(layer, 2))


def recurrent() -> nn.Module:
    return OfParts(
        lambda own, x: own.b(own.a(x[None])[0])[0],
        a=nn.LSTM(WIDTH, WIDTH, num_layers=2, bidirectional=True),
        b=nn.GRU(2 * WIDTH, WIDTH),
    )


def lists() -> nn.Module:
    def use(own: Any, x: torch.Tensor) -> torch.Tensor:
        for weight in own.each:
            x = torch.tanh(x @ weight)
        return torch.as_tensor(x * own.named["scale"] + own.named["shift"] @ own.deep["inner"][0])

    weights = nn.ParameterList(torch.randn(WIDTH, WIDTH) for _ in range(3))
    named = nn.ParameterDict({"scale": torch.randn(WIDTH), "shift": torch.randn(WIDTH)})
    deep = nn.ModuleDict({"inner": nn.ParameterList([torch.randn(WIDTH, WIDTH)])})
    return OfParts(use, each=weights, named=named, deep=deep)


def tied() -> nn.Module:
    made = OfParts(
        lambda own, x: own.c(torch.tanh(own.b(torch.tanh(own.a(x))))) * own.scale,
        **{name: nn.Linear(WIDTH, WIDTH) for name in "abc"},
        scale=nn.Parameter(torch.tensor(1.5)),
        empty=nn.Parameter(torch.zeros(0, 3)),
    )
    made.c.weight = made.a.weight  # type: ignore[union-attr]
    return made


def low_rank() -> nn.Module:
    made = OfParts(
        lambda own, x: own.b(torch.relu(own.a(x) + x @ own.up @ own.down)),
        a=nn.Linear(WIDTH, WIDTH),
        b=nn.Linear(WIDTH, WIDTH),
        up=nn.Parameter(torch.randn(WIDTH, 2)),
        down=nn.Parameter(torch.zeros(2, WIDTH)),
    )
    for frozen in (*made.a.parameters(), *made.b.parameters()):  # type: ignore[union-attr]
        frozen.requires_grad_(False)
    return made


def of_views() -> nn.Module:
    def use(own: Any, x: torch.Tensor) -> torch.Tensor:
        q, k = own.both.weight.chunk(2)
        x = torch.tanh(functional.linear(x, q)) @ k.t().contiguous()
        product = torch.einsum("bi,ij->bj", x, own.both.weight.view(2, WIDTH, WIDTH)[1])
        return torch.as_tensor(product * own.both.weight[0])

    return OfParts(use, both=nn.Linear(WIDTH, 2 * WIDTH))


KINDS: dict[str, Callable[[], nn.Module]] = {
    "a stack": mlp,
    "attention": attention,
    "encoder layers": encoder,
    "recurrent": recurrent,
    "lists of parameters": lists,
    "tied, scalar and empty": tied,
    "frozen with low rank": low_rank,
    "views": of_views,
    "a child's weight": lambda: OfParts(
        lambda own, x: functional.linear(torch.tanh(own.a(x)), own.a.weight.t()),
        a=nn.Linear(WIDTH, WIDTH),
    ),
    "a weight that is returned": lambda: OfParts(
        lambda own, x: torch.tanh(own.b(x)) @ own.a(x) @ own.a(x).t(),
        a=GivesItsWeight(WIDTH, WIDTH),
        b=nn.Linear(WIDTH, WIDTH),
    ),
    "a weight in a record that is returned": lambda: OfParts(
        lambda own, x: own.a(x).weight @ own.b(torch.tanh(x)).t(),
        a=GivesARecord(WIDTH, WIDTH),
        b=nn.Linear(WIDTH, WIDTH),
    ),
    "an autograd function": lambda: OfParts(
        lambda own, x: own.b(torch.as_tensor(SavesItsWeight.apply(own.a(x), own.scale))),  # type: ignore[no-untyped-call]
        a=nn.Linear(WIDTH, WIDTH),
        b=nn.Linear(WIDTH, WIDTH),
        scale=nn.Parameter(torch.randn(WIDTH)),
    ),
    "weight norm": lambda: nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
        nn.Tanh(),
        nn.Linear(WIDTH, WIDTH),
    ),
    "convolutions": lambda: OfParts(
        lambda own, x: own.b(torch.relu(own.norm(own.a(x[:, None])))),
        a=nn.Conv1d(1, 3, 3, padding=1),
        norm=nn.BatchNorm1d(3),
        b=nn.ConvTranspose1d(3, 2, 3),
    ),
    "a sparse product": lambda: OfParts(
        lambda own, x: own.b(torch.sparse.mm(torch.eye(len(x)).to_sparse(), own.a(x)).tanh()),
        a=nn.Linear(WIDTH, WIDTH),
        b=nn.Linear(WIDTH, WIDTH),
    ),
    "one linear layer": lambda: nn.Linear(WIDTH, WIDTH),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_is_trained_with_the_same_bits(kind: str) -> None:
    assert_the_same(KINDS[kind], train)


@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_gives_the_same_bits_and_leaves_training_as_it_was(kind: str) -> None:
    def run(made: Engine) -> list[float]:
        before = train(made, steps=2)
        made.eval()
        with torch.no_grad():
            seen = [squares(made, noise(seed)).item() for seed in (7, 8)]
        graph = squares(made, noise(9))  # that nobody uses
        seen.append(graph.item())
        made.train()
        return [*before, *seen, *train(made, first=2)]

    assert_the_same(KINDS[kind], run)  # an encoder layer reads all its weights when it is evaluated


# --- how the model is used ------------------------------------------------------------------------


def direct(made: Engine, batch: torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(made.model(batch)).pow(2).mean()


def with_penalty(made: Engine, batch: torch.Tensor) -> torch.Tensor:
    layers = [layer for layer in made.model.modules() if isinstance(layer, nn.Linear)]
    penalty = sum((layer.weight.pow(2).sum() for layer in layers), torch.zeros(()))
    return penalty * 1e-3 + squares(made, batch)


def by_functions(made: Engine, batch: torch.Tensor) -> torch.Tensor:
    model: Any = made.model
    return (
        functional.linear(squares(made, batch) * batch, model[0].weight, model[0].bias)
        .pow(2)
        .mean()
    )


def with_its_parameters_given(made: Engine, batch: torch.Tensor) -> torch.Tensor:
    given: dict[str, torch.Tensor] = dict(made.model.named_parameters())
    return torch.as_tensor(torch.func.functional_call(made.model, given, batch)).pow(2).mean()


def twice(made: Engine, batch: torch.Tensor) -> torch.Tensor:
    return squares(made, batch) * squares(made, batch + 1)


def with_gradient_penalty(made: Engine, batch: torch.Tensor) -> torch.Tensor:
    batch.requires_grad_(True)
    out = torch.as_tensor(made(batch)).pow(2).mean()
    (gradient,) = torch.autograd.grad(out, batch, create_graph=True)
    return out + gradient.pow(2).sum()


def saved_on_cpu(made: Engine, batch: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.save_on_cpu():
        return squares(made, batch)


def all_of_it_checkpointed(made: Engine, batch: torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(checkpoint(made.model, batch, use_reentrant=False)).pow(2).mean()


@pytest.mark.parametrize(
    ("loss", "more"),
    [
        (direct, 0),
        (with_penalty, 0),
        (by_functions, 0),
        (with_its_parameters_given, 0),
        (twice, 0),
        (with_gradient_penalty, 0),
        (saved_on_cpu, 0),
        (all_of_it_checkpointed, 0),
    ],
)
def test_however_a_model_is_called_the_bits_are_the_same(loss: Loss, more: int) -> None:
    assert_the_same(mlp, lambda made: train(made, loss), more=more)


def test_a_graph_that_is_kept_gives_the_same_gradients_again() -> None:
    def run(made: Engine) -> list[float]:
        loss = squares(made, noise(0))
        made.backward(loss, retain_graph=True)
        made.backward(loss)
        made.step()
        return train(made, first=1)

    assert_the_same(mlp, run)


def test_gradients_with_regard_to_inputs_and_parameters_are_the_same() -> None:
    def run(made: Engine) -> list[float]:
        batch = noise(0).requires_grad_(True)
        weight = made.model[0].weight  # type: ignore[index]
        found = torch.autograd.grad(squares(made, batch), (batch, weight))
        return [*found[0].flatten().tolist(), *found[1].flatten().tolist(), *train(made)]

    assert_the_same(mlp, run)


def test_clearing_gradients_between_forward_and_backward_takes_nothing_from_the_backward() -> None:
    def cleared(made: Engine, batch: torch.Tensor) -> torch.Tensor:
        loss = with_penalty(made, batch)
        made.zero_grad()
        return loss

    assert_the_same(mlp, lambda made: train(made, cleared))


class Checkpointed(nn.Module):
    """Blocks that are computed again in the backward; `within` the computation, one of two
    kinds.
    """

    def __init__(self, outer: bool | None, inner: bool | None) -> None:
        super().__init__()
        self.reentrant = (outer, inner)
        self.blocks = nn.ModuleList(mlp() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self.again(0, self.run, block, x)
        return x

    def run(self, block: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.again(1, block[:2], x)
        return torch.as_tensor(self.again(1, block[2:], x)) + x

    def again(self, level: int, function: Any, *args: Any) -> torch.Tensor:
        reentrant = self.reentrant[level]
        if reentrant is None:
            return torch.as_tensor(function(*args))
        return torch.as_tensor(checkpoint(function, *args, use_reentrant=reentrant))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("inner", [None, False, True])
@pytest.mark.parametrize("outer", [False, True])
def test_blocks_that_are_computed_again_have_the_same_bits(outer: bool, inner: bool | None) -> None:
    def loss(made: Engine, batch: torch.Tensor) -> torch.Tensor:
        return squares(made, batch.requires_grad_(True))

    assert_the_same(lambda: Checkpointed(outer, inner), lambda made: train(made, loss))


class Marked(nn.Module):
    """Deep blocks that are computed again, marked as Transformers marks them."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.gradient_checkpointing = True
        self._gradient_checkpointing_func = partial(checkpoint, use_reentrant=reentrant)
        self.blocks = nn.ModuleList(
            nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.as_tensor(self._gradient_checkpointing_func(block, x))
        return x


@pytest.mark.parametrize("reentrant", [False, True])
def test_the_least_room_holds_a_whole_block_of_a_model_that_recomputes_itself(
    reentrant: bool,
) -> None:
    with fetching(partial(Marked, reentrant), subgroup_numel=4096) as made:
        for step in range(STEPS):
            made.backward(squares(made, noise(step, 4, 64).requires_grad_(True)))
            made.step()


def test_a_block_that_is_recomputed_by_the_reentrant_kind_needs_one_module_at_a_time() -> None:
    apart = {
        reentrant: least(partial(Marked, reentrant), subgroup_numel=4096)
        for reentrant in (False, True)
    }

    assert apart[False] - apart[True] >= 4 * 64 * 64 * 4


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_function_that_reads_parameters_itself_can_be_computed_again(reentrant: bool) -> None:
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
            self.scale = nn.Parameter(torch.randn(WIDTH))

        def run(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(functional.linear(x, layer.weight, layer.bias) * self.scale)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = torch.as_tensor(checkpoint(self.run, layer, x, use_reentrant=reentrant))
            return x

    def loss(made: Engine, batch: torch.Tensor) -> torch.Tensor:
        return squares(made, batch.requires_grad_(True))

    assert_the_same(Functional, lambda made: train(made, loss))


class Wandering(nn.Module):
    """Goes another way through its layers when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.way = list(range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.way:
            x = torch.tanh(self.layers[layer](x))
        return x


WAYS = (
    [0, 1, 2, 3, 4, 5],
    [5, 0, 3],
    [0, 1, 2, 3, 4, 5],
    [2, 2, 1, 5, 4, 3, 0],
    [1],
    [0, 1, 2, 3, 4, 5],
)


def test_control_flow_that_changes_between_steps_has_the_same_bits() -> None:
    def run(made: Engine) -> list[float]:
        losses = []
        for step, way in enumerate(WAYS):
            made.model.way = way  # type: ignore[assignment]
            losses += train(made, first=step, steps=1)
        return losses

    assert_the_same(Wandering, run, more=600)


def test_from_the_second_step_of_one_order_on_nothing_is_late() -> None:
    with fetching(Wandering, more=600) as made:
        late = []
        for way in (WAYS[0], WAYS[0], WAYS[1], WAYS[1], WAYS[1]):
            before = made.fetching().late
            made.model.way = way  # type: ignore[assignment]
            train(made, steps=1)
            late.append(made.fetching().late - before)

    assert late[0] > 0
    assert late[1] == 0
    assert late[2] > 0
    assert late[3:] == [0, 0]


def test_accumulated_micro_batches_have_the_same_bits() -> None:
    with unfetched(mlp, accumulation_steps=2) as made:
        train(made, steps=4)
        expected = bits_of(made)
    with fetching(mlp, accumulation_steps=2) as made:
        train(made, steps=4)
        assert differing(expected, bits_of(made)) == []


# --- what is told ---------------------------------------------------------------------------------


def model_of(made: Engine) -> Any:
    return made.model


def test_a_backward_after_the_step_is_told() -> None:
    with fetching(mlp) as made:
        loss = squares(made, noise(0))
        made.backward(loss, retain_graph=True)
        made.step()

        with pytest.raises(
            RuntimeError, match=r"4\.weight as it was in the forward.*Call backward\(\) before"
        ):
            made.backward(loss)


def test_a_backward_through_what_is_frozen_is_as_good_after_the_step() -> None:
    def run(made: Engine) -> list[float]:
        model = model_of(made)
        x = noise(0).requires_grad_(True)
        later = functional.linear(x, model.a.weight).pow(2).sum()
        losses = train(made)
        later.backward()  # type: ignore[no-untyped-call]
        assert x.grad is not None
        return [*losses, *x.grad.flatten().tolist()]

    assert_the_same(low_rank, run)


def test_a_change_under_gathered_between_forward_and_backward_is_told() -> None:
    with fetching(mlp, more=None) as made:
        loss = squares(made, noise(0))
        with made.gathered(model_of(made)[2].weight, modify=True), torch.no_grad():
            model_of(made)[2].weight.fill_(0.5)

        with pytest.raises(RuntimeError, match=r"2\.weight as it was in the forward"):
            made.backward(loss)


def test_a_saved_activation_that_is_modified_in_place_is_told() -> None:
    with fetching(mlp) as made:
        x = noise(0).requires_grad_(True)
        hidden = torch.tanh(model_of(made)[0](x))
        loss = model_of(made)[2](hidden).sum()
        hidden.add_(1)

        with pytest.raises(RuntimeError, match=r"modified by an in-?place operation"):
            made.backward(loss)


def test_an_activation_that_is_modified_in_place_within_the_model_is_told() -> None:
    def modifying(own: Any, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(own.a(x))
        out = own.b(hidden)
        hidden.mul_(2)
        return torch.as_tensor(out)

    with fetching(
        lambda: OfParts(modifying, a=nn.Linear(WIDTH, WIDTH), b=nn.Linear(WIDTH, WIDTH))
    ) as made:
        loss = squares(made, noise(0))

        with pytest.raises(RuntimeError, match=r"\(4, 8\).*modified by an in-place operation"):
            made.backward(loss)


def test_a_write_outside_of_gathered_is_told_and_kept_where_the_engine_is_closed_then() -> None:
    with fetching(mlp) as made:
        model = model_of(made)
        with torch.no_grad():
            model[0].weight.fill_(0.25)
        with pytest.raises(RuntimeError, match=r"0\.weight was changed outside"):
            train(made)

    assert torch.equal(model[0].weight, torch.full((WIDTH, WIDTH), 0.25))


def test_a_write_to_a_parameter_that_is_not_there_is_an_error() -> None:
    with fetching(mlp) as made, torch.no_grad():
        parameter = next(made.model.parameters())
        with pytest.raises(RuntimeError, match="single memory location"):
            parameter.clamp_(-1, 1)


def test_a_read_of_a_parameter_that_is_only_listed_gives_no_number() -> None:
    with fetching(mlp) as made:
        assert all(parameter.isnan().all() for parameter in made.model.parameters())
        assert [parameter.shape for parameter in made.model.parameters()] == [
            each.shape for each in mlp().parameters()
        ]


def test_state_dict_of_the_model_is_refused_and_that_of_the_engine_is_right() -> None:
    with unfetched(mlp) as made:
        train(made)
        expected = made.state_dict()
    with fetching(mlp) as made:
        train(made)

        with pytest.raises(RuntimeError, match=r"Call engine\.state_dict\(\)"):
            made.model.state_dict()
        assert differing(expected, made.state_dict()) == []


def test_values_are_loaded_where_they_are_gathered_and_refused_where_they_are_not() -> None:
    with unfetched(mlp) as made:
        train(made)
        saved = made.state_dict()
    for precision in ("fp32", "bf16"):
        with fetching(mlp, precision=precision) as made:
            with pytest.raises(
                RuntimeError,
                match=r"0\.weight is not on the device, so nothing can be loaded into it.*gathered\(model\.parameters\(\)",
            ):
                made.model.load_state_dict(saved)
            with made.gathered(made.model.parameters(), modify=True):
                made.model.load_state_dict(saved)
            part = model_of(made)[2]
            with made.gathered(part.parameters(), modify=True):
                part.load_state_dict(
                    {name: 2 * saved[f"2.{name}"] for name, _ in part.named_parameters()}
                )

            found = made.state_dict()
            assert torch.equal(found["0.weight"], saved["0.weight"].to(found["0.weight"].dtype))
            assert torch.equal(found["2.weight"], 2 * saved["2.weight"].to(found["2.weight"].dtype))


@pytest.mark.parametrize("overlap", ["off", "auto"])
def test_evaluation_in_inference_mode_leaves_what_can_be_trained_with(overlap: str) -> None:
    def run(made: Engine) -> list[float]:
        found = []
        for step in range(STEPS):
            with torch.inference_mode():
                found.append(squares(made, noise(step)).item())
                with made.gathered(made.model.parameters()):
                    pass
            found += train(made, first=step, steps=1)
        return found

    assert_the_same(mlp, run, overlap=overlap)
    assert_the_same(
        mlp, run, overlap=overlap, more=None, strategy={"name": "interleaved", "share": 0.5}
    )


def test_state_dict_of_a_part_of_the_model_is_refused_too() -> None:
    with (
        fetching(lambda: nn.Sequential(mlp(), mlp())) as made,
        pytest.raises(RuntimeError, match=r"engine\.state_dict"),
    ):
        model_of(made)[1].state_dict()


@pytest.mark.parametrize("copying", [copy.deepcopy, pickle.dumps])
@pytest.mark.parametrize("part", [lambda model: model, lambda model: model[0]])
def test_a_model_is_neither_copied_nor_pickled(
    copying: Callable[[nn.Module], object], part: Callable[[Any], nn.Module]
) -> None:
    with (
        fetching(mlp) as made,
        pytest.raises(TypeError, match=r"engine\.state_dict\(\), or close the engine"),
    ):
        copying(part(made.model))


def test_what_is_used_at_once_and_does_not_fit_is_named_with_what_to_change() -> None:
    def use(own: Any, x: torch.Tensor) -> torch.Tensor:
        for layer in own.layers:
            x = torch.tanh(functional.linear(x, layer.weight))
        return x

    layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
    with fetching(lambda: OfParts(use, layers=layers), subgroup_numel=4096) as made:
        with pytest.raises(
            CapacityError, match=r"parameter layers\.0\.weight holds.*stays until it returns"
        ) as refused:
            made(noise(0, 4, 64))

        assert refused.value.tier == "DEVICE"
        assert "raise the budget's device. layers.3.weight is needed" in refused.value.change
        made.model.layers = nn.ModuleList(list(layers)[:2])
        made(noise(0, 4, 64))


# --- gathered -------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_change_under_gathered_is_trained_on(precision: str) -> None:
    def run(made: Engine) -> list[float]:
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32

        def loss(made: Engine, batch: torch.Tensor) -> torch.Tensor:
            return squares(made, batch.to(dtype)).float()

        losses = train(made, loss)
        weight = model_of(made)[2].weight
        with made.gathered(weight, modify=True), torch.no_grad():
            weight.mul_(0.5)
        return [*losses, weight.float().sum().item(), *train(made, loss, first=STEPS)]

    with unfetched(mlp, precision=precision) as made:
        expected = run(made), bits_of(made)
    with fetching(mlp, precision=precision) as made:
        assert run(made) == expected[0]
        assert differing(expected[1], bits_of(made)) == []


def test_gathered_shows_values_and_a_change_without_modify_is_told() -> None:
    with fetching(mlp, more=None) as made:
        parameters = list(made.model.parameters())
        with made.gathered(parameters):
            assert torch.equal(
                torch.cat([each.flatten() for each in parameters]),
                torch.cat([*map(flat, mlp_values())]),
            )

        told = pytest.raises(RuntimeError, match=r"0\.weight was changed outside.*modify=True")
        with told, made.gathered(parameters[0]), torch.no_grad():
            parameters[0].zero_()


def flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().flatten()


def mlp_values() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [parameter.detach() for parameter in mlp().parameters()]


def test_a_step_within_gathered_is_refused_and_can_be_made_after_it() -> None:
    with unfetched(mlp) as made:
        train(made, steps=1)
        expected = bits_of(made)
    with fetching(mlp) as made:
        weight = model_of(made)[0].weight
        made.backward(squares(made, noise(0)))
        with (
            made.gathered(weight, modify=True),
            pytest.raises(RuntimeError, match=r"updates 0\.weight.*gathered"),
        ):
            made.step()
        made.step()

        assert differing(expected, bits_of(made)) == []


def test_gathered_can_be_within_gathered_and_within_a_forward() -> None:
    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)
            self.engine: list[Engine] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with (
                self.engine[0].gathered(self.layer.parameters()),
                self.engine[0].gathered(self.layer.weight),
            ):
                return torch.as_tensor(self.layer(x)) * self.layer.weight.detach().sum()

    def run(made: Engine) -> list[float]:
        model_of(made).engine.append(made)
        return train(made)

    assert_the_same(Asks, run)


# --- failures -------------------------------------------------------------------------------------


class Fails(nn.Module):
    """Raises when it is told to."""

    def __init__(self, within: nn.Module) -> None:
        super().__init__()
        self.within = within
        self.error: BaseException | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.within(x)
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        return x


def failing() -> nn.Module:
    layers = (
        Fails(nn.Linear(WIDTH, WIDTH)),
        Fails(nn.Sequential(Fails(nn.Linear(WIDTH, WIDTH)), nn.Tanh())),
    )
    return Fails(nn.Sequential(*layers, Fails(nn.Linear(WIDTH, WIDTH))))


def held(made: Engine) -> int:
    """Return the device bytes that are in use, once all that can be given up is."""
    fetcher = made._parts.fetcher
    assert isinstance(fetcher, ParameterFetcher)
    fetcher._lanes.accelerator.synchronize()
    fetcher._lanes.device.release_ended()
    while fetcher.evict_one():
        pass
    return next(usage.held for usage in made.usage() if usage.tier is Tier.DEVICE)


@pytest.mark.parametrize("call", [squares, direct])
@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
@pytest.mark.parametrize("graph", [nullcontext, torch.no_grad])
def test_an_error_in_any_module_leaves_the_engine_usable_and_nothing_held(
    call: Loss, error: BaseException, graph: Callable[[], Any]
) -> None:
    with unfetched(failing) as made:
        expected = train(made), bits_of(made)
    with fetching(failing) as made:
        empty = held(made)
        for module in [module for module in made.model.modules() if isinstance(module, Fails)]:
            module.error = error
            with pytest.raises(type(error)), graph():
                call(made, noise(0))
            if isinstance(error, Exception):
                assert not made._parts.fetcher.resident.held  # type: ignore[attr-defined]

        assert (train(made), bits_of(made))[0] == expected[0]
        assert differing(expected[1], bits_of(made)) == []
        assert held(made) == empty


def test_an_error_in_a_backward_leaves_nothing_held() -> None:
    def fail(_gradient: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError

    with unfetched(mlp) as made:
        expected = train(made), bits_of(made)
    with fetching(mlp) as made:
        empty = held(made)
        handle = model_of(made)[2].register_forward_hook(
            lambda *of: of[2].register_hook(fail) and None
        )
        with pytest.raises(ZeroDivisionError):
            made.backward(squares(made, noise(0)))
        handle.remove()
        made.zero_grad()
        assert held(made) == empty

        assert train(made) == expected[0]
        assert differing(expected[1], bits_of(made)) == []


def test_a_forward_without_a_backward_keeps_nothing() -> None:
    with fetching(mlp) as made:
        kept = []
        empty = held(made)
        for call in (squares, direct):
            for seed in range(2):
                hook = model_of(made)[1].register_forward_hook(
                    lambda *of: kept.append(weakref.ref(of[2]))
                )
                call(made, noise(seed))
                hook.remove()

        assert len(kept) == 4
        assert [reference() for reference in kept] == [None] * 4
        assert held(made) == empty


class Breaks:
    """Breaks the n-th copy of a kind, once."""

    def __init__(self) -> None:
        self.countdown: int | None = None
        self.seen = 0

    def __call__(self, kind: StreamKind) -> Exception | None:
        if kind is StreamKind.COMPUTE:
            return None
        self.seen += 1
        if self.countdown is None:
            return None
        self.countdown -= 1
        if self.countdown:
            return None
        self.countdown = None
        return RuntimeError("the link is down")


def finish(made: Engine, batch: torch.Tensor) -> int:
    """Make one step, whatever fails; return how often it had to be tried again."""
    failures = 0
    while True:
        try:
            if not made._parts.states.begun:
                made.zero_grad()
                made.backward(squares(made, batch))
            made.step()
        except (TransferError, RuntimeError) as error:
            if "the link is down" not in str(error) and not isinstance(error, TransferError):
                raise
            failures += 1
        else:
            return failures


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH, bias=False))


@pytest.mark.parametrize(
    "strategy", ["host_only", "device_only", {"name": "interleaved", "share": 0.5}]
)
def test_whatever_copy_fails_the_step_can_be_made_again_with_the_same_bits(
    strategy: object,
) -> None:
    settings: dict[str, Any] = {
        "strategy": strategy,
        "more": 4096,
        "subgroup_numel": 4096,
        "overlap": "off",
    }
    with unfetched(small) as made:
        train(made, steps=2)
        expected = bits_of(made)
    breaks = Breaks()
    with fetching(small, fault=breaks, **settings) as made:
        train(made, steps=2)
        copies = breaks.seen

    assert copies >= 12
    for nth in range(1, copies + 1):
        breaks = Breaks()
        with fetching(small, fault=breaks, **settings) as made:
            breaks.countdown = nth
            failures = sum(finish(made, noise(step)) for step in range(2))
            assert (str(breaks.countdown), failures) == ("None", 1), nth
            assert differing(expected, bits_of(made)) == []


# --- larger than the room that gradients need -----------------------------------------------------


def wide() -> nn.Module:
    """Twelve layers of 16 KiB each; gradients on their way take two of them."""
    return nn.Sequential(*(layer for _ in range(12) for layer in (nn.Linear(64, 64), nn.Tanh())))


class WideBlocks(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)) for _ in range(6)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.as_tensor(checkpoint(block, x, use_reentrant=self.reentrant))
        return x


@pytest.mark.parametrize(
    ("make", "more"), [(wide, 0), (lambda: WideBlocks(True), 0), (lambda: WideBlocks(False), 16640)]
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_model_much_larger_than_the_device_is_trained_with_the_same_bits(
    make: Callable[[], nn.Module], more: int, precision: str
) -> None:
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32

    def loss(made: Engine, batch: torch.Tensor) -> torch.Tensor:
        return squares(
            made, noise(int(batch.sum().item() * 100), 4, 64).to(dtype).requires_grad_(True)
        ).float()

    settings: dict[str, Any] = {"precision": precision, "subgroup_numel": 4096}
    with unfetched(make, **settings) as made:
        expected = train(made, loss), bits_of(made)
    for seed in range(2):
        with fetching(make, more=more, seed=seed, **settings) as made:
            assert train(made, loss) == expected[0]
            assert differing(expected[1], bits_of(made)) == []
            (usage,) = (usage for usage in made.usage() if usage.tier is Tier.DEVICE)
            assert usage.peak_held <= usage.limit < 6 * 4 * 64 * 65


# --- the end --------------------------------------------------------------------------------------


def at_rest(_made: Engine) -> None:
    pass


def after_training(made: Engine) -> None:
    train(made, steps=1)


def between_forward_and_backward(made: Engine) -> None:
    squares(made, noise(0))


def between_backward_and_step(made: Engine) -> None:
    made.backward(squares(made, noise(0)))


def with_something_read(made: Engine) -> None:
    assert not model_of(made)[4].weight.isnan().any()


def with_a_write_that_nobody_asked_for(made: Engine) -> None:
    with torch.no_grad():
        model_of(made)[0].weight.add_(0)


def interrupted(made: Engine) -> None:
    model_of(made)[1].register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        direct(made, noise(0))


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    "state",
    [
        at_rest,
        after_training,
        between_forward_and_backward,
        between_backward_and_step,
        with_something_read,
        with_a_write_that_nobody_asked_for,
        interrupted,
    ],
)
def test_an_engine_that_is_closed_leaves_an_ordinary_model(state: Callable[[Engine], None]) -> None:
    torch.manual_seed(0)
    model = mlp()
    mappings = [module._parameters for module in model.modules()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with emulated() as device:
        settings: dict[str, Any] = {
            "strategy": "host_only",
            "parameters": "host",
            "budget": {"device": "1MiB", "host": HOST},
        }
        with infinity_engine.initialize(model, optimizer, device=device, **settings) as made:
            state(made)
            expected = made.state_dict()
        usage = made.usage()
        assert device.memory().free == CAPACITY

    assert all(tier.held == tier.reserved == 0 for tier in usage)
    assert all(
        module._parameters is mapping
        for module, mapping in zip(model.modules(), mappings, strict=True)
    )
    hooks = (
        "_forward_hooks",
        "_forward_pre_hooks",
        "_state_dict_pre_hooks",
        "_forward_hooks_always_called",
    )
    model[1]._forward_hooks.clear()  # of `interrupted`
    assert not any(getattr(module, name) for module in model.modules() for name in hooks)
    assert differing(expected, model.state_dict()) == []
    with torch.autograd.graph.disable_saved_tensors_hooks("none is left"):
        pass
    twin = copy.deepcopy(model)
    twin(noise(0)).sum().backward()
    assert all(
        parameter.grad is not None and parameter.is_contiguous() for parameter in twin.parameters()
    )


def test_closing_with_a_view_of_a_weight_leaves_view_and_model_whole() -> None:
    with emulated() as device:
        made = initialized(mlp, device, 1 << 20)
        expected = made.state_dict()
        view = model_of(made)[0].weight.detach().t()
        copied = view.clone()

        made.close()

        assert torch.equal(view, copied)
        assert differing(expected, made.model.state_dict()) == []


def test_the_parameters_mapping_follows_what_is_added_and_taken_away() -> None:
    with fetching(mlp, more=None) as made:
        model = model_of(made)
        model[0].late = nn.Parameter(torch.ones(2))
        del model[2].bias
        assert torch.equal(model[0].late, torch.ones(2))

    assert list(model[0]._parameters) == ["weight", "bias", "late"]
    assert list(model[2]._parameters) == ["weight"]
    assert type(model[0]._parameters) is dict


def test_two_engines_do_not_disturb_each_other() -> None:
    with unfetched(mlp) as made:
        losses, expected = train(made), bits_of(made)
    with fetching(mlp) as first, fetching(tied, seed=1) as other, fetching(mlp, seed=2) as second:
        for step in range(STEPS):
            for made in (first, other, second):
                assert train(made, steps=1, first=step) == [losses[step]] or made is other

        assert differing(expected, bits_of(first)) == []
        assert differing(expected, bits_of(second)) == []


def test_a_module_that_is_attached_late_computes_with_its_own_and_with_fetched_parameters() -> None:
    def run(made: Engine) -> list[float]:
        model = model_of(made)
        model.late = OfParts(
            lambda own, x: own.base(x) * own.scale, base=model[4], scale=nn.Parameter(torch.ones(1))
        )
        model[0].weight = model[2].weight
        return train(made)

    with unfetched(mlp) as made:
        expected = run(made), made.state_dict()
    with fetching(mlp) as made:
        assert run(made) == expected[0]
        assert differing(expected[1], made.state_dict()) == []


def test_collected_frames_of_an_error_make_room_again() -> None:
    with fetching(wide, subgroup_numel=4096) as made:
        cycle: list[object] = []
        for weight in [*made.model.parameters()][:6:2]:
            with made.gathered(weight):
                cycle.append([cycle, weight.detach()])
        del cycle
        gc.disable()
        try:
            squares(made, noise(0, 4, 64))
        finally:
            gc.enable()
