"""Policies, which decide where each subgroup is updated: interface, limits, and a draft of plans.

A policy is a pure function of subgroups, rates and limits. Starts nothing and holds no state; the
built-in ones are in policies/. Called by the planner and the engine; `initialize(..., policy=)`
takes one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from operator import attrgetter

from infinity_engine.errors import CapacityError, ConfigError
from infinity_engine.plan.ops import (
    CopyOp,
    DownloadParameters,
    DownloadStates,
    LoadStates,
    Op,
    StoreStates,
    UpdateOnDevice,
    UpdateOnHost,
    UploadParameters,
    UploadStates,
)
from infinity_engine.plan.rates import Rates
from infinity_engine.plan.step import (
    ADAM_BYTES,
    BytesPerParameter,
    Home,
    PlanOutline,
    StepPlan,
    SubgroupSpec,
)
from infinity_engine.plan.tier import Tier

__all__ = [
    "HOST_BUFFERS",
    "Decide",
    "Homes",
    "HomesAt",
    "Limits",
    "OffloadPolicy",
    "PlanDraft",
    "PolicyRegistry",
    "offload_policy",
    "split_residents",
]

_OF_PARAMETERS = (UploadParameters, DownloadParameters)
_ON_DRIVES = frozenset({LoadStates, StoreStates})
# With so many host buffers drives never wait for one: two fill ahead, one is updated, one is
# emptied.
HOST_BUFFERS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The bytes of the device that a plan may take, and the sizes of its transfers.

    `resident_bytes` are for states that stay on the device through the whole step, `staging_bytes`
    for those that visit it during the update, when activations and most gradients are gone.
    `parameters` is the tier where an update leaves the parameters that modules compute with;
    `update_bytes` is the device memory for each parameter that its update there needs beside the
    states. `host_buffers` is how many buffers there are for subgroups with states on the drives.
    """

    resident_bytes: int
    staging_bytes: int
    staging_sets: int = 3  # at most: one is filled, one updated, one emptied
    per_parameter: BytesPerParameter = ADAM_BYTES
    parameters: Tier = Tier.DEVICE
    update_bytes: int = 0
    host_buffers: int = HOST_BUFFERS

    def __post_init__(self) -> None:
        for name in (
            "resident_bytes",
            "staging_bytes",
            "staging_sets",
            "update_bytes",
            "host_buffers",
        ):
            value = getattr(self, name)
            if value < 0:
                raise ConfigError(field=f"Limits.{name}", value=value, expected="0 or more")

    def device_bytes(self, numel: int) -> int:
        """Return the device memory that so many parameters take when it updates them."""
        return numel * (self.per_parameter.states + self.update_bytes)

    def parameter_bytes(self, subgroup: SubgroupSpec) -> int:
        """Return the bytes of a subgroup's parameters in the dtype that modules compute with."""
        return subgroup.numel * (subgroup.parameter_bytes or self.per_parameter.parameter)

    def sets_for(self, numel: int) -> int:
        """Return how many staging sets for subgroups of up to `numel` parameters there may be."""
        return min(self.staging_sets, self.staging_bytes // self.device_bytes(numel))

    def check(self, plan: StepPlan, outline: PlanOutline) -> None:
        """Refuse a plan, of which this is the outline, that is not within the limits.

        Raises:
            CapacityError: it takes more of the device than there is.
            ConfigError: it uses too many staging sets, or an op copies other bytes than its
                subgroup has.
        """
        self._check_copy_bytes(plan)
        self.check_memory(outline, plan.subgroups)

    def check_memory(self, outline: PlanOutline, subgroups: Sequence[SubgroupSpec]) -> None:
        """Refuse a plan with this outline that is not within the limits.

        Raises:
            CapacityError: it takes more of the device than there is.
            ConfigError: it is for parameters in another tier, or has too many staging sets or host
                buffers.
        """
        if outline.parameters is not self.parameters:
            expected = f"{self.parameters.name}, the tier that the limits name"
            raise ConfigError(
                field="StepPlan.parameters", value=outline.parameters.name, expected=expected
            )
        homes = outline.homes
        numels = [spec.numel for spec in subgroups if homes[spec.index] is Home.RESIDENT]
        resident = self.device_bytes(sum(numels))
        change = "keep fewer subgroups resident, or give the device a larger budget"
        _check_fits(resident, self.resident_bytes, holder="resident states", change=change)
        change = "use fewer staging sets or smaller subgroups, or give the device a larger budget"
        _check_fits(
            sum(outline.staging_bytes), self.staging_bytes, holder="staging sets", change=change
        )
        for name, there in (
            ("staging_sets", outline.staging_bytes),
            ("host_buffers", outline.buffer_bytes),
        ):
            most: int = getattr(self, name)
            if len(there) > most:
                expected = f"{len(there)} or more: the plan uses so many"
                raise ConfigError(field=f"Limits.{name}", value=most, expected=expected)

    def _check_copy_bytes(self, plan: StepPlan) -> None:
        subgroups = {subgroup.index: subgroup for subgroup in plan.subgroups}
        for number, op in enumerate(plan.ops):
            # A StepPlan checks by itself what drives move.
            if isinstance(op, CopyOp) and type(op) not in _ON_DRIVES:
                subgroup = subgroups[op.subgroup]
                states = subgroup.numel * self.per_parameter.states
                nbytes = (
                    self.parameter_bytes(subgroup) if isinstance(op, _OF_PARAMETERS) else states
                )
                if op.nbytes != nbytes:
                    per_parameter = nbytes // subgroup.numel
                    expected = (
                        f"{nbytes} bytes: {per_parameter} for each of the subgroup's parameters"
                    )
                    raise ConfigError(field=f"StepPlan.ops[{number}]", value=op, expected=expected)


# A policy's function: makes a plan of the subgroups, which come in the order of the next forward.
Decide = Callable[[Sequence[SubgroupSpec], Rates, Limits], StepPlan]

# Where a policy updates each of the subgroups, by index; they come in the same order.
Homes = Callable[[Sequence[SubgroupSpec]], Mapping[int, Home]]

# The same, where rates and limits decide that too.
HomesAt = Callable[[Sequence[SubgroupSpec], Rates, Limits], Mapping[int, Home]]


@dataclass(frozen=True, slots=True, eq=False)  # a function has no equals
class OffloadPolicy:
    """A function that makes plans, with the name that users know it by.

    The engine trains with the plans that it makes.

    `homes` is given where the subgroups' sizes alone decide where each is updated. It saves making
    plans to find that out. `homes_at` is given where rates and limits decide it too. With
    `is_drafted`, `decide` makes its plans by PlanDraft, so both tell what memory they take, too.
    """

    name: str
    decide: Decide
    homes: Homes | None = None
    homes_at: HomesAt | None = None
    is_drafted: bool = False

    def __call__(self, subgroups: Sequence[SubgroupSpec], rates: Rates, limits: Limits) -> StepPlan:
        """Return the policy's plan for these subgroups, in whatever order they are given.

        Raises:
            CapacityError: the plan needs more of the device than the limits allow.
            ConfigError: the policy made no sound plan, made it for other subgroups, or lacks a
                rate.
        """
        ordered = _ordered(subgroups)
        homes = None if self.homes is None else self.homes(ordered)
        return self._made(ordered, rates, limits, homes)

    def _made(
        self,
        ordered: tuple[SubgroupSpec, ...],
        rates: Rates,
        limits: Limits,
        homes: Mapping[int, Home] | None,
    ) -> StepPlan:
        plan = self.decide(ordered, rates, limits)
        field = f"policy {self.name!r}"
        if not isinstance(plan, StepPlan):
            raise ConfigError(
                field=field, value=plan, expected="a function that returns a StepPlan"
            )
        # Mostly the same objects: comparing their fields takes as long as making some of the ops.
        if set(map(id, plan.subgroups)) != set(map(id, ordered)) and (
            set(plan.subgroups) != set(ordered)
        ):
            expected = "a plan for the subgroups that it was given, all of them and no others"
            raise ConfigError(field=field, value=plan.subgroups, expected=expected)
        # Placing asks `homes` before there is a plan, so both have to agree.
        outline = plan.outline()
        if homes is not None and outline.homes != homes:
            expected = (
                "a plan that updates each subgroup where the policy's `homes` says; or a policy "
                "without `homes`"
            )
            raise ConfigError(field=field, value=outline.homes, expected=expected)
        limits.check(plan, outline)
        return plan

    def outline(
        self,
        subgroups: Sequence[SubgroupSpec],
        rates: Rates,
        limits: Limits,
        known: Mapping[int, Home] | None = None,
    ) -> tuple[PlanOutline, Callable[[], StepPlan]]:
        """Return what memory the policy's plan takes, and what makes the plan.

        A search asks for many outlines of each plan that it makes: where the policy can say what
        memory is taken, ops are not made for that. `known` is what `homes_of` has said.

        Raises:
            CapacityError, ConfigError: as for the plan.
        """
        ordered = _ordered(subgroups)
        homes = known if self.is_drafted else None
        if homes is None:
            homes = self._drafted_homes(ordered, rates, limits)
        if homes is None:
            plan = self(subgroups, rates, limits)
            return plan.outline(), lambda: plan
        outline = PlanDraft(ordered, limits).outline(homes)
        limits.check_memory(outline, ordered)
        return outline, lambda: self._made(ordered, rates, limits, homes)

    def _drafted_homes(
        self, ordered: tuple[SubgroupSpec, ...], rates: Rates, limits: Limits
    ) -> Mapping[int, Home] | None:
        """Return where each subgroup will be updated; None where only a plan shows the memory."""
        if not self.is_drafted:
            return None
        if self.homes is not None:
            return self.homes(ordered)
        return None if self.homes_at is None else self.homes_at(ordered, rates, limits)

    def homes_of(self, subgroups: Sequence[SubgroupSpec]) -> dict[int, Home] | None:
        """Return where each subgroup will be updated; None where only a plan shows it."""
        return None if self.homes is None else dict(self.homes(_ordered(subgroups)))


def _ordered(subgroups: Sequence[SubgroupSpec]) -> tuple[SubgroupSpec, ...]:
    # By index where several are first used together: plans must not depend on the caller's order.
    return tuple(sorted(subgroups, key=attrgetter("first_use", "index")))


def offload_policy(name: str) -> Callable[[Decide], OffloadPolicy]:
    """Return the decorator that makes a policy called `name` of a function."""
    return lambda decide: OffloadPolicy(name, decide)


def split_residents(
    subgroups: Sequence[SubgroupSpec], part: float
) -> tuple[tuple[SubgroupSpec, ...], tuple[SubgroupSpec, ...]]:
    """Return the other subgroups and the residents: the last ones that hold at most `part` of all.

    The last ones, because their parameters are needed last, and residents are updated last.
    """
    # Exact: with floats, a part of a large model could miss its last subgroup by rounding.
    numerator, denominator = Fraction(part).as_integer_ratio()
    left = numerator * sum(subgroup.numel for subgroup in subgroups) // denominator
    first = len(subgroups)
    while first > 0 and subgroups[first - 1].numel <= left:
        first -= 1
        left -= subgroups[first].numel
    return tuple(subgroups[:first]), tuple(subgroups[first:])


class PolicyRegistry(Mapping[str, OffloadPolicy]):
    """The policies by name. It never changes: adding one makes another registry."""

    __slots__ = ("_policies",)

    def __init__(self, policies: Sequence[OffloadPolicy]) -> None:
        self._policies = {policy.name: policy for policy in policies}
        if len(self._policies) != len(policies):
            names = [policy.name for policy in policies]
            raise ConfigError(field="PolicyRegistry", value=names, expected="each name once")

    def __getitem__(self, name: str) -> OffloadPolicy:
        if name not in self._policies:
            raise ConfigError.unknown_name(field="policy", name=name, known=self._policies)
        return self._policies[name]

    def __contains__(self, name: object) -> bool:
        return name in self._policies

    def __iter__(self) -> Iterator[str]:
        return iter(self._policies)

    def __len__(self) -> int:
        return len(self._policies)

    def with_policy(self, policy: OffloadPolicy) -> PolicyRegistry:
        """Return a registry that knows this policy too."""
        return PolicyRegistry([*self._policies.values(), policy])


class _Turns:
    """Places that serve in turn, such as staging sets: what was filled first is empty first."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.taken = 0
        """How often one of them was taken."""
        # For each place, the newest op that empties it.
        self._emptied_by: list[int | None] = [None] * count

    @property
    def following(self) -> int:
        """The place that serves next."""
        return self.taken % self.count

    def next_emptied_by(self) -> int | None:
        """Return the op that empties the place that serves next; None: it is empty."""
        return self._emptied_by[self.taken % self.count] if self.count else None

    def take(self) -> tuple[int, tuple[int, ...]]:
        """Take the next place; return it, and the op that empties it, if it is not empty."""
        place = self.taken % self.count
        self.taken += 1
        op = self._emptied_by[place]
        return place, () if op is None else (op,)

    def note_emptied(self, place: int, op: int) -> None:
        """Note which op empties a place."""
        self._emptied_by[place] = op


class PlanDraft:
    """A plan in the making: each call adds the ops of one subgroup, in the order of their lanes."""

    def __init__(self, subgroups: Sequence[SubgroupSpec], limits: Limits) -> None:
        self._subgroups = tuple(subgroups)
        self._limits = limits
        self.ops: list[Op] = []
        """Those so far, to be read: each call adds its own."""
        # The subgroups updated on the host and uploaded since.
        self._uploaded: set[int] = set()
        # For each subgroup updated on the host, the number of that op.
        self._updated: dict[int, int] = {}
        largest = max([subgroup.numel for subgroup in subgroups], default=1)
        self._set_bytes = limits.device_bytes(largest)
        self._sets = _Turns(limits.sets_for(largest))
        buffer_bytes = [subgroup.buffer_bytes for subgroup in subgroups]
        self._buffer_bytes = max(buffer_bytes, default=0)
        on_drives = len(buffer_bytes) - buffer_bytes.count(0)
        self._buffers = _Turns(min(limits.host_buffers, on_drives))
        # The buffer of each subgroup, and its load's number.
        self._in_buffer: dict[int, tuple[int, int]] = {}
        # By buffer: what is updated there, and not yet stored.
        self._occupants: dict[int, SubgroupSpec] = {}

    @property
    def next_set_after(self) -> int | None:
        """The number of the op that empties the next visit's staging set; None if it is empty."""
        return self._sets.next_emptied_by()

    def update_on_host(self, subgroup: SubgroupSpec) -> None:
        """Update a subgroup on the CPU; the caller adds `upload_parameters` at any later time.

        A subgroup that it displaces from its host buffer has its parameters uploaded first.
        """
        self._load(subgroup)
        self._updated[subgroup.index] = len(self.ops)
        self.ops.append(
            UpdateOnHost(
                subgroup=subgroup.index, params=subgroup.numel, after=self._loaded_at(subgroup)
            )
        )
        # Where parameters stay on the host, nothing follows the update, so states can be stored at
        # once.
        if self._limits.parameters is not Tier.DEVICE:
            self._store(subgroup)

    def upload_parameters(self, subgroup: SubgroupSpec) -> None:
        """Upload the parameters of a subgroup that the CPU updated, unless modules fetch them."""
        if self._limits.parameters is not Tier.DEVICE or subgroup.index in self._uploaded:
            return
        self._uploaded.add(subgroup.index)
        updated = self._updated.get(subgroup.index)
        after = () if updated is None else (updated,)
        nbytes = self._limits.parameter_bytes(subgroup)
        self.ops.append(
            UploadParameters(
                subgroup=subgroup.index, nbytes=nbytes, pieces=subgroup.pieces, after=after
            )
        )
        self._store(subgroup)

    def host(self, subgroup: SubgroupSpec) -> None:
        """Update a subgroup on the CPU and upload its parameters next."""
        self.update_on_host(subgroup)
        self.upload_parameters(subgroup)

    def visit(self, subgroup: SubgroupSpec) -> None:
        """Update a subgroup on the device, in the next staging set.

        Raises:
            CapacityError: the limits allow no staging set.
        """
        self._check_staging()
        self._load(subgroup)
        staging, emptied_by = self._sets.take()
        nbytes = subgroup.numel * self._limits.per_parameter.states
        after = (*emptied_by, *self._loaded_at(subgroup))
        self.ops.append(
            UploadStates(subgroup=subgroup.index, staging=staging, nbytes=nbytes, after=after)
        )
        self._update_on_device(subgroup, staging)
        # The last op of the update: it writes the set that is downloaded next.
        newest = (len(self.ops) - 1,)
        self.ops.append(
            DownloadStates(subgroup=subgroup.index, staging=staging, nbytes=nbytes, after=newest)
        )
        self._sets.note_emptied(staging, len(self.ops) - 1)
        self._store(subgroup)

    def _check_staging(self) -> None:
        """Refuse a visit where the limits allow no staging set."""
        if not self._sets.count:
            change = (
                "keep more on the host, use smaller subgroups, or give the device a larger budget"
            )
            _check_fits(
                self._set_bytes, self._limits.staging_bytes, holder="a staging set", change=change
            )
            raise ConfigError(
                field="Limits.staging_sets",
                value=0,
                expected=("1 or more where subgroups visit the device"),
            )

    def resident(self, subgroup: SubgroupSpec) -> None:
        """Update a resident subgroup: its states stay on the device."""
        self._load(subgroup)
        self._update_on_device(subgroup, None)
        self._store(subgroup)

    def _update_on_device(self, subgroup: SubgroupSpec, staging: int | None) -> None:
        """Update a subgroup on the device; download its parameters where they stay on the host."""
        index, params = subgroup.index, subgroup.numel
        # A visitor's update comes after its upload, which is the op before.
        after = self._loaded_at(subgroup) if staging is None else (len(self.ops) - 1,)
        self.ops.append(UpdateOnDevice(subgroup=index, staging=staging, params=params, after=after))
        if self._limits.parameters is Tier.DEVICE:
            return
        nbytes = self._limits.parameter_bytes(subgroup)
        updated = (len(self.ops) - 1,)
        self.ops.append(
            DownloadParameters(
                subgroup=index,
                staging=staging,
                nbytes=nbytes,
                pieces=subgroup.pieces,
                after=updated,
            )
        )

    def _load(self, subgroup: SubgroupSpec) -> None:
        """Load a subgroup's states from the drives into the next host buffer."""
        if not subgroup.on_drives:
            return
        self._check_buffers()
        occupant = self._occupants.get(self._buffers.following)
        # A subgroup is stored after its upload, which has to be in the plan before its buffer is
        # reused.
        if occupant is not None:
            self.upload_parameters(occupant)
        buffer, after = self._buffers.take()
        self._occupants[buffer] = subgroup
        # The number that the load will have.
        self._in_buffer[subgroup.index] = buffer, len(self.ops)
        self.ops.append(
            LoadStates(
                subgroup=subgroup.index, buffer=buffer, nbytes=subgroup.load_bytes, after=after
            )
        )

    def _check_buffers(self) -> None:
        """Refuse to load states where the limits allow no host buffer."""
        if not self._buffers.count:
            raise ConfigError(
                field="Limits.host_buffers",
                value=0,
                expected=("1 or more where states are offloaded to NVMe"),
            )

    def _loaded_at(self, subgroup: SubgroupSpec) -> tuple[int, ...]:
        return (self._in_buffer[subgroup.index][1],) if subgroup.on_drives else ()

    def _store(self, subgroup: SubgroupSpec) -> None:
        """Store a subgroup to the drives after the newest op, which is its own."""
        if not subgroup.on_drives:
            return
        buffer, _ = self._in_buffer[subgroup.index]
        after = (len(self.ops) - 1,)
        self._buffers.note_emptied(buffer, len(self.ops))
        self._occupants.pop(buffer, None)
        self.ops.append(
            StoreStates(
                subgroup=subgroup.index, buffer=buffer, nbytes=subgroup.store_bytes, after=after
            )
        )

    def plan(self) -> StepPlan:
        """Return the plan.

        Raises:
            ConfigError: a subgroup was given no op, or two.
        """
        return StepPlan(
            subgroups=self._subgroups,
            ops=tuple(self.ops),
            staging_bytes=self._staging_bytes(self._sets.taken),
            parameters=self._limits.parameters,
            buffer_bytes=(self._buffer_bytes,) * self._buffers.count,
        )

    def outline(self, homes: Mapping[int, Home]) -> PlanOutline:
        """Return the outline of the plan that updates each subgroup where `homes` says.

        Raises:
            CapacityError, ConfigError: the limits allow no staging set, or no host buffer, and the
                plan needs one.
        """
        visits = [*homes.values()].count(Home.VISITING)
        if visits:
            self._check_staging()
        if self._buffer_bytes:
            self._check_buffers()
        return PlanOutline(
            homes=homes,
            parameters=self._limits.parameters,
            staging_bytes=self._staging_bytes(visits),
            buffer_bytes=(self._buffer_bytes,) * self._buffers.count,
        )

    def _staging_bytes(self, visits: int) -> tuple[int, ...]:
        return (self._set_bytes,) * min(visits, self._sets.count)


def _check_fits(asked: int, free: int, *, holder: str, change: str) -> None:
    if asked > free:
        raise CapacityError(
            tier="DEVICE", asked=asked, free=free, limit=free, change=f"{change} ({holder})"
        )
