"""The threads of the update kernels: where they run, and what is refused."""

from __future__ import annotations

import os
import threading
import time

import numpy as np
import pytest

from infinity_engine.errors import ConfigError
from infinity_engine.optim import (
    AdamW,
    FloatFormat,
    HostKernels,
    UpdateThreads,
)
from support.optim import Model, threads


def test_threads_run_on_the_cores_given() -> None:
    core = min(os.sched_getaffinity(0))
    before = set(os.listdir("/proc/self/task"))

    pool = UpdateThreads([core, core])

    started = set(os.listdir("/proc/self/task")) - before
    assert len(pool) == len(started) == 2
    assert all(os.sched_getaffinity(int(task)) == {core} for task in started)


def test_threads_within_some_cores_stay_there_and_whoever_starts_them_does_not() -> None:
    core, everywhere = max(os.sched_getaffinity(0)), os.sched_getaffinity(0)
    before = set(os.listdir("/proc/self/task"))

    pool = UpdateThreads.within({core}, 3)

    started = set(os.listdir("/proc/self/task")) - before
    assert len(pool) == len(started) == 3
    assert all(os.sched_getaffinity(int(task)) == {core} for task in started)
    assert os.sched_getaffinity(0) == everywhere


@pytest.mark.parametrize("cores", [{99999}, set()])
def test_threads_within_cores_that_are_not_there_are_refused(cores: set[int]) -> None:
    everywhere = os.sched_getaffinity(0)

    with pytest.raises(ConfigError, match="cores that this process may run on"):
        UpdateThreads.within(cores, 1)
    assert os.sched_getaffinity(0) == everywhere


def test_a_core_that_is_not_there_is_refused_with_its_number() -> None:
    with pytest.raises(ConfigError, match="core 99999"):
        UpdateThreads([99999])
    with pytest.raises(ConfigError, match="at least one core"):
        UpdateThreads([])


def test_threads_that_wait_use_no_time() -> None:
    pool = threads(4)
    started = time.process_time()
    time.sleep(0.3)

    assert time.process_time() - started < 0.1
    assert len(pool) == 4


def test_other_python_threads_run_during_an_update() -> None:
    model = Model(AdamW(), np.ones(1_000_000, np.float32))
    gradient = np.ones(1_000_000, np.float32)
    kernels = HostKernels(threads(1), home="scalar")
    counted, stop = [0], threading.Event()

    def count() -> None:
        while not stop.is_set():
            counted[0] += 1

    beside = threading.Thread(target=count)
    beside.start()
    before = counted[0]
    model.step(kernels, gradient, FloatFormat.FP32)
    after = counted[0]
    stop.set()
    beside.join()

    assert after - before > 100
