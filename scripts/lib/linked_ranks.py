"""Ranks with a link each: what the bench of partitioning runs on every rank, with real bytes and
real collectives.

A link copies in pieces, each of which is done no sooner than its bytes would have come at the
link's bandwidth, counted from the beginning of the copy. What is on this side of it is the host, on
the other the device.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch_adder import TorchAdder

from infinity_engine.partition import (
    Collectives,
    GroupMember,
    Partitioner,
    Shard,
    ShardGroup,
    ShardSpec,
)

__all__ = ["Link", "Times", "Work", "measure"]

_PIECE = 1 << 14  # bytes


@dataclass(frozen=True)
class Work:
    """Parameters of so many elements each, in fp32, and what passes a rank's link in a second.

    Each is cut over all ranks, as the engine does it, or one rank owns all of it.
    """

    over_all_ranks: bool
    parameters: int
    numel: int
    bytes_per_s: float


@dataclass(frozen=True)
class Times:
    """The seconds that all parameters took, one after another."""

    fetch_s: float
    offload_s: float


class Link:
    """The way between a rank's host and its device."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy flat tensors of the same size and dtype."""
        into, of = target.view(torch.uint8), source.view(torch.uint8)
        began = time.perf_counter()
        for start in range(0, of.numel(), _PIECE):
            end = min(start + _PIECE, of.numel())
            into[start:end].copy_(of[start:end])
            early_s = began + end / self._bytes_per_s - time.perf_counter()
            if early_s > 0:
                time.sleep(early_s)


def measure(work: Work) -> Times:
    """Fetch all parameters and offload all their gradients, on this rank and together with the
    others.
    """
    with Collectives.join(timeout_s=600) as ranks:
        partitioner = Partitioner(ranks.size)
        groups = []
        for at in range(work.parameters):
            if work.over_all_ranks:
                spec = partitioner.cut(work.numel)
            else:
                shards = [Shard(0, 0)] * ranks.size
                shards[at % ranks.size] = Shard(0, work.numel)
                spec = ShardSpec(work.numel, tuple(shards))
            member = GroupMember("w", spec, torch.float32)
            groups.append(ShardGroup(f"p{at}", [member], ranks))
        link = Link(work.bytes_per_s)
        _fetch(groups[:1], link, ranks)  # connections are made and pages are there
        _offload(groups[:1], link, ranks)
        return Times(_fetch(groups, link, ranks), _offload(groups, link, ranks))


def _fetch(groups: Sequence[ShardGroup], link: Link, ranks: Collectives) -> float:
    """Bring every parameter whole to every device: what a rank has of it over its link, the rest
    from the others.
    """
    at_home = [
        torch.full((group.shard(0).numel,), float(at + 1)) for at, group in enumerate(groups)
    ]
    there = [torch.zeros_like(each) for each in at_home]
    whole = [torch.zeros(group.members[0].spec.numel) for group in groups]
    wires = [torch.zeros(group.gather_bytes(), dtype=torch.uint8) for group in groups]
    ranks.agree("the beginning")
    began = time.perf_counter()
    for group, home, mine, into, wire in zip(groups, at_home, there, whole, wires, strict=True):
        link.copy(mine, home)
        group.gather([mine], [into], wire=wire if wire.numel() else None).wait()
    ranks.agree("the end")
    took = time.perf_counter() - began
    for at, into in enumerate(whole):
        if not bool((into == at + 1).all()):
            raise RuntimeError(f"parameter {at} did not come whole")
    return took


def _offload(groups: Sequence[ShardGroup], link: Link, ranks: Collectives) -> float:
    """Add every gradient up over the ranks, and bring what each owns of the sums over its link to
    its host.
    """
    gradients = [
        torch.full((group.members[0].spec.numel,), float(ranks.rank + 1)) for group in groups
    ]
    sums = [torch.zeros(group.shard(0).numel) for group in groups]
    at_home = [torch.zeros_like(each) for each in sums]
    wires = [torch.zeros(group.reduce_bytes(), dtype=torch.uint8) for group in groups]
    ranks.agree("the beginning")
    began = time.perf_counter()
    for group, gradient, mine, home, wire in zip(
        groups, gradients, sums, at_home, wires, strict=True
    ):
        group.reduce(
            [gradient], [mine], adder=TorchAdder(), wire=wire if wire.numel() else None
        ).wait()
        link.copy(home, mine)
        ranks.agree("that it is there")  # the next gradient is made after this one, on all ranks
    took = time.perf_counter() - began
    expected = ranks.size * (ranks.size + 1) / 2
    for home in at_home:
        if not bool((home == expected).all()):
            raise RuntimeError("a sum of gradients is wrong")
    return took
