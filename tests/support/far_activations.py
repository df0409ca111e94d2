"""Activations on a far device that has the links and the compute of a GPU by its data sheet.

Seconds are those of the device's computed clock: links carry bytes at their rates, modules take the
time of their products, and the host none. Nothing here depends on how fast the machine is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity_engine
from infinity_engine.accel import Emulation, TimeCost
from infinity_engine.activation import ActivationOffload
from infinity_engine.activation.deciding import MeasuredWays
from infinity_engine.placement.activations import BlockWay
from infinity_engine.placement.models import Activations, ModelShape, ModuleShape, ParameterShape
from infinity_engine.plan import Rates
from infinity_engine.tiling import tile_sequence
from support.block_ways import activations_by_block, take_turns
from support.determinism import deterministic_compute
from support.engine_bits import Bits, bits_of
from support.families import FAMILIES
from support.far import FAR, FarAccelerator, most_allocated

__all__ = [
    "GPUS",
    "Gpu",
    "block_s",
    "gated_shape",
    "most_held",
    "peak_of_gated",
    "seconds_of_ways",
    "train_family",
]

MIB = 1 << 20
WIDTH, TOKENS, DEPTH = 32, 256, 8
SAVED = TOKENS * 9 * WIDTH * 4
"""Of one block: its input, and what the activation function is given and returns."""
STEPS = 5


@dataclass(frozen=True)
class Gpu:
    """Operations that products reach, and bytes of one direction of the link, per second."""

    flops_per_s: float
    link_bytes_per_s: float


# Half of the dense bf16 rate of each data sheet; PCIe 4 and 5 with 16 lanes, less a fifth.
GPUS: Mapping[str, Gpu] = {
    "RTX 4090": Gpu(165.2e12 / 2, 25e9),
    "H100 SXM": Gpu(989.4e12 / 2, 50e9),
}


class _Stack(nn.Module):
    """Feed-forward blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(DEPTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def seconds_of_ways(
    gpu: Gpu,
    hidden: int,
    ways: Mapping[str, Mapping[str, Any]],
    *,
    tokens: Sequence[int] = (TOKENS,) * STEPS,
    holds: int = 0,
) -> dict[str, float]:
    """Return the seconds of the last step with each of these settings of activations.

    A block's products take as long for its bytes as those of a model of `hidden` in bf16. Each step
    has so many `tokens`, while the graph of a forward of `holds` tokens is held.
    """
    return {
        name: _seconds(gpu, hidden, activations, tokens, holds)
        for name, activations in ways.items()
    }


def block_s(gpu: Gpu, hidden: int) -> float:
    """Return the seconds of a block's two products in a forward."""
    tokens = SAVED / (9 * hidden * 2)
    return 2 * tokens * 8 * hidden**2 / gpu.flops_per_s


def _seconds(
    gpu: Gpu,
    hidden: int,
    activations: Mapping[str, Any],
    tokens: Sequence[int],
    holds: int,
) -> float:
    ns = round(block_s(gpu, hidden) / 2 * 1e9)  # of one of the products
    rates = Rates(
        h2d_bytes_per_s=gpu.link_bytes_per_s,
        d2h_bytes_per_s=gpu.link_bytes_per_s,
        host_update_params_per_s=1e9,
        device_update_params_per_s=1e10,
    )
    torch.manual_seed(0)
    model, seconds = _Stack(), 0.0
    with (
        deterministic_compute(),
        FarAccelerator(Emulation(rates=rates, capacity_bytes=64 * MIB)) as device,
        infinity_engine.initialize(
            model,
            torch.optim.SGD(model.parameters(), lr=1e-3),
            device=device,
            strategy="device_only",
            parameters="device",
            rates=rates,
            calibration="off",
            budget={"host": "64MiB", "device": "48MiB"},
            activation_bytes="32MiB",
            activations={"host_bytes": "16MiB", "small_bytes": 0, **activations},
        ) as engine,
    ):
        stream = engine._parts.gradients._lanes.compute

        def passes(nanoseconds: int) -> None:
            device.run(lambda: None, stream=stream, cost=TimeCost(nanoseconds))

        _take_time(model, ns, passes)
        batch = torch.randn(TOKENS, WIDTH).to(FAR).requires_grad_()
        held = engine(batch[:holds].detach().requires_grad_()) if holds else None
        for count in tokens:
            given = batch[:count].detach().requires_grad_()
            device.synchronize()
            start = device.now_ns
            engine.backward(engine(given).square().mean())
            device.synchronize()
            seconds = (device.now_ns - start) / 1e9
            engine.step()
        del held
    return seconds


def _take_time(model: nn.Module, ns: int, passes: Any) -> None:
    """Let each product take its time before its result is there: twice as long in the backward."""

    def before(_module: nn.Module, _given: object) -> None:
        passes(ns)

    def after(_module: nn.Module, _given: object, made: torch.Tensor) -> None:
        if made.requires_grad:
            # torch is
            made.register_hook(lambda _gradient: passes(2 * ns))  # type: ignore[no-untyped-call]

    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(before)
            module.register_forward_hook(after)


def most_held(
    ways: Sequence[BlockWay],
    room: int,
    drive: Path | None,
    *,
    host_bytes: int = 16 * MIB,
    graphs: int = 1,
) -> int:
    """Train with these ways of blocks, as if chosen; return the most bytes that were held of
    activations on the device, by what blocks keep and by what moves.

    `graphs` are made in each step before the first backward.
    """
    torch.manual_seed(0)
    model, held = _Stack(), [0]
    rates = Rates(
        h2d_bytes_per_s=1e9,
        d2h_bytes_per_s=1e9,
        host_update_params_per_s=1e9,
        device_update_params_per_s=1e10,
    )
    with (
        deterministic_compute(),
        FarAccelerator(Emulation(rates=rates, capacity_bytes=64 * MIB)) as device,
        infinity_engine.initialize(
            model,
            torch.optim.SGD(model.parameters(), lr=1e-3),
            device=device,
            strategy="device_only",
            parameters="device",
            rates=rates,
            calibration="off",
            budget={
                "host": "64MiB",
                "device": "48MiB",
                "nvme": {} if drive is None else {str(drive): "64MiB"},
            },
            accumulation_steps=graphs,
            activation_bytes="32MiB",
            activations={
                "at": "auto",
                "resident_bytes": room,
                "host_bytes": host_bytes,
                "small_bytes": 0,
            },
        ) as engine,
    ):
        batch = torch.randn(TOKENS, WIDTH).to(FAR).requires_grad_()

        def step(graphs: int) -> None:
            for loss in [engine(batch).square().mean() for _ in range(graphs)]:
                engine.backward(loss)
            engine.step(update=True)

        step(1)
        step(1)
        by_block = activations_by_block(engine)
        decider = by_block._decider
        assert isinstance(decider, MeasuredWays)
        assert decider.choice is not None
        decider.adopt(ways)
        moves = [
            keeper._moves
            for keeper in by_block._keepers.values()
            if isinstance(keeper, ActivationOffload)
        ]

        def look() -> None:
            moved = sum(each.resident._used + each._evicting_bytes for each in moves)
            held[0] = max(held[0], moved + by_block._lifetimes.kept)

        with _after_each(look):
            step(graphs)
            step(1)
        assert [use.way for use in engine.report().blocks] == [way.value for way in ways]
    return held[0]


@contextmanager
def _after_each(look: Callable[[], None]) -> Iterator[None]:
    """Call `look` whenever a tensor has been saved, or is needed."""

    def followed(function: Callable[..., object]) -> Callable[..., object]:
        def call(*args: Any) -> object:
            found = function(*args)
            look()
            return found

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("pack", "unpack"):
            patch.setattr(ActivationOffload, name, followed(getattr(ActivationOffload, name)))
        yield


HIDDEN, INNER, GATED, SEQUENCES, POSITIONS = 64, 1024, 3, 4, 128


class _FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, INNER, bias=False)
        self.up = nn.Linear(HIDDEN, INNER, bias=False)
        self.down = nn.Linear(INNER, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.down(nn.functional.gelu(self.gate(x)) * self.up(x)))


