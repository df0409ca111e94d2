"""What everything else stands on: the operating system, the architecture, and whether our native
modules load there.

Facts only; `diagnose_system` says whether they will do. Imports nothing that needs a native module.
"""

from __future__ import annotations

import importlib
import platform
import sys
from dataclasses import dataclass

__all__ = ["System", "probe_system"]


@dataclass(frozen=True, kw_only=True, slots=True)
class System:
    """The operating system, the architecture and the Python on them; `native_problem` says why ours
    do not load.
    """

    name: str
    release: str
    architecture: str
    pointer_bits: int
    byte_order: str
    python: str
    native_problem: str | None


def probe_system() -> System:
    """Ask the interpreter what it runs on, and load the native modules."""
    return System(
        name=platform.system(),
        release=platform.release(),
        architecture=platform.machine(),
        pointer_bits=sys.maxsize.bit_length() + 1,
        byte_order=sys.byteorder,
        python=platform.python_version(),
        native_problem=_native_problem(),
    )


def _native_problem() -> str | None:
    try:
        for name in ("deepnvme._native", "infinity_engine._native"):
            importlib.import_module(name)
    except (ImportError, AttributeError) as error:
        # AttributeError: one left over from another version
        return str(error)
    return None
