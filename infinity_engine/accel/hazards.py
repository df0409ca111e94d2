"""Shows an operation NaN in place of bytes that an unordered copy may be moving.

Such bytes could be right by luck; NaN is wrong every time.

Two operations are unordered when neither waits for the other and the host waited for neither before
it submitted the other. Used by the virtual clock alone, in one thread; touches device memory and
the targets of copies, nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from infinity_engine.accel.base import StreamKind
from infinity_engine.accel.emulated import NAN_BYTE
from infinity_engine.accel.operation import Copy

__all__ = ["Footprint", "carry_out_copy", "carry_out_work"]


@dataclass(frozen=True, slots=True, eq=False)
class Footprint:
    """The bytes that a copy touches, as addresses; those in device memory also as a tensor."""

    name: str
    kind: StreamKind
    reads: range
    writes: range
    device: torch.Tensor

    @classmethod
    def of(cls, copy: Copy, *, name: str, kind: StreamKind, device: torch.Tensor) -> Footprint:
        """Return the footprint of `copy`, which keeps neither of its tensors."""
        return cls(
            name=name,
            kind=kind,
            reads=_addresses(copy.source),
            writes=_addresses(copy.target),
            device=device,
        )


def carry_out_copy(copy: Copy, unordered: Sequence[Footprint]) -> None:
    """Copy the bytes; those that an unordered copy writes, here or at the source, arrive as NaN."""
    copy.target.copy_(copy.source)
    # Half-written bytes where another copy writes our source; where it writes our target, either
    # copy may be the last. NaN stands for both.
    for own in (_addresses(copy.source), _addresses(copy.target)):
        for other in unordered:
            start, stop = max(own.start, other.writes.start), min(own.stop, other.writes.stop)
            if start < stop:
                # `own` may be the source: an offset there is the same offset in the target.
                copy.target[start - own.start : stop - own.start].fill_(NAN_BYTE)


# [Note: why no host memory is filled in passing] While a work is carried out, the targets of
# unordered uploads are NaN; afterwards their bytes are put back. Nothing else reads device memory
# meanwhile. Host memory may belong to an I/O by then, as the host may have seen the end of a
# download and gone on. So only the bytes that a copy itself writes are touched there.
def carry_out_work(
    call: Callable[[], object], unordered: Sequence[Footprint], *, name: str
) -> None:
    """Do the work while the targets of unordered uploads are NaN.

    Raises:
        RuntimeError: it changed bytes that an unordered upload writes or an unordered download
            reads.
    """
    targets = [(other, other.device.clone()) for other in unordered if other.kind is StreamKind.H2D]
    for target, _ in targets:
        target.device.fill_(NAN_BYTE)
    # Taken after the targets were filled: what the work writes over the NaN shows as a change, too.
    seen = [(other, other.device.clone()) for other in unordered]
    try:
        call()
        changed = [other.name for other, before in seen if not torch.equal(other.device, before)]
    finally:
        for target, before in targets:
            target.device.copy_(before)
    if changed:
        raise RuntimeError(
            f"{name} changed bytes of {' and '.join(changed)}, which may be under way: neither "
            "waits for the other. Pass the event of the one that goes first in the other's `after`"
        )


def _addresses(tensor: torch.Tensor) -> range:
    return range(tensor.data_ptr(), tensor.data_ptr() + tensor.numel())
