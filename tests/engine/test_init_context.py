"""A model that is built under init_context has the bits that it would have otherwise, and never
exists whole.
"""

from __future__ import annotations

import copy
import errno
import gc
import os
import pickle
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from deepnvme import FaultPlan, IOQueue, Requests
from infinity_engine.building import built_parameters
from infinity_engine.building.built import BuiltModel, built_model_of
from infinity_engine.engine.init_context import init_context
from infinity_engine.errors import CapacityError, ConfigError, TransferError
from infinity_engine.memory import Usage
from infinity_engine.plan import Budget, Tier
from infinity_engine.storage import swapfile
from support.engine_bits import differing
from support.interrupts import interrupted_at
from support.nvme_programs import output_of, run_program
from support.small_models import MODELS
from support.unnamed_files import unnamed_files
from support.warm_programs import WITH_SUPPORT

KIB, MIB = 1 << 10, 1 << 20
CACHES = (0, 20 * KIB, None)


@pytest.fixture
def drive(tmp_path: Path) -> Path:
    """Return a directory for the files, which has none when the test is over."""
    path = tmp_path / "drive"
    path.mkdir()
    return path


def budget(*drives: Path, host: str = "256MiB", nvme: str = "64MiB") -> Budget:
    return Budget(host=host, nvme={str(drive): nvme for drive in drives})


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return (
        tensor.detach().contiguous().view(-1).view(torch.uint8)
        if tensor.numel()
        else tensor.detach().view(-1)
    )


def assert_same_bits(
    found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]
) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        kind = (
            found[name].shape,
            found[name].dtype,
            found[name].stride(),
            found[name].requires_grad,
        )
        assert kind == (tensor.shape, tensor.dtype, tensor.stride(), tensor.requires_grad), name
        assert torch.equal(bits(found[name]), bits(tensor)), name


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def usage(built: BuiltModel, tier: Tier) -> Usage:
    return next(each for each in built.ledger.usage() if each.tier is tier)


# --- the bits -------------------------------------------------------------------------------------


class InitializedLater(nn.Module):
    """Initializes as models do that come from elsewhere: when all modules are there, in every way
    that there is.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 64, bias=False)
        self.head.weight = self.embed.weight
        self.apply(self.initialize)
        layers: list[Any] = [*self.layers]
        layers[0].weight.data.normal_()
        with torch.no_grad():
            layers[1].weight[3].fill_(7)
            layers[2].weight.copy_(layers[1].weight)
            layers[3].weight += 1
            torch.nn.init.trunc_normal_(layers[3].bias)
        layers[4].weight.data = layers[0].weight.data.clone() * 2
        layers[5].weight = nn.Parameter(layers[4].weight.detach() / layers[0].weight.norm())
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                parameter.data.uniform_(-1, 1)

    def initialize(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            weight = module.weight.data
            weight.normal_(mean=0.0, std=0.02)
            weight[0].zero_()


class OfManyKinds(nn.Module):
    """Parameters of every dtype and layout."""

    def __init__(self) -> None:
        super().__init__()
        self.halved = nn.Parameter(torch.randn(40, 50).to(torch.bfloat16))
        self.eighth = nn.Parameter(torch.randn(5000).to(torch.float8_e4m3fn), requires_grad=False)
        self.complexes = nn.Parameter(torch.randn(700, dtype=torch.complex64))
        self.whole = nn.Parameter(torch.randint(9, (3000,)), requires_grad=False)
        self.mask = nn.Parameter(torch.rand(3000) < 0.5, requires_grad=False)
        self.doubled = nn.Parameter(torch.randn(3, 5, 7, dtype=torch.float64))
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.single = nn.Parameter(torch.randn(1))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.turned = nn.Parameter(torch.randn(30, 60).t())
        self.last = nn.Parameter(torch.randn(2, 8, 9, 9).to(memory_format=torch.channels_last))
        whole = torch.randn(4000)
        self.first_part, self.second_part = nn.Parameter(whole[:1000]), nn.Parameter(whole[1000:])
        self.repeated = nn.Parameter(torch.randn(30, 1).expand(30, 20))
        self.on_meta = nn.Parameter(torch.empty(10, device="meta"))
        self.other = nn.Parameter(torch.randn(2000))


class Containers(nn.Module):
    """Parameters in lists and mappings, made of one another, and one that two modules have."""

    def __init__(self) -> None:
        super().__init__()
        self.listed = nn.ParameterList(torch.randn(40, 40) for _ in range(5))
        self.named = nn.ParameterDict({"a": torch.randn(1000), "b": nn.Parameter(torch.randn(9))})
        self.named["c"] = nn.Parameter(self.named["a"] * 2)
        self.same = nn.ParameterList(
            [self.listed[2], nn.Parameter(torch.stack([*self.listed]).mean(0))]
        )
        self.replaced = nn.Parameter(torch.randn(500))
        self.replaced = nn.Parameter(self.replaced[:100].clone())
        self.nested = nn.ModuleDict(
            {"x": nn.Sequential(nn.Linear(9, 40), nn.ModuleList([nn.Linear(40, 9)]))}
        )
        self.nested["y"] = copy.deepcopy(self.nested["x"])
        self.register_buffer("sum", torch.stack([*self.listed]).sum(0).detach())
        self.listed = nn.ParameterList([*self.listed][:4])


class MadeOfAnother(nn.Module):
    """Parameters that share memory with one another, some of which nobody has any more."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = nn.Linear(50, 50)
        self.shares = nn.Parameter(self.kept.weight)
        self.of_nobody = nn.Parameter(nn.Linear(70, 30).weight)
        between = nn.Linear(40, 40)
        shares = nn.Parameter(between.weight)
        nn.init.normal_(between.weight)
        del between
        self.padding = nn.Parameter(torch.randn(4000))
        self.late = shares
        with torch.no_grad():
            self.shares.mul_(3)
            self.late[:5] = 1


