"""What one model and one optimizer have to hold, and the bytes that a plan takes of each tier.

Pure: of sizes, before anything is made or moved. The engine makes its memory by it, the planner
answers with it. Which plan is taken is for placing.py to say.

[Note: alike] A large model has thousands of subgroups of a few kinds, and a search asks for the
bytes of dozens of plans. So subgroups that take the same bytes wherever they are get counted, and
one of them is asked.

[Note: gradients that stay] Gradients of what is updated where modules compute stay there; in one
memory without drives, all of them do. Each stays as it came; of several micro-batches its fp32 sum
stays, and a new sum has its first gradient beside it. They come as a backward lets go of
activations, and go as updates are made, before the next forward has new activations in their place.
So where activations are known, both together take what the larger one does. Sums stay through
forwards, beside activations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import compress
from types import MappingProxyType
from typing import Any, NamedTuple

from deepnvme.sizes import PAGE
from infinity_engine.errors import CapacityError
from infinity_engine.memory.layout import Layout
from infinity_engine.optim import FloatFormat, Formats, Segment, Subgroup, cut_into_subgroups
from infinity_engine.optim.policy import Limits, OffloadPolicy
from infinity_engine.placement.buffers import (
    GRADIENT_SLOTS,
    NO_LAYOUT,
    NOTHING_RESTS,
    SCRATCH,
    SUM,
    BufferLayout,
    Resting,
    buffer_slot,
    early_slot,
    gradient_slot,
)
from infinity_engine.plan import Extent, ResolvedBudget, Tier
from infinity_engine.plan.step import BytesPerParameter, Home, PlanOutline, SubgroupSpec
from infinity_engine.units import align_up

__all__ = ["PASSING", "Demand", "Sizing", "cut"]

PASSING = 4
"""How many of the largest parameters pass the host at once."""

# Values come to the drives in pieces of so many bytes before the first step.
_MOST_SCRATCH = 8 << 20
_MOST_KEPT = 8  # answers about all subgroups
_SPARE = 8 * PAGE  # for each place on the drives, of which there may be up to eight


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """The bytes that a plan takes of each tier.

    `fetched` of the device's are for parameters that modules fetch, `window` beside the host's for
    those that pass it. `staying`, beside the device's, is what gradients take that stay there:
    [Note: gradients that stay]. `slots` has the places of the host's buffers, which are those of
    `buffer_slot`, `gradient_slot` and SCRATCH.
    """

    host: int
    device: int
    fetched: int
    staying: int
    window: int = 0
    nvme: int = 0
    slots: Layout | None = None


_Kind = tuple[int, Home, bool]
"""The first subgroup that is alike, the home, and whether the subgroup is among those asked for."""


class _Kinds(NamedTuple):
    """The kind of each subgroup; by kind how many there are, and the number of one of them."""

    of_each: Sequence[_Kind]
    counts: Mapping[_Kind, int]
    indices: Mapping[_Kind, int]


class _Values(NamedTuple):
    """The bytes of parameters: of those that rest on drives, and of those that stay."""

    passing: int
    on_drives: int
    """What the first take of drives."""
    largest: int
    window: int
    """The largest of the first together, which pass the host on their way to a device."""
    staying: int
    staying_on_host: int


def _keep_newest(answers: dict[Any, Any]) -> None:
    """Forget the oldest, where there is one too many."""
    if len(answers) > _MOST_KEPT:
        del answers[next(iter(answers))]


class _SpecsPassing(dict[int, SubgroupSpec]):
    """Subgroups as plans see them, which pass so many bytes of a buffer, load and store so many;
    each made when it is asked for.
    """

    def __init__(self, subgroups: Sequence[Subgroup], passes: tuple[int, int, int]) -> None:
        super().__init__()
        self._subgroups = subgroups
        self._passes = passes

    def __missing__(self, index: int) -> SubgroupSpec:
        subgroup, (buffer_bytes, load_bytes, store_bytes) = self._subgroups[index], self._passes
        spec = self[index] = SubgroupSpec(
            index=index,
            numel=subgroup.numel,
            # Numbered by their first parameters, the order of which stands for that of use.
            first_use=index,
            parameter_bytes=subgroup.formats.width,
            pieces=len(subgroup.segments),
            buffer_bytes=buffer_bytes,
            load_bytes=load_bytes,
            store_bytes=store_bytes,
        )
        return spec


@dataclass(frozen=True, kw_only=True)
class Sizing:
    """What there is to be held for one model and one optimizer."""

    subgroups: tuple[Subgroup, ...]
    """In the order of their `index`, which is their place here."""
    state_names: tuple[str, ...]
    parameters: tuple[int, ...]
    """The bytes that modules compute with, of each parameter, those that are frozen at the end."""
    deepest: int
    """The most of these bytes that modules within one another need at the same time."""
    unified: bool
    sums: bool = True
    """Whether gradients of several micro-batches are added up."""
    gradient_width: int | None = None
    """Bytes of one element of every gradient; None: as wide as modules' own values."""
    activations: int = 0
    """What autograd keeps of a forward; 0: it is not of the budget, or not known."""

    @cached_property
    def formats(self) -> Formats:
        """How most of what is trained is stored, for estimates that know one format only."""
        numels: dict[Formats, int] = {}
        for index, count in Counter(self.alike).items():
            kind = self.subgroups[index]
            numels[kind.formats] = numels.get(kind.formats, 0) + count * kind.numel
        return max(numels, key=lambda formats: numels[formats], default=Formats())

    @cached_property
    def width(self) -> int:
        """Bytes of one element as modules compute with most of what is trained, for estimates."""
        return self.formats.width

    def wire(self, subgroup: Subgroup) -> int:
        """Return the bytes of one element of a gradient."""
        return subgroup.formats.width if self.gradient_width is None else self.gradient_width

    @cached_property
    def subgroups_of(self) -> Mapping[int, tuple[int, ...]]:
        """The subgroups that parameters are parts of, by the parameter's number."""
        found: dict[int, list[int]] = {}
        for subgroup in self.subgroups:
            for segment in subgroup.segments:
                found.setdefault(segment.parameter, []).append(subgroup.index)
        return MappingProxyType({number: tuple(indices) for number, indices in found.items()})

    @cached_property
    def alike(self) -> tuple[int, ...]:
        """Of each subgroup, the number of the first that takes the same bytes: [Note: alike].

        Whether values rest on drives goes by their parameter's bytes, so these are alike too.
        """
        first: dict[Hashable, int] = {}
        return tuple(
            first.setdefault(
                (
                    id(subgroup.formats),  # hashing what they say takes longer
                    *(
                        (segment.numel, self.parameters[segment.parameter])
                        for segment in subgroup.segments
                    ),
                ),
                subgroup.index,
            )
            for subgroup in self.subgroups
        )

    def counted(
        self, homes: Mapping[int, Home], states: Set[int]
    ) -> Iterator[tuple[Subgroup, Home, bool, int]]:
        """Yield, of subgroups alike that are updated in one home, any one, and how many they are.

        Between these: the home, and whether they are among `states`.
        """
        kinds = self._kinds(homes, states)
        for kind, count in kinds.counts.items():
            _, home, is_there = kind
            yield self.subgroups[kinds.indices[kind]], home, is_there, count

    def _kinds(self, homes: Mapping[int, Home], states: Set[int]) -> _Kinds:
        """Return the kind of each subgroup, updated in its home, and among `states` or not.

        Placing asks this several times in a row of the same objects. So the newest answers are kept
        by the ids of these objects, and with them, so that no other object gets such an id.
        """
        known, key = self._known_kinds, (id(homes), id(states))
        if key not in known:
            indices = range(len(self.subgroups))
            kinds = list(
                zip(
                    self.alike,
                    map(homes.__getitem__, indices),
                    map(states.__contains__, indices),
                    strict=True,
                )
            )
            known[key] = (
                homes,
                states,
                _Kinds(kinds, Counter(kinds), dict(zip(kinds, indices, strict=True))),
            )
            _keep_newest(known)
        return known[key][-1]

    # What a search asks for again and again, of the same subgroups.

    @cached_property
    def _known_kinds(self) -> dict[tuple[int, int], tuple[Mapping[int, Home], Set[int], _Kinds]]:
        return {}

    @cached_property
    def indices(self) -> frozenset[int]:
        """Those of all subgroups."""
        return frozenset(range(len(self.subgroups)))

    @cached_property
    def _homes(self) -> dict[OffloadPolicy, Mapping[int, Home] | None]:
        return {}

    def homes_by(self, policy: OffloadPolicy) -> Mapping[int, Home] | None:
        """Return where a policy updates subgroups: each time the same object.

        None where their sizes alone do not decide that.
        """
        if policy not in self._homes:
            self._homes[policy] = policy.homes_of(self._specs_in_memory)
            _keep_newest(self._homes)
        return self._homes[policy]

    @cached_property
    def _specs(self) -> dict[tuple[int, int, int], _SpecsPassing]:
        return {}

    @cached_property
    def _layouts(self) -> dict[Hashable, dict[_Kind, BufferLayout]]:
        return {}

    @cached_property
    def _bytes_on_host(self) -> dict[Hashable, int]:
        return {}

    @cached_property
    def _layouts_of_slots(self) -> dict[Hashable, Layout]:
        return {}

    @cached_property
    def _of_at_least(self) -> dict[int, frozenset[int]]:
        return {}

    def of_at_least(self, nbytes: int) -> frozenset[int]:
        """Return the parameters of that many bytes or more: each time the same object."""
        if nbytes not in self._of_at_least:
            self._of_at_least[nbytes] = frozenset(
                number for number, size in enumerate(self.parameters) if size >= nbytes
            )
        return self._of_at_least[nbytes]

    @cached_property
    def _values(self) -> dict[frozenset[int], _Values]:
        return {}

    def _of_parameters(self, resting: frozenset[int]) -> _Values:
        """Return what parameters take, those with these numbers on drives."""
        if resting not in self._values:
            self._values[resting] = _values_of(self.parameters, resting)
        return self._values[resting]

    # --- what plans are made of -------------------------------------------------------------------

    def specs(self, layouts: Mapping[int, BufferLayout]) -> tuple[SubgroupSpec, ...]:
        """Return subgroups as plans see them; those with a layout pass a buffer laid out so."""
        if not layouts:
            return self._specs_in_memory
        # Subgroups alike share a layout.
        distinct = {id(layout): layout for layout in (NO_LAYOUT, *layouts.values())}
        specs = {key: self._specs_passing(layout) for key, layout in distinct.items()}
        of_each = (layouts.get(index, NO_LAYOUT) for index in range(len(self.subgroups)))
        return tuple([specs[id(layout)][index] for index, layout in enumerate(of_each)])

    def _specs_passing(self, layout: BufferLayout) -> _SpecsPassing:
        """Return the specs of subgroups that pass a buffer laid out so: those known so far."""
        passes = layout.nbytes, layout.load_bytes, layout.store_bytes
        if passes not in self._specs:
            self._specs[passes] = _SpecsPassing(self.subgroups, passes)
        return self._specs[passes]

    @cached_property
    def _specs_in_memory(self) -> tuple[SubgroupSpec, ...]:
        return tuple(map(self._specs_passing(NO_LAYOUT).__getitem__, range(len(self.subgroups))))

    def limits(self, budget: ResolvedBudget, parameters: Tier) -> Limits:
        """Return what a plan may take of the device where its parameters stay in that tier."""
        # Masters and states, in fp32.
        weights = BytesPerParameter(states=4 * (1 + len(self.state_names)), parameter=self.width)
        if self.unified:  # Nothing visits another memory, so nothing is staged.
            everything = sum(subgroup.numel for subgroup in self.subgroups) * weights.states
            return Limits(
                resident_bytes=everything,
                # In one memory the device sets no limit: enough for three sets of everything.
                staging_bytes=3 * everything,
                per_parameter=weights,
                parameters=parameters,
            )
        at_home = parameters is not Tier.DEVICE
        left = (
            budget.device
            - self.activations
            - self.on_their_way
            - (0 if at_home else sum(self.parameters))
        )
        # Residents stay while modules compute, the deepest too. Staging has ended by then.
        resident = left - self.deepest if at_home else left
        if resident < 0:
            change = (
                "raise the budget's device, or take a smaller model: modules compute with all "
                "parameters there"
            )
            if at_home:
                change = (
                    "raise the budget's device: modules that run within one another need so much "
                    "at once"
                )
            raise CapacityError(
                tier=Tier.DEVICE.name,
                asked=budget.device - resident,
                free=budget.device,
                limit=budget.device,
                change=change,
            )
        return Limits(
            resident_bytes=resident,
            staging_bytes=left,
            per_parameter=weights,
            parameters=parameters,
            update_bytes=self._most_copied if at_home else 0,
        )

    def with_states(
        self, indices: Set[int], homes: Mapping[int, Home], parameters: Tier
    ) -> frozenset[int]:
        """Return those of these subgroups with states on the host, which may rest on drives."""
        kinds = self._kinds(homes, indices)
        there = {
            kind
            for kind, index in kinds.indices.items()
            if kind[-1]
            and kind[1] is not Home.RESIDENT
            and self.states_bytes(self.subgroups[index], kind[1], parameters)
        }
        of_each = map(there.__contains__, kinds.of_each)
        found = frozenset(compress(range(len(self.subgroups)), of_each))
        return self.indices if len(found) == len(self.subgroups) else found

    def layouts(
        self, resting: Resting, homes: Mapping[int, Home], parameters: Tier
    ) -> dict[int, BufferLayout]:
        """Return where the things of each subgroup lie in a host buffer, of which so much rests."""
        resting_alike = resting.gradients, resting.values, resting.small_bytes, parameters
        known = self._layouts.setdefault(resting_alike, {})
        kinds = self._kinds(homes, resting.states)
        for kind, index in kinds.indices.items():
            if kind not in known:
                known[kind] = self._layout(self.subgroups[index], resting, kind[1], parameters)
        return dict(enumerate(map(known.__getitem__, kinds.of_each)))

    def _layout(
        self, subgroup: Subgroup, resting: Resting, home: Home, parameters: Tier
    ) -> BufferLayout:
        on_host = home is Home.HOST or self.unified
        in_place = self.in_place(subgroup, home, parameters)
        # The update writes what modules on a device of its own compute with.
        copies = subgroup.formats.has_copies and parameters is Tier.DEVICE and not self.unified
        return BufferLayout.of(
            subgroup,
            # Gradients of what a device of its own updates do not pass the host.
            resting if on_host else replace(resting, gradients=0),
            streams=len(self.state_names) + (0 if in_place else 1),
            gradient_width=self.wire(subgroup),
            in_place=in_place,
            copies=copies and home is Home.HOST,
        )

    def in_place(self, subgroup: Subgroup, home: Home, parameters: Tier) -> bool:
        """Tell whether values are the masters of a subgroup; StateKeeper goes by the same rule."""
        # An fp32 master is what modules compute with only where both are in one place.
        here = Home.RESIDENT if parameters is Tier.DEVICE else Home.HOST
        return not subgroup.formats.has_copies and (self.unified or home is here)

    def beside_gradients(
        self, limits: Limits, plan: PlanOutline, *, drives: bool, visit: bool
    ) -> Limits:
        """Return what a plan may take beside the gradients that stay where another one updates.

        It may stage what is left beside as many residents: with `visit`, one set at least.
        """
        homes = plan.homes
        gradients = self.of_backward(self._staying(homes, drives=drives)) - self.activations
        resident = sum(
            count
            * (
                self.states_bytes(subgroup, Home.RESIDENT, plan.parameters)
                + (0 if plan.parameters is Tier.DEVICE else self._copied(subgroup))
            )
            for subgroup, home, _, count in self.counted(homes, frozenset())
            if home is Home.RESIDENT
        )
        one_set = (
            limits.device_bytes(max((subgroup.numel for subgroup in self.subgroups), default=0))
            if visit
            else 0
        )
        # With `visit` one set at least, but never more than the limits before.
        return replace(
            limits,
            resident_bytes=max(limits.resident_bytes - gradients, 0),
            staging_bytes=min(
                max(limits.staging_bytes - gradients - resident, one_set), limits.staging_bytes
            ),
        )

    # --- bytes ------------------------------------------------------------------------------------

    def demand(
        self,
        plan: PlanOutline,
        budget: ResolvedBudget,
        resting: Resting,
        layouts: Mapping[int, BufferLayout],
    ) -> Demand:
        """Return what a plan takes of each tier.

        Raises:
            CapacityError: the device cannot hold what it would have to.
        """
        if resting.any:
            return self._demand_with_drives(plan, budget, resting, layouts)
        # In one memory, parameters are where modules compute in any case.
        at_home = plan.parameters is not Tier.DEVICE and not self.unified
        homes = plan.homes
        device = host = 0
        for subgroup, home, _, count in self.counted(homes, frozenset()):
            if self._is_on_device(home):
                copied = self._copied(subgroup) if at_home else 0
                device += count * (self._states(subgroup, in_place=not at_home) + copied)
            else:
                host += count * self._on_host(subgroup, home, at_home=at_home)
        if at_home:
            host += self._of_parameters(frozenset()).staying_on_host
        fetched = 0
        staying = self._staying(homes, drives=False)
        if self.unified:
            device = sum(self.parameters)  # beside the masters
        else:
            device += self.on_their_way
            left = budget.device - device - self.of_backward(staying)
            fetched = max(min(left, sum(self.parameters)), self.deepest) if at_home else 0
            staged = sum(plan.staging_bytes)
            # Staging sets and fetched parameters share one room.
            device += max(staged, fetched) if at_home else staged + sum(self.parameters)
        demand = Demand(
            host=align_up(max(host, 1), PAGE), device=device, fetched=fetched, staying=staying
        )
        self._check_device(demand, budget)
        return demand

    def gradient_stays(self, home: Home, *, drives: bool) -> bool:
        """Tell whether the gradients of what is updated there stay where modules compute.

        `drives`: the plan has something on them.
        """
        return not drives if self.unified else home is not Home.HOST

    def _staying(self, homes: Mapping[int, Home], *, drives: bool) -> int:
        """Return what gradients that stay take: the pieces that are updated there."""
        staying = {home for home in Home if self.gradient_stays(home, drives=drives)}
        counted = [
            (subgroup, count)
            for subgroup, home, _, count in self.counted(homes, frozenset())
            if home in staying
        ]
        if not self.sums:
            return sum(count * self.wire(subgroup) * subgroup.numel for subgroup, count in counted)
        if not counted:
            return 0
        sums = FloatFormat.FP32.nbytes * sum(count * kind.numel for kind, count in counted)
        # A new sum has its first gradient beside it.
        first = self.gradients_of(
            subgroup for subgroup in self.subgroups if homes[subgroup.index] in staying
        )
        return sums + max(first.values(), default=0)

    @cached_property
    def all_gradients(self) -> Mapping[int, int]:
        """The bytes of the gradients of what is trained, by parameter."""
        return MappingProxyType(self.gradients_of(self.subgroups))

    @cached_property
    def largest(self) -> Subgroup:
        """The subgroup with the most elements."""
        return max(self.subgroups, key=lambda subgroup: subgroup.numel)

    @cached_property
    def numel(self) -> int:
        """Elements of all that is trained."""
        return sum(subgroup.numel for subgroup in self.subgroups)

    def gradients_of(self, subgroups: Iterable[Subgroup]) -> dict[int, int]:
        """Return the bytes of the gradients of what these subgroups hold, by parameter."""
        found: dict[int, int] = {}
        for subgroup in subgroups:
            for segment in subgroup.segments:
                nbytes = self.wire(subgroup) * segment.numel
                found[segment.parameter] = found.get(segment.parameter, 0) + nbytes
        return found

    def of_backward(self, staying: int) -> int:
        """Return what gradients that stay and activations take: [Note: gradients that stay]."""
        return self.activations + staying if self.sums else max(self.activations, staying)

    def held_on_host(self, demand: Demand) -> int:
        """Return what a demand takes of the host's budget; in one memory, the device's part too."""
        return (
            demand.host
            + demand.window
            + (self._where_modules_compute(demand) if self.unified else 0)
        )

    def _where_modules_compute(self, demand: Demand) -> int:
        return demand.device + self.of_backward(demand.staying)

    def refusal(
        self, tier: Tier, demand: Demand, limit: int, *, beside: int = 0, change: str
    ) -> CapacityError:
        """Return the error that a tier has too little for a demand; `change` is what would do.

        `beside` is what the host has to have for drives. The error says how much would be enough.
        """
        computes_here = tier is Tier.DEVICE or self.unified
        asked = (
            self._where_modules_compute(demand)
            if tier is Tier.DEVICE
            else self.held_on_host(demand) + beside
        )
        parts = {
            "states, with what passes the host": demand.host + demand.window + beside
            if tier is Tier.HOST
            else 0,
            "parameters" if self.unified else "parameters and states": demand.device
            if computes_here
            else 0,
            "gradients that stay": demand.staying if computes_here else 0,
            "activations": self.activations if computes_here else 0,
        }
        return CapacityError(
            tier=tier.name,
            asked=asked,
            free=limit,
            limit=limit,
            holders=tuple((name, nbytes) for name, nbytes in parts.items() if nbytes),
            change=change,
            budget=tier.value,
        )

    def _check_device(self, demand: Demand, budget: ResolvedBudget) -> None:
        if not self.unified and self._where_modules_compute(demand) > budget.device:
            change = (
                "update less on the device: states that are resident stay there, and so do the "
                "gradients of what is updated there"
            )
            raise self.refusal(Tier.DEVICE, demand, budget.device, change=change)

    def states_bytes(self, subgroup: Subgroup, home: Home, parameters: Tier) -> int:
        """Return the bytes of a subgroup's masters, where they are not in place, and moments."""
        return (
            4
            * subgroup.numel
            * (len(self.state_names) + (0 if self.in_place(subgroup, home, parameters) else 1))
        )

    def on_host_beside_drives(
        self, subgroup: Subgroup, home: Home, parameters: Tier, resting: Resting, *, rests: bool
    ) -> int:
        """Return what a subgroup that is no resident takes of the host, where its states do or do
        not rest on drives.

        That is its states, its gradients, and what its update writes for a device that has memory
        of its own.
        """
        known = (
            self.alike[subgroup.index],
            home,
            parameters,
            rests,
            bool(resting.gradients),
            resting.small_bytes,
        )
        if known not in self._bytes_on_host:
            nbytes = 0 if rests else align_up(self.states_bytes(subgroup, home, parameters), PAGE)
            if home is Home.HOST or self.unified:
                nbytes += sum(
                    self._gradient_on_host(subgroup, segment, resting, rests=rests)
                    for segment in subgroup.segments
                )
                copied = parameters is Tier.DEVICE and not self.unified and not rests
                nbytes += align_up(self._copied(subgroup), PAGE) if copied else 0
            self._bytes_on_host[known] = nbytes
        return self._bytes_on_host[known]

    def all_beside_drives(
        self, homes: Mapping[int, Home], parameters: Tier, resting: Resting
    ) -> int:
        """Return what all that rests on no drive takes of the host: buffers come on top of it."""
        nbytes = 0
        for subgroup, home, rests, count in self.counted(homes, resting.states):
            if not self._is_on_device(home):
                nbytes += count * self.on_host_beside_drives(
                    subgroup, home, parameters, resting, rests=rests
                )
        if parameters is not Tier.DEVICE and not self.unified:
            nbytes += self._of_parameters(resting.values).staying_on_host
        return nbytes

    def _is_on_device(self, home: Home) -> bool:
        return home is Home.RESIDENT and not self.unified

    def _demand_with_drives(
        self,
        plan: PlanOutline,
        budget: ResolvedBudget,
        resting: Resting,
        layouts: Mapping[int, BufferLayout],
    ) -> Demand:
        homes = plan.homes
        at_home = plan.parameters is not Tier.DEVICE
        host = self.all_beside_drives(homes, plan.parameters, resting)
        device = nvme = largest_early = 0
        for subgroup, home, _, count in self.counted(homes, resting.states):
            if self._is_on_device(home):
                states = self.states_bytes(subgroup, Home.RESIDENT, plan.parameters)
                device += count * (states + (self._copied(subgroup) if at_home else 0))
            if subgroup.index not in layouts:
                continue
            layout = layouts[subgroup.index]
            nvme += count * self._on_drives(subgroup, layout, resting)
            if resting.early and layout.may_be_early:
                # Early updates write to new places: the old values are needed until the step adopts
                # them.
                nvme += count * (align_up(layout.states_bytes, PAGE) + _SPARE)
                largest_early = max(largest_early, layout.nbytes)
        values = self._of_parameters(resting.values)
        nvme += values.on_drives
        if largest_early:
            again = {
                segment.parameter
                for index, layout in layouts.items()
                if layout.may_be_early
                for segment in self.subgroups[index].segments
            }
            nvme += sum(align_up(self.parameters[number], PAGE) + _SPARE for number in again)
        slots = self._slots(
            plan, resting, largest_value=values.largest, largest_early=largest_early
        )
        host += slots.nbytes
        fetched = window = 0
        gradients = self._staying(homes, drives=True)
        if self.unified:
            device += values.staying
        else:
            device += self.on_their_way
        if at_home:
            all_fetched = values.passing + (0 if self.unified else values.staying)
            # In one memory twice the deepest; `_with_room` adds what the host has left.
            room = (
                2 * self.deepest
                if self.unified
                else budget.device - device - self.of_backward(gradients)
            )
            # The deepest at least: modules cannot compute with less, which the check below refuses.
            fetched = max(min(room, all_fetched), min(self.deepest, all_fetched))
            window = 0 if self.unified else values.window
        staged = sum(plan.staging_bytes)
        if at_home:
            device += max(staged, fetched)
        else:
            device += staged + (0 if self.unified else values.staying)
        demand = Demand(
            host=align_up(max(host, 1), PAGE),
            device=device,
            fetched=fetched,
            staying=gradients,
            window=window,
            nvme=align_up(nvme, PAGE),
            slots=slots,
        )
        self._check_device(demand, budget)
        return demand

    def _slots(
        self, plan: PlanOutline, resting: Resting, *, largest_value: int, largest_early: int
    ) -> Layout:
        """Return the places of buffers: an update's lie where gradients pass in a backward."""
        known = plan.buffer_bytes, resting.gradients, resting.early, largest_value, largest_early
        if known not in self._layouts_of_slots:
            together = self._buffers_together(
                plan, resting, largest_value=largest_value, largest_early=largest_early
            )
            self._layouts_of_slots[known] = _stacked(together)
        return self._layouts_of_slots[known]

    def _buffers_together(
        self, plan: PlanOutline, resting: Resting, *, largest_value: int, largest_early: int
    ) -> Iterator[Mapping[str, int]]:
        """Yield the bytes of buffers by name: those of an update, of a backward, and before both.

        They live at different times, so they share memory.
        """
        yield {buffer_slot(number): nbytes for number, nbytes in enumerate(plan.buffer_bytes)}
        passing: dict[str, int] = {}
        if resting.gradients:
            numel, wire = self._longest_segments
            count = max(GRADIENT_SLOTS, resting.gradients)
            passing |= {gradient_slot(number): align_up(wire, PAGE) for number in range(count)}
            if resting.gradients > 1:
                passing[SUM] = align_up(4 * numel, PAGE)
        if largest_early:
            passing |= {early_slot(number): largest_early for number in range(resting.early)}
        yield passing
        if largest_value:
            yield {SCRATCH: min(align_up(largest_value, PAGE), _MOST_SCRATCH)}

    @cached_property
    def _longest_segments(self) -> tuple[int, int]:
        """The elements of the longest segment, and the bytes of the longest gradient of one.

        These may be two segments.
        """
        segments = [
            (self.wire(self.subgroups[first]), segment.numel)
            for first in set(self.alike)
            for segment in self.subgroups[first].segments
        ]
        return (
            max((numel for _, numel in segments), default=1),
            max((wire * numel for wire, numel in segments), default=1),
        )

    def _gradient_on_host(
        self, subgroup: Subgroup, segment: Segment, resting: Resting, *, rests: bool
    ) -> int:
        """Return what a piece of a gradient takes of the host, with the sum of several."""
        numel = segment.numel
        if rests and resting.gradients and subgroup.formats.width * numel >= resting.small_bytes:
            return 0
        return align_up(self.wire(subgroup) * numel, PAGE) + (
            align_up(4 * numel, PAGE) if self.sums else 0
        )

    def _on_drives(self, subgroup: Subgroup, layout: BufferLayout, resting: Resting) -> int:
        """Return what states and gradients take there, in whole pages, perhaps in pieces."""
        gradients = sum(
            resting.gradients
            * (align_up(self.wire(subgroup) * subgroup.segments[number].numel, PAGE) + _SPARE)
            for number in layout.gradients
        )
        return align_up(layout.states_bytes, PAGE) + _SPARE + gradients

    def _on_host(self, subgroup: Subgroup, home: Home, *, at_home: bool) -> int:
        if home is Home.RESIDENT and not self.unified:
            return 0
        known = self.alike[subgroup.index], home, at_home
        if known not in self._bytes_on_host:
            in_place = self.unified or (at_home and home is Home.HOST)
            nbytes = align_up(self._states(subgroup, in_place=in_place), PAGE)
            if home is Home.HOST and not self.unified:
                # Its gradient, the sum of several, and what the update writes for a device.
                nbytes += sum(
                    self._gradient_on_host(subgroup, segment, NOTHING_RESTS, rests=False)
                    for segment in subgroup.segments
                )
                nbytes += 0 if at_home else align_up(self._copied(subgroup), PAGE)
            self._bytes_on_host[known] = nbytes
        return self._bytes_on_host[known]

    def _copied(self, subgroup: Subgroup) -> int:
        """Return what an update writes for modules elsewhere; fp32 parameters are masters."""
        return subgroup.formats.width * subgroup.numel if subgroup.formats.has_copies else 0

    @cached_property
    def _most_copied(self) -> int:
        """The most bytes that an update writes for one parameter: of mixed formats, the largest."""
        copied = (self._copied(subgroup) // subgroup.numel for subgroup in self.subgroups)
        return max(copied, default=0)

    def _states(self, subgroup: Subgroup, *, in_place: bool) -> int:
        """Return the bytes of states; where masters may be in place, fp32 parameters are so."""
        masters = 0 if in_place and not subgroup.formats.has_copies else 1
        return 4 * subgroup.numel * (len(self.state_names) + masters)

    @cached_property
    def on_their_way(self) -> int:
        """Bytes of gradients that are on the device until they have gone down."""
        # Twice the largest: one goes down while the next one is made.
        return 2 * max(
            (self.wire(subgroup) * subgroup.numel for subgroup in self.subgroups), default=0
        )


def _values_of(parameters: Sequence[int], resting: Set[int]) -> _Values:
    passing = [nbytes for number, nbytes in enumerate(parameters) if number in resting]
    staying = [nbytes for number, nbytes in enumerate(parameters) if number not in resting]
    pages = [align_up(nbytes, PAGE) for nbytes in passing]
    return _Values(
        passing=sum(passing),
        # A place may be in pieces on several drives, each rounded up to a page.
        on_drives=sum(pages) + len(pages) * _SPARE,
        largest=max(passing, default=0),
        window=sum(sorted(pages)[-PASSING:]),
        staying=sum(staying),
        staying_on_host=sum(align_up(nbytes, PAGE) for nbytes in staying),
    )


def _stacked(together: Iterable[Mapping[str, int]]) -> Layout:
    """Return places for buffers: those of one time lie one behind another, from the bottom on."""
    places: dict[str, Extent] = {}
    most = 0
    for buffers in together:
        top = 0
        for name, nbytes in buffers.items():
            places[name] = Extent(top, nbytes)
            top = align_up(top + nbytes, PAGE)
        most = max(most, top)
    return Layout(places=places, nbytes=most)


def cut(
    parameters: Sequence[tuple[int, Formats]],
    subgroup_numel: int,
    *,
    small_bytes: int | None = None,
) -> tuple[Subgroup, ...]:
    """Return the subgroups of parameters, given by elements and formats; each has one format.

    Where drives may be used, those of parameters of fewer than `small_bytes`, which stay in memory,
    come first. Others follow in the order of their first parameters.
    """

    def is_small(numel: int, formats: Formats) -> bool:
        return small_bytes is not None and formats.width * numel < small_bytes

    kinds = dict.fromkeys((is_small(numel, formats), formats) for numel, formats in parameters)
    found: list[tuple[bool, Segment, Subgroup]] = []
    for kind in kinds:
        numels = [
            # Parameters of other kinds count 0 here, so that parameters keep their numbers.
            numel if (is_small(numel, formats), formats) == kind else 0
            for numel, formats in parameters
        ]
        of_kind = cut_into_subgroups(numels, subgroup_numel, kind[1])
        found += [(not kind[0], subgroup.segments[0], subgroup) for subgroup in of_kind]
    found.sort(key=lambda entry: (entry[0], entry[1].parameter, entry[1].first_element))
    return tuple(replace(subgroup, index=index) for index, (_, _, subgroup) in enumerate(found))
