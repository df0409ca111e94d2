"""Blocks that the engine runs again in the backward: the same bits as keeping what they save."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import infinity_engine
from infinity_engine.activation import KeptActivations
from infinity_engine.activation.blocks import RepeatedBlock
from infinity_engine.activation.by_block import BlockActivations, _Forward
from infinity_engine.activation.recompute import BlockCall
from infinity_engine.engine.engine import Engine
from infinity_engine.errors import ConfigError
from support.engine_bits import Bits, bits_of, differing
from support.nvme_training import emulated

AGAIN: dict[str, object] = {"recompute": "blocks"}
ON_DRIVES: dict[str, object] = {
    "at": "nvme",
    "recompute": "blocks",
    "resident_bytes": 1024,
    "small_bytes": 0,
}
WAYS = {"kept inputs": AGAIN, "inputs on drives": ON_DRIVES}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Block(nn.Module):
    """A feed-forward block with dropout."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.2), nn.Linear(4 * width, width)
        )
        self.calls = 0

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        self.calls += 1
        y: torch.Tensor = self.inner(self.norm(x))
        return x + (y if scale is None else y * scale)


def let_fail(block: Any, fails: bool) -> None:
    """Set whether the block's forward fails from here on."""
    block.fails = fails


class Stack(nn.Module):
    """Blocks between two layers, and a loss."""

    def __init__(self, block: Callable[[], nn.Module] = Block, depth: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.blocks = nn.ModuleList(block() for _ in range(depth))
        self.last = nn.Linear(32, 4)

    def forward(self, x: torch.Tensor, **given: Any) -> torch.Tensor:
        x = self.first(x.to(self.first.weight.dtype))
        for block in self.blocks:
            x = block(x, **given)
        return torch.as_tensor(self.last(x).square().mean())


def batch(seed: int) -> torch.Tensor:
    return torch.randn(24, 16, generator=torch.Generator().manual_seed(seed))


@contextmanager
def stack_of(
    drive: Path,
    block: Callable[[], nn.Module] = Block,
    *,
    model_class: Callable[[Callable[[], nn.Module]], Stack] = Stack,
    parameters: str = "auto",
    on: Any = None,
    **settings: Any,
) -> Iterator[tuple[Engine, Stack]]:
    torch.manual_seed(0)
    model = model_class(block)
    strategy = "nvme_streamed" if parameters == "nvme" else "host_only"
    with infinity_engine.initialize(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        **({"accelerator": "cpu"} if on is None else {"device": on}),
        budget={"host": "64MiB", "nvme": {str(drive): "64MiB"}},
        strategy=strategy,
        parameters=parameters,
        storage={"small_bytes": 0},
        calibration="off",
        **settings,
    ) as engine:
        yield engine, model


def trained(
    drive: Path,
    block: Callable[[], nn.Module] = Block,
    *,
    use: Callable[[Engine, int], None] | None = None,
    **settings: Any,
) -> Bits:
    with stack_of(drive, block, **settings) as (engine, _):
        for seed in range(3):
            torch.manual_seed(seed)  # of dropout
            if use is None:
                engine.backward(engine(batch(seed)))
            else:
                use(engine, seed)
            engine.step()
        return bits_of(engine)


def same_bits(drive: Path, block: Callable[[], nn.Module] = Block, **more: Any) -> None:
    expected = trained(drive, block, **more)
    for activations in WAYS.values():
        assert differing(expected, trained(drive, block, activations=activations, **more)) == []


def ways_of(drive: Path, block: Callable[[], nn.Module] = Block, **more: Any) -> set[str]:
    """Return the ways that blocks go in a step which is to recompute all of them."""
    with stack_of(drive, block, activations=AGAIN, **more) as (engine, _):
        engine.backward(engine(batch(0)))
        engine.step()
        return {use.way for use in engine.report().blocks}


@pytest.mark.parametrize("parameters", ["device", "host", "nvme"])
def test_recomputed_blocks_train_with_the_same_bits(parameters: str, tmp_path: Path) -> None:
    same_bits(tmp_path, parameters=parameters)


@pytest.mark.parametrize("parameters", ["auto", "nvme"])
def test_blocks_are_recomputed_on_an_emulated_device(parameters: str, tmp_path: Path) -> None:
    bits = []
    for activations in ({}, AGAIN, ON_DRIVES):
        with ExitStack() as stack:
            device = emulated(1)
            stack.callback(device.close)
            bits.append(
                trained(tmp_path, on=device, parameters=parameters, activations=activations)
            )
    assert [differing(bits[0], other) for other in bits[1:]] == [[], []]


@pytest.mark.parametrize("precision", ["bf16", "bf16_autocast"])
def test_a_second_run_has_the_precision_of_the_first(precision: str, tmp_path: Path) -> None:
    same_bits(tmp_path, precision=precision)


def test_each_block_runs_twice_and_saves_nothing_in_between(tmp_path: Path) -> None:
    with stack_of(tmp_path, activations=AGAIN) as (engine, model):
        loss = engine(batch(0))
        assert [block.calls for block in model.blocks] == [1, 1, 1, 1]
        engine.backward(loss)
        assert [block.calls for block in model.blocks] == [2, 2, 2, 2]
        engine.step()
        held = [use.held for use in engine.report().blocks]
        assert held == [24 * 32 * 4] * 4
        assert all(use.saved > 4 * 24 * 32 * 4 for use in engine.report().blocks)
        assert "recomputed" in str(engine.report())


def test_evaluation_runs_no_block_twice(tmp_path: Path) -> None:
    with stack_of(tmp_path, activations=AGAIN) as (engine, model):
        with torch.no_grad():
            engine(batch(0))
        assert [block.calls for block in model.blocks] == [1, 1, 1, 1]


def test_an_evaluation_comes_between_forward_and_backward(tmp_path: Path) -> None:
    def use(engine: Engine, seed: int) -> None:
        loss = engine(batch(seed))
        with torch.no_grad():
            engine(batch(7))
        engine(batch(8))  # a graph that no backward uses
        engine.backward(loss)

    same_bits(tmp_path, use=use)


class Switching(Block):
    """Computes something else in evaluation, and saves as much for it."""

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(x * 2 if self.training else x * 3).tanh()


@pytest.mark.parametrize("block", [Block, Switching])
def test_a_second_run_is_in_the_mode_of_the_first(
    block: Callable[[], nn.Module], tmp_path: Path
) -> None:
    def use(engine: Engine, seed: int) -> None:
        loss = engine(batch(seed))
        engine.module.eval()
        engine.backward(loss)
        assert not any(module.training for module in engine.module.modules())
        engine.module.train()

    same_bits(tmp_path, block, use=use)


def test_a_retained_graph_is_differentiated_twice(tmp_path: Path) -> None:
    def use(engine: Engine, seed: int) -> None:
        loss = engine(batch(seed))
        engine.backward(loss, retain_graph=True)
        engine.backward(loss * 0.5)

    same_bits(tmp_path, use=use)


def test_several_forwards_come_before_their_backwards(tmp_path: Path) -> None:
    def use(engine: Engine, seed: int) -> None:
        losses = [engine(batch(3 * seed + number)) for number in range(3)]
        for loss in losses:
            engine.backward(loss)

    same_bits(tmp_path, use=use, accumulation_steps=3)


def test_masks_and_other_arguments_come_to_the_second_run(tmp_path: Path) -> None:
    def use(engine: Engine, seed: int) -> None:
        scale = torch.linspace(0, 1, 32).requires_grad_()
        engine.backward(engine(batch(seed), scale=scale))
        assert scale.grad is not None

    same_bits(tmp_path, use=use)


class Drawing(Block):
    """Draws factors from Python's and NumPy's generators."""

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(x * random.random() * float(np.random.rand()))


def test_pythons_and_numpys_random_numbers_are_drawn_again(tmp_path: Path) -> None:
    left = set()

    def use(engine: Engine, seed: int) -> None:
        random.seed(seed)
        np.random.seed(seed)
        engine.backward(engine(batch(seed)))
        left.add((seed, random.random(), float(np.random.rand())))

    same_bits(tmp_path, Drawing, use=use)
    assert len(left) == 3  # the caller's numbers go on as before


class Adding(Block):
    """Adds its mask, which no backward needs."""

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        assert scale is not None
        return super().forward(x + scale)


def test_a_mask_of_inference_mode_comes_to_the_second_run(tmp_path: Path) -> None:
    def use(engine: Engine, seed: int) -> None:
        with torch.inference_mode():
            mask = torch.linspace(0, 1, 32)
        engine.backward(engine(batch(seed), scale=mask))

    same_bits(tmp_path, Adding, use=use)


def test_the_random_state_is_that_of_the_device_beside_the_cpu() -> None:
    position, states = torch.zeros(1), torch.zeros(1, device="meta")
    kept = KeptActivations()
    block = RepeatedBlock("block", Block(), 0, ())
    given = BlockCall.arguments(block, ((position, states), {}), lambda one: (kept, kept.pack(one)))
    assert given.device == states.device


def test_hooks_ahead_of_the_engines_change_arguments_once(tmp_path: Path) -> None:
    def use(engine: Engine, seed: int) -> None:
        model: Any = engine.module
        handles = [
            block.register_forward_pre_hook(lambda _, given: (given[0] * 1.5,), prepend=True)
            for block in model.blocks
        ]
        engine.backward(engine(batch(seed)))
        for handle in handles:
            handle.remove()

    same_bits(tmp_path, use=use)


class Halves(Block):
    """Returns two tensors in a dict, and takes tuples."""

    def forward(self, x: Any, scale: Any = None) -> Any:
        first, second = x if isinstance(x, tuple) else (x, x.exp())
        return super().forward(first * second), second


def test_containers_of_tensors_come_and_go(tmp_path: Path) -> None:
    class Pairs(Stack):
        def __init__(self, block: Callable[[], nn.Module] = Halves, depth: int = 3) -> None:
            super().__init__(block, depth)

        def forward(self, x: torch.Tensor, **given: Any) -> torch.Tensor:
            pair: Any = self.first(x)
            for block in self.blocks:
                pair = block(pair)
            return torch.as_tensor(self.last(pair[0] + pair[1]).square().mean())

    def bits(**settings: Any) -> Bits:
        torch.manual_seed(0)
        model = Pairs()
        with infinity_engine.initialize(
            model,
            torch.optim.AdamW(model.parameters()),
            accelerator="cpu",
            budget={"host": "64MiB"},
            calibration="off",
            **settings,
        ) as engine:
            for seed in range(2):
                engine.backward(engine(batch(seed)))
                engine.step()
            return bits_of(engine)

    assert differing(bits(), bits(activations=AGAIN)) == []


class Attending(Stack):
    """Self-attention of torch, which looks whether keys and values are the queries."""

    def __init__(self, block: Callable[[], nn.Module] = Block, depth: int = 3) -> None:
        super().__init__(lambda: nn.MultiheadAttention(32, 4, batch_first=True), depth)

    def forward(self, x: torch.Tensor, **given: Any) -> torch.Tensor:
        x = self.first(x)[None]
        for block in self.blocks:
            x = x + block(x, x, x, need_weights=False)[0]
        return torch.as_tensor(self.last(x).square().mean())


def test_a_tensor_that_is_given_thrice_is_one_in_the_second_run(tmp_path: Path) -> None:
    same_bits(tmp_path, model_class=Attending)
    assert ways_of(tmp_path, model_class=Attending) == {"recomputed"}


def test_an_input_that_one_block_gets_twice_is_not_shared() -> None:
    forward, x = _Forward(()), torch.ones(4)
    assert list(forward.new_inputs([x, x])) == [16]
    assert not forward.is_shared(x)
    assert list(forward.new_inputs([x])) == []
    assert forward.is_shared(x)


def allowed_attention() -> list[object]:
    own: Any = torch._C
    flags = ("flash", "mem_efficient", "math", "cudnn", "overrideable")
    enabled = [getattr(own, f"_get_{name}_sdp_enabled", bool)() for name in flags]
    return [*enabled, getattr(own, "_get_sdp_priority_order", list)()]


class Looking(Block):
    """Attention, which torch computes in one of several ways."""

    fails = False

    def __init__(self) -> None:
        super().__init__()
        self.allowed: list[object] = []

    def forward(self, x: torch.Tensor, scale: Any = None) -> torch.Tensor:
        self.allowed.append(allowed_attention())
        if self.fails:
            raise ValueError("as asked")
        heads = x.view(1, 24, 4, 8).transpose(1, 2)
        seen = nn.functional.scaled_dot_product_attention(heads, heads, heads)
        return super().forward(x + seen.transpose(1, 2).reshape(24, 32))


@pytest.mark.parametrize("set_priority", [False, True])
def test_a_second_run_computes_attention_as_the_first_did(
    set_priority: bool, tmp_path: Path
) -> None:
    def use(engine: Engine, seed: int) -> None:
        with sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=set_priority):
            loss = engine(batch(seed))
        before = allowed_attention()
        engine.backward(loss)
        assert allowed_attention() == before

    same_bits(tmp_path, Looking, use=use)
    with stack_of(tmp_path, Looking, activations=AGAIN) as (engine, model):
        use(engine, 0)
        for block in model.blocks:
            allowed: Any = block.allowed
            assert len(allowed) == 2
            assert allowed[0] == allowed[1] != allowed_attention()
        engine.step()
        assert {use.way for use in engine.report().blocks} == {"recomputed"}


