"""Tiled layers against whole ones: results, gradients, state dicts.

Where values are small integers, every sum is exact in any order, so all bits must be equal however
a layer is cut. With other values, tiles of outputs and of entries are compared by bits of each
element's own sum, tiles of inputs within roundings.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from infinity_engine.errors import ConfigError
from infinity_engine.tiling import (
    SequenceTiles,
    TiledEmbedding,
    TiledLinear,
    TiledValues,
    tile,
    tile_sequence,
)
from support.engine_bits import differing

pytestmark = pytest.mark.usefixtures("deterministic")
IN, OUT, TOKENS = 12, 20, 6
CUTS = [(1, 1), (3, 1), (20, 1), (1, 4), (3, 5), (7, 12)]


def whole_numbers(*shape: int, seed: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, shape, generator=draw).float()


def with_whole_numbers(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for number, parameter in enumerate(module.parameters()):
            parameter.copy_(whole_numbers(*parameter.shape, seed=number))
    return module


def outcome(module: nn.Module, inputs: torch.Tensor, factor: torch.Tensor) -> dict[str, Any]:
    """Return outputs, and the gradients of inputs and parameters."""
    inputs = inputs.clone().requires_grad_(inputs.is_floating_point())
    found = module(inputs)
    torch.autograd.backward((found * factor).sum())
    return {
        "outputs": found.detach(),
        "inputs": inputs.grad,
        "gradients": {name: value.grad for name, value in module.named_parameters()},
    }


def joined(module: TiledLinear | TiledEmbedding) -> torch.Tensor:
    """Return the gradient of the whole weight."""
    return module.whole_values().joined(lambda part: torch.as_tensor(part.grad))


def gradient_of(module: Any) -> torch.Tensor:
    found = joined(module) if hasattr(module, "tiles") else module.weight.grad
    assert isinstance(found, torch.Tensor)
    return found


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("outputs", "inputs"), CUTS)
def test_a_tiled_linear_layer_has_the_bits_of_a_whole_one(
    outputs: int, inputs: int, bias: bool
) -> None:
    whole = with_whole_numbers(nn.Linear(IN, OUT, bias))
    tiled = TiledLinear(IN, OUT, bias, output_tiles=outputs, input_tiles=inputs)
    tiled.load_state_dict(whole.state_dict())
    batch = whole_numbers(2, TOKENS, IN, seed=7)
    factor = whole_numbers(2, TOKENS, OUT, seed=8)

    expected, found = outcome(whole, batch, factor), outcome(tiled, batch, factor)

    assert torch.equal(found["outputs"], expected["outputs"])
    assert torch.equal(found["inputs"], expected["inputs"])
    assert torch.equal(gradient_of(tiled), gradient_of(whole))
    if bias:
        assert torch.equal(found["gradients"]["bias"], expected["gradients"]["bias"])


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize(("inputs", "outputs"), [(0, 3), (3, 0), (0, 0)])
def test_a_layer_without_features_is_as_that_of_torch(inputs: int, outputs: int) -> None:
    whole, tiled = nn.Linear(inputs, outputs), TiledLinear(inputs, outputs)
    tiled.load_state_dict(whole.state_dict())
    batch = torch.ones(2, inputs, requires_grad=True)

    found = tiled(batch)
    found.sum().backward()

    assert torch.equal(found, whole(batch))
    assert batch.grad is not None
    assert torch.equal(tiled.state_dict()["weight"], whole.weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("outputs", "inputs"), CUTS)
def test_any_values_differ_by_roundings_only(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    whole = nn.Linear(IN, OUT).to(dtype)
    tiled = TiledLinear(IN, OUT, output_tiles=outputs, input_tiles=inputs).to(dtype)
    tiled.load_state_dict(whole.state_dict())
    batch, factor = torch.randn(TOKENS, IN).to(dtype), torch.randn(TOKENS, OUT).to(dtype)

    expected, found = outcome(whole, batch, factor), outcome(tiled, batch, factor)

    assert found["outputs"].dtype is dtype
    # Each of 4 parts of a sum, or of 20 of an input's gradient, is rounded once.
    near: Any = {"rtol": 0.0, "atol": 16 * torch.finfo(dtype).eps}
    torch.testing.assert_close(found["outputs"], expected["outputs"], **near)
    torch.testing.assert_close(found["inputs"], expected["inputs"], **near)
    torch.testing.assert_close(gradient_of(tiled), gradient_of(whole), **near)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("outputs", [1, 3, 20])
def test_a_tiled_layer_begins_with_the_values_of_a_whole_one(outputs: int, bias: bool) -> None:
    torch.manual_seed(5)
    whole = nn.Linear(IN, OUT, bias)
    torch.manual_seed(5)
    tiled = TiledLinear(IN, OUT, bias, output_tiles=outputs)

    assert differing(dict(tiled.state_dict()), dict(whole.state_dict())) == []


@pytest.mark.parametrize("tiles", [1, 3, 11])
@pytest.mark.parametrize("padding", [None, 0, 4, -1])
def test_a_tiled_embedding_has_the_bits_of_a_whole_one(padding: int | None, tiles: int) -> None:
    torch.manual_seed(0)
    whole = nn.Embedding(11, IN, padding_idx=padding)
    tiled = TiledEmbedding(11, IN, padding, tiles=tiles)
    tiled.load_state_dict(whole.state_dict())
    entries = torch.tensor([[3, 10, 3, 0], [4, 4, 10, 3]])
    factor = torch.randn(2, 4, IN)

    expected, found = outcome(whole, entries, factor), outcome(tiled, entries, factor)

    assert torch.equal(found["outputs"], expected["outputs"])
    assert torch.equal(gradient_of(tiled), gradient_of(whole))


def test_a_tile_without_entries_of_the_batch_has_a_gradient_of_zeros() -> None:
    tiled = TiledEmbedding(10, 4, tiles=5)

    tiled(torch.tensor([0, 1])).sum().backward()

    assert all(part.grad is not None for part in tiled.parameters())


def test_an_entry_outside_of_the_embedding_is_refused() -> None:
    with pytest.raises(
        IndexError, match="indices go from 3 to 10, and the embedding has entries from 0 to 9"
    ):
        TiledEmbedding(10, 4, tiles=3)(torch.tensor([3, 10]))


# --- state dicts ----------------------------------------------------------------------------------


def tiled_model() -> tuple[nn.Module, nn.Module]:
    """Return a model, and the same with tiles."""
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Embedding(30, 8), nn.Linear(8, 24), nn.GELU(), nn.Linear(24, 5))
    tiled = copy.deepcopy(whole)
    assert tile(tiled, 200).names == ("0", "1", "3")
    return whole, tiled


def test_state_dicts_have_the_names_and_values_of_a_whole_model() -> None:
    whole, tiled = tiled_model()

    assert list(tiled.state_dict()) == list(whole.state_dict())
    assert differing(dict(tiled.state_dict()), dict(whole.state_dict())) == []


@pytest.mark.parametrize("assign", [False, True])
def test_a_whole_state_dict_is_loaded_into_tiles(assign: bool) -> None:
    whole, tiled = tiled_model()
    state = {name: torch.randn_like(value) for name, value in whole.state_dict().items()}

    result = tiled.load_state_dict(state, assign=assign)

    assert [*result.missing_keys, *result.unexpected_keys] == []
    assert differing(dict(tiled.state_dict()), state) == []
    assert all(parameter.requires_grad for parameter in tiled.parameters())


def test_loading_reports_what_is_missing_unexpected_or_of_another_shape() -> None:
    whole, tiled = tiled_model()
    state = dict(whole.state_dict())
    del state["0.weight"]
    state["1.weight"] = torch.zeros(3, 3)
    state["3.other"] = torch.zeros(1)

    with pytest.raises(RuntimeError) as raised:
        tiled.load_state_dict(state)

    text = str(raised.value)
    assert 'Missing key(s) in state_dict: "0.weight"' in text
    assert 'Unexpected key(s) in state_dict: "3.other"' in text
    assert "size mismatch for 1.weight: copying a param with shape (3, 3)" in text


def test_the_tiles_themselves_are_in_a_state_dict_that_keeps_variables() -> None:
    _, tiled = tiled_model()
    kept = tiled.state_dict(keep_vars=True)["1.weight"]

    assert isinstance(kept, TiledValues)
    assert {id(part) for part in kept.tiles} <= {id(known) for known in tiled.parameters()}
    assert torch.equal(kept.joined(lambda part: part.detach()), tiled.state_dict()["1.weight"])


def test_a_whole_weight_can_be_read_and_differentiated() -> None:
    _, tiled = tiled_model()
    layer: Any = tiled[3]  # type: ignore[index]

    torch.autograd.backward((layer.weight * 2).sum())

    assert torch.equal(layer.weight, tiled.state_dict()["3.weight"])
    assert torch.equal(joined(layer), torch.full((5, 24), 2.0))


def add_as_adapters_do(layer: Any) -> None:
    layer.weight.data += 1.0  # as peft merges


def replace_data(layer: Any) -> None:
    layer.weight.data = torch.zeros(5, 24)


@torch.no_grad()
def zero_an_element(layer: Any) -> None:
    layer.weight[0, 0] = 0.0


def assign(layer: Any) -> None:
    layer.weight = nn.Parameter(torch.zeros(5, 24))


@pytest.mark.parametrize(
    "change",
    [
        add_as_adapters_do,
        replace_data,
        zero_an_element,
        assign,
        lambda layer: nn.init.zeros_(layer.weight),
        lambda layer: layer.weight.detach().copy_(torch.zeros(5, 24)),
        lambda layer: torch.zeros(5, 24, out=layer.weight.detach()),
        lambda layer: layer.weight.data[0].zero_(),
        lambda layer: layer.weight.data.view(-1).zero_(),
        lambda layer: layer.weight.data.t().mul_(2.0),
        lambda layer: layer.weight.data.unbind(0)[1].zero_(),
        lambda layer: nn.init.zeros_(layer.weight[:2]),
        lambda layer: functional.relu(layer.weight, inplace=True),
        lambda layer: torch._foreach_mul_([torch.zeros(1), layer.weight.data], 2.0),
        lambda layer: torch.ops.aten.mul_.Tensor(layer.weight.detach(), torch.zeros(())),
        lambda layer: functional.embedding(torch.arange(2), layer.weight.detach(), max_norm=0.1),
        lambda layer: torch.max(torch.zeros(1, 5, 24), 0, out=(layer.weight.data, torch.zeros(0))),
    ],
)
def test_a_change_of_a_whole_weight_is_refused(change: Callable[[Any], object]) -> None:
    _, tiled = tiled_model()
    layer: Any = tiled[3]  # type: ignore[index]
    before = layer.state_dict()["weight"]

    with pytest.raises(RuntimeError, match="in tiles"):
        change(layer)

    assert torch.equal(layer.state_dict()["weight"], before)


def test_what_is_computed_of_a_whole_weight_can_be_changed() -> None:
    _, tiled = tiled_model()
    layer: Any = tiled[3]  # type: ignore[index]
    doubled = layer.weight * 2
    copied = layer.weight.detach().clone()
    part = layer.weight[:2] * 2

    assert type(doubled) is type(copied) is type(part) is torch.Tensor
    torch.testing.assert_close(copied.mul_(2.0), doubled)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # the compiler's own look
def test_a_whole_weight_can_be_read_where_a_model_is_compiled() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = TiledLinear(24, 5, output_tiles=2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return functional.linear(x, self.layer.weight).exp()

    model, x = Reads(), torch.randn(3, 24)
    compiled = torch.compile(model, backend="eager")
    assert torch.equal(compiled(x), model(x))


def test_a_whole_weight_can_be_read_under_transforms() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = TiledLinear(24, 5, output_tiles=2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x @ self.layer.weight.T).exp()

    model, x = Reads(), torch.randn(3, 2, 24)
    torch.testing.assert_close(torch.vmap(model)(x), model(x))
    found = torch.func.grad(
        lambda parameters: torch.func.functional_call(model, parameters, (x,)).sum()
    )(dict(model.named_parameters()))
    torch.autograd.backward(model(x).sum())
    for name, parameter in model.named_parameters():
        if name != "layer.bias":  # it has no part in it
            torch.testing.assert_close(found[name], parameter.grad)


def test_a_weight_without_memory_can_be_computed_with() -> None:
    layer = TiledLinear(24, 5, output_tiles=2).to("meta")
    doubled = layer.weight * 2
    assert doubled.add_(1.0).shape == (5, 24)


def test_a_copy_of_a_tiled_model_is_of_its_own() -> None:
    _, tiled = tiled_model()
    copied = copy.deepcopy(tiled)

    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()

    assert all(bool(value.any()) for value in tiled.state_dict().values())


# --- replacing ------------------------------------------------------------------------------------


class Tied(nn.Module):
    """An embedding that is the output layer as well."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 8)
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 40, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, entries: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.body(self.embed(entries)).tanh())
        return found


