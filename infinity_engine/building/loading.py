"""`load`: reads a model's values from safetensors files to the drives, piece by piece.

Checks all names and shapes first, moves the bytes, and touches the model last. Called by
`load_into`.
"""

from __future__ import annotations

import errno
import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from deepnvme.memory.buffers import memory_of
from deepnvme.memory.checksum import crc32c
from deepnvme.queue.queue import File
from infinity_engine.building.building import opened
from infinity_engine.building.built import BuiltModel
from infinity_engine.building.built_parameter import absent
from infinity_engine.building.sharded_parameters import ShardedParameters
from infinity_engine.building.sources import FileTensor, found_in, listed
from infinity_engine.errors import ConfigError, TransferError
from infinity_engine.partition import Partitioner, Shard, ShardSpec
from infinity_engine.plan import ResolvedBudget, Tier
from infinity_engine.progress import ProgressReporter
from infinity_engine.ranks.ranks import Ranks
from infinity_engine.signals import HeldSignals
from infinity_engine.storage import IOHop, Place, SwapFile

__all__ = ["load"]

_PIECE_BYTES = 4 << 20
_SLOTS = 4  # half of them are read into while the others are written
_SLOTS_BYTES = 2 * _SLOTS * _PIECE_BYTES
_SAMPLE_BYTES = 4096  # in the middle of a tensor, which all ranks read
_MOST_SAMPLES = 4096  # tensors, evenly among all where there are more


@dataclass(frozen=True, slots=True)
class _Target:
    """A tensor of the model with its names, the source of its values, and how ranks cut it."""

    tensor: torch.Tensor
    names: tuple[str, ...]
    source: FileTensor
    spec: ShardSpec | None = None
    rank: int = 0

    @property
    def part(self) -> Shard:
        """The elements that go to the drives of this rank, if it is streamed."""
        # Without ranks, this one has all of it.
        return Shard(0, self.tensor.numel()) if self.spec is None else self.spec.shards[self.rank]

    @property
    def nbytes(self) -> int:
        """The bytes of it that go to the drives."""
        return self.part.numel * self.tensor.element_size() if self.is_streamed else 0

    @property
    def is_streamed(self) -> bool:
        """Whether it is a parameter that can be absent."""
        return isinstance(self.tensor, torch.nn.Parameter) and not self.is_small

    @property
    def is_small(self) -> bool:
        """Whether it has one element at most, and so stays in host memory."""
        return self.tensor.numel() < 2


def load(
    model: torch.nn.Module,
    directory: str | os.PathLike[str],
    budget: ResolvedBudget,
    reporter: ProgressReporter,
    ranks: Ranks | None,
) -> BuiltModel:
    """Fill `model`; with several `ranks`, with this one's slices. See `load_into` for errors."""
    targets = _targets(model, found_in(Path(directory)), str(directory))
    if ranks is not None:
        # Before the cut: the ranks cut what they agree on.
        _agree(ranks, targets)
        targets = _cut(ranks, targets)
    with ExitStack() as failed:
        # No cache: nothing is built, and values go from file to drive in pieces.
        built, records = opened(budget, 0, failed, lambda _: None, ranks)
        # All places before the first byte: a budget that is too small refuses at once.
        places = [
            records.allocate(target.nbytes, target.names[0]) if target.nbytes else None
            for target in targets
        ]
        # Room for the values that stay in memory; the rest is given back for the pieces below.
        records.shrink(room=sum(target.tensor.nbytes for target in targets if target.is_small))
        queue = built.swap.queue
        with ExitStack() as opens:
            own = queue.settings_for(directory).inflight_bytes
            opens.enter_context(
                # Counted in the budget while it lasts, as whatever the engine allocates.
                built.ledger.reserve(Tier.HOST, own + _SLOTS_BYTES, holder="pieces of files")
            )
            files = {
                path: opens.enter_context(queue.open(path))
                for path in {target.source.path for target in targets}
            }
            total = sum(target.nbytes for target in targets)
            with reporter.part("loading values", total) as written:
                _stream(_pieces(targets, places, files), built.swap, written)
            # On the side: the model is touched only when everything has been read.
            values = [
                absent(target.tensor)
                if target.is_streamed
                else _read(target, files[target.source.path])
                for target in targets
            ]
        if ranks is not None:
            # no rank changes its model before all have the values
            ranks.collectives.agree("the end of loading")
        # An interrupt in the midst would leave half of the model without values.
        with HeldSignals():
            # `failed` takes the values back where a later line raises.
            _install(targets, values, failed)
            for target, place in zip(targets, places, strict=True):
                if target.spec is not None:
                    assert isinstance(records, ShardedParameters), "there are several ranks"
                    records.adopt_part(target.tensor, target.names[0], target.spec, place)
                elif place is not None:
                    records.adopt_absent(target.tensor, target.names[0], place)
                elif isinstance(target.tensor, torch.nn.Parameter):
                    records.adopt(target.tensor, target.names[0])
            # A module runs when an engine has its values, and not before.
            built.guard(
                module
                for module in model.modules()
                if any(parameter in records for parameter in module.parameters())
            )
            # Nothing can fail any more: what would undo it is dropped.
            failed.pop_all()
    return built


