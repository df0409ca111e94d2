"""Starts a command under a seccomp filter that refuses one system call: `seccomp.py EPERM 425 --
command ...`.

What Docker's default profile does to io_uring, without Docker and without root: a filter of the
process's own, which the command inherits. Run as a script; `refusing` gives the start of the
command line.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys
from pathlib import Path

IO_URING_SETUP = 425

_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_PR_SET_NO_NEW_PRIVS = 38
_PR_SET_SECCOMP = 22
_SECCOMP_MODE_FILTER = 2
_RETURN_ALLOW = 0x7FFF0000
_RETURN_ERRNO = 0x00050000
_LOAD_WORD = 0x20  # BPF_LD | BPF_W | BPF_ABS
_JUMP_IF_EQUAL = 0x15  # BPF_JMP | BPF_JEQ | BPF_K
_RETURN = 0x06  # BPF_RET | BPF_K
_OFFSET_OF_NUMBER = 0
_OFFSET_OF_ARCHITECTURE = 4


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p)]


def is_supported() -> bool:
    """Tell whether the filter knows this architecture."""
    return platform.machine() in _AUDIT_ARCH


def refusing(error: str, syscall: int = IO_URING_SETUP) -> list[str]:
    """Return the launcher that refuses `syscall` with `error`, such as "EPERM", to the command that
    follows it.
    """
    return [sys.executable, str(Path(__file__).resolve()), error, str(syscall), "--"]


def install_filter(error: int, syscall: int) -> None:
    """Make `syscall` fail with `error` in this process and in all that it starts."""
    instructions = b"".join(
        struct.pack("HBBI", *instruction)
        for instruction in (
            (_LOAD_WORD, 0, 0, _OFFSET_OF_ARCHITECTURE),
            (_JUMP_IF_EQUAL, 0, 3, _AUDIT_ARCH[platform.machine()]),
            (_LOAD_WORD, 0, 0, _OFFSET_OF_NUMBER),
            (_JUMP_IF_EQUAL, 0, 1, syscall),
            (_RETURN, 0, 0, _RETURN_ERRNO | error),
            (_RETURN, 0, 0, _RETURN_ALLOW),
        )
    )
    memory = ctypes.create_string_buffer(instructions)
    program = _Program(len(instructions) // 8, ctypes.addressof(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = (
        (_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        (_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(program), 0, 0),
    )
    for option, *rest in arguments:
        if libc.prctl(option, *map(ctypes.c_ulong, rest)) != 0:
            raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def main() -> None:
    """Install the filter and become the command."""
    error, syscall, _, *command = sys.argv[1:]
    install_filter(getattr(errno, error), int(syscall))
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
