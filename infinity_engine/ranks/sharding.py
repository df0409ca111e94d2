"""`Sharding`: how a model is cut over ranks, and what wholes and collectives need of the device.

`assemble` puts it together where there are several ranks.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch

from infinity_engine.activation import SavedTensors
from infinity_engine.activation.blocks import blocks_held_whole
from infinity_engine.config import EngineConfig, ParametersAt, ShardingStage
from infinity_engine.errors import CapacityError, ConfigError
from infinity_engine.gradients.keeper import GradientKeeper
from infinity_engine.lanes.lanes import Lanes
from infinity_engine.memory import DeviceMemory, Ledger
from infinity_engine.parameters.describing import deepest_of
from infinity_engine.parameters.fetching import ParameterFetcher
from infinity_engine.parameters.hooks import Hooks
from infinity_engine.parameters.modules import ModuleParameters, UnwatchedModules, leaves_of
from infinity_engine.partition import GroupMember
from infinity_engine.placement.placing import Wish
from infinity_engine.placement.sizing import Sizing
from infinity_engine.plan import ResolvedBudget, Tier
from infinity_engine.ranks.gathering import ParameterGatherer
from infinity_engine.ranks.gathers import WIRES, CutParameter, room_of_wires
from infinity_engine.ranks.ranks import Cut, Ranks
from infinity_engine.ranks.reducing import REDUCES, GradientReducer, Room
from infinity_engine.ranks.replicating import ParameterReplicas, room_of_gathers
from infinity_engine.ranks.together import ManyRanks

__all__ = ["Sharding", "Shards", "check_cut"]

_WRAPPERS = frozenset({"DistributedDataParallel", "FullyShardedDataParallel"})
# Small parameters that stay whole get at most this part of the room for whole parameters: 1 / 4.
_LARGEST_SMALL_PART = 4


def check_cut(model: torch.nn.Module, config: EngineConfig, *, built_alone: bool) -> None:
    """Refuse what this version cannot do on several ranks. `built_alone`: by this rank by itself.

    Raises:
        ConfigError: it is such a thing.
    """
    for name, module in model.named_modules():
        if any(
            # By name, so that torch.distributed's packages need not be imported to look.
            kind.__name__ in _WRAPPERS and kind.__module__.startswith("torch.")
            for kind in type(module).__mro__
        ):
            expected = (
                "the model without this wrapper: the engine itself cuts parameters and averages "
                "gradients over the ranks"
            )
            raise ConfigError(
                field=f"module {name}" if name else "model",
                value=type(module).__name__,
                expected=expected,
            )
    for name, parameter in model.named_parameters():
        # A DTensor's attribute: it is a shard already.
        if hasattr(parameter, "placements"):
            expected = (
                "an ordinary tensor, as a DTensor is a shard already and its operations "
                "communicate: let only one of the engine and tensor parallelism cut the model"
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
    """How a model is cut, and what its whole parameters need of the device."""

    cut: Cut
    parameters: tuple[CutParameter, ...]
    members: tuple[GroupMember, ...]
    """What is reduced: one member for each trained parameter."""
    adds_up: bool
    """Whether gradients of several micro-batches are summed before they are reduced."""
    by_module: bool
    """Whether parameters are whole only while modules need them."""
    leaves: frozenset[str]
    least: int
    """The bytes that are whole at once: all parameters, or the most that nested modules need."""
    deepest_shards: int
    """The most bytes that nested modules need of the shards, of the rank with the largest ones."""
    gather_bytes: int
    reduces: Room
    wires_bytes: int
    """The bytes of all buffers that collectives pass."""

    @classmethod
    def of(
        cls, model: torch.nn.Module, cut: Cut, accumulation_steps: int, *, unified: bool
    ) -> Sharding:
        """Return the sharding of a model that was cut."""
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
        members = [parameter.member for parameter in parameters[: len(cut.trained)]]
        adds_up = ranks.config.stage is ShardingStage.OPTIMIZER and accumulation_steps > 1
        if adds_up:
            # Sums that are added up before they are reduced go over the wire in fp32.
            members = [replace(member, dtype=torch.float32) for member in members]
        by_module = ranks.config.stage is ShardingStage.PARAMETERS
        # The same walk for shards and for wholes, with other sizes.
        together = leaves | blocks_held_whole(model)
        shards = deepest_of(
            model,
            {id(parameter.whole.parameter): parameter.largest_shard for parameter in parameters},
            together,
        )
        wholes = deepest_of(
            model,
            {id(parameter.whole.parameter): parameter.nbytes for parameter in parameters},
            together,
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
            least=wholes if by_module else sum(parameter.nbytes for parameter in parameters),
            deepest_shards=shards,
            # Gathers and reduces run beside each other, each with buffers of its own.
            wires_bytes=gathers * (WIRES if by_module else 1) + reduces.wire * REDUCES,
            gather_bytes=gathers,
            reduces=reduces,
        )

    @property
    def ranks(self) -> Ranks:
        """The ranks that train the model."""
        return self.cut.ranks

    def wish(self, wish: Wish) -> Wish:
        """Return the wish for shards: where wholes stay on the device, shards do as well."""
        return wish if self.by_module else replace(wish, tiers=(Tier.DEVICE,))

    def left_of(self, budget: ResolvedBudget, *, unified: bool) -> ResolvedBudget:
        """Return the budget without the least that whole parameters and collectives need.

        Raises:
            CapacityError: the budget has less.
        """
        needed = self.least + self.wires_bytes + self.reduces.held
        tier, has = (Tier.HOST, budget.host) if unified else (Tier.DEVICE, budget.device)
        # In one memory, the device's bytes are the host's.
        if needed > has:
            raise CapacityError(
                tier=tier.name,
                asked=needed,
                free=has,
                limit=has,
                change=f"raise the budget's {tier.name.lower()}: whole parameters that are there "
                f"at once take {self.least} B, whole gradients {self.reduces.held} B, and "
                f"buffers of collectives {self.wires_bytes} B; ranks.bucket_bytes lowers "
                "both of the latter",
            )
        return (
            replace(budget, host=has - needed) if unified else replace(budget, device=has - needed)
        )

    def without_ahead(self, left: ResolvedBudget, *, unified: bool) -> ResolvedBudget:
        """Return the rest of the budget without room to gather ahead of modules."""
        ahead = self.least if self.by_module else 0
        if unified:
            return replace(left, host=max(left.host - ahead, 0))
        return replace(left, device=max(left.device - ahead, 0))

    def sized(self, sizing: Sizing) -> Sizing:
        """Return the shards' sizes. What modules need at one time is the same on all ranks."""
        return replace(sizing, deepest=self.deepest_shards)

    def whole(
        self,
        model: torch.nn.Module,
        hooks: Hooks,
        shards: Shards,
        ledger: Ledger,
        resources: ExitStack,
        *,
        activations: SavedTensors,
        small_bytes: int,
    ) -> ManyRanks:
        """Reserve memory for wholes from what the budget has left; return what makes them whole."""
        # What is reserved first is freed last: gatherers and reducers close before their memory.
        held = ledger.reserve(Tier.DEVICE, self.reduces.held, holder="whole gradients")
        resources.callback(held.close)
        # After the gradients' reservation: it asks what is left.
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
            shards.gradients.deliver,
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
            modules = UnwatchedModules(model, hooks, activations)
            return ManyRanks(self.cut, replicas, modules, reducer, shards.gradients)
        gatherer = ParameterGatherer(
            self.parameters,
            self.ranks,
            shards.lanes,
            memory,
            limit=limit,
            wire_bytes=self.gather_bytes,
            # Small ones leave room for the deepest modules.
            small=self._small(small_bytes, min(limit - self.least, limit // _LARGEST_SMALL_PART)),
            below=shards.fetcher,
            # None where no rank fetches: then gathers have no such limit anywhere.
            below_bytes=self.deepest_shards if self._some_fetch(shards) else None,
            fetched=shards.fetched,
            beside=reducer,
        )
        resources.callback(gatherer.close)
        wholes = [parameter.whole for parameter in self.parameters]
        return ManyRanks(
            self.cut,
            gatherer,
            ModuleParameters(
                model, wholes, gatherer, hooks, activations=activations, leaves=self.leaves
            ),
            reducer,
            shards.gradients,
        )

    def _limit(self, ledger: Ledger) -> int:
        """Return the bytes of whole parameters that every rank has room for."""
        wholes = sum(parameter.nbytes for parameter in self.parameters)
        # Beside the least, which the limit has in any case.
        free = ledger.free(Tier.DEVICE) - self.wires_bytes - self.least
        more = min(max(free, 0), wholes - self.least)
        # One limit for all: [Note: all ranks decide alike].
        return self.ranks.least("room for whole parameters", self.least + more)

    def _some_fetch(self, shards: Shards) -> bool:
        """Tell whether any rank fetches its shards: plans may differ between machines."""
        return self.ranks.most("who fetches shards", int(shards.fetcher is not None)) > 0

    def _small(self, small_bytes: int, room: int) -> list[int]:
        """Return the numbers of small parameters that stay whole from one update to the next."""
        found = []
        for parameter in self.parameters:
            if parameter.nbytes < small_bytes and parameter.nbytes <= room:
                found.append(parameter.whole.number)
                room -= parameter.nbytes
        return found


@dataclass(frozen=True)
class Shards:
    """What holds this rank's shards: their gradients' keeper, and a fetcher of those elsewhere."""

    lanes: Lanes
    gradients: GradientKeeper
    fetcher: ParameterFetcher | None
    fetched: Collection[int]
