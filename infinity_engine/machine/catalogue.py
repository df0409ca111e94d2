"""GPUs, drives and PCIe generations by the names that people give them: one line each.

Pure data; measures nothing. `source` names the document in which a figure is stated. Figures were
entered from memory; `compared` says with what a line was compared since, and which of its figures
were found nowhere. Rates in fp32 were not compared. What is assumed says so.
Called by the command line, for machines that are described by their parts.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from types import MappingProxyType
from typing import TypeVar

from infinity_engine.errors import ConfigError
from infinity_engine.units import GB, TB, GiB

__all__ = [
    "DRIVE_SHEETS",
    "GPU_SHEETS",
    "PCIE_BYTES_PER_S",
    "SUSTAINED_BYTES_PER_S",
    "DriveSheet",
    "GpuSheet",
    "better_gpus",
    "find_drive",
    "find_gpu",
    "names_near",
]

_TERA = 10**12  # operations
_LARGER = 1.2  # times as much memory is the next size
_FASTER = 1.3  # times the operations a second
_OFFERED = 2  # better GPUs
_UNITS = frozenset({"gib", "gb", "tb"})
_VARIANTS = frozenset({"ti", "pro", "plus"})  # after the name of one board, they name another one


@dataclass(frozen=True, slots=True)
class GpuSheet:
    """A GPU: its memory, what it computes in bf16 (dense, fp32 sums) and in fp32 (without TF32),
    its memory's rate, its PCIe generation (16 lanes) and what it draws at most.
    """

    name: str
    memory_bytes: int
    flops_per_s: float
    fp32_flops_per_s: float
    memory_bytes_per_s: float
    pcie: int
    watts: int
    source: str

    @property
    def is_on_board(self) -> bool:
        """Whether it is a part of a server's board: no slot takes it."""
        return "SXM" in self.name or self.name.startswith("B200")

    @property
    def gpu_gpu_bytes_per_s(self) -> float | None:
        """What one sends the others of a node over NVLink, one way; None: nothing joins all."""
        return _NVLINK_BYTES_PER_S.get(self.name)

    @property
    def compared(self) -> str:
        """What this line was compared with, and which figures no page at hand has; empty:
        nothing yet.
        """
        return _COMPARED.get(self.name, "")


@dataclass(frozen=True, slots=True)
class DriveSheet:
    """A drive: `burst` is what its data sheet says of writes, `sustained` what it holds for hours.

    `sustained` is None where neither the vendor nor a review at hand says it.
    """

    name: str
    capacity_bytes: int
    read_bytes_per_s: float
    burst_bytes_per_s: float
    sustained_bytes_per_s: float | None
    rated_bytes: int
    """What it may be written in its life, its TBW."""
    source: str

    @property
    def compared(self) -> str:
        """What this line was compared with, and which figures no page at hand has; empty:
        nothing yet.
        """
        return _COMPARED.get(self.name, "")

    @property
    def write_bytes_per_s(self) -> float:
        """What it is planned with: what it holds for hours, as far as that is known."""
        return self.sustained_bytes_per_s or min(SUSTAINED_BYTES_PER_S, self.burst_bytes_per_s)


SUSTAINED_BYTES_PER_S = 1.4 * GB
"""Assumed of a consumer drive with a full cache, where no measurement is at hand."""

PCIE_BYTES_PER_S = MappingProxyType({3: 12 * GB, 4: 25 * GB, 5: 55 * GB})
"""What 16 lanes of a generation were seen to carry one way: ZeRO-Infinity's DGX-2 (3), section 4.1
of Deep Optimizer States (4), and its JLSE node (5)."""


