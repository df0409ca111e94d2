"""Activations on a GPU: the same bits wherever they wait, and tiles that agree with plain torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import infinity_engine
from infinity_engine.accel import Accelerator, open_accelerator
from infinity_engine.engine.engine import Engine
from infinity_engine.losses import TokenLoss, chunked_cross_entropy
from infinity_engine.plan import HostOnly
from infinity_engine.tiling import TiledEmbedding, TiledLinear, tile, tile_sequence
from support.block_ways import take_turns
from support.engine_bits import Bits, bits_of, differing
from support.nvme_training import RATES, Case, opened, train
from support.small_models import MODELS

pytest.importorskip("cupy")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
    pytest.mark.usefixtures("exact"),
    # what `exact` asks for, where torch has it not
    pytest.mark.filterwarnings("ignore:.*deterministic:UserWarning"),
    # torch, in a backward's own thread
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning"),
]
# cuBLAS takes 32 MiB of it for each thread that computes, and for some products as much again
DEVICE = "1GiB"
CUDA = torch.device("cuda")
FEW = {"resident_bytes": 8192, "host_bytes": "1MiB", "small_bytes": 0}
WAYS: tuple[dict[str, object], ...] = (
    {"at": "host"},
    {"at": "nvme"},
    {"recompute": "blocks"},
    {"at": "host", "recompute": "blocks"},
    {"at": "nvme", "recompute": "blocks"},
    {"at": "auto"},
)


@cache
def kept(model: str) -> tuple[Bits, list[float]]:
    case = Case(model=model, strategy=HostOnly(), parameters="device", small_bytes=0, device=DEVICE)
    with (
        open_accelerator("cuda") as device,
        opened(case, device, None) as (engine, task),
    ):
        losses = train(engine, task, case)
        return bits_of(engine), losses


def same_as_kept(
    model: str, parameters: str, activations: dict[str, object], device: Accelerator, drive: Path
) -> str:
    """Train with activations that leave; return the report."""
    case = Case(model=model, parameters=parameters, small_bytes=0, device=DEVICE)
    with opened(case, device, drive, activations={**FEW, **activations}) as (engine, task):
        losses = train(engine, task, case)
        bits, report = bits_of(engine), str(engine.report())
    expected, expected_losses = kept(model)
    assert differing(expected, bits) == []
    assert losses == expected_losses
    return report


@pytest.mark.parametrize("at", ["host", "nvme"])
@pytest.mark.parametrize("parameters", ["device", "host"])
@pytest.mark.parametrize("model", MODELS)
def test_saved_tensors_leave_and_come_back_with_the_same_bits(
    model: str, parameters: str, at: str, device: Accelerator, tmp_path: Path
) -> None:
    assert "activations" in same_as_kept(model, parameters, {"at": at}, device, tmp_path)


@pytest.mark.parametrize("activations", WAYS[2:], ids=str)
@pytest.mark.parametrize("parameters", ["device", "host"])
def test_blocks_run_again_with_the_same_bits(
    parameters: str, activations: dict[str, object], device: Accelerator, tmp_path: Path
) -> None:
    # The attentions of this model are in a list.
    report = same_as_kept("llama", parameters, activations, device, tmp_path)

    assert "activations of attention.0" in report


# --- as much that copies are under way while modules compute --------------------------------------

WIDTH, ROWS, DEPTH = 512, 2048, 6  # about 36 MiB for each block


class Wide(nn.Module):
    """Blocks that save far more than they have weights, each recomputed by torch or not."""

    def __init__(self, checkpointing: str | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(DEPTH)
        )
        self.checkpointing = checkpointing

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if self.checkpointing is None:
                x = x + block(x)
            else:
                x = x + checkpoint(block, x, use_reentrant=self.checkpointing == "reentrant")
        return torch.as_tensor(x.square().mean())


def wide_batch(seed: int) -> torch.Tensor:
    drawn = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))
    return drawn.to(CUDA).requires_grad_()


Use = Callable[[Engine], None]


def step_by_step(engine: Engine) -> None:
    for seed in range(4):
        engine.backward(engine(wide_batch(seed)))
        engine.step()


def several_forwards(engine: Engine) -> None:
    for seed in range(2):
        losses = [engine(wide_batch(2 * seed + number)) for number in range(2)]
        with torch.no_grad():
            engine(wide_batch(9))
        for loss in losses:
            engine.backward(loss)
        engine.step()


def retained(engine: Engine) -> None:
    for seed in range(2):
        loss = engine(wide_batch(seed))
        engine(wide_batch(8))  # a graph that no backward uses
        engine.backward(loss, retain_graph=True)
        engine.backward(loss * 0.5)
        engine.step()


def wide_bits(
    use: Use,
    device: Accelerator,
    drive: Path,
    *,
    accumulation: int = 1,
    checkpointing: str | None = None,
    prepare: Use | None = None,
    parameters: str = "host",
    **settings: Any,
) -> Bits:
    torch.manual_seed(0)
    model = Wide(checkpointing)
    with infinity_engine.initialize(
        model,
        torch.optim.AdamW(model.parameters()),
        device=device,
        strategy="host_only",
        parameters=parameters,
        accumulation_steps=accumulation,
        rates=RATES,
        calibration="off",
        budget={"host": "1GiB", "device": "4GiB", "nvme": {str(drive): "2GiB"}},
        **settings,
    ) as engine:
        if prepare is not None:
            prepare(engine)
        use(engine)
        return bits_of(engine)


LIMITS = {"resident_bytes": "64MiB", "host_bytes": "512MiB"}


@pytest.mark.parametrize("parameters", ["device", "host"])
@pytest.mark.parametrize("activations", WAYS, ids=str)
def test_wide_blocks_train_with_the_same_bits(
    activations: dict[str, object], parameters: str, device: Accelerator, tmp_path: Path
) -> None:
    expected = wide_bits(step_by_step, device, tmp_path)

    found = wide_bits(
        step_by_step,
        device,
        tmp_path,
        parameters=parameters,
        activations={**LIMITS, **activations},
    )

    assert differing(expected, found) == []


@pytest.mark.parametrize("at", ["host", "nvme"])
@pytest.mark.parametrize("use", [several_forwards, retained])
def test_graphs_may_be_used_in_other_ways(
    use: Use, at: str, device: Accelerator, tmp_path: Path
) -> None:
    accumulation = 2 if use is several_forwards else 1
    expected = wide_bits(use, device, tmp_path, accumulation=accumulation)

    found = wide_bits(
        use, device, tmp_path, accumulation=accumulation, activations={**LIMITS, "at": at}
    )

    assert differing(expected, found) == []


@pytest.mark.parametrize("checkpointing", ["reentrant", "not reentrant"])
def test_the_inputs_of_blocks_that_torch_recomputes_leave_too(
    checkpointing: str, device: Accelerator, tmp_path: Path
) -> None:
    expected = wide_bits(step_by_step, device, tmp_path, checkpointing=checkpointing)

    found = wide_bits(
        step_by_step,
        device,
        tmp_path,
        checkpointing=checkpointing,
        activations={"at": "host", "resident_bytes": "4MiB"},
    )

    assert differing(expected, found) == []


def test_blocks_that_go_other_ways_in_turn_have_the_same_bits(
    device: Accelerator, tmp_path: Path
) -> None:
    expected = wide_bits(step_by_step, device, tmp_path)

    found = wide_bits(
        step_by_step,
        device,
        tmp_path,
        prepare=take_turns,
        activations={"at": "auto", "resident_bytes": "256MiB", "host_bytes": "256MiB"},
    )

    assert differing(expected, found) == []


# --- tiles ----------------------------------------------------------------------------------------


def whole_numbers(*shape: int, seed: int) -> torch.Tensor:
    drawn = torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed))
    return drawn.float().to(CUDA)


def gradient_of(module: Any) -> torch.Tensor:
    if isinstance(module, TiledLinear | TiledEmbedding):
        return module.whole_values().joined(lambda part: torch.as_tensor(part.grad))
    return torch.as_tensor(module.weight.grad)


@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (3, 1), (1, 4), (3, 5)])
def test_a_tiled_linear_layer_has_the_bits_of_a_whole_one(outputs: int, inputs: int) -> None:
    """All values are whole numbers, so each sum is exact in any order."""
    whole = nn.Linear(96, 160).to(CUDA)
    with torch.no_grad():
        for number, parameter in enumerate(whole.parameters()):
            parameter.copy_(whole_numbers(*parameter.shape, seed=number))
    tiled = TiledLinear(96, 160, output_tiles=outputs, input_tiles=inputs)
    tiled.load_state_dict(whole.state_dict())
    tiled.to(CUDA)
    factor = whole_numbers(2, 30, 160, seed=8)
    found = []
    for layer in (whole, tiled):
        batch = whole_numbers(2, 30, 96, seed=7).requires_grad_()
        output = layer(batch)
        torch.autograd.backward((output * factor).sum())
        assert batch.grad is not None
        found.append((output.detach(), batch.grad, gradient_of(layer)))

    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_a_tiled_embedding_has_the_bits_of_a_whole_one() -> None:
    whole = nn.Embedding(110, 12).to(CUDA)
    tiled = TiledEmbedding(110, 12, tiles=3)
    tiled.load_state_dict(whole.state_dict())
    tiled.to(CUDA)
    entries = torch.tensor([[3, 100, 3, 0], [44, 44, 109, 3]], device=CUDA)
    factor = whole_numbers(2, 4, 12, seed=1)
    found = []
    for layer in (whole, tiled):
        output = layer(entries)
        torch.autograd.backward((output * factor).sum())
        found.append((output.detach(), gradient_of(layer)))

    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


class Language(nn.Module):
    """An embedding that is the head too, and a block between."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8192, 64)
        self.mlp = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        self.head = nn.Linear(64, 8192, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.mlp(self.embed(tokens))
        return chunked_cross_entropy(hidden, self.head, labels, workspace="1MiB")


def language(
    device: Accelerator, drive: Path, *, tiled: bool, **settings: Any
) -> tuple[Bits, list[float]]:
    """Train the model; return its weights and losses."""
    torch.manual_seed(0)
    model = Language()
    if tiled:
        assert set(tile(model, "256KiB").names) == {"embed", "head"}
        tile_sequence(model, "mlp", 5)
    losses = []
    budget = {"host": "64MiB", "device": DEVICE, "nvme": {str(drive): "128MiB"}}
    with infinity_engine.initialize(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        device=device,
        rates=RATES,
        calibration="off",
        budget=budget,
        **settings,
    ) as engine:
        draw = torch.Generator().manual_seed(0)
        for _ in range(3):
            tokens = torch.randint(8192, (4, 33), generator=draw).to(CUDA)
            loss = engine(tokens[:, :-1], tokens[:, 1:])
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        found: Bits = engine.state_dict()
        return found, losses


def test_a_tiled_model_trains_alike_from_everywhere(device: Accelerator, tmp_path: Path) -> None:
    at_host: dict[str, Any] = {"strategy": "host_only", "parameters": "host"}
    whole, near = language(device, tmp_path, tiled=False, **at_host)
    expected, losses = language(device, tmp_path, tiled=True, **at_host)

    on_device = {"strategy": "host_only", "parameters": "device"}
    on_drives = {"strategy": "nvme_streamed", "parameters": "nvme", "storage": {"small_bytes": 0}}
    for settings in (on_device, on_drives):
        bits, same = language(device, tmp_path, tiled=True, **settings)
        assert same == losses
        assert differing(expected, bits) == []
    assert losses == pytest.approx(near, rel=1e-4)
    assert whole.keys() == expected.keys()


# --- the chunked loss -----------------------------------------------------------------------------

RULES = (
    TokenLoss(),
    TokenLoss(label_smoothing=0.2, z_loss=1e-3, scale=3.0, soft_cap=5.0),
)


def plain_loss(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, labels: torch.Tensor, rule: Any
) -> torch.Tensor:
    """Return the loss from whole logits, in fp64."""
    logits = functional.linear(hidden.double(), weight.double(), bias.double()) * rule.scale
    if rule.soft_cap is not None:
        logits = torch.tanh(logits / rule.soft_cap) * rule.soft_cap
    losses = functional.cross_entropy(
        logits, labels, label_smoothing=rule.label_smoothing, reduction="none"
    )
    counts = labels != -100
    losses = losses + rule.z_loss * logits.logsumexp(1).square() * counts
    return torch.as_tensor(losses.sum() / counts.sum())


@pytest.mark.parametrize("workspace", ["8MiB", 400_000])
@pytest.mark.parametrize(
    ("dtype", "near"), [(torch.float64, 1e-10), (torch.float32, 1e-4), (torch.bfloat16, 3e-2)]
)
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_the_chunked_loss_is_that_of_whole_logits(
    rule: TokenLoss, dtype: torch.dtype, near: float, workspace: object
) -> None:
    draw = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        (torch.randn(shape, generator=draw, dtype=torch.float64) / 4)
        .to(CUDA, dtype)
        .requires_grad_()
        for shape in ((300, 64), (1000, 64), (1000,))
    )
    labels = torch.randint(1000, (300,), generator=draw)
    labels[:20] = -100
    labels = labels.to(CUDA)
    given = (hidden, weight, bias)

    loss = chunked_cross_entropy(
        hidden,
        weight,
        labels,
        bias=bias,
        workspace=workspace,  # type: ignore[arg-type]
        token_loss=rule,
    )
    found = torch.autograd.grad(loss, given)

    expected = plain_loss(hidden, weight, bias, labels, rule)
    assert loss.device == hidden.device
    assert loss.item() == pytest.approx(expected.item(), rel=near)
    for mine, theirs in zip(found, torch.autograd.grad(expected, given), strict=True):
        assert mine.dtype is dtype
        error = (mine.double() - theirs.double()).norm() / theirs.double().norm()
        assert float(error) <= near
