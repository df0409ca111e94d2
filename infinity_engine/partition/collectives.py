"""`Collectives`: one rank of a group, and what the ranks do together.

The only caller of torch.distributed.

Carries out rounds that its callers have laid out, in the order in which they were started, the same
on every rank. Before data of a collective moves, the ranks send one another headers that say which
collective it is. Where the headers differ, or a rank does not answer in time, every rank gets a
CollectiveError that names the ranks, and no collective works after that. One thread calls it.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any, Protocol

import torch
import torch.distributed as dist

from infinity_engine.accel import Accelerator, Event, Stream, TimeCost
from infinity_engine.errors import CollectiveError, ConfigError
from infinity_engine.kept_errors import again, kept
from infinity_engine.partition.failures import Failures, NoStore, Store
from infinity_engine.partition.header import Header, digest, disagreement
from infinity_engine.partition.rounds import (
    AllGather,
    Exchange,
    HostWork,
    Issuer,
    NoWire,
    Pending,
    Round,
    Rounds,
    Wire,
    Work,
    ignore,
    nothing,
)

__all__ = ["CollectiveEvent", "Collectives"]

_LOOK_S = 0.25  # how often a waiting rank checks whether another rank has failed
_TURN_S = 1e-3  # to block for one sequence, while another has something under way
_LONGEST_S = 1e8  # three years: torch counts in 64 bits
_PAUSE_S = 0.1e-3  # between two polls of a device
_PATIENCE_S = 5.0  # for the other ranks to report why they stopped
_STALL_S = 0.05  # after so long a waiting rank looks for a stall: [Note: who waits for whom]


class CollectiveEvent(Event):
    """The end of one collective on this rank.

    As with every event, one that failed has ended: `wait` raises its error, each time.
    """

    def __init__(self, owner: Collectives, pending: Pending) -> None:
        self._owner = owner
        self._pending = pending

    def done(self) -> bool:
        """Tell whether it has ended, without blocking; lets everything under way make progress."""
        # Polls all of the sequence: an event that is asked for moves the collectives before it too.
        self._owner.poll()
        return self._pending.ended

    def wait(self) -> None:
        """Block until it has ended.

        Raises:
            CollectiveError: it failed, or one before it.
        """
        self._owner.wait_for(self._pending)

    @property
    def announced(self) -> Sequence[int]:
        """The number that each rank has sent along, once it has ended well."""
        return self._pending.announced

    def __repr__(self) -> str:
        return f"CollectiveEvent({self._pending.op}{', ended' if self._pending.ended else ''})"


# --- what carries them ----------------------------------------------------------------------------


class _Torch:
    """Work of a process group."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def done(self) -> bool:
        return bool(self._work.is_completed())

    def wait(self) -> None:
        self._work.wait()

    def block(self, most_s: float) -> None:
        """Block until the work has ended, but no longer than `most_s`."""
        # torch raises when the time is over, too. A work that failed raises again in `wait`.
        with suppress(RuntimeError):
            self._work.wait(timedelta(seconds=most_s))


