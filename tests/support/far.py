"""A device that is to torch another one than the CPU, as a GPU is, and to the engine's streams an
emulated one.

far_device.cpp is its half in torch, compiled here with the headers that come with torch. Copies and
works of the engine are as late as the emulated device's virtual clock can make them, but for what a
GPU's streams promise: what modules compute comes after all that the compute stream was told to wait
for, and works of that stream are in one order with it. What a copy reads or writes may go as soon
as torch frees it, which leaves NaN, unless the accelerator was told.
"""

from __future__ import annotations

import ctypes
import fcntl
import shutil
import subprocess
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.cpp_extension import include_paths

from deepnvme.memory.device_arrays import CopyEvent, DeviceArray, device_array_of
from infinity_engine.accel import (
    Buffer,
    Cost,
    Emulation,
    Event,
    Stream,
    StreamKind,
    VirtualAccelerator,
)
from infinity_engine.accel.emulated import EmulatedMemory
from infinity_engine.accel.operation import Copy
from infinity_engine.accel.virtual import VirtualOperation
from infinity_engine.errors import CapacityError

__all__ = [
    "FAR",
    "FarAccelerator",
    "allocated",
    "compiled_far_device",
    "far_array_of",
    "far_device_is_missing",
    "load_far_device",
    "most_allocated",
]

FAR = torch.device("hpu", 0)
_NO_LIMIT = 2**63 - 1
_SOURCE = Path(__file__).with_name("far_device.cpp")


def far_device_is_missing() -> str | None:
    """Return why there cannot be one here; None: there can."""
    if torch.version.cuda is not None or torch.version.hip is not None:
        return (
            "this torch is built for a GPU, and allows no other accelerator beside that, present "
            "or not"
        )
    return "it is compiled with g++, which is not there" if shutil.which("g++") is None else None


