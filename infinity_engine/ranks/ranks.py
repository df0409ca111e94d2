"""`Ranks`: this rank among those that train one model: what all must have in common, who owns what,
whole values.

Knows parameters, budgets and settings; fetches, reduces and updates nothing. Made by `initialize`
where there are several ranks, and closed last, with the error if there is one, of which the others
are told.
"""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from deepnvme.machine.probing import find_mount, read_mounts
from deepnvme.memory.checksum import crc32c
from infinity_engine.config import EngineConfig, RanksConfig, ShardingStage
from infinity_engine.errors import CollectiveError, ConfigError
from infinity_engine.machine.capacity import probe_capacity
from infinity_engine.machine.cores import CoreShare, divide_cores, read_nodes
from infinity_engine.optim import GradientNorm, GradientSums, Rule
from infinity_engine.parameters.parameters import ModelParameter, TrainedParameter, absent
from infinity_engine.partition import (
    Collectives,
    GroupMember,
    Partitioner,
    Partitioning,
    ShardGroup,
    ShardSpec,
    share_block_sums,
)
from infinity_engine.partition.failures import Process
from infinity_engine.plan import ResolvedBudget
from infinity_engine.units import align_up

__all__ = ["Cut", "Held", "Ranks", "together", "wire_of"]

_LOG = logging.getLogger(__name__)
_MOST_SHOWN = 3
# What may be another on each rank: where things are and how fast, and what only this process sees.
_OF_EACH_RANK = (
    "budget.nvme",
    "calibration",
    "rates",
    "storage.backend",
    "storage.endurance",
    "telemetry",
)


@dataclass(frozen=True, kw_only=True)
class Cut:
    """The model's parameters, whole and as this rank's shards, `trained` and `frozen`; `specs` are
    of all ranks.
    """

    ranks: Ranks
    wholes: tuple[TrainedParameter, ...]
    frozen_wholes: tuple[ModelParameter, ...]
    trained: tuple[TrainedParameter, ...]
    frozen: tuple[ModelParameter, ...]
    specs: tuple[ShardSpec, ...]


@dataclass(frozen=True)
class Held:
    """What a machine's ranks hold already of its host, and of its file systems."""

    host: int
    on_systems: Mapping[str, int]

    def in_directory(self, directory: str) -> int:
        """Return what they hold of the file system of a directory."""
        return self.on_systems.get(_file_system_of(directory)[0], 0)


