"""`Checkpoints`: saves all of one engine's run, and brings it back, between two steps.

Says which streams and objects a run has, and where they go; the checkpoint package knows files. Of
several ranks, each writes and reads the slices that it owns, and all come to the same calls.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

import torch

from deepnvme import IOQueue
from deepnvme.memory.arrays import ITEMSIZES, Returns, code_of, empty
from infinity_engine.checkpoint import (
    CheckpointDirectory,
    CheckpointReader,
    Kind,
    Manifest,
    SavedFile,
    SavedTensor,
)
from infinity_engine.checkpoint.directory import tag_of_step
from infinity_engine.checkpoint.objects import objects_file, read_objects, write_objects
from infinity_engine.checkpoint.streams import Slice
from infinity_engine.checkpoint.writer import write_shard
from infinity_engine.errors import CheckpointError, CollectiveError, ConfigError, ManifestMismatch
from infinity_engine.gradients.scaling import LossScale
from infinity_engine.memory import Ledger
from infinity_engine.optim import Segment
from infinity_engine.parameters.parameters import ModelParameter, TrainedParameter
from infinity_engine.parameters.providing import Provider
from infinity_engine.plan import Tier
from infinity_engine.ranks.together import ManyRanks
from infinity_engine.update.states import StateKeeper

__all__ = ["Checkpoints", "Loaded", "Run", "Stateful"]

_MOST_STAGING_BYTES, _LEAST_STAGING_BYTES = 32 << 20, 1 << 20
_PIECE_BYTES = 16 << 20  # of what is not trained, on its way through memory of its own


class Stateful(Protocol):
    """Anything that can be saved beside the model: a scheduler, a sampler, a data loader."""

    def state_dict(self) -> Any:
        """Return its state."""

    def load_state_dict(self, state_dict: Any) -> object:
        """Go on from such a state."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """What `Engine.load` found: the checkpoint, and where model and checkpoint differ if it was not
    strict.
    """

    tag: str
    step: int
    missing: tuple[str, ...] = ()
    """Tensors of the model that the checkpoint does not have. They are as they were."""
    unexpected: tuple[str, ...] = ()
    """Tensors of the checkpoint that the model does not have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What of an engine there is to be saved."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    trained: Sequence[TrainedParameter]
    frozen: Sequence[ModelParameter]
    states: StateKeeper
    provider: Provider | None
    whole: ManyRanks | None  # None where there is one rank
    scale: LossScale
    ledger: Ledger
    queue: IOQueue | None


