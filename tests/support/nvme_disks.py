"""Small file systems that exist for the length of a `with`: tmpfs, and ext4 on a loop device of any
sector size.

Need root and a kernel that lets this process mount: DiskUnavailableError with the reason elsewhere.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PATH = os.environ.get("PATH", os.defpath) + ":/sbin:/usr/sbin"


class DiskUnavailableError(Exception):
    """No such file system can be made here; the text says why."""


@contextmanager
def tmpfs(folder: Path, nbytes: int) -> Iterator[Path]:
    """Yield a directory with room for `nbytes`."""
    with _mounted(
        folder / "tmpfs", "-t", "tmpfs", "-o", f"size={nbytes},mode=1777", "tmpfs"
    ) as mount_point:
        yield mount_point


@contextmanager
def loop_device(folder: Path, nbytes: int, *, sector_bytes: int = 512) -> Iterator[Path]:
    """Yield a block device of `nbytes`, backed by a file in `folder`."""
    image = folder / "image"
    with image.open("wb") as file:
        file.truncate(nbytes)
    options = ["--show", "--find", "--sector-size", str(sector_bytes)]
    device = _try("losetup", *options, str(image)).strip()
    try:
        yield Path(device)
    finally:
        _undo("losetup", "--detach", device)


@contextmanager
def loop_ext4(folder: Path, nbytes: int, *, sector_bytes: int = 512) -> Iterator[Path]:
    """Yield an empty ext4 on a block device of `nbytes`."""
    with loop_device(folder, nbytes, sector_bytes=sector_bytes) as device:
        _try("mkfs.ext4", "-q", "-F", "-b", "4096", "-m", "0", str(device))
        with _mounted(folder / "ext4", "-t", "ext4", str(device)) as mount_point:
            yield mount_point


@contextmanager
def loop_reflinks(folder: Path, kind: str) -> Iterator[Path]:
    """Yield an empty file system that lets files share blocks: xfs or btrfs, of 384 MiB."""
    with loop_device(folder, 384 << 20) as device:
        _try(f"mkfs.{kind}", "-q", "-f", str(device))
        with _mounted(folder / kind, "-t", kind, str(device)) as mount_point:
            yield mount_point


@contextmanager
def _mounted(mount_point: Path, *arguments: str) -> Iterator[Path]:
    mount_point.mkdir()
    _try("mount", *arguments, str(mount_point))
    try:
        yield mount_point
    finally:
        _undo("umount", str(mount_point))


def _try(program: str, *arguments: str) -> str:
    if os.geteuid() != 0:
        raise DiskUnavailableError(f"{program} needs root")
    if shutil.which(program, path=_PATH) is None:
        raise DiskUnavailableError(f"{program} is not installed")
    done = _run(program, *arguments)
    if done.returncode != 0:
        raise DiskUnavailableError(f"{program} {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def _undo(program: str, *arguments: str) -> None:
    """Fail rather than skip: what cannot be undone is still in use.

    A ring's files are let go of a little later.
    """
    deadline = time.monotonic() + 10
    while (done := _run(program, *arguments)).returncode != 0 and time.monotonic() < deadline:
        time.sleep(0.05)
    if done.returncode != 0:
        raise RuntimeError(f"{program} {' '.join(arguments)}: {done.stderr.strip()}")


def _run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": _PATH}
    return subprocess.run(
        [program, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=environment,
    )
