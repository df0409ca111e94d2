"""Which tiles of logits a chunked loss makes within a workspace: a pure function of sizes.

Counts the memory of the computation beside its results: gradients of hidden states and of the head
are results. Knows no tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from infinity_engine.errors import ConfigError
from infinity_engine.tiling.cuts import TileCut, cut_evenly
from infinity_engine.units import format_bytes

__all__ = ["LossShape", "LossTiles", "choose_tiles", "product_rows"]

_ENOUGH_TOKENS = 64
"""So many rows keep a matrix product busy: with fewer, tiles of the vocabulary are better."""
_SPLIT_TOKENS = 1024
"""At most, of a tile that has only a part of the vocabulary."""
_ENOUGH_ENTRIES = 128
"""Entries of the vocabulary in a tile: before it has fewer, it has fewer tokens."""
_PRODUCT_ELEMENTS = 1 << 20
"""Elements of a weight's gradient that are made in one product, before they are added in fp32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossShape:
    """What a chunked loss computes on, as sizes."""

    tokens: int
    """Those with a label that counts."""
    vocabulary: int
    hidden: int
    width: int
    """Bytes of an element of the matrix products: 2 for bf16 and fp16."""
    wide: int
    """Bytes of an element of logits, losses and sums: 4, or 8 where products are in fp64."""
    has_cap: bool = False
    hidden_gradient: bool = True
    weight_gradient: bool = True

    @property
    def is_narrow(self) -> bool:
        """Whether products are in another dtype than what they are added up in."""
        return self.width < self.wide

    @property
    def least(self) -> int:
        """The bytes without which no tile can be computed."""
        return min(self.workspace(1, 1), self.workspace(1, self.vocabulary))

    def workspace(self, tokens: int, entries: int) -> int:
        """Return the bytes that tiles of so many tokens and entries of the vocabulary take."""
        logit = self.wide + (self.width if self.is_narrow else 0) + (self.wide * self.has_cap)
        # The tile's hidden states, and the product that is their gradient.
        rows = tokens * self.hidden * self.width * (1 + self.hidden_gradient)
        # Four values for each token: its log-sum, its label's logit and so on.
        statistics = 4 * self.tokens * self.wide
        sums = 0
        if self.is_narrow and self.weight_gradient:
            product = product_rows(entries, self.hidden) * self.hidden
            sums += entries * self.hidden * self.wide + product * self.width
        if self.hidden_gradient and entries < self.vocabulary:
            sums += self.tokens * self.hidden * self.wide
        return tokens * entries * logit + rows + statistics + sums


@dataclass(frozen=True, slots=True)
class LossTiles:
    """The tiles of tokens and of the vocabulary."""

    tokens: TileCut
    vocabulary: TileCut

    @property
    def computes_twice(self) -> bool:
        """Whether logits are computed once for their sum and once more for gradients."""
        return len(self.vocabulary) > 1


def product_rows(entries: int, hidden: int) -> int:
    """Return how many entries' gradients are multiplied at one time."""
    return max(1, min(entries, _PRODUCT_ELEMENTS // max(hidden, 1)))


def choose_tiles(shape: LossShape, workspace: int) -> LossTiles:
    """Return the tiles that need the fewest products within `workspace` bytes.

    Tiles with the whole vocabulary compute each logit once. Where too few tokens fit beside them,
    tiles have a part of the vocabulary, and each logit is computed twice.

    Raises:
        ConfigError: not even one logit at a time fits; says what would.
    """
    tokens, vocabulary = max(shape.tokens, 1), shape.vocabulary
    enough = min(tokens, _ENOUGH_TOKENS)
    if shape.workspace(enough, vocabulary) <= workspace:
        return _whole(shape, workspace, enough)
    # Less than the vocabulary: tiles with all of it need no sums of the states' gradients.
    entries = min(vocabulary - 1, _ENOUGH_ENTRIES)
    count = min(tokens, _SPLIT_TOKENS)
    while count > 1 and shape.workspace(count, entries) > workspace:
        count //= 2
    if entries and shape.workspace(count, entries) <= workspace:
        return _split(shape, workspace, count, entries)
    if shape.workspace(1, vocabulary) <= workspace:
        return _whole(shape, workspace, 1)
    if entries and shape.workspace(1, 1) <= workspace:
        return _split(shape, workspace, 1, 1)
    expected = f"at least {shape.least} B ({format_bytes(shape.least)}), for one token at a time"
    raise ConfigError(field="workspace", value=workspace, expected=expected)


def _whole(shape: LossShape, workspace: int, tokens: int) -> LossTiles:
    """Return tiles with the whole vocabulary, of which so many tokens fit at least."""
    most = _largest(
        tokens,
        max(shape.tokens, 1),
        lambda count: shape.workspace(count, shape.vocabulary),
        workspace,
    )
    vocabulary = TileCut(shape.vocabulary, shape.vocabulary)
    return LossTiles(cut_evenly(shape.tokens, most, multiple=8), vocabulary)


def _split(shape: LossShape, workspace: int, tokens: int, entries: int) -> LossTiles:
    """Return tiles with a part of the vocabulary, of which so many entries fit at least."""
    most = _largest(
        entries, shape.vocabulary - 1, lambda size: shape.workspace(tokens, size), workspace
    )
    return LossTiles(
        cut_evenly(shape.tokens, tokens), cut_evenly(shape.vocabulary, most, multiple=8)
    )


def _largest(low: int, high: int, nbytes: Callable[[int], int], limit: int) -> int:
    """Return the largest size from `low`, which fits, to `high`; what a size takes only grows."""
    while low < high:
        middle = (low + high + 1) // 2
        if nbytes(middle) <= limit:
            low = middle
        else:
            high = middle - 1
    return low
