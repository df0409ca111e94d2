"""The bytes of DEVICE and HOST and their holders: limits, promises, buffers. Decides nothing."""

from infinity_engine.memory.borrowed import BorrowedMemory
from infinity_engine.memory.device import DeviceMemory, Views
from infinity_engine.memory.layout import Layout, Request, layout
from infinity_engine.memory.lease import Lease, Waitable
from infinity_engine.memory.ledger import Ledger, Reservation, Usage
from infinity_engine.memory.pinned import Freed, PinnedPool, PoolStats
from infinity_engine.memory.resident import FreedMemory, ResidentMemory, return_freed_memory

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
    "Request",
    "Reservation",
    "ResidentMemory",
    "Usage",
    "Views",
    "Waitable",
    "layout",
    "return_freed_memory",
]
