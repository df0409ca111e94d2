"""Puts the first values of parameters and buffers where they stay in training.

That is the device, the host or the drives.

The plan says which goes where. Where placing fails, or what follows it, `restored_on_failure`
undoes it.
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
from infinity_engine.plan import Tier
from infinity_engine.progress import ProgressReporter
from infinity_engine.residence import ShardRecord
from infinity_engine.storage import SwapFile

__all__ = [
    "InitialValues",
    "move_buffers",
    "place_parameters",
    "release_initial_values",
    "restored_on_failure",
]

_CONVERTED = 1 << 18  # elements at once, where the file has another dtype


class InitialValues:
    """The values that parameters have before the engine takes them: in memory or with `built`."""

    def __init__(self, parameters: Sequence[ModelParameter], built: BuiltModel | None) -> None:
        self._built = built
        # One buffer for all pieces: a new one for each would leave holes in malloc's heap.
        self._converted: dict[torch.dtype, torch.Tensor] = {}
        # Views of the old values, which keep them alive until every parameter has its new place.
        self._values = {
            parameter.number: parameter.parameter.detach().reshape(-1)
            for parameter in parameters
            if not self.is_built(parameter)
        }

    def is_built(self, parameter: ModelParameter) -> bool:
        """Tell whether an `init_context` has its values, on the drives or in memory."""
        return self._built is not None and parameter.of_model in self._built

    def fill(self, parameter: ModelParameter, first_element: int, values: torch.Tensor) -> None:
        """Fill a flat tensor with a parameter's elements from `first_element` on, in its dtype."""
        if self._built is None or not self.is_built(parameter):
            values.copy_(
                self._values[parameter.number][first_element : first_element + values.numel()]
            )
        # No conversion and no device in between: read straight into the caller's memory.
        elif values.dtype == parameter.parameter.dtype and values.device.type == "cpu":
            self._built.read_into(parameter.of_model, first_element, values)
        else:
            dtype = parameter.parameter.dtype
            if dtype not in self._converted:
                self._converted[dtype] = torch.empty(_CONVERTED, dtype=dtype, device="cpu")
            room = self._converted[dtype]
            # In pieces through one buffer: the whole may not fit beside its new place.
            for start in range(0, values.numel(), _CONVERTED):
                piece = values[start : start + _CONVERTED]
                read = room[: piece.numel()]
                self._built.read_into(parameter.of_model, first_element + start, read)
                piece.copy_(read)


def release_initial_values(parameters: Iterable[ModelParameter], built: BuiltModel | None) -> None:
    """Release the built model's copy of these values: the engine has them."""
    if built is not None:
        for parameter in parameters:
            if parameter.of_model in built:
                built.release(parameter.of_model)
        # The engine goes on with these ranks, so the built model must not close them.
        built.detach_ranks()
        built.close()


@contextmanager
def restored_on_failure(model: torch.nn.Module) -> Iterator[None]:
    """Restore the data of the model's parameters and buffers where the body fails."""
    # Data only: the objects stay the model's own, and so do the optimizer's references.
    before = [(parameter, parameter.data) for parameter in (*model.parameters(), *model.buffers())]
    try:
        yield
    except BaseException:
        for tensor, data in before:
            tensor.data = data
        raise


def place_parameters(
    parameters: Sequence[ModelParameter],
    plan: Plan,
    *,
    lanes: Lanes,
    swap: SwapFile | None,
    initial: InitialValues,
    resources: ExitStack,
    reporter: ProgressReporter,
) -> tuple[dict[int, ShardRecord], list[tuple[torch.nn.Parameter, torch.Tensor]]]:
    """Put the values of parameters where they stay; return the records of those that modules fetch.

    Also returns what the other parameters are to show, to be set once their old values are not
    needed any more.
    """
    records = {}
    shown = []
    # In one memory, the device's place is the host's.
    on_host = plan.steps.parameters is not Tier.DEVICE and not lanes.accelerator.unified
    with reporter.part(
        "placing parameters", sum(parameter.nbytes for parameter in parameters)
    ) as placed:
        for parameter in parameters:
            # By the plan: small parameters stay in memory although others rest on drives.
            if parameter.number in plan.resting.values:
                assert swap is not None, "what rests on drives has a place there"
                records[parameter.number] = _place_on_drives(
                    parameter, lanes, swap, initial, placed=placed
                )
                continue
            if not parameter.numel:
                shown.append((parameter.parameter, _without_elements(parameter, lanes, resources)))
            elif on_host:
                records[parameter.number] = _place_on_host(parameter, lanes, initial, resources)
            else:
                # Shown later: until all have moved, a failure leaves the model as it was.
                shown.append(
                    (parameter.parameter, _on_device(parameter, lanes, initial, resources))
                )
            placed(parameter.nbytes)
    return records, shown


