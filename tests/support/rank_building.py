"""Building and loading models on several ranks for tests: each function runs on every rank; returns
what it found.
"""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import infinity_engine
from deepnvme import FaultPlan, IOQueue, Requests, write_safetensors
from infinity_engine.building.built import BuiltModel, built_model_of
from infinity_engine.errors import CapacityError, CollectiveError, ConfigError, TransferError
from infinity_engine.memory import return_freed_memory
from infinity_engine.partition.collectives import Collectives
from infinity_engine.plan import Tier
from infinity_engine.storage import swapfile
from support.determinism import deterministic_compute
from support.rank_training import Run, batch_of, engine_of, made, states_of, where
from support.resident_memory import ResidentMemory

__all__ = [
    "BUILDERS",
    "FEW_BUILDERS",
    "WAYS",
    "build",
    "build_otherwise",
    "fail",
    "files_of",
    "load",
    "load_otherwise",
    "measure_building",
    "measure_loading",
    "measure_training",
    "on_a_mesh",
    "read_in_the_body",
    "train_built",
    "wide",
    "wide_files",
]


class InitializedLater(nn.Module):
    """Initializes in a second pass, through views and without them, ties weights and reads what it
    has made.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(640, 32)
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(6))
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 640, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.halved = nn.Parameter(torch.randn(100, 90).to(torch.bfloat16).t())
        self.apply(self.initialize)
        layers: list[Any] = [*self.layers]
        view = layers[0].weight.data
        with torch.no_grad():
            layers[2].weight.copy_(layers[1].weight)
            layers[3].weight += 1
        view[3:5].fill_(7)
        layers[4].weight.data = layers[0].weight.data.clone() * 2
        layers[5].weight = nn.Parameter(layers[4].weight.detach() / layers[0].weight.norm())
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                parameter.data.uniform_(-1, 1)

    def initialize(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            module.weight.data.normal_(mean=0.0, std=0.02)


def trained_with_checkpoints() -> nn.Module:
    """Return a model that the body has trained: a backward asks for all parameters."""
    model = nn.Sequential(nn.Linear(90, 100), nn.LayerNorm(100), nn.Linear(100, 90))
    for _ in range(2):
        x = torch.randn(8, 90, requires_grad=True)
        checkpoint(
            model, checkpoint(model, x, use_reentrant=False), use_reentrant=False
        ).sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.sub_(parameter.grad)
    return model


def in_a_default_device() -> nn.Module:
    """Return a model that comes from the meta device, under torch's own modes."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 100)).to_empty(device="cpu")
        for module in model:
            module.reset_parameters()  # type: ignore[operator]  # torch knows it as a tensor
    return model


BUILDERS: Mapping[str, Callable[[], nn.Module]] = {
    "initialized later": InitializedLater,
    "transformer": lambda: nn.Transformer(64, 4, 1, 1, 128, batch_first=True),
    "trained with checkpoints": trained_with_checkpoints,
    "in a default device": in_a_default_device,
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(90, 100)),
    "cast": lambda: nn.Sequential(nn.Linear(90, 100), nn.LayerNorm(100)).to(torch.bfloat16),
}


FEW_BUILDERS = ("initialized later", "cast")
"""Of BUILDERS, that which does most with what it builds, and one that replaces all of it."""
WAYS = ("in memory", "built", "loaded")
"""How a model comes to be trained."""


def budget(drive: str, *, host: str = "256MiB", nvme: str = "64MiB") -> dict[str, Any]:
    """Return a machine's budget."""
    return {"host": host, "nvme": {drive: nvme}}


def is_same(built: BuiltModel, model: nn.Module, plain: nn.Module) -> list[str]:
    """Return the parameters that have other values than those of a model that was built without a
    context.
    """
    expected = dict(plain.named_parameters())
    return [
        name
        for name, each in model.named_parameters()
        if not torch.equal(built.piece(each, 0, each.numel()), expected[name].detach().reshape(-1))
    ]


