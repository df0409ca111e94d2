"""Turns a model, an optimizer and settings into an Engine. A refusal leaves the model as it was.

It checks, plans and reserves, in this order, and touches the model last.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch

from deepnvme import Checksum as Summing
from deepnvme import IOQueue
from deepnvme.machine.probing import find_mount, read_mounts
from deepnvme.sizes import PAGE
from infinity_engine.accel import Accelerator, StreamKind, VirtualAccelerator, open_accelerator
from infinity_engine.accel.virtual import clock_of
from infinity_engine.activation import SavedTensors
from infinity_engine.building.built import built_model_of
from infinity_engine.building.initial_placement import (
    InitialValues,
    move_buffers,
    place_parameters,
    release_initial_values,
    restored_on_failure,
)
from infinity_engine.config import EngineConfig, Overlap, Precision, Recording
from infinity_engine.engine.activations import activations_of, uses_drives, watch_blocks
from infinity_engine.engine.engine import Engine, close_at_its_end
from infinity_engine.engine.parts import EngineParts
from infinity_engine.engine.tiling import tiled_by_budget
from infinity_engine.errors import CapacityError
from infinity_engine.gradients.keeper import GradientKeeper
from infinity_engine.gradients.offloading import GradientOffload, NoOffload
from infinity_engine.gradients.scaling import LossScale
from infinity_engine.lanes.kernels import device_kernels
from infinity_engine.lanes.lanes import Lanes
from infinity_engine.lanes.meter import Meter
from infinity_engine.memory import (
    DeviceMemory,
    Ledger,
    PinnedPool,
    Reservation,
    return_freed_memory,
)
from infinity_engine.optim import FloatFormat, HostKernels, UpdateThreads
from infinity_engine.optim.policy import OffloadPolicy
from infinity_engine.parameters.deferred import Follower, parts_of
from infinity_engine.parameters.describing import pieces_of
from infinity_engine.parameters.fetching import ParameterFetcher
from infinity_engine.parameters.hooks import Hooks
from infinity_engine.parameters.modules import ModuleParameters, UnwatchedModules
from infinity_engine.parameters.parameters import TrainedParameter
from infinity_engine.parameters.pending import PendingParameters
from infinity_engine.parameters.precision import asked_dtype
from infinity_engine.parameters.providing import NothingFetched, Provider
from infinity_engine.placement.placing import Plan
from infinity_engine.placement.sizing import Demand, Sizing
from infinity_engine.plan import DriveRates, Rates, ResolvedBudget, Tier
from infinity_engine.planning.planning import Planned, check_and_plan, refusing_beside
from infinity_engine.progress import Progress, ProgressReporter
from infinity_engine.ranks.ranks import Ranks
from infinity_engine.ranks.sharding import Shards
from infinity_engine.ranks.together import ManyRanks, OneRank
from infinity_engine.reporting.drives import DriveMeter
from infinity_engine.residence import ShardRecord
from infinity_engine.signals import HeldSignals
from infinity_engine.storage import SwapFile
from infinity_engine.storage.shares import shares_by_rate
from infinity_engine.telemetry import NullTelemetry, Telemetry
from infinity_engine.update.early import EarlyUpdates, NoEarlyUpdates
from infinity_engine.update.host_thread import HostThread
from infinity_engine.update.replanning import KeptPlan
from infinity_engine.update.states import StateKeeper, piece_numbers
from infinity_engine.update.swapping import SwappedStates
from infinity_engine.update.updating import Deferral

__all__ = ["assemble"]

_AUTOCAST = frozenset({Precision.BF16_AUTOCAST, Precision.FP16_AUTOCAST})


def assemble(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    config: EngineConfig,
    *,
    device: Accelerator | None,
    policy: OffloadPolicy | None,
    queue: IOQueue | None,
    progress: Callable[[Progress], object] | None,
) -> Engine:
    """Return an engine; `device` and `queue` are used where given, and stay open.

    `initialize` says what is raised.
    """
    # `taken` has what is opened once the model is touched: it closes before the rest.
    resources, taken, reporter = ExitStack(), ExitStack(), ProgressReporter(progress)
    built = built_model_of(model)
    # A model that ranks have built together is trained by these ranks.
    of_built = None if built is None else built.ranks
    ranks = of_built or Ranks.join(config.ranks)
    with _closed_where_it_fails(resources, ranks):
        if of_built is not None:
            of_built.go_on_with(config.ranks)
        accelerator = device
        if accelerator is None:
            accelerator = resources.enter_context(open_accelerator(config.accelerator.value))
        with tiled_by_budget(model, optimizer, config, accelerator, ranks):
            planned = check_and_plan(
                model,
                optimizer,
                config,
                accelerator,
                resources,
                policy=policy,
                queue=queue,
                ranks=ranks,
                built=built,
            )
            # Innermost: closing may set parameters once more, and the model is restored after that.
            with restored_on_failure(model), _closed_where_it_fails(taken, ranks):
                parts = _parts(model, optimizer, config, planned, taken, reporter=reporter)
                engine = Engine(parts)
                # The engine has all values: what the model and the optimizer had goes only now.
                release_initial_values(planned.everything, built)
                planned.previous.release(planned.trained)
    # Pushed last, so closed first.
    resources.push(taken.pop_all())
    close_at_its_end(engine, resources)
    return_freed_memory()  # the model's former memory
    return engine


@contextmanager
def _closed_where_it_fails(resources: ExitStack, ranks: Ranks | None) -> Iterator[None]:
    """Where the body fails, tell the other ranks why, and close what was opened."""
    try:
        yield
    except BaseException as error:
        if ranks is not None:
            ranks.close(error)
        # The traceback of `error` may still hold views of this memory, so closing may fail too.
        # The first error is the one to raise.
        with suppress(Exception):
            resources.close()
        raise


@dataclass(frozen=True, kw_only=True, slots=True)
class _Reserved:
    """The memory and drives of a plan: promised before anything moves."""

    ledger: Ledger
    swap: SwapFile | None
    host: PinnedPool
    device: DeviceMemory[Any]
    passing: PinnedPool | None
    staying: Reservation
    """Of gradients that stay on the device."""
    sums: Reservation
    """Of nothing yet: sums that no plan foresees make it grow within the budget."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Placed:
    """Parameters and states, with their values, where the plan wants them."""

    records: Mapping[int, ShardRecord]
    states: StateKeeper
    swapped: SwappedStates


