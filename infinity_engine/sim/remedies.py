"""What is missing where nothing fits, and the smallest changes that would do, each with its number.

Pure. Every remedy is found by asking the search itself: the plan that it leads to fits, and with a
few hundredths less there is none. Called where the planner has refused.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations, islice
from math import inf, isinf
from types import MappingProxyType
from typing import TypeAlias

from infinity_engine.optim import FloatFormat, Formats
from infinity_engine.placement.tiles import has_large_layers, tiled_by_room
from infinity_engine.placement.training import Means, Training
from infinity_engine.plan import Auto, DriveRates, Rates, ResolvedBudget, Strategy, Tier
from infinity_engine.sim.planner import Planner
from infinity_engine.units import format_bytes

__all__ = ["Needs", "Refusal", "Remedy", "explain_refusal"]

_NAMES = ("nvme", "host", "device")  # the cheapest bytes first
_WORDS = MappingProxyType({"device": "the device", "host": "the host", "nvme": "NVMe"})
_PLENTY = 1 << 60
_SOME_DRIVE = "NVMe"
_SOME_RATE = 1e9
_LEAST_ROOM = 1 << 20
_ABOVE = 1.004  # times an estimate: with the estimate itself, many plans each lack a little
_CLOSE = 1.01  # times an amount that does not fit: near enough
_NEAR = 1.02  # times what should be enough: an amount that fits agrees with it
_LESS = 0.97  # of an amount that fits: asked at first, to find whether less fits
_FURTHER = 0.01  # of an amount that does not fit: the least that is added, the next time twice that
_STEP = 1.1  # times an amount that does not fit: the most to try next, near an estimate
_ALIKE = 1.1  # times another answer: no worse than it
_FAR = 2.0  # times what the host has, or times another answer: far more
_MOST_COMBINED = 2  # changes that are offered together with memory
_MOST_WITH_TILES = 1  # likewise, where layers are cut anew for each memory
_SHORTEST, _TOKENS = 128, 128  # of a sequence, and the steps in which it gets shorter
_LEAST_POSITIONS = 64  # of a tile of the sequence
_CHECKPOINT = "checkpoint activations (--checkpointing)"

_Changes: TypeAlias = "Callable[[Planner], Iterator[tuple[str, Training]]]"
"""Finds changes of one kind, each in words and as the training that it makes."""


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes of each tier, for one device and for the host and the drives of the machine."""

    device: int
    host: int
    nvme: int

    def without(self, there: Needs) -> Needs:
        """Return what is not there."""
        return Needs(
            max(self.device - there.device, 0),
            max(self.host - there.host, 0),
            max(self.nvme - there.nvme, 0),
        )

    def is_within(self, times: float, other: Needs) -> bool:
        """Tell whether this is at most so many times the other, in each tier."""
        return all(getattr(self, name) <= times * getattr(other, name) for name in Needs.__slots__)


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change in words, and what it adds of each tier: of one device, and of the machine."""

    change: str
    more: Needs
    moved: int | None = None
    """Inputs of blocks that are moved then, of all ranks; None: as many as without it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """Why nothing fits. `least` is what each tier needs even where the others have plenty.

    Where that is no more than is there, `least` has what is there.
    """

    model: str
    there: Needs
    least: Needs
    remedies: tuple[Remedy, ...]
    notes: tuple[str, ...] = ()
    """What was assumed of the model."""

    def to_mapping(self) -> dict[str, object]:
        """Return it as lists and mappings, ready for JSON."""
        return {
            "model": self.model,
            "fits": False,
            "there_bytes": _plain(self.there),
            "least_bytes": _plain(self.least),
            "remedies": [
                {"change": remedy.change, "more_bytes": _plain(remedy.more)}
                for remedy in self.remedies
            ],
            "notes": list(self.notes),
        }


