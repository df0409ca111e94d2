"""One training iteration with optimizer states on the host, as Deep Optimizer States and its
baselines make it.

The update phase is a StepPlan, made by a policy and priced by the simulator; forward and backward
are sums of work over rates. All rates come from a MachineModel and a Reading of the paper's Table
1. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from infinity_engine.errors import ConfigError
from infinity_engine.optim.policies import algorithm1, interleaved, static_split
from infinity_engine.optim.policy import Limits, OffloadPolicy, split_residents
from infinity_engine.plan.ops import Lane, Op, UpdateOnDevice, UpdateOnHost, UploadParameters
from infinity_engine.plan.rates import Rates
from infinity_engine.plan.step import Home, StepPlan, SubgroupSpec
from infinity_engine.sim.bound import HOST_UPDATE_BYTES, VISIT_BYTES
from infinity_engine.sim.hardware import MachineModel
from infinity_engine.sim.simulate import Simulation, simulate
from infinity_engine.units import GB
from papers.machines import JLSE_H100, wire_bytes_per_s
from papers.transformer import Shape

__all__ = ["TABLE_1", "Iteration", "Job", "Method", "Reading", "Update", "blocking"]

_HALF_BYTES, _SINGLE_BYTES = 2, 4
_SUBGROUP = 100_000_000
_SEQUENCE = 2048
_NS = 10**9


class Method(Enum):
    """What is compared."""

    BLOCKING = "ZeRO-3 offload or TwinFlow"  # With a resident part of 0, or of more.
    ALGORITHM1 = "Deep Optimizer States"
    STATIC = "our static_split"  # With nothing resident, host_only.
    INTERLEAVED = "our interleaved"


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """The paper's rates that its text leaves open, one rank's; those in bytes count the 16-bit
    side.

    `flush_bytes_per_s` is G16 -> H32 and `upload_bytes_per_s` H32 -> G16, of the baseline.
    Collectives are added to the passes or hidden behind their work; `gathers` is how often
    parameters are gathered. `downscales` says whether the CPU's update in Algorithm 1 is followed
    by a downscale of its own.
    """

    flush_bytes_per_s: float = 4 * GB
    upload_bytes_per_s: float = 8 * GB
    collectives_hidden: bool = False
    gathers: int = 3
    downscales: bool = True


TABLE_1 = Reading()
"""The reading that all figures are computed with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A model trained on some GPUs of one node: what an iteration is of.

    `cores` is how many CPU cores a rank has, where 1 is the node's cores over its GPUs.
    """

    shape: Shape
    ranks: int = 4
    micro_batch: int = 1
    resident: float = 0.0
    subgroup: int = _SUBGROUP
    stride: int = 2
    cores: float = 1.0
    machine: MachineModel = JLSE_H100
    reading: Reading = TABLE_1

    @property
    def own_params(self) -> int:
        """The parameters that one rank updates."""
        return -(-self.shape.params // self.ranks)

    def subgroups(self) -> tuple[SubgroupSpec, ...]:
        """Return the parameters of one rank, in subgroups."""
        whole, rest = divmod(self.own_params, self.subgroup)
        sizes = [self.subgroup] * whole + ([rest] if rest else [])
        return tuple(
            SubgroupSpec(index=at, numel=numel, first_use=at) for at, numel in enumerate(sizes)
        )

    def rates(self, method: Method) -> Rates:
        """Return what the lanes of one rank do a second."""
        rates = self.machine.rates(self.ranks)
        update = self.machine.host.update_params_per_s / self.machine.gpus * self.cores
        if method is Method.BLOCKING:
            return replace(
                rates,
                host_update_params_per_s=update,
                h2d_bytes_per_s=self.reading.upload_bytes_per_s,
            )
        if method is Method.ALGORITHM1 and self.reading.downscales:
            scaled = _known(self.machine.host.downscale_params_per_s, "host.downscale_params_per_s")
            update = 1 / (1 / update + 1 / (scaled * self.cores))
        return replace(rates, host_update_params_per_s=update)

    def policy(self, method: Method) -> OffloadPolicy:
        """Return the policy that makes the method's update phase."""
        if method is Method.BLOCKING:
            return blocking(self.resident)
        if method is Method.ALGORITHM1:
            return algorithm1(self.stride, resident=self.resident)
        if method is Method.STATIC:
            return static_split(self.resident)
        return interleaved(resident=self.resident)

    def update(self, method: Method) -> Update:
        """Return the update phase, simulated."""
        rates = self.rates(method)
        # Beside states, a GPU has its parameters and gradients, of 16 bits each.
        memory = self.machine.gpu.memory_bytes - 2 * _HALF_BYTES * self.own_params
        plan = self.policy(method)(
            self.subgroups(), rates, Limits(resident_bytes=memory, staging_bytes=memory)
        )
        return Update(simulation=simulate(plan, rates), rates=rates)

    def iteration(self, method: Method) -> Iteration:
        """Return the three phases of an iteration."""
        update = self.update(method)
        forward, backward = self._passes()
        if method is Method.BLOCKING:
            flushed = self.own_params - update.simulation.plan.params_at(Home.RESIDENT)
            backward += flushed * _HALF_BYTES / self.reading.flush_bytes_per_s
        else:
            # Widened on the GPU, at a rate that does not show, and sent while backward goes on.
            flushed = update.simulation.plan.params_at(Home.HOST)
            backward = max(
                backward, flushed * _SINGLE_BYTES / _known(update.rates.d2h_bytes_per_s, "link")
            )
        return Iteration(forward=forward, backward=backward, update=update)

    @property
    def model_flops(self) -> float:
        """The work of one rank that counts as useful: without recomputation."""
        return 6 * self.shape.params * self.micro_batch * _SEQUENCE

    def _passes(self) -> tuple[float, float]:
        """Return the seconds of forward and backward, gradients not flushed."""
        work = self.shape.flops(self.micro_batch, _SEQUENCE) / _known(
            self.machine.gpu.achieved_flops_per_s, "gpu.achieved_flops_per_s"
        )
        others = (self.ranks - 1) / self.ranks
        collective = others * _HALF_BYTES * self.shape.params / wire_bytes_per_s(self.machine, 1)
        join = max if self.reading.collectives_hidden else _sum
        # One gather in forward, the rest and the gradients' reduction in backward.
        return join(work / 4, collective), join(work * 3 / 4, self.reading.gathers * collective)


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """A simulated update phase of one rank."""

    simulation: Simulation
    rates: Rates

    @property
    def seconds(self) -> float:
        """How long it takes: as simulated, or as long as its bytes of host memory do."""
        plan = self.simulation.plan
        touched = HOST_UPDATE_BYTES * plan.params_at(Home.HOST) + VISIT_BYTES * plan.params_at(
            Home.VISITING
        )
        return max(
            self.simulation.end_ns / _NS,
            touched / _known(self.rates.dram_bytes_per_s, "host.dram_bytes_per_s"),
        )

    @property
    def params_per_s(self) -> float:
        """How many parameters one rank updates in a second."""
        return sum(subgroup.numel for subgroup in self.simulation.plan.subgroups) / self.seconds

    def busy(self, lane: Lane) -> float:
        """Return the part of the time that a lane works."""
        return self.simulation.busy_ns[lane] / _NS / self.seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Iteration:
    """The phases of an iteration, in seconds but for the update."""

    forward: float
    backward: float
    update: Update

    @property
    def seconds(self) -> float:
        """The iteration, its phases one after the other."""
        return self.forward + self.backward + self.update.seconds