@dataclass(frozen=True, kw_only=True, slots=True)
class _Served:
    """What brings parameters to modules, on one rank or on several."""

    ranks: OneRank | ManyRanks
    modules: ModuleParameters | UnwatchedModules
    provider: Provider
    deferral: Deferral


def _parts(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    config: EngineConfig,
    planned: Planned,
    resources: ExitStack,
    *,
    reporter: ProgressReporter,
) -> EngineParts:
    """Reserve memory, move the parameters, and make the engine's parts."""
    accelerator, sizing, plan = planned.accelerator, planned.sizing, planned.plan
    reserved = _reserve(config, planned, resources)
    swap = reserved.swap
    telemetry = _telemetry(config, accelerator)
    meter = Meter(telemetry, accelerator, reserved.ledger)
    lanes = _lanes(_update_threads(planned), accelerator, reserved.host, reserved.device, meter)
    signals = HeldSignals()
    hooks = Hooks(signals)
    resources.callback(hooks.remove)
    # Registered first: an interrupt after cap() still lifts the limit.
    resources.callback(accelerator.cap, None)
    accelerator.cap(planned.budget.device)
    # From here on the model changes: values go to where they stay.
    placed = _place(model, planned, resources, lanes=lanes, swap=swap, reporter=reporter)
    states = placed.states
    has_fp16 = any(subgroup.formats.parameter is FloatFormat.FP16 for subgroup in sizing.subgroups)
    early = _early_updates(sizing, plan, states=states, swapped=placed.swapped, lanes=lanes)
    gradients = _gradients(
        planned.trained,
        sizing,
        plan,
        lanes=lanes,
        swap=swap,
        early=early,
        staying=reserved.staying,
        sums=reserved.sums,
        planned=config.accumulation_steps,
        # Block sums are made as gradients come only where each step needs a norm.
        sums_early=has_fp16 or config.max_grad_norm is not None,
    )
    # Before ranks reserve all that is left for whole parameters.
    activations = activations_of(
        config, planned, lanes, model, ledger=reserved.ledger, swap=swap, resources=resources
    )
    served = _serve_modules(
        model,
        config,
        planned,
        resources,
        reserved=reserved,
        placed=placed,
        lanes=lanes,
        gradients=gradients,
        early=early,
        activations=activations,
        signals=signals,
        hooks=hooks,
    )
    watch_blocks(activations, served.modules, hooks)
    sharding = planned.sharding
    return EngineParts(
        model=model,
        optimizer=optimizer,
        accelerator=accelerator,
        # The user's parameters, of which `trained` has this rank's shards.
        trained=planned.trained if sharding is None else sharding.cut.wholes,
        frozen=planned.frozen if sharding is None else sharding.cut.frozen_wholes,
        plan=plan.steps,
        replanner=planned.replanner or KeptPlan(),
        gradients=gradients,
        states=states,
        early=early,
        fetcher=served.provider,
        modules=served.modules,
        activations=activations,
        ranks=served.ranks,
        deferral=served.deferral,
        scale=LossScale(dynamic=has_fp16),
        autocast=asked_dtype(config.precision) if config.precision in _AUTOCAST else None,
        accumulation_steps=config.accumulation_steps,
        max_grad_norm=config.max_grad_norm,
        telemetry=telemetry,
        meter=meter,
        drives=DriveMeter(
            telemetry, swap, rates=_drive_rates(planned.rates, accelerator), rated=planned.rated
        ),
        ledger=reserved.ledger,
        hooks=hooks,
        queue=None if swap is None else swap.queue,
        io_bytes=0 if swap is None else swap.io_bytes,
        settings=config.to_mapping(),
    )