# --- what belongs to what -------------------------------------------------------------------------


def _targets(model: torch.nn.Module, found: Mapping[str, FileTensor], where: str) -> list[_Target]:
    """Return each of the model's tensors once.

    Raises:
        ConfigError: names or shapes differ from the files', or a tensor cannot be filled.
    """
    # keep_vars: the parameters themselves, not detached copies.
    named = {
        name: tensor
        for name, tensor in model.state_dict(keep_vars=True).items()
        if isinstance(tensor, torch.Tensor)
    }
    # Tied tensors have several names and are one: filled once.
    names: dict[int, list[str]] = {}
    for name, tensor in named.items():
        names.setdefault(id(tensor), []).append(name)
    _check_devices(model, names)
    # One of its names in the files is enough.
    missing = [
        aliases[0] for aliases in names.values() if not any(name in found for name in aliases)
    ]
    unexpected = [name for name in found if name not in named]
    if missing or unexpected:
        differences = [
            f"{len(those)} {what}: {listed(those)}"
            for what, those in (
                ("missing", missing),
                ("that the model does not have", unexpected),
            )
            if those
        ]
        raise ConfigError(
            field=f"tensors in {where}",
            value="; ".join(differences),
            expected="exactly the tensors of the model",
        )
    targets = []
    for aliases in names.values():
        # The last of several names, as torch's load_state_dict lets the last one win.
        source = found[[name for name in aliases if name in found][-1]]
        target = _Target(named[aliases[0]], tuple(aliases), source)
        if target.source.entry.shape != tuple(target.tensor.shape):
            raise ConfigError(
                field=f"tensor {source.name} in {source.path}",
                value=source.entry.shape,
                expected=f"the shape {tuple(target.tensor.shape)}, which the model has",
            )
        if not torch.can_cast(source.dtype, target.tensor.dtype):
            raise ConfigError(
                field=f"tensor {source.name} in {source.path}",
                value=source.dtype,
                expected=(
                    f"a dtype that torch converts to {target.tensor.dtype}, which the model has"
                ),
            )
        targets.append(target)
    return targets


def _check_devices(model: torch.nn.Module, persistent: Mapping[int, object]) -> None:
    for name, parameter in model.named_parameters():
        if not parameter.is_meta:
            expected = "on the meta device: build the model under `with torch.device('meta')`"
            raise ConfigError(
                field=f"parameter {name}", value=str(parameter.device), expected=expected
            )
    lost = [name for name, parameter in model.named_parameters() if id(parameter) not in persistent]
    if lost:
        expected = (
            "a parameter of the state dict: files have no values for others, as of compact layers "
            "in int8. Build the model under init_context, or make these modules with values"
        )
        raise ConfigError(
            field=f"parameter {listed(lost)}", value="not in the state dict", expected=expected
        )
    empty = [
        name
        for name, buffer in model.named_buffers()
        # Files have values for what is in the state dict alone.
        if buffer.is_meta and id(buffer) not in persistent
    ]
    if empty:
        expected = (
            "a buffer with values: files have none for buffers that are not persistent. Put only "
            "parameters on the meta device, as "
            "accelerate.init_empty_weights(include_buffers=False) does; or make the modules of "
            "these buffers again outside of torch.device('meta'), before load_into; or build the "
            "model under init_context"
        )
        raise ConfigError(
            field=f"buffer {listed(empty)}", value="on the meta device", expected=expected
        )


