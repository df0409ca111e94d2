"""What this machine and this process can do for storage: io_uring, Linux AIO, locked memory, the
drive of a directory.

Returns frozen records that turn into JSON as they are. What a fact means (why io_uring is refused,
which backend is best) is decided by pure functions; /proc and /sys are read under `SystemRoots`, so
that tests can hand in others. In a probed directory it writes a block to one or two files that are
gone at once; it changes nothing else.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import re
import resource
import stat
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import MappingProxyType

from deepnvme import _native

__all__ = [
    "HOST_ROOTS",
    "AioProbe",
    "Backend",
    "DirectoryProbe",
    "Drive",
    "LiburingProbe",
    "Memlock",
    "Mount",
    "Probe",
    "ProcessLimits",
    "Refusal",
    "RefusalKind",
    "SystemProbe",
    "SystemRoots",
    "UringProbe",
    "best_backend",
    "drive_directory",
    "find_liburing",
    "find_mount",
    "judge_liburing",
    "kernel_version",
    "probe",
    "probe_directory",
    "probe_system",
    "read_kernel_file",
    "read_mounts",
    "read_process_limits",
    "uring_refusal",
]

# The ring backends (native/nvme/src/backend_uring.cpp) refuse a ring without this feature, which
# came with 5.13: only from then on can buffers be registered while the read that wakes the ring is
# in flight.
_OLDEST_URING_KERNEL = (5, 13)
_FEATURE_RSRC_TAGS = 1 << 10
_OLDEST_LIBURING = (2026, 3, 25)
_CAP_IPC_LOCK = 14
_CAP_SYS_ADMIN = 21
_SECCOMP_FILTER = 2
_LIBURING_CPU = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl"})
_MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs", "hugetlbfs")


@dataclass(frozen=True, kw_only=True, slots=True)
class SystemRoots:
    """Where the kernel's files are read."""

    proc: Path = Path("/proc")
    sys: Path = Path("/sys")


HOST_ROOTS = SystemRoots()


class Backend(str, Enum):
    """The ways of asking the kernel for I/O, best first."""

    LIBURING = "liburing"
    URING = "uring"
    AIO = "aio"
    THREADS = "threads"


class RefusalKind(str, Enum):
    """What stands between this process and io_uring."""

    OLD_KERNEL = "old kernel"
    SANDBOX = "sandbox"
    SYSCTL = "sysctl"
    SECCOMP = "seccomp"
    SECURITY_MODULE = "security module"
    MEMLOCK = "memlock"
    OTHER = "other"


