"""The plan of a training before it begins: what `infinity plan` says of this machine and budget.

Asks the planner and decides nothing. What it answers with are the settings that let the engine make
this very plan. Needs no torch. Called by train.py.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from infinity_engine.advice.doubt import RateSource
from infinity_engine.cli.plan_answer import Section, answer, refused
from infinity_engine.cli.plan_machine import AskedMachine, machine_of
from infinity_engine.cli.plan_machine import add_arguments as add_machine
from infinity_engine.cli.plan_question import (
    PRECISION_OF_DTYPE,
    add_settings,
    add_training,
    model_of,
    settings_of,
    training_of,
)
from infinity_engine.config import ActivationsAt, EngineConfig, Recompute, Tiling
from infinity_engine.errors import CapacityError, ConfigError
from infinity_engine.placement.tiles import tiled_by_room
from infinity_engine.plan import Budget, Capacity
from infinity_engine.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from infinity_engine.placement.models import ModelShape
    from infinity_engine.placement.training import Means, Training
    from infinity_engine.sim.remedies import Refusal, Remedy
    from infinity_engine.training.settings import TrainingSettings

__all__ = ["PlannedTraining", "plan_first"]

_OPTIONS_OF_TRAIN = MappingProxyType(
    {
        "--accumulation": "--accumulation-steps",
        "--tiling auto": '{"tiling": "auto"} in the file of --config',
        "no --subgroup": 'without the "subgroup_numel" of --config',
    }
)
"""What `infinity train` has in place of options of `infinity plan` that refusals name."""

_LESS_FREE = 32  # a part of the memory: what libraries and the model take until the engine begins


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedTraining:
    """The planner's answer; `fits` is None where it does not know the model."""

    fits: bool | None
    sections: Iterable[Section]
    settings: Mapping[str, object] = field(default_factory=dict)
    """Of the engine, which then makes this plan."""
    prediction: Mapping[str, object] | None = None