def test_the_kernels_of_attention_are_as_before_a_second_run_that_fails(tmp_path: Path) -> None:
    with stack_of(tmp_path, Looking, activations=AGAIN) as (engine, model):
        before = allowed_attention()
        with sdpa_kernel(SDPBackend.MATH, set_priority=True):
            loss = engine(batch(0))
        let_fail(model.blocks[2], True)
        with pytest.raises(ValueError, match="as asked"):
            engine.backward(loss)
        assert allowed_attention() == before


def test_kernels_of_attention_that_are_as_before_are_not_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sets: list[bool] = []
    with stack_of(tmp_path, Looking, activations=AGAIN) as (engine, _):
        loss = engine(batch(0))
        monkeypatch.setattr(torch._C, "_set_sdp_use_math", sets.append)
        engine.backward(loss)
    assert sets == []


class Adapting(Stack):
    """Runs its blocks with parameters that it has computed, as meta-learning does."""

    def forward(self, x: torch.Tensor, **given: Any) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            faster = {name: 0.9 * value for name, value in block.named_parameters()}
            x = torch.func.functional_call(block, faster, (x,))
        return torch.as_tensor(self.last(x).square().mean())


def test_blocks_that_run_with_other_parameters_are_kept(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"model_class": Adapting, "parameters": "device"}
    same_bits(tmp_path, **settings)
    with stack_of(tmp_path, activations=AGAIN, **settings) as (engine, _):
        engine.backward(engine(batch(0)))
        engine.step()
        assert "its parameters are not those that it had in initialize" in str(engine.report())


