"""`chunk_loss`: lets a language model of Transformers compute its loss without whole logits.

Hooks of the model and of its head do it, and the model's code is not touched: its head gets the
hidden states of one position, all else runs as it does without them. Under an engine as well, on
every tier: the loss is computed within the head's call, or by reading its parameters as any module
may.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional

from deepnvme.closing import Closing
from infinity_engine.errors import ConfigError
from infinity_engine.losses.cross_entropy import (
    DEFAULT_WORKSPACE,
    TokenLoss,
    chunked_cross_entropy,
    is_linear,
)
from infinity_engine.parameters.hooks import Hooks
from infinity_engine.tiling.linear import TiledLinear
from infinity_engine.units import parse_bytes

__all__ = ["ChunkedLoss", "chunk_loss"]

_CAUSAL = "ForCausalLMLoss"
_PREPARE = "prepare_decoder_input_ids_from_labels"
_IGNORED = -100
"""The label that models of Transformers do not count."""


def chunk_loss(
    model: torch.nn.Module,
    *,
    token_loss: TokenLoss | None = None,
    workspace: int | str = DEFAULT_WORKSPACE,
) -> ChunkedLoss:
    """Let `model(input_ids=..., labels=...)` compute its loss tile by tile, until `close()`.

    `model` is a language model of Transformers: a decoder, or an encoder and a decoder such as T5
    and BART; or one of these with adapters of peft. Calls without labels, such as those of
    `generate()`, are as before. In the output of calls with labels, `logits` has the last position
    alone. `num_items_in_batch` and `shift_labels` mean what they mean to the model. What the model
    adds to its loss, such as that of routers, stays.

    `token_loss` adds label smoothing or a z-loss; a soft cap and a scale are taken from the model's
    configuration. The first call compares the model's own logits of one position with those of the
    tiles, and raises where the model does anything else to its logits.

    Raises:
        ConfigError: the model has another loss or another head; or a workspace in which not one
            logit fits.
    """
    return ChunkedLoss(model, token_loss or TokenLoss(), parse_bytes(workspace, field="workspace"))


@dataclass(slots=True)
class _Pending:
    """The call that is under way."""

    targets: torch.Tensor
    """The label of each position."""
    items: Any
    """What the sum of losses is divided by; None: by the number of tokens that count."""
    ignored: int
    hidden: torch.Tensor | None = None
    """The head's inputs, while the head is called."""
    found: torch.Tensor | None = None
    """The loss, once the head was called."""
    outputs: torch.Tensor | None = None
    """The head's outputs for the last position."""

    def begin(self, hidden: torch.Tensor) -> None:
        """Note the head's inputs."""
        self.hidden = hidden

    def finish(self, found: torch.Tensor, outputs: torch.Tensor) -> None:
        """Note the loss and the outputs, and forget the inputs."""
        self.hidden, self.found, self.outputs = None, found, outputs