class Checkpoints:
    """The checkpoints of one engine. The engine calls it between steps, with nothing under way."""

    def __init__(self, run: Run) -> None:
        self._run = run

    # --- saving -----------------------------------------------------------------------------------

    def save(
        self,
        path: Path,
        tag: str | None,
        steps: int,
        extra: Mapping[str, Stateful],
        *,
        keep: int | None,
    ) -> str:
        """Save the run as it is; return the tag. See `Engine.save`."""
        if keep is not None and keep < 1:
            raise ConfigError(
                field="keep",
                value=keep,
                expected="how many checkpoints to keep, 1 or more; None: all",
            )
        tag = tag_of_step(steps) if tag is None else tag
        directory = CheckpointDirectory(path)
        self._agree(
            "where the checkpoint is saved", {"path": str(path.resolve()), "tag": tag, "keep": keep}
        )
        with self._staging() as (queue, staging_bytes):
            self._on_rank_0("beginning the checkpoint", lambda: directory.begin(tag))
            try:
                draft = directory.draft_of(tag)
                written = self._on_all(
                    "writing the checkpoint",
                    lambda: self._write(draft, extra, queue, staging_bytes),
                )
                manifest = self._manifest(tag, steps, written)
                self._on_rank_0(
                    "committing the checkpoint", lambda: directory.commit(tag, manifest)
                )
            except BaseException:
                if self._rank == 0:
                    directory.abandon(tag)
                raise
            if keep is not None:
                self._on_rank_0(
                    "retiring checkpoints", lambda: _retire(directory, tag, keep, queue)
                )
        return tag

    def _write(
        self, draft: Path, extra: Mapping[str, Stateful], queue: IOQueue, staging_bytes: int
    ) -> dict[str, Any]:
        """Write what this rank has; return what the manifest says of it."""
        if not draft.is_dir():
            raise ConfigError(
                field="path",
                value=str(draft.parent),
                expected="a directory that all ranks share: rank 0 has begun a checkpoint there, "
                "this rank sees none",
            )
        files = list(
            write_shard(
                draft, self._rank, _Streams(self._run), queue=queue, staging_bytes=staging_bytes
            )
        )
        structure, file = write_objects(
            draft, self._rank, self._objects(extra), queue=queue, staging_bytes=staging_bytes
        )
        return {
            "files": [
                [saved.name, saved.nbytes, list(saved.checksums)] for saved in (*files, file)
            ],
            "objects": structure,
        }

    def _manifest(self, tag: str, steps: int, written: Sequence[Mapping[str, Any]]) -> Manifest:
        return Manifest(
            tag=tag,
            step=steps,
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            ranks=len(written),
            tensors=tuple(_saved_tensors(self._run, steps_of=self._steps_of())),
            files=tuple(
                SavedFile(name=name, nbytes=nbytes, checksums=tuple(checksums))
                for rank in written
                for name, nbytes, checksums in rank["files"]
            ),
            run={
                "infinity_engine": _version("infinity-engine"),
                "torch": torch.__version__,
                "optimizer": type(self._run.optimizer).__name__,
                "loss_scale": self._run.scale.value,
            },
            objects={objects_file(rank): said["objects"] for rank, said in enumerate(written)},
        )

    def _steps_of(self) -> Callable[[int], int]:
        """Return how often each parameter was updated; a rank that owns none of it does not know by
        itself.
        """
        mine = [self._run.states.steps_of(parameter.number) for parameter in self._run.trained]
        if self._run.whole is None:
            return mine.__getitem__
        said = self._run.whole.ranks.tell("updates of each parameter", mine)
        return [max(steps) for steps in zip(*said, strict=True)].__getitem__

    def _objects(self, extra: Mapping[str, Stateful]) -> dict[str, Any]:
        scale = self._run.scale
        groups = [
            {name: value for name, value in group.items() if name != "params"}
            for group in self._run.optimizer.param_groups
        ]
        return {
            "loss_scale": scale.state_dict(),
            "optimizer_groups": groups,
            "random": _random_state(),
            "extra": {name: thing.state_dict() for name, thing in extra.items()},
        }

    # --- loading ----------------------------------------------------------------------------------

    def load(
        self,
        path: Path,
        tag: str,
        extra: Mapping[str, Stateful],
        *,
        strict: bool,
        weights_only: bool,
        begin: Callable[[], None],
    ) -> Loaded:
        """Bring a run back; see `Engine.load`.

        What can be refused is refused before `begin` is called.
        """
        found = CheckpointDirectory(path).resolve(tag)
        self._agree("which checkpoint is loaded", {"checkpoint": str(found.resolve())})
        with (
            self._staging() as (queue, staging_bytes),
            CheckpointReader(found, queue=queue, staging_bytes=staging_bytes) as reader,
        ):
            loaded, wanted = self._compare(reader, strict=strict, weights_only=weights_only)
            reader.check_slices()
            objects = None if weights_only else read_objects(reader, self._rank)
            if objects is not None:
                self._check_objects(reader, objects, extra, strict=strict)
            if self._run.provider is not None:
                self._run.provider.give_up()
            begin()
            self._on_all(
                "reading the checkpoint",
                lambda: self._read_trained(reader, wanted, weights_only=weights_only),
            )
            if self._run.provider is not None:
                self._run.provider.changed(parameter.number for parameter in self._run.trained)
            self._read_others(reader, wanted)
            if objects is not None:
                self._restore(objects, extra, reader.manifest.ranks)
        return loaded

    def _compare(
        self, reader: CheckpointReader, *, strict: bool, weights_only: bool
    ) -> tuple[Loaded, Mapping[str, SavedTensor]]:
        """Return how model and checkpoint differ, and the tensors of the checkpoint that are
        loaded, by name.

        Raises:
            ManifestMismatch: they differ, and that was not allowed.
        """
        saved = {
            name: tensor
            for tensor in reader.manifest.tensors
            for name in (tensor.name, *tensor.aliases)
        }
        mine = {tensor.name: tensor for tensor in _saved_tensors(self._run, steps_of=lambda _: 0)}
        wanted: dict[str, SavedTensor] = {}
        missing: list[str] = []
        for name, tensor in mine.items():
            found = saved.get(name)
            flaw = _mismatch(tensor, found, weights_only=weights_only)
            if flaw is None and found is not None:
                wanted[name] = found
            elif strict:
                expected, seen = flaw or ("a tensor", "none of that name")
                raise ManifestMismatch(
                    path=str(reader.path), entry=name, expected=expected, found=seen
                )
            else:
                missing.append(name)
        unexpected = [
            tensor.name
            for tensor in reader.manifest.tensors
            if mine.keys().isdisjoint((tensor.name, *tensor.aliases))
        ]
        if strict and unexpected:
            raise ManifestMismatch(
                path=str(reader.path),
                entry=unexpected[0],
                expected="no tensor of that name",
                found="one",
            )
        manifest = reader.manifest
        return Loaded(
            tag=manifest.tag,
            step=manifest.step,
            missing=tuple(missing),
            unexpected=tuple(unexpected),
        ), wanted

    def _check_objects(
        self,
        reader: CheckpointReader,
        objects: Mapping[str, Any],
        extra: Mapping[str, Stateful],
        *,
        strict: bool,
    ) -> None:
        groups = len(self._run.optimizer.param_groups)
        if len(objects["optimizer_groups"]) != groups:
            raise ManifestMismatch(
                path=str(reader.path),
                entry="the optimizer's groups",
                expected=groups,
                found=len(objects["optimizer_groups"]),
            )
        unlike = sorted(set(extra) ^ set(objects["extra"]))
        if strict and unlike:
            raise ManifestMismatch(
                path=str(reader.path),
                entry="extra",
                expected=sorted(extra),
                found=sorted(objects["extra"]),
            )

    def _read_trained(
        self, reader: CheckpointReader, wanted: Mapping[str, SavedTensor], *, weights_only: bool
    ) -> None:
        """Overwrite masters, moments and values of this rank's slices, one subgroup after
        another.
        """
        states = self._run.states

        def fill(
            segment: Segment, pieces: Mapping[str, torch.Tensor], values: torch.Tensor | None
        ) -> None:
            parameter = self._run.trained[segment.parameter]
            saved = wanted.get(parameter.name)
            if saved is None:
                return
            first = _first_element(self._run, parameter.number) + segment.first_element
            for name, piece in pieces.items():
                if name == "master":
                    _read_weight(reader, saved, first, piece)
                elif not weights_only:
                    _read_into(reader, saved, name, first, piece)
            if values is not None:
                values.copy_(pieces["master"])

        states.overwrite_segments(fill)
        for parameter in self._run.trained:
            saved = wanted.get(parameter.name)
            if saved is not None and not weights_only:
                states.set_steps(parameter.number, saved.steps)

    def _read_others(self, reader: CheckpointReader, wanted: Mapping[str, SavedTensor]) -> None:
        """Read frozen parameters and buffers."""
        provider = self._run.provider
        for parameter in self._run.frozen:
            saved = wanted.get(parameter.name)
            if saved is None or not parameter.parameter.numel():
                continue
            with _shown(provider, parameter):
                _read_weight(reader, saved, 0, parameter.parameter.data.reshape(-1))
                if provider is not None:
                    provider.write_home(parameter.number)
                parameter.note_values()
        for name, buffer in self._run.model.named_buffers():
            saved = wanted.get(name)
            if saved is not None and buffer.numel():
                with torch.no_grad():
                    flat = torch.empty(buffer.numel(), dtype=buffer.dtype)
                    _read_weight(reader, saved, 0, flat)
                    buffer.copy_(flat.view(buffer.shape))

    def _restore(
        self, objects: Mapping[str, Any], extra: Mapping[str, Stateful], saved_ranks: int
    ) -> None:
        for name, thing in extra.items():
            if name in objects["extra"]:
                thing.load_state_dict(objects["extra"][name])
        for group, saved in zip(
            self._run.optimizer.param_groups, objects["optimizer_groups"], strict=True
        ):
            group.update(saved)
        self._run.scale.load_state_dict(objects["loss_scale"])
        # else the rank is a new one, and the random numbers of rank 0 are not its own
        if self._rank < saved_ranks:
            _set_random_state(objects["random"])

    # --- ranks and memory -------------------------------------------------------------------------

    @property
    def _rank(self) -> int:
        return 0 if self._run.whole is None else self._run.whole.ranks.rank

    def _agree(self, what: str, said: Mapping[str, object]) -> None:
        if self._run.whole is not None:
            self._run.whole.ranks.agree_on(what, said)

    def _on_rank_0(self, what: str, act: Callable[[], object]) -> None:
        """Let rank 0 do something; where it fails, all ranks do."""
        self._on_all(what, act if self._rank == 0 else lambda: None)

    def _on_all(self, what: str, act: Callable[[], Any]) -> list[Any]:
        """Let all ranks do something, and return what each returned; where one fails, all do.

        Raises:
            CollectiveError: another rank failed.
        """
        failed: Exception | None = None
        done: Any = None
        try:
            done = act()
        except Exception as error:
            failed = error
        if self._run.whole is None:
            if failed is not None:
                raise failed
            return [done]
        said = self._run.whole.ranks.tell(
            what,
            {
                "failed": None if failed is None else str(failed),
                "done": done if _is_json(done) else None,
            },
        )
        if failed is not None:
            raise failed
        for rank, answer in enumerate(said):
            if answer["failed"] is not None:
                raise CollectiveError(
                    group="all ranks",
                    rank=self._rank,
                    op=what,
                    reason=f"rank {rank} failed: {answer['failed']}",
                )
        return [answer["done"] for answer in said]

    @contextmanager
    def _staging(self) -> Iterator[tuple[IOQueue, int]]:
        """Have a queue, and staging memory within what the host's budget has free."""
        ledger = self._run.ledger
        with ExitStack() as ends:
            nbytes = max(
                _LEAST_STAGING_BYTES, min(_MOST_STAGING_BYTES, ledger.free(Tier.HOST) // 2)
            )
            if nbytes <= ledger.free(Tier.HOST):
                reservation = ends.enter_context(
                    ledger.reserve(Tier.HOST, nbytes, holder="staging of checkpoints")
                )
                reservation.hold(nbytes)
                ends.callback(reservation.release, nbytes)
            yield self._run.queue or ends.enter_context(IOQueue()), nbytes


class _Streams:
    """The streams of this rank, for the writer."""

    def __init__(self, run: Run) -> None:
        self._run = run
        steps = {tensor.name: tensor for tensor in _saved_tensors(run, steps_of=lambda _: 0)}
        self._tensors: Mapping[str, SavedTensor] = steps
        self._is_first = run.whole is None or run.whole.ranks.rank == 0

    def slices(self) -> list[Slice]:
        found = []
        if self._has_states:
            for segment in self._run.states.segments():
                parameter = self._run.trained[segment.parameter]
                tensor = self._tensors[parameter.name]
                first = _first_element(self._run, parameter.number) + segment.first_element
                found += [
                    Slice(tensor.stream(name), first, segment.numel) for name in tensor.streams
                ]
        if self._is_first:
            for name, numel in self._others():
                stream = self._tensors[name].stream("value")
                step = _PIECE_BYTES // self._others_itemsize(name)
                found += [
                    Slice(stream, first, min(step, numel - first))
                    for first in range(0, numel, step)
                ]
        return found

    @property
    def _has_states(self) -> bool:
        """Whether this rank's states are not another one's as well: of replicas, the first
        writes.
        """
        whole = self._run.whole
        return whole is None or whole.ranks.rank < whole.ranks.shards.size

    def _others(self) -> Iterator[tuple[str, int]]:
        """Yield the names and sizes of what is not trained."""
        for parameter in self._run.frozen:
            yield parameter.name, parameter.parameter.numel()
        for name, buffer in self._run.model.named_buffers():
            yield name, buffer.numel()

    def _others_itemsize(self, name: str) -> int:
        return ITEMSIZES[self._tensors[name].dtype]

    def hand_out(self, take: Callable[[Slice, memoryview], None]) -> None:
        slices = iter(self.slices())

        def show(_: Segment, pieces: Mapping[str, torch.Tensor]) -> None:
            for piece in pieces.values():
                take(next(slices), _bytes_of(piece))

        if self._has_states:
            self._run.states.read_segments(show)
        for tensor in self._shown_others():
            if self._is_first:
                flat = tensor.detach().reshape(-1)
                step = _PIECE_BYTES // flat.element_size()
                for first in range(0, flat.numel(), step):
                    take(next(slices), _bytes_of(flat[first : first + step]))

    def _shown_others(self) -> Iterator[torch.Tensor]:
        """Yield what is not trained, whole; all ranks take part."""
        for parameter in self._run.frozen:
            with _shown(self._run.provider, parameter):
                yield parameter.parameter.data
        for _, buffer in self._run.model.named_buffers():
            yield buffer


@contextmanager
def _shown(provider: Provider | None, parameter: ModelParameter) -> Iterator[None]:
    """Have a parameter's values where modules see them within the body."""
    if provider is None:
        yield
        return
    with provider.gathered([parameter.number]):
        yield


def _saved_tensors(run: Run, *, steps_of: Callable[[int], int]) -> Iterator[SavedTensor]:
    """Yield what the model has: its parameters in their order, then its buffers."""
    names: dict[int, list[str]] = {}
    for name, parameter in run.model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for known in (*run.trained, *run.frozen):
        first, *aliases = names[id(known.parameter)]
        dtype = code_of(known.parameter)
        is_trained = isinstance(known, TrainedParameter)
        trained = {"master": "F32", **dict.fromkeys(run.states.state_names, "F32")}
        yield SavedTensor(
            name=first,
            kind=Kind.TRAINED if is_trained else Kind.FROZEN,
            shape=tuple(known.parameter.shape),
            dtype=dtype,
            streams=trained if is_trained else {"value": dtype},
            steps=steps_of(known.number) if is_trained else 0,
            aliases=tuple(aliases),
        )
    kept = _persistent_buffers(run.model)
    for name, buffer in run.model.named_buffers():
        yield SavedTensor(
            name=name,
            kind=Kind.BUFFER if name in kept else Kind.TRANSIENT,
            shape=tuple(buffer.shape),
            dtype=code_of(buffer),
            streams={"value": code_of(buffer)},
        )


def _persistent_buffers(model: torch.nn.Module) -> set[str]:
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in module._buffers
        if name not in module._non_persistent_buffers_set
    }


