"""Parameters used where the engine cannot see it: refused, and nothing is updated from NaN of the
engine's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import infinity_engine
from infinity_engine.engine.engine import Engine


@contextmanager
def on_drives(model: nn.Module, folder: Path, **settings: Any) -> Iterator[Engine]:
    """Open an engine that fetches all parameters from a drive."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    more: dict[str, Any] = {
        "accelerator": "cpu",
        "strategy": "nvme_streamed",
        "parameters": "nvme",
        "subgroup_numel": 1 << 14,
        "storage": {"small_bytes": 0},
        "budget": {"host": "24MiB", "nvme": {str(folder): "64MiB"}},
        **settings,
    }
    with infinity_engine.initialize(model, optimizer, **more) as engine:
        yield engine


def plain(precision: str = "model") -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
    return layers.to(torch.bfloat16) if precision == "bf16" else layers


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_penalty_over_parameters_is_refused_and_updates_nothing(
    tmp_path: Path, precision: str
) -> None:
    model = plain(precision)
    batch = torch.randn(2, 64, dtype=next(model.parameters()).dtype)
    with on_drives(model, tmp_path) as engine:
        before = engine.state_dict()
        penalty = sum(parameter.float().pow(2).sum() for parameter in model.parameters())
        loss = engine(batch).float().pow(2).mean() + 1e-4 * penalty
        with pytest.raises(
            RuntimeError,
            match=r"The loss is nan in step 0\. .*engine\.gathered\(parameter\).*It uses 0\.weight, .* outside of",
        ):
            engine.backward(loss)
        with pytest.raises(RuntimeError, match="no gradient to update with"):
            engine.step()
        assert all(torch.equal(before[name], value) for name, value in engine.state_dict().items())
        with engine.gathered(model.parameters()):
            penalty = sum(parameter.float().pow(2).sum() for parameter in model.parameters())
            engine.backward(engine(batch).float().pow(2).mean() + 1e-4 * penalty)
        engine.step()
        assert not any(bool(value.isnan().any()) for value in engine.state_dict().values())


class Listed(nn.Module):
    """Uses its layers' weights through a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(3))
        self.kept = list(self.layers.parameters())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.kept:
            x = torch.tanh(x @ weight)
        return x


def test_weights_used_through_a_list_are_named_in_evaluation(tmp_path: Path) -> None:
    model = Listed()
    with on_drives(model, tmp_path) as engine, torch.no_grad():
        expected = r"returned NaN, and no module has asked for layers\.0\.weight, layers\.1\.weight, layers\.2\.weight"
        with pytest.raises(RuntimeError, match=expected):
            engine.eval()(torch.randn(2, 64))
        for weight in model.kept:
            engine.register_external(model, weight)
        assert not bool(engine(torch.randn(2, 64)).isnan().any())


@dataclass
class Output:
    """What some models return."""

    logits: torch.Tensor


def test_weights_used_through_a_list_are_named_where_a_dataclass_is_returned(
    tmp_path: Path,
) -> None:
    class Returning(Listed):
        def forward(self, x: torch.Tensor) -> Any:
            return Output(super().forward(x))

    with (
        on_drives(Returning(), tmp_path) as engine,
        torch.no_grad(),
        pytest.raises(RuntimeError, match="no module has asked for layers"),
    ):
        engine.eval()(torch.randn(2, 64))


def test_generation_from_weights_in_a_list_is_refused(tmp_path: Path) -> None:
    class Generating(Listed):
        def generate(self, x: torch.Tensor) -> torch.Tensor:
            return torch.as_tensor(self(x)).argmax(-1)

    model = Generating()
    with on_drives(model, tmp_path) as engine, torch.no_grad():
        with pytest.raises(RuntimeError, match="no module has asked for layers"):
            engine.generate(torch.randn(2, 64))
        with pytest.raises(RuntimeError, match="no module has asked for layers"):
            model(torch.randn(2, 64))


def test_nan_of_weights_that_one_call_did_not_ask_for_is_warned_of(tmp_path: Path) -> None:
    class Sometimes(Listed):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not self.training:
                return torch.as_tensor(super().forward(x))
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return x

    model = Sometimes()
    with on_drives(model, tmp_path) as engine:
        engine.backward(engine(torch.randn(2, 64)).pow(2).mean())
        engine.step()
        with (
            torch.no_grad(),
            pytest.warns(RuntimeWarning, match=r"layers\.0\.weight.*in this call"),
        ):
            engine.eval()(torch.randn(2, 64))


KEPT: dict[str, Callable[[Any, torch.Tensor], None]] = {
    "as an attribute": lambda ctx, weight: setattr(ctx, "kept", weight),
    "in a tuple": lambda ctx, weight: setattr(ctx, "kept", (None, weight)),
    "in an object": lambda ctx, weight: setattr(ctx, "kept", SimpleNamespace(of=[weight])),
}
FOUND: dict[str, Callable[[Any], Any]] = {
    "as an attribute": lambda ctx: ctx.kept,
    "in a tuple": lambda ctx: ctx.kept[1],
    "in an object": lambda ctx: ctx.kept.of[0],
}
ELSEWHERE: dict[int, torch.Tensor] = {}


class Keeping(torch.autograd.Function):
    """Keeps the weight on its ctx, and not with save_for_backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, how: str) -> torch.Tensor:
        KEPT[how](ctx, weight)
        ctx.how = how
        ctx.save_for_backward(x)
        return x @ weight.float()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        weight = FOUND[ctx.how](ctx)
        of_weight = ctx.saved_tensors[0].t() @ gradients[0] if weight.is_floating_point() else None
        return gradients[0] @ weight.float().t(), of_weight, None


