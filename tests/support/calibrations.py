"""A calibration with round numbers: four threads, one drive, a device, and something lost to every
disturbance. And what makes measuring one short.
"""

from __future__ import annotations

import pytest

from infinity_engine.plan import (
    BlockFigures,
    BlockShape,
    Calibration,
    DriveFigures,
    Figure,
    HostUpdateFigures,
    LinkFigures,
    Unit,
)

__all__ = ["SMALL_BLOCKS", "calibration", "drive", "figure", "measure_small_blocks"]

_WIDTHS, _TOKENS = {"cpu": (64,)}, {"cpu": (16,)}
SMALL_BLOCKS = f"""
from infinity_engine.calibration import blocks
blocks._WIDTHS, blocks._TOKENS = {_WIDTHS}, {_TOKENS}
"""
"""What a program begins with that measures blocks of one small shape."""


def measure_small_blocks(patch: pytest.MonkeyPatch) -> None:
    """Let calibrations measure blocks of one small shape.

    In bf16, the usual ones take seconds each on a CPU without AVX-512.
    """
    patch.setattr("infinity_engine.calibration.blocks._WIDTHS", _WIDTHS)
    patch.setattr("infinity_engine.calibration.blocks._TOKENS", _TOKENS)


def calibration() -> Calibration:
    """Return it."""
    return Calibration(
        machine={"cpu": "Imaginary 9000", "cores": "4"},
        date="2026-11-22T12:00:00+00:00",
        memory_bytes=1 << 27,
        links=LinkFigures(
            h2d=figure(10e9),
            d2h=figure(8e9),
            duplex_h2d=figure(9e9),
            duplex_d2h=figure(7e9),
            h2d_beside_updates=figure(2 / 3, Unit.PART),
            d2h_beside_updates=figure(1.05, Unit.PART),
            start=figure(1e-5, Unit.SECONDS),
        ),
        dram={1: figure(15e9), 2: figure(30e9), 4: figure(29e9)},
        host_updates={
            "adamw": {1: _updates(0.5e9, 0.9), 2: _updates(0.9e9, 0.8), 4: _updates(1.2e9, 2 / 3)},
            "sgd": {1: _updates(1e9, 0.8)},
        },
        device_updates={"adamw": figure(25e9, Unit.PARAMETERS)},
        host_start=figure(5e-5, Unit.SECONDS),
        device_start=figure(2e-5, Unit.SECONDS),
        lease=figure(3e-4, Unit.SECONDS),
        matmul={"fp32": figure(100e9, Unit.FLOPS), "bf16": figure(200e9, Unit.FLOPS)},
        blocks={
            "bf16": {
                BlockShape(1024, 256): BlockFigures(
                    forward=_flops(150e9), backward=_flops(120e9), again=_flops(200e9)
                )
            }
        },
        all_gather=Figure.missing("one rank", Unit.BYTES),
        reduce_scatter=Figure.missing("one rank", Unit.BYTES),
        drives={"/mnt/a": drive()},
    )


def drive(identity: str = "serial 1") -> DriveFigures:
    """Return the figures of a drive beside which a fifth of the updates' rate, half of its own, or
    three tenths beside modules, and two fifths of the modules' are lost.
    """
    return DriveFigures(
        drive={"drive": identity},
        read=figure(3e9),
        write=figure(2e9),
        mixed=figure(2.4e9),
        mixed_beside_updates=figure(0.5, Unit.PART),
        mixed_beside_blocks=figure(0.7, Unit.PART),
        start=figure(1e-4, Unit.SECONDS),
        host_updates={"adamw": {4: figure(0.8, Unit.PART)}},
        blocks=figure(0.6, Unit.PART),
    )


def figure(median: float, unit: Unit = Unit.BYTES) -> Figure:
    """Return a figure of three rounds."""
    return Figure.of([median * 0.9, median, median * 1.1], unit)


def _flops(median: float) -> Figure:
    return figure(median, Unit.FLOPS)


def _updates(alone: float, part: float) -> HostUpdateFigures:
    return HostUpdateFigures(
        alone=figure(alone, Unit.PARAMETERS),
        beside_copies=figure(part, Unit.PART),
        summing=figure(0.5, Unit.PART),
    )
