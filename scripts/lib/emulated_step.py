"""A training step of the bench's GPT on an emulated device whose clock is computed, as a bench lets
it be measured.

Links, updates on both sides and the modules' computing take their time at rates that are set: the
same as the plan's. What modules compute is the device's work, in the stream in which the engine
expects it, as a GPU's kernels are: hooks of the model submit it module by module, as forward and
backward come to them. Imports torch when it trains.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from infinity_engine.accel import Stream, VirtualAccelerator
    from infinity_engine.engine.engine import Engine
    from infinity_engine.placement.models import ModuleShape
    from infinity_engine.plan import Rates

__all__ = ["Emulated", "train_emulated"]

_STEPS = 4


@dataclass(frozen=True)
class Emulated:
    """A GPT, and the device: operations, bytes and parameters per second."""

    width: int
    depth: int
    context: int
    flops_per_s: float = 2e12
    link_bytes_per_s: float = 8e9
    host_params_per_s: float = 0.6e9
    device_params_per_s: float = 6e9
    op_s: float = 0.0
    """What each update and each copy costs, however small it is."""

    def rates(self) -> Rates:
        """Return the rates but that of computing."""
        from infinity_engine.plan import Rates

        return Rates(
            h2d_bytes_per_s=self.link_bytes_per_s,
            d2h_bytes_per_s=self.link_bytes_per_s,
            host_update_params_per_s=self.host_params_per_s,
            device_update_params_per_s=self.device_params_per_s,
            host_start_s=self.op_s or None,
            device_start_s=self.op_s or None,
            copy_start_s=self.op_s or None,
        )


def train_emulated(case: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, float]:
    """Train some steps with these settings; return the last one's seconds by the device's clock,
    and bytes held.
    """
    import torch

    from infinity_engine import initialize
    from infinity_engine.accel import Emulation, VirtualAccelerator
    from infinity_engine.sim.configs import model_of_config
    from tiny_gpt import TinyGPT

    emulated = Emulated(**case)
    capacity = settings["budget"]["device"] + (1 << 30)
    device = VirtualAccelerator(
        Emulation(rates=emulated.rates(), capacity_bytes=capacity, host_takes_time=True)
    )
    torch.manual_seed(0)
    model = TinyGPT(
        width=emulated.width,
        depth=emulated.depth,
        heads=max(1, emulated.width // 64),
        context=emulated.context,
    )
    config = {
        "model_type": "gpt2",
        "n_embd": emulated.width,
        "n_layer": emulated.depth,
        "vocab_size": model.embedding.num_embeddings,
        "n_positions": emulated.context,
    }
    shapes = model_of_config(config, name="gpt").modules
    computing = _Computing(device)
    _pass_time(model, shapes, emulated, computing.submit)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    seconds = []
    with initialize(model, optimizer, device=device, **settings) as engine:
        computing.begin(engine)
        tokens = torch.randint(0, model.embedding.num_embeddings, (1, emulated.context))
        for _ in range(_STEPS):
            start_ns = device.now_ns
            logits = engine(tokens)
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())
            engine.backward(loss)
            computing.end()
            engine.step()
            seconds.append((device.now_ns - start_ns) / 1e9)
        held = {usage.tier.name: usage.peak_held for usage in engine.usage()}
        phases = {f"{name}": each for name, each in engine.report().phases.items()}
    device.stop()
    return {
        **phases,
        "step": seconds[-1],
        "host bytes": held["HOST"],
        "device bytes": held["DEVICE"],
    }


class _Computing:
    """The device's work on modules, in the engine's stream for it, which is there when it
    trains.
    """

    def __init__(self, device: VirtualAccelerator) -> None:
        self._device = device
        self._stream: Stream | None = None

    def begin(self, engine: Engine) -> None:
        """Work for this engine from here on."""
        self._stream = engine._parts.gradients._lanes.compute

    def submit(self, ns: int) -> None:
        """Let the device be busy for `ns` nanoseconds with what it is given next."""
        from infinity_engine.accel import TimeCost

        assert self._stream is not None, "it trains"
        self._device.run(lambda: None, stream=self._stream, cost=TimeCost(ns))

    def end(self) -> None:
        """Wait for all of it."""
        assert self._stream is not None, "it trains"
        self._device.record(self._stream).wait()


def _pass_time(
    model: torch.nn.Module,
    shapes: tuple[ModuleShape, ...],
    case: Emulated,
    passes: Callable[[int], None],
) -> None:
    """Let the model's modules take their time: those with parameters have the shapes' order, the
    head is the last.

    That of a backward begins when the module's own parameters are there: when their first gradient
    is made.
    """
    own = [
        module for module in model.modules() if any(True for _ in module.parameters(recurse=False))
    ]
    for module, shape in zip(own, shapes, strict=False):
        ns = round(shape.flops(case.context) * case.context * 1e9 / case.flops_per_s)
        if ns:
            _takes(module, ns, passes)
    _takes(
        model, round(shapes[-1].flops(case.context) * case.context * 1e9 / case.flops_per_s), passes
    )


def _takes(module: torch.nn.Module, ns: int, passes: Callable[[int], None]) -> None:
    own = list(module.parameters(recurse=False))

    def forward(_module: torch.nn.Module, _given: object, made: torch.Tensor) -> None:
        passes(ns)
        if made.requires_grad and not own:
            # torch is
            made.register_hook(lambda _gradient: passes(2 * ns))  # type: ignore[no-untyped-call]

    module.register_forward_hook(forward)
    if own:
        # torch is
        own[0].register_hook(lambda _gradient: passes(2 * ns))  # type: ignore[no-untyped-call]
