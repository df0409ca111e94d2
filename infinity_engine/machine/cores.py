"""Divides a machine's cores among its ranks, so that each has cores near one another for itself.

`divide_cores` decides, and is pure: from the same arguments all ranks get the same. `read_nodes`
reads how cores lie. Nothing here binds a thread. Called by code that starts threads for updates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import islice

from deepnvme.machine.probing import HOST_ROOTS, SystemRoots, read_kernel_file

__all__ = ["CoreShare", "divide_cores", "read_nodes"]


@dataclass(frozen=True, slots=True)
class CoreShare:
    """The cores of one rank; where `is_shared`, there are too few and other ranks use them too."""

    cores: tuple[int, ...]
    is_shared: bool

    @property
    def threads(self) -> int:
        """How many threads can run at once without taking turns with another rank's, or 1."""
        return 1 if self.is_shared else max(1, len(self.cores))


def divide_cores(
    allowed: Sequence[Collection[int]], nodes: Sequence[Sequence[int]]
) -> tuple[CoreShare, ...]:
    """Divide cores among ranks, each with its `allowed` ones; `read_nodes` returns `nodes`.

    No core has two owners, and a rank keeps all cores that only it may use. Each other core goes to
    the rank that has fewest among those that may have it. Ranks that may run on the same cores
    follow one another there, so that each has cores of as few nodes as equal numbers allow. A rank
    left without cores shares those of the ranks that it overlaps with.
    """
    # Cores in the order in which they lie: neighbours share a NUMA node, siblings a core.
    place = {core: at for at, core in enumerate(core for node in nodes for core in node)}
    users: dict[int, tuple[int, ...]] = {}
    for rank, cores in enumerate(allowed):
        for core in cores:
            # Ranks are seen in order, so equal sets of ranks give equal tuples.
            users[core] = (*users.get(core, ()), rank)
    # Cores that the same ranks may use are one run, dealt out together.
    runs: dict[tuple[int, ...], list[int]] = {}
    # Cores that `nodes` does not know come last, by number.
    for core in sorted(users, key=lambda core: (place.get(core, len(place)), core)):
        runs.setdefault(users[core], []).append(core)
    own: list[list[int]] = [[] for _ in allowed]
    # Cores with the fewest users first: a rank's own cores count before it competes for others.
    for who in sorted(runs, key=lambda ranks: (len(ranks), ranks)):
        _deal(runs[who], {rank: own[rank] for rank in who})
    return _shares(allowed, own)


def read_nodes(roots: SystemRoots = HOST_ROOTS) -> tuple[tuple[int, ...], ...]:
    """Return the cores of each NUMA node, siblings side by side; empty where unknown."""
    found = (roots.sys / "devices/system/node").glob("node[0-9]*")
    nodes = [
        _numbers(read_kernel_file(directory / "cpulist"))
        # By number: as text, node10 would come before node2.
        for directory in sorted(found, key=lambda directory: int(directory.name[4:]))
    ]
    return tuple(
        tuple(sorted(node, key=lambda core: (_first_sibling(core, roots), core)))
        for node in nodes
        # A node may have memory and no cores.
        if node
    )


def _deal(cores: Sequence[int], own: dict[int, list[int]]) -> None:
    """Give each core to the rank that has fewest; each rank's are next to each other."""
    count = {rank: len(had) for rank, had in own.items()}
    for _ in cores:
        # Equal counts go to the lower rank, so that every rank computes the same.
        count[min(count, key=lambda rank: (count[rank], rank))] += 1
    # Counted first and dealt in runs afterwards, so that each rank's cores are neighbours.
    left = iter(cores)
    for rank, had in own.items():
        had.extend(islice(left, count[rank] - len(had)))


def _shares(
    allowed: Sequence[Collection[int]], own: Sequence[Sequence[int]]
) -> tuple[CoreShare, ...]:
    """Let ranks without cores run wherever they may; a rank that they leave no core does too."""
    sharing: set[int] = set()
    crowded: set[int] = set()
    # Ranks that share may fill all cores of another, which then shares too: until none is left.
    while more := {
        # A rank without cores is the first: the empty set is in every set.
        rank
        for rank, cores in enumerate(own)
        if rank not in sharing and crowded.issuperset(cores)
    }:
        sharing |= more
        crowded.update(*(allowed[rank] for rank in more))
    left = [
        tuple(
            sorted(allowed[rank])
            if rank in sharing
            else (core for core in cores if core not in crowded)
        )
        for rank, cores in enumerate(own)
    ]
    # Also between ranks that share: then threads of several take turns.
    users = Counter(core for cores in left for core in cores)
    return tuple(CoreShare(cores, any(users[core] > 1 for core in cores)) for cores in left)


def _numbers(text: str) -> list[int]:
    """Read the kernel's list of numbers: 0-3,8."""
    ranges = [part.split("-") for part in text.strip().split(",") if part]
    # "8" has one end, which is both the first and the last.
    return [number for ends in ranges for number in range(int(ends[0]), int(ends[-1]) + 1)]


def _first_sibling(core: int, roots: SystemRoots) -> int:
    siblings = _numbers(
        read_kernel_file(roots.sys / f"devices/system/cpu/cpu{core}/topology/thread_siblings_list")
    )
    return min(siblings, default=core)