def _on_device(
    parameter: ModelParameter,
    lanes: Lanes,
    initial: InitialValues,
    resources: ExitStack,
) -> torch.Tensor:
    """Return the tensor on the device that modules compute with from here on."""
    if lanes.accelerator.unified and parameter.keeps_memory and not initial.is_built(parameter):
        values = parameter.parameter.detach()
        kept = lanes.device.adopt(values.view(-1).view(torch.uint8), holder="parameters")
        resources.callback(kept.close)
        return values
    # Views keep it: after close() the user's views still show the trained values.
    lease = lanes.device.lease(parameter.nbytes, holder="parameters", views=Views.KEEP)
    # At the end the values go to ordinary memory, then the lease closes.
    resources.callback(_leave, parameter.parameter, lease)
    values = lease.tensor(parameter.dtype)
    initial.fill(parameter, 0, values)
    return values.view(parameter.parameter.shape)


def _without_elements(
    parameter: ModelParameter, lanes: Lanes, resources: ExitStack
) -> torch.Tensor:
    """Return a tensor where modules compute: torch wants that of empty ones too."""
    resources.callback(_move, parameter.parameter, torch.device("cpu"))
    return parameter.parameter.detach().to(lanes.accelerator.torch_device, parameter.dtype)


def _place_on_host(
    parameter: ModelParameter, lanes: Lanes, initial: InitialValues, resources: ExitStack
) -> ShardRecord:
    """Put a parameter's values on the host, in a shard of their own."""
    lease = lanes.host.lease(parameter.nbytes, holder="parameters")
    resources.callback(lease.close)
    values = lease.tensor(parameter.dtype)
    initial.fill(parameter, 0, values)
    parameter.live_at(values)
    return ShardRecord(parameter.name, lease)


def _place_on_drives(
    parameter: ModelParameter,
    lanes: Lanes,
    swap: SwapFile,
    initial: InitialValues,
    *,
    placed: Callable[[int], None],
) -> ShardRecord:
    """Write a parameter's values to the drives piece by piece; `placed` gets the bytes of each."""
    dtype = parameter.dtype
    # Checksums are of blocks as subgroups cut them, so that each reads whole blocks.
    block = (
        NORM_BLOCK * dtype.itemsize if isinstance(parameter, TrainedParameter) else CHECKSUM_BYTES
    )
    place = swap.allocate(parameter.nbytes, holder=parameter.name, block_bytes=block)
    with lanes.host.lease_planned(SCRATCH) as scratch:
        most = scratch.nbytes // dtype.itemsize
        for first in range(0, parameter.numel, most):
            numel = min(most, parameter.numel - first)
            nbytes = numel * dtype.itemsize
            initial.fill(parameter, first, scratch.tensor(dtype)[:numel])
            # Waited for each piece: they share one buffer.
            swap.write(
                place.part(first * dtype.itemsize, nbytes),
                scratch.memory()[:nbytes],
                what=parameter.name,
            ).wait()
            placed(nbytes)
    # From here on the parameter has no memory of its own.
    parameter.rest_on_drives()
    return ShardRecord(parameter.name, place)


def move_buffers(model: torch.nn.Module, where: torch.device, resources: ExitStack) -> None:
    """Move buffers, in their own dtype, to where modules compute, until the engine is closed."""
    for buffer in model.buffers():
        if buffer.device != where:
            # Registered first: an interrupt in the move still moves it back.
            resources.callback(_move, buffer, buffer.device)
            _move(buffer, where)


def _leave(parameter: torch.nn.Parameter, lease: Lease) -> None:
    """Give a parameter ordinary host memory again, and close the lease."""
    # `copy=True`: on a device that is host memory, to("cpu") would return the lease's own memory.
    parameter.data = parameter.data.to("cpu", copy=True)
    lease.close()


def _move(tensor: torch.Tensor, where: torch.device) -> None:
    tensor.data = tensor.data.to(where)
