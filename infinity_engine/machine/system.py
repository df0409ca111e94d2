"""The base of everything else: the system, the architecture, and whether native modules load there.

Facts only; `diagnose_system` decides whether they suffice. Imports nothing that needs a native
module.
"""

from __future__ import annotations

import importlib
import platform
import sys
from dataclasses import dataclass

__all__ = ["System", "probe_system"]


@dataclass(frozen=True, kw_only=True, slots=True)
class System:
    """The system, architecture and Python; `native_problem`: why native modules do not load."""

    name: str
    release: str
    architecture: str
    pointer_bits: int
    byte_order: str
    python: str
    native_problem: str | None


def probe_system() -> System:
    """Ask the interpreter for its system, and load the native modules."""
    return System(
        name=platform.system(),
        release=platform.release(),
        architecture=platform.machine(),
        # maxsize is the largest signed number of a pointer's size.
        pointer_bits=sys.maxsize.bit_length() + 1,
        byte_order=sys.byteorder,
        python=platform.python_version(),
        native_problem=_native_problem(),
    )


def _native_problem() -> str | None:
    try:
        for name in ("deepnvme._native", "infinity_engine._native"):
            importlib.import_module(name)
    except (ImportError, AttributeError) as error:  # AttributeError: a module of another version
        return str(error)
    return None
