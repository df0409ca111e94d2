"""Reads what DeepSpeed saved, without DeepSpeed and torch: ZeRO-1, 2 and 3, and universal.

What is read was learned from DeepSpeed 0.19 and is in docs/checkpoints.md. Masters, moments and
step counts keep their bits. Nothing of the pickles is executed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from deepnvme.volume.framing import shown
from infinity_engine.checkpoint.exchange.found import (
    HYPERPARAMETERS,
    Block,
    ForeignCheckpoint,
    number_in,
    pieces_of,
    step_count,
)
from infinity_engine.checkpoint.exchange.inert_pickle import Built
from infinity_engine.checkpoint.exchange.torch_files import OpenFiles, SavedArray, TorchFile
from infinity_engine.checkpoint.manifest import Kind, SavedTensor
from infinity_engine.checkpoint.rounding import FLOATS
from infinity_engine.errors import DamagedCheckpoint, IncompleteCheckpoint, UnsupportedCheckpoint
from infinity_engine.outcome import GROWTH_STEPS

__all__ = ["is_deepspeed", "open_deepspeed"]

_LATEST = ("latest", "latest_universal")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")
_OPTIMIZER = re.compile(
    r"(?:bf16_|fp16_)?zero_pp_rank_(\d{1,6})_mp_rank_(\d{1,6})_optim_states\.pt"
)
_MODEL = re.compile(r"(?:zero_pp_rank_(\d{1,6})_)?mp_rank_(\d{1,6})_model_states\.pt")
# Files of pipeline stages and of experts.
_ELSEWHERE = re.compile(r"(?:layer_|expp_rank_|expert_).*\.pt")
# DeepSpeed's names of the stages of ZeRO.
_STAGES = MappingProxyType(
    {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3, "max_stage": 3}
)
_MOST_TAG_BYTES = 256

# What DeepSpeed itself puts into a model's file. The rest comes from the caller's client_state.
_KNOWN = frozenset(
    {
        "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes",
        "shared_params", "frozen_param_fragments", "sparse_tensor_module_names", "skipped_steps",
        "global_steps", "global_samples", "dp_world_size", "mp_world_size", "ds_config",
        "checkpoint_parallel_dimensions", "ds_version", "universal_checkpoint_info",
    }
)  # fmt: skip


def is_deepspeed(path: Path) -> bool:
    """Tell whether a directory looks like DeepSpeed's: a checkpoint, or a directory of them."""
    folder = _folder(path)
    return folder is not None and any(_MODEL.fullmatch(entry.name) for entry in folder.iterdir())


def open_deepspeed(path: Path, files: OpenFiles) -> ForeignCheckpoint:
    """Return what the checkpoint at `path` holds: one checkpoint, or a directory with a `latest`.

    Raises:
        IncompleteCheckpoint: files of it are missing.
        UnsupportedCheckpoint: its kind is not read: tensor or pipeline parallel, experts, states
            left on NVMe.
        DamagedCheckpoint: a file is not what DeepSpeed writes.
    """
    folder = _folder(path)
    if folder is None:
        raise IncompleteCheckpoint(path=str(path), missing=("a checkpoint of DeepSpeed",))
    reading = _DeepSpeedReading(folder, files)
    try:
        return reading.universal() if (folder / "zero").is_dir() else reading.sharded()
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as flaw:
        raise DamagedCheckpoint(
            path=str(folder),
            entry="its structure",
            flaw=f"a field that DeepSpeed writes is missing or strange: {flaw!r}",
        ) from None


def _folder(path: Path) -> Path | None:
    """Return the directory of one checkpoint."""
    for name in _LATEST:
        if (path / name).is_file() and not (path / name).is_symlink():
            with (path / name).open("rb") as file:
                tag = file.read(_MOST_TAG_BYTES).decode("ascii", "replace").strip()
            if _TAG.fullmatch(tag) and (path / tag).is_dir():
                return path / tag
    return path if path.is_dir() else None


@dataclass
class _Found:
    """What was found so far of a checkpoint's parameters."""

    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    blocks: dict[tuple[str, str], list[Block]] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)

    def add(self, name: str, stream: str, array: SavedArray, first: int) -> None:
        """Note that elements of a stream, from `first` on, are in `array`."""
        self.blocks.setdefault((name, stream), []).append(Block(array, (first,)))


