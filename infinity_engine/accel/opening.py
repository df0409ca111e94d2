"""Opens an accelerator by its name.

Decides from the name and from what torch sees; keeps none. Called by engine/, tests and benches.
"""

from __future__ import annotations

import torch

from infinity_engine.accel.base import Accelerator
from infinity_engine.accel.cpu import CpuAccelerator
from infinity_engine.accel.emulated import Emulation
from infinity_engine.accel.virtual import VirtualAccelerator
from infinity_engine.errors import ConfigError

__all__ = ["emulated_accelerator", "open_accelerator"]

_NAMES = ("auto", "cuda", "cpu", "emulated")


def open_accelerator(name: str, *, emulation: Emulation | None = None) -> Accelerator:
    """Return the accelerator `name`, which the caller closes; "auto" is cuda on a GPU, else cpu.

    Raises:
        ConfigError: there is none of that name, there is no GPU, or "emulated" comes without an
            `emulation`.
    """
    if name not in _NAMES:
        raise ConfigError.unknown_name(field="accelerator", name=name, known=_NAMES)
    if (name == "emulated") != (emulation is not None):
        expected = "an Emulation with the accelerator emulated, and none with the others"
        raise ConfigError(field="emulation", value=emulation, expected=expected)
    if emulation is not None:
        return emulated_accelerator(emulation)
    if name == "cuda" or (name == "auto" and torch.cuda.is_available()):
        from infinity_engine.accel.cuda import CudaAccelerator

        return CudaAccelerator()
    return CpuAccelerator()


def emulated_accelerator(emulation: Emulation) -> VirtualAccelerator:
    """Return an emulated device."""
    return VirtualAccelerator(emulation)
