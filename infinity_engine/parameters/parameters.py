"""The parameters of a model: those that the engine trains and those that are frozen, and what
modules compute with.

Sees when somebody else changed one. Takes no gradients, moves and updates nothing.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import torch

from infinity_engine.config import Precision
from infinity_engine.errors import ConfigError
from infinity_engine.optim import Formats
from infinity_engine.parameters.hooks import Hooks
from infinity_engine.parameters.precision import dtypes_of, formats_of

__all__ = [
    "ModelParameter",
    "TrainedParameter",
    "absent",
    "check_memory_of_their_own",
    "collect_frozen",
    "collect_parameters",
]


@dataclass(eq=False)
class ModelParameter:
    """One parameter of the model; `number` is its place among those that the engine knows.

    Modules compute with it in `dtype`, which may be another one than it has when it is given to the
    engine.

    Or this rank's shard of one, flat: a part of the model's parameter `part_of`, with the same
    number and name.
    """

    number: int
    name: str
    parameter: torch.nn.Parameter
    dtype: torch.dtype
    part_of: torch.nn.Parameter | None = field(default=None, repr=False, kw_only=True)
    _seen: tuple[int, int] = field(default=(0, 0), repr=False, kw_only=True)
    _at_home: torch.Tensor | None = field(default=None, repr=False, kw_only=True)
    _on_drives: bool = field(default=False, repr=False, kw_only=True)

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return self.parameter.numel()

    @property
    def nbytes(self) -> int:
        """The bytes that modules compute with."""
        return self.numel * self.dtype.itemsize

    @property
    def of_model(self) -> torch.nn.Parameter:
        """The model's parameter that it is, or is a shard of."""
        return self.parameter if self.part_of is None else self.part_of

    @property
    def values(self) -> torch.Tensor:
        """The elements that modules compute with, flat, where updates leave them in memory."""
        return self.home.detach().view(-1)

    @property
    def home(self) -> torch.Tensor:
        """The contiguous tensor that has those elements: the parameter, or what modules see copies
        of.
        """
        if self._on_drives:
            raise RuntimeError(
                f"the values of {self.name} are on the drives: load them to see them"
            )
        return self.parameter if self._at_home is None else self._at_home

    def live_at(self, home: torch.Tensor | None) -> None:
        """Let its values be in this flat tensor, of which modules see copies; None: they are the
        parameter's own.
        """
        self._at_home = home
        self._on_drives = False

    def rest_on_drives(self) -> None:
        """Let its values be on the drives, and modules see copies of them."""
        self._on_drives = True

    @property
    def on_drives(self) -> bool:
        """Whether its values are there."""
        return self._on_drives

    def show(self, values: torch.Tensor) -> None:
        """Let modules see these values.

        A change by somebody else, before, is still seen as one afterwards.
        """
        self.parameter.data = values
        self._seen = (values.data_ptr(), self._seen[1])

    @property
    def is_there(self) -> bool:
        """Whether modules see its values, and not what is shown in place of them."""
        return self.parameter.numel() < 2 or any(self.parameter.stride())

    def note_values(self) -> None:
        """Remember the values as they are now as the engine's own."""
        self._seen = self._state()

    def check_untouched(self) -> None:
        """Refuse to go on where somebody else has changed the values.

        Raises:
            RuntimeError: that is so.
        """
        if self._state() != self._seen:
            raise RuntimeError(
                f"{self.name} was changed outside of the engine, which has its own copy of it: the "
                "change would be lost. Change it under `with engine.gathered([parameter], "
                "modify=True)`"
            )

    def _state(self) -> tuple[int, int]:
        # Kernels do not raise the version. An update does so once, and notes it: any other change
        # is somebody else's.
        return self.parameter.data_ptr(), self.parameter._version


def absent(dtype: torch.dtype, shape: torch.Size, where: torch.device) -> torch.Tensor:
    """Return what a parameter shows whose values are not there: who reads it gets NaN, who writes
    to it an error.
    """
    nothing = math.nan if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full((), nothing, dtype=dtype, device=where).expand(shape)


@dataclass(eq=False)
class TrainedParameter(ModelParameter):
    """One parameter of the optimizer: `number` is its place among them, `group` that of its
    parameter group.
    """

    group: int

    @property
    def formats(self) -> Formats:
        """How it and its masters are stored."""
        return formats_of(self.name, self.dtype)


