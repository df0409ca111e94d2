"""All that an engine trains, as tensors by name, so that trainings can be compared bit for bit."""

from __future__ import annotations

from typing import Any

import torch

from infinity_engine.engine.engine import Engine

__all__ = ["Bits", "bits_of", "differing"]

Bits = dict[str, torch.Tensor]


def bits_of(engine: Engine) -> Bits:
    """Return copies of all parameters, masters, moments and step counts."""
    found: dict[str, Any] = engine.state_dict()
    for name, parameter in engine.model.named_parameters():
        if parameter.requires_grad:
            states = engine.state_of(parameter).items()
            found.update(
                {f"{name}: {key}": torch.as_tensor(it) for key, it in states if key != "gradient"}
            )
    return found


def differing(first: Bits, second: Bits) -> list[str]:
    """Return the names of what is not the same in both, which have to have the same names."""
    assert first.keys() == second.keys()
    return [name for name in first if not torch.equal(first[name], second[name])]
