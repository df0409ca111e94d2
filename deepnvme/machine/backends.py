"""Which backend a queue runs on: the first of the chain that this machine allows, never silently a
worse one.
"""

from __future__ import annotations

import errno
import os
import platform
import warnings
from collections.abc import Collection
from functools import cache
from typing import Protocol, TypeVar

from deepnvme import _native
from deepnvme.errors import BackendUnavailableError
from deepnvme.machine.probing import (
    Backend,
    LiburingProbe,
    find_liburing,
    find_mount,
    read_mounts,
    read_process_limits,
    uring_refusal,
)

__all__ = [
    "BACKEND_VARIABLE",
    "CHAIN",
    "BackendFallbackWarning",
    "Starter",
    "choose_backend",
    "fallbacks",
    "refuse_where_threads_must",
    "start_on",
]

CHAIN = tuple(backend.value for backend in Backend)
BACKEND_VARIABLE = "DEEPNVME_BACKEND"
_FOR_TESTS = ("memory",)
_RINGS = (Backend.LIBURING.value, Backend.URING.value)


_T = TypeVar("_T")
_Started_co = TypeVar("_Started_co", covariant=True)


class Starter(Protocol[_Started_co]):
    """What needs a backend; raises BackendUnavailableError where it is refused."""

    def __call__(self, *, backend: str) -> _Started_co:
        """Start on that backend."""
        ...


class BackendFallbackWarning(RuntimeWarning):
    """A backend further down the chain is used; the message says why."""


def choose_backend(wanted: str, require: str | Collection[str] | None = None) -> str:
    """Return the backend that a queue with these arguments would run on, tried at its smallest.

    Raises what `start_on` does.
    """
    return start_on(wanted, require, lambda *, backend: _native.try_backend(backend))[0]


def start_on(
    wanted: str, require: str | Collection[str] | None, start: Starter[_T]
) -> tuple[str, _T]:
    """Start something on the first backend that works; return that backend's name and the thing.

    `wanted` is a backend's name, or "auto" for the first of the chain that works here (or what the
    environment variable DEEPNVME_BACKEND names). `require` names the backends that are acceptable;
    "io_uring" stands for both rings.

    Raises:
        BackendUnavailableError: none that is wanted and acceptable works here; the message says
            why, one by one.
        ValueError: an unknown name.
    """
    from_environment = os.environ.get(BACKEND_VARIABLE, "") if wanted == "auto" else ""
    named = from_environment or wanted
    candidates = _applicable() if named == "auto" else (named,)
    acceptable = _acceptable(require)
    for name in (*candidates, *acceptable):
        if name not in (*CHAIN, *_FOR_TESTS):
            source = (
                f", from the environment variable {BACKEND_VARIABLE}"
                if name == from_environment
                else ""
            )
            raise ValueError(
                f"unknown backend {name!r}{source}; there are: auto, "
                f"{', '.join((*CHAIN, *_FOR_TESTS))}"
            )
    refusals = []
    for name in candidates:
        # Asked before it is started: a refused one leaves no ring behind.
        if acceptable and name not in acceptable:
            refusals.append(f"{name}: not among the required {', '.join(acceptable)}")
            continue
        try:
            _prepare(name)
            started = start(backend=name)
        except BackendUnavailableError as refusal:
            refusals.append(f"{name}: {_reason(name, refusal)}")
            continue
        # A caller that named what is acceptable knows of the others.
        if refusals and not acceptable:
            warnings.warn(
                f"deepnvme uses {name}: {'; '.join(refusals)}", BackendFallbackWarning, stacklevel=3
            )
        return name, started
    raise BackendUnavailableError(
        errno.ENOTSUP,
        f"no acceptable backend works here: {'; '.join(refusals)}. `deepnvme doctor` says what to "
        "do",
    )


def fallbacks(wanted: str, require: str | Collection[str] | None) -> tuple[str, ...]:
    """Return what a queue with these arguments may use for a drive that gets no ring of its own."""
    named = os.environ.get(BACKEND_VARIABLE, "") if wanted == "auto" else wanted
    # No other ring: it would count against the same limit on locked memory.
    return () if named not in ("", "auto") or require is not None else CHAIN[2:]


def refuse_where_threads_must(
    backend: str, require: str | Collection[str] | None, path: str
) -> None:
    """Refuse a file on a FUSE file system, where threads do a ring's work, to a queue that requires
    the ring.

    Raises:
        BackendUnavailableError: the file is on one, and the queue does not accept threads.
    """
    acceptable = _acceptable(require)
    if backend not in _RINGS or not acceptable or Backend.THREADS.value in acceptable:
        return
    # A link may lead to another file system than the one it is on.
    place = os.path.realpath(path)
    if not _native.on_fuse(place):
        return
    mount = find_mount(read_mounts(), place)
    others = (*((require,) if isinstance(require, str) else require or ()), Backend.THREADS.value)
    raise BackendUnavailableError(
        errno.ENOTSUP,
        f"the file is on a FUSE file system ({mount.file_system if mount else 'of unknown kind'}), "
        "where io_uring may "
        "report short transfers as whole ones, so that only threads are used there; this queue "
        "requires "
        f"{', '.join(acceptable)}. Use a file on another file system (ext4, xfs), or accept "
        f"threads too: require={others!r}",
        path=path,
    )


@cache
def _installed_liburing() -> LiburingProbe:
    """Look for python-liburing once: each look reads the metadata of what is installed."""
    return find_liburing()


def _applicable() -> tuple[str, ...]:
    """Return the chain, without python-liburing where none of its builds is for this machine.

    Then leaving it out is no fallback to warn of: our own ring does the same at the same speed.
    """
    return CHAIN if platform.machine() == "x86_64" and _installed_liburing().fits_cpu else CHAIN[1:]


def _acceptable(require: str | Collection[str] | None) -> tuple[str, ...]:
    if require is None:
        return ()
    names = (require,) if isinstance(require, str) else tuple(require)
    return tuple(part for name in names for part in (_RINGS if name == "io_uring" else (name,)))


def _prepare(name: str) -> None:
    """Give the native side python-liburing's library, where that is the backend."""
    if name != Backend.LIBURING.value:
        return
    found = _installed_liburing()
    if not found.usable:
        raise BackendUnavailableError(errno.ENOENT, f"python-liburing: {found.reason}")
    # Importing it loads its library, which cannot be loaded otherwise; the native side then binds
    # its functions.
    import liburing.liburing

    _native.set_liburing_path(str(liburing.liburing.__file__))


def _reason(name: str, refusal: BackendUnavailableError) -> str:
    reason = str(refusal.strerror).removeprefix(f"{name}: ")
    if name not in _RINGS:
        return reason
    if refusal.errno in (errno.EPERM, errno.ENOSYS):
        return uring_refusal(refusal.errno, read_process_limits()).cause
    if refusal.errno == errno.ENOMEM:
        return f"{reason}: a ring counts against the limit on locked memory (ulimit -l)"
    return reason