def plan_first(
    settings: TrainingSettings, engine: Mapping[str, Any], *, uses_gpu: bool
) -> PlannedTraining:
    """Return what the planner says of a training with these settings of the engine.

    Raises:
        ConfigError: a setting cannot be right.
    """
    config = EngineConfig.from_mapping(engine)
    asked = _question(settings, engine, uses_gpu=uses_gpu)
    try:
        model = model_of(asked)
    except ConfigError as error:
        # The engine knows it as soon as it is loaded, and refuses then what does not fit.
        words = f"None before the model is loaded, as the planner does not know it: {error}"
        return PlannedTraining(fits=None, sections=[("Plan", [("", words)])])
    precision = _precision(str(engine.get("precision", "model")), model)
    training = training_of(asked, model, precision)
    try:
        machine = machine_of(asked, precision, training)
    except ConfigError as error:
        if error.field != "directories":
            raise
        # The engine measures what was not, where that is worth its time.
        words = f"None before the model is loaded, as rates are missing: {error}"
        return PlannedTraining(fits=None, sections=[("Plan", [("", words)])])
    budget = Budget.from_mapping(engine.get("budget") or {})
    try:
        means = _within(machine.means, budget)
    except CapacityError as error:
        return PlannedTraining(fits=False, sections=[("The budget", [("", str(error))])])
    if config.activation_bytes:  # what the caller says goes before what the planner estimates
        means = replace(means, for_all=False, activation_bytes=config.activation_bytes)
    # Layers of a model that is built on drives are left whole.
    is_cut = config.tiling is Tiling.AUTO and not means.budget.nvme
    planned = _planned(asked, training, means, machine, is_cut=is_cut)
    stated = budget.device if uses_gpu else budget.host
    whole = means.budget.device if uses_gpu else means.budget.host
    return _for_engine(planned, config, less_free=0 if stated is not None else whole // _LESS_FREE)


def _for_engine(
    planned: PlannedTraining, config: EngineConfig, *, less_free: int
) -> PlannedTraining:
    """Return the plan with the settings that hold as well where so many bytes less are free."""
    at = config.activations.at
    if at is not ActivationsAt.DEVICE:
        if planned.fits:
            # What is moved takes memory that this plan has given away: the engine plans anew.
            return replace(planned, settings={})
        words = (
            "None before the model is loaded: there is no room for all activations where modules "
            f'compute, and the planner does not know how much activations.at="{at.value}" lets '
            "leave"
        )
        return PlannedTraining(fits=None, sections=[("Plan", [("", words)])])
    left = planned.settings.get("activation_bytes")
    if not isinstance(left, int):
        return planned
    kept = max(left - less_free, 0)
    return replace(planned, settings={**planned.settings, "activation_bytes": kept})


def _planned(
    asked: argparse.Namespace,
    training: Training,
    means: Means,
    machine: AskedMachine,
    *,
    is_cut: bool,
) -> PlannedTraining:
    from infinity_engine.advice.advising import advise
    from infinity_engine.sim.planner import decide
    from infinity_engine.sim.remedies import explain_refusal
    from infinity_engine.sim.report import report_of
    from infinity_engine.training.prediction import prediction_of

    limits, whole = settings_of(asked), training
    if is_cut:
        room = means.room_for_layers(training)
        tiled = tiled_by_room(training.model, width=training.width, room=room)
        training = training if tiled is None else replace(training, model=tiled.model)
    try:
        decision = decide(training, means, **limits)
    except CapacityError:
        explained = explain_refusal(whole, means, **limits, tiling=is_cut)
        if is_cut:  # drives leave layers whole
            with_drives = explain_refusal(whole, means, **limits).remedies
            remedies = (
                *(remedy for remedy in with_drives if remedy.more.nvme),
                *(remedy for remedy in explained.remedies if not remedy.more.nvme),
            )
            explained = replace(explained, remedies=remedies)
        refusal = _for_train(explained, training, means)
        return PlannedTraining(fits=False, sections=refused(refusal))
    report = report_of(decision, rated_bytes=machine.rated_bytes)
    report = replace(report, notes=(*machine.notes, *report.notes))
    # What is measured lets the engine say how much of it a step reaches.
    measured = machine.source is RateSource.MEASURED
    return PlannedTraining(
        fits=True,
        sections=[
            section
            for section in answer(
                report,
                training,
                advise(decision, machine.source, None),
                without_rate="`infinity calibrate` measures the rate of computing",
            )
            if section[0] != "Next purchase"
        ],
        settings={
            **({"rates": means.rates.to_mapping()} if measured else {}),
            **report.settings,
        },
        prediction=prediction_of(report, means.rates, machine.source.value),
    )


def _for_train(refusal: Refusal, training: Training, means: Means) -> Refusal:
    """Return the refusal with the options of `infinity train`, without what it cannot do."""
    drives = sum(means.budget.nvme.values())
    place = "nvme" if drives > training.input_bytes() else "host"
    words = {
        **_OPTIONS_OF_TRAIN,
        "--offload-inputs": f'{{"activations": {{"at": "{place}"}}}} in the file of --config',
    }
    # The engine leaves layers whole that are built on drives.
    absent = ("--tile-sequence", *(("--tiling",) if drives else ()))

    def reworded(remedy: Remedy) -> str:
        change = remedy.change
        for option, instead in words.items():
            change = change.replace(option, instead)
        if not remedy.more.nvme:
            return change
        return f"{change} (--nvme DIR, with {format_bytes(drives + remedy.more.nvme)} free there)"

    return replace(
        refusal,
        remedies=tuple(
            replace(remedy, change=reworded(remedy))
            for remedy in refusal.remedies
            if not any(option in remedy.change for option in absent)
        ),
    )


def _question(
    settings: TrainingSettings, engine: Mapping[str, Any], *, uses_gpu: bool
) -> argparse.Namespace:
    """Return the arguments of `infinity plan` for this training on this machine."""
    budget = engine.get("budget") or {}
    drives = budget.get("nvme") or {}
    runs_again = EngineConfig.from_mapping(engine).activations.recompute is Recompute.BLOCKS
    strategy = engine.get("strategy", "auto")
    given = {
        "model": str(settings.model / "config.json"),
        "lora": settings.lora,
        "batch": settings.batch,
        "sequence": settings.sequence,
        "accumulation": settings.accumulation_steps,
        "optimizer": settings.optimizer,
        "checkpointing": settings.checkpointing or runs_again,
        "loss": "chunked" if settings.chunk_loss else "whole",
        "strategy": strategy if isinstance(strategy, str) else json.dumps(strategy),
        "parameters": engine.get("parameters", "auto"),
        "overlap": "off" if engine.get("overlap") == "off" else "auto",
        "subgroup": engine.get("subgroup_numel"),
        "here": list(drives),
        "gpus": 1 if uses_gpu else 0,  # it trains in one process
        # The planner's rating is that of all drives together.
        "tbw": _rated(engine, len(drives)),
    }
    parser = argparse.ArgumentParser()
    for add in (add_training, add_machine, add_settings):
        add(parser)
    parser.set_defaults(**given)
    return parser.parse_args([])


def _rated(engine: Mapping[str, Any], drives: int) -> str | None:
    """Return what all drives together may be written, where that is known and there are some."""
    endurance = (engine.get("storage") or {}).get("endurance")
    if not endurance or not drives:
        return None
    if isinstance(endurance, Mapping):
        if len(endurance) < drives:
            return None
        return f"{sum(map(parse_bytes, endurance.values()))} B"
    return f"{drives * parse_bytes(endurance)} B"


def _precision(given: str, model: ModelShape) -> str:
    """Return what parameters compute in; a directory that states no dtype is loaded as fp32."""
    return PRECISION_OF_DTYPE.get(model.dtype or "", "fp32") if given == "model" else given


def _within(means: Means, budget: Budget) -> Means:
    """Return the means that this budget leaves of the machine's."""
    free, unified = means.budget, means.unified
    resolved = budget.resolve(
        Capacity(
            # On the CPU, device and host are one memory.
            device=free.host if unified else free.device,
            host=free.host,
            nvme={name: nbytes for name, nbytes in free.nvme.items() if name in budget.nvme},
        )
    )
    return replace(means, budget=replace(resolved, device=0) if unified else resolved)
