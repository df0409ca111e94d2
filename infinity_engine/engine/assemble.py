"""Turns a model, an optimizer and settings into an Engine. A refusal leaves the model as it was.

Checks, then plans, then reserves, and touches the model last.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from deepnvme import Checksum as Summing
from deepnvme import IOQueue
from deepnvme.checksum import CHECKSUM_BYTES
from deepnvme.extents import PAGE
from deepnvme.probing import find_mount, read_mounts
from infinity_engine.accel import Accelerator, StreamKind, VirtualAccelerator, open_accelerator
from infinity_engine.config import Checksum, EngineConfig, Overlap, Precision, Recording, Replanning
from infinity_engine.engine.awaiting import AwaitedParameters
from infinity_engine.engine.built import BuiltModel, originals_of
from infinity_engine.engine.calibrating import with_rates, with_rates_of_machine
from infinity_engine.engine.choosing import choose
from infinity_engine.engine.deferred import Follower, parts_of
from infinity_engine.engine.device_kernels import device_kernels
from infinity_engine.engine.drives import DriveMeter
from infinity_engine.engine.early import EarlyUpdates
from infinity_engine.engine.engine import Deferral, Engine, EngineParts
from infinity_engine.engine.fetching import ParameterFetcher
from infinity_engine.engine.gradients import GradientKeeper
from infinity_engine.engine.hooks import Hooks
from infinity_engine.engine.lanes import Lanes
from infinity_engine.engine.meter import Meter, clock_of
from infinity_engine.engine.modules import ModuleParameters, check_modules
from infinity_engine.engine.original import digest_of
from infinity_engine.engine.outgoing import Outgoing
from infinity_engine.engine.parameters import ModelParameter, TrainedParameter, collect_frozen, collect_parameters
from infinity_engine.engine.progress import Progress, Teller
from infinity_engine.engine.ranks import Ranks
from infinity_engine.engine.replanning import Question, Replanner
from infinity_engine.engine.scaling import LossScale
from infinity_engine.engine.sharding import Sharding, Shards, check_cut
from infinity_engine.engine.signals import HeldSignals
from infinity_engine.engine.sizing import pieces_of, sizing_of, wish_of
from infinity_engine.engine.states import StateKeeper, piece_numbers
from infinity_engine.engine.swapping import SwappedStates
from infinity_engine.errors import CapacityError, ConfigError
from infinity_engine.machine.capacity import probe_capacity
from infinity_engine.machine.cores import CoreShare
from infinity_engine.memory import DeviceMemory, Lease, Ledger, PinnedPool, Reservation, return_freed_memory
from infinity_engine.optim import NORM_BLOCK, FloatFormat, HostKernels, Rule, UpdateThreads, rules_of
from infinity_engine.optim.policy import OffloadPolicy
from infinity_engine.partition import ShardSpec
from infinity_engine.plan import Budget, Capacity, DriveRates, ResolvedBudget, Tier
from infinity_engine.sim.buffers import SCRATCH
from infinity_engine.sim.placing import Plan, place
from infinity_engine.sim.sizing import Demand, Sizing
from infinity_engine.storage import SwapFile
from infinity_engine.telemetry import NullTelemetry, Telemetry
from infinity_engine.tiering import ShardRecord
from infinity_engine.units import align_up

__all__ = ["assemble"]


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
    """Return an engine; `device` and `queue` are used where given, and stay open. `initialize` says what is raised."""
    resources, teller = ExitStack(), Teller(progress)
    built = originals_of(model)
    ranks = None if built is None else built.ranks
    if ranks is None:
        ranks = Ranks.join(config.ranks)
    try:
        if built is not None and built.ranks is not None:
            built.ranks.go_on_with(config.ranks)
        accelerator = device
        if accelerator is None:
            accelerator = resources.enter_context(open_accelerator(config.accelerator.value))
        planned = _planned(
            model, optimizer, config, accelerator, resources, policy=policy, queue=queue, ranks=ranks, built=built
        )
        parts = _parts(model, optimizer, config, planned, resources, teller=teller)
        engine = Engine(parts)
    except BaseException as error:
        if ranks is not None:
            ranks.close(error)
        with suppress(Exception):  # what holds views of what is closed here is the error that is raised
            resources.close()
        raise
    parts.resources.push(resources.pop_all())
    return_freed_memory()  # of what the model was until now
    return engine


@dataclass(frozen=True, kw_only=True)
class _Planned:
    """What is to be put together, checked and planned; the model is as it was."""

    accelerator: Accelerator
    rules: Sequence[Rule]
    trained: Sequence[TrainedParameter]
    """The model's; of several ranks, this one's shards of them."""
    frozen: Sequence[ModelParameter]
    built: BuiltModel | None
    sizing: Sizing
    sharding: Sharding | None
    """None where there is one rank."""
    budget: ResolvedBudget
    rated: Mapping[str, int]
    update_threads: int
    cores: CoreShare | None
    """Where they run; None: anywhere."""
    queue: IOQueue | None
    sums_bytes: int
    plan: Plan
    replanner: Replanner | None

    @property
    def everything(self) -> tuple[ModelParameter, ...]:
        """All parameters, or shards."""
        return (*self.trained, *self.frozen)


def _planned(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    config: EngineConfig,
    accelerator: Accelerator,
    resources: ExitStack,
    *,
    policy: OffloadPolicy | None,
    queue: IOQueue | None,
    ranks: Ranks | None,
    built: BuiltModel | None,
) -> _Planned:
    """Check what can be wrong, and return the plan; or refuse."""
    rules = rules_of(optimizer)
    trained = collect_parameters(model, optimizer)
    if ranks is not None and accelerator.torch_device.type != "cpu":
        raise ConfigError(
            field="accelerator",
            value=config.accelerator.value,
            expected="cpu: this version trains on one GPU, or on several ranks of the CPU (CHANGELOG.md, Known gaps)",
        )
    if accelerator.torch_device.type == "cuda":
        warnings.warn(
            "the engine has not run on a GPU yet: it was tested on other devices only. Compare a short training with "
            "one of accelerator='cpu', and run scripts/gpu_check of the project",
            RuntimeWarning,
            stacklevel=5,
        )
    _check_early_updates(config, unified=accelerator.unified)
    frozen = collect_frozen(model, trained)
    cut = None
    if ranks is not None:
        check_cut(model, config, built)
        ranks.agree_on_run(config, _named(accelerator, policy), rules, (*trained, *frozen), partial(_digest, built))
        cut = ranks.cut(trained, frozen, partial(_spec, built))
        trained, frozen = cut.trained, cut.frozen
    replanner = None
    sizing = sizing_of(model, trained, frozen, rules, config, unified=accelerator.unified, in_memory=built is None)
    sharding = None if cut is None else Sharding.of(model, cut, _dtype(sizing), config.accumulation_steps)
    if sharding is not None:
        sizing = sharding.sized(sizing)
    budget = _budget(config, accelerator, built, ranks)
    endurance = _endurance(config, budget)
    queue = _queue(config, budget, queue, resources)
    sums_bytes = _sums_bytes(config, sizing)
    io_bytes = SwapFile.host_bytes(budget.nvme, queue) + sums_bytes if queue is not None else 0
    update_threads = config.update_threads or (len(os.sched_getaffinity(0)) if ranks is None else ranks.cores.threads)
    if ranks is not None:
        ranks.tell_of_shared_cores()
    rated = partial(
        with_rates,
        config if ranks is None else replace(config, update_threads=update_threads),
        policy,
        rules,
        accelerator=accelerator,
        budget=budget,
        queue=queue,
        sizing=sizing,
        io_bytes=io_bytes,
    )
    rated_config = rated() if ranks is None else with_rates_of_machine(config, ranks, budget.nvme, rated)
    if sharding is None:
        wish, question = choose(
            model, trained, sizing, config=rated_config, policy=policy, budget=budget, io_bytes=io_bytes
        )
        plan = place(sizing, wish, budget, io_bytes=io_bytes)
        replanner = _replanner(config, question, sizing, plan, trained=len(trained))
    else:  # the planner knows one rank only: what fits decides
        left = sharding.left_of(budget, unified=accelerator.unified)
        plan = place(sizing, sharding.wish(wish_of(rated_config, policy)), left, io_bytes=io_bytes)
    if plan.steps.parameters is not Tier.DEVICE or (sharding is not None and sharding.by_module):
        check_modules(model)
    return _Planned(
        accelerator=accelerator,
        rules=rules,
        trained=trained,
        frozen=frozen,
        built=built,
        sizing=sizing,
        sharding=sharding,
        budget=budget,
        rated=endurance,
        update_threads=update_threads,
        cores=None if ranks is None else ranks.cores,
        queue=queue,
        sums_bytes=sums_bytes,
        plan=plan,
        replanner=replanner,
    )


def _replanner(
    config: EngineConfig, question: Question | None, sizing: Sizing, plan: Plan, *, trained: int
) -> Replanner | None:
    """Return who looks for a better plan while training, None where there is nothing to look at or to change."""
    wanted = config.replanning is Replanning.AUTO and config.telemetry.recording is not Recording.OFF
    if question is None or not wanted or not Replanner.can_watch(question, sizing, plan):
        return None
    return Replanner(question, sizing, plan, trained=trained)


def _parts(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    config: EngineConfig,
    planned: _Planned,
    resources: ExitStack,
    *,
    teller: Teller,
) -> EngineParts:
    """Reserve, move and put together what was planned."""
    accelerator, sizing, plan = planned.accelerator, planned.sizing, planned.plan
    trained, everything = planned.trained, planned.everything
    ledger = Ledger(planned.budget, device_is=Tier.HOST if accelerator.unified else Tier.DEVICE)
    swap = _swap(plan, ledger, planned.budget, planned.queue, resources, sums_bytes=planned.sums_bytes)
    host, on_device = _pools(plan.demand, ledger, accelerator, resources)
    passing = _passing(plan.demand, ledger, resources)
    staying = resources.enter_context(ledger.reserve(Tier.DEVICE, plan.demand.staying, holder="gradients that stay"))
    _serve((host, passing), swap)
    telemetry = _telemetry(config, accelerator)
    meter = Meter(telemetry, accelerator, ledger)
    lanes = _lanes(_update_threads(planned), accelerator, host, on_device, meter)
    autocast = config.precision in {Precision.BF16_AUTOCAST, Precision.FP16_AUTOCAST}
    signals = HeldSignals()
    hooks = Hooks(signals)
    resources.callback(hooks.remove)
    originals = _Originals(everything, planned.built)
    resources.callback(accelerator.cap, None)
    accelerator.cap(planned.budget.device)
    with _model_kept(model, everything):
        records, shown = _place(
            everything, sizing, plan, lanes=lanes, swap=swap, originals=originals, resources=resources, teller=teller
        )
        _move_buffers(model, sizing, accelerator.torch_device, resources)
        swapped = _swapped(plan, sizing, trained=trained, records=records, lanes=lanes, swap=swap)
        states = StateKeeper(
            plan.steps,
            sizing.subgroups,
            trained,
            formats=sizing.formats,
            state_names=sizing.state_names,
            lanes=lanes,
            swapped=swapped,
            resting=plan.resting.states,
        )
        resources.callback(states.close)
        states.begin(originals.fill, planned.rules, teller)
        originals.release(everything)
        for parameter, values in shown:
            parameter.data = values
    gradients = _gradients(config, trained, sizing, plan, lanes=lanes, swap=swap, staying=staying)
    fetcher = modules = whole = None
    if plan.steps.parameters is not Tier.DEVICE:
        fetcher = ParameterFetcher(everything, records, lanes, plan.demand.fetched, swap=swap, passing=passing)
        resources.callback(fetcher.close)
    sharding = planned.sharding
    if sharding is not None:
        shards = Shards(lanes, gradients, fetcher, frozenset(records))
        whole = sharding.whole(model, hooks, shards, ledger, resources, small_bytes=config.storage.small_bytes)
        modules = whole.modules
    elif fetcher is not None:
        modules = ModuleParameters(model, [each for each in everything if each.number in records], fetcher, hooks)
    early = _early_updates(sizing, plan, gradients=gradients, states=states, swapped=swapped, lanes=lanes)
    if whole is None and fetcher is not None:
        states.hand_to(fetcher.receive)
        if early is not None:
            fetcher.call_beside(early.go_on)
    deferral = None
    if whole is None or fetcher is not None:  # else all is gathered when it is updated
        deferral = _deferral(
            config,
            sizing,
            plan,
            records,
            whole.provider if whole is not None else fetcher,
            resources=resources,
            awaited=lambda: AwaitedParameters(model, trained, gradients.has, Hooks(signals)),
        )
    return EngineParts(
        model=model,
        optimizer=optimizer,
        accelerator=accelerator,
        trained=trained if sharding is None else sharding.cut.wholes,
        frozen=planned.frozen if sharding is None else sharding.cut.frozen_wholes,
        plan=plan.steps,
        replanner=planned.replanner,
        gradients=gradients,
        states=states,
        early=early,
        fetcher=fetcher if whole is None else whole.provider,
        modules=modules,
        whole=whole,
        deferral=deferral,
        scale=LossScale(dynamic=sizing.formats.parameter is FloatFormat.FP16),
        autocast=_dtype(sizing) if autocast else None,
        accumulation_steps=config.accumulation_steps,
        max_grad_norm=config.max_grad_norm,
        telemetry=telemetry,
        meter=lanes.meter,
        drives=DriveMeter(telemetry, swap, rates=_drive_rates(config, accelerator), rated=planned.rated),
        ledger=ledger,
        hooks=hooks,
        resources=ExitStack(),
    )


def _named(accelerator: Accelerator, policy: OffloadPolicy | None) -> dict[str, object]:
    """Return the names of what was given as an object, and is no setting."""
    return {"accelerator in use": accelerator.name, "policy": None if policy is None else policy.name}


def _update_threads(planned: _Planned) -> UpdateThreads:
    """Return the threads that update; ranks of one machine have theirs on cores of their own, if there are enough."""
    if planned.cores is None or planned.cores.is_shared:
        return UpdateThreads.anywhere(planned.update_threads)
    return UpdateThreads.within(planned.cores.cores, planned.update_threads)


def _lanes(
    update_threads: UpdateThreads, accelerator: Accelerator, host: PinnedPool, device: DeviceMemory[Any], meter: Meter
) -> Lanes:
    """Return what moves and updates, with its streams and threads."""
    kernels = HostKernels(update_threads)
    return Lanes(
        accelerator=accelerator,
        compute=accelerator.stream(StreamKind.COMPUTE),
        upload=None if accelerator.unified else accelerator.stream(StreamKind.H2D),
        download=None if accelerator.unified else accelerator.stream(StreamKind.D2H),
        kernels=kernels,
        device_kernels=device_kernels(accelerator, kernels),
        host=host,
        device=device,
        meter=meter,
    )


def _gradients(
    config: EngineConfig,
    trained: Sequence[TrainedParameter],
    sizing: Sizing,
    plan: Plan,
    *,
    lanes: Lanes,
    swap: SwapFile | None,
    staying: Reservation,
) -> GradientKeeper:
    outgoing = None
    if plan.resting.gradients:
        assert swap is not None, "gradients rest on drives that there are"
        outgoing = Outgoing(swap, lanes, plan.resting.gradients)
    return GradientKeeper(
        [each.name for each in trained],
        [each.numel for each in trained],
        pieces_of(sizing, plan, len(trained)),
        lanes,
        outgoing,
        staying=staying,
        sums_early=config.max_grad_norm is not None or sizing.formats.parameter is FloatFormat.FP16,
    )


class _Originals:
    """The values that parameters have before the engine takes them: in memory, or where `built` has them."""

    def __init__(self, parameters: Sequence[ModelParameter], built: BuiltModel | None) -> None:
        self._built = built
        self._converted: dict[torch.dtype, torch.Tensor] = {}  # one for all: many would leave holes in malloc's heap
        self._values = {
            each.number: each.parameter.detach().reshape(-1) for each in parameters if not self.on_drives(each)
        }

    def on_drives(self, each: ModelParameter) -> bool:
        """Tell whether a parameter has no values in memory."""
        return self._built is not None and each.of_model in self._built

    def fill(self, each: ModelParameter, first_element: int, values: torch.Tensor) -> None:
        """Fill a flat tensor with the elements of a parameter from one on, in its own dtype."""
        if self._built is None or not self.on_drives(each):
            values.copy_(self._values[each.number][first_element : first_element + values.numel()])
        elif values.dtype == each.parameter.dtype and values.device.type == "cpu":
            self._built.read_into(each.of_model, first_element, values)
        else:
            dtype = each.parameter.dtype
            room = self._room_for(dtype)
            for start in range(0, values.numel(), _CONVERTED):
                piece = values[start : start + _CONVERTED]
                read = room[: piece.numel()]
                self._built.read_into(each.of_model, first_element + start, read)
                piece.copy_(read)

    def _room_for(self, dtype: torch.dtype) -> torch.Tensor:
        if dtype not in self._converted:
            self._converted[dtype] = torch.empty(_CONVERTED, dtype=dtype, device="cpu")
        return self._converted[dtype]

    def release(self, parameters: Iterable[ModelParameter]) -> None:
        """Have none of them any more: the engine has."""
        if self._built is not None:
            for each in parameters:
                if self.on_drives(each):
                    self._built.release(each.of_model)
            self._built.hand_over_ranks()
            self._built.close()


def _queue(config: EngineConfig, budget: ResolvedBudget, queue: IOQueue | None, resources: ExitStack) -> IOQueue | None:
    """Return the queue for the budget's drives, None where it has none."""
    if not budget.nvme:
        return None
    return queue or resources.enter_context(IOQueue(config.storage.backend.value))