def explain_refusal(
    training: Training,
    means: Means,
    *,
    strategy: Strategy | None = None,
    parameters: Tier | None = None,
    subgroup_numel: int | None = None,
    tiling: bool = False,
) -> Refusal:
    """Return what is missing, and what would do. `tiling`: the training's layers are whole, and
    those without room are cut anew for each memory and training that is tried.
    """
    asked = None if isinstance(strategy, Auto) else strategy
    # Rates of drives that there may not be yet; how fast modules compute changes nothing.
    means = replace(means, rates=_with_all(means.rates), flops_per_s=None, blocks=None)
    planner = Planner(
        training,
        means,
        strategy=asked,
        parameters=parameters,
        subgroup_numel=subgroup_numel,
        whole_model=training.model if tiling else None,
    ).with_training(training)
    there, least = _there(planner), _least_of_each(planner)
    larger = list(_larger(planner, least=least))
    together = list(_together(planner))
    remedies = [*_left_open(planner), *together, *larger, *_other(planner)]
    if training.model.activations.are_known and not together:
        remedies += _combined(planner, [remedy.more for remedy in larger])
    return Refusal(
        model=training.model.name,
        there=there,
        least=least,
        remedies=tuple(remedies),
        notes=training.model.notes,
    )


def _with_all(rates: Rates) -> Rates:
    """Return the rates with some in place of those that are missing: what fits has any."""
    drive = DriveRates(read_bytes_per_s=_SOME_RATE, write_bytes_per_s=_SOME_RATE)
    return replace(
        rates,
        h2d_bytes_per_s=rates.h2d_bytes_per_s or _SOME_RATE,
        d2h_bytes_per_s=rates.d2h_bytes_per_s or _SOME_RATE,
        host_update_params_per_s=rates.host_update_params_per_s or _SOME_RATE,
        device_update_params_per_s=rates.device_update_params_per_s or _SOME_RATE,
        nvme=rates.nvme or {_SOME_DRIVE: drive},
    )


def _plain(needs: Needs) -> dict[str, int]:
    return {"device": needs.device, "host": needs.host, "nvme": needs.nvme}


def _there(planner: Planner) -> Needs:
    means = planner.means
    device = 0 if means.unified else means.budget.device
    return Needs(device, means.budget.host, sum(means.budget.nvme.values()))


# --- more memory ----------------------------------------------------------------------------------


def _larger(planner: Planner, *, before: str = "", least: Needs | None = None) -> Iterator[Remedy]:
    """Yield what more memory would do, the cheapest bytes first: the least of one tier alone; and
    where that is the device, or far more of the host, the least of several. `least` is that of each
    tier, if it is known.
    """
    for more in _worth_offering(list(_amounts(planner, least))):
        yield _adding(more, before=before)


def _adding(more: Needs, *, before: str) -> Remedy:
    parts = [
        f"{format_bytes(getattr(more, name))} more of {_WORDS[name]}"
        for name in reversed(_NAMES)
        if getattr(more, name)
    ]
    return Remedy(before + " and ".join(parts), more)


def _amounts(planner: Planner, least: Needs | None = None) -> Iterator[Needs]:
    """Yield the amounts of `_larger`, and those that are no better than another one of them."""
    there = _there(planner)
    drives = _smallest(planner, there, "nvme")
    if drives is not None:
        yield drives.without(there)
    host = _smallest(planner, there, "host")
    if drives is None and (host is None or host.host > _FAR * there.host):
        if least is not None and least.device > there.device:
            start: Needs | None = replace(there, device=least.device)
        else:
            start = _with_least_device(planner, there)
        if start is not None:
            richer = _with(planner, start)
            if richer.fits():  # only the device lacks something
                yield from (needs.without(there) for needs in (host, start) if needs is not None)
                return
            for last in ("nvme", "host") if host is None else ("nvme",):
                mixed = _of_several(richer, start, last)
                if mixed is not None:
                    yield mixed.without(there)
    if host is not None:
        yield host.without(there)
    if not planner.means.unified:
        device = _smallest(planner, there, "device")
        if device is not None:
            yield device.without(there)


def _worth_offering(found: list[Needs]) -> Iterator[Needs]:
    """Yield those beside which no other one takes about as little of each tier, or less."""
    kept: list[Needs] = []
    for place, needs in enumerate(found):
        if not any(other.is_within(_ALIKE, needs) for other in (*kept, *found[place + 1 :])):
            kept.append(needs)
    yield from kept


