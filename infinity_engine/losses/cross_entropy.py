"""Cross-entropy of a vocabulary head, tile by tile: the logits are never whole in memory.

The forward computes the loss and, where autograd will want them, the gradients of the hidden states
and of the head. So the backward needs no logits, and no weight. Knows nothing of engines or models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
from torch.nn import functional

from infinity_engine.errors import ConfigError
from infinity_engine.losses.tiles import LossShape, LossTiles, choose_tiles, product_rows
from infinity_engine.placement.models import LOSS_WORKSPACE
from infinity_engine.tiling.cuts import TileCut
from infinity_engine.tiling.linear import TiledLinear
from infinity_engine.tiling.weights import WeightTile
from infinity_engine.units import parse_bytes

__all__ = [
    "DEFAULT_WORKSPACE",
    "Reduction",
    "TokenLoss",
    "chunked_cross_entropy",
    "is_linear",
]

DEFAULT_WORKSPACE = LOSS_WORKSPACE
"""What the tiles of a loss take at one time, beside the gradients that they end in."""


class Reduction(Enum):
    """What is made of the losses of all tokens."""

    MEAN = "mean"  # their sum by the sum of their weights, which are 1 where none are given
    SUM = "sum"


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLoss:
    """The loss of one token, as a function of the head's outputs."""

    ignore_index: int = -100
    """The label of tokens that do not count."""
    label_smoothing: float = 0.0
    """The part of the target that is spread over the whole vocabulary, as in torch's own loss."""
    z_loss: float = 0.0
    """The factor of the squared log-sum of the logits, which is added."""
    scale: float = 1.0
    """What the head's outputs are multiplied with (Cohere; Granite divides)."""
    soft_cap: float | None = None
    """The cap c of `c * tanh(output / c)`, after the scale (Gemma)."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.label_smoothing < 1.0:
            expected = "0 or more and less than 1"
            raise ConfigError(
                field="label_smoothing", value=self.label_smoothing, expected=expected
            )
        if self.z_loss < 0.0:
            raise ConfigError(field="z_loss", value=self.z_loss, expected="0 or more")
        if self.soft_cap is not None and self.soft_cap <= 0.0:
            raise ConfigError(field="soft_cap", value=self.soft_cap, expected="above 0, or None")

    def logits(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return the logits of the head's outputs; `outputs` is overwritten."""
        if self.scale != 1.0:
            outputs.mul_(self.scale)
        if self.soft_cap is not None:
            outputs.div_(self.soft_cap).tanh_().mul_(self.soft_cap)
        return outputs

    def slopes(self, logits: torch.Tensor) -> torch.Tensor | None:
        """Return the derivatives of the logits by the outputs, but for the scale; None: all 1."""
        if self.soft_cap is None:
            return None
        return (logits / self.soft_cap).square_().neg_().add_(1.0)


def chunked_cross_entropy(
    hidden: torch.Tensor,
    head: torch.Tensor | torch.nn.Module,
    labels: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    token_loss: TokenLoss | None = None,
    reduction: Reduction | str = Reduction.MEAN,
    divide_by: float | torch.Tensor | None = None,
    token_weights: torch.Tensor | None = None,
    workspace: int | str = DEFAULT_WORKSPACE,
) -> torch.Tensor:
    """Return `cross_entropy(linear(hidden, head, bias).float(), labels)`, never with all logits.

    `hidden` is (..., features), and `labels` (...) are not shifted. `head` is a weight of shape
    (vocabulary, features), with a `bias` or without; or a linear layer, or a `TiledLinear` that is
    cut over its outputs. Of a tiled head, the parameters of one tile at a time are used: twice in
    the forward, and not in the backward.

    `token_weights` (...) weigh the tokens' losses. `divide_by` divides the sum of the losses in
    place of `reduction`, such as the number of tokens of several micro-batches. `workspace` is what
    the tiles may take, beside the gradients. Matrix products are in the dtype of `hidden`, or in
    autocast's; logits, losses and sums over tiles are in fp32.

    The gradients are computed here, if autograd is on: the backward needs no logits and no weight.
    Gradients of gradients are refused, and so are weights and divisors that require one.

    Raises:
        ConfigError: shapes that do not fit together, another head, a reduction that tiles cannot
            have, a weight or divisor that requires a gradient, or a workspace in which not one
            logit fits.
        IndexError: a label is no entry of the vocabulary.
    """
    entries, features, bias = _sizes(head, bias)
    call = _LossCall.of(
        hidden,
        labels,
        entries=entries,
        features=features,
        token_loss=token_loss or TokenLoss(),
        reduction=_reduction(reduction),
        divide_by=divide_by,
        token_weights=token_weights,
        workspace=workspace,
    )
    if isinstance(head, TiledLinear):
        return _of_tiled_head(call, hidden, head)
    weight = head if isinstance(head, torch.Tensor) else head.weight
    assert isinstance(weight, torch.Tensor), "the head was checked"
    wanted = _Wanted.of(hidden, weight.requires_grad, bias)
    with torch.no_grad(), _no_autocast(hidden.device):
        whole = _HeadPart(0, weight.detach(), _rows(bias, slice(None)))
        loss, found = _computed(call, whole, wanted)
    return _with_gradients(loss, (hidden, found.hidden), (weight, found.weight), (bias, found.bias))


