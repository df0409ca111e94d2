"""Turns a model, an optimizer and settings into an Engine. A refusal leaves the model as it was.

Checks, then plans, then reserves, and touches the model last.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from infinity_engine.accel import Accelerator, StreamKind, open_accelerator
from infinity_engine.config import EngineConfig, Precision, Recording
from infinity_engine.engine.engine import Engine, EngineParts
from infinity_engine.engine.gradients import GradientKeeper, Lanes, Piece
from infinity_engine.engine.hooks import Hooks
from infinity_engine.engine.parameters import TrainedParameter, collect_parameters
from infinity_engine.engine.scaling import LossScale
from infinity_engine.engine.states import StateKeeper
from infinity_engine.errors import CapacityError, ConfigError
from infinity_engine.machine.capacity import probe_capacity
from infinity_engine.memory import DeviceMemory, Lease, Ledger, PinnedPool
from infinity_engine.optim import (
    FloatFormat,
    Formats,
    HostKernels,
    Rule,
    Subgroup,
    UpdateThreads,
    cut_into_subgroups,
    rules_of,
)
from infinity_engine.optim.policies import DEVICE_ONLY, HOST_ONLY, policy_for
from infinity_engine.optim.policy import Limits
from infinity_engine.plan import Auto, Budget, Capacity, Rates, ResolvedBudget, Tier
from infinity_engine.plan.step import BytesPerParameter, Home, StepPlan, SubgroupSpec
from infinity_engine.telemetry import NullTelemetry, Telemetry
from infinity_engine.units import align_up

__all__ = ["assemble"]

_PAGE = 4096


def assemble(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, config: EngineConfig, device: Accelerator | None
) -> Engine:
    """Return an engine; `device` is used where given, and stays open. See `initialize` for what is raised."""
    with ExitStack() as resources:
        parts = _parts(model, optimizer, config, device, resources)
        engine = Engine(parts)
        parts.resources.push(resources.pop_all())
    return engine


@dataclass(frozen=True)
class _Layout:
    """What is to be placed, before anything is: pure arithmetic."""

    subgroups: tuple[Subgroup, ...]
    formats: Formats
    state_names: tuple[str, ...]
    parameters: int
    compute_bytes: int

    def limits(self, budget: ResolvedBudget, *, unified: bool) -> Limits:
        """Return what a plan may take of the device."""
        weights = BytesPerParameter(
            states=4 * (1 + len(self.state_names)), parameter=(self.formats.parameter or FloatFormat.FP32).nbytes
        )
        if unified:  # Nothing visits another memory, so nothing is staged.
            everything = sum(subgroup.numel for subgroup in self.subgroups) * weights.states
            return Limits(resident_bytes=everything, staging_bytes=3 * everything, per_parameter=weights)
        left = budget.device - self.compute_bytes
        if left < 0:
            raise CapacityError(
                tier=Tier.DEVICE.name,
                asked=self.compute_bytes,
                free=budget.device,
                limit=budget.device,
                change="raise the budget's device, or take a smaller model: modules compute with all parameters there",
            )
        return Limits(resident_bytes=left, staging_bytes=left, per_parameter=weights)


def _parts(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    config: EngineConfig,
    device: Accelerator | None,
    resources: ExitStack,
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
    layout = _layout(trained, rules, config)
    budget = _budget(config, accelerator)
    ledger = Ledger(budget, device_is=Tier.HOST if accelerator.unified else Tier.DEVICE)
    plan = _plan(layout, config, budget, unified=accelerator.unified)
    host, on_device = _pools(layout, plan, ledger, accelerator, resources)
    threads = UpdateThreads.anywhere(config.update_threads or len(os.sched_getaffinity(0)))
    lanes = Lanes(
        accelerator=accelerator,
        compute=accelerator.stream(StreamKind.COMPUTE),
        upload=None if accelerator.unified else accelerator.stream(StreamKind.H2D),
        download=None if accelerator.unified else accelerator.stream(StreamKind.D2H),
        kernels=HostKernels(threads),
        host=host,
        device=on_device,
    )
    originals = {each.number: each.parameter.detach() for each in trained}  # as they are before they are moved
    with _values_moved(model, trained, layout, lanes, resources):
        states = StateKeeper(
            plan, layout.subgroups, trained, formats=layout.formats, state_names=layout.state_names, lanes=lanes
        )
        resources.callback(states.close)
        states.begin(lambda each: originals[each.number], rules)
    return EngineParts(
        model=model,
        optimizer=optimizer,
        trained=trained,
        plan=plan,
        gradients=GradientKeeper([each.numel for each in trained], _pieces(layout, plan, accelerator), lanes),
        states=states,
        scale=LossScale(dynamic=config.precision is Precision.FP16),
        accumulation_steps=config.accumulation_steps,
        max_grad_norm=config.max_grad_norm,
        telemetry=_telemetry(config),
        ledger=ledger,
        hooks=Hooks(),
        resources=ExitStack(),
    )


def _layout(trained: Sequence[TrainedParameter], rules: Sequence[Rule], config: EngineConfig) -> _Layout:
    numels = [each.numel for each in trained]
    sixteen = {Precision.FP32: None, Precision.BF16: FloatFormat.BF16, Precision.FP16: FloatFormat.FP16}
    formats = Formats(parameter=sixteen[config.precision])
    used = {each.group for each in trained}
    state_names = max((rules[group].states for group in used), key=len)
    width = (formats.parameter or FloatFormat.FP32).nbytes
    return _Layout(
        subgroups=cut_into_subgroups(numels, config.subgroup_numel),
        formats=formats,
        state_names=state_names,
        parameters=len(trained),
        compute_bytes=sum(width * numel for numel in numels),
    )


def _budget(config: EngineConfig, accelerator: Accelerator) -> ResolvedBudget:
    wanted = config.budget or Budget()
    capacity = probe_capacity(wanted.nvme, device_free_bytes=0 if accelerator.unified else accelerator.memory().free)
    if accelerator.unified:
        capacity = Capacity(device=capacity.host, host=capacity.host, nvme=capacity.nvme)
    elif accelerator.name == "emulated":  # Nothing else lives there that room would have to be left for.
        capacity = Capacity(device=accelerator.memory().free, host=capacity.host, nvme=capacity.nvme)
    return wanted.resolve(capacity)


def _plan(layout: _Layout, config: EngineConfig, budget: ResolvedBudget, *, unified: bool) -> StepPlan:
    """Return the plan of the strategy that is asked for; `auto` keeps states on the device where they fit there."""
    specs = [
        SubgroupSpec(index=subgroup.index, numel=subgroup.numel, first_use=subgroup.index)
        for subgroup in layout.subgroups
    ]
    limits = layout.limits(budget, unified=unified)
    rates = config.rates or Rates()
    if not isinstance(config.strategy, Auto):
        return policy_for(config.strategy)(specs, rates, limits)
    if unified:
        return HOST_ONLY(specs, rates, limits)
    try:
        return DEVICE_ONLY(specs, rates, limits)
    except CapacityError:
        return HOST_ONLY(specs, rates, limits)


def _pools(
    layout: _Layout, plan: StepPlan, ledger: Ledger, accelerator: Accelerator, resources: ExitStack
) -> tuple[PinnedPool, DeviceMemory[Any]]:
    """Reserve what the plan takes, and open the pools that hold it."""
    homes = plan.homes()
    unified = accelerator.unified
    host_bytes = device_bytes = 0
    width = (layout.formats.parameter or FloatFormat.FP32).nbytes
    for subgroup in layout.subgroups:
        home = homes[subgroup.index]
        in_place = layout.formats.parameter is None and (unified or home is Home.RESIDENT)
        states = 4 * subgroup.numel * (len(layout.state_names) + (0 if in_place else 1))
        if home is Home.RESIDENT and not unified:
            device_bytes += states
        else:
            host_bytes += align_up(states, _PAGE)
        if home is Home.HOST and not unified:
            # What its update writes, its gradient, and the sum of several; pieces begin on pages of their own.
            each = (width + width + 4) * subgroup.numel
            host_bytes += each + _PAGE * (1 + 2 * len(subgroup.segments))
    if not unified:
        largest = max((subgroup.numel for subgroup in layout.subgroups), default=0)
        device_bytes += layout.compute_bytes + sum(plan.staging_bytes) + 2 * width * largest
    host = ledger.reserve(Tier.HOST, align_up(max(host_bytes, 1), _PAGE), holder="pinned pool")
    resources.callback(host.close)
    pool = PinnedPool(host)
    resources.callback(pool.close)
    on_device = ledger.reserve(Tier.DEVICE, device_bytes, holder="device memory")
    resources.callback(on_device.close)
    memory: DeviceMemory[Any] = DeviceMemory(accelerator, on_device)
    resources.callback(memory.close)
    return pool, memory


def _pieces(layout: _Layout, plan: StepPlan, accelerator: Accelerator) -> list[list[Piece]]:
    """Return the pieces that each parameter's gradient is needed in."""
    homes = plan.homes()
    pieces: list[list[Piece]] = [[] for _ in range(layout.parameters)]
    for subgroup in layout.subgroups:
        on_host = homes[subgroup.index] is Home.HOST and not accelerator.unified
        for segment in subgroup.segments:
            pieces[segment.parameter].append(Piece(segment.first_element, segment.numel, on_host))
    return pieces


