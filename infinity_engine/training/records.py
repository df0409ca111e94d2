"""The directory of a run: what was asked for, and a JSON line for each step and each event.

Writes so that a kill at any instant loses one line at most, and reads whatever is there: a line
that was cut short, or a file that something else has changed, is counted and not believed. Never
imports torch.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from infinity_engine.errors import ConfigError

__all__ = [
    "BEGAN",
    "ENDED",
    "SAVING",
    "SCHEMA",
    "STEP",
    "RecordedRun",
    "RunDirectory",
    "RunEvent",
    "RunStep",
    "entries",
    "figure",
    "line_of",
]

SCHEMA = 1  # of the files: raised when a field changes its meaning or goes
BEGAN, SAVING, ENDED, STEP = "began", "saving", "ended", "step"
_MOST_LINE = 1 << 20  # characters: a longer line was not written by a run


class RunDirectory:
    """Where the parts of a run are, and how they are written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.description = path / "run.json"
        self.records = path / "records.jsonl"
        self.timeline = path / "timeline.json"
        self.data = path / "data"
        self.checkpoints = path / "checkpoints"
        self.weights = path / "weights"
        self.report = path / "report.html"

    def begin(self, *, resume: bool) -> Mapping[str, object] | None:
        """Make the directory; return what the run there is, None where there is none to go on with.

        Raises:
            ConfigError: there is a run, and it is not to be resumed; or nothing can be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            steps = (it for it in _read_lines(self.records, []) if it.get("event") == STEP)
            has_trained = self.checkpoints.exists() or any(steps)
        except OSError as error:
            expected = f"a directory that can be written ({error.strerror})"
            raise ConfigError(field="run", value=str(self.path), expected=expected) from error
        # A start that has failed before its first step leaves nothing that could be lost.
        if not has_trained:
            return None
        if not resume:
            expected = "a new directory, or --resume to go on with the run that is there"
            raise ConfigError(field="run", value=str(self.path), expected=expected)
        description = _read_json(self.description, [])
        if not description:
            expected = f"a run.json that can be read: remove {self.path}, or choose another one"
            raise ConfigError(field="run", value=str(self.description), expected=expected)
        return description

    def describe(self, description: Mapping[str, object]) -> None:
        """Write what the run is."""
        self.replace_json(self.description, {"schema": SCHEMA, **description})

    def opened(self) -> IO[str]:
        """Return the file of records, to which this process alone adds lines.

        Raises:
            ConfigError: another process trains this run.
        """
        file = self.records.open("a", encoding="utf-8")
        if _is_locked(file, fcntl.LOCK_EX):
            file.close()
            expected = "a run that no other process trains: wait for it, or stop it"
            raise ConfigError(field="run", value=str(self.path), expected=expected)
        # A line that a kill has cut short gets an end, or the next one would be lost with it.
        with self.records.open("rb") as written:
            written.seek(max(self.records.stat().st_size - 1, 0))
            if written.read() not in {b"", b"\n"}:
                file.write("\n")
        return file

    def replace_json(self, path: Path, value: Mapping[str, object]) -> None:
        """Write a file of JSON whole."""
        self.replace(path, json.dumps(_finite(value)))

    def replace(self, path: Path, text: str) -> None:
        """Write a file whole: a reader sees the one before or this one."""
        written = path.with_name(f".{path.name}.{os.getpid()}")
        written.write_text(text, encoding="utf-8", errors="backslashreplace")
        written.replace(path)


def _is_locked(file: IO[str], kind: int) -> bool:
    """Tell whether another process holds the lock; where none does, this file has it now."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass  # a file system without locks
    return False


def line_of(event: str, **fields: object) -> str:
    """Return a record as a line; numbers that JSON does not have are null."""
    return json.dumps(_finite({"event": event, "at": time.time(), **fields})) + "\n"


