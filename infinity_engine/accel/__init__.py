"""The devices that copy and update bytes, behind one small interface.

`open_accelerator` makes the accelerator that a name asks for. `cuda` is a GPU, `cpu` is the host as
its own device, `emulated` is a test instrument that lives in host memory. Nothing here decides what
moves when.
"""

from infinity_engine.accel.base import (
    Accelerator,
    Buffer,
    Cost,
    DeviceBytes,
    Event,
    Stream,
    StreamKind,
    TimeCost,
    UpdateCost,
)
from infinity_engine.accel.cpu import CpuAccelerator
from infinity_engine.accel.emulated import EmulatedAccelerator, Emulation, OperationRecord
from infinity_engine.accel.opening import emulated_accelerator, open_accelerator
from infinity_engine.accel.virtual import VirtualAccelerator

__all__ = [
    "Accelerator",
    "Buffer",
    "Cost",
    "CpuAccelerator",
    "DeviceBytes",
    "EmulatedAccelerator",
    "Emulation",
    "Event",
    "OperationRecord",
    "Stream",
    "StreamKind",
    "TimeCost",
    "UpdateCost",
    "VirtualAccelerator",
    "emulated_accelerator",
    "open_accelerator",
]
