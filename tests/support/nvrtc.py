"""NVRTC without cupy: the functions that infinity_engine.optim.nvrtc uses, bound by ctypes to the
wheel's library.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

__all__ = ["WHEEL", "WheelNvrtc"]

WHEEL = "nvidia-cuda-nvrtc-cu12"


class WheelNvrtc:
    """Named and behaving as cupy.cuda.nvrtc."""

    def __init__(self) -> None:
        files = metadata.files(WHEEL) or []
        [library] = [Path(str(each.locate())) for each in files if each.name == "libnvrtc.so.12"]
        self._library = ctypes.CDLL(str(library))

    def createProgram(  # noqa: N802
        self, src: str, name: str, headers: Sequence[bytes], include_names: Sequence[bytes]
    ) -> ctypes.c_void_p:
        program = ctypes.c_void_p()
        texts = (ctypes.c_char_p * len(headers))(*headers)
        names = (ctypes.c_char_p * len(headers))(*include_names)
        self._call(
            "nvrtcCreateProgram",
            ctypes.byref(program),
            src.encode(),
            name.encode(),
            len(headers),
            texts,
            names,
        )
        return program

    def compileProgram(self, program: ctypes.c_void_p, options: Sequence[str]) -> None:  # noqa: N802
        listed = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        self._call("nvrtcCompileProgram", program, len(options), listed)

    def getProgramLog(self, program: ctypes.c_void_p) -> str:  # noqa: N802
        return self._get("ProgramLog", program).rstrip(b"\0").decode()

    def getPTX(self, program: ctypes.c_void_p) -> str:  # noqa: N802
        return self._get("PTX", program).rstrip(b"\0").decode()

    def getCUBIN(self, program: ctypes.c_void_p) -> bytes:  # noqa: N802
        return self._get("CUBIN", program)

    def destroyProgram(self, program: ctypes.c_void_p) -> None:  # noqa: N802
        self._call("nvrtcDestroyProgram", ctypes.byref(program))

    def _get(self, what: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._call(f"nvrtcGet{what}", program, buffer)
        return buffer.raw

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, name)(*arguments)
        if status != 0:
            raise RuntimeError(f"{name} returned {status}")