def _reserve(config: EngineConfig, planned: Planned, resources: ExitStack) -> _Reserved:
    """Promise all memory first: what does not fit is refused before anything moves."""
    accelerator, plan = planned.accelerator, planned.plan
    ledger = Ledger(planned.budget, device_is=Tier.HOST if accelerator.unified else Tier.DEVICE)
    with refusing_beside(planned.built):
        swap = _swap(
            plan,
            ledger,
            planned.budget,
            planned.queue,
            resources,
            rates={} if planned.rates is None else planned.rates.nvme,
            sums_bytes=planned.sums_bytes,
            saves=uses_drives(config),
        )
    host, device = _pools(plan.demand, ledger, accelerator, resources)
    passing = _passing(plan.demand, ledger, resources)
    staying = resources.enter_context(
        ledger.reserve(Tier.DEVICE, plan.demand.staying, holder="gradients that stay")
    )
    sums = resources.enter_context(
        ledger.reserve(Tier.HOST, 0, holder="sums of gradients beside the plan")
    )
    if swap is not None:  # its drives then read and write the pools without copies
        for pool in filter(None, (host, passing)):
            pool.register_with(swap.queue)
    return _Reserved(
        ledger=ledger,
        swap=swap,
        host=host,
        device=device,
        passing=passing,
        staying=staying,
        sums=sums,
    )


