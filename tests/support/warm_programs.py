"""Runs programs in processes of their own that have imported torch and the engine already.

They are forked from a server that this process starts with its first program: importing takes
seconds, forking next to nothing. A program ends as Python does, with all that happens then. Tests
of what an import does, or of options of the interpreter, need a process that is new.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

__all__ = ["WITH_SUPPORT", "WarmProgram", "run_warm"]

# torch imports its compiler, and with it hundreds of modules, when the first optimizer is made.
PRELOADED = ["torch", "torch._dynamo", "infinity_engine.engine.assemble"]
TIMEOUT_S = 120.0
WITH_SUPPORT = {"PYTHONPATH": str(Path(__file__).resolve().parents[1])}
"""An environment in which programs can import what tests import."""
_LONGEST = 1 << 17  # bytes of a request


class WarmProgram:
    """A program that runs, as subprocess.Popen has it: standard input and output are pipes."""

    def __init__(
        self,
        text: str,
        *arguments: object,
        folder: Path | None = None,
        environment: Mapping[str, str] | None = None,
        warned: Sequence[str] = (),
        imported: tuple[str, ...] = (),
        errors: TextIO | None = None,
    ) -> None:
        """Start it in `folder`; `warned` are what options -W of the interpreter say, `imported`
        modules that are there beside PRELOADED.
        """
        self.args = arguments
        self.returncode: int | None = None
        standard_input, to_it = os.pipe()
        from_it, standard_output = os.pipe()
        self.stdin, self.stdout = os.fdopen(to_it, "w"), os.fdopen(from_it)
        request = {
            "text": text,
            "arguments": [str(argument) for argument in arguments],
            "folder": str(folder or Path.cwd()),
            "environment": {**_inherited(), **(environment or {})},
            "warned": list(warned),
        }
        self._server = _server(imported)
        ends = [standard_input, standard_output, 2 if errors is None else errors.fileno()]
        socket.send_fds(self._server, [json.dumps(request).encode()], ends)
        os.close(standard_input)
        os.close(standard_output)
        self.pid = int(self._server.recv(32))

    def send_signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        os.kill(self.pid, number)

    def communicate(self, timeout: float = TIMEOUT_S) -> tuple[str, None]:
        """Return what it printed until its end.

        Raises:
            subprocess.TimeoutExpired: it took longer, and was killed.
        """
        late: list[float] = []

        def kill() -> None:
            late.append(timeout)
            self.send_signal(signal.SIGKILL)

        timer = threading.Timer(timeout, kill)
        timer.start()
        self.stdin.close()
        with self.stdout:
            printed = self.stdout.read()
        self.returncode = int(self._server.recv(32))
        timer.cancel()
        if late:
            raise subprocess.TimeoutExpired(sys.executable, timeout)
        return printed, None


def run_warm(
    text: str,
    *arguments: object,
    folder: Path,
    environment: Mapping[str, str] | None = None,
    warned: Sequence[str] = (),
    imported: tuple[str, ...] = (),
    timeout_s: float = TIMEOUT_S,
) -> subprocess.CompletedProcess[str]:
    """Run `text` as a script with `arguments`; return how it ended, and what it printed."""
    with tempfile.TemporaryFile("w+") as errors:
        program = WarmProgram(
            text,
            *arguments,
            folder=folder,
            environment=environment,
            warned=warned,
            imported=imported,
            errors=errors,
        )
        printed, _ = program.communicate(timeout_s)
        errors.seek(0)
        told = errors.read()
    return subprocess.CompletedProcess([], program.returncode or 0, printed, told)


def _inherited() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DEEPNVME_")}
    return {**kept, "DEEPNVME_PROFILE": ""}


@cache
def _server(imported: tuple[str, ...]) -> socket.socket:
    """Return this process's end of the socket to a server, which ends with it."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for side in (here, there):
        side.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LONGEST)
    with there:
        process = subprocess.Popen(
            [sys.executable, __file__, str(there.fileno()), *imported],
            env={**_inherited(), "HF_HUB_OFFLINE": "1"},  # which is read by an import
            pass_fds=[there.fileno()],
        )

    def end() -> None:
        here.close()
        process.wait()

    atexit.register(end)
    return here


# --- the server -----------------------------------------------------------------------------------


def serve(requests: socket.socket, imported: Sequence[str]) -> dict[str, Any]:
    """Fork for each request; return it in the process that is to run it."""
    for module in (*PRELOADED, *imported):
        import_module(module)
    gc.collect()
    gc.freeze()
    while True:
        request, ends, *_ = socket.recv_fds(requests, _LONGEST, 3)
        if not request:
            os._exit(0)
        child = os.fork()
        if not child:
            for number, end in enumerate(ends):
                os.dup2(end, number)
        for end in ends:
            os.close(end)
        if not child:
            requests.close()
            asked: dict[str, Any] = json.loads(request)
            return asked
        requests.send(str(child).encode())
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        requests.send(str(status).encode())


def become(request: Mapping[str, Any]) -> None:
    """Run the program that is asked for, as if this process had begun with it."""
    # Made anew: those of the server know of its own files whether they can be sought in.
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    paths = list(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
    sys.path[:] = [request["folder"], *paths, *(path for path in sys.path if path not in paths)]
    sys.argv[:] = ["program.py", *request["arguments"]]
    vars(warnings)["_processoptions"](request["warned"])  # what Python itself does with them
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    exec(compile(request["text"], "program.py", "exec"), main.__dict__)


if __name__ == "__main__":
    del sys.path[0]  # the folder of this file: its modules belong to a package
    become(serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:]))
