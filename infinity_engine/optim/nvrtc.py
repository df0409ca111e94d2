"""Compiles the GPU's update kernels from the source text that the native module was compiled from.

Knows the flags that exactness needs and refuses code compiled without them. Launches nothing; works
without a GPU.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from infinity_engine import _native
from infinity_engine.errors import MissingDependencyError

__all__ = ["FLAGS", "KERNELS", "Compiled", "Nvrtc", "compile_kernels", "cupy_nvrtc"]

# Passed to NVRTC directly: cupy's own compilation appends -ftz=true, which flushes subnormals.
FLAGS = ("--std=c++17", "--ftz=false", "--prec-div=true", "--prec-sqrt=true", "--fmad=false")
KERNELS = ("update", "block_sums", "accumulate")
# Instructions of PTX that flush subnormals or approximate.
_INEXACT = re.compile(r"\S*\.(?:ftz|approx)\b\S*")


class Nvrtc(Protocol):
    """The functions of cupy.cuda.nvrtc that are used; tests bind them to NVRTC without cupy."""

    def createProgram(  # noqa: D102, N802
        self, src: str, name: str, headers: Sequence[bytes], include_names: Sequence[bytes]
    ) -> Any: ...
    def compileProgram(self, program: Any, options: Sequence[str]) -> None: ...  # noqa: D102, N802
    def getProgramLog(self, program: Any) -> str: ...  # noqa: D102, N802
    def getPTX(self, program: Any) -> str | bytes: ...  # noqa: D102, N802
    def getCUBIN(self, program: Any) -> bytes: ...  # noqa: D102, N802
    def destroyProgram(self, program: Any) -> None: ...  # noqa: D102, N802


@dataclass(frozen=True, slots=True)
class Compiled:
    """Machine code for one architecture, and the PTX between the text and it."""

    ptx: str
    cubin: bytes


def compile_kernels(nvrtc: Nvrtc, architecture: str) -> Compiled:
    """Compile for an `architecture` such as "sm_90".

    Raises:
        RuntimeError: NVRTC refuses the source, or compiles it to code that could give other bits
            than the CPU.
    """
    sources = _native.sources()
    kernels = sources.pop("kernels.cu")
    # cupy takes these as bytes only
    headers = {name.encode(): text.encode() for name, text in sources.items()}
    program = nvrtc.createProgram(kernels, "kernels.cu", list(headers.values()), list(headers))
    try:
        try:
            nvrtc.compileProgram(program, (*FLAGS, f"--gpu-architecture={architecture}"))
        except Exception as refusal:
            log = nvrtc.getProgramLog(program)
            raise RuntimeError(
                f"the update kernels do not compile for {architecture}: {log}"
            ) from refusal
        ptx = nvrtc.getPTX(program)
        text = ptx.decode() if isinstance(ptx, bytes) else ptx
        # The flags alone are no proof: an intrinsic in a header would bypass them.
        inexact = sorted(set(_INEXACT.findall(text)))
        if inexact:
            raise RuntimeError(
                f"the update kernels compiled for {architecture} contain {', '.join(inexact)}, "
                f"which round otherwise than the CPU, though {' '.join(FLAGS)} were set: look for "
                "an intrinsic in the kernels' headers, or an NVRTC that ignores a flag"
            )
        return Compiled(text, nvrtc.getCUBIN(program))
    finally:
        nvrtc.destroyProgram(program)


def cupy_nvrtc() -> Nvrtc:
    """Return cupy's NVRTC.

    Raises:
        MissingDependencyError: cupy is not installed.
    """
    try:
        from cupy.cuda import nvrtc
    except ImportError as missing:
        needed_by = "the optimizer's updates on a GPU"
        raise MissingDependencyError(needed_by=needed_by, package="cupy", extra="cuda") from missing
    found: Nvrtc = nvrtc
    return found
