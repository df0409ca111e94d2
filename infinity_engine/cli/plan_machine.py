"""The machine of `infinity plan`: its memory and its rates, out of the arguments, out of the
catalogue, or of the machine at hand.

Needs no torch, and imports the planner only when it is asked. Called by plan.py and compare.py.
"""

from __future__ import annotations

import argparse
import copy
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from infinity_engine.cli.plan_question import flag, given_in, size_of
from infinity_engine.errors import ConfigError
from infinity_engine.units import GB, format_bytes

if TYPE_CHECKING:
    from infinity_engine.advice.doubt import RateSource
    from infinity_engine.machine.catalogue import DriveSheet, GpuSheet
    from infinity_engine.placement.training import Means, Training
    from infinity_engine.plan import (
        BlockRates,
        Calibration,
        Capacity,
        DriveRates,
        OwnWork,
        Rates,
    )
    from infinity_engine.sim.hardware import MachineModel

__all__ = ["AskedMachine", "add_arguments", "better_gpus_of", "free", "machine_of"]

_ASSUMED = "desktop_4090"
_QUEUE_BYTES = 16 << 20  # of the host for each drive, as deepnvme's queues take them
_LEAST_TFLOPS, _MOST_TFLOPS = 1e-6, 1e9
_OF_THE_SHEET = "about 0.4 of the data sheet's"  # as sim/hardware.py takes rates from peaks
_LEAST_RATE, _MOST_RATE = 1.0, 1e18  # bytes or parameters a second
_MOST_START_S = 3600.0
_MOST_GPUS = 64
_NOTHING = re.compile(r"\s*0+(\.0*)?\s*[a-zA-Z]*\s*$")  # a size


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments that describe a machine."""
    means = parser.add_argument_group(
        "the machine (without any of these: the one that this runs on)"
    )
    means.add_argument(
        "--machine",
        metavar="NAME",
        help="a known machine: its figures hold where no others are given",
    )
    means.add_argument(
        "--here",
        nargs="*",
        metavar="DIR",
        help="this machine, by what its doctor and its calibration found, with the drives of these "
        "directories",
    )
    means.add_argument(
        "--gpu", metavar="NAME", help='a GPU of the catalogue, such as "4090" (--models lists them)'
    )
    means.add_argument(
        "--drive",
        action="append",
        metavar="NAME",
        help='a drive of the catalogue, such as "samsung 990 pro"; again for one more',
    )
    means.add_argument(
        "--pcie", type=int, choices=(3, 4, 5), help="the PCIe generation of the GPU's slot"
    )
    means.add_argument(
        "--gpus", type=int, metavar="N", help="GPUs, one for each rank; 0: the CPU alone"
    )
    means.add_argument("--gpu-mem", metavar="SIZE", help='memory of each GPU, such as "24GiB"')
    means.add_argument("--ram", metavar="SIZE", help="the host's memory that is free")
    means.add_argument(
        "--nvme",
        action="append",  # _given_in() refuses a second one
        metavar="SIZE",
        help="free space on all drives together; 0: use none (default: those of --machine, --drive "
        "or --here)",
    )
    means.add_argument(
        "--tbw",
        metavar="SIZE",
        help='rated endurance of all drives together (TBW), such as "1200TB"',
    )
    means.add_argument(
        "--rates", type=Path, metavar="FILE", help="a calibration, or rates, in JSON"
    )
    means.add_argument(
        "--tflops",
        type=float,
        metavar="N",
        help=f"the rate that your model reaches on each rank, in 10^12 operations a second: "
        f"{_OF_THE_SHEET}",
    )


class AskedMachine(NamedTuple):
    """The means of a machine, what there is to say about their rates, and where these come from."""

    means: Means
    notes: tuple[str, ...]
    source: RateSource
    rated_bytes: int | None = None
    """What its drives may be written, where that is known."""
    watts: float | None = None
    """What its GPUs draw at most, where that is known."""
    is_implied: bool = False
    """Whether it is the machine at hand, as none was described: a size alone describes another."""
    nvme_option: str = "--nvme {}"
    """What gives it drives that hold so much."""
    moved_bytes: int = 0
    """Inputs of blocks that are taken off its drives, or off its host."""
    moved_to_drives: bool = False


@dataclass(frozen=True, kw_only=True)
class _Known:
    """What is known of a machine beside the sizes and rates that were typed."""

    model: MachineModel
    """Its rates, some of them assumed."""
    is_named: bool = False
    """Whether all of it is that of a published machine."""
    gpus: int = 1
    most_gpus: int = _MOST_GPUS
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Bytes by the option that would give them."""
    parts: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    rated_bytes: int | None = None
    watts: int = 0
    is_here: bool = False
    """Whether it is this machine, and the system was asked what is free."""
    capacity: Capacity = field(default_factory=lambda: free(0, 0, 0))
    calibration: Calibration | None = None
    sharing: Mapping[str, int] = field(default_factory=dict)
    """How many of its directories share the drive of each; others have theirs alone."""