def test_tied_weights_stay_tied() -> None:
    torch.manual_seed(0)
    whole = Tied()
    tiled = copy.deepcopy(whole)
    assert set(tile(tiled, 400).names) == {"embed", "head"}
    entries = torch.randint(40, (3, 5))
    for model in (whole, tiled):
        loss = functional.cross_entropy(model(entries).flatten(0, 1), entries.flatten())
        torch.autograd.backward(loss)

    assert len(list(tiled.parameters())) == 4 + 2
    parts: Any = tiled.embed
    torch.testing.assert_close(joined(parts), gradient_of(whole.embed))
    assert differing(dict(tiled.state_dict()), dict(whole.state_dict())) == []


def test_optimizers_get_the_tiles_in_place_of_what_was_replaced() -> None:
    whole, _ = tiled_model()
    before = list(whole.parameters())

    tiled = tile(whole, 200)

    found = tiled.in_place_of(before)
    assert {id(parameter) for parameter in found} == {id(known) for known in whole.parameters()}
    assert tiled.in_place_of([before[2]]) == [before[2]]  # a bias


def test_frozen_weights_stay_frozen_and_modes_stay() -> None:
    whole, _ = tiled_model()
    whole.eval()
    for parameter in whole.parameters():
        parameter.requires_grad_(False)

    tile(whole, 200)

    assert not any(parameter.requires_grad for parameter in whole.parameters())
    assert not any(module.training for module in whole.modules())


