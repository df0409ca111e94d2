"""States that are handed out: what was handed out stays as it is until it is settled."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

pytest.importorskip("torch", reason="states are tensors")

import torch

from deepnvme.sizes import PAGE
from deepnvme.volume.extents import Extent
from infinity_engine.optim import Segment
from infinity_engine.storage.swapfile import Place
from infinity_engine.update.captured import (
    CapturedPiece,
    CapturedStates,
    CapturedSubgroup,
    RunInMemory,
    RunOnDrives,
    StateDrives,
)

STREAMS = ("master", "exp_avg", "exp_avg_sq")


class CheckingSink:
    """Keeps what it took, and finds at each `settle` whether it has changed meanwhile."""

    def __init__(self) -> None:
        self.taken: dict[CapturedPiece, bytes] = {}
        self.unsettled: list[tuple[memoryview, bytes]] = []
        self.left: list[set[int]] = []  # by settle: the subgroups that have to stay as they are
        self.states: CapturedStates | None = None

    def take(self, piece: CapturedPiece, values: memoryview) -> None:
        self.taken[piece] = self.taken.get(piece, b"") + bytes(values)
        self.unsettled.append((values, bytes(values)))

    def settle(self) -> None:
        assert all(bytes(values) == before for values, before in self.unsettled)
        self.unsettled.clear()
        assert self.states is not None
        self.left.append({index for index in (0, 1) if self.states.is_left(index)})


class ReadAtOnce:
    """Drives whose reads have ended when they begin: the earliest that a room can change."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def read(self, place: Place, into: memoryview) -> Read:
        into[:] = self._content[place.start : place.start + place.nbytes]
        return Read(place.nbytes)

    def share(self, *_: object) -> None:
        raise NotImplementedError("nothing is shared here")


class Read:
    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes

    def done(self) -> bool:
        return True

    def wait(self) -> int:
        return self._nbytes


def handed_out(
    *in_memory: Sequence[RunInMemory], on_drives: Sequence[RunOnDrives] = ()
) -> CheckingSink:
    """Hand out a subgroup for each of `in_memory`, and these runs; through two rooms of a page."""
    sink = CheckingSink()
    subgroups = [CapturedSubgroup(index, tuple(runs)) for index, runs in enumerate(in_memory)]
    sink.states = states = CapturedStates(subgroups, on_drives)
    assert all(states.reads(run.place) for run in on_drives)
    states.hand_out(sink, [memoryview(bytearray(PAGE)) for _ in range(2)])
    assert not sink.unsettled, "an update may change what was not settled"
    assert not any(states.is_left(index) for index in range(len(in_memory)))
    assert not any(states.reads(run.place) for run in on_drives)
    return sink


def pieces(parameter: int, numel: int) -> tuple[CapturedPiece, ...]:
    segment = Segment(parameter, 0, numel, 0)
    return tuple(CapturedPiece(segment, stream) for stream in STREAMS)


def test_subgroups_in_memory_stay_until_all_their_bytes_are_settled() -> None:
    tensors = [torch.arange(10.0) + number for number in range(6)]
    first, second = pieces(0, 10), pieces(1, 10)
    runs = [RunInMemory(*pair) for pair in zip((*first, *second), tensors, strict=True)]

    sink = handed_out(runs[:3], runs[3:])

    assert sink.left == [{0, 1}, {1}]
    assert [
        torch.frombuffer(bytearray(found), dtype=torch.float32).tolist()
        for found in sink.taken.values()
    ] == [values.tolist() for values in tensors]


@pytest.mark.parametrize("numel", [1, 300, 1024, 3000])
def test_a_room_is_filled_again_only_once_it_is_settled(numel: int) -> None:
    of_run = pieces(0, numel)
    content = random.Random(0).randbytes(len(of_run) * 4 * numel)
    place = Place((Extent(0, 0, len(content)),))
    drives: StateDrives = ReadAtOnce(content)  # type: ignore[assignment]  # it shares nothing

    sink = handed_out(on_drives=[RunOnDrives(of_run, place, drives)])

    assert b"".join(sink.taken.values()) == content
