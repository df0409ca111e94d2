"""What all accelerators share: checked submissions, order within streams, failures on the host.

Knows streams as queues of operations; how an operation is carried out, and when, belongs to the
subclasses.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch

from infinity_engine.accel.base import Accelerator, Cost, Event, Stream, StreamKind
from infinity_engine.accel.operation import Action, Copy, Failure, Mark, Operation, Submission, Work
from infinity_engine.kept_errors import again

__all__ = ["OrderedAccelerator", "StreamOrder"]

_Op = TypeVar("_Op", bound=Operation)
_RUNS_WORK = frozenset({StreamKind.COMPUTE, StreamKind.COLLECTIVE})


class StreamOrder(Generic[_Op]):
    """The state of one stream: its newest operation, and what the next one is to wait for."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.newest: Sequence[_Op] = ()  # none before the first
        self._waits: list[_Op] = []

    def wait_for(self, operation: _Op) -> None:
        """Make the next operation wait for this one."""
        self._waits.append(operation)

    def pop_waits(self) -> list[_Op]:
        """Return what the next operation waits for, and forget it: later ones wait for that one."""
        waits, self._waits = self._waits, []
        return waits

    def append(self, operation: _Op) -> None:
        """Note the newest operation."""
        self.newest = (operation,)


class OrderedAccelerator(Accelerator, Generic[_Op]):
    """An accelerator in terms of operations: subclasses make them, start them and wait for them."""

    def __init__(self, kind: type[_Op]) -> None:
        self._kind = kind
        self._lanes: dict[Stream, StreamOrder[_Op]] = {}
        self._submitted = 0
        self._lock = threading.Lock()  # guards _failures: paced operations fail in own threads
        self._failures: list[tuple[int, Failure]] = []
        self._stopped = False

    def stream(self, kind: StreamKind) -> Stream:
        """Return a new stream."""
        # Numbered within the kind: names of streams appear in timelines and messages.
        stream = Stream(kind, f"{kind.value} {sum(other.kind is kind for other in self._lanes)}")
        self._lanes[stream] = StreamOrder(stream)
        return stream

    def record(self, stream: Stream) -> Event:
        """Return the end of everything that was submitted to `stream` so far."""
        return self._submit(stream, Mark(), ())

    def wait_for(self, stream: Stream, event: Event) -> None:
        """Make all that is submitted to `stream` from here on wait for `event`."""
        self._lane(stream).wait_for(self._own(event))

    def copy(
        self,
        target: torch.Tensor,
        source: torch.Tensor,
        *,
        stream: Stream,
        after: Sequence[Event] = (),
    ) -> Event:
        """Copy bytes between host and device, once all of `after` have passed."""
        _check_bytes(target=target, source=source)
        direction = self._direction(target, source)
        if stream.kind is not direction:
            raise ValueError(
                f"expected a stream of kind {direction.value} for this copy, got {stream.name}"
            )
        return self._submit(stream, Copy(target, source), after)

    def run(
        self, work: Callable[[], object], *, stream: Stream, cost: Cost, after: Sequence[Event] = ()
    ) -> Event:
        """Run `work` on the device, once all of `after` have passed."""
        if stream.kind not in _RUNS_WORK:
            raise ValueError(
                "expected a stream of kind compute or collective for device work, got "
                f"{stream.name}"
            )
        return self._submit(stream, Work(work, cost), after)

    def synchronize(self) -> None:
        """Block the host until all has ended; raise the first error that was not yet raised."""
        self._drain()
        self._raise_unreported()

    def stop(self) -> None:
        """Wait for all that was submitted and stop the device."""
        # Draining first: a device must not go while its operations still use memory.
        if not self._stopped:
            self._drain()
            # Set first: after an error in _shut_down() a second call does nothing.
            self._stopped = True
            self._shut_down()

    def close(self) -> None:
        """Stop the device, and raise the first error that was not yet raised."""
        self.stop()
        self._raise_unreported()

    @abstractmethod
    def _start(self, operation: _Op, behind: Sequence[_Op]) -> None:
        """Begin an operation; `behind` are all that it waits for, begun before."""

    @abstractmethod
    def _has_ended(self, operation: _Op) -> bool:
        """Tell whether an operation has ended."""

    @abstractmethod
    def _wait(self, operation: _Op) -> None:
        """Block until an operation has ended, and raise its failure."""

    @abstractmethod
    def _drain(self) -> None:
        """Block until all operations have ended."""

    @abstractmethod
    def _in_device(self, tensor: torch.Tensor) -> bool:
        """Tell whether the bytes of `tensor` are device memory."""

    def _shut_down(self) -> None:
        """Release the resources that the device runs on: nothing is under way any more."""

    def _submit(self, stream: Stream, action: Action, events: Sequence[Event]) -> _Op:
        lane = self._lane(stream)
        named = [self._own(event) for event in events]
        if self._stopped:
            raise RuntimeError(
                f"the accelerator {self.name} is closed: submit nothing after close()"
            )
        # wait_for() delays the next operation only: later ones follow it in the stream anyway.
        after = [*named, *lane.pop_waits()]
        number, previous = self._submitted, lane.newest
        submission = Submission(
            number=number, stream=stream, action=action, previous=previous, after=tuple(after)
        )
        operation = self._kind(self, submission)
        behind = [*previous, *after]
        self._submitted += 1
        lane.append(operation)
        self._start(operation, behind)
        return operation

    def _finish(self, operation: _Op, failure: Failure | None) -> None:
        """Note how an operation ended."""
        operation.finish(failure)
        if failure is not None:
            # Of operations that have ended only failures are kept, and each stream's newest.
            with self._lock:
                self._failures.append((operation.number, failure))

    def _raise_failure(self, operation: _Op) -> None:
        """Raise the error of an operation that has ended, if it has one."""
        if operation.failure is not None:
            operation.failure.mark_reported(self._submitted)
            # Drops the failures that are reported by now, so that close() does not raise them a
            # second time.
            self._unreported()
            # A copy: raising adds to a traceback, and each wait raises the error again.
            raise again(operation.failure.error)

    def _raise_unreported(self) -> None:
        unreported = self._unreported()
        for _, failure in unreported:
            failure.mark_reported(self._submitted)
        if unreported:
            # The lowest number: what came after it may have failed only because of it.
            _, first = min(unreported, key=lambda item: item[0])
            raise again(first.error)

    def _unreported(self) -> list[tuple[int, Failure]]:
        """Return the failures that were not raised on the host yet, and forget the others."""
        with self._lock:
            self._failures = [item for item in self._failures if not item[1].is_reported]
            return self._failures

    def _lane(self, stream: Stream) -> StreamOrder[_Op]:
        lane = self._lanes.get(stream)
        if lane is None:
            raise ValueError(
                f"expected a stream of this accelerator ({self.name}), got {stream.name} of "
                "another one. Ask this one's stream() for it"
            )
        return lane

    def _own(self, event: Event) -> _Op:
        if not isinstance(event, self._kind) or event.owner is not self:
            raise ValueError(
                f"expected an event of this accelerator ({self.name}), got {event!r} of another "
                "one. Streams of different accelerators cannot wait for each other"
            )
        return event

    def _direction(self, target: torch.Tensor, source: torch.Tensor) -> StreamKind:
        places = self._in_device(source), self._in_device(target)
        if places == (False, True):
            return StreamKind.H2D
        if places == (True, False):
            return StreamKind.D2H
        both = "device" if places[0] else "host"
        raise ValueError(
            f"expected one tensor in host and one in device memory, got both in {both} memory "
            "(a view of a freed buffer is in neither); within one memory, use run() or torch itself"
        )


def _check_bytes(*, target: torch.Tensor, source: torch.Tensor) -> None:
    for role, tensor in (("target", target), ("source", source)):
        # A copy is an address and a length: a strided tensor's would cover bytes of others.
        if tensor.dtype is not torch.uint8 or tensor.dim() != 1 or not tensor.is_contiguous():
            raise ValueError(
                f"expected the {role} of a copy to be a flat contiguous uint8 tensor, got "
                f"{tensor.dtype} of shape "
                f"{tuple(tensor.shape)}; take tensor.view(-1).view(torch.uint8)"
            )
    if target.numel() != source.numel() or not target.numel():
        raise ValueError(
            f"expected a target and a source of the same size, 1 B or more, got {target.numel()} B "
            f"and {source.numel()} B"
        )