_COMPARED: Mapping[str, str] = MappingProxyType(
    {
        "RTX 3080 10 GB": "itcreations.com: memory, its rate, power; gamingpcbuilder.com: a "
        "quarter of 238 sparse TFLOPS with FP16 sums",
        "RTX 3090 24 GB": "thetechfeed.site: memory, its rate, power; gamingpcbuilder.com: a "
        "quarter of 285 sparse TFLOPS with FP16 sums",
        "RTX 4070 Ti 12 GB": "fpsbench.com: memory, its rate, power, and twice the FP32 rate of "
        "40.09",
        "RTX 4080 16 GB": "db.thegpu.guru: memory, its rate; sweclockers.com: power; "
        "cputronic.com: twice the FP32 rate of 48.74",
        "RTX 4090 24 GB": "waredb.com, thefpsreview.com: memory, its rate, compute, power",
        "RTX 5070 12 GB": "euro.dayfr.com: memory, its rate, power; tweaktown.com: a sixteenth "
        "of 988 AI TOPS",
        "RTX 5070 Ti 16 GB": "euro.dayfr.com: memory, its rate, power; tweaktown.com: a "
        "sixteenth of 1,406 AI TOPS",
        "RTX 5080 16 GB": "euro.dayfr.com: memory, its rate, power; tweaktown.com: a sixteenth "
        "of 1,801 AI TOPS",
        "RTX 5090 32 GB": "euro.dayfr.com: memory, its rate, power; tweaktown.com: a sixteenth "
        "of 3,352 AI TOPS",
        "RTX A5000 24 GB": "tables of two public repositories: memory, its rate, compute, power",
        "RTX A6000 48 GB": "llmperf.net: memory, its rate, compute, power",
        "RTX 6000 Ada 48 GB": "grafikkarten.com: memory, its rate, power, and four times the "
        "FP32 rate of 91.1",
        "RTX PRO 6000 Blackwell 96 GB": "gpu.name: memory, its rate, power; a copy of its "
        "announcement: an eighth of 4,000 AI TOPS",
        "A10 24 GB": "winston-zhang-orz/gpu-specs, gist.github.com/kimbochen: memory, its rate, "
        "compute, power",
        "A30 24 GB": "NVIDIA's nvbench on one: memory, its rate; tables of public repositories: "
        "compute, power",
        "A40 48 GB": "ecer.com: memory, its rate, compute, power",
        "A100 PCIe 80 GB": "thundercompute.com, glennklockwood.com: memory, compute, power",
        "A100 SXM 80 GB": "thundercompute.com, glennklockwood.com: memory, compute, power",
        "A100 PCIe 40 GB": "thundercompute.com, wccftech.com: memory, compute, power",
        "L4 24 GB": "winston-zhang-orz/gpu-specs: compute; grokipedia.com: memory, power",
        "L40 48 GB": "a seller's copy of the data sheet: memory, compute, power",
        "L40S 48 GB": "a seller's copy of the data sheet: memory, compute, power",
        "H100 SXM 80 GB": "glennklockwood.com: memory, its rate, compute, power",
        "H100 PCIe 80 GB": "hpctech.co.jp: memory, its rate, power, and half of 1,513 sparse "
        "TFLOPS",
        "H100 NVL 94 GB": "aiminingco.com: memory, its rate, power; torchtitan: compute",
        "H200 SXM 141 GB": "itkb.uw.cz: memory, its rate, compute, power",
        "B200 180 GB": "zdszero.github.io, a copy of NVIDIA's table: memory, its rate, power, "
        "and half of 4.5 sparse PFLOPS",
        "Samsung 990 PRO 2 TB": "digitec.ch, bytebuys.com: reads, writes, TBW",
        "Samsung 990 PRO 4 TB": "mezha.media: reads, writes, TBW",
        "Samsung 980 PRO 2 TB": "pugetsystems.com: reads, writes, TBW",
        "Samsung 9100 PRO 2 TB": "TechPowerUp: TBW; no page at hand has its reads and writes",
        "WD Black SN850X 2 TB": "newsdirectory3.com: reads, writes; a public price list: TBW",
        "SK hynix Platinum P41 2 TB": "a public price list: reads, writes; no page at hand has "
        "its TBW",
        "Crucial T500 2 TB": "kitguru.net: reads, writes; TechPowerUp: TBW, 0.64 GB/s over a "
        "whole drive",
        "Crucial T705 2 TB": "julliannepiano.com: reads, writes; a public price list: TBW",
        "Seagate FireCuda 530 2 TB": "a public price list: reads, writes, TBW",
        "Kingston KC3000 2 TB": "TechPowerUp's review of the A440 Pro: 2.0 GB/s over a whole "
        "drive; no page at hand has its TBW",
        "Sabrent Rocket 4 Plus 2 TB": "TechPowerUp: 1.6 GB/s over a whole drive; no page at "
        "hand has its TBW",
        "Samsung PM9A3 3.84 TB": "heise.de, a public price list: reads, writes, a whole drive a "
        "day",
        "Samsung PM9D3a 7.68 TB": "a seller's copy of the data sheet: reads, writes, TBW",
        "Micron 7450 PRO 3.84 TB": "servethehome.com: reads; no page at hand has writes and TBW "
        "of this size",
        "Intel D7-P5500 3.84 TB": "ilsoftware.it: reads, writes, a whole drive a day",
        "Intel Optane P5800X 1.6 TB": "a public table: reads, writes; a seller: a hundred whole "
        "drives a day",
    }
)
"""Which figures of a line were found to be the same elsewhere, and where; which were not found."""

