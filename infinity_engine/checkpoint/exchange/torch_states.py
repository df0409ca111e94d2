"""Reads what plain PyTorch saved: state dicts of a model and an optimizer, in a file or in DCP.

Finds which of its dicts is the model's and which the optimizer's, and which state belongs to which
parameter. Where that cannot be known, it refuses and says what to pass. Executes nothing of the
file, and imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepnvme.volume.framing import shown
from infinity_engine.checkpoint.exchange.found import (
    HYPERPARAMETERS,
    Block,
    ForeignCheckpoint,
    number_in,
    step_count,
)
from infinity_engine.checkpoint.exchange.torch_files import OpenFiles, SavedArray, TorchFile
from infinity_engine.checkpoint.manifest import Kind, SavedTensor
from infinity_engine.checkpoint.rounding import FLOATS
from infinity_engine.errors import UnsupportedCheckpoint

__all__ = ["WholeTensor", "checkpoint_of", "open_torch"]

_MODEL_KEYS = ("model", "module", "model_state_dict", "state_dict", "model_state")
_WRAPPERS = ("module.", "_orig_mod.")  # of DistributedDataParallel and torch.compile
# How deep dicts are searched for those of the model and the optimizer.
_MOST_DEPTH = 4


@dataclass(frozen=True, slots=True)
class WholeTensor:
    """A tensor that lies in one or several blocks."""

    dtype: str
    shape: tuple[int, ...]
    blocks: tuple[Block, ...]


def open_torch(
    path: Path, files: OpenFiles, *, names: Sequence[str] | None = None
) -> ForeignCheckpoint:
    """Return what a file of torch.save holds.

    `names` are the optimizer's parameters in its order, for one that knows them by number.

    Raises:
        UnsupportedCheckpoint: it has no state dict of a model, or does not say which state belongs
            to which parameter.
        DamagedCheckpoint: it is no file of torch.save.
    """
    file = TorchFile(files, path)
    content = file.content()
    try:
        return checkpoint_of(path, "torch.save", content, names=names)
    # A pickle may hold any structure: each of these errors means that a field is missing or
    # strange.
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as flaw:
        raise file.flaw(f"its state dicts are not as torch makes them: {flaw!r:.200}") from None


def checkpoint_of(
    path: Path, format_: str, content: Any, *, names: Sequence[str] | None = None
) -> ForeignCheckpoint:
    """Return what nested dicts hold: see open_torch."""
    return _TorchReading(path, format_, names).checkpoint(content)


class _TorchReading:
    """One file that is being read."""

    def __init__(self, path: Path, format_: str, names: Sequence[str] | None) -> None:
        self._path = path
        self._format = format_
        self._names = names
        self._left: list[str] = []

    def checkpoint(self, content: Any) -> ForeignCheckpoint:
        dicts = dict(_dicts_in(content, ()))
        optimizers = {where: found for where, found in dicts.items() if _is_optimizer(found)}
        if len(optimizers) > 1:
            where = ", ".join(sorted(map(_shown_path, optimizers)))
            raise self._unsupported(
                f"it has several optimizers: {where}", "save a checkpoint with one of them"
            )
        optimizer_at = next(iter(optimizers), None)
        model_at = self._model_at(dicts, optimizer_at)
        model = self._unwrapped(dicts[model_at])
        optimizer = {} if optimizer_at is None else optimizers[optimizer_at]
        state_of, groups = self._owners(model, optimizer)
        self._note_others(content, model_at, optimizer_at)
        blocks: dict[tuple[str, str], tuple[Block, ...]] = {}
        tensors = tuple(self._tensors(model, state_of, blocks))
        return ForeignCheckpoint(
            path=str(self._path),
            format=self._format,
            step=max((tensor.steps for tensor in tensors), default=0),
            tensors=tensors,
            blocks=blocks,
            groups=groups,
            left_behind=tuple(dict.fromkeys(self._left)),
        )

    # --- the model --------------------------------------------------------------------------------

    def _model_at(
        self, dicts: Mapping[tuple[str, ...], Any], optimizer_at: tuple[str, ...] | None
    ) -> tuple[str, ...]:
        """Return where the model's state dict is: the dict of tensors that is no optimizer's."""
        counts = {
            where: sum(_is_tensor(value) for value in found.values())
            for where, found in dicts.items()
            if optimizer_at is None
            or where[: len(optimizer_at)] != optimizer_at
            or not optimizer_at
        }
        candidates = [where for where, count in counts.items() if count]
        # A well-known name decides where several dicts hold tensors.
        named = [where for where in candidates if where and where[-1] in _MODEL_KEYS]
        chosen = named if named else candidates
        if len(chosen) != 1:
            found = ", ".join(sorted(map(_shown_path, chosen))) or "none"
            raise self._unsupported(
                f"expected one dict of tensors, or one called {_MODEL_KEYS[0]}; it has {found}",
                'save {"model": model.state_dict(), "optimizer": optimizer.state_dict()}',
            )
        return chosen[0]

    def _unwrapped(self, model: Mapping[Any, Any]) -> dict[str, WholeTensor]:
        found: dict[str, WholeTensor] = {}
        for name, value in model.items():
            if isinstance(name, str) and _is_tensor(value):
                found[name] = _whole(value)
            else:
                self._left.append(f"{shown(name)} of the model's state dict: it is no tensor")
        for prefix in _WRAPPERS:
            # Only where every name begins so: a model may have a module of this name.
            if found and all(name.startswith(prefix) for name in found):
                found = {name.removeprefix(prefix): value for name, value in found.items()}
        return found

    def _tensors(
        self,
        model: Mapping[str, WholeTensor],
        state_of: Mapping[str, Mapping[str, Any]],
        blocks: dict[tuple[str, str], tuple[Block, ...]],
    ) -> Iterator[SavedTensor]:
        """Yield what the model has, tied names once, and note the blocks of their streams."""
        # Tied weights have the same bytes of the file.
        aliases: dict[object, list[str]] = {}
        for name, tensor in model.items():
            aliases.setdefault(_identity(tensor), []).append(name)
        # Of all parameters together: one without a state of its own has these streams too, all
        # zeros.
        moments = _moments(model, state_of)
        for names in aliases.values():
            # The optimizer has a tied weight under one of its names, not always the first.
            owner = next((name for name in names if name in state_of), names[0])
            first, others = names[0], tuple(names[1:])
            tensor, state = model[owner], state_of.get(owner)
            if state is None:
                blocks[first, "value"] = tensor.blocks
                yield SavedTensor(
                    name=first,
                    kind=Kind.FROZEN,
                    shape=tensor.shape,
                    dtype=tensor.dtype,
                    streams={"value": tensor.dtype},
                    aliases=others,
                )
                continue
            blocks[first, "master"] = tensor.blocks
            for key in moments:
                if key in state:
                    blocks[first, key] = _whole(state[key]).blocks
            self._note_state(first, state, moments)
            yield SavedTensor(
                name=first,
                kind=Kind.TRAINED,
                shape=tensor.shape,
                dtype=tensor.dtype,
                streams=dict.fromkeys(("master", *moments), "F32"),
                steps=step_count(state.get("step")) or 0,
                aliases=others,
            )

    def _note_state(self, name: str, state: Mapping[str, Any], moments: Sequence[str]) -> None:
        for key, value in state.items():
            if key not in ("step", *moments) and value is not None:
                self._left.append(
                    f"{key} of the state of {name}: it is not one value for each element"
                )

    # --- the optimizer ----------------------------------------------------------------------------

    def _owners(
        self, model: Mapping[str, WholeTensor], optimizer: Mapping[str, Any]
    ) -> tuple[Mapping[str, Mapping[str, Any]], Sequence[Mapping[str, Any]]]:
        """Return the optimizer's state of each parameter by name, and the options of its groups."""
        if not optimizer:
            self._left.append("an optimizer: there is none in it; load with weights_only=True")
            return {}, ()
        groups = [
            group for group in _listed(optimizer.get("param_groups", ())) if isinstance(group, dict)
        ]
        # DCP writes the keys of a dict as texts, numbers too.
        state = {
            _as_id(key): value
            for key, value in optimizer["state"].items()
            if isinstance(value, dict)
        }
        ids = [_as_id(number) for group in groups for number in _listed(group.get("params", ()))]
        ids = ids or list(state)  # groups may have been left out of the checkpoint
        names = self._names_of(ids, groups, model, state)
        missing = [name for name in names if name not in model]
        if missing:
            raise self._unsupported(
                f"its optimizer has a parameter {shown(missing[0])} that its model does not have",
                "check the names that you passed",
            )
        fresh = [name for number, name in zip(ids, names, strict=True) if not state.get(number)]
        if state and fresh:
            self._left.append(f"states of {', '.join(fresh[:5])}: they have none, and begin anew")
        if not groups:
            self._left.append("the options of the optimizer's groups: it does not have them")
        state_of = {
            name: self._with_step(state.get(number, {}), groups)
            for number, name in zip(ids, names, strict=True)
        }
        return state_of, [self._hyperparameters(group) for group in groups]

    def _names_of(
        self,
        ids: Sequence[object],
        groups: Sequence[Mapping[str, Any]],
        model: Mapping[str, WholeTensor],
        state: Mapping[object, Mapping[str, Any]],
    ) -> list[str]:
        """Return the names of the optimizer's parameters, in its order."""
        known = [name for group in groups for name in _listed(group.get("param_names", ()))]
        # What the caller passed comes first, then what the groups say, then ids that are names.
        for given in (self._names, known, ids):
            if given and len(given) == len(ids) and all(isinstance(name, str) for name in given):
                return [self._name_in(model, str(name)) for name in given]
        if self._names is not None:
            raise self._unsupported(
                f"{len(self._names)} names were passed, its optimizer has {len(ids)} parameters",
                "pass the name of each parameter of the optimizer, in its order",
            )
        # Several groups may have the parameters in another order than the model.
        guessed = _in_order(ids, model, state) if len(groups) == 1 else None
        if guessed is None:
            raise self._unsupported(
                "its optimizer numbers its parameters, and their shapes do not say which is which",
                "pass --names FILE: the optimizer's parameters, one name a line, in its order",
            )
        return guessed

    @staticmethod
    def _name_in(model: Mapping[str, WholeTensor], name: str) -> str:
        """Return the name of a parameter as the model has it, without what wraps it."""
        for prefix in _WRAPPERS:
            if name not in model and name.removeprefix(prefix) in model:
                return name.removeprefix(prefix)
        return name

    @staticmethod
    def _with_step(
        state: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]
    ) -> Mapping[str, Any]:
        shared = groups[0].get("step") if groups else None
        return (
            {**state, "step": shared}
            if "step" not in state and shared is not None and state
            else state
        )

    def _hyperparameters(self, group: Mapping[str, Any]) -> dict[str, Any]:
        kept: dict[str, Any] = {}
        for name in HYPERPARAMETERS:
            if name not in group:
                continue
            value = _plain_number(group[name])
            if value is None:
                self._left.append(f"{name} of the optimizer's groups: it is no number")
            else:
                kept[name] = value
        return kept

    # --- the rest ---------------------------------------------------------------------------------

    def _note_others(
        self, content: Any, model_at: tuple[str, ...], optimizer_at: tuple[str, ...] | None
    ) -> None:
        if model_at:
            roots = {where[0] for where in (model_at, optimizer_at) if where}
            for name in content:
                if name not in roots:
                    self._left.append(f"{shown(name)}: an object of your program; load it there")
        self._left.append("the random generators: they are not among what is read here")

    def _unsupported(self, flaw: str, change: str) -> UnsupportedCheckpoint:
        return UnsupportedCheckpoint(
            path=str(self._path), entry="its content", flaw=flaw, change=change
        )