class Layer(nn.Module):
    """A layer of such a function; a weight of integers is frozen, as a quantized model has it."""

    def __init__(self, how: str, dtype: torch.dtype, function: Any = Keeping) -> None:
        super().__init__()
        self.how, self.function = how, function
        is_float = dtype.is_floating_point
        weight = torch.randn(256, 256) / 16 if is_float else torch.randint(-9, 9, (256, 256))
        self.weight = nn.Parameter(weight.to(dtype), requires_grad=is_float)
        self.scale = nn.Parameter(torch.full((256,), 1.0 if is_float else 0.02))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.function.apply(x * self.scale, self.weight, self.how))


def layers_of(
    how: str, dtype: torch.dtype = torch.float32, function: Any = Keeping
) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Layer(how, dtype, function) for _ in range(24)])


def run(model: nn.Sequential, x: torch.Tensor, checkpointed: bool | None) -> torch.Tensor:
    """Return a loss, with blocks that are computed again where asked: reentrant or not."""
    for layer in model:
        again = checkpointed is not None
        x = checkpoint(layer, x, use_reentrant=checkpointed) if again else layer(x)
    return x.pow(2).mean()


class Whole(nn.Module):
    """A model that returns its loss."""

    def __init__(self, layers: nn.Sequential, checkpointed: bool | None) -> None:
        super().__init__()
        self.layers, self.checkpointed = layers, checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return run(self.layers, x, self.checkpointed)


LITTLE = {torch.float32: 24_200_000, torch.int8: 17_600_000}  # bytes of the host: few layers fit


@pytest.mark.parametrize(
    ("how", "checkpointed", "dtype"),
    [
        *((how, None, torch.float32) for how in KEPT),
        ("as an attribute", True, torch.float32),
        *(("as an attribute", checkpointed, torch.int8) for checkpointed in (None, True, False)),
    ],
    ids=str,
)
def test_a_function_finds_the_weight_that_its_ctx_keeps(
    how: str, checkpointed: bool | None, dtype: torch.dtype, tmp_path: Path
) -> None:
    batch = torch.randn(2, 256, generator=torch.Generator().manual_seed(1)).requires_grad_()
    expected = Whole(layers_of(how, dtype), checkpointed)
    expected(batch).backward()
    model = Whole(layers_of(how, dtype), checkpointed)
    budget = {"host": LITTLE[dtype], "nvme": {str(tmp_path): "64MiB"}}
    with on_drives(model, tmp_path, budget=budget) as engine:
        engine.backward(engine(batch))
        for parameter, same in zip(model.parameters(), expected.parameters(), strict=True):
            if same.grad is not None:
                gradient = engine.state_of(parameter)["gradient"]
                assert torch.equal(torch.as_tensor(gradient), same.grad)
        assert engine.fetching().fetched > 24  # most were fetched again
        engine.step()