def _mismatch(
    mine: SavedTensor, saved: SavedTensor | None, *, weights_only: bool
) -> tuple[str, str] | None:
    """Return what was expected and what was found, where a saved tensor cannot be loaded into one
    of the model.
    """
    if saved is None:
        return ("a tensor of that name", "none")
    if saved.shape != mine.shape:
        return (f"shape {mine.shape}", f"shape {saved.shape}")
    if not weights_only and mine.kind is Kind.TRAINED and dict(saved.streams) != dict(mine.streams):
        return (", ".join(mine.streams), ", ".join(saved.streams))
    return None


def _first_element(run: Run, number: int) -> int:
    """Return where this rank's shard of a trained parameter begins."""
    if run.whole is None:
        return 0
    return run.whole.cut.specs[number].shards[run.whole.ranks.shards.rank].first_element


def _read_weight(
    reader: CheckpointReader, saved: SavedTensor, first: int, into: torch.Tensor
) -> None:
    """Fill a flat tensor with weights: masters of what was trained, values of what was not; rounded
    if need be.
    """
    _read_into(reader, saved, "master" if "master" in saved.streams else "value", first, into)


def _read_into(
    reader: CheckpointReader, saved: SavedTensor, name: str, first: int, into: torch.Tensor
) -> None:
    """Fill a flat tensor with elements of a stream; by way of pieces, where it has another dtype or
    device.
    """
    stream = saved.stream(name)
    if into.device.type == "cpu" and code_of(into) == stream.dtype and into.is_contiguous():
        reader.read(stream, first, into)
        return
    step = _PIECE_BYTES // ITEMSIZES[stream.dtype]
    for at in range(0, into.numel(), step):
        piece = empty(stream.dtype, (min(step, into.numel() - at),), Returns.TORCH)
        reader.read(stream, first + at, piece)
        into[at : at + piece.numel()].copy_(piece)


def _bytes_of(piece: torch.Tensor) -> memoryview:
    """Return the bytes of a flat tensor, copied from a device if it is there."""
    return piece.detach().cpu().contiguous().view(torch.uint8).numpy().data


def _retire(directory: CheckpointDirectory, tag: str, keep: int, queue: IOQueue) -> None:
    """Remove old checkpoints, after the new one was read back."""
    with CheckpointReader(directory.resolve(tag), queue=queue) as reader:
        damage = next(reader.verify(), None)
    if damage is not None:
        raise CheckpointError(path=str(directory.path / tag))
    directory.retire(keep)


def _random_state() -> dict[str, Any]:
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    # torch is
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        state["numpy"] = (kind, keys, *rest)
    return state


def _set_random_state(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if (
        "cuda" in state
        and torch.cuda.is_available()
        and len(state["cuda"]) == torch.cuda.device_count()
    ):
        torch.cuda.set_rng_state_all(state["cuda"])
    if "numpy" in state:
        import numpy as np

        np.random.set_state(tuple(state["numpy"]))


def _is_json(value: object) -> bool:
    return value is None or isinstance(value, dict | list | str | int | float)


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "unknown"
