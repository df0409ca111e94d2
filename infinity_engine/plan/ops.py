"""The steps of an update phase: each is one piece of work in one lane, after others.

Pure data. An op names other ops by their numbers, which are their places in the plan; step.py sees
to it that they fit together. Made by policies, run by the executor, priced by timing.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import ClassVar

from infinity_engine.errors import ConfigError

__all__ = [
    "CopyOp",
    "DownloadParameters",
    "DownloadStates",
    "Lane",
    "LoadStates",
    "Op",
    "StoreStates",
    "UpdateOnDevice",
    "UpdateOnHost",
    "UpdateOp",
    "UploadParameters",
    "UploadStates",
]


class Lane(Enum):
    """What does the work.

    The ops of one lane follow one another in the plan's order; lanes work at the same time.
    """

    HOST = "host"  # The CPU's updates.
    DEVICE = "device"  # The device's updates.
    H2D = "h2d"  # The link from host to device.
    D2H = "d2h"  # The link from device to host.
    NVME_READ = "nvme read"  # From the drives to the host.
    NVME_WRITE = "nvme write"  # From the host to the drives.

    # By identity, as each member is one object: Enum's own hash runs in Python at each look-up.
    __hash__ = object.__hash__

    @property
    def label(self) -> str:
        """What pages call it."""
        return _LABELS[self]


_LABELS = MappingProxyType(
    {
        Lane.HOST: "CPU",
        Lane.DEVICE: "device",
        Lane.H2D: "to the device",
        Lane.D2H: "to the host",
        Lane.NVME_READ: "drives read",
        Lane.NVME_WRITE: "drives write",
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Op:
    """One piece of work on one subgroup.

    It starts once its lane is free and the ops `after` have ended.
    """

    lane: ClassVar[Lane]
    subgroup: int
    after: tuple[int, ...] = ()

    @property
    def starts(self) -> int:
        """How many times something is started for it, which costs the same whatever its size."""
        return 1

    @property
    def name(self) -> str:
        """What the op is called in print and in JSON."""
        return type(self).__name__

    @property
    def amount(self) -> int:
        """How much work it is, in what its lane's rate counts: bytes or parameters.

        Each kind says that.
        """
        raise NotImplementedError(f"{self.name} is no kind of op: expected a CopyOp or an UpdateOp")


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyOp(Op):
    """Bytes go over a link."""

    nbytes: int

    def __post_init__(self) -> None:
        if self.nbytes < 1:
            raise _too_little(f"{self.name}.nbytes", self.nbytes, unit="bytes")

    @property
    def amount(self) -> int:
        """Its bytes."""
        return self.nbytes


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateOp(Op):
    """The optimizer's step for so many parameters."""

    params: int

    def __post_init__(self) -> None:
        if self.params < 1:
            raise _too_little(f"{self.name}.params", self.params, unit="parameters")

    @property
    def amount(self) -> int:
        """Its parameters."""
        return self.params


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadStates(CopyOp):
    """Read a subgroup's offloaded part into a host buffer; no bytes where it only leaves some."""

    lane: ClassVar[Lane] = Lane.NVME_READ
    buffer: int

    def __post_init__(self) -> None:
        if self.nbytes < 0:
            raise ConfigError(
                field=f"{self.name}.nbytes", value=self.nbytes, expected="0 or more bytes"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreStates(CopyOp):
    """Write the offloaded, updated part of a subgroup to the drives; its buffer is empty then."""

    lane: ClassVar[Lane] = Lane.NVME_WRITE
    buffer: int


@dataclass(frozen=True, kw_only=True, slots=True)
class UploadStates(CopyOp):
    """The states of a subgroup that visits go into a staging set on the device."""

    lane: ClassVar[Lane] = Lane.H2D
    staging: int


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateOnDevice(UpdateOp):
    """The device updates a subgroup, and writes what modules compute with or fetch.

    What they fetch, DownloadParameters takes home. `staging` is the set that a visiting subgroup
    is in, None for one with states that stay on the device.
    """

    lane: ClassVar[Lane] = Lane.DEVICE
    staging: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class DownloadParameters(CopyOp):
    """Updated parameters go from the device to the host, where modules or StoreStates take them, a
    copy for each of so many `pieces`.

    `staging` is the set that a visiting subgroup is in, None for one with states that stay on the
    device.
    """

    lane: ClassVar[Lane] = Lane.D2H
    staging: int | None = None
    pieces: int = 1

    @property
    def starts(self) -> int:
        """Its copies."""
        return self.pieces


@dataclass(frozen=True, kw_only=True, slots=True)
class DownloadStates(CopyOp):
    """The updated states of a subgroup that visited go home."""

    lane: ClassVar[Lane] = Lane.D2H
    staging: int


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateOnHost(UpdateOp):
    """The CPU updates a subgroup, and writes what modules, UploadParameters or StoreStates take."""

    lane: ClassVar[Lane] = Lane.HOST


@dataclass(frozen=True, kw_only=True, slots=True)
class UploadParameters(CopyOp):
    """The parameters that the CPU updated go to where modules compute with them, a copy for each of
    so many `pieces`.
    """

    lane: ClassVar[Lane] = Lane.H2D
    pieces: int = 1

    @property
    def starts(self) -> int:
        """Its copies."""
        return self.pieces


def _too_little(field: str, number: int, *, unit: str) -> ConfigError:
    return ConfigError(field=field, value=number, expected=f"1 or more {unit}")
