"""How a queue uses each drive: the settings, their defaults, and the file that keeps what `deepnvme
tune` found best.

A queue reads that file once, when it is made. A damaged file gives one warning and fails no
operation. sysfs identifies the drives; none is opened for that.
"""

from __future__ import annotations

import os
import reprlib
import stat
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any

from deepnvme import _native
from deepnvme.machine.probing import (
    HOST_ROOTS,
    Mount,
    SystemRoots,
    drive_directory,
    find_mount,
    read_kernel_file,
    read_mounts,
)

__all__ = [
    "PROFILE_VARIABLE",
    "PROFILE_VERSION",
    "Profile",
    "ProfileError",
    "ProfileWarning",
    "Settings",
    "UserMemory",
    "drive_key",
    "effective_settings",
    "load_profile",
    "profile_path",
    "read_profile",
    "write_profile",
]

PROFILE_VARIABLE = "DEEPNVME_PROFILE"
PROFILE_VERSION = 1

_DEFAULT = _native.DriveOptions()
_AGAIN = "remove it and run `deepnvme tune` again"
# Attributes in sysfs that identify a drive, best first: of NVMe and SCSI, of virtual drives, of
# device mapper and MD.
_IDENTITIES = ("wwid", "device/wwid", "serial", "device/serial", "dm/uuid", "md/uuid")


class UserMemory(Enum):
    """How aligned memory that is not of a registered pool travels; unaligned memory is always
    copied.
    """

    ZERO_COPY = _native.UserMemory.ZERO_COPY  # the device reads and writes it: least CPU
    # copied through huge pages: faster where scattered pages are slow
    BOUNCE = _native.UserMemory.BOUNCE


_DEFAULT_USER_MEMORY = UserMemory(_DEFAULT.user_memory)


@dataclass(frozen=True)
class Settings:
    """How a queue uses one drive: the size of its requests, and the bytes of them in flight."""

    chunk_bytes: int = _DEFAULT.chunk_bytes
    inflight_bytes: int = _DEFAULT.inflight_bytes
    user_memory: UserMemory = _DEFAULT_USER_MEMORY

    def native(self) -> _native.DriveOptions:
        """Return the same for the core.

        Raises:
            ValueError: they make no sense, alone or together.
        """
        return _native.DriveOptions(
            chunk_bytes=self.chunk_bytes,
            inflight_bytes=self.inflight_bytes,
            user_memory=self.user_memory.value,
        )


class ProfileError(ValueError):
    """The profile file cannot be used; the message says why and what to do."""


class ProfileWarning(RuntimeWarning):
    """The profile file is ignored; the message says why and what to do."""


class Profile:
    """Settings of drives, by `drive_key`; empty where nothing was measured."""

    def __init__(self, drives: Mapping[str, Settings] = MappingProxyType({})) -> None:
        self.drives = MappingProxyType(dict(drives))
        self._by_device: dict[int, Settings | None] = {}

    def for_path(self, path: str | os.PathLike[str]) -> Settings | None:
        """Return what was measured of the drive that holds `path`, which need not exist yet."""
        # Most machines have no profile: then no call of the kernel is made for each open.
        if not self.drives:
            return None
        try:
            device = _device(path)
            if device not in self._by_device:
                # Once for each device: drive_key() reads all mounts.
                self._by_device[device] = self.drives.get(drive_key(path))
        except OSError:  # opening the file will raise the same, with its reason
            return None
        return self._by_device[device]


def effective_settings(
    measured: Settings | None,
    *,
    chunk_bytes: int | None = None,
    inflight_bytes: int | None = None,
    user_memory: UserMemory | None = None,
) -> Settings:
    """Return the settings to use: the arguments, else what was `measured`, else the defaults.

    Chunk and bytes in flight were measured as a pair: where only one is given, the other is the
    default.
    """
    known = measured or Settings()
    pair = known if chunk_bytes is None and inflight_bytes is None else Settings()
    return Settings(
        chunk_bytes=pair.chunk_bytes if chunk_bytes is None else chunk_bytes,
        inflight_bytes=pair.inflight_bytes if inflight_bytes is None else inflight_bytes,
        user_memory=known.user_memory if user_memory is None else user_memory,
    )


def profile_path() -> Path | None:
    """Return where the profile file is or would be; None where there is to be none.

    The environment variable DEEPNVME_PROFILE names it, or by being empty switches it off. Else it
    is deepnvme/profile.json under XDG_CONFIG_HOME, or under ~/.config.
    """
    named = os.environ.get(PROFILE_VARIABLE)
    if named is not None:
        return Path(named) if named else None
    folder = os.environ.get("XDG_CONFIG_HOME", "")
    if not Path(folder).is_absolute():
        try:
            folder = str(Path.home() / ".config")
        except RuntimeError:  # the user has no home, as in a container with an arbitrary user
            return None
    return Path(folder, "deepnvme", "profile.json")


def read_profile(path: Path) -> Profile:
    """Return what the file says was measured; an empty profile where there is no file.

    Raises:
        ProfileError: it is not a profile, or a newer one.
    """
    return Profile(
        {key: _settings_of(key, entry) for key, entry in _document(path).get("drives", {}).items()}
    )