def build(
    names: Iterable[str], drive: str, cache: int | None, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Build these of BUILDERS; return what differs from a model that this rank builds alone, and
    what it takes.
    """
    found: dict[str, Any] = {}
    for name in names:
        make = BUILDERS[name]
        torch.manual_seed(7)
        plain = make()
        after = torch.get_rng_state()
        torch.manual_seed(7)
        with infinity_engine.init_context(
            budget=budget(drive), cache=cache, ranks=settings
        ) as built:
            model = make()
        random = torch.equal(torch.get_rng_state(), after)
        written = sum(each.written_bytes for each in built.swap.traffic().values())
        nbytes = sum(each.numel() * each.element_size() for each in plain.parameters())
        taken = sum(extent.nbytes for extent in built.swap._holders)
        differs = is_same(built, model, plain)
        built.whole()
        differs += [
            key
            for key, each in model.state_dict().items()
            if not torch.equal(each, plain.state_dict()[key])
        ]
        found[name] = {
            "differs": differs,
            "random": random,
            "written": written / nbytes,
            "taken": taken / nbytes,
            "closed": built.closed,
        }
    return found


def read_in_the_body(drive: str, settings: Mapping[str, Any]) -> list[bool]:
    """Read a part of a parameter, that is away and then is not, while a model is built; tell
    whether it was right.
    """
    torch.manual_seed(0)
    values = nn.Linear(200, 100).weight.detach().view(-1)[5000:12000]
    torch.manual_seed(0)
    with infinity_engine.init_context(budget=budget(drive), cache=0, ranks=settings) as built:
        first, second = (nn.Linear(200, 100) for _ in range(2))
        away = torch.equal(built.piece(first.weight, 5000, 7000), values)
        first.weight.sum()
        found = [
            built.is_absent(second.weight),
            away,
            torch.equal(built.piece(first.weight, 5000, 7000), values),
        ]
    built.close()
    return found


def train_built(runs: Mapping[str, Run], folder: str) -> dict[str, dict[str, dict[str, Any]]]:
    """Train models that were made in memory, built, or loaded from files; return losses, weights
    and states.
    """
    return {
        name: {how: _train_built(run, how, folder) for how in WAYS} for name, run in runs.items()
    }


def on_a_mesh(shard_ranks: int, run: Run, drive: str, folder: str, files: str) -> dict[str, Any]:
    """Build, load and train where so many ranks share one copy of a model; return what came of
    each.
    """
    mesh = {"shard_ranks": shard_ranks}
    return {
        "built": build(FEW_BUILDERS, drive, 0, mesh),
        "read in the body": read_in_the_body(drive, mesh),
        "loaded values": load(files, drive, mesh),
        "trained": train_built({"all": run}, folder)["all"],
    }


def _train_built(run: Run, how: str, folder: str) -> dict[str, Any]:
    settings = run.settings.get("ranks", {})
    ranks = {key: settings[key] for key in ("shard_ranks",) if key in settings}
    with deterministic_compute(), ExitStack() as around:
        task, optimizer = _begun(run, how, folder, ranks)
        engine = engine_of(run, task, optimizer, around)
        losses = []
        for step in range(run.steps):
            loss = engine(batch_of(task, step))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        within = all(each.peak_held <= each.limit for each in engine.usage())
        return {"losses": losses, "states": states_of(engine, task), "within": within}


def _begun(
    run: Run, how: str, folder: str, ranks: Mapping[str, Any]
) -> tuple[Any, torch.optim.Optimizer]:
    small = budget(next(iter(run.settings["budget"]["nvme"])), host="512MiB", nvme="16MiB")
    if how == "built":
        with infinity_engine.init_context(budget=small, cache=0, ranks=ranks):
            return made(run)
    if how == "loaded":
        with torch.device("meta"):
            task, optimizer = made(run)
        infinity_engine.load_into(task, f"{folder}/{run.model}", small, ranks=ranks)
        return task, optimizer
    return made(run)


# --- loading --------------------------------------------------------------------------------------


def wide() -> nn.Sequential:
    """Return a model of several files, with tied, halved, small and empty parameters, and a
    buffer.
    """
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Embedding(640, 32), nn.Linear(32, 640, bias=False), nn.BatchNorm1d(640)
    )
    model[1].weight = model[0].weight
    model.append(nn.Linear(1000, 257))
    model.scale = nn.Parameter(torch.tensor(2.0))
    model.empty = nn.Parameter(torch.zeros(0, 3), requires_grad=False)
    model.halved = nn.Parameter(torch.randn(90001).to(torch.bfloat16), requires_grad=False)
    return model


def files_of(folder: Path, *models: str) -> Path:
    """Return a folder with the first values of these models, each in a directory of its name."""
    for model in models:
        task, _ = made(Run(model=model))
        (folder / model).mkdir(parents=True)
        write_safetensors(folder / model / "model.safetensors", task.state_dict())
    return folder


def wide_files(folder: Path) -> Path:
    """Return a directory with the values of the wide model, in two files."""
    folder.mkdir(exist_ok=True)
    state = wide().state_dict()
    del state["1.weight"]
    names = sorted(state)
    for number in range(2):
        write_safetensors(
            folder / f"{number}.safetensors", {name: state[name] for name in names[number::2]}
        )
    return folder


def load(folder: str, drive: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Load a model; return what differs from that of the files, and how much was read and written
    here.
    """
    plain = wide()
    with torch.device("meta"):
        model = wide()
    built = infinity_engine.load_into(model, folder, budget(drive, host="512MiB"), ranks=settings)
    assert built_model_of(model) is built
    read = sum(each.read_bytes for each in built.swap.queue.stats().drives.values())
    written = sum(each.written_bytes for each in built.swap.traffic().values())
    differs = is_same(built, model, plain)
    built.whole()
    differs += [
        key
        for key, each in model.state_dict().items()
        if not torch.equal(each, plain.state_dict()[key])
    ]
    return {
        "differs": differs,
        "read": read,
        "written": written,
        "tied": model[0].weight is model[1].weight,
    }


# --- what goes wrong ------------------------------------------------------------------------------


def _told(call: Callable[[], object]) -> str:
    """Return which error came."""
    try:
        call()
    except (
        CapacityError,
        CollectiveError,
        ConfigError,
        TransferError,
        ZeroDivisionError,
        RuntimeError,
    ) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@contextmanager
def _looking_late() -> Iterator[None]:
    """Let this rank look for others' failures only when they had time to fail and to leave."""
    look = Collectives._look

    def late(collectives: Collectives) -> None:
        if collectives._under_way[0].op == "the model that was built":
            time.sleep(0.3)
        look(collectives)

    with patch.object(Collectives, "_look", late):
        yield


def build_otherwise(what: str, drive: str) -> dict[str, Any]:
    """Build something else on the last rank, or initialize it otherwise; return what each was
    told.
    """
    rank, size = where()
    last = rank == size - 1

    def body() -> None:
        torch.manual_seed(rank if what == "seed" else 0)
        ranks = {"stage": "alone"} if what == "alone" else {"timeout_s": 20}
        cache = None if what == "more" else 0
        with infinity_engine.init_context(budget=budget(drive), cache=cache, ranks=ranks):
            model = nn.Sequential(*(nn.Linear(100, 100) for _ in range(6)))
            if what == "order":
                nn.init.zeros_(model[0 if last else 1].weight)  # type: ignore[arg-type]
            if what == "more" and last:
                model.append(nn.Linear(50, 50))
        others: dict[str, dict[str, object]] = {"mesh": {"shard_ranks": 1}}
        infinity_engine.initialize(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            budget=budget(drive),
            accelerator="cpu",
            ranks={"timeout_s": 20, **others.get(what, {})},
        ).close()

    with _looking_late() if what in {"seed", "mesh"} and rank == 1 else nullcontext():
        return {"told": _told(body), "left": _left(drive)}


def fail(what: str, drive: str) -> dict[str, Any]:
    """Let the last rank fail in the body; return what each was told, and whether the model can be
    used.
    """
    rank, size = where()
    last = rank == size - 1
    models: list[nn.Module] = []

    def body() -> None:
        place = f"{drive}/none" if what == "no directory" and last else drive
        nvme = "1MiB" if what == "budget" and last else "64MiB"
        with (
            _faulty(
                Requests.WRITES
                if what == "write" and last
                else Requests.READS
                if what == "read" and last
                else None
            ),
            infinity_engine.init_context(
                budget=budget(place, nvme=nvme), cache=0, ranks={"timeout_s": 40}
            ),
        ):
            model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
            models.append(model)
            if what == "raises" and last:
                raise ZeroDivisionError("in its body")
            if what == "killed" and last:
                os.kill(os.getpid(), signal.SIGKILL)
            for module in model:
                nn.init.normal_(module.weight)  # type: ignore[arg-type]

    told = _told(body)
    # called at once
    used = [_told(lambda: model(torch.ones(1, 512))) for model in models]  # noqa: B023
    return {"told": told, "used": used, "left": _left(drive)}


@contextmanager
def _faulty(requests: Requests | None) -> Any:
    """Let swap files' drives fail once, in the middle."""
    if requests is None:
        yield
        return
    plan = FaultPlan().fail(nth=3, requests=requests)
    with patch.object(swapfile, "IOQueue", lambda: IOQueue(faults=plan)):
        yield


def load_otherwise(what: str, folder: str, other: str, drive: str) -> dict[str, Any]:
    """Load from another directory on the last rank, or with a drive that fails; return what each
    was told.
    """
    rank, size = where()
    last = rank == size - 1
    with torch.device("meta"):
        model = wide()

    def body() -> None:
        with _faulty(Requests.READS if what == "read" and last else None):
            infinity_engine.load_into(
                model, other if last else folder, budget(drive), ranks={"timeout_s": 20}
            )

    return {
        "told": _told(body),
        "meta": all(each.is_meta for each in model.parameters()),
        "left": _left(drive),
    }


def _left(drive: str) -> int:
    """Return how many of this process's files there are."""
    gc.collect()
    return sum(str(os.getpid()) in path.name for path in Path(drive).iterdir())


# --- how much it takes ----------------------------------------------------------------------------


def _layers(count: int, width: int = 1024) -> nn.Module:
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(count)))


