"""The NVIDIA GPUs, read from the driver's library (NVML) through ctypes, without a CUDA context.

A machine without the library, or with a driver that does not answer, has no GPUs and a reason why.
Tested against a fake library that is compiled for the purpose, and by tests/gpu on a GPU.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from typing import TypeVar

from deepnvme.machine.probing import HOST_ROOTS, SystemRoots, read_kernel_file

__all__ = [
    "NVML_LIBRARIES",
    "VISIBLE_VARIABLE",
    "Gpu",
    "Gpus",
    "PcieLink",
    "count_visible",
    "probe_gpus",
]

VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"
# Where the library is found: by the loader, in containers, in distributions, under WSL.
NVML_LIBRARIES = (
    "libnvidia-ml.so.1",
    "/usr/local/nvidia/lib64/libnvidia-ml.so.1",
    "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1",
    "/usr/lib/aarch64-linux-gnu/libnvidia-ml.so.1",
    "/usr/lib/wsl/lib/libnvidia-ml.so.1",
)
# NVML's texts are shorter: names have at most 96 bytes, versions 80.
_TEXT_BYTES = 96
_Record = TypeVar("_Record", bound=ctypes.Structure)


@dataclass(frozen=True, kw_only=True, slots=True)
class PcieLink:
    """A GPU's link.

    An idle GPU lowers the generation, so that `max_generation` is what counts; the width stays.
    """

    generation: int
    max_generation: int
    width: int
    max_width: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One GPU; None stands for what its driver does not report."""

    name: str
    total_bytes: int | None
    free_bytes: int | None
    bus_id: str | None
    numa_node: int | None
    link: PcieLink | None
    uuid: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpus:
    """All GPUs of the machine, or the reason why they are not known.

    `driver` is its version, `cuda` the newest CUDA that it supports. `visible_devices` is
    CUDA_VISIBLE_DEVICES (None: it is not set), `visible_count` how many of the devices CUDA
    therefore offers to this process.
    """

    devices: tuple[Gpu, ...]
    driver: str | None
    cuda: str | None
    reason: str | None
    visible_devices: str | None
    visible_count: int

    @property
    def visible(self) -> tuple[Gpu, ...]:
        """The devices that CUDA offers to this process, in its order.

        Numbers count as the driver does, which is CUDA's way with CUDA_DEVICE_ORDER=PCI_BUS_ID. A
        name that no device has, as that of a MIG slice, stands for the device at its place.
        """
        if self.visible_devices is None:
            return self.devices
        entries = self.visible_devices.split(",")[: self.visible_count]
        return tuple(self._device(entry.strip(), place) for place, entry in enumerate(entries))

    def _device(self, entry: str, place: int) -> Gpu:
        if entry.isdecimal():
            return self.devices[int(entry)]
        # CUDA takes the beginning of a name for the whole.
        named = (gpu for gpu in self.devices if gpu.uuid is not None and gpu.uuid.startswith(entry))
        return next(named, self.devices[place])


def probe_gpus(libraries: Sequence[str] = NVML_LIBRARIES, roots: SystemRoots = HOST_ROOTS) -> Gpus:
    """Ask the first of `libraries` that loads."""
    library = _load(libraries)
    if library is None:
        return _no_gpus("no NVIDIA driver: libnvidia-ml.so.1 is not found")
    try:
        with _session(library) as nvml:
            devices = tuple(
                _gpu(nvml, index, roots) for index in range(nvml.number("nvmlDeviceGetCount_v2"))
            )
            visible = os.environ.get(VISIBLE_VARIABLE)
            return Gpus(
                devices=devices,
                driver=nvml.text("nvmlSystemGetDriverVersion"),
                cuda=_cuda_version(nvml),
                reason=None if devices else "the NVIDIA driver sees no GPU",
                visible_devices=visible,
                visible_count=count_visible(visible, len(devices)),
            )
    except _NvmlError as error:
        return _no_gpus(f"the NVIDIA driver does not answer: {error}")


def count_visible(visible_devices: str | None, count: int) -> int:
    """Return how many of `count` GPUs CUDA offers where CUDA_VISIBLE_DEVICES is `visible_devices`.

    CUDA reads the list up to the first entry that is no GPU. Names, such as "GPU-8932f937", are
    taken for those of GPUs that are there.
    """
    if visible_devices is None:
        return count
    entries = (entry.strip() for entry in visible_devices.split(","))
    # CUDA ignores all entries behind the first bad one.
    good = takewhile(
        lambda it: it.startswith(("GPU-", "MIG-")) or (it.isdecimal() and int(it) < count), entries
    )
    return min(count, sum(1 for _ in good))


def _no_gpus(reason: str) -> Gpus:
    return Gpus(
        devices=(),
        driver=None,
        cuda=None,
        reason=reason,
        visible_devices=os.environ.get(VISIBLE_VARIABLE),
        visible_count=0,
    )


class _NvmlError(Exception):
    """A call failed; the text is NVML's own."""


class _MemoryInfo(ctypes.Structure):
    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