def trained_a_little() -> nn.Module:
    model = nn.Sequential(nn.Linear(30, 60), nn.BatchNorm1d(60), nn.ReLU(), nn.Linear(60, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        model(torch.randn(8, 30)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def trained_with_checkpoints() -> nn.Module:
    model = nn.Sequential(nn.Linear(30, 60), nn.LayerNorm(60), nn.Linear(60, 30))
    for reentrant in (False, True):
        x = torch.randn(8, 30, requires_grad=True)
        checkpoint(
            model, checkpoint(model, x, use_reentrant=reentrant), use_reentrant=reentrant
        ).sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.sub_(parameter.grad)
    return model


def loaded() -> nn.Module:
    source = {
        name: torch.randn(tensor.shape) for name, tensor in nn.Linear(60, 30).state_dict().items()
    }
    model = nn.Sequential(nn.Linear(60, 30), nn.Linear(60, 30))
    model[0].load_state_dict(source)
    model[1].load_state_dict({name: tensor * 2 for name, tensor in source.items()}, assign=True)
    model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()})
    return model


def first_on_meta() -> nn.Module:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(60, 60), nn.ModuleDict({"a": nn.Linear(60, 60)}))
    model.to_empty(device="cpu")
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.reset_parameters()
    return model


def lazy() -> nn.Module:
    model = nn.Sequential(nn.LazyLinear(40), nn.Linear(40, 40))
    model(torch.ones(1, 20))
    return model


def cast() -> nn.Module:
    model = nn.Sequential(nn.Linear(60, 30), nn.LayerNorm(30)).to(torch.bfloat16)
    model[1].float()
    return model.requires_grad_(False)


def transformer(**settings: object) -> nn.Module:
    return nn.Transformer(32, 4, 3, 3, 64, batch_first=True, **settings)  # type: ignore[arg-type]


BUILDERS: Mapping[str, Callable[[], nn.Module]] = {
    **{name: make for name, make in MODELS.items() if "checkpointed" not in name},
    "transformer": transformer,
    "lstm": lambda: nn.LSTM(16, 24, 2),
    "initialized later": InitializedLater,
    "of many kinds": OfManyKinds,
    "containers": Containers,
    "made of another": MadeOfAnother,
    "trained a little": trained_a_little,
    "trained with checkpoints": trained_with_checkpoints,
    "loaded": loaded,
    "first on meta": first_on_meta,
    "lazy": lazy,
    "cast": cast,
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(60, 60)),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(60, 60)),
    "orthogonal": lambda: nn.utils.parametrizations.orthogonal(nn.Linear(40, 40)),
    "one linear": lambda: nn.Linear(60, 60),
}


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("name", BUILDERS)
def test_the_same_seed_gives_the_same_bits_as_without_the_context(
    name: str, cache: int | None, drive: Path
) -> None:
    torch.manual_seed(7)
    plain = BUILDERS[name]()
    after = torch.get_rng_state()

    torch.manual_seed(7)
    with init_context(budget=budget(drive), cache=cache) as built:
        model = BUILDERS[name]()

    assert torch.equal(torch.get_rng_state(), after)
    expected = {name: tensor for name, tensor in tensors(plain).items() if not tensor.is_meta}
    for each, parameter in model.named_parameters():
        if each in expected:
            piece = built.piece(parameter, 0, parameter.numel())
            assert torch.equal(bits(piece), bits(expected[each])), each
    built.whole()
    found = {name: tensor for name, tensor in tensors(model).items() if not tensor.is_meta}
    assert_same_bits(found, expected)
    assert unnamed_files(drive) == []