def test_a_block_whose_parameter_was_replaced_is_kept(tmp_path: Path) -> None:
    with stack_of(tmp_path, parameters="device", activations=AGAIN) as (engine, model):
        norm: Any = model.blocks[1].norm
        norm.bias = nn.Parameter(torch.ones(32), requires_grad=False)
        engine.backward(engine(batch(0)))
        engine.step()
        ways = {use.name: use.way for use in engine.report().blocks}
        assert ways.pop("blocks.1") == "kept"
        assert set(ways.values()) == {"recomputed"}
        assert "its parameters are not those that it had in initialize" in str(engine.report())


class InPlace(Block):
    """Changes its input."""

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(x.add_(1.0))


class Counting(Block):
    """Changes a buffer, as batch normalization does."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        self.seen.add_(1.0)
        return super().forward(x) * self.seen


class Sparing(Block):
    """Saves nothing of its input, so that torch allows code after it to change that."""

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        return torch.as_tensor(self.inner(x * 0.5))


def test_an_input_that_changes_after_its_block_is_an_error_with_a_way_out(tmp_path: Path) -> None:
    def change(_: object, given: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        return given[0].add_(output)

    with stack_of(tmp_path, Sparing, activations=AGAIN) as (engine, model):
        for block in model.blocks:
            block.register_forward_hook(change)
        loss = engine(batch(0))
        with pytest.raises(
            RuntimeError, match=r"blocks\.\d has to run again .*activations\.recompute"
        ):
            engine.backward(loss)


def test_a_block_does_not_run_again_with_newer_parameters(tmp_path: Path) -> None:
    with stack_of(tmp_path, parameters="device", activations=AGAIN) as (engine, model):
        for parameter in model.last.parameters():  # what it saves would be refused first
            parameter.requires_grad_(False)
        older = engine(batch(1))
        engine.backward(engine(batch(0)))
        engine.step()
        with pytest.raises(RuntimeError, match=r"blocks\.3 has to run again .* has changed"):
            engine.backward(older)
        engine.zero_grad()
        engine.backward(engine(batch(1)))
        engine.step()


class Frozen(Block):
    """Has nothing to train, and adds a parameter of the model: its argument, or one in a list."""

    scales: list[nn.Parameter]

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        return torch.tanh(super().forward(x) + (self.scales[0] if scale is None else scale))


class Given(Stack):
    """Gives its blocks a parameter of its own, as an argument or by themselves."""

    gives = True

    def __init__(self, block: Callable[[], Any]) -> None:
        super().__init__(block)
        self.scale = nn.Parameter(torch.ones(32))
        for each in self.blocks:
            assert isinstance(each, Frozen)
            each.scales = [self.scale]
        for parameter in self.last.parameters():
            parameter.requires_grad_(False)

    def forward(self, x: torch.Tensor, **given: Any) -> torch.Tensor:
        return super().forward(x, **({"scale": self.scale} if self.gives else {}))


class Taking(Given):
    """Lets its blocks take the parameter themselves."""

    gives = False


@pytest.mark.parametrize("parameters", ["device", "host"])
@pytest.mark.parametrize("kind", [Given, Taking])
def test_a_block_does_not_run_again_with_a_newer_parameter_from_elsewhere(
    kind: type[Given], parameters: str, tmp_path: Path
) -> None:
    with stack_of(tmp_path, Frozen, model_class=kind, parameters=parameters, activations=AGAIN) as (
        engine,
        model,
    ):
        for block in model.blocks:
            engine.register_external(block, model.scale)  # type: ignore[arg-type]
        older = engine(batch(1))
        engine.backward(engine(batch(0)))
        engine.step()
        with pytest.raises(RuntimeError, match=r"has to run again .* has changed"):
            engine.backward(older)
        engine.zero_grad()
        engine.backward(engine(batch(1)))
        engine.step()


class Normed(Block):
    """Normalizes with a module that it is given, and that counts in a buffer."""

    def forward(self, x: torch.Tensor, scale: Any = None) -> torch.Tensor:
        return torch.as_tensor(scale(super().forward(x)))


class Norms(Stack):
    """Gives all blocks one batch normalization, and itself."""

    norm: nn.Module

    def __init__(self, block: Callable[[], Any]) -> None:
        super().__init__(block)
        self.norm = nn.BatchNorm1d(32)

    def forward(self, x: torch.Tensor, **given: Any) -> torch.Tensor:
        return super().forward(x, scale=self.norm)


def test_blocks_are_kept_that_are_given_a_module_with_buffers(tmp_path: Path) -> None:
    same_bits(tmp_path, Normed, model_class=Norms)
    with stack_of(tmp_path, Normed, model_class=Norms, activations=AGAIN) as (engine, model):
        engine.backward(engine(batch(0)))
        assert model.get_submodule("norm").get_buffer("num_batches_tracked") == 4
        engine.step()
        assert "a module among its arguments has buffers" in str(engine.report())


class Spectral(Norms):
    """Gives all blocks one layer that goes on with a power iteration at each call."""

    def __init__(self, block: Callable[[], Any]) -> None:
        super().__init__(block)
        self.norm = nn.utils.parametrizations.spectral_norm(nn.Linear(32, 32))


def test_a_given_module_that_iterates_has_the_same_bits(tmp_path: Path) -> None:
    same_bits(tmp_path, Normed, model_class=Spectral)


class Gate(nn.Module):
    """Computes something else in evaluation, and saves as much for it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * (2 if self.training else 3)).tanh()


