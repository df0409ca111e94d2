"""`Ranks`: this rank and the others that train one model: agreements, shards and whole values.

Knows parameters, budgets and settings; fetches, reduces and updates nothing. `initialize` makes it
where there are several ranks. It is closed last, with the error if there is one, which the other
ranks then raise.
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
    ShardGroup,
    ShardSpec,
    share_block_sums,
)
from infinity_engine.partition.failures import Process
from infinity_engine.partition.wire import WIRE_ALIGNMENT
from infinity_engine.plan import ResolvedBudget
from infinity_engine.units import align_up

__all__ = ["Cut", "Held", "Ranks", "together", "wire_of"]

_LOG = logging.getLogger(__name__)
_MOST_SHOWN = 3
# Settings that may differ between ranks: where drives are, how fast they are, what is recorded.
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
    """The model's parameters, whole and as this rank's shards; `specs` has all ranks' shards."""

    ranks: Ranks
    wholes: tuple[TrainedParameter, ...]
    frozen_wholes: tuple[ModelParameter, ...]
    trained: tuple[TrainedParameter, ...]
    frozen: tuple[ModelParameter, ...]
    specs: tuple[ShardSpec, ...]


@dataclass(frozen=True)
class Held:
    """What the ranks of this machine already hold of its host and its file systems."""

    host: int
    on_systems: Mapping[str, int]

    def in_directory(self, directory: str) -> int:
        """Return what they hold of the file system of a directory."""
        return self.on_systems.get(_file_system_of(directory)[0], 0)