def test_what_is_within_the_limit_is_left_alone() -> None:
    whole, _ = tiled_model()

    assert tile(whole, "1KiB").names == ()


class Scaled(nn.Linear):
    """A linear layer of another class."""


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Scaled(64, 64), "it is weight of a Scaled"),
        (lambda: nn.Embedding(64, 64, max_norm=1.0), "max_norm"),
        (lambda: nn.Embedding(64, 64, sparse=True), "sparse"),
        (lambda: nn.Embedding(4, 4096), "one entry of the embedding"),
        (lambda: nn.Conv1d(64, 64, 1), "it is weight of a Conv1d"),
    ],
)
def test_a_layer_that_cannot_be_tiled_is_left_with_the_reason(
    make: Callable[[], nn.Module], said: str
) -> None:
    model = nn.Sequential(make())

    tiled = tile(model, 1024)

    assert tiled.names == ()
    assert said in tiled.left["0.weight"]


def test_a_layer_with_hooks_is_left() -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    model[0].register_forward_hook(lambda *_: None)

    assert "hooks" in tile(model, 1024).left["0.weight"]


def test_a_model_that_is_one_layer_is_refused() -> None:
    with pytest.raises(ConfigError, match="with this layer inside it"):
        tile(nn.Linear(64, 64), 1024)


