"""Stand-ins for what a browser lacks and a plan never calls: NumPy, the native module, others.

Modules of the engine that a plan imports name them, for their own kernels. Whatever is taken of a
stand-in is one too; it can be called or subscripted while modules are imported, and has no
arithmetic: a plan that used one would fail.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

__all__ = ["install"]


class Absent(ModuleType):
    """A module, class or value that is not there."""

    def __getattr__(self, name: str) -> Absent:
        """Return another stand-in; what Python itself asks modules for is not there."""
        if name.startswith("__") and name != "__version__":
            raise AttributeError(name)
        return Absent(f"{self.__name__}.{name}")

    def __call__(self, *args: object, **options: object) -> Absent:
        """Return another stand-in."""
        return Absent(f"{self.__name__}()")

    def __getitem__(self, item: object) -> Absent:
        """Return itself, as a type with parameters does."""
        return self

    def __or__(self, other: object) -> Absent:
        """Return itself, as one of several types."""
        return self

    __ror__ = __or__

    def __mro_entries__(self, bases: object) -> tuple[type, ...]:
        """Return no base, so that a class can be made of one that is not there."""
        return ()


def install() -> None:
    """Let the modules be found that are not there."""
    for name in ("fcntl", "numpy", "numpy.typing", "psutil", "resource"):
        sys.modules[name] = Absent(name)
    native = Absent("infinity_engine._native")
    constants = Path(__file__).with_name("native_constants.json").read_text(encoding="utf-8")
    vars(native).update(json.loads(constants))
    sys.modules[native.__name__] = native
    import deepnvme

    # What it imports when first used needs Linux.
    vars(deepnvme)["__getattr__"] = lambda name: Absent(f"deepnvme.{name}")
