"""`TiledEmbedding`: an embedding in tiles of its entries."""

from __future__ import annotations

from functools import partial

import torch
from torch.nn import functional

from infinity_engine.tiling.cuts import TileCut, cut_into
from infinity_engine.tiling.weights import TiledWeight
from infinity_engine.units import format_known

__all__ = ["TiledEmbedding"]


class TiledEmbedding(TiledWeight):
    """`torch.nn.Embedding` in tiles, with the same bits and the same names in state dicts.

    A call uses all tiles, also those with no entry in it: their gradient is zero, not none.
    """

    padding_idx: int | None

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        tiles: int = 1,
    ) -> None:
        """Make an embedding with at most so many tiles.

        Raises:
            ConfigError: there are more tiles than entries.
        """
        rows = cut_into(num_embeddings, tiles)
        super().__init__(
            rows,
            TileCut(embedding_dim, max(embedding_dim, 1)),
            [
                torch.nn.Parameter(torch.empty(height, embedding_dim, device=device, dtype=dtype))
                for height in rows.lengths
            ],
        )
        self._set_padding(padding_idx)
        self.reset_parameters()

    @classmethod
    def of(
        cls,
        rows: TileCut,
        columns: TileCut,
        parameters: list[torch.nn.Parameter],
        padding: int | None,
    ) -> TiledEmbedding:
        """Return an embedding of these tiles; `padding` is the entry without a gradient."""
        made = cls.__new__(cls)
        TiledWeight.__init__(made, rows, columns, parameters)
        made._set_padding(padding)
        return made

    def reset_parameters(self) -> None:
        """Draw first values as `torch.nn.Embedding` does, from the same distribution."""
        for tile, rows in self.row_tiles():
            torch.nn.init.normal_(tile.weight)
            place = self._padding_in(rows)
            if place is not None:
                with torch.no_grad():
                    tile.weight[place].fill_(0)

    @property
    def num_embeddings(self) -> int:
        """The number of entries."""
        return self.rows.length

    @property
    def embedding_dim(self) -> int:
        """The length of an entry."""
        return self.columns.length

    def forward(self, entries: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of these entries."""
        flat = entries.reshape(-1)
        places, parts = [], []
        for tile, rows in self.row_tiles():
            here = ((flat >= rows.start) & (flat < rows.stop)).nonzero().squeeze(1)
            local, padding = flat[here] - rows.start, self._padding_in(rows)
            places.append(here)
            parts.append(tile(partial(functional.embedding, local, padding_idx=padding)))
        order = torch.cat(places)
        if len(order) != len(flat):
            raise IndexError(
                f"The indices go from {int(flat.min())} to {int(flat.max())}, and the embedding "
                f"has entries from 0 to {self.num_embeddings - 1}. Give it as many as the "
                "tokenizer has"
            )
        found = torch.cat(parts)[order.argsort()]
        return found.view(*entries.shape, self.embedding_dim)

    def extra_repr(self) -> str:
        """Return the sizes, and the number of tiles."""
        padding = format_known(self.padding_idx, ", padding_idx={}")
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}, tiles={len(self.rows)}"

    def _set_padding(self, padding: int | None) -> None:
        # As torch keeps it: counted from the beginning.
        negative = padding is not None and padding < 0
        self.padding_idx = padding + self.num_embeddings if negative and padding else padding

    def _padding_in(self, rows: slice) -> int | None:
        """Return the place of the entry without a gradient in a tile; None: it is elsewhere."""
        padding, start, stop = self.padding_idx, int(rows.start), int(rows.stop)
        return padding - start if padding is not None and start <= padding < stop else None
