"""Turns a model, an optimizer and settings into an Engine. A refusal leaves the model as it was.

Checks, then plans, then reserves, and touches the model last.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from infinity_engine.accel import Accelerator, StreamKind, open_accelerator
from infinity_engine.config import EngineConfig, Precision, Recording
from infinity_engine.engine.engine import Engine, EngineParts
from infinity_engine.engine.fetching import ParameterFetcher
from infinity_engine.engine.gradients import GradientKeeper, Piece
from infinity_engine.engine.hooks import Hooks
from infinity_engine.engine.lanes import Lanes
from infinity_engine.engine.meter import Meter, clock_of
from infinity_engine.engine.modules import ModuleParameters, check_modules
from infinity_engine.engine.parameters import ModelParameter, TrainedParameter, collect_frozen, collect_parameters
from infinity_engine.engine.scaling import LossScale
from infinity_engine.engine.sizing import Demand, Sizing
from infinity_engine.engine.states import StateKeeper
from infinity_engine.errors import ConfigError
from infinity_engine.machine.capacity import probe_capacity
from infinity_engine.memory import DeviceMemory, Lease, Ledger, PinnedPool
from infinity_engine.optim import FloatFormat, HostKernels, UpdateThreads, rules_of
from infinity_engine.optim.policy import OffloadPolicy
from infinity_engine.plan import Budget, Capacity, ResolvedBudget, Tier
from infinity_engine.plan.step import Home, StepPlan
from infinity_engine.telemetry import NullTelemetry, Telemetry
from infinity_engine.tiering import ShardRecord

__all__ = ["assemble"]


def assemble(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    config: EngineConfig,
    device: Accelerator | None,
    policy: OffloadPolicy | None,
) -> Engine:
    """Return an engine; `device` is used where given, and stays open. See `initialize` for what is raised."""
    with ExitStack() as resources:
        parts = _parts(model, optimizer, config, device, resources, policy=policy)
        engine = Engine(parts)
        parts.resources.push(resources.pop_all())
    return engine


def _parts(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    config: EngineConfig,
    device: Accelerator | None,
    resources: ExitStack,
    *,
    policy: OffloadPolicy | None,
) -> EngineParts:
    rules = rules_of(optimizer)
    trained = collect_parameters(model, optimizer)
    accelerator = device
    if accelerator is None:
        accelerator = resources.enter_context(open_accelerator(config.accelerator.value))
    if accelerator.name == "cuda":
        raise ConfigError(
            field="accelerator",
            value=config.accelerator.value,
            expected="cpu: this version does not update on a GPU yet (CHANGELOG.md, Known gaps)",
        )
    frozen = collect_frozen(model, trained)
    sizing = Sizing.of(model, trained, frozen, rules, config, unified=accelerator.unified)
    budget = _budget(config, accelerator)
    plan, demand = sizing.plan(config, policy, budget)
    at_home = plan.parameters is Tier.HOST
    if at_home:
        check_modules(model)
    ledger = Ledger(budget, device_is=Tier.HOST if accelerator.unified else Tier.DEVICE)
    host, on_device = _pools(demand, ledger, accelerator, resources)
    threads = UpdateThreads.anywhere(config.update_threads or len(os.sched_getaffinity(0)))
    telemetry = _telemetry(config, accelerator)
    lanes = Lanes(
        accelerator=accelerator,
        compute=accelerator.stream(StreamKind.COMPUTE),
        upload=None if accelerator.unified else accelerator.stream(StreamKind.H2D),
        download=None if accelerator.unified else accelerator.stream(StreamKind.D2H),
        kernels=HostKernels(threads),
        host=host,
        device=on_device,
        meter=Meter(telemetry, accelerator, ledger),
    )
    autocast = config.precision in {Precision.BF16_AUTOCAST, Precision.FP16_AUTOCAST}
    hooks = Hooks()
    resources.callback(hooks.remove)
    originals = {each.number: each.parameter.detach() for each in trained}  # as they are before they are moved
    with _model_kept(model, trained):
        home = _go_home if at_home else _go_to_device
        records = home((*trained, *frozen), sizing, lanes, resources)
        _cast_buffers(model, sizing)
        states = StateKeeper(
            plan, sizing.subgroups, trained, formats=sizing.formats, state_names=sizing.state_names, lanes=lanes
        )
        resources.callback(states.close)
        states.begin(lambda each: originals[each.number], rules)
    fetcher = modules = None
    if at_home:
        everything = (*trained, *frozen)
        fetcher = ParameterFetcher(everything, records, lanes, demand.fetched)
        resources.callback(fetcher.close)
        modules = ModuleParameters(model, everything, fetcher, hooks)
    return EngineParts(
        model=model,
        optimizer=optimizer,
        device_type=accelerator.torch_device.type,
        trained=trained,
        frozen=frozen,
        plan=plan,
        gradients=GradientKeeper([each.numel for each in trained], _pieces(sizing, plan, len(trained)), lanes),
        states=states,
        fetcher=fetcher,
        modules=modules,
        scale=LossScale(dynamic=sizing.formats.parameter is FloatFormat.FP16),
        autocast=_dtype(sizing) if autocast else None,
        accumulation_steps=config.accumulation_steps,
        max_grad_norm=config.max_grad_norm,
        telemetry=telemetry,
        meter=lanes.meter,
        ledger=ledger,
        hooks=hooks,
        resources=ExitStack(),
    )


def _budget(config: EngineConfig, accelerator: Accelerator) -> ResolvedBudget:
    wanted = config.budget or Budget()
    capacity = probe_capacity(wanted.nvme, device_free_bytes=0 if accelerator.unified else accelerator.memory().free)
    if accelerator.unified:
        capacity = Capacity(device=capacity.host, host=capacity.host, nvme=capacity.nvme)
    elif accelerator.name == "emulated":  # Nothing else lives there that room would have to be left for.
        capacity = Capacity(device=accelerator.memory().free, host=capacity.host, nvme=capacity.nvme)
    return wanted.resolve(capacity)


def _pools(
    demand: Demand, ledger: Ledger, accelerator: Accelerator, resources: ExitStack
) -> tuple[PinnedPool, DeviceMemory[Any]]:
    """Reserve what the plan takes, and open the pools that hold it."""
    host = ledger.reserve(Tier.HOST, demand.host, holder="pinned pool")
    resources.callback(host.close)
    pool = PinnedPool(host)
    resources.callback(pool.close)
    on_device = ledger.reserve(Tier.DEVICE, demand.device, holder="device memory")
    resources.callback(on_device.close)
    memory: DeviceMemory[Any] = DeviceMemory(accelerator, on_device)
    resources.callback(memory.close)
    return pool, memory


def _pieces(sizing: Sizing, plan: StepPlan, trained: int) -> list[list[Piece]]:
    """Return the pieces that each trained parameter's gradient is needed in."""
    homes = plan.homes()
    pieces: dict[int, list[Piece]] = {}
    for subgroup in sizing.subgroups:
        on_host = homes[subgroup.index] is Home.HOST and not sizing.unified
        for segment in subgroup.segments:
            piece = Piece(segment.first_element, segment.numel, on_host)
            pieces.setdefault(segment.parameter, []).append(piece)
    return [pieces.get(number, []) for number in range(trained)]


