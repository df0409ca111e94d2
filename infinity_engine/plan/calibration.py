"""What was measured of a machine, figure by figure, and the Rates for an optimizer and drives.

Pure data with a versioned JSON form; a figure that was not measured says why. Measures nothing and
opens no file: `infinity_engine.calibration` does. Planners, reports and the command line read it.
"""

from __future__ import annotations

import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from operator import mul
from types import MappingProxyType
from typing import Any, TypeVar

from infinity_engine.errors import ConfigError
from infinity_engine.plan.compute import BlockRates, BlockShape, ComputeRate
from infinity_engine.plan.mappings import Directories, FrozenMapping, known_mapping
from infinity_engine.plan.own_work import OwnWork
from infinity_engine.plan.rates import DriveRates, Rates
from infinity_engine.units import positive

__all__ = [
    "CALIBRATION_VERSION",
    "BlockFigures",
    "Calibration",
    "DriveFigures",
    "Figure",
    "HostUpdateFigures",
    "LinkFigures",
    "Unit",
]

CALIBRATION_VERSION = 6
"""Of the JSON form: raised when a figure comes, goes or changes its meaning."""

_BUSY = 0.1  # of all processors: others that use more disturb what is measured

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class Unit(Enum):
    """What a figure counts."""

    BYTES = "bytes/s"
    PARAMETERS = "parameters/s"
    FLOPS = "flop/s"
    PART = "of the rate alone"  # no rate itself: what is left of one beside other work
    SECONDS = "s"  # no rate either: what an operation costs, however small it is


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """The median of some rounds, their least and most; or no number, and the reason for that."""

    unit: Unit
    median: float | None = None
    least: float | None = None
    most: float | None = None
    rounds: int = 0
    reason: str | None = None

    def __post_init__(self) -> None:
        numbers = (self.least, self.median, self.most)
        if self.reason is not None:
            sound = bool(self.reason) and numbers == (None, None, None) and self.rounds == 0
        else:
            sound = (
                self.rounds >= 1
                and all(isinstance(number, int | float) for number in numbers)
                # Also refuses NaN and infinities.
                and 0 < numbers[0] <= numbers[1] <= numbers[2] <= sys.float_info.max  # type: ignore[operator]
            )
        if not sound:
            expected = "0 < least <= median <= most of 1 round or more, or a reason and no number"
            raise ConfigError(
                field="Figure", value=(*numbers, self.rounds, self.reason), expected=expected
            )

    @classmethod
    def of(cls, samples: Sequence[float], unit: Unit) -> Figure:
        """Return the figure of what each round gave."""
        return cls(
            unit=unit,
            median=statistics.median(samples),
            least=min(samples),
            most=max(samples),
            rounds=len(samples),
        )

    @classmethod
    def missing(cls, reason: str, unit: Unit) -> Figure:
        """Return the figure of what could not be measured."""
        return cls(unit=unit, reason=reason)

    @classmethod
    def from_mapping(cls, mapping: object, *, field: str, unit: Unit) -> Figure:
        """Return the figure that a JSON-like `mapping` says, which has to be of this unit."""
        given = dict(known_mapping(mapping, field=field, known=_names(cls)))
        said = given.pop("unit", None)
        # A figure in another unit is another figure: it is never converted.
        if said != unit.value:
            raise ConfigError(field=f"{field}.unit", value=said, expected=f"the unit {unit.value}")
        numbers = {
            name: given[name] for name in ("median", "least", "most") if given.get(name) is not None
        }
        for name, number in numbers.items():
            numbers[name] = positive(number, field=f"{field}.{name}")
        rounds, reason = given.get("rounds"), given.get("reason")
        if isinstance(rounds, bool) or not isinstance(rounds, int):
            raise ConfigError(field=f"{field}.rounds", value=rounds, expected="a whole number")
        if not isinstance(reason, str | None):
            raise ConfigError(field=f"{field}.reason", value=reason, expected="text, or none")
        return cls(unit=unit, rounds=rounds, reason=reason, **numbers)  # type: ignore[arg-type]

    def to_mapping(self) -> dict[str, object]:
        """Return it as from_mapping reads it, ready for JSON."""
        return {
            **{name: getattr(self, name) for name in _names(type(self))},
            "unit": self.unit.value,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkFigures:
    """Bytes per second between host and device, alone and both ways; the part left beside updates.

    Beside updates by all threads, that is. `start` is what the smallest copy takes.
    """

    h2d: Figure
    d2h: Figure
    duplex_h2d: Figure
    duplex_d2h: Figure
    h2d_beside_updates: Figure
    d2h_beside_updates: Figure
    start: Figure


@dataclass(frozen=True, kw_only=True, slots=True)
class HostUpdateFigures:
    """Parameters per second of a number of threads, and the part left while both links are busy.

    `summing`: the part left to updates that make the checksums of states on drives as well.
    """

    alone: Figure
    beside_copies: Figure
    summing: Figure


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockFigures:
    """Operations per second of a transformer block; a backward has twice as many as a forward.

    Again: of a forward that a backward runs again, until all is there that it needs.
    """

    forward: Figure
    backward: Figure
    again: Figure


@dataclass(frozen=True, kw_only=True, slots=True)
class DriveFigures:
    """Of the drive behind one directory.

    Mixed: as many bytes read as written at once, counted together. Start: what the smallest read
    takes.
    """

    drive: Mapping[str, str]  # what was measured: the drive's identity, and how it was used
    read: Figure
    write: Figure
    mixed: Figure
    mixed_beside_updates: Figure  # the part of it that is left while all threads update
    mixed_beside_blocks: Figure  # likewise, while transformer blocks compute on the host
    start: Figure
    # by optimizer and threads: the part left beside reads and writes
    host_updates: Mapping[str, Mapping[int, Figure]]
    blocks: Figure  # the part that transformer blocks on the host keep beside reads and writes
    # the part of all processors that other processes used, up to the end of its measuring; files
    # may lack it
    others_share: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "drive", FrozenMapping(self.drive))
        object.__setattr__(self, "host_updates", _frozen(self.host_updates))

    @classmethod
    def from_mapping(cls, mapping: object, *, field: str) -> DriveFigures:
        """Return the figures of a JSON-like `mapping`; errors name the place, below `field`."""
        names = [name for name in _names(cls) if name != "others_share"]
        given = _whole(mapping, field, names, optional=("others_share",))
        return cls(
            drive=_texts(given["drive"], f"{field}.drive"),
            host_updates=_table(
                given["host_updates"],
                f"{field}.host_updates",
                lambda row, place: _table(row, place, _figure(Unit.PART), key=_count),
            ),
            **_figures(_DRIVE_UNITS, given, field),
            others_share=_others_share(given, field),
        )

    def to_mapping(self) -> dict[str, object]:
        """Return them as from_mapping reads them, ready for JSON."""
        return {
            "drive": dict(self.drive),
            **{name: getattr(self, name).to_mapping() for name in _DRIVE_UNITS},
            "host_updates": {
                rule: {str(threads): figure.to_mapping() for threads, figure in row.items()}
                for rule, row in self.host_updates.items()
            },
            "others_share": self.others_share,
        }


