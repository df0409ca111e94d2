"""`Loads`: brings a saved run back into an engine, wherever its states lie now.

What can be refused is refused before anything changes. Each rank reads the slices that it owns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import torch

from deepnvme import IOQueue, Pool
from deepnvme.memory.arrays import ITEMSIZES, Returns, code_of, empty
from infinity_engine.checkpoint import CheckpointDirectory, CheckpointReader, Kind, SavedTensor
from infinity_engine.checkpoint.objects import nbytes_of_objects, objects_file, read_objects
from infinity_engine.engine.checkpoints.checkpointing import (
    Run,
    Stateful,
    check_extra,
    reserve_together,
    set_random_state,
    try_random_state,
)
from infinity_engine.engine.checkpoints.frozen import frozen_checksums
from infinity_engine.errors import (
    CapacityError,
    ConfigError,
    DamagedCheckpoint,
    ManifestMismatch,
)
from infinity_engine.gradients.scaling import LossScale
from infinity_engine.machine.capacity import free_for_copies
from infinity_engine.machine.memory import probe_memory
from infinity_engine.optim import Segment, missing_states, rules_of
from infinity_engine.parameters.parameters import ModelParameter
from infinity_engine.plan import Tier

__all__ = ["Loaded", "Loads", "Overwritten"]

_ALIGNED = 16  # bytes of the largest element
_LEFT_OUT_ADVICE = (
    "The save left out this frozen parameter, so the model has to bring the same values. Build it "
    "on the same base, with the same precision and the same parameters frozen; or load a "
    "checkpoint that was saved with frozen='save'. With strict=False, the other tensors are loaded"
)
# What a state dict of any structure may raise; RuntimeError is of torch's generators.
_STRANGE = (
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """What `Engine.load` found: the checkpoint, and where it differs from the run if not strict."""

    tag: str
    step: int
    missing: tuple[str, ...] = ()
    """Tensors of the model that the checkpoint does not have. They are as they were."""
    unexpected: tuple[str, ...] = ()
    """Tensors of the checkpoint that the model does not have."""
    mismatched: tuple[str, ...] = ()
    """What differs, as name, expected and found: tensors with other shapes or states, frozen
    tensors whose values are not those that the save left out, and other state of the run. All of it
    is as it was."""


class Overwritten(Enum):
    """What a load overwrites."""

    WEIGHTS = "weights"  # masters, frozen parameters and buffers
    STATES = "states"  # moments, step counts and the optimizer's groups


class Loads:
    """Loads checkpoints into one engine. Called between steps, with nothing under way."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.half_loaded: frozenset[Overwritten] = frozenset()
        """What a load had begun to overwrite when it failed, and no later load has overwritten."""

    @contextmanager
    def overwriting(self, *parts: Overwritten) -> Iterator[None]:
        """Overwrite these in the body. Where that fails, they are half loaded."""
        self.half_loaded |= frozenset(parts)
        yield
        # Only where the body succeeded: else the engine refuses to train.
        self.half_loaded -= frozenset(parts)

    def load(
        self,
        path: Path,
        tag: str,
        extra: Mapping[str, Stateful],
        *,
        strict: bool,
        weights_only: bool,
    ) -> Loaded:
        """Bring a run back; see `Engine.load`. A refusal leaves the model as it was."""
        check_extra(extra)
        run, ranks = self._run, self._run.ranks
        found = CheckpointDirectory(path).resolve(tag)
        ranks.agree_on("which checkpoint is loaded", {"checkpoint": str(found.resolve())})
        with ExitStack() as ends:
            memory = reserve_together(run, ends)
            # An engine without drives has no queue.
            queue = run.queue or ends.enter_context(IOQueue())
            pool = Pool(memory.small)
            # Whole elements of any dtype.
            room = pool.buffer(memory.small // _ALIGNED * _ALIGNED)
            opened: list[_Load] = []

            def check() -> None:
                reader = ends.enter_context(
                    CheckpointReader(found, queue=queue, staging_bytes=memory.large)
                )
                load = _Load(run, reader, room, weights_only=weights_only)
                load.check(extra, ranks.rank, strict=strict)
                opened.append(load)

            # Nothing changes before every rank has found all that it needs.
            ranks.on_all("checking the checkpoint", check)
            [load] = opened
            if load.left_out:
                # On all ranks, as they gather what they compare.
                load.check_left_out(frozen_checksums(run, room), strict=strict)
            # Fetched copies would go on showing the old values.
            run.fetcher.give_up()
            parts = (Overwritten.WEIGHTS,) if weights_only else tuple(Overwritten)
            with self.overwriting(*parts):
                ranks.on_all("reading the checkpoint", load.read_trained)
                run.fetcher.changed(known.number for known in run.trained)

                def read_rest() -> None:
                    load.read_others()
                    load.restore(extra, ranks.rank)

                ranks.on_all("restoring the rest of the run", read_rest)
            return load.loaded


class _Load:
    """One load: compares first, then reads."""

    def __init__(
        self, run: Run, reader: CheckpointReader, room: memoryview, *, weights_only: bool
    ) -> None:
        self._run = run
        self._reader = reader
        self._room = room
        self._weights_only = weights_only
        self._wanted: dict[str, SavedTensor] = {}  # by the model's own name
        self.left_out: dict[str, SavedTensor] = {}
        """What the checkpoint has no values of, by the model's own name."""
        self._places = run.places
        self._objects: Mapping[str, Any] = {}
        self._restores: list[str] = []  # of "optimizer_groups" and "schedulers"
        self.loaded = Loaded(tag=reader.manifest.tag, step=reader.manifest.step)

    # --- comparing --------------------------------------------------------------------------------

    def check(self, extra: Mapping[str, Stateful], rank: int, *, strict: bool) -> None:
        """Compare run and checkpoint.

        Raises:
            ManifestMismatch: they differ, and `strict` does not allow that.
        """
        manifest = self._reader.manifest
        # By all of its names: another first name may stand for the same tied tensor.
        saved = {
            name: tensor for tensor in manifest.tensors for name in (tensor.name, *tensor.aliases)
        }
        mine = {tensor.name: tensor for tensor in self._run.saved_tensors()}
        missing: list[str] = []
        mismatched: list[_Difference] = []
        unlike_objects: list[_Difference] = []
        for name, tensor in mine.items():
            found = saved.get(name)
            if found is None:
                # Other libraries do not save what a state dict leaves out.
                if tensor.kind is not Kind.TRANSIENT:
                    missing.append(name)
                continue
            flaw = self._flaw(tensor, found)
            if flaw is not None:
                mismatched.append(flaw)
            elif found.left_out is not None:
                self.left_out[name] = found
            else:
                self._wanted[name] = found
        known = {name for tensor in mine.values() for name in (tensor.name, *tensor.aliases)}
        unexpected = [
            tensor.name
            for tensor in manifest.tensors
            if known.isdisjoint((tensor.name, *tensor.aliases))
        ]
        self._reader.check_slices()
        if not self._weights_only:
            self._check_room_for_objects(rank)
            self._objects = read_objects(self._reader, rank)
            self._check_objects(objects_file(rank))
            unlike_objects += self._unlike_objects(extra)
        # First what names a tensor: with another model, groups of parameters differ as well.
        differences = [
            *mismatched,
            *(_Difference(name, "a tensor of that name", "none") for name in missing),
            *(_Difference(name, "no tensor of that name", "one") for name in unexpected),
            *unlike_objects,
        ]
        self._refuse(differences, strict=strict)
        self.loaded = Loaded(
            tag=manifest.tag,
            step=manifest.step,
            missing=tuple(missing),
            unexpected=tuple(unexpected),
            mismatched=tuple(map(str, [*mismatched, *unlike_objects])),
        )

    def check_left_out(self, checksums: Mapping[str, int], *, strict: bool) -> None:
        """Compare the model's frozen values, by checksum, with those that the save left out.

        Raises:
            ManifestMismatch: they differ, and `strict` does not allow that.
        """
        differences = [
            _Difference(
                name,
                f"values with the checksum {checksums[name]:08x}, as here",
                f"the checksum {saved.left_out:08x}",
                _LEFT_OUT_ADVICE,
            )
            for name, saved in self.left_out.items()
            if checksums[name] != saved.left_out
        ]
        self._refuse(differences, strict=strict)
        mismatched = (*self.loaded.mismatched, *map(str, differences))
        self.loaded = replace(self.loaded, mismatched=mismatched)

    def _refuse(self, differences: Sequence[_Difference], *, strict: bool) -> None:
        if strict and differences:
            name, expected, found, change = differences[0]
            raise ManifestMismatch(
                path=str(self._reader.path),
                entry=name,
                expected=expected,
                found=found,
                change=change,
            )

    def _flaw(self, mine: SavedTensor, saved: SavedTensor) -> _Difference | None:
        """Return why a saved tensor cannot be loaded into one of the model, None where it can."""
        if saved.left_out is not None:
            return _unlike_left_out(mine, saved)
        if saved.shape != mine.shape:
            return _Difference(mine.name, f"shape {mine.shape}", f"shape {saved.shape}")
        trained = not self._weights_only and mine.kind is Kind.TRAINED
        if trained and dict(saved.streams) != dict(mine.streams):
            return _Difference(mine.name, ", ".join(mine.streams), ", ".join(saved.streams))
        # Widths are converted. Floats in a buffer of integers, or in the codes of compact weights,
        # would lose their fractions.
        found = saved.streams.get("value", saved.dtype)
        if _numbers_of(mine.dtype) != _numbers_of(found):
            kind = "buffer" if mine.kind in (Kind.BUFFER, Kind.TRANSIENT) else "parameter"
            return _Difference(mine.name, f"a {kind} of {mine.dtype}", found)
        return None

    def _check_room_for_objects(self, rank: int) -> None:
        """Refuse state dicts that would not fit: the kernel would kill the process.

        Raises:
            CapacityError: their tensors are larger than this rank's part of the free memory.
        """
        free = free_for_copies() // self._run.ranks.neighbours
        nbytes = nbytes_of_objects(self._reader, rank)
        if nbytes > free:
            raise CapacityError(
                tier=Tier.HOST.name,
                asked=nbytes,
                free=free,
                limit=probe_memory().usable_bytes,
                change=f"give the process more memory beside the budget's host for the state dicts "
                f"of {self._reader.path}, or load with weights_only=True, which reads none",
            )

    def _check_objects(self, name: str) -> None:
        """Try state dicts on objects of no consequence, before anything changes.

        Raises:
            DamagedCheckpoint: an engine writes no such state.
        """
        objects = self._objects
        try:
            LossScale(dynamic=True).load_state_dict(objects["loss_scale"])
            # Loaded as they are, such groups would replace the optimizer's parameters.
            if any("params" in group for group in objects.get("optimizer_groups", ())):
                raise ValueError("a group of the optimizer has parameters of its own")
            dict(objects["extra"])
            for group in objects.get("optimizer_groups", ()):
                dict(group)
            list(objects.get("schedulers", ()))
            if "random" in objects:
                try_random_state(objects["random"])
        # A hostile structure may be anything.
        except _STRANGE as flaw:
            raise DamagedCheckpoint(
                path=str(self._reader.path),
                entry=name,
                flaw=f"its state dicts are not as an engine writes them: {flaw!r:.200}",
            ) from None

    def _unlike_objects(self, extra: Mapping[str, Stateful]) -> Iterator[_Difference]:
        """Yield how the optimizer and `extra` differ; note what can be restored."""
        optimizer, run = self._run.optimizer, self._reader.manifest.run
        kind, members = type(optimizer).__name__, self._run.group_members()
        groups = self._objects.get("optimizer_groups")  # some imported checkpoints have none
        # An imported checkpoint may not say what it was of: then nothing differs.
        unlike = [
            _Difference("the optimizer", kind, run.get("optimizer", kind)),
            _Difference(
                "the optimizer's groups of parameters",
                members,
                run.get("optimizer_parameters", members),
            ),
        ]
        if groups is not None:
            number = "the number of the optimizer's groups"
            unlike.insert(0, _Difference(number, len(members), len(groups)))
        differences = [
            difference for difference in unlike if difference.expected != difference.found
        ]
        if groups is not None and not differences:
            differences += self._unlike_options(groups)
        if groups is not None and not differences:
            self._restores.append("optimizer_groups")
        # One says enough: groups of another optimizer differ in all of these.
        yield from differences[:1]
        followed = self._objects.get("schedulers")  # imported and older checkpoints have none
        if followed is not None:
            if len(followed) == len(self._run.schedulers):
                self._restores.append("schedulers")
            else:
                number = "the number of schedulers that the engine steps"
                yield _Difference(number, len(self._run.schedulers), len(followed))
        there = self._objects["extra"]
        for name in sorted(set(extra) ^ set(there)):
            expected, found = ("a state", "none") if name in extra else ("none", "a state")
            yield _Difference(f"extra {name!r}", expected, found)

    def _unlike_options(self, groups: Sequence[Mapping[str, Any]]) -> Iterator[_Difference]:
        """Yield what the options of saved groups need that the engine has no states for."""
        optimizer, there = self._run.optimizer, self._run.states.state_names
        merged = [
            {**group, **saved} for group, saved in zip(optimizer.param_groups, groups, strict=True)
        ]
        try:
            rules = rules_of(optimizer, merged)
        except ConfigError as error:
            yield _Difference("the optimizer's options", error.expected, error.value)
            return
        except (TypeError, ValueError) as error:
            yield _Difference("the optimizer's options", "numbers that a rule computes with", error)
            return
        needed = dict.fromkeys(name for rule in rules for name in missing_states(rule, there))
        if needed:
            yield _Difference("the optimizer's states", list(there), [*there, *needed])

    # --- reading ----------------------------------------------------------------------------------

    def read_trained(self) -> None:
        """Overwrite masters, moments and values of this rank's slices, subgroup by subgroup."""
        run, states = self._run, self._run.states

        def fill(segment: Segment, pieces: Mapping[str, torch.Tensor]) -> None:
            parameter = run.trained[segment.parameter]
            saved, start = self._saved(parameter)
            if saved is None:
                return
            first = start + run.ranks.first_element(parameter.number) + segment.first_element
            for name, piece in pieces.items():
                if name == "master":
                    self._read_weight(saved, first, piece)
                elif not self._weights_only:
                    self._read(saved, name, first, piece)

        states.overwrite_segments(fill)
        for parameter in run.trained:
            saved, _ = self._saved(parameter)
            if saved is not None and not self._weights_only:
                states.set_steps(parameter.number, saved.steps)

    def read_others(self) -> None:
        """Read frozen parameters and buffers."""
        failures: list[Exception] = []
        if any(self._saved(parameter)[0] for parameter in self._run.frozen):
            self._run.checksums.forget()
        for parameter in self._run.frozen:
            saved, start = self._saved(parameter)
            if saved is None or not parameter.parameter.numel():
                continue
            # All ranks gather each of them, so this rank does too after its first failure.
            with self._run.shown(parameter):
                try:
                    if not failures:
                        self._read_frozen(saved, start, parameter)
                except Exception as error:
                    failures.append(error)
        if failures:
            raise failures[0]
        for name, buffer in self._run.model.named_buffers():
            saved = self._wanted.get(name)
            if saved is None or not buffer.numel():
                continue
            values = buffer.detach()
            if values.is_contiguous() and not values.is_conj() and not values.is_neg():
                self._read_weight(saved, 0, values.view(-1))
            else:
                read = torch.empty(buffer.shape, dtype=buffer.dtype)
                self._read_weight(saved, 0, read.view(-1))
                self._overwrite(name, values, read)

    def _saved(self, parameter: ModelParameter) -> tuple[SavedTensor | None, int]:
        """Return the tensor that a parameter is in, if it is wanted, and where it begins there."""
        place = self._places[parameter.number]
        return self._wanted.get(place.names[0]), place.first_element

    def _read_frozen(self, saved: SavedTensor, start: int, parameter: ModelParameter) -> None:
        """Read a parameter that is shown."""
        self._read_weight(saved, start, parameter.parameter.data.reshape(-1))
        # At home as well: it is fetched from there again.
        self._run.fetcher.write_home(parameter.number)
        parameter.note_values()

    def _overwrite(self, name: str, buffer: torch.Tensor, values: torch.Tensor) -> None:
        """Overwrite a buffer whose elements do not follow one another in memory.

        Raises:
            ManifestMismatch: one element of the buffer stands for several that differ.
        """
        for dimension, (size, stride) in enumerate(zip(buffer.shape, buffer.stride(), strict=True)):
            if size == 1 or stride:
                continue
            # An expanded dimension: torch refuses to write one element several times.
            first = values.narrow(dimension, 0, 1)
            bits = (  # those of NaNs too
                part.contiguous().view(torch.uint8) for part in (first.expand_as(values), values)
            )
            if not torch.equal(*bits):
                raise ManifestMismatch(
                    path=str(self._reader.path),
                    entry=name,
                    expected=f"the same along dimension {dimension}, as an expanded buffer is",
                    found="other values",
                )
            buffer, values = buffer.narrow(dimension, 0, 1), first
        buffer.copy_(values)

    def restore(self, extra: Mapping[str, Stateful], rank: int) -> None:
        """Let small state be as it was saved."""
        if self._weights_only:
            return
        objects = self._objects
        for name, stateful in extra.items():
            if name in objects["extra"]:
                stateful.load_state_dict(objects["extra"][name])
        if "optimizer_groups" in self._restores:
            groups = zip(self._run.optimizer.param_groups, objects["optimizer_groups"], strict=True)
            # `saved` has no "params": each group keeps its parameters, and their names.
            for group, saved in groups:
                group.update({key: value for key, value in saved.items() if key != "param_names"})
        if "schedulers" in self._restores:
            for scheduler, state in zip(self._run.schedulers, objects["schedulers"], strict=True):
                scheduler.load_state_dict(state)
        self._run.scale.load_state_dict(objects["loss_scale"])
        # A new rank has rank 0's objects, but random numbers of its own. An imported checkpoint
        # has none.
        if objects_file(rank) in self._reader.manifest.objects and "random" in objects:
            set_random_state(objects["random"])

    def _read_weight(self, saved: SavedTensor, first: int, into: torch.Tensor) -> None:
        """Fill a flat tensor with weights, rounded if need be: masters of what was trained."""
        name = "master" if "master" in saved.streams else "value"
        self._read(saved, name, first, into)

    def _read(self, saved: SavedTensor, name: str, first: int, into: torch.Tensor) -> None:
        """Fill a flat tensor from a stream; through the room, if dtype or device is another."""
        stream = saved.stream(name)
        on_host = into.device.type == "cpu" and into.is_contiguous()
        # No conversion: read straight to where it stays.
        if on_host and code_of(into) == stream.dtype:
            self._reader.read(stream, first, into)
            return
        kind = empty(stream.dtype, (0,), Returns.TORCH).dtype
        step = len(self._room) // ITEMSIZES[stream.dtype]
        room = torch.frombuffer(self._room, dtype=kind)
        for at in range(0, into.numel(), step):
            piece = room[: min(step, into.numel() - at)]
            self._reader.read(stream, first + at, piece)
            into[at : at + piece.numel()].copy_(piece)


class _Difference(NamedTuple):
    """Something in which run and checkpoint differ."""

    name: str
    expected: object
    found: object
    change: str = ManifestMismatch.change

    def __str__(self) -> str:
        """Say what it is."""
        return f"{self.name}: expected {self.expected}, found {self.found}"


def _unlike_left_out(mine: SavedTensor, saved: SavedTensor) -> _Difference | None:
    """Return how a tensor differs from a frozen one that was left out, but for its values."""
    expected, found = (
        f"{tensor.kind.value}, of shape {tensor.shape} in {tensor.dtype}"
        for tensor in (mine, saved)
    )
    return None if expected == found else _Difference(mine.name, expected, found, _LEFT_OUT_ADVICE)


def _numbers_of(code: str) -> tuple[bool, bool, bool]:
    """Return which kind of numbers a dtype has. A conversion to another kind changes them."""
    dtype = empty(code, (0,), Returns.TORCH).dtype
    return (dtype.is_floating_point, dtype.is_complex, dtype is torch.bool)