def compiled_far_device(folder: Path) -> Path:
    """Return the library that has the device, compiled into the folder if nobody has yet."""
    library = folder / "far_device.so"
    with (folder / "far_device.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _compile(library)
    return library


def _compile(library: Path) -> None:
    made = library.with_suffix(".new")
    abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
    includes = [f"-I{path}" for path in include_paths()]
    linked = [f"-L{Path(torch.__file__).parent / 'lib'}", "-ltorch_cpu", "-lc10"]
    options = ["-std=c++20", "-O1", "-fPIC", "-shared", f"-D_GLIBCXX_USE_CXX11_ABI={abi}"]
    subprocess.run(["g++", *options, *includes, str(_SOURCE), "-o", str(made), *linked], check=True)
    made.rename(library)


def load_far_device(library: Path) -> None:
    """Let torch have the device, in this process and for ever, before anything was computed on a
    device.
    """
    torch.ops.load_library(library)  # type: ignore[no-untyped-call]  # torch is
    device = types.ModuleType("torch.hpu")
    device.__dict__.update(
        current_device=lambda: 0,
        device_count=lambda: 1,
        is_available=lambda: True,
        _is_in_bad_fork=lambda: False,
        _lazy_init=lambda: None,
    )
    torch._register_device_module("hpu", device)  # type: ignore[no-untyped-call]  # torch is


def allocated() -> int:
    """Return the bytes that torch has taken there."""
    return int(torch.ops.far.allocated())


def most_allocated(work: Callable[[], object]) -> int:
    """Return the most bytes that torch takes there while it works, beside those before."""
    before = allocated()
    torch.ops.far.forget_peak()
    work()
    return int(torch.ops.far.peak()) - before


def _bytes_at(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a flat tensor as one of the CPU's that keeps nothing."""
    here = (ctypes.c_uint8 * tensor.numel()).from_address(tensor.data_ptr())
    return torch.frombuffer(here, dtype=torch.uint8)


class _Ended:
    """A copy that happened when it was asked for."""

    def synchronize(self) -> None:
        pass


class _FarArray:
    """A tensor there as deepnvme's staging sees arrays of devices."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._bytes = torch.as_tensor(torch.ops.far.near(tensor.view(-1).view(torch.uint8)))
        self.nbytes = self._bytes.numel()

    def begin(self) -> None:
        pass

    def to_host(self, start: int, target: memoryview) -> CopyEvent:
        torch.frombuffer(target, dtype=torch.uint8).copy_(self._bytes[start : start + len(target)])
        return _Ended()

    def to_device(self, start: int, source: memoryview) -> CopyEvent:
        self._bytes[start : start + len(source)].copy_(torch.frombuffer(source, dtype=torch.uint8))
        return _Ended()


def far_array_of(thing: Any, *, writable: bool) -> DeviceArray | None:
    """Return what deepnvme copies from or to, where it is on the far device or another; see
    `device_array_of`.
    """
    if isinstance(thing, torch.Tensor) and thing.device == FAR:
        return _FarArray(thing)
    return device_array_of(thing, writable=writable)


class _Memory(EmulatedMemory):
    """The accelerator's own bytes, which are torch's too, beside which modules have others."""

    def _new_block(self, nbytes: int) -> torch.Tensor:
        return torch.as_tensor(
            torch.ops.far.near(torch.empty(nbytes, dtype=torch.uint8, device=FAR))
        )

    def part(self, tensor: torch.Tensor) -> torch.Tensor:
        return super().part(tensor) if self.holds(tensor) else tensor


class _Buffer(Buffer):
    """A block of the host's memory as the far device's."""

    __slots__ = ("block",)

    def __init__(self, block: torch.Tensor) -> None:
        super().__init__(torch.ops.far.far(block))
        self.block = block

    def shared(self) -> tuple[torch.Tensor, object]:
        array = self.block.numpy()
        return torch.as_tensor(torch.ops.far.far(torch.from_numpy(array))), array


class FarAccelerator(VirtualAccelerator):
    """The engine's half: an emulated device whose tensors torch has on the far device."""

    def __init__(self, emulation: Emulation) -> None:
        super().__init__(emulation)
        self.torch_device = FAR
        self._memory = _Memory(emulation.capacity_bytes)
        self._outlived: list[tuple[Event, torch.Tensor]] = []
        self._before: int | None = None
        self._computed_ns = 0  # when all works have ended that were carried out at once

    def allocate(self, nbytes: int, *, idle_bytes: int = 0) -> Buffer:
        """Return a buffer of NaN."""
        try:
            block = self._memory.allocate(nbytes)
        except torch.OutOfMemoryError as error:
            free, limit = self.memory()
            raise CapacityError(
                tier="DEVICE", asked=nbytes, free=free, limit=limit, change="modules less"
            ) from error
        return _Buffer(block)

    def free(self, buffer: Buffer) -> None:
        """Give a buffer back; views of it see NaN from here on."""
        assert isinstance(buffer, _Buffer)
        buffer.release()
        super().free(Buffer(buffer.block))

    def copy(
        self,
        target: torch.Tensor,
        source: torch.Tensor,
        *,
        stream: Stream,
        after: Sequence[Event] = (),
    ) -> Event:
        """Copy bytes; neither tensor is kept."""
        assert (target.device, source.device) in {
            (FAR, torch.device("cpu")),
            (torch.device("cpu"), FAR),
        }
        assert (source.device == FAR) == (stream.kind is StreamKind.D2H)
        assert target.numel() == source.numel()
        down = stream.kind is StreamKind.D2H
        copy = Copy(target, _bytes_at(source)) if down else Copy(_bytes_at(target), source)
        return self._submit(stream, copy, after)

    def run(
        self, work: Callable[[], object], *, stream: Stream, cost: Cost, after: Sequence[Event] = ()
    ) -> Event:
        """Work in the compute stream is in one order with what modules compute, which happens at
        once.
        """
        event = super().run(work, stream=stream, cost=cost, after=after)
        if stream.kind is StreamKind.COMPUTE:
            self._carry_out_now(event)
        return event

    def wait_for(self, stream: Stream, event: Event) -> None:
        """Let what modules compute from here on come after the event too."""
        super().wait_for(stream, event)
        if stream.kind is StreamKind.COMPUTE:
            self._carry_out_now(event)

    def computed(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return it: modules compute on this device."""
        return tensor

    def outlives(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Keep a tensor until the stream has done what it was given."""
        self._outlived = [(event, each) for event, each in self._outlived if self._pends(event)]
        self._outlived.append((self.record(stream), tensor))

    def synchronize(self) -> None:
        """Block the host until all has ended, also what was carried out at once."""
        super().synchronize()
        self._now_ns = max(self._now_ns, self._computed_ns)

    def stop(self) -> None:
        """Wait for all that was submitted, and keep nothing."""
        super().stop()
        self._outlived.clear()

    def cap(self, nbytes: int | None) -> None:
        """Let torch take no more than so many bytes."""
        self._before = None if nbytes is None else allocated()
        torch.ops.far.set_limit(_NO_LIMIT if nbytes is None else allocated() + nbytes)

    def taken_by_torch(self) -> int | None:
        """Return how many bytes it has taken since there is a cap; None where there is none."""
        return None if self._before is None else allocated() - self._before

    def _pends(self, event: Event) -> bool:
        assert isinstance(event, VirtualOperation)
        return event.is_pending

    def _carry_out_now(self, event: Event) -> None:
        """Carry out what the event ends, without telling the host."""
        assert isinstance(event, VirtualOperation)
        self._computed_ns = max(self._computed_ns, event.end_ns)
        self._carry_out_all([event])
