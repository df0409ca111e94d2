"""`CompactLinear`: a linear layer with a frozen weight in 8 or 4 bits.

Its integers and scales are parameters that need no gradient, so an engine keeps and moves them as
others. Its state dict has bitsandbytes' names and layout for 4 bits.
"""

from __future__ import annotations

import json
from collections.abc import Callable, MutableMapping
from typing import Any, ClassVar

import torch
from torch.nn import functional

from infinity_engine.compact.weights import (
    NF4_BLOCK,
    CompactKind,
    compacted,
    expanded,
    nf4_values,
)
from infinity_engine.errors import ConfigError
from infinity_engine.memory.freed import return_freed_memory

__all__ = ["CompactLinear"]

_STATE = "quant_state.bitsandbytes__nf4"
_LARGE = 4 << 20  # bytes of an expanded weight
_NESTED = ("nested_absmax", "nested_quant_map")


class CompactLinear(torch.nn.Linear):
    """A frozen `torch.nn.Linear` that is kept in 8 or 4 bits, and expanded when it computes.

    What it computes is what a linear layer with the expanded weight computes. The expanded weight
    is not kept for the backward, which expands again. peft adds adapters to it as to any
    `torch.nn.Linear`; they cannot be merged into it.
    """

    infinity_in_fp32: ClassVar = ("scale", "values")
    """Parameters that no precision casts."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        kind: CompactKind = CompactKind.NF4,
        bias: torch.nn.Parameter | None = None,
    ) -> None:
        # Not Linear's own: it would make a weight in floating point.
        torch.nn.Module.__init__(self)
        self.in_features, self.out_features, self.kind = in_features, out_features, kind
        numel = in_features * out_features
        if not kind.fits(numel):
            raise ConfigError(
                field="kind",
                value=f"{kind.value} for a weight of {numel} elements",
                expected=f"a multiple of {NF4_BLOCK} elements for nf4, one or more for int8",
            )
        if kind is CompactKind.INT8:
            weight = torch.zeros(out_features, in_features, dtype=torch.int8)
            scale = torch.zeros(out_features, 1)
        else:
            weight = torch.zeros(numel // 2, 1, dtype=torch.uint8)
            scale = torch.zeros(numel // NF4_BLOCK)
        self.weight = _frozen(weight)
        self.scale = _frozen(scale)
        self.values = _frozen(nf4_values())
        self.register_parameter("bias", bias)

    @classmethod
    def of(cls, layer: torch.nn.Linear, kind: CompactKind) -> CompactLinear:
        """Return the compact layer of one in floating point; the bias stays what it is."""
        made = cls(layer.in_features, layer.out_features, kind=kind, bias=layer.bias)
        with torch.no_grad():
            weight, scale = compacted(layer.weight, kind)
            made.weight.copy_(weight)
            made.scale.copy_(scale)
        return made.to(layer.weight.device).train(layer.training)

    def _apply(
        self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
    ) -> CompactLinear:
        """Move the layer; its scales and values stay in fp32, whatever the model is cast to."""
        kept = {name: getattr(self, name).data for name in self.infinity_in_fp32}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch has no annotations
        for name, before in kept.items():
            parameter = getattr(self, name)  # torch may have made another one
            if parameter.dtype is not before.dtype:
                parameter.data = before.to(parameter.device)
        return self

    def expanded(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight in floating point."""
        found = expanded(self.weight, self.scale, self.values, dtype)
        return found.view(self.out_features, self.in_features)

    def as_linear(self, dtype: torch.dtype) -> torch.nn.Linear:
        """Return a linear layer with the expanded weight; the bias stays what it is."""
        # On the meta device, as it would draw a weight of its own.
        made = torch.nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        with torch.no_grad():
            made.register_parameter("weight", _frozen(self.expanded(dtype)))
        made.register_parameter("bias", self.bias)
        return made.train(self.training)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Compute with the expanded weight, in the dtype of the input or of autocast."""
        kind = input.device.type
        if torch.is_autocast_enabled(kind):
            input = input.to(torch.get_autocast_dtype(kind))
        compact = (self.weight, self.scale, self.values)
        # torch has no annotations for it
        product: torch.Tensor = _Product.apply(input, self.bias, *compact)  # type: ignore[no-untyped-call]
        return product

    def extra_repr(self) -> str:
        """Return the arguments that made it, for `repr`."""
        return f"{super().extra_repr()}, kind={self.kind.value}"

    # --- bitsandbytes' layout ---------------------------------------------------------------------

    def _save_to_state_dict(
        self, destination: MutableMapping[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        """Save 4 bits as bitsandbytes does: what belongs to a weight is named after it."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        scale, values = destination.pop(f"{prefix}scale"), destination.pop(f"{prefix}values")
        destination[f"{prefix}weight.{self._scale_name}"] = scale
        if self.kind is CompactKind.NF4:
            destination[f"{prefix}weight.quant_map"] = values
            destination[f"{prefix}weight.{_STATE}"] = self._described()

    def _load_from_state_dict(
        self, state_dict: MutableMapping[str, Any], prefix: str, *others: Any
    ) -> None:
        """Load what `_save_to_state_dict` or bitsandbytes has saved; others' keys are left."""
        self.name_entries(state_dict, prefix)
        # The values of 8 bits are never used, and in no file.
        if self.kind is CompactKind.INT8:
            state_dict.setdefault(f"{prefix}values", self.values)
        super()._load_from_state_dict(state_dict, prefix, *others)

    def name_entries(self, state_dict: MutableMapping[str, Any], prefix: str) -> None:
        """Give a layer's entries of a state dict the names of its parameters.

        Raises:
            ConfigError: they are of another layout, or of a weight of another shape.
        """
        given = f"{prefix}weight."
        described = state_dict.pop(f"{given}{_STATE}", None)
        if described is not None:
            self._check(json.loads(bytes(described.tolist())), prefix)
        if f"{given}nested_absmax" in state_dict:
            state_dict[f"{given}absmax"] = _unnested(state_dict, given, described)
        for name, key in ((self._scale_name, "scale"), ("quant_map", "values")):
            if f"{given}{name}" in state_dict:
                state_dict[f"{prefix}{key}"] = state_dict.pop(f"{given}{name}")

    @property
    def _scale_name(self) -> str:
        return "absmax" if self.kind is CompactKind.NF4 else "scale"

    def _described(self) -> torch.Tensor:
        described = {
            "quant_type": "nf4",
            "blocksize": NF4_BLOCK,
            "dtype": "float32",
            "shape": [self.out_features, self.in_features],
        }
        return torch.tensor(list(json.dumps(described).encode()), dtype=torch.uint8)

    def _check(self, described: dict[str, Any], prefix: str) -> None:
        expected = {"blocksize": NF4_BLOCK, "shape": [self.out_features, self.in_features]}
        found = {name: described.get(name) for name in expected}
        if self.kind is not CompactKind.NF4 or found != expected:
            raise ConfigError(
                field=f"{prefix}weight",
                value=f"a weight in {described}",
                expected=f"{self.kind.value} with {expected}",
            )


