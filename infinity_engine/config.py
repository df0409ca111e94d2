"""The settings of the engine: every one of them with its meaning, its check and its only default.

Frozen data, checked when made, read from and written to JSON-like mappings; the documentation's
tables come from here. Knows no tensor and starts nothing. Only rooms that read settings import it;
all others get plain arguments.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from enum import Enum
from types import MappingProxyType
from typing import Any, TypeVar

from infinity_engine.errors import ConfigError
from infinity_engine.plan import Auto, Budget, Rates, Strategy, parse_strategy
from infinity_engine.plan.mappings import Directories, known_mapping
from infinity_engine.plan.strategy import STRATEGIES
from infinity_engine.units import parse_bytes, positive

__all__ = [
    "AcceleratorChoice",
    "ActivationsAt",
    "ActivationsConfig",
    "Backend",
    "Checksum",
    "EngineConfig",
    "Overlap",
    "ParametersAt",
    "Precision",
    "RanksConfig",
    "Recompute",
    "Recording",
    "Replanning",
    "ShardingStage",
    "StorageConfig",
    "TelemetryConfig",
    "Tiling",
]


_RESIDENT_BYTES = 256 << 20


class Precision(Enum):
    """The dtype that parameters compute in.

    Masters and optimizer states are fp32, and buffers keep their dtype.
    """

    MODEL = "model"  # Each parameter computes in the dtype that it has.
    FP32 = "fp32"  # Casts all to fp32. Exact and largest.
    BF16 = "bf16"  # Casts to bf16. Half the bytes, the range of fp32, fewer digits.
    # Casts to fp16. Half the bytes, more digits than bf16, a small range: needs loss scaling.
    FP16 = "fp16"
    BF16_AUTOCAST = "bf16_autocast"  # As bf16; torch.autocast chooses for each operation.
    FP16_AUTOCAST = "fp16_autocast"  # As fp16, likewise, with loss scaling.


class ParametersAt(Enum):
    """Where parameters stay between their uses."""

    AUTO = "auto"  # On the device where they fit there, otherwise on the host.
    DEVICE = "device"  # Where modules compute.
    HOST = "host"  # Fetched to the device around the modules that need them.
    NVME = "nvme"  # Fetched from the budget's drives; small parameters stay on the host.


class Overlap(Enum):
    """Whether the end of an update goes on beside the next forward, which waits where it must."""

    AUTO = "auto"  # Yes where the device has memory of its own, or states are on drives.
    OFF = "off"  # No: step() ends the update.


class Tiling(Enum):
    """Whether large linear layers and embeddings are cut into tiles."""

    OFF = "off"  # No; your code may have cut them.
    # Those whose weight and gradient together take more than half of the device's budget.
    AUTO = "auto"


class Replanning(Enum):
    """Whether a plan that `auto` chose changes in training, where measured rates differ."""

    # Yes on one rank, with states in host and device memory, while telemetry is recorded.
    AUTO = "auto"
    OFF = "off"  # No: every step has the first plan.


class AcceleratorChoice(Enum):
    """The device that DEVICE stands for."""

    AUTO = "auto"  # cuda where there is a usable GPU, otherwise cpu.
    CUDA = "cuda"  # A GPU.
    CPU = "cpu"  # The host itself: DEVICE and HOST are one memory.
    # A device that lives in host memory behind links of set speed: for tests.
    EMULATED = "emulated"


class Backend(Enum):
    """How deepnvme asks the kernel for I/O; named here again, so that no native code is needed."""

    AUTO = "auto"  # The first of the others that this machine allows.
    LIBURING = "liburing"  # io_uring through python-liburing's library.
    URING = "uring"  # io_uring through system calls of our own.
    AIO = "aio"  # Linux AIO.
    THREADS = "threads"  # Threads that wait in ordinary reads and writes.


class Checksum(Enum):
    """How swapped bytes are checked when they are read back."""

    CRC32C = "crc32c"  # A crc32c for each block, kept in host memory: a damaged one is an error.
    OFF = "off"  # No check: a drive's wrong bytes are trained on.


class ActivationsAt(Enum):
    """Where what autograd saves for the backward waits for it."""

    DEVICE = "device"  # Where it was made.
    HOST = "host"  # What is needed last, in host memory; for devices with memory of their own.
    NVME = "nvme"  # What is needed last, on drives.
    AUTO = "auto"  # Each block of the model in the way that is fastest and fits.


class Recompute(Enum):
    """What the engine runs again in the backward, so that less is saved."""

    NOTHING = "nothing"  # Nothing, but what the model's own code checkpoints.
    BLOCKS = "blocks"  # Every repeated block of the model.


class ShardingStage(Enum):
    """What the ranks shard; each rank has all of the rest."""

    ALONE = "alone"  # Nothing: each process trains a model of its own, also under torchrun.
    # Optimizer states; each rank has whole parameters, and whole gradients until the step.
    OPTIMIZER = "optimizer"
    GRADIENTS = "gradients"  # Gradients as well, as soon as they are made.
    PARAMETERS = "parameters"  # Parameters as well, which are whole only while modules need them.


class Recording(Enum):
    """What telemetry records."""

    TIMELINE = "timeline"  # Spans and counters of the newest steps.
    OFF = "off"  # Nothing.


@dataclass(frozen=True, slots=True)
class _Kind:
    """A kind of setting: its values in words, and the function that reads a value at a path."""

    words: str
    read: Callable[[str, object], object]


_MOST_KEPT = (1 << 63) - 1  # a deque's limit is a C number


def _whole(at_least: int, at_most: int | None = None) -> _Kind:
    words = f"a whole number, {at_least} {'or more' if at_most is None else f'to {at_most}'}"

    def read(place: str, given: object) -> int:
        # True and False are ints in Python.
        if (
            isinstance(given, bool)
            or not isinstance(given, int)
            # `at_most or given`: without an upper limit, every number is within it.
            or not at_least <= given <= (at_most or given)
        ):
            raise ConfigError(field=place, value=given, expected=words)
        return given

    return _Kind(words, read)


def _flag() -> _Kind:
    words = "True or False"

    def read(place: str, given: object) -> bool:
        if not isinstance(given, bool):
            raise ConfigError(field=place, value=given, expected=words)
        return given

    return _Kind(words, read)


def _positive() -> _Kind:
    words = "a positive number"
    return _Kind(words, lambda place, given: positive(given, field=place, expected=words))


def _member(kind: type[Enum]) -> _Kind:
    values = [str(member.value) for member in kind]

    def read(place: str, given: object) -> Enum:
        if isinstance(given, kind):
            return given
        if given not in values:
            raise ConfigError.unknown_name(field=place, name=given, known=values)
        return kind(given)

    return _Kind(f"one of {', '.join(values)}", read)


def _or_none(kind: _Kind) -> _Kind:
    def read(place: str, given: object) -> object:
        return None if given is None else kind.read(place, given)

    return _Kind(f"{kind.words}, or None", read)


def _budget() -> _Kind:
    def read(place: str, given: object) -> Budget:
        return given if isinstance(given, Budget) else Budget.from_mapping(given, field=place)

    return _Kind("a Budget, or a mapping of device, host and nvme", read)


def _rates() -> _Kind:
    def read(place: str, given: object) -> Rates:
        return given if isinstance(given, Rates) else Rates.from_mapping(given, field=place)

    return _Kind("Rates, or a mapping of them", read)


def _bytes() -> _Kind:
    words = "bytes, as a number or text such as '4 GiB'"

    def read(place: str, given: object) -> int:
        if isinstance(given, bool) or not isinstance(given, int | str):
            raise ConfigError(field=place, value=given, expected=words)
        return parse_bytes(given, field=place)

    return _Kind(words, read)


def _bytes_of_drives() -> _Kind:
    words = "bytes, as a number or text such as '600TB', or a mapping from directories to them"

    def read(place: str, given: object) -> int | Directories[int]:
        if isinstance(given, Mapping):
            return Directories(
                {name: size(f"{place}[{name!r}]", nbytes) for name, nbytes in given.items()},
                field=place,
            )
        return size(place, given)

    def size(place: str, given: object) -> int:
        if isinstance(given, bool) or not isinstance(given, int | str):
            raise ConfigError(field=place, value=given, expected=words)
        nbytes = parse_bytes(given, field=place)
        if not nbytes:
            raise ConfigError(field=place, value=given, expected="more than 0 bytes")
        return nbytes

    return _Kind(words, read)


def _calibration() -> _Kind:
    words = "auto, off, or the path of a file that `infinity calibrate --json` wrote"

    def read(place: str, given: object) -> str:
        if not isinstance(given, str | os.PathLike) or not os.fspath(given):
            raise ConfigError(field=place, value=given, expected=words)
        return os.fsdecode(given)

    return _Kind(words, read)


def _names() -> _Kind:
    words = "a sequence of names"

    def read(place: str, given: object) -> tuple[str, ...]:
        if (
            # A string is a sequence of strings as well: each letter would be a name.
            isinstance(given, str)
            or not isinstance(given, Sequence)
            or not all(isinstance(name, str) for name in given)
        ):
            raise ConfigError(field=place, value=given, expected=words)
        return tuple(given)

    return _Kind(words, read)


def _strategy() -> _Kind:
    names = ", ".join(kind.name for kind in STRATEGIES)
    return _Kind(
        f"one of {names}, or a mapping of its name and settings",
        lambda place, given: parse_strategy(given, field=place),
    )


def _section(kind: type[_Settings], *, short: str | None = None) -> _Kind:
    """Return the kind of a section; text in its place is the setting `short` of it."""

    def read(place: str, given: object) -> _Settings:
        if isinstance(given, str) and short is not None:
            given = {short: given}
        return given if isinstance(given, kind) else kind._at(place, given)

    return _Kind("a section", read)


def _about(kind: _Kind, meaning: str) -> dict[str, object]:
    """Return the metadata of a setting's field."""
    return {"kind": kind, "meaning": meaning}


