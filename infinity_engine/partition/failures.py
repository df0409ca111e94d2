"""`Failures`: how ranks report that they cannot go on, so that each rank can name the one that did.

Uses the key-value store that the ranks met at, and looks at processes of its own machine. Takes no
part in collectives, which do not work any more by then. Without a store it knows only that
something failed.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol

import psutil

__all__ = ["Failures", "NoStore", "Process", "Store"]

# Between two looks at the store.
_PAUSE_S = 0.02
# A longer difference means that the process number belongs to another process by now.
_CLOCK_S = 5.0
# Characters of one report.
_MOST_SHOWN = 500


class Store(Protocol):
    """The part of a process group's store that is needed here."""

    def set(self, key: str, value: str) -> object:
        """Keep a value for all ranks."""

    def get(self, key: str) -> bytes:
        """Return a value; waits for it where there is none."""

    def check(self, keys: list[str]) -> bool:
        """Tell whether all of these have values, without waiting."""


class NoStore:
    """Stands where ranks met without a store: it cannot be reached."""

    def set(self, *_given: Any, **_named: Any) -> NoReturn:
        """Raise, as a store does that is gone."""
        raise ConnectionError("the ranks met without a store")

    get = check = set


@dataclass(frozen=True, slots=True)
class Process:
    """A process, as others on its machine can find it. `machine` differs on other machines."""

    pid: int
    started: float
    machine: str

    @classmethod
    def own(cls) -> Process:
        """Return this one."""
        # Containers of one machine share the boot's number, but not the namespace of process
        # numbers.
        boot = Path("/proc/sys/kernel/random/boot_id")
        machine = f"{boot.read_text().strip() if boot.exists() else ''} {_pid_namespace()}"
        return cls(os.getpid(), psutil.Process().create_time(), machine)

    def has_ended(self, seen_from: Process) -> bool:
        """Tell whether the process has certainly ended."""
        if self.machine != seen_from.machine:
            return False
        try:
            process = psutil.Process(self.pid)
            # Reading the clock's start anew may move what was seen of a process by a second.
            another = abs(process.create_time() - self.started) > _CLOCK_S
            # A zombie has ended: its parent has not asked for its status yet.
            return another or process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True


class Failures:
    """What rank `rank` of `size` reports to the other ranks, and what they report to it.

    It waits for them for `patience_s` at most.
    """

    def __init__(self, store: Store, name: str, rank: int, size: int, *, patience_s: float) -> None:
        self._store = store
        self._name = name
        self._rank = rank
        self._size = size
        self._patience_s = patience_s
        if self.has_store:
            self._put(f"process/{rank}", json.dumps(asdict(Process.own())))

    @property
    def has_store(self) -> bool:
        """Whether there is a store, without which the other ranks hear nothing."""
        return not isinstance(self._store, NoStore)

    def seen(self) -> bool:
        """Tell whether some rank has reported a failure."""
        return self._has("failed")

    def report(self, what: str) -> None:
        """Report why this rank cannot go on."""
        self._put(f"reports/{self._rank}", what[:_MOST_SHOWN])
        # The reason is stored before the alarm: a rank that sees the alarm reads it at once.
        self._put("failed", what[:_MOST_SHOWN])

    def leave(self, what: str) -> None:
        """Report that this rank ended on purpose, unless it has reported a failure."""
        if not self._has(f"reports/{self._rank}"):
            self._put(f"reports/{self._rank}", what[:_MOST_SHOWN])

    def want(self, number: int, position: int, among: str) -> None:
        """Announce which collective this rank waits for, and how far it is in the group's order."""
        self._put(f"wanted/{among}", f"{number} {position}")

    def wanted(self, among: str) -> tuple[int, int]:
        """Return which collective a rank of a group waits or waited for, and how far it is.

        The last that was announced: ranks write to one key.
        """
        number, position = map(int, (self._get(f"wanted/{among}") or "0 0").split())
        return number, position

    def account(self) -> list[str]:
        """Return a sentence about each other rank; wait, for a bounded time, until it reports."""
        if self._size == 1:
            return []
        if not self._reachable():
            return [
                "the state of the other ranks is unknown, as the store at which they met cannot "
                "be reached"
            ]
        reports: dict[int, str] = {}
        # Known to have ended without a report.
        ended: dict[int, int] = {}
        missing = [rank for rank in range(self._size) if rank != self._rank]
        until = time.monotonic() + self._patience_s
        while missing:
            # A copy, as ranks leave the list.
            for rank in list(missing):
                reported = self._get(f"reports/{rank}")
                pid = self._ended(rank)
                if reported:
                    reports[rank] = reported
                elif pid is not None:
                    ended[rank] = pid
                else:
                    continue
                missing.remove(rank)
            if not missing or time.monotonic() > until:
                break
            time.sleep(_PAUSE_S)
        return _in_words(ended, missing, reports, self._patience_s)

    def _ended(self, rank: int) -> int | None:
        """Return the process number of a rank if that process has ended; None where it has not."""
        text = self._get(f"process/{rank}")
        if not text:
            return None
        process = Process(**json.loads(text))
        return process.pid if process.has_ended(Process.own()) else None

    def _reachable(self) -> bool:
        try:
            self._store.check([self._key("failed")])
        except Exception:  # Each kind of store raises errors of its own.
            return False
        return True

    def _key(self, what: str) -> str:
        return f"infinity/{self._name}/{what}"

    def _put(self, what: str, value: str) -> None:
        with suppress(Exception):  # A failed report must not hide the failure itself.
            self._store.set(self._key(what), value)

    def _has(self, what: str) -> bool:
        try:
            return bool(self._store.check([self._key(what)]))
        except Exception:
            return False

    def _get(self, what: str) -> str:
        """Return a value; empty where there is none."""
        # `get` would wait for a value that no rank may ever set.
        if not self._has(what):
            return ""
        try:
            return self._store.get(self._key(what)).decode()
        except Exception:
            return ""


def _in_words(
    ended: Mapping[int, int], missing: list[int], reports: Mapping[int, str], patience_s: float
) -> list[str]:
    """Return the accounts as sentences, the likely cause first."""
    parts = [
        f"rank {rank} (process {pid} of this machine) has ended without a report"
        for rank, pid in ended.items()
    ]
    if missing:
        ranks = (
            f"rank {missing[0]} has"
            if len(missing) == 1
            else f"ranks {', '.join(map(str, missing))} have"
        )
        parts.append(
            f"{ranks} not answered for {patience_s:g} s: it has died, or its program is busy "
            "elsewhere"
        )
    return [*parts, *(f"rank {rank} {text}" for rank, text in reports.items())]


def _pid_namespace() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""