_GA102 = "NVIDIA Ampere GA102 white paper V2 (2020)"
_ADA = "NVIDIA Ada white paper V2 (2023)"
_BLACKWELL = "NVIDIA RTX Blackwell white paper (2025)"

_NVLINK_BYTES_PER_S: Mapping[str, float] = MappingProxyType(
    {
        "A100 SXM 80 GB": 300 * GB,
        "H100 SXM 80 GB": 450 * GB,
        "H200 SXM 141 GB": 450 * GB,
        "B200 180 GB": 900 * GB,
    }
)
"""Half of what the data sheets of the lines say, which is of both ways together."""

# name, GiB, Tflop/s in bf16 and in fp32, GB/s of its memory, PCIe, W. Of several that fit a name
# the first is taken. Where drivers show less than the name says, as checks of errors take a part,
# the memory is what they show: 23,028 MiB and so on.
_GPUS: tuple[tuple[str, float, float, float, float, int, int, str], ...] = (
    ("RTX 3080 10 GB", 10, 59.5, 29.8, 760, 4, 320, _GA102),
    ("RTX 3090 24 GB", 24, 71, 35.6, 936, 4, 350, _GA102),
    ("RTX 4070 Ti 12 GB", 12, 80.2, 40.1, 504, 4, 285, _ADA),
    ("RTX 4080 16 GB", 16, 97.5, 48.7, 716.8, 4, 320, _ADA),
    ("RTX 4090 24 GB", 24, 165.2, 82.6, 1008, 4, 450, _ADA),
    ("RTX 5070 12 GB", 12, 61.7, 30.9, 672, 5, 250, _BLACKWELL),
    ("RTX 5070 Ti 16 GB", 16, 87.9, 43.9, 896, 5, 300, _BLACKWELL),
    ("RTX 5080 16 GB", 16, 112.6, 56.3, 960, 5, 360, _BLACKWELL),
    ("RTX 5090 32 GB", 32, 209.5, 104.8, 1792, 5, 575, _BLACKWELL),
    ("RTX A5000 24 GB", 24, 111.1, 27.8, 768, 4, 230, "NVIDIA RTX A5000 data sheet (2021)"),
    ("RTX A6000 48 GB", 48, 154.8, 38.7, 768, 4, 300, _GA102),
    ("RTX 6000 Ada 48 GB", 48, 364.2, 91.1, 960, 4, 300, "NVIDIA RTX 6000 Ada data sheet (2023)"),
    (
        "RTX PRO 6000 Blackwell 96 GB",
        *(96, 500, 125, 1792, 5, 600),
        "NVIDIA RTX PRO 6000 data sheet (2025): an eighth of its sparse FP4",
    ),
    ("A10 24 GB", 23028 / 1024, 125, 31.2, 600, 4, 150, "NVIDIA A10 data sheet (2021)"),
    ("A30 24 GB", 24, 165, 10.3, 933, 4, 165, "NVIDIA A30 data sheet (2022)"),
    ("A40 48 GB", 46068 / 1024, 149.7, 37.4, 696, 4, 300, "NVIDIA A40 data sheet (2022)"),
    ("A100 PCIe 80 GB", 80, 312, 19.5, 1935, 4, 300, "NVIDIA A100 data sheet (2022)"),
    ("A100 SXM 80 GB", 80, 312, 19.5, 2039, 4, 400, "NVIDIA A100 data sheet (2022)"),
    ("A100 PCIe 40 GB", 40, 312, 19.5, 1555, 4, 250, "NVIDIA A100 40GB PCIe brief (2020)"),
    ("L4 24 GB", 23034 / 1024, 121, 30.3, 300, 4, 72, "NVIDIA L4 data sheet (2023)"),
    ("L40 48 GB", 46068 / 1024, 181.05, 90.5, 864, 4, 300, "NVIDIA L40 data sheet (2023)"),
    ("L40S 48 GB", 46068 / 1024, 362.05, 91.6, 864, 4, 350, "NVIDIA L40S data sheet (2023)"),
    ("H100 SXM 80 GB", 80, 989.4, 67, 3350, 5, 700, "NVIDIA H100 data sheet (2023)"),
    ("H100 PCIe 80 GB", 80, 756, 51, 2000, 5, 350, "NVIDIA H100 data sheet (2023)"),
    ("H100 NVL 94 GB", 94, 835, 60, 3900, 5, 400, "NVIDIA H100 data sheet (2024)"),
    ("H200 SXM 141 GB", 143771 / 1024, 989.4, 67, 4800, 5, 700, "NVIDIA H200 data sheet (2024)"),
    ("B200 180 GB", 180, 2250, 75, 7700, 5, 1000, "NVIDIA HGX B200 data sheet (2025)"),
)


