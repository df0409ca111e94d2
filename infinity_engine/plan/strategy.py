"""Which strategy is asked for: where optimizer states stay and updates run, by name and settings.

Pure data, checked when made; the policies that carry them out are elsewhere. Chosen by users,
config and planner.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import ClassVar

from infinity_engine.errors import ConfigError
from infinity_engine.plan.mappings import known_mapping

__all__ = [
    "STRATEGIES",
    "Auto",
    "DeviceOnly",
    "HostOnly",
    "Interleaved",
    "NvmeStreamed",
    "StaticSplit",
    "Strategy",
    "parse_strategy",
]


@dataclass(frozen=True, slots=True)
class Strategy:
    """What all strategies are: a name, and fields for the settings that it has."""

    name: ClassVar[str]

    def to_plain(self) -> str | dict[str, object]:
        """Return it as parse_strategy reads it, for JSON: its name, or a mapping with settings."""
        settings = {item.name: getattr(self, item.name) for item in fields(self)}
        plain = {
            key: it.to_plain() if isinstance(it, Strategy) else it for key, it in settings.items()
        }
        return {"name": self.name, **plain} if plain else self.name


@dataclass(frozen=True, slots=True)
class Auto(Strategy):
    """The planner chooses, from measured rates and the budget."""

    name: ClassVar[str] = "auto"


@dataclass(frozen=True, slots=True)
class DeviceOnly(Strategy):
    """All states stay on the device and are updated there."""

    name: ClassVar[str] = "device_only"


@dataclass(frozen=True, slots=True)
class HostOnly(Strategy):
    """All states stay on the host and are updated there."""

    name: ClassVar[str] = "host_only"


@dataclass(frozen=True, kw_only=True, slots=True)
class StaticSplit(Strategy):
    """A fixed part of the states stays on the device and is updated there, the rest on the host.

    `ratio` is the device's part, from 0 to 1.
    """

    name: ClassVar[str] = "static_split"
    ratio: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "ratio", _part(self.ratio, field="StaticSplit.ratio"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Interleaved(Strategy):
    """States stay on the host; some subgroups visit the device while the host updates others.

    Which part visits is said as `share`, from 0 to 1, or as `stride`, one subgroup out of so many;
    None for both leaves it to the measured rates. `resident` is the part of all states that stays
    on the device instead, and is not counted by the other two.
    """

    name: ClassVar[str] = "interleaved"
    share: float | None = None
    stride: int | None = None
    resident: float = 0.0

    def __post_init__(self) -> None:
        if self.share is not None:
            object.__setattr__(self, "share", _part(self.share, field="Interleaved.share"))
        if self.stride is not None:
            stride: object = self.stride  # as it was given
            if isinstance(stride, bool) or not isinstance(stride, int) or stride < 1:
                expected = "a whole number, 1 or more"
                raise ConfigError(field="Interleaved.stride", value=stride, expected=expected)
        if self.share is not None and self.stride is not None:
            expected = (
                f"None beside share={self.share:g}: both say which part visits the device, so give "
                "one"
            )
            raise ConfigError(field="Interleaved.stride", value=self.stride, expected=expected)
        object.__setattr__(self, "resident", _part(self.resident, field="Interleaved.resident"))


@dataclass(frozen=True, kw_only=True, slots=True)
class NvmeStreamed(Strategy):
    """States stay on NVMe and pass the host for each update.

    `update` says where updates run: HostOnly, or Interleaved for host and device at once.
    """

    name: ClassVar[str] = "nvme_streamed"
    update: HostOnly | Interleaved = HostOnly()

    def __post_init__(self) -> None:
        update = parse_strategy(self.update, field="NvmeStreamed.update")
        if not isinstance(update, HostOnly | Interleaved):
            raise ConfigError(
                field="NvmeStreamed.update", value=self.update, expected="host_only or interleaved"
            )
        object.__setattr__(self, "update", update)


STRATEGIES: tuple[type[Strategy], ...] = (
    Auto,
    DeviceOnly,
    HostOnly,
    StaticSplit,
    Interleaved,
    NvmeStreamed,
)


def parse_strategy(given: object, *, field: str = "strategy") -> Strategy:
    """Return the strategy that is meant: one already, a name, or a mapping with settings.

    Raises:
        ConfigError: it is none of these, or a setting of it is wrong; names the place, below
            `field`.
    """
    if isinstance(given, Strategy):
        return given
    if not isinstance(given, str | Mapping):
        expected = (
            "a name such as 'auto', a mapping such as {'name': 'static_split', 'ratio': 0.5}, or a "
            "Strategy"
        )
        raise ConfigError(field=field, value=given, expected=expected)
    name = given if isinstance(given, str) else given.get("name")
    kind = next((kind for kind in STRATEGIES if kind.name == name), None)
    if kind is None:
        place = field if isinstance(given, str) else f"{field}.name"
        raise ConfigError.unknown_name(
            field=place, name=name, known=[kind.name for kind in STRATEGIES]
        )
    known = known_mapping(
        {} if name is given else given, field=field, known=["name", *(f.name for f in fields(kind))]
    )
    settings = {key: value for key, value in known.items() if key != "name"}
    # Settings without a default have to be given; a bare name then does not say enough.
    missing = [
        item.name for item in fields(kind) if item.default is MISSING and item.name not in settings
    ]
    if missing:
        expected = (
            f"a mapping that gives its {missing[0]} too: {{'name': '{kind.name}', '{missing[0]}': "
            f"...}}"
        )
        raise ConfigError(field=field, value=given, expected=expected)
    try:
        return kind(**settings)
    except ConfigError as error:
        below = error.field.partition(".")[2]  # The class that refuses knows only its own name.
        raise ConfigError(
            field=f"{field}.{below}", value=error.value, expected=error.expected
        ) from None


def _part(value: object, *, field: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ConfigError(field=field, value=value, expected="a number from 0 to 1")
    return float(value)
