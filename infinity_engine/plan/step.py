"""The plan of an update phase: ops in order, checked as a whole when it is made.

Pure data. A StepPlan that exists is sound: each subgroup is updated once, no op comes before its
inputs, no staging set is in two hands, nothing is left on the way. Made by policies, run by the
executor, priced by the simulator, printed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from types import MappingProxyType

from infinity_engine.errors import ConfigError
from infinity_engine.plan.ops import (
    CopyOp,
    DownloadParameters,
    DownloadStates,
    Lane,
    LoadStates,
    Op,
    StoreStates,
    UpdateOnDevice,
    UpdateOnHost,
    UpdateOp,
    UploadParameters,
    UploadStates,
)
from infinity_engine.plan.tier import Tier
from infinity_engine.plan.timing import OpTime

__all__ = ["ADAM_BYTES", "BytesPerParameter", "Home", "PlanOutline", "StepPlan", "SubgroupSpec"]

# What a subgroup must have been through just before each op. None: nothing, or LoadStates where
# some of it rests on the drives. StoreStates comes last.
_INPUT: Mapping[type[Op], type[Op] | None] = MappingProxyType(
    {
        LoadStates: None,
        UploadStates: None,
        UpdateOnDevice: UploadStates,
        DownloadParameters: UpdateOnDevice,
        DownloadStates: UpdateOnDevice,
        UpdateOnHost: None,
        UploadParameters: UpdateOnHost,
        StoreStates: None,
    }
)
# The same, where updates leave parameters on the host or on the drives.
_INPUT_AT_HOME = MappingProxyType({**_INPUT, DownloadStates: DownloadParameters})


# What brings new parameters to where they stay; the last of them in a subgroup.
_ARRIVES: Mapping[Tier, tuple[type[Op], ...]] = MappingProxyType(
    {
        Tier.DEVICE: (UpdateOnDevice, UploadParameters),
        Tier.HOST: (UpdateOnHost, DownloadParameters),
        Tier.NVME: (UpdateOnHost, DownloadParameters, StoreStates),
    }
)


class Home(Enum):
    """Where a subgroup is updated, and where its states stay; the host's may rest on drives."""

    HOST = "host"  # Updated by the CPU; states stay on the host.
    VISITING = "visiting"  # Updated by the device; states stay on the host.
    RESIDENT = "resident"  # Updated by the device; states stay there.

    # By identity, as each member is one object: Enum's own hash runs in Python at each look-up.
    __hash__ = object.__hash__


@dataclass(frozen=True, kw_only=True, slots=True)
class BytesPerParameter:
    """What one parameter weighs on the links during its update."""

    states: int  # Each way, where the device updates it: master, momentum and variance.
    # What modules compute with, where it is not updated in the memory in which it stays.
    parameter: int

    def __post_init__(self) -> None:
        for item in fields(self):
            if getattr(self, item.name) < 1:
                field = f"BytesPerParameter.{item.name}"
                raise ConfigError(
                    field=field, value=getattr(self, item.name), expected="1 or more bytes"
                )


