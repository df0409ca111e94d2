"""What a machine can do: measured bandwidths and update rates, as one rank sees them.

Pure data with a versioned JSON form. Measures nothing and predicts nothing: calibration fills it
in, planners, policies and the simulator read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

from infinity_engine.errors import ConfigError
from infinity_engine.plan.mappings import Directories, known_mapping
from infinity_engine.units import parse_rate, positive

__all__ = ["DriveRates", "Rates"]

# Of the JSON form: raised when a rate changes its meaning.
_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class DriveRates:
    """Bytes per second of one directory's drive, or text like "6.5 GB/s"; None: not measured."""

    read_bytes_per_s: float | None = None  # nothing but reads
    write_bytes_per_s: float | None = None  # nothing but writes
    # as many bytes read as written, at once: the sum of both
    mixed_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        _check_rates(self, field="DriveRates")

    def divided(self, users: int) -> DriveRates:
        """Return what each of so many ranks has that use the drive at once."""
        return DriveRates(
            **{name: _part(getattr(self, name), users) for name in _names(DriveRates)}
        )

    def both_at_once(self, reads: float = 1, writes: float = 1) -> DriveRates:
        """Return what reads and writes get on average while the drive is to do so much of both.

        Together they each get half of the mixed rate; where it was not measured, they take turns.
        What is left when one of them has ended gets the drive alone.
        """
        read, write, mixed = self.read_bytes_per_s, self.write_bytes_per_s, self.mixed_bytes_per_s
        if read is None or write is None:
            return self
        # Taking turns, reads and writes get equal bytes, so their times add up.
        half = 1 / (1 / read + 1 / write) if mixed is None else mixed / 2
        both = min(read, half), min(write, half)
        reading, writing = _on_average((reads, writes), both=both, alone=(read, write))
        return replace(self, read_bytes_per_s=reading, write_bytes_per_s=writing)

    def reading_more(self, more: float, *, reads: float, writes: float) -> DriveRates:
        """Return what `more` reads get on average that come after `reads`, and what the writes
        get beside them all.
        """
        every, first = self.both_at_once(reads + more, writes), self.both_at_once(reads, writes)
        if every.read_bytes_per_s is None or first.read_bytes_per_s is None:
            return every
        more_s = (reads + more) / every.read_bytes_per_s - reads / first.read_bytes_per_s
        return replace(every, read_bytes_per_s=more / more_s)

    def seconds(self, read_bytes: int, written_bytes: int) -> float | None:
        """Return what so many bytes take, both at once if that was measured; None: unknown."""
        # The mixed rate counts reads and writes together.
        both = 0 if self.mixed_bytes_per_s is None else min(read_bytes, written_bytes)
        parts = (
            (2 * both, self.mixed_bytes_per_s),
            (read_bytes - both, self.read_bytes_per_s),
            (written_bytes - both, self.write_bytes_per_s),
        )
        # No bytes need no rate.
        if any(nbytes and rate is None for nbytes, rate in parts):
            return None
        return sum(nbytes / rate for nbytes, rate in parts if rate is not None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """What one rank gets while all ranks of its machine do the same; None where not measured.

    The links count bytes in the direction of their name: h2d from host to device, d2h from device
    to host. An update rate counts the parameters that are updated in that home. Bytes
    per second may be given as text, such as "55 GB/s". What each op costs before it moves anything
    is in seconds; None: nothing.
    """

    h2d_bytes_per_s: float | None = None
    d2h_bytes_per_s: float | None = None
    duplex_h2d_bytes_per_s: float | None = None  # while bytes go from device to host as well
    duplex_d2h_bytes_per_s: float | None = None  # while bytes go from host to device as well
    dram_bytes_per_s: float | None = None  # reads and writes of host memory, added up
    host_update_params_per_s: float | None = None
    device_update_params_per_s: float | None = None
    host_start_s: float | None = None  # each update on the host takes so much, however small
    device_start_s: float | None = None  # likewise, to launch one on the device
    copy_start_s: float | None = None  # likewise, to start a copy over a link
    io_start_s: float | None = None  # likewise, to start a read or a write of the drives
    nvme: Mapping[str, DriveRates] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_rates(self, field="Rates")
        object.__setattr__(self, "nvme", Directories(self.nvme, field="Rates.nvme"))

    def divided(self, ranks: int, *, users: Mapping[str, int] | None = None) -> Rates:
        """Return what each of so many ranks of a machine has, where these are what one has alone.

        They share host memory, its updates and the drives, each drive as many as `users` says, or
        all. Links and devices are their own.
        """
        return replace(
            self,
            dram_bytes_per_s=_part(self.dram_bytes_per_s, ranks),
            # Each rank has its part of the threads.
            host_update_params_per_s=_part(self.host_update_params_per_s, ranks),
            nvme={
                name: drive.divided(ranks if users is None else users[name])
                for name, drive in self.nvme.items()
            },
        )

    def both_at_once(
        self,
        reads: float = 1,
        writes: float = 1,
        *,
        up_and_down: tuple[float, float] | None = None,
    ) -> Rates:
        """Return the rates while both directions of the links, and of the drives, are in use, as
        in an update, in which drives do so much of both.

        With `up_and_down`, links go on alone, too, where one way has more to move than the other.
        """
        h2d, d2h = self.h2d_bytes_per_s, self.d2h_bytes_per_s
        up = _slower(h2d, self.duplex_h2d_bytes_per_s)
        down = _slower(d2h, self.duplex_d2h_bytes_per_s)
        if up_and_down and h2d and d2h and up and down:
            up, down = _on_average(up_and_down, both=(up, down), alone=(h2d, d2h))
        return replace(
            self,
            h2d_bytes_per_s=up,
            d2h_bytes_per_s=down,
            nvme={name: drive.both_at_once(reads, writes) for name, drive in self.nvme.items()},
        )

    @classmethod
    def from_mapping(cls, mapping: object, *, field: str = "rates") -> Rates:
        """Return the rates of a JSON-like `mapping`; errors name the place in it, below `field`.

        Raises:
            ConfigError: a name or a value is wrong, or the mapping is of another version than this
                one writes.
        """
        # What is no mapping at all is refused below, with a better error.
        version = mapping.get("version") if isinstance(mapping, Mapping) else _VERSION
        if isinstance(version, bool) or version != _VERSION:
            expected = (
                f"version {_VERSION}, the one that this release reads; calibrate again to get it"
            )
            raise ConfigError(field=f"{field}.version", value=version, expected=expected)
        known = known_mapping(mapping, field=field, known=("version", *_names(cls)))
        given = {name: value for name, value in known.items() if name != "version"}
        drives = given.pop("nvme", {})
        if not isinstance(drives, Mapping):
            expected = "a mapping from directories to the rates of their drives"
            raise ConfigError(field=f"{field}.nvme", value=drives, expected=expected)
        nvme = {}
        for directory, rates in drives.items():
            place = f"{field}.nvme[{directory!r}]"
            nvme[directory] = DriveRates(
                **_rates(known_mapping(rates, field=place, known=_names(DriveRates)), place)
            )
        return cls(**_rates(given, field), nvme=Directories(nvme, field=f"{field}.nvme"))

    def to_mapping(self) -> dict[str, object]:
        """Return them as from_mapping reads them, ready for JSON."""
        scalars = {name: getattr(self, name) for name in _names(type(self)) if name != "nvme"}
        drives = {
            directory: {name: getattr(drive, name) for name in _names(DriveRates)}
            for directory, drive in self.nvme.items()
        }
        return {"version": _VERSION, **scalars, "nvme": drives}


def _on_average(
    amounts: tuple[float, float], *, both: tuple[float, float], alone: tuple[float, float]
) -> tuple[float, float]:
    """Return what two ways get on average: both at once, then what one of them has left alone."""
    (one, other), (one_rate, other_rate) = amounts, both
    one_s, other_s = one / one_rate, other / other_rate
    if one_s > other_s and one_rate != alone[0]:  # else rounding would change it
        one_rate = one / (other_s + (one - one_rate * other_s) / alone[0])
    elif other_s > one_s and other_rate != alone[1]:
        other_rate = other / (one_s + (other - other_rate * one_s) / alone[1])
    return one_rate, other_rate


def _slower(alone: float | None, beside: float | None) -> float | None:
    """Return what one way gets beside the other: not more than alone, however it was measured."""
    return min((rate for rate in (alone, beside) if rate is not None), default=None)


def _part(rate: float | None, users: int) -> float | None:
    return None if rate is None else rate / users


def _names(kind: type[Rates | DriveRates]) -> tuple[str, ...]:
    return tuple(item.name for item in fields(kind))


def _check_rates(record: Rates | DriveRates, *, field: str) -> None:
    given = {name: getattr(record, name) for name in _names(type(record)) if name != "nvme"}
    for name, rate in _rates(given, field).items():
        # As numbers: rates may be given as text.
        object.__setattr__(record, name, rate)


def _rates(given: Mapping[str, object], field: str) -> dict[str, float | None]:
    return {name: _rate(value, field=f"{field}.{name}") for name, value in given.items()}


def _rate(value: object, *, field: str) -> float | None:
    """Return a rate in the unit that the end of `field` names; only bytes may be given as text."""
    if value is None:
        return None
    if field.endswith("_bytes_per_s"):
        return parse_rate(value, field=field)
    if field.endswith("_start_s"):
        return positive(value, field=field, expected="a positive number of seconds")
    return positive(value, field=field, expected="a positive number of parameters per second")
