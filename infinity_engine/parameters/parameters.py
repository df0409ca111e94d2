"""The parameters of a model, trained and frozen, and the values that modules compute with.

Detects changes by other code. Takes no gradients, moves and updates nothing.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt
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
    "keeps_memory",
    "kept_bytes",
]

_ALIGNMENT = 64  # bytes: every lease is aligned to at least as many


@dataclass(eq=False)
class ModelParameter:
    """One parameter of the model, or this rank's shard; `number` is its index in the engine.

    Modules compute with it in `dtype`, which may differ from the dtype that it had in `initialize`.
    A shard is flat, and has the number and name of the model's parameter `part_of`.
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
        """The bytes of its values, in the dtype that modules compute with."""
        return self.parameter.numel() * self.dtype.itemsize

    @property
    def of_model(self) -> torch.nn.Parameter:
        """The model's parameter that this is, or is a shard of."""
        return self.parameter if self.part_of is None else self.part_of

    @property
    def keeps_memory(self) -> bool:
        """Whether modules on the host can go on with the memory it has."""
        return self.part_of is None and keeps_memory(self.parameter, self.dtype)

    @property
    def values(self) -> torch.Tensor:
        """Its values where updates leave them, flat."""
        return self.home.detach().view(-1)

    @property
    def home(self) -> torch.Tensor:
        """The contiguous tensor where its values live: itself, or one that modules see copied."""
        if self._on_drives:
            raise RuntimeError(
                f"The values of {self.name} are on the drives, so there is no tensor of them. "
                "Fetch the parameter first"
            )
        return self.parameter if self._at_home is None else self._at_home

    def live_at(self, home: torch.Tensor | None) -> None:
        """Set the flat tensor where its values live. None: they live in the parameter itself."""
        self._at_home = home
        self._on_drives = False

    def rest_on_drives(self) -> None:
        """Note that its values live on the drives."""
        self._on_drives = True

    @property
    def on_drives(self) -> bool:
        """Whether its values live on the drives."""
        return self._on_drives

    def show(self, values: torch.Tensor) -> None:
        """Let modules see these values.

        The version is not noted: `check_untouched` still detects a change that came before.
        """
        self.parameter.data = values
        # The address is the engine's own change. The version is compared as it was noted.
        self._seen = (values.data_ptr(), self._seen[1])

    @property
    def is_there(self) -> bool:
        """Whether modules see its values, and not NaN in place of them."""
        # Expanded NaN has strides of 0 only; fewer than two elements do not show it.
        return self.parameter.numel() < 2 or any(self.parameter.stride())

    def note_values(self) -> None:
        """Remember the present values as the engine's own."""
        self._seen = self._state()

    def check_untouched(self) -> None:
        """Refuse values that other code has changed.

        Raises:
            RuntimeError: they were changed.
        """
        if self._state() != self._seen:
            raise RuntimeError(
                f"{self.name} was changed outside of the engine. The engine keeps a copy of its "
                "own and would overwrite the change. Change it under `with "
                "engine.gathered([parameter], modify=True)`"
            )

    def _state(self) -> tuple[int, int]:
        # The engine's kernels do not raise the version. An update raises it once and notes that, so
        # any other change of the version or the address is not the engine's.
        return self.parameter.data_ptr(), self.parameter._version


def keeps_memory(parameter: torch.nn.Parameter, dtype: torch.dtype) -> bool:
    """Tell whether modules on the host that compute in `dtype` can go on with this memory.

    They can where PyTorch allocated it, for this parameter and process alone, aligned as leases
    are. Mapped files can change or be read-only, a part of a tensor would keep the whole alive, and
    kernels may round differently by alignment.
    """
    is_plain = parameter.device.type == "cpu" and parameter.layout is torch.strided
    if not is_plain or parameter.dtype != dtype:
        return False
    storage = parameter.untyped_storage()
    is_own = storage.resizable() and not storage.is_shared()
    is_alone = is_own and storage.nbytes() == parameter.numel() * dtype.itemsize
    return is_alone and parameter.is_contiguous() and storage.data_ptr() % _ALIGNMENT == 0


def kept_bytes(parameters: Iterable[tuple[torch.nn.Parameter, torch.dtype]]) -> int:
    """Return the bytes of memory that these parameters keep; what several of them lie in counts
    once.
    """
    return sum(
        {
            parameter.data_ptr(): parameter.numel() * dtype.itemsize
            for parameter, dtype in parameters
            if keeps_memory(parameter, dtype)
        }.values()
    )


def absent(dtype: torch.dtype, shape: torch.Size, where: torch.device) -> torch.Tensor:
    """Return what absent values look like: NaN, expanded so that a write to it raises."""
    nothing = math.nan if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full((), nothing, dtype=dtype, device=where).expand(shape)


