"""`SequenceTiles`: a module that handles each position alone, a few positions at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from infinity_engine.errors import ConfigError
from infinity_engine.tiling.cuts import TileCut

__all__ = ["SequenceTiles"]


class SequenceTiles(torch.nn.Module):
    """Runs `module` on at most `positions` positions of its input at a time.

    What the module saves for its backward is there for one tile at a time: the backward computes it
    again, as checkpoints do. Its submodules keep their names. The module must handle each position
    alone, such as a feed-forward block does, and attention does not. Positions are the last
    dimension but one.
    """

    def __init__(self, module: torch.nn.Module, positions: int) -> None:
        """Take over the submodules of `module`, under their names.

        Raises:
            ConfigError: the module has parameters or buffers of its own, which would have to be
                here.
        """
        super().__init__()
        own = [*module._parameters, *module._buffers]
        if own:
            expected = "a module whose parameters and buffers are all in submodules"
            raise ConfigError(
                field="module", value=f"{type(module).__name__} with {own[0]}", expected=expected
            )
        if positions < 1:
            raise ConfigError(field="positions", value=positions, expected="1 or more")
        self.positions = positions
        # In a tuple, so that it is no submodule: its own are, by the names that they have in it.
        self._module = (module,)
        # One mapping for both, so that a submodule that is replaced here is replaced there.
        self.__dict__["_modules"] = module._modules
        self.training = module.training

    def forward(self, inputs: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return what the module returns for all positions."""
        (module,) = self._module
        cut = TileCut(inputs.shape[-2], self.positions)
        if len(cut) <= 1:
            whole: torch.Tensor = module(inputs, *args, **kwargs)
            return whole
        parts = []
        # Not a slice for each: the gradient of a slice is as large as the whole.
        for tile in torch.split(inputs, cut.size, -2):
            part = self._part(tile, *args, **kwargs)
            self._check(part, tile.shape[-2])
            parts.append(part)
        return torch.cat(parts, -2)

    def train(self, mode: bool = True) -> SequenceTiles:
        """Set the mode of the module and of its submodules."""
        super().train(mode)
        self._module[0].train(mode)
        return self

    def __getattr__(self, name: str) -> Any:
        """Return what the module itself has, for code that looks at it."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "_module":  # a copy that has nothing yet
                raise
            return getattr(self._module[0], name)

    def extra_repr(self) -> str:
        """Return the class of the module and the positions of a tile."""
        return f"{type(self._module[0]).__name__}, positions={self.positions}"

    def _check(self, part: object, positions: int) -> None:
        """Refuse what cannot be put together to the output for all positions."""
        name = type(self._module[0]).__name__
        if not isinstance(part, torch.Tensor):
            raise TypeError(
                f"{name} returned a {type(part).__name__}. Tiles of the sequence are put together "
                "again, which takes a block that returns one tensor: do not tile this one"
            )
        if part.ndim < 2 or part.shape[-2] != positions:
            raise ValueError(
                f"{name} returned shape {tuple(part.shape)} for a tile of {positions} positions, "
                "so it does not handle each position alone. An argument beside the first with "
                "positions of its own is not cut: do not tile this block"
            )

    def _part(self, inputs: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        (module,) = self._module
        if not torch.is_grad_enabled():
            found: torch.Tensor = module(inputs, *args, **kwargs)
            return found
        again: torch.Tensor = checkpoint(module, inputs, *args, use_reentrant=False, **kwargs)
        return again
