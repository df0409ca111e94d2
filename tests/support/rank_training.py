"""Training on several ranks for tests: each function runs on every rank and returns what the test
looks at.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

import infinity_engine
from deepnvme import FaultPlan, IOQueue, Requests
from infinity_engine.accel import Accelerator, Emulation, emulated_accelerator
from infinity_engine.config import EngineConfig
from infinity_engine.engine.engine import Engine
from infinity_engine.errors import CapacityError, CollectiveError, ConfigError, TransferError
from infinity_engine.parameters.describing import shape_of, wish_of
from infinity_engine.placement.placing import Plan, place
from infinity_engine.placement.sizing import Sizing
from infinity_engine.placement.training import Means, Training
from infinity_engine.plan import Rates, ResolvedBudget
from infinity_engine.plan.step import Home
from infinity_engine.planning import planning
from infinity_engine.planning.choosing import choose_together
from infinity_engine.ranks.sharding import Sharding
from infinity_engine.ranks.together import ManyRanks
from infinity_engine.sim.planner import decide
from support.determinism import deterministic_compute
from support.mixed_models import Mixed
from support.small_models import MODELS, Task

__all__ = [
    "KINDS",
    "RATES",
    "Odd",
    "Run",
    "accumulate_by_turns",
    "accumulates",
    "adds_through_views",
    "batch_of",
    "begin_alike",
    "begins_with_a_broken_drive",
    "borrow",
    "close_crowded",
    "comes_alone",
    "differ",
    "ends",
    "engine_of",
    "evaluate",
    "gather_in_one_run",
    "have_other_devices",
    "holds",
    "is_killed",
    "looks",
    "made",
    "plan_together",
    "reduces",
    "run_short",
    "sometimes",
    "states_of",
    "steps_with",
    "train",
    "train_all",
    "wants_another_mesh",
    "where",
]

RATES = Rates(
    h2d_bytes_per_s=5e9,
    d2h_bytes_per_s=4e9,
    host_update_params_per_s=2e8,
    device_update_params_per_s=2e9,
)
SETTINGS = {
    "accelerator": "cpu",
    "subgroup_numel": 4096,
    "update_threads": 1,
    "budget": {"host": "256MiB", "device": "32MiB"},
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """What is trained and how; the rows of each batch are divided among the ranks, in order."""

    model: str = "gpt"
    optimizer: str = "adamw"
    steps: int = 3
    accumulation: int = 1
    emulated: bool = False
    device_bytes: Sequence[int] = ()  # of each rank's emulated device
    settings: Mapping[str, Any] = field(default_factory=dict)


class Experts(nn.Module):
    """Sends each row to the expert that it names."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(24, 24) for _ in range(4))

    def forward(self, x: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for number in sorted(set(which.tolist())):
            rows = which == number
            out[rows] = self.experts[number](x[rows])
        return x + out


class Routed(Task):
    """Two layers of experts; of four, the last is never used, and each half of a batch uses
    others.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 24)
        self.blocks = nn.ModuleList(Experts() for _ in range(2))
        self.last = nn.Linear(24, 1)

    def batch(self, seed: int) -> torch.Tensor:
        rows = torch.randn(6, 17, generator=torch.Generator().manual_seed(seed))
        rows[:, 0] = seed % 100 // 4  # of twelve parts, four after one another have the same expert
        return rows

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        which = batch[:, 0].long()
        x = torch.relu(self.first(batch[:, 1:].to(self.last.weight.dtype)))
        for block in self.blocks:
            x = torch.relu(block(x, which))
        return torch.as_tensor(self.last(x)).float().pow(2).mean()


class Odd(Task):
    """Parameters of no element, of one, of blocks and a bit, frozen ones, one that nobody uses, one
    that some do.
    """

    def __init__(self) -> None:
        super().__init__()
        self.uses = False
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.one = nn.Parameter(torch.ones(1))
        self.wide = nn.Linear(16, 1000)
        self.frozen = nn.Linear(1000, 20)
        self.frozen.requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(9000))
        self.sometimes = nn.Parameter(torch.ones(5000))

    def batch(self, seed: int) -> torch.Tensor:
        return torch.randn(2, 16, generator=torch.Generator().manual_seed(seed))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        x = (
            self.frozen(torch.tanh(self.wide(batch.to(self.one.dtype)))) * self.one
            + self.empty.sum()
        )
        if self.uses:
            x = x + self.sometimes.sum() / 5000
        return torch.as_tensor(x).float().pow(2).mean()


KINDS: Mapping[str, Callable[[], Task]] = {
    **MODELS,
    "routed": Routed,
    "odd": Odd,
    "mixed": lambda: Mixed(keeps_mean=False),  # which is of a rank's own rows
}


def made(run: Run) -> tuple[Task, torch.optim.Optimizer]:
    """Return the model and its optimizer, of two groups."""
    torch.manual_seed(0)
    task = KINDS[run.model]()
    parameters = list(task.parameters())
    half = len(parameters) // 2
    kinds: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "adamw": lambda some: torch.optim.AdamW(some, lr=3e-3, weight_decay=0.1),
        "sgd": lambda some: torch.optim.SGD(some, lr=1e-2, momentum=0.9),
    }
    optimizer = kinds[run.optimizer](parameters[:half])
    optimizer.add_param_group({"params": parameters[half:], "lr": 1e-3})
    return task, optimizer


def engine_of(run: Run, task: Task, optimizer: torch.optim.Optimizer, around: ExitStack) -> Engine:
    """Return an engine for it, which ends with `around`."""
    device: AbstractContextManager[Accelerator | None] = nullcontext()
    if run.emulated:
        nbytes = run.device_bytes[where()[0]] if run.device_bytes else 64 << 20
        device = emulated_accelerator(Emulation(rates=RATES, capacity_bytes=nbytes))
    settings = {**SETTINGS, "accumulation_steps": run.accumulation, **run.settings}
    on = around.enter_context(device)
    return around.enter_context(infinity_engine.initialize(task, optimizer, settings, device=on))


def where() -> tuple[int, int]:
    """Return this rank, and how many there are."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def batch_of(task: Task, seed: int) -> torch.Tensor:
    """Return this rank's rows of a batch of twelve parts."""
    rank, size = where()
    rows = torch.cat([task.batch(100 * seed + part) for part in range(12)])
    return rows.chunk(size)[rank]


def states_of(engine: Engine, task: Task) -> dict[str, torch.Tensor]:
    """Return the whole weights, and the states of what is trained."""
    bits = engine.state_dict()
    for name, parameter in task.named_parameters():
        if parameter.requires_grad:
            state = engine.state_of(parameter)
            bits.update({f"{name}: {key}": torch.as_tensor(value) for key, value in state.items()})
    return {name: saved(each) for name, each in bits.items()}


def saved(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy that torch.load can read, which reads no fp8."""
    is_fp8 = tensor.is_floating_point() and tensor.element_size() == 1
    return tensor.detach().float() if is_fp8 else tensor.detach().clone()


def train(run: Run) -> dict[str, Any]:
    """Train with this rank's part of each batch; return losses, norms, weights and states."""
    losses, norms = [], []
    task, optimizer = made(run)
    with deterministic_compute(), ExitStack() as around:
        engine = engine_of(run, task, optimizer, around)
        for step in range(run.steps):
            for micro_batch in range(run.accumulation):
                loss = engine(batch_of(task, step * run.accumulation + micro_batch))
                engine.backward(loss)
                result = engine.step()
                losses.append(loss.item())
            norms.append(result.gradient_norm)
        usage = engine.usage()
        found: dict[str, Any] = {
            "losses": losses,
            "norms": norms,
            "states": states_of(engine, task),
        }
        found["within"] = all(each.peak_held <= each.limit for each in usage)
        found["parameters"] = engine.plan.parameters.name
    found["after"] = {name: saved(each) for name, each in task.named_parameters()}
    return found


def train_all(runs: Mapping[str, Run]) -> dict[str, dict[str, Any]]:
    """Train one after another in one group of processes, which is the user's."""
    dist.init_process_group("gloo")
    try:
        return {name: train(run) for name, run in runs.items()}
    finally:
        dist.destroy_process_group()


# --- what else there is to an engine --------------------------------------------------------------


def looks(ranks: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Use what an engine has beside training; return what came of it by name."""
    found: dict[str, Any] = {}
    rank, _ = where()
    run = Run(settings={"storage": {"small_bytes": 0}, "ranks": ranks or {}})
    task, optimizer = made(run)
    before = {name: each.detach().clone() for name, each in task.named_parameters()}
    embed, position = task.get_parameter("embed.weight"), task.get_parameter("position")
    with deterministic_compute(), ExitStack() as around:
        engine = engine_of(run, task, optimizer, around)
        found["is nan"] = bool(embed.detach().isnan().all())
        with torch.no_grad():
            found["evaluated"] = engine.eval()(batch_of(task, 3)).item()
            found["outside"] = task(batch_of(task, 3)).item()
        engine.train()
        with engine.gathered(embed):
            found["gathered"] = torch.equal(embed.detach(), before["embed.weight"])
        with engine.gathered([embed, position], modify=True), torch.no_grad():
            embed.mul_(2)
        found["doubled"] = torch.equal(
            engine.state_dict()["embed.weight"], 2 * before["embed.weight"]
        )
        found["master"] = torch.equal(
            torch.as_tensor(engine.state_of(embed)["master"]), 2 * before["embed.weight"]
        )
        engine.backward(engine(batch_of(task, 0)))
        found["norm"] = engine.clip_grad_norm_(0.1)
        engine.zero_grad()
        found["state_dict"] = _refused(task.state_dict)
        found["nothing"] = _refused(engine.step)
        engine(batch_of(task, 1)).backward()  # not through the engine
        found["stepped"] = engine.step().outcome
        found["steps"] = engine.state_of(embed)["step"]
        found["bits"] = engine.state_dict()
    found["after"] = {name: each.detach().clone() for name, each in task.named_parameters()}
    found["other values"] = _told(lambda: _write(run, rank))
    return found


def _write(run: Run, rank: int) -> None:
    """Let each rank write something else."""
    task, optimizer = made(run)
    embed = task.get_parameter("embed.weight")
    with ExitStack() as around:
        engine = engine_of(run, task, optimizer, around)
        with engine.gathered(embed, modify=True), torch.no_grad():
            embed.add_(rank)


def _refused(call: Callable[[], object]) -> str:
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return "it was not refused"


def _told(call: Callable[[], object]) -> str:
    """Return what this rank is told of the others, or what `call` says."""
    try:
        return str(call())
    except CollectiveError as error:
        return f"{error.op}: {error.reason}"
    except (ConfigError, TransferError) as error:
        return str(error)


def sometimes() -> list[dict[str, Any]]:
    """Train a parameter that in turn nobody, the last rank and everybody uses; return gradients'
    norms and states.
    """
    rank, size = where()
    run = Run(model="odd", optimizer="sgd")
    task, optimizer = made(run)
    assert isinstance(task, Odd)
    found = []
    with deterministic_compute(), ExitStack() as around:
        engine = engine_of(run, task, optimizer, around)
        for step in range(5):
            task.uses = (False, rank == size - 1, True, rank == 0, False)[step]
            engine.backward(engine(batch_of(task, step)))
            norm = engine.clip_grad_norm_(1e9)
            shown = [
                engine.state_of(each).get("gradient")
                for each in task.parameters()
                if each.requires_grad
            ]
            squares = sum(
                torch.as_tensor(each).double().square().sum().item()
                for each in shown
                if each is not None
            )
            engine.step()
            found.append({"norm": norm, "shown": squares**0.5, "states": states_of(engine, task)})
    return found


class Deep(Task):
    """Many layers of as many parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(40))

    def batch(self, seed: int) -> torch.Tensor:
        return torch.randn(2, 64, generator=torch.Generator().manual_seed(seed))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        x = batch
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.pow(2).mean()


def holds(stage: str, slow: int, accumulation: int = 1) -> dict[str, Any]:
    """Train a deep model, in whose backwards one rank is slower; return the most bytes of whole
    gradients at a time.
    """
    rank, _ = where()
    torch.manual_seed(0)
    task = Deep()
    alive = most = 0

    def gone(nbytes: int) -> None:
        nonlocal alive
        alive -= nbytes

    def came(parameter: torch.Tensor) -> None:
        nonlocal alive, most
        if rank == slow:
            time.sleep(0.003)
        assert parameter.grad is not None
        alive += parameter.grad.nbytes
        weakref.finalize(parameter.grad.untyped_storage(), gone, parameter.grad.nbytes)
        most = max(most, alive)

    for each in task.parameters():
        each.register_post_accumulate_grad_hook(came)  # type: ignore[no-untyped-call]  # torch is
    settings = {"storage": {"small_bytes": 0}, "ranks": {"stage": stage, "bucket_bytes": 32768}}
    run = Run(steps=2, accumulation=accumulation, settings=settings)
    held = []
    with deterministic_compute(), ExitStack() as around:
        engine = engine_of(run, task, torch.optim.SGD(task.parameters(), lr=0.1), around)
        for step in range(run.steps * accumulation):
            before = engine.usage()[0].held
            engine.backward(engine(batch_of(task, step)))
            held.append(engine.usage()[0].held - before)
            engine.step()
        [host] = engine.usage()
        return {
            "most": most,
            "left": alive,
            "held": held,
            "room": dict(host.holders).get("whole gradients"),
        }


def reduces() -> list[int]:
    """Train a deep model; return how many reduces each backward took beyond one for each bucket."""
    torch.manual_seed(0)
    task = Deep()
    settings = {"storage": {"small_bytes": 0}, "ranks": {"bucket_bytes": 4096}}
    found, before = [], 0
    with deterministic_compute(), ExitStack() as around:
        engine = engine_of(
            Run(settings=settings), task, torch.optim.SGD(task.parameters(), lr=0.1), around
        )
        whole = engine._parts.ranks
        assert isinstance(whole, ManyRanks)
        for step in range(6):
            engine.backward(engine(batch_of(task, step)))
            found.append(whole.ranks.gradients.started - before - len(whole.reducer._all_buckets))
            before = whole.ranks.gradients.started
            engine.step()
    return found


class Uneven(Task):
    """Of as many elements, two parameters of one block each have larger shards than one of two
    blocks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(64, 128, bias=False)
        self.narrow = nn.Linear(128, 64, bias=False)
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(8))

    def batch(self, seed: int) -> torch.Tensor:
        return torch.randn(2, 64, generator=torch.Generator().manual_seed(seed))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.narrow(torch.tanh(self.wide(batch))))
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.pow(2).mean()


class Borrowing(Task):
    """Of two layers, the second computes with the first one's neighbour's weight, which it has in a
    list.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.owner = nn.Linear(64, 128, bias=False)
        self.block = nn.Sequential(
            _Borrower(self.get_parameter("owner.weight")), nn.Tanh(), nn.Linear(128, 1)
        )

    def batch(self, seed: int) -> torch.Tensor:
        return torch.randn(2, 64, generator=torch.Generator().manual_seed(seed))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.block(self.first(batch))).pow(2).mean()


class _Borrower(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.hidden = [weight]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.hidden[0])


def borrow(settings: Mapping[str, Any], *, registers: bool) -> dict[str, Any] | str:
    """Train a model that uses a parameter out of sight; return its losses and weights, or the
    error.
    """
    torch.manual_seed(0)
    task, losses = Borrowing(), []
    run = Run(settings={"storage": {"small_bytes": 0}, **settings})
    with deterministic_compute(), ExitStack() as around:
        engine = engine_of(run, task, torch.optim.AdamW(task.parameters(), lr=1e-2), around)
        if registers:
            engine.register_external(task.block[0], task.get_parameter("owner.weight"))
        try:
            for step in range(3):
                loss = engine(batch_of(task, step))
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
        except RuntimeError as error:
            return str(error)
        return {"losses": losses, "states": engine.state_dict()}


def _uneven(device_bytes: Sequence[int], around: ExitStack) -> tuple[Uneven, Engine]:
    """Return a model of which no more is whole than one module, where a device has so few bytes."""
    torch.manual_seed(0)
    task = Uneven()
    run = Run(
        emulated=True,
        device_bytes=device_bytes,
        settings={
            "strategy": "host_only",
            "budget": {"host": "64MiB"},
            "storage": {"small_bytes": 0},
            "ranks": {"bucket_bytes": 4096},
        },
    )
    return task, engine_of(run, task, torch.optim.SGD(task.parameters(), lr=0.1), around)


def gather_in_one_run() -> list[bool]:
    """Use two parameters together, each of which goes over the wire as it is, where modules have
    but one each.
    """
    torch.manual_seed(0)
    task = nn.Sequential(nn.Linear(64, 128, bias=False), nn.Linear(128, 64, bias=False))
    before = [each.detach().clone() for each in task.parameters()]
    settings = {**SETTINGS, "storage": {"small_bytes": 0}}
    optimizer = torch.optim.SGD(task.parameters(), lr=0.1)
    with (
        infinity_engine.initialize(task, optimizer, settings) as engine,
        engine.gathered(list(task.parameters())),
    ):
        return [
            torch.equal(each.detach(), values)
            for each, values in zip(task.parameters(), before, strict=True)
        ]


def evaluate(counts: Sequence[int], device_bytes: int, *, in_step: bool) -> dict[str, Any] | str:
    """Evaluate each rank's own number of batches, then train a step; return what was counted, or
    the error.
    """
    rank, size = where()
    found: list[float] = []

    def body() -> dict[str, Any]:
        with deterministic_compute(), ExitStack() as around:
            task, engine = _uneven([device_bytes] * size, around)
            mine = [batch_of(task, number) for number in range(counts[rank])]
            rounds = 0
            with torch.no_grad():
                for batch, is_new in (
                    engine.in_step(mine) if in_step else ((batch, True) for batch in mine)
                ):
                    loss = engine(batch).item()
                    rounds += 1
                    if is_new:
                        found.append(loss)
            engine.backward(engine(batch_of(task, 100)))
            engine.step()
            return {"losses": found, "rounds": rounds, "steps": engine.steps}

    try:
        return body()
    except (CollectiveError, ConfigError) as error:
        return f"{type(error).__name__}: {error}"


def accumulates(counts: Sequence[int], ranks: Mapping[str, Any]) -> dict[str, Any]:
    """Train two micro-batches a step on each rank's own number of them; return how many reduces
    each took, and states.

    A batch that a rank gets again has no weight.
    """
    rank, _ = where()
    run = Run(accumulation=2, settings={"ranks": ranks})
    task, optimizer = made(run)
    reduced, fresh = [], []
    with deterministic_compute(), ExitStack() as around:
        engine = engine_of(run, task, optimizer, around)
        whole = engine._parts.ranks
        assert isinstance(whole, ManyRanks)
        for batch, is_new in engine.in_step(
            [batch_of(task, number) for number in range(counts[rank])]
        ):
            before = whole.ranks.gradients.started
            engine.backward(engine(batch) * is_new)
            engine.step()
            reduced.append(whole.ranks.gradients.started - before)
            fresh.append(is_new)
        return {
            "reduced": reduced,
            "new": fresh,
            "steps": engine.steps,
            "states": states_of(engine, task),
        }


def accumulate_by_turns(
    counts: Sequence[int], settings: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Do it with each of these settings of ranks."""
    return [accumulates(counts, each) for each in settings]


def accumulate_as_called(ranks: Mapping[str, Any]) -> dict[str, Any]:
    """Make the same two updates of two micro-batches by several loops; return the states after each
    loop.
    """

    def states(
        steps: Sequence[Mapping[str, Any] | None], accumulation: int = 2, *, scale: bool = True
    ) -> Any:
        run = Run(accumulation=accumulation, settings={"ranks": ranks})
        task, optimizer = made(run)
        with deterministic_compute(), ExitStack() as around:
            engine = engine_of(run, task, optimizer, around)
            for number, step in enumerate(steps):
                loss = engine(batch_of(task, number))
                engine.backward(loss if scale else loss / 2, scale=scale)
                if step is not None:
                    engine.step(**step)
            assert engine.steps == 2
            return states_of(engine, task)

    return {
        "step after each backward": states([{}] * 4),
        "step after two backwards": states([None, {}] * 2),
        "remainders": states([None, {"update": True}] * 2, accumulation=4, scale=False),
    }


class Positions(nn.Module):
    """Adds two parameters through views of them, so that autograd gives both one memory."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.randn(16, 32))
        self.kinds = nn.Parameter(torch.randn(16, 32))
        self.out = nn.Linear(32, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a loss of one row."""
        added = x + self.places.unsqueeze(0) + self.kinds.unsqueeze(0)
        loss: torch.Tensor = self.out(added).square().mean()
        return loss


def adds_through_views(stage: str) -> dict[str, torch.Tensor]:
    """Return the gradients of two micro-batches."""
    torch.manual_seed(0)
    model = Positions()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {**SETTINGS, "accumulation_steps": 2, "ranks": {"stage": stage}}
    generator = torch.Generator().manual_seed(1 + where()[0])
    with infinity_engine.initialize(model, optimizer, settings) as engine:
        for _ in range(2):
            engine.backward(engine(torch.randn(1, 16, 32, generator=generator)))
        states = {name: engine.state_of(each) for name, each in model.named_parameters()}
        return {name: saved(torch.as_tensor(each["gradient"])) for name, each in states.items()}


def takes_over(stage: str, *, differs: bool = False) -> str | list[str]:
    """Step plainly, then let an engine take the optimizer's states over; return which it does not
    have as they were.

    Or, where the last rank has another moment, what each was told.
    """
    run, (rank, size) = Run(settings={"ranks": {"stage": stage}}), where()
    task, optimizer = made(run)
    for seed in range(2):
        task(task.batch(seed)).backward()
        optimizer.step()
        optimizer.zero_grad()
    parameters = dict(task.named_parameters())
    before = {name: dict(optimizer.state[parameter]) for name, parameter in parameters.items()}
    if differs and rank == size - 1:
        optimizer.state[next(iter(parameters.values()))]["exp_avg"].add_(1)

    def differing_states() -> list[str]:
        with ExitStack() as around:
            engine = engine_of(run, task, optimizer, around)
            now = {name: engine.state_of(parameter) for name, parameter in parameters.items()}
        return [
            name
            for name, states in before.items()
            for key in states
            if not (states[key] == now[name][key]).all()
        ]

    return _told(differing_states) if differs else differing_states()


def updates_alone(ranks: Mapping[str, Any]) -> str:
    """Update with a remainder on the last rank only; return what each was told."""
    rank, size = where()
    run = Run(accumulation=2, settings={"ranks": ranks})

    def train_until_told() -> None:
        task, optimizer = made(run)
        with ExitStack() as around:
            engine = engine_of(run, task, optimizer, around)
            for number in range(4):
                engine.backward(engine(batch_of(task, number)))
                engine.step(update=True if number == 2 and rank == size - 1 else None)

    return _told(train_until_told)


def close_crowded(rank: int) -> list[str]:
    """Close where only one rank shares its machine with so many that there is no room; return what
    was warned of.
    """
    task, optimizer = made(Run())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with ExitStack() as around:
            engine = engine_of(Run(), task, optimizer, around)
            whole = engine._parts.ranks
            assert isinstance(whole, ManyRanks)
            if where()[0] == rank:
                whole.ranks.neighbours = 1 << 60
    return [str(each.message) for each in caught if "show NaN" in str(each.message)]


def begin_alike() -> dict[str, Any]:
    """Begin where rates have to be measured; return who did, with how many threads, and where its
    own run.
    """
    asked: list[int | None] = []
    everywhere = os.sched_getaffinity(0)

    def measured(config: EngineConfig, *_: object, **__: object) -> EngineConfig:
        asked.append(config.update_threads)
        return replace(config, rates=RATES)

    with ExitStack() as around:
        around.enter_context(patch.object(planning, "with_rates", measured))
        task, optimizer = made(Run())
        settings = {"strategy": "interleaved", "update_threads": None}
        engine = engine_of(Run(emulated=True, settings=settings), task, optimizer, around)
        bound = [
            cores
            for task in os.listdir("/proc/self/task")
            if (cores := os.sched_getaffinity(int(task))) != everywhere
        ]
        return {
            "asked": asked,
            "bound": bound,
            "steps": engine.steps,
            "everywhere": os.sched_getaffinity(0),
        }


def plan_together(run: Run, rates: Sequence[Rates | None]) -> dict[str, Any]:
    """Train with rates of each rank's own; return what came of it, and what the planner says of
    what this rank has.
    """
    asked: dict[str, Any] = {}

    def choose_and_note(*args: Any, **kwargs: Any) -> Any:
        found = choose_together(*args, **kwargs)
        asked.update(args=args, kwargs=kwargs, chosen=found)
        return found

    with patch.object(planning, "choose_together", choose_and_note):
        found = train(replace(run, settings={**run.settings, "rates": rates[where()[0]]}))
    chosen = asked["chosen"]
    found["homes"] = (
        None if chosen is None else {home.name: chosen.steps.params_at(home) for home in Home}
    )
    if chosen is not None:
        found["as planned"] = (
            chosen.steps
            == _planned(run, rates[0] or Rates(), *asked["args"], **asked["kwargs"]).steps
        )
    return found


def _planned(
    run: Run,
    rates: Rates,
    model: nn.Module,
    sizing: Sizing,
    sharding: Sharding,
    *,
    config: EngineConfig,
    budget: ResolvedBudget,
    **_: object,
) -> Plan:
    """Return what the planner chooses for one of equal ranks, placed as this one's."""
    room = replace(budget, device=budget.device - sharding.least)  # for what is gathered ahead
    shape = shape_of(model, sharding.cut.wholes, sharding.cut.frozen_wholes)
    training = Training(
        model=replace(shape, deepest_numel=sizing.deepest // sizing.width),
        batch=1,
        sequence=1,
        accumulation_steps=run.accumulation,
        checkpointing=False,
        formats=sizing.formats,
        state_names=sizing.state_names,
        small_bytes=config.storage.small_bytes,
    )
    size = sharding.ranks.size
    means = Means(
        budget=replace(room, host=size * room.host), rates=rates, ranks=size, for_all=False
    )
    choice = decide(training, means, subgroup_numel=config.subgroup_numel).best.choice
    wish = replace(wish_of(config, None), strategy=choice.strategy, tiers=(choice.parameters,))
    return place(sizing, wish, room, io_bytes=0)


def run_short(device_bytes: Sequence[int]) -> list[str]:
    """Ask for more than there is room for, again and again, and then for what there is; return what
    came of it.
    """
    found = []
    with deterministic_compute(), ExitStack() as around:
        task, engine = _uneven(device_bytes, around)
        parameters = list(task.parameters())
        with engine.gathered(parameters[-1]):
            kept = parameters[-1].detach()
        for _ in range(4):
            try:
                with engine.gathered(parameters[-3:-1]):
                    found.append("there was room")
            except CapacityError as error:
                found.append(type(error).__name__)
        del kept
        engine.backward(engine(batch_of(task, 0)))
        found.append(engine.step().outcome.name)
    return found


def have_other_devices(device_bytes: Sequence[int]) -> dict[str, Any]:
    """Use parameters together on ranks of which the devices are not as large."""
    with deterministic_compute(), ExitStack() as around:
        task, engine = _uneven(device_bytes, around)
        engine.backward(engine(batch_of(task, 0)))
        engine.step()
        two = dict(list(task.named_parameters())[-2:])
        with engine.gathered(two.values()):
            values = {name: each.detach().clone() for name, each in two.items()}
        bits = engine.state_dict()
        alike = [torch.equal(values[name], bits[name]) for name in two]
        return {"parameters": engine.plan.parameters.name, "alike": alike}


# --- what goes wrong ------------------------------------------------------------------------------


def differ() -> dict[str, str]:
    """Begin with something else on the last rank, each time in a new engine; return what each was
    told.
    """
    rank, size = where()
    last = rank == size - 1
    dist.init_process_group("gloo")

    def begins(run: Run, task: Task | None = None) -> str:
        ready, optimizer = made(run)
        if task is not None:
            ready, optimizer = task, torch.optim.AdamW(task.parameters())
        with ExitStack() as around:
            return _told(lambda: engine_of(run, ready, optimizer, around).steps)

    try:
        settings = begins(Run(settings={"precision": "bf16" if last else "fp32"}))
        model = begins(Run(model="llama" if last else "gpt"))
        torch.manual_seed(rank)
        values = begins(Run(), MODELS["gpt"]())
        drives = {"/no/such/directory": "1MiB"} if last else {}
        refused = begins(Run(settings={"budget": {"host": "64MiB", "nvme": drives}}))
        experts = _told(lambda: train(Run(model="routed")))
        return {
            "settings": settings,
            "model": model,
            "values": values,
            "refused": refused,
            "experts": experts,
        }
    finally:
        dist.destroy_process_group()


def begins_with_a_broken_drive(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Begin where the last rank's drives take no byte, and again where they do; return what came of
    the model.
    """
    rank, size = where()
    run = Run(settings={**SETTINGS, **settings, "precision": "bf16"})
    task, optimizer = made(run)
    task.register_buffer("mean", torch.full((3,), 0.1))
    before = {name: each.clone() for name, each in task.state_dict().items()}
    faults = FaultPlan().fail(every=1, requests=Requests.WRITES) if rank == size - 1 else None
    with IOQueue(faults=faults) as queue:
        found: dict[str, Any] = {
            "told": _told(
                lambda: infinity_engine.initialize(task, optimizer, run.settings, queue=queue)
            )
        }
    after = task.state_dict()
    found["changed"] = [
        name
        for name, each in before.items()
        if after[name].dtype != each.dtype or not torch.equal(after[name], each)
    ]
    with ExitStack() as around:
        engine = engine_of(run, task, optimizer, around)
        engine.backward(engine(batch_of(task, 0)))
        found["again"] = engine.step().outcome
    return found


def comes_alone() -> str:
    """Begin on the first rank alone; return what it was told."""
    rank, _ = where()
    task, optimizer = made(Run())
    with ExitStack() as around:
        alone = Run(settings={"ranks": {"timeout_s": 2}})
        return "" if rank else _told(lambda: engine_of(alone, task, optimizer, around).steps)


def wants_another_mesh() -> str:
    """Begin with another mesh on the last rank; return what each was told."""
    rank, size = where()
    run = Run(settings={"ranks": {} if rank == size - 1 else {"shard_ranks": 2}})
    task, optimizer = made(run)
    with ExitStack() as around:
        return _told(lambda: engine_of(run, task, optimizer, around).steps)


def steps_with(what: str) -> str:
    """Step with something else on the last rank, once all have made a step; return what each was
    told.
    """
    rank, size = where()
    last = rank == size - 1
    if what == "rate":
        return _told(lambda: _steps_with(rate=2e-3 if last else 1e-3))
    if what == "dropped gradients":
        return _told(lambda: _steps_with(drops=last))
    return _told(lambda: _steps_with(clip=2.0 if last else 1.0))


def _steps_with(
    rate: float = 1e-3, clip: float | None = None, *, drops: bool | None = None
) -> None:
    """Make a step as all do, and another with this learning rate and bound of the norm.

    Or with a second backward, before which the gradients of the first are dropped, or are not.
    """
    run = Run(accumulation=2)
    task, optimizer = made(run)
    with ExitStack() as around:
        engine = engine_of(run, task, optimizer, around)
        for step in range(2):
            engine.backward(engine(batch_of(task, step)))
            if step:
                optimizer.param_groups[1]["lr"] = rate
            if step and drops is not None:
                if drops:
                    engine.zero_grad()
                engine.backward(engine(batch_of(task, step)))
            if step and clip is not None:
                engine.clip_grad_norm_(clip)
            engine.step(update=True)


def ends(rank: int, step: int, how: str, settings: Mapping[str, Any]) -> str:
    """Train until a rank is killed, or raises, in the middle of a step; return what the others were
    told.
    """
    run = Run(model="gpt", steps=100, settings={"storage": {"small_bytes": 0}, **settings})
    task, optimizer = made(run)
    me, _ = where()

    def body() -> None:
        with ExitStack() as around:
            engine = engine_of(run, task, optimizer, around)
            for number in range(run.steps):
                loss = engine(batch_of(task, number))
                if (me, number) == (rank, step):
                    _end(how)
                engine.backward(loss)
                engine.step()

    try:
        return _told(body)
    except ZeroDivisionError:
        return "its own"


def is_killed(rank: int, after_s: float, settings: Mapping[str, Any]) -> str:
    """Train until a rank is killed, so long after the first step; return what the others were
    told.
    """
    run = Run(steps=100_000, settings={"storage": {"small_bytes": 0}, **settings})
    task, optimizer = made(run)

    def body() -> None:
        with ExitStack() as around:
            engine = engine_of(run, task, optimizer, around)
            for number in range(run.steps):
                engine.backward(engine(batch_of(task, number)))
                engine.step()
                if not number and where()[0] == rank:
                    threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGKILL)).start()

    return _told(body)


def is_interrupted(told: str) -> str:
    """Let rank 0 get Ctrl-C while it waits for the other, which comes when it is told of that;
    return what each saw.
    """
    run = Run(settings={"storage": {"small_bytes": 0}})
    task, optimizer = made(run)

    def body() -> None:
        with ExitStack() as around:
            engine = engine_of(run, task, optimizer, around)
            if where()[0]:
                while not Path(told).exists():
                    time.sleep(0.01)
            else:
                threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
            try:
                engine(batch_of(task, 0))
            except KeyboardInterrupt:
                Path(told).touch()
                raise

    try:
        return _told(body)
    except KeyboardInterrupt:
        return "Ctrl-C"


def _end(how: str) -> None:
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    raise ZeroDivisionError("division by zero")
