"""The share and the schedule of *Deep Optimizer States* as published: references to compare with.

Pure. Two independent halves of that paper: `eq1` takes its formula for the share and our layout,
`algorithm1` its layout and a given stride.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from infinity_engine.errors import ConfigError
from infinity_engine.optim.policies.interleaved import interleaved
from infinity_engine.optim.policy import Limits, OffloadPolicy, split_residents
from infinity_engine.plan.ops import (
    DownloadParameters,
    DownloadStates,
    Op,
    UpdateOnDevice,
    UpdateOnHost,
    UploadParameters,
    UploadStates,
)
from infinity_engine.plan.rates import Rates
from infinity_engine.plan.step import StepPlan, SubgroupSpec
from infinity_engine.plan.tier import Tier

__all__ = ["ALGORITHM1", "EQ1", "algorithm1", "eq1", "eq1_ratio"]

_FP32_BYTES = 4


def eq1_ratio(rates: Rates, *, downscale_params_per_s: float | None = None) -> Fraction:
    """Return k of the paper's Eq. 1: the subgroups that the CPU updates for each one on the device.

    All rates are those of one rank. Without a rate of downscaling, the CPU's update writes the
    16-bit copy itself.
    """
    needed = (
        "host_update_params_per_s",
        "device_update_params_per_s",
        "h2d_bytes_per_s",
        "d2h_bytes_per_s",
    )
    for name in needed:
        if getattr(rates, name) is None:
            raise ConfigError(field=f"Rates.{name}", value=None, expected="a rate: Eq. 1 needs it")
    host, device, up, down = (Fraction(getattr(rates, name)) for name in needed)
    # B: the paper counts the link in fp32 parameters, and both ways alike.
    link = min(up, down) / _FP32_BYTES
    downscale = (
        Fraction(0) if downscale_params_per_s is None else 1 / Fraction(downscale_params_per_s)
    )
    cpu = 1 / host + downscale - 1 / (2 * link)
    if cpu <= 0:
        expected = (
            "a CPU that takes longer for a parameter than the link takes for its 16-bit copy: "
            "otherwise Eq. 1 has no solution"
        )
        raise ConfigError(
            field="Rates.host_update_params_per_s",
            value=rates.host_update_params_per_s,
            expected=expected,
        )
    # Three fp32 streams come up: master and both moments.
    return (3 / link + 1 / device) / cpu


def eq1(
    *, downscale_params_per_s: float | None = None, resident: float = 0.0, name: str = "eq1"
) -> OffloadPolicy:
    """Return the policy that lets Eq. 1's share visit, 1 / (k + 1), as `interleaved` does it."""

    def decide(subgroups: Sequence[SubgroupSpec], rates: Rates, limits: Limits) -> StepPlan:
        share = 1 / (eq1_ratio(rates, downscale_params_per_s=downscale_params_per_s) + 1)
        return interleaved(share, resident=resident).decide(subgroups, rates, limits)

    return OffloadPolicy(name, decide)


def algorithm1(stride: int, *, resident: float = 0.0, name: str = "algorithm1") -> OffloadPolicy:
    """Return the paper's Algorithm 1: each `stride`-th subgroup visits, in its one staging set.

    The CPU goes through the subgroups in order and launches what the listing launches, where the
    listing does. Updates on the device do not hold the CPU up. The ops that the listing forgets are
    added at its end: the last visitor is downloaded, and the parameters that the CPU updated last
    are uploaded. Downscaling costs nothing here, as our updates write 16 bits.
    """
    if stride < 2:
        expected = (
            "2 or more: the listing fetches states only while the CPU updates an earlier subgroup"
        )
        raise ConfigError(field="algorithm1 stride", value=stride, expected=expected)

    def decide(subgroups: Sequence[SubgroupSpec], rates: Rates, limits: Limits) -> StepPlan:
        others, residents = split_residents(subgroups, resident)
        return _Listing(others, residents, stride, limits).plan()

    return OffloadPolicy(name, decide)


EQ1 = eq1()
ALGORITHM1 = algorithm1(2)


