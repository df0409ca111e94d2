"""The rates that a strategy asks for where the settings have none: from a calibration, which is
measured if need be.

Says through `logging` when it measures, as that takes a while. Called once, before the plan is
made.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from deepnvme import IOQueue
from infinity_engine.accel import Accelerator
from infinity_engine.calibration import (
    FULL,
    CalibrationCache,
    CalibrationWarning,
    Effort,
    calibrated,
    kept_calibration,
)
from infinity_engine.calibration.device import device_identity
from infinity_engine.calibration.host import name_of
from infinity_engine.calibration.identity import machine_identity
from infinity_engine.config import EngineConfig
from infinity_engine.errors import CapacityError, ConfigError
from infinity_engine.optim import Rule
from infinity_engine.placement.placing import Wish, place
from infinity_engine.placement.sizing import Sizing
from infinity_engine.plan import (
    Auto,
    Calibration,
    Interleaved,
    NvmeStreamed,
    Rates,
    ResolvedBudget,
    Strategy,
    Tier,
)
from infinity_engine.plan.step import Home
from infinity_engine.ranks.ranks import Ranks
from infinity_engine.units import GiB, format_bytes

__all__ = ["needs_rates", "of_one_rank", "with_rates", "with_rates_of_machine"]

_LOG = logging.getLogger(__name__)
# of states and parameters: less is moved so fast that a minute is not won back
_WORTH_MEASURING = GiB


def needs_rates(strategy: Strategy) -> bool:
    """Tell whether rates decide what happens when: also where a strategy says what visits."""
    if isinstance(strategy, NvmeStreamed):
        return needs_rates(strategy.update)
    return isinstance(strategy, Interleaved)


def with_rates(
    config: EngineConfig,
    wish: Wish,
    rules: Sequence[Rule],
    *,
    accelerator: Accelerator,
    budget: ResolvedBudget,
    room: ResolvedBudget,
    queue: IOQueue | None,
    sizing: Sizing,
    io_bytes: int,
    ranks: Ranks | None = None,
) -> EngineConfig:
    """Return the settings with rates, where these are needed, are not given, and may be taken from
    a calibration.

    Plans are made for `room`, which is all of the budget or, of several ranks, the part of it that
    is for shards. A caller with a policy of its own gives the rates that it needs. `auto` needs
    them where not everything fits into one place, and where a training is so large that measuring
    takes less than a good plan saves; it does without them where they cannot be had. A calibration
    file that the settings name is read in any case, so that a wrong path never goes unnoticed.

    Raises:
        ConfigError: the calibration file that the settings name cannot be used; or a calibration
            has to be measured, and the budget or a directory does not allow it.
    """
    given = None if config.calibration in ("auto", "off") else _read(Path(config.calibration))
    if wish.policy is not None or config.rates is not None or config.calibration == "off":
        return config
    if isinstance(config.strategy, Auto):
        states = 4 * (1 + len(sizing.state_names)) * sizing.numel
        worth = states + sum(sizing.parameters) >= _WORTH_MEASURING
        worth = worth and not config.storage.early_updates
        if not worth or not _leaves_a_choice(wish, sizing, room, io_bytes):
            return config
        return _with_rates_for_auto(
            config, rules, accelerator, budget, queue, given=given, ranks=ranks
        )
    # on one memory, nothing visits the device
    if accelerator.unified or not needs_rates(config.strategy):
        return config
    streams = isinstance(config.strategy, NvmeStreamed)
    directories = tuple(budget.nvme) if streams else ()
    found = given or _calibration(accelerator, budget, directories, queue)
    _warn_of_doubtful(found, config.calibration, accelerator)
    rates = of_one_rank(
        found,
        ranks,
        optimizer=name_of(rules[0]),
        threads=config.update_threads,
        directories=directories,
        beside_io=streams,
        beside_copies=True,
    )
    # While subgroups visit the device, its links are busy both ways.
    both = rates.both_at_once()
    rates = replace(
        rates, h2d_bytes_per_s=both.h2d_bytes_per_s, d2h_bytes_per_s=both.d2h_bytes_per_s
    )
    return replace(config, rates=rates)


def with_rates_of_machine(
    config: EngineConfig,
    ranks: Ranks,
    directories: Iterable[str],
    rated: Callable[[], EngineConfig],
) -> EngineConfig:
    """Return the settings as `rated` does, which only one rank of each machine asks; but for drives
    of its own.

    Raises:
        CollectiveError: that rank has failed, as `with_rates` says.
    """
    own_directories = sorted(directories)

    def asked() -> str:
        rates = rated().rates
        return json.dumps([own_directories, None if rates is None else rates.to_mapping()])

    measured_directories, rates = json.loads(ranks.once_a_machine("rates of the machine", asked))
    if config.rates is not None or config.calibration == "off":
        return config
    if measured_directories != own_directories:
        return rated()
    return replace(config, rates=None if rates is None else Rates.from_mapping(rates))


def _leaves_a_choice(wish: Wish, sizing: Sizing, room: ResolvedBudget, io_bytes: int) -> bool:
    """Tell whether something has to be elsewhere than where modules compute."""
    try:
        plan = place(sizing, wish, room, io_bytes=io_bytes)
    except (CapacityError, ConfigError):  # placing it in earnest raises it
        return False
    if sizing.unified:
        return plan.demand.nvme > 0
    return plan.steps.parameters is not Tier.DEVICE or set(plan.steps.homes().values()) != {
        Home.RESIDENT
    }


def _with_rates_for_auto(
    config: EngineConfig,
    rules: Sequence[Rule],
    accelerator: Accelerator,
    budget: ResolvedBudget,
    queue: IOQueue | None,
    *,
    given: Calibration | None,
    ranks: Ranks | None,
) -> EngineConfig:
    directories = tuple(budget.nvme)
    try:
        optimizer = name_of(rules[0])
        found = given or _calibration(accelerator, budget, directories, queue)
        _warn_of_doubtful(found, config.calibration, accelerator)
        rates = of_one_rank(
            found,
            ranks,
            optimizer=optimizer,
            threads=config.update_threads,
            directories=directories,
            beside_io=bool(directories),
            beside_copies=not accelerator.unified,
        )
    except ConfigError as problem:
        if config.calibration != "auto":
            raise
        _LOG.warning("strategy='auto' plans without rates, by what fits: %s", problem)
        return config
    return replace(config, rates=rates)


def of_one_rank(
    found: Calibration,
    ranks: Ranks | None,
    *,
    optimizer: str,
    threads: int | None,
    directories: Sequence[str],
    beside_io: bool,
    beside_copies: bool,
) -> Rates:
    """Return what one rank gets while the others of its machine do the same: one at a time was
    measured.

    They update with so many threads each, and share host memory and the drives that they name.
    Links are their own.
    """
    neighbours = 1 if ranks is None else ranks.neighbours
    rates = found.rates(
        optimizer=optimizer,
        threads=None if threads is None else threads * neighbours,
        directories=directories,
        beside_io=beside_io,
        beside_copies=beside_copies,
    )
    return rates if ranks is None else rates.divided(neighbours, users=ranks.users)


def _calibration(
    accelerator: Accelerator,
    budget: ResolvedBudget,
    directories: Sequence[str],
    queue: IOQueue | None,
) -> Calibration:
    """Return what was kept, or measure within the budget."""
    try:
        kept = kept_calibration(directories, accelerator=accelerator, queue=queue)
        if kept is not None and len(kept.drives) == len(directories):
            return kept
        _check(budget, directories)
        where = CalibrationCache.of_user().folder
        _LOG.warning(
            "measuring what this machine can do, in about a minute; kept in %s, so that it is "
            "done once. "
            "`infinity calibrate` does it beforehand; rates= or calibration='off' does without",
            where,
        )
        return calibrated(
            directories,
            accelerator=accelerator,
            queue=queue,
            effort=_effort(accelerator, budget),
            report=lambda part: _LOG.info("measuring %s", part),
            waiting=lambda: _LOG.info("another process measures this machine: waiting for it"),
        )
    except OSError as problem:
        expected = (
            f"directories that can be measured ({problem}); or give rates=, or calibration='off'"
        )
        raise ConfigError(
            field="budget.nvme", value=", ".join(directories), expected=expected
        ) from problem


def _effort(accelerator: Accelerator, budget: ResolvedBudget) -> Effort:
    """Return how much memory measuring takes: more beside a GPU, where the budget has it."""
    larger = FULL.beside_a_gpu()
    has_room = accelerator.works_beside_host and budget.host >= larger.memory_bytes
    return larger if has_room else FULL


def _check(budget: ResolvedBudget, directories: Sequence[str]) -> None:
    """Refuse to measure with more than the budget allows."""
    beforehand = "run `infinity calibrate` once beforehand, with the directories; or give rates="
    if budget.host < FULL.memory_bytes:
        needed = format_bytes(FULL.memory_bytes)
        expected = f"{needed} or more, which measuring this machine's rates takes; or {beforehand}"
        raise ConfigError(field="budget.host", value=format_bytes(budget.host), expected=expected)
    for directory in directories:
        if budget.nvme[directory] < FULL.file_bytes:
            needed = format_bytes(FULL.file_bytes)
            expected = f"{needed} or more, which measuring the drive takes; or {beforehand}"
            value = format_bytes(budget.nvme[directory])
            raise ConfigError(field=f"budget.nvme[{directory!r}]", value=value, expected=expected)


def _read(path: Path) -> Calibration:
    """Return the calibration in a file.

    Raises:
        ConfigError: the file is missing, or `infinity calibrate` did not write it.
    """
    try:
        # Opening a pipe would wait for a writer, and a device may never end.
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise OSError("it is not a regular file")
        return Calibration.from_mapping(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError) as problem:
        expected = f"auto, off, or a file that `infinity calibrate --json` wrote ({problem})"
        raise ConfigError(field="calibration", value=str(path), expected=expected) from problem


def _warn_of_doubtful(found: Calibration, source: str, accelerator: Accelerator) -> None:
    """Warn where rates are used that another machine was measured to have, or a busy one."""
    if found.is_disturbed:
        _LOG.warning(
            "other processes used %.0f%% of the processors while the rates of this plan were "
            "measured, so it may be a slow one. Run `infinity calibrate` with the directories when "
            "the machine is quiet",
            100 * found.most_others_share,
        )
    here = machine_identity(device_identity(accelerator))
    names = [*here, *(name for name in found.machine if name not in here)]
    differing = [name for name in names if here.get(name) != found.machine.get(name)]
    if differing:
        listed = "; ".join(
            f"{name}: {found.machine.get(name)}, here {here.get(name)}" for name in differing
        )
        warnings.warn(
            f"{source} is of another machine ({listed}): its rates are used",
            CalibrationWarning,
            stacklevel=2,
        )