class Program:
    """Does to modules, their parameters and views of these what it is told, the same whenever it is
    told the same.
    """

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self.views: list[torch.Tensor] = []
        self.model = nn.ModuleList()

    def weight(self, number: int) -> torch.Tensor:
        found = getattr(self.modules[number % len(self.modules)], "weight", None)
        assert isinstance(found, torch.Tensor)
        return found

    def run(self, steps: list[tuple[str, int, int]]) -> nn.Module:
        self.make(0, 0)
        for step, first, second in steps:
            getattr(self, step)(first, second)
        for module in self.modules:
            if not any(module is each for each in self.model):
                self.model.append(module)
        return self.model

    def make(self, first: int, _: int) -> None:
        self.modules.append(nn.Linear(16, 16 + first % 3 * 16))

    def register(self, first: int, _: int) -> None:
        self.model.append(self.modules[first % len(self.modules)])

    def drop(self, first: int, _: int) -> None:
        if len(self.modules) > 1:
            del self.modules[first % len(self.modules)]

    def draw(self, first: int, second: int) -> None:
        nn.init.normal_(self.weight(first)[second % 16 :])

    def draw_in_data(self, first: int, _: int) -> None:
        self.weight(first).data.uniform_()

    def look(self, first: int, second: int) -> None:
        self.views.append(self.weight(first).data[second % 16])

    def write_into_view(self, first: int, second: int) -> None:
        if self.views:
            self.views[first % len(self.views)].add_(second)

    def forget_views(self, first: int, _: int) -> None:
        del self.views[first % 3 :]

    def make_of(self, first: int, second: int) -> None:
        made = nn.Linear(16, 16)
        source = self.weight(first)
        made.weight = nn.Parameter(source if second % 2 else source.detach() * second)
        self.modules.append(made)

    def tie(self, first: int, second: int) -> None:
        module: Any = self.modules[first % len(self.modules)]
        module.weight = self.weight(second)

    def take_data_of(self, first: int, second: int) -> None:
        self.weight(first).data = self.weight(second).data

    def add(self, first: int, second: int) -> None:
        with torch.no_grad():
            self.weight(first)[:8] += self.weight(second)[-8:]

    def copy(self, first: int, _: int) -> None:
        self.modules.append(copy.deepcopy(self.modules[first % len(self.modules)]))

    def cast(self, first: int, second: int) -> None:
        self.modules[first % len(self.modules)].to((torch.float32, torch.float64)[second % 2])

    def turn(self, first: int, _: int) -> None:
        weight = self.weight(first)
        weight.data = weight.data.t().contiguous().t()


STEPS = [
    name
    for name, each in vars(Program).items()
    if callable(each) and name not in {"__init__", "weight", "run"}
]
programs = st.lists(
    st.tuples(st.sampled_from(STEPS), st.integers(0, 9), st.integers(0, 9)), max_size=25
)


@settings(max_examples=60)
@given(steps=programs, cache=st.sampled_from([0, 3 * KIB, 6 * KIB]))
def test_any_program_that_builds_a_model_gives_the_same_bits(
    steps: list[tuple[str, int, int]], cache: int
) -> None:
    torch.manual_seed(5)
    plain = Program().run(steps)
    with tempfile.TemporaryDirectory() as drive:
        torch.manual_seed(5)
        with init_context(budget=budget(Path(drive), nvme="8MiB"), cache=cache) as built:
            model = Program().run(steps)
        built.whole()

    assert_same_bits(tensors(model), tensors(plain))


def test_what_is_tied_stays_tied(drive: Path) -> None:
    with init_context(budget=budget(drive)) as built:
        model = InitializedLater()

    assert model.head.weight is model.embed.weight
    assert len({id(each) for each in model.parameters()}) == len([*model.parameters()])
    built.whole()
    assert model.head.weight is model.embed.weight


