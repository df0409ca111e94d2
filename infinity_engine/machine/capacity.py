"""A machine's Capacity, which a Budget's percentages and defaults refer to, less room for others.

Asks the system and reserves nothing. The caller that has the accelerator's context passes its free
memory: no torch here. Called when an engine starts, before anything is planned.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping

from deepnvme.machine.probing import (
    HOST_ROOTS,
    SystemRoots,
    find_mount,
    read_mounts,
)
from infinity_engine.errors import ConfigError
from infinity_engine.machine.memory import free_host_bytes
from infinity_engine.plan import Capacity
from infinity_engine.units import GiB, MiB

__all__ = ["capacity_of", "directories_beside", "free_for_copies", "probe_capacity"]


def probe_capacity(
    directories: Iterable[str], *, device_free_bytes: int = 0, roots: SystemRoots = HOST_ROOTS
) -> Capacity:
    """Return what a budget can take of this machine and these directories now.

    `device_free_bytes` are free on the device.

    Of the host's available memory a tenth is left for the rest of the process (Python, torch, the
    loader's workers, page tables): at least 1 GiB or, where less than 2 GiB are available, half of
    it. Of the device's memory a twentieth is left, at least 512 MiB, for the context's own growth
    and for fragments. Of each file system's free space a twentieth, because drives slow down when
    full; directories on one file system have equal parts of it.

    Raises:
        ConfigError: one of `directories` cannot be used.
    """
    return capacity_of(
        device=device_free_bytes,
        host=free_host_bytes(roots),
        nvme=_drives(tuple(directories), roots),
    )


def free_for_copies(roots: SystemRoots = HOST_ROOTS) -> int:
    """Return the bytes of the host that copies outside of every budget may take now.

    Of the memory left by the machine and the control groups around this process, a twentieth and at
    least 64 MiB stay for the rest of the process: a group kills a process that takes more.
    """
    return _without(free_host_bytes(roots), part=20, at_least=64 * MiB)


def capacity_of(*, device: int, host: int, nvme: Mapping[str, int]) -> Capacity:
    """Return the capacity for so many free bytes, less what `probe_capacity` leaves to others."""
    return Capacity(
        device=_without(device, part=20, at_least=512 * MiB),
        # Half of a small host: a whole GiB would leave it nothing.
        host=_without(host, part=10, at_least=min(GiB, host // 2)),
        nvme={directory: _without(free, part=20) for directory, free in nvme.items()},
    )


def _without(free: int, *, part: int, at_least: int = 0) -> int:
    """Return `free` less one of `part` parts, rounded up, and less `at_least` bytes at least."""
    # A floor division of the negated number rounds up.
    return max(free - max(-(-free // part), at_least), 0)


def _drives(directories: tuple[str, ...], roots: SystemRoots) -> dict[str, int]:
    free = {directory: _free_bytes(directory) for directory in directories}
    sharing = directories_beside(free, roots)
    return {directory: nbytes // sharing[directory] for directory, nbytes in free.items()}


def directories_beside(
    directories: Iterable[str], roots: SystemRoots = HOST_ROOTS
) -> dict[str, int]:
    """Return how many of the directories are on the file system of each, itself among them."""
    mounts = read_mounts(roots)
    # Not by st_dev, which differs between the subvolumes of one btrfs.
    # Without links, or a directory would seem to be on the file system of its link.
    found = {name: find_mount(mounts, os.path.realpath(name)) for name in directories}
    # What is on no known mount counts as one file system: parts too small are the safe mistake.
    file_systems = {name: mount.device if mount else "" for name, mount in found.items()}
    shared_by = Counter(file_systems.values())
    return {name: shared_by[file_system] for name, file_system in file_systems.items()}


def _free_bytes(directory: str) -> int:
    """Return the bytes that this user may still write there."""
    try:
        with os.scandir(directory):  # raises for a file, which disk_usage does not
            return shutil.disk_usage(directory).free
    except OSError as error:
        expected = (
            f"a directory that can be used ({error.strerror}): make it, or mount the drive that "
            "it should be on"
        )
        raise ConfigError(field="Budget.nvme", value=directory, expected=expected) from error