def is_linear(module: torch.nn.Module) -> bool:
    """Tell whether a module computes what `torch.nn.Linear` does, and nothing else."""
    return isinstance(module, torch.nn.Linear) and type(module).forward is torch.nn.Linear.forward


# --- what is computed -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Wanted:
    """The gradients that the backward will want."""

    hidden: bool
    weight: bool
    bias: bool

    @classmethod
    def of(cls, hidden: torch.Tensor, weight: bool, bias: torch.Tensor | None) -> _Wanted:
        """Return none of them where autograd is off, else those of tensors that are trained."""
        is_on = torch.is_grad_enabled()
        return cls(
            hidden=is_on and hidden.requires_grad,
            weight=is_on and weight,
            bias=is_on and bias is not None and bias.requires_grad,
        )

    @property
    def any(self) -> bool:
        """Whether there is one."""
        return self.hidden or self.weight or self.bias


@dataclass(frozen=True, slots=True)
class _HeadPart:
    """Entries of the vocabulary from `start` on, and their part of the head."""

    start: int
    weight: torch.Tensor
    bias: torch.Tensor | None

    def tile(self, entries: slice, dtype: torch.dtype) -> _HeadPart:
        """Return some of these entries, for products in a dtype."""
        bias = self.bias
        return _HeadPart(
            self.start + entries.start,
            self.weight[entries].to(dtype),
            None if bias is None else bias[entries].to(dtype),
        )


@dataclass(frozen=True, slots=True)
class _FoundGradients:
    """The gradients that are wanted, not yet multiplied with the loss's own."""

    hidden: torch.Tensor | None
    """(all tokens, features)."""
    weight: torch.Tensor | None
    bias: torch.Tensor | None

    @classmethod
    def empty(cls, call: _LossCall, head: _HeadPart, wanted: _Wanted) -> _FoundGradients:
        """Return room for them; tokens that do not count have zeros."""
        device = call.hidden.device

        def room(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=call.kept(dtype), device=device)

        hidden, bias = call.hidden, head.bias
        return cls(
            room(tuple(hidden.shape), hidden.dtype) if wanted.hidden else None,
            room(tuple(head.weight.shape), head.weight.dtype) if wanted.weight else None,
            None if bias is None or not wanted.bias else room((call.entries,), bias.dtype),
        )


