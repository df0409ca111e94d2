"""Which backend a queue runs on: the first of the chain that this machine allows, never silently a worse one."""

from __future__ import annotations

import errno
import os
import platform
import warnings
from collections.abc import Collection

from deepnvme import _native
from deepnvme.errors import BackendUnavailableError
from deepnvme.probing import Backend, find_liburing, read_process_limits, uring_refusal

__all__ = ["BACKEND_VARIABLE", "CHAIN", "BackendFallbackWarning", "choose_backend"]

CHAIN = tuple(backend.value for backend in Backend)
BACKEND_VARIABLE = "DEEPNVME_BACKEND"
_OTHERS = ("memory",)


class BackendFallbackWarning(RuntimeWarning):
    """A backend further down the chain is used; the message says why."""


def choose_backend(wanted: str, require: str | Collection[str] | None) -> str:
    """Return the backend to use.

    `wanted` is a backend's name, or "auto" for the first of the chain that works here (or what the environment variable
    DEEPNVME_BACKEND names). `require` names the backends that are acceptable; "io_uring" stands for both rings.

    Raises:
        BackendUnavailableError: none that is wanted and acceptable works here; the message says why, one by one.
        ValueError: an unknown name.
    """
    told = os.environ.get(BACKEND_VARIABLE, "") if wanted == "auto" else ""
    named = told or wanted
    candidates = _applicable() if named == "auto" else (named,)
    acceptable = _acceptable(require)
    for name in (*candidates, *acceptable):
        if name not in (*CHAIN, *_OTHERS):
            source = f", from the environment variable {BACKEND_VARIABLE}" if name == told else ""
            raise ValueError(f"unknown backend {name!r}{source}; there are: auto, {', '.join((*CHAIN, *_OTHERS))}")
    refusals = []
    for name in candidates:
        if acceptable and name not in acceptable:
            refusals.append(f"{name}: not among the required {', '.join(acceptable)}")
            continue
        refusal = _refusal(name)
        if refusal is None:
            if refusals and not acceptable:
                warnings.warn(f"deepnvme uses {name}: {'; '.join(refusals)}", BackendFallbackWarning, stacklevel=3)
            return name
        refusals.append(f"{name}: {refusal}")
    raise BackendUnavailableError(errno.ENOTSUP, "no acceptable backend works here: " + "; ".join(refusals))


def _applicable() -> tuple[str, ...]:
    """Return the chain without what has no build for this machine: to go on without it is not a fallback.

    Our own ring does what python-liburing's does, at the same speed.
    """
    return CHAIN if platform.machine() == "x86_64" and find_liburing().fits_cpu else CHAIN[1:]


def _acceptable(require: str | Collection[str] | None) -> tuple[str, ...]:
    if require is None:
        return ()
    names = (require,) if isinstance(require, str) else tuple(require)
    return tuple(part for name in names for part in (("liburing", "uring") if name == "io_uring" else (name,)))


def _refusal(name: str) -> str | None:
    """Return why this process cannot use the backend, None where it can: one is made and thrown away."""
    if name == Backend.LIBURING.value:
        found = find_liburing()
        if not found.usable:
            return f"python-liburing: {found.reason}"
        # Importing it loads its library, which cannot be loaded otherwise; the native side then binds its functions.
        import liburing.liburing

        _native.set_liburing_path(str(liburing.liburing.__file__))
    try:
        _native.try_backend(name)
    except BackendUnavailableError as error:
        if error.errno in (errno.EPERM, errno.ENOSYS) and name in (Backend.LIBURING.value, Backend.URING.value):
            return uring_refusal(error.errno, read_process_limits()).cause
        return str(error.strerror)
    return None
