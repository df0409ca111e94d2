"""The bytes of DEVICE and HOST and their holders: limits, promises, buffers. Decides nothing.

What holds bytes is imported when it is first used: plans need its sizes alone.
"""

from __future__ import annotations

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING

from infinity_engine.memory.layout import Layout

if TYPE_CHECKING:
    from infinity_engine.memory.borrowed import BorrowedMemory
    from infinity_engine.memory.device import DeviceMemory, Views
    from infinity_engine.memory.freed import FreedMemory, return_freed_memory
    from infinity_engine.memory.lease import Lease, Waitable
    from infinity_engine.memory.ledger import Ledger, Reservation, Usage
    from infinity_engine.memory.pinned import Freed, PinnedPool, PoolStats

__all__ = [
    "BorrowedMemory",
    "DeviceMemory",
    "Freed",
    "FreedMemory",
    "Layout",
    "Lease",
    "Ledger",
    "PinnedPool",
    "PoolStats",
    "Reservation",
    "Usage",
    "Views",
    "Waitable",
    "return_freed_memory",
]

_MODULES = MappingProxyType(
    {
        "BorrowedMemory": "borrowed",
        "DeviceMemory": "device",
        "Freed": "pinned",
        "FreedMemory": "freed",
        "Lease": "lease",
        "Ledger": "ledger",
        "PinnedPool": "pinned",
        "PoolStats": "pinned",
        "Reservation": "ledger",
        "Usage": "ledger",
        "Views": "device",
        "Waitable": "lease",
        "return_freed_memory": "freed",
    }
)

# With a __getattr__, type checkers would take any name for one of ours.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
        return globals()[name]