def measure_building(drive: str, host: str, count: int) -> dict[str, int]:
    """Build so many layers of 4 MiB, in two passes; return by how much this process grew at
    most.
    """

    def body() -> nn.Module:
        with infinity_engine.init_context(budget=budget(drive, host=host, nvme="4GiB")):
            model = _layers(count)
            for each in model.parameters():
                nn.init.uniform_(each)
        return model

    return _measured(body, drive)


def measure_loading(folder: str, drive: str, host: str, count: int) -> dict[str, int]:
    """Load so many layers of 4 MiB; return by how much this process grew at most."""

    def body() -> nn.Module:
        with torch.device("meta"):
            model = _layers(count)
        infinity_engine.load_into(model, folder, budget(drive, host=host, nvme="4GiB"))
        return model

    return _measured(body, drive)


LITTLE_AT_ONCE: Mapping[str, Any] = {
    "ranks": {"bucket_bytes": 1 << 20},
    "subgroup_numel": 1 << 17,
    "calibration": "off",
    "update_threads": 1,
}


def measure_training(
    folder: str | None, drive: str, host: str, count: int, width: int
) -> dict[str, int]:
    """Build so many layers, or load them from a folder, and train them for two steps.

    Return by how much this process grew at most in each part, and how large model, budget and files
    are.
    """

    def body() -> nn.Module:
        if folder is None:
            with infinity_engine.init_context(budget=machine):
                return _layers(count, width)
        with torch.device("meta"):
            model = _layers(count, width)
        infinity_engine.load_into(model, folder, machine)
        return model

    machine = budget(drive, host=host, nvme="8GiB")
    _train_little(drive)
    meter = _Resident()
    model = body()
    found = {"making": meter.rise()}
    engine = infinity_engine.initialize(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        budget=machine,
        accelerator="cpu",
        **LITTLE_AT_ONCE,
    )
    found["initialize"] = meter.rise()
    with engine:
        for step in range(2):
            engine.backward(engine(torch.ones(4, width)).pow(2).mean())
            engine.step()
            found[f"step {step}"] = meter.rise()
        found["limit"] = max(each.limit for each in engine.usage() if each.tier is Tier.HOST)
        found["model"] = sum(each.numel() * each.element_size() for each in model.parameters())
        found["drives"] = sum(each.peak_held for each in engine.usage() if each.tier is Tier.NVME)
    return found