def _frozen(values: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(values, requires_grad=False)


def _give_back(nbytes: int, device: torch.device) -> None:
    """Let the C library give back what a large expanded weight took: small tensors split it."""
    if device.type == "cpu" and nbytes >= _LARGE:
        return_freed_memory()


def _unnested(
    state_dict: MutableMapping[str, Any], prefix: str, described: torch.Tensor
) -> torch.Tensor:
    """Return the scales of a weight whose scales are in 8 bits as well."""
    known = json.loads(bytes(described.tolist()))
    nested, values = (state_dict.pop(f"{prefix}{name}") for name in _NESTED)
    found = values.index_select(0, state_dict[f"{prefix}absmax"].int())
    # A block's last elements may be fewer.
    factors = nested.repeat_interleave(known["nested_blocksize"])[: len(found)]
    scale: torch.Tensor = found * factors + known["nested_offset"]
    return scale


class _Product(torch.autograd.Function):
    """The input times a compact weight; the backward expands the weight once more."""

    @staticmethod
    def forward(
        ctx: Any, given: torch.Tensor, bias: torch.Tensor | None, *compact: torch.Tensor
    ) -> torch.Tensor:
        """Compute as a linear layer does, and save the integers."""
        ctx.save_for_backward(*compact)
        weight, scale, values = compact
        weight = expanded(weight, scale, values, given.dtype).view(-1, given.shape[-1])
        product = functional.linear(given, weight, None if bias is None else bias.to(given.dtype))
        nbytes = weight.nbytes
        del weight
        _give_back(nbytes, given.device)
        return product

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of the input and the bias; the weight is frozen."""
        (gradient,) = gradients
        of_input = of_bias = None
        if ctx.needs_input_grad[0]:
            weight, scale, values = ctx.saved_tensors
            weight = expanded(weight, scale, values, gradient.dtype)
            of_input = gradient.matmul(weight.view(gradient.shape[-1], -1))
            nbytes = weight.nbytes
            del weight
            _give_back(nbytes, gradient.device)
        if ctx.needs_input_grad[1]:
            of_bias = gradient.reshape(-1, gradient.shape[-1]).sum(dim=0)
        return of_input, of_bias, None, None, None