class Gated(Norms):
    """Gives all blocks one gate."""

    def __init__(self, block: Callable[[], Any]) -> None:
        super().__init__(block)
        self.norm = nn.Sequential(Gate(), nn.Dropout(0.2))


def test_a_given_module_is_in_the_mode_of_the_first_run(tmp_path: Path) -> None:
    def use(engine: Engine, seed: int) -> None:
        loss = engine(batch(seed))
        engine.module.eval()
        engine.backward(loss)
        assert not any(module.training for module in engine.module.modules())
        engine.module.train()

    same_bits(tmp_path, Normed, model_class=Gated, use=use)
    assert ways_of(tmp_path, Normed, model_class=Gated) == {"recomputed"}


class Shifting(Block):
    """Adds a parameter that it may have, and has nothing to train itself."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor, scale: Any = None) -> torch.Tensor:
        source = self if scale is None else scale
        shift = getattr(source, "shift", None)
        times = 2 if source.training else 3
        return super().forward(x if shift is None else (times * x + shift).tanh())


class Itself(Stack):
    """Gives itself to its blocks, and counts its calls in a buffer."""

    calls: torch.Tensor

    def __init__(self, block: Callable[[], Any]) -> None:
        super().__init__(block)
        self.shift = nn.Parameter(torch.ones(32))
        self.register_buffer("calls", torch.zeros(()))
        for parameter in self.last.parameters():
            parameter.requires_grad_(False)

    def forward(self, x: torch.Tensor, **given: Any) -> torch.Tensor:
        found = super().forward(x, scale=self)
        self.calls.add_(1)
        return found


def test_a_second_run_has_the_mode_of_a_model_that_gives_itself(tmp_path: Path) -> None:
    def use(engine: Engine, seed: int) -> None:
        loss = engine(batch(seed))
        engine.module.eval()
        engine.backward(loss)
        assert not any(module.training for module in engine.module.modules())
        engine.module.train()

    same_bits(tmp_path, Shifting, model_class=Itself, use=use)
    assert ways_of(tmp_path, Shifting, model_class=Itself) == {"recomputed"}


class Hidden(nn.Module):
    """Adds a parameter that is registered as external."""

    scales: list[nn.Parameter]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.scales[0]).tanh()


class Hiding(Itself):
    """Gives its blocks a module that has a parameter from elsewhere."""

    def __init__(self, block: Callable[[], Any]) -> None:
        super().__init__(block)
        for parameter in self.blocks.parameters():
            parameter.requires_grad_(False)
        self.gate = Hidden()
        self.gate.scales = [self.shift]

    def forward(self, x: torch.Tensor, **given: Any) -> torch.Tensor:
        return Stack.forward(self, x, scale=self.gate)


@pytest.mark.parametrize("parameters", ["device", "host"])
def test_a_block_does_not_run_again_with_a_newer_parameter_of_a_given_module(
    parameters: str, tmp_path: Path
) -> None:
    with stack_of(
        tmp_path, Normed, model_class=Hiding, parameters=parameters, activations=AGAIN
    ) as (engine, model):
        gate: Any = model.get_submodule("gate")
        engine.register_external(gate, model.get_parameter("shift"))
        older = engine(batch(1))
        engine.backward(engine(batch(0)))
        engine.step()
        with pytest.raises(RuntimeError, match=r"has to run again .* has changed"):
            engine.backward(older)


def test_blocks_are_kept_whose_given_module_has_other_parameters(tmp_path: Path) -> None:
    class Replaced(Norms):
        def __init__(self, block: Callable[[], Any]) -> None:
            super().__init__(block)
            self.norm = nn.LayerNorm(32)

    def use(engine: Engine, seed: int) -> None:
        weight = torch.full((32,), 2.0)
        loss = torch.func.functional_call(engine.module, {"norm.weight": weight}, (batch(seed),))
        engine.backward(loss)

    same_bits(tmp_path, Normed, model_class=Replaced, use=use, parameters="device")


def test_a_block_that_is_given_the_model_does_not_run_again_with_its_newer_parameter(
    tmp_path: Path,
) -> None:
    with stack_of(
        tmp_path, Shifting, model_class=Itself, parameters="device", activations=AGAIN
    ) as (engine, _):
        older = engine(batch(1))
        engine.backward(engine(batch(0)))
        engine.step()
        with pytest.raises(RuntimeError, match=r"has to run again .* has changed"):
            engine.backward(older)


@pytest.mark.parametrize("name", ["shift", "norm.bias"])
def test_a_block_does_not_run_again_with_a_parameter_that_came_since(
    name: str, tmp_path: Path
) -> None:
    place, _, last = name.rpartition(".")
    with stack_of(tmp_path, Shifting, activations=AGAIN) as (engine, model):
        loss = engine(batch(0))
        for block in model.blocks:
            parameter = nn.Parameter(torch.zeros(32), requires_grad=False)
            block.get_submodule(place).register_parameter(last, parameter)
        with pytest.raises(RuntimeError, match=rf"blocks\.3 .* its {name} is another tensor"):
            engine.backward(loss)


def test_a_closed_engine_holds_nothing_of_an_interrupted_forward(tmp_path: Path) -> None:
    with stack_of(tmp_path, activations=AGAIN, parameters="device") as (engine, model):

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        model.blocks[3].register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine(batch(0))
        activations = engine._parts.activations
    assert isinstance(activations, BlockActivations)
    assert activations._running == []


def test_an_external_parameter_may_be_registered_again_and_later(tmp_path: Path) -> None:
    for parameters in ("device", "host"):
        with stack_of(
            tmp_path, Frozen, model_class=Taking, parameters=parameters, activations=AGAIN
        ) as (engine, model):

            def register(engine: Engine = engine, model: Any = model) -> None:
                for block in model.blocks:
                    engine.register_external(block, model.scale)
                    engine.register_external(block, model.first.bias)

            register()
            older = engine(batch(0))
            register()
            later: Any = model.first.weight
            engine.register_external(model.blocks[0].get_submodule("norm"), later)
            newer = engine(batch(1))
            engine.backward(older)
            engine.backward(newer)
            engine.step()


class Scaled(Block):
    """Has a factor in a buffer, which it leaves alone."""

    factor: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.ones(()))

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(x) * self.factor


def test_a_block_does_not_run_again_with_newer_buffers(tmp_path: Path) -> None:
    with stack_of(tmp_path, Scaled, activations=AGAIN) as (engine, model):
        loss = engine(batch(0))
        factor = model.blocks[1].get_buffer("factor")
        factor.mul_(2.0)
        with pytest.raises(RuntimeError, match=r"blocks\.1 has to run again .* its factor has"):
            engine.backward(loss)


def test_a_block_whose_buffer_was_replaced_does_not_run_again(tmp_path: Path) -> None:
    def replace_factors(model: Stack, value: float) -> None:
        for block in model.blocks:
            block.register_buffer("factor", torch.full((), value))

    message = r"blocks\.3 has to run again .* its factor is another tensor than when it ran"
    with stack_of(tmp_path, Scaled, activations=AGAIN, accumulation_steps=2) as (engine, model):
        losses = []
        for value in (1.0, 2.0):  # as a mask for each micro-batch
            replace_factors(model, value)
            losses.append(engine(batch(int(value))))
        with pytest.raises(RuntimeError, match=message):
            engine.backward(losses[0])
        engine.zero_grad()
        for value in (1.0, 2.0):
            replace_factors(model, value)
            engine.backward(engine(batch(int(value))))
        engine.step()
        assert {use.way for use in engine.report().blocks} == {"recomputed"}


class Exchanging(Stack):
    """Runs its blocks with a factor that it gives to each call."""

    def forward(self, x: torch.Tensor, **given: Any) -> torch.Tensor:
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            factor = torch.full((), 1.5 + number)
            x = torch.func.functional_call(block, {"factor": factor}, (x,))
        return torch.as_tensor(self.last(x).square().mean())


class Renewing(Stack):
    """Gives its blocks a new buffer in each forward."""

    def forward(self, x: torch.Tensor, **given: Any) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            block.register_buffer("factor", torch.full((), 1.5 + number))
        return super().forward(x, **given)


@pytest.mark.parametrize("model_class", [Exchanging, Renewing])
def test_blocks_that_run_with_other_buffers_are_kept(
    model_class: type[Stack], tmp_path: Path
) -> None:
    same_bits(tmp_path, Scaled, model_class=model_class)
    with stack_of(tmp_path, Scaled, model_class=model_class, activations=AGAIN) as (engine, _):
        engine.backward(engine(batch(0)))
        engine.step()
        assert "other buffers than its own" in str(engine.report())


def test_a_frozen_block_that_saves_nothing_holds_nothing(tmp_path: Path) -> None:
    with stack_of(tmp_path, activations=AGAIN) as (engine, model):
        for parameter in (*model.first.parameters(), *model.blocks[0].parameters()):
            parameter.requires_grad_(False)
        engine.backward(engine(batch(0)))
        engine.step()
        found = {use.name: (use.way, use.held) for use in engine.report().blocks}
        assert found["blocks.0"] == ("kept", 0)
        assert found["blocks.1"][0] == "recomputed"


class Averaging(Block):
    """Assigns to a buffer twice: the second tensor may have the id of the first one, which is gone."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(()))

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        y = super().forward(x) * self.mean
        for _ in range(2):
            self.mean = self.mean * 1.5
        return y


