"""What ranks do in tests: each function runs on every rank and returns what the test looks at."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch_adder import TorchAdder

from infinity_engine.accel import StreamKind, open_accelerator
from infinity_engine.errors import CollectiveError
from infinity_engine.optim import GradientSums, HostKernels, UpdateThreads, Values
from infinity_engine.partition import (
    CollectiveEvent,
    Collectives,
    GroupMember,
    Partitioner,
    ReplicaSums,
    ShardGroup,
    ShardSpec,
    share_block_sums,
)

BLOCK = 4096
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Empty, of one element, of less than a block for each rank, of whole blocks for each, and with a
# short last block.
NUMELS = (1, 0, 12 * BLOCK, BLOCK, 5, 24 * BLOCK + 17, 2 * BLOCK + 1, 3 * BLOCK)

DEVICE_NUMEL = 2 * BLOCK + 5


def values(numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return values of every magnitude that a dtype has, zeros of both signs among them, the same
    for the same seed.
    """
    random = np.random.default_rng([seed, numel])
    exponents = random.integers(-30, 12, numel)
    drawn = np.ldexp(random.standard_normal(numel), exponents)
    drawn[random.random(numel) < 0.02] = -0.0
    return torch.from_numpy(drawn).to(dtype)


def gradients(numel: int, dtype: torch.dtype, size: int) -> list[torch.Tensor]:
    """Return what each rank has."""
    return [values(numel, dtype, 1000 + rank) for rank in range(size)]


def serial_sum(gradients_: Sequence[torch.Tensor]) -> torch.Tensor:
    """Add up in fp32 in the ranks' order."""
    total = gradients_[0].float()
    for gradient in gradients_[1:]:
        total = total + gradient.float()
    return total


def cut(numels: Sequence[int], size: int) -> list[ShardSpec]:
    """Return how parameters of these sizes are cut."""
    partitioner = Partitioner(size)
    return [partitioner.cut(numel) for numel in numels]


def everything() -> dict[str, Any]:
    """Do all that works, one after another in one group; return what came of it by name."""
    with Collectives.join(timeout_s=600) as ranks:
        ranks.agree("the model", "gpt")
        return {
            "who": (ranks.rank, ranks.size),
            "gathers": gathers(ranks),
            "reduces": reduces(ranks),
            "without": one_without_a_gradient(ranks),
            "norm": norm_bits(ranks),
            "several": several_at_once(ranks),
            "shared": ranks.share("names", f"rank {ranks.rank}".encode() * ranks.rank),
            "shared nothing": ranks.share("nothing", b""),
            "of the user": among_the_users_own(ranks),
            "on a device": on_a_device(),
        }