def _finite(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# --- reading --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RunStep:
    """One step as it was recorded; what is missing, or is no number, is None."""

    number: int
    fields: Mapping[str, object]

    def figure(self, *names: str) -> float | None:
        """Return the number under this name, or under names within one another."""
        return figure(self.fields, *names)

    def entries(self, *names: str) -> Mapping[str, object]:
        """Return the mapping under these names, empty where there is none."""
        return entries(self.fields, *names)


@dataclass(frozen=True, slots=True)
class RunEvent:
    """Something that happened to the run: it began, was saved or has ended."""

    kind: str
    fields: Mapping[str, object]


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedRun:
    """All that is recorded of a run. `steps` are those that count, each once."""

    path: Path
    description: Mapping[str, object] = field(default_factory=dict)
    steps: Sequence[RunStep] = ()
    events: Sequence[RunEvent] = ()
    timeline: Mapping[str, object] = field(default_factory=dict)
    written: Mapping[str, int] = field(default_factory=dict)
    """The bytes that were written to each directory, those of repeated steps included."""
    goes_on: bool = False
    """Whether a process trains it now."""
    damage: Sequence[str] = ()
    """What could not be read, in words."""

    @classmethod
    def read(cls, path: Path) -> RecordedRun:
        """Read a run's directory, whatever state it is in.

        Raises:
            ConfigError: there is no such directory.
        """
        if not path.is_dir():
            expected = "the directory of a run, which `infinity train --run` has made"
            raise ConfigError(field="run", value=str(path), expected=expected)
        directory, damage = RunDirectory(path), list[str]()
        steps: dict[int, RunStep] = {}
        events, written, before = [], dict[str, int](), dict[str, int]()
        for fields in _read_lines(directory.records, damage):
            kind, number = fields.get("event"), figure(fields, "step")
            if kind == STEP and number is not None:
                steps[int(number)] = RunStep(int(number), fields)
                for name in entries(fields, "drives"):
                    in_all = int(figure(fields, "drives", name, "written_in_all") or 0)
                    # The engine counts from its own start.
                    written[name] = before.get(name, 0) + in_all
            elif isinstance(kind, str):
                events.append(RunEvent(kind, fields))
                if kind == BEGAN:
                    # Steps after the checkpoint that it goes on from are made again.
                    steps = {at: step for at, step in steps.items() if at <= (number or 0)}
                    before = dict(written)
        return cls(
            path=path,
            description=_read_json(directory.description, damage),
            timeline=_read_json(directory.timeline, damage, optional=True),
            steps=[steps[number] for number in sorted(steps)],
            events=events,
            written=written,
            goes_on=_is_open(directory.records),
            damage=damage,
        )

    @property
    def ended(self) -> RunEvent | None:
        """How the run has ended; None: it goes on, or was killed."""
        last = next((event for event in reversed(self.events) if event.kind != SAVING), None)
        return last if last is not None and last.kind == ENDED else None


def _is_open(records: Path) -> bool:
    try:
        with records.open(encoding="utf-8") as file:
            return _is_locked(file, fcntl.LOCK_SH)
    except OSError:
        return False


def figure(fields: Mapping[str, object], *names: str) -> float | None:
    """Return the finite number under these names, within one another; None where there is none."""
    *outer, last = names
    value = entries(fields, *outer).get(last)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    # An int may be larger than any float.
    return float(value) if abs(value) < 1e300 else None


def entries(fields: Mapping[str, object], *names: str) -> Mapping[str, object]:
    """Return the mapping under these names, empty where there is none."""
    found: object = fields
    for name in names:
        found = found.get(name) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else {}


def _read_json(path: Path, damage: list[str], *, optional: bool = False) -> Mapping[str, object]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if not optional:
            damage.append(f"{path.name} is missing")
        return {}
    except (OSError, ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        damage.append(f"{path.name} cannot be read")
        return {}
    return found


def _read_lines(path: Path, damage: list[str]) -> Iterator[Mapping[str, object]]:
    wrong = 0
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                if not line.strip():
                    continue
                try:
                    found = json.loads(line) if len(line) <= _MOST_LINE else None
                except (ValueError, RecursionError):
                    found = None
                if isinstance(found, dict):
                    yield found
                else:
                    wrong += 1
    except FileNotFoundError:
        damage.append(f"{path.name} is missing")
    except OSError as error:
        damage.append(f"{path.name} cannot be read ({error.strerror})")
    if wrong:
        damage.append(f"{path.name} has {wrong} damaged lines; a kill leaves one")
