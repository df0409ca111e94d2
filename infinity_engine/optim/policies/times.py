"""When an update's subgroups are done as they are laid out: with ops, or by their times alone.

Pure. Two forms of the same: `TimedDraft` makes a plan's ops as it goes, `UpdateTimes` makes none,
so a search can afford to lay out many updates. Both decide nothing; interleaved.py does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import compress
from typing import NamedTuple

from infinity_engine.optim.policy import Limits, PlanDraft
from infinity_engine.plan.ops import Lane
from infinity_engine.plan.rates import Rates
from infinity_engine.plan.step import StepPlan, SubgroupSpec
from infinity_engine.plan.tier import Tier
from infinity_engine.plan.timing import LaneClocks

__all__ = [
    "HostCosts",
    "LaneWork",
    "ResidentCosts",
    "TimedDraft",
    "UpdateCosts",
    "UpdateTimes",
    "VisitCosts",
]


class VisitCosts(NamedTuple):
    """What a visit takes of each lane."""

    up_ns: int
    device_ns: int
    parameters_ns: int  # Down; 0 where they stay on the device.
    down_ns: int
    load_ns: int  # From drives and to them; 0 where nothing rests there.
    store_ns: int


class ResidentCosts(NamedTuple):
    """What a resident's update takes of each lane."""

    device_ns: int
    parameters_ns: int  # Down; 0 where they stay on the device.
    load_ns: int
    store_ns: int


class HostCosts(NamedTuple):
    """What an update by the CPU takes of each lane, but for the parameters' upload."""

    host_ns: int
    load_ns: int
    store_ns: int


class UpdateCosts:
    """What each subgroup's work takes, worked out at its first use.

    A rate is asked for only where its lane has work, as in a plan.
    """

    def __init__(self, subgroups: Sequence[SubgroupSpec], rates: Rates, limits: Limits) -> None:
        self._clocks = LaneClocks(rates)
        self._limits = limits
        largest = max((subgroup.numel for subgroup in subgroups), default=1)
        self.sets = limits.sets_for(largest)
        """How many staging sets there may be."""
        on_drives = sum(subgroup.on_drives for subgroup in subgroups)
        self.buffers = min(limits.host_buffers, on_drives)
        """How many host buffers there are."""
        self.has_buffers = self.buffers > 0 or not on_drives
        """Whether there is a host buffer if one is needed."""
        # By the subgroup's index.
        self._visits: dict[int, VisitCosts] = {}
        self._residents: dict[int, ResidentCosts] = {}
        self._on_host: dict[int, HostCosts] = {}
        self._uploads: dict[int, int] = {}

    @property
    def at_home(self) -> bool:
        """Whether new parameters stay on the host or on drives, and modules fetch them."""
        return self._limits.parameters is not Tier.DEVICE

    def visit(self, subgroup: SubgroupSpec) -> VisitCosts:
        """Return what the subgroup's visit takes."""
        index = subgroup.index
        if index not in self._visits:
            nbytes = subgroup.numel * self._limits.per_parameter.states
            there = self.resident(subgroup)
            self._visits[index] = VisitCosts(
                self._clocks.duration_ns(Lane.H2D, nbytes),
                there.device_ns,
                there.parameters_ns,
                self._clocks.duration_ns(Lane.D2H, nbytes),
                there.load_ns,
                there.store_ns,
            )
        return self._visits[index]

    def resident(self, subgroup: SubgroupSpec) -> ResidentCosts:
        """Return what the subgroup's update takes where its states are on the device."""
        index = subgroup.index
        if index not in self._residents:
            self._residents[index] = ResidentCosts(
                self._clocks.duration_ns(Lane.DEVICE, subgroup.numel),
                self._parameters_ns(Lane.D2H, subgroup) if self.at_home else 0,
                *self._drives(subgroup),
            )
        return self._residents[index]

    def on_host(self, subgroup: SubgroupSpec) -> HostCosts:
        """Return what the subgroup's update by the CPU takes."""
        index = subgroup.index
        if index not in self._on_host:
            host_ns = self._clocks.duration_ns(Lane.HOST, subgroup.numel)
            self._on_host[index] = HostCosts(host_ns, *self._drives(subgroup))
        return self._on_host[index]

    def upload(self, subgroup: SubgroupSpec) -> int:
        """Return how long the subgroup's parameters go up."""
        index = subgroup.index
        if index not in self._uploads:
            self._uploads[index] = self._parameters_ns(Lane.H2D, subgroup)
        return self._uploads[index]

    def _drives(self, subgroup: SubgroupSpec) -> tuple[int, int]:
        """Return how long the subgroup's load and its store take."""
        if not subgroup.on_drives:
            return 0, 0
        return (
            self._clocks.duration_ns(Lane.NVME_READ, subgroup.load_bytes),
            self._clocks.duration_ns(Lane.NVME_WRITE, subgroup.store_bytes),
        )

    def _parameters_ns(self, lane: Lane, subgroup: SubgroupSpec) -> int:
        nbytes = self._limits.parameter_bytes(subgroup)
        return self._clocks.duration_ns(lane, nbytes, subgroup.pieces)


