"""The NVMe tier of one rank: where its bytes lie on the drives, and reads, writes and copies."""

from infinity_engine.storage.swapfile import Place, SwapFile, Traffic
from infinity_engine.storage.transfer import (
    CopyHop,
    Hop,
    Hops,
    IOHop,
    PlannedHop,
    Transfer,
    transfer_error,
)

__all__ = [
    "CopyHop",
    "Hop",
    "Hops",
    "IOHop",
    "Place",
    "PlannedHop",
    "SwapFile",
    "Traffic",
    "Transfer",
    "transfer_error",
]
