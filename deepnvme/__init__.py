"""Asynchronous direct I/O for tensors, arrays and bytes, and stores of them.

Needs no torch, knows nothing of training.

A name is imported when it is first used, so that `deepnvme.diagnosis` and what else needs no native
module works also where that cannot be loaded.
"""

import importlib as _importlib
import typing as _typing

if _typing.TYPE_CHECKING:
    from deepnvme.arrays import Returns
    from deepnvme.backends import BackendFallbackWarning
    from deepnvme.checkpoint import load, save
    from deepnvme.errors import (
        BackendUnavailableError,
        BatchError,
        ChecksumError,
        ClosedError,
        ForkedError,
        NVMeError,
        PoisonedError,
        PoolExhaustedError,
        QueueFull,
        ShortReadError,
        StoreError,
        VolumeError,
        VolumeFullError,
        VolumeLockedError,
    )
    from deepnvme.faults import FaultPlan, Requests
    from deepnvme.future import IOFuture
    from deepnvme.member import Access
    from deepnvme.page_stock import PageStock
    from deepnvme.pool import Cuda, Pool
    from deepnvme.probing import Probe, probe
    from deepnvme.profile import UserMemory
    from deepnvme.queue import Direct, File, IOQueue, Sync, WhenFull
    from deepnvme.safetensors import (
        SafetensorsError,
        read_safetensors,
        safetensors_header,
        write_safetensors,
    )
    from deepnvme.store import Checksum, Durability, TensorStore, UncommittedWarning
    from deepnvme.store_threads import StoreFuture
    from deepnvme.tensor_io import Damage
    from deepnvme.volume import Member, Volume

__all__ = [
    "Access",
    "BackendFallbackWarning",
    "BackendUnavailableError",
    "BatchError",
    "Checksum",
    "ChecksumError",
    "ClosedError",
    "Cuda",
    "Damage",
    "Direct",
    "Durability",
    "FaultPlan",
    "File",
    "ForkedError",
    "IOFuture",
    "IOQueue",
    "Member",
    "NVMeError",
    "PageStock",
    "PoisonedError",
    "Pool",
    "PoolExhaustedError",
    "Probe",
    "QueueFull",
    "Requests",
    "Returns",
    "SafetensorsError",
    "ShortReadError",
    "StoreError",
    "StoreFuture",
    "Sync",
    "TensorStore",
    "UncommittedWarning",
    "UserMemory",
    "Volume",
    "VolumeError",
    "VolumeFullError",
    "VolumeLockedError",
    "WhenFull",
    "load",
    "probe",
    "read_safetensors",
    "safetensors_header",
    "save",
    "write_safetensors",
]

_PARTS = (
    "backends",
    "errors",
    "faults",
    "future",
    "page_stock",
    "pool",
    "probing",
    "profile",
    "queue",
    "arrays",
    "member",
    "volume",
    "tensor_io",
    "store_threads",
    "store",
    "safetensors",
    "checkpoint",
)

# with a __getattr__, type checkers would take any name for one of ours
if not _typing.TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name in __all__:
            for part in _PARTS:
                module = _importlib.import_module(f"{__name__}.{part}")
                if name in module.__all__:
                    globals()[name] = getattr(module, name)
                    return globals()[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