def test_a_function_finds_its_weight_in_a_backward_past_the_engine(tmp_path: Path) -> None:
    batch = torch.randn(2, 256, generator=torch.Generator().manual_seed(1))
    expected, model = layers_of("as an attribute"), layers_of("as an attribute")
    run(expected, batch, None).backward()  # type: ignore[no-untyped-call]  # torch is
    budget = {"host": LITTLE[torch.float32], "nvme": {str(tmp_path): "64MiB"}}
    with on_drives(model, tmp_path, budget=budget) as engine:
        engine(batch).pow(2).mean().backward()
        gradient = engine.state_of(next(model.parameters()))["gradient"]
        assert torch.equal(
            torch.as_tensor(gradient), torch.as_tensor(next(expected.parameters()).grad)
        )


class Failing(Keeping):
    """Fails in its backward."""

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        raise ArithmeticError("as a test wants it")


def test_a_function_that_fails_in_its_backward_holds_nothing(tmp_path: Path) -> None:
    model = layers_of("as an attribute", function=Failing)
    batch = torch.randn(2, 256)
    budget = {"host": LITTLE[torch.float32], "nvme": {str(tmp_path): "64MiB"}}
    with on_drives(model, tmp_path, budget=budget) as engine:
        for _ in range(8):  # what they would hold does not fit
            with pytest.raises(ArithmeticError, match="as a test wants it"):
                engine.backward(engine(batch).pow(2).mean())
            engine.zero_grad()
        for layer in model:
            assert isinstance(layer, Layer)
            layer.function = Keeping
        engine.backward(engine(batch).pow(2).mean())
        engine.step()


class Careless(Keeping):
    """Keeps the weight in a dictionary of the program, where nothing finds it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, how: str) -> torch.Tensor:
        ELSEWHERE[id(weight)] = weight
        ctx.key = id(weight)
        ctx.save_for_backward(x)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        weight = ELSEWHERE.pop(ctx.key)
        return gradients[0] @ weight.t(), ctx.saved_tensors[0].t() @ gradients[0], None


def test_a_weight_that_a_function_keeps_elsewhere_updates_nothing(tmp_path: Path) -> None:
    layers = layers_of("", function=Careless)
    budget = {"host": LITTLE[torch.float32], "nvme": {str(tmp_path): "64MiB"}}
    with on_drives(layers, tmp_path, budget=budget) as engine:
        before = engine.state_dict()
        loss = engine(torch.randn(2, 256)).pow(2).mean()
        with pytest.raises(
            RuntimeError, match=r"The gradient of \d+\.\w+ is NaN\. .*ctx\.save_for_backward"
        ):
            engine.backward(loss)
        with pytest.raises(RuntimeError, match=r"no step can be made|zero_grad"):
            engine.step()
        engine.zero_grad()
        assert all(torch.equal(before[name], value) for name, value in engine.state_dict().items())
    ELSEWHERE.clear()


class Bare(nn.Module):
    """A layer of nothing but a function that keeps its weight elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(256, 256) / 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(Careless.apply(x, self.weight, ""))  # type: ignore[no-untyped-call]


def test_nan_in_some_rows_of_an_embedding_updates_nothing(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(256, 256) for _ in range(24)]
    model = nn.Sequential(nn.Embedding(256, 256), Bare(), *layers)
    budget = {"host": 24_800_000, "nvme": {str(tmp_path): "64MiB"}}
    with on_drives(model, tmp_path, budget=budget) as engine:
        before = engine.state_dict()
        loss = engine(torch.tensor([3, 5])).pow(2).mean()
        with pytest.raises(RuntimeError, match=r"The gradient of 0\.weight is NaN"):
            engine.backward(loss)
        engine.zero_grad()
        assert all(torch.equal(before[name], value) for name, value in engine.state_dict().items())
    ELSEWHERE.clear()


def test_nan_of_the_users_own_passes_where_parameters_are_at_home() -> None:
    model = plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with infinity_engine.initialize(
        model, optimizer, accelerator="cpu", budget={"host": "64MiB"}
    ) as engine:
        with pytest.warns(RuntimeWarning, match="The loss is nan"):
            engine.backward(engine(torch.full((2, 64), float("nan"))).sum())
        engine.step()


def test_nan_that_a_seen_model_returns_is_the_users_own(tmp_path: Path) -> None:
    with on_drives(plain(), tmp_path) as engine, torch.no_grad():
        assert bool(engine(torch.full((2, 64), float("nan"))).isnan().all())