def machine_of(options: argparse.Namespace, precision: str, training: Training) -> AskedMachine:
    """Return the means of the machine that the arguments describe, less what moved inputs of the
    training's blocks take.

    Raises:
        ConfigError: they describe none, or one that cannot be.
    """
    from infinity_engine.placement.training import Means, beside_inputs
    from infinity_engine.plan import OwnWork, ResolvedBudget

    given = _given_in(options)
    known = _known(given)
    gpus = given.get("gpus", known.gpus)
    if not 0 <= gpus <= known.most_gpus:
        expected = f"a number of GPUs, 0 to {known.most_gpus}: a plan is for one machine"
        raise ConfigError(field="--gpus", value=gpus, expected=expected)
    _check_gpus(given, known, gpus)
    left = _capacity(given, known, gpus)
    drives = bool(sum(left.nvme.values()))
    ranks = max(gpus, 1)  # without GPUs, one rank trains on the CPU
    rated_bytes = size_of(given["tbw"], "--tbw") if "tbw" in given else known.rated_bytes
    if "tbw" in given and not drives:
        expected = "a size in --nvme, too: without drives, nothing wears out"
        raise ConfigError(field="--tbw", value=options.tbw, expected=expected)
    found = _rates(given, known, precision, ranks=ranks, unified=gpus == 0, drives=drives)
    compute = found.compute
    if "tflops" in given:
        if not _LEAST_TFLOPS <= options.tflops <= _MOST_TFLOPS:
            expected = (
                f"a positive number, from {_LEAST_TFLOPS:g} to {_MOST_TFLOPS:g}: the rate that "
                f"your model reaches, {_OF_THE_SHEET}"
            )
            raise ConfigError(field="--tflops", value=options.tflops, expected=expected)
        # What is given takes the place of measured blocks, too.
        compute = compute._replace(flops_per_s=options.tflops * 1e12, blocks=None)
    means = Means(
        budget=ResolvedBudget(device=left.device, host=left.host, nvme=left.nvme),
        rates=found.rates,
        ranks=ranks,
        flops_per_s=compute.flops_per_s,
        blocks=compute.blocks,
        alone=compute.alone,
        computing_beside_io=compute.beside_io,
        io_beside_computing=compute.io_beside,
        summing=compute.summing,
        own=compute.own or OwnWork(),
        wire_bytes_per_s=known.model.wire_bytes_per_s(ranks) if found.wire else None,
        unified=gpus == 0,  # without GPUs, device and host are one memory
        io_bytes=_QUEUE_BYTES if drives else 0,
    )
    # Without GPUs, what the machine draws is not known either.
    watts = float(known.watts * gpus) or None
    beside = beside_inputs(training, means)
    nvme_option = _nvme_option(given, known, found.rates)
    moved_bytes = ranks * training.input_bytes() if training.inputs_moved else 0
    to_drives = training.inputs_moved and sum(left.nvme.values()) > moved_bytes
    if training.inputs_moved and means.unified and not to_drives:
        expected = (
            f"drives with more than {format_bytes(moved_bytes)} free for them "
            f"({nvme_option.format('SIZE')}): without a GPU, inputs of blocks are in the host's "
            "memory already, and can only go to drives"
        )
        raise ConfigError(field="--offload-inputs", value="yes", expected=expected)
    return AskedMachine(
        beside,
        (*known.notes, found.note),
        found.source,
        rated_bytes,
        watts,
        is_implied=known.is_here and "here" not in given,
        nvme_option=nvme_option,
        moved_bytes=moved_bytes,
        moved_to_drives=to_drives,
    )


