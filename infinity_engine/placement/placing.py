"""Which plan a budget allows, and which parts of it rest on the drives: the best is tried first.

Pure: asks policies and adds up bytes. Called by the engine, which carries out the plan, and by the
planner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType

from infinity_engine.errors import CapacityError, ConfigError
from infinity_engine.kept_errors import again
from infinity_engine.optim.policies import DEVICE_ONLY, HOST_ONLY, policy_for
from infinity_engine.optim.policy import HOST_BUFFERS, OffloadPolicy
from infinity_engine.placement.buffers import NOTHING_RESTS, BufferLayout, Resting
from infinity_engine.placement.sizing import Demand, Sizing
from infinity_engine.plan import Auto, NvmeStreamed, Rates, ResolvedBudget, Strategy, Tier
from infinity_engine.plan.step import Home, PlanOutline, StepPlan

__all__ = ["Outlined", "Plan", "Wish", "outline", "place"]

_MOST_TRIES = 4  # to find a plan with buffers that fit where it updates
# Small buffers are done with before a module ends, so more of them are filled ahead, within so many
# bytes.
_MOST_BUFFERS = 8
_MOST_BUFFER_BYTES = 256 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Wish:
    """What is asked for, as settings say it: EngineConfig has the defaults."""

    strategy: Strategy
    tiers: tuple[Tier, ...]
    """Where parameters may stay, what is best first."""
    accumulation_steps: int
    small_bytes: int
    """Parameters of fewer bytes stay in memory."""
    rates: Rates
    early_updates: bool = False
    """Whether subgroups that rest on drives are updated in a backward."""
    policy: OffloadPolicy | None = None
    """Takes the place of the strategy's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A plan, what it takes, and which parts of it rest on the drives."""

    steps: StepPlan
    demand: Demand
    resting: Resting = field(default_factory=Resting)
    layouts: Mapping[int, BufferLayout] = field(default_factory=lambda: MappingProxyType({}))
    """Of the subgroups of which some does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outlined:
    """A plan as far as memory is concerned; `steps` makes its ops."""

    outline: PlanOutline
    steps: Callable[[], StepPlan]
    demand: Demand
    resting: Resting
    layouts: Mapping[int, BufferLayout]

    def plan(self) -> Plan:
        """Return the plan, with its ops."""
        return Plan(
            steps=self.steps(), demand=self.demand, resting=self.resting, layouts=self.layouts
        )


def place(sizing: Sizing, wish: Wish, budget: ResolvedBudget, *, io_bytes: int) -> Plan:
    """Return the plan of the policy or the strategy, what it takes, and what rests on drives.

    Where that is left open, parameters stay on the device if all fits with them there, else on the
    host; and nothing rests on drives that has room elsewhere. `io_bytes` of the host are what using
    the drives takes.

    Raises:
        CapacityError: a tier cannot hold what it would have to.
        ConfigError: something is to rest on drives, and the budget has none; or the policy makes no
            sound plan.
    """
    return outline(sizing, wish, budget, io_bytes=io_bytes).plan()


def outline(sizing: Sizing, wish: Wish, budget: ResolvedBudget, *, io_bytes: int) -> Outlined:
    """Return the same without its ops, which take most of the time to make.

    Raises:
        CapacityError, ConfigError: as `place` says.
    """
    return _Placing(sizing, wish, budget, io_bytes).outlined()


@dataclass(frozen=True, slots=True)
class _Placing:
    """The search for one plan."""

    sizing: Sizing
    wish: Wish
    budget: ResolvedBudget
    io_bytes: int

    def outlined(self) -> Outlined:
        wish, budget = self.wish, self.budget
        streams = isinstance(wish.strategy, NvmeStreamed)
        if (streams or wish.tiers == (Tier.NVME,)) and not budget.nvme:
            raise ConfigError(
                field="budget.nvme",
                value=None,
                expected='directories of drives and their sizes, such as {"/mnt/nvme": "400GiB"}, '
                "for what is offloaded to NVMe",
            )
        refused: CapacityError | None = None
        for parameters, on_drives in self._choices():
            try:
                if on_drives or parameters is Tier.NVME:
                    return self._plan_with_drives(parameters, states=on_drives)
                plan = self._outlined(parameters)
                self._check_host(plan.demand)
            except CapacityError as error:
                # The first refusal is of the best choice, so it says what that would need. It is
                # kept without its frames, which hold the plans that were tried.
                refused = refused or error.with_traceback(None)
            else:
                return plan
        assert refused is not None, "there is a choice"
        raise again(refused)

    def _choices(self) -> Iterator[tuple[Tier, bool]]:
        """Yield the tier of parameters, and whether states are on drives, what is best first."""
        wish = self.wish
        # In one memory, HOST and DEVICE are one tier.
        tiers = [
            tier for tier in wish.tiers if tier is not Tier.HOST or not self.sizing.unified
        ] or [Tier.DEVICE]
        must_rest = isinstance(wish.strategy, NvmeStreamed)
        may_rest = must_rest or (isinstance(wish.strategy, Auto) and wish.policy is None)
        # All that needs no drives for states comes before what does.
        for on_drives in (False, True):
            for tier in tiers:
                drives = on_drives or tier is Tier.NVME
                if (
                    (must_rest and not on_drives)
                    or (drives and not self.budget.nvme)
                    or (on_drives and not may_rest)
                ):
                    continue
                yield tier, on_drives

    def _outlined(
        self,
        parameters: Tier,
        *,
        resting: Resting = NOTHING_RESTS,
        layouts: Mapping[int, BufferLayout] = MappingProxyType({}),
        buffers: int = 0,
    ) -> Outlined:
        sizing, wish = self.sizing, self.wish
        # Without layouts nothing passes a buffer, whatever its number.
        limits = replace(sizing.limits(self.budget, parameters), host_buffers=buffers)
        specs = sizing.specs(layouts)

        def with_demand(found: PlanOutline, steps: Callable[[], StepPlan]) -> Outlined:
            return Outlined(
                outline=found,
                steps=steps,
                demand=sizing.demand(found, self.budget, resting, layouts),
                resting=resting,
                layouts=layouts,
            )

        def outlined_by(policy: OffloadPolicy) -> Outlined:
            known = sizing.homes_by(policy)
            found, steps = policy.outline(specs, wish.rates, limits, known)
            try:
                return with_demand(found, steps)
            except CapacityError as error:
                # policies know nothing of gradients, and stage as much as there is room
                refused = error.with_traceback(None)
            # At first with one staging set at least, then perhaps without visitors.
            for visit in (True, False):
                left = sizing.beside_gradients(limits, found, drives=resting.any, visit=visit)
                with suppress(CapacityError):  # not of a policy that could do with more
                    fewer = policy.outline(specs, wish.rates, left, known)
                    try:
                        return with_demand(*fewer)
                    except CapacityError as error:
                        refused = error.with_traceback(None)
            raise again(refused)

        if wish.policy is not None:
            return outlined_by(wish.policy)
        if not isinstance(wish.strategy, Auto):
            return outlined_by(policy_for(wish.strategy))
        # On the device first: nothing moves in the update then.
        if not sizing.unified and not resting.states:
            try:
                return outlined_by(DEVICE_ONLY)
            except CapacityError:
                pass
        return outlined_by(HOST_ONLY)

    # --- drives -----------------------------------------------------------------------------------

    def _plan_with_drives(self, parameters: Tier, *, states: bool) -> Outlined:
        """Return the plan that keeps all that has room in memory, what is needed first."""
        sizing, budget = self.sizing, self.budget
        # Of at least one byte: parameters without elements have no place on a drive.
        small = max(self.wish.small_bytes, 1)
        values = sizing.of_at_least(small) if parameters is Tier.NVME else frozenset[int]()
        resting = Resting(
            states=sizing.indices if states else frozenset(),
            values=values,
            small_bytes=small,
        )
        micro_batches = self.wish.accumulation_steps
        early = self.wish.early_updates and states
        most = self._most_buffers()
        # Gradients in memory first, with ever fewer buffers; early updates need them on drives.
        choices = [] if early else [(buffers, 0) for buffers in range(most, 1, -1)]
        # Then gradients on the drives too: that takes less of the host.
        if states:
            choices += [(buffers, micro_batches) for buffers in range(most, 0, -1)]
        refused: CapacityError | None = None
        known_homes = self._homes()
        homes: Mapping[int, Home] = known_homes or {
            subgroup.index: Home.HOST for subgroup in sizing.subgroups
        }
        # By gradients: the least of the host that any plan takes with so many buffers.
        least: dict[int, Callable[[int], int]] = {}
        for buffers, gradients in choices:
            if known_homes and gradients not in least:
                least[gradients] = self._least_of_any_plan(
                    parameters, known_homes, replace(resting, gradients=gradients)
                )
            is_last = (buffers, gradients) == choices[-1]  # which says what is missing
            # Plans that cannot fit are not outlined: half of a search's time goes into outlines.
            if (
                not is_last
                and not early
                and gradients in least
                and least[gradients](buffers) > budget.host
            ):
                continue
            tried = replace(
                resting, gradients=gradients, early=max(buffers, HOST_BUFFERS) if early else 0
            )
            try:
                plan = self._settled(parameters, homes, resting=tried, buffers=buffers)
                # The next choice begins where this plan updates.
                homes = plan.outline.homes
                least[gradients] = partial(self._least_of_host, plan)
                self._check_host(plan.demand, self.io_bytes)
            except CapacityError as error:
                refused = error.with_traceback(None)
                if known_homes and error.tier == Tier.DEVICE.name:
                    break  # buffers of the host change nothing there
                continue
            if not states:
                return self._with_room(plan)
            left = budget.host - self.io_bytes - sizing.held_on_host(plan.demand)
            # Room to compute with goes first.
            kept = self._kept(plan, left - (plan.demand.fetched if sizing.unified else 0))
            fewer_by = 1
            while kept:
                fewer = replace(tried, states=tried.states - frozenset(kept))
                plan_of_fewer = self._settled(parameters, homes, resting=fewer, buffers=buffers)
                if sizing.held_on_host(plan_of_fewer.demand) + self.io_bytes <= budget.host:
                    plan = plan_of_fewer
                    break
                # Where this takes more, the policy updates others; or nothing rests, which takes
                # more too.
                # One subgroup less, then two, four ... more: halving at once would give up too
                # much.
                kept, fewer_by = kept[:-fewer_by], 2 * fewer_by
            return self._with_room(plan)
        assert refused is not None, "there is a choice"
        raise again(refused)

    def _homes(self) -> Mapping[int, Home] | None:
        """Return where subgroups will be updated, if the policy can say it without a plan."""
        wish, sizing = self.wish, self.sizing
        policy = wish.policy
        if policy is None and not isinstance(wish.strategy, Auto):
            policy = policy_for(wish.strategy)
        return None if policy is None else sizing.homes_by(policy)

    def _most_buffers(self) -> int:
        """Return how many buffers there are where the host has room for them."""
        sizing = self.sizing
        # The fp32 master and states of the largest subgroup.
        largest = sizing.largest.numel if sizing.subgroups else 0
        nbytes = 4 * (1 + len(sizing.state_names)) * largest
        return max(HOST_BUFFERS, min(_MOST_BUFFERS, _MOST_BUFFER_BYTES // max(nbytes, 1)))

    def _least_of_any_plan(
        self, parameters: Tier, homes: Mapping[int, Home], resting: Resting
    ) -> Callable[[int], int]:
        """Return the least of the host that plans take which update there, with any buffers."""
        rests = replace(resting, states=self.sizing.with_states(resting.states, homes, parameters))
        # A lower bound: buffers come on top, and where nothing rests, drives take nothing.
        nbytes = (
            self.sizing.all_beside_drives(homes, parameters, rests) + self.io_bytes
            if rests.any
            else 0
        )
        return lambda buffers: nbytes

    def _least_of_host(self, plan: Outlined, buffers: int) -> int:
        """Return the least of the host that a plan would take with so many buffers instead."""
        there = plan.outline.buffer_bytes
        held = self.sizing.held_on_host(plan.demand) + self.io_bytes
        # All buffers of a plan have one size.
        return held - (len(there) - buffers) * there[0] if there else held

    def _settled(
        self, parameters: Tier, homes: Mapping[int, Home], *, resting: Resting, buffers: int
    ) -> Outlined:
        """Return the plan with buffers that fit where it updates; that decides what passes them.

        `homes` is where that may be: what another plan of the same wish does.
        """
        sizing = self.sizing
        # Layouts follow from where updates run, and the policy decides that by the layouts.
        for _ in range(_MOST_TRIES):
            rests = replace(resting, states=sizing.with_states(resting.states, homes, parameters))
            layouts = sizing.layouts(rests, homes, parameters)
            passing = MappingProxyType(
                # A subgroup without bytes in a buffer passes none.
                {index: layout for index, layout in layouts.items() if layout.nbytes}
            )
            plan = self._outlined(
                parameters, resting=rests.of(passing.values()), layouts=passing, buffers=buffers
            )
            found = plan.outline.homes
            if found is homes or found == homes:
                return plan
            homes = found
        raise ConfigError(
            field="strategy",
            value=self.wish.strategy.name,
            expected="one that says which part visits the device, such as "
            "NvmeStreamed(update=Interleaved(share=0.5)). No best part was found: it depends on "
            "what passes the host, and that depends on the part",
        )

    def _kept(self, plan: Outlined, left: int) -> list[int]:
        """Return the subgroups with states that have room in so many bytes of the host.

        What is needed first, first; with early updates they are spread among those that rest on the
        drives, so that in a backward the drives have as much to do at each time as at any other.
        """
        sizing, homes = self.sizing, plan.outline.homes
        of_kinds: dict[tuple[int, Home], int] = {}
        for subgroup, home, rests, _ in sizing.counted(homes, plan.resting.states):
            if rests:
                there, here = (
                    sizing.on_host_beside_drives(
                        subgroup, home, plan.outline.parameters, plan.resting, rests=its_rest
                    )
                    for its_rest in (True, False)
                )
                of_kinds[sizing.alike[subgroup.index], home] = here - there
        sizes = {
            index: of_kinds[sizing.alike[index], homes[index]]
            for index in sorted(plan.resting.states)
        }
        # Early updates load in a backward; the others do not, so they are kept in memory first.
        early = {
            index: nbytes
            for index, nbytes in sizes.items()
            if plan.resting.early and plan.layouts[index].may_be_early
        }
        kept: list[int] = []
        for index in (index for index in sizes if index not in early):
            left -= sizes[index]
            # In the order of use: one that has no room ends this, whatever fits behind it.
            if left < 0:
                return kept
            kept.append(index)
        return kept + _spread(early, left)

    def _with_room(self, plan: Outlined) -> Outlined:
        """Return the plan with what the host has left as room for parameters from the drives."""
        sizing = self.sizing
        # Only one memory: elsewhere they are fetched to the device, with what that has left.
        if not sizing.unified or not plan.resting.values:
            return plan
        left = self.budget.host - self.io_bytes - sizing.held_on_host(plan.demand)
        passing = sum(
            nbytes
            for number, nbytes in enumerate(sizing.parameters)
            if number in plan.resting.values
        )
        # Never more than would hold all of them at once.
        more = max(min(left, passing - plan.demand.fetched), 0)
        demand = replace(
            plan.demand, device=plan.demand.device + more, fetched=plan.demand.fetched + more
        )
        return replace(plan, demand=demand)

    def _check_host(self, demand: Demand, io_bytes: int = 0) -> None:
        if self.sizing.held_on_host(demand) + io_bytes > self.budget.host:
            raise self.sizing.refusal(
                Tier.HOST,
                demand,
                self.budget.host,
                beside=io_bytes,
                change="lower subgroup_numel, or let more rest on drives: give the budget "
                'nvme directories, and set strategy="nvme_streamed" and parameters="nvme"',
            )


def _spread(sizes: Mapping[int, int], left: int) -> list[int]:
    """Return which of these have room in so many bytes, evenly among them."""
    total = sum(sizes.values())
    # Whole numbers, in 1/total of a byte.
    chosen, owed = [], 0
    for index, nbytes in sizes.items():
        # A subgroup is chosen when its share of what is left has come together.
        owed += min(left, total) * nbytes
        if owed >= total * nbytes:
            owed -= total * nbytes
            chosen.append(index)
    return chosen
