"""What an engine is to hold, in bytes, and the plan that this allows: arithmetic, before anything is made or moved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch

from infinity_engine.config import EngineConfig, ParametersAt, Precision
from infinity_engine.engine.parameters import ModelParameter, TrainedParameter
from infinity_engine.errors import CapacityError
from infinity_engine.optim import FloatFormat, Formats, Rule, Subgroup, cut_into_subgroups
from infinity_engine.optim.policies import DEVICE_ONLY, HOST_ONLY, policy_for
from infinity_engine.optim.policy import Limits, OffloadPolicy
from infinity_engine.plan import Auto, Rates, ResolvedBudget, Tier
from infinity_engine.plan.step import BytesPerParameter, Home, StepPlan, SubgroupSpec
from infinity_engine.units import align_up

__all__ = ["Demand", "Sizing"]

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
_LISTS = (torch.nn.ParameterList, torch.nn.ParameterDict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """The bytes that a plan takes of each tier; `fetched` of the device's are for parameters that modules fetch."""

    host: int
    device: int
    fetched: int


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
    ) -> Sizing:
        """Return it for a model whose parameters these are."""
        formats = Formats(parameter=_PARAMETER[config.precision])
        width = (formats.parameter or FloatFormat.FP32).nbytes
        nbytes = {
            id(each.parameter): each.numel
            * (width if each.parameter.is_floating_point() else each.parameter.element_size())
            for each in (*trained, *frozen)
        }
        return cls(
            subgroups=cut_into_subgroups([each.numel for each in trained], config.subgroup_numel),
            formats=formats,
            state_names=max((rules[group].states for group in {each.group for each in trained}), key=len),
            parameters=tuple(nbytes.values()),
            deepest=_deepest(model, lambda parameter: nbytes.get(id(parameter), 0)),
            unified=unified,
        )

    @property
    def width(self) -> int:
        """Bytes of one element as modules compute with it."""
        return (self.formats.parameter or FloatFormat.FP32).nbytes

    # --- plans ----------------------------------------------------------------------------------------------------

    def plan(
        self, config: EngineConfig, policy: OffloadPolicy | None, budget: ResolvedBudget
    ) -> tuple[StepPlan, Demand]:
        """Return the plan that the policy or the strategy makes, and what it takes.

        Where that is left open, parameters stay on the device if all fits with them there.

        Raises:
            CapacityError: the device cannot hold what it would have to.
        """
        asked = ParametersAt.DEVICE if self.unified else config.parameters
        if asked is ParametersAt.HOST:
            return self._plan(config, policy, budget, Tier.HOST)
        try:
            return self._plan(config, policy, budget, Tier.DEVICE)
        except CapacityError:
            if asked is ParametersAt.DEVICE:
                raise
        return self._plan(config, policy, budget, Tier.HOST)

    def _plan(
        self, config: EngineConfig, policy: OffloadPolicy | None, budget: ResolvedBudget, parameters: Tier
    ) -> tuple[StepPlan, Demand]:
        limits = self._limits(budget, parameters)
        specs = [SubgroupSpec(index=each.index, numel=each.numel, first_use=each.index) for each in self.subgroups]
        rates = config.rates or Rates()

        def made(by: OffloadPolicy) -> tuple[StepPlan, Demand]:
            plan = by(specs, rates, limits)
            return plan, self._demand(plan, budget)

        if policy is not None:
            return made(policy)
        if not isinstance(config.strategy, Auto):
            return made(policy_for(config.strategy))
        if not self.unified:
            try:
                return made(DEVICE_ONLY)
            except CapacityError:
                pass
        return made(HOST_ONLY)

    def _limits(self, budget: ResolvedBudget, parameters: Tier) -> Limits:
        """Return what a plan may take of the device where its parameters stay in that tier."""
        weights = BytesPerParameter(states=4 * (1 + len(self.state_names)), parameter=self.width)
        if self.unified:  # Nothing visits another memory, so nothing is staged.
            everything = sum(subgroup.numel for subgroup in self.subgroups) * weights.states
            return Limits(resident_bytes=everything, staging_bytes=3 * everything, per_parameter=weights)
        at_home = parameters is Tier.HOST
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

    def _demand(self, plan: StepPlan, budget: ResolvedBudget) -> Demand:
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
            device = 0 if self.formats.parameter is None else sum(self.parameters)  # beside the masters
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


def _deepest(module: torch.nn.Module, nbytes: Callable[[torch.nn.Parameter], int]) -> int:
    """Return what the module needs at most at one time. Lists of parameters are not called: whoever has them reads."""
    own = sum(nbytes(each) for each in module.parameters(recurse=False))
    within = [child for child in module.children() if not isinstance(child, _LISTS)]
    own += sum(nbytes(each) for child in module.children() if isinstance(child, _LISTS) for each in child.parameters())
    return own + max((_deepest(child, nbytes) for child in within), default=0)