# --- several ranks --------------------------------------------------------------------------------


def _agree(ranks: Ranks, targets: Sequence[_Target]) -> None:
    """Check that all ranks load the same files into the same model.

    Raises:
        CollectiveError: they do not.
    """
    kinds = {
        target.names[0]: f"{target.tensor.dtype} {list(target.tensor.shape)}" for target in targets
    }
    ranks.agree_on("the model to load into", kinds)
    entries: dict[Path, dict[str, str]] = {}
    for target in targets:
        entries.setdefault(target.source.path, {})[target.source.name] = str(target.source.entry)
    headers = {
        # By name: ranks may see the directory under different paths.
        path.name: crc32c(json.dumps(tensors, sort_keys=True).encode())
        for path, tensors in entries.items()
    }
    ranks.agree_on(
        "the files of values",
        {
            path.name: f"{path.stat().st_size} B, header {headers[path.name]:08x}"
            for path in entries
        },
    )
    # Headers may agree where values differ: an old copy on one machine.
    ranks.agree_again_on(
        "samples of the values in files", _samples([target.source for target in targets])
    )


def _samples(sources: Sequence[FileTensor]) -> dict[str, str]:
    """Return checksums of a few bytes of each tensor: each rank reads only its slices of the rest.

    Raises:
        TransferError: a file could not be read.
    """
    # Rounded up, so that the samples are never more than the most.
    every = -(-len(sources) // _MOST_SAMPLES)
    by_file: dict[Path, list[FileTensor]] = {}
    for source in sources[::every]:
        if source.entry.nbytes:
            by_file.setdefault(source.path, []).append(source)
    found = {}
    for path, those in by_file.items():
        with path.open("rb", buffering=0) as file:
            # Pages around a sample are not read ahead: each file is touched in a few places.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            for source in those:
                found[f"{source.name} in {path.name}"] = (
                    f"values of checksum {crc32c(_sample(file.fileno(), source)):08x}"
                )
    return found


def _sample(descriptor: int, source: FileTensor) -> bytes:
    """Return the bytes in the middle of a tensor."""
    nbytes = min(source.entry.nbytes, _SAMPLE_BYTES)
    offset = source.entry.offset + (source.entry.nbytes - nbytes) // 2
    error, values = errno.EIO, b""
    try:
        values = os.pread(descriptor, nbytes, offset)
    except OSError as problem:
        error = problem.errno or error
    # Short without an error: the file ends early, which is reported as EIO.
    if len(values) < nbytes:
        asked, done = nbytes, len(values)
        raise TransferError(
            errno=error,
            path=str(source.path),
            offset=offset,
            asked=asked,
            done=done,
            what=source.name,
        ) from None
    return values


def _cut(ranks: Ranks, targets: Sequence[_Target]) -> list[_Target]:
    """Return the targets with how the ranks share those that go to the drives."""
    partitioner = Partitioner(ranks.shards.size)
    return [
        replace(target, spec=partitioner.cut(target.tensor.numel()), rank=ranks.shards.rank)
        # The same cut as the engine makes: each rank writes what it will own.
        if target.is_streamed
        else target
        for target in targets
    ]


# --- bytes ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Piece:
    """Elements of a file, and where on the drives they belong."""

    name: str
    file: File
    offset: int
    numel: int
    source: torch.dtype
    target: torch.dtype
    place: Place


class _Slot:
    """Memory for a piece, as the file and as the model have it, and the I/O under way with it."""

    def __init__(self) -> None:
        self._raw, self._cast = (
            torch.empty(_PIECE_BYTES, dtype=torch.uint8, device="cpu") for _ in range(2)
        )
        self._hop: IOHop | None = None
        self._piece: _Piece | None = None

    def read(self, piece: _Piece) -> None:
        """Begin to read a piece, once the I/O under way has ended."""
        # The slot's memory may still be on its way to the drive.
        self.wait()
        self._piece = piece
        self._hop = _begin(piece.file, self._values(piece), piece.offset, piece.name)

    def write(self, swap: SwapFile) -> int:
        """Begin to write the piece, if one was read; return its bytes."""
        # Taken out first: the slot is free for the next piece, also if the write fails.
        piece, self._piece = self._piece, None
        if piece is None:
            return 0
        self.wait()
        values = self._values(piece)
        if piece.target != piece.source:
            # In the slot's second buffer: the two dtypes have different widths.
            values = self._cast[: piece.place.nbytes].view(piece.target).copy_(values)
        self._hop = swap.write(piece.place, memory_of(values, writable=False), what=piece.name)
        return piece.place.nbytes

    def wait(self) -> None:
        """Wait for the I/O under way."""
        hop, self._hop = self._hop, None
        if hop is not None:
            hop.wait()

    def _values(self, piece: _Piece) -> torch.Tensor:
        return self._raw[: piece.numel * piece.source.itemsize].view(piece.source)


def _stream(pieces: Iterable[_Piece], swap: SwapFile, written: Callable[[int], None]) -> None:
    """Move pieces to their places: half of the slots are read into while the others are written.

    `written` is called with the bytes of each piece.

    Raises:
        TransferError: a file could not be read, or a drive not be written.
    """
    slots = deque(_Slot() for _ in range(_SLOTS))
    try:
        for piece in pieces:
            slots[0].read(piece)
            # The slot half a turn behind has had that time to arrive.
            written(slots[_SLOTS // 2].write(swap))
            # The slot that was written longest ago is read into next.
            slots.rotate(1)
        # Those that were read and not written yet, oldest first.
        for slot in reversed(slots):
            written(slot.write(swap))
        for slot in slots:
            slot.wait()
    finally:
        for slot in slots:
            # I/O left behind by a failure; the first failure is the one to raise
            with suppress(TransferError):
                slot.wait()


def _begin(file: File, values: torch.Tensor, offset: int, what: str) -> IOHop:
    return IOHop([file.pread(memory_of(values, writable=True), offset)], what)


def _pieces(
    targets: Sequence[_Target], places: Sequence[Place | None], files: Mapping[Path, File]
) -> Iterator[_Piece]:
    """Yield pieces that begin on a page of their places."""
    for target, place in zip(targets, places, strict=True):
        if place is None:
            continue
        source, dtype = target.source, target.tensor.dtype
        # Whichever dtype is wider: a piece has to fit in both of a slot's buffers.
        most = _PIECE_BYTES // max(source.dtype.itemsize, dtype.itemsize)
        part = target.part
        for first in range(0, part.numel, most):
            numel = min(most, part.numel - first)
            yield _Piece(
                name=source.name,
                file=files[source.path],
                # Of this rank's part, in the file; its place has that part alone, from 0 on.
                offset=source.entry.offset + (part.first_element + first) * source.dtype.itemsize,
                numel=numel,
                source=source.dtype,
                target=dtype,
                place=place.part(first * dtype.itemsize, numel * dtype.itemsize),
            )


def _read(target: _Target, file: File) -> torch.Tensor:
    """Return the values of a tensor that is small, or that is a buffer."""
    values = torch.empty(target.source.entry.shape, dtype=target.source.dtype, device="cpu")
    _begin(file, values, target.source.entry.offset, target.source.name).wait()
    return values.to(target.tensor.dtype)


# --- the model ------------------------------------------------------------------------------------


def _install(targets: Sequence[_Target], values: Sequence[torch.Tensor], failed: ExitStack) -> None:
    """Give the model's tensors, which stay the same objects, these values; `failed` undoes it."""
    for target, fresh_values in zip(targets, values, strict=True):
        tensor = target.tensor
        if not tensor.is_meta:  # a buffer
            # Registered before the copy: the clone is what the buffer had.
            failed.callback(tensor.copy_, tensor.clone())
            tensor.copy_(fresh_values)
            continue
        fresh = fresh_values
        if isinstance(tensor, torch.nn.Parameter):
            # As torch makes one of other data, with what else there is of this one.
            make, (_, *others) = tensor.__reduce_ex__(2)  # type: ignore[no-untyped-call]
            fresh = make(fresh_values, *others)
        # The object stays the same, so modules, tied names and optimizers see the values.
        torch.utils.swap_tensors(tensor, fresh)  # type: ignore[no-untyped-call]
        # Swapping again is the way back.
        failed.callback(torch.utils.swap_tensors, tensor, fresh)