_DRIVE_UNITS = MappingProxyType(
    {
        "read": Unit.BYTES,
        "write": Unit.BYTES,
        "mixed": Unit.BYTES,
        "mixed_beside_updates": Unit.PART,
        "mixed_beside_blocks": Unit.PART,
        "start": Unit.SECONDS,
        "blocks": Unit.PART,
    }
)
_LINK_UNITS = MappingProxyType(
    {
        **dict.fromkeys(("h2d", "d2h", "duplex_h2d", "duplex_d2h"), Unit.BYTES),
        **dict.fromkeys(("h2d_beside_updates", "d2h_beside_updates"), Unit.PART),
        "start": Unit.SECONDS,
    }
)
_UPDATE_UNITS = MappingProxyType(
    {"alone": Unit.PARAMETERS, "beside_copies": Unit.PART, "summing": Unit.PART}
)
_BLOCK_UNITS = MappingProxyType(dict.fromkeys(ComputeRate._fields, Unit.FLOPS))


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """All figures of one machine, its device and some directories, as one process gets them.

    Updates are of 16-bit parameters with fp32 masters and states, with gradients of 16 bits: 28
    bytes of memory traffic per parameter with Adam. Optimizers go by the names "adamw", "adam",
    "lion", "adagrad" and "sgd" (with momentum), dtypes by "fp32" and "bf16".
    """

    machine: Mapping[str, str]  # what tells this machine, its device and its software from others
    date: str  # of the measurement, as in ISO 8601
    # that the measured updates went through: a cache that holds more makes them too fast
    memory_bytes: int
    links: LinkFigures
    dram: Mapping[int, Figure]  # reads and writes added up, by the number of threads that sweep
    host_updates: Mapping[str, Mapping[int, HostUpdateFigures]]  # by optimizer and threads
    device_updates: Mapping[str, Figure]  # by optimizer
    host_start: Figure  # what the smallest update by all threads takes, likewise on the device
    device_start: Figure
    lease: Figure  # what the engine takes on the host to lease memory for one parameter
    matmul: Mapping[str, Figure]  # by dtype, on the device that modules compute on
    # likewise: transformer blocks, by dtype and shape
    blocks: Mapping[str, Mapping[BlockShape, BlockFigures]]
    all_gather: Figure
    reduce_scatter: Figure
    drives: Mapping[str, DriveFigures] = field(default_factory=dict)  # by directory
    # likewise, up to the end of all but the drives
    others_share: float = 0.0

    def __post_init__(self) -> None:
        for name in ("machine", "dram", "device_updates", "matmul"):
            object.__setattr__(self, name, FrozenMapping(getattr(self, name)))
        object.__setattr__(self, "host_updates", _frozen(self.host_updates))
        object.__setattr__(self, "blocks", _frozen(self.blocks))
        object.__setattr__(self, "drives", Directories(self.drives, field="Calibration.drives"))

    @classmethod
    def from_mapping(cls, mapping: object, *, field: str = "calibration") -> Calibration:
        """Return the calibration of a JSON-like `mapping`; errors name the place, below `field`.

        Raises:
            ConfigError: something is missing or wrong, or the mapping is of another version than
                this one writes.
        """
        # What is no mapping at all is refused below, with a better error.
        version = mapping.get("version") if isinstance(mapping, Mapping) else CALIBRATION_VERSION
        if isinstance(version, bool) or version != CALIBRATION_VERSION:
            expected = (
                f"version {CALIBRATION_VERSION}, the one that this release reads: run `infinity "
                "calibrate` again"
            )
            raise ConfigError(field=f"{field}.version", value=version, expected=expected)
        names = ("version", *(name for name in _names(cls) if name != "others_share"))
        given = _whole(mapping, field, names, optional=("others_share",))
        nbytes = given["memory_bytes"]
        if isinstance(nbytes, bool) or not isinstance(nbytes, int) or nbytes < 1:
            raise ConfigError(
                field=f"{field}.memory_bytes", value=nbytes, expected="a whole number of bytes"
            )
        drives = _table(
            given["drives"],
            f"{field}.drives",
            lambda drive, place: DriveFigures.from_mapping(drive, field=place),
        )
        return cls(
            machine=_texts(given["machine"], f"{field}.machine"),
            date=str(given["date"]),
            memory_bytes=nbytes,
            links=LinkFigures(**_record(_LINK_UNITS, given["links"], f"{field}.links")),
            dram=_table(given["dram"], f"{field}.dram", _figure(Unit.BYTES), key=_count),
            host_updates=_table(
                given["host_updates"],
                f"{field}.host_updates",
                lambda row, place: _table(
                    row,
                    place,
                    lambda figures, below: HostUpdateFigures(
                        **_record(_UPDATE_UNITS, figures, below)
                    ),
                    key=_count,
                ),
            ),
            device_updates=_table(
                given["device_updates"], f"{field}.device_updates", _figure(Unit.PARAMETERS)
            ),
            host_start=_figure(Unit.SECONDS)(given["host_start"], f"{field}.host_start"),
            device_start=_figure(Unit.SECONDS)(given["device_start"], f"{field}.device_start"),
            lease=_figure(Unit.SECONDS)(given["lease"], f"{field}.lease"),
            matmul=_table(given["matmul"], f"{field}.matmul", _figure(Unit.FLOPS)),
            blocks=_table(
                given["blocks"],
                f"{field}.blocks",
                lambda row, place: _table(
                    row,
                    place,
                    lambda figures, below: BlockFigures(**_record(_BLOCK_UNITS, figures, below)),
                    key=_shape,
                ),
            ),
            all_gather=_figure(Unit.BYTES)(given["all_gather"], f"{field}.all_gather"),
            reduce_scatter=_figure(Unit.BYTES)(given["reduce_scatter"], f"{field}.reduce_scatter"),
            drives=Directories(drives, field=f"{field}.drives"),
            others_share=_others_share(given, field),
        )

    def to_mapping(self) -> dict[str, object]:
        """Return it as from_mapping reads it, ready for JSON."""
        return {
            "version": CALIBRATION_VERSION,
            "machine": dict(self.machine),
            "date": self.date,
            "memory_bytes": self.memory_bytes,
            "links": _plain(self.links),
            # JSON has no numbers as keys.
            "dram": {str(threads): figure.to_mapping() for threads, figure in self.dram.items()},
            "host_updates": {
                rule: {str(threads): _plain(figures) for threads, figures in row.items()}
                for rule, row in self.host_updates.items()
            },
            "device_updates": {
                rule: figure.to_mapping() for rule, figure in self.device_updates.items()
            },
            "host_start": self.host_start.to_mapping(),
            "device_start": self.device_start.to_mapping(),
            "lease": self.lease.to_mapping(),
            "matmul": {dtype: figure.to_mapping() for dtype, figure in self.matmul.items()},
            "blocks": {
                dtype: {str(shape): _plain(figures) for shape, figures in row.items()}
                for dtype, row in self.blocks.items()
            },
            "all_gather": self.all_gather.to_mapping(),
            "reduce_scatter": self.reduce_scatter.to_mapping(),
            "drives": {directory: drive.to_mapping() for directory, drive in self.drives.items()},
            "others_share": self.others_share,
        }

    @property
    def most_others_share(self) -> float:
        """What other processes used of the processors while the machine, or one of the drives, was
        measured: the most of these.
        """
        return max([self.others_share, *(drive.others_share for drive in self.drives.values())])

    @property
    def is_disturbed(self) -> bool:
        """Whether other processes used so much of the machine that the figures are not its own."""
        return self.most_others_share > _BUSY

    def with_drives(self, drives: Mapping[str, DriveFigures]) -> Calibration:
        """Return the same with these directories, in place of those that it has."""
        return replace(self, drives=drives)

    def rates(
        self,
        *,
        optimizer: str = "adamw",
        threads: int | None = None,
        directories: Iterable[str] | None = None,
        beside_io: bool = False,
        beside_copies: bool = False,
    ) -> Rates:
        """Return the medians as rates, for updates by `threads` (by default the most measured).

        `directories` are those to use, by default all that were measured; those on one drive get
        equal parts of its rates. `beside_io` gives what updates and drives get while both work,
        `beside_copies` what updates and links get: each disturbance adds the time that it costs a
        parameter, and a drive or link is slowed as it was while all threads updated. A number of
        threads that was not measured is placed between its neighbours on a straight line.

        Raises:
            ConfigError: an optimizer or a directory was not measured, or there are no threads.
        """
        if optimizer not in self.host_updates:
            raise ConfigError.unknown_name(
                field="optimizer", name=optimizer, known=self.host_updates
            )
        if threads is not None and threads < 1:
            raise ConfigError(field="threads", value=threads, expected="1 or more")
        drives = self._drives(directories)
        updates = self.host_updates[optimizer]
        count = threads or max(updates, default=1)
        # Without an identity, which a file may lack, a directory has a drive of its own.
        drive_of = {name: drive.drive.get("drive", name) for name, drive in drives.items()}
        sharing = Counter(drive_of.values())
        parts = []  # of their rate that updates keep
        if beside_copies:
            copies = {number: figures.beside_copies for number, figures in updates.items()}
            parts.append(_part_at(copies, count))
        if beside_io:
            # Once a drive, however many of its directories are used: the least of theirs.
            least: dict[str, float] = {}
            for name, drive in drives.items():
                part = _part_at(drive.host_updates.get(optimizer, {}), count)
                least[drive_of[name]] = min(part, least.get(drive_of[name], part))
            parts += least.values()
        alone = _at({number: figures.alone for number, figures in updates.items()}, count)
        links = self.links
        h2d, d2h = links.h2d_beside_updates, links.d2h_beside_updates
        # The links are slowed as they were while all threads updated, whatever `threads` is.
        up, down = (_left(h2d), _left(d2h)) if beside_copies else (1.0, 1.0)
        device = self.device_updates.get(optimizer)
        return Rates(
            h2d_bytes_per_s=_times(links.h2d, up),
            d2h_bytes_per_s=_times(links.d2h, down),
            duplex_h2d_bytes_per_s=_times(links.duplex_h2d, up),
            duplex_d2h_bytes_per_s=_times(links.duplex_d2h, down),
            # The most of any number of threads: what the memory gives, not what a few threads
            # reach.
            dram_bytes_per_s=max(
                (figure.median for figure in self.dram.values() if figure.median), default=None
            ),
            host_update_params_per_s=_beside(alone, parts),
            device_update_params_per_s=None if device is None else device.median,
            host_start_s=self.host_start.median,
            device_start_s=self.device_start.median,
            copy_start_s=links.start.median,
            # The slowest: an operation goes over all drives, and ends with the last of them.
            io_start_s=max(
                (drive.start.median for drive in drives.values() if drive.start.median),
                default=None,
            ),
            nvme={
                name: _drive_rates(drive, beside_updates=beside_io).divided(sharing[drive_of[name]])
                for name, drive in drives.items()
            },
        )

    def own(self) -> OwnWork:
        """Return how long the engine's own work takes; no time where that was not measured."""
        return OwnWork(self.lease.median or 0.0)

    def flops_per_s(self, dtype: str) -> float | None:
        """Return the rate of matrix products in "fp32" or "bf16", None where not measured."""
        if dtype not in self.matmul:
            raise ConfigError.unknown_name(field="dtype", name=dtype, known=self.matmul)
        return self.matmul[dtype].median

    def block_rates(self, dtype: str) -> BlockRates | None:
        """Return how fast transformer blocks compute in "fp32" or "bf16", if that was measured."""
        measured = {}
        for shape, figures in self.blocks.get(dtype, {}).items():
            medians = [getattr(figures, way).median for way in ComputeRate._fields]
            if None not in medians:
                measured[shape] = ComputeRate(*medians)
        return BlockRates(measured) if measured else None

    def summing(self, *, optimizer: str = "adamw", threads: int | None = None) -> float:
        """Return the part of its rate that an update keeps which makes the checksums of states on
        drives as well; 1 where that was not measured.
        """
        updates = self.host_updates.get(optimizer, {})
        count = max(updates, default=1) if threads is None else threads
        return _part_at({number: figures.summing for number, figures in updates.items()}, count)

    def computing_beside_io(self, directories: Iterable[str] | None = None) -> float:
        """Return the part of their rate that modules on the host keep while the drives of these
        directories work, by default of all that were measured; 1 where none was.
        """
        # The one that takes the most: an operation goes over all drives, and takes as much for a
        # byte of each.
        return min((_left(drive.blocks) for drive in self._drives(directories).values()), default=1)

    def io_beside_computing(self, directories: Iterable[str] | None = None) -> float:
        """Return the part of what they move together that these drives keep while modules compute
        on the host, likewise.
        """
        drives = self._drives(directories).values()
        rates = [drive.mixed.median or 0.0 for drive in drives]
        left = [_left(drive.mixed_beside_blocks) for drive in drives]
        return sum(map(mul, rates, left)) / sum(rates) if any(rates) else 1.0

    def _drives(self, directories: Iterable[str] | None) -> Mapping[str, DriveFigures]:
        if directories is None:
            return self.drives
        wanted = tuple(directories)
        for directory in wanted:
            if directory not in self.drives:
                expected = f"a directory that was measured: run `infinity calibrate {directory}`"
                raise ConfigError(field="directories", value=directory, expected=expected)
        return {directory: self.drives[directory] for directory in wanted}