def test_parameters_stay_the_objects_that_they_are(drive: Path) -> None:
    with init_context(budget=budget(drive), cache=0) as built:
        model = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40))
        made = [*model.parameters()]
        optimizer = torch.optim.AdamW(model.parameters())

    assert [id(each) for each in model.parameters()] == [id(each) for each in made]
    assert [id(each) for each in optimizer.param_groups[0]["params"]] == [id(each) for each in made]
    assert all(each.is_leaf and each.requires_grad and not each.is_meta for each in made)
    built.close()


# --- views ----------------------------------------------------------------------------------------


def push_out(built: BuiltModel) -> None:
    """Use so much that everything leaves that can."""
    nn.Sequential(*(nn.Linear(60, 60) for _ in range(20)))


def test_what_is_written_through_a_view_in_the_body_counts_whenever_it_is_written(
    drive: Path,
) -> None:
    with init_context(budget=budget(drive), cache=0) as built:
        model = nn.Linear(60, 60)
        view = model.weight.data[3:5]
        push_out(built)
        view.fill_(9)
        del view
        push_out(built)

    assert built.is_absent(model.weight)
    assert built.piece(model.weight, 180, 120).eq(9).all()
    built.close()


@pytest.mark.parametrize(
    "view_of",
    [
        lambda weight: weight.data,
        lambda weight: weight.detach().view(-1)[7:],
        lambda weight: weight.detach().numpy(),
        lambda weight: torch.empty(0).set_(weight.untyped_storage()),
    ],
)
def test_what_somebody_has_a_view_of_when_the_context_ends_stays_in_memory_with_what_he_writes(
    view_of: Callable[[torch.Tensor], torch.Tensor], drive: Path
) -> None:
    with init_context(budget=budget(drive), cache=0) as built:
        model = nn.Linear(60, 60)
        view = view_of(model.weight)
        push_out(built)
    view[:] = 4

    assert not built.is_absent(model.weight)
    assert built.is_absent(model.bias)
    assert built.piece(model.weight, 20, 30).eq(4).all()
    assert usage(built, Tier.HOST).held >= 60 * 60 * 4
    built.close()


def test_what_has_given_its_address_away_stays_in_memory(drive: Path) -> None:
    with init_context(budget=budget(drive), cache=0) as built:
        model = nn.Linear(60, 60)
        address = model.weight.data_ptr()
        frozen = model.bias.requires_grad_(False).numpy()
        push_out(built)
        frozen[:] = 5

    assert model.weight.data_ptr() == address
    assert model.bias.eq(5).all()
    built.close()


def test_a_graph_that_needs_a_parameter_gets_its_values(drive: Path) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(60, 60)
    plain(torch.ones(1, 60)).square().sum().backward()
    assert plain.weight.grad is not None

    torch.manual_seed(0)
    with init_context(budget=budget(drive), cache=0) as built:
        model = nn.Linear(60, 60)
        loss = model(torch.ones(1, 60)).square().sum()
        state = torch.get_rng_state()
        push_out(built)
        torch.set_rng_state(state)
        loss.backward()

    assert model.weight.grad is not None
    assert torch.equal(model.weight.grad, plain.weight.grad)
    built.close()


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", [0, 16 * KIB, 300 * KIB])
@pytest.mark.parametrize("make", [InitializedLater, transformer])
def test_no_more_is_held_than_the_cache_and_the_largest_module_s_own(
    make: Callable[[], nn.Module], cache: int, drive: Path
) -> None:
    with init_context(budget=budget(drive), cache=cache) as built:
        before = usage(built, Tier.HOST).held
        model = make()

    own = max(
        sum(each.nbytes for each in module.parameters(recurse=False)) for module in model.modules()
    )
    assert usage(built, Tier.HOST).peak_held - before <= cache + own
    assert own + 16 * KIB < sum(each.nbytes for each in model.parameters())
    built.close()


MANY_TIMES_LARGER = """
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from infinity_engine.engine.init_context import init_context
from support.resident_memory import ResidentMemory

nn.Linear(2048, 2048)
with init_context(budget={"host": "96MiB", "nvme": {".": "1GiB"}}, cache="32MiB") as built:
    resident = ResidentMemory()
    model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(24)))
    model.apply(lambda module: [each.data.mul_(2) for each in module.parameters(recurse=False)])
assert sum(built.nbytes_of(each) for each in model.parameters()) > 384 << 20
print((resident.peak_bytes() - resident.baseline_bytes) >> 20)
"""


