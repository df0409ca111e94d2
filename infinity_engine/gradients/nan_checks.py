"""`NaNChecks`: refuses a NaN that the engine itself may have put into a loss or gradient.

A parameter that is fetched around modules shows NaN everywhere else. Code that uses it there
computes NaN without any error, so the checks say how such code is written.
"""

from __future__ import annotations

import math
import warnings

import torch

from infinity_engine.errors import ConfigError
from infinity_engine.gradients.scaling import LossScale
from infinity_engine.parameters.modules import ModuleParameters, UnwatchedModules, listed

__all__ = ["NaNChecks"]


class NaNChecks:
    """The checks of one engine."""

    def __init__(self, modules: ModuleParameters | UnwatchedModules, scale: LossScale) -> None:
        self._modules = modules
        self._scale = scale

    @property
    def _may_be_ours(self) -> bool:
        """Whether a NaN may be what the engine shows in place of a parameter.

        With a dynamic loss scale, NaN may also come from an overflow, which the scale answers.
        """
        return self._modules.fetches and not self._scale.dynamic

    def check_loss(self, loss: object, step: int) -> None:
        """Refuse what is no loss; warn of one that is not finite.

        Raises:
            ConfigError: it is no tensor of one element.
            RuntimeError: it is NaN, and a parameter may have been read as NaN.
        """
        if not isinstance(loss, torch.Tensor):
            expected = (
                "a tensor: if the model returns other values beside its loss, pass only the loss"
            )
            raise ConfigError(field="loss", value=type(loss).__name__, expected=expected)
        if loss.numel() != 1:
            expected = "a tensor of one element, as Tensor.backward() needs"
            raise ConfigError(
                field="loss", value=f"a tensor of shape {tuple(loss.shape)}", expected=expected
            )
        # Only on the CPU: on a GPU, item() would wait for the forward to end.
        if loss.device.type == "cpu" and not math.isfinite(loss.item()):
            problem = (
                f"The loss is {loss.item()} in step {step}. An update would turn every parameter "
                "that it depends on into NaN. If the same batch gives a finite loss in plain "
                "PyTorch, your code uses a parameter where the engine cannot see it, such as a "
                "penalty over model.parameters() or a weight that is kept in a list: use it under "
                "`with engine.gathered(parameter)`, or call engine.register_external(module, "
                "parameter) for the module that uses it"
            )
            if math.isnan(loss.item()) and self._may_be_ours:
                names = self._modules.used_outside(loss)
                used = f"It uses {listed(names)} outside of modules. " if names else ""
                raise RuntimeError(f"{problem}. {used}No gradient was computed")
            warnings.warn(problem, RuntimeWarning, stacklevel=3)

    def is_suspect(self, gradient: torch.Tensor) -> bool:
        """Tell whether a gradient has a NaN that may come from a parameter read as NaN.

        The first element of each row and column decides: such a NaN fills whole rows or columns,
        of an embedding only the rows that were looked up.
        """
        if not (self._may_be_ours and gradient.device.type == "cpu" and gradient.numel()):
            return False
        starts = gradient  # of its rows
        while starts.dim() > 1:
            starts = starts[..., 0]
        first = gradient[0] if gradient.dim() > 1 else starts
        return bool(starts.isnan().any()) or bool(first.isnan().any())
