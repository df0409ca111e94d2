"""A new memory below the host becomes a tier by one class and one rate.

`FarMemory` stands for a second pool of the host, such as CXL, or for another machine's memory. The
class is what a queue opens there; the rate is that of its directory. No other code knows of it.
"""

from __future__ import annotations

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from deepnvme import File, IOFuture, IOQueue
from deepnvme.memory.buffers import Memory, memory_of
from infinity_engine.errors import CapacityError
from infinity_engine.placement.training import Means
from infinity_engine.plan import DriveRates, HostOnly, Lane, Rates, ResolvedBudget
from infinity_engine.plan.ops import LoadStates
from infinity_engine.sim.planner import Planner, decide
from infinity_engine.units import GB
from support.engine_bits import bits_of, differing
from support.nvme_training import STREAMED, emulated, opened, train, trained
from support.plannings import model_of, training_of


class FarMemory(File):
    """A file that lies in memory of its own; one thread copies to it and from it."""

    def __init__(self, file: File) -> None:
        super().__init__(file._queue, file._open())
        self.read_bytes = self.written_bytes = 0
        self._bytes = np.zeros(0, np.uint8)
        self._thread = ThreadPoolExecutor(1)

    def truncate(self, nbytes: int | str) -> None:
        self._thread.submit(self._resize, int(nbytes)).result()

    def preallocate(self, nbytes: int | str) -> None:
        if int(nbytes) > self._bytes.size:
            self.truncate(nbytes)

    def pread(self, buffer: Any, offset: int | str = 0, **_: Any) -> IOFuture[int]:
        memory = memory_of(buffer, writable=True)
        return cast("IOFuture[int]", self._thread.submit(self._read, memory, int(offset)))

    def pwrite(self, buffer: Any, offset: int | str = 0, **_: Any) -> IOFuture[int]:
        memory = memory_of(buffer, writable=False)
        return cast("IOFuture[int]", self._thread.submit(self._write, memory, int(offset)))

    def close(self) -> None:
        super().close()
        self._thread.shutdown()

    def _resize(self, nbytes: int) -> None:
        self._bytes = np.resize(self._bytes, nbytes)

    def _read(self, memory: Memory, offset: int) -> int:
        ctypes.memmove(memory.address, self._address(offset, memory.nbytes), memory.nbytes)
        self.read_bytes += memory.nbytes
        return memory.nbytes

    def _write(self, memory: Memory, offset: int) -> int:
        ctypes.memmove(self._address(offset, memory.nbytes), memory.address, memory.nbytes)
        self.written_bytes += memory.nbytes
        return memory.nbytes

    def _address(self, offset: int, nbytes: int) -> int:
        assert 0 <= offset <= offset + nbytes <= self._bytes.size, "it is within the memory"
        return int(self._bytes.ctypes.data) + offset


def keep_in_far_memory(
    home: Path, queue: IOQueue, monkeypatch: pytest.MonkeyPatch
) -> list[FarMemory]:
    """Let files that `queue` opens in `home` lie in far memory; return a list that gets them."""
    files: list[FarMemory] = []
    opens = queue.open

    def open_file(path: str, mode: Any = "r", **more: Any) -> File:
        file = opens(path, mode, **more)
        # Swap files have no name: they are opened by their descriptors.
        if Path(os.path.realpath(path)).parent != home.resolve():
            return file
        files.append(FarMemory(file))
        return files[-1]

    monkeypatch.setattr(queue, "open", open_file)
    return files


def test_an_engine_trains_with_states_and_parameters_in_far_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = replace(STREAMED, steps=2)
    in_memory = replace(case, host="256MiB", parameters="auto", strategy=HostOnly())
    expected = trained(in_memory, None, None)
    queue = IOQueue()
    files = keep_in_far_memory(tmp_path, queue, monkeypatch)

    with queue, opened(case, emulated(3), tmp_path, queue=queue) as (engine, task):
        losses = train(engine, task, case)
        bits = bits_of(engine)
        loaded = sum(op.amount for op in engine.plan.ops if isinstance(op, LoadStates))

    assert losses == expected.losses
    assert differing(expected.bits, bits) == []
    [far] = files
    assert far.read_bytes >= case.steps * loaded > 0
    assert far.written_bytes > 0


# --- plans ----------------------------------------------------------------------------------------

SMALL = model_of(*([40_000_000] * 8))  # 0.32 billion parameters: 5.1 GB with states and gradients


def with_far_memory(nbytes: float, bytes_per_s: float) -> Means:
    """Return a machine with little memory besides."""
    rates = Rates(
        h2d_bytes_per_s=25e9,
        d2h_bytes_per_s=25e9,
        host_update_params_per_s=1.5e9,
        device_update_params_per_s=30e9,
        nvme={"far": DriveRates(read_bytes_per_s=bytes_per_s, write_bytes_per_s=bytes_per_s)},
    )
    budget = ResolvedBudget(
        device=round(1.5 * GB), host=round(1.5 * GB), nvme={"far": round(nbytes)}
    )
    return Means(budget=budget, rates=rates, flops_per_s=80e12)


def test_a_plan_takes_far_memory_as_fast_as_its_rate_and_no_larger_than_its_budget() -> None:
    training = training_of(SMALL)
    best = decide(training, with_far_memory(20 * GB, 8e9)).best

    def reading_ns(bytes_per_s: float) -> int:
        there = with_far_memory(20 * GB, bytes_per_s)
        timeline = Planner(training, there).candidate(best.choice).timeline
        return timeline.update_busy_ns[Lane.NVME_READ]

    assert reading_ns(8e9) > 0
    assert reading_ns(4e9) == pytest.approx(2 * reading_ns(8e9), rel=1e-3)
    assert 0 < best.plan.demand.nvme <= 20 * GB
    with pytest.raises(CapacityError, match="drives together cannot hold"):
        decide(training, with_far_memory(1 * GB, 8e9))