class LaneWork:
    """How long each lane works at an update, by which of the `others` visit the device."""

    def __init__(
        self,
        others: Sequence[SubgroupSpec],
        residents: Sequence[SubgroupSpec],
        costs: UpdateCosts,
    ) -> None:
        on_host = [costs.on_host(subgroup) for subgroup in others]
        uploads = [0 if costs.at_home else costs.upload(subgroup) for subgroup in others]
        visits = [costs.visit(subgroup) for subgroup in others]
        staying = [costs.resident(subgroup) for subgroup in residents]
        nothing = [0] * len(others)
        # What each lane does for residents, and for each of the others on the host or on a visit.
        work = (
            (0, [cost.host_ns for cost in on_host], nothing),
            (sum(cost.device_ns for cost in staying), nothing, [cost.device_ns for cost in visits]),
            (0, uploads, [cost.up_ns for cost in visits]),
            (
                sum(cost.parameters_ns for cost in staying),
                nothing,
                [cost.parameters_ns + cost.down_ns for cost in visits],
            ),
        )
        # With no visitors, and what each of them changes.
        self._lanes = [
            (fixed + sum(host), [there - here for here, there in zip(host, visiting, strict=True)])
            for fixed, host, visiting in work
        ]
        # Drives do the same for both.
        passing: list[HostCosts | ResidentCosts] = [*on_host, *staying]
        self._drives_ns = max(
            sum(cost.load_ns for cost in passing), sum(cost.store_ns for cost in passing)
        )

    def busiest_ns(self, visits: Sequence[bool]) -> int:
        """Return how long the busiest lane works: no update in which these visit ends before."""
        lanes = (none + sum(compress(changes, visits)) for none, changes in self._lanes)
        return max(self._drives_ns, *lanes)


class TimedDraft:
    """A plan in the making, with the times of its ops."""

    def __init__(self, subgroups: Sequence[SubgroupSpec], rates: Rates, limits: Limits) -> None:
        self._draft = PlanDraft(subgroups, limits)
        self._clocks = LaneClocks(rates)
        self.costs = UpdateCosts(subgroups, rates, limits)

    @property
    def end_ns(self) -> int:
        """When all so far is done."""
        return self._clocks.end_ns

    @property
    def host_ns(self) -> int:
        """When the CPU has done all of its updates so far."""
        return self._clocks.free_ns(Lane.HOST)

    @property
    def device_ns(self) -> int:
        """When the device has done all of its updates so far."""
        return self._clocks.free_ns(Lane.DEVICE)

    @property
    def next_visit_ns(self) -> int:
        """When the upload of the next states can begin."""
        emptied = self._draft.next_set_after
        # A set is free once the states that were in it are down.
        set_ns = 0 if emptied is None else self._clocks.times[emptied].end_ns
        return max(self._clocks.free_ns(Lane.H2D), set_ns)

    def visit(self, subgroup: SubgroupSpec) -> None:
        """Update a subgroup on the device, in the next staging set."""
        self._draft.visit(subgroup)
        self._run()

    def resident(self, subgroup: SubgroupSpec) -> None:
        """Update a resident subgroup."""
        self._draft.resident(subgroup)
        self._run()

    def update_on_host(self, subgroup: SubgroupSpec) -> int:
        """Update a subgroup on the CPU; return when that is done."""
        self._draft.update_on_host(subgroup)
        self._run()
        # The same call may load and store too; the update itself is the op in the lane HOST.
        return self._clocks.free_ns(Lane.HOST)

    def upload_parameters(self, subgroup: SubgroupSpec) -> None:
        """Upload the parameters of a subgroup that the CPU updated, unless modules fetch them."""
        self._draft.upload_parameters(subgroup)
        self._run()

    def plan(self) -> StepPlan:
        """Return the plan."""
        return self._draft.plan()

    def _run(self) -> None:
        """Time the ops that came since the last time."""
        clocks = self._clocks
        for op in self._draft.ops[len(clocks.times) :]:
            clocks.run(op)


class _Buffer:
    """A host buffer: when it was last emptied, and what is updated there and not yet stored."""

    __slots__ = ("emptied_ns", "occupant", "store_ns")

    def __init__(self) -> None:
        self.emptied_ns = 0
        self.occupant: SubgroupSpec | None = None
        self.store_ns = 0
        """How long storing what is in it takes."""

    def fill(self, subgroup: SubgroupSpec, store_ns: int) -> None:
        """Note what is in it."""
        self.occupant, self.store_ns = subgroup, store_ns

    def empty(self, at_ns: int) -> None:
        """Note when it is empty again."""
        self.emptied_ns, self.occupant = at_ns, None


