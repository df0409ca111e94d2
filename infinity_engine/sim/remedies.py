"""What is missing where nothing fits, and the smallest changes that would do, each with its number.

Pure. Every remedy has been tried: the plan that it leads to fits. Called where the planner has
refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from infinity_engine.errors import CapacityError
from infinity_engine.optim import NORM_BLOCK, FloatFormat, Formats
from infinity_engine.placement.training import Means, Training
from infinity_engine.plan import Auto, DeviceOnly, HostOnly, NvmeStreamed, Strategy, Tier
from infinity_engine.sim.planner import Choice, Planner
from infinity_engine.units import format_bytes

__all__ = ["Needs", "Refusal", "Remedy", "explain_refusal"]

_COARSE, _FINE = 128, 512  # subgroups
_MOST_RAISES = 12  # of the budget, until it holds a choice
_PLENTY = 1 << 60
_SOME_DRIVE = "NVMe"
_CHECKPOINT = "checkpoint activations (--checkpointing)"


@dataclass(frozen=True, slots=True)
class Needs:
    """What one rank would need of each tier, for one choice; PyTorch's own included."""

    device: int
    host: int
    nvme: int

    def missing(self, there: Needs) -> Needs:
        """Return what is not there."""
        return Needs(
            max(self.device - there.device, 0),
            max(self.host - there.host, 0),
            max(self.nvme - there.nvme, 0),
        )


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change, in words with its number; what it adds of each tier is the machine's, of the device
    one device's.
    """

    change: str
    more: Needs


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """Why nothing fits. `least` is what each tier needs at the least, if the others had plenty."""

    model: str
    there: Needs
    least: Needs
    remedies: tuple[Remedy, ...]

    def to_mapping(self) -> dict[str, object]:
        """Return it as lists and mappings, ready for JSON."""
        return {
            "model": self.model,
            "fits": False,
            "there_bytes": _plain(self.there),
            "least_bytes": _plain(self.least),
            "remedies": [
                {"change": each.change, "more_bytes": _plain(each.more)} for each in self.remedies
            ],
        }


def explain_refusal(
    training: Training,
    means: Means,
    *,
    strategy: Strategy | None = None,
    parameters: Tier | None = None,
    subgroup_numel: int | None = None,
) -> Refusal:
    """Return what is missing, and what would do; bytes are of the whole machine, and of one
    device.
    """
    asked = None if isinstance(strategy, Auto) else strategy
    planner = Planner(
        training, means, strategy=asked, parameters=parameters, subgroup_numel=subgroup_numel
    )
    found = [*_needs_of_all(planner)]
    budget = means.budget
    there = Needs(0 if means.unified else budget.device, budget.host, sum(budget.nvme.values()))
    several = [_of_machine(needs, means) for needs in found]
    remedies = [*_left_open(planner), *_larger(several, there), *_other(planner)]
    if not training.checkpointing and training.model.activations is not None:
        checkpointed = replace(planner, training=replace(training, checkpointing=True))
        fewer = [_of_machine(needs, means) for needs in _needs_of_all(checkpointed)]
        remedies += _larger(fewer, there, before=f"{_CHECKPOINT} and ")
    return Refusal(
        model=training.model.name,
        there=there,
        least=Needs(
            min((needs.device for needs in several), default=0),
            min((needs.host for needs in several), default=0),
            min((needs.nvme for needs in several), default=0),
        ),
        remedies=tuple(remedies),
    )


def _plain(needs: Needs) -> dict[str, int]:
    return {"device": needs.device, "host": needs.host, "nvme": needs.nvme}


def _of_machine(needs: Needs, means: Means) -> Needs:
    return Needs(needs.device, needs.host * means.ranks, needs.nvme * means.ranks)


# --- more memory ----------------------------------------------------------------------------------


def _larger(needed: list[Needs], there: Needs, *, before: str = "") -> Iterator[Remedy]:
    """Yield what more memory would do: the least of each tier alone, or of all where no one tier is
    enough.
    """
    missing = list(dict.fromkeys(needs.missing(there) for needs in needed))
    alone = [
        min(
            (each for each in missing if not any(_others(each, name))),
            key=lambda each: getattr(each, name),
            default=None,
        )
        for name in ("nvme", "host", "device")  # the cheapest bytes first
    ]
    enough = [each for each in alone if each is not None and each != Needs(0, 0, 0)]
    if not enough and missing and Needs(0, 0, 0) not in missing:
        enough = [min(missing, key=lambda each: (each.device, each.host, each.nvme))]
        host_least = min(missing, key=lambda each: (each.host, each.device, each.nvme))
        enough += [host_least] if host_least not in enough else []
    for more in dict.fromkeys(enough):
        parts = [
            f"{format_bytes(getattr(more, name))} more of {words}"
            for name, words in (("device", "the device"), ("host", "the host"), ("nvme", "NVMe"))
            if getattr(more, name)
        ]
        yield Remedy(before + " and ".join(parts), more)


def _others(needs: Needs, name: str) -> list[int]:
    return [getattr(needs, other) for other in ("device", "host", "nvme") if other != name]


def _needs_of_all(planner: Planner) -> Iterator[Needs]:
    """Yield what the most frugal choices need."""
    for choice in _frugal(planner):
        needs = _needs(planner, choice)
        if needs is not None:
            yield needs


def _frugal(planner: Planner) -> Iterator[Choice]:
    """Yield choices that need little of one tier or the other; with smaller subgroups, less of the
    host for buffers.
    """
    trained = sum(
        -(-each.numel // planner.means.ranks) for each in planner.training.ordered() if each.trained
    )
    tiers = [tier for tier in Tier if tier is not Tier.HOST or not planner.means.unified]
    for tier in tiers if planner.parameters is None else [planner.parameters]:
        strategies: list[tuple[Strategy, int]] = [(HostOnly(), _COARSE), (NvmeStreamed(), _COARSE)]
        if tier is tiers[-1]:
            strategies.append((NvmeStreamed(), _FINE))
        if not planner.means.unified:
            strategies.append((DeviceOnly(), _COARSE))
        if planner.strategy is not None:
            strategies = [(planner.strategy, count) for count in (_COARSE, _FINE)]
        for strategy, count in strategies:
            numel = planner.subgroup_numel or max(
                trained // count // NORM_BLOCK * NORM_BLOCK, NORM_BLOCK
            )
            yield Choice(strategy=strategy, parameters=tier, subgroup_numel=numel)


def _needs(planner: Planner, choice: Choice) -> Needs | None:
    """Return what the choice needs at the least: each tier in turn is given what is asked for;
    None: it never ends.
    """
    means = planner.means
    sizing = planner.sizing(choice.subgroup_numel)
    floor = replace(means.budget, device=0, host=0, nvme={_SOME_DRIVE: _PLENTY})
    for _ in range(_MOST_RAISES):
        tried = replace(planner, means=replace(means, budget=floor))
        try:
            sizing.limits(tried.left(sizing), choice.parameters)  # asks for the device at once
            _, plan, _ = tried.placed(choice)
        except CapacityError as error:
            if error.tier not in {Tier.DEVICE.name, Tier.HOST.name}:
                return None
            name = Tier[error.tier].value
            whole = getattr(tried.means.of_one_rank(), name) + max(error.asked - error.free, 1)
            floor = replace(
                floor, **{name: whole * (means.ranks if error.tier == Tier.HOST.name else 1)}
            )
            continue
        return Needs(
            0 if means.unified else floor.device, -(-floor.host // means.ranks), plan.demand.nvme
        )
    return None


# --- other settings -------------------------------------------------------------------------------


def _left_open(planner: Planner) -> Iterator[Remedy]:
    """Yield what need only be left to the planner, of what was asked for; or that all of it would
    have to be.
    """
    opened = {
        "--strategy auto": (planner.strategy, replace(planner, strategy=None)),
        "--parameters auto": (planner.parameters, replace(planner, parameters=None)),
        "no --subgroup": (planner.subgroup_numel, replace(planner, subgroup_numel=None)),
    }
    asked = {words: left_open for words, (given, left_open) in opened.items() if given is not None}
    enough = [words for words, left_open in asked.items() if _fits(left_open)]
    if not enough and len(asked) > 1 and _fits(Planner(planner.training, planner.means)):
        enough = [", ".join(asked)]
    yield from (
        Remedy(f"what is best, left to the planner ({words})", Needs(0, 0, 0)) for words in enough
    )


def _other(planner: Planner) -> Iterator[Remedy]:
    """Yield changes of the training with which it fits as it is, those that cost least first."""
    nothing, training = Needs(0, 0, 0), planner.training
    for words, changed in _changes(training):
        before, after = training.activation_bytes(), changed.activation_bytes()
        if _fits(replace(planner, training=changed)):
            saved = (
                f", which saves {format_bytes(before - after)} of activations"
                if after < before
                else ""
            )
            yield Remedy(words + saved, nothing)


def _changes(training: Training) -> Iterator[tuple[str, Training]]:
    if not training.checkpointing and training.model.activations is not None:
        yield _CHECKPOINT, replace(training, checkpointing=True)
    if training.batch > 1:
        yield "a micro-batch of 1 (--batch 1)", replace(training, batch=1)
    sequence = training.sequence // 2
    while sequence >= 256 and training.model.activations is not None:
        yield (
            f"a sequence of {sequence} tokens (--sequence {sequence})",
            replace(training, sequence=sequence),
        )
        sequence //= 4
    if training.formats.parameter is None:
        bf16 = replace(training, formats=Formats(parameter=FloatFormat.BF16))
        yield "parameters of 16 bits (--precision bf16)", bf16
    if len(training.state_names) > 1:
        yield (
            "an optimizer with one state (--optimizer lion)",
            replace(training, state_names=training.state_names[:1]),
        )


def _fits(planner: Planner) -> bool:
    with suppress(CapacityError):
        planner.check_all()
        for choice in _frugal(planner):
            if planner.means.budget.nvme or not (
                isinstance(choice.strategy, NvmeStreamed) or choice.parameters is Tier.NVME
            ):
                with suppress(CapacityError):
                    planner.placed(choice)
                    return True
    return False