def wires(needed: int, size: int) -> list[torch.Tensor | None]:
    """Return buffers that let it go in one round, in some, and in many."""
    if not needed:
        return [None]
    sizes = (needed, needed // 3 + 1, max(needed // 12 + 1, 2 * size * 64))
    return [torch.empty(nbytes, dtype=torch.uint8) for nbytes in sizes]


def gathers(ranks: Collectives) -> dict[str, list[torch.Tensor]]:
    """Gather all parameters, of all dtypes, in one group and each in its own."""
    dtypes = [dtype for dtype in DTYPES for _ in NUMELS]
    members = [
        GroupMember(f"p{number}", spec, dtype)
        for number, (spec, dtype) in enumerate(
            zip(cut(NUMELS * len(DTYPES), ranks.size), dtypes, strict=True)
        )
    ]
    alone = [gather(ranks, [member], number) for number, member in enumerate(members)]
    return {
        "together": gather(ranks, members, 0),
        "alone": [whole for [whole] in alone],
    }


def gather(ranks: Collectives, members: list[GroupMember], seed: int) -> list[torch.Tensor]:
    """Gather with every size of buffer; return the whole parameters if they are always the same."""
    group = ShardGroup("all" if len(members) > 1 else members[0].name, members, ranks)
    shards = []
    for number, member in enumerate(members):
        shard = group.shard(number)
        whole = values(member.spec.numel, member.dtype, seed + number)
        shards.append(whole[shard.first_element : shard.end].clone())
    found: list[list[torch.Tensor]] = []
    for wire in wires(group.gather_bytes(), ranks.size)[: 3 if len(members) > 1 else 1]:
        into = [
            torch.full((member.spec.numel,), torch.nan, dtype=member.dtype) for member in members
        ]
        group.gather(shards, into, wire=wire).wait()
        found.append(into)
    for other in found[1:]:
        for one, another in zip(found[0], other, strict=True):
            assert bits(one) == bits(another), "rounds change nothing"
    return found[0]


def reduces(ranks: Collectives) -> dict[str, list[torch.Tensor]]:
    """Reduce gradients of every dtype with every size of buffer; return this rank's sums."""
    sums = {}
    for dtype in DTYPES:
        specs = cut(NUMELS, ranks.size)
        members = [GroupMember(f"p{number}", spec, dtype) for number, spec in enumerate(specs)]
        mine = [gradients(numel, dtype, ranks.size)[ranks.rank] for numel in NUMELS]
        group = ShardGroup(f"{dtype}", members, ranks)
        for number, wire in enumerate(wires(group.reduce_bytes(), ranks.size)):
            sums[f"{dtype} wire {number}"] = reduce(group, mine, wire)
        apart = [ShardGroup(member.name, [member], ranks) for member in members]
        sums[f"{dtype} alone"] = [
            reduce(one, [gradient], wires(one.reduce_bytes(), ranks.size)[0])[0]
            for one, gradient in zip(apart, mine, strict=True)
        ]
    return sums


def reduce(
    group: ShardGroup, mine: Sequence[torch.Tensor | None], wire: torch.Tensor | None
) -> list[torch.Tensor]:
    """Return this rank's sums."""
    device = "cpu" if wire is None else wire.device
    into = [
        torch.full((group.shard(number).numel,), torch.nan, device=device)
        for number in range(len(mine))
    ]
    if wire is not None and wire.is_cuda:
        torch.cuda.synchronize()  # the collectives' stream is not the one that has filled these
    group.reduce(mine, into, adder=TorchAdder(), wire=wire).wait()
    return into


def one_without_a_gradient(ranks: Collectives) -> list[torch.Tensor]:
    """Reduce what the last rank has no gradient of: coalesced, and alone where it would lie as it
    is.
    """
    numel = 4 * BLOCK * ranks.size
    [spec] = cut([numel], ranks.size)
    members = [GroupMember(name, spec, torch.bfloat16) for name in "ab"]
    gradient = (
        None
        if ranks.rank == ranks.size - 1
        else gradients(numel, torch.bfloat16, ranks.size)[ranks.rank]
    )
    groups = [ShardGroup("both", members, ranks), ShardGroup("one", members[:1], ranks)]
    sums = []
    for group in groups:
        mine = [gradient] * len(group.members)
        sums += reduce(group, mine, torch.empty(group.reduce_bytes(), dtype=torch.uint8))
    return sums


def norm_bits(ranks: Collectives) -> float:
    """Return the sum of squares of gradients of which each rank knows its shards."""
    kernels = HostKernels(UpdateThreads.anywhere(1))
    specs = cut(NUMELS, ranks.size)
    mine = []
    for spec in specs:
        shard = spec.shards[ranks.rank]
        gradient = values(spec.numel, torch.float32, 7)[shard.first_element : shard.end]
        mine.append(kernels.block_sums(Values.of(gradient)) if shard.numel else np.zeros(0))
    sums = GradientSums(NUMELS)
    for number, blocks in enumerate(share_block_sums(ranks, specs, mine)):
        sums.put(number, 0, blocks)
    return sums.total().sum_of_squares


def several_at_once(ranks: Collectives) -> list[torch.Tensor]:
    """Start gathers without waiting, then wait in another order on each rank."""
    numel = 3 * BLOCK * ranks.size + 5
    [spec] = cut([numel], ranks.size)
    under_way: list[CollectiveEvent] = []
    results = []
    for number in range(6):
        group = ShardGroup(f"layer {number}", [GroupMember("w", spec, torch.float32)], ranks)
        shard = group.shard(0)
        into = torch.empty(numel)
        results.append(into)
        mine = values(numel, torch.float32, number)[shard.first_element : shard.end].clone()
        wire = torch.empty(group.gather_bytes() // (1 + number % 3), dtype=torch.uint8)
        under_way.append(group.gather([mine], [into], wire=wire))
    order = under_way[ranks.rank :] + under_way[: ranks.rank]
    for event in order:
        event.wait()
    assert all(event.done() for event in under_way), "they have ended"
    return results


def among_the_users_own(ranks: Collectives) -> float:
    """Let a collective of the user's own run while one of ours is under way."""
    [spec] = cut([BLOCK * ranks.size], ranks.size)
    group = ShardGroup("w", [GroupMember("w", spec, torch.float32)], ranks)
    into = torch.empty(spec.numel)
    total = torch.tensor([float(ranks.rank)])
    event = group.gather([torch.full((group.shard(0).numel,), 1.0)], [into])
    dist.all_reduce(total)
    event.wait()
    return float(total) + float(into.sum())


def on_a_device(name: str = "cpu") -> list[torch.Tensor]:
    """Gather and reduce in an accelerator's stream; on GPUs each rank in that of its own one."""
    if name == "cuda":
        torch.cuda.set_device(int(os.environ["RANK"]))
    with open_accelerator(name) as accelerator:
        lane = (accelerator, accelerator.stream(StreamKind.COLLECTIVE))
        device = accelerator.torch_device
        with Collectives.join(timeout_s=600, name="device", lane=lane) as ranks:
            [spec] = cut([DEVICE_NUMEL], ranks.size)
            group = ShardGroup("w", [GroupMember("w", spec, torch.float32)], ranks)
            shard, into = group.shard(0), torch.empty(spec.numel, device=device)
            mine = values(spec.numel, torch.float32, 3)[shard.first_element : shard.end].to(
                device, copy=True
            )
            wire = torch.empty(group.gather_bytes() // 2, dtype=torch.uint8, device=device)
            group.gather([mine], [into], wire=wire).wait()
            gradient = gradients(spec.numel, torch.float32, ranks.size)[ranks.rank].to(device)
            wire = torch.empty(group.reduce_bytes(), dtype=torch.uint8, device=device)
            sums = reduce(group, [gradient], wire)
            accelerator.synchronize()
            return [each.cpu() for each in (into, *sums)]


def check_on_a_device(found: Sequence[Sequence[torch.Tensor]]) -> None:
    """Hold what every rank got on its device to the bits of a loop over the ranks."""
    [spec] = cut([DEVICE_NUMEL], len(found))
    total = serial_sum(gradients(DEVICE_NUMEL, torch.float32, len(found)))
    for shard, (whole, mine) in zip(spec.shards, found, strict=True):
        assert bits(whole) == bits(values(DEVICE_NUMEL, torch.float32, 3))
        assert bits(mine) == bits(total[shard.first_element : shard.end])


def bits(tensor: torch.Tensor) -> bytes:
    """Return a tensor's bytes."""
    return (
        tensor.numpy(force=True).tobytes()
        if tensor.dtype != torch.bfloat16
        else bits(tensor.view(torch.int16))
    )


def again_and_again() -> list[tuple[bytes, ...]]:
    """Join and leave several times, with a second sequence of collectives; return what was said
    each time.
    """
    found = []
    for turn in range(4):
        with Collectives.join(timeout_s=600) as ranks, ranks.beside() as others:
            first = ranks.share("turn", f"{turn} of {ranks.rank}".encode())
            found += [first, others.share("turn beside", f"{turn} beside {ranks.rank}".encode())]
    return found


def met_by_all(folder: str) -> list[bool]:
    """Join, twice; return whether the last rank, which is late, had made its groups by then."""
    rank = int(os.environ["RANK"])
    made, make = Path(folder), dist.new_group
    calls = 0

    def late(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        group = make(*arguments)
        if rank == int(os.environ["WORLD_SIZE"]) - 1:
            time.sleep(0.2)
            (made / str(calls)).touch()
        return group

    with patch.object(dist, "new_group", late), Collectives.join(timeout_s=20) as ranks:
        joined = (made / str(calls)).exists()
        with ranks.beside():
            return [joined, (made / str(calls)).exists()]


def two_at_once() -> tuple[tuple[bytes, ...], bool]:
    """Leave a group while another, which has found the processes that the first has brought
    together, goes on.
    """
    me = f"{os.environ['RANK']}".encode()
    first = Collectives.join(timeout_s=600)
    with Collectives.join(timeout_s=600, name="others") as second:
        first.close()
        return second.share("who", me), dist.is_initialized()


def crossing() -> list[bytes]:
    """Start collectives of two sequences in other orders on each rank; return what came of both."""
    with Collectives.join(timeout_s=600) as ranks, ranks.beside() as others:
        numel = BLOCK * ranks.size
        [spec] = cut([numel], ranks.size)
        into = [torch.empty(numel), torch.empty(numel)]
        groups = [
            ShardGroup("w", [GroupMember("w", spec, torch.float32)], each)
            for each in (ranks, others)
        ]
        events = {}
        for number in (0, 1) if ranks.rank % 2 else (1, 0):
            mine = values(numel, torch.float32, number)[groups[number].shard(0).first_element :][
                :BLOCK
            ].clone()
            events[number] = groups[number].gather([mine], [into[number]])
            events[number].done()
        for number in (1, 0) if ranks.rank % 2 else (0, 1):
            events[number].wait()
        return [bits(each) for each in into]


def fails_beside() -> tuple[CollectiveError, CollectiveError]:
    """Disagree in the second sequence; return what each of both raises after that."""
    found = []
    with Collectives.join(timeout_s=600) as ranks, ranks.beside() as others:
        for sequence in (others, ranks):
            try:
                sequence.agree("who", ranks.rank)
            except CollectiveError as error:
                found.append(error)
    return found[0], found[1]


def mesh(shard_ranks: int) -> tuple[tuple[int, int], tuple[int, int], list[bytes], list[bytes]]:
    """Share one's number along both dimensions of a mesh."""
    with Collectives.join(timeout_s=600) as ranks:
        me = str(ranks.rank).encode()
        shards, replicas = ranks.split(shard_ranks)
        with shards, replicas:
            said = list(shards.share("who", me)), list(replicas.share("who", me))
            return (shards.rank, shards.size), (replicas.rank, replicas.size), *said


def sums_of_replicas() -> dict[str, Any]:
    """Sum over all ranks as replicas do, in different rounds; return whether that is what a loop
    over them gets.
    """
    numels = [0, 5, BLOCK, 1, 3 * BLOCK + 7]
    adder = TorchAdder()
    equal = []
    with Collectives.join(timeout_s=600) as ranks:
        of_each = [
            [values(numel, torch.float32, 10 * rank + numel) for numel in numels]
            for rank in range(ranks.size)
        ]
        wanted = [each.clone() for each in of_each[0]]
        for other in of_each[1:]:
            wanted = [total + each for total, each in zip(wanted, other, strict=True)]
        sums = ReplicaSums(ranks)
        enough = sums.wire_bytes(sum(numels))
        for nbytes in (enough, 2 * ranks.size * 64, 2 * ranks.size * 64 * 7 + 13, 2 * enough):
            mine = [each.clone() for each in of_each[ranks.rank]]
            wire = torch.empty(nbytes, dtype=torch.uint8)
            sums.start("some", mine, announces=1, adder=adder, wire=wire).wait()
            equal.append([bits(each) for each in mine] == [bits(each) for each in wanted])
        mine = [each.clone() for each in of_each[ranks.rank]]  # of which the first rank has none
        sums.start(
            "some",
            mine,
            announces=int(ranks.rank > 0),
            adder=adder,
            wire=torch.empty(enough, dtype=torch.uint8),
        ).wait()
        rest = [torch.zeros_like(each) for each in mine]
        for other in of_each[1:]:
            rest = [total + each for total, each in zip(rest, other, strict=True)]
        equal.append(all(torch.equal(each, total) for each, total in zip(mine, rest, strict=True)))
        mine = [each.clone() for each in of_each[ranks.rank]]
        event = sums.start(
            "some", mine, announces=0, adder=adder, wire=torch.empty(enough, dtype=torch.uint8)
        )
        event.wait()
        kept = all(
            torch.equal(each, one) for each, one in zip(mine, of_each[ranks.rank], strict=True)
        )
        return {"equal": equal, "ways": 5, "nobody has anything": kept and not any(event.announced)}


# --- what goes wrong ------------------------------------------------------------------------------


def disagreements() -> dict[str, CollectiveError]:
    """Do different things on different ranks, each time in a new group; return what each raised."""
    dist.init_process_group("gloo")
    found = {}
    try:
        for wrong in (
            other_order,
            other_size,
            other_buffer,
            other_value,
            one_after_another,
            one_more,
        ):
            with Collectives.join(timeout_s=600, name=wrong.__name__) as ranks:
                try:
                    wrong(ranks)
                except CollectiveError as error:
                    found[wrong.__name__] = error
    finally:
        dist.destroy_process_group()
    return found


def layer(
    ranks: Collectives, name: str, numel: int = 8 * BLOCK + 1
) -> tuple[ShardGroup, list[torch.Tensor], Any]:
    """Return a group, this rank's shard, and a buffer."""
    [spec] = cut([numel], ranks.size)
    group = ShardGroup(name, [GroupMember(name, spec, torch.float32)], ranks)
    return (
        group,
        [torch.ones(group.shard(0).numel)],
        torch.empty(group.gather_bytes(), dtype=torch.uint8),
    )


def gather_layers(
    ranks: Collectives, names: str, numel: int = 8 * BLOCK + 1, wire_share: int = 1
) -> None:
    """Gather layers one after another."""
    for name in names:
        group, mine, wire = layer(ranks, f"layer {name}", numel)
        group.gather(mine, [torch.empty(numel)], wire=wire[: len(wire) // wire_share]).wait()


def other_order(ranks: Collectives) -> None:
    """Rank 1 takes the branch that the others do not take."""
    gather_layers(ranks, "abdc" if ranks.rank == 1 else "abcd")


def other_size(ranks: Collectives) -> None:
    """The last rank has a parameter of another size."""
    gather_layers(ranks, "a", 8 * BLOCK + (2 if ranks.rank == ranks.size - 1 else 1))


def other_buffer(ranks: Collectives) -> None:
    """Rank 0 would need more rounds."""
    gather_layers(ranks, "a", wire_share=2 if ranks.rank == 0 else 1)


def other_value(ranks: Collectives) -> None:
    """The ranks have other models."""
    ranks.agree("the model", f"{10 + (ranks.rank == 2)} layers")


def one_after_another(ranks: Collectives) -> None:
    """Go on after ranks have disagreed."""
    with suppress(CollectiveError):
        ranks.agree("who", ranks.rank)
    ranks.agree("what comes then")


def one_more(ranks: Collectives) -> None:
    """Rank 0 has ended while the others still gather."""
    gather_layers(ranks, "a" if ranks.rank == 0 else "ab")


def dies(rank: int, timeout_s: float) -> CollectiveError | None:
    """Gather layers until a rank is killed; return what the others were told."""
    return _until(
        timeout_s,
        lambda ranks: os.kill(os.getpid(), signal.SIGKILL) if ranks.rank == rank else None,
    )


def works_until(rank: int, killed_after_s: float) -> CollectiveError | None:
    """Gather and reduce until a rank is killed in the middle of it; return what the others were
    told.
    """
    with Collectives.join(timeout_s=600) as ranks:
        numel = 64 * BLOCK * ranks.size + 1
        group, mine, wire = layer(ranks, "w", numel)
        into, sums = torch.empty(numel), torch.empty(group.shard(0).numel)
        buffer = torch.empty(group.reduce_bytes() // 3, dtype=torch.uint8)
        ranks.agree("beginning")
        if ranks.rank == rank:
            threading.Timer(killed_after_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
        try:
            while True:
                group.gather(mine, [into], wire=wire).wait()
                group.reduce([into], [sums], adder=TorchAdder(), wire=buffer).wait()
        except CollectiveError as error:
            return error


def raises(rank: int, timeout_s: float) -> CollectiveError | None:
    """Gather layers until the program of a rank raises; return what the others were told."""
    return _until(timeout_s, lambda ranks: 1 / 0 if ranks.rank == rank else None)


def is_stuck(rank: int, timeout_s: float) -> CollectiveError | None:
    """Gather layers until a rank does something else for long; return what the others were told."""
    return _until(
        timeout_s, lambda ranks: time.sleep(4 * timeout_s) if ranks.rank == rank else None
    )


def _until(timeout_s: float, happens: Any) -> CollectiveError | None:
    try:
        with Collectives.join(timeout_s=timeout_s) as ranks:
            gather_layers(ranks, "ab")
            happens(ranks)
            gather_layers(ranks, "cd")
    except CollectiveError as error:
        return error
    except ZeroDivisionError:
        return None
    return None


def run_program(text: str) -> str:
    """Run a script; return what it printed."""
    with redirect_stdout(StringIO()) as printed:
        exec(compile(text, "program.py", "exec"), {"__name__": "__main__"})
    return printed.getvalue()