def load_profile() -> Profile:
    """Return what was measured on this machine.

    Warns, and returns an empty profile, where the file cannot be used.
    """
    path = profile_path()
    if path is None:
        return Profile()
    try:
        if PROFILE_VARIABLE in os.environ and not path.exists():
            raise ProfileError(
                f"there is no such file, and {PROFILE_VARIABLE} names it. Run `deepnvme tune`, "
                "which makes it, or unset the variable"
            )
        return read_profile(path)
    except ProfileError as problem:
        # It points at the code that makes the queue.
        warnings.warn(f"{path} is ignored: {problem}", ProfileWarning, stacklevel=3)
        return Profile()


def write_profile(path: Path, key: str, settings: Settings, measured: Mapping[str, object]) -> None:
    """Put one drive's settings into the file, beside those of others: at once, or not at all.

    `measured` is for people who read the file: date, directory, rates.

    Raises:
        ProfileError: there is a file already, which is not a profile or a newer one.
        OSError: it cannot be written.
    """
    import json

    document = _document(path)
    drives = {name: entry for name, entry in document.get("drives", {}).items() if name != key}
    drives[key] = {
        "chunk_bytes": settings.chunk_bytes,
        "inflight_bytes": settings.inflight_bytes,
        "user_memory": settings.user_memory.name.lower(),
        "measured": dict(measured),
    }
    path = path.resolve()  # a link stays a link
    path.parent.mkdir(parents=True, exist_ok=True)
    # Of this process alone: two may tune two drives at a time.
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        with draft.open("w", encoding="utf-8") as file:
            json.dump({"version": PROFILE_VERSION, "drives": drives}, file, indent=2)
            file.write("\n")
            file.flush()
            # Else a power failure may find the new name and no bytes.
            os.fsync(file.fileno())
        # The directory is not synced: if the power fails, the older file is as good.
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def drive_key(path: str | os.PathLike[str], roots: SystemRoots = HOST_ROOTS) -> str:
    """Return a name for the drive that holds `path`, the same after a reboot and under another
    device name.

    It is the drive's serial number or worldwide name; without either, its file system and where
    that is mounted.

    Raises:
        OSError: neither `path` nor the directory it would be in exists.
    """
    real = Path(path).resolve()
    place = real if real.exists() else real.parent  # where a file is to be made
    mount = find_mount(read_mounts(roots), str(place))
    identity = _identity(mount, roots) if mount else None
    return (
        identity
        or f"file system {os.statvfs(place).f_fsid:016x} at {mount.mount_point if mount else place}"
    )


def _identity(mount: Mount, roots: SystemRoots) -> str | None:
    """Return what the drive under `mount` calls itself; None without a drive or a name."""
    drive = drive_directory(mount, roots)
    if drive is not None:
        for attribute in _IDENTITIES:
            name = " ".join(read_kernel_file(drive / attribute).split())
            if name:
                return f"{attribute} {name}"
    return None


def _device(path: str | os.PathLike[str]) -> int:
    """Return the number of the device that holds a file, or the directory it would be made in."""
    try:
        return os.stat(path).st_dev  # noqa: PTH116 - a Path costs more than the call, and this is for every open
    except FileNotFoundError:
        return Path(path).absolute().parent.stat().st_dev


def _document(path: Path) -> dict[str, Any]:
    """Return the profile in the file, empty where there is none."""
    import json

    document: Any
    try:
        # A device or pipe may have no end.
        is_regular = stat.S_ISREG(path.stat().st_mode)
        document = json.loads(path.read_text(encoding="utf-8")) if is_regular else None
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ProfileError(
            f"it cannot be read ({error.strerror}); let this user read it, or do without it by an "
            f"empty {PROFILE_VARIABLE}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ProfileError(f"it is not JSON ({error}); {_AGAIN}") from None
    if not is_regular:
        raise ProfileError(
            "it cannot be read, as it is no regular file; name one, or do without it by an empty "
            f"{PROFILE_VARIABLE}"
        )
    version = document.get("version") if isinstance(document, dict) else None
    if isinstance(version, int) and version > PROFILE_VERSION:
        raise ProfileError(
            f"it is of version {version}, and this deepnvme reads up to {PROFILE_VERSION}; update "
            f"deepnvme, or {_AGAIN}"
        )
    if version != PROFILE_VERSION or not isinstance(document.get("drives"), dict):
        raise ProfileError(
            f"it is not an object with version {PROFILE_VERSION} and drives; {_AGAIN}"
        )
    return dict(document)


def _settings_of(key: str, entry: Any) -> Settings:
    try:
        settings = Settings(
            entry["chunk_bytes"], entry["inflight_bytes"], UserMemory[entry["user_memory"].upper()]
        )
        settings.native()  # refuses now what it would when a file is opened
    except (AttributeError, KeyError, TypeError):
        problem = (
            "expected chunk_bytes, inflight_bytes, user_memory (zero_copy or bounce), got "
            f"{reprlib.repr(entry)}"
        )
    except ValueError as error:
        problem = str(error)
    else:
        return settings
    raise ProfileError(f"the settings of {key!r} are not usable: {problem}; {_AGAIN}")