def better_gpus_of(
    options: argparse.Namespace, precision: str, training: Training
) -> dict[str, Means]:
    """Return the means with GPUs that are better, where --gpu names one of the catalogue and its
    rates are published ones. As much of their memory is taken by others.
    """
    from infinity_engine.machine.catalogue import better_gpus, find_gpu

    given = given_in(options, "gpu", "gpu_mem", "rates", "tflops")
    if "gpu" not in given or given.keys() & {"rates", "tflops"}:
        return {}
    sheet, taken = find_gpu(options.gpu)[0], 0
    if "gpu_mem" in given:
        taken = max(sheet.memory_bytes - size_of(options.gpu_mem, "--gpu-mem"), 0)
    parser = argparse.ArgumentParser(add_help=False)
    add_arguments(parser)
    found = {}
    for better in better_gpus(sheet):
        parts = ["--gpu", better.name, "--gpu-mem", f"{better.memory_bytes - taken} B"]
        bought = parser.parse_args(parts, copy.copy(options))
        is_faster = better.pcie > sheet.pcie and not options.pcie
        slot = f" in a PCIe {better.pcie} slot" if is_faster else ""
        found[better.name + slot] = machine_of(bought, precision, training).means
    return found


def _nvme_option(given: Mapping[str, Any], known: _Known, rates: Rates) -> str:
    """Return what gives the machine drives that hold so much, with their rates."""
    if known.is_here:
        return "--here DIR, a directory on a drive with {} free"
    if rates.nvme:
        return "--nvme {}"
    if "rates" in given:
        return "--nvme {}, and a drive's rates in the file of --rates"
    return "--nvme {} --drive NAME"


def _check_gpus(given: Mapping[str, Any], known: _Known, gpus: int) -> None:
    """Refuse what is said of GPUs where there are none, and more GPUs than this machine has."""
    for name in ("gpu", "gpu_mem", "pcie"):
        if gpus == 0 and name in given:
            expected = "nothing, as there are no GPUs (--gpus is 0)"
            raise ConfigError(field=flag(name), value=given[name], expected=expected)
    if known.is_here and gpus > known.gpus and "gpu_mem" not in given:
        there = f"at most {known.gpus}" if known.gpus else "0"
        expected = f"{there}, as this machine has no more; or --gpu-mem beside it"
        raise ConfigError(field="--gpus", value=gpus, expected=expected)


def free(device: int, host: int, drives: int) -> Capacity:
    """Return what an engine would take of so much."""
    from infinity_engine.machine.capacity import capacity_of

    return capacity_of(device=device, host=host, nvme={"NVMe": drives} if drives else {})


# --- what is known --------------------------------------------------------------------------------