class _Done:
    """Nothing is under way."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        pass

    def block(self, most_s: float) -> None:
        pass


class _Channel(Protocol):
    """The way to the other ranks. `on_host` is for host bytes, whichever backend the data has."""

    store: Store

    def start(self, wire: Wire, *, on_host: bool) -> HostWork: ...

    def again(self, timeout_s: float) -> _Channel: ...

    def parted(self, parts: Sequence[range], mine: int, timeout_s: float) -> _Channel: ...

    def close(self) -> None: ...


class _Alone:
    """The way of one rank to itself."""

    store: Store = NoStore()

    def start(self, wire: Wire, *, on_host: bool) -> HostWork:
        if not isinstance(wire, NoWire):
            # The only rank's own bytes are all that arrives.
            wire.into[: wire.mine.numel()].copy_(wire.mine)
        return _Done()

    def again(self, timeout_s: float) -> _Channel:
        return self

    def parted(self, parts: Sequence[range], mine: int, timeout_s: float) -> _Channel:
        return self

    def close(self) -> None:
        pass


class _Groups:
    """Two process groups of the same ranks: Gloo's for headers and host bytes, and one for data.

    torch wants all ranks to make all groups, so these are made for each of `parts` in turn; this
    rank is in `mine`.
    """

    def __init__(
        self,
        parts: Sequence[Sequence[int] | None],
        mine: int,
        timeout_s: float,
        *,
        own_world: bool,
        backend: str,
    ) -> None:
        timeout = timedelta(seconds=timeout_s)
        self._groups: list[Any] = []
        for number, ranks in enumerate(parts):
            groups = [
                # NCCL sends device memory only, so headers always go over Gloo.
                dist.new_group(ranks, timeout, "gloo"),
                dist.new_group(ranks, timeout, backend),
            ]
            if number == mine:
                self._groups = groups
        # A rank that left while another still connects would end that with an error of Gloo.
        dist.barrier(self._groups[0])
        self._parts, self._mine = parts, mine
        self._backend = backend
        self._world = dist.group.WORLD if own_world else None
        of = getattr(self._groups[0], "get_group_store", NoStore)  # older torch has none
        self.store: Store = of() or NoStore()  # a group may also have been made without one

    def again(self, timeout_s: float) -> _Channel:
        return _Groups(self._parts, self._mine, timeout_s, own_world=False, backend=self._backend)

    def parted(self, parts: Sequence[range], mine: int, timeout_s: float) -> _Channel:
        if len(parts[0]) == 1:
            return _Alone()
        return _Groups(
            [list(part) for part in parts], mine, timeout_s, own_world=False, backend=self._backend
        )

    def start(self, wire: Wire, *, on_host: bool) -> HostWork:
        group = self._groups[0 if on_host else 1]
        if isinstance(wire, AllGather):
            return _Torch(_all_gather()(wire.into, wire.mine, group=group, async_op=True))
        assert isinstance(wire, Exchange), "several ranks send one another something"
        sent, received = list(wire.sent), list(wire.received)
        return _Torch(
            dist.all_to_all_single(wire.into, wire.mine, received, sent, group=group, async_op=True)
        )

    def close(self) -> None:
        while self._groups:
            # Destroyed at once, on all ranks: Gloo ends a group when its work has ended or its
            # peers are gone, so a group that waited for the garbage collector would block the other
            # ranks in theirs.
            group = self._groups.pop()
            with suppress(Exception):  # after a failure the group may be broken
                dist.destroy_process_group(group)
            del group
        # Groups of a later engine, or of your code, may need the world that this one has made. And
        # by now another world may be in its place.
        if (
            self._world is not None
            and dist.is_initialized()
            and dist.group.WORLD is self._world
            and not _other_groups_exist()
        ):
            with suppress(Exception):
                dist.destroy_process_group()


def _init_world(timeout: timedelta, name: str) -> None:
    """Meet the processes that the environment names, under keys that no earlier meeting has used.

    Raises:
        CollectiveError: not all have come in time.
    """
    store, rank, size = _store_of_all(timeout, name)
    # torch would use the keys of a group that has ended again, with the addresses that are left
    # there.
    turn = store.add(f"infinity/joins of rank {rank}", 1)
    own = dist.PrefixStore(f"infinity/join {turn}", store)  # type: ignore[attr-defined]  # likewise
    try:
        dist.init_process_group("gloo", store=own, rank=rank, world_size=size, timeout=timeout)
    except RuntimeError as error:
        # `add` with 0 reads a counter: a rank that is as far as this one has counted as often.
        try:
            missing = [
                other
                for other in range(size)
                if store.add(f"infinity/joins of rank {other}", 0) < turn
            ]
        except RuntimeError:  # rank 0 has waited as long and has left, and its store with it
            raise _not_met(timeout, name, rank, f"some of {size} ranks") from error
        if not missing:
            raise
        raise _not_met(
            timeout, name, rank, f"of {size} ranks, {', '.join(map(str, missing))}"
        ) from error


def _store_of_all(timeout: timedelta, name: str) -> tuple[Any, int, int]:
    """Return the store at which the ranks meet, this rank, and the number of ranks.

    Rank 0 may hold the store. With a world size of 1, it does not wait for the others inside torch,
    where it could not name those that are missing.
    """
    # torch's annotations leave `rendezvous` out.
    found = dist.rendezvous("env://?world_size=1", timeout=timeout)  # type: ignore[attr-defined]
    try:
        store, rank, _ = next(found)
    except dist.DistError as error:
        raise _not_met(
            timeout, name, int(os.environ["RANK"]), "rank 0, which holds the ranks' store,"
        ) from error
    return store, rank, int(os.environ["WORLD_SIZE"])


def _not_met(timeout: timedelta, name: str, rank: int, who: str) -> CollectiveError:
    return CollectiveError(
        group=name,
        rank=rank,
        op="meeting the other ranks",
        reason=f"{who} did not come in {timeout.total_seconds():g} s. All ranks must call "
        "initialize, init_context and load_into equally often; to train on its own, a process "
        'passes ranks={"stage": "alone"}',
    )


def _other_groups_exist() -> bool:
    """Tell whether there are process groups beside the world; they would end with it."""
    # torch has no public list of its groups.
    groups = getattr(dist.distributed_c10d, "_world").pg_map  # noqa: B009
    return len(groups) > 1


def _all_gather() -> Callable[..., Any]:
    found: Callable[..., Any] = (
        # Newer torch has a new name for the same.
        getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    )
    return found


class _Unpacking:
    """A round on the host; its buffers are unpacked when it has ended."""

    def __init__(self, work: HostWork, unpack: Callable[[], object]) -> None:
        self._work = work
        self._unpack = unpack

    def done(self) -> bool:
        return self._work.done()

    def block(self, most_s: float) -> None:
        self._work.block(most_s)

    def wait(self) -> None:
        self._work.wait()
        # After `wait`: until then the buffers are undefined.
        self._unpack()


@dataclass(frozen=True)
class _Related:
    """What the sequences of one family share, and which ranks take part in one of them.

    The ranks have the numbers that they have in the family.
    """

    failures: Failures
    ranks: tuple[int, ...]
    lane: tuple[Accelerator, Stream] | None  # where data is on a GPU
    # Whether ranks may start its collectives at other points of their programs.
    own_order: bool = False
    sequences: list[Collectives] = field(default_factory=list)


def _join_nothing(_number: int) -> None:
    """Start nothing: this sequence cannot help another rank."""


class _Waiting:
    """What a rank does while it waits in one sequence."""

    def __init__(self) -> None:
        self.call: Callable[[], object] = nothing
        """Called again and again."""
        self.join: Callable[[int], object] = _join_nothing
        """Called with the number of a collective that another rank waits for."""
        self._looked_s = self._asked_s = 0.0

    def set_call(self, call: Callable[[], object]) -> None:
        """Call this again and again from now on."""
        self.call = call

    def set_join(self, join: Callable[[int], object]) -> None:
        """Call this from now on with what another rank waits for."""
        self.join = join

    def must_look(self, now_s: float) -> bool:
        """Tell, now and then, that it is time to look whether another rank has failed."""
        if now_s - self._looked_s <= _LOOK_S:
            return False
        self._looked_s = now_s
        return True

    def must_ask(self, since_s: float) -> bool:
        """Tell that it is time to ask who waits for whom; the wait has begun at `since_s`."""
        # Neither at once nor often: each time asks the store, perhaps over the network.
        if time.monotonic() - max(since_s, self._asked_s) <= _STALL_S:
            return False
        self._asked_s = time.monotonic()
        return True


# --- all of them ----------------------------------------------------------------------------------


class Collectives:
    """Rank `rank` of `size`, and what it does together with the other ranks.

    Made by `join`, `alone` or `split`.
    """

    def __init__(
        self,
        channel: _Channel,
        *,
        name: str,
        rank: int,
        size: int,
        timeout_s: float,
        lane: tuple[Accelerator, Stream] | None = None,
        related: _Related | None = None,
    ) -> None:
        self.name = name
        self.rank = rank
        self.timeout_s = timeout_s
        self._channel = channel
        self._related = related or _Related(
            # A rank cannot wait longer for reports than it would have waited for the collective.
            Failures(channel.store, name, rank, size, patience_s=min(_PATIENCE_S, timeout_s)),
            tuple(range(size)),
            lane,
        )
        self._failure: CollectiveError | None = None
        self._closed = False
        self._polling = False
        self._started = 0
        self._waiting = _Waiting()
        self._headers: deque[tuple[Pending, HostWork, torch.Tensor]] = deque()
        self._under_way: deque[Pending] = deque()
        # A wait in one sequence polls all of them, so each has to know the others.
        self._related.sequences.append(self)

    @classmethod
    def alone(cls) -> Collectives:
        """Return the only rank of a group. It starts no process groups and asks no process."""
        return cls(_Alone(), name="one rank", rank=0, size=1, timeout_s=math.inf)

    @classmethod
    def join(
        cls,
        *,
        timeout_s: float,
        name: str = "ranks",
        lane: tuple[Accelerator, Stream] | None = None,
    ) -> Collectives:
        """Meet the other ranks of this run; where there are none, do as `alone`.

        Uses the processes that torch.distributed has been initialized with, or else those that
        torchrun has started, which its environment variables name. Makes process groups of its own,
        so that the user's collectives do not get between its own. `lane` is given where data is on
        a GPU: the accelerator, and the COLLECTIVE stream to work in. `timeout_s` bounds how long
        one rank waits for another.

        Raises:
            ConfigError: `timeout_s` is not positive, or longer than torch can wait.
            CollectiveError: not all ranks have come in that time.
        """
        if not 0 < timeout_s <= _LONGEST_S:
            raise ConfigError(
                field="timeout_s",
                value=timeout_s,
                expected=f"more than 0 seconds, and at most {_LONGEST_S:g}",
            )
        on_gpu = lane is not None and lane[0].torch_device.type != "cpu"
        # Asked before `_init_world`: only a world that this engine made may be destroyed by it.
        own_world = not dist.is_initialized()
        if own_world:
            if int(os.environ.get("WORLD_SIZE", "1")) == 1:
                return cls.alone()
            _init_world(timedelta(seconds=timeout_s), name)
        if dist.get_world_size() == 1:
            if own_world:
                dist.destroy_process_group()
            return cls.alone()
        groups = _Groups(
            [None], 0, timeout_s, own_world=own_world, backend="nccl" if on_gpu else "gloo"
        )
        rank, size = dist.get_rank(), dist.get_world_size()
        return cls(groups, name=name, rank=rank, size=size, timeout_s=timeout_s, lane=lane)

    def beside(self) -> Collectives:
        """Return a second sequence of collectives of the same ranks, with an order of its own.

        A wait in one sequence lets both make progress, and a failure of one fails the other. All
        ranks call it on a group that `join` returned, and close the sequences that they got from it
        first.
        """
        return self._made(
            # Its own order: that of the first sequence says nothing of this one.
            self._channel.again(self.timeout_s),
            replace(self._related, own_order=True),
        )

    def _made(self, channel: _Channel, related: _Related, name: str | None = None) -> Collectives:
        """Return a sequence of this channel's ranks that shares waits and failures with this."""
        return Collectives(
            channel,
            name=name or self.name,
            rank=related.ranks.index(self._related.ranks[self.rank]),
            size=len(related.ranks),
            timeout_s=self.timeout_s,
            related=related,
        )

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return len(self._related.ranks)

    def on_wait(self, call: Callable[[], object]) -> None:
        """Call this again and again while this rank waits here; what it raises ends the wait."""
        self._waiting.set_call(call)

    def on_stall(self, join: Callable[[int], object]) -> None:
        """Call `join` with the number of a collective here that another rank waits for.

        This rank has not started that collective.

        Called while this rank waits in another sequence for a collective that the other rank has
        not come to, so that neither would go on. Where there are replicas, their collectives have
        the numbers of those of this sequence that they follow. [Note: who waits for whom]
        """
        self._waiting.set_join(join)

    @property
    def started(self) -> int:
        """How many collectives of this sequence this rank has started."""
        return self._started

    @property
    def can_stall(self) -> bool:
        """Whether ranks learn that they wait for one another in two orders: see `on_stall`."""
        return self._related.failures.has_store

    @property
    def failed(self) -> bool:
        """Whether no collective works any more: one of them has failed, or this rank has left."""
        return self._closed or self._failure is not None

    def split(self, shard_ranks: int) -> tuple[Collectives, Collectives]:
        """Return a mesh: the ranks that cut parameters among them, and those with the same shards.

        Every `shard_ranks` neighbours make a group of the first kind, which keeps the order of all
        ranks. Groups of the second kind have an order of their own, as those of `beside`. A failure
        of one fails the whole family. All ranks call it on a group that `join` returned, and close
        the groups that they got from it first.

        Raises:
            ConfigError: the ranks cannot be divided like that.
        """
        if shard_ranks < 1 or self.size % shard_ranks:
            expected = f"a divisor of the {self.size} ranks"
            raise ConfigError(field="shard_ranks", value=shard_ranks, expected=expected)
        rows = [range(first, first + shard_ranks) for first in range(0, self.size, shard_ranks)]
        columns = [range(column, self.size, shard_ranks) for column in range(shard_ranks)]
        return self._part(rows, "shards", own_order=False), self._part(
            columns, "replicas", own_order=True
        )

    def _part(self, parts: Sequence[range], name: str, *, own_order: bool) -> Collectives:
        number = next(number for number, part in enumerate(parts) if self.rank in part)
        related = replace(self._related, ranks=tuple(parts[number]), own_order=own_order)
        # torch wants every rank to make the groups of all parts, not only its own.
        channel = self._channel.parted(parts, number, self.timeout_s)
        return self._made(channel, related, f"{self.name}/{name} {number}")

    # --- collectives ------------------------------------------------------------------------------

    def start(
        self,
        op: str,
        rounds: Sequence[Round],
        *,
        key: bytes = b"",
        announces: int | None = None,
        ended: Callable[[BaseException | None], object] = ignore,
    ) -> CollectiveEvent:
        """Begin a collective; data moves once all ranks have started it.

        `op` names it in messages; all ranks must start the same `op` with the same `key`. `ended`
        is called at its end, with the error if there is one. All ranks can read from the event the
        number that each rank announces; where all of them announce 0, no data moves.

        Raises:
            CollectiveError: an earlier one has failed.
            RuntimeError: it is closed.
        """

        # Where no rank announces anything, the headers are all that moves.
        def rounds_if_any(announced: Sequence[int]) -> Sequence[Round]:
            return rounds if announces is None or any(announced) else ()

        pending = self._begin(
            op, rounds_if_any, self._data_issuer, key=key, nbytes=announces or 0, ended=ended
        )
        # At once: headers of other ranks may be here already.
        self.poll()
        return CollectiveEvent(self, pending)

    def agree(self, what: str, value: object = "") -> None:
        """Wait until all ranks are here, and check that they have the same `value`, as it prints.

        Raises:
            CollectiveError: they have not; names which rank has what.
        """
        text = f"agreement on {what}" + (f": {value}" if str(value) else "")
        self.wait_for(self._begin(text, lambda _: (), self._host_issuer, key=digest(value)))

    def share(self, op: str, payload: bytes | memoryview) -> tuple[bytes, ...]:
        """Return the payload of each rank, in the ranks' order. Lengths may differ.

        Blocks, and stays on the host.

        Raises:
            CollectiveError: not all of them came to it.
        """
        payloads: list[bytes] = []

        def rounds(nbytes: Sequence[int]) -> Sequence[Round]:
            width = max(nbytes)
            if not width:
                payloads.extend(b"" for _ in nbytes)
                return ()
            # Padded to the longest: an all-gather takes as many bytes from each rank.
            mine = torch.zeros(width, dtype=torch.uint8)
            if len(payload):
                # A copy that may be written: torch warns of read-only bytes.
                mine[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
            into = torch.empty(width * self.size, dtype=torch.uint8)

            def unpack() -> None:
                whole = into.numpy().tobytes()
                payloads.extend(whole[rank * width :][:count] for rank, count in enumerate(nbytes))

            return (Round(AllGather(mine, into), unpack=unpack),)

        self.wait_for(self._begin(op, rounds, self._host_issuer, nbytes=len(payload)))
        return tuple(payloads)

    # [Note: what is under way goes on while a rank polls] Data of a collective starts to move when
    # its rank polls or waits and sees the headers. So a rank must not block in other communication,
    # of the user's own, while another rank waits for the engine's: ranks that run one program do
    # both in one order, and never get there.
    def poll(self) -> None:
        """Let all that is under way make progress. Raises nothing: `wait` raises what failed."""
        if self._polling:  # a collective that comes after another polls that one's end
            return
        self._polling = True
        try:
            self._go_on()
        finally:
            self._polling = False

    def wait_for(self, pending: Pending) -> None:
        """Wait until a collective has ended; raise its error."""
        self._wait_until(lambda: pending.ended, pending)
        if pending.error is not None:
            raise pending.error

    def close(self, error: BaseException | None = None) -> None:
        """Leave the group and send the other ranks `error`, if any. Does nothing a second time.

        What is under way ends here.
        """
        if self._closed:
            return
        self._closed = True
        # With an alarm where something failed here. A rank that leaves on purpose raises none: the
        # others learn of it when they wait for this one.
        works = self._failure is None
        if error is not None and works:
            self._related.failures.report(f"has left with {type(error).__name__}: {_brief(error)}")
        else:
            self._related.failures.leave(f"has left after {self._started} collectives")
        if self._under_way and works:
            pending = self._under_way[0]
            self._end_all(
                self._error(pending.op, "this rank closed the group while it was under way")
            )
        self._channel.close()

    def __enter__(self) -> Collectives:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        """Leave, and send the other ranks what the body raised."""
        self.close(error)

    # --- how they go on ---------------------------------------------------------------------------

    def _wait_until(self, reached: Callable[[], bool], pending: Pending) -> None:
        # How long this call waits, not how old the collective is.
        since = time.monotonic()
        while True:
            # All sequences: another rank may need one of them before it comes to this collective.
            for sequence in self._related.sequences:
                sequence.poll()
            if reached():
                return
            self._look()
            self._waiting.call()
            if pending.waits_for_headers and self._waiting.must_ask(since):
                self._resolve_stall(pending)
            # What was called may have brought it about.
            if not reached():
                self._block()

    def _resolve_stall(self, pending: Pending) -> None:
        """Announce which collective this rank waits for, or start one that another rank announced.

        [Note: who waits for whom] Where ranks do other things between two gathers, rank A may wait
        for a reduce that rank B would start later, after a gather that A has not come to. So a rank
        that waits for a reduce announces it, with how many collectives it has started in the order
        of all ranks; a rank that waits for a later one of those starts the reduce at once. Nothing
        that belongs to the reduce can still come on that rank: in the common order, it is past
        where the other is. In a mesh, a rank that waits among the ranks of its shards looks at
        these only, as it may be anywhere past where the others are. A collective of all ranks waits
        for all of them, so nothing can come then.
        """
        all_ranks = self._related.sequences[0]
        if self._related.own_order:
            for among in {self.name, all_ranks.name}:
                self._related.failures.want(pending.number, self._position, among)
            return
        number, position = self._related.failures.wanted(self.name)
        for other in self._related.sequences:
            # Not started here, and this rank is past where the other one waits.
            if number > other._started and pending.position > position:
                other._waiting.join(number)

    @property
    def _position(self) -> int:
        """How many collectives this rank has started in sequences that keep all ranks' order."""
        return sum(
            sequence._started
            for sequence in self._related.sequences
            if not sequence._related.own_order
        )

    def _block(self) -> None:
        """Give the processor away until the oldest collective can go on, or for a short time."""
        oldest = next(pending for pending in self._under_way if not pending.ended)
        work = self._headers[0][1] if oldest.waits_for_headers else oldest.work
        # Nothing to block on: a device's event can only be polled.
        if work is None or isinstance(work, Event):
            time.sleep(_PAUSE_S)
        else:
            # While this blocks, other sequences do not go on: the block is short where one has
            # work.
            others = [sequence for sequence in self._related.sequences if sequence is not self]
            work.block(
                _TURN_S
                if any(other._under_way for other in others)
                else _STALL_S
                if others
                else _LOOK_S
            )

    def _begin(
        self,
        op: str,
        rounds: Rounds,
        issuer: Issuer,
        *,
        key: bytes = b"",
        nbytes: int = 0,
        ended: Callable[[BaseException | None], object] = ignore,
    ) -> Pending:
        if self._closed:
            raise RuntimeError(
                f"{op} cannot start: this rank has left the group {self.name}. Start nothing "
                "after close()"
            )
        if self._failure is not None:
            raise again(self._failure)
        # Ranks compare numbers too: a collective that one rank left out shows at the next one.
        self._started += 1
        # [Note: why headers] If the ranks of a collective disagree, it hangs, ends the process or
        # mixes up bytes, depending on backend and sizes. A header of 256 bytes over Gloo costs one
        # exchange on the host beside the data, which several collectives overlap (figures:
        # docs/decisions/0014-many-ranks.md). It waits for the ranks' programs, never for a device.
        header = Header(self._started, op, digest(op, key.hex()), nbytes)
        pending = Pending(header, rounds, issuer, ended=ended, position=self._position)
        self._under_way.append(pending)
        mine = torch.frombuffer(bytearray(header.pack() * self.size), dtype=torch.uint8)
        into = torch.empty(self.size * Header.SIZE, dtype=torch.uint8)
        per_rank = [Header.SIZE] * self.size
        try:
            # Straight to each rank: Gloo's all-gather goes from neighbour to neighbour.
            work = self._channel.start(Exchange(mine, into, per_rank, per_rank), on_host=True)
        except Exception as error:
            # Ends all sequences: without this header the ranks are out of step.
            raise again(self._fail(pending, error)) from error
        self._headers.append((pending, work, into))
        return pending

    def _go_on(self) -> None:
        self._read_headers()
        may_issue = True
        # A copy: the end of one may start another, which appends here.
        for pending in list(self._under_way):
            # Headers come in order: none behind this one has the ranks' agreement.
            if pending.ended or pending.waits_for_headers:
                break
            try:
                if pending.go_on(may_issue=may_issue):
                    pending.end(None)
            except Exception as error:
                self._fail(pending, error)
            # Rounds of a later collective start behind all rounds of the earlier ones, on every
            # rank.
            may_issue = may_issue and pending.issued
        self._under_way = deque(pending for pending in self._under_way if not pending.ended)

    def _read_headers(self) -> None:
        while self._headers and self._headers[0][1].done():
            pending, work, into = self._headers.popleft()
            try:
                # Raises what the exchange failed with; `done` is true for that as well.
                work.wait()
            except Exception as error:
                self._fail(pending, error)
                return
            received = into.numpy().tobytes()
            headers = [
                Header.unpack(received[at : at + Header.SIZE])
                for at in range(0, len(received), Header.SIZE)
            ]
            problem = disagreement(headers, self._related.ranks)
            if problem is not None:
                # no alarm: all ranks see the same headers
                self._related.failures.leave(f"has stopped, as {problem}")
                self._end_all(self._error(pending.op, problem))
                return
            pending.agreed([header.nbytes for header in headers])

    @property
    def _data_issuer(self) -> Issuer:
        lane = self._related.lane
        if lane is None:
            return Issuer(partial(self._issue, on_host=False), in_stream=False)
        return Issuer(partial(self._issue_in_stream, *lane), in_stream=True)

    @property
    def _host_issuer(self) -> Issuer:
        return Issuer(partial(self._issue, on_host=True), in_stream=False)

    def _issue_in_stream(self, accelerator: Accelerator, stream: Stream, round_: Round) -> Work:
        def work() -> None:
            round_.pack()
            # on a GPU, the stream waits and not the host
            self._channel.start(round_.wire, on_host=False).wait()
            round_.unpack()

        return accelerator.run(work, stream=stream, cost=TimeCost(0))

    def _issue(self, round_: Round, *, on_host: bool) -> HostWork:
        round_.pack()
        return _Unpacking(self._channel.start(round_.wire, on_host=on_host), round_.unpack)

    # --- failure ----------------------------------------------------------------------------------

    def _look(self) -> None:
        """Check now and then whether another rank has failed, or has not come for too long."""
        now = time.monotonic()
        # Its clock counts: later ones wait for it, not for other ranks.
        oldest = next(pending for pending in self._under_way if not pending.ended)
        if now - oldest.since > self.timeout_s:
            self._fail(oldest, TimeoutError(f"not all ranks came within {self.timeout_s:g} s"))
        elif self._waiting.must_look(now):
            if not self._related.failures.seen():
                return
            # Not at the first look: that rank may have done its part of this one, which then ends
            # here too, and this rank goes on to what it would say itself.
            if oldest.doubt():
                # Without a cause of its own: `account` says which rank it was.
                self._fail(oldest, None)

    def _fail(self, pending: Pending, cause: BaseException | None) -> CollectiveError:
        """End everything; return the error, which names the ranks to blame, where it found them."""
        if self._failure is not None:
            return self._failure
        # Of an error of Gloo the first sentence, the fact: guesses and places follow it.
        known = [] if cause is None else [re.split(r"\.\s", _brief(cause))[0].removesuffix(".")]
        # Before `account` waits for the others' reports: they wait for this one.
        self._related.failures.report(f"has stopped in {': '.join([pending.op, *known])}")
        try:
            raise self._error(
                pending.op, "; ".join([*known, *self._related.failures.account()])
            ) from cause
        # Raised once, so that it has its cause. Each wait raises a copy without frames.
        except CollectiveError as failure:
            return self._end_all(kept(failure))

    def _error(self, op: str, reason: str) -> CollectiveError:
        return CollectiveError(
            group=self.name, rank=self._related.ranks[self.rank], op=op, reason=reason
        )

    def _end_all(self, failure: CollectiveError) -> CollectiveError:
        self._failure = failure
        self._headers.clear()
        # First `_failure`, then these: an `ended` that starts something has to find it failed.
        for pending in self._under_way:
            if not pending.ended:
                pending.end(failure)
        for other in self._related.sequences:
            if other._failure is None:
                other._end_all(failure)
        return failure


def _brief(error: BaseException) -> str:
    """Return the first line of an error's text, without the place in torch's sources."""
    lines = str(error).strip().splitlines()
    # torch begins its texts with the source line: [file.cpp:123].
    return re.sub(r"^\[\S+:\d+\] ", "", lines[0])[:200] if lines else type(error).__name__