class Ranks:
    """Rank `rank` of `size`, two or more, which a parameter is cut over, or neighbours among them
    that share a copy.

    `collectives` are of all ranks, and `shards` of those that share a copy of the model, which may
    be all. `gradients` is a second sequence of these, of what backwards make. `replicas` are those
    that own the same, None where all ranks share one copy.
    """

    def __init__(self, collectives: Collectives, config: RanksConfig) -> None:
        self.config = config
        self.partitioning = Partitioning(config.partitioning.value)
        self.neighbours = 1
        """How many ranks there are on this machine, once budgets were shared."""
        self.users: Mapping[str, int] = MappingProxyType({})
        """How many of them use each directory of this one's, once budgets were shared."""
        self.cores = CoreShare(tuple(sorted(os.sched_getaffinity(0))), is_shared=False)
        """Which of the cores that this process may run on are this rank's, once budgets were
        shared.
        """
        self._first_here = collectives.rank
        self.collectives = collectives
        self._agree_on_mesh()
        self.shards, self.replicas = collectives, None
        if config.shard_ranks not in {None, collectives.size}:
            self.shards, self.replicas = self._split(config.shard_ranks)
        self.gradients = self.shards.beside()

    @classmethod
    def join(cls, config: RanksConfig) -> Ranks | None:
        """Meet the others; None where there are none."""
        if config.stage is ShardingStage.ALONE:
            return None
        collectives = Collectives.join(timeout_s=config.timeout_s)
        if collectives.size == 1:
            collectives.close()
            return None
        try:
            return cls(collectives, config)
        except BaseException as error:
            collectives.close(error)
            raise

    def _split(self, shard_ranks: int | None) -> tuple[Collectives, Collectives]:
        if shard_ranks is None or self.size % shard_ranks:
            fitting = ", ".join(
                str(each) for each in range(1, self.size + 1) if self.size % each == 0
            )
            expected = f"a divisor of the {self.size} ranks: {fitting}"
            raise ConfigError(field="ranks.shard_ranks", value=shard_ranks, expected=expected)
        return self.collectives.split(shard_ranks)

    def _agree_on_mesh(self) -> None:
        """Make sure that all ranks make the same groups: where they do not, torch waits or mixes
        them up.
        """
        self.agree_again_on("the mesh", {"ranks.shard_ranks": self.config.shard_ranks})

    @property
    def rank(self) -> int:
        """Which one this is."""
        return self.collectives.rank

    @property
    def size(self) -> int:
        """How many there are."""
        return self.collectives.size

    def on_wait(self, call: Callable[[], object]) -> None:
        """Call this again and again while this rank waits for others: what it raises ends the
        wait.
        """
        for each in self._sequences():
            each.on_wait(call)

    def close(self, error: BaseException | None = None) -> None:
        """Leave the others, who are told why where `error` says it. Again: nothing."""
        for each in self._sequences():
            each.close(error)

    def _sequences(self) -> list[Collectives]:
        """Return all, those that follow others first."""
        found = [
            self.gradients,
            *([] if self.replicas is None else [self.replicas]),
            self.shards,
            self.collectives,
        ]
        return list(dict.fromkeys(found))

    # --- what all have in common ------------------------------------------------------------------

    def agree_on(self, what: str, mine: Mapping[str, object]) -> None:
        """Make sure that all ranks say the same of the same things.

        Raises:
            CollectiveError: they do not; names the first things that differ, and who says what of
                them.
        """
        payload = json.dumps({name: str(value) for name, value in mine.items()}).encode()
        said: list[dict[str, str]] = [
            json.loads(each) for each in self.collectives.share(what, payload)
        ]
        names = list(dict.fromkeys(name for each in said for name in each))
        found = [
            f"{name}: {told}"
            for name in names
            if (told := _told([each.get(name) for each in said]))
        ]
        if found:
            more = f"; and {len(found) - _MOST_SHOWN} more" if len(found) > _MOST_SHOWN else ""
            raise CollectiveError(
                group=self.collectives.name,
                rank=self.rank,
                op=f"agreement on {what}",
                reason=f"the ranks differ in {'; '.join(found[:_MOST_SHOWN])}{more}",
            )

    def agree_on_versions(self) -> None:
        """Make sure that all ranks run the same.

        Raises:
            CollectiveError: they do not.
        """
        self.agree_on("versions", {"infinity-engine": _version(), "torch": torch.__version__})

    def agree_on_run(
        self,
        config: EngineConfig,
        others: Mapping[str, object],
        rules: Sequence[Rule],
        parameters: Sequence[ModelParameter],
        digest: Callable[[torch.nn.Parameter], str],
    ) -> None:
        """Make sure that all ranks train the same model in the same way, from the same values, as
        `digest` says them.

        Raises:
            CollectiveError: they do not.
        """
        self.agree_on_versions()
        settings = {
            name: value
            for name, value in _flat(config.to_mapping())
            if not name.startswith(_OF_EACH_RANK)
        }
        self.agree_on("settings", {**settings, **others})
        optimizer = {f"optimizer's group {number}": rule for number, rule in enumerate(rules)}
        self.agree_on(
            "the model", {**{each.name: _kind_of(each) for each in parameters}, **optimizer}
        )
        self.agree_on(
            "the model's first values", {each.name: digest(each.parameter) for each in parameters}
        )

    def agree_again_on(self, what: str, mine: Mapping[str, object]) -> None:
        """Do as `agree_on`, for what is asked often and mostly is the same: ranks exchange a
        checksum first.

        Raises:
            CollectiveError: they do not say the same.
        """
        checksum = crc32c(json.dumps({name: str(value) for name, value in mine.items()}).encode())
        if (
            len(set(self.collectives.share(f"whether all agree on {what}", str(checksum).encode())))
            > 1
        ):
            self.agree_on(what, mine)

    def any_has_more(self, *, has_more: bool, has_had: bool) -> bool:
        """Tell whether any rank has another batch; those that have none use their last one again.

        Raises:
            ConfigError: a rank has had none so far.
        """
        mine = b"more" if has_more else b"again" if has_had else b"none"
        said = self.collectives.share("which ranks have another batch", mine)
        without = [rank for rank, each in enumerate(said) if each == b"none"]
        if b"more" in said and without:
            expected = "one on each rank at least, which it can use again while others have more"
            raise ConfigError(
                field="batches",
                value=f"none on rank {', '.join(map(str, without))}",
                expected=expected,
            )
        return b"more" in said

    def go_on_with(self, config: RanksConfig) -> None:
        """Train, with these settings, what the ranks have built or loaded with others.

        Raises:
            ConfigError: they do not go with what was built.
            RuntimeError: the ranks have parted since.
        """
        if self.collectives.failed:
            raise RuntimeError(
                "the ranks that have built this model have parted, as one of them has failed, or "
                "initialize has: build "
                "the model again, on all of them"
            )
        before = self.config
        for name, now, then in (
            ("stage", config.stage is ShardingStage.ALONE, before.stage is ShardingStage.ALONE),
            ("partitioning", config.partitioning, before.partitioning),
            ("shard_ranks", config.shard_ranks, before.shard_ranks),
            ("timeout_s", config.timeout_s, before.timeout_s),
        ):
            if now != then:
                given, had = getattr(config, name), getattr(before, name)
                expected = (
                    f"{had!r}, as init_context or load_into had it: give the same ranks to both"
                )
                raise ConfigError(field=f"ranks.{name}", value=given, expected=expected)
        self.config = config

    def tell(self, what: str, mine: object) -> list[Any]:
        """Return what each rank says, of what JSON has."""
        return [
            json.loads(each) for each in self.collectives.share(what, json.dumps(mine).encode())
        ]

    def least(self, what: str, mine: int) -> int:
        """Return the smallest of what the ranks say."""
        return min(int(each) for each in self.collectives.share(what, str(mine).encode()))

    def most(self, what: str, mine: int) -> int:
        """Return the largest of what the ranks say."""
        return max(int(each) for each in self.collectives.share(what, str(mine).encode()))

    def share_budget(
        self, budget: ResolvedBudget, *, device_is_shared: bool, held: Held | None = None
    ) -> ResolvedBudget:
        """Return this rank's part of a budget, which is that of its machine: of its host, its cores
        and its drives.

        Who names the same directory on the same machine has an equal part of it. Directories of one
        file system, which ranks may have each for itself, have together no more than is free there,
        and than the machine's ranks have `held` already.
        """
        places = {directory: str(Path(directory).resolve()) for directory in budget.nvme}
        on_drives = {} if held is None else held.on_systems
        systems = {each: _file_system_of(each) for each in budget.nvme}
        told = {
            "machine": Process.own().machine,
            "host": budget.host,
            "cores": sorted(os.sched_getaffinity(0)),
            "nodes": read_nodes(),
            "drives": {
                places[each]: [
                    systems[each][0],
                    systems[each][1] + on_drives.get(systems[each][0], 0),
                    limit,
                ]
                for each, limit in budget.nvme.items()
            },
        }
        said = [
            json.loads(each)
            for each in self.collectives.share("budgets", json.dumps(told).encode())
        ]
        ranks = [rank for rank, each in enumerate(said) if each["machine"] == told["machine"]]
        here = [said[rank] for rank in ranks]
        self.neighbours, self._first_here = len(here), ranks[0]
        self.cores = divide_cores([each["cores"] for each in here], here[0]["nodes"])[
            ranks.index(self.rank)
        ]
        host = min(each["host"] for each in here) // len(here)
        drives = [each["drives"] for each in here]
        self.users = {name: sum(place in each for each in drives) for name, place in places.items()}
        nvme = {
            directory: _part_of(places[directory], limit, drives)
            for directory, limit in budget.nvme.items()
        }
        return replace(
            budget, host=host, device=host if device_is_shared else budget.device, nvme=nvme
        )

    def tell_of_shared_cores(self) -> None:
        """Warn, once a machine, where it has too few cores for its ranks; once budgets were
        shared.
        """
        if self.cores.is_shared and self.rank == self._first_here:
            _LOG.warning(
                "%d ranks of this machine share cores %s, fewer than they are: updates of one wait "
                "for another's",
                self.neighbours,
                ", ".join(map(str, self.cores.cores)),
            )

    def held_here(self, host: int, drives: Mapping[str, int]) -> Held:
        """Return what all ranks of this machine hold already, of which this one says what it
        does.
        """
        told = {
            "machine": Process.own().machine,
            "host": host,
            "drives": [[_file_system_of(each)[0], nbytes] for each, nbytes in drives.items()],
        }
        said = [
            json.loads(each)
            for each in self.collectives.share("what is held already", json.dumps(told).encode())
        ]
        here = [each for each in said if each["machine"] == told["machine"]]
        systems: Counter[str] = Counter()
        for each in here:
            for system, nbytes in each["drives"]:
                systems[system] += nbytes
        return Held(sum(each["host"] for each in here), systems)

    def once_a_machine(self, what: str, make: Callable[[], str]) -> str:
        """Return what the first rank of this machine makes, while the others wait; once budgets
        were shared.
        """
        mine = make() if self.rank == self._first_here else ""
        return self.collectives.share(what, mine.encode())[self._first_here].decode()

    # --- who owns what ----------------------------------------------------------------------------

    def cut(
        self,
        trained: Sequence[TrainedParameter],
        frozen: Sequence[ModelParameter],
        is_cut: Callable[[torch.nn.Parameter], ShardSpec | None] = lambda _: None,
    ) -> Cut:
        """Cut parameters over the ranks, but for those that are, as `is_cut` says.

        What this one owns of the others shares the memory of the whole ones until it is moved.
        """
        partitioner = Partitioner(self.shards.size, self.partitioning)
        known = {each.number: is_cut(each.parameter) for each in (*trained, *frozen)}
        specs = tuple(
            known[each.number] or partitioner.cut(each.numel) for each in (*trained, *frozen)
        )
        return Cut(
            ranks=self,
            wholes=tuple(trained),
            frozen_wholes=tuple(frozen),
            trained=tuple(
                TrainedParameter(
                    each.number,
                    each.name,
                    self._own(each, spec, has_values=known[each.number] is None),
                    each.dtype,
                    each.group,
                    part_of=each.parameter,
                )
                for each, spec in zip(trained, specs, strict=False)
            ),
            frozen=tuple(
                ModelParameter(
                    each.number,
                    each.name,
                    self._own(each, specs[each.number], has_values=known[each.number] is None),
                    each.dtype,
                    part_of=each.parameter,
                )
                for each in frozen
            ),
            specs=specs,
        )

    def _own(
        self, each: ModelParameter, spec: ShardSpec, *, has_values: bool
    ) -> torch.nn.Parameter:
        shard, whole = spec.shards[self.shards.rank], each.parameter.detach()
        if not has_values and shard.numel:
            return torch.nn.Parameter(
                absent(whole.dtype, torch.Size([shard.numel]), whole.device), requires_grad=False
            )
        # no view, which would keep all of it
        values = torch.empty(0, dtype=whole.dtype, device=whole.device)
        if shard.numel:
            values = whole.reshape(-1)[shard.first_element : shard.end]
        return torch.nn.Parameter(values, requires_grad=False)

    def own(self, spec: ShardSpec, whole: torch.Tensor) -> torch.Tensor:
        """Return what this rank owns of a flat tensor."""
        shard = spec.shards[self.shards.rank]
        return whole[shard.first_element : shard.end]

    def group(
        self, name: str, members: Sequence[GroupMember], collectives: Collectives | None = None
    ) -> ShardGroup:
        """Return parameters that go together."""
        return ShardGroup(name, members, collectives or self.shards, partitioning=self.partitioning)

    def whole(self, name: str, spec: ShardSpec, shard: torch.Tensor) -> torch.Tensor:
        """Return, on every rank and in new host memory, all of what each has a shard of; flat, as
        they are.
        """
        group = self.group(name, [GroupMember(name, spec, shard.dtype)])
        whole = torch.empty(spec.numel, dtype=shard.dtype, device="cpu")
        wire = torch.empty(
            wire_of(group.gather_bytes(), self.shards.size + 1, self.config.bucket_bytes),
            dtype=torch.uint8,
            device="cpu",
        )
        group.gather([shard], [whole], wire=wire).wait()
        return whole

    def norm(self, sums: GradientSums, specs: Sequence[ShardSpec]) -> GradientNorm:
        """Return the norm of what all ranks have the block sums of."""
        whole = GradientSums([spec.numel for spec in specs])
        for number, blocks in enumerate(share_block_sums(self.shards, specs, sums.blocks)):
            whole.put(number, 0, blocks)
        return whole.total()


