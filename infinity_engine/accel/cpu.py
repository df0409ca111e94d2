"""The host as its own device: DEVICE and HOST are one memory; nothing is copied, work runs at once.

Starts no thread: a buffer is an ordinary tensor's. Pages that were given back are kept for later
buffers as far as their owner allows, because new pages cost as much time as filling them. The
ledger counts DEVICE's bytes as HOST's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deepnvme import PageStock
from infinity_engine.accel.base import Buffer, DeviceBytes, Event, Stream
from infinity_engine.accel.operation import Failure, Operation, Work
from infinity_engine.accel.ordered import OrderedAccelerator
from infinity_engine.errors import CapacityError
from infinity_engine.machine.memory import free_host_bytes, probe_memory

__all__ = ["CpuAccelerator"]


_LARGE = 64 << 10  # from here on, memory begins on a page


class CpuAccelerator(OrderedAccelerator[Operation]):
    """No device at all: every operation has ended when its submission returns."""

    name = "cpu"
    unified = True

    def __init__(self) -> None:
        super().__init__(Operation)
        self.torch_device = torch.device("cpu")
        self._pages = PageStock()

    def copy(
        self,
        target: torch.Tensor,
        source: torch.Tensor,
        *,
        stream: Stream,
        after: Sequence[Event] = (),
    ) -> Event:
        """Refuse: there is nothing to copy."""
        raise RuntimeError(
            "the accelerator cpu copies nothing: DEVICE and HOST are one memory. "
            "Check `unified` before a copy, and use the bytes where they are"
        )

    def allocate(self, nbytes: int, *, idle_bytes: int = 0) -> Buffer:
        """Return a buffer in host memory."""
        if nbytes < 1:
            raise ValueError(f"expected a buffer of 1 B or more, got {nbytes} B")
        try:
            # Small buffers come from malloc: whole pages for each would waste most of their memory.
            if nbytes < _LARGE:
                # Here too, or idle pages would stay as long as only small buffers are made.
                self._pages.keep_at_most(idle_bytes)
                return Buffer(torch.empty(nbytes, dtype=torch.uint8))
            memory = self._pages.take(nbytes, keep=idle_bytes)
            return Buffer(torch.frombuffer(memory, dtype=torch.uint8))
        # torch raises a plain RuntimeError when it is out of memory.
        except (RuntimeError, MemoryError, OSError) as error:
            free, total = self.memory()
            raise CapacityError(
                tier="DEVICE",
                asked=nbytes,
                free=free,
                limit=total,
                change="lower the budget's host to what this machine has",
            ) from error

    def free(self, buffer: Buffer) -> None:
        """Give a buffer back."""
        # Dropping the memory gives its pages back to the stock, once no view of it is left.
        buffer.release()

    def forget_idle(self) -> None:
        """Give idle memory back to the system."""
        self._pages.keep_at_most(0)

    def memory(self) -> DeviceBytes:
        """Return how much host memory this process may use, and how much of it is free."""
        return DeviceBytes(free=free_host_bytes(), total=probe_memory().usable_bytes)

    def _start(self, operation: Operation, behind: Sequence[Operation]) -> None:
        failure = operation.inherited()
        action = operation.action
        if failure is None and isinstance(action, Work):
            try:
                action.call()
            except Exception as error:
                failure = Failure(error)
        self._finish(operation, failure)

    def _has_ended(self, operation: Operation) -> bool:
        return True

    def _wait(self, operation: Operation) -> None:
        self._raise_failure(operation)

    def _drain(self) -> None:
        pass

    def _in_device(self, tensor: torch.Tensor) -> bool:
        return True
