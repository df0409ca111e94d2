"""What an engine is to be, checked and planned before anything is touched: budgets, drives, ranks,
a plan that fits.

Refuses what cannot be. Reserves nothing but the queue for the drives; what it opens closes with the
`resources` given.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch

from deepnvme import IOQueue
from deepnvme.memory.checksum import CHECKSUM_BYTES
from infinity_engine.accel import Accelerator
from infinity_engine.building.built import BuiltModel
from infinity_engine.building.previous import PreviousStates
from infinity_engine.config import (
    ActivationsAt,
    ActivationsConfig,
    Checksum,
    EngineConfig,
    Recompute,
    Recording,
    Replanning,
)
from infinity_engine.errors import CapacityError, ConfigError
from infinity_engine.machine.capacity import capacity_of, probe_capacity
from infinity_engine.machine.cores import CoreShare
from infinity_engine.machine.memory import probe_memory
from infinity_engine.optim import NORM_BLOCK, Rule, rules_of
from infinity_engine.optim.policy import OffloadPolicy
from infinity_engine.parameters.describing import sizing_of, wish_of
from infinity_engine.parameters.modules import check_modules
from infinity_engine.parameters.parameters import (
    ModelParameter,
    TrainedParameter,
    check_memory_of_their_own,
    collect_frozen,
    collect_parameters,
    kept_bytes,
)
from infinity_engine.partition import ShardSpec
from infinity_engine.partition.digest import digest_of
from infinity_engine.placement.placing import Plan
from infinity_engine.placement.sizing import Sizing
from infinity_engine.plan import Budget, Capacity, Rates, ResolvedBudget, Tier
from infinity_engine.planning.calibrating import with_rates, with_rates_of_machine
from infinity_engine.planning.choosing import choose, choose_together, what_fits
from infinity_engine.ranks.ranks import Ranks
from infinity_engine.ranks.sharding import Sharding, check_cut
from infinity_engine.storage import SwapFile
from infinity_engine.update.replanning import Question, Replanner

__all__ = [
    "Planned",
    "check_and_plan",
    "check_device",
    "refusing_beside",
    "room_for_layers",
    "saved_on_host",
]

_UNSET_PART = 4  # of the host, for saved tensors where the caller has set no bytes


@dataclass(frozen=True, kw_only=True)
class Planned:
    """What is to be put together, checked and planned; the model is as it was."""

    accelerator: Accelerator
    rules: Sequence[Rule]
    trained: Sequence[TrainedParameter]
    """The model's; of several ranks, this one's shards of them."""
    frozen: Sequence[ModelParameter]
    previous: PreviousStates
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
    rates: Rates | None
    """What the plan was made with; None: nothing is known."""
    replanner: Replanner | None

    @property
    def everything(self) -> tuple[ModelParameter, ...]:
        """All parameters, or shards."""
        return (*self.trained, *self.frozen)


def check_and_plan(
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
) -> Planned:
    """Check what can be wrong, and return the plan; or refuse."""
    rules = rules_of(optimizer)
    trained = collect_parameters(model, optimizer, config.precision)
    # Rates decide how updates are made: a model that only runs needs none.
    config = config if trained else replace(config, calibration="off", rates=None)
    check_device(accelerator, alone=ranks is None)
    _check_early_updates(config, trained, unified=accelerator.unified)
    _check_activations(config, accelerator)
    previous = PreviousStates(optimizer, trained, rules)
    frozen = collect_frozen(model, trained, config.precision)
    check_memory_of_their_own((*trained, *frozen), dict(model.named_buffers()))
    cut = None
    if ranks is not None:
        check_cut(model, config, built_alone=built is not None and built.ranks is None)
        ranks.agree_on_run(
            config, _named(accelerator, policy), rules, (*trained, *frozen), partial(_digest, built)
        )
        cut = ranks.cut(trained, frozen, partial(_spec, built))
        previous.cut(cut)
        trained, frozen = cut.trained, cut.frozen
    replanner = None
    sizing = sizing_of(model, trained, frozen, rules, config, unified=accelerator.unified)
    sharding = None
    if cut is not None:
        sharding = Sharding.of(model, cut, config.accumulation_steps, unified=accelerator.unified)
        sizing = sharding.sized(sizing)
    budget = _budget(config, accelerator, built, ranks, (*trained, *frozen))
    endurance = _endurance(config, budget)
    queue = _queue(config, budget, queue, resources)
    sums_bytes = _sums_bytes(config, sizing)
    io_bytes = SwapFile.host_bytes(budget.nvme, queue) + sums_bytes if queue is not None else 0
    update_threads = config.update_threads or (
        len(os.sched_getaffinity(0)) if ranks is None else ranks.cores.threads
    )
    if ranks is not None:
        ranks.tell_of_shared_cores()
    saved = saved_on_host(config.activations, accelerator, budget.host)
    planned_budget = replace(budget, host=max(budget.host - saved, 0))
    room, asked = planned_budget, wish_of(config, policy)
    if sharding is not None:
        room = sharding.left_of(planned_budget, unified=accelerator.unified)
        asked = sharding.wish(asked)
    rated = partial(
        with_rates,
        config if ranks is None else replace(config, update_threads=update_threads),
        asked,
        rules,
        accelerator=accelerator,
        budget=planned_budget,
        room=room,
        queue=queue,
        sizing=sizing,
        io_bytes=io_bytes,
        ranks=ranks,
    )
    rated_config = (
        rated() if ranks is None else with_rates_of_machine(config, ranks, budget.nvme, rated)
    )
    with _refusing_beside_saved(saved, budget.host, accelerator), refusing_beside(built):
        if sharding is None:
            plan, question = choose(
                model,
                trained,
                frozen,
                sizing,
                config=rated_config,
                policy=policy,
                budget=planned_budget,
                io_bytes=io_bytes,
            )
            replanner = _replanner(config, question, sizing, plan, trained=len(trained))
        else:
            chosen = choose_together(
                model,
                sizing,
                sharding,
                config=rated_config,
                policy=policy,
                budget=room,
                io_bytes=io_bytes,
            )
            wish = sharding.wish(wish_of(rated_config, policy))
            plan = chosen or what_fits(sizing, wish, sharding, room, io_bytes=io_bytes)
    if plan.steps.parameters is not Tier.DEVICE or (sharding is not None and sharding.by_module):
        check_modules(dict(model.named_modules()))
    return Planned(
        accelerator=accelerator,
        rules=rules,
        trained=trained,
        frozen=frozen,
        previous=previous,
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
        rates=rated_config.rates,
        replanner=replanner,
    )


def check_device(accelerator: Accelerator, *, alone: bool) -> None:
    """Refuse what does not work on a device yet; `alone`: without other ranks.

    Raises:
        ConfigError: several ranks on a device other than the CPU.
    """
    kind = accelerator.torch_device.type
    if kind != "cpu" and not alone:
        raise ConfigError(
            field="accelerator",
            value=accelerator.name,
            expected="cpu: this version trains on one GPU, or on several ranks of the CPU "
            "(CHANGELOG.md, Known gaps)",
        )


def _replanner(
    config: EngineConfig, question: Question | None, sizing: Sizing, plan: Plan, *, trained: int
) -> Replanner | None:
    """Return who looks for a better plan while training, None where there is nothing to look at or
    to change.
    """
    wanted = (
        config.replanning is Replanning.AUTO and config.telemetry.recording is not Recording.OFF
    )
    if question is None or not wanted or not Replanner.can_watch(question, sizing, plan):
        return None
    return Replanner(question, sizing, plan, trained=trained)


def _named(accelerator: Accelerator, policy: OffloadPolicy | None) -> dict[str, object]:
    """Return the names of what was given as an object, and is no setting."""
    return {
        "accelerator in use": accelerator.name,
        "policy": None if policy is None else policy.name,
    }


def _queue(
    config: EngineConfig, budget: ResolvedBudget, queue: IOQueue | None, resources: ExitStack
) -> IOQueue | None:
    """Return the queue for the budget's drives, None where it has none."""
    if not budget.nvme:
        return None
    return queue or resources.enter_context(IOQueue(config.storage.backend.value))


