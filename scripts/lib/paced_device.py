"""The emulated device under the real clock: threads that copy and work at set rates.

For benches, and for tests of what the engine does with a device that takes its time.

One thread for each link and one for each stream of device work. A copy goes in pieces, each paced
by a deadline that is computed from the operation's start, and an operation starts at the deadlines
of what it waits for: late wake-ups do not add up. Memory moves without the GIL, and a thread that
woke late moves all that is due at once. A machine that cannot keep up with the rates makes the
device slower than they say.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Sequence
from queue import SimpleQueue

from infinity_engine.accel.base import Stream, StreamKind
from infinity_engine.accel.emulated import EmulatedAccelerator, Emulation
from infinity_engine.accel.operation import (
    Copy,
    Failure,
    Mark,
    Operation,
    OperationOwner,
    Submission,
    Work,
)

__all__ = ["PacedAccelerator", "PacedOperation"]

_PIECE_NS = 1_000_000  # of a copy: longer pieces come in bursts, shorter ones cost wake-ups
_NS_PER_S = 10**9


class PacedOperation(Operation):
    """An operation that a thread carries out."""

    def __init__(self, owner: OperationOwner, submission: Submission) -> None:
        super().__init__(owner, submission)
        # From the submission, not from the worker's wake-up: the device would have begun at once.
        self.submitted_ns = time.perf_counter_ns()
        self.end_ns = 0
        self._ended = threading.Event()

    @property
    def has_ended(self) -> bool:
        """Whether it has ended."""
        return self._ended.is_set()

    def end(self, end_ns: int) -> None:
        # Written first: a thread that has seen the event reads this without a lock.
        """Let it end: `end_ns` is when it was due."""
        self.end_ns = end_ns
        self._ended.set()

    def block(self) -> None:
        """Block until it has ended."""
        self._ended.wait()


_Job = tuple[PacedOperation, Sequence[PacedOperation]]


class PacedAccelerator(EmulatedAccelerator[PacedOperation]):
    """An emulated device that takes its time."""

    clock = "real"

    def __init__(self, emulation: Emulation) -> None:
        super().__init__(PacedOperation, emulation)
        self._workers: dict[
            Stream | StreamKind, tuple[threading.Thread, SimpleQueue[_Job | None]]
        ] = {}

    def _start(self, operation: PacedOperation, behind: Sequence[PacedOperation]) -> None:
        stream = operation.stream
        # One thread for each link, whatever the stream: copies of one direction share the link's
        # rate.
        key = stream.kind if stream.kind in self._ratios else stream
        if key not in self._workers:
            jobs: SimpleQueue[_Job | None] = SimpleQueue()
            thread = threading.Thread(
                target=self._serve, args=(jobs,), name=f"emulated {stream.name}", daemon=True
            )
            self._workers[key] = thread, jobs
            thread.start()
        # Unbounded, so a submission never blocks the host, as on a real device.
        self._workers[key][1].put((operation, behind))

    def _has_ended(self, operation: PacedOperation) -> bool:
        return operation.has_ended

    def _wait(self, operation: PacedOperation) -> None:
        operation.block()
        self._raise_failure(operation)

    def _drain(self) -> None:
        for lane in self._lanes.values():
            for newest in lane.newest:
                newest.block()

    def _shut_down(self) -> None:
        for _, jobs in self._workers.values():
            jobs.put(None)
        for thread, _ in self._workers.values():
            thread.join()

    def _serve(self, jobs: SimpleQueue[_Job | None]) -> None:
        """Carry out jobs until None comes; each waits only for jobs submitted before it."""
        # When this worker's last job was due to end: a link carries one copy at a time.
        free_ns = 0
        while True:
            job = jobs.get()
            if job is None:
                return
            free_ns = self._carry_out(*job, free_ns)
            del job  # else this frame would keep the job's tensors alive until the next job

    def _carry_out(
        self, operation: PacedOperation, behind: Sequence[PacedOperation], free_ns: int
    ) -> int:
        for other in behind:
            # Cannot wait for each other in a circle: each operation waits only for lower numbers.
            other.block()
        # Due times, not observed ones: a thread that wakes late does not make all later operations
        # late.
        due_ns = max([operation.submitted_ns, free_ns, *(other.end_ns for other in behind)])
        began_ns = time.perf_counter_ns()
        failure = operation.inherited()
        if failure is None:
            try:
                due_ns = self._perform(operation, due_ns)
            # Everything: the thread must go on, or each wait for a later operation would hang.
            except BaseException as error:
                failure = Failure(error)
        if not isinstance(operation.action, Mark):
            self._note(operation, began_ns, time.perf_counter_ns())
        # Before end(): the host may look at the failure as soon as it sees the end.
        self._finish(operation, failure)
        operation.end(due_ns)
        return due_ns

    def _perform(self, operation: PacedOperation, start_ns: int) -> int:
        """Carry it out, beginning now what was due at `start_ns`; return when its end was due."""
        action = operation.action
        if isinstance(action, Mark):
            return start_ns
        self._raise_fault(operation)
        duration_ns = self._duration_ns(operation.stream, action)
        if isinstance(action, Copy):
            _copy_paced(action, start_ns, duration_ns)
        elif isinstance(action, Work):
            action.call()
            _sleep_until(start_ns + duration_ns)
        return start_ns + duration_ns


def _copy_paced(copy: Copy, start_ns: int, duration_ns: int) -> None:
    target, source, nbytes = copy.target.data_ptr(), copy.source.data_ptr(), copy.nbytes
    copied = 0
    while copied < nbytes:
        # Whatever is due by now, and a piece ahead; a thread that woke late catches up here.
        due_ns = time.perf_counter_ns() - start_ns + _PIECE_NS
        # At least one byte more, so that a copy of any rate comes to its end.
        upto = min(nbytes, max(nbytes * due_ns // duration_ns, copied + 1))
        # Without the GIL, so copies of both directions and Python's own work overlap.
        ctypes.memmove(target + copied, source + copied, upto - copied)
        copied = upto
        _sleep_until(start_ns + duration_ns * copied // nbytes)


def _sleep_until(deadline_ns: int) -> None:
    left_ns = deadline_ns - time.perf_counter_ns()
    if left_ns > 0:
        time.sleep(left_ns / _NS_PER_S)