def test_a_model_many_times_larger_than_the_budget_never_is_in_memory(tmp_path: Path) -> None:
    rise = int(output_of(run_program(MANY_TIMES_LARGER, folder=tmp_path, environment=WITH_SUPPORT)))

    assert rise < 96


def test_copies_that_nobody_has_registered_yet_do_not_stay_in_memory(drive: Path) -> None:
    with init_context(budget=budget(drive), cache=0) as built:
        before = usage(built, Tier.HOST).held
        layer = nn.Linear(60, 60)
        copies = [copy.deepcopy(layer) for _ in range(10)]
        held = usage(built, Tier.HOST).held - before
        nn.ModuleList(copies)

    assert held <= 3 * 61 * 60 * 4
    assert all(
        torch.equal(built.piece(each.weight, 0, 3600), built.piece(layer.weight, 0, 3600))
        for each in copies
    )
    built.close()


def test_what_nobody_has_any_more_takes_no_room_on_the_drives(drive: Path) -> None:
    with init_context(budget=budget(drive, nvme="2MiB"), cache=0) as built:
        for _ in range(10):
            model = nn.Linear(400, 400)

    assert built.piece(model.weight, 0, 10).isfinite().all()
    built.close()


def test_a_model_that_is_dropped_gives_its_room_back(drive: Path) -> None:
    with init_context(budget=budget(drive)) as built:
        model = nn.Linear(100, 100)
        other = nn.Linear(100, 100)
    free = built.swap.free_bytes
    del model

    assert other.weight in built
    assert built.swap.free_bytes > free
    built.close()


def test_a_model_may_lie_in_several_directories(tmp_path: Path) -> None:
    drives = [tmp_path / "a", tmp_path / "b"]
    for each in drives:
        each.mkdir()
    torch.manual_seed(1)
    plain = nn.Sequential(*(nn.Linear(500, 500) for _ in range(6)))
    torch.manual_seed(1)
    with init_context(budget=budget(*drives, nvme="4MiB"), cache=0) as built:
        model = nn.Sequential(*(nn.Linear(500, 500) for _ in range(6)))

    written = [each.held for each in built.ledger.usage() if each.tier is Tier.NVME]
    assert min(written) > MIB  # 5.7 MiB, cut by rates that were measured just now
    built.whole()
    assert_same_bits(tensors(model), tensors(plain))


def test_a_model_from_before_may_be_read_and_stays_as_it_is(drive: Path) -> None:
    source = nn.Linear(60, 60)
    address = source.weight.data_ptr()
    with init_context(budget=budget(drive), cache=0) as built:
        model = nn.Linear(60, 60)
        with torch.no_grad():
            model.weight.copy_(source.weight)
        push_out(built)

    assert source.weight not in built
    assert source.weight.data_ptr() == address
    assert torch.equal(built.piece(model.weight, 0, 3600), source.weight.detach().view(-1))
    built.close()


# --- what cannot be -------------------------------------------------------------------------------


def assert_given_back(drive: Path) -> None:
    """Nothing is left on the drive, and a model that is built now is an ordinary one."""
    assert unnamed_files(drive) == []
    assert nn.Linear(60, 60).weight.isfinite().all()
    assert not torch.overrides.has_torch_function((None,))


def test_drives_without_room_say_what_is_missing_and_everything_is_given_back(drive: Path) -> None:
    with (
        pytest.raises(
            CapacityError, match=r"NVME .*raise the budget's nvme.*Linear.weight"
        ) as refused,
        init_context(budget=budget(drive, nvme="1MiB"), cache=0),
    ):
        nn.Sequential(*(nn.Linear(300, 300) for _ in range(10)))

    assert refused.value.asked == 300 * 300 * 4
    assert refused.value.limit == MIB
    assert_given_back(drive)


def test_a_parameter_larger_than_the_host_s_budget_is_refused_where_it_is_made(drive: Path) -> None:
    with (
        pytest.raises(CapacityError, match=r"HOST .*raise the budget's host") as refused,
        init_context(budget=budget(drive, host="20MiB")),
    ):
        nn.Linear(2000, 1000)

    assert refused.value.asked == 8_000_000
    assert_given_back(drive)