def _kind(setting: Field[Any]) -> _Kind:
    kind: _Kind = setting.metadata["kind"]
    return kind


def _plain(value: object) -> object:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Strategy):
        return value.to_plain()
    if isinstance(value, Directories):
        return dict(value)
    if isinstance(value, tuple):
        return list(value)
    return value.to_mapping() if isinstance(value, Budget | Rates | _Settings) else value


_REMOVED = MappingProxyType(
    {
        "ranks.partitioning": "nothing, as this setting was removed and each rank now always owns "
        "a part of every parameter: delete it"
    }
)
"""What to do about settings that there are no longer, by their dotted path."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Settings:
    """A section of settings: each field has _about as its metadata and is read by its kind."""

    def __post_init__(self) -> None:
        for item in fields(self):
            # The class's own name, as no path is known here; _at() reads first, with the path.
            value = _kind(item).read(f"{type(self).__name__}.{item.name}", getattr(self, item.name))
            # The class is frozen: this replaces what was given by what its kind has read.
            object.__setattr__(self, item.name, value)

    @classmethod
    def _at(cls: type[_Section], place: str, mapping: object) -> _Section:
        kinds = {item.name: _kind(item) for item in fields(cls)}
        # At the top there is no section, and so no dot.
        within = f"{place}." if place else ""
        # Before known_mapping(), which would call a removed setting unknown.
        for name, value in mapping.items() if isinstance(mapping, Mapping) else ():
            expected = _REMOVED.get(f"{within}{name}")
            if expected:
                raise ConfigError(field=f"{within}{name}", value=value, expected=expected)
        given = known_mapping(mapping, field=place, known=kinds)
        return cls(
            **{name: kinds[name].read(within + name, value) for name, value in given.items()}
        )

    def to_mapping(self) -> dict[str, object]:
        """Return the settings as from_mapping reads them, ready for JSON."""
        return {item.name: _plain(getattr(self, item.name)) for item in fields(self)}


_Section = TypeVar("_Section", bound=_Settings)


@dataclass(frozen=True, kw_only=True, slots=True)
class StorageConfig(_Settings):
    """How deepnvme is used; deepnvme chooses what is None here."""

    backend: Backend = field(
        default=Backend.AUTO,
        metadata=_about(
            _member(Backend), "deepnvme's I/O backend; auto: the best that this machine allows"
        ),
    )
    checksum: Checksum = field(
        default=Checksum.CRC32C,
        metadata=_about(
            _member(Checksum),
            "how bytes read back from drives are checked; off: training goes on with a drive's "
            "wrong bytes",
        ),
    )
    small_bytes: int = field(
        default=65536,
        metadata=_about(
            _whole(0),
            "parameters of fewer bytes stay in memory: a page and an I/O would cost more",
        ),
    )
    early_updates: bool = field(
        default=False,
        metadata=_about(
            _flag(),
            "update subgroups on drives during the backward already, into places of their own "
            "(larger-than-ram.md)",
        ),
    )
    endurance: int | Mapping[str, int] | None = field(
        default=None,
        metadata=_about(
            _or_none(_bytes_of_drives()),
            "the rated endurance of each drive (its TBW), which reports and warnings compare with",
        ),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationsConfig(_Settings):
    """What happens to the tensors that autograd saves for the backward, but for parameters."""

    at: ActivationsAt = field(
        default=ActivationsAt.DEVICE,
        metadata=_about(
            _member(ActivationsAt),
            "where saved tensors wait for the backward; host, nvme: those beyond resident_bytes, "
            "what is needed last; auto: the engine chooses for each block (activations.md)",
        ),
    )
    recompute: Recompute = field(
        default=Recompute.NOTHING,
        metadata=_about(
            _member(Recompute),
            "what the engine runs again in the backward; blocks: what they were given waits as "
            "`at` says",
        ),
    )
    resident_bytes: int | None = field(
        default=None,
        metadata=_about(
            _or_none(_bytes()),
            "bytes of saved tensors that stay where they were made; half of them may be on their "
            "way from there or to there; None: 256 MiB, and with auto most of what the plan leaves",
        ),
    )
    host_bytes: int = field(
        default=256 << 20,
        metadata=_about(
            _bytes(),
            "bytes of the host's budget that saved tensors of a device with memory of its own "
            "lie in, or pass on their way to drives",
        ),
    )
    small_bytes: int = field(
        default=65536,
        metadata=_about(_whole(0), "saved tensors of fewer bytes stay where they were made"),
    )

    @property
    def resident(self) -> int:
        """The bytes that stay at least, where they are not set."""
        return _RESIDENT_BYTES if self.resident_bytes is None else self.resident_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class RanksConfig(_Settings):
    """How the processes of a run, started by torchrun, train one model; one process needs none."""

    stage: ShardingStage = field(
        default=ShardingStage.PARAMETERS,
        metadata=_about(
            _member(ShardingStage), "what the ranks shard, beside the optimizer's states"
        ),
    )
    shard_ranks: int | None = field(
        default=None,
        metadata=_about(
            _or_none(_whole(1)),
            "neighbouring ranks, such as those of a machine, that share one copy of the model; "
            "other ranks have replicas; None: all ranks share one copy",
        ),
    )
    leaf_modules: Sequence[str] = field(
        default=(),
        metadata=_about(
            _names(),
            "modules, or their classes, that are gathered as a whole, because ranks run "
            "different parts of them",
        ),
    )
    bucket_bytes: int = field(
        default=2**25,
        metadata=_about(
            _whole(4096),
            "bytes of gradients that one collective reduces; a gather goes in rounds of this size",
        ),
    )
    timeout_s: float = field(
        default=600.0,
        metadata=_about(
            _positive(),
            "seconds that a rank waits for another before it fails and names the missing rank",
        ),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class TelemetryConfig(_Settings):
    """What is recorded of a run, and how much of it is kept."""

    recording: Recording = field(
        default=Recording.TIMELINE,
        metadata=_about(_member(Recording), "what telemetry keeps"),
    )
    keep_steps: int = field(
        default=16,
        metadata=_about(
            _whole(1, _MOST_KEPT), "how many steps the timeline holds; the newest are kept"
        ),
    )
    keep_spans: int = field(
        default=4096,
        metadata=_about(
            _whole(1, _MOST_KEPT),
            "how many spans are held of each step, about 0.5 KiB each; the newest are kept",
        ),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig(_Settings):
    """All settings of one engine.

    `subgroup_numel` is a compromise. Small subgroups fit small budgets: at the default, one of fp32
    parameters with both moments is 192 MiB, and the three that interleaving stages take 576 MiB of
    the device. Large subgroups hide the cost of starting each: at the default, a transfer takes
    milliseconds on any link. And interleaving comes close to its bound only with 46 subgroups or
    more, which at the default is a model of 0.8 billion parameters.
    """

    budget: Budget | None = field(
        default=None,
        metadata=_about(
            _or_none(_budget()),
            "the limit of each tier; None: device and host as the machine allows, no NVMe",
        ),
    )
    strategy: Strategy = field(
        default=Auto(),
        metadata=_about(
            _strategy(), "where states stay and where their updates run; auto: the planner chooses"
        ),
    )
    precision: Precision = field(
        default=Precision.MODEL,
        metadata=_about(
            _member(Precision),
            "the dtype that parameters compute in; model: each one's own; others cast (memory.md)",
        ),
    )
    accelerator: AcceleratorChoice = field(
        default=AcceleratorChoice.AUTO,
        metadata=_about(_member(AcceleratorChoice), "what DEVICE is"),
    )
    parameters: ParametersAt = field(
        default=ParametersAt.AUTO,
        metadata=_about(
            _member(ParametersAt),
            "where parameters stay; host, nvme: fetched around the modules that need them; auto: "
            "the first of device, host and nvme where they fit",
        ),
    )
    overlap: Overlap = field(
        default=Overlap.AUTO,
        metadata=_about(
            _member(Overlap),
            "whether the end of an update goes on beside the next forward (strategies.md); off: "
            "step() ends it",
        ),
    )
    replanning: Replanning = field(
        default=Replanning.AUTO,
        metadata=_about(
            _member(Replanning),
            "whether a plan that strategy auto made from rates changes with measured rates "
            "(planner.md); off: never",
        ),
    )
    activation_bytes: int = field(
        default=0,
        metadata=_about(
            _bytes(),
            "bytes of the device's budget that the plan leaves to activations and all else that "
            "modules allocate",
        ),
    )
    activations: ActivationsConfig = field(
        default=ActivationsConfig(),
        metadata=_about(
            _section(ActivationsConfig, short="at"),
            "where what autograd saves waits for the backward",
        ),
    )
    tiling: Tiling = field(
        default=Tiling.OFF,
        metadata=_about(
            _member(Tiling),
            "whether linear layers and embeddings are cut into tiles; auto: those that the "
            "device's budget has no room for (activations.md)",
        ),
    )
    accumulation_steps: int = field(
        default=1,
        metadata=_about(_whole(1), "micro-batches that are summed for one update"),
    )
    max_grad_norm: float | None = field(
        default=None,
        metadata=_about(
            _or_none(_positive()),
            "the norm that gradients are clipped to; None: they are not clipped",
        ),
    )
    subgroup_numel: int = field(
        default=2**24,
        metadata=_about(
            _whole(4096), "parameters that are moved and updated as one piece, at most"
        ),
    )
    rates: Rates | None = field(
        default=None,
        metadata=_about(
            _or_none(_rates()),
            "the machine's rates, for strategies that need them; None: from `calibration`",
        ),
    )
    calibration: str = field(
        default="auto",
        metadata=_about(
            _calibration(),
            "where missing rates come from; auto: an earlier measurement, or one made now; off: "
            "nowhere",
        ),
    )
    update_threads: int | None = field(
        default=None,
        metadata=_about(
            _or_none(_whole(1, 1024)),
            "threads that update on the host; None: one for each core of this process, divided "
            "among ranks",
        ),
    )
    storage: StorageConfig = field(
        default=StorageConfig(),
        metadata=_about(_section(StorageConfig), "how deepnvme is used"),
    )
    ranks: RanksConfig = field(
        default=RanksConfig(),
        metadata=_about(_section(RanksConfig), "how several ranks train together"),
    )
    telemetry: TelemetryConfig = field(
        default=TelemetryConfig(),
        metadata=_about(_section(TelemetryConfig), "what is recorded of a run"),
    )

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, object]) -> EngineConfig:
        """Return the settings in a JSON-like `mapping`; what it leaves out has its default.

        Enums may be given by value ("bf16"), sizes as text ("12 GiB"), the strategy by name, and
        settings with parts (the strategy, the budget, sections) as a mapping of them.

        Raises:
            ConfigError: an unknown name at any level or a value that cannot be right; names its
                dotted path.
        """
        return cls._at("", mapping)