class _DeepSpeedReading:
    """One checkpoint that is being read."""

    def __init__(self, folder: Path, files: OpenFiles) -> None:
        self._folder = folder
        self._files = files
        self._names = sorted(entry.name for entry in folder.iterdir())
        self._found = _Found()

    # --- ZeRO-1, ZeRO-2 and ZeRO-3 ----------------------------------------------------------------

    def sharded(self) -> ForeignCheckpoint:
        """Return a checkpoint that each rank wrote its part of."""
        self._refuse_other_parallelism()
        ranks = self._rank_files(_OPTIMIZER)
        if not ranks:
            raise self._unsupported(
                "its optimizer states",
                "there are no files zero_pp_rank_*_optim_states.pt: it was not saved by ZeRO",
                "save it with ZeRO, or import the file of its weights with --from torch",
            )
        # Ordered by rank: the pieces below follow one another in this order.
        parts = [self._content(name) for name in ranks.values()]
        states = [part["optimizer_state_dict"] for part in parts]
        stage = _stage(states[0]["zero_stage"])
        models = [self._content(name) for name in self._rank_files(_MODEL).values()]
        # ZeRO-3 has one model file for each rank, with that rank's fragments of frozen parameters.
        self._check_ranks(list(ranks), states, models if stage == 3 else models[:1])
        model = models[0]
        if stage == 3:
            self._gather_partitioned(models[0]["param_shapes"], states)
            # The optimizer's own state dict has another name in each of the two.
            optimizers = [state["optimizer_state_dict"] for state in states]
        else:
            optimizers = [_optimizer(state["base_optimizer_state"]) for state in states]
            self._gather_grouped(model["param_shapes"], states, optimizers)
        return self._checkpoint(
            f"DeepSpeed {shown(model.get('ds_version'))}, ZeRO-{stage}, {len(states)} ranks",
            models,
            optimizers[0]["param_groups"],
            states[0].get("loss_scaler"),
        )

    def _gather_partitioned(
        self, groups: Sequence[Mapping[str, Any]], states: Sequence[Mapping[str, Any]]
    ) -> None:
        """Find the parameters of ZeRO-3: each is cut over the ranks, in flat subgroups."""
        ranks = len(states)
        for number, shapes in enumerate(groups):
            moments = [_state_of(state["optimizer_state_dict"], number) for state in states]
            flats = [state["fp32_flat_groups"][number] for state in states]
            names = self._moment_names(moments[0])
            # With states on NVMe, DeepSpeed saves flat groups without elements.
            if any(flat.numel == 0 for flat in flats) or not moments[0]:
                self._refuse_offloaded()
            # Where the parameter begins in each rank's flat group. Ranks pad it to parts of one
            # length.
            at = 0
            for name, shape in self._shapes_of(shapes):
                numel = math.prod(shape)
                part = -(-numel // ranks)
                for rank in range(ranks):
                    # The last ranks may have nothing but padding.
                    first = rank * part
                    count = max(0, min(part, numel - first))
                    for stream, flat in (
                        ("master", flats[rank]),
                        *((new, moments[rank][old]) for old, new in names),
                    ):
                        for array, offset in pieces_of([flat], at, count, at=first):
                            self._found.add(name, stream, array, offset)
                at += part
            self._note_steps(shapes, moments[0], states[0]["optimizer_state_dict"], number)

    def _gather_grouped(
        self,
        groups: Sequence[Mapping[str, Any]],
        states: Sequence[Mapping[str, Any]],
        optimizers: Sequence[Mapping[str, Any]],
    ) -> None:
        """Find the parameters of ZeRO-1 and ZeRO-2: rows that are cut over the ranks."""
        for number, shapes in enumerate(groups):
            moments = [_state_of(optimizer, number) for optimizer in optimizers]
            # All parameters of a group in one row, cut into one piece for each rank.
            flats = {
                "master": [state["single_partition_of_fp32_groups"][number] for state in states]
            }
            for old, new in self._moment_names(moments[0]):
                flats[new] = [moment[old] for moment in moments]
            # Elements behind each parameter, since DeepSpeed 0.19.7.
            paddings = states[0].get("param_alignment_paddings")
            behind = paddings[number] if paddings else [0] * len(shapes)
            at = 0
            for (name, shape), padding in zip(self._shapes_of(shapes), behind, strict=True):
                numel = math.prod(shape)
                for stream, parts in flats.items():
                    for array, offset in pieces_of(parts, at, numel):
                        self._found.add(name, stream, array, offset)
                at += numel + padding
            self._note_steps(shapes, moments[0], optimizers[0], number)

    def _shapes_of(self, shapes: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the parameters of a group with their shapes, in the order of their elements."""
        for name, shape in shapes.items():
            self._found.shapes[name] = tuple(shape)
            yield name, self._found.shapes[name]

    def _moment_names(self, state: Mapping[str, Any]) -> list[tuple[str, str]]:
        """Return the moments of an optimizer: what they are called there and here."""
        arrays = [
            name
            for name, value in state.items()
            if name != "step" and isinstance(value, SavedArray) and value.dtype in FLOATS
        ]
        for name in state:
            if name not in arrays and name != "step":
                self._leave(
                    f"{name} of the optimizer's state: it is not one value for each element"
                )
        if arrays == ["exp_avg_sq"]:
            return [("exp_avg_sq", "sum")]  # as DeepSpeed's Adagrad calls it
        return [(name, name) for name in arrays]

    def _note_steps(
        self,
        shapes: Mapping[str, Any],
        state: Mapping[str, Any],
        optimizer: Mapping[str, Any],
        number: int,
    ) -> None:
        groups = optimizer["param_groups"]
        group = groups[number] if number < len(groups) else groups[-1]
        # Some optimizers count steps in the group, not in each state.
        self._count_steps(shapes, state.get("step", group.get("step")))

    # --- universal --------------------------------------------------------------------------------

    def universal(self) -> ForeignCheckpoint:
        """Return what ds_to_universal made: a folder for each parameter, a file for each stream."""
        models = [self._content(name) for name in self._rank_files(_MODEL).values()]
        if not models:
            raise IncompleteCheckpoint(
                path=str(self._folder), missing=("mp_rank_00_model_states.pt",)
            )
        zero = self._folder / "zero"
        shared = (
            self._content("zero/optimizer_state.pt")
            if (zero / "optimizer_state.pt").exists()
            else {}
        )
        # Names become paths: only plain names of real directories, so none leads outside.
        shapes = models[0].get("param_shapes")
        for group in [shapes] if isinstance(shapes, dict) else shapes or []:
            for name, shape in group.items():
                if (
                    not _TAG.fullmatch(name)
                    or not (zero / name).is_dir()
                    or (zero / name).is_symlink()
                ):
                    raise IncompleteCheckpoint(
                        path=str(self._folder), missing=(f"zero/{shown(name)}",)
                    )
                self._gather_universal(zero / name, tuple(shape))
        inner = shared.get("optimizer_state_dict") or shared
        self._steps_of_universal(inner)
        groups = shared.get("param_groups") or inner.get("param_groups") or []
        return self._checkpoint(
            f"DeepSpeed {shown(models[0].get('ds_version'))}, universal",
            models,
            groups,
            shared.get("loss_scaler"),
        )

    def _gather_universal(self, folder: Path, shape: tuple[int, ...]) -> None:
        name = folder.name
        for entry in sorted(folder.glob("*.pt")):
            stream = "master" if entry.stem == "fp32" else entry.stem
            content = self._content(f"zero/{name}/{entry.name}")
            # A file holds a dict around the tensor, or the tensor alone.
            value = content.get("param") if isinstance(content, dict) else content
            if stream == "step":
                self._count_steps([name], value)
                continue
            if not isinstance(value, SavedArray):
                raise DamagedCheckpoint(
                    path=str(self._folder),
                    entry=f"zero/{name}/{entry.name}",
                    flaw="expected a tensor in it",
                )
            # A flat stream does not have the shape. The model's file does.
            self._found.shapes.setdefault(name, value.shape if len(value.shape) > 1 else shape)
            self._found.blocks[name, stream] = [Block(value, (0,) * len(value.shape))]

    def _steps_of_universal(self, optimizer: Mapping[str, Any]) -> None:
        """Note the steps of parameters that have no file for it: the optimizer's."""
        states = optimizer.get("state")
        state = _state_of(optimizer, 0) if states else {}
        groups = optimizer.get("param_groups") or [{}]
        unknown = [name for name in self._found.shapes if name not in self._found.steps]
        self._count_steps(unknown, state.get("step", groups[0].get("step")))

    # --- what all kinds share ---------------------------------------------------------------------

    def _count_steps(self, names: Iterable[str], value: object) -> None:
        """Note the steps of these parameters, if the value counts any."""
        steps = step_count(value)
        if steps is not None:
            self._found.steps.update(dict.fromkeys(names, steps))

    def _checkpoint(
        self,
        format_: str,
        models: Sequence[Mapping[str, Any]],
        groups: Sequence[Mapping[str, Any]],
        scaler: object,
    ) -> ForeignCheckpoint:
        model = models[0]
        # DeepSpeed counts steps that it skipped as well.
        made = step_count(model.get("global_steps")) or 0
        made -= step_count(model.get("skipped_steps")) or 0
        aliases: dict[str, list[str]] = {}
        for alias, name in (model.get("shared_params") or {}).items():
            aliases.setdefault(name, []).append(alias)
        # After the trained ones: what has no master by now is frozen or a buffer.
        self._gather_untrained(models, {alias for names in aliases.values() for alias in names})
        tensors = tuple(self._tensors(model, aliases, made))
        for name, value in model.items():
            if name not in _KNOWN and value is not None and value != {}:
                self._leave(f"{name}: an object of your program; load it there")
        self._leave("the random generators: DeepSpeed does not save them")
        scale = self._loss_scale(scaler)
        hyperparameters = [self._hyperparameters(group) for group in groups]
        return ForeignCheckpoint(
            path=str(self._folder),
            format=format_,
            step=max(made, 0),
            tensors=tensors,
            blocks=self._found.blocks,
            groups=hyperparameters,
            loss_scale=scale,
            # Each name once, in the order in which it was found.
            left_behind=tuple(dict.fromkeys(self._found.left)),
        )

    def _gather_untrained(self, models: Sequence[Mapping[str, Any]], aliases: set[str]) -> None:
        """Find frozen parameters and buffers."""
        model = models[0]
        frozen = {
            name: tuple(shape) for name, shape in (model.get("frozen_param_shapes") or {}).items()
        }
        module = model["module"] or {}
        for name, value in module.items():
            if name in self._found.shapes or name in aliases or name in frozen:
                continue
            if not isinstance(value, SavedArray):
                self._leave(f"{name}: it is no tensor")
                continue
            self._found.shapes[name] = value.shape
            self._found.blocks[name, "value"] = [Block(value, (0,) * len(value.shape))]
        for name, shape in frozen.items():
            self._found.shapes[name] = shape
            fragments = [part["frozen_param_fragments"][name] for part in models]
            # ZeRO-3 cuts frozen parameters too. Otherwise the fragment is the whole.
            if fragments[0].shape == shape:
                self._found.blocks[name, "value"] = [Block(fragments[0], (0,) * len(shape))]
                continue
            for array, offset in pieces_of(fragments, 0, math.prod(shape)):
                self._found.add(name, "value", array, offset)

    def _tensors(
        self, model: Mapping[str, Any], aliases: Mapping[str, Sequence[str]], made: int
    ) -> Iterator[SavedTensor]:
        """Yield what the model has, in its order."""
        module = model["module"] or {}
        buffers = set(model.get("buffer_names") or ())
        streams: dict[str, list[str]] = {}
        # Masters sort first, so each tensor's streams begin with its master.
        for name, stream in sorted(self._found.blocks, key=lambda found: found[1] != "master"):
            streams.setdefault(name, []).append(stream)
        order = [*(name for name in module if name in self._found.shapes)]
        order += [name for name in self._found.shapes if name not in module]
        for name in order:
            # A parameter without elements has no blocks. It counts as trained.
            trained = "value" not in streams.get(name, ["master"])
            first = self._found.blocks.get((name, "master" if trained else "value"))
            seen = module.get(name)
            dtype = seen.dtype if isinstance(seen, SavedArray) else "F32"
            if not trained and first:
                dtype = first[0].array.dtype
            yield SavedTensor(
                name=name,
                kind=Kind.TRAINED if trained else Kind.BUFFER if name in buffers else Kind.FROZEN,
                shape=self._found.shapes[name],
                dtype=dtype,
                streams=dict.fromkeys(streams.get(name, ["master"]), "F32")
                if trained
                else {"value": dtype},
                steps=self._found.steps.get(name, made) if trained else 0,
                aliases=tuple(aliases.get(name, ())),
            )

    def _hyperparameters(self, group: Mapping[str, Any]) -> dict[str, Any]:
        kept: dict[str, Any] = {}
        for name, value in group.items():
            plain = (
                tuple(number_in(part) for part in value)
                if isinstance(value, list | tuple)
                else value
            )
            plain = number_in(plain) if isinstance(plain, SavedArray) else plain
            if name in HYPERPARAMETERS and _is_plain(plain):
                kept[name] = plain
            elif name in HYPERPARAMETERS:
                self._leave(f"{name} of the optimizer's groups: it is no number")
        return kept

    def _loss_scale(self, scaler: object) -> dict[str, float | int]:
        if not isinstance(scaler, Built) or not scaler.get("dynamic"):
            return {"value": 1.0, "good_steps": 0}
        value = number_in(scaler.get("cur_scale")) or 1.0
        # The largest power of two that is not above DeepSpeed's scale.
        power = 2.0 ** math.floor(math.log2(value)) if 1.0 <= value < 2.0**126 else 1.0
        if power != value:
            self._leave(
                f"the loss scale {value}: the engine's are powers of two; it becomes {power}"
            )
        # DeepSpeed notes the step of the last overflow; the engine counts the good steps since
        # then.
        good = (
            (step_count(scaler.get("cur_iter")) or 0)
            - (number_in(scaler.get("last_overflow_iter")) or 0)
            - 1
        )
        window = scaler.get("scale_window")
        if window != GROWTH_STEPS:
            self._leave(
                f"the loss scale's window of {window} steps: the engine's is {GROWTH_STEPS}"
            )
        return {"value": power, "good_steps": int(max(0, good)) % GROWTH_STEPS}

    # --- files ------------------------------------------------------------------------------------

    def _content(self, name: str) -> Any:
        file = TorchFile(self._files, self._folder / name)
        content = file.content()
        if not isinstance(content, dict | SavedArray | int | float):
            raise file.flaw("expected a dict or a tensor in it")
        return content

    def _rank_files(self, pattern: re.Pattern[str]) -> dict[int, str]:
        """Return the files of a kind by the rank that wrote them."""
        found = {
            int(match[1] or 0): match[0]
            for match in map(pattern.fullmatch, self._names)
            # Of model-parallel rank 0 alone: `sharded` has refused checkpoints that have more.
            if match is not None and not int(match[2])
        }
        return dict(sorted(found.items()))

    def _check_ranks(
        self,
        ranks: Sequence[int],
        states: Sequence[Mapping[str, Any]],
        models: Sequence[Mapping[str, Any]],
    ) -> None:
        counts = states[0]["partition_count"]
        count = max(counts) if isinstance(counts, list) else counts
        if isinstance(counts, list) and len(set(counts)) > 1:
            raise self._unsupported(
                "its groups", "they are cut over different numbers of ranks", "use ds_to_universal"
            )
        missing = tuple(
            f"the optimizer states of rank {rank}" for rank in range(count) if rank not in ranks
        )
        if missing:
            raise IncompleteCheckpoint(path=str(self._folder), missing=missing)
        if len(states) != count or len(models) not in (1, count):
            flaw = (
                f"expected {count} ranks, got {len(states)} optimizer states, {len(models)} models"
            )
            raise DamagedCheckpoint(path=str(self._folder), entry="its files", flaw=flaw)

    def _refuse_other_parallelism(self) -> None:
        found = [
            match
            for name in self._names
            for match in (_OPTIMIZER.fullmatch(name), _MODEL.fullmatch(name))
            if match
        ]
        if any(int(match[2]) for match in found) or any(
            _ELSEWHERE.fullmatch(name) for name in self._names
        ):
            raise self._unsupported(
                "its files",
                "it was saved with tensor or pipeline parallelism, or experts on several ranks",
                "make it universal with deepspeed.checkpoint.ds_to_universal, and import that",
            )

    def _refuse_offloaded(self) -> None:
        raise self._unsupported(
            "its optimizer states",
            "they stayed on NVMe: DeepSpeed copied a folder that it cannot resume from itself",
            "save once without optimizer states on NVMe, or import the weights of "
            "save_16bit_model with --from torch",
        )

    def _unsupported(self, entry: str, flaw: str, change: str) -> UnsupportedCheckpoint:
        return UnsupportedCheckpoint(path=str(self._folder), entry=entry, flaw=flaw, change=change)

    def _leave(self, what: str) -> None:
        self._found.left.append(what)


def _stage(value: object) -> int:
    """Return the number of a stage: of an enumeration, by its value or, from Python 3.11.0 to
    3.11.3, by its name.
    """
    if isinstance(value, Built) and value.arguments:
        value = value.arguments[-1]
    return _STAGES[value] if isinstance(value, str) else int(value)  # type: ignore[call-overload]


def _optimizer(saved: Any) -> Mapping[str, Any]:
    """Return an optimizer's state dict; an elastic checkpoint has a list of states."""
    if isinstance(saved, list):
        return {"state": dict(enumerate(saved)), "param_groups": [{} for _ in saved]}
    found: Mapping[str, Any] = saved
    return found


def _state_of(optimizer: Mapping[str, Any], number: int) -> Mapping[str, Any]:
    found: Mapping[str, Any] = optimizer["state"].get(number, {})
    return found


def _is_plain(value: object) -> bool:
    parts: Sequence[object] = value if isinstance(value, tuple) else (value,)
    return bool(parts) and all(type(part) in (bool, int, float) for part in parts)