def test_views_that_hold_more_than_the_host_s_budget_are_named(drive: Path) -> None:
    def build() -> None:
        layers, views = [], []
        for _ in range(10):
            layers.append(nn.Linear(500, 500))
            views.append(layers[-1].weight.data)

    with (
        pytest.raises(CapacityError, match=r"Linear.weight holds .*weight.data"),
        init_context(budget=budget(drive, host="20MiB"), cache=0),
    ):
        build()
    assert_given_back(drive)


def test_an_error_in_the_body_is_the_one_that_comes_out_and_everything_is_given_back(
    drive: Path,
) -> None:
    def fails() -> None:
        nn.Linear(60, 60)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"), init_context(budget=budget(drive), cache=0):
        fails()

    assert_given_back(drive)


def test_what_was_built_before_an_error_does_not_run_with_values_that_are_gone(drive: Path) -> None:
    built = []

    def fails() -> None:
        built.append(nn.Sequential(nn.Linear(60, 60), nn.Linear(60, 60)))
        raise KeyError("mine")

    with pytest.raises(KeyError), init_context(budget=budget(drive), cache=0):
        fails()

    with pytest.raises(
        RuntimeError, match="This model has no values: the body of its init_context failed"
    ):
        built[0](torch.ones(60))


def test_a_drive_that_turns_out_to_be_full_is_named_and_everything_is_given_back(
    drive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    def build() -> None:
        monkeypatch.setattr(os, "posix_fallocate", full)
        nn.Sequential(*(nn.Linear(300, 300) for _ in range(6)))

    monkeypatch.setattr(built_parameters, "_STEP", MIB)
    with (
        pytest.raises(CapacityError, match="free space on the drive") as refused,
        init_context(budget=budget(drive), cache=0),
    ):
        build()

    assert refused.value.directory == str(drive)
    assert_given_back(drive)


@pytest.mark.parametrize("requests", [Requests.READS, Requests.WRITES])
def test_a_drive_that_fails_is_told_and_everything_is_given_back(
    requests: Requests, drive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = FaultPlan().fail(nth=3, requests=requests)
    monkeypatch.setattr(swapfile, "IOQueue", lambda: IOQueue(faults=plan))

    with (
        pytest.raises(TransferError, match=r"Linear.*errno 5"),
        init_context(budget=budget(drive), cache=0),
    ):
        nn.Sequential(*(nn.Linear(60, 60) for _ in range(5))).double()

    assert_given_back(drive)


def test_a_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match="not mounted"),
        init_context(budget=budget(tmp_path / "not mounted")),
    ):
        pass


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"budget": {"host": "1GiB"}}, "at least one directory"),
        ({"budget": {"host": "1GiB", "nvm": {}}}, "nearest: nvme"),
        (
            {"budget": {"host": "64MiB", "nvme": {".": "1MiB"}}, "cache": "a lot"},
            "cache of init_context",
        ),
        ({"budget": {"host": "64MiB", "nvme": {".": "1MiB"}}, "cache": "65MiB"}, "lower the cache"),
    ],
)
def test_settings_that_cannot_be_are_refused(
    settings: dict[str, object], said: str, drive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(drive)
    with pytest.raises((ConfigError, CapacityError), match=said), init_context(**settings):  # type: ignore[arg-type]
        pass
    assert_given_back(drive)


def test_a_context_within_a_context_is_refused(drive: Path) -> None:
    with (
        init_context(budget=budget(drive)),
        torch.device("cpu"),
        pytest.raises(RuntimeError, match="open in this thread already"),
        init_context(budget=budget(drive)),
    ):
        pass
    assert_given_back(drive)


def test_another_thread_builds_as_it_always_did(drive: Path) -> None:
    made: list[nn.Module] = []
    with init_context(budget=budget(drive), cache=0) as built:
        thread = threading.Thread(target=lambda: made.append(nn.Linear(60, 60)))
        thread.start()
        thread.join()
        push_out(built)

    assert made[0].weight not in built
    assert made[0](torch.ones(60)).isfinite().all()
    built.close()


# --- what is built --------------------------------------------------------------------------------


@pytest.fixture
def model_and_built(drive: Path) -> Iterator[tuple[Any, BuiltModel]]:
    with init_context(budget=budget(drive), cache=0) as built:
        model = nn.Sequential(nn.Linear(100, 90), nn.Sequential(nn.ReLU(), nn.Linear(90, 1)))
    yield model, built
    built.close()
    assert unnamed_files(drive) == []


@pytest.mark.parametrize(
    ("use", "error"),
    [
        (lambda model: model(torch.ones(100)), RuntimeError),
        (lambda model: model[1](torch.ones(90)), RuntimeError),
        (lambda model: model.state_dict(), RuntimeError),
        (lambda model: model.load_state_dict({}), RuntimeError),
        (copy.deepcopy, TypeError),
        (pickle.dumps, TypeError),
    ],
)
def test_a_model_that_is_built_refuses_to_be_used(
    use: Callable[[nn.Module], object],
    error: type[Exception],
    model_and_built: tuple[Any, BuiltModel],
) -> None:
    with pytest.raises(error, match=r"engine\.initialize"):
        use(model_and_built[0])


def test_a_parameter_that_is_not_there_reads_as_nan_and_refuses_to_be_written(
    model_and_built: tuple[Any, BuiltModel],
) -> None:
    weight = model_and_built[0][0].weight

    assert weight.isnan().all()
    with torch.no_grad(), pytest.raises(RuntimeError, match="single memory location"):
        weight.mul_(2)


@pytest.mark.parametrize(
    "change",
    [
        lambda weight: weight.detach().zero_(),
        lambda weight: weight.data.fill_(1),
        lambda weight: setattr(weight, "data", torch.ones_like(weight)),
    ],
)
def test_what_is_written_to_a_parameter_that_is_not_there_is_refused_when_its_values_are_asked_for(
    change: Callable[[torch.Tensor], object], model_and_built: tuple[Any, BuiltModel]
) -> None:
    model, built = model_and_built
    change(model[0].weight)

    for use in (built.materialize, lambda each: built.piece(each, 0, 1)):
        with pytest.raises(RuntimeError, match=r"Linear.weight was changed .* would be lost"):
            use(model[0].weight)
    assert built.piece(model[0].bias, 0, 90).isfinite().all()


def test_what_was_built_is_found_from_the_model(model_and_built: tuple[Any, BuiltModel]) -> None:
    model, built = model_and_built

    assert built_model_of(model) is built
    assert built_model_of(model[1]) is built
    assert built_model_of(nn.Sequential(model)) is built
    assert built_model_of(nn.Linear(2, 2)) is None


def test_a_model_of_two_contexts_is_refused(drive: Path) -> None:
    parts = []
    for _ in range(2):
        with init_context(budget=budget(drive)) as built:
            parts.append((nn.Linear(60, 60), built))

    with pytest.raises(RuntimeError, match="2 init_contexts"):
        built_model_of(nn.Sequential(*(part for part, _ in parts)))
    for _, built in parts:
        built.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex128, torch.int8])
