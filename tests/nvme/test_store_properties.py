"""A `TensorStore` does what a dict does that `commit` saves, whatever is done in whatever order,
faults included.
"""

from __future__ import annotations

import random
import shutil
import tempfile
import warnings
from collections.abc import Callable
from concurrent.futures import wait
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from deepnvme import FaultPlan, IOQueue, NVMeError, Requests
from deepnvme.errors import ChecksumError, PoisonedError, VolumeFullError
from deepnvme.memory.arrays import Returns
from deepnvme.sizes import whole_pages
from deepnvme.store.store import TensorStore, UncommittedWarning
from deepnvme.volume.extents import Extent
from deepnvme.volume.volume import Member
from support.nvme_io import CHUNK, PAGE

MIB = 1 << 20
CAPACITY = 8 * MIB
NOISE = random.Random(4).randbytes(3 * MIB)

names = st.sampled_from(["a", "b", "c", "d", "e", "f/g"])
sizes = st.sampled_from(
    [
        0,
        1,
        PAGE - 1,
        PAGE,
        PAGE + 1,
        40_000,
        256 << 10,
        (256 << 10) + 1,
        700_000,
        2 * MIB,
        2 * MIB + 5000,
    ]
)
tensors = st.builds(lambda size, start: NOISE[start : start + size], sizes, st.integers(0, 9999))


@dataclass(frozen=True)
class Fault:
    """One rule of a FaultPlan; `kind` is the name of its method."""

    kind: str
    nth: int
    requests: Requests


faults = st.lists(
    st.builds(
        Fault,
        st.sampled_from(["fail", "fail", "shorten"]),
        st.integers(1, 12),
        st.sampled_from(list(Requests)),
    ),
    max_size=3,
)


@dataclass(frozen=True)
class Tensor:
    """What the model knows of a tensor."""

    data: bytes
    extents: tuple[Extent, ...]