@contextmanager
def _values_moved(
    model: torch.nn.Module, trained: Sequence[TrainedParameter], layout: _Layout, lanes: Lanes, resources: ExitStack
) -> Iterator[None]:
    """Give modules the tensors that they compute with from here on; take them back where the body fails."""
    kinds = {None: torch.float32, FloatFormat.BF16: torch.bfloat16, FloatFormat.FP16: torch.float16}
    dtype = kinds[layout.formats.parameter]
    before: list[tuple[Any, torch.Tensor]] = []
    ours = {id(each.parameter) for each in trained}
    try:
        for each in trained:
            values = each.parameter.detach().to(dtype).contiguous()
            if not lanes.accelerator.unified and each.numel:
                lease = lanes.device.lease(values.numel() * dtype.itemsize, holder="parameters")
                resources.callback(_leave, each.parameter, lease)
                values = lease.tensor(dtype, values.shape).copy_(values)
            before.append((each.parameter, each.parameter.data))
            each.parameter.data = values
        for other in (*model.parameters(), *model.buffers()):
            if id(other) not in ours and other.is_floating_point() and other.dtype != dtype:
                before.append((other, other.data))
                other.data = other.data.to(dtype)
        yield
    except BaseException:
        for tensor, data in reversed(before):
            tensor.data = data
        raise


def _leave(parameter: torch.nn.Parameter, lease: Lease) -> None:
    """Let a parameter have ordinary memory again, and give the lease back."""
    parameter.data = parameter.data.clone()
    lease.close()


def _telemetry(config: EngineConfig) -> Telemetry:
    if config.telemetry.recording is Recording.OFF:
        return NullTelemetry()
    return Telemetry(keep_steps=config.telemetry.keep_steps, keep_spans=config.telemetry.keep_spans)