GPU_SHEETS = tuple(
    GpuSheet(name, round(gib * GiB), bf16 * _TERA, fp32 * _TERA, gb_per_s * GB, pcie, watts, source)
    for name, gib, bf16, fp32, gb_per_s, pcie, watts, source in _GPUS
)

_STEADY = "stated for a drive that is in use, so it is what it holds"

# name, TB, GB/s of reads, of writes in bursts and for hours, TBW. The first that fits is taken.
_DRIVES: tuple[tuple[str, float, float, float, float | None, float, str], ...] = (
    ("Samsung 990 PRO 2 TB", 2, 7.45, 6.9, None, 1200, "Samsung data sheet (2022)"),
    ("Samsung 990 PRO 4 TB", 4, 7.45, 6.9, None, 2400, "Samsung data sheet (2023)"),
    ("Samsung 980 PRO 2 TB", 2, 7.0, 5.1, None, 1200, "Samsung data sheet (2021)"),
    ("Samsung 9100 PRO 2 TB", 2, 14.7, 13.4, None, 1200, "Samsung data sheet (2025)"),
    ("WD Black SN850X 2 TB", 2, 7.3, 6.6, None, 1200, "Western Digital product brief (2022)"),
    ("SK hynix Platinum P41 2 TB", 2, 7.0, 6.5, None, 1200, "SK hynix data sheet (2022)"),
    (
        "Crucial T500 2 TB",
        *(2, 7.4, 7.0, 0.64, 1200),
        "Crucial (2023); 0.64 GB/s over the whole drive, as TechPowerUp measured it",
    ),
    ("Crucial T705 2 TB", 2, 14.5, 12.7, None, 1200, "Crucial product flyer (2024)"),
    ("Seagate FireCuda 530 2 TB", 2, 7.3, 6.9, None, 2550, "Seagate data sheet (2021)"),
    (
        "Kingston KC3000 2 TB",
        *(2, 7.0, 7.0, 2.0, 1600),
        "Kingston (2021); 2.0 GB/s over the whole drive, as TechPowerUp measured it",
    ),
    (
        "Sabrent Rocket 4 Plus 2 TB",
        *(2, 7.1, 6.6, 1.6, 1400),
        "Sabrent; 1.6 GB/s over the whole drive, as TechPowerUp measured it",
    ),
    ("Samsung PM9A3 3.84 TB", 3.84, 6.5, 3.5, 3.5, 7008, f"Samsung (2020); {_STEADY}"),
    ("Samsung PM9D3a 7.68 TB", 7.68, 12.0, 6.8, 6.8, 14016, f"Samsung (2024); {_STEADY}"),
    ("Micron 7450 PRO 3.84 TB", 3.84, 6.8, 5.3, 5.3, 7300, f"Micron (2022); {_STEADY}"),
    ("Intel D7-P5500 3.84 TB", 3.84, 7.0, 4.3, 4.3, 7008, f"Intel (2020); {_STEADY}"),
    ("Intel Optane P5800X 1.6 TB", 1.6, 7.2, 6.2, 6.2, 292_000, f"Intel (2021); {_STEADY}"),
)

DRIVE_SHEETS = tuple(
    DriveSheet(
        name,
        round(tb * TB),
        read * GB,
        burst * GB,
        None if sustained is None else sustained * GB,
        round(tbw * TB),
        source,
    )
    for name, tb, read, burst, sustained, tbw, source in _DRIVES
)

_Sheet = TypeVar("_Sheet", GpuSheet, DriveSheet)


