"""Where the limits of this process's control groups are written, for cgroup versions 1 and 2 alike.

Only finds the directories; memory.py and cpu.py read them.
"""

from __future__ import annotations

from pathlib import Path

from deepnvme.machine.probing import HOST_ROOTS, Mount, SystemRoots, read_kernel_file, read_mounts

__all__ = ["cgroup_directories", "read_number"]


def cgroup_directories(controller: str, roots: SystemRoots = HOST_ROOTS) -> tuple[Path, ...]:
    """Return the directories with the limits on this process: its own groups and all above them, up
    to the mounts.

    A container often knows its group's path and does not see the group: directories may be missing,
    and the mount itself, the last of each hierarchy, then is the container's group.
    """
    groups = _groups_of_this_process(roots)
    found: list[Path] = []
    for mount in read_mounts(roots):
        if mount.file_system == "cgroup2" and "" in groups:
            found += _from_leaf_to_mount(mount, groups[""])
        elif mount.file_system == "cgroup" and controller in mount.options and controller in groups:
            found += _from_leaf_to_mount(mount, groups[controller])
    return tuple(found)


def read_number(path: Path) -> int | None:
    """Return the number in a control file; None where there is no such file, or where it says
    "max".
    """
    text = read_kernel_file(path)
    return int(text) if text.lstrip("-").isdecimal() else None


def _groups_of_this_process(roots: SystemRoots) -> dict[str, str]:
    """Return the path of this process's group by controller; version 2 has one for all of them,
    under "".
    """
    groups: dict[str, str] = {}
    for line in filter(None, read_kernel_file(roots.proc / "self/cgroup").split("\n")):
        _, controllers, path = line.split(":", 2)
        groups.update(dict.fromkeys(controllers.split(","), path))
    return groups


def _from_leaf_to_mount(mount: Mount, group: str) -> list[Path]:
    top = Path(mount.mount_point)
    inside = (
        Path(group).relative_to(mount.root) if Path(group).is_relative_to(mount.root) else Path()
    )
    if ".." in inside.parts:  # the group is the group is outside of this process's cgroup namespace
        inside = Path()
    return [top / inside, *(top / parent for parent in inside.parents)]