@contextmanager
def together(
    config: RanksConfig, budget: Callable[[], ResolvedBudget]
) -> Iterator[tuple[Ranks | None, ResolvedBudget]]:
    """Yield the other ranks, if there are any, and this one's part of a budget; tell them what the
    body raises.
    """
    ranks = Ranks.join(config)
    if ranks is None:
        yield None, budget()
        return
    try:
        ranks.agree_on_versions()
        yield ranks, ranks.share_budget(budget(), device_is_shared=False)
    except BaseException as error:
        ranks.close(error)
        raise


def wire_of(nbytes: int, parts: int, most: int) -> int:
    """Return how large a buffer is taken where `nbytes` let a collective go in one round, and it
    has so many parts.
    """
    least = 64 * parts
    return min(nbytes, max(align_up(most, least), least)) if nbytes else 0


def _told(values: Sequence[str | None]) -> str | None:
    """Say which ranks said what, where it is not the same."""
    ranks: dict[str | None, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    if len(ranks) == 1:
        return None
    return ", ".join(
        f"{'nothing' if value is None else value} on rank{'s' if len(who) > 1 else ''} "
        f"{', '.join(map(str, who))}"
        for value, who in ranks.items()
    )


def _flat(mapping: Mapping[str, object], within: str = "") -> Iterator[tuple[str, object]]:
    for name, value in mapping.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{within}{name}.")
        else:
            yield f"{within}{name}", value


def _kind_of(each: ModelParameter) -> str:
    of = f"in group {each.group}" if isinstance(each, TrainedParameter) else "frozen"
    return (
        f"{str(each.parameter.dtype).removeprefix('torch.')} {list(each.parameter.shape)} {of}, "
        f"number {each.number}"
    )


def _file_system_of(directory: str) -> tuple[str, int]:
    """Return which one a directory is on, and how many bytes may be taken there, as budgets count
    them.
    """
    mount = find_mount(read_mounts(), os.path.realpath(directory))
    return mount.device if mount else "", probe_capacity([directory]).nvme[directory]


def _part_of(place: str, limit: int, drives: Sequence[Mapping[str, tuple[str, int, int]]]) -> int:
    """Return a rank's part of a directory, of which `drives` have what each rank of the machine
    said.
    """
    system = next(each[place][0] for each in drives if place in each)
    limits: dict[str, int] = {}
    free = []
    for each in drives:
        for other, (where, bytes_, most) in each.items():
            if where == system:
                limits[other] = max(limits.get(other, 0), most)
                free.append(bytes_)
    every = sum(limits.values())
    part = limit // sum(place in each for each in drives)
    return part if every <= min(free) else part * min(free) // every


def _version() -> str:
    try:
        return metadata.version("infinity-engine")
    except metadata.PackageNotFoundError:
        return "unknown (not installed)"