class Ranks:
    """Rank `rank` of `size`, two or more.

    `collectives` are those of all ranks, `shards` those of the ranks that share one copy of the
    model, which may be all. `gradients` is a second sequence over the same ranks as `shards`:
    reduces run beside gathers. `replicas` are the ranks that own the same shards, or None where all
    share one copy.
    """

    def __init__(self, collectives: Collectives, config: RanksConfig) -> None:
        self.config = config
        self.neighbours = 1
        """How many ranks this machine has, after `share_budget`."""
        self.users: Mapping[str, int] = MappingProxyType({})
        """How many of these use the file system of each directory of this rank, after
        `share_budget`."""
        self.cores = CoreShare(tuple(sorted(os.sched_getaffinity(0))), is_shared=False)
        """Which of this process's cores are this rank's, after `share_budget`."""
        self._first_here = collectives.rank
        self.collectives = collectives
        # Before the others are asked: each rank is to tell it, whichever leaves first.
        self._check_mesh(config.shard_ranks)
        # Before any group is made: groups of other meshes would not match.
        self.agree_again_on("the mesh", {"ranks.shard_ranks": config.shard_ranks})
        self.shards, self.replicas = collectives, None
        if config.shard_ranks not in {None, collectives.size}:
            self.shards, self.replicas = collectives.split(config.shard_ranks)
        # All ranks make it here, at the same place: making a group is a collective.
        self.gradients = self.shards.beside()

    @classmethod
    def join(cls, config: RanksConfig) -> Ranks | None:
        """Connect to the other ranks. Return None where there are none."""
        if config.stage is ShardingStage.ALONE:
            return None
        collectives = Collectives.join(timeout_s=config.timeout_s)
        if collectives.size == 1:
            collectives.close()
            return None
        try:
            return cls(collectives, config)
        # Other ranks wait in the same constructor; the error ends that.
        except BaseException as error:
            collectives.close(error)
            raise

    def _check_mesh(self, shard_ranks: int | None) -> None:
        if shard_ranks is not None and self.size % shard_ranks:
            fitting = ", ".join(
                str(divisor) for divisor in range(1, self.size + 1) if self.size % divisor == 0
            )
            expected = f"a divisor of the {self.size} ranks: {fitting}"
            raise ConfigError(field="ranks.shard_ranks", value=shard_ranks, expected=expected)

    @property
    def rank(self) -> int:
        """This rank's number."""
        return self.collectives.rank

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self.collectives.size

    def on_wait(self, call: Callable[[], object]) -> None:
        """Call `call` again and again while this rank waits for others; its error ends the wait."""
        for sequence in self._sequences():
            sequence.on_wait(call)

    def close(self, error: BaseException | None = None) -> None:
        """Leave the other ranks, which raise `error` if there is one. Again: does nothing."""
        for sequence in self._sequences():
            sequence.close(error)

    def _sequences(self) -> list[Collectives]:
        """Return all sequences of collectives, those made of others first."""
        found = [
            self.gradients,
            *([] if self.replicas is None else [self.replicas]),
            self.shards,
            self.collectives,
        ]
        # `shards` and `collectives` are one where all ranks share one copy.
        return list(dict.fromkeys(found))

    # --- what all have in common ------------------------------------------------------------------

    def agree_on(self, what: str, values: Mapping[str, object]) -> None:
        """Make sure that all ranks have the same values for the same names.

        Raises:
            CollectiveError: they have not. The error names the first values that differ, and the
                ranks that have each.
        """
        # As text: ranks compare what the values print, and no rank has to load another's classes.
        payload = json.dumps({name: str(value) for name, value in values.items()}).encode()
        answers: list[dict[str, str]] = [
            json.loads(answer) for answer in self.collectives.share(what, payload)
        ]
        # In the order of first mention; a rank may lack a name that another has.
        names = list(dict.fromkeys(name for answer in answers for name in answer))
        found = [
            f"{name}: {difference}"
            for name in names
            if (difference := _difference([answer.get(name) for answer in answers]))
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
        """Make sure that all ranks run the same versions.

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
        """Make sure that all ranks train the same model in the same way, from the same values.

        `digest` hashes the values.

        Raises:
            CollectiveError: they do not.
        """
        self.agree_on_versions()
        settings = {
            name: value
            for name, value in _flat(config.to_mapping())
            # startswith: `telemetry` stands for all settings of that section.
            if not name.startswith(_OF_EACH_RANK)
        }
        self.agree_on("settings", {**settings, **others})
        optimizer = {f"optimizer's group {number}": rule for number, rule in enumerate(rules)}
        self.agree_on(
            "the model", {**{known.name: _kind_of(known) for known in parameters}, **optimizer}
        )
        # Last: hashes take a pass over all values, and the checks above are cheap.
        self.agree_on(
            "the model's first values",
            {known.name: digest(known.parameter) for known in parameters},
        )

    def agree_again_on(self, what: str, values: Mapping[str, object]) -> None:
        """Like `agree_on`, for values that rarely differ: ranks compare a checksum first.

        Raises:
            CollectiveError: the values differ.
        """
        checksum = crc32c(json.dumps({name: str(value) for name, value in values.items()}).encode())
        if (
            len(set(self.collectives.share(f"whether all agree on {what}", str(checksum).encode())))
            > 1
        ):
            # Only to find out what differs; all ranks come here, as all have seen the checksums.
            self.agree_on(what, values)

    def any_has_more(self, *, has_more: bool, has_had: bool) -> bool:
        """Tell whether any rank has another batch. Ranks without one use their last one again.

        Raises:
            ConfigError: a rank has had no batch so far.
        """
        own = b"more" if has_more else b"again" if has_had else b"none"
        answers = self.collectives.share("which ranks have another batch", own)
        without = [rank for rank, answer in enumerate(answers) if answer == b"none"]
        # Without "more" nothing is run, so a rank without any batch is no fault.
        if b"more" in answers and without:
            expected = "at least one on each rank, which the rank uses again while others have more"
            raise ConfigError(
                field="batches",
                value=f"none on rank {', '.join(map(str, without))}",
                expected=expected,
            )
        return b"more" in answers

    def go_on_with(self, config: RanksConfig) -> None:
        """Go on with the ranks that have built or loaded the model, with these settings.

        Raises:
            ConfigError: the settings do not fit what was built.
            RuntimeError: the ranks are no longer connected.
        """
        if self.collectives.failed:
            raise RuntimeError(
                "The ranks that built this model are no longer connected: one of them failed, or "
                "an earlier initialize did. Build the model again on all ranks"
            )
        before = self.config
        for name, now, then in (
            # Of the stage, only whether this rank is alone mattered when the model was built.
            ("stage", config.stage is ShardingStage.ALONE, before.stage is ShardingStage.ALONE),
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

    def tell(self, what: str, value: object) -> list[Any]:
        """Return what each rank passes, as JSON has it."""
        return [
            json.loads(answer)
            for answer in self.collectives.share(what, json.dumps(value).encode())
        ]

    def least(self, what: str, value: int) -> int:
        """Return the smallest of the ranks' values."""
        return min(int(answer) for answer in self.collectives.share(what, str(value).encode()))

    def most(self, what: str, value: int) -> int:
        """Return the largest of the ranks' values."""
        return max(int(answer) for answer in self.collectives.share(what, str(value).encode()))

    def share_budget(
        self, budget: ResolvedBudget, *, device_is_shared: bool, held: Held | None = None
    ) -> ResolvedBudget:
        """Return this rank's part of its machine's budget: of the host, the cores and the drives.

        Ranks of a machine that name the same directory get equal parts of it. Directories of one
        file system together get no more than is free there; `held` counts what the ranks hold
        already as free.
        """
        # Resolved, so that two names of one directory are one place.
        places = {directory: str(Path(directory).resolve()) for directory in budget.nvme}
        on_drives = {} if held is None else held.on_systems
        systems = {directory: _file_system_of(directory) for directory in budget.nvme}
        own = {
            "machine": Process.own().machine,
            "host": budget.host,
            # What the launcher has left to this process.
            "cores": sorted(os.sched_getaffinity(0)),
            "nodes": read_nodes(),
            "drives": {
                places[directory]: [
                    systems[directory][0],
                    systems[directory][1] + on_drives.get(systems[directory][0], 0),
                    limit,
                ]
                for directory, limit in budget.nvme.items()
            },
        }
        answers = [
            json.loads(answer)
            for answer in self.collectives.share("budgets", json.dumps(own).encode())
        ]
        # By machine, not by node number: a launcher may place ranks anywhere.
        ranks = [rank for rank, answer in enumerate(answers) if answer["machine"] == own["machine"]]
        here = [answers[rank] for rank in ranks]
        self.neighbours, self._first_here = len(here), ranks[0]
        # All ranks compute the same division and take their own part.
        self.cores = divide_cores([neighbour["cores"] for neighbour in here], here[0]["nodes"])[
            ranks.index(self.rank)
        ]
        # The least of all: a limit that one rank sees, such as a cgroup's, may bind all of them.
        host = min(neighbour["host"] for neighbour in here) // len(here)
        drives = [neighbour["drives"] for neighbour in here]
        # By file system: ranks with directories of their own on one drive share its rates too.
        used = [{system for system, _, _ in directories.values()} for directories in drives]
        self.users = {
            directory: sum(system in rank_systems for rank_systems in used)
            for directory, (system, _) in systems.items()
        }
        nvme = {
            directory: _part_of(places[directory], limit, drives)
            for directory, limit in budget.nvme.items()
        }
        return replace(
            budget, host=host, device=host if device_is_shared else budget.device, nvme=nvme
        )

    def tell_of_shared_cores(self) -> None:
        """Warn, on the machine's first rank, if it has too few cores. After `share_budget`."""
        if self.cores.is_shared and self.rank == self._first_here:
            _LOG.warning(
                "%d ranks of this machine share the cores %s: there are fewer cores than ranks. A "
                "rank's updates wait for those of another rank",
                self.neighbours,
                ", ".join(map(str, self.cores.cores)),
            )

    def held_here(self, host: int, drives: Mapping[str, int]) -> Held:
        """Return what all ranks of this machine hold; this one holds `host` and `drives`."""
        own = {
            "machine": Process.own().machine,
            "host": host,
            "drives": [
                [_file_system_of(directory)[0], nbytes] for directory, nbytes in drives.items()
            ],
        }
        answers = [
            json.loads(answer)
            for answer in self.collectives.share("what is held already", json.dumps(own).encode())
        ]
        here = [answer for answer in answers if answer["machine"] == own["machine"]]
        systems: Counter[str] = Counter()
        for neighbour in here:
            for system, nbytes in neighbour["drives"]:
                systems[system] += nbytes
        return Held(sum(neighbour["host"] for neighbour in here), systems)

    def once_a_machine(self, what: str, make: Callable[[], str]) -> str:
        """Return what the machine's first rank makes; its others wait. After `share_budget`."""
        # The others go straight to `share`, which waits for the first rank.
        made = make() if self.rank == self._first_here else ""
        return self.collectives.share(what, made.encode())[self._first_here].decode()

    # --- who owns what ----------------------------------------------------------------------------

    def cut(
        self,
        trained: Sequence[TrainedParameter],
        frozen: Sequence[ModelParameter],
        is_cut: Callable[[torch.nn.Parameter], ShardSpec | None] = lambda _: None,
    ) -> Cut:
        """Cut parameters over the ranks; those that `is_cut` returns a spec for are cut already.

        This rank's shards are views of the whole values until they are moved.
        """
        partitioner = Partitioner(self.shards.size)
        built = {
            known.number: spec
            for known in (*trained, *frozen)
            if (spec := is_cut(known.parameter)) is not None
        }
        # In the order of numbers: a cut depends on those before it, so all ranks cut alike.
        specs = tuple(
            built.get(known.number) or partitioner.cut(known.numel) for known in (*trained, *frozen)
        )
        return Cut(
            ranks=self,
            wholes=tuple(trained),
            frozen_wholes=tuple(frozen),
            trained=tuple(
                TrainedParameter(
                    whole.number,
                    whole.name,
                    self._own(whole, spec, has_values=whole.number not in built),
                    whole.dtype,
                    whole.group,
                    part_of=whole.parameter,
                )
                for whole, spec in zip(trained, specs[: len(trained)], strict=True)
            ),
            frozen=tuple(
                ModelParameter(
                    whole.number,
                    whole.name,
                    self._own(whole, specs[whole.number], has_values=whole.number not in built),
                    whole.dtype,
                    part_of=whole.parameter,
                )
                for whole in frozen
            ),
            specs=specs,
        )

    def _own(
        self, parameter: ModelParameter, spec: ShardSpec, *, has_values: bool
    ) -> torch.nn.Parameter:
        shard, whole = spec.shards[self.shards.rank], parameter.parameter.detach()
        if not has_values and shard.numel:
            # Cut when it was built: the values come from where building left them.
            return torch.nn.Parameter(
                absent(whole.dtype, torch.Size([shard.numel]), whole.device), requires_grad=False
            )
        # An empty shard gets memory of its own: a view would keep the whole parameter alive.
        values = torch.empty(0, dtype=whole.dtype, device=whole.device)
        if shard.numel:
            values = whole.reshape(-1)[shard.first_element : shard.end]
        return torch.nn.Parameter(values, requires_grad=False)

    def own(self, spec: ShardSpec, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard of a flat tensor."""
        shard = spec.shards[self.shards.rank]
        return whole[shard.first_element : shard.end]

    def group(
        self, name: str, members: Sequence[GroupMember], collectives: Collectives | None = None
    ) -> ShardGroup:
        """Return a group of parameters that one collective moves."""
        return ShardGroup(name, members, collectives or self.shards)

    def wholes(
        self, name: str, spec: ShardSpec, shards: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return whole flat tensors, in new host memory on every rank, from the shards of all.

        They have the same elements, and one collective gathers them.
        """
        group = self.group(name, [GroupMember(name, spec, shard.dtype) for shard in shards])
        wholes = [torch.empty(spec.numel, dtype=shard.dtype, device="cpu") for shard in shards]
        wire = torch.empty(
            wire_of(group.gather_bytes(), self.shards.size + 1, self.config.bucket_bytes),
            dtype=torch.uint8,
            device="cpu",
        )
        group.gather(shards, wholes, wire=wire).wait()
        return wholes

    def norm(self, sums: GradientSums, specs: Sequence[ShardSpec]) -> GradientNorm:
        """Return the norm of the gradients of which the ranks have the block sums."""
        whole = GradientSums([spec.numel for spec in specs])
        for number, blocks in enumerate(share_block_sums(self.shards, specs, sums.blocks)):
            whole.put(number, 0, blocks)
        return whole.total()


@contextmanager
def together(
    config: RanksConfig, budget: Callable[[], ResolvedBudget]
) -> Iterator[tuple[Ranks | None, ResolvedBudget]]:
    """Yield the ranks, None for one alone, and this rank's part of a budget.

    If the body raises, the other ranks raise too.
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
    """Return the size of a collective's buffer: `nbytes`, or of `parts` parts within `most`."""
    least = WIRE_ALIGNMENT * parts  # that a round can take
    return min(nbytes, max(align_up(most, least), least)) if nbytes else 0


def _difference(values: Sequence[str | None]) -> str | None:
    """Say which ranks have which value, or return None where all are equal."""
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


def _kind_of(known: ModelParameter) -> str:
    of = f"in group {known.group}" if isinstance(known, TrainedParameter) else "frozen"
    return (
        f"{str(known.parameter.dtype).removeprefix('torch.')} {list(known.parameter.shape)} {of}, "
        f"number {known.number}"
    )


def _file_system_of(directory: str) -> tuple[str, int]:
    """Return the file system of a directory, and how many bytes it has free for a budget."""
    # realpath: a link may lead to another file system.
    mount = find_mount(read_mounts(), os.path.realpath(directory))
    return mount.device if mount else "", probe_capacity([directory]).nvme[directory]


def _part_of(place: str, limit: int, drives: Sequence[Mapping[str, tuple[str, int, int]]]) -> int:
    """Return a rank's part of a directory; `drives` has what each rank of the machine uses."""
    system = next(directories[place][0] for directories in drives if place in directories)
    limits: dict[str, int] = {}
    free = []
    for directories in drives:
        for other, (where, free_there, most) in directories.items():
            # Several directories of one file system share what is free there.
            if where == system:
                # The same directory, named by several ranks, counts once.
                limits[other] = max(limits.get(other, 0), most)
                free.append(free_there)
    asked = sum(limits.values())
    part = limit // sum(place in directories for directories in drives)
    # In integers: rounding up would promise bytes that are not there.
    return part if asked <= min(free) else part * min(free) // asked


def _version() -> str:
    try:
        return metadata.version("infinity-engine")
    except metadata.PackageNotFoundError:
        return "unknown (not installed)"
