"""How much of each tier may be taken: Budget as it was asked for, ResolvedBudget in bytes.

Pure data: asks no machine what it has and looks at no path on disk. Budgets come from users and
config; engine and command line resolve them with the machine's Capacity before anything is planned.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from types import MappingProxyType

from infinity_engine.errors import CapacityError, ConfigError
from infinity_engine.plan.mappings import Directories, known_mapping
from infinity_engine.plan.tier import Tier
from infinity_engine.units import parse_bytes

__all__ = ["Budget", "Capacity", "Percent", "ResolvedBudget"]

_PERCENT = re.compile(r"\s*([0-9]{1,3}(\.[0-9]+)?)\s*%\s*")


@dataclass(frozen=True, slots=True)
class Percent:
    """A part of what the machine has: `value` hundredths of it, more than 0 and at most 100."""

    value: Decimal

    def __post_init__(self) -> None:
        # Decimal also has NaN and infinities.
        if not (self.value.is_finite() and 0 < self.value <= 100):
            raise ConfigError(
                field="Percent", value=f"{self.value}%", expected="more than 0% and at most 100%"
            )

    def __str__(self) -> str:
        # Without an exponent: normalize() alone would write 100 as 1E+2.
        return f"{self.value.normalize():f}%"

    def of(self, nbytes: int) -> int:
        """Return this part of `nbytes`, rounded down to whole bytes."""
        # By fractions: int() of a float could be a byte off.
        return int(Fraction(self.value) * nbytes / 100)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Bytes:
    device: int
    host: int
    nvme: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # The subclass: errors name what the caller made.
        kind = type(self).__name__
        drives = {
            name: parse_bytes(size, field=f"{kind}.nvme[{name!r}]")
            for name, size in self.nvme.items()
        }
        # The class is frozen, and bytes may be given as text.
        object.__setattr__(self, "device", parse_bytes(self.device, field=f"{kind}.device"))
        object.__setattr__(self, "host", parse_bytes(self.host, field=f"{kind}.host"))
        object.__setattr__(self, "nvme", Directories(drives, field=f"{kind}.nvme"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Capacity(_Bytes):
    """The bytes that may be taken of one machine: what is free, less what the process needs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedBudget(_Bytes):
    """The bytes that are taken of each tier at most, and of each directory of NVMe."""


@dataclass(frozen=True, init=False, slots=True)
class Budget:
    """What may be taken of each tier: bytes, a percentage of the machine's, or None for all of it.

    Sizes may be given as text, "12GiB" or "80%". `nvme` maps directories to their sizes; the drives
    are used in that order, and none is used where none is named.
    """

    device: int | Percent | None
    host: int | Percent | None
    nvme: Mapping[str, int | Percent | None]

    def __init__(
        self,
        *,
        device: int | str | Percent | None = None,
        host: int | str | Percent | None = None,
        nvme: Mapping[str, int | str | Percent | None] = MappingProxyType({}),
    ) -> None:
        object.__setattr__(self, "device", _limit(device, field="Budget.device"))
        object.__setattr__(self, "host", _limit(host, field="Budget.host"))
        object.__setattr__(self, "nvme", _drive_limits(nvme, field="Budget.nvme"))

    @classmethod
    def from_mapping(cls, mapping: object, *, field: str = "budget") -> Budget:
        """Return the budget of a JSON-like `mapping`; errors name the place, below `field`."""
        given = known_mapping(mapping, field=field, known=("device", "host", "nvme"))
        # Parsed here already, so that an error names the place in the mapping.
        return cls(
            device=_limit(given.get("device"), field=f"{field}.device"),
            host=_limit(given.get("host"), field=f"{field}.host"),
            nvme=_drive_limits(given.get("nvme", {}), field=f"{field}.nvme"),
        )

    def to_mapping(self) -> dict[str, object]:
        """Return it as from_mapping reads it, ready for JSON."""
        return {
            "device": _plain(self.device),
            "host": _plain(self.host),
            "nvme": {directory: _plain(limit) for directory, limit in self.nvme.items()},
        }

    def resolve(self, capacity: Capacity) -> ResolvedBudget:
        """Return it in bytes of the machine that has `capacity`.

        Raises:
            CapacityError: more is asked of a tier than there is.
            ConfigError: `capacity` does not know one of the directories.
        """
        unknown = [directory for directory in self.nvme if directory not in capacity.nvme]
        if unknown:
            raise ConfigError.unknown_name(
                field="Budget.nvme", name=unknown[0], known=capacity.nvme
            )
        return ResolvedBudget(
            device=_resolve(self.device, capacity.device, Tier.DEVICE),
            host=_resolve(self.host, capacity.host, Tier.HOST),
            nvme={
                directory: _resolve(limit, capacity.nvme[directory], Tier.NVME, directory)
                for directory, limit in self.nvme.items()
            },
        )


def _limit(given: object, *, field: str) -> int | Percent | None:
    if given is None or isinstance(given, Percent):
        return given
    # bool first: Python's bool is an int.
    if isinstance(given, bool) or not isinstance(given, int | str):
        expected = (
            "bytes, text such as '12 GiB' or '80%', or None for all that the machine has to give"
        )
        raise ConfigError(field=field, value=given, expected=expected)
    if not isinstance(given, str) or "%" not in given:
        return parse_bytes(given, field=field)
    number = _PERCENT.fullmatch(given)
    if number is None or not 0 < Decimal(number[1]) <= 100:
        raise ConfigError(
            field=field, value=given, expected="more than 0% and at most 100%, such as '80%'"
        )
    return Percent(Decimal(number[1]))


def _drive_limits(given: object, *, field: str) -> Directories[int | Percent | None]:
    if not isinstance(given, Mapping):
        raise ConfigError(field=field, value=given, expected="a mapping from directories to sizes")
    limits = {
        directory: _limit(size, field=f"{field}[{directory!r}]")
        for directory, size in given.items()
    }
    return Directories(limits, field=field)


def _resolve(
    limit: int | Percent | None, free: int, tier: Tier, directory: str | None = None
) -> int:
    # None is all that there is, so it cannot be too much.
    if limit is None:
        return free
    nbytes = limit.of(free) if isinstance(limit, Percent) else limit
    if nbytes > free:
        change = f"lower this budget to {free} B or '100%', or make room on the machine"
        raise CapacityError(
            tier=tier.name, directory=directory, asked=nbytes, free=free, limit=free, change=change
        )
    return nbytes


def _plain(limit: int | Percent | None) -> int | str | None:
    return str(limit) if isinstance(limit, Percent) else limit
