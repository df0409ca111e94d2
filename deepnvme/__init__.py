"""Asynchronous direct I/O for tensors, arrays and bytes. Needs no torch and knows nothing of training."""

from deepnvme.backends import BackendFallbackWarning
from deepnvme.errors import (
    BackendUnavailableError,
    BatchError,
    ClosedError,
    ForkedError,
    NVMeError,
    PoolExhaustedError,
    QueueFull,
    ShortReadError,
)
from deepnvme.faults import FaultPlan, Requests
from deepnvme.future import IOFuture
from deepnvme.pool import Cuda, Pool
from deepnvme.probing import probe_directory, probe_system
from deepnvme.profile import UserMemory
from deepnvme.queue import Direct, File, IOQueue, Sync, WhenFull

__all__ = [
    "BackendFallbackWarning",
    "BackendUnavailableError",
    "BatchError",
    "ClosedError",
    "Cuda",
    "Direct",
    "FaultPlan",
    "File",
    "ForkedError",
    "IOFuture",
    "IOQueue",
    "NVMeError",
    "Pool",
    "PoolExhaustedError",
    "QueueFull",
    "Requests",
    "ShortReadError",
    "Sync",
    "UserMemory",
    "WhenFull",
    "probe_directory",
    "probe_system",
]
