"""`TiledLinear`: a linear layer in tiles of its outputs, its inputs, or both."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import torch
from torch.nn import functional

from infinity_engine.tiling.cuts import TileCut, cut_into
from infinity_engine.tiling.weights import TiledWeight, WeightTile

__all__ = ["TiledLinear"]


class TiledLinear(TiledWeight):
    """`torch.nn.Linear` in tiles, with the same names in state dicts, and the same first values.

    Tiles of outputs compute each output as a whole layer does. Tiles of inputs give parts of sums,
    which are added in fp32 or wider; with more than one, results differ by rounding.
    """

    bias: torch.nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        output_tiles: int = 1,
        input_tiles: int = 1,
    ) -> None:
        """Make a layer with at most so many tiles of outputs and of inputs.

        Raises:
            ConfigError: there are more tiles than features.
        """
        rows, columns = cut_into(out_features, output_tiles), cut_into(in_features, input_tiles)
        super().__init__(
            rows,
            columns,
            [
                torch.nn.Parameter(torch.empty(height, width, device=device, dtype=dtype))
                for height in rows.lengths
                for width in columns.lengths
            ],
        )
        self._set_bias(
            torch.nn.Parameter(torch.empty(out_features, device=device, dtype=dtype))
            if bias
            else None
        )
        self.reset_parameters()

    @classmethod
    def of(
        cls,
        rows: TileCut,
        columns: TileCut,
        parameters: list[torch.nn.Parameter],
        bias: torch.nn.Parameter | None,
    ) -> TiledLinear:
        """Return a layer of these tiles, row by row."""
        made = cls.__new__(cls)
        TiledWeight.__init__(made, rows, columns, parameters)
        made._set_bias(bias)
        return made

    def reset_parameters(self) -> None:
        """Draw first values as `torch.nn.Linear` does; the same ones, if outputs alone are cut."""
        # The bounds of all inputs, not of a tile's.
        gain = torch.nn.init.calculate_gain("leaky_relu", math.sqrt(5))
        bound = math.sqrt(3.0) * (gain / math.sqrt(self.in_features)) if self.in_features else 0.0
        for tile in self._all_tiles():
            torch.nn.init.uniform_(tile.weight, -bound, bound)
        if self.bias is not None:
            bound = 1 / math.sqrt(self.in_features) if self.in_features else 0.0
            torch.nn.init.uniform_(self.bias, -bound, bound)

    @property
    def in_features(self) -> int:
        """The length of inputs."""
        return self.columns.length

    @property
    def out_features(self) -> int:
        """The length of outputs."""
        return self.rows.length

    @property
    def is_cut_over_outputs_only(self) -> bool:
        """Whether each tile has all inputs."""
        return len(self.columns) == 1

    def output_tiles(self) -> Iterator[tuple[WeightTile, slice]]:
        """Yield the tiles and their outputs, where each has all inputs."""
        return self.row_tiles()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return `linear(inputs, weight, bias)`, tile by tile."""
        bias = self.bias
        parts = [
            self._outputs(number, inputs, None if bias is None else bias[rows])
            for number, rows in enumerate(self.rows)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def extra_repr(self) -> str:
        """Return the features, and the tiles of each kind."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self._parameters['bias'] is not None}, "
            f"tiles={len(self.rows)} x {len(self.columns)}"
        )

    def _set_bias(self, bias: torch.nn.Parameter | None) -> None:
        self.register_parameter("bias", bias)

    def _outputs(
        self, number: int, inputs: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the outputs of one row of tiles."""
        row = self._row(number)
        if len(row) == 1:
            found: torch.Tensor = row[0](partial(_linear, inputs, bias))
            return found
        total: torch.Tensor | None = None
        dtype = inputs.dtype
        for tile, features in zip(row, self.columns, strict=True):
            part: torch.Tensor = tile(partial(_linear, inputs[..., features], bias))
            bias, dtype = None, part.dtype  # the first part has it
            wide = part.float() if dtype.itemsize < 4 else part
            total = wide if total is None else total + wide
        assert total is not None, "there is a tile at least"
        return total.to(dtype)


def _linear(inputs: torch.Tensor, bias: torch.Tensor | None, weight: torch.Tensor) -> torch.Tensor:
    return functional.linear(inputs, weight, bias)
