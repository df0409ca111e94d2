"""The answer of `infinity plan` as tables: what fits and how, or what is missing and what would do.

Prints what the report and the advice say, and works out nothing. Called by plan.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from infinity_engine.cli.plan_machine import free
from infinity_engine.units import DAY_S, TB, GiB, format_bytes, format_decimal_bytes

if TYPE_CHECKING:
    from deepnvme.cli.report import Rows
    from infinity_engine.advice.activations import ActivationAdvice
    from infinity_engine.advice.advising import Advice
    from infinity_engine.advice.course import RunForecast
    from infinity_engine.advice.tiles import TileAdvice
    from infinity_engine.cli.plan_machine import AskedMachine
    from infinity_engine.placement.training import Training
    from infinity_engine.plan import Capacity
    from infinity_engine.sim.remedies import Refusal, Remedy
    from infinity_engine.sim.report import PlanReport, WearForecast

__all__ = [
    "Section",
    "answer",
    "computes",
    "refused",
    "seconds_in_words",
    "setting_in_words",
    "show",
    "step_in_words",
    "what_follows",
    "with_options",
    "written_per_day",
]

Section = tuple[str, Iterable[tuple[str, str]]]
_UNKNOWN = "unknown, as the rate of computing is"
_LEAST_GAIN = 0.001  # of a step, that one GiB more saves
_LARGEST = 3  # of what a tier holds, on one line
_MOST_ON_LINE = 4  # values of a setting
_MOST_PURCHASES = 3  # that are shown
_WORTH_SHOWING = 0.02  # of a step
_SOURCES = MappingProxyType(
    {"measured": "measured rates", "given": "given rates", "published": "published rates"}
)


def show(sections: Iterable[Section]) -> None:
    """Print titles with their rows."""
    from rich.table import Table
    from rich.text import Text

    from deepnvme.cli.report import Output

    console = Output()
    for title, rows in sections:
        table = Table.grid(padding=(0, 2))
        table.add_column(min_width=22)
        # Folded, not cut: values may be paths that are copied.
        table.add_column(overflow="fold")
        for label, value in rows:
            # As Text: brackets in a name are no markup.
            table.add_row(Text(label, style="dim"), Text(value))
        console.print(Text(title, style="bold"))
        console.print(table)
        console.print()


def answer(
    report: PlanReport,
    training: Training,
    advice: Advice,
    ways: ActivationAdvice | None = None,
    tiles: TileAdvice | None = None,
    *,
    full: bool = False,
    without_rate: str = "give --tflops, or --rates of a calibration",
) -> Iterator[Section]:
    """Yield what a plan that fits says: what fits on one screen, or every figure.

    `without_rate` is what to do where the rate of computing is not known.
    """
    title = f"{report.model} fits: {step_in_words(report, advice)}"
    yield title, _summary(report, training, without_rate=without_rate)
    yield "Settings", [(name, setting_in_words(value)) for name, value in report.settings.items()]
    if full:
        yield from _every_figure(report)
    else:
        yield f"Memory{_of_each_rank(report)}", _memory(report)
        yield "Time", _phases(report)
    yield from what_follows(report, advice, ways, tiles)
    if report.notes:
        yield "Notes", [("", note) for note in report.notes]


def what_follows(
    report: PlanReport,
    advice: Advice,
    ways: ActivationAdvice | None,
    tiles: TileAdvice | None = None,
) -> Iterator[Section]:
    """Yield what follows from a plan: tiles, activations, wear, the run, the next purchase."""
    if tiles is not None:
        yield "Tiles", _tiles(tiles)
    if ways is not None:
        yield "Activations", _activations(ways, report)
    if report.wear is not None:
        yield "Wear", _wear(report.wear)
    if advice.run is not None:
        yield "The run", _run(advice.run, report.wear)
    yield "Next purchase", _purchases(report, advice)


def _every_figure(report: PlanReport) -> Iterator[Section]:
    from infinity_engine.plan import Tier
    from infinity_engine.sim.report import resource

    for tier in Tier:
        held, limit = report.held(tier), report.limits[tier]
        # A tier that is not used, or not given, has no section.
        if held and limit:
            rank = _of_each_rank(report)
            title = f"{tier.value}{rank}: {format_bytes(held)} of {format_bytes(limit)}"
            yield (
                title,
                [
                    (
                        holding.what,
                        format_bytes(holding.nbytes)
                        + (" (PyTorch's own)" if holding.of_pytorch else ""),
                    )
                    for holding in report.holdings
                    if holding.tier is tier
                ],
            )
    yield "Time", _times(report)
    yield (
        "Bytes over each link in a step",
        [(resource(lane), format_bytes(nbytes)) for lane, nbytes in report.moved.items()],
    )
    if report.alternatives:
        yield (
            "What else fits",
            [
                (
                    f"{seconds_in_words(other.step_s)}",
                    f"{setting_in_words(other.strategy)}, parameters on {other.parameters.value}",
                )
                for other in report.alternatives[:5]
            ],
        )


def _of_each_rank(report: PlanReport) -> str:
    return " of each rank" if report.ranks > 1 else ""


def _memory(report: PlanReport) -> Rows:
    """Yield what each tier holds, with what takes most of it."""
    from infinity_engine.plan import Tier

    for tier in Tier:
        held, limit = report.held(tier), report.limits[tier]
        if held and limit:
            largest = sorted(
                (holding for holding in report.holdings if holding.tier is tier),
                key=lambda holding: -holding.nbytes,
            )[:_LARGEST]
            parts = ", ".join(
                f"{holding.what} {format_bytes(holding.nbytes)}" for holding in largest
            )
            yield tier.value, f"{format_bytes(held)} of {format_bytes(limit)}: {parts}"


def _phases(report: PlanReport) -> Rows:
    for phase in report.phases:
        if not report.knows(phase):
            yield phase.name, _UNKNOWN
            continue
        yield phase.name, f"{seconds_in_words(phase.seconds)}, bound by {phase.bound_by}"
    yield from _again(report)
    yield from _between_ranks(report)


def _again(report: PlanReport) -> Rows:
    """Yield what the phases do not show: the micro-batches after the first."""
    if report.micro_batches > 1 and computes(report):
        seconds = seconds_in_words(report.repeated_s)
        yield (
            f"{report.micro_batches - 1} micro-batches more",
            f"{seconds}, forward and backward again",
        )


def _between_ranks(report: PlanReport) -> Rows:
    if report.gathering_s:
        gathering = seconds_in_words(report.gathering_s)
        yield "between ranks", f"gathers and reductions take {gathering}, hidden or not"


def _summary(report: PlanReport, training: Training, *, without_rate: str) -> Rows:
    trained = sum(parameter.numel for parameter in training.model.parameters if parameter.trained)
    part = "" if trained == report.parameters else f", {trained:,} of them trained"
    yield "parameters", f"{report.parameters:,}{part}"
    yield (
        "step",
        f"{report.ranks} x {report.micro_batches} x {training.batch} sequences of "
        f"{training.sequence} tokens",
    )
    yield "activations", "; ".join(_kept(report, training))
    throughput = f"{report.tokens_per_s:,.1f} tokens/s" if computes(report) else ""
    yield "throughput", throughput or f"unknown: {without_rate}"


def _kept(report: PlanReport, training: Training) -> Iterator[str]:
    """Yield what is kept of activations until the backward, and what makes them fewer."""
    activations = report.settings.get("activations")
    if not training.checkpointing:
        yield "all are kept for the backward"
    elif training.inputs_moved and isinstance(activations, Mapping):
        place = "drives" if activations["at"] == "nvme" else "the host"
        inputs = f"{format_bytes(training.input_bytes())}{_of_each_rank(report)}"
        yield f"only the inputs of blocks are kept, on {place} ({inputs}), the rest is recomputed"
    else:
        yield "only the inputs of blocks are kept, the rest is recomputed"
    if training.chunked_loss:
        yield "the loss makes no whole logits"
    if training.tiles > 1:
        yield f"feed-forward blocks in {training.tiles:,} tiles of the sequence"


def setting_in_words(value: object) -> str:
    """Return a setting as one line."""
    if isinstance(value, Mapping):
        inner = ", ".join(
            f"{key}={setting_in_words(inside)}"
            for key, inside in value.items()
            # The name stands before the brackets; None is what is left to its default.
            if key != "name" and inside is not None
        )
        if "name" in value:
            return f"{value['name']}({inner})"
        # Rates have too many values for one line.
        fits = len(value) <= _MOST_ON_LINE
        return inner if fits else "those of this plan (`infinity plan --json` has them)"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _times(report: PlanReport) -> Rows:
    from infinity_engine.sim.report import resource

    for phase in report.phases:
        if not report.knows(phase):
            yield phase.name, _UNKNOWN
            continue
        # The busiest first: it is what binds the phase.
        used = ", ".join(
            f"{name} {part:.0%}"
            for name, part in sorted(phase.utilisation.items(), key=lambda entry: -entry[1])
        )
        yield phase.name, f"{seconds_in_words(phase.seconds)}, bound by {phase.bound_by} ({used})"
    if report.update_utilisation and all(phase.name != "update" for phase in report.phases):
        ranked = sorted(report.update_utilisation.items(), key=lambda it: -it[1])
        used = ", ".join(f"{resource(lane)} {part:.0%}" for lane, part in ranked)
        yield "of which the update", f"{seconds_in_words(report.update_s)} ({used})"
    yield from _again(report)
    yield from _between_ranks(report)
    if report.least_update_s is not None:
        yield (
            "least update",
            f"{seconds_in_words(report.least_update_s)}: no order of work ends earlier",
        )
    yield (
        "updates",
        ", ".join(f"{count} {home.value}" for home, count in report.subgroups.items() if count),
    )
    if report.staging_sets:
        yield "staging sets", str(report.staging_sets)
    if report.host_buffers:
        yield "host buffers", str(report.host_buffers)
    if report.fetched_ahead:
        yield "fetched ahead", f"up to {format_bytes(report.fetched_ahead)} of parameters"
    yield "host per parameter", f"{report.host_bytes_per_parameter:.2f} B"


def _activations(ways: ActivationAdvice, report: PlanReport) -> Rows:
    """Yield what a block saves, the ways that the engine would choose, and what more would save."""
    from infinity_engine.plan import Tier

    # On the CPU, device and host are one memory.
    words = {Tier.DEVICE: "the device", Tier.HOST: "the host", Tier.NVME: "drives"}
    words[Tier.DEVICE] = words[Tier.DEVICE if report.limits[Tier.DEVICE] else Tier.HOST]
    predicted = ways.choice.predicted
    yield (
        "each block",
        f"saves {format_bytes(ways.saved)} where it is kept, its inputs of "
        f"{format_bytes(ways.inputs)} where it is recomputed",
    )
    places = {
        Tier.DEVICE: predicted.device,
        Tier.HOST: predicted.host,
        Tier.NVME: predicted.drives,
    }
    counts = "; ".join(f"{count} {way.value}" for way, count in ways.choice.counts().items())
    held = ", ".join(
        f"{format_bytes(nbytes)} of {words[tier]}" for tier, nbytes in places.items() if nbytes
    )
    took, planned = seconds_in_words(ways.seconds), seconds_in_words(ways.planned_s)
    yield (
        'activations="auto"',
        f"{counts}; with at most {held}, blocks take {took} forward and backward, {planned} as "
        "planned",
    )
    gains = {tier: gain for tier, gain in ways.gains.items() if gain > _LEAST_GAIN * ways.seconds}
    if gains:
        saved = "; ".join(
            f"of {words[tier]} saves {seconds_in_words(gain)}" for tier, gain in gains.items()
        )
        yield "1 GiB more for them", saved


def _tiles(tiles: TileAdvice) -> Rows:
    """Yield which layers are cut, why, and what whole ones would take."""
    tiled, more = tiles.tiled, tiles.with_more
    yield 'tiling="auto"', str(tiled)
    yield (
        "why",
        f"whole, the largest works with {format_bytes(tiled.working)}, more than half of the "
        f"{format_bytes(tiled.room)} that layers and updates have beside activations",
    )
    whole = tiles.whole_s
    yield (
        "with whole layers",
        "nothing fits" if whole is None else f"a step of {seconds_in_words(whole)}",
    )
    yield (
        "with 1 GiB more",
        "no layer is cut"
        if more is None
        else f"{more.tiles} tiles of at most {format_bytes(more.tile_bytes)}",
    )


def _wear(wear: WearForecast) -> Rows:
    yield "written", f"{wear.written_per_day / TB:,.1f} TB in a day of steps"
    if wear.years is not None and wear.rated_bytes is not None:
        # Below two years, days say more, and below a day, hours.
        seconds = wear.years * 365.25 * DAY_S
        life = f"{wear.years:,.1f} years" if wear.years >= 2 else _time_in_words(seconds)
        yield "drives' life", f"{life} of steps, at {wear.rated_bytes / TB:,.0f} TB rated"


def _purchases(report: PlanReport, advice: Advice) -> Rows:
    """Yield the purchases that save something, those that do not, and what a little more is
    worth.
    """
    now = seconds_in_words(report.step_s)
    step = "a step" if computes(report) else "without computing"
    written = written_per_day(report)
    gains = [purchase for purchase in advice.purchases if purchase.saved >= _WORTH_SHOWING]
    for purchase in gains[:_MOST_PURCHASES]:
        change = f"{now} -> {seconds_in_words(purchase.step_s)} {step}"
        if written and purchase.written_per_day is not None:
            day = f"{written / TB:,.1f} -> {purchase.written_per_day / TB:,.1f}"
            change += f", {day} TB written a day"
        yield purchase.what, change
    if others := gains[_MOST_PURCHASES:]:
        yield (
            "smaller gains",
            "; ".join(f"{it.what}: {seconds_in_words(it.step_s)}" for it in others),
        )
    idle = [purchase.what for purchase in advice.purchases if purchase.saved < _WORTH_SHOWING]
    if idle:
        yield "no gain", "; ".join(idle)
    if advice.worths:
        yield (
            "worth",
            "; ".join(
                f"1 {worth.unit} more: {seconds_in_words(worth.seconds)}" for worth in advice.worths
            ),
        )


def _run(run: RunForecast, wear: WearForecast | None) -> Rows:
    """Yield what a run takes, and what it would take with more micro-batches in a step."""
    rated_bytes = wear.rated_bytes if wear is not None else None
    yield f"{run.tokens:,} tokens", f"{_steps(run.steps)}, {_takes(run, rated_bytes)}"
    more = run.accumulated
    if more is not None:
        times = more.accumulation // run.accumulation
        words = f"{_steps(more.steps)} of {times} times the tokens, {_takes(more, rated_bytes)}"
        yield f"--accumulation {more.accumulation}", words


def _steps(count: int) -> str:
    return f"{count:,} step" + ("s" if count != 1 else "")


def _takes(run: RunForecast, rated_bytes: int | None) -> str:
    parts = [_time_in_words(run.seconds)]
    if run.written:
        share = "" if rated_bytes is None else f" ({run.written / rated_bytes:.1%} of the TBW)"
        parts.append(f"{format_decimal_bytes(run.written)} written{share}")
    if run.kwh is not None:
        parts.append(f"{run.kwh:,.1f} kWh" if run.kwh >= 1 else f"{1000 * run.kwh:,.2f} Wh")
    if run.cost is not None:
        parts.append(f"cost {run.cost:,.2f}")
    return ", ".join(parts)


def _time_in_words(seconds: float) -> str:
    for unit, length_s in (("days", DAY_S), ("hours", 3600), ("minutes", 60)):
        if seconds >= length_s:
            return f"{seconds / length_s:,.1f} {unit}"
    return seconds_in_words(seconds)


def refused(refusal: Refusal) -> Iterator[Section]:
    """Yield what is there, and what would do."""
    rows = []
    for tier, has, needs in (
        ("device", refusal.there.device, refusal.least.device),
        ("host", refusal.there.host, refusal.least.host),
        ("nvme", refusal.there.nvme, refusal.least.nvme),
    ):
        # A machine without a GPU has no line about one.
        if tier == "device" and not has and not needs:
            continue
        short = (
            f", and at the least {format_bytes(needs)} needed, whatever the others have"
            if needs > has
            else ""
        )
        rows.append((tier, f"{format_bytes(has)} there{short}"))
    yield f"{refusal.model} does not fit", rows
    if refusal.remedies:
        yield (
            "Any of these would do",
            [(f"{number}.", remedy.change) for number, remedy in enumerate(refusal.remedies, 1)],
        )
    if refusal.notes:
        yield "Notes", [("", note) for note in refusal.notes]


def with_options(refusal: Refusal, machine: AskedMachine) -> Refusal:
    """Return the refusal with options that add to this machine what each remedy needs.

    A part of what is given is left for others, so an option is larger than the need.
    """

    def words(remedy: Remedy) -> str:
        more, there = remedy.more, refusal.there
        moved = machine.moved_bytes if remedy.moved is None else remedy.moved
        device, host, nvme = there.device + more.device, there.host + more.host, there.nvme
        nvme += more.nvme
        # Moved inputs are taken off what is given, and go to drives that have room for them.
        if machine.moved_to_drives or nvme > moved:
            nvme += moved
        else:
            host += moved
        added = {
            "--gpu-mem {}": (more.device, _to_give(device, lambda free: free.device)),
            "--ram {}": (more.host, _to_give(host, lambda free: free.host)),
            machine.nvme_option: (
                more.nvme,
                _to_give(nvme, lambda free: sum(free.nvme.values())),
            ),
        }
        options = " ".join(option.format(size) for option, (much, size) in added.items() if much)
        if options and machine.is_implied and "--here" not in options:
            options = f"--here {options}"
        # Nothing to add: the remedy is a setting, not a size.
        return f"{remedy.change} ({options})" if options else remedy.change

    return replace(
        refusal,
        remedies=tuple(replace(remedy, change=words(remedy)) for remedy in refusal.remedies),
    )


def _to_give(needed: int, left: Callable[[Capacity], int]) -> str:
    """Return the size in whole GiB of which so many bytes are left when others have their part."""
    gib = -(-needed // GiB)
    # Again and again: the part for others grows with the size.
    while (lacking := needed - left(free(gib * GiB, gib * GiB, gib * GiB))) > 0:
        gib += -(-lacking // GiB)
    return f"{gib}GiB"


def seconds_in_words(seconds: float) -> str:
    """Return seconds, or milliseconds where that is less than one."""
    if seconds >= 100:
        return f"{seconds:,.0f} s"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def step_in_words(report: PlanReport, advice: Advice) -> str:
    """Return what a step takes, as far as that is known, between which seconds, and by which
    rates.
    """
    found = advice.step_range or advice.update_range
    between = ""
    if found is not None:
        least, most = map(seconds_in_words, found)
        between = f" ({least} to {most} with {_SOURCES[advice.source.value]})"
    if computes(report):
        return f"{seconds_in_words(report.step_s)} a step{between}"
    return f"update {seconds_in_words(report.update_s)}{between} + forward and backward: unknown"


def computes(report: PlanReport) -> bool:
    """Tell whether the rate of computing is known; without it, only the update's time is."""
    return report.tokens_per_s is not None


def written_per_day(report: PlanReport) -> float:
    """Return the bytes that all drives are written in a day of steps."""
    return 0.0 if report.wear is None else report.wear.written_per_day