def find_gpu(name: str, *, field: str = "gpu") -> tuple[GpuSheet, ...]:
    """Return the GPUs that a name such as "4090" or "a100 40" fits, the likeliest first.

    Raises:
        ConfigError: it fits none; "4070" does not fit a 4070 Ti, which is another board.
    """
    return _found(name, GPU_SHEETS, field)


def better_gpus(sheet: GpuSheet) -> tuple[GpuSheet, ...]:
    """Return GPUs for the same kind of slot that have more memory or compute much faster, and are
    worse in neither: the fastest of each of the first two sizes of memory.
    """
    better = [
        other
        for other in GPU_SHEETS
        if other.is_on_board == sheet.is_on_board
        and other.memory_bytes >= sheet.memory_bytes
        and other.flops_per_s >= sheet.flops_per_s
        and (
            other.memory_bytes >= _LARGER * sheet.memory_bytes
            or other.flops_per_s >= _FASTER * sheet.flops_per_s
        )
    ]
    found: list[GpuSheet] = []
    while better and len(found) < _OFFERED:
        most = _LARGER * min(other.memory_bytes for other in better)
        alike = [other for other in better if other.memory_bytes <= most]
        found.append(max(alike, key=lambda other: other.flops_per_s))
        better = [other for other in better if other.memory_bytes > most]
    return tuple(found)


def find_drive(name: str, *, field: str = "drive") -> tuple[DriveSheet, ...]:
    """Return the drives that a name such as "samsung 990 pro" fits, the likeliest first.

    Raises:
        ConfigError: it fits none.
    """
    return _found(name, DRIVE_SHEETS, field)


def _found(name: str, sheets: Sequence[_Sheet], field: str) -> tuple[_Sheet, ...]:
    asked = _words(name)
    found = tuple(sheet for sheet in sheets if asked and _fits(asked, _words(sheet.name)))
    if found:
        return found
    if near := _near(asked, sheets):
        expected = f"one of {', '.join(near)}, or another name that `infinity plan --models` lists"
        raise ConfigError(field=field, value=name, expected=expected)
    raise ConfigError.unknown_name(field=field, name=name, known=[sheet.name for sheet in sheets])


def names_near(name: str) -> list[str]:
    """Return the GPUs and drives with a number in their names like one in this name."""
    return _near(_words(name), [*GPU_SHEETS, *DRIVE_SHEETS])


def _near(asked: Sequence[str], sheets: Sequence[GpuSheet | DriveSheet]) -> list[str]:
    """Return the names with a number of what is asked for; else those with one digit unlike it."""
    models = {sheet.name: _models(_words(sheet.name)) for sheet in sheets}
    wanted = _models(asked)
    same = [name for name, numbers in models.items() if set(wanted).intersection(numbers)]
    return same or [
        name
        for name, numbers in models.items()
        if any(_differ_once(one, other) for one in wanted for other in numbers)
    ]


def _models(words: Sequence[str]) -> list[str]:
    """Return the words with a digit in them, but for sizes of memory."""
    return [
        word
        for word, unit in zip_longest(words, words[1:])
        if _has_digit(word) and unit not in _UNITS
    ]


def _differ_once(one: str, other: str) -> bool:
    return len(one) == len(other) and sum(map(operator.ne, one, other)) == 1


def _words(name: str) -> list[str]:
    """Return the letters and numbers of a name, apart: "rtx4090", "RTX 4090" and "4090" meet."""
    # what drivers add to a name: "NVIDIA H100 80GB HBM3", "A100-SXM4-80GB"
    added = r"\b(nvidia|geforce|hbm\w*|generation|workstation|server|edition)\b"
    plain = re.sub(added, " ", name.lower())
    plain = re.sub(r"\bsxm\d\b", "sxm", plain)
    plain = re.sub(r"(\d)\s*(gib|gb|tb)\b", r"\1 \2", plain)
    plain = re.sub(r"\b(rtx)(?=\d)", r"\1 ", plain)
    plain = re.sub(r"\b(\d{4})(?=(ti|super)\b)", r"\1 ", plain)  # "4070ti"
    return re.findall(r"[a-z0-9.]+", plain)


def _fits(asked: list[str], words: list[str]) -> bool:
    # "4070" means no 4070 Ti; "samsung" alone means any of its drives
    another = _VARIANTS.intersection(words).difference(asked)
    means_one_model = any(map(_has_digit, asked))
    return all(word in words for word in asked) and not (means_one_model and another)


def _has_digit(word: str) -> bool:
    return any(letter.isdecimal() for letter in word)