# --- rates out of figures ---


def _at(figures: Mapping[int, Figure], threads: int) -> float | None:
    """Return what so many threads get: measured, between neighbours, or what the most get."""
    known = sorted((number, figure.median) for number, figure in figures.items() if figure.median)
    if not known:
        return None
    below = [pair for pair in known if pair[0] <= threads]
    above = [pair for pair in known if pair[0] >= threads]
    if not below:
        # Fewer than were measured: in proportion.
        return known[0][1] * threads / known[0][0]
    # Measured, or beyond the most that were: more threads gain nothing.
    if not above or below[-1] == above[0]:
        return below[-1][1]
    (few, less), (many, more) = below[-1], above[0]
    return less + (more - less) * (threads - few) / (many - few)


def _part_at(figures: Mapping[int, Figure], threads: int) -> float:
    """Return the part that so many threads keep; all of it where that was not measured."""
    return min(_at(figures, threads) or 1.0, 1.0)


def _beside(alone: float | None, parts: Iterable[float]) -> float | None:
    """Return what is left of a rate under several disturbances; each leaves a part of it."""
    if alone is None:
        return None
    # Times add up, rates do not: each disturbance adds what it costs one parameter.
    return alone / (1.0 + sum(1 / part - 1 for part in parts))


def _left(part: Figure) -> float:
    """Return the part of a rate that is left: at most all, and all where it was not measured."""
    return min(part.median or 1.0, 1.0)


