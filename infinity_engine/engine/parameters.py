"""The parameters that the engine trains: which they are, and the tensors that modules compute with.

Owns those tensors and sees when somebody else changed one. Takes no gradients and updates nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from infinity_engine.errors import ConfigError

__all__ = ["TrainedParameter", "collect_parameters"]


@dataclass(eq=False)
class TrainedParameter:
    """One parameter of the optimizer: `number` is its place there, `group` that of its parameter group."""

    number: int
    name: str
    parameter: torch.nn.Parameter
    group: int
    _seen: tuple[int, int] = field(default=(0, 0), repr=False)

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return self.parameter.numel()

    @property
    def values(self) -> torch.Tensor:
        """The elements that modules compute with, flat."""
        return self.parameter.detach().view(-1)

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
                f"{self.name} was changed outside of the engine, which has its own copy of it: the change would be "
                "lost. Change it under `with engine.gathered([parameter], modify=True)`"
            )

    def _state(self) -> tuple[int, int]:
        # The kernels write without telling torch, so what moves the version is somebody else.
        return self.parameter.data_ptr(), self.parameter._version


def collect_parameters(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[TrainedParameter, ...]:
    """Return the optimizer's parameters that are to be trained, in its order.

    Raises:
        ConfigError: one is not the model's, or is of a kind that cannot be trained here; or none is left.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: list[TrainedParameter] = []
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            name = names.get(id(parameter))
            if name is None:
                raise ConfigError(
                    field="optimizer",
                    value=f"a parameter of shape {tuple(parameter.shape)} in group {number}",
                    expected="only parameters of the model: make the optimizer of model.parameters(), after the "
                    "last module was added or replaced",
                )
            _check(name, parameter)
            if parameter.requires_grad:
                found.append(TrainedParameter(len(found), name, parameter, number))
    if not found:
        raise ConfigError(field="optimizer", value="no parameter that requires a gradient", expected="at least one")
    return tuple(found)


def _check(name: str, parameter: torch.nn.Parameter) -> None:
    problem = None
    if parameter.is_meta:
        problem = "is on the meta device, without values"
    elif parameter.device.type != "cpu":
        problem = f"is on {parameter.device}, and this version updates in host memory only"
    elif not parameter.is_floating_point():
        problem = f"is {parameter.dtype}"
    elif parameter.layout != torch.strided:
        problem = f"has the layout {parameter.layout}"
    if problem is not None:
        raise ConfigError(
            field=f"parameter {name}", value=problem, expected="a dense floating-point tensor with values, on the CPU"
        )