def collect_parameters(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, precision: Precision
) -> tuple[TrainedParameter, ...]:
    """Return the optimizer's parameters that are to be trained, in the model's order: about that of
    their use.

    Raises:
        ConfigError: one is not the model's, or is of a kind that cannot be trained here; or none is
            left.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    dtypes = dtypes_of(model, precision)
    groups: dict[int, int] = {}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            name = names.get(id(parameter))
            if name is None:
                raise ConfigError(
                    field="optimizer",
                    value=f"a parameter of shape {tuple(parameter.shape)} in group {number}",
                    expected="only parameters of the model: make the optimizer of "
                    "model.parameters(), after the last module was added or replaced",
                )
            _check(name, parameter)
            if Hooks.takes_gradients(parameter):
                raise ConfigError(
                    field="model",
                    value=f"one whose {name} another engine trains",
                    expected="a model of no other engine: close that one first, which leaves an "
                    "ordinary model",
                )
            if parameter.requires_grad:
                formats_of(name, dtypes[id(parameter)])
                groups[id(parameter)] = number
    if not groups:
        raise ConfigError(
            field="optimizer",
            value="no parameter that requires a gradient",
            expected="at least one",
        )
    listed = [
        (name, parameter) for name, parameter in model.named_parameters() if id(parameter) in groups
    ]
    return tuple(
        TrainedParameter(number, name, parameter, dtypes[id(parameter)], groups[id(parameter)])
        for number, (name, parameter) in enumerate(listed)
    )


def check_memory_of_their_own(
    parameters: Iterable[ModelParameter], buffers: Mapping[str, torch.Tensor]
) -> None:
    """Refuse parameters that share elements with one another or with a buffer, where one of them is
    trained.

    Each would get its own gradient and its own copy on another tier, so what was one tensor would
    become two.

    Raises:
        ConfigError: two share elements; it names both.
    """
    ranges = [
        (*_range_of(known.parameter), known.name, isinstance(known, TrainedParameter))
        for known in parameters
    ]
    ranges += [(*_range_of(buffer), f"buffer {name}", False) for name, buffer in buffers.items()]
    end, of, is_trained = 0, "", False  # of the range that reaches furthest so far
    for start, stop, name, trained in sorted(found for found in ranges if found[0] < found[1]):
        if start < end and (trained or is_trained):
            raise ConfigError(
                field=f"parameter {name}",
                value=f"one that shares memory with {of}",
                expected="memory of its own. As two parameters of one memory they would come apart "
                "on drives and in 16 bits. To tie them, let both modules have the same "
                "Parameter: second.weight = first.weight. To keep both, give one its own "
                "values: parameter.data = parameter.data.clone()",
            )
        if stop > end:
            end, of, is_trained = stop, name, trained


def _range_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses that a tensor's elements fill; nothing where they have gaps, as columns
    of a matrix have.
    """
    if tensor.is_meta or tensor.layout != torch.strided or not tensor.numel():
        return 0, 0
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    # an expanded tensor has fewer elements in memory, which are no values of its own
    if last + 1 != tensor.numel():
        return 0, 0
    return tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()


def collect_frozen(
    model: torch.nn.Module, trained: Collection[TrainedParameter], precision: Precision
) -> tuple[ModelParameter, ...]:
    """Return the model's other parameters, with the numbers that follow.

    Raises:
        ConfigError: one is of a kind that cannot be used here.
    """
    ours, dtypes = {id(known.parameter) for known in trained}, dtypes_of(model, precision)
    others = [
        (name, parameter)
        for name, parameter in model.named_parameters()
        if id(parameter) not in ours
    ]
    for name, parameter in others:
        if parameter.is_meta or parameter.layout != torch.strided:
            expected = "a dense tensor with values, on the CPU"
            found = "on the meta device" if parameter.is_meta else str(parameter.layout)
            raise ConfigError(field=f"parameter {name}", value=found, expected=expected)
    return tuple(
        ModelParameter(len(trained) + place, name, parameter, dtypes[id(parameter)])
        for place, (name, parameter) in enumerate(others)
    )


def _check(name: str, parameter: torch.nn.Parameter) -> None:
    problem = None
    if parameter.is_meta:
        problem = "is on the meta device, without values"
    elif parameter.device.type != "cpu":
        problem = f"is on {parameter.device}, and this version updates in host memory only"
    elif parameter.layout != torch.strided:
        problem = f"has the layout {parameter.layout}"
    if problem is not None:
        raise ConfigError(
            field=f"parameter {name}",
            value=problem,
            expected="a dense tensor with values, on the CPU",
        )