def _sums_bytes(config: EngineConfig, sizing: Sizing) -> int:
    """Return what the checksums of all that could rest on drives take of the host at most; 0 where
    there are none.
    """
    if config.storage.checksum is not Checksum.CRC32C:
        return 0
    versions = 2 if config.storage.early_updates else 1
    smallest = NORM_BLOCK * min(
        (subgroup.formats.width for subgroup in sizing.subgroups), default=1
    )
    blocks = versions * sum(-(-nbytes // smallest) for nbytes in sizing.parameters)
    for subgroup in sizing.subgroups:
        states = 4 * (1 + len(sizing.state_names)) * subgroup.numel
        gradients = sizing.wire(subgroup) * subgroup.numel
        blocks += versions * (states // CHECKSUM_BYTES + 1)
        blocks += config.accumulation_steps * (gradients // CHECKSUM_BYTES + len(subgroup.segments))
    return 4 * blocks


def _check_early_updates(
    config: EngineConfig, trained: Sequence[TrainedParameter], *, unified: bool
) -> None:
    """Refuse updates in a backward where they would not be exact, or cannot be made."""
    if not config.storage.early_updates:
        return
    expected = ""
    dtypes = {parameter.dtype for parameter in trained}
    if torch.bfloat16 not in dtypes or torch.float16 in dtypes:
        found = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        expected = (
            f'False with precision "{config.precision.value}" of this model, whose trained '
            f"parameters are {found}: "
            "only bf16 parameters are updated in the backward, and none where there are fp16 ones"
        )
    elif config.max_grad_norm is not None:
        expected = (
            "False with max_grad_norm: the norm of gradients is not known before the last of them "
            "has come"
        )
    elif not unified:
        expected = (
            "False with an accelerator that has memory of its own: this version updates early on "
            "the cpu only"
        )
    if expected:
        raise ConfigError(field="storage.early_updates", value=True, expected=expected)


@contextmanager
def _refusing_beside_saved(nbytes: int, host: int, accelerator: Accelerator) -> Iterator[None]:
    """Let a refusal in the body count what saved tensors take of `host`, the host's budget."""
    try:
        yield
    except CapacityError as error:
        if error.tier != Tier.HOST.name or not nbytes:
            raise
        on_cpu = accelerator.torch_device.type == "cpu"
        setting = f"activations.{'resident' if on_cpu else 'host'}_bytes"
        beside = error.beside(f"saved activations ({setting})", min(nbytes, host))
        change = f"lower {setting}, or {error.change}"
        if nbytes > host and error.budget:
            least = error.limit + nbytes + max(error.asked - error.free, 0)
            change = (
                f"raise the budget's {error.budget} to at least {least} B ({setting} alone is "
                f"{nbytes} B), or {change}"
            )
            beside = replace(beside, budget=None)
        raise replace(beside, change=change) from None


def saved_on_host(config: ActivationsConfig, accelerator: Accelerator, host: int) -> int:
    """Return the bytes of the host's budget, `host`, that saved tensors take at least."""
    if config.at is ActivationsAt.DEVICE:
        return 0
    if accelerator.torch_device.type != "cpu":
        return config.host_bytes
    # Nothing was asked for, so nothing is refused for it: the choice has what the plan leaves.
    unset = config.at is ActivationsAt.AUTO and config.resident_bytes is None
    return min(config.resident, host // _UNSET_PART) if unset else config.resident


def _check_activations(config: EngineConfig, accelerator: Accelerator) -> None:
    """Refuse settings by which saved tensors cannot leave."""
    at = config.activations.at
    if at is ActivationsAt.HOST and accelerator.torch_device.type == "cpu":
        raise ConfigError(
            field="activations.at",
            value=at.value,
            expected=f'"nvme" or "device" with the accelerator {accelerator.name}: what modules '
            "compute is in host memory already",
        )
    if at is ActivationsAt.AUTO and config.activations.recompute is not Recompute.NOTHING:
        raise ConfigError(
            field="activations.recompute",
            value=config.activations.recompute.value,
            expected=f'"{Recompute.NOTHING.value}" with activations.at={at.value!r}, which chooses '
            "the blocks that run again itself",
        )
    if at is ActivationsAt.NVME and not (config.budget and config.budget.nvme):
        raise ConfigError(
            field="activations.at",
            value=at.value,
            expected='a budget with nvme, such as {"nvme": {directory: "100GiB"}}, for saved '
            "tensors to rest on",
        )


def room_for_layers(
    config: EngineConfig,
    accelerator: Accelerator,
    ranks: Ranks | None = None,
    *,
    kept: int = 0,
) -> int:
    """Return the bytes of this rank's device that layers and what updates pass have together.

    `kept`: what parameters have of the host, and keep. All ranks call this, and get the same.
    """
    wanted = config.budget or Budget()
    budget = wanted.resolve(_capacity(wanted, accelerator, kept))
    room = budget.host if accelerator.unified else budget.device
    if ranks is not None:
        own = room // ranks.size if accelerator.unified else room
        room = ranks.least("room for layers", own)
    return max(room - config.activation_bytes, 0)


def _capacity(wanted: Budget, accelerator: Accelerator, kept: int) -> Capacity:
    """Return what this machine has for a budget.

    Where modules compute on the host, parameters have `kept` bytes of it already: these are not
    free, but of the budget.
    """
    capacity = probe_capacity(
        wanted.nvme, device_free_bytes=0 if accelerator.unified else accelerator.memory().free
    )
    if accelerator.unified:
        most = capacity_of(device=0, host=probe_memory().usable_bytes, nvme={}).host
        host = min(capacity.host + kept, max(most, capacity.host))
        return Capacity(device=host, host=host, nvme=capacity.nvme)
    if accelerator.name == "emulated":
        # Nothing else lives there that room would have to be left for.
        return Capacity(device=accelerator.memory().free, host=capacity.host, nvme=capacity.nvme)
    return capacity


def _budget(
    config: EngineConfig,
    accelerator: Accelerator,
    built: BuiltModel | None,
    ranks: Ranks | None,
    parameters: Sequence[ModelParameter],
) -> ResolvedBudget:
    """Return this rank's budget in bytes, less what a model that was built on drives takes of it.

    It takes that until the engine has its values.
    """
    wanted = config.budget or Budget()
    kept = kept_bytes(
        (known.parameter, known.dtype)
        for known in parameters
        if known.part_of is None and (built is None or known.parameter not in built)
    )
    capacity = _capacity(wanted, accelerator, kept)
    on_host, on_drives = _held_by(built)
    held = None if ranks is None or built is None else ranks.held_here(on_host, on_drives)
    budget = wanted.resolve(
        replace(
            capacity,
            host=capacity.host + (on_host if held is None else held.host),
            nvme={
                name: free + (on_drives.get(name, 0) if held is None else held.in_directory(name))
                for name, free in capacity.nvme.items()
            },
        )
    )
    if ranks is not None:
        budget = ranks.share_budget(budget, device_is_shared=accelerator.unified, held=held)
    left = {name: max(limit - on_drives.get(name, 0), 0) for name, limit in budget.nvme.items()}
    return replace(budget, host=max(budget.host - on_host, 0), nvme=left)


@contextmanager
def refusing_beside(built: BuiltModel | None) -> Iterator[None]:
    """Let a refusal in the body count what a model takes of the budget that was built on drives."""
    try:
        yield
    except CapacityError as error:
        on_host, on_drives = _held_by(built)
        held = on_host if error.tier == Tier.HOST.name else sum(on_drives.values())
        if error.tier == Tier.DEVICE.name or not held:
            raise
        raise error.beside("the model as it was built", held) from None


def _held_by(built: BuiltModel | None) -> tuple[int, dict[str, int]]:
    """Return the bytes of host memory, and of each directory, that a model takes that was built on
    drives.
    """
    used = () if built is None else built.ledger.usage()
    on_host = sum(usage.held for usage in used if usage.tier is Tier.HOST)
    return on_host, {usage.directory: usage.held for usage in used if usage.directory is not None}


def _spec(built: BuiltModel | None, parameter: torch.nn.Parameter) -> ShardSpec | None:
    """Return how a parameter was cut when it was built; None where it is to be cut."""
    return built.spec_of(parameter) if built is not None and parameter in built else None


def _digest(built: BuiltModel | None, parameter: torch.nn.Parameter) -> str:
    """Return words that differ where values do."""
    return (
        built.digest_of(parameter)
        if built is not None and parameter in built
        else digest_of(parameter)
    )


def _endurance(config: EngineConfig, budget: ResolvedBudget) -> Mapping[str, int]:
    """Return what may be written to each directory of the budget of which that was stated."""
    stated = config.storage.endurance
    if not isinstance(stated, Mapping):
        return {} if stated is None else dict.fromkeys(budget.nvme, stated)
    unknown = [directory for directory in stated if directory not in budget.nvme]
    if unknown:
        raise ConfigError.unknown_name(
            field="storage.endurance", name=unknown[0], known=budget.nvme
        )
    return {directory: stated[directory] for directory in budget.nvme if directory in stated}