def _with_least_device(planner: Planner, there: Needs) -> Needs | None:
    """Return what is there, with the least of the device where the others have plenty."""
    if planner.means.unified:
        return there
    enough = _smallest(planner, replace(there, host=_PLENTY, nvme=_PLENTY), "device")
    return None if enough is None else replace(there, device=enough.device)


def _of_several(planner: Planner, start: Needs, last: str) -> Needs | None:
    """Return the least of the host or the drives, then what is left of the `last` of these."""
    first = "host" if last == "nvme" else "nvme"
    enough = _smallest(planner, replace(start, **{last: _PLENTY}), first)
    if enough is None:
        return None
    return _smallest(planner, replace(start, **{first: getattr(enough, first)}), last)


def _least_of_each(planner: Planner) -> Needs:
    """Return what each tier needs where the others have plenty."""
    there = _there(planner)
    found = {}
    for name in _NAMES:
        others = {other: _PLENTY for other in _NAMES if other != name}
        if planner.means.unified:
            others.pop("device", None)
        plenty = replace(there, **others)
        smallest = None
        if not _with(planner, plenty).seems_to_fit():
            smallest = _smallest(planner, plenty, name)
        found[name] = getattr(smallest or there, name)
    return Needs(**found)


def _smallest(planner: Planner, there: Needs, name: str) -> Needs | None:
    """Return what is there with the least of one tier that fits; None: no amount is enough."""
    tier, before = Tier(name), _with(planner, there)
    low, most = float(getattr(there, name)), _most(planner)
    estimated = planner.strategy is None  # estimates know nothing of a strategy that is asked for
    tiles = planner.cuts_layers and name == _where_modules_compute(planner)

    def raised(nbytes: float) -> Needs:
        return replace(there, **{name: int(nbytes)})

    def missing(nbytes: float) -> float:
        tried = _with(before, raised(nbytes))
        # Near an estimate little is missing, and what lacks more lacks it of another tier. Large
        # layers are whole only where tiles would be too many: with more room, less is missing.
        is_near = _has_large_layers(tried) if tiles else estimated
        next_step = max((_STEP - 1) * nbytes, _LEAST_ROOM) if is_near else most / 2
        return min(tried.missing(tier), next_step)

    start = low
    if estimated:
        about = _with(before, raised(_PLENTY)).least(tier)
        if about > most:
            return None
        start = max(low, _ABOVE * about, _LEAST_ROOM)  # also where estimates need none of it
    elif missing(most):
        return None
    if tiles:  # from below: smaller tiles need less, and between tiles and whole layers more may
        # fit worse
        start = max(low, float(planner.training.activation_bytes()), _LEAST_ROOM)
    found = _least(missing, low, start, most)
    return None if isinf(found) else raised(found)


def _least(missing: Callable[[float], float], low: float, start: float, most: float) -> float:
    """Return the least amount of which nothing is missing; inf: it is more than `most`.

    Of `low` something is missing, or it is the answer. What is missing leads from one amount to the
    next. Where that says too little, steps grow; where it says too much, halves decide.
    """
    below, high, amount, enough = low, inf, start, 0.0
    further, less = _FURTHER, 1 - _LESS
    while amount <= most:
        if more := missing(amount):
            below, enough = amount, amount + more
            amount, further = max(enough, (1 + further) * amount), 2 * further
        else:
            high = amount
        agrees = high / _NEAR <= enough <= high * _NEAR and below >= _LESS * high
        if agrees or high <= _CLOSE * below + 1:
            return high
        if not below < amount < high:
            amount, less = max((1 - less) * high, (below * high) ** 0.5), min(3 * less, 0.9)
    return inf


def _has_large_layers(planner: Planner) -> bool:
    training = planner.training
    room = planner.means.room_for_layers(training)
    return has_large_layers(training.model, width=training.width, room=room)


def _where_modules_compute(planner: Planner) -> str:
    return "host" if planner.means.unified else "device"


def _most(planner: Planner) -> float:
    """Return more bytes than all that there is to be held takes of any one tier."""
    training = planner.training
    per_parameter = 64 + 8 * training.accumulation_steps
    held = per_parameter * training.model.numel
    return float(4 * (held + training.activation_bytes()) + (1 << 34))


