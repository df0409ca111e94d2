"""Turns the settings of activations into what keeps saved tensors.

The planner has left room for what is reserved here (planning/planning.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from types import MappingProxyType

import torch

from infinity_engine.accel import Accelerator
from infinity_engine.accel.virtual import clock_of
from infinity_engine.activation import ActivationOffload, KeptActivations, SavedTensors
from infinity_engine.activation.agreeing import Agreement, ChosenAlone, ChosenTogether
from infinity_engine.activation.blocks import RepeatedBlock, find_blocks, recomputing_modules
from infinity_engine.activation.by_block import BlockActivations, FixedWays
from infinity_engine.activation.deciding import MeasuredWays
from infinity_engine.activation.drive_room import DriveRoom
from infinity_engine.activation.lifetimes import Lifetimes
from infinity_engine.activation.moving import ActivationLimits, SharedRoom
from infinity_engine.activation.probing import Homes
from infinity_engine.config import ActivationsAt, EngineConfig, Recompute
from infinity_engine.lanes.lanes import Lanes
from infinity_engine.memory import BorrowedMemory, Ledger, PinnedPool
from infinity_engine.parameters.hooks import Hooks
from infinity_engine.parameters.modules import ModuleParameters, UnwatchedModules, is_compiled
from infinity_engine.placement.activations import ActivationRoom, BlockWay
from infinity_engine.plan import Tier
from infinity_engine.planning.planning import Planned, saved_on_host
from infinity_engine.residence import Mover
from infinity_engine.storage import SwapFile

__all__ = ["activations_of", "uses_drives", "watch_blocks"]

_PART_FOR_SAVED = 3, 4  # of what a plan leaves: modules allocate besides what they save
_STAGING = 2  # of what may stay, the part for what is on its way: with less, fetches do not overlap
_RECOMPUTED_AT = MappingProxyType(
    {
        ActivationsAt.DEVICE: BlockWay.RECOMPUTE,
        ActivationsAt.HOST: BlockWay.RECOMPUTE_HOST,
        ActivationsAt.NVME: BlockWay.RECOMPUTE_DRIVE,
    }
)


def uses_drives(config: EngineConfig) -> bool:
    """Tell whether saved tensors may go to drives."""
    at = config.activations.at
    return at is ActivationsAt.NVME or (
        at is ActivationsAt.AUTO and bool(config.budget and config.budget.nvme)
    )


def activations_of(
    config: EngineConfig,
    planned: Planned,
    lanes: Lanes,
    model: torch.nn.Module,
    *,
    ledger: Ledger,
    swap: SwapFile | None,
    resources: ExitStack,
) -> SavedTensors:
    """Return what keeps saved tensors; on drives, in `swap`.

    Raises:
        CapacityError: the budget has no room for it.
    """
    settings = config.activations
    if settings.at is ActivationsAt.DEVICE and settings.recompute is Recompute.NOTHING:
        return KeptActivations()
    building = _Assembling(config, planned, lanes, ledger, swap, resources)
    if settings.at is ActivationsAt.AUTO:
        return building.closed_with_engine(building.chosen(model))
    kept: SavedTensors = KeptActivations()
    lifetimes = Lifetimes(lanes.meter)
    home = {ActivationsAt.HOST: Tier.HOST, ActivationsAt.NVME: Tier.NVME}.get(settings.at)
    if home is not None:
        pool = building.reserve(settings.resident)
        kept = building.offload(home, settings.resident, pool, SharedRoom(lifetimes))
    if settings.recompute is Recompute.NOTHING:
        return kept
    return building.closed_with_engine(
        BlockActivations(
            _blocks_of(model),
            FixedWays(_RECOMPUTED_AT[settings.at], _left_alone(model)),
            outside=kept,
            moved={} if home is None else {home: kept},
            lifetimes=lifetimes,
        )
    )


def watch_blocks(
    activations: SavedTensors, modules: ModuleParameters | UnwatchedModules, hooks: Hooks
) -> None:
    """Let `activations` see the calls of the blocks that they know."""
    if isinstance(activations, BlockActivations):
        activations.run_again_under(modules)
        for block in activations.blocks:
            hooks.around_block(block.module, activations.before_block, activations.after_block)


def _blocks_of(model: torch.nn.Module) -> tuple[RepeatedBlock, ...]:
    return () if _left_alone(model) else find_blocks(model)


def _left_alone(model: torch.nn.Module) -> str:
    """Return why no block of a model is run again by the engine; empty where some are."""
    recomputing = recomputing_modules(model)
    if recomputing:
        others = f" and {len(recomputing) - 1} other modules" if recomputing[1:] else ""
        return (
            f"the model checkpoints itself ({recomputing[0]}{others}), so the engine runs none of "
            "its blocks again"
        )
    if any(is_compiled(module) for module in model.modules()):
        return "the model is compiled, so the engine does not see its blocks"
    if not find_blocks(model):
        return "the model has no repeated blocks: no list of modules of one class"
    return ""


@dataclass(frozen=True)
class _Assembling:
    """What is needed to make keepers of saved tensors."""

    config: EngineConfig
    planned: Planned
    lanes: Lanes
    ledger: Ledger
    swap: SwapFile | None
    resources: ExitStack

    @property
    def drives(self) -> SwapFile:
        assert self.swap is not None, "it was opened for what is saved"
        return self.swap

    @property
    def accelerator(self) -> Accelerator:
        return self.planned.accelerator

    @property
    def has_device_memory(self) -> bool:
        """Whether modules save tensors in memory that the host does not share."""
        return self.accelerator.torch_device.type != "cpu"

    def reserve(self, resident: int) -> PinnedPool | None:
        """Reserve the host memory that saved tensors take; return the pool that they go through.

        On the CPU that is for what stays in memory; else for what goes through the host, or stays
        there.
        """
        settings, host = self.config.activations, self.planned.budget.host
        nbytes = saved_on_host(settings, self.accelerator, host)
        reservation = self.resources.enter_context(
            self.ledger.reserve(
                Tier.HOST,
                nbytes if self.has_device_memory else resident,
                holder="saved activations",
            )
        )
        if not self.has_device_memory:
            return None
        pool = PinnedPool(reservation)
        self.resources.callback(pool.close)
        if uses_drives(self.config):
            pool.register_with(self.drives.queue)
        return pool

    def offload(
        self,
        home: Tier,
        resident: int,
        pool: PinnedPool | None,
        shared: SharedRoom,
    ) -> ActivationOffload:
        """Return what moves saved tensors to `home`, within limits that `shared` adds to."""
        settings = self.config.activations
        in_flight, room = resident // 2, None
        if home is Tier.NVME:
            room = DriveRoom(self.drives)
            if pool is not None:
                in_flight = min(in_flight, settings.host_bytes // 2)
        here = Tier.DEVICE if self.has_device_memory else Tier.HOST
        nothing = self.resources.enter_context(
            self.ledger.reserve(here, 0, holder="memory of saved tensors")
        )
        offload = ActivationOffload(
            self.lanes,
            self._mover(pool),
            BorrowedMemory(here, nothing),
            ActivationLimits(
                resident=resident,
                in_flight=in_flight,
                small=settings.small_bytes,
                shared=shared,
            ),
            room=room,
        )
        self.resources.callback(offload.close)
        return offload

    def _mover(self, pool: PinnedPool | None) -> Mover:
        return Mover(self.accelerator, pool or self.lanes.host, self.lanes.device, self.swap)

    # --- a choice per block -----------------------------------------------------------------------

    def chosen(self, model: torch.nn.Module) -> BlockActivations:
        """Return what chooses the way of each block within the budget."""
        settings, blocks = self.config.activations, _blocks_of(model)
        resident = self._resident()
        pool = self.reserve(resident)
        homes = tuple(self._homes())
        staging = resident // _STAGING if homes else 0
        lifetimes = Lifetimes(self.lanes.meter)
        on_host = settings.host_bytes // (2 if Tier.NVME in homes else 1)
        room = ActivationRoom(
            device=resident,
            host=on_host if Tier.HOST in homes else 0,
            drives=self._free_on_drives() if Tier.NVME in homes else 0,
            staging=staging,
        )
        shared = SharedRoom(lifetimes, left=resident - staging)
        moved = {home: self.offload(home, staging, pool, shared) for home in homes}
        decider = MeasuredWays(
            blocks,
            room,
            Homes(moved, shared, over_link=self.has_device_memory),
            clock=self._clock(),
            agreement=self._agreement(),
            left_alone=_left_alone(model),
        )
        return BlockActivations(
            blocks, decider, outside=KeptActivations(), moved=moved, lifetimes=lifetimes
        )

    def closed_with_engine(self, activations: BlockActivations) -> BlockActivations:
        """Return these, which are closed with the engine."""
        self.resources.callback(activations.close)
        return activations

    def _resident(self) -> int:
        """Return the bytes of saved tensors that may stay where modules compute."""
        settings = self.config.activations
        if settings.resident_bytes is not None:
            return settings.resident_bytes
        # With several ranks, the rest is for whole parameters.
        if self.planned.sharding is not None:
            return saved_on_host(settings, self.accelerator, self.planned.budget.host)
        free = self.ledger.free(Tier.DEVICE if self.has_device_memory else Tier.HOST)
        part, of = _PART_FOR_SAVED
        return free * part // of

    def _agreement(self) -> Agreement:
        sharding = self.planned.sharding
        return ChosenAlone() if sharding is None else ChosenTogether(sharding.cut.ranks.tell)

    def _homes(self) -> Iterator[Tier]:
        if self.has_device_memory and self.config.activations.host_bytes:
            yield Tier.HOST
        if uses_drives(self.config):
            yield Tier.NVME

    def _free_on_drives(self) -> int:
        whole = sum(self.planned.budget.nvme.values())
        return max(whole - self.drives.capacity, 0) + self.drives.free_bytes

    def _clock(self) -> Callable[[], float]:
        """Return the time in seconds at which all that was submitted has ended."""
        clock = clock_of(self.accelerator)

        def ended() -> float:
            if self.has_device_memory:
                self.accelerator.synchronize()
            return clock() / 1e9

        return ended