ADAM_BYTES = BytesPerParameter(states=12, parameter=2)
"""Adam with its states in fp32, and parameters of 16 bits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SubgroupSpec:
    """A subgroup as plans see it: its number, its parameters, and its place in the next forward.

    The subgroup with the lowest `first_use` is needed first. Its parameters are in so many `pieces`
    of modules' tensors. `parameter_bytes` is what one parameter of it weighs as modules compute
    with it; None: as much as the limits of the plan say.
    Where some of it rests on the drives, it passes through host buffers of at least `buffer_bytes`
    for its update, which loads and stores so many bytes.
    """

    index: int
    numel: int
    first_use: int
    parameter_bytes: int | None = None
    pieces: int = 1
    buffer_bytes: int = 0
    load_bytes: int = 0
    store_bytes: int = 0

    def __post_init__(self) -> None:
        for name, what in (("numel", "parameters"), ("pieces", "pieces")):
            if getattr(self, name) < 1:
                raise ConfigError(
                    field=f"SubgroupSpec.{name}",
                    value=getattr(self, name),
                    expected=f"1 or more {what}",
                )
        for name in ("buffer_bytes", "load_bytes", "store_bytes"):
            if getattr(self, name) < 0:
                raise ConfigError(
                    # Only what is in a buffer is stored, and what is in a buffer must be stored.
                    field=f"SubgroupSpec.{name}",
                    value=getattr(self, name),
                    expected="0 or more bytes",
                )
        if (self.store_bytes > 0) != (self.buffer_bytes > 0):
            expected = (
                "more than 0 where `buffer_bytes` is, and only there: what is in a buffer is stored"
            )
            raise ConfigError(
                field="SubgroupSpec.store_bytes", value=self.store_bytes, expected=expected
            )

    @property
    def on_drives(self) -> bool:
        """Whether some of it rests on the drives."""
        return self.buffer_bytes > 0


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOutline:
    """The part of a plan that decides how much memory it takes: all but its ops.

    `homes` says where each subgroup is updated, by its index. The rest is as in StepPlan.
    """

    homes: Mapping[int, Home]
    parameters: Tier
    staging_bytes: tuple[int, ...]
    buffer_bytes: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """The ops of one update phase; an op's number is its place among them.

    `staging_bytes` has the size of each staging set on the device, in the order of their numbers,
    `buffer_bytes` that of each host buffer for what rests on the drives. `parameters` is the tier
    where the update leaves what modules compute with: DEVICE, or the one from which they are
    fetched.

    Raises:
        ConfigError: the ops do not make a sound plan; names the first op that is wrong.
    """

    subgroups: tuple[SubgroupSpec, ...]
    ops: tuple[Op, ...]
    staging_bytes: tuple[int, ...] = ()
    parameters: Tier = Tier.DEVICE
    buffer_bytes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("staging_bytes", "buffer_bytes"):
            sizes = getattr(self, name)
            if min(sizes, default=0) < 0:
                raise ConfigError(
                    field=f"StepPlan.{name}", value=sizes, expected="sizes of 0 or more bytes"
                )
        # A plan that exists is sound: executor and simulator check nothing again.
        _Check(self).all()

    def homes(self) -> dict[int, Home]:
        """Return where each subgroup is updated, by its index."""
        found = {}
        for op in self.ops:
            # By exact type: an op of a policy's own kind was refused when the plan was made.
            if type(op) is UpdateOnHost:
                found[op.subgroup] = Home.HOST
            elif type(op) is UpdateOnDevice:
                found[op.subgroup] = Home.RESIDENT if op.staging is None else Home.VISITING
        return found

    def outline(self) -> PlanOutline:
        """Return the plan without its ops."""
        return PlanOutline(
            homes=self.homes(),
            parameters=self.parameters,
            staging_bytes=self.staging_bytes,
            buffer_bytes=self.buffer_bytes,
        )

    def arrivals(self) -> dict[int, int]:
        """Return the op after which a subgroup's new parameters are where the plan leaves them."""
        kinds = _ARRIVES[self.parameters]
        # The last one wins: later ops of a subgroup replace earlier ones in the dict.
        return {op.subgroup: number for number, op in enumerate(self.ops) if isinstance(op, kinds)}

    def params_at(self, home: Home) -> int:
        """Return how many parameters are updated there."""
        homes = self.homes()
        return sum(subgroup.numel for subgroup in self.subgroups if homes[subgroup.index] is home)

    def submission_order(self) -> tuple[int, ...]:
        """Return the ops' numbers, each before the first HOST op that it does not wait for.

        One thread that submits in this order, and is busy itself with what is in the HOST lane,
        keeps no lane waiting.
        """
        updates = 0
        # For each op, how many updates on the host come before it or are it.
        behind: list[int] = []
        newest = dict.fromkeys(Lane, 0)
        ranks = []
        for op in self.ops:
            lane = op.lane
            is_update = lane is Lane.HOST
            if is_update:
                updates += 1
                most = updates
            else:
                # Its inputs, and the op before it in its lane: lanes keep the plan's order.
                most = newest[lane]
                for other in op.after:
                    most = behind[other] if behind[other] > most else most
            behind.append(most)
            newest[lane] = most
            # With equal numbers the update itself is first: the other ops wait for it, or their
            # lanes do. Sorting keeps the plan's order else.
            ranks.append(2 * most - is_update)
        return tuple(sorted(range(len(ranks)), key=ranks.__getitem__))

    def describe(self, times: Sequence[OpTime] = ()) -> str:
        """Return the ops as a table of text; with `times`, one for each op, also when they run."""
        titles = ["op", "lane", "what", "subgroup", "set", "amount", "after"]
        rows = [_row(number, op) for number, op in enumerate(self.ops)]
        if times:
            titles += ["start", "end"]
            for row, time in zip(rows, times, strict=True):
                row += [f"{ns / 1e6:.3f} ms" for ns in time]
        widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
        padded = (map(str.ljust, row, widths) for row in [titles, *rows])
        return "\n".join("  ".join(cells).rstrip() for cells in padded)

    def to_mapping(self) -> dict[str, object]:
        """Return it as lists and mappings, ready for JSON."""
        return {
            "subgroups": [_plain(subgroup) for subgroup in self.subgroups],
            "ops": [{"op": op.name, **_plain(op)} for op in self.ops],
            "staging_bytes": list(self.staging_bytes),
            "buffer_bytes": list(self.buffer_bytes),
            "parameters": self.parameters.name,
        }


