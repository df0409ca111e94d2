"""What is saved and loaded of an engine's run, and how its ranks do that together.

Lists tensors and small state; `saving` and `loading` move it. Imports no tier and no strategy.
"""

from __future__ import annotations

import errno
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch

from deepnvme import IOQueue
from deepnvme.closing import Closing
from deepnvme.formats.safetensors import SafetensorsError
from deepnvme.memory.arrays import code_of, described
from infinity_engine.checkpoint import Kind, SavedTensor
from infinity_engine.checkpoint.objects import savable
from infinity_engine.errors import ConfigError, InfinityError, TransferError
from infinity_engine.gradients.scaling import LossScale
from infinity_engine.kept_errors import kept
from infinity_engine.memory import Ledger
from infinity_engine.parameters.parameters import ModelParameter, TrainedParameter
from infinity_engine.parameters.providing import Provider
from infinity_engine.plan import Tier
from infinity_engine.ranks.together import ManyRanks, OneRank
from infinity_engine.telemetry import Telemetry
from infinity_engine.tiling import PlaceInWeight, places_of_tiles
from infinity_engine.update.states import StateKeeper

__all__ = [
    "CheckpointMemory",
    "FrozenChecksums",
    "Run",
    "Stateful",
    "as_transfer",
    "check_extra",
    "random_state",
    "reserve_together",
    "set_random_state",
    "try_random_state",
]

_MOST_BYTES = 32 << 20
_BLOCK_BYTES = 1 << 20  # that a checksum of a checkpoint, or of swapped bytes, covers
_LEAST_BYTES = _BLOCK_BYTES + (128 << 10)  # a block, and a small part beside it


class Stateful(Protocol):
    """Anything that can be saved beside the model: a scheduler, a sampler, a data loader."""

    def state_dict(self) -> Any:
        """Return its state."""

    def load_state_dict(self, state_dict: Any) -> object:
        """Go on from such a state."""


def check_extra(extra: Mapping[str, Stateful]) -> None:
    """Refuse what is not further state by name.

    Raises:
        ConfigError: it is something else, or holds something without a state dict.
    """
    given: object = extra  # whatever the caller passed
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        expected = 'a dict of objects by name, such as {"scheduler": scheduler}'
        raise ConfigError(field="extra", value=extra, expected=expected)
    for name, stateful in extra.items():
        if not all(
            callable(getattr(stateful, do, None)) for do in ("state_dict", "load_state_dict")
        ):
            expected = "an object with state_dict() and load_state_dict()"
            raise ConfigError(field=f"extra[{name!r}]", value=stateful, expected=expected)


class FrozenChecksums:
    """The crc32c of each frozen tensor, by name, until a frozen parameter changes."""

    def __init__(self) -> None:
        self.by_name: Mapping[str, int] = {}
        self._versions: Sequence[int] | None = None

    def keep(self, by_name: Mapping[str, int], frozen: Sequence[ModelParameter]) -> None:
        """Keep these of the values as they are now."""
        self.by_name, self._versions = by_name, _versions_of(frozen)

    def are_current(self, frozen: Sequence[ModelParameter]) -> bool:
        """Tell whether no frozen parameter has changed since `keep`, as far as torch counts it."""
        return self._versions == _versions_of(frozen)

    def forget(self) -> None:
        """Forget them: the engine has changed values, which torch does not count."""
        self._versions = None


def _versions_of(frozen: Sequence[ModelParameter]) -> Sequence[int]:
    # Other code may change a parameter in place that stays where modules compute.
    return [known.parameter._version for known in frozen]