@pytest.mark.parametrize(
    ("first", "count"), [(0, 20_000), (4096, 100), (8192, 4096), (4095, 5), (19_999, 1), (77, 0)]
)
def test_a_piece_is_these_elements(first: int, count: int, dtype: torch.dtype, drive: Path) -> None:
    values = torch.randn(100, 200).mul(50).to(dtype)
    with init_context(budget=budget(drive), cache=0) as built:
        model = nn.ParameterList([nn.Parameter(values.clone(), requires_grad=False)])
        push_out(built)

    assert built.is_absent(model[0])
    assert torch.equal(built.piece(model[0], first, count), values.view(-1)[first : first + count])
    assert built.nbytes_of(model[0]) == values.nbytes
    built.close()


def test_a_piece_can_be_had_in_the_body_of_what_is_there_and_of_what_is_not(drive: Path) -> None:
    torch.manual_seed(0)
    values = nn.Linear(90, 100).weight.detach().view(-1)
    torch.manual_seed(0)
    with init_context(budget=budget(drive), cache=0) as built:
        first, second = nn.Linear(90, 100), nn.Linear(90, 100)
        assert [built.is_absent(first.weight), built.is_absent(second.bias)] == [True, False]
        assert torch.equal(built.piece(first.weight, 4096, 100), values[4096:4196])
        assert torch.equal(built.piece(second.bias, 50, 10), second.bias[50:60])
    built.close()


@pytest.mark.parametrize(("first", "count"), [(-1, 2), (8999, 2)])
def test_a_piece_beyond_the_parameter_is_refused(
    first: int, count: int, model_and_built: tuple[Any, BuiltModel]
) -> None:
    model, built = model_and_built

    with pytest.raises(ValueError, match="within the 9000 elements"):
        built.piece(model[0].weight, first, count)