class _Check:
    """What is known of a plan's subgroups and staging sets after so many of its ops."""

    def __init__(self, plan: StepPlan) -> None:
        # Ops are checked in order, each against what is known after those before it.
        self._plan = plan
        self._at_home = plan.parameters is not Tier.DEVICE
        self._input = _INPUT_AT_HOME if self._at_home else _INPUT
        self._numel = {subgroup.index: subgroup.numel for subgroup in plan.subgroups}
        self._specs = {subgroup.index: subgroup for subgroup in plan.subgroups}
        self._newest: dict[int, tuple[int, Op]] = {}  # The newest op of each subgroup.
        # The newest copy of each staging set.
        self._in_set: dict[int, tuple[int, UploadStates | DownloadStates]] = {}
        # The newest I/O of each host buffer.
        self._in_buffer: dict[int, tuple[int, LoadStates | StoreStates]] = {}

    def all(self) -> None:
        if len(self._numel) != len(self._plan.subgroups):
            listed = [subgroup.index for subgroup in self._plan.subgroups]
            raise ConfigError(field="StepPlan.subgroups", value=listed, expected="each index once")
        for number, op in enumerate(self._plan.ops):
            # The order of the checks: each relies on those before it, so errors name the first
            # cause.
            self._order(number, op)
            self._amount(number, op)
            self._inputs(number, op)
            if type(op) is UploadStates:
                self._upload(number, op)
            elif type(op) is DownloadStates:
                self._download(number, op)
            elif type(op) is LoadStates:
                self._load(number, op)
            elif type(op) is StoreStates:
                self._store(number, op)
            self._newest[op.subgroup] = number, op
        self._completeness()

    def _order(self, number: int, op: Op) -> None:
        kind = type(op)
        if kind not in _INPUT:
            raise _wrong(number, op, f"one of {', '.join(kind.__name__ for kind in _INPUT)}")
        if kind is UploadParameters and self._at_home:
            raise _wrong(
                number, op, f"none: the plan's parameters stay {_PLACE[self._plan.parameters]}"
            )
        if kind is DownloadParameters and not self._at_home:
            raise _wrong(number, op, "none: the plan's parameters stay on the device")
        if op.subgroup not in self._numel:
            raise _wrong(number, op, f"a subgroup of the plan, which has {_listing(self._numel)}")
        if (kind is LoadStates or kind is StoreStates) and not self._specs[op.subgroup].on_drives:
            raise _wrong(number, op, "none: nothing of the subgroup rests on the drives")
        after = op.after
        is_wrong = len(after) > 1 and len(set(after)) != len(after)
        for other in after:
            is_wrong = is_wrong or not 0 <= other < number
        if is_wrong:
            raise _wrong(number, op, "each of `after` once, and all of them numbers of earlier ops")

    def _amount(self, number: int, op: Op) -> None:
        spec = self._specs[op.subgroup]
        # By exact type, which `_order` has checked: isinstance() of a union takes long.
        kind = type(op)
        if isinstance(op, UpdateOp):
            if op.params != spec.numel:
                raise _wrong(number, op, f"all of the subgroup's {spec.numel} parameters")
        elif kind is LoadStates or kind is StoreStates:
            nbytes = spec.load_bytes if kind is LoadStates else spec.store_bytes
            if op.amount != nbytes:
                raise _wrong(number, op, f"the {nbytes} bytes that the subgroup says")

    def _inputs(self, number: int, op: Op) -> None:
        before = self._newest.get(op.subgroup)
        if type(op) is StoreStates:
            missing = LoadStates if before is None else self._missing(before[1])
            if before is None or missing is not StoreStates or before[0] not in op.after:
                raise _wrong(number, op, "to come `after` the last of the subgroup's other ops")
            return
        # A resident's states are on the device already.
        resident = type(op) is UpdateOnDevice and op.staging is None
        needed = None if resident else self._input[type(op)]
        # Where an op needs nothing else, that of an offloaded subgroup needs its load.
        if needed is None and self._specs[op.subgroup].buffer_bytes and type(op) is not LoadStates:
            needed = LoadStates
        if needed is None:
            if before is not None:
                raise _wrong(
                    number,
                    op,
                    f"one update of each subgroup; op {before[0]} belongs to another of this one",
                )
        elif before is None or type(before[1]) is not needed or before[0] not in op.after:
            raise _wrong(number, op, f"to come `after` the subgroup's {needed.__name__}")
        elif needed is not LoadStates and getattr(op, "staging", None) != getattr(
            before[1], "staging", None
        ):
            raise _wrong(number, op, f"the staging set of op {before[0]}, which is before it")

    def _upload(self, number: int, op: UploadStates) -> None:
        sets = self._plan.staging_bytes
        if not 0 <= op.staging < len(sets):
            raise _wrong(number, op, f"one of the plan's {len(sets)} staging sets, counted from 0")
        if op.nbytes > sets[op.staging]:
            raise _wrong(
                number, op, f"no more than the {sets[op.staging]} bytes of its staging set"
            )
        before = self._in_set.get(op.staging)
        # The set's last copy has to be a download, and this upload has to come after it.
        if before is not None and not (
            isinstance(before[1], DownloadStates) and before[0] in op.after
        ):
            raise _wrong(
                number,
                op,
                f"an empty staging set: to come `after` subgroup {before[1].subgroup} has left it",
            )
        self._in_set[op.staging] = number, op

    def _download(self, number: int, op: DownloadStates) -> None:
        # `_inputs` has found the upload.
        _, upload = self._in_set[op.staging]
        if op.nbytes != upload.nbytes:
            raise _wrong(number, op, f"as many bytes down as went up, {upload.nbytes}")
        self._in_set[op.staging] = number, op

    def _load(self, number: int, op: LoadStates) -> None:
        buffers, needed = self._plan.buffer_bytes, self._specs[op.subgroup].buffer_bytes
        if not 0 <= op.buffer < len(buffers):
            raise _wrong(
                number, op, f"one of the plan's {len(buffers)} host buffers, counted from 0"
            )
        if needed > buffers[op.buffer]:
            raise _wrong(
                number, op, f"a host buffer of at least the {needed} bytes that the subgroup says"
            )
        before = self._in_buffer.get(op.buffer)
        if before is not None and not (
            isinstance(before[1], StoreStates) and before[0] in op.after
        ):
            raise _wrong(
                number,
                op,
                f"an empty host buffer: to come `after` subgroup {before[1].subgroup} has left it",
            )
        self._in_buffer[op.buffer] = number, op

    def _store(self, number: int, op: StoreStates) -> None:
        before = self._in_buffer.get(op.buffer)
        if before is None or before[1].subgroup != op.subgroup:
            raise _wrong(number, op, "the host buffer that the subgroup was loaded into")
        self._in_buffer[op.buffer] = number, op

    def _completeness(self) -> None:
        for index in self._numel:
            newest = self._newest.get(index)
            if newest is None:
                expected = f"an update of every subgroup; subgroup {index} has none"
                raise ConfigError(
                    field="StepPlan.ops", value=_listing(self._newest), expected=expected
                )
            number, op = newest
            missing = self._missing(op)
            if missing is not None:
                raise _wrong(number, op, f"a {missing.__name__} of the subgroup to follow")

    def _missing(self, op: Op) -> type[Op] | None:
        """Return what has to follow a subgroup's newest op before its update is whole."""
        spec = self._specs[op.subgroup]
        if isinstance(op, LoadStates):
            return UpdateOnHost
        if isinstance(op, StoreStates):
            return None
        # Whatever an update was, what rests on drives has to be stored after it.
        return self._missing_of_update(op) or (StoreStates if spec.on_drives else None)

    def _missing_of_update(self, op: Op) -> type[Op] | None:
        if isinstance(op, UpdateOnHost):
            return None if self._at_home else UploadParameters
        if isinstance(op, UpdateOnDevice) and self._at_home:
            return DownloadParameters
        if isinstance(op, UpdateOnDevice | DownloadParameters):
            return None if op.staging is None else DownloadStates
        return UpdateOnDevice if isinstance(op, UploadStates) else None


_PLACE = MappingProxyType({Tier.HOST: "on the host", Tier.NVME: "on the drives"})


def _wrong(number: int, op: Op, expected: str) -> ConfigError:
    return ConfigError(field=f"StepPlan.ops[{number}]", value=op, expected=expected)


def _listing(indices: Iterable[int]) -> str:
    return ", ".join(map(str, indices)) or "none"


def _row(number: int, op: Op) -> list[str]:
    staging = getattr(op, "staging", getattr(op, "buffer", None))
    amount = f"{op.amount} {'B' if isinstance(op, CopyOp) else 'params'}"
    after = " ".join(map(str, op.after))
    in_set = "" if staging is None else str(staging)
    return [str(number), op.lane.value, op.name, str(op.subgroup), in_set, amount, after]


def _plain(record: Op | SubgroupSpec) -> dict[str, object]:
    values = {item.name: getattr(record, item.name) for item in fields(record)}
    return {
        name: list(value) if isinstance(value, tuple) else value for name, value in values.items()
    }
