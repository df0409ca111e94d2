"""A file to measure on, and a progress bar.

The file is gone afterwards, also after Ctrl-C, a signal or an error.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from deepnvme.machine.backends import CHAIN, choose_backend
from deepnvme.machine.diagnosis import Severity, about_directory
from deepnvme.machine.probing import probe_directory
from deepnvme.machine.profile import Settings
from deepnvme.measuring.measure import MIB, fill
from deepnvme.memory.pool import Pool
from deepnvme.queue.queue import IOQueue
from deepnvme.sizes import format_bytes

__all__ = [
    "OPERATION_BYTES",
    "PIECE_BYTES",
    "UnusableError",
    "data_file",
    "progress_bar",
    "scratch_file",
    "signals_are_exceptions",
    "usable_backend",
    "usable_directory",
]

PIECE_BYTES = 64 * MIB  # files are a whole number of these
OPERATION_BYTES = 16 * MIB

_Advance = Callable[[str], None]


class UnusableError(OSError):
    """Nothing can be measured here; the message says why, and how much room it would need."""


@contextlib.contextmanager
def progress_bar(steps: int) -> Iterator[_Advance]:
    """Show on standard error how many steps are done; yield the call that ends one of them.

    Nothing is drawn in between: a thread that draws would take part in what is measured.
    """
    console = Console(stderr=True)
    if not console.is_terminal:  # older versions of rich end even a disabled bar with an empty line
        yield lambda _: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as progress:
        task = progress.add_task("", total=steps)

        def advance(what: str) -> None:
            progress.update(task, description=what, advance=1, refresh=True)

        yield advance


def usable_backend(name: str) -> str:
    """Return the backend to measure.

    Raises:
        UnusableError: the name, which may be the environment's, is of no backend or of one without
            a drive.
        BackendUnavailableError: it is refused here.
    """
    try:
        backend = choose_backend(name, None)
    except ValueError as unknown:
        raise UnusableError(str(unknown)) from None
    if backend not in CHAIN:
        raise UnusableError(f"{backend} has no drive to measure; choose one of {', '.join(CHAIN)}")
    return backend


def usable_directory(directory: Path, nbytes: int) -> Path:
    """Return the directory's real path, if a file of `nbytes` fits; warn if it is unfit to measure.

    Raises:
        UnusableError: no file can be made there, or not so large a one.
    """
    probe = probe_directory(directory)
    for finding in about_directory(probe):
        if finding.severity is Severity.BLOCKER:
            raise UnusableError(f"{finding.subject}: {finding.what}; {finding.remedy}")
        if finding.severity is Severity.WEAK:
            warnings.warn(f"{finding.subject}: {finding.what}", UserWarning, stacklevel=2)
    free = probe.free_bytes or 0
    if free < nbytes:
        raise UnusableError(
            f"{probe.path}: the file to measure on needs {format_bytes(nbytes)}, and "
            f"{format_bytes(free)} are free. Free space, or name a directory on another drive"
        )
    return Path(probe.path)


@contextlib.contextmanager
def scratch_file(directory: Path, prefix: str) -> Iterator[Path]:
    """Yield an empty file that is gone afterwards, also after Ctrl-C, a signal or an error."""
    # Else a signal would end the process without the `finally` below.
    with signals_are_exceptions():
        # Named before it is made: an interrupt in between is to find it.
        path = directory / f"{prefix}{uuid.uuid4().hex}.tmp"
        try:
            path.touch(mode=0o600, exist_ok=False)
            yield path
        finally:
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def data_file(
    directory: Path, nbytes: int, *, backend: str, advance: _Advance, seconds: float = float("inf")
) -> Iterator[tuple[Path, int]]:
    """Write up to `nbytes` random bytes, as many as time allows; yield path and length."""
    with scratch_file(directory, "deepnvme-") as path:
        yield path, _write(path, nbytes, backend, advance, time.perf_counter() + seconds)


def _write(path: Path, nbytes: int, backend: str, advance: _Advance, end: float) -> int:
    pool = Pool(OPERATION_BYTES)
    block = pool.buffer(OPERATION_BYTES)
    fill(block)
    usual = Settings()
    with (
        IOQueue(
            backend,
            chunk_bytes=usual.chunk_bytes,
            inflight_bytes=usual.inflight_bytes,
            user_memory=usual.user_memory,
            pool=pool,
        ) as queue,
        queue.open(path, "w", size=nbytes) as file,
    ):
        written = 0
        while written < nbytes and (written == 0 or time.perf_counter() < end):
            advance(f"writing a file of {format_bytes(nbytes)}")
            with queue.batch() as batch:
                for offset in range(written, written + PIECE_BYTES, OPERATION_BYTES):
                    batch.pwrite(file, block, offset)
            written += PIECE_BYTES
        file.truncate(written)
        file.sync().result()
    return written


@contextlib.contextmanager
def signals_are_exceptions() -> Iterator[None]:
    """Let SIGTERM and SIGHUP unwind the program, as Ctrl-C does."""

    def end(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
