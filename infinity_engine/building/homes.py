"""Brings the values of parameters and buffers to where they stay while an engine trains: device,
host or drives.

What is brought, and where to, the plan says. Where that fails, or what follows, `model_kept` takes
it all back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch

from deepnvme.memory.checksum import CHECKSUM_BYTES
from infinity_engine.building.built import BuiltModel
from infinity_engine.lanes.lanes import Lanes
from infinity_engine.memory import Lease, Views
from infinity_engine.optim import NORM_BLOCK
from infinity_engine.parameters.parameters import ModelParameter, TrainedParameter
from infinity_engine.placement.buffers import SCRATCH
from infinity_engine.placement.placing import Plan
from infinity_engine.placement.sizing import Sizing
from infinity_engine.plan import Tier
from infinity_engine.progress import Teller
from infinity_engine.residence import ShardRecord
from infinity_engine.storage import SwapFile

__all__ = ["Originals", "bring_home", "model_kept", "move_buffers", "release_originals"]

_CONVERTED = 1 << 18  # elements at once, where what is read has another dtype than what is written


class Originals:
    """The values that parameters have before the engine takes them: in memory, or where `built` has
    them.
    """

    def __init__(self, parameters: Sequence[ModelParameter], built: BuiltModel | None) -> None:
        self._built = built
        # one for all: many would leave holes in malloc's heap
        self._converted: dict[torch.dtype, torch.Tensor] = {}
        self._values = {
            each.number: each.parameter.detach().reshape(-1)
            for each in parameters
            if not self.on_drives(each)
        }

    def on_drives(self, each: ModelParameter) -> bool:
        """Tell whether a parameter has no values in memory."""
        return self._built is not None and each.of_model in self._built

    def fill(self, each: ModelParameter, first_element: int, values: torch.Tensor) -> None:
        """Fill a flat tensor with the elements of a parameter from one on, in its own dtype."""
        if self._built is None or not self.on_drives(each):
            values.copy_(self._values[each.number][first_element : first_element + values.numel()])
        elif values.dtype == each.parameter.dtype and values.device.type == "cpu":
            self._built.read_into(each.of_model, first_element, values)
        else:
            dtype = each.parameter.dtype
            room = self._room_for(dtype)
            for start in range(0, values.numel(), _CONVERTED):
                piece = values[start : start + _CONVERTED]
                read = room[: piece.numel()]
                self._built.read_into(each.of_model, first_element + start, read)
                piece.copy_(read)

    def _room_for(self, dtype: torch.dtype) -> torch.Tensor:
        if dtype not in self._converted:
            self._converted[dtype] = torch.empty(_CONVERTED, dtype=dtype, device="cpu")
        return self._converted[dtype]


def release_originals(parameters: Iterable[ModelParameter], built: BuiltModel | None) -> None:
    """Let what has built the model have none of their values any more: the engine has."""
    if built is not None:
        for each in parameters:
            if each.of_model in built:
                built.release(each.of_model)
        built.hand_over_ranks()
        built.close()


@contextmanager
def model_kept(model: torch.nn.Module) -> Iterator[None]:
    """Take back what the body gave the model's parameters and buffers to compute with where it
    fails.
    """
    before = [(each, each.data) for each in (*model.parameters(), *model.buffers())]
    try:
        yield
    except BaseException:
        for tensor, data in before:
            tensor.data = data
        raise


def bring_home(
    parameters: Sequence[ModelParameter],
    sizing: Sizing,
    plan: Plan,
    *,
    lanes: Lanes,
    swap: SwapFile | None,
    originals: Originals,
    resources: ExitStack,
    teller: Teller,
) -> tuple[dict[int, ShardRecord], list[tuple[torch.nn.Parameter, torch.Tensor]]]:
    """Bring the values of parameters to where they stay; return the records of those that modules
    fetch.

    And what the others are to show, once nobody needs what they were.
    """
    records = {}
    shown = []
    on_host = plan.steps.parameters is not Tier.DEVICE and not lanes.accelerator.unified
    with teller.part("placing parameters", sum(each.nbytes for each in parameters)) as placed:
        for each in parameters:
            if each.number in plan.resting.values:
                assert swap is not None, "what rests on drives has a place there"
                records[each.number] = _go_to_drives(each, lanes, swap, originals, placed=placed)
                continue
            if on_host and each.numel:
                records[each.number] = _go_home(each, lanes, originals, resources)
            elif not on_host:
                shown.append(
                    (each.parameter, _on_device(each, sizing, lanes, originals, resources))
                )
            placed(each.nbytes)
    return records, shown


def _on_device(
    each: ModelParameter, sizing: Sizing, lanes: Lanes, originals: Originals, resources: ExitStack
) -> torch.Tensor:
    """Return the tensor that modules compute with from here on, on the device."""
    if sizing.own or not each.numel:
        return each.parameter.detach().to(each.dtype).contiguous()
    lease = lanes.device.lease(each.nbytes, holder="parameters", views=Views.KEEP)
    resources.callback(_leave, each.parameter, lease)
    values = lease.tensor(each.dtype)
    originals.fill(each, 0, values)
    return values.view(each.parameter.shape)


def _go_home(
    each: ModelParameter, lanes: Lanes, originals: Originals, resources: ExitStack
) -> ShardRecord:
    """Let values live on the host, in a shard of their own."""
    lease = lanes.host.lease(each.nbytes, holder="parameters")
    resources.callback(lease.close)
    values = lease.tensor(each.dtype)
    originals.fill(each, 0, values)
    each.live_at(values)
    return ShardRecord(each.name, lease)


def _go_to_drives(
    each: ModelParameter,
    lanes: Lanes,
    swap: SwapFile,
    originals: Originals,
    *,
    placed: Callable[[int], None],
) -> ShardRecord:
    """Let values rest on the drives, in a place of their own; they go there in pieces, which
    `placed` is told of.
    """
    dtype = each.dtype
    # as subgroups cut it
    block = NORM_BLOCK * dtype.itemsize if isinstance(each, TrainedParameter) else CHECKSUM_BYTES
    place = swap.allocate(each.nbytes, holder=each.name, block_bytes=block)
    with lanes.host.lease_planned(SCRATCH) as scratch:
        most = scratch.nbytes // dtype.itemsize
        for first in range(0, each.numel, most):
            numel = min(most, each.numel - first)
            nbytes = numel * dtype.itemsize
            originals.fill(each, first, scratch.tensor(dtype)[:numel])
            swap.write(
                place.part(first * dtype.itemsize, nbytes),
                scratch.memory()[:nbytes],
                what=each.name,
            ).wait()
            placed(nbytes)
    each.rest_on_drives()
    return ShardRecord(each.name, place)


def move_buffers(model: torch.nn.Module, where: torch.device, resources: ExitStack) -> None:
    """Have buffers where modules compute, until the engine is closed, in the dtype that they
    have.
    """
    for buffer in model.buffers():
        if buffer.device != where:
            resources.callback(_move, buffer, buffer.device)
            _move(buffer, where)


def _leave(parameter: torch.nn.Parameter, lease: Lease) -> None:
    """Let a parameter have ordinary memory of the host's again, and give the lease back."""
    parameter.data = parameter.data.to("cpu", copy=True)
    lease.close()


def _move(tensor: torch.Tensor, where: torch.device) -> None:
    tensor.data = tensor.data.to(where)