class UpdateTimes:
    """The times of the ops that a TimedDraft would make by the same calls, without the ops."""

    def __init__(self, costs: UpdateCosts) -> None:
        self.costs = costs
        self.host_ns = 0
        self.device_ns = 0
        self._at_home = costs.at_home
        self._up_ns = self._down_ns = 0
        self._read_ns = self._write_ns = 0
        # When each staging set is empty, the next one first.
        self._sets = deque([0] * costs.sets)
        self._buffers = deque(_Buffer() for _ in range(costs.buffers))
        # By index, for those updated on the host and not uploaded yet: when, and in which buffer.
        self._updated: dict[int, tuple[int, _Buffer | None]] = {}

    @property
    def end_ns(self) -> int:
        """When all so far is done."""
        links = self._up_ns, self._down_ns
        return max(self.host_ns, self.device_ns, *links, self._read_ns, self._write_ns)

    @property
    def next_visit_ns(self) -> int:
        """When the upload of the next states can begin."""
        set_ns = self._sets[0]
        return set_ns if set_ns > self._up_ns else self._up_ns

    def visit(self, subgroup: SubgroupSpec) -> None:
        """Update a subgroup on the device, in the next staging set."""
        cost = self.costs.visit(subgroup)
        buffer, ready_ns = self._load(subgroup, cost) if subgroup.buffer_bytes else (None, 0)
        # A search takes this way for each visitor of each update: no call that can be spared.
        set_ns, up_ns = self._sets.popleft(), self._up_ns
        up_ns = set_ns if set_ns > up_ns else up_ns
        up_ns = (ready_ns if ready_ns > up_ns else up_ns) + cost.up_ns
        device_ns = self.device_ns
        device_ns = (up_ns if up_ns > device_ns else device_ns) + cost.device_ns
        down_ns = self._down_ns
        down_ns = (device_ns if device_ns > down_ns else down_ns) + cost.parameters_ns
        down_ns += cost.down_ns
        self._up_ns, self.device_ns, self._down_ns = up_ns, device_ns, down_ns
        self._sets.append(down_ns)
        if buffer is not None:
            self._store(buffer, down_ns)

    def resident(self, subgroup: SubgroupSpec) -> None:
        """Update a resident subgroup."""
        cost = self.costs.resident(subgroup)
        buffer, ready_ns = self._load(subgroup, cost) if subgroup.buffer_bytes else (None, 0)
        newest_ns = self.device_ns = max(self.device_ns, ready_ns) + cost.device_ns
        if self._at_home:
            newest_ns = self._down_ns = max(self._down_ns, newest_ns) + cost.parameters_ns
        if buffer is not None:
            self._store(buffer, newest_ns)

    def update_on_host(self, subgroup: SubgroupSpec) -> int:
        """Update a subgroup on the CPU; return when that is done."""
        cost = self.costs.on_host(subgroup)
        buffer, ready_ns = self._load(subgroup, cost) if subgroup.buffer_bytes else (None, 0)
        start_ns = ready_ns if ready_ns > self.host_ns else self.host_ns
        self.host_ns = end_ns = start_ns + cost.host_ns
        if not self._at_home:
            self._updated[subgroup.index] = end_ns, buffer
        elif buffer is not None:
            self._store(buffer, end_ns)
        return end_ns

    def upload_parameters(self, subgroup: SubgroupSpec) -> None:
        """Upload the parameters of a subgroup that the CPU updated, unless modules fetch them."""
        updated = self._updated.pop(subgroup.index, None)
        # One that made way for another is up already.
        if updated is None:
            return
        ready_ns, buffer = updated
        start_ns = ready_ns if ready_ns > self._up_ns else self._up_ns
        self._up_ns = end_ns = start_ns + self.costs.upload(subgroup)
        if buffer is not None:
            self._store(buffer, end_ns)

    def _load(
        self, subgroup: SubgroupSpec, cost: VisitCosts | ResidentCosts | HostCosts
    ) -> tuple[_Buffer, int]:
        """Load a subgroup's states into the next host buffer; return it, and when that is done."""
        buffer = self._buffers[0]
        if buffer.occupant is not None:
            self.upload_parameters(buffer.occupant)
        self._buffers.rotate(-1)
        buffer.fill(subgroup, cost.store_ns)
        read_ns, emptied_ns = self._read_ns, buffer.emptied_ns
        self._read_ns = read_ns = (emptied_ns if emptied_ns > read_ns else read_ns) + cost.load_ns
        return buffer, read_ns

    def _store(self, buffer: _Buffer, after_ns: int) -> None:
        """Store what is in a host buffer."""
        write_ns = self._write_ns
        self._write_ns = write_ns = (
            after_ns if after_ns > write_ns else write_ns
        ) + buffer.store_ns
        buffer.empty(write_ns)