class StoreMachine(RuleBasedStateMachine):
    """A store beside its model: what each name has now, and what the last two commits have."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="store-properties-"))
        self.now: dict[str, Tensor] = {}
        self.commits: dict[int, dict[str, Tensor]] = {1: {}}
        self.poisoned = False
        self.plan: list[Fault] = []

    @initialize(members=st.sampled_from([1, 2]))
    def create(self, members: int) -> None:
        self.places = [self.folder / str(index) for index in range(members)]
        self.queue = IOQueue("threads", chunk_bytes=CHUNK)
        self.store = TensorStore.create(
            [Member(place, rate=1.0) for place in self.places],
            CAPACITY,
            queue=self.queue,
            returns=Returns.NUMPY,
        )

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.close()
        shutil.rmtree(self.folder)

    def close(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UncommittedWarning)
            self.store.close()
        self.queue.close()

    def attempt(self, change: Callable[[], object]) -> bool:
        """Do it; return whether it was done."""
        try:
            change()
        except NVMeError as error:
            self.check_excuse(error)
            self.poisoned = self.poisoned or isinstance(error, PoisonedError)
            return False
        return True

    def check_excuse(self, error: NVMeError) -> None:
        """Fail unless it is a fault's error, or that of a store poisoned by one."""
        assert not isinstance(error, (ChecksumError, VolumeFullError)), error
        assert any(fault.kind == "fail" for fault in self.plan), error

    def written(self, batch: dict[str, bytes], put: Callable[[], object]) -> None:
        asked = sum(whole_pages(len(data)) for data in batch.values())
        if not self.poisoned and asked > self.store.volume.free_bytes:
            with pytest.raises(NVMeError) as caught:  # EIO where a fault struck first
                put()
            assert isinstance(caught.value, VolumeFullError) or self.plan
        elif self.attempt(put):
            assert not self.poisoned
            for name, data in batch.items():
                self.now[name] = Tensor(data, self.store.record(name).extents)

    @rule(name=names, data=tensors)
    def put(self, name: str, data: bytes) -> None:
        self.written({name: data}, lambda: self.store.put(name, data))

    @rule(batch=st.dictionaries(names, tensors, max_size=6))
    def put_many(self, batch: dict[str, bytes]) -> None:
        self.written(batch, lambda: self.store.put_many(batch))

    @rule(name=names, data=tensors)
    def put_async(self, name: str, data: bytes) -> None:
        self.written({name: data}, lambda: self.store.put_async(name, data).result())

    @rule(name=names)
    def delete(self, name: str) -> None:
        if name in self.now or self.poisoned:
            if self.attempt(lambda: self.store.delete(name)):
                assert not self.poisoned
                del self.now[name]
        else:
            with pytest.raises(KeyError):
                self.store.delete(name)

    @rule()
    def commit(self) -> None:
        if self.attempt(self.store.commit):
            assert not self.poisoned
            self.commits[self.store.generation] = dict(self.now)
            self.commits.pop(self.store.generation - 2, None)

    @rule(wanted=st.lists(names, max_size=6), out=st.booleans())
    def get_many(self, wanted: list[str], out: bool) -> None:
        if not self.now.keys() >= set(wanted):
            with pytest.raises(KeyError):
                self.store.get_many(wanted)
            return
        targets = (
            {name: np.empty(len(self.now[name].data), np.uint8) for name in wanted} if out else None
        )
        try:
            got = self.store.get_many(wanted, targets)
        except NVMeError as error:
            self.check_excuse(error)
            return
        assert {name: array.tobytes() for name, array in got.items()} == {
            name: self.now[name].data for name in wanted
        }

    @rule(name=names)
    def prefetch(self, name: str) -> None:
        if name in self.now:
            self.store.prefetch([name])
            wait(self.store._ahead.futures)  # a reader keeps space from being free

    @rule(name=names)
    def get(self, name: str) -> None:
        if name not in self.now:
            with pytest.raises(KeyError):
                self.store.get(name)
            return
        try:
            array = self.store.get(name)
        except NVMeError as error:
            self.check_excuse(error)
            return
        assert array.tobytes() == self.now[name].data

    @rule()
    def verify(self) -> None:
        assert not self.store.verify() or self.plan

    @rule(plan=faults, back=st.booleans())
    def reopen(self, plan: list[Fault], back: bool) -> None:
        self.close()
        self.plan, self.poisoned = plan, False
        rules = FaultPlan()
        for fault in plan:
            getattr(rules, fault.kind)(nth=fault.nth, requests=fault.requests)
        self.queue = IOQueue("threads", chunk_bytes=CHUNK, faults=rules)
        chosen = (min if back else max)(self.commits)
        self.store = TensorStore.open(
            self.places,
            generation=chosen if back else None,
            queue=self.queue,
            returns=Returns.NUMPY,
        )
        self.now = dict(self.commits[chosen])

    @precondition(lambda self: hasattr(self, "store"))
    @invariant()
    def the_names_and_the_last_commit_are_those_of_the_model(self) -> None:
        assert set(self.store) == set(self.now)
        assert self.store.generation == max(self.commits)

    @precondition(lambda self: hasattr(self, "store"))
    @invariant()
    def what_nobody_needs_is_free(self) -> None:
        needed = {
            extent
            for state in (self.now, *self.commits.values())
            for tensor in state.values()
            for extent in tensor.extents
        }
        used = sum(whole_pages(extent.nbytes) for extent in needed)
        assert self.store.volume.free_bytes == sum(self.store.volume.capacities) - used


def test_a_store_is_a_dict_with_commits() -> None:
    run_state_machine_as_test(
        StoreMachine, settings=settings(max_examples=25, stateful_step_count=30, deadline=None)
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_store_is_a_dict_with_commits_for_long() -> None:
    run_state_machine_as_test(
        StoreMachine, settings=settings(max_examples=500, stateful_step_count=80, deadline=None)
    )
