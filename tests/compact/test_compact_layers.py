"""A compact layer computes what a linear layer with its expanded weight computes, in memory and
under an engine.
"""

from __future__ import annotations

import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity_engine
from infinity_engine.compact import (
    CompactKind,
    CompactLinear,
    compact_linears,
    expand_linears,
    weights,
)
from infinity_engine.compact.weights import compacted
from infinity_engine.errors import ConfigError
from support.nvme_training import RATES, emulated

pytestmark = pytest.mark.usefixtures("deterministic")

KINDS = list(CompactKind)


def layer(*, bias: bool = True, dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(64, 32, bias=bias).to(dtype)


def plain_of(compact: CompactLinear, dtype: torch.dtype) -> nn.Linear:
    """Return the linear layer that a compact one stands for."""
    plain = nn.Linear(64, 32, bias=compact.bias is not None).to(dtype)
    with torch.no_grad():
        plain.weight.copy_(compact.expanded(dtype))
        if compact.bias is not None:
            plain.bias.copy_(compact.bias)
    plain.weight.requires_grad_(False)
    return plain


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_output_and_gradients_are_those_of_the_expanded_weight(
    kind: CompactKind, bias: bool, dtype: torch.dtype
) -> None:
    compact = CompactLinear.of(layer(bias=bias, dtype=dtype), kind)
    plain = plain_of(compact, dtype)
    given = torch.randn(3, 5, 64).to(dtype)
    mine, theirs = given.clone().requires_grad_(), given.clone().requires_grad_()

    product, expected = compact(mine), plain(theirs)
    product.square().sum().backward()
    expected.square().sum().backward()

    assert torch.equal(product, expected)
    assert mine.grad is not None
    assert theirs.grad is not None
    assert torch.equal(mine.grad, theirs.grad)
    if bias:
        assert compact.bias.grad is not None
        assert plain.bias.grad is not None
        assert torch.equal(compact.bias.grad, plain.bias.grad)
    assert not any(p.requires_grad for name, p in compact.named_parameters() if name != "bias")


def test_int8_is_off_by_half_a_step_at_most() -> None:
    given = layer()
    given.weight.data[3] = 0
    compact = CompactLinear.of(given, CompactKind.INT8)

    error = (compact.expanded(torch.float32) - given.weight).abs()
    assert bool((error <= compact.scale / 2 * (1 + 1e-5)).all())
    assert compact.weight.dtype is torch.int8


def test_nf4_takes_half_a_byte_and_the_nearest_of_16_values() -> None:
    given = layer()
    given.weight.data[3] = 0
    compact = CompactLinear.of(given, CompactKind.NF4)

    assert compact.weight.numel() == given.weight.numel() // 2
    blocks = given.weight.detach().view(-1, 64)
    found = compact.expanded(torch.float32).view(-1, 64)
    choices = compact.values * compact.scale[:, None]
    nearest = (blocks[:, :, None] - choices[:, None, :]).abs().amin(dim=2)
    assert torch.allclose((found - blocks).abs(), nearest, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_give_the_bits_of_the_whole(
    kind: CompactKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = CompactLinear.of(layer(), kind)
    expected = whole.expanded(torch.bfloat16)

    # Not a divisor of the 2048 elements.
    for name in ("_PIECE", "_ROUNDED"):
        monkeypatch.setattr(f"infinity_engine.compact.weights.{name}", 3 * 64)
    pieces = CompactLinear.of(layer(), kind)

    assert torch.equal(pieces.weight, whole.weight)
    assert torch.equal(pieces.scale, whole.scale)
    assert torch.equal(pieces.expanded(torch.bfloat16), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_the_host_expands_to_the_bits_of_torchs_operators(
    kind: CompactKind, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of operators. Not a divisor of the 2048 elements.
    monkeypatch.setattr(weights, "_PIECE", 3 * 64)
    compact = CompactLinear.of(layer(), kind)
    with torch.no_grad():
        compact.scale.view(-1)[:2] = torch.tensor([1e-42, 1e30])  # too small and too large
    kept = (compact.weight, compact.scale)
    by_operators = torch.empty_like(compact.expanded(dtype))
    if kind is CompactKind.INT8:
        weights._expand_rows(*kept, by_operators)
    else:
        weights._expand_blocks(*kept, compact.values, by_operators.view(-1, 64))

    assert torch.equal(compact.expanded(dtype), by_operators)


# Python 3.12 warns of any fork beside threads
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_expands_too() -> None:
    compact = CompactLinear.of(layer(), CompactKind.NF4)
    expected = compact.expanded(torch.bfloat16)
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as child:
        assert torch.equal(child.submit(compact.expanded, torch.bfloat16).result(60), expected)


def test_autocast_computes_in_its_dtype() -> None:
    compact = CompactLinear.of(layer(), CompactKind.NF4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert compact(torch.randn(2, 64)).dtype is torch.bfloat16


# --- replacing ------------------------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 64)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64)) for _ in range(3)
        )
        self.head = nn.Linear(64, 64)
        self.tied = nn.Linear(64, 64, bias=False)
        self.tied.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found = self.embed(tokens)
        for block in self.blocks:
            found = found + block(found)
        output: torch.Tensor = self.tied(self.head(found))
        return output


def model() -> Model:
    torch.manual_seed(0)
    return Model()


def test_linear_layers_are_replaced_but_tied_and_skipped_ones() -> None:
    made = model()
    names = compact_linears(made, "int8", skip=("head",))

    assert names == tuple(f"blocks.{block}.{part}" for block in range(3) for part in (0, 2))
    assert type(made.head) is nn.Linear
    assert made.tied.weight is made.embed.weight


def test_what_transformers_keeps_in_fp32_and_shapes_without_blocks_stay_whole() -> None:
    made = model()
    made._keep_in_fp32_modules = ["2"]  # type: ignore[assignment]  # as Transformers' T5 has "wo"
    made.blocks.append(nn.Sequential(nn.Linear(3, 5)))

    assert compact_linears(made, "nf4", skip=("head",)) == ("blocks.0.0", "blocks.1.0")


def test_an_unknown_kind_and_a_model_without_such_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match="int8, nf4"):
        compact_linears(model(), "int9")
    with pytest.raises(ConfigError, match="multiple of 64 elements: this one has none"):
        compact_linears(nn.Sequential(nn.Linear(3, 5)), "nf4")


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_dict_is_loaded_with_the_same_bits(kind: CompactKind) -> None:
    saved, loaded = model(), Model()
    compact_linears(saved, kind)
    compact_linears(loaded, kind)

    loaded.load_state_dict(saved.state_dict())

    tokens = torch.arange(8)[None]
    assert torch.equal(loaded(tokens), saved(tokens))


def test_weights_of_another_shape_or_kind_are_refused() -> None:
    saved = nn.ModuleDict({"a": CompactLinear(64, 32)}).state_dict()
    with pytest.raises(ConfigError, match=r"a\.weight"):
        nn.ModuleDict({"a": CompactLinear(32, 64)}).load_state_dict(saved)
    with pytest.raises(ConfigError, match="int8"):
        nn.ModuleDict({"a": CompactLinear(64, 32, kind=CompactKind.INT8)}).load_state_dict(saved)


# --- bitsandbytes ---------------------------------------------------------------------------------


def in_files(weight: torch.Tensor, scale: torch.Tensor, **described: Any) -> dict[str, Any]:
    """Return a weight as checkpoints of bitsandbytes have it."""
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [32, 64]}
    text = json.dumps({**state, **described})
    return {
        "weight": weight,
        "weight.absmax": scale,
        "weight.quant_map": CompactLinear(64, 32).values.detach(),
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(text.encode())).byte(),
    }


def test_scales_in_8_bits_are_expanded_when_they_are_loaded() -> None:
    weight, scale = compacted(layer().weight.detach(), CompactKind.NF4)
    # 32 blocks share nested scales by 20; 256 values, evenly spread.
    nested_map = torch.linspace(-1, 1, 256)
    offset = scale.mean().item()
    nested = torch.stack([part.abs().max() for part in torch.split(scale - offset, 20)])
    factors = nested.repeat_interleave(20)[:32]
    numbers = torch.bucketize((scale - offset) / factors, nested_map).clamp(max=255).byte()
    state = in_files(weight, numbers, nested_blocksize=20, nested_offset=offset)
    state |= {"weight.nested_absmax": nested, "weight.nested_quant_map": nested_map}

    loaded = CompactLinear(64, 32)
    loaded.load_state_dict(state)

    assert torch.equal(loaded.scale, nested_map[numbers.long()] * factors + offset)
    assert torch.equal(loaded.weight, weight)


@pytest.mark.parametrize("nested", [False, True])
def test_a_layer_of_bitsandbytes_is_loaded_with_its_values(nested: bool) -> None:
    functions = pytest.importorskip(
        "bitsandbytes.functional", reason="its checkpoints are loaded", exc_type=ImportError
    )
    weight = layer().weight.detach()
    packed, state = functions.quantize_4bit(weight, quant_type="nf4", compress_statistics=nested)
    theirs = functions.dequantize_4bit(packed, state)

    loaded = CompactLinear(64, 32)
    loaded.load_state_dict(
        {"weight": packed, **{f"weight.{k}": v for k, v in state.as_dict(packed=True).items()}}
    )

    assert torch.equal(loaded.expanded(torch.float32), theirs)
    if not nested:
        mine = CompactLinear.of(layer(), CompactKind.NF4)
        assert torch.equal(mine.weight, packed)
        assert torch.equal(mine.scale, state.absmax)


# --- under an engine ------------------------------------------------------------------------------


class Adapted(nn.Module):
    """Adds a small trained product to a frozen layer, as LoRA does."""

    def __init__(self, base: nn.Module, columns: int, rows: int) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(columns, 2, bias=False)
        self.up = nn.Linear(2, rows, bias=False)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.base(given) + self.up(self.down(given))
        return output


def adapted(kind: CompactKind, *, compact: bool) -> nn.Module:
    """Return a model with adapters on a compact base, or on the same base expanded."""
    base = model()
    compact_linears(base, kind, skip=("head",))
    base.requires_grad_(False)
    for block in base.blocks:
        assert isinstance(block, nn.Sequential)
        for number in (0, 2):
            known = block[number]
            assert isinstance(known, CompactLinear)
            used: nn.Module = known
            if not compact:
                used = nn.Linear(known.in_features, known.out_features)
                used.weight.data, used.bias.data = known.expanded(torch.float32), known.bias.data
                used.requires_grad_(False)
            # Here, as an expanded layer takes random numbers when it is made.
            torch.manual_seed(number)
            block[number] = Adapted(used, known.in_features, known.out_features)
    return base


def losses_of(made: nn.Module, settings: dict[str, Any]) -> list[float]:
    trained = [parameter for parameter in made.parameters() if parameter.requires_grad]
    found = []
    with infinity_engine.initialize(
        made, torch.optim.AdamW(trained, lr=1e-2), calibration="off", rates=RATES, **settings
    ) as engine:
        for step in range(3):
            loss = engine(torch.arange(8)[None] + step).square().mean()
            engine.backward(loss)
            engine.step()
            found.append(loss.item())
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_on_a_compact_base_train_with_the_bits_of_the_expanded_one(
    kind: CompactKind, tmp_path: Path
) -> None:
    memory = {"accelerator": "cpu", "budget": {"host": "64MiB"}}
    drives = {
        "accelerator": "cpu",
        "budget": {"host": "64MiB", "nvme": {str(tmp_path): "64MiB"}},
        "parameters": "nvme",
        "storage": {"small_bytes": 0},
    }
    expected = losses_of(adapted(kind, compact=False), memory)

    assert len(set(expected)) == 3
    assert losses_of(adapted(kind, compact=True), memory) == expected
    assert losses_of(adapted(kind, compact=True), drives) == expected
    with emulated(1) as device:
        far = {
            "device": device,
            "parameters": "host",
            "strategy": "host_only",
            "budget": {"host": "16MiB", "device": "2MiB"},
        }
        assert losses_of(adapted(kind, compact=True), far) == expected


def test_the_base_stays_compact_on_drives(tmp_path: Path) -> None:
    made = adapted(CompactKind.NF4, compact=True)
    trained = [parameter for parameter in made.parameters() if parameter.requires_grad]
    with infinity_engine.initialize(
        made,
        torch.optim.SGD(trained, lr=0.1),
        accelerator="cpu",
        calibration="off",
        budget={"host": "64MiB", "nvme": {str(tmp_path): "64MiB"}},
        parameters="nvme",
        storage={"small_bytes": 0},
    ) as engine:
        packed = [known for known in engine._known.values() if known.parameter.dtype is torch.uint8]
        assert len(packed) == 6
        assert all(known.on_drives and known.nbytes == 64 * 128 // 2 for known in packed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_is_cast_keeps_its_scales(kind: CompactKind, dtype: torch.dtype) -> None:
    compact = CompactLinear.of(layer(), kind)
    expected = compact.expanded(dtype)
    scale = compact.scale

    compact.to(dtype)

    assert compact.scale is scale
    assert (compact.scale.dtype, compact.bias.dtype) == (torch.float32, dtype)
    assert torch.equal(compact.expanded(dtype), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_scales_of_16_bits_are_read_as_what_they_are(kind: CompactKind) -> None:
    compact = CompactLinear.of(layer(), kind)
    compact.scale.data = compact.scale.data.bfloat16()
    compact.values.data = compact.values.data.bfloat16()
    given = compact.weight, compact.scale.float(), compact.values.float()

    found = compact.expanded(torch.bfloat16)

    assert torch.equal(found, weights.expanded(*given, torch.bfloat16).view_as(found))


@pytest.mark.parametrize("precision", ["bf16", "fp16", "bf16_autocast"])
def test_no_precision_casts_scales(precision: str) -> None:
    model = nn.Sequential(layer(), nn.Linear(32, 4))
    compact_linears(model, "nf4", skip=("1",))
    compact = model[0]
    assert isinstance(compact, CompactLinear)
    expected = compact.expanded(torch.float32)

    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    with infinity_engine.initialize(
        model, optimizer, budget={"host": "64MiB"}, accelerator="cpu", precision=precision
    ) as engine:
        given = next(model[1].parameters())
        engine(torch.randn(2, 64).to(given.dtype))
        assert compact.scale.dtype is torch.float32
        assert torch.equal(compact.expanded(torch.float32), expected)


def test_a_layer_in_two_places_stays_one() -> None:
    shared = layer()
    model = nn.Sequential(shared, nn.Linear(32, 64), shared)

    assert compact_linears(model, "int8", skip=("1",)) == ("0",)
    assert isinstance(model[0], CompactLinear)
    assert model[2] is model[0]
    expand_linears(model, torch.float32)
    assert type(model[0]) is nn.Linear
    assert model[2] is model[0]


def test_a_layer_with_hooks_is_left_as_it_is() -> None:
    model = nn.Sequential(layer(), nn.Linear(32, 64))
    model[0].register_forward_hook(lambda *_: None)

    assert compact_linears(model, "int8") == ("1",)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_without_elements_is_left_as_it_is(kind: CompactKind) -> None:
    model = nn.Sequential(nn.Linear(64, 0), nn.Linear(0, 64), layer())

    assert compact_linears(model, kind) == ("2",)
    assert model(torch.randn(2, 64)[:, :64]).shape == (2, 32)


def test_a_layer_that_is_skipped_in_one_place_is_left_in_all() -> None:
    model = nn.ModuleDict({"body": layer(), "other": layer()})
    model["lm_head"] = model["body"]

    assert compact_linears(model, "int8") == ("other",)
    assert model["lm_head"] is model["body"]
    assert type(model["body"]) is nn.Linear