def _train_little(drive: str) -> None:
    """Have torch.distributed, its threads and torch's own of an optimizer and a backward."""
    with infinity_engine.init_context(budget=budget(drive), cache=0):
        model = _layers(2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with infinity_engine.initialize(
        model, optimizer, budget=budget(drive), accelerator="cpu", **LITTLE_AT_ONCE
    ) as engine:
        engine.backward(engine(torch.ones(4, 1024)).pow(2).mean())
        engine.step()


class _Resident:
    """By how much this process has grown since it was made; at most, between two questions."""

    def __init__(self) -> None:
        gc.collect()
        return_freed_memory()
        self._memory = ResidentMemory()
        self._begin()

    def rise(self) -> int:
        peak = self._memory.peak_bytes()
        assert peak is not None
        self._begin()
        return peak - self._memory.baseline_bytes

    def _begin(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")


def _measured(body: Callable[[], nn.Module], drive: str) -> dict[str, int]:
    # torch.distributed and its threads
    with infinity_engine.init_context(budget=budget(drive), cache=0) as first:
        _layers(2)
    first.close()
    resident = _Resident()
    model = body()
    rise = resident.rise()
    built = built_model_of(model)
    assert built is not None
    counted = {each.directory or each.tier.name: each.peak_held for each in built.ledger.usage()}
    limits = {each.directory or each.tier.name: each.limit for each in built.ledger.usage()}
    model_bytes = sum(each.numel() * each.element_size() for each in model.parameters())
    built.close()
    return {
        "rise": rise,
        "host": counted["HOST"],
        "limit": limits["HOST"],
        "drives": sum(nbytes for name, nbytes in counted.items() if name not in {"HOST", "DEVICE"}),
        "model": model_bytes,
    }