def _given_in(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options that were given, with the one size of all drives together.

    Raises:
        ConfigError: it was given twice: the last one would take the place of the first unseen.
    """
    given = given_in(
        options,
        *("machine", "here", "gpu", "drive", "pcie", "gpus", "gpu_mem", "ram", "nvme", "tbw"),
        *("rates", "tflops", "optimizer"),
    )
    sizes = given.get("nvme", [])
    if len(sizes) > 1:
        expected = "one size, of all drives together: give the sum"
        raise ConfigError(field="--nvme", value=" and ".join(sizes), expected=expected)
    return {**given, "nvme": sizes[0]} if sizes else given


def _known(given: Mapping[str, Any]) -> _Known:
    parts = given.keys() & {"machine", "gpu", "drive"}
    if "here" not in given and (parts or given.keys() & {"gpus", "gpu_mem", "ram", "nvme"}):
        return _of_catalogue(given)
    if parts:
        expected = "without --machine, --gpu and --drive: this machine has its own"
        raise ConfigError(field="--here", value=given["here"], expected=expected)
    if "pcie" in given:
        expected = "--gpu beside it: the slots of this machine are measured by its calibration"
        raise ConfigError(field="--pcie", value=given["pcie"], expected=expected)
    return _of_here(given.get("here", ()))


def _of_catalogue(given: Mapping[str, Any]) -> _Known:
    from infinity_engine.machine.catalogue import (
        GPU_SHEETS,
        PCIE_BYTES_PER_S,
        find_drive,
        find_gpu,
    )
    from infinity_engine.sim.hardware import machine

    known = _Known(model=machine(_ASSUMED))
    if "machine" in given:
        named = machine(given["machine"])
        sizes = {
            "--gpu-mem": named.gpu.memory_bytes,
            "--ram": named.host.memory_bytes,
            "--nvme": named.drive_capacity_bytes,
        }
        watts = {sheet.name: sheet.watts for sheet in GPU_SHEETS}
        known = _Known(
            model=named,
            is_named=True,
            gpus=named.gpus,
            most_gpus=named.gpus,
            sizes=sizes,
            watts=watts.get(named.gpu.name, 0),
        )
    if "gpu" in given:
        try:
            gpus = find_gpu(given["gpu"], field="--gpu")
        except ConfigError as error:
            expected = f"{error.expected}; to plan for another GPU, give --gpu-mem and --tflops "
            expected += f"({_OF_THE_SHEET}) instead"
            raise replace(error, expected=expected) from error
        known = _with_gpu(known, gpus[0])
        known = replace(known, notes=(*known.notes, *_also("--gpu", given["gpu"], gpus)))
    if {"pcie", "rates"} <= given.keys():
        expected = "nothing beside --rates, which has the rates of the link"
        raise ConfigError(field="--pcie", value=given["pcie"], expected=expected)
    if "pcie" in given:
        link = PCIE_BYTES_PER_S[given["pcie"]]
        known = replace(known, model=known.model.with_link(link))
    if "drive" in given:
        found = [find_drive(name, field="--drive") for name in given["drive"]]
        sheets = [drives[0] for drives in found]
        known = _with_drives(known, sheets)
        if "rates" not in given:
            known = replace(known, notes=(*known.notes, *_writes_assumed(sheets)))
        for name, drives in dict(zip(given["drive"], found, strict=True)).items():
            known = replace(known, notes=(*known.notes, *_also("--drive", name, drives)))
    return known


def _with_gpu(known: _Known, sheet: GpuSheet) -> _Known:
    return replace(
        known,
        model=known.model.with_gpu(sheet),
        sizes={**known.sizes, "--gpu-mem": sheet.memory_bytes},
        parts=(*known.parts, sheet.name),
        watts=sheet.watts,
    )


def _with_drives(known: _Known, sheets: list[DriveSheet]) -> _Known:
    return replace(
        known,
        model=known.model.with_drives(sheets),
        sizes={**known.sizes, "--nvme": sum(sheet.capacity_bytes for sheet in sheets)},
        parts=(*known.parts, *(sheet.name for sheet in sheets)),
        rated_bytes=sum(sheet.rated_bytes for sheet in sheets),
    )


def _writes_assumed(sheets: Iterable[DriveSheet]) -> Iterator[str]:
    """Yield a note for each kind of drive that is planned with less than its sheet says."""
    for sheet in dict.fromkeys(sheets):
        if sheet.sustained_bytes_per_s is None:
            yield (
                f"a {sheet.name} is taken to write {sheet.write_bytes_per_s / GB:g} GB/s, as such "
                f"drives do once their cache is full: the {sheet.burst_bytes_per_s / GB:g} of its "
                "data sheet are those of the cache"
            )


def _also(
    option: str, name: str, found: tuple[GpuSheet, ...] | tuple[DriveSheet, ...]
) -> tuple[str, ...]:
    """Return a note where a name fits several parts."""
    if len(found) == 1:
        return ()
    others = ", ".join(sheet.name for sheet in found[1:])
    return (f"{option} {name} is taken to be {found[0].name}; it also fits {others}",)


def _of_here(directories: Sequence[str]) -> _Known:
    """Return what this machine has free, and what was kept of its calibration."""
    from infinity_engine.calibration import kept_calibration
    from infinity_engine.machine.capacity import directories_beside, probe_capacity
    from infinity_engine.machine.catalogue import find_gpu
    from infinity_engine.machine.gpus import probe_gpus
    from infinity_engine.plan.mappings import Directories
    from infinity_engine.sim.hardware import machine

    gpus = probe_gpus()
    visible = gpus.visible
    device = min(
        ((gpu.total_bytes or 0) if gpu.free_bytes is None else gpu.free_bytes for gpu in visible),
        default=0,
    )
    capacity = probe_capacity(directories, device_free_bytes=device)
    try:
        calibration = kept_calibration(directories)
    except OSError as error:
        expected = f"a directory on a drive to be used ({error.strerror})"
        raise ConfigError(field="--here", value=error.filename, expected=expected) from error
    known = _Known(
        model=machine(_ASSUMED),
        gpus=len(visible),
        is_here=True,
        capacity=capacity,
        calibration=calibration,
        # Spelled as rates spell them.
        sharing=Directories(directories_beside(directories), field="--here"),
    )
    if visible:
        # Without a line in the catalogue, rates are those of the assumed machine: a note says so.
        with suppress(ConfigError):
            known = _with_gpu(known, find_gpu(visible[0].name)[0])
    return replace(known, notes=("memory is what is free on this machine now",))


# --- memory ---------------------------------------------------------------------------------------


def _capacity(given: Mapping[str, Any], known: _Known, gpus: int) -> Capacity:
    """Return what is free: sizes that were typed go before those that are known."""
    here = known.capacity
    device = 0 if gpus == 0 else _size(given, "gpu_mem", known)
    host = _size(given, "ram", known)
    asked = not _NOTHING.match(given["nvme"]) if "nvme" in given else "--nvme" in known.sizes
    drives = _size(given, "nvme", known) if asked else 0
    typed = free(device, host, drives)
    if not known.is_here:
        return typed
    return replace(
        here,
        device=typed.device if "gpu_mem" in given or not gpus else here.device,
        host=typed.host if "ram" in given else here.host,
        nvme=typed.nvme if "nvme" in given else here.nvme,
    )


def _size(given: Mapping[str, Any], name: str, known: _Known) -> int:
    field = flag(name)
    if name in given:
        return size_of(given[name], field)
    if known.is_here:
        return 0
    if field not in known.sizes:
        expected = (
            'a size such as "64GiB", for what is free there, or a known machine with --machine'
        )
        raise ConfigError(field=field, value=None, expected=expected)
    return known.sizes[field]


# --- rates ----------------------------------------------------------------------------------------


class _Compute(NamedTuple):
    """How fast modules compute, in operations or blocks, and what part of that is left beside
    drives, and to these beside it; what all else does alone, what part is left to updates that make
    checksums, and what the engine takes for itself.
    """

    flops_per_s: float | None = None
    blocks: BlockRates | None = None
    alone: Rates | None = None
    beside_io: float = 1.0
    io_beside: float = 1.0
    summing: float = 1.0
    own: OwnWork | None = None


class _FoundRates(NamedTuple):
    """Rates, with where they are from; `wire`: what ranks exchange is that of the known machine."""

    rates: Rates
    compute: _Compute
    note: str
    source: RateSource
    wire: bool = False


def _rates(
    given: Mapping[str, Any],
    known: _Known,
    precision: str,
    *,
    ranks: int,
    unified: bool,
    drives: bool,
) -> _FoundRates:
    # Without directories, drives are known by a size alone: they are all that were measured.
    directories = given.get("here", []) if drives else []
    if "rates" in given:
        return _rates_of_file(
            given, precision, directories, ranks=ranks, unified=unified, drives=drives
        )
    if known.calibration is not None:
        note = f"rates were measured {known.calibration.date}, of one process of this machine"
        return _measured(
            known.calibration,
            given["optimizer"],
            precision,
            note,
            directories=directories,
            ranks=ranks,
            unified=unified,
            drives=drives,
        )
    return _published(given, known, precision, ranks=ranks, unified=unified, drives=drives)


def _published(
    given: Mapping[str, Any],
    known: _Known,
    precision: str,
    *,
    ranks: int,
    unified: bool,
    drives: bool,
) -> _FoundRates:
    from infinity_engine.advice.doubt import RateSource
    from infinity_engine.sim.hardware import sharing_memory

    model, fp32 = known.model, precision == "fp32"
    published = {} if model.drives is None else {"NVMe": model.drives.divided(ranks)}
    if drives and not published:
        expected = f"--drive beside it: a {model.title} has no drives whose rates are published"
        raise ConfigError(field="--nvme", value=given.get("nvme"), expected=expected)
    alone = replace(
        model.rates(min(ranks, model.gpus)),
        host_update_params_per_s=model.host.update_params_per_s / ranks,
        dram_bytes_per_s=model.host.dram_bytes_per_s / ranks,
        nvme=published,
    )
    if known.is_here and "nvme" not in given and alone.nvme:
        [drive] = alone.nvme.values()
        alone = replace(alone, nvme=dict.fromkeys(known.capacity.nvme, drive))
        alone = _shared(alone, known.sharing)
    rates = sharing_memory(alone, links=not unified, drives=drives)
    # Autocast computes in 16 bits, whatever parameters are kept in.
    flops_per_s = None if unified else model.gpu.training_flops_per_s(fp32=fp32)
    without_tf32 = "; GPUs are taken to compute fp32 without TF32" if fp32 and flops_per_s else ""
    return _FoundRates(
        rates,
        _Compute(flops_per_s, alone=alone),
        _where_from(known) + without_tf32,
        RateSource.PUBLISHED,
        wire=True,
    )


def _shared(rates: Rates, sharing: Mapping[str, int]) -> Rates:
    """Return the rates where each directory has its part of a drive that others use as well."""
    return rates.divided(1, users={name: sharing.get(name, 1) for name in rates.nvme})


def _where_from(known: _Known) -> str:
    advice = "measure yours with `infinity calibrate` and give --rates"
    if known.is_here:
        advice = "measure yours with `infinity calibrate`, which is kept for this command"
    title = known.model.title
    if known.parts:
        counts = {part: known.parts.count(part) for part in known.parts}
        parts = " and ".join(
            part if count == 1 else f"{count} x {part}" for part, count in counts.items()
        )
        base = "as published" if known.is_named else "assumed to be those"
        return f"rates are as published of {parts}, all others {base} of a {title}: {advice}"
    source = "as published of" if known.is_named else "assumed to be those of"
    return f"rates are {source} a {title}: {advice}"


def _rates_of_file(
    given: Mapping[str, Any],
    precision: str,
    directories: Sequence[str],
    *,
    ranks: int,
    unified: bool,
    drives: bool,
) -> _FoundRates:
    from infinity_engine.advice.doubt import RateSource
    from infinity_engine.plan import Rates
    from infinity_engine.plan.calibration import Calibration

    path: Path = given["rates"]
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            field="--rates", value=str(path), expected=f"a file ({error.strerror})"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            field="--rates", value=str(path), expected=f"a file in JSON ({error})"
        ) from error
    # One of the cache's own files has the figures of a machine, or of a drive, alone.
    if isinstance(read, dict) and "links" not in read and {"calibration", "drive"} & read.keys():
        expected = (
            "a file that `infinity calibrate --json FILE` wrote: this file is from its cache, "
            "which has only a part of the figures"
        )
        raise ConfigError(field="--rates", value=str(path), expected=expected)
    if not (isinstance(read, dict) and "links" in read):
        # No calibration: plain rates by their names.
        rates = Rates.from_mapping(read, field="--rates")
        _check_rates(rates)
        return _FoundRates(rates, _Compute(), f"rates are those of {path}", RateSource.GIVEN)
    calibration = Calibration.from_mapping(read, field="--rates")
    # Measured by another name of the same directory.
    named = {drive.drive.get("directory"): name for name, drive in calibration.drives.items()}
    directories = [
        name if name in calibration.drives else named.get(str(Path(name).resolve()), name)
        for name in directories
    ]
    missing = [name for name in directories if name not in calibration.drives]
    if missing:
        measuring = f"infinity calibrate {' '.join(directories)} --json {path}"
        expected = f"directories that {path} has rates of: run `{measuring}`"
        raise ConfigError(field="--here", value=", ".join(missing), expected=expected)
    note = f"rates were measured {calibration.date}, of one process; those of {path}"
    return _measured(
        calibration,
        given["optimizer"],
        precision,
        note,
        directories=directories,
        ranks=ranks,
        unified=unified,
        drives=drives,
    )


def _check_rates(rates: Rates) -> None:
    """Refuse rates of a file that no machine has, and with which a plan's times have no end."""
    tables: dict[str, Rates | DriveRates] = {"": rates}
    tables.update({f".nvme[{name!r}]": drive for name, drive in rates.nvme.items()})
    for place, table in tables.items():
        for item in fields(table):
            value = getattr(table, item.name)
            if not isinstance(value, float | int):
                continue
            least, most = 0.0, _MOST_START_S
            if item.name.endswith("_per_s"):
                least, most = _LEAST_RATE, _MOST_RATE
            if not least <= value <= most:
                expected = f"a number from {least:g} to {most:g}"
                raise ConfigError(
                    field=f"--rates{place}.{item.name}", value=value, expected=expected
                )


def _measured(
    calibration: Calibration,
    optimizer: str,
    precision: str,
    note: str,
    *,
    directories: Sequence[str],
    ranks: int,
    unified: bool,
    drives: bool,
) -> _FoundRates:
    from infinity_engine.advice.doubt import RateSource
    from infinity_engine.plan import OwnWork

    directories = directories or tuple(calibration.drives)
    # The first with what I/O and copies take away, the second without.
    rates, alone = (
        calibration.rates(
            optimizer=optimizer,
            directories=directories,
            beside_io=beside and drives,
            beside_copies=beside and not unified,
        ).divided(ranks)
        for beside in (True, False)
    )
    own = calibration.own() if unified else OwnWork()
    # The search weighs it as part of what an update takes, however small.
    rates, alone = (
        replace(found, host_start_s=(found.host_start_s or 0) + own.updating_s or None)
        for found in (rates, alone)
    )
    # Only these two are measured: fp16 is taken to compute as bf16.
    dtype = "fp32" if precision == "fp32" else "bf16"
    flops_per_s, blocks = calibration.flops_per_s(dtype), calibration.block_rates(dtype)
    if unified and calibration.machine.get("device", "").startswith("cuda"):
        flops_per_s, blocks = None, None
        note += "; modules computed on a GPU then: how fast they compute without one is not known"
    compute = _Compute(
        flops_per_s,
        blocks,
        alone,
        calibration.computing_beside_io(directories),
        calibration.io_beside_computing(directories),
        calibration.summing(optimizer=optimizer),
        own,
    )
    calibration = calibration.with_drives(
        {name: calibration.drives[name] for name in directories} if drives else {}
    )
    if not calibration.is_disturbed:
        return _FoundRates(rates, compute, note, RateSource.MEASURED)
    note += (
        f"; other processes used {calibration.most_others_share:.0%} of the processors meanwhile, "
        "so these rates are doubted as if they were given by hand"
    )
    return _FoundRates(rates, compute, note, RateSource.GIVEN)
