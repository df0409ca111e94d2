"""Where the limits of this process's control groups are written, for cgroup versions 1 and 2 alike.

Only finds the directories; memory.py and cpu.py read them.
"""

from __future__ import annotations

from pathlib import Path

from deepnvme.machine.probing import HOST_ROOTS, Mount, SystemRoots, read_kernel_file, read_mounts

__all__ = ["cgroup_directories", "read_number"]


def cgroup_directories(controller: str, roots: SystemRoots = HOST_ROOTS) -> tuple[Path, ...]:
    """Return the directories with the limits on this process: of its groups and of all above.

    A container often knows its group's path and does not see the group: directories may be missing,
    and the mount itself, the last of each hierarchy, then is the container's group.
    """
    groups = _groups_of_this_process(roots)
    found: list[Path] = []
    for mount in read_mounts(roots):
        # Both versions may be mounted at once: limits of either count.
        if mount.file_system == "cgroup2" and "" in groups:
            found += _from_leaf_to_mount(mount, groups[""])
        elif mount.file_system == "cgroup" and controller in mount.options and controller in groups:
            found += _from_leaf_to_mount(mount, groups[controller])
    return tuple(found)


def read_number(path: Path) -> int | None:
    """Return the number in a control file; None: there is no such file, or it says "max"."""
    text = read_kernel_file(path)
    # -1 is a number: version 1's "no quota".
    return int(text) if text.lstrip("-").isdecimal() else None


def _groups_of_this_process(roots: SystemRoots) -> dict[str, str]:
    """Return the path of this process's group by controller; version 2 has one, under ""."""
    groups: dict[str, str] = {}
    for line in filter(None, read_kernel_file(roots.proc / "self/cgroup").split("\n")):
        # At most three parts: a group's path may have colons.
        _, controllers, path = line.split(":", 2)
        groups.update(dict.fromkeys(controllers.split(","), path))
    return groups


def _from_leaf_to_mount(mount: Mount, group: str) -> list[Path]:
    top = Path(mount.mount_point)
    # In a container the mount shows a part of the hierarchy, from `root` on.
    inside = (
        Path(group).relative_to(mount.root) if Path(group).is_relative_to(mount.root) else Path()
    )
    if ".." in inside.parts:  # the group is outside of this process's cgroup namespace
        inside = Path()
    return [top / inside, *(top / parent for parent in inside.parents)]