# --- tiles of the sequence ------------------------------------------------------------------------


class Feedforward(nn.Module):
    """A block that handles each position alone."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 32)
        self.dropout = nn.Dropout(0.5)
        self.down = nn.Linear(32, 8)
        self.calls = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        found: torch.Tensor = self.down(self.dropout(functional.gelu(self.up(inputs))))
        return found


def blocks() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    whole = nn.Sequential(Feedforward(), Feedforward()).double()
    return whole, copy.deepcopy(whole)


@pytest.mark.parametrize("positions", [1, 3, 6, 100])
def test_a_block_in_tiles_of_the_sequence_gives_the_same(positions: int) -> None:
    whole, tiled = blocks()
    whole.eval()
    tiled.eval()
    assert tile_sequence(tiled, "Feedforward", positions) == ("0", "1")
    inputs, factor = torch.randn(2, TOKENS, 8).double(), torch.randn(2, TOKENS, 8).double()

    expected, found = outcome(whole, inputs, factor), outcome(tiled, inputs, factor)

    torch.testing.assert_close(found, expected)
    assert list(found["gradients"]) == list(expected["gradients"])


def test_a_tile_of_the_sequence_is_computed_again_for_its_backward_alone() -> None:
    _, tiled = blocks()
    tile_sequence(tiled, "0", 2)
    block: Any = tiled[0]  # type: ignore[index]

    loss = tiled(torch.randn(1, TOKENS, 8).double()).sum()
    assert block.calls == 3
    torch.autograd.backward(loss)

    assert block.calls == 6


def test_gradients_of_tiles_are_put_together_once() -> None:
    """A slice of the inputs for each tile would fill a whole gradient with zeros, tile by tile."""
    _, tiled = blocks()
    tile_sequence(tiled, "0", 1)
    inputs = torch.randn(1, TOKENS, 8, dtype=torch.float64, requires_grad=True)
    loss = tiled(inputs).sum()

    with Seen() as seen:
        torch.autograd.backward(loss)

    assert "aten::slice_backward" not in seen.names
    assert seen.names.count("aten::cat") == 1


class Seen(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no annotations for it
    """Notes the names of operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        self.names.append(func.name().split(".")[0])
        return func(*args, **(kwargs or {}))


