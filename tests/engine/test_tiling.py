"""Tiled layers under an engine: layers larger than the device train, with the same bits as on the
host, and state dicts have whole weights.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity_engine
from infinity_engine.engine.engine import Engine
from infinity_engine.errors import CapacityError, ConfigError
from infinity_engine.losses import chunked_cross_entropy
from infinity_engine.placement.tiles import largest_tile
from infinity_engine.plan import Tier
from infinity_engine.plan.budget import Capacity
from infinity_engine.planning import planning
from infinity_engine.tiling import TiledEmbedding, TiledLinear, tile, tile_sequence
from support.engine_bits import Bits, bits_of, differing
from support.nvme_training import RATES, emulated

pytestmark = pytest.mark.usefixtures("deterministic")

WIDTH, WIDE, TOKENS = 64, 16_384, 6
DEVICE = 3 << 20
"""Less than the 4 MiB of one layer."""
LIMIT = "512KiB"
TIERS = ("host", "drives", "device")


class Block(nn.Module):
    """A block with one layer that the device cannot hold."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.large = nn.Linear(WIDTH, WIDE)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.large(self.first(inputs))
        return found


class Language(nn.Module):
    """An embedding that is the head too, both larger than the device, and a block between."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WIDE, WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.mlp = nn.Sequential(nn.Linear(4 * WIDTH, 4 * WIDTH), nn.GELU())
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WIDE, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.down(self.mlp(self.up(self.embed(tokens))))
        return chunked_cross_entropy(hidden, self.head, labels, workspace="1MiB")


def whole_numbers(*shape: int, seed: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=draw).float()


def made(kind: Callable[[], nn.Module], *, exact: bool = False) -> nn.Module:
    torch.manual_seed(0)
    model = kind()
    if exact:
        with torch.no_grad():
            for number, parameter in enumerate(model.parameters()):
                parameter.copy_(whole_numbers(*parameter.shape, seed=number))
    return model


def opened(
    model: nn.Module,
    tier: str,
    drive: Path,
    stack: ExitStack,
    optimizer: Any = None,
    **more: Any,
) -> Engine:
    """Return an engine that has everything on one tier that can be there."""
    settings: dict[str, Any] = {"strategy": "host_only", "budget": {"host": "256MiB"}}
    if tier == "drives":
        settings = {
            "strategy": "nvme_streamed",
            "parameters": "nvme",
            "budget": {"host": "48MiB", "nvme": {str(drive): "128MiB"}},
        }
    if tier == "device":
        device = stack.enter_context(emulated(1))
        settings = {
            "strategy": "host_only",
            "parameters": "host",
            "device": device,
            "budget": {"host": "256MiB", "device": DEVICE},
        }
    return stack.enter_context(
        infinity_engine.initialize(
            model,
            optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2),
            rates=RATES,
            accelerator="cpu",
            subgroup_numel=1 << 16,
            update_threads=2,
            **settings,
            **more,
        )
    )


def test_a_layer_larger_than_the_device_is_refused_whole(tmp_path: Path) -> None:
    with ExitStack() as stack, pytest.raises(CapacityError):
        opened(made(Block), "device", tmp_path, stack)


@pytest.mark.parametrize("tier", TIERS)
def test_a_layer_larger_than_the_device_trains_with_plain_torchs_bits(
    tier: str, tmp_path: Path
) -> None:
    # Whole numbers: all sums are exact, so tiles add up to the bits of a whole layer.
    inputs = whole_numbers(TOKENS, WIDTH, seed=9)
    factor = whole_numbers(TOKENS, WIDE, seed=10)
    plain = made(Block, exact=True)
    (plain(inputs) * factor).sum().backward()
    torch.optim.SGD(plain.parameters(), lr=0.5).step()

    model = made(Block, exact=True)
    names = tile(model, LIMIT).names
    with ExitStack() as stack:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        engine = opened(model, tier, tmp_path, stack, optimizer)
        engine.backward((engine(inputs) * factor).sum())
        engine.step()
        found = engine.state_dict()
        if tier == "device":
            peak = {usage.tier: usage.peak_held for usage in engine.usage()}[Tier.DEVICE]
            assert peak <= DEVICE

    assert names == ("large",)
    assert list(found) == list(plain.state_dict())
    assert differing(found, dict(plain.state_dict())) == []


def trained(
    tier: str, drive: Path, prepare: Callable[[nn.Module], None]
) -> tuple[Bits, list[float]]:
    """Train some steps of the language model; return all bits and the losses."""
    model = made(Language)
    prepare(model)
    draw = torch.Generator().manual_seed(0)
    losses = []
    with ExitStack() as stack:
        engine = opened(model, tier, drive, stack)
        for _ in range(3):
            tokens = torch.randint(WIDE, (2, TOKENS + 1), generator=draw)
            loss = engine(tokens[:, :-1], tokens[:, 1:])
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return bits_of(engine), losses


def in_tiles(model: nn.Module) -> None:
    assert set(tile(model, LIMIT).names) == {"embed", "head"}
    tile_sequence(model, "mlp", 2)


def test_a_tied_vocabulary_larger_than_the_device_trains_with_the_same_bits(
    tmp_path: Path,
) -> None:
    expected, losses = trained("host", tmp_path, in_tiles)
    for tier in TIERS[1:]:
        bits, same = trained(tier, tmp_path, in_tiles)
        assert same == losses, tier
        assert differing(expected, bits) == [], tier

    whole, near = trained("host", tmp_path, lambda _: None)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(near), rtol=1e-5, atol=0.0)
    assert set(whole) & set(expected) >= {"embed.weight", "head.weight", "mlp.0.weight"}


def test_tied_weights_share_one_copy_in_a_state_dict(tmp_path: Path) -> None:
    model = made(Language)
    in_tiles(model)
    with ExitStack() as stack:
        found = opened(model, "drives", tmp_path, stack).state_dict()

    assert found["embed.weight"] is found["head.weight"]
    assert found["embed.weight"].shape == (WIDE, WIDTH)


def test_trained_weights_of_a_tiled_model_are_listed(tmp_path: Path) -> None:
    model = made(Block)
    tile(model, LIMIT)
    for parameter in model.first.parameters():  # type: ignore[union-attr]
        parameter.requires_grad_(False)
    optimizer = torch.optim.SGD([known for known in model.parameters() if known.requires_grad])
    with ExitStack() as stack:
        engine = opened(model, "host", tmp_path, stack, optimizer)

        assert list(engine.trainable_state_dict()) == ["large.weight", "large.bias"]


def test_a_whole_state_dict_is_loaded_into_a_tiled_engine(tmp_path: Path) -> None:
    model = made(Block)
    state = {name: torch.randn_like(value) for name, value in model.state_dict().items()}
    tile(model, LIMIT)
    with ExitStack() as stack:
        engine = opened(model, "host", tmp_path, stack)
        with engine.gathered(engine.parameters(), modify=True):
            engine.module.load_state_dict(state)

        assert differing(engine.state_dict(), state) == []


def test_a_whole_head_is_fetched_for_its_loss(tmp_path: Path) -> None:
    tokens = torch.randint(WIDE, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    expected = made(Language)(tokens, tokens).detach()
    with ExitStack() as stack:
        engine = opened(made(Language), "drives", tmp_path, stack)

        assert torch.equal(engine(tokens, tokens).detach(), expected)


class Built(nn.Module):
    """A model that is made of tiled layers from the start."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = TiledEmbedding(WIDE, WIDTH, tiles=8)
        self.head = TiledLinear(WIDTH, WIDE, output_tiles=8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return chunked_cross_entropy(self.embed(tokens), self.head, tokens, workspace="1MiB")


def test_tiled_layers_built_beyond_memory_train_with_the_same_bits(tmp_path: Path) -> None:
    tokens = torch.randint(WIDE, (2, TOKENS), generator=torch.Generator().manual_seed(0))

    def bits(model: nn.Module, tier: str) -> Bits:
        with ExitStack() as stack:
            engine = opened(model, tier, tmp_path, stack)
            engine.backward(engine(tokens))
            engine.step()
            return bits_of(engine)

    torch.manual_seed(0)
    budget = {"host": "48MiB", "nvme": {str(tmp_path): "128MiB"}}
    with infinity_engine.init_context(budget=budget, cache="1MiB"):
        built = Built()

    assert differing(bits(made(Built), "host"), bits(built, "drives")) == []


def test_a_saved_run_goes_on_with_the_same_tiles(tmp_path: Path) -> None:
    def opened_in_tiles(stack: ExitStack, tier: str) -> Engine:
        model = made(Language)
        in_tiles(model)
        return opened(model, tier, tmp_path, stack)

    tokens = torch.randint(WIDE, (2, TOKENS), generator=torch.Generator().manual_seed(0))
    with ExitStack() as stack:
        engine = opened_in_tiles(stack, "host")
        engine.backward(engine(tokens, tokens))
        engine.step()
        engine.save(tmp_path / "run")
        expected = bits_of(engine)
    with ExitStack() as stack:
        engine = opened_in_tiles(stack, "device")
        engine.load(tmp_path / "run")

        assert differing(bits_of(engine), expected) == []


@pytest.mark.parametrize(
    ("saved_with", "loaded_with"), [(None, LIMIT), (LIMIT, None), (LIMIT, "768KiB")]
)
@pytest.mark.parametrize("frozen", [False, True])
def test_a_saved_run_goes_on_with_other_tiles(
    saved_with: str | None, loaded_with: str | None, frozen: bool, tmp_path: Path
) -> None:
    load_file = pytest.importorskip("safetensors.torch").load_file

    def opened_with(limit: str | None, tier: str, stack: ExitStack) -> Engine:
        model = made(Language)
        embed: Any = model.embed
        embed.weight.requires_grad_(not frozen)
        if limit is not None:
            assert tile(model, limit).names == ("embed", "head")
        optimizer = torch.optim.AdamW(
            [(name, known) for name, known in model.named_parameters() if known.requires_grad]
        )
        return opened(model, tier, tmp_path, stack, optimizer)

    def moments(engine: Engine) -> list[Any]:
        embed: Any = engine.module.embed
        states: list[Any] = [engine.state_of(known) for known in embed.parameters()]
        assert {state["step"] for state in states} == {1}
        return [torch.cat([state[name] for state in states]) for name in ("exp_avg", "exp_avg_sq")]

    tokens = torch.randint(WIDE, (2, TOKENS), generator=torch.Generator().manual_seed(0))
    with ExitStack() as stack:
        engine = opened_with(saved_with, "host", stack)
        engine.backward(engine(tokens, tokens))
        engine.step()
        engine.save(tmp_path / "run")
        engine.export(tmp_path / "weights")
        weights, states = engine.state_dict(), [] if frozen else moments(engine)
    with ExitStack() as stack:
        engine = opened_with(loaded_with, "drives" if loaded_with else "host", stack)
        [names] = [group["param_names"] for group in engine.optimizer.param_groups]
        engine.load(tmp_path / "run")

        assert differing(weights, engine.state_dict()) == []
        assert frozen or all(map(torch.equal, moments(engine), states))
        assert engine.optimizer.param_groups[0]["param_names"] == names
    # What is exported is for programs that know no tiles.
    exported = load_file(tmp_path / "weights" / "model.safetensors")
    assert set(exported) == set(weights) - {"head.weight"}
    assert differing({name: weights[name] for name in exported}, exported) == []


def test_a_tiled_head_computes_in_autocasts_dtype_on_every_tier(tmp_path: Path) -> None:
    tokens = torch.randint(WIDE, (2, TOKENS), generator=torch.Generator().manual_seed(0))

    def losses(tier: str) -> list[float]:
        model = made(Language)
        in_tiles(model)
        with ExitStack() as stack:
            engine = opened(model, tier, tmp_path, stack, precision="bf16_autocast")
            found = []
            for _ in range(2):
                loss = engine(tokens, tokens)
                engine.backward(loss)
                engine.step()
                found.append(loss.item())
            return found

    exact = made(Language)(tokens, tokens).item()
    first = losses("host")
    assert first == losses("device") == losses("drives")
    assert first[0] == pytest.approx(exact, rel=1e-2)
    assert first[0] != exact


# --- tiling="auto" --------------------------------------------------------------------------------


def test_auto_cuts_what_the_device_has_no_room_for(tmp_path: Path) -> None:
    inputs = whole_numbers(TOKENS, WIDTH, seed=9)
    factor = whole_numbers(TOKENS, WIDE, seed=10)
    plain = made(Block, exact=True)
    (plain(inputs) * factor).sum().backward()
    torch.optim.SGD(plain.parameters(), lr=0.5).step()

    model = made(Block, exact=True)
    # Of the whole weights, as a user's program makes it.
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.5)
    with ExitStack() as stack:
        engine = opened(model, "device", tmp_path, stack, optimizer, tiling="auto")
        engine.backward((engine(inputs) * factor).sum())
        engine.step()
        found = engine.state_dict()
        peak = {usage.tier: usage.peak_held for usage in engine.usage()}[Tier.DEVICE]

    assert peak <= DEVICE
    assert isinstance(model.large, TiledLinear)
    assert type(model.first) is nn.Linear
    assert list(found) == list(plain.state_dict())
    assert differing(found, dict(plain.state_dict())) == []
    [group] = optimizer.param_groups
    assert {id(parameter) for parameter in group["params"]} == {
        id(parameter) for parameter in model.parameters()
    }
    assert group["param_names"][-2:] == ["large.tiles.10.weight", "large.bias"]