def _with(planner: Planner, needs: Needs) -> Planner:
    drives = {_SOME_DRIVE: needs.nvme} if needs.nvme else {}
    budget = ResolvedBudget(device=needs.device, host=needs.host, nvme=drives)
    return planner.with_budget(budget)


# --- more memory, with less to hold ---------------------------------------------------------------


def _combined(planner: Planner, alone: list[Needs]) -> Iterator[Remedy]:
    """Yield changes that lower activations, each with the memory that is missing then, where the
    memory `alone` is far more.
    """
    before, training = "", planner.training
    if not training.checkpointing:
        before = f"{_CHECKPOINT} and "
        planner = planner.with_training(replace(training, checkpointing=True))
        if planner.fits():  # which is offered alone
            return
        found = [it for it in _larger(planner, before=before) if _is_far_less(it.more, alone)]
        yield from found
        alone = [*alone, *(remedy.more for remedy in found)]
    # With these, each amount takes long to find: subgroups may be many.
    if planner.strategy is not None or not planner.has_any_size:
        return
    combined = _with_lower_activations(planner, alone, before)
    most = _MOST_WITH_TILES if planner.cuts_layers else _MOST_COMBINED
    yield from islice((it for it in combined if _is_far_less(it.more, alone)), most)


def _with_lower_activations(planner: Planner, alone: list[Needs], before: str) -> Iterator[Remedy]:
    """Yield the changes that save half of what is missing where modules compute, and what is
    missing then, up to the first one that is enough without more memory.
    """
    training, where = planner.training, _where_modules_compute(planner)
    ranks = planner.means.ranks if planner.means.unified else 1
    missing = min((getattr(more, where) for more in alone), default=0)

    def fits(after: Training) -> bool:
        return planner.with_training(after).fits()

    for changes, lowest in _lower_activations(training):
        saved = ranks * (training.activation_bytes() - lowest.activation_bytes())
        if not missing or _FAR * saved < missing:
            continue
        enough = next((words for words, after in changes(planner) if fits(after)), None)
        if enough is not None:
            if before:  # else it is offered already
                yield Remedy(f"{before}{enough}", Needs(0, 0, 0))
            return
        richer = planner
        if changes is not _chunked_loss:  # else the change is no larger than it has to be
            least = planner.with_training(lowest)
            more = next(_amounts(least), Needs(0, 0, 0))
            if more.nvme:  # to which inputs go then, if they were on the host
                more = replace(more, nvme=more.nvme + _moved(lowest, planner))
            richer = _with_more(planner, more)
        for words, after in changes(richer):
            least_more = next(_amounts(planner.with_training(after)), None)
            if least_more is not None:
                remedy = _adding(least_more, before=f"{before}{words} and ")
                yield replace(remedy, moved=_moved(after, planner))


def _moved(training: Training, planner: Planner) -> int:
    return planner.means.ranks * training.input_bytes() if training.inputs_moved else 0


def _lower_activations(
    training: Training,
) -> Iterator[tuple[_Changes, Training]]:
    """Yield what finds the smallest change of a kind that is enough, and the largest change of that
    kind; the kinds that cost least come first.
    """
    yield _chunked_loss, replace(training, chunked_loss=True)
    yield _smaller_batches, _in_batches_of(training, 1)
    if training.may_be_tiled:
        yield _tiles_of_sequence, replace(training, tile_positions=_LEAST_POSITIONS)


def _is_far_less(more: Needs, others: list[Needs]) -> bool:
    """Tell whether each of the others takes far more of a tier."""
    return not any(other.is_within(_FAR, more) for other in others)


def _with_more(planner: Planner, more: Needs) -> Planner:
    means = planner.means.before_inputs()
    budget, nvme = means.budget, sum(means.budget.nvme.values()) + more.nvme
    larger = ResolvedBudget(
        device=budget.device + more.device,
        host=budget.host + more.host,
        nvme={_SOME_DRIVE: nvme} if nvme else {},
    )
    return planner.with_means(replace(means, budget=larger))


# --- other settings -------------------------------------------------------------------------------