# The layout of nvmlPciInfo_t, version 3.
class _PciInfo(ctypes.Structure):
    _fields_ = (
        ("bus_id_legacy", ctypes.c_char * 16),
        ("domain", ctypes.c_uint),
        ("bus", ctypes.c_uint),
        ("device", ctypes.c_uint),
        ("device_id", ctypes.c_uint),
        ("subsystem_id", ctypes.c_uint),
        ("bus_id", ctypes.c_char * 32),
    )


class _Nvml:
    """NVML's calling convention: functions return a status and write where a pointer says."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def call(self, function: str, *arguments: object) -> None:
        """Call `function`, raising _NvmlError for any status but success."""
        try:
            entry = getattr(self._library, function)
        except AttributeError:  # the driver is older than the function
            raise _NvmlError(f"it has no {function}") from None
        status = entry(*arguments)
        if status != 0:
            raise _NvmlError(f"{function}: {self._status_text(status)}")

    def number(self, function: str, *arguments: object) -> int:
        """Return the unsigned int that `function` writes."""
        answer = ctypes.c_uint()
        self.call(function, *arguments, ctypes.byref(answer))
        return answer.value

    def text(self, function: str, *arguments: object) -> str:
        """Return the text that `function` writes."""
        # NVML ends the text with a 0, which `value` stops at.
        answer = ctypes.create_string_buffer(_TEXT_BYTES)
        self.call(function, *arguments, answer, ctypes.c_uint(_TEXT_BYTES))
        return answer.value.decode(errors="replace")

    def _status_text(self, status: int) -> str:
        describe = getattr(self._library, "nvmlErrorString", None)
        if describe is None:
            return f"error {status}"
        # ctypes takes results for ints, which would cut the pointer.
        describe.restype = ctypes.c_char_p
        text: bytes | None = describe(status)
        return (text or b"").decode(errors="replace") or f"error {status}"


def _load(libraries: Sequence[str]) -> ctypes.CDLL | None:
    for name in libraries:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


@contextmanager
def _session(library: ctypes.CDLL) -> Iterator[_Nvml]:
    nvml = _Nvml(library)
    # NVML counts its users: each init needs one shutdown.
    nvml.call("nvmlInit_v2")
    try:
        yield nvml
    finally:
        nvml.call("nvmlShutdown")


def _cuda_version(nvml: _Nvml) -> str | None:
    """Return the newest CUDA that the driver supports, such as "12.8"; None where unknown."""
    try:
        number = nvml.number("nvmlSystemGetCudaDriverVersion_v2")
    except _NvmlError:
        return None
    # NVML writes 12.8 as 12080.
    return f"{number // 1000}.{number % 1000 // 10}"


def _gpu(nvml: _Nvml, index: int, roots: SystemRoots) -> Gpu:
    device = ctypes.c_void_p()
    nvml.call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(device))
    memory = _filled(_MemoryInfo(), nvml, "nvmlDeviceGetMemoryInfo", device)
    pci = _filled(_PciInfo(), nvml, "nvmlDeviceGetPciInfo_v3", device)
    # The legacy field is too short for a domain of eight digits.
    bus_id = pci.bus_id.decode(errors="replace") if pci else None
    return Gpu(
        name=nvml.text("nvmlDeviceGetName", device),
        total_bytes=memory.total if memory else None,
        free_bytes=memory.free if memory else None,
        bus_id=bus_id,
        numa_node=_numa_node(bus_id, roots) if bus_id else None,
        link=_link(nvml, device),
        uuid=_uuid(nvml, device),
    )


def _filled(record: _Record, nvml: _Nvml, function: str, device: ctypes.c_void_p) -> _Record | None:
    """Return `record`, filled by `function`; None: this kind of GPU does not support it."""
    try:
        nvml.call(function, device, ctypes.byref(record))
    except _NvmlError:
        return None
    return record


def _uuid(nvml: _Nvml, device: ctypes.c_void_p) -> str | None:
    try:
        return nvml.text("nvmlDeviceGetUUID", device)
    except _NvmlError:
        return None


def _link(nvml: _Nvml, device: ctypes.c_void_p) -> PcieLink | None:
    try:
        return PcieLink(
            generation=nvml.number("nvmlDeviceGetCurrPcieLinkGeneration", device),
            max_generation=nvml.number("nvmlDeviceGetMaxPcieLinkGeneration", device),
            width=nvml.number("nvmlDeviceGetCurrPcieLinkWidth", device),
            max_width=nvml.number("nvmlDeviceGetMaxPcieLinkWidth", device),
        )
    except _NvmlError:  # virtual and integrated GPUs
        return None


def _numa_node(bus_id: str, roots: SystemRoots) -> int | None:
    # NVML writes the domain with eight digits and capitals, sysfs with four and small letters.
    node = read_kernel_file(
        roots.sys / "bus/pci/devices" / bus_id.lower()[-len("0000:00:00.0") :] / "numa_node"
    )
    # -1, of a machine with one node, is no decimal: None.
    return int(node) if node.isdecimal() else None