# Of each kind: the cause, and what to do about it.
_REFUSALS = MappingProxyType(
    {
        RefusalKind.OLD_KERNEL: (
            "Linux {release} is older than {oldest}, the first whose io_uring can be used",
            "boot Linux 6.1 or newer; in a sandbox that reports an old release (gVisor), use "
            "another runtime",
        ),
        RefusalKind.SANDBOX: (
            "Linux {release} should have io_uring but answers that it has not: a sandbox such as "
            "gVisor stands between, or the kernel was built without it",
            "use a container runtime without such a sandbox (runc), or a kernel with "
            "CONFIG_IO_URING=y",
        ),
        RefusalKind.SYSCTL: (
            "the sysctl kernel.io_uring_disabled={disabled} switches it off (1: except for root "
            "and one group; 2: for all)",
            "sudo sysctl kernel.io_uring_disabled=0; a line in /etc/sysctl.d makes it last",
        ),
        RefusalKind.SECCOMP: (
            "a seccomp filter on this process refuses it, as Docker's default profile does",
            "give the container a seccomp profile that allows io_uring_setup, io_uring_enter and "
            "io_uring_register: "
            "docker run --security-opt seccomp=PROFILE.json (to try it out: seccomp=unconfined); "
            "in Kubernetes: securityContext.seccompProfile",
        ),
        RefusalKind.SECURITY_MODULE: (
            "neither the sysctl nor a seccomp filter refuses it, so that a security module "
            "probably does",
            "look for a denial by SELinux or AppArmor: sudo journalctl -k | grep -i denied",
        ),
        RefusalKind.MEMLOCK: (
            "the memlock limit leaves no room for a ring, which kernels before 5.12 count against "
            "it",
            "raise the limit: ulimit -l unlimited, or docker run --ulimit memlock=-1",
        ),
        RefusalKind.OTHER: (
            "the kernel says: {error}",
            "free what it names (open files, memory) and try again",
        ),
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """Why io_uring is refused, and what to do about it."""

    kind: RefusalKind
    cause: str
    advice: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessLimits:
    """What the kernel and its administrator impose on this process, as far as storage is concerned.

    `uring_disabled` is the sysctl kernel.io_uring_disabled (0 where the kernel has none);
    `uring_exempt` says that this process may make rings although that is 1: CAP_SYS_ADMIN, or
    membership of kernel.io_uring_group.
    """

    kernel_release: str
    seccomp_mode: int
    uring_disabled: int
    uring_exempt: bool
    can_lock_memory: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class UringProbe:
    """Whether this process can make an io_uring that a queue can use, and what the ring offers.

    A ring without the features that our backends need counts as refused with ENOSYS, as a queue
    refuses it: the kernel is too old. `defer_taskrun`: single-issuer rings that run completions
    only when asked (Linux 6.1). `opcodes` are the numbers of the supported operations.
    """

    available: bool
    errno_name: str | None
    refusal: Refusal | None
    features: int
    defer_taskrun: bool
    opcodes: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class AioProbe:
    """Whether this process can use Linux AIO."""

    available: bool
    errno_name: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class LiburingProbe:
    """Whether python-liburing is installed with the library that we bind; `reason`: why not.

    `fits_cpu`: whether this CPU has what its published builds are compiled for. They were made for
    one with AVX-512, and an instruction that the CPU lacks ends the process; a queue takes such a
    build only when asked for by name.
    """

    version: str | None
    usable: bool
    reason: str | None
    fits_cpu: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Memlock:
    """How many bytes this process may lock in memory; None is without limit.

    `exempt`: it has CAP_IPC_LOCK.
    """

    soft_bytes: int | None
    hard_bytes: int | None
    exempt: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class SystemProbe:
    """What this process can do for storage on any drive of this machine."""

    kernel_release: str
    uring: UringProbe
    aio: AioProbe
    liburing: LiburingProbe
    memlock: Memlock
    huge_pages: str | None
    backend: Backend


@dataclass(frozen=True, kw_only=True, slots=True)
class Mount:
    """One line of mountinfo. `root` is the directory of the file system that is mounted."""

    device: str
    root: str
    mount_point: str
    file_system: str
    source: str
    options: frozenset[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Drive:
    """A whole block device, never a partition; None stands for what the kernel does not say."""

    name: str
    model: str | None
    rotational: bool | None


@dataclass(frozen=True, kw_only=True, slots=True)
class DirectoryProbe:
    """What can be done in one directory; None stands for what is not known or not reported.

    `plain_errno` and `direct_errno` name what went wrong when one block was written as usual, and
    written and read back with O_DIRECT.
    """

    path: str
    plain_errno: str | None
    direct_errno: str | None
    memory_align: int | None
    offset_align: int | None
    file_system: str | None
    in_memory: bool
    discard: bool
    mount_point: str | None
    source: str | None
    total_bytes: int | None
    free_bytes: int | None
    drive: Drive | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """What this process can do for storage here; `directory` is None where none was named."""

    system: SystemProbe
    directory: DirectoryProbe | None


def probe(directory: str | os.PathLike[str] | None = None) -> Probe:
    """Ask the kernel what this process may use for storage, and what works in a directory."""
    return Probe(
        system=probe_system(), directory=None if directory is None else probe_directory(directory)
    )


def probe_system(roots: SystemRoots = HOST_ROOTS) -> SystemProbe:
    """Ask the kernel what this process may use."""
    limits = read_process_limits(roots)
    ring = _native.probe_uring()
    error = ring.error or (0 if ring.features & _FEATURE_RSRC_TAGS else errno.ENOSYS)
    uring = UringProbe(
        available=error == 0,
        errno_name=_errno_name(error),
        refusal=uring_refusal(error, limits) if error else None,
        features=ring.features,
        defer_taskrun=ring.defer_taskrun,
        opcodes=tuple(ring.opcodes),
    )
    aio_error = _native.probe_linux_aio()
    aio = AioProbe(available=aio_error == 0, errno_name=_errno_name(aio_error))
    liburing = find_liburing(roots)
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return SystemProbe(
        kernel_release=limits.kernel_release,
        uring=uring,
        aio=aio,
        liburing=liburing,
        memlock=Memlock(
            soft_bytes=None if soft == resource.RLIM_INFINITY else soft,
            hard_bytes=None if hard == resource.RLIM_INFINITY else hard,
            exempt=limits.can_lock_memory,
        ),
        huge_pages=_huge_page_mode(roots),
        backend=best_backend(
            uring=uring.available, liburing=liburing.usable and liburing.fits_cpu, aio=aio.available
        ),
    )


def probe_directory(
    directory: str | os.PathLike[str], roots: SystemRoots = HOST_ROOTS
) -> DirectoryProbe:
    """Ask what I/O works in `directory`, and what holds it.

    A directory that does not exist is an answer as well.
    """
    path = Path(os.path.realpath(directory))
    answer = _native.probe_directory(path)
    total_bytes, free_bytes = _space(path)
    mount = None if total_bytes is None else find_mount(read_mounts(roots), str(path))
    return DirectoryProbe(
        path=str(path),
        plain_errno=_errno_name(answer.plain_error),
        direct_errno=_errno_name(answer.direct_error),
        memory_align=answer.alignment.memory if answer.alignment else None,
        offset_align=answer.alignment.offset if answer.alignment else None,
        file_system=mount.file_system if mount else None,
        in_memory=mount is not None and mount.file_system in _MEMORY_FILE_SYSTEMS,
        discard=mount is not None and "discard" in mount.options,
        mount_point=mount.mount_point if mount else None,
        source=mount.source if mount else None,
        total_bytes=total_bytes,
        free_bytes=free_bytes,
        drive=_drive_of(mount, roots) if mount else None,
    )


def uring_refusal(error: int, limits: ProcessLimits) -> Refusal:
    """Explain why io_uring_setup failed with `error` in a process under `limits`."""
    kind = _refusal_kind(error, limits)
    cause, advice = _REFUSALS[kind]
    known = {
        "release": limits.kernel_release,
        "oldest": ".".join(map(str, _OLDEST_URING_KERNEL)),
        "disabled": limits.uring_disabled,
        "error": os.strerror(error),
    }
    return Refusal(kind=kind, cause=cause.format_map(known), advice=advice.format_map(known))


def best_backend(*, uring: bool, liburing: bool, aio: bool) -> Backend:
    """Return the best backend, given what works here. Threads work everywhere."""
    if uring:
        return Backend.LIBURING if liburing else Backend.URING
    return Backend.AIO if aio else Backend.THREADS


def judge_liburing(
    version: str | None, *, library_present: bool, cpu_flags: Collection[str]
) -> LiburingProbe:
    """Tell whether python-liburing of this `version` (None: absent) is usable; if not, why."""
    oldest = ".".join(map(str, _OLDEST_LIBURING))
    numbers = tuple(int(number) for number in re.findall(r"\d+", version or ""))
    if version is None:
        reason = "not installed"
    elif numbers < _OLDEST_LIBURING:
        reason = f"{version} is older than {oldest} and lacks functions that are needed"
    elif not library_present:
        reason = f"{version} carries no shared library"
    else:
        reason = None
    return LiburingProbe(
        version=version,
        usable=reason is None,
        reason=reason,
        fits_cpu=_LIBURING_CPU.issubset(cpu_flags),
    )


def kernel_version(release: str) -> tuple[int, int]:
    """Return the first two numbers of a release like "6.1.0-28-amd64"; (0, 0) without any."""
    numbers = re.match(r"(\d+)\.(\d+)", release)
    return (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)


def read_process_limits(roots: SystemRoots = HOST_ROOTS) -> ProcessLimits:
    """Read what is imposed on this process."""
    status = dict(
        line.split(":", 1)
        for line in read_kernel_file(roots.proc / "self/status").split("\n")
        if ":" in line
    )
    # Those that count now, in hexadecimal: a process may have others that it could raise.
    capabilities = int(status.get("CapEff", "0").strip() or "0", 16)
    # Text as it is: the group in io_uring_group is compared, never computed with.
    groups = {*status.get("Gid", "").split(), *status.get("Groups", "").split()}
    uring_group = read_kernel_file(roots.proc / "sys/kernel/io_uring_group")
    return ProcessLimits(
        kernel_release=read_kernel_file(roots.proc / "sys/kernel/osrelease") or os.uname().release,
        seccomp_mode=int(status.get("Seccomp", "0")),
        uring_disabled=int(read_kernel_file(roots.proc / "sys/kernel/io_uring_disabled") or "0"),
        uring_exempt=bool(capabilities >> _CAP_SYS_ADMIN & 1) or uring_group in groups,
        can_lock_memory=bool(capabilities >> _CAP_IPC_LOCK & 1),
    )


def read_mounts(roots: SystemRoots = HOST_ROOTS) -> tuple[Mount, ...]:
    """Read the mounts that this process sees, in the order in which they were made."""
    mounts = []
    # Not splitlines(): a mount point may hold any character that Python takes for the end of a line
    # but \n.
    for line in filter(None, read_kernel_file(roots.proc / "self/mountinfo").split("\n")):
        # Any number of optional fields stands before the dash, so what follows is found by it.
        left, _, right = line.partition(" - ")
        _, _, device, root, mount_point, options, *_ = left.split(" ")
        file_system, source, super_options = right.split(" ", 2)
        mounts.append(
            Mount(
                device=device,
                root=_unescaped(root),
                mount_point=_unescaped(mount_point),
                file_system=file_system,
                source=_unescaped(source),
                options=frozenset([*options.split(","), *super_options.split(",")]),
            )
        )
    return tuple(mounts)


def find_mount(mounts: tuple[Mount, ...], path: str) -> Mount | None:
    """Return the mount that holds the absolute `path`: the deepest, of equals the latest."""
    # With the slash: /mnt/a does not hold /mnt/ab.
    holding = [
        mount for mount in mounts if f"{path}/".startswith(f"{mount.mount_point.rstrip('/')}/")
    ]
    # Reversed, as max() returns the first of equals: a later mount hides the one below it.
    return max(reversed(holding), key=lambda mount: len(mount.mount_point), default=None)


def drive_directory(mount: Mount, roots: SystemRoots = HOST_ROOTS) -> Path | None:
    """Return the directory in sysfs of the whole drive that `mount` is on.

    None for a mount that is on no drive: network, memory, overlay.
    """
    device = mount.device
    # btrfs and others number themselves; their source is the block device
    if device.startswith("0:"):
        device = _block_device_number(Path(mount.source)) or device
    # A link into the tree of devices, where a partition lies in its drive's directory.
    directory = (roots.sys / "dev/block" / device).resolve()
    if not directory.exists():
        return None
    return directory.parent if (directory / "partition").exists() else directory


def read_kernel_file(path: Path) -> str:
    """Return the stripped text of a file of /proc or /sys, empty where it cannot be read.

    File names in it, which need not be text, are spelled as Python spells them elsewhere.
    """
    try:
        return os.fsdecode(path.read_bytes()).strip()
    except OSError:
        return ""


def _refusal_kind(error: int, limits: ProcessLimits) -> RefusalKind:
    filtered = limits.seccomp_mode == _SECCOMP_FILTER
    # With 1, a filter may have refused a process that is exempt. Without one, the exemption did not
    # count: CAP_SYS_ADMIN of a user namespace does not.
    switched_off = limits.uring_disabled >= 2 or (
        limits.uring_disabled == 1 and not (limits.uring_exempt and filtered)
    )
    kind = RefusalKind.OTHER
    if error == errno.ENOMEM:
        kind = RefusalKind.MEMLOCK
    elif error == errno.ENOSYS and kernel_version(limits.kernel_release) < _OLDEST_URING_KERNEL:
        kind = RefusalKind.OLD_KERNEL
    elif error == errno.EPERM and switched_off:
        kind = RefusalKind.SYSCTL
    # Container runtimes answer a call that they filter with any of these.
    elif error in (errno.EPERM, errno.EACCES, errno.ENOSYS) and filtered:
        kind = RefusalKind.SECCOMP
    elif error == errno.ENOSYS:
        kind = RefusalKind.SANDBOX
    elif error in (errno.EPERM, errno.EACCES):
        kind = RefusalKind.SECURITY_MODULE
    return kind


def _drive_of(mount: Mount, roots: SystemRoots) -> Drive | None:
    """Return the whole drive that `mount` is on, None for one that is on none."""
    directory = drive_directory(mount, roots)
    if directory is None:
        return None
    rotational = read_kernel_file(directory / "queue/rotational")
    return Drive(
        name=directory.name,
        model=read_kernel_file(directory / "device/model") or None,
        rotational=rotational == "1" if rotational else None,
    )


def _block_device_number(path: Path) -> str | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return (
        f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
        if stat.S_ISBLK(status.st_mode)
        else None
    )


def _space(path: Path) -> tuple[int | None, int | None]:
    """Return the bytes in all and those free for this user."""
    try:
        space = os.statvfs(path)
    except OSError:
        return None, None
    # f_bavail: what the file system keeps for root is not there for this process.
    return space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize


def find_liburing(roots: SystemRoots = HOST_ROOTS) -> LiburingProbe:
    """Find python-liburing without an import, which would map its library into this process."""
    spec = importlib.util.find_spec("liburing")
    if spec is None or spec.origin is None:
        return judge_liburing(None, library_present=False, cpu_flags=())
    package = Path(spec.origin).parent
    flags = re.search(r"^flags\s*:(.*)$", read_kernel_file(roots.proc / "cpuinfo"), re.MULTILINE)
    return judge_liburing(
        _version_beside(package),
        library_present=(package / "liburing.so").exists(),
        cpu_flags=flags[1].split() if flags else (),
    )


def _version_beside(package: Path) -> str | None:
    """Return the version that the installation of a package names, None where there is none."""
    # Not by importlib.metadata: importing that takes longer than making a queue.
    [*installed] = package.parent.glob(f"{package.name}-*.dist-info")
    return installed[0].stem.rpartition("-")[2] if installed else None


def _huge_page_mode(roots: SystemRoots) -> str | None:
    """Return the chosen mode of transparent huge pages: always, madvise or never."""
    chosen = re.search(
        r"\[(\w+)\]", read_kernel_file(roots.sys / "kernel/mm/transparent_hugepage/enabled")
    )
    return chosen[1] if chosen else None


def _errno_name(error: int) -> str | None:
    return errno.errorcode.get(error, str(error)) if error else None


def _unescaped(field: str) -> str:
    r"""Undo mountinfo's escapes of blanks and backslashes, such as a blank's \040."""
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), field)
