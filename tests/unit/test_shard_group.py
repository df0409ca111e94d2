"""`ShardGroup` and `Collectives` on one rank, and what they refuse on any number: nothing of
torch.distributed runs.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence

import pytest

pytest.importorskip("torch", reason="the package gathers tensors of torch")

import torch
import torch.distributed as dist
from torch_adder import TorchAdder

from infinity_engine.errors import CollectiveError, ConfigError
from infinity_engine.partition import (
    Collectives,
    GroupMember,
    Partitioner,
    ShardGroup,
    share_block_sums,
)
from infinity_engine.partition.failures import Failures, NoStore, Process, Store
from infinity_engine.partition.header import Header, digest, disagreement
from infinity_engine.partition.rounds import NoWire, Round, Wire

BLOCK = 4096


class Silence:
    """A way to the other ranks on which nothing arrives, and what was sent on it."""

    store: Store = NoStore()

    def start(self, wire: Wire, *, on_host: bool) -> Silence:
        return self

    def again(self, timeout_s: float) -> Silence:
        return self

    def parted(self, parts: Sequence[range], mine: int, timeout_s: float) -> Silence:
        return self

    def done(self) -> bool:
        return False

    def wait(self) -> None:
        raise AssertionError("nothing arrives")

    def block(self, most_s: float) -> None:
        raise AssertionError("nothing arrives")

    def close(self) -> None:
        pass


def group_of(*numels: int, ranks: Collectives | None = None) -> ShardGroup:
    partitioner = Partitioner(1)
    members = [
        GroupMember(f"p{at}", partitioner.cut(numel), torch.float32)
        for at, numel in enumerate(numels)
    ]
    return ShardGroup("layer", members, ranks or Collectives.alone())


def test_a_gather_that_has_ended_keeps_nobodys_memory() -> None:
    into = torch.zeros(3)
    alive = weakref.ref(into.untyped_storage())

    event = group_of(3).gather([torch.ones(3)], [into])
    event.wait()
    del into

    assert event.done()
    assert alive() is None


# --- gathers ----------------------------------------------------------------------------------------


def test_a_gather_that_fails_ends_and_each_wait_says_why() -> None:
    def fail() -> None:
        raise OSError("a bad drive")

    event = Collectives.alone().start("gather of layer", [Round(NoWire(), pack=fail)])

    assert event.done()
    for _ in range(2):
        with pytest.raises(
            CollectiveError, match="gather of layer failed on rank 0 of group one rank: a bad drive"
        ):
            event.wait()


# --- one rank -------------------------------------------------------------------------------------


def test_one_rank_needs_no_process_group_and_no_buffers() -> None:
    group = group_of(BLOCK + 1, 0, 5)
    mine = [torch.randn(numel) for numel in (BLOCK + 1, 0, 5)]
    into, sums = (
        [torch.zeros_like(each) for each in mine],
        [torch.zeros_like(each) for each in mine],
    )

    group.gather(mine, into).wait()
    group.reduce([mine[0], None, mine[2]], sums, adder=TorchAdder()).wait()

    assert (group.gather_bytes(), group.reduce_bytes()) == (0, 0)
    assert all(torch.equal(one, two) for one, two in zip(mine, into, strict=True))
    assert all(torch.equal(one, two) for one, two in zip(mine, sums, strict=True))
    assert not dist.is_initialized()


def test_what_is_there_already_is_not_copied() -> None:
    group, whole = group_of(5), torch.ones(5)
    version = whole._version

    group.gather([whole], [whole]).wait()

    assert whole._version == version


def test_joining_without_others_is_being_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with Collectives.join(timeout_s=5) as ranks:
        assert (ranks.rank, ranks.size) == (0, 1)
        assert ranks.share("names", b"me") == (b"me",)
        ranks.agree("the model", "any")
    assert not dist.is_initialized()


def test_a_rank_that_has_left_starts_nothing() -> None:
    ranks = Collectives(Silence(), name="one rank", rank=0, size=1, timeout_s=math.inf)
    waiting = ranks.start("waiting", [Round(NoWire())])

    ranks.close()
    ranks.close()

    with pytest.raises(
        CollectiveError,
        match=r"waiting failed on rank 0 .* this rank closed the group while it was under way",
    ):
        waiting.wait()
    with pytest.raises(RuntimeError, match="Start nothing after close"):
        ranks.agree("anything")


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shards", "into"),
    [
        ([torch.ones(4)], [torch.ones(5)]),
        ([torch.ones(5)], [torch.ones(5, dtype=torch.float16)]),
        ([torch.ones(5)], [torch.ones(1, 5)]),
        ([torch.ones(10)[::2]], [torch.ones(5)]),
        ([torch.ones(5)], []),
    ],
)
def test_tensors_that_are_not_the_members_are_refused(
    shards: list[torch.Tensor], into: list[torch.Tensor]
) -> None:
    group = group_of(5)

    with pytest.raises(ConfigError, match="of layer"):
        group.gather(shards, into)


def test_sums_are_fp32() -> None:
    with pytest.raises(ConfigError, match=r"into of layer, p0: expected torch.float32"):
        group_of(5).reduce(
            [torch.ones(5)], [torch.ones(5, dtype=torch.float64)], adder=TorchAdder()
        )


def test_a_parameter_cut_over_other_ranks_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="layer: p0: expected a parameter that is cut over the 1 ranks"
    ):
        ShardGroup(
            "layer", [GroupMember("p0", Partitioner(2).cut(5), torch.float32)], Collectives.alone()
        )
    with pytest.raises(ConfigError, match="one parameter or more"):
        ShardGroup("layer", [], Collectives.alone())


def test_a_timeout_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="timeout_s"):
        Collectives.join(timeout_s=0)


def test_a_mesh_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="shard_ranks: expected a divisor of the 1 ranks, got 2"):
        Collectives.alone().split(2)


def test_block_sums_that_are_not_the_shards_are_refused() -> None:
    with pytest.raises(ConfigError, match="block sums of parameter 0: expected 2"):
        share_block_sums(
            Collectives.alone(), [Partitioner(1).cut(BLOCK + 1)], [torch.zeros(1).double().numpy()]
        )


# --- headers and accounts -------------------------------------------------------------------------


def test_a_header_survives_packing_however_long_the_name_is() -> None:
    header = Header(7, "gather of layer ä" + "x" * 300, digest("a", 1), 12)

    unpacked = Header.unpack(header.pack())

    assert len(header.pack()) == Header.SIZE == 256
    assert (unpacked.number, unpacked.key, unpacked.nbytes) == (7, header.key, 12)
    assert header.op.startswith(unpacked.op)


def test_headers_disagree_where_number_or_digest_differ_and_not_where_bytes_do() -> None:
    one = Header(1, "gather", digest("a"), 5)

    assert disagreement([one, Header(1, "gather", digest("a"), 6)], [0, 1, 2]) is None
    assert disagreement([one, one, Header(2, "gather", digest("a"))], [0, 1, 2]) is not None
    assert disagreement([one, one, Header(1, "gather", digest("b"))], [0, 1, 2]) is not None


class Memory:
    """A store in memory; it can be gone."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.is_gone = False

    def set(self, key: str, value: str) -> None:
        self._reach()
        self.values[key] = value

    def get(self, key: str) -> bytes:
        self._reach()
        return self.values[key].encode()

    def check(self, keys: list[str]) -> bool:
        self._reach()
        return all(key in self.values for key in keys)

    def _reach(self) -> None:
        if self.is_gone:
            raise ConnectionError("no store")


def test_an_account_names_who_spoke_and_who_did_not() -> None:
    store = Memory()
    me, other, _ = (Failures(store, "g", rank, 3, patience_s=0.1) for rank in range(3))

    other.report("has left with ValueError: no")

    assert me.seen()
    assert me.account() == [
        "rank 2 has not answered for 0.1 s: it has died, or its program is busy elsewhere",
        "rank 1 has left with ValueError: no",
    ]


def test_an_account_without_a_store_says_so() -> None:
    store = Memory()
    me = Failures(store, "g", 0, 2, patience_s=60)
    store.is_gone = True

    me.report("has stopped")

    assert not me.seen()
    assert "cannot be reached" in me.account()[0]
    assert "cannot be reached" in Failures(NoStore(), "g", 0, 2, patience_s=60).account()[0]
    assert Failures(NoStore(), "g", 0, 1, patience_s=60).account() == []


def test_a_process_has_ended_only_where_that_is_certain() -> None:
    own = Process.own()

    assert not own.has_ended(own)
    assert Process(own.pid, own.started - 1000, own.machine).has_ended(own)
    assert not Process(own.pid, own.started - 1000, "another machine").has_ended(own)