def _times(figure: Figure, part: float) -> float | None:
    return None if figure.median is None else figure.median * part


def _drive_rates(drive: DriveFigures, *, beside_updates: bool) -> DriveRates:
    part = _left(drive.mixed_beside_updates) if beside_updates else 1.0
    return DriveRates(
        read_bytes_per_s=_times(drive.read, part),
        write_bytes_per_s=_times(drive.write, part),
        mixed_bytes_per_s=_times(drive.mixed, part),
    )


# --- mappings in and out ---


def _names(kind: type[Any]) -> tuple[str, ...]:
    return tuple(item.name for item in fields(kind))


def _frozen(table: Mapping[str, Mapping[_Key, _Value]]) -> Mapping[str, Mapping[_Key, _Value]]:
    return FrozenMapping({key: FrozenMapping(row) for key, row in table.items()})


def _plain(record: LinkFigures | HostUpdateFigures | BlockFigures) -> dict[str, object]:
    return {name: getattr(record, name).to_mapping() for name in _names(type(record))}


def _whole(
    mapping: object, field: str, names: Sequence[str], optional: Sequence[str] = ()
) -> Mapping[str, object]:
    """Return a mapping that has all of these names, and no other but those that are `optional`."""
    given = known_mapping(mapping, field=field, known=(*names, *optional))
    for name in names:
        if name not in given:
            raise ConfigError(
                field=f"{field}.{name}", value=None, expected="a value: it is missing"
            )
    return given