def blocking(ratio: float, *, name: str = "blocking") -> OffloadPolicy:
    """Return the baseline's policy: residents first, then the CPU, which waits for each upload
    before it goes on.

    As the paper draws it in Figure 5 (top): while the GPU updates its part the CPU is idle, and
    each subgroup that the CPU updated goes up before the next one is begun.
    """

    def decide(subgroups: Sequence[SubgroupSpec], rates: Rates, limits: Limits) -> StepPlan:
        del rates
        others, residents = split_residents(subgroups, ratio)
        ops: list[Op] = [UpdateOnDevice(subgroup=one.index, params=one.numel) for one in residents]
        for one in others:
            after = (len(ops) - 1,) if ops else ()
            ops.append(UpdateOnHost(subgroup=one.index, params=one.numel, after=after))
            nbytes = one.numel * limits.per_parameter.parameter
            ops.append(UploadParameters(subgroup=one.index, nbytes=nbytes, after=(len(ops) - 1,)))
        return StepPlan(subgroups=tuple(subgroups), ops=tuple(ops), parameters=limits.parameters)

    return OffloadPolicy(name, decide)


def _sum(one: float, other: float) -> float:
    return one + other


def _known(rate: float | None, name: str) -> float:
    if rate is None:
        raise ConfigError(field=name, value=None, expected="a rate: an iteration needs it")
    return rate