def test_auto_cuts_tied_weights_once_and_trains_with_the_bits_of_tile(tmp_path: Path) -> None:
    def train_tied(prepare: Callable[[nn.Module], object], **more: Any) -> Bits:
        model = made(Language)
        prepare(model)
        with ExitStack() as stack:
            engine = opened(model, "device", tmp_path, stack, **more)
            tokens = torch.arange(2 * TOKENS + 2).view(2, -1)
            engine.backward(engine(tokens[:, :-1], tokens[:, 1:]))
            engine.step()
            assert isinstance(model.embed, TiledEmbedding)
            return bits_of(engine)

    by_call = train_tied(lambda model: tile(model, largest_tile(DEVICE)))
    assert differing(by_call, train_tied(lambda _: None, tiling="auto")) == []


def test_auto_leaves_a_model_that_fits_alone(tmp_path: Path) -> None:
    model = made(Block)
    with ExitStack() as stack:
        opened(model, "host", tmp_path, stack, tiling="auto")
        assert type(model.large) is nn.Linear


def test_a_refused_engine_gives_the_model_its_layers_back(tmp_path: Path) -> None:
    model = made(Block)
    optimizer = torch.optim.AdamW(model.parameters())
    modules, parameters = list(model.modules()), list(model.parameters())
    before = {name: values.clone() for name, values in model.state_dict().items()}
    with ExitStack() as stack, pytest.raises(CapacityError):
        opened(
            model,
            "device",
            tmp_path,
            stack,
            optimizer,
            tiling="auto",
            activation_bytes=DEVICE - (64 << 10),
        )

    assert list(model.modules()) == modules
    assert [id(parameter) for parameter in optimizer.param_groups[0]["params"]] == [
        id(parameter) for parameter in parameters
    ]
    assert differing(before, dict(model.state_dict())) == []