@dataclass(frozen=True, kw_only=True)
class Run:
    """The parts of an engine that are saved."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    trained: Sequence[TrainedParameter]
    frozen: Sequence[ModelParameter]
    states: StateKeeper
    fetcher: Provider
    ranks: OneRank | ManyRanks
    scale: LossScale
    ledger: Ledger
    queue: IOQueue | None  # None where there are no drives
    io_bytes: int
    """The host memory that the queue has reserved for copies."""
    telemetry: Telemetry
    settings: Mapping[str, Any]
    """All settings of the engine, as JSON has them: checkpoints say what the run was."""
    schedulers: list[torch.optim.lr_scheduler.LRScheduler] = field(default_factory=list)
    """Those that the engine steps; more may follow."""
    checksums: FrozenChecksums = field(default_factory=FrozenChecksums)

    def saved_tensors(self, steps_of: Callable[[int], int] = lambda _: 0) -> Iterator[SavedTensor]:
        """Yield what the model has: its parameters in their order, then its buffers.

        Raises:
            TypeError: a buffer cannot be saved.
        """
        places = self.places
        # The tiles of a weight are one tensor.
        by_name: dict[str, list[ModelParameter]] = {}
        for known in (*self.trained, *self.frozen):
            by_name.setdefault(places[known.number].names[0], []).append(known)
        for parts in by_name.values():
            known, place = parts[0], places[parts[0].number]
            dtype = code_of(known.parameter)
            is_trained = isinstance(known, TrainedParameter)
            trained = {"master": "F32", **dict.fromkeys(self.states.state_names, "F32")}
            yield SavedTensor(
                name=place.names[0],
                kind=Kind.TRAINED if is_trained else Kind.FROZEN,
                shape=place.shape,
                dtype=dtype,
                streams=trained if is_trained else {"value": dtype},
                steps=max(steps_of(part.number) for part in parts) if is_trained else 0,
                aliases=place.names[1:],
            )
        kept = {
            f"{prefix}.{name}" if prefix else name
            for prefix, module in self.model.named_modules()
            for name in module._buffers
            if name not in module._non_persistent_buffers_set
        }
        for name, buffer in self.model.named_buffers():
            # Refuses by its name what cannot be saved: sparse, quantized, on "meta", complex128.
            dtype = described(name, buffer, savable).code
            yield SavedTensor(
                name=name,
                kind=Kind.BUFFER if name in kept else Kind.TRANSIENT,
                shape=tuple(buffer.shape),
                dtype=dtype,
                streams={"value": dtype},
            )

    @cached_property
    def places(self) -> Mapping[int, PlaceInWeight]:
        """Where each parameter is in the tensors that are saved, by its number."""
        names: dict[int, list[str]] = {}
        # With tied names: the first names the tensor, the others are its aliases.
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        tiles = places_of_tiles(self.model)
        kinds: dict[tuple[str, ...], set[object]] = {}
        for known in (*self.trained, *self.frozen):
            if id(known.parameter) in tiles:
                kind = isinstance(known, TrainedParameter), known.parameter.dtype
                kinds.setdefault(tiles[id(known.parameter)].names, set()).add(kind)
        places: dict[int, PlaceInWeight] = {}
        for known in (*self.trained, *self.frozen):
            whole = PlaceInWeight(tuple(names[id(known.parameter)]), tuple(known.parameter.shape))
            tile = tiles.get(id(known.parameter), whole)
            # Tiles of which some are frozen have other streams than the rest.
            places[known.number] = whole if len(kinds.get(tile.names, ())) > 1 else tile
        return places

    def has_in_memory(self, parameter: ModelParameter) -> bool:
        """Tell whether this process has a parameter whole in memory, for any thread to read."""
        return self.ranks.is_alone and not parameter.on_drives

    @contextmanager
    def shown(self, parameter: ModelParameter) -> Iterator[None]:
        """Have a parameter's values where modules see them within the body; all ranks do this."""
        with self.fetcher.gathered([parameter.number]):
            yield

    def group_members(self) -> list[list[str]]:
        """Return the names of the parameters in each of the optimizer's groups."""
        places = self.places
        names = {
            id(known.of_model): places[known.number].names[0]
            for known in (*self.trained, *self.frozen)
        }
        return [
            # A parameter that the engine does not know has no name.
            _each_once([names.get(id(parameter), "") for parameter in group["params"]])
            for group in self.optimizer.param_groups
        ]


def _each_once(names: Sequence[str]) -> list[str]:
    """Return the names with one for all tiles of a weight, which are neighbours."""
    return [name for at, name in enumerate(names) if not (name and at and name == names[at - 1])]