def _place(
    model: torch.nn.Module,
    planned: Planned,
    resources: ExitStack,
    *,
    lanes: Lanes,
    swap: SwapFile | None,
    reporter: ProgressReporter,
) -> _Placed:
    """Move parameters and buffers to where they stay, and make the states."""
    sizing, plan, trained = planned.sizing, planned.plan, planned.trained
    initial = InitialValues(planned.everything, planned.built)
    records, shown = place_parameters(
        planned.everything,
        plan,
        lanes=lanes,
        swap=swap,
        initial=initial,
        resources=resources,
        reporter=reporter,
    )
    move_buffers(model, planned.accelerator.torch_device, resources)
    swapped = _swapped(plan, sizing, trained=trained, records=records, lanes=lanes, swap=swap)
    # Swapped states are updated where they are begun: in their buffers, in the order of the drives.
    beside = lanes.accelerator.works_beside_host and not swapped.any
    thread = HostThread(lanes.meter.now_ns) if beside else None
    states = StateKeeper(
        plan.steps,
        sizing.subgroups,
        trained,
        state_names=sizing.state_names,
        lanes=lanes,
        swapped=swapped,
        resting=plan.resting.states,
        host_thread=thread,
    )
    resources.callback(states.close)
    if thread is not None:
        resources.callback(thread.close)  # before the memory that it updates goes
    # Masters are made of the old values, so parameters show the new ones only after this.
    states.begin(initial, planned.rules, planned.previous, reporter)
    for parameter, values in shown:
        parameter.data = values
    return _Placed(records=records, states=states, swapped=swapped)


def _serve_modules(
    model: torch.nn.Module,
    config: EngineConfig,
    planned: Planned,
    resources: ExitStack,
    *,
    reserved: _Reserved,
    placed: _Placed,
    lanes: Lanes,
    gradients: GradientKeeper,
    early: EarlyUpdates | NoEarlyUpdates,
    activations: SavedTensors,
    signals: HeldSignals,
    hooks: Hooks,
) -> _Served:
    """Let modules have their parameters when they run, and updates wait for them."""
    plan, everything, records = planned.plan, planned.everything, placed.records
    fetcher: ParameterFetcher | None = None
    provider: Provider = NothingFetched()
    fetches = plan.steps.parameters is not Tier.DEVICE
    # Parameters that rest on the host or on drives are fetched around modules.
    if fetches:
        provider = fetcher = ParameterFetcher(
            everything,
            records,
            lanes,
            plan.demand.fetched,
            swap=reserved.swap,
            passing=reserved.passing,
            beside=early,
        )
        resources.callback(fetcher.close)
    ranks: OneRank | ManyRanks = OneRank(gradients)
    modules: ModuleParameters | UnwatchedModules = UnwatchedModules(model, hooks, activations)
    # Several ranks have their own modules and provider, over this rank's shards.
    if planned.sharding is not None:
        ranks = planned.sharding.whole(
            model,
            hooks,
            Shards(lanes, gradients, fetcher, frozenset(records)),
            reserved.ledger,
            resources,
            activations=activations,
            small_bytes=config.storage.small_bytes,
        )
        modules, provider = ranks.modules, ranks.provider
    elif fetcher is not None:
        modules = ModuleParameters(
            model,
            [parameter for parameter in everything if parameter.number in records],
            fetcher,
            hooks,
            activations=activations,
        )
        placed.states.on_new_values(fetcher)
    deferral = Deferral.none()
    if _may_defer(config, planned, records, fetches=fetches):
        follower: Follower = provider
        if not fetches:
            follower = PendingParameters(model, planned.trained, gradients, Hooks(signals))
        # At the end no module waits for an update any more.
        resources.callback(follower.follow_update, None)
        # A subgroup with a parameter that modules do not fetch cannot wait: no module would.
        now = [
            subgroup.index
            for subgroup in planned.sizing.subgroups
            if fetches and any(segment.parameter not in records for segment in subgroup.segments)
        ]
        deferral = Deferral(now=now, parts=parts_of(planned.sizing.subgroups), follower=follower)
    return _Served(ranks=ranks, modules=modules, provider=provider, deferral=deferral)


def _update_threads(planned: Planned) -> UpdateThreads:
    """Return the threads for updates: on cores of this rank's own where there are enough."""
    if planned.cores is None or planned.cores.is_shared:
        return UpdateThreads.anywhere(planned.update_threads)
    return UpdateThreads.within(planned.cores.cores, planned.update_threads)


def _lanes(
    update_threads: UpdateThreads,
    accelerator: Accelerator,
    host: PinnedPool,
    device: DeviceMemory[Any],
    meter: Meter,
) -> Lanes:
    """Return streams, kernels and memory."""
    kernels = HostKernels(update_threads)
    return Lanes(
        accelerator=accelerator,
        compute=accelerator.stream(StreamKind.COMPUTE),
        upload=accelerator.stream(StreamKind.H2D),
        download=accelerator.stream(StreamKind.D2H),
        kernels=kernels,
        device_kernels=device_kernels(accelerator, kernels),
        host=host,
        device=device,
        meter=meter,
    )


