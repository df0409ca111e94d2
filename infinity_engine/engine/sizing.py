"""What an engine is to hold, in bytes, and the plan that this allows: arithmetic, before anything is made or moved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import torch

from infinity_engine.config import EngineConfig, ParametersAt, Precision
from infinity_engine.engine.buffers import (
    GRADIENT_SLOTS,
    SCRATCH,
    SUM,
    BufferLayout,
    Resting,
    buffer_slot,
    gradient_slot,
)
from infinity_engine.engine.parameters import ModelParameter, TrainedParameter
from infinity_engine.errors import CapacityError, ConfigError
from infinity_engine.memory.layout import Layout, Request, layout
from infinity_engine.optim import FloatFormat, Formats, Rule, Subgroup, cut_into_subgroups
from infinity_engine.optim.policies import DEVICE_ONLY, HOST_ONLY, policy_for
from infinity_engine.optim.policy import Limits, OffloadPolicy
from infinity_engine.plan import Auto, NvmeStreamed, Rates, ResolvedBudget, Tier
from infinity_engine.plan.step import BytesPerParameter, Home, StepPlan, SubgroupSpec
from infinity_engine.units import align_up

__all__ = ["Demand", "Plan", "Sizing"]

_PAGE = 4096
_PARAMETER = MappingProxyType(
    {
        Precision.FP32: None,
        Precision.BF16: FloatFormat.BF16,
        Precision.BF16_AUTOCAST: FloatFormat.BF16,
        Precision.FP16: FloatFormat.FP16,
        Precision.FP16_AUTOCAST: FloatFormat.FP16,
    }
)
_BEFORE, _BACKWARD, _UPDATE = range(3)  # when buffers live
_PASSING = 4  # of the largest parameters, so many pass the host at once
_MOST_SCRATCH = 8 << 20
_SPARE = 8 * _PAGE  # for each place on the drives, of which there may be up to eight
_MOST_TRIES = 4  # to find a plan whose buffers fit what it lets be updated where
_MOST_BUFFERS = 4  # two filled ahead, one updated, one emptied
_NOTHING = Resting()
_LISTS = (torch.nn.ParameterList, torch.nn.ParameterDict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """The bytes that a plan takes of each tier.

    `fetched` of the device's are for parameters that modules fetch, `window` beside the host's for those that pass it.
    `slots` has the places of the host's buffers, which are those of `buffer_slot`, `gradient_slot` and SCRATCH.
    """

    host: int
    device: int
    fetched: int
    window: int = 0
    nvme: int = 0
    slots: Layout | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A plan, what it takes, and what of it rests on the drives."""

    steps: StepPlan
    demand: Demand
    resting: Resting = field(default_factory=Resting)
    layouts: Mapping[int, BufferLayout] = field(default_factory=lambda: MappingProxyType({}))
    """Of the subgroups of which some does."""