@dataclass(slots=True)
class _Statistics:
    """Of each token that counts: what its loss is made of, in the wide dtype."""

    log_sum: torch.Tensor
    label: torch.Tensor
    """The logit of its label."""
    total: torch.Tensor
    """The sum of its logits, where labels are smoothed."""

    @classmethod
    def empty(cls, call: _LossCall) -> _Statistics:
        """Return those of no logits at all."""
        count = len(call.labels)
        device, dtype = call.hidden.device, call.wide
        return cls(
            torch.full((count,), -torch.inf, dtype=dtype, device=device),
            torch.zeros(count, dtype=dtype, device=device),
            torch.zeros(count, dtype=dtype, device=device),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _LossCall:
    """One computation: tokens that count, what their loss is, and in which dtypes."""

    hidden: torch.Tensor
    """(all tokens, features)."""
    rows: torch.Tensor | None
    """The tokens that count; None: all of them."""
    labels: torch.Tensor
    """The labels of the tokens that count."""
    weights: torch.Tensor | None
    token_loss: TokenLoss
    divisor: torch.Tensor
    """What the sum of losses is divided by."""
    entries: int
    """How many the vocabulary has."""
    dtype: torch.dtype
    """The dtype of matrix products."""
    wide: torch.dtype
    """The dtype of logits, losses and sums."""
    workspace: int

    @classmethod
    def of(
        cls,
        hidden: torch.Tensor,
        labels: torch.Tensor,
        *,
        entries: int,
        features: int,
        token_loss: TokenLoss,
        reduction: Reduction,
        divide_by: float | torch.Tensor | None,
        token_weights: torch.Tensor | None,
        workspace: int | str,
    ) -> _LossCall:
        """Check the arguments, and find the tokens that count."""
        _check_shapes(hidden, labels, features, token_weights)
        _check_constant("token_weights", token_weights)
        _check_constant("divide_by", divide_by)
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        dtype = dtype or hidden.dtype
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        flat = labels.detach().to(hidden.device).reshape(-1).long()  # bytes have no -100
        counts = flat != token_loss.ignore_index
        rows = counts.nonzero().squeeze(1)
        _check_labels(flat[rows], entries)
        weights = None
        if token_weights is not None:
            weights = token_weights.detach().to(hidden.device, wide).reshape(-1)[rows]
        if divide_by is not None:
            divisor = torch.as_tensor(divide_by, dtype=wide, device=hidden.device)
        elif reduction is Reduction.SUM:
            divisor = torch.ones((), dtype=wide, device=hidden.device)
        elif weights is not None:
            divisor = weights.sum()
        else:
            divisor = torch.tensor(float(len(rows)), dtype=wide, device=hidden.device)
        return cls(
            hidden=hidden.detach().reshape(-1, features),
            rows=None if len(rows) == len(flat) else rows,
            labels=flat[rows],
            weights=weights,
            token_loss=token_loss,
            divisor=divisor,
            entries=entries,
            dtype=dtype,
            wide=wide,
            workspace=parse_bytes(workspace, field="workspace"),
        )

    @property
    def divides_early(self) -> bool:
        """Whether gradients are divided before products: in fp16, quotients would be lost."""
        return self.dtype is not torch.float16

    def kept(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which gradients of tensors of `dtype` wait for the backward."""
        return self.wide if self.dtype is torch.float16 else dtype

    def tiles(self, wanted: _Wanted) -> LossTiles:
        """Return the tiles of tokens and vocabulary."""
        return choose_tiles(
            LossShape(
                tokens=len(self.labels),
                vocabulary=self.entries,
                hidden=self.hidden.shape[1],
                width=self.dtype.itemsize,
                wide=self.wide.itemsize,
                has_cap=self.token_loss.soft_cap is not None,
                hidden_gradient=wanted.hidden,
                weight_gradient=wanted.weight,
            ),
            self.workspace,
        )

    def divide_late(self, gradients: torch.Tensor) -> None:
        """Divide sums that were not divided before they were added up."""
        if not self.divides_early and len(self.labels):
            gradients.div_(self.divisor)

    def put_states(self, kept: torch.Tensor, tokens: slice, gradients: torch.Tensor) -> None:
        """Write the gradients of states that count to where they are kept."""
        if not self.divides_early:
            gradients = gradients.to(self.wide)
            self.divide_late(gradients)
        if self.rows is None:
            kept[tokens] = gradients
        else:
            kept.index_copy_(0, self.rows[tokens], gradients.to(kept.dtype))

    def states(self, tokens: slice) -> torch.Tensor:
        """Return the hidden states of some of the tokens that count."""
        found = self.hidden[tokens if self.rows is None else self.rows[tokens]]
        return found.to(self.dtype)

    def logits(self, states: torch.Tensor, part: _HeadPart) -> torch.Tensor:
        """Return logits of their own memory."""
        outputs = functional.linear(states, part.weight, part.bias)
        return self.token_loss.logits(outputs.to(self.wide))

    def losses(self, statistics: _Statistics) -> torch.Tensor:
        """Return the sum of all tokens' losses, divided."""
        rule = self.token_loss
        losses = statistics.log_sum - (1.0 - rule.label_smoothing) * statistics.label
        if rule.label_smoothing:
            losses -= (rule.label_smoothing / self.entries) * statistics.total
        if rule.z_loss:
            losses += rule.z_loss * statistics.log_sum.square()
        if self.weights is not None:
            losses *= self.weights
        return losses.sum() / self.divisor

    def gradients(
        self,
        probabilities: torch.Tensor,
        slopes: torch.Tensor | None,
        tokens: slice,
        statistics: _Statistics,
        *,
        start: int,
    ) -> torch.Tensor:
        """Return the gradients of a tile's outputs; `probabilities` is overwritten.

        The tile has the entries of the vocabulary from `start` on.
        """
        rule, found = self.token_loss, probabilities
        if rule.z_loss:
            found.mul_((2.0 * rule.z_loss * statistics.log_sum[tokens] + 1.0).unsqueeze(1))
        place, is_here = _within(self.labels[tokens], start, found.shape[1])
        of_label = is_here.to(self.wide).mul_(rule.label_smoothing - 1.0)
        found.scatter_add_(1, place.unsqueeze(1), of_label.unsqueeze(1))
        if rule.label_smoothing:
            found.sub_(rule.label_smoothing / self.entries)
        if self.weights is not None:
            found.mul_(self.weights[tokens].unsqueeze(1))
        if slopes is not None:
            found.mul_(slopes)
        if rule.scale != 1.0:
            found.mul_(rule.scale)
        if self.divides_early:
            found.div_(self.divisor)
        return found.to(self.dtype)


def _computed(
    call: _LossCall, whole: _HeadPart, wanted: _Wanted
) -> tuple[torch.Tensor, _FoundGradients]:
    """Return the loss and its gradients, by tiles of one head."""
    logits, found = _TiledLogits.of(call, wanted), _FoundGradients.empty(call, whole, wanted)
    if not logits.tiles.computes_twice:
        part = whole.tile(slice(0, call.entries), call.dtype)
        logits.compute_once(part, _PartSums(call, part, found.weight, found.bias), found.hidden)
        return call.losses(logits.statistics), found
    for entries in logits.tiles.vocabulary:
        logits.observe(whole.tile(entries, call.dtype))
    loss = call.losses(logits.statistics)
    if wanted.any:
        states = _StateSums(call, found)
        for entries in logits.tiles.vocabulary:
            part = whole.tile(entries, call.dtype)
            sums = _PartSums(call, part, _rows(found.weight, entries), _rows(found.bias, entries))
            logits.differentiate(part, sums, states)
        states.finish()
    return loss, found


def _of_tiled_head(call: _LossCall, hidden: torch.Tensor, head: TiledLinear) -> torch.Tensor:
    """Return the loss with a head of which one tile at a time is called."""
    bias = head.bias
    wanted = _Wanted.of(hidden, head.is_trained, bias)
    logits = _TiledLogits.of(call, wanted)

    def observe(part: _HeadPart) -> None:
        for entries in _entries_of(part, logits.tiles):
            logits.observe(part.tile(entries, call.dtype))

    with torch.no_grad(), _no_autocast(hidden.device):
        for tile, entries in head.output_tiles():
            _called(tile, entries, bias, observe)
        loss = call.losses(logits.statistics)
        if not wanted.any:
            return loss
        nothing = _HeadPart(0, hidden.new_empty(0, 0), bias)
        found = _FoundGradients.empty(call, nothing, replace(wanted, weight=False))
        states = _StateSums(call, found)

    def differentiate(part: _HeadPart) -> torch.Tensor:
        with torch.no_grad(), _no_autocast(hidden.device):
            made = None
            if wanted.weight:
                made = torch.empty_like(part.weight, dtype=call.kept(part.weight.dtype))
            for entries in _entries_of(part, logits.tiles):
                piece = part.tile(entries, call.dtype)
                place = slice(piece.start, piece.start + len(piece.weight))
                sums = _PartSums(call, piece, _rows(made, entries), _rows(found.bias, place))
                logits.differentiate(piece, sums, states)
        # Zero: a tile's part of the graph gives its parameters their gradients, and no value.
        return _with_gradients(torch.zeros_like(loss), (part.weight, made))

    parts = [_called(tile, entries, bias, differentiate) for tile, entries in head.output_tiles()]
    with torch.no_grad():
        states.finish()
    whole = _with_gradients(loss, (hidden, found.hidden), (bias, found.bias))
    return torch.stack([whole, *parts]).sum()


def _entries_of(part: _HeadPart, tiles: LossTiles) -> Iterator[slice]:
    """Yield the tiles of the vocabulary within a part of the head."""
    yield from TileCut(len(part.weight), tiles.vocabulary.size)


def _rows(tensor: torch.Tensor | None, rows: slice) -> torch.Tensor | None:
    """Return rows of a tensor, if there is one, outside of autograd's graph."""
    return None if tensor is None else tensor.detach()[rows]


def _called(
    tile: WeightTile,
    entries: slice,
    bias: torch.Tensor | None,
    compute: Callable[[_HeadPart], Any],
) -> Any:
    """Compute with a tile's weight within a call of the tile, for which it is fetched."""
    return tile(lambda weight: compute(_HeadPart(entries.start, weight, _rows(bias, entries))))


@dataclass(frozen=True, slots=True)
class _TiledLogits:
    """The logits of one computation, of which one tile at a time is in memory."""

    call: _LossCall
    wanted: _Wanted
    tiles: LossTiles
    statistics: _Statistics

    @classmethod
    def of(cls, call: _LossCall, wanted: _Wanted) -> _TiledLogits:
        """Return logits of which none was computed yet."""
        return cls(call, wanted, call.tiles(wanted), _Statistics.empty(call))

    def compute_once(self, part: _HeadPart, sums: _PartSums, hidden: torch.Tensor | None) -> None:
        """Compute the logits of the whole vocabulary, and the gradients that are wanted."""
        for tokens in self.tiles.tokens:
            self._compute_tile(part, tokens, sums, hidden)
        sums.finish()

    def observe(self, part: _HeadPart) -> None:
        """Add the logits of a part of the vocabulary to the statistics of all tokens."""
        for tokens in self.tiles.tokens:
            # No variable has the logits: they would be there beside those of the next tile.
            self._observe_tile(self.call.logits(self.call.states(tokens), part), tokens, part.start)

    def differentiate(self, part: _HeadPart, sums: _PartSums, state_sums: _StateSums) -> None:
        """Compute the logits of a part once more, and add up their gradients."""
        for tokens in self.tiles.tokens:
            states = self.call.states(tokens)
            outputs = self._outputs_again(part, tokens, states)
            sums.add(outputs, states)
            state_sums.add(tokens, outputs, part)
            del states, outputs
        sums.finish()

    def _compute_tile(
        self, part: _HeadPart, tokens: slice, sums: _PartSums, hidden: torch.Tensor | None
    ) -> None:
        call = self.call
        states = call.states(tokens)
        logits = call.logits(states, part)
        slopes = call.token_loss.slopes(logits) if self.wanted.any else None
        exponentials, row_sums = self._observe_tile(logits, tokens, part.start)
        if self.wanted.any:
            probabilities = exponentials.div_(row_sums)
            del logits, exponentials
            outputs = call.gradients(
                probabilities, slopes, tokens, self.statistics, start=part.start
            )
            # Products take memory as well, and need `outputs` alone.
            del probabilities, slopes
            sums.add(outputs, states)
            if hidden is not None:
                call.put_states(hidden, tokens, outputs @ part.weight)

    def _observe_tile(
        self, logits: torch.Tensor, tokens: slice, start: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add a tile to the statistics; return its exponentials and the sum of each row.

        `logits` is overwritten: no second tile of this size is made.
        """
        statistics = self.statistics
        place, is_here = _within(self.call.labels[tokens], start, logits.shape[1])
        of_label = logits.gather(1, place.unsqueeze(1)).squeeze(1)
        # where(): a logit may be infinite, and times 0 it would be NaN.
        statistics.label[tokens] += torch.where(is_here, of_label, 0.0)
        if self.call.token_loss.label_smoothing:
            statistics.total[tokens] += logits.sum(1)
        # Of a row without any finite logit, the largest is -inf, and -inf - -inf would be NaN.
        largest = logits.amax(1, keepdim=True)
        largest = torch.where(largest == -torch.inf, 0.0, largest)
        exponentials = logits.sub_(largest).exp_()
        sums = exponentials.sum(1, keepdim=True)
        here = (sums.log() + largest).squeeze(1)
        statistics.log_sum[tokens] = torch.logaddexp(statistics.log_sum[tokens], here)
        return exponentials, sums

    def _outputs_again(self, part: _HeadPart, tokens: slice, states: torch.Tensor) -> torch.Tensor:
        """Return the gradients of the outputs of a tile whose log-sums are known."""
        logits = self.call.logits(states, part)
        slopes = self.call.token_loss.slopes(logits)
        probabilities = logits.sub_(self.statistics.log_sum[tokens].unsqueeze(1)).exp_()
        return self.call.gradients(probabilities, slopes, tokens, self.statistics, start=part.start)


def _within(labels: torch.Tensor, start: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the labels' places in a tile, and whether each is there; those elsewhere get a place
    too.
    """
    place = labels - start
    is_here = (place >= 0) & (place < length)
    return place.clamp(0, length - 1), is_here


class _PartSums:
    """The gradients of a part of the head, added up over tiles of tokens in the wide dtype.

    They end in `weight` and `bias`; None: not wanted.
    """

    def __init__(
        self,
        call: _LossCall,
        part: _HeadPart,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
    ) -> None:
        self._call = call
        self._weight = _WideSum.of(weight, call.wide)
        self._bias = _WideSum.of(bias, call.wide)
        self._step = product_rows(len(part.weight), part.weight.shape[1])

    def add(self, outputs: torch.Tensor, states: torch.Tensor) -> None:
        """Add what the gradients of a tile's outputs make of it."""
        if self._bias is not None:
            self._bias.values.add_(outputs.sum(0, dtype=self._call.wide))
        if self._weight is None:
            return
        total = self._weight.values
        if outputs.dtype is total.dtype:
            total.addmm_(outputs.t(), states)
            return
        # A product in a narrow dtype takes memory of its own before it can be added: few rows.
        for rows in TileCut(len(total), self._step):
            total[rows] += outputs[:, rows].t() @ states

    def finish(self) -> None:
        """Write the sums to where the gradients are kept."""
        for total in (self._weight, self._bias):
            if total is not None:
                self._call.divide_late(total.values)
                total.finish()


class _StateSums:
    """The gradients of the states that count, added up over parts of the vocabulary."""

    def __init__(self, call: _LossCall, found: _FoundGradients) -> None:
        self._call = call
        self._found = found.hidden
        self._sum: torch.Tensor | None = None
        if found.hidden is not None:
            shape = (len(call.labels), found.hidden.shape[1])
            self._sum = torch.zeros(shape, dtype=call.wide, device=found.hidden.device)

    def add(self, tokens: slice, outputs: torch.Tensor, part: _HeadPart) -> None:
        """Add what a part of the vocabulary makes of the gradients of a tile's states."""
        if self._sum is None:
            return
        if outputs.dtype is self._sum.dtype:
            self._sum[tokens].addmm_(outputs, part.weight)
        else:
            self._sum[tokens] += outputs @ part.weight

    def finish(self) -> None:
        """Write the sums to where the gradients are kept."""
        if self._sum is not None and self._found is not None:
            self._call.put_states(self._found, slice(0, len(self._sum)), self._sum)
            self._sum = None


@dataclass(frozen=True, slots=True)
class _WideSum:
    """Values that are added up in a wide dtype, and where they are kept."""

    values: torch.Tensor
    kept: torch.Tensor

    @classmethod
    def of(cls, kept: torch.Tensor | None, wide: torch.dtype) -> _WideSum | None:
        """Return zeros: those of `kept` itself where its dtype is wide."""
        if kept is None:
            return None
        if kept.dtype is wide:
            return cls(kept.zero_(), kept)
        return cls(torch.zeros_like(kept, dtype=wide), kept)

    def finish(self) -> None:
        """Write the values to where they are kept."""
        if self.values is not self.kept:
            self.kept.copy_(self.values)


# --- into autograd's graph ------------------------------------------------------------------------


class _KnownGradients(torch.autograd.Function):
    """A value with gradients that are known already: the backward multiplies them with its own."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, count: int, *both: torch.Tensor) -> torch.Tensor:
        """Return the value; `both` has `count` tensors, and then the gradient of each."""
        ctx.save_for_backward(*both[count:])
        return value.clone()

    @staticmethod
    def backward(ctx: Any, factor: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return each gradient times that of the value.

        Raises:
            RuntimeError: these gradients are to be differentiated as well.
        """
        if torch.is_grad_enabled():
            raise RuntimeError(
                "A chunked loss has no gradients of gradients: its own are computed in the "
                "forward, as numbers. Call backward() or autograd.grad() without "
                "create_graph=True, or use torch's cross_entropy() on whole logits"
            )
        # What is returned may become a leaf's gradient, which the next backward adds to.
        is_used_again = torch._C._autograd._get_current_graph_task_keep_graph()
        # Looking at a number waits for a device, so a factor of 1 is found on the CPU only.
        as_known = not is_used_again and factor.device.type == "cpu" and factor.item() == 1.0
        # Autograd casts each to its tensor's dtype.
        found = [known if as_known else known * factor for known in ctx.saved_tensors]
        return None, None, *found, *([None] * len(found))


def _with_gradients(
    value: torch.Tensor, *pairs: tuple[torch.Tensor | None, torch.Tensor | None]
) -> torch.Tensor:
    """Return the value in a graph that gives each tensor its gradient, where there is one."""
    known = [
        (tensor, gradient.view(tensor.shape))
        for tensor, gradient in pairs
        if tensor is not None and gradient is not None
    ]
    if not known:
        return value
    tensors, gradients = zip(*known, strict=True)
    found: torch.Tensor = _KnownGradients.apply(  # type: ignore[no-untyped-call]
        value, len(tensors), *tensors, *gradients
    )
    return found


def _no_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context without autocast: products are in the dtype that was chosen."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


# --- checks ---------------------------------------------------------------------------------------


def _sizes(
    head: torch.Tensor | torch.nn.Module, bias: torch.Tensor | None
) -> tuple[int, int, torch.Tensor | None]:
    """Return how many entries and features a head has, and its bias."""
    if isinstance(head, torch.nn.Module) and bias is not None:
        expected = "None beside a module, which has its own"
        raise ConfigError(field="bias", value=tuple(bias.shape), expected=expected)
    if isinstance(head, torch.Tensor):
        if head.ndim != 2 or (bias is not None and bias.shape != head.shape[:1]):
            expected = "a weight of (vocabulary, features) and a bias of (vocabulary), or no bias"
            shapes = tuple(head.shape), None if bias is None else tuple(bias.shape)
            raise ConfigError(field="head", value=shapes, expected=expected)
        return head.shape[0], head.shape[1], bias
    if is_linear(head) or (isinstance(head, TiledLinear) and head.is_cut_over_outputs_only):
        assert isinstance(head, torch.nn.Linear | TiledLinear), "it is one of the two"
        return head.out_features, head.in_features, head.bias
    expected = "a torch.nn.Linear, or a TiledLinear that is cut over its outputs only"
    raise ConfigError(field="head", value=type(head).__name__, expected=expected)


def _reduction(reduction: Reduction | str) -> Reduction:
    given = reduction.value if isinstance(reduction, Reduction) else reduction
    if given == "none":
        expected = (
            "mean or sum, as gradients are computed with the losses, before it is known how each "
            "loss is weighed: give token_weights with reduction='sum'"
        )
        raise ConfigError(field="reduction", value=given, expected=expected)
    if given not in {known.value for known in Reduction}:
        raise ConfigError.unknown_name(
            field="reduction", name=given, known=[known.value for known in Reduction]
        )
    return Reduction(given)


def _check_shapes(
    hidden: torch.Tensor, labels: torch.Tensor, features: int, weights: torch.Tensor | None
) -> None:
    if hidden.ndim < 1 or hidden.shape[-1] != features:
        expected = f"(..., {features}), as the head has {features} inputs"
        raise ConfigError(field="hidden", value=tuple(hidden.shape), expected=expected)
    expected = f"{tuple(hidden.shape[:-1])}, one for each hidden state"
    if labels.shape != hidden.shape[:-1]:
        raise ConfigError(field="labels", value=tuple(labels.shape), expected=expected)
    if labels.is_floating_point():
        expected = "integers: probabilities as targets are not supported"
        raise ConfigError(field="labels", value=str(labels.dtype), expected=expected)
    if weights is not None and weights.shape != labels.shape:
        raise ConfigError(field="token_weights", value=tuple(weights.shape), expected=expected)


def _check_constant(name: str, value: object) -> None:
    # Gradients are computed with the losses, of the hidden states and the head alone.
    if isinstance(value, torch.Tensor) and value.requires_grad and torch.is_grad_enabled():
        expected = "a tensor that requires no gradient, as it would get none: detach() it"
        raise ConfigError(field=name, value="a tensor that requires one", expected=expected)


def _check_labels(labels: torch.Tensor, entries: int) -> None:
    # Torch's own loss checks this on the CPU too; on a device, an index out of range is undefined.
    if labels.numel() and not (int(labels.min()) >= 0 and int(labels.max()) < entries):
        raise IndexError(
            f"The labels go from {int(labels.min())} to {int(labels.max())}, and the vocabulary "
            f"has entries from 0 to {entries - 1}. Set labels that are not to count to ignore_index"
        )
