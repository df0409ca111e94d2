"""The numbers that describe a known machine, each of which needs a source."""

from __future__ import annotations

from dataclasses import fields

from infinity_engine.sim.hardware import MachineModel


def names_of_numbers(model: MachineModel) -> set[str]:
    """Return the dotted name of each number that is known."""
    named = {item.name: getattr(model, item.name) for item in fields(model)}
    for part in ("gpu", "link", "host", "drives"):
        value = named[part]
        named |= (
            {f"{part}.{item.name}": getattr(value, item.name) for item in fields(value)}
            if value
            else {}
        )
    return {name for name, value in named.items() if isinstance(value, int | float)}