@dataclass(frozen=True, kw_only=True)
class Sizing:
    """What there is to be held for one model and one optimizer."""

    subgroups: tuple[Subgroup, ...]
    formats: Formats
    state_names: tuple[str, ...]
    parameters: tuple[int, ...]
    """The bytes that modules compute with, of each parameter, those that are frozen at the end."""
    deepest: int
    """The most of these bytes that modules within one another need at the same time."""
    unified: bool
    sums: bool = True
    """Whether gradients of several micro-batches are added up."""
    own: bool = False
    """Whether modules go on with the memory that parameters have already, which is their user's."""

    @classmethod
    def of(
        cls,
        model: torch.nn.Module,
        trained: Sequence[TrainedParameter],
        frozen: Sequence[ModelParameter],
        rules: Sequence[Rule],
        config: EngineConfig,
        *,
        unified: bool,
        in_memory: bool = True,
    ) -> Sizing:
        """Return it for a model whose parameters these are, and are in memory or not."""
        formats = Formats(parameter=_PARAMETER[config.precision])
        width = (formats.parameter or FloatFormat.FP32).nbytes
        nbytes = {
            id(each.parameter): each.numel
            * (width if each.parameter.is_floating_point() else each.parameter.element_size())
            for each in (*trained, *frozen)
        }
        return cls(
            subgroups=_cut(trained, config, width),
            formats=formats,
            state_names=max((rules[group].states for group in {each.group for each in trained}), key=len),
            parameters=tuple(nbytes.values()),
            deepest=_deepest(model, lambda parameter: nbytes.get(id(parameter), 0)),
            unified=unified,
            sums=config.accumulation_steps > 1,
            own=in_memory and formats.parameter is None and unified,
        )

    @property
    def width(self) -> int:
        """Bytes of one element as modules compute with it."""
        return (self.formats.parameter or FloatFormat.FP32).nbytes

    # --- plans ----------------------------------------------------------------------------------------------------

    def plan(
        self, config: EngineConfig, policy: OffloadPolicy | None, budget: ResolvedBudget, *, io_bytes: int
    ) -> Plan:
        """Return the plan that the policy or the strategy makes, what it takes, and what rests on drives.

        Where that is left open, parameters stay on the device if all fits with them there, else on the host; and
        nothing rests on drives that has room elsewhere. `io_bytes` of the host are what using the drives takes.

        Raises:
            CapacityError: a tier cannot hold what it would have to.
        """
        streams = isinstance(config.strategy, NvmeStreamed)
        if (streams or config.parameters is ParametersAt.NVME) and not budget.nvme:
            raise ConfigError(
                field="budget.nvme",
                value=None,
                expected='directories of drives and their sizes, such as {"/mnt/nvme": "400GiB"}, for what rests there',
            )
        refused: CapacityError | None = None
        for parameters, on_drives in self._choices(config, policy, budget):
            try:
                if on_drives or parameters is Tier.NVME:
                    return self._plan_with_drives(
                        config, policy, budget, parameters, states=on_drives, io_bytes=io_bytes
                    )
                plan = self._plan(config, policy, budget, parameters)
                if budget.nvme:  # else the ledger says what is missing
                    self._check_host(plan.demand, budget)
            except CapacityError as error:
                refused = refused or error
            else:
                return plan
        assert refused is not None, "there is a choice"
        raise refused

    def _choices(
        self, config: EngineConfig, policy: OffloadPolicy | None, budget: ResolvedBudget
    ) -> Iterator[tuple[Tier, bool]]:
        """Yield where parameters and states may be, what is best first: parameters' tier, and states on the drives."""
        asked = {
            ParametersAt.AUTO: (Tier.DEVICE, Tier.HOST, Tier.NVME),
            ParametersAt.DEVICE: (Tier.DEVICE,),
            ParametersAt.HOST: (Tier.HOST,),
            ParametersAt.NVME: (Tier.NVME,),
        }[config.parameters]
        tiers = [tier for tier in asked if tier is not Tier.HOST or not self.unified] or [Tier.DEVICE]
        may_rest = isinstance(config.strategy, NvmeStreamed)
        must_rest = may_rest or (isinstance(config.strategy, Auto) and policy is None)
        for on_drives in (False, True):
            for tier in tiers:
                drives = on_drives or tier is Tier.NVME
                if (may_rest and not on_drives) or (drives and not budget.nvme) or (on_drives and not must_rest):
                    continue
                yield tier, on_drives

    def _plan(
        self,
        config: EngineConfig,
        policy: OffloadPolicy | None,
        budget: ResolvedBudget,
        parameters: Tier,
        *,
        resting: Resting = _NOTHING,
        layouts: Mapping[int, BufferLayout] = MappingProxyType({}),
        buffers: int = 0,
    ) -> Plan:
        limits = replace(self._limits(budget, parameters), host_buffers=buffers)
        specs = [self._spec(each, layouts.get(each.index)) for each in self.subgroups]
        rates = config.rates or Rates()

        def made(by: OffloadPolicy) -> Plan:
            steps = by(specs, rates, limits)
            demand = self._demand(steps, budget, resting, layouts)
            return Plan(steps=steps, demand=demand, resting=resting, layouts=layouts)

        if policy is not None:
            return made(policy)
        if not isinstance(config.strategy, Auto):
            return made(policy_for(config.strategy))
        if not self.unified and not resting.states:
            try:
                return made(DEVICE_ONLY)
            except CapacityError:
                pass
        return made(HOST_ONLY)

    def _spec(self, subgroup: Subgroup, layout: BufferLayout | None) -> SubgroupSpec:
        if layout is None:
            return SubgroupSpec(index=subgroup.index, numel=subgroup.numel, first_use=subgroup.index)
        return SubgroupSpec(
            index=subgroup.index,
            numel=subgroup.numel,
            first_use=subgroup.index,
            buffer_bytes=layout.nbytes,
            load_bytes=layout.load_bytes,
            store_bytes=layout.store_bytes,
        )

    # --- drives ---------------------------------------------------------------------------------------------------

    def _plan_with_drives(
        self,
        config: EngineConfig,
        policy: OffloadPolicy | None,
        budget: ResolvedBudget,
        parameters: Tier,
        *,
        states: bool,
        io_bytes: int,
    ) -> Plan:
        """Return the plan that keeps as much in memory as there is room for, what is needed first before the rest."""
        small = max(config.storage.small_bytes, 1)
        values = frozenset(
            number for number, nbytes in enumerate(self.parameters) if parameters is Tier.NVME and nbytes >= small
        )
        resting = Resting(
            states=frozenset(each.index for each in self.subgroups) if states else frozenset(),
            values=values,
            small_bytes=small,
        )
        micro_batches = config.accumulation_steps
        choices = [(buffers, 0) for buffers in range(_MOST_BUFFERS, 1, -1)]
        if states:
            choices += [(buffers, micro_batches) for buffers in range(_MOST_BUFFERS, 0, -1)]
        refused: CapacityError | None = None
        for buffers, gradients in choices:
            tried = replace(resting, gradients=gradients)
            try:
                plan = self._settled(config, policy, budget, parameters, resting=tried, buffers=buffers)
                self._check_host(plan.demand, budget, io_bytes)
            except CapacityError as error:
                refused = error
                continue
            if not states:
                return self._with_room(plan, budget, io_bytes)
            left = budget.host - io_bytes - self._held_on_host(plan.demand)
            kept = self._kept(plan, left - (plan.demand.fetched if self.unified else 0))  # room to compute with, first
            while kept:
                fewer = replace(tried, states=tried.states - frozenset(kept))
                plan_of_fewer = self._settled(config, policy, budget, parameters, resting=fewer, buffers=buffers)
                if self._held_on_host(plan_of_fewer.demand) + io_bytes <= budget.host:
                    plan = plan_of_fewer
                    break
                kept = kept[: len(kept) // 2]  # the policy lets others be updated where this takes more
            return self._with_room(plan, budget, io_bytes)
        assert refused is not None, "there is a choice"
        raise refused

    def _settled(
        self,
        config: EngineConfig,
        policy: OffloadPolicy | None,
        budget: ResolvedBudget,
        parameters: Tier,
        *,
        resting: Resting,
        buffers: int,
    ) -> Plan:
        """Return the plan whose buffers fit what it lets be updated where, which decides what passes them."""
        homes = {each.index: Home.HOST for each in self.subgroups}
        for _ in range(_MOST_TRIES):
            rests = replace(resting, states=self._with_states(resting.states, homes, parameters))
            layouts = {each.index: self._layout(each, rests, homes[each.index], parameters) for each in self.subgroups}
            passing = MappingProxyType({index: each for index, each in layouts.items() if each.nbytes})
            plan = self._plan(config, policy, budget, parameters, resting=rests, layouts=passing, buffers=buffers)
            found = plan.steps.homes()
            if found == homes:
                return plan
            homes = found
        raise ConfigError(
            field="strategy",
            value=config.strategy.name,
            expected="one that says which part visits the device, such as "
            "NvmeStreamed(update=Interleaved(share=0.5)): what is best changes with what passes the host",
        )

    def _with_states(self, indices: Set[int], homes: Mapping[int, Home], parameters: Tier) -> frozenset[int]:
        """Return those of these subgroups that have states on the host, which may rest on drives."""
        return frozenset(
            each.index
            for each in self.subgroups
            if each.index in indices
            and homes[each.index] is not Home.RESIDENT
            and self._states_bytes(each, homes[each.index], parameters)
        )

    def _layout(self, subgroup: Subgroup, resting: Resting, home: Home, parameters: Tier) -> BufferLayout:
        on_host = home is Home.HOST or self.unified
        in_place = self._in_place(home, parameters)
        return BufferLayout.of(
            subgroup,
            resting if on_host else replace(resting, gradients=0),
            streams=len(self.state_names) + (0 if in_place else 1),
            width=self.width,
            in_place=in_place,
            copies=parameters is Tier.DEVICE and home is Home.HOST and not self.unified and self.width < 4,
        )

    def _in_place(self, home: Home, parameters: Tier) -> bool:
        """Tell whether values are the masters of a subgroup; StateKeeper goes by the same rule."""
        here = Home.RESIDENT if parameters is Tier.DEVICE else Home.HOST
        return self.formats.parameter is None and (self.unified or home is here)

    def _kept(self, plan: Plan, left: int) -> list[int]:
        """Return the subgroups whose states have room in so many bytes of the host: what is needed first, first."""
        kept: list[int] = []
        homes = plan.steps.homes()
        for each in self.subgroups:
            if each.index not in plan.resting.states:
                continue
            there, here = (
                self._on_host_beside_drives(each, homes[each.index], plan.steps.parameters, plan.resting, rests=rests)
                for rests in (True, False)
            )
            left -= here - there
            if left < 0:
                break
            kept.append(each.index)
        return kept

    def _with_room(self, plan: Plan, budget: ResolvedBudget, io_bytes: int) -> Plan:
        """Return the plan with what the host has left as room for parameters that come from the drives."""
        if not self.unified or not plan.resting.values:
            return plan
        left = budget.host - io_bytes - self._held_on_host(plan.demand)
        passing = sum(nbytes for number, nbytes in enumerate(self.parameters) if number in plan.resting.values)
        more = max(min(left, passing - plan.demand.fetched), 0)
        demand = replace(plan.demand, device=plan.demand.device + more, fetched=plan.demand.fetched + more)
        return replace(plan, demand=demand)

    def _check_host(self, demand: Demand, budget: ResolvedBudget, io_bytes: int = 0) -> None:
        asked = self._held_on_host(demand) + io_bytes
        if asked > budget.host:
            raise CapacityError(
                tier=Tier.HOST.name,
                asked=asked,
                free=budget.host,
                limit=budget.host,
                change="raise the budget's host, lower subgroup_numel, or let more rest on drives: give the budget "
                'nvme directories, and set strategy="nvme_streamed" and parameters="nvme"',
            )

    def _held_on_host(self, demand: Demand) -> int:
        return demand.host + demand.window + (demand.device if self.unified else 0)

    def _limits(self, budget: ResolvedBudget, parameters: Tier) -> Limits:
        """Return what a plan may take of the device where its parameters stay in that tier."""
        weights = BytesPerParameter(states=4 * (1 + len(self.state_names)), parameter=self.width)
        if self.unified:  # Nothing visits another memory, so nothing is staged.
            everything = sum(subgroup.numel for subgroup in self.subgroups) * weights.states
            return Limits(
                resident_bytes=everything,
                staging_bytes=3 * everything,
                per_parameter=weights,
                parameters=parameters,
            )
        at_home = parameters is not Tier.DEVICE
        left = budget.device - self._on_their_way - (0 if at_home else sum(self.parameters))
        resident = left - self.deepest if at_home else left
        if resident < 0:
            change = "raise the budget's device, or take a smaller model: modules compute with all parameters there"
            if at_home:
                change = "raise the budget's device: modules that run within one another need so much at once"
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
            update_bytes=self.width if at_home and self.formats.parameter is not None else 0,
        )

    # --- bytes ----------------------------------------------------------------------------------------------------

    def _demand(
        self, plan: StepPlan, budget: ResolvedBudget, resting: Resting, layouts: Mapping[int, BufferLayout]
    ) -> Demand:
        if resting.states or resting.values:
            return self._demand_with_drives(plan, budget, resting, layouts)
        at_home = plan.parameters is Tier.HOST
        homes = plan.homes()
        device = sum(
            self._states(each.numel, in_place=not at_home) + (each.numel * self.width if at_home else 0)
            for each in self.subgroups
            if homes[each.index] is Home.RESIDENT and not self.unified
        )
        host = sum(self._on_host(each, homes[each.index], at_home=at_home) for each in self.subgroups)
        if at_home:
            host += sum(align_up(nbytes, _PAGE) for nbytes in self.parameters)
        fetched = 0
        if self.unified:
            device = 0 if self.own else sum(self.parameters)  # beside the masters
        else:
            device += self._on_their_way
            fetched = max(min(budget.device - device, sum(self.parameters)), self.deepest) if at_home else 0
            staged = sum(plan.staging_bytes)
            device += max(staged, fetched) if at_home else staged + sum(self.parameters)
            if device > budget.device:
                change = "raise the budget's device, or keep fewer states there"
                raise CapacityError(
                    tier=Tier.DEVICE.name, asked=device, free=budget.device, limit=budget.device, change=change
                )
        return Demand(host=align_up(max(host, 1), _PAGE), device=device, fetched=fetched)

    def _demand_with_drives(
        self, plan: StepPlan, budget: ResolvedBudget, resting: Resting, layouts: Mapping[int, BufferLayout]
    ) -> Demand:
        homes = plan.homes()
        at_home = plan.parameters is not Tier.DEVICE
        host = device = 0
        for each in self.subgroups:
            home = homes[each.index]
            states = self._states_bytes(each, home, plan.parameters)
            if home is Home.RESIDENT and not self.unified:
                device += states + (each.numel * self.width if at_home else 0)
                continue
            rests = each.index in resting.states
            host += self._on_host_beside_drives(each, home, plan.parameters, resting, rests=rests)
        nvme = sum(
            self._on_drives(each, layouts[each.index], resting) for each in self.subgroups if each.index in layouts
        )
        passing = [nbytes for number, nbytes in enumerate(self.parameters) if number in resting.values]
        nvme += sum(align_up(nbytes, _PAGE) + _SPARE for nbytes in passing)
        staying = sum(nbytes for number, nbytes in enumerate(self.parameters) if number not in resting.values)
        slots = self._slots(plan, resting, max(passing, default=0))
        host += slots.nbytes
        fetched = window = 0
        if self.unified:
            device += 0 if self.own else staying
        else:
            device += self._on_their_way
            if at_home:
                host += sum(
                    align_up(nbytes, _PAGE)
                    for number, nbytes in enumerate(self.parameters)
                    if number not in resting.values
                )
        if at_home:
            every = sum(passing) if self.unified else sum(self.parameters)
            room = min(every, 2 * self.deepest) if self.unified else min(budget.device - device, every)
            fetched = max(room, min(self.deepest, every))
            if not self.unified and passing:
                window = sum(sorted(align_up(nbytes, _PAGE) for nbytes in passing)[-_PASSING:])
        staged = sum(plan.staging_bytes)
        device += max(staged, fetched) if at_home else staged + (0 if self.unified else staying)
        if device > budget.device and not self.unified:
            change = "raise the budget's device, or keep fewer states there"
            raise CapacityError(
                tier=Tier.DEVICE.name, asked=device, free=budget.device, limit=budget.device, change=change
            )
        return Demand(
            host=align_up(max(host, 1), _PAGE),
            device=device,
            fetched=fetched,
            window=window,
            nvme=align_up(nvme, _PAGE),
            slots=slots,
        )

    def _slots(self, plan: StepPlan, resting: Resting, largest_value: int) -> Layout:
        """Return the places of buffers: those of an update are where gradients pass in a backward."""
        requests = [
            Request(buffer_slot(number), nbytes, first=_UPDATE, last=_UPDATE)
            for number, nbytes in enumerate(plan.buffer_bytes)
        ]
        if resting.gradients:
            numel = max(segment.numel for each in self.subgroups for segment in each.segments)
            wire = align_up(self.width * numel, _PAGE)
            count = max(GRADIENT_SLOTS, resting.gradients)
            requests += [
                Request(gradient_slot(number), wire, first=_BACKWARD, last=_BACKWARD) for number in range(count)
            ]
            if resting.gradients > 1:
                requests.append(Request(SUM, align_up(4 * numel, _PAGE), first=_BACKWARD, last=_BACKWARD))
        if largest_value:
            scratch = min(align_up(largest_value, _PAGE), _MOST_SCRATCH)
            requests.append(Request(SCRATCH, scratch, first=_BEFORE, last=_BEFORE))
        return layout(requests)

    def _states_bytes(self, subgroup: Subgroup, home: Home, parameters: Tier) -> int:
        """Return the bytes of a subgroup's masters, where they are not in place, and moments."""
        return 4 * subgroup.numel * (len(self.state_names) + (0 if self._in_place(home, parameters) else 1))

    def _on_host_beside_drives(
        self, subgroup: Subgroup, home: Home, parameters: Tier, resting: Resting, *, rests: bool
    ) -> int:
        """Return what a subgroup that is no resident takes of the host, where its states do or do not rest on drives.

        That is its states, its gradients, and what its update writes for a device that has memory of its own.
        """
        nbytes = 0 if rests else align_up(self._states_bytes(subgroup, home, parameters), _PAGE)
        if home is Home.HOST or self.unified:
            nbytes += sum(self._gradient_on_host(each.numel, resting, rests=rests) for each in subgroup.segments)
            copied = parameters is Tier.DEVICE and not self.unified and self.formats.parameter is not None
            nbytes += align_up(self.width * subgroup.numel, _PAGE) if copied and not rests else 0
        return nbytes

    def _gradient_on_host(self, numel: int, resting: Resting, *, rests: bool) -> int:
        """Return what a piece of a gradient takes of the host, with the sum of several."""
        nbytes = self.width * numel
        if rests and resting.gradients and nbytes >= resting.small_bytes:
            return 0
        return align_up(nbytes, _PAGE) + (align_up(4 * numel, _PAGE) if self.sums else 0)

    def _on_drives(self, subgroup: Subgroup, layout: BufferLayout, resting: Resting) -> int:
        """Return what states and gradients take there, in whole pages; a place may be in pieces on several drives."""
        gradients = sum(
            resting.gradients * (align_up(self.width * subgroup.segments[number].numel, _PAGE) + _SPARE)
            for number in layout.gradients
        )
        return align_up(layout.states_bytes, _PAGE) + _SPARE + gradients

    def _on_host(self, subgroup: Subgroup, home: Home, *, at_home: bool) -> int:
        if self.unified:
            return align_up(self._states(subgroup.numel, in_place=True), _PAGE)
        if home is Home.RESIDENT:
            return 0
        if home is Home.VISITING:
            return align_up(self._states(subgroup.numel, in_place=False), _PAGE)
        # Its gradient, the sum of several, what its update writes for the device; pieces begin on pages of their own.
        each = (self.width + 4 + (0 if at_home else self.width)) * subgroup.numel
        states = align_up(self._states(subgroup.numel, in_place=at_home), _PAGE)
        return states + each + _PAGE * (1 + 2 * len(subgroup.segments))

    def _states(self, numel: int, *, in_place: bool) -> int:
        """Return the bytes of states; where masters may be in place, fp32 parameters are the masters."""
        return 4 * numel * (len(self.state_names) + (0 if in_place and self.formats.parameter is None else 1))

    @property
    def _on_their_way(self) -> int:
        """Bytes of gradients that are on the device until they have gone down."""
        return 2 * self.width * max((subgroup.numel for subgroup in self.subgroups), default=0)


def _cut(trained: Sequence[TrainedParameter], config: EngineConfig, width: int) -> tuple[Subgroup, ...]:
    """Return the subgroups; where drives may be used, those of small parameters, which stay in memory, come first."""
    numels = [each.numel for each in trained]
    if config.budget is None or not config.budget.nvme:
        return cut_into_subgroups(numels, config.subgroup_numel)
    small = [numel if width * numel < config.storage.small_bytes else 0 for numel in numels]
    large = [numel - less for numel, less in zip(numels, small, strict=True)]
    cut = [each for kind in (small, large) for each in cut_into_subgroups(kind, config.subgroup_numel)]
    return tuple(replace(each, index=index) for index, each in enumerate(cut))


def _deepest(module: torch.nn.Module, nbytes: Callable[[torch.nn.Parameter], int]) -> int:
    """Return what the module needs at most at one time. Lists of parameters are not called: whoever has them reads."""
    own = sum(nbytes(each) for each in module.parameters(recurse=False))
    within = [child for child in module.children() if not isinstance(child, _LISTS)]
    own += sum(nbytes(each) for child in module.children() if isinstance(child, _LISTS) for each in child.parameters())
    return own + max((_deepest(child, nbytes) for child in within), default=0)