def _left_open(planner: Planner) -> Iterator[Remedy]:
    """Yield which of the given settings the planner would have to choose itself, or all of them."""
    opened = {
        "--strategy auto": (planner.strategy, replace(planner, strategy=None)),
        "--parameters auto": (planner.parameters, replace(planner, parameters=None)),
        "no --subgroup": (planner.subgroup_numel, replace(planner, subgroup_numel=None)),
    }
    asked = {words: left_open for words, (given, left_open) in opened.items() if given is not None}
    enough = [words for words, left_open in asked.items() if left_open.fits()]
    nothing, best = Needs(0, 0, 0), "what is best, left to the planner"
    yield from (Remedy(f"{best} ({words})", nothing) for words in enough)
    if enough or not asked:
        return
    words = ", ".join(asked)
    free = replace(planner, strategy=None, parameters=None, subgroup_numel=None)
    if len(asked) > 1 and free.fits():
        yield Remedy(f"{best} ({words})", nothing)
        return
    for remedy in islice(_other(free), 1):
        yield Remedy(f"{best} ({words}), with {remedy.change}", nothing)


def _other(planner: Planner) -> Iterator[Remedy]:
    """Yield changes of the training with which it fits as it is, those that cost least first."""
    nothing, training = Needs(0, 0, 0), planner.training
    for words, changed in _changes(planner):
        before, after = training.activation_bytes(), changed.activation_bytes()
        if planner.with_training(changed).fits():
            saved = f", which saves {format_bytes(before - after)} of activations"
            yield Remedy(words + (saved if after < before else ""), nothing)


def _changes(planner: Planner) -> Iterator[tuple[str, Training]]:
    training = planner.training
    room = planner.means.room_for_layers(training)
    tiled = tiled_by_room(training.model, width=training.width, room=room)
    if tiled is not None and not planner.cuts_layers:
        yield f"{tiled} (--tiling auto)", replace(training, model=tiled.model)
    yield from _checkpointed(planner)
    yield from _moved_inputs(planner)
    yield from _tiles_of_sequence(planner)
    yield from _chunked_loss(planner)
    yield from _smaller_batches(planner)
    sequence = _longest(planner)
    if sequence:
        shorter = replace(training, sequence=sequence)
        logits = training.logits_bytes()
        because = ""
        if 2 * logits > training.activation_bytes():
            because = f" (of the activations, {format_bytes(logits)} are logits)"
        yield f"a sequence of {sequence} tokens{because} (--sequence {sequence})", shorter
    if not training.formats.has_copies:
        bf16 = replace(training, formats=Formats(parameter=FloatFormat.BF16))
        yield "parameters of 16 bits (--precision bf16)", bf16
    if len(training.state_names) > 1:
        lion = replace(training, state_names=training.state_names[:1])
        yield "an optimizer with one state (--optimizer lion)", lion


def _together(planner: Planner) -> Iterator[Remedy]:
    """Yield the fewest changes with which it fits together, of those that compute the same from the
    same tokens; nothing where one of them is enough alone, or all are not.
    """
    lowest = replace(
        planner.training,
        checkpointing=True,
        chunked_loss=True,
        inputs_moved=not planner.means.unified,
    )
    if lowest.may_be_tiled:
        lowest = replace(lowest, tile_positions=_LEAST_POSITIONS)
    # Where sizes are given, each takes long to find: subgroups may be many.
    if not planner.has_any_size or not lowest.model.activations.are_known:
        return
    if not planner.with_training(lowest).fits():
        return
    kinds = (_checkpointed, _chunked_loss, _moved_inputs, _tiles_of_sequence)
    for count in range(1, len(kinds) + 1):
        found = [words for some in combinations(kinds, count) if (words := _enough(planner, some))]
        if found:
            yield from (Remedy(words, Needs(0, 0, 0)) for words in found if count > 1)
            return


def _enough(planner: Planner, kinds: Sequence[_Changes]) -> str:
    """Return one change of each kind after the other; nothing where that is not enough, or where
    there is no change of a kind.
    """
    words = []
    for kind in kinds:
        found = next(kind(planner), None)
        if found is None:
            return ""
        words.append(found[0])
        planner = planner.with_training(found[1])
    return " and ".join(words) if planner.fits() else ""