@pytest.mark.parametrize(
    ("block", "why"),
    [
        (InPlace, "changes its inputs"),
        (Counting, "changes its buffers"),
        (Averaging, "changes its buffers"),
    ],
)
def test_blocks_that_cannot_run_twice_are_kept(
    block: Callable[[], nn.Module], why: str, tmp_path: Path
) -> None:
    same_bits(tmp_path, block)
    with stack_of(tmp_path, block, activations=AGAIN) as (engine, model):
        engine.backward(engine(batch(0)))
        engine.step()
        assert [inner.calls for inner in model.blocks] == [1, 1, 1, 1]
        assert why in str(engine.report())


def test_an_unknown_argument_lets_a_block_be_kept(tmp_path: Path) -> None:
    class Notes:
        def __init__(self) -> None:
            self.taken = 0

    class Noting(Block):
        def forward(self, x: torch.Tensor, scale: Any = None) -> torch.Tensor:
            scale.taken += 1
            return super().forward(x) * float(scale.taken)

    def use(engine: Engine, seed: int) -> None:
        engine.backward(engine(batch(seed), scale=Notes()))

    same_bits(tmp_path, Noting, use=use)
    with stack_of(tmp_path, Noting, activations=AGAIN) as (engine, _):
        use(engine, 0)
        engine.step()
        assert "an argument is a Notes" in str(engine.report())