def _gradients(
    trained: Sequence[TrainedParameter],
    sizing: Sizing,
    plan: Plan,
    *,
    lanes: Lanes,
    swap: SwapFile | None,
    early: EarlyUpdates | NoEarlyUpdates,
    staying: Reservation,
    sums: Reservation,
    planned: int,
    sums_early: bool,
) -> GradientKeeper:
    offload: GradientOffload | NoOffload = NoOffload()
    if plan.resting.gradients:
        assert swap is not None, "gradients rest on drives that there are"
        offload = GradientOffload(swap, lanes, plan.resting.gradients, early)
    return GradientKeeper(
        [parameter.name for parameter in trained],
        [parameter.numel for parameter in trained],
        pieces_of(sizing, plan, len(trained)),
        lanes,
        offload,
        staying=staying,
        sums=sums,
        planned=planned,
        sums_early=sums_early,
    )


def _swap(
    plan: Plan,
    ledger: Ledger,
    budget: ResolvedBudget,
    queue: IOQueue | None,
    resources: ExitStack,
    *,
    rates: Mapping[str, DriveRates],
    sums_bytes: int,
    saves: bool,
) -> SwapFile | None:
    """Open the swap file, each directory's share by its drive's speed, and memory for checksums."""
    needed = plan.demand.nvme
    # For what autograd saves it grows when that comes.
    if not needed and not saves:
        return None
    # Each file has a header, and a page of data at least.
    room = {directory: limit // PAGE - 2 for directory, limit in budget.nvme.items()}
    small = [directory for directory, pages in room.items() if pages < 0]
    if small or needed > PAGE * sum(room.values()):
        named = small[:1] or list(room)
        free = sum(budget.nvme[directory] for directory in named)
        enough = (0 if small else needed) + 3 * PAGE * len(named)  # limits are no whole pages
        raise CapacityError(
            tier=Tier.NVME.name,
            directory=", ".join(named),
            asked=max(enough, free + 1),
            free=free,
            limit=free,
            budget=Tier.NVME.value,
            change="name another directory there, or raise the budget's host",
        )
    speeds = _speeds(budget.nvme, rates)
    shares = shares_by_rate(needed // PAGE, room, speeds or dict.fromkeys(room, 1.0))
    sizes = {directory: PAGE * (pages + 2) for directory, pages in shares.items()}
    _warn_of_memory(sizes)
    sums = resources.enter_context(
        ledger.reserve(Tier.HOST, sums_bytes, holder="checksums of swapped bytes")
    )
    sums.hold(sums_bytes)
    resources.callback(sums.release, sums_bytes)
    checksum = Summing.CRC32C if sums_bytes else Summing.NONE
    return resources.enter_context(
        SwapFile(sizes, ledger, rates=speeds, queue=queue, checksum=checksum)
    )


def _speeds(directories: Iterable[str], rates: Mapping[str, DriveRates]) -> dict[str, float] | None:
    """Return how fast drives read and write as much, None where that of one is not known."""
    found = {}
    for directory in directories:
        seconds = rates[directory].seconds(1, 1) if directory in rates else None
        if seconds is None:
            return None
        found[directory] = 1 / seconds
    return found


def _warn_of_memory(directories: Iterable[str]) -> None:
    """Warn of directories that are host memory: the host's budget does not count their bytes."""
    mounts = read_mounts()
    for directory in directories:
        mount = find_mount(mounts, os.path.realpath(directory))
        if mount is not None and mount.file_system in {"tmpfs", "ramfs"}:
            warnings.warn(
                f"{directory} is on {mount.file_system}, which is host memory: what is offloaded "
                "there takes RAM beside the budget's host. Name a directory on a drive",
                RuntimeWarning,
                stacklevel=2,
            )


def _may_defer(
    config: EngineConfig, planned: Planned, records: Collection[int], *, fetches: bool
) -> bool:
    """Tell whether part of an update can wait until modules need it.

    With one memory for host and device, deferring gains time only where drives work meanwhile, and
    only parameters that are fetched can wait there.
    """
    if config.overlap is Overlap.OFF:
        return False
    if planned.sizing.unified:
        return bool(fetches and records and planned.plan.steps.buffer_bytes)
    # Several ranks that fetch nothing gather replicas in the update.
    return fetches or planned.sharding is None


def _swapped(
    plan: Plan,
    sizing: Sizing,
    *,
    trained: Sequence[TrainedParameter],
    records: Mapping[int, ShardRecord],
    lanes: Lanes,
    swap: SwapFile | None,
) -> SwappedStates:
    return SwappedStates(
        swap,
        sizing.subgroups,
        plan.layouts,
        {number: record.place for number, record in records.items() if record.place is not None},
        names=[parameter.name for parameter in trained],
        pieces=piece_numbers(sizing.subgroups),
        lanes=lanes,
        early=_early(plan),
    )


def _early(plan: Plan) -> list[int]:
    """Return the subgroups that may be updated early, in the order in which modules use them."""
    return [
        index
        for index, layout in plan.layouts.items()
        if plan.resting.early and layout.may_be_early
    ]


def _early_updates(
    sizing: Sizing,
    plan: Plan,
    *,
    states: StateKeeper,
    swapped: SwappedStates,
    lanes: Lanes,
) -> EarlyUpdates | NoEarlyUpdates:
    order = _early(plan)
    if not order:
        return NoEarlyUpdates()
    numbers, chosen = piece_numbers(sizing.subgroups), set(order)
    return EarlyUpdates(
        states,
        swapped,
        lanes.meter,
        # Backwards: gradients come in the reverse order of the modules.
        order=order[::-1],
        segments={
            (segment.parameter, numbers[subgroup.index][number]): (subgroup.index, number)
            for subgroup in sizing.subgroups
            if subgroup.index in chosen
            for number, segment in enumerate(subgroup.segments)
        },
        buffers=plan.resting.early,
    )


def _pools(
    demand: Demand, ledger: Ledger, accelerator: Accelerator, resources: ExitStack
) -> tuple[PinnedPool, DeviceMemory[Any]]:
    """Reserve the plan's memory, and open its pools."""
    host = ledger.reserve(Tier.HOST, demand.host, holder="pinned pool")
    # Closed last first: each pool before its reservation.
    resources.callback(host.close)
    pool = PinnedPool(host, layout=demand.slots)
    resources.callback(pool.close)
    on_device = ledger.reserve(Tier.DEVICE, demand.device, holder="device memory")
    resources.callback(on_device.close)
    memory: DeviceMemory[Any] = DeviceMemory(accelerator, on_device)
    resources.callback(memory.close)
    return pool, memory


def _passing(demand: Demand, ledger: Ledger, resources: ExitStack) -> PinnedPool | None:
    """Return the pool that parameters pass from the drives to a device with memory of its own.

    It is a pool of its own: when all parameters have passed it, it is one free piece again.
    """
    if not demand.window:
        return None
    host = ledger.reserve(Tier.HOST, demand.window, holder="parameters on their way")
    resources.callback(host.close)
    pool = PinnedPool(host)
    resources.callback(pool.close)
    return pool


def _drive_rates(rates: Rates | None, accelerator: Accelerator) -> Mapping[str, DriveRates]:
    """Return the drives' calibrated rates; none on a virtual clock, where drives take no time."""
    return {} if rates is None or isinstance(accelerator, VirtualAccelerator) else rates.nvme


def _telemetry(config: EngineConfig, accelerator: Accelerator) -> Telemetry:
    if config.telemetry.recording is Recording.OFF:
        return NullTelemetry()
    keep_steps, keep_spans = config.telemetry.keep_steps, config.telemetry.keep_spans
    return Telemetry(keep_steps=keep_steps, keep_spans=keep_spans, clock_ns=clock_of(accelerator))
