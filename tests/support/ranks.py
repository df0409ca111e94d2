"""Ranks for tests: processes that torch.distributed can bring together, and what became of each.

They are forked from a server that has imported everything once, so that a launch costs
milliseconds. As with torchrun, the store at which they meet belongs to the launcher and survives
each of them.
"""

from __future__ import annotations

import gc
import multiprocessing as mp
import os
import pickle
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["Rank", "launch", "launched"]

_TICK_S = 0.5
# torch imports its compiler, and with it hundreds of modules, when the first optimizer is made.
PRELOADED = ["pytest", "torch", "torch._dynamo", "infinity_engine.engine.assemble"]


@dataclass(frozen=True)
class Rank:
    """How one rank ended: with what its program returned or raised, or killed."""

    value: Any = None
    error: BaseException | None = None
    trace: str = ""
    exitcode: int | None = None


def launch(
    size: int, program: Callable[..., Any], *arguments: Any, timeout_s: float = 60.0
) -> list[Rank]:
    """Run `program(*arguments)` on so many ranks; kill those that are not done in time."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)  # type: ignore[attr-defined]
    processes, ends = [], []
    for rank in range(size):
        here, there = context.Pipe(duplex=False)
        process = context.Process(
            target=_run, args=(there, rank, size, store.port, program, arguments), daemon=True
        )
        process.start()
        there.close()
        processes.append(process)
        ends.append(here)
    ranks = _collect(ends, timeout_s)
    for process in processes:
        process.join(timeout_s)
        if process.is_alive():
            process.kill()
            process.join()
    del store
    return [
        Rank(rank.value, rank.error, rank.trace, process.exitcode)
        for rank, process in zip(ranks, processes, strict=True)
    ]


def launched(
    size: int, program: Callable[..., Any], *arguments: Any, timeout_s: float = 200.0
) -> list[Any]:
    """Return what `program(*arguments)` returns on so many ranks, none of which fails."""
    ranks = launch(size, program, *arguments, timeout_s=timeout_s)
    for rank in ranks:
        assert rank.error is None, rank.trace
        assert rank.exitcode == 0
    return [rank.value for rank in ranks]


def _collect(ends: Sequence[Connection], timeout_s: float) -> list[Rank]:
    ranks = {number: Rank() for number in range(len(ends))}
    open_ends = dict(zip(ends, ranks, strict=True))
    ticks = 0  # and no clock, which goes on while a whole machine is held
    while open_ends and ticks < timeout_s / _TICK_S:
        ready = wait(list(open_ends), _TICK_S)
        ticks += not ready
        for end in ready:
            assert isinstance(end, Connection)
            number = open_ends.pop(end)
            try:
                value, error, trace = pickle.loads(end.recv_bytes())
                ranks[number] = Rank(value, error, trace)
            except EOFError:  # it was killed
                ranks[number] = Rank()
    return list(ranks.values())


def _run(
    end: Connection,
    rank: int,
    size: int,
    port: int,
    program: Callable[..., Any],
    arguments: Sequence[Any],
) -> None:
    # The engine collects garbage often, and has not to go through all that was imported for it.
    gc.freeze()
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_RANK=str(rank),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    try:
        found: tuple[Any, BaseException | None, str] = program(*arguments), None, ""
    except BaseException as error:
        found = None, error, traceback.format_exc()
    # send() would share tensors with a process that is about to end
    end.send_bytes(pickle.dumps(found))