def _checkpointed(planner: Planner) -> Iterator[tuple[str, Training]]:
    training = planner.training
    if not training.checkpointing and training.model.activations.are_known:
        yield _CHECKPOINT, replace(training, checkpointing=True)


def _moved_inputs(planner: Planner) -> Iterator[tuple[str, Training]]:
    training = planner.training
    if not training.checkpointing or training.inputs_moved or planner.means.unified:
        return
    if training.input_bytes():
        moved = format_bytes(training.input_bytes())
        words = f"inputs of blocks on drives or the host, {moved} there (--offload-inputs)"
        yield words, replace(training, inputs_moved=True)


def _chunked_loss(planner: Planner) -> Iterator[tuple[str, Training]]:
    training = planner.training
    if not training.chunked_loss and training.model.activations.are_known:
        yield "a loss without whole logits (--loss chunked)", replace(training, chunked_loss=True)


def _tiles_of_sequence(planner: Planner) -> Iterator[tuple[str, Training]]:
    """Yield the fewest tiles of the sequence that fit, where logits are not most of the
    activations.
    """
    training = planner.training
    if not training.may_be_tiled:
        return
    if 2 * training.logits_bytes() > training.activation_bytes():
        return
    sizes: list[Training] = []  # of tiles: powers of two that are less than the sequence
    while (size := _LEAST_POSITIONS << len(sizes)) < training.sequence:
        sizes.append(replace(training, tile_positions=size))
    # Larger tiles take more.
    enough = bisect_left(sizes, True, key=lambda tiled: not planner.with_training(tiled).fits())
    if enough:
        tiled = sizes[enough - 1]
        yield (
            f"feed-forward blocks in {tiled.tiles:,} tiles of the sequence "
            f"(--tile-sequence {tiled.tile_positions})",
            tiled,
        )


def _smaller_batches(planner: Planner) -> Iterator[tuple[str, Training]]:
    """Yield a smaller micro-batch, near the largest that fits, with about as many sequences in a
    step; where gradients of its micro-batches leave no room for that, a micro-batch of one
    sequence.
    """
    training = planner.training
    if training.batch == 1:
        return
    sequences = training.batch * training.accumulation_steps
    smaller = partial(_in_batches_of, training)

    def fits(batch: int) -> bool:
        return planner.with_training(smaller(batch)).fits()

    # Smaller ones need not take less: gradients on drives are those of each micro-batch.
    steps, sizes = training.accumulation_steps + 1, [training.batch]
    while sizes[-1] > 1:
        sizes.append(-(-sequences // steps))
        steps = -(-4 * steps // 3)
    smaller_ones = sorted({*sizes} - {training.batch}, reverse=True)
    most = next(filter(fits, smaller_ones), None)
    if most is not None:
        whole = max(batch for batch in range(1, most + 1) if sequences % batch == 0)
        found = smaller(whole if 2 * whole >= most and fits(whole) else most)
        batch, steps = found.batch, found.accumulation_steps
        yield (
            f"{steps:,} micro-batches of {batch:,} in a step "
            f"(--batch {batch} --accumulation {steps})",
            found,
        )
    else:
        yield "a micro-batch of 1 (--batch 1)", replace(training, batch=1)


def _in_batches_of(training: Training, batch: int) -> Training:
    """Return the training with another micro-batch, and about as many sequences in a step."""
    sequences = training.batch * training.accumulation_steps
    return replace(training, batch=batch, accumulation_steps=-(-sequences // batch))


def _longest(planner: Planner) -> int:
    """Return the longest shorter sequence that fits, in steps of 128 tokens; 0 where none does."""
    training = planner.training
    if not training.model.activations.are_known or training.sequence <= _SHORTEST:
        return 0

    def fits(count: int) -> bool:
        shorter = replace(training, sequence=count * _TOKENS)
        return planner.with_training(shorter).fits()

    low, high = _SHORTEST // _TOKENS, -(-training.sequence // _TOKENS)
    if not fits(low):
        return 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * _TOKENS