class _GatedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = _FeedForward()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(x + self.mlp(x))


class _Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_GatedBlock() for _ in range(GATED))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.sum()


def gated_shape() -> ModelShape:
    """Return the model of `peak_of_gated` in numbers."""
    sides = {"gate": (INNER, HIDDEN), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER)}
    return ModelShape(
        name="gated",
        modules=tuple(
            ModuleShape(
                name=f"blocks.{number}.mlp.{name}",
                parameters=(ParameterShape(f"blocks.{number}.mlp.{name}.weight", out * into),),
                flops_per_token=2 * out * into,
                sides=(out, into),
                feed_forward=f"blocks.{number}.mlp",
            )
            for number in range(GATED)
            for name, (out, into) in sides.items()
        ),
        deepest_numel=HIDDEN * INNER,
        activations=Activations(
            blocks=GATED,
            hidden=HIDDEN,
            elements=HIDDEN + 4 * INNER,
            fp32=0,
            logits=0,
            inner=4 * INNER,
            gradients=2 * INNER,
        ),
    )


def peak_of_gated(positions: int | None, *, recompute: bool) -> int:
    """Train gated blocks, with tiles of so many positions; return the most bytes that torch takes
    of the device in the forward and backward of a step, beside what the engine holds there.
    """
    torch.manual_seed(0)
    model = _Gated()
    if positions is not None:
        tile_sequence(model, "_FeedForward", positions)
    rates = Rates(
        h2d_bytes_per_s=1e9,
        d2h_bytes_per_s=1e9,
        host_update_params_per_s=1e9,
        device_update_params_per_s=1e10,
    )
    with (
        deterministic_compute(),
        FarAccelerator(Emulation(rates=rates, capacity_bytes=64 * MIB)) as device,
        infinity_engine.initialize(
            model,
            torch.optim.SGD(model.parameters(), lr=1e-3),
            device=device,
            strategy="host_only",
            parameters="device",
            rates=rates,
            calibration="off",
            budget={"host": "64MiB", "device": "48MiB"},
            activation_bytes="40MiB",
            activations={"recompute": "blocks" if recompute else "nothing"},
        ) as engine,
    ):
        batch = torch.randn(SEQUENCES, POSITIONS, HIDDEN).to(FAR).requires_grad_()

        def step() -> None:
            engine.backward(engine(batch))

        step()
        engine.step()
        device.synchronize()
        most = most_allocated(step)
        engine.step()
    return most