def _others_share(given: Mapping[str, object], field: str) -> float:
    share = given.get("others_share", 0.0)
    # NaN fails every comparison.
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
        expected = "a part, from 0 to 1"
        raise ConfigError(field=f"{field}.others_share", value=share, expected=expected)
    return share


def _texts(mapping: object, field: str) -> dict[str, str]:
    return {key: str(value) for key, value in _mapping(mapping, field).items()}


def _table(
    mapping: object,
    field: str,
    read: Callable[[object, str], _Value],
    *,
    key: Callable[[str, str], Any] = lambda text, _: text,
) -> dict[Any, _Value]:
    given = _mapping(mapping, field)
    return {key(text, field): read(value, f"{field}[{text!r}]") for text, value in given.items()}


def _mapping(mapping: object, field: str) -> Mapping[str, object]:
    if not isinstance(mapping, Mapping) or not all(isinstance(key, str) for key in mapping):
        raise ConfigError(field=field, value=mapping, expected="a mapping with text as its keys")
    return mapping


def _count(text: str, field: str) -> int:
    if not (text.isascii() and text.isdecimal() and int(text) >= 1):
        raise ConfigError(
            field=field, value=text, expected="numbers of threads as keys, such as '8'"
        )
    return int(text)


def _shape(text: str, field: str) -> BlockShape:
    width, _, tokens = text.partition("x")
    numbers = [
        part for part in (width, tokens) if part.isascii() and part.isdecimal() and int(part) >= 1
    ]
    if len(numbers) != 2:
        raise ConfigError(
            field=field, value=text, expected="widths and tokens as keys, such as '1024x256'"
        )
    return BlockShape(*map(int, numbers))


def _figure(unit: Unit) -> Callable[[object, str], Figure]:
    return lambda mapping, place: Figure.from_mapping(mapping, field=place, unit=unit)


def _figures(
    units: Mapping[str, Unit], given: Mapping[str, object], field: str
) -> dict[str, Figure]:
    return {name: _figure(unit)(given[name], f"{field}.{name}") for name, unit in units.items()}


def _record(units: Mapping[str, Unit], mapping: object, field: str) -> dict[str, Figure]:
    """Return the figures of a mapping that has nothing else."""
    return _figures(units, _whole(mapping, field, tuple(units)), field)
