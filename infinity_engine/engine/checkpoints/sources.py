"""Where the bytes of an engine's tensors come from, as slices of streams.

States are read from where they lie; frozen parameters and buffers are rank 0's. Saves and exports
are made of these sources.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch

from infinity_engine.checkpoint import SavedTensor, Slice
from infinity_engine.checkpoint.objects import COPIED_BYTES
from infinity_engine.engine.checkpoints.checkpointing import Run
from infinity_engine.parameters.parameters import ModelParameter
from infinity_engine.update.captured import CapturedPiece, CapturedStates, RunOnDrives, bytes_of

__all__ = ["SmallBuffers", "StateStreams", "TakeSlice", "UntrainedStreams", "flat", "whole_of"]

TakeSlice = Callable[[Slice, memoryview], None]
"""Called with a slice and its next bytes, which are valid until it returns."""


class StateStreams:
    """The states of this rank."""

    def __init__(
        self, run: Run, captured: CapturedStates, tensors: Mapping[str, SavedTensor]
    ) -> None:
        self.captured = captured
        self._streams = {
            known.number: (tensors[known.name], run.first_element(known.number))
            for known in run.trained
        }

    def leave_out(self, runs: Sequence[RunOnDrives]) -> None:
        """Hand out all but these."""
        self.captured = self.captured.without(runs)

    def slices(self) -> list[Slice]:
        """Return what is written."""
        return [self.slice_of(piece) for piece in self.captured.pieces]

    def hand_out(self, take: TakeSlice, rooms: Sequence[memoryview]) -> None:
        """Hand out the bytes of all slices; `rooms` are for what has to be copied or read."""

        def take_piece(piece: CapturedPiece, values: memoryview) -> None:
            take(self.slice_of(piece), values)

        self.captured.hand_out(take_piece, rooms)

    def slice_of(self, piece: CapturedPiece) -> Slice:
        """Return the slice that a piece is."""
        tensor, first = self._streams[piece.segment.parameter]
        stream = tensor.stream(piece.stream)
        return Slice(stream, first + piece.segment.first_element, piece.segment.numel)


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
        self._tensors = tensors
        self._frozen = [known for known in frozen if tensors[known.name].numel]
        self._buffers = [
            (name, buffer)
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
        names = [known.name for known in self._frozen] + [name for name, _ in self._buffers]
        return [whole_of(self._tensors[name]) for name in names] if self._is_first else []

    def hand_out(self, take: TakeSlice) -> None:
        """Hand out the bytes of all slices; all ranks take part."""
        for known in self._frozen:
            with self._run.shown(known):
                self._hand_out(known.name, known.parameter.data, take)
        for name, buffer in self._buffers:
            self._hand_out(name, buffer, take)

    def _hand_out(self, name: str, tensor: torch.Tensor, take: TakeSlice) -> None:
        if self._is_first:
            for part in bytes_of(flat(tensor), self._room):
                take(whole_of(self._tensors[name]), part)


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


def whole_of(tensor: SavedTensor) -> Slice:
    """Return all of a tensor that nothing trains."""
    return Slice(tensor.stream("value"), 0, tensor.numel)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of a tensor in a row: the tensor's own memory where they lie so.

    A conjugate or negative view has other values than its memory.
    """
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