class ChunkedLoss(Closing):
    """The hooks of one model, by which its loss is computed in tiles."""

    def __init__(self, model: torch.nn.Module, token_loss: TokenLoss, workspace: int) -> None:
        head = _head_of(model)
        config = getattr(model, "config", None)
        self._is_decoder = not getattr(config, "is_encoder_decoder", False)
        self._token_loss = replace(token_loss, **_transform_of(model, config))
        _check_loss(model, self._is_decoder)
        self._workspace = workspace
        self._pending: _Pending | None = None
        self._is_checked = False
        self._names = _positional_names(model)
        self._hooks = Hooks()
        self._hooks.around_call(model, self._before_model, self._after_model)
        self._hooks.around_call(head, self._before_head, self._after_head)

    def close(self) -> None:
        """Let the model compute its loss as before."""
        self._hooks.remove()
        self._pending = None

    # --- the model's call -------------------------------------------------------------------------

    def _before_model(self, model: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        self._pending = None  # an earlier call may have been interrupted
        given = {**kwargs, **dict(zip(self._names, args, strict=False))}
        rest = args[len(self._names) :]
        labels = given.pop("labels", None)
        if labels is None:
            return None
        if labels.dtype is torch.uint8:
            labels = labels.long()  # a byte has no -100
        targets = given.pop("shift_labels", None) if self._is_decoder else labels
        ignored = given.get("ignore_index", _IGNORED)
        if targets is None:
            # A position's target is the next one's label; the last position has none.
            targets = functional.pad(labels, (0, 1), value=ignored)[..., 1:]
        self._pending = _Pending(targets, given.pop("num_items_in_batch", None), ignored)
        if self._is_decoder:
            # The model's own loss is that of one position that does not count, so it is 0, and
            # the model adds to it what it adds.
            given["labels"] = labels.new_full((*labels.shape[:-1], 1), ignored)
            given["num_items_in_batch"] = 1
            return rest, given
        inputs = ("decoder_input_ids", "decoder_inputs_embeds")
        if all(given.get(name) is None for name in inputs):
            prepare: Any = getattr(model, _PREPARE)
            given["decoder_input_ids"] = prepare(labels=labels)
        # With labels, such models keep no cache.
        given.setdefault("use_cache", False)
        return rest, given

    def _after_model(self, _model: torch.nn.Module, _args: Any, output: Any) -> Any:
        pending, self._pending = self._pending, None
        if pending is None or output is None:  # the call has raised
            return None
        if pending.found is None:
            raise RuntimeError(
                "The model returned without calling its output layer, so there is no loss. Call "
                "close() of what chunk_loss() returned, and the model computes its loss itself"
            )
        is_tuple = isinstance(output, tuple)
        logits = output[int(self._is_decoder)] if is_tuple else output["logits"]
        loss = pending.found
        if self._is_decoder:
            own = output[0] if is_tuple else output["loss"]
            self._check_own_loss(own)
            loss = own + loss
        self._check_logits(pending, logits)
        self._is_checked = True
        if is_tuple:
            return (loss, *(output[1:] if self._is_decoder else output))
        assert isinstance(output, Mapping), "models of Transformers return one of the two"
        return type(output)(**{**output, "loss": loss})

    # --- the head's call --------------------------------------------------------------------------

    def _before_head(self, head: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        pending = self._pending
        if pending is None:
            return None
        if pending.found is not None:
            raise RuntimeError(
                "The model called its output layer twice in one forward, and chunk_loss() knows "
                "the loss of one call. Call its close(), and the model computes its loss itself"
            )
        hidden = args[0]
        if hidden.shape[:-1] != pending.targets.shape:
            raise ValueError(
                f"The labels have the shape {tuple(pending.targets.shape)}, and the output layer "
                f"was called for {tuple(hidden.shape[:-1])} positions. Give a label for each "
                "position, and no logits_to_keep with labels"
            )
        pending.begin(hidden)
        return (hidden[..., -1:, :].detach(), *args[1:]), kwargs

    def _after_head(self, head: torch.nn.Module, _args: Any, output: Any) -> Any:
        pending = self._pending
        if pending is None or pending.hidden is None or output is None:
            return None
        # Here an engine still holds what it fetched for the head's call.
        loss = chunked_cross_entropy(
            pending.hidden,
            head,
            pending.targets,
            token_loss=replace(self._token_loss, ignore_index=pending.ignored),
            divide_by=pending.items,
            workspace=self._workspace,
        )
        # Detached: the gradients are known, and zeros of the weight's size would be added to them.
        outputs = output.detach()
        pending.finish(loss, outputs)
        return outputs

    # --- what the first call checks ---------------------------------------------------------------

    def _check_logits(self, pending: _Pending, logits: torch.Tensor) -> None:
        """Compare the model's logits of one position with ours.

        Raises:
            ConfigError: the model does something to its logits that is not known here.
        """
        outputs = pending.outputs
        if self._is_checked or outputs is None:
            return
        expected = self._token_loss.logits(outputs.float().clone())
        nearby = 8 * torch.finfo(outputs.dtype).eps * float(expected.abs().max() + 1.0)
        if logits.shape != expected.shape or not torch.allclose(
            logits.float(), expected, rtol=0.0, atol=nearby
        ):
            raise ConfigError(
                field="model",
                value="one whose logits are not the outputs of its output layer",
                expected="one that scales or soft-caps them as its configuration says, and nothing "
                "else. Compute its loss in a forward of your own, with chunked_cross_entropy()",
            )

    def _check_own_loss(self, own: torch.Tensor) -> None:
        """Refuse a model that computes no finite loss of its own where no label counts."""
        if not self._is_checked and not bool(torch.isfinite(own).all()):
            raise ConfigError(
                field="model",
                value=f"one whose own loss is {float(own)} where no label counts",
                expected="one that passes num_items_in_batch on to its loss function, which then "
                "divides by it, and not by the 0 labels that count",
            )


# --- what is known of models ----------------------------------------------------------------------


def _head_of(model: torch.nn.Module) -> torch.nn.Module:
    """Return the layer that makes the logits.

    Raises:
        ConfigError: there is none, or it is of another kind.
    """
    find: Any = getattr(model, "get_output_embeddings", lambda: None)
    head = find()
    if head is None:
        expected = (
            "a language model of Transformers; for your own models, call chunked_cross_entropy() "
            "in the forward"
        )
        raise ConfigError(field="model", value=type(model).__name__, expected=expected)
    if is_linear(head) or (isinstance(head, TiledLinear) and head.is_cut_over_outputs_only):
        assert isinstance(head, torch.nn.Module), "a layer is a module"
        return head
    expected = (
        "a torch.nn.Linear, or a TiledLinear that is cut over its outputs only. Adapters must "
        "leave the output layer alone"
    )
    raise ConfigError(
        field="the model's output layer", value=type(head).__name__, expected=expected
    )


def _check_loss(model: torch.nn.Module, is_decoder: bool) -> None:
    """Refuse a model whose loss is not known here."""
    if not is_decoder:
        if not hasattr(model, _PREPARE):
            expected = "one that can prepare its decoder's inputs from labels"
            raise ConfigError(field="model", value=type(model).__name__, expected=expected)
        return
    function: Any = getattr(model, "loss_function", None)
    name = getattr(function, "__name__", type(function).__name__)
    if name != _CAUSAL:
        expected = f"one whose loss function is {_CAUSAL}, which shifts labels and is not weighted"
        raise ConfigError(
            field="model", value=f"{type(model).__name__} with {name}", expected=expected
        )


def _transform_of(model: torch.nn.Module, config: Any) -> dict[str, Any]:
    """Return scale and soft cap as a model's configuration has them."""
    inner = getattr(config, "get_text_config", None)  # of models of several kinds of input
    config = config if inner is None else inner()
    cap = getattr(config, "final_logit_softcapping", None)
    divisor = getattr(config, "logits_scaling", None)  # Granite
    factor = getattr(model, "logit_scale", None)  # Cohere; of CLIP, it is a parameter
    scale = 1.0
    if isinstance(factor, int | float):
        scale = float(factor)
    elif divisor:
        scale = 1.0 / float(divisor)
    return {"scale": scale, "soft_cap": None if cap is None else float(cap)}


def _positional_names(model: torch.nn.Module) -> tuple[str, ...]:
    """Return the names of the arguments that the model's forward takes by position."""
    parameters = inspect.signature(model.forward).parameters.values()
    return tuple(
        parameter.name
        for parameter in parameters
        if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    )