def test_an_optimizer_with_states_of_a_weight_to_cut_is_refused(tmp_path: Path) -> None:
    model = made(Block)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, WIDTH)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with ExitStack() as stack, pytest.raises(ConfigError, match=r"states for large\.weight"):
        opened(model, "device", tmp_path, stack, optimizer, tiling="auto")


def test_auto_leaves_layers_that_were_built_on_drives_alone(tmp_path: Path) -> None:
    budget = {"host": "256MiB", "nvme": {str(tmp_path): "128MiB"}}
    with infinity_engine.init_context(budget=budget):
        model = made(Block)
    with ExitStack() as stack, pytest.raises(CapacityError):
        opened(model, "device", tmp_path, stack, tiling="auto")
    assert type(model.large) is nn.Linear


def test_layers_are_cut_by_the_memory_that_is_free_and_what_parameters_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free = Capacity(device=0, host=20 << 20, nvme={})
    monkeypatch.setattr(planning, "probe_capacity", lambda *_, **__: free)

    def kinds(**budget: Any) -> list[str]:
        layers = [nn.Linear(1024, rows, bias=False) for rows in (1024, 1024, 2048)]
        model = nn.Sequential(*layers)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        with infinity_engine.initialize(
            model, optimizer, accelerator="cpu", calibration="off", tiling="auto", **budget
        ):
            return [type(module).__name__ for module in model]

    # 16 MiB of parameters beside 20 MiB.
    assert kinds() == kinds(budget={"host": "36MiB"})


