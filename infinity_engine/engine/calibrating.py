"""The rates that a strategy asks for where the settings have none: from a calibration, which is measured if need be.

Says through `logging` when it measures, as that takes a while. Called once, before the plan is made.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from deepnvme import IOQueue
from infinity_engine.accel import Accelerator
from infinity_engine.calibration import FULL, CalibrationCache, CalibrationWarning, calibrated, kept_calibration
from infinity_engine.calibration.device import device_identity
from infinity_engine.calibration.host import name_of
from infinity_engine.calibration.identity import machine_identity
from infinity_engine.config import EngineConfig
from infinity_engine.errors import ConfigError
from infinity_engine.optim import Rule
from infinity_engine.optim.policy import OffloadPolicy
from infinity_engine.plan import Calibration, Interleaved, NvmeStreamed, Rates, ResolvedBudget, Strategy
from infinity_engine.units import format_bytes

__all__ = ["needs_rates", "with_rates"]

_LOG = logging.getLogger(__name__)


def needs_rates(strategy: Strategy) -> bool:
    """Tell whether what a strategy leaves open is decided by rates."""
    if isinstance(strategy, NvmeStreamed):
        return needs_rates(strategy.update)
    return isinstance(strategy, Interleaved) and strategy.share is None and strategy.stride is None


def with_rates(
    config: EngineConfig,
    policy: OffloadPolicy | None,
    rules: Sequence[Rule],
    *,
    accelerator: Accelerator,
    budget: ResolvedBudget,
    queue: IOQueue | None,
) -> EngineConfig:
    """Return the settings with rates, where these are needed, are not given, and may be taken from a calibration.

    Whoever gives a policy of his own gives the rates that it needs.

    Raises:
        ConfigError: the calibration that the settings name cannot be used; or one has to be measured, and the budget
            or a directory does not allow it.
    """
    if policy is not None or config.rates is not None or config.calibration == "off":
        return config
    if accelerator.unified or not needs_rates(config.strategy):  # on one memory, nothing visits the device
        return config
    streams = isinstance(config.strategy, NvmeStreamed)
    directories = tuple(budget.nvme) if streams else ()
    if config.calibration == "auto":
        found = _calibration(accelerator, budget, directories, queue)
    else:
        found = _read(Path(config.calibration), accelerator)
    rates = found.rates(
        optimizer=name_of(rules[0]),
        threads=config.update_threads,
        directories=directories,
        beside_io=streams,
        beside_copies=True,
    )
    return replace(config, rates=_both_ways(rates))


def _both_ways(rates: Rates) -> Rates:
    """Return the rates of links that are busy both ways, as they are while subgroups visit the device."""
    return replace(
        rates,
        h2d_bytes_per_s=rates.duplex_h2d_bytes_per_s or rates.h2d_bytes_per_s,
        d2h_bytes_per_s=rates.duplex_d2h_bytes_per_s or rates.d2h_bytes_per_s,
    )


def _calibration(
    accelerator: Accelerator, budget: ResolvedBudget, directories: Sequence[str], queue: IOQueue | None
) -> Calibration:
    """Return what was kept, or measure within the budget."""
    try:
        kept = kept_calibration(directories, accelerator=accelerator, queue=queue)
        if kept is not None and len(kept.drives) == len(directories):
            return kept
        _check(budget, directories)
        where = CalibrationCache.of_user().folder
        _LOG.warning(
            "measuring what this machine can do, in less than a minute; kept in %s, so that it is done once. "
            "`infinity calibrate` does it beforehand; rates= or calibration='off' does without",
            where,
        )
        return calibrated(
            directories, accelerator=accelerator, queue=queue, report=lambda line: _LOG.info("measuring %s", line)
        )
    except OSError as problem:
        expected = f"directories that can be measured ({problem}); or give rates=, or calibration='off'"
        raise ConfigError(field="budget.nvme", value=", ".join(directories), expected=expected) from problem


def _check(budget: ResolvedBudget, directories: Sequence[str]) -> None:
    """Refuse to measure with more than the budget allows."""
    beforehand = "run `infinity calibrate` once beforehand, with --directory for each directory; or give rates="
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


def _read(path: Path, accelerator: Accelerator) -> Calibration:
    """Return the calibration in a file; warn where it is of another machine."""
    try:
        found = Calibration.from_mapping(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError) as problem:
        expected = f"a file that `infinity calibrate --json` wrote ({problem})"
        raise ConfigError(field="calibration", value=str(path), expected=expected) from problem
    here = machine_identity(device_identity(accelerator))
    names = [*here, *(name for name in found.machine if name not in here)]
    others = [name for name in names if here.get(name) != found.machine.get(name)]
    if others:
        told = "; ".join(f"{name}: {found.machine.get(name)}, here {here.get(name)}" for name in others)
        warnings.warn(f"{path} is of another machine ({told}): its rates are used", CalibrationWarning, stacklevel=2)
    return found