def test_a_block_that_does_something_else_is_refused_by_name(tmp_path: Path) -> None:
    class Fickle(Block):
        def forward(self, x: torch.Tensor, scale: Any = None) -> torch.Tensor:
            return super().forward(x if not self.calls else x[:1])

    with stack_of(tmp_path, Fickle, activations=AGAIN) as (engine, _):
        loss = engine(batch(0))
        with pytest.raises(RuntimeError, match=r"blocks\.3 was run again .* gradients"):
            engine.backward(loss)


class Slopes(Block):
    """Has a gradient of its own part in its output."""

    def forward(self, x: torch.Tensor, scale: Any = None) -> torch.Tensor:
        part = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.norm(part).square().sum(), part, create_graph=True)
        return super().forward(x) + slope


def test_a_gradient_within_a_block_is_made_again(tmp_path: Path) -> None:
    same_bits(tmp_path, Slopes)


class SlopesAndCounts(Slopes):
    """Changes a buffer as well, so it cannot run again."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor, scale: Any = None) -> torch.Tensor:
        self.get_buffer("seen").add_(1.0)
        return super().forward(x)


def test_a_gradient_within_a_block_that_is_kept_takes_nothing_away(tmp_path: Path) -> None:
    same_bits(tmp_path, SlopesAndCounts)


def test_gradients_of_gradients_have_the_same_bits(tmp_path: Path) -> None:
    def use(engine: Engine, seed: int) -> None:
        x = batch(seed).requires_grad_()
        out = engine(x)
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        engine.backward(out + slope.square().sum())

    same_bits(tmp_path, use=use, parameters="device")


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_within_a_block_still_work(reentrant: bool, tmp_path: Path) -> None:
    from torch.utils.checkpoint import checkpoint

    class Twice(Block):
        def forward(self, x: torch.Tensor, scale: Any = None) -> torch.Tensor:
            inner: Any = super().forward
            return torch.as_tensor(checkpoint(inner, x, use_reentrant=reentrant))

    same_bits(tmp_path, Twice)


@pytest.mark.parametrize("reentrant", [True, False])
def test_blocks_that_the_caller_checkpoints_have_the_same_bits(
    reentrant: bool, tmp_path: Path
) -> None:
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(Stack):
        def forward(self, x: torch.Tensor, **given: Any) -> torch.Tensor:
            x = self.first(x)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return torch.as_tensor(self.last(x).square().mean())

    def bits(**settings: Any) -> Bits:
        torch.manual_seed(0)
        model = Checkpointed()
        with infinity_engine.initialize(
            model,
            torch.optim.AdamW(model.parameters()),
            accelerator="cpu",
            budget={"host": "64MiB"},
            calibration="off",
            **settings,
        ) as engine:
            for seed in range(3):
                torch.manual_seed(seed)
                engine.backward(engine(batch(seed)))
                engine.step()
            return bits_of(engine)

    expected = bits()
    assert differing(expected, bits(activations=AGAIN)) == []
    assert differing(expected, bits(activations="auto")) == []


def test_an_error_in_a_block_leaves_nothing_behind(tmp_path: Path) -> None:
    class Failing(Block):
        fails = False

        def forward(self, x: torch.Tensor, scale: Any = None) -> torch.Tensor:
            y = super().forward(x)
            if self.fails:
                raise ValueError("as asked")
            return y

    expected = trained(tmp_path, Failing)
    with stack_of(tmp_path, Failing, activations=AGAIN) as (engine, model):
        for seed in range(3):
            let_fail(model.blocks[2], True)
            with pytest.raises(ValueError, match="as asked"):
                engine(batch(seed))
            let_fail(model.blocks[2], False)
            torch.manual_seed(seed)
            engine.backward(engine(batch(seed)))
            engine.step()
        found = bits_of(engine)
        activations = engine._parts.activations
        assert isinstance(activations, BlockActivations)
        assert activations._lifetimes.kept == 0
        assert activations._running == []
    assert differing(expected, found) == []


def test_an_interrupted_block_is_forgotten_by_the_next_backward(tmp_path: Path) -> None:
    with stack_of(tmp_path, activations=AGAIN, parameters="device") as (engine, model):

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        handle = model.blocks[1].register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine(batch(0))
        handle.remove()
        engine.backward(model(batch(0)))
        activations = engine._parts.activations
        assert isinstance(activations, BlockActivations)
        assert activations._running == []


def test_an_error_in_a_second_run_can_be_repeated(tmp_path: Path) -> None:
    class FailsOnce(Block):
        fails = False

        def forward(self, x: torch.Tensor, scale: Any = None) -> torch.Tensor:
            if self.fails:
                raise ValueError("as asked")
            return super().forward(x)

    expected = trained(tmp_path, FailsOnce)
    with stack_of(tmp_path, FailsOnce, activations=AGAIN) as (engine, model):
        for seed in range(3):
            torch.manual_seed(seed)
            loss = engine(batch(seed))
            let_fail(model.blocks[1], True)
            with pytest.raises(ValueError, match="as asked"):
                engine.backward(loss, retain_graph=True)
            let_fail(model.blocks[1], False)
            engine.zero_grad()
            engine.backward(loss)
            engine.step()
        assert differing(expected, bits_of(engine)) == []


def test_the_random_numbers_of_the_caller_go_on_as_before(tmp_path: Path) -> None:
    def drawn(**settings: Any) -> torch.Tensor:
        with stack_of(tmp_path, **settings) as (engine, _):
            torch.manual_seed(3)
            engine.backward(engine(batch(0)))
            return torch.rand(4)

    assert torch.equal(drawn(), drawn(activations=AGAIN))


def test_a_graph_cannot_run_blocks_again_after_close(tmp_path: Path) -> None:
    with stack_of(tmp_path, activations=AGAIN) as (engine, _):
        loss = engine(batch(0))
    with pytest.raises(RuntimeError, match="closed before this backward"):
        loss.backward()


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_blocks_that_are_compiled_later_are_kept(tmp_path: Path) -> None:
    def use(engine: Engine, seed: int) -> None:
        model: Any = engine.module
        for block in model.blocks:
            block.compile(backend="eager")
        engine.backward(engine(batch(seed)))

    same_bits(tmp_path, use=use, parameters="device")


def test_models_without_blocks_say_so(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    with infinity_engine.initialize(
        model,
        torch.optim.AdamW(model.parameters()),
        accelerator="cpu",
        budget={"host": "64MiB"},
        calibration="off",
        activations=AGAIN,
    ) as engine:
        engine.backward(engine(torch.randn(4, 8)).square().mean())
        engine.step()
        assert "no repeated blocks" in str(engine.report())


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_a_compiled_model_is_left_alone(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Stack()
    model.blocks[0].compile(backend="eager")
    with infinity_engine.initialize(
        model,
        torch.optim.AdamW(model.parameters()),
        accelerator="cpu",
        budget={"host": "64MiB"},
        calibration="off",
        parameters="device",
        activations=AGAIN,
    ) as engine:
        engine.backward(engine(batch(0)))
        engine.step()
        assert "compiled" in str(engine.report())


@pytest.mark.parametrize(
    ("activations", "said"),
    [
        ({"recompute": "everything"}, "activations.recompute"),
        ("everywhere", "activations.at"),
    ],
)
def test_settings_of_recomputing_are_checked(
    activations: object, said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=said):
        infinity_engine.initialize(
            Stack(), "adamw", accelerator="cpu", budget={"host": "64MiB"}, activations=activations
        )
