"""Asynchronous direct I/O for tensors, arrays and bytes. Needs no torch and knows nothing of training.

A name is imported when it is first used, so that `deepnvme.diagnosis` and what else needs no native module works also
where that cannot be loaded.
"""

import importlib as _importlib
import typing as _typing

if _typing.TYPE_CHECKING:
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

_PARTS = ("backends", "errors", "faults", "future", "pool", "probing", "profile", "queue")

if not _typing.TYPE_CHECKING:  # with a __getattr__, type checkers would take any name for one of ours

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