def train_family(
    name: str, directory: Path, drive: Path, activations: dict[str, Any]
) -> tuple[Bits, list[float], set[str]]:
    """Train a saved model of Transformers; return the bits, the losses and the ways of its blocks.

    With "auto", the blocks go all ways in turn.
    """
    family = FAMILIES[name]
    rates = Rates(
        h2d_bytes_per_s=1e9,
        d2h_bytes_per_s=1e9,
        host_update_params_per_s=1e9,
        device_update_params_per_s=1e10,
    )
    model = family.load(directory, torch.float32)
    if hasattr(model, "set_experts_implementation"):
        # Histograms of integers, for which the CPU has no operation.
        model.set_experts_implementation("eager")
        model.config.output_router_logits = False
    with (
        deterministic_compute(),
        FarAccelerator(Emulation(rates=rates, capacity_bytes=64 * MIB)) as device,
        infinity_engine.initialize(
            model,
            torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False),
            device=device,
            strategy="host_only",
            parameters="host",
            rates=rates,
            calibration="off",
            subgroup_numel=4096,
            update_threads=2,
            budget={"host": "64MiB", "device": "32MiB", "nvme": {str(drive): "64MiB"}},
            activations=activations,
        ) as engine,
    ):
        if activations["at"] == "auto":
            take_turns(engine, on_host=True)
        losses, ways = [], set()
        for step in range(3):
            torch.manual_seed(step)
            batch = {key: value.to(FAR) for key, value in family.batch(step, 32).items()}
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            ways |= {use.way for use in engine.report().blocks}
        return bits_of(engine), losses, ways