class _Listing:
    """The loop of Algorithm 1, recording the ops that it launches."""

    def __init__(
        self,
        others: Sequence[SubgroupSpec],
        residents: Sequence[SubgroupSpec],
        stride: int,
        limits: Limits,
    ) -> None:
        self._subgroups = (*others, *residents)
        self._visitors = others[stride - 1 :: stride]
        self._limits = limits
        self._per_parameter = limits.per_parameter
        self._ops: list[Op] = []
        # the CPU's newest update: the CPU launches the next ops after it
        self._cpu_at: tuple[int, ...] = ()
        self._staged: SubgroupSpec | None = None
        self._set_at: tuple[int, ...] = ()  # the newest op in the staging set
        # updated by the CPU, not uploaded
        self._downscaled: list[tuple[SubgroupSpec, tuple[int, ...]]] = []
        to_fetch = iter(self._visitors)
        for number, subgroup in enumerate(others):
            # The listing's condition: one in `stride`, not one for `stride` others.
            if (number + 1) % stride == 0:
                self._update_on_device(subgroup, staging=0, after=self._set_at)
                continue
            # At the beginning of each group of `stride`: the last visitor leaves, the next one
            # comes.
            if number % stride == 0:
                self._flush()
                self._prefetch(next(to_fetch, None))
            self._update_on_host(subgroup)
        for subgroup in residents:
            self._update_on_device(subgroup, staging=None, after=())
        # The ops that the listing forgets.
        self._flush()
        self._upload_parameters()

    def plan(self) -> StepPlan:
        largest = max((subgroup.numel for subgroup in self._visitors), default=0)
        return StepPlan(
            subgroups=self._subgroups,
            ops=tuple(self._ops),
            staging_bytes=(self._limits.device_bytes(largest),) if largest else (),
            parameters=self._limits.parameters,
        )

    def _update_on_device(
        self, subgroup: SubgroupSpec, *, staging: int | None, after: tuple[int, ...]
    ) -> None:
        launched = self._launched(after)
        added = self._add(
            UpdateOnDevice(
                subgroup=subgroup.index, staging=staging, params=subgroup.numel, after=launched
            )
        )
        if self._at_home:
            nbytes = self._limits.parameter_bytes(subgroup)
            added = self._add(
                DownloadParameters(
                    subgroup=subgroup.index,
                    staging=staging,
                    nbytes=nbytes,
                    pieces=subgroup.pieces,
                    after=self._launched(added),
                )
            )
        if staging is not None:
            self._set_at = added
        self._upload_parameters()

    def _update_on_host(self, subgroup: SubgroupSpec) -> None:
        self._cpu_at = self._add(UpdateOnHost(subgroup=subgroup.index, params=subgroup.numel))
        self._downscaled.append((subgroup, self._cpu_at))

    def _flush(self) -> None:
        if self._staged is not None:
            nbytes = self._staged.numel * self._per_parameter.states
            after = self._launched(self._set_at)
            self._set_at = self._add(
                DownloadStates(subgroup=self._staged.index, staging=0, nbytes=nbytes, after=after)
            )
            self._staged = None

    def _prefetch(self, subgroup: SubgroupSpec | None) -> None:
        if subgroup is not None:
            nbytes = subgroup.numel * self._per_parameter.states
            after = self._launched(self._set_at)
            self._set_at = self._add(
                UploadStates(subgroup=subgroup.index, staging=0, nbytes=nbytes, after=after)
            )
            self._staged = subgroup

    def _upload_parameters(self) -> None:
        for subgroup, updated in () if self._at_home else self._downscaled:
            nbytes = self._limits.parameter_bytes(subgroup)
            self._add(
                UploadParameters(
                    subgroup=subgroup.index, nbytes=nbytes, pieces=subgroup.pieces, after=updated
                )
            )
        self._downscaled.clear()

    @property
    def _at_home(self) -> bool:
        return self._limits.parameters is not Tier.DEVICE

    def _launched(self, after: tuple[int, ...]) -> tuple[int, ...]:
        # After what it needs, and after the CPU's newest update: the CPU launches it then.
        return tuple(dict.fromkeys((*after, *self._cpu_at)))

    def _add(self, op: Op) -> tuple[int, ...]:
        self._ops.append(op)
        return (len(self._ops) - 1,)