def test_layers_of_a_mixed_model_are_cut_by_the_dtypes_that_parameters_compute_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free = Capacity(device=0, host=20 << 20, nvme={})
    monkeypatch.setattr(planning, "probe_capacity", lambda *_, **__: free)
    # The fp32 layers stay fp32, and keep their 8 MiB, as another one is bf16 already.
    layers = [nn.Linear(1024, 1024, bias=False).requires_grad_(False) for _ in range(2)]
    model = nn.Sequential(*layers, nn.Linear(16, 16, bias=False).to(torch.bfloat16))
    with infinity_engine.initialize(
        model,
        torch.optim.SGD(model[2].parameters(), lr=1e-3),
        accelerator="cpu",
        calibration="off",
        tiling="auto",
        precision="bf16",
        budget={"host": "24MiB"},
    ) as engine:
        assert engine.model is model


def test_a_sparse_parameter_is_named_also_where_layers_may_be_cut() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    sparse = torch.eye(16).to_sparse()
    model[1].weight = nn.Parameter(sparse, requires_grad=False)
    optimizer = torch.optim.SGD(model[0].parameters(), lr=1e-3)
    with pytest.raises(ConfigError, match=r"1\.weight.*dense"):
        infinity_engine.initialize(
            model, optimizer, accelerator="cpu", calibration="off", tiling="auto"
        )
