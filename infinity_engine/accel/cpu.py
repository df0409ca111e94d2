"""The host as its own device: DEVICE and HOST are one memory, so there is nothing to copy, and work happens at once.

Starts no thread: a buffer is an ordinary tensor's. Memory that was given back is kept for buffers of the same size as
far as its owner allows, because new pages cost as much time as filling them. DEVICE's bytes count as HOST's, which is
the business of whoever keeps the budgets.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence

import torch

from deepnvme import Pool
from infinity_engine.accel.base import Buffer, DeviceBytes, Event, Stream
from infinity_engine.accel.operation import Failure, Operation, Work
from infinity_engine.accel.ordered import OrderedAccelerator
from infinity_engine.errors import CapacityError
from infinity_engine.machine.memory import probe_memory
from infinity_engine.units import align_up

__all__ = ["CpuAccelerator"]


_LARGE = 64 << 10  # from here on, memory begins on a page
_PAGE = 4096


class CpuAccelerator(OrderedAccelerator[Operation]):
    """No device at all: every operation has ended when its submission returns."""

    name = "cpu"
    unified = True

    def __init__(self) -> None:
        super().__init__(Operation)
        self.torch_device = torch.device("cpu")
        self._pages = _Pages()

    def copy(self, target: torch.Tensor, source: torch.Tensor, *, stream: Stream, after: Sequence[Event] = ()) -> Event:
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
            if nbytes < _LARGE:
                self._pages.keep_at_most(idle_bytes)
                return Buffer(torch.empty(nbytes, dtype=torch.uint8))
            return Buffer(self._pages.take(nbytes, idle_bytes))
        except (RuntimeError, MemoryError, OSError) as error:  # torch has no class of its own for this
            free, total = self.memory()
            raise CapacityError(
                tier="DEVICE", asked=nbytes, free=free, limit=total, change="let the host budget fit this machine"
            ) from error

    def free(self, buffer: Buffer) -> None:
        """Give a buffer back."""
        buffer.release()

    def forget_idle(self) -> None:
        """Give idle memory back to the system."""
        self._pages.keep_at_most(0)

    def memory(self) -> DeviceBytes:
        """Return how much host memory this process may use, and how much of it nobody has taken."""
        memory = probe_memory()
        free = memory.available_bytes
        if memory.cgroup is not None and memory.cgroup.used_bytes is not None:
            free = max(min(free, memory.cgroup.limit_bytes - memory.cgroup.used_bytes), 0)
        return DeviceBytes(free=free, total=memory.usable_bytes)

    def _start(self, operation: Operation, behind: Sequence[Operation]) -> None:
        failure = operation.inherited()
        action = operation.action
        if failure is None and isinstance(action, Work):
            try:
                action.call()
            except Exception as error:
                failure = Failure(error)
        self._settle(operation, failure)

    def _has_ended(self, operation: Operation) -> bool:
        return True

    def _wait(self, operation: Operation) -> None:
        self._tell(operation)

    def _drain(self) -> None:
        pass

    def _in_device(self, tensor: torch.Tensor) -> bool:
        return True


class _Pages:
    """Memory that drives can read into without a copy; what nobody has views of is idle, and can be had again."""

    def __init__(self) -> None:
        self._idle: deque[Pool] = deque()  # what went back last, last
        self._returned: deque[Pool] = deque()  # by finalizers, which may run anywhere

    def take(self, nbytes: int, idle_bytes: int) -> torch.Tensor:
        """Return so many bytes; at most `idle_bytes` stay idle beside them."""
        self._catch_up()
        pool = next((each for each in reversed(self._idle) if each.capacity == align_up(nbytes, _PAGE)), None)
        if pool is None:
            self.keep_at_most(idle_bytes)
            pool = Pool(nbytes)
        else:
            self._idle.remove(pool)
            self.keep_at_most(idle_bytes)
        memory = pool.buffer(nbytes)
        weakref.finalize(memory, self._returned.append, pool)
        return torch.frombuffer(memory, dtype=torch.uint8)

    def keep_at_most(self, nbytes: int) -> None:
        """Give idle memory back to the system, what has been idle longest first, until at most so much is left."""
        self._catch_up()
        left = sum(pool.capacity for pool in self._idle)
        while left > nbytes:
            left -= self._idle.popleft().capacity

    def _catch_up(self) -> None:
        while self._returned:
            pool = self._returned.popleft()
            if pool.free_bytes == pool.capacity:
                self._idle.append(pool)
