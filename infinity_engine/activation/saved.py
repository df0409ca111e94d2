"""What autograd saves in place of a tensor that is no parameter, and who keeps it.

`KeptActivations` leaves each where it is; `ActivationOffload` moves them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

import torch

__all__ = [
    "BlockUse",
    "ChangedInPlaceError",
    "KeptActivations",
    "SavedTensors",
    "addresses_of",
    "changed_since",
    "version_of",
]


class ChangedInPlaceError(RuntimeError):
    """A tensor that a backward needs was changed in place since it was saved."""


class BlockUse(NamedTuple):
    """What one block saved in a step, at most in one call, and what of that it kept in memory."""

    name: str
    way: str
    saved: int
    held: int


class SavedTensors(Protocol):
    """Keeps saved tensors until their backward."""

    offloads: bool
    """Whether some of them are moved."""

    def begin_forward(self, own: Iterable[torch.Tensor]) -> None:
        """Note that a forward begins; what lies in the memory of `own` tensors is never moved."""

    def pack(self, tensor: torch.Tensor) -> object:
        """Return what autograd saves in place of a tensor.

        Raises:
            CapacityError: there is no room for it.
            TransferError: it could not be moved.
        """

    def make_room(self) -> None:
        """Wait until no more is on its way than there is room for."""

    def begin_backward(self) -> None:
        """Note that a backward begins, before it computes anything."""

    def unpack(self, saved: object) -> torch.Tensor:
        """Return the tensor that `pack` was given.

        Raises:
            RuntimeError: it was changed since, or the engine was closed.
            CapacityError: there is no room for it.
            TransferError: it could not be read back.
        """

    def end_step(self) -> None:
        """Note that a step has ended."""

    def uses(self) -> tuple[BlockUse, ...]:
        """Return what blocks saved in the step that has ended; nothing where no block is known."""

    def described(self) -> str:
        """Return what was decided for blocks, and why; empty where nothing was."""

    def close(self) -> None:
        """Give everything back. What is still saved cannot be unpacked any more."""


class _SavedTensor(NamedTuple):
    """A saved tensor, and its version then.

    It is a detached alias: the tensor itself would hold its graph, and the graph holds what is
    saved.
    """

    tensor: torch.Tensor
    version: int


class KeptActivations:
    """Leaves every saved tensor where it is."""

    offloads = False

    def begin_forward(self, own: Iterable[torch.Tensor]) -> None:
        """Do nothing."""

    def pack(self, tensor: torch.Tensor) -> object:
        """Return the tensor without its graph."""
        # Its version as it is now: an in-place change after this is an error.
        # Without the call in Python that a NamedTuple's own constructor costs.
        return tuple.__new__(_SavedTensor, (tensor.detach(), version_of(tensor)))

    def make_room(self) -> None:
        """Do nothing."""

    def begin_backward(self) -> None:
        """Do nothing."""

    def unpack(self, saved: object) -> torch.Tensor:
        """Return the tensor, if it is as it was saved."""
        assert isinstance(saved, _SavedTensor), "it was packed here"
        now = version_of(saved.tensor)
        if now != saved.version:
            raise changed_since(saved.tensor.shape, saved.version, now)
        return saved.tensor

    def end_step(self) -> None:
        """Do nothing."""

    def uses(self) -> tuple[BlockUse, ...]:
        """Return nothing: it knows no blocks."""
        return ()

    def described(self) -> str:
        """Return nothing: there was nothing to decide."""
        return ""

    def close(self) -> None:
        """Do nothing."""


def addresses_of(own: Iterable[torch.Tensor]) -> frozenset[int]:
    """Return the addresses of the memory in which these lie."""
    return frozenset(
        [
            tensor.untyped_storage().data_ptr()
            for tensor in own
            if tensor.layout == torch.strided and tensor.device.type != "meta"
        ]
    )


def version_of(tensor: torch.Tensor) -> int:
    """Return the version of a tensor: a change in place raises it. Those of inference have none."""
    return 0 if tensor.is_inference() else tensor._version


def changed_since(shape: Iterable[int], saved: int, now: int) -> ChangedInPlaceError:
    """Return the error for a tensor that was changed in place between forward and backward."""
    return ChangedInPlaceError(
        f"A tensor of shape {tuple(shape)} that the backward needs was "
        "modified by an in-place operation after it was saved: it was at version "
        f"{saved} and is at version {now}. Let the operation "
        "make a new tensor, or use a copy of this one in the forward"
    )
