"""`Sharding`: a model that is cut over the ranks: what it takes of this one beside its shards, and
what makes it whole.

Put together by `assemble`, used by the engine; where there is one rank, there is none of it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch

from infinity_engine.config import EngineConfig, ParametersAt, ShardingStage
from infinity_engine.errors import CapacityError, ConfigError
from infinity_engine.gradients.accumulation import Accumulation
from infinity_engine.gradients.keeper import GradientKeeper
from infinity_engine.lanes.lanes import Lanes
from infinity_engine.memory import DeviceMemory, Ledger
from infinity_engine.optim import GradientNorm, Rule
from infinity_engine.parameters.describing import deepest_of
from infinity_engine.parameters.fetching import ParameterFetcher
from infinity_engine.parameters.hooks import Hooks
from infinity_engine.parameters.modules import ModuleParameters, leaves_of
from infinity_engine.parameters.parameters import ModelParameter
from infinity_engine.parameters.providing import Provider
from infinity_engine.partition import GroupMember
from infinity_engine.partition.digest import digest_of
from infinity_engine.placement.placing import Wish
from infinity_engine.placement.sizing import Sizing
from infinity_engine.plan import ResolvedBudget, Tier
from infinity_engine.ranks.gathering import ParameterGatherer
from infinity_engine.ranks.gathers import WIRES, CutParameter, room_of_wires
from infinity_engine.ranks.ranks import Cut, Ranks
from infinity_engine.ranks.reducing import REDUCES, GradientReducer, Room
from infinity_engine.ranks.replicating import ParameterReplicas, room_of_gathers

__all__ = ["Sharding", "Shards", "Whole", "check_cut"]

_WRAPPERS = frozenset({"DistributedDataParallel", "FullyShardedDataParallel"})
# of the room for whole parameters, small ones that stay whole take at most one in so many
_LARGEST_SMALL_PART = 4


def check_cut(model: torch.nn.Module, config: EngineConfig, *, built_alone: bool) -> None:
    """Refuse what this version does not do on several ranks; `built_alone`: this rank has built the
    model by itself.

    Raises:
        ConfigError: it is something of that.
    """
    for name, module in model.named_modules():
        if any(
            kind.__name__ in _WRAPPERS and kind.__module__.startswith("torch.")
            for kind in type(module).__mro__
        ):
            expected = (
                "the model itself, without it: the engine cuts parameters and averages gradients "
                "over the ranks"
            )
            raise ConfigError(
                field=f"module {name}" if name else "model",
                value=type(module).__name__,
                expected=expected,
            )
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "placements"):
            expected = (
                "an ordinary tensor: a DTensor is a shard of something already, as tensor "
                "parallelism makes it, and "
                "its operations communicate. Let one of the two cut the model"
            )
            raise ConfigError(
                field=f"parameter {name}", value=type(parameter).__name__, expected=expected
            )
    if built_alone:
        expected = (
            "one in memory, or one that all ranks have built or loaded together: init_context and "
            "load_into do that "
            'where they find the others, unless they are given ranks={"stage": "alone"}'
        )
        raise ConfigError(
            field="model", value="one that this rank has built alone", expected=expected
        )
    if config.ranks.stage is not ShardingStage.PARAMETERS and config.parameters not in {
        ParametersAt.AUTO,
        ParametersAt.DEVICE,
    }:
        expected = (
            f'"auto" or "device" with ranks.stage="{config.ranks.stage.value}", which has them '
            "whole on each rank"
        )
        raise ConfigError(field="parameters", value=config.parameters.value, expected=expected)
    if config.ranks.stage is not ShardingStage.PARAMETERS and config.ranks.leaf_modules:
        expected = (
            f'none with ranks.stage="{config.ranks.stage.value}", which gathers around no modules'
        )
        raise ConfigError(
            field="ranks.leaf_modules", value=config.ranks.leaf_modules, expected=expected
        )
    if config.storage.early_updates:
        expected = "False on several ranks: this version updates in the backward on one only"
        raise ConfigError(field="storage.early_updates", value=True, expected=expected)


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """What the parameters that `cut` has shards of take of the device when they are whole."""

    cut: Cut
    parameters: tuple[CutParameter, ...]
    members: tuple[GroupMember, ...]
    """What is reduced: one for each that is trained."""
    adds_up: bool
    """Whether gradients of several micro-batches are added up before they are reduced."""
    by_module: bool
    """Whether parameters are whole only while modules need them."""
    leaves: frozenset[str]
    least: int
    """The bytes of what is whole at the same time: all, or the most that modules within one another
    need.
    """
    deepest_shards: int
    """The most bytes of the largest shards that any rank has, of what modules within one another
    need.
    """
    gather_bytes: int
    reduces: Room
    wires_bytes: int
    """Of all buffers that collectives go through."""

    @classmethod
    def of(
        cls, model: torch.nn.Module, cut: Cut, accumulation_steps: int, *, unified: bool
    ) -> Sharding:
        """Return it for a model that was cut."""
        ranks = cut.ranks
        leaves = leaves_of(model, ranks.config.leaf_modules)
        parameters = tuple(
            CutParameter(whole=whole, shard=shard, spec=spec)
            for whole, shard, spec in zip(
                (*cut.wholes, *cut.frozen_wholes),
                (*cut.trained, *cut.frozen),
                cut.specs,
                strict=True,
            )
        )
        members = [each.member for each in parameters[: len(cut.trained)]]
        adds_up = ranks.config.stage is ShardingStage.OPTIMIZER and accumulation_steps > 1
        if adds_up:
            members = [replace(each, dtype=torch.float32) for each in members]
        by_module = ranks.config.stage is ShardingStage.PARAMETERS
        shards = deepest_of(
            model, {id(each.whole.parameter): each.largest_shard for each in parameters}, leaves
        )
        wholes = deepest_of(
            model, {id(each.whole.parameter): each.nbytes for each in parameters}, leaves
        )
        gathers = (
            room_of_wires(model, parameters, ranks, leaves)
            if by_module
            else room_of_gathers(parameters, ranks)
        )
        reduces = Room.of(members, ranks, adds_up=adds_up, on_host=unified)
        return cls(
            cut=cut,
            parameters=parameters,
            members=tuple(members),
            adds_up=adds_up,
            by_module=by_module,
            leaves=leaves,
            least=wholes if by_module else sum(each.nbytes for each in parameters),
            deepest_shards=shards,
            wires_bytes=gathers * (WIRES if by_module else 1) + reduces.wire * REDUCES,
            gather_bytes=gathers,
            reduces=reduces,
        )

    @property
    def ranks(self) -> Ranks:
        """Who works together."""
        return self.cut.ranks

    def wish(self, wish: Wish) -> Wish:
        """Return what settings ask for, of shards: with all parameters whole on the device, they
        stay there as well.
        """
        return wish if self.by_module else replace(wish, tiers=(Tier.DEVICE,))

    def left_of(self, budget: ResolvedBudget, *, unified: bool) -> ResolvedBudget:
        """Return the budget without the least that whole parameters and collectives take of it.

        Raises:
            CapacityError: it has not so much.
        """
        needed = self.least + self.wires_bytes + self.reduces.held
        tier, has = (Tier.HOST, budget.host) if unified else (Tier.DEVICE, budget.device)
        if needed > has:
            raise CapacityError(
                tier=tier.name,
                asked=needed,
                free=has,
                limit=has,
                change=f"raise the budget's {tier.name.lower()}: whole parameters that are there "
                "at once "
                f"take {self.least} B, whole gradients {self.reduces.held} B, and buffers of "
                "collectives "
                f"{self.wires_bytes} B; ranks.bucket_bytes lowers both of the latter",
            )
        return (
            replace(budget, host=has - needed) if unified else replace(budget, device=has - needed)
        )

    def without_ahead(self, left: ResolvedBudget, *, unified: bool) -> ResolvedBudget:
        """Return what is left without as much again as is whole at a time, for what is gathered
        ahead of modules.
        """
        ahead = self.least if self.by_module else 0
        if unified:
            return replace(left, host=max(left.host - ahead, 0))
        return replace(left, device=max(left.device - ahead, 0))

    def sized(self, sizing: Sizing) -> Sizing:
        """Return what there is to be held of the shards: what modules need at a time is as much on
        all ranks.
        """
        return replace(sizing, deepest=self.deepest_shards)

    def whole(
        self,
        model: torch.nn.Module,
        hooks: Hooks,
        shards: Shards,
        ledger: Ledger,
        resources: ExitStack,
        *,
        small_bytes: int,
    ) -> Whole:
        """Take the memory for whole parameters, with what the budget has left, and return what
        makes them whole.
        """
        held = ledger.reserve(Tier.DEVICE, self.reduces.held, holder="whole gradients")
        resources.callback(held.close)
        limit = self._limit(ledger)
        reservation = ledger.reserve(
            Tier.DEVICE, limit + self.wires_bytes, holder="whole parameters"
        )
        resources.callback(reservation.close)
        memory: DeviceMemory[Any] = DeviceMemory(shards.lanes.accelerator, reservation)
        resources.callback(memory.close)
        reducer = GradientReducer(
            self.members,
            self.ranks,
            shards.lanes,
            shards.gradients.take,
            room=self.reduces,
            wires=[
                resources.enter_context(
                    memory.lease(self.reduces.wire, holder="buffers of collectives")
                )
                for _ in range(REDUCES)
            ],
            held=held,
            adds_up=self.adds_up,
        )
        resources.callback(reducer.close)
        if not self.by_module:
            replicas = ParameterReplicas(
                self.parameters, self.ranks, shards.lanes, memory, wire_bytes=self.gather_bytes
            )
            resources.callback(replicas.close)
            return Whole(self, replicas, None, reducer)
        gatherer = ParameterGatherer(
            self.parameters,
            self.ranks,
            shards.lanes,
            memory,
            limit=limit,
            wire_bytes=self.gather_bytes,
            small=self._small(small_bytes, min(limit - self.least, limit // _LARGEST_SMALL_PART)),
            below=shards.fetcher,
            below_bytes=self.deepest_shards if self._some_fetch(shards) else None,
            fetched=shards.fetched,
            beside=reducer.go_on,
        )
        resources.callback(gatherer.close)
        wholes = [each.whole for each in self.parameters]
        return Whole(
            self, gatherer, ModuleParameters(model, wholes, gatherer, hooks, self.leaves), reducer
        )

    def _limit(self, ledger: Ledger) -> int:
        """Return the bytes of whole parameters that all ranks have room for, what the budget has
        left among them.
        """
        every = sum(each.nbytes for each in self.parameters)
        free = ledger.free(Tier.DEVICE) - self.wires_bytes - self.least
        more = min(max(free, 0), every - self.least)
        return self.ranks.least("room for whole parameters", self.least + more)

    def _some_fetch(self, shards: Shards) -> bool:
        """Tell whether shards are at home elsewhere on any rank: plans may differ where machines
        do.
        """
        return self.ranks.most("who fetches shards", int(shards.fetcher is not None)) > 0

    def _small(self, small_bytes: int, room: int) -> list[int]:
        """Return the parameters of fewer bytes that stay whole from one update to the next."""
        found = []
        for each in self.parameters:
            if each.nbytes < small_bytes and each.nbytes <= room:
                found.append(each.whole.number)
                room -= each.nbytes
        return found


@dataclass(frozen=True)
class Shards:
    """Who has this rank's shards: the keeper of their gradients, and the fetcher of those that are
    not at home.
    """

    lanes: Lanes
    gradients: GradientKeeper
    fetcher: ParameterFetcher | None
    fetched: Collection[int]


class Whole:
    """What makes parameters whole and sums of gradients, and what the engine asks of all ranks."""

    def __init__(
        self,
        sharding: Sharding,
        provider: Provider,
        modules: ModuleParameters | None,
        reducer: GradientReducer,
    ) -> None:
        self.sharding = sharding
        self.provider = provider
        self.modules = modules
        self.reducer = reducer
        self._norm: GradientNorm | None = None  # of what the reducer has handed on
        self._agreed: Mapping[str, object] | None = None  # on the update with that
        # whether all ranks have yet to reduce gradients of a backward that has ended
        self._owed = False

    @property
    def ranks(self) -> Ranks:
        """Who works together."""
        return self.sharding.ranks

    def end_backward(self, *, last: bool) -> None:
        """Let all gradients be with those who own them, if they are needed by now; all ranks come
        to this.
        """
        if self.modules is not None:
            self.modules.end_backward()
        if self.waits(last=last):
            self._owed = True
        else:
            self._reduce()

    def waits(self, *, last: bool) -> bool:
        """Tell whether gradients stay where they were made until the last micro-batch."""
        return self.reducer.adds_up and not last

    def finish(self, *, last: bool) -> None:
        """Reduce gradients that came outside of `Engine.backward`, or wait here, if they are needed
        by now.
        """
        if (self.reducer.open or self._owed) and not self.waits(last=last):
            self._reduce()

    def agree_on_update(
        self,
        rules: Sequence[Rule],
        max_grad_norm: float | None,
        loss_scale: float,
        accumulation: Accumulation,
    ) -> None:
        """Make sure that all ranks update in the same way; asked once: who repeats a step does so
        alone.

        Raises:
            CollectiveError: they do not; names what differs, and who has what.
        """
        groups = {f"optimizer's group {number}": rule for number, rule in enumerate(rules)}
        mine = {
            **groups,
            "max_grad_norm": max_grad_norm,
            "loss scale": loss_scale,
            "micro-batches of this step": accumulation.count,
            "divisor of gradients": accumulation.divisor,
        }
        if mine != self._agreed:
            self.ranks.agree_again_on("what the update is made with", mine)
            self._agreed = mine

    def drop(self) -> None:
        """Drop gradients that have come, as if there had been no backward; all ranks come to
        this.
        """
        self.reducer.drop()
        self._owed = False

    def _reduce(self) -> None:
        self._owed = False
        self._norm = self._agreed = None
        self.reducer.finish()

    def norm(self, gradients: GradientKeeper) -> GradientNorm:
        """Return the norm of the gradients that all ranks keep, exchanged once: who repeats a step
        does so alone.
        """
        if self._norm is None or not gradients.any:
            cut = self.sharding.cut
            self._norm = self.ranks.norm(gradients.sums(), cut.specs[: len(cut.trained)])
        return self._norm

    def own(self, number: int, flat: torch.Tensor) -> torch.Tensor:
        """Return what this rank owns of a whole parameter."""
        return self.ranks.own(self.sharding.cut.specs[number], flat)

    def gradient(self, number: int, mine: torch.Tensor | None) -> torch.Tensor | None:
        """Return this rank's part of a gradient of which some rank has one: zeros, if it has none
        itself.
        """
        cut = self.sharding.cut
        if not self.ranks.most(f"gradients of {cut.wholes[number].name}", int(mine is not None)):
            return None
        return torch.zeros(cut.trained[number].numel) if mine is None else mine

    def states(
        self, each: ModelParameter, mine: Mapping[str, torch.Tensor], steps: int
    ) -> tuple[dict[str, torch.Tensor], int]:
        """Return a parameter's whole states, and its steps, of which a rank that owns nothing of it
        has none.
        """
        spec = self.sharding.cut.specs[each.number]
        whole = {
            name: self.ranks.whole(f"{name} of {each.name}", spec, values)
            for name, values in mine.items()
        }
        return whole, self.ranks.most(f"steps of {each.name}", steps)

    def check_same(self, changed: Sequence[ModelParameter]) -> None:
        """Make sure that all ranks have changed parameters to the same values.

        Raises:
            CollectiveError: they have not.
        """
        said = {each.name: digest_of(each.parameter.data) for each in changed}
        self.ranks.agree_on("what gathered(modify=True) wrote", said)
