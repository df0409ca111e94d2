"""`Ledger`: each tier's limit and the bytes promised to each holder; limits are compared only here.

Takes no memory itself: pools and swap files hold bytes within their `Reservation`. Reservations are
made when things are planned, so that what does not fit is refused before anything moves. Any thread
may call. Code that must not wait for a lock, as the garbage collector may run it anywhere, calls
`Reservation.release_soon`.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

from deepnvme.closing import Closing
from infinity_engine.errors import CapacityError, ConfigError
from infinity_engine.plan import ResolvedBudget, Tier
from infinity_engine.units import format_bytes

__all__ = ["Ledger", "Reservation", "Usage"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """The bytes of one tier or directory of NVMe: promised and held, now and at their peaks."""

    tier: Tier
    directory: str | None
    # limit >= reserved >= held: holders use what was promised to them.
    limit: int
    reserved: int
    held: int
    peak_reserved: int
    peak_held: int
    holders: tuple[tuple[str, int], ...]  # of the reservations, largest first


class _Account:
    """One limit and the reservations under it."""

    def __init__(self, tier: Tier, directory: str | None, limit: int) -> None:
        self.tier, self.directory, self.limit = tier, directory, limit
        self.reservations: list[Reservation] = []
        self.reserved = self.held = self.peak_reserved = self.peak_held = 0

    def promise(self, reservation: Reservation) -> None:
        """Count a new reservation."""
        self.reservations.append(reservation)
        self.promise_more(reservation.nbytes)

    def promise_more(self, nbytes: int) -> None:
        """Count bytes as promised, or, where negative, as not promised any more."""
        self.reserved += nbytes
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def check(self, nbytes: int, holder: str) -> None:
        """Refuse to promise more than is left under the limit."""
        needed = self.reserved + nbytes
        if needed <= self.limit:
            return
        # The name of the setting as the user writes it in the budget.
        setting = f"nvme[{self.directory!r}]" if self.directory else self.tier.value
        raise CapacityError(
            tier=self.tier.name,
            directory=self.directory,
            asked=nbytes,
            free=self.limit - self.reserved,
            limit=self.limit,
            holders=self.holders(),
            change=f"raise the budget's {setting} to at least {needed} B ({format_bytes(needed)}), "
            f"or ask less of it for {holder}",
        )

    def forget(self, reservation: Reservation) -> None:
        """Stop listing a reservation; it promises nothing any more."""
        self.reservations.remove(reservation)

    def hold(self, nbytes: int) -> None:
        """Count bytes as in use, or, where negative, as not in use any more."""
        self.held += nbytes
        self.peak_held = max(self.peak_held, self.held)

    def holders(self) -> tuple[tuple[str, int], ...]:
        """Return the holders and what was promised to each, largest first."""
        promised = (
            (reservation.holder, reservation.nbytes)
            for reservation in self.reservations
            # Reservations of no bytes, which may grow later, are in no other's way.
            if reservation.nbytes
        )
        return tuple(sorted(promised, key=lambda holder: holder[1], reverse=True))


class _Books:
    """The lock of all accounts of a ledger, and late releases, to be counted before a reading."""

    def __init__(self) -> None:
        # Without a lock: append and popleft are one step each.
        self.late: deque[tuple[Reservation, int]] = deque()
        # One lock for all accounts: a device's and the host's may be one.
        self.lock = threading.Lock()

    def count_late(self) -> None:
        """Count the late releases; called with the lock held, before an account is used."""
        while self.late:
            reservation, nbytes = self.late.popleft()
            reservation._subtract(nbytes)


class Reservation(Closing):
    """Bytes of one tier that are promised to `holder`, some in use; made by `Ledger.reserve`.

    A context manager. Closing it ends the promise: at once, except for the bytes in use, which end
    as they are released.
    """

    def __init__(self, account: _Account, books: _Books, nbytes: int, holder: str) -> None:
        self.holder = holder
        # What is promised now: grow, shrink and close change it.
        self.nbytes = nbytes
        self._account = account
        self._books = books
        self._held = self._peak = 0
        self._closed = False

    @property
    def tier(self) -> Tier:
        """The tier of its account: HOST also for DEVICE bytes where both are one memory."""
        return self._account.tier

    @property
    def held(self) -> int:
        """Bytes that are in use."""
        with self._books.lock:
            self._books.count_late()
            return self._held

    @property
    def peak(self) -> int:
        """The most that ever were in use."""
        # Without the lock: one read of an int, and the peak only ever grows.
        return self._peak

    def hold(self, nbytes: int) -> int:
        """Count `nbytes` as in use; return what is left of what was promised.

        Raises:
            CapacityError: they are more than is left of what was promised.
        """
        self._check(nbytes, "held")
        with self._books.lock:
            self._books.count_late()
            if self._closed:
                raise RuntimeError(
                    f"the reservation of {self.holder} is closed. Hold bytes only before close()"
                )
            # Within its own promise: what other holders have left does not matter here.
            if self._held + nbytes > self.nbytes:
                raise CapacityError(
                    tier=self._account.tier.name,
                    directory=self._account.directory,
                    asked=nbytes,
                    free=self.nbytes - self._held,
                    limit=self.nbytes,
                    holders=((self.holder, self._held),),
                    change=f"reserve at least {self._held + nbytes} B for {self.holder}, or hold "
                    "less at once",
                )
            self._held += nbytes
            self._peak = max(self._peak, self._held)
            self._account.hold(nbytes)
            return self.nbytes - self._held

    def grow(self, nbytes: int) -> None:
        """Promise `nbytes` more.

        Raises:
            CapacityError: that is more than is left under the limit. Nothing has changed.
        """
        self._check(nbytes, "promised more")
        with self._books.lock:
            self._books.count_late()
            if self._closed:
                raise RuntimeError(
                    f"the reservation of {self.holder} is closed and cannot grow. Reserve again"
                )
            # Raises before anything is counted.
            self._account.check(nbytes, self.holder)
            self.nbytes += nbytes
            self._account.promise_more(nbytes)

    def shrink(self, nbytes: int) -> None:
        """Promise `nbytes` less.

        Raises:
            ValueError: some of them are in use. Nothing has changed.
        """
        self._check(nbytes, "promised less")
        with self._books.lock:
            self._books.count_late()
            # What a closed reservation still promises is in use, and ends with its release.
            if self._closed:
                return
            if nbytes > self.nbytes - self._held:
                raise ValueError(
                    f"{self.holder} holds {self._held} of its {self.nbytes} B: the promise cannot "
                    f"shrink by {nbytes} B. Release bytes first"
                )
            self.nbytes -= nbytes
            self._account.promise_more(-nbytes)

    def release(self, nbytes: int) -> None:
        """Count `nbytes` as no longer in use."""
        self._check(nbytes, "given back")
        with self._books.lock:
            self._books.count_late()
            if nbytes > self._held:
                raise ValueError(
                    f"{self.holder} holds {self._held} B and cannot release {nbytes} B"
                )
            self._subtract(nbytes)

    def release_soon(self, nbytes: int) -> None:
        """Count `nbytes`, which must be held, as released at the next reading; take no lock."""
        # Appending is one step, so the collector may run this in the midst of any other method.
        self._books.late.append((self, nbytes))

    def _subtract(self, nbytes: int) -> None:
        self._held -= nbytes
        self._account.hold(-nbytes)
        # A closed reservation ends its promise byte by byte, as what is in use is released.
        if self._closed:
            self._end_promise(nbytes)

    def _check(self, nbytes: int, what: str) -> None:
        if nbytes < 0:
            raise ConfigError(
                field=f"bytes {what} by {self.holder}", value=nbytes, expected="0 or more bytes"
            )

    def close(self) -> None:
        """End the promise; for the bytes in use, when they are released. Again: does nothing."""
        with self._books.lock:
            self._books.count_late()
            if not self._closed:
                self._closed = True
                # What is in use stays promised: another holder must not be given the same bytes.
                self._end_promise(self.nbytes - self._held)

    def _end_promise(self, nbytes: int) -> None:
        self.nbytes -= nbytes
        self._account.promise_more(-nbytes)
        # Only when the last byte has gone, so that a refusal still names who has it.
        if not self.nbytes:
            self._account.forget(self)

    def __repr__(self) -> str:
        """Show its holder and how much of it is in use."""
        return (
            f"Reservation({self.holder}: {self._held} of {self.nbytes} B of "
            f"{self._account.tier.name} held)"
        )


class Ledger:
    """The accounts of one rank; `device_is` says which memory DEVICE's bytes are in.

    With `device_is=Tier.HOST`, DEVICE and HOST are one account under the host's limit.
    """

    def __init__(self, budget: ResolvedBudget, *, device_is: Tier = Tier.DEVICE) -> None:
        if device_is is Tier.NVME:
            raise ConfigError(
                field="Ledger.device_is", value=device_is, expected="Tier.DEVICE or Tier.HOST"
            )
        self._books = _Books()
        host = _Account(Tier.HOST, None, budget.host)
        # The same object twice: what counts for DEVICE counts for HOST, against one limit.
        device = host if device_is is Tier.HOST else _Account(Tier.DEVICE, None, budget.device)
        self._memory = {Tier.DEVICE: device, Tier.HOST: host}
        self._drives = {
            name: _Account(Tier.NVME, name, limit) for name, limit in budget.nvme.items()
        }

    def reserve(
        self, tier: Tier, nbytes: int, *, holder: str, directory: str | None = None
    ) -> Reservation:
        """Promise `nbytes` of `tier` to `holder`; of NVME, in `directory`.

        Raises:
            CapacityError: that is more than is left under the limit. Nothing has changed.
            ConfigError: the budget has no such directory.
        """
        if nbytes < 0:
            raise ConfigError(
                field=f"bytes reserved for {holder}", value=nbytes, expected="0 or more bytes"
            )
        account = self._account(tier, directory)
        # Check and promise under one lock, or two threads could be promised the same bytes.
        with self._books.lock:
            self._books.count_late()
            account.check(nbytes, holder)
            reservation = Reservation(account, self._books, nbytes, holder)
            account.promise(reservation)
        return reservation

    def free(self, tier: Tier, *, directory: str | None = None) -> int:
        """Return the bytes that can still be reserved."""
        account = self._account(tier, directory)
        with self._books.lock:
            self._books.count_late()
            return account.limit - account.reserved

    def usage(self) -> tuple[Usage, ...]:
        """Return the state of every account, DEVICE first; DEVICE is left out where it is HOST."""
        with self._books.lock:
            self._books.count_late()
            return tuple(
                Usage(
                    tier=account.tier,
                    directory=account.directory,
                    limit=account.limit,
                    reserved=account.reserved,
                    held=account.held,
                    peak_reserved=account.peak_reserved,
                    peak_held=account.peak_held,
                    holders=account.holders(),
                )
                # dict.fromkeys: DEVICE and HOST may be one account.
                for account in (*dict.fromkeys(self._memory.values()), *self._drives.values())
            )

    def _account(self, tier: Tier, directory: str | None) -> _Account:
        if tier is not Tier.NVME:
            if directory is not None:
                raise ConfigError(
                    field="directory", value=directory, expected=f"None for {tier.name}"
                )
            return self._memory[tier]
        if directory is None or directory not in self._drives:
            raise ConfigError.unknown_name(
                field="directory of NVME", name=directory, known=self._drives
            )
        return self._drives[directory]