@contextmanager
def _model_kept(model: torch.nn.Module, trained: Sequence[TrainedParameter]) -> Iterator[None]:
    """Take back what the body gave the model's parameters and buffers to compute with where it fails."""
    before = [(each, each.data) for each in (*model.parameters(), *model.buffers())]
    try:
        yield
    except BaseException:
        for tensor, data in before:
            tensor.data = data
        for each in trained:
            each.live_at(None)
        raise


def _go_to_device(
    parameters: Sequence[ModelParameter], sizing: Sizing, lanes: Lanes, resources: ExitStack
) -> dict[int, ShardRecord]:
    """Give modules the tensors that they compute with from here on, on the device."""
    for each in parameters:
        values = _as_computed(each, sizing)
        if each.numel and not (lanes.accelerator.unified and sizing.formats.parameter is None):
            lease = lanes.device.lease(values.numel() * values.element_size(), holder="parameters")
            resources.callback(_leave, each.parameter, lease)
            values = lease.tensor(values.dtype, values.shape).copy_(values)
        each.parameter.data = values
    return {}


def _go_home(
    parameters: Sequence[ModelParameter], sizing: Sizing, lanes: Lanes, resources: ExitStack
) -> dict[int, ShardRecord]:
    """Let values live on the host, each in a shard of its own."""
    records = {}
    for each in parameters:
        if each.numel:
            values = _as_computed(each, sizing)
            lease = lanes.host.lease(values.numel() * values.element_size(), holder="parameters")
            resources.callback(lease.close)
            each.live_at(lease.tensor(values.dtype).copy_(values.view(-1)))
            records[each.number] = ShardRecord(each.name, lease)
    return records


def _as_computed(each: ModelParameter, sizing: Sizing) -> torch.Tensor:
    values = each.parameter.detach()
    return (values.to(_dtype(sizing)) if values.is_floating_point() else values).contiguous()


def _cast_buffers(model: torch.nn.Module, sizing: Sizing) -> None:
    """Cast buffers as `model.to(dtype)` does: batch norm, for one, wants them in its parameters' dtype."""
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.data = buffer.data.to(_dtype(sizing))


def _dtype(sizing: Sizing) -> torch.dtype:
    kinds = {None: torch.float32, FloatFormat.BF16: torch.bfloat16, FloatFormat.FP16: torch.float16}
    return kinds[sizing.formats.parameter]


def _leave(parameter: torch.nn.Parameter, lease: Lease) -> None:
    """Let a parameter have ordinary memory again, and give the lease back."""
    parameter.data = parameter.data.clone()
    lease.close()


def _telemetry(config: EngineConfig, accelerator: Accelerator) -> Telemetry:
    if config.telemetry.recording is Recording.OFF:
        return NullTelemetry()
    keep_steps, keep_spans = config.telemetry.keep_steps, config.telemetry.keep_spans
    return Telemetry(keep_steps=keep_steps, keep_spans=keep_spans, clock_ns=clock_of(accelerator))