def _dicts_in(
    content: Any, where: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], Mapping[Any, Any]]]:
    """Yield the dicts near the root, but none inside an optimizer's."""
    if not isinstance(content, dict) or len(where) > _MOST_DEPTH:
        return
    yield where, content
    if _is_optimizer(content):
        return
    for name, value in content.items():
        yield from _dicts_in(value, (*where, str(name)))


def _is_optimizer(found: Mapping[Any, Any]) -> bool:
    return (
        isinstance(found.get("state"), dict)
        and not _is_tensor(found.get("param_groups", ()))
        and (
            "param_groups" in found
            or all(isinstance(value, dict) for value in found["state"].values())
        )
    )


def _is_tensor(value: object) -> bool:
    return isinstance(value, SavedArray | WholeTensor)


def _moments(
    model: Mapping[str, WholeTensor], state_of: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    """Return the names of the moments: tensors with a value for each element of a parameter.

    Where a parameter has no dimensions, a moment looks like a number. It is one of these where
    parameters with dimensions have a number of that name as well, such as `mu_product` of NAdam.
    """
    moments: set[str] = set()
    of_scalars: set[str] = set()
    numbers: set[str] = set()
    for name, state in state_of.items():
        for key, value in state.items():
            if key == "step" or not _is_tensor(value) or _whole(value).dtype not in FLOATS:
                continue
            if _whole(value).shape:
                moments.add(key)
            elif model[name].shape:
                numbers.add(key)
            else:
                of_scalars.add(key)
    return sorted(moments | (of_scalars - numbers))


def _whole(value: Any) -> WholeTensor:
    if isinstance(value, WholeTensor):
        return value
    return WholeTensor(value.dtype, value.shape, (Block(value, (0,) * len(value.shape)),))


def _identity(tensor: WholeTensor) -> object:
    """Return what is the same for two names of one tensor."""
    # Tensors without elements may all begin at one byte.
    if not math.prod(tensor.shape):
        return id(tensor)
    places = [(block.array.place, block.array.strides, block.offsets) for block in tensor.blocks]
    return tuple(places), tensor.shape


def _in_order(
    ids: Sequence[object],
    model: Mapping[str, WholeTensor],
    state: Mapping[object, Mapping[str, Any]],
) -> list[str] | None:
    """Return names if the optimizer has all of the model's tensors in order, as shapes tell."""
    distinct: dict[object, str] = {}
    for name, tensor in model.items():
        distinct.setdefault(_identity(tensor), name)
    names = list(distinct.values())
    if len(names) != len(ids):
        return None
    for number, name in zip(ids, names, strict=True):
        shapes = [
            _whole(value).shape
            for key, value in state.get(number, {}).items()
            if key != "step" and _is_tensor(value) and _whole(value).dtype in FLOATS
        ]
        # One without dimensions may be a number of the whole parameter.
        if any(shape and shape != model[name].shape for shape in shapes):
            return None
    return names


def _as_id(key: object) -> object:
    return int(key) if isinstance(key, str) and key.isdecimal() else key


def _listed(value: Any) -> Sequence[Any]:
    return list(value.values()) if isinstance(value, dict) else list(value)


def _plain_number(value: Any) -> Any:
    """Return a number, a truth value or a tuple of numbers; None for anything else."""
    if type(value) is bool:
        return value
    if isinstance(value, list | tuple):
        numbers = tuple(number_in(part) for part in value)
        return numbers if numbers and None not in numbers else None
    return number_in(value)


def _shown_path(where: tuple[str, ...]) -> str:
    return ".".join(where) or "the file itself"