@dataclass(eq=False)
class TrainedParameter(ModelParameter):
    """One parameter of the optimizer; `number` and `group` are indices among its own."""

    group: int

    @property
    def formats(self) -> Formats:
        """The formats of its values and masters."""
        return formats_of(self.name, self.dtype)


def collect_parameters(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, precision: Precision
) -> tuple[TrainedParameter, ...]:
    """Return the optimizer's trained parameters, in the model's order, about that of their use.

    Of a frozen model whose optimizer has no parameters, none.

    Raises:
        ConfigError: one is not the model's, or cannot be trained here; or none is left.
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
                    expected="only parameters of the model: make the optimizer from "
                    "model.parameters(), after the last module was added or replaced",
                )
            _check(name, parameter)
            if Hooks.takes_gradients(parameter):
                raise ConfigError(
                    field="model",
                    value=f"one with a parameter {name} that another engine trains",
                    expected="a model that no other engine trains: close that engine first, which "
                    "leaves an ordinary model",
                )
            if parameter.requires_grad:
                # Refuses a dtype that cannot be trained; the result is asked for again later.
                formats_of(name, dtypes[id(parameter)])
                groups[id(parameter)] = number
    # An optimizer of nothing belongs to a model that only runs: optimizer_of makes one.
    given = any(group["params"] for group in optimizer.param_groups)
    runs_only = not given and not any(parameter.requires_grad for parameter in model.parameters())
    if not groups and not runs_only:
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
    """Refuse a trained parameter that shares memory with another parameter or a buffer.

    Each of the two would get its own gradient and its own copy on another tier, and so become a
    tensor of its own.

    Raises:
        ConfigError: two share memory. The error names both.
    """
    memories = [
        _MemoryOfParameter(known.name, known.parameter, trained=isinstance(known, TrainedParameter))
        for known in parameters
    ]
    memories += [
        _MemoryOfParameter(f"buffer {name}", buffer, trained=False)
        for name, buffer in buffers.items()
    ]
    reaching: list[
        _MemoryOfParameter
    ] = []  # those before that end behind the beginning of this one
    for memory in sorted(memories, key=lambda memory: (memory.start, memory.stop, memory.name)):
        reaching = [before for before in reaching if before.stop > memory.start]
        for before in reaching:
            if (memory.trained or before.trained) and memory.shares_with(before):
                raise ConfigError(
                    field=f"parameter {memory.name}",
                    value=f"one that shares memory with {before.name}",
                    expected="memory of its own, as the two would become different tensors once "
                    "they are offloaded or rounded to 16 bits: to tie them, let both modules have "
                    "the same Parameter (second.weight = first.weight); to keep both, give one its "
                    "own values (parameter.data = parameter.data.clone())",
                )
        reaching.append(memory)


class _MemoryOfParameter:
    """The memory of a tensor, from its first element's address to the end of its last one's.

    It is empty for a tensor without memory of its own, and for an expanded one.
    """

    def __init__(self, name: str, tensor: torch.Tensor, *, trained: bool) -> None:
        self.name = name
        self.trained = trained
        self._tensor = tensor
        self._has_gaps = False  # as a column of a matrix has
        self.start = self.stop = 0
        if tensor.is_meta or tensor.layout != torch.strided or not tensor.numel():
            return
        steps = [
            (size - 1) * stride
            for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
            if size > 1
        ]
        if all(steps):
            count = sum(steps) + 1
            self.start = tensor.data_ptr()
            self.stop = self.start + count * tensor.element_size()
            self._has_gaps = count != tensor.numel()

    def shares_with(self, other: _MemoryOfParameter) -> bool:
        """Tell whether an element of this tensor is one of another tensor, whose range overlaps
        with this one's.
        """
        if not (self._has_gaps or other._has_gaps):
            return True
        return np.shares_memory(self._addresses(), other._addresses())

    def _addresses(self) -> npt.NDArray[np.void]:
        """Return an array of the same addresses. numpy lacks some dtypes, such as bf16."""
        size = self._tensor.element_size()
        interface = {
            "version": 3,
            "data": (self.start, False),
            "shape": tuple(self._tensor.shape),
            "strides": tuple(stride * size for stride in self._tensor.stride()),
            "typestr": f"|V{size}",
        }
        return np.asarray(SimpleNamespace(__array_interface__=interface))


def collect_frozen(
    model: torch.nn.Module, trained: Collection[TrainedParameter], precision: Precision
) -> tuple[ModelParameter, ...]:
    """Return the parameters that are not trained, numbered after those that are.

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
