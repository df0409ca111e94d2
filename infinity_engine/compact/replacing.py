"""Replaces the linear layers of a model by compact ones, and compact ones by linear layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any

import torch

from infinity_engine.compact.linear import CompactLinear
from infinity_engine.compact.weights import CompactKind

__all__ = ["compact_linears", "expand_linears"]


def compact_linears(
    model: torch.nn.Module,
    kind: CompactKind | str = CompactKind.NF4,
    *,
    skip: Collection[str] = ("lm_head",),
) -> tuple[str, ...]:
    """Keep the weights of a model's linear layers in 8 or 4 bits; return their paths.

    Only modules of exactly the class `torch.nn.Linear` are replaced, and none that `skip` names by
    path or last name, and none that shares its weight. One weight at a time is in memory in both
    forms. Call it before peft adds adapters, and before `initialize`.

    Raises:
        ConfigError: the kind is unknown, or a weight has a shape that it cannot have.
    """
    chosen = CompactKind.of(kind)
    holders = Counter(
        id(parameter)
        for module in model.modules()
        for parameter in module.parameters(recurse=False)
    )
    names = [
        path
        for path, module in model.named_modules()
        if path
        and type(module) is torch.nn.Linear
        and holders[id(module.weight)] == 1
        and not {path, path.rpartition(".")[2]} & set(skip)
    ]
    for path in names:
        parent, _, name = path.rpartition(".")
        layer = model.get_submodule(path)
        assert isinstance(layer, torch.nn.Linear), "it was looked at above"
        model.get_submodule(parent).add_module(name, CompactLinear.of(layer, chosen))
    return tuple(names)


def expand_linears(model: torch.nn.Module, dtype: torch.dtype) -> tuple[str, ...]:
    """Give each compact layer its weight in floating point back; return their paths.

    The layers are `torch.nn.Linear` then, so that peft merges adapters into them. Within an
    `init_context`, the expanded weights go to the drives, and one at a time is in memory. Call it
    when no engine has the model.
    """
    names = [path for path, module in model.named_modules() if isinstance(module, CompactLinear)]
    for path in names:
        layer = model.get_submodule(path)
        assert isinstance(layer, CompactLinear), "it was looked at above"
        parent, _, name = path.rpartition(".")
        model.get_submodule(parent).add_module(name, layer.as_linear(dtype))
    # load_pretrained says in it what the weights were, for whatever saves the model.
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "quantization_config", None) is not None:
            config.update({"quantization_config": None})
    return tuple(names)