def test_a_parameter_of_another_model_is_refused(model_and_built: tuple[Any, BuiltModel]) -> None:
    other = nn.Linear(2, 2).weight
    built = model_and_built[1]

    assert other not in built
    for use in (
        built.nbytes_of,
        built.release,
        built.materialize,
        lambda each: built.piece(each, 0, 1),
    ):
        with pytest.raises(ConfigError, match="built in this init_context and not released"):
            use(other)


def test_what_is_released_takes_no_room_and_is_not_had_any_more(
    model_and_built: tuple[Any, BuiltModel],
) -> None:
    model, built = model_and_built
    free = built.swap.free_bytes

    built.release(model[0].weight)

    assert built.swap.free_bytes >= free + 100 * 90 * 4
    assert model[0].weight not in built
    assert model[0].weight.isnan().all()


def test_one_parameter_can_be_had_in_memory_again(model_and_built: tuple[Any, BuiltModel]) -> None:
    model, built = model_and_built
    expected = built.piece(model[0].weight, 0, 9000).view(90, 100)

    built.materialize(model[0].weight)

    assert torch.equal(model[0].weight, expected)
    assert model[0].weight not in built
    assert model[0].bias in built


def test_a_model_that_is_whole_again_is_an_ordinary_one(drive: Path) -> None:
    with init_context(budget=budget(drive), cache=0) as built:
        model = nn.Sequential(nn.Linear(60, 60), nn.Linear(60, 1))
    built.whole()

    assert built.closed
    assert built_model_of(model) is None
    model(torch.ones(60)).backward()
    assert copy.deepcopy(model).state_dict().keys() == model.state_dict().keys()
    assert_given_back(drive)


def test_making_a_model_whole_can_be_interrupted_and_tried_again(drive: Path) -> None:
    torch.manual_seed(0)
    expected = nn.Linear(60, 60)
    for line in count(1, 3):
        with init_context(budget=budget(drive), cache=0) as built:
            torch.manual_seed(0)
            model = nn.Linear(60, 60)
        assert built.is_absent(model.weight)
        with interrupted_at(
            line, ("building/built_parameters.py", "building/built_parameter.py")
        ) as told:
            built.whole()
        built.whole()

        assert differing(dict(model.state_dict()), dict(expected.state_dict())) == []
        if not told[0]:
            break


def test_a_model_that_does_not_fit_is_not_made_whole(drive: Path) -> None:
    with init_context(budget=budget(drive, host="18MiB"), cache=0) as built:
        model: Any = nn.Sequential(*(nn.Linear(300, 300) for _ in range(10)))

    with pytest.raises(CapacityError, match="raise the budget's host"):
        built.whole()
    assert all(built.is_absent(each) for each in model.parameters())
    assert built.piece(model[9].weight, 0, 300).isfinite().all()
    built.close()


def test_what_was_closed_too_early_says_so(drive: Path) -> None:
    with init_context(budget=budget(drive)) as built:
        model = nn.Linear(60, 60)
    built.close()
    built.close()

    with pytest.raises(RuntimeError, match="This model has no values"):
        model(torch.ones(60))


def test_what_was_taken_over_runs_when_it_is_closed(drive: Path) -> None:
    with init_context(budget=budget(drive)) as built:
        model = nn.Linear(60, 60)
    for parameter in model.parameters():
        values = built.piece(parameter, 0, parameter.numel()).view(parameter.shape)
        built.release(parameter)
        parameter.data = values
    built.close()

    assert model(torch.ones(60)).isfinite().all()
    assert built_model_of(model) is None


def test_the_files_go_with_the_model(drive: Path) -> None:
    def build() -> None:
        with init_context(budget=budget(drive)):
            nn.Sequential(nn.Linear(60, 60))

    build()
    torch.nn.Linear(1, 1)
    gc.collect()
    assert unnamed_files(drive) == []


def test_a_parameter_that_no_module_has_is_an_ordinary_one_after_the_context(drive: Path) -> None:
    with init_context(budget=budget(drive), cache=0) as built:
        model = nn.Linear(60, 60)
        before = model.weight
        expected = before.detach().clone()
        model.weight = nn.Parameter(torch.zeros(60, 60))
        push_out(built)
        unregistered = copy.deepcopy(model)

    assert torch.equal(before, expected)
    assert unregistered(torch.ones(60)).isfinite().all()
    assert built.is_absent(model.weight)
    built.close()
