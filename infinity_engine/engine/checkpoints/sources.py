"""Where the bytes of an engine's tensors come from, as slices of streams.

States are read from where they lie; frozen parameters and buffers are rank 0's. Saves and exports
are made of these sources.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from infinity_engine.checkpoint import SavedTensor, Slice, SliceSink
from infinity_engine.checkpoint.objects import COPIED_BYTES
from infinity_engine.engine.checkpoints.checkpointing import Run
from infinity_engine.parameters.parameters import ModelParameter
from infinity_engine.update.captured import CapturedPiece, CapturedStates, RunOnDrives, bytes_of

__all__ = [
    "SmallBuffers",
    "StateStreams",
    "UntrainedStreams",
    "flat",
    "frozen_slices",
    "hand_out",
    "whole_of",
]


class StateStreams:
    """The states of this rank."""

    def __init__(
        self, run: Run, captured: CapturedStates, tensors: Mapping[str, SavedTensor]
    ) -> None:
        self.captured = captured
        places = run.places
        self._streams = {
            known.number: (
                tensors[places[known.number].names[0]],
                places[known.number].first_element + run.ranks.first_element(known.number),
            )
            for known in run.trained
        }

    def leave_out(self, runs: Sequence[RunOnDrives]) -> None:
        """Hand out all but these."""
        self.captured = self.captured.without(runs)

    def slices(self) -> list[Slice]:
        """Return what is written."""
        return [self.slice_of(piece) for piece in self.captured.pieces]

    def hand_out(self, sink: SliceSink, rooms: Sequence[memoryview]) -> None:
        """Hand out the bytes of all slices; `rooms` are for what has to be copied or read."""
        self.captured.hand_out(_Pieces(self, sink), rooms)

    def slice_of(self, piece: CapturedPiece) -> Slice:
        """Return the slice that a piece is."""
        tensor, first = self._streams[piece.segment.parameter]
        stream = tensor.stream(piece.stream)
        return Slice(stream, first + piece.segment.first_element, piece.segment.numel)


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Hands out captured pieces as slices."""

    states: StateStreams
    sink: SliceSink

    def take(self, piece: CapturedPiece, values: memoryview) -> None:
        self.sink.take(self.states.slice_of(piece), values)

    def settle(self) -> None:
        self.sink.settle()


class UntrainedStreams:
    """Frozen parameters and buffers, as modules see them: written by rank 0.

    Buffers that are `copied` are left out, as another source has them.
    """

    def __init__(
        self,
        run: Run,
        tensors: Mapping[str, SavedTensor],
        frozen: Sequence[ModelParameter],
        *,
        is_first: bool,
        copied: Collection[str] = (),
    ) -> None:
        self._run = run
        slices = frozen_slices(run, tensors, frozen)
        self._frozen = [
            (known, part) for known, part in zip(frozen, slices, strict=True) if part.numel
        ]
        self._buffers = [
            (whole_of(tensors[name]), buffer)
            for name, buffer in run.model.named_buffers()
            if buffer.numel() and name not in copied
        ]
        self._room = memoryview(b"")
        self._is_first = is_first

    @property
    def is_empty(self) -> bool:
        """Whether there are none, on all ranks."""
        return not self._frozen and not self._buffers

    def use(self, room: memoryview) -> None:
        """Copy through this memory what is not in the host's."""
        self._room = room

    def slices(self) -> list[Slice]:
        """Return what is written."""
        if not self._is_first:
            return []
        return [part for _, part in self._frozen] + [part for part, _ in self._buffers]

    def hand_out(self, sink: SliceSink) -> None:
        """Hand out the bytes of all slices; all ranks take part."""
        for known, part in self._frozen:
            with self._run.shown(known):
                self._hand_out(part, known.parameter.data, sink)
        for part, buffer in self._buffers:
            self._hand_out(part, buffer, sink)

    def _hand_out(self, part: Slice, tensor: torch.Tensor, sink: SliceSink) -> None:
        if self._is_first:
            hand_out(part, flat(tensor), self._room, sink)


class SmallBuffers:
    """Copies of the model's buffers, if all are small: a forward may change the buffers."""

    def __init__(self, model: torch.nn.Module, tensors: Mapping[str, SavedTensor]) -> None:
        buffers = {name: buffer for name, buffer in model.named_buffers() if buffer.numel()}
        if sum(buffer.nbytes for buffer in buffers.values()) > COPIED_BYTES:
            buffers = {}
        self._buffers, self._tensors = buffers, tensors

    @property
    def names(self) -> Collection[str]:
        """Return their names; none where they are not small."""
        return self._buffers.keys()

    def copies(self) -> Iterator[tuple[Slice, torch.Tensor]]:
        """Yield their values as they are now, in host memory."""
        for name, buffer in self._buffers.items():
            yield whole_of(self._tensors[name]), flat(buffer).to("cpu", copy=True)


def frozen_slices(
    run: Run, tensors: Mapping[str, SavedTensor], frozen: Sequence[ModelParameter]
) -> list[Slice]:
    """Return what is saved of each frozen parameter."""
    places = run.places
    return [
        Slice(
            tensors[places[known.number].names[0]].stream("value"),
            places[known.number].first_element,
            known.parameter.numel(),
        )
        for known in frozen
    ]


def whole_of(tensor: SavedTensor) -> Slice:
    """Return all of a tensor that nothing trains."""
    return Slice(tensor.stream("value"), 0, tensor.numel)


def hand_out(part: Slice, values: torch.Tensor, room: memoryview, sink: SliceSink) -> None:
    """Hand out a flat tensor, through a room if it is on a device; it may change afterwards."""
    for piece in bytes_of(values, room):
        sink.take(part, piece)
        sink.settle()


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of a tensor in a row: the tensor's own memory where they lie so.

    A conjugate or negative view has other values than its memory.
    """
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