class CheckpointMemory(Closing):
    """Memory for one save or load, of what the host's budget has free: 32 MiB at most.

    Where that is too little, half of the `io_bytes` that the queue of the drives has reserved for
    copies: it is `lent` until the engine goes on, as nothing else is under way before. The small
    and the large part together are all of it. The large one has room for a block that a checksum
    covers. A context manager.

    Raises:
        CapacityError: there is not even the least; names what to raise the budget to.
    """

    def __init__(self, ledger: Ledger, io_bytes: int) -> None:
        free = ledger.free(Tier.HOST)
        # Too little is free, and half of what the queue has is enough.
        self.lent = free < _LEAST_BYTES <= io_bytes // 2
        nbytes = min(_MOST_BYTES, io_bytes // 2 if self.lent else max(_LEAST_BYTES, free // 2))
        with ExitStack() as ends:
            if not self.lent:
                reservation = ledger.reserve(Tier.HOST, nbytes, holder="a checkpoint on its way")
                ends.callback(reservation.close)
                reservation.hold(nbytes)
                ends.callback(reservation.release, nbytes)
            self._ends = ends.pop_all()
        # The large part keeps one whole block at least.
        self.small = min(nbytes // 4, nbytes - _BLOCK_BYTES)
        self.large = nbytes - self.small

    def note_ranks(self, *, any_lent: bool) -> None:
        """Count as lent where any rank has lent its own."""
        self.lent = any_lent

    def rooms(self) -> tuple[int, int]:
        """Return into how many rooms of how many bytes the large part is divided: whole blocks."""
        count = 2 if self.large >= 2 * _BLOCK_BYTES else 1
        return count, self.large // count // _BLOCK_BYTES * _BLOCK_BYTES

    def close(self) -> None:
        """Give it back."""
        self._ends.close()


def reserve_together(run: Run, ends: ExitStack) -> CheckpointMemory:
    """Return memory for a save or a load, until `ends` close; where one rank has none, all fail.

    It counts as lent on all ranks where one of them has lent it, as they wait together.

    Raises:
        CapacityError: as `CheckpointMemory`.
        CollectiveError: another rank has no memory for it.
    """
    reserved: list[CheckpointMemory] = []

    def reserve() -> bool:
        reserved.append(ends.enter_context(CheckpointMemory(run.ledger, run.io_bytes)))
        return reserved[0].lent

    lent = run.ranks.on_all("reserving memory for a checkpoint", reserve)
    [memory] = reserved
    memory.note_ranks(any_lent=any(lent))
    return memory


@contextmanager
def as_transfer(path: Path, what: str = "checkpoint") -> Iterator[None]:
    """Raise what the file system refuses as the engine's own error; `what` is at `path`."""
    try:
        yield
    except (InfinityError, SafetensorsError):
        raise
    except OSError as error:
        raise TransferError(
            errno=error.errno or errno.EIO,
            path=str(error.filename or path),
            offset=0,
            asked=0,
            done=0,
            what=f"{what} {path}",
        ) from kept(error)


def random_state() -> dict[str, Any]:
    """Return the state of the random generators: torch on all devices, Python, NumPy."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    # Asking for the state of a device that was never used would initialize it.
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all()
    # Without importing it: a program that does not use NumPy has no state of it.
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        state["numpy"] = (kind, keys, *rest)
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Set the random generators to what `random_state` returned."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    # With another number of GPUs, their generators stay as they are.
    if "cuda" in state and len(state["cuda"]) == devices:
        torch.cuda.set_rng_state_all(state["cuda"])
    if "numpy" in state:
        import numpy as np

        np.random.set_state(tuple(state["numpy"]))


def try_random_state(state: Mapping[str, Any]) -> None:
    """Set generators that no code uses; raises whatever they raise of a state that is none."""
    torch.Generator().set_state(state["torch"])
    random.Random().setstate(state["python"])  # noqa: S311 - no secret
    for of_device in state.get("cuda", ()):
        if not isinstance(of_device, torch.Tensor) or of_device.dtype is not torch.uint8:
            raise TypeError("the state of a GPU's generator is no tensor of bytes")
    if "numpy" in state:
        import numpy as np

        np.random.RandomState().set_state(tuple(state["numpy"]))