def _swap(
    plan: Plan,
    ledger: Ledger,
    budget: ResolvedBudget,
    queue: IOQueue | None,
    resources: ExitStack,
    *,
    sums_bytes: int,
) -> SwapFile | None:
    """Take what the plan needs of each directory, as its budget is to all of them; of the host, for checksums."""
    needed = plan.demand.nvme
    if not needed:
        return None
    every = sum(budget.nvme.values()) or 1
    sizes = {directory: align_up(needed * limit // every, PAGE) + 2 * PAGE for directory, limit in budget.nvme.items()}
    short = [directory for directory, nbytes in sizes.items() if nbytes > budget.nvme[directory]]
    if short:
        raise CapacityError(
            tier=Tier.NVME.name,
            directory=", ".join(budget.nvme),
            asked=needed,
            free=every,
            limit=every,
            change="raise the budget's nvme, name another directory there, or raise the budget's host",
        )
    _warn_of_memory(sizes)
    SwapFile.remove_stale(sizes)  # of killed runs; what a living one uses stays
    sums = resources.enter_context(ledger.reserve(Tier.HOST, sums_bytes, holder="checksums of swapped bytes"))
    sums.hold(sums_bytes)
    resources.callback(sums.release, sums_bytes)
    checksum = Summing.CRC32C if sums_bytes else Summing.NONE
    return resources.enter_context(SwapFile(sizes, ledger, queue=queue, checksum=checksum))


def _sums_bytes(config: EngineConfig, sizing: Sizing) -> int:
    """Return what the checksums of all that could rest on drives take of the host at most; 0 where there are none."""
    if config.storage.checksum is not Checksum.CRC32C:
        return 0
    versions = 2 if config.storage.early_updates else 1
    blocks = versions * sum(-(-nbytes // (NORM_BLOCK * sizing.width)) for nbytes in sizing.parameters)
    for subgroup in sizing.subgroups:
        states = 4 * (1 + len(sizing.state_names)) * subgroup.numel
        gradients = sizing.wire * subgroup.numel
        blocks += versions * (states // CHECKSUM_BYTES + 1)
        blocks += config.accumulation_steps * (gradients // CHECKSUM_BYTES + len(subgroup.segments))
    return 4 * blocks


def _warn_of_memory(directories: Iterable[str]) -> None:
    """Say where a directory is host memory itself, whose bytes no budget of the host counts."""
    mounts = read_mounts()
    for directory in directories:
        mount = find_mount(mounts, os.path.realpath(directory))
        if mount is not None and mount.file_system in {"tmpfs", "ramfs"}:
            warnings.warn(
                f"{directory} is on {mount.file_system}: what rests there is in host memory all the same, beside the "
                "budget's host. Name a directory on a drive",
                RuntimeWarning,
                stacklevel=2,
            )


def _deferral(
    config: EngineConfig,
    sizing: Sizing,
    plan: Plan,
    records: Collection[int],
    fetching: Follower | None,
    *,
    resources: ExitStack,
    awaited: Callable[[], Follower],
) -> Deferral | None:
    """Return what of an update can wait until modules need it, None where all of it has to be made in the step.

    On one memory that gains nothing, but where drives are at work; what is not fetched there nobody would wait for.
    """
    if config.overlap is Overlap.OFF:
        return None
    if sizing.unified and not (fetching and records and plan.steps.buffer_bytes):
        return None
    now = [
        each.index
        for each in sizing.subgroups
        if fetching and any(segment.parameter not in records for segment in each.segments)
    ]
    follower = fetching or awaited()
    resources.callback(follower.follow, None)
    return Deferral(now=now, parts=parts_of(sizing.subgroups), follower=follower)


def _swapped(
    plan: Plan,
    sizing: Sizing,
    *,
    trained: Sequence[TrainedParameter],
    records: Mapping[int, ShardRecord],
    lanes: Lanes,
    swap: SwapFile | None,
) -> SwappedStates | None:
    if not plan.layouts:
        return None
    assert swap is not None, "what rests on drives has a place there"
    return SwappedStates(
        swap,
        sizing.subgroups,
        plan.layouts,
        {number: record.place for number, record in records.items() if record.place is not None},
        names=lambda number: trained[number].name,
        width=sizing.width,
        in_place=sizing.formats.parameter is None,
        pieces=piece_numbers(sizing.subgroups),
        lanes=lanes,
        early=_early(plan),
    )


def _early(plan: Plan) -> list[int]:
    """Return the subgroups that may be updated in a backward, in the order in which modules use them."""
    return [index for index, layout in plan.layouts.items() if plan.resting.early and layout.may_be_early]


def _early_updates(
    sizing: Sizing,
    plan: Plan,
    *,
    gradients: GradientKeeper,
    states: StateKeeper,
    swapped: SwappedStates | None,
    lanes: Lanes,
) -> EarlyUpdates | None:
    order = _early(plan)
    if not order:
        return None
    assert swapped is not None, "what is early rests on drives"
    assert sizing.formats.parameter is not None, "fp32 parameters, which are masters, are not updated early"
    numbers, chosen = piece_numbers(sizing.subgroups), set(order)
    early = EarlyUpdates(
        states,
        swapped,
        lanes.meter,
        order=order[::-1],
        segments={
            (segment.parameter, numbers[each.index][number]): (each.index, number)
            for each in sizing.subgroups
            if each.index in chosen
            for number, segment in enumerate(each.segments)
        },
        buffers=plan.resting.early,
        format_=sizing.formats.parameter,
        keep=gradients.keep,
    )
    gradients.ask_first(early.take)
    return early


def _check_early_updates(config: EngineConfig, *, unified: bool) -> None:
    """Refuse updates in a backward where they would not be exact, or cannot be made."""
    if not config.storage.early_updates:
        return
    expected = None
    if config.precision not in {Precision.BF16, Precision.BF16_AUTOCAST}:
        expected = f'False with precision "{config.precision.value}": it is for "bf16" and "bf16_autocast"'
    elif config.max_grad_norm is not None:
        expected = "False with max_grad_norm: the norm of gradients is not known before the last of them has come"
    elif not unified:
        expected = "False with an accelerator that has memory of its own: this version updates early on the cpu only"
    if expected is not None:
        raise ConfigError(field="storage.early_updates", value=True, expected=expected)


def _budget(
    config: EngineConfig, accelerator: Accelerator, built: BuiltModel | None, ranks: Ranks | None
) -> ResolvedBudget:
    """Return this rank's budget in bytes, less what a model takes of it that was built on drives.

    That is until it is taken over.
    """
    wanted = config.budget or Budget()
    capacity = probe_capacity(wanted.nvme, device_free_bytes=0 if accelerator.unified else accelerator.memory().free)
    if accelerator.unified:
        capacity = Capacity(device=capacity.host, host=capacity.host, nvme=capacity.nvme)
    elif accelerator.name == "emulated":  # Nothing else lives there that room would have to be left for.
        capacity = Capacity(device=accelerator.memory().free, host=capacity.host, nvme=capacity.nvme)
    on_host, on_drives = (0, {}) if built is None else _held_by(built)
    every = None if ranks is None or built is None else ranks.held_here(on_host, on_drives)
    budget = wanted.resolve(
        replace(
            capacity,
            host=capacity.host + (on_host if every is None else every.host),
            nvme={
                name: free + (on_drives.get(name, 0) if every is None else every.in_directory(name))
                for name, free in capacity.nvme.items()
            },
        )
    )
    if ranks is not None:
        budget = ranks.share_budget(budget, device_is_shared=accelerator.unified, held=every)
    left = {name: max(limit - on_drives.get(name, 0), 0) for name, limit in budget.nvme.items()}
    return replace(budget, host=max(budget.host - on_host, 0), nvme=left)


def _held_by(built: BuiltModel) -> tuple[int, dict[str, int]]:
    """Return the bytes of host memory, and of each directory, that a model takes that was built on drives."""
    used = built.ledger.usage()
    on_host = sum(each.held for each in used if each.tier is Tier.HOST)
    return on_host, {each.directory: each.held for each in used if each.directory is not None}


def _spec(built: BuiltModel | None, parameter: torch.nn.Parameter) -> ShardSpec | None:
    """Return how a parameter was cut when it was built; None where it is to be cut."""
    return built.spec_of(parameter) if built is not None and parameter in built else None


def _digest(built: BuiltModel | None, parameter: torch.nn.Parameter) -> str:
    """Return words that differ where values do."""
    return built.digest_of(parameter) if built is not None and parameter in built else digest_of(parameter)


def _pools(
    demand: Demand, ledger: Ledger, accelerator: Accelerator, resources: ExitStack
) -> tuple[PinnedPool, DeviceMemory[Any]]:
    """Reserve what the plan takes, and open the pools that hold it."""
    host = ledger.reserve(Tier.HOST, demand.host, holder="pinned pool")
    resources.callback(host.close)
    pool = PinnedPool(host, layout=demand.slots)
    resources.callback(pool.close)
    on_device = ledger.reserve(Tier.DEVICE, demand.device, holder="device memory")
    resources.callback(on_device.close)
    memory: DeviceMemory[Any] = DeviceMemory(accelerator, on_device)
    resources.callback(memory.close)
    return pool, memory


def _serve(pools: Iterable[PinnedPool | None], swap: SwapFile | None) -> None:
    """Let the drives read and write the pools' memory without copies."""
    for pool in pools:
        if pool is not None and swap is not None:
            pool.serve(swap.queue)


def _passing(demand: Demand, ledger: Ledger, resources: ExitStack) -> PinnedPool | None:
    """Return the pool for parameters on their way from the drives to a device with memory of its own.

    It is one of its own, so that it is one piece again when all that pass it have passed.
    """
    if not demand.window:
        return None
    host = ledger.reserve(Tier.HOST, demand.window, holder="parameters on their way")
    resources.callback(host.close)
    pool = PinnedPool(host)
    resources.callback(pool.close)
    return pool


_CONVERTED = 1 << 18  # elements at once, where what is read has another dtype than what is written


@contextmanager
def _model_kept(model: torch.nn.Module, parameters: Sequence[ModelParameter]) -> Iterator[None]:
    """Take back what the body gave the model's parameters and buffers to compute with where it fails."""
    before = [(each, each.data) for each in (*model.parameters(), *model.buffers())]
    try:
        yield
    except BaseException:
        for tensor, data in before:
            tensor.data = data
        for each in parameters:
            each.live_at(None)
        raise


def _place(
    parameters: Sequence[ModelParameter],
    sizing: Sizing,
    plan: Plan,
    *,
    lanes: Lanes,
    swap: SwapFile | None,
    originals: _Originals,
    resources: ExitStack,
    teller: Teller,
) -> tuple[dict[int, ShardRecord], list[tuple[torch.nn.Parameter, torch.Tensor]]]:
    """Bring the values of parameters to where they stay; return the records of those that modules fetch.

    And what the others are to show, once nobody needs what they were.
    """
    records = {}
    shown = []
    on_host = plan.steps.parameters is not Tier.DEVICE and not lanes.accelerator.unified
    with teller.part("placing parameters", sum(_nbytes(each, sizing) for each in parameters)) as placed:
        for each in parameters:
            if each.number in plan.resting.values:
                assert swap is not None, "what rests on drives has a place there"
                records[each.number] = _go_to_drives(each, sizing, lanes, swap, originals, placed=placed)
                continue
            if on_host and each.numel:
                records[each.number] = _go_home(each, sizing, lanes, originals, resources)
            elif not on_host:
                shown.append((each.parameter, _on_device(each, sizing, lanes, originals, resources)))
            placed(_nbytes(each, sizing))
    return records, shown


def _on_device(
    each: ModelParameter, sizing: Sizing, lanes: Lanes, originals: _Originals, resources: ExitStack
) -> torch.Tensor:
    """Return the tensor that modules compute with from here on, on the device."""
    dtype = _computed_dtype(each, sizing)
    stays = lanes.accelerator.unified and sizing.formats.parameter is None and not originals.on_drives(each)
    stays = stays and each.part_of is None  # whose memory is the whole's, which goes
    if stays or not each.numel:
        return each.parameter.detach().to(dtype).contiguous()
    lease = lanes.device.lease(each.numel * dtype.itemsize, holder="parameters")
    resources.callback(_leave, each.parameter, lease)
    values = lease.tensor(dtype)
    originals.fill(each, 0, values)
    return values.view(each.parameter.shape)


def _go_home(
    each: ModelParameter, sizing: Sizing, lanes: Lanes, originals: _Originals, resources: ExitStack
) -> ShardRecord:
    """Let values live on the host, in a shard of their own."""
    dtype = _computed_dtype(each, sizing)
    lease = lanes.host.lease(each.numel * dtype.itemsize, holder="parameters")
    resources.callback(lease.close)
    values = lease.tensor(dtype)
    originals.fill(each, 0, values)
    each.live_at(values)
    return ShardRecord(each.name, lease)


def _go_to_drives(
    each: ModelParameter,
    sizing: Sizing,
    lanes: Lanes,
    swap: SwapFile,
    originals: _Originals,
    *,
    placed: Callable[[int], None],
) -> ShardRecord:
    """Let values rest on the drives, in a place of their own; they go there in pieces, which `placed` is told of."""
    dtype = _computed_dtype(each, sizing)
    block = NORM_BLOCK * dtype.itemsize if isinstance(each, TrainedParameter) else CHECKSUM_BYTES  # as subgroups cut it
    place = swap.allocate(each.numel * dtype.itemsize, holder=each.name, block_bytes=block)
    with lanes.host.lease_planned(SCRATCH) as scratch:
        most = scratch.nbytes // dtype.itemsize
        for first in range(0, each.numel, most):
            numel = min(most, each.numel - first)
            nbytes = numel * dtype.itemsize
            originals.fill(each, first, scratch.tensor(dtype)[:numel])
            swap.write(place.part(first * dtype.itemsize, nbytes), scratch.memory()[:nbytes], what=each.name).wait()
            placed(nbytes)
    each.rest_on_drives(dtype)
    return ShardRecord(each.name, place)


def _nbytes(each: ModelParameter, sizing: Sizing) -> int:
    """Return the bytes that modules compute with of a parameter."""
    return each.numel * _computed_dtype(each, sizing).itemsize


def _computed_dtype(each: ModelParameter, sizing: Sizing) -> torch.dtype:
    """Return what modules compute with a parameter in."""
    return _dtype(sizing) if each.parameter.is_floating_point() else each.parameter.dtype


def _move_buffers(model: torch.nn.Module, sizing: Sizing, where: torch.device, resources: ExitStack) -> None:
    """Cast buffers as `model.to(dtype)` does: batch norm, for one, wants them in its parameters' dtype.

    And have them where modules compute, until the engine is closed.
    """
    for buffer in model.buffers():
        before = buffer.device
        dtype = _dtype(sizing) if buffer.is_floating_point() else buffer.dtype
        buffer.data = buffer.data.to(where, dtype)
        if buffer.device != before:
            resources.callback(_move, buffer, before)


def _dtype(sizing: Sizing) -> torch.dtype:
    kinds = {None: torch.float32, FloatFormat.BF16: torch.bfloat16, FloatFormat.FP16: torch.float16}
    return kinds[sizing.formats.parameter]


def _leave(parameter: torch.nn.Parameter, lease: Lease) -> None:
    """Let a parameter have ordinary memory of the host's again, and give the lease back."""
    parameter.data = parameter.data.to("cpu", copy=True)
    lease.close()


def _move(tensor: torch.Tensor, where: torch.device) -> None:
    tensor.data = tensor.data.to(where)


def _drive_rates(config: EngineConfig, accelerator: Accelerator) -> Mapping[str, DriveRates]:
    """Return the drives' calibrated rates, none where time is computed: drives take no time there."""
    return {} if config.rates is None or isinstance(accelerator, VirtualAccelerator) else config.rates.nvme


def _endurance(config: EngineConfig, budget: ResolvedBudget) -> Mapping[str, int]:
    """Return what may be written to each directory of the budget of which that was stated."""
    stated = config.storage.endurance
    if not isinstance(stated, Mapping):
        return {} if stated is None else dict.fromkeys(budget.nvme, stated)
    unknown = [directory for directory in stated if directory not in budget.nvme]
    if unknown:
        raise ConfigError.unknown_name(field="storage.endurance", name=unknown[0], known=budget.nvme)
    return {directory: stated[directory] for directory in budget.nvme if directory in stated}


def _telemetry(config: EngineConfig, accelerator: Accelerator) -> Telemetry:
    if config.telemetry.recording is Recording.OFF:
        return NullTelemetry()
    keep_steps, keep_spans = config.telemetry.keep_steps, config.telemetry.keep_spans
    return Telemetry(keep_steps=keep_steps, keep_spans=keep_spans, clock_ns=clock_of(accelerator))
