"""Measurements kept between processes: JSON files in the user's cache folder.

There is one file for the machine and one for each directory that was measured.

A file is named by a hash of what it holds for and says it as well. Files appear whole; what is
wrong with one is a warning, and it counts as not there. Measures nothing, imports no torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from infinity_engine.errors import ConfigError
from infinity_engine.plan import CALIBRATION_VERSION, Calibration, DriveFigures

__all__ = ["CalibrationCache", "CalibrationWarning", "cache_folder"]

_Figures = TypeVar("_Figures", Calibration, DriveFigures)


class CalibrationWarning(RuntimeWarning):
    """Figures that were kept cannot be used, or kept; the message says what happens instead."""


def cache_folder() -> Path | None:
    """Return where calibrations are kept; None where the user's home is not known.

    That is infinity_engine/calibration under XDG_CACHE_HOME, or under ~/.cache.
    """
    folder = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG rule: a path that is not absolute counts as not set.
    if not Path(folder).is_absolute():
        try:
            folder = str(Path.home() / ".cache")
        except RuntimeError:  # as in a container with an arbitrary user
            return None
    return Path(folder, "infinity_engine", "calibration")


class CalibrationCache:
    """The files of one folder; without a folder, nothing is kept."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    @classmethod
    def of_user(cls) -> CalibrationCache:
        """Return the cache of the user of this process."""
        return cls(cache_folder())

    def machine(self, identity: Mapping[str, str]) -> Calibration | None:
        """Return what was measured of this machine, without drives; None: nothing usable."""

        def read(document: Mapping[str, object]) -> Calibration:
            kept = Calibration.from_mapping(document.get("calibration"))
            # The name is a hash, cut short, and files may be copied.
            if dict(kept.machine) != dict(identity):
                expected = "the machine that the file is named after"
                raise ConfigError(
                    field="calibration.machine", value=dict(kept.machine), expected=expected
                )
            return kept

        return self._read("machine", identity, read)

    def drive(self, machine: Mapping[str, str], identity: Mapping[str, str]) -> DriveFigures | None:
        """Return what was measured of a directory on this machine; None: nothing usable."""

        def read(document: Mapping[str, object]) -> DriveFigures:
            kept = DriveFigures.from_mapping(document.get("drive"), field="drive")
            if dict(kept.drive) != dict(identity) or document.get("machine") != dict(machine):
                expected = "the directory and the machine that the file is named after"
                raise ConfigError(field="drive.drive", value=dict(kept.drive), expected=expected)
            return kept

        # A drive's figures are of one machine: home folders are shared between several.
        return self._read("drive", {**machine, **identity}, read)

    def keep_machine(self, measured: Calibration) -> None:
        """Keep what was measured of a machine, in place of what was kept of it."""
        document = {"calibration": measured.with_drives({}).to_mapping()}
        self._write("machine", measured.machine, document)

    def keep_drive(self, machine: Mapping[str, str], measured: DriveFigures) -> None:
        """Keep what was measured of a directory on this machine, in place of earlier figures."""
        document = {"machine": dict(machine), "drive": measured.to_mapping()}
        self._write("drive", {**machine, **measured.drive}, document)

    def holds(self, measured: Calibration) -> bool:
        """Tell whether just this is what would be found, of the machine and of all its drives."""
        # Without warnings: this only asks.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CalibrationWarning)
            drives = all(
                self.drive(measured.machine, found.drive) == found
                for found in measured.drives.values()
            )
            return drives and self.machine(measured.machine) == measured.with_drives({})

    @contextlib.contextmanager
    def alone(self, waiting: Callable[[], object] = lambda: None) -> Iterator[None]:
        """Let the body run while no other process is in one; `waiting` is called before a wait.

        Where the folder cannot be written or its file system has no locks, the body runs at once.
        """
        with contextlib.ExitStack() as stack:
            # Of the lock alone: an error of the body is raised.
            with contextlib.suppress(OSError):
                stack.enter_context(self._locked(waiting))
            yield

    @contextlib.contextmanager
    def _locked(self, waiting: Callable[[], object]) -> Iterator[None]:
        if self.folder is None:
            yield
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        # Never removed: another process may wait for the lock of this very file.
        descriptor = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                # First without waiting, so that `waiting` is called only where there is a wait.
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waiting()
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            # Closing the last descriptor ends the lock, also when the process is killed.
            os.close(descriptor)

    def path(self, what: str, identity: Mapping[str, str]) -> Path | None:
        """Return the file of a "machine" or a "drive" that these texts identify."""
        if self.folder is None:
            return None
        told = json.dumps(dict(sorted(identity.items())))
        # 96 bits make short names; the file itself says what it is of.
        return self.folder / f"{what}-{hashlib.sha256(told.encode()).hexdigest()[:24]}.json"

    def _read(
        self,
        what: str,
        identity: Mapping[str, str],
        read: Callable[[Mapping[str, object]], _Figures],
    ) -> _Figures | None:
        path = self.path(what, identity)
        if path is None:
            return None
        try:
            # From another version, or by another program: nothing in it is believed.
            document = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(document, dict) or document.get("version") != CALIBRATION_VERSION:
                raise ValueError(f"it is no object of version {CALIBRATION_VERSION}")
            return read(document)
        except FileNotFoundError:
            return None
        # RecursionError: JSON may nest deeper than Python reads.
        except (OSError, ValueError, RecursionError) as problem:  # a ConfigError is a ValueError
            warnings.warn(
                f"{path} is not used: {problem}. It is measured again",
                CalibrationWarning,
                stacklevel=4,
            )
            return None

    def _write(
        self, what: str, identity: Mapping[str, str], document: Mapping[str, object]
    ) -> None:
        path = self.path(what, identity)
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _replace(
                path, json.dumps({"version": CALIBRATION_VERSION, **document}, indent=1) + "\n"
            )
        except OSError as problem:
            message = (
                f"what was measured cannot be kept in {path.parent} ({problem.strerror}): set "
                "XDG_CACHE_HOME"
            )
            warnings.warn(
                f"{message} to a folder that can be written", CalibrationWarning, stacklevel=4
            )


def _replace(path: Path, text: str) -> None:
    """Let the file hold this text, at once or not at all."""
    descriptor, draft = tempfile.mkstemp(prefix=f"{path.name}.", suffix=".draft", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            # Before the rename: after a power failure the name must not show an empty file.
            file.flush()
            os.fsync(file.fileno())
        Path(draft).replace(path)
    # Does nothing after the rename: the draft's name is gone.
    finally:
        Path(draft).unlink(missing_ok=True)