def test_dropout_is_the_same_when_a_tile_is_computed_again() -> None:
    _, tiled = blocks()
    tile_sequence(tiled, "Feedforward", 2)
    tiled.train()
    inputs = torch.randn(1, TOKENS, 8, dtype=torch.float64, requires_grad=True)

    def loss(values: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(3)
        return torch.as_tensor(tiled(values)).square().sum()

    assert torch.autograd.gradcheck(loss, (inputs,))


def test_names_of_parameters_stay_when_the_sequence_is_tiled() -> None:
    whole, tiled = blocks()
    tile_sequence(tiled, "Feedforward", 2)

    assert [name for name, _ in tiled.named_parameters()] == [
        name for name, _ in whole.named_parameters()
    ]
    assert tiled.load_state_dict(whole.state_dict()).missing_keys == []


def test_the_mode_reaches_the_block_itself() -> None:
    _, tiled = blocks()
    tile_sequence(tiled, "Feedforward", 2)

    tiled.eval()

    block: Any = tiled[0]  # type: ignore[index]
    assert not block._module[0].training
    assert not block.dropout.training


class Pair(Feedforward):
    """Returns what it was given as well."""

    def forward(self, inputs: torch.Tensor) -> Any:
        return super().forward(inputs), inputs


class Gated(Feedforward):
    """Has a factor for each position."""

    def forward(self, inputs: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        assert gate is not None
        return super().forward(inputs) * gate


@pytest.mark.parametrize(
    ("block", "more", "said"),
    [
        (Pair, {}, "Pair returned a tuple"),
        (Gated, {"gate": torch.ones(1, TOKENS, 1)}, "Gated returned shape"),
    ],
)
def test_a_block_that_needs_other_positions_is_refused_when_it_runs(
    block: Callable[[], nn.Module], more: dict[str, torch.Tensor], said: str
) -> None:
    tiled = SequenceTiles(block(), 1)

    with pytest.raises((TypeError, ValueError), match=said):
        tiled(torch.ones(1, TOKENS, 8), **more)


def test_layers_and_blocks_can_both_be_tiled() -> None:
    whole, tiled = blocks()
    tile_sequence(tiled, "Feedforward", 4)
    assert set(tile(tiled, 512).names) == {"0.up", "0.down", "1.up", "1.down"}
    inputs = torch.randn(2, TOKENS, 8).double()

    whole.eval()
    tiled.eval()
    torch.testing.assert_close(tiled(inputs), whole(inputs))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: SequenceTiles(nn.Linear(2, 2), 4), "Linear with weight"),
        (lambda: SequenceTiles(Feedforward(), 0), "positions"),
        (lambda: tile_sequence(blocks()[0], "Attention", 4), "the path or the class"),
        (lambda: tile_sequence(blocks()[0], "", 4), "inside the model"),
    ],
)
def test_what_cannot_be_tiled_over_the_sequence_is_refused(
    make: Callable[[], object], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        make()
