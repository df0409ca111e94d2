"""Asynchronous direct I/O for tensors, arrays and bytes, and stores of them.

Needs no torch, knows nothing of training.

A name is imported when it is first used. So what needs no native module, such as
`deepnvme.machine.diagnosis`, works also where that module cannot be loaded.
"""

import importlib as _importlib
import sys as _sys
import typing as _typing

from deepnvme.version import __version__ as __version__

if _typing.TYPE_CHECKING:
    from deepnvme.checkpoint import load, save
    from deepnvme.errors import (
        BackendUnavailableError,
        BatchError,
        ChecksumError,
        ClosedError,
        DeadlineError,
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
    from deepnvme.formats.file_object import FileObject, open
    from deepnvme.formats.mapped import map_safetensors
    from deepnvme.formats.safetensors import (
        SafetensorsError,
        read_safetensors,
        safetensors_header,
        write_safetensors,
    )
    from deepnvme.machine.backends import BackendFallbackWarning
    from deepnvme.machine.probing import Probe, probe
    from deepnvme.machine.profile import UserMemory
    from deepnvme.memory.arrays import Returns
    from deepnvme.memory.page_stock import PageStock
    from deepnvme.memory.pool import Cuda, Pool
    from deepnvme.queue.faults import FaultPlan, Requests
    from deepnvme.queue.future import IOFuture
    from deepnvme.queue.queue import Direct, File, IOQueue, Priority, Sync, WhenFull
    from deepnvme.store.lane import StoreFuture
    from deepnvme.store.store import Checksum, Durability, TensorStore, UncommittedWarning
    from deepnvme.store.stored_tensor import StoredTensor
    from deepnvme.store.tensor_io import Damage
    from deepnvme.volume.member import Access
    from deepnvme.volume.volume import Member, Volume

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
    "DeadlineError",
    "Direct",
    "Durability",
    "FaultPlan",
    "File",
    "FileObject",
    "ForkedError",
    "IOFuture",
    "IOQueue",
    "Member",
    "NVMeError",
    "PageStock",
    "PoisonedError",
    "Pool",
    "PoolExhaustedError",
    "Priority",
    "Probe",
    "QueueFull",
    "Requests",
    "Returns",
    "SafetensorsError",
    "ShortReadError",
    "StoreError",
    "StoreFuture",
    "StoredTensor",
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
    "map_safetensors",
    "open",
    "probe",
    "read_safetensors",
    "safetensors_header",
    "save",
    "write_safetensors",
]

_PARTS = (
    "machine.backends",
    "errors",
    "queue.faults",
    "queue.future",
    "memory.page_stock",
    "memory.pool",
    "machine.probing",
    "machine.profile",
    "queue.queue",
    "memory.arrays",
    "volume.member",
    "volume.volume",
    "store.tensor_io",
    "store.lane",
    "store.stored_tensor",
    "store.store",
    "formats.safetensors",
    "formats.mapped",
    "formats.file_object",
    "checkpoint",
)

# with a __getattr__, type checkers would take any name for one of ours
if not _typing.TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name in __all__:
            if _sys.platform != "linux":
                raise ImportError(
                    f"deepnvme.{name} needs Linux, for io_uring, Linux AIO and direct I/O. "
                    f"This is {_sys.platform}: use a Linux machine, container or virtual machine."
                )
            for part in _PARTS:
                module = _importlib.import_module(f"{__name__}.{part}")
                if name in module.__all__:
                    # The next look finds it here, and does not call this function.
                    globals()[name] = getattr(module, name)
                    return globals()[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
